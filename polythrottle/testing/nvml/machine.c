/* The file behind the stand-in: shared by processes, locked for each call, and outliving them as a driver's state does. */
#define _GNU_SOURCE
#include "fake.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static char attached[4096]; /* the folder whose state is mapped */
static Machine *mapped;
static int state_fd = -1;

static void after_fork(void) { pthread_mutex_init(&mutex, NULL); }

__attribute__((constructor)) static void at_load(void) { pthread_atfork(NULL, NULL, after_fork); }

static void detach(void) {
    if (mapped) munmap(mapped, sizeof(Machine));
    if (state_fd >= 0) close(state_fd);
    mapped = NULL;
    state_fd = -1;
    attached[0] = 0;
}

static int attach(const char *folder) {
    char path[4200];
    struct stat found;
    if (mapped && !strcmp(folder, attached)) return 0;
    detach();
    snprintf(path, sizeof path, "%s/state", folder);
    state_fd = open(path, O_RDWR | O_CLOEXEC);
    if (state_fd < 0 || fstat(state_fd, &found) || (size_t)found.st_size != sizeof(Machine)) return detach(), -1;
    void *memory = mmap(NULL, sizeof(Machine), PROT_READ | PROT_WRITE, MAP_SHARED, state_fd, 0);
    if (memory == MAP_FAILED) return detach(), -1;
    mapped = memory;
    snprintf(attached, sizeof attached, "%s", folder);
    return 0;
}

/* A process's lock: fork does not share it, and the kernel drops it when the process is killed. */
static void file_lock(short kind) {
    struct flock whole = {.l_type = kind, .l_whence = SEEK_SET};
    while (fcntl(state_fd, F_SETLKW, &whole) < 0 && errno == EINTR)
        ;
}

Machine *machine_lock(const char *folder) {
    const char *named = folder ? folder : getenv("POLYTHROTTLE_FAKE_NVML");
    pthread_mutex_lock(&mutex);
    if (!named || attach(named)) return NULL;
    file_lock(F_WRLCK);
    return mapped;
}

void machine_unlock(void) {
    if (mapped) file_lock(F_UNLCK);
    pthread_mutex_unlock(&mutex);
}

void machine_forget(void) {
    pthread_mutex_lock(&mutex);
    detach();
    pthread_mutex_unlock(&mutex);
}

const char *machine_folder(void) { return attached; }

int machine_create(const char *folder) {
    char path[4200], fresh[4300];
    snprintf(path, sizeof path, "%s/state", folder);
    snprintf(fresh, sizeof fresh, "%s.%d", path, getpid());
    machine_forget(); /* a state of this name may be mapped from before */
    int fd = open(fresh, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    if (fd < 0) return -1;
    int failed = ftruncate(fd, sizeof(Machine)) || rename(fresh, path);
    return close(fd), failed ? -1 : 0;
}

int64_t now_us(const Machine *machine) {
    struct timespec now;
    if (machine->frozen_us) return machine->frozen_us + machine->shift_us;
    clock_gettime(CLOCK_BOOTTIME, &now);
    return (int64_t)now.tv_sec * 1000000 + now.tv_nsec / 1000 + machine->shift_us;
}

void reload_driver(Machine *machine) {
    for (int64_t slot = 0; slot < machine->gpu_count; slot++) {
        Gpu *gpu = &machine->gpus[slot];
        board_reset(gpu);
        gpu->point_count = 0; /* the counter runs since driver load */
        board_update(machine, gpu);
    }
}

/* Without persistence mode a driver may let go of a GPU, and of its settings, with the last client. */
static void driver_idles(Machine *machine) {
    if (!machine->forget_without_persistence) return;
    for (int64_t slot = 0; slot < machine->gpu_count; slot++) {
        Gpu *gpu = &machine->gpus[slot];
        if (gpu->persistence) continue;
        board_reset(gpu);
        board_update(machine, gpu);
    }
}

void clients_settle(Machine *machine) {
    int alive = 0;
    for (int slot = 0; slot < CLIENTS; slot++) {
        int64_t pid = machine->clients[slot];
        if (pid && kill((pid_t)pid, 0) < 0) machine->clients[slot] = 0;
        alive += machine->clients[slot] != 0;
    }
    if (!alive) driver_idles(machine);
}

void client_enter(Machine *machine) {
    clients_settle(machine);
    for (int slot = 0; slot < CLIENTS; slot++)
        if (!machine->clients[slot]) {
            machine->clients[slot] = getpid();
            return;
        }
}

void client_leave(Machine *machine) {
    for (int slot = 0; slot < CLIENTS; slot++)
        if (machine->clients[slot] == getpid()) machine->clients[slot] = 0;
    clients_settle(machine);
}

static int fault_matches(const Fault *fault, const char *function, int64_t gpu, int is_setter) {
    if (fault->gpu >= 0 && gpu != fault->gpu) return 0;
    return !strcmp(fault->function, function) || (is_setter && !strcmp(fault->function, "*"));
}

/* Return the fault that hits this call, or NULL; a fault lets `skip` calls pass and hits `times` (0: for ever). */
Fault *fault_hit(Machine *machine, const char *function, int64_t gpu, int is_setter) {
    static __thread Fault hit; /* a copy: the slot may be freed by this very hit */
    Fault *first = NULL;
    for (int slot = 0; slot < FAULTS; slot++) {
        Fault *fault = &machine->faults[slot];
        if (!fault->function[0] || !fault_matches(fault, function, gpu, is_setter)) continue;
        if (fault->skip-- > 0 || first) continue;
        fault->skip = 0;
        hit = *fault;
        first = &hit;
        if (fault->times && --fault->times == 0) fault->function[0] = 0;
    }
    return first;
}

/* One line, one write: lines of several processes never mix, and a kill leaves whole lines. */
void log_line(const char *call, const char *uuid, const char *arguments, int code, const char *note) {
    char path[4200], line[1024];
    snprintf(path, sizeof path, "%s/log.jsonl", attached);
    int length = snprintf(line, sizeof line,
                          "{\"pid\": %d, \"call\": \"%s\", \"uuid\": \"%s\", \"arguments\": [%s], \"code\": %d, "
                          "\"note\": \"%s\"}\n",
                          getpid(), call, uuid, arguments, code, note);
    int fd = open(path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0666);
    if (fd < 0) return;
    if (write(fd, line, (size_t)length) != length) abort();
    close(fd);
}

void die(void) {
    kill(getpid(), SIGKILL);
    for (;;) pause();
}
