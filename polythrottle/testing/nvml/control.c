/* What the tests' side of the stand-in calls: numbers and texts by name, tables, faults, reload. */
#include "call.h"

#include <stdio.h>
#include <string.h>

typedef struct {
    const char *name;
    size_t offset;
} Named;

#define X(field) {#field, offsetof(Machine, field)},
static const Named MACHINE_NUMBER[] = {MACHINE_NUMBERS(X) {NULL, 0}};
static const Named MACHINE_TEXT[] = {MACHINE_TEXTS(X) {NULL, 0}};
#undef X
#define X(field) {#field, offsetof(Gpu, field)},
static const Named GPU_NUMBER[] = {GPU_NUMBERS(X) {NULL, 0}};
static const Named GPU_TEXT[] = {GPU_TEXTS(X) {NULL, 0}};
#undef X

static void *member(void *whole, const Named *names, const char *name) {
    for (; names->name; names++)
        if (!strcmp(names->name, name)) return (char *)whole + names->offset;
    return NULL;
}

static int64_t *number(Machine *machine, int slot, const char *name) {
    return slot < 0 ? member(machine, MACHINE_NUMBER, name) : member(&machine->gpus[slot], GPU_NUMBER, name);
}

static void update(Machine *machine, int slot) {
    if (slot >= 0 && machine->gpus[slot].memory_count) board_update(machine, &machine->gpus[slot]);
}

/* All return 0, or -1 where there is no such state, slot or name; slot -1 is the machine. */
NVML int fake_create(const char *folder) { return machine_create(folder); }

NVML void fake_forget(void) {
    machine_forget();
    session_forget();
}

static Machine *opened(const char *folder, int slot) {
    Machine *machine = machine_lock(folder);
    return slot < GPUS ? machine : NULL;
}

NVML int fake_set(const char *folder, int slot, const char *name, int64_t value) {
    Machine *machine = opened(folder, slot);
    int64_t *found = machine ? number(machine, slot, name) : NULL;
    if (found) {
        update(machine, slot);
        *found = value;
        update(machine, slot);
    }
    return machine_unlock(), found ? 0 : -1;
}

NVML int fake_get(const char *folder, int slot, const char *name, int64_t *value) {
    Machine *machine = opened(folder, slot);
    int64_t *found = machine ? number(machine, slot, name) : NULL;
    if (found) {
        clients_settle(machine);
        update(machine, slot);
        *value = *found;
    }
    return machine_unlock(), found ? 0 : -1;
}

NVML int fake_set_text(const char *folder, int slot, const char *name, const char *value) {
    Machine *machine = opened(folder, slot);
    char *found = NULL;
    if (machine) found = slot < 0 ? member(machine, MACHINE_TEXT, name) : member(&machine->gpus[slot], GPU_TEXT, name);
    if (found) snprintf(found, TEXT, "%s", value);
    return machine_unlock(), found ? 0 : -1;
}

/* Add a memory clock, from the highest down, and the GPU clocks that go with it, descending. */
NVML int fake_add_clocks(const char *folder, int slot, int64_t memory_mhz, const int64_t *clocks_mhz, int count) {
    Machine *machine = opened(folder, slot);
    Gpu *gpu = machine ? &machine->gpus[slot] : NULL;
    int fits = gpu && gpu->memory_count < MEMORIES && count > 0 && count <= CLOCKS;
    if (fits) {
        gpu->memory_mhz[gpu->memory_count] = memory_mhz;
        gpu->clock_count[gpu->memory_count] = count;
        memcpy(gpu->clock_mhz[gpu->memory_count++], clocks_mhz, (size_t)count * sizeof *clocks_mhz);
    }
    return machine_unlock(), fits ? 0 : -1;
}

NVML int fake_set_order(const char *folder, const int64_t *order) {
    Machine *machine = machine_lock(folder);
    if (machine) memcpy(machine->order, order, sizeof machine->order);
    return machine_unlock(), machine ? 0 : -1;
}

NVML int fake_add_process(const char *folder, int slot, int64_t pid, int64_t bytes) {
    Machine *machine = opened(folder, slot);
    Gpu *gpu = machine ? &machine->gpus[slot] : NULL;
    int fits = gpu && gpu->process_count < PROCESSES;
    if (fits) {
        gpu->process_pid[gpu->process_count] = pid;
        gpu->process_bytes[gpu->process_count++] = bytes;
    }
    return machine_unlock(), fits ? 0 : -1;
}

NVML int fake_add_fault(const char *folder, const char *function, int64_t slot, int64_t skip, int64_t times,
                        int64_t kind, int64_t code, int64_t value) {
    Machine *machine = machine_lock(folder);
    Fault *free_one = NULL;
    for (int number = FAULTS - 1; machine && number >= 0; number--)
        if (!machine->faults[number].function[0]) free_one = &machine->faults[number];
    if (free_one) {
        *free_one = (Fault){.gpu = slot, .skip = skip, .times = times, .kind = kind, .code = code, .value = value};
        snprintf(free_one->function, sizeof free_one->function, "%s", function);
    }
    return machine_unlock(), free_one ? 0 : -1;
}

NVML int fake_clear_faults(const char *folder) {
    Machine *machine = machine_lock(folder);
    if (machine) memset(machine->faults, 0, sizeof machine->faults);
    return machine_unlock(), machine ? 0 : -1;
}

NVML int fake_reload(const char *folder, int invalidate) {
    Machine *machine = machine_lock(folder);
    if (machine) {
        machine->generation += invalidate != 0;
        reload_driver(machine);
    }
    return machine_unlock(), machine ? 0 : -1;
}

/* What the board does now, for a look beside the driver: 0 GPU clock, 1 memory clock, 2 power, 3 enforced limit. */
NVML int64_t fake_now(const char *folder, int slot, int what) {
    Machine *machine = opened(folder, slot);
    int64_t answer = -1;
    if (machine) {
        const Gpu *gpu = &machine->gpus[slot];
        update(machine, slot);
        int64_t now[] = {gpu_clock_mhz(gpu), memory_clock_mhz(gpu), power_now_mw(gpu), enforced_limit_mw(gpu)};
        answer = now[what & 3];
    }
    return machine_unlock(), answer;
}

NVML int64_t fake_time_us(const char *folder) {
    Machine *machine = machine_lock(folder);
    int64_t now = machine ? now_us(machine) : -1;
    return machine_unlock(), now;
}

/* Another program writes: noted in the log as its, past permission and faults. */
NVML int fake_log(const char *folder, int slot, const char *call_name, const char *arguments) {
    Machine *machine = opened(folder, slot);
    if (machine) log_line(call_name, machine->gpus[slot].uuid, arguments, 0, "foreign");
    return machine_unlock(), machine ? 0 : -1;
}
