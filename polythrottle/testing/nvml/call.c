/* The start and end of every call, and the session: init, shutdown, handles. */
#include "call.h"

#include <stdio.h>
#include <string.h>

static int sessions;            /* nvmlInit less nvmlShutdown, of this process */
static int64_t session_started; /* the driver's generation at the last init */

void session_forget(void) { sessions = 0; }

nvmlReturn_t end(nvmlReturn_t code) {
    machine_unlock();
    return code;
}

static void reverse_order(Machine *machine) {
    for (int64_t low = 0, high = machine->gpu_count - 1; low < high; low++, high--) {
        int64_t kept = machine->order[low];
        machine->order[low] = machine->order[high];
        machine->order[high] = kept;
    }
}

/* A reading call meets its fault before it answers. */
static nvmlReturn_t meet(Machine *machine, const Fault *fault) {
    if (!fault) return OK;
    if (fault->kind == REORDER) reverse_order(machine);
    if (fault->kind == DIE_BEFORE || fault->kind == DIE_AFTER) die();
    return fault->kind == REFUSE ? (nvmlReturn_t)fault->code : OK;
}

nvmlReturn_t begin(Call *call, const char *function) {
    *call = (Call){.machine = machine_lock(NULL)};
    if (!call->machine) return DRIVER_NOT_LOADED;
    if (!sessions) return UNINITIALIZED;
    call->machine->shift_us += call->machine->tick_us;
    return meet(call->machine, fault_hit(call->machine, function, -1, 0));
}

static nvmlReturn_t resolve(Call *call, nvmlDevice_t handle, int64_t *slot) {
    uintptr_t value = (uintptr_t)handle;
    if (!call->machine) return DRIVER_NOT_LOADED;
    if (!sessions) return UNINITIALIZED;
    *slot = (int64_t)(value & ~(uintptr_t)MIG_BIT) - 1;
    if (*slot < 0 || *slot >= call->machine->gpu_count) return INVALID_ARGUMENT;
    call->gpu = &call->machine->gpus[*slot];
    if (call->gpu->lost || session_started != call->machine->generation) return GPU_IS_LOST;
    if (call->gpu->reset_required) return RESET_REQUIRED;
    /* An instance has neither clocks nor power of its own. */
    return value & MIG_BIT ? NOT_SUPPORTED : OK;
}

nvmlReturn_t begin_on(Call *call, const char *function, nvmlDevice_t handle, int is_setter) {
    int64_t slot = -1;
    *call = (Call){.machine = machine_lock(NULL)};
    nvmlReturn_t code = resolve(call, handle, &slot);
    if (code) return code;
    call->machine->shift_us += call->machine->tick_us;
    board_update(call->machine, call->gpu);
    call->fault = fault_hit(call->machine, function, slot, is_setter);
    if (call->fault && call->fault->kind == LOSE) {
        call->gpu->lost = 1;
        return GPU_IS_LOST;
    }
    return is_setter ? OK : meet(call->machine, call->fault);
}

nvmlDevice_t handle_of(const Machine *machine, const Gpu *gpu) {
    return (nvmlDevice_t)(uintptr_t)(gpu - machine->gpus + 1);
}

nvmlReturn_t give_text(char *to, unsigned length, const char *text) {
    if (!to) return INVALID_ARGUMENT;
    if (strlen(text) + 1 > length) return INSUFFICIENT_SIZE;
    strcpy(to, text);
    return OK;
}

NVML nvmlReturn_t nvmlInitWithFlags(unsigned flags) {
    (void)flags;
    Machine *machine = machine_lock(NULL);
    if (!machine) return end(DRIVER_NOT_LOADED);
    Fault *fault = fault_hit(machine, "nvmlInit", -1, 0);
    nvmlReturn_t code = machine->init_code ? (nvmlReturn_t)machine->init_code : meet(machine, fault);
    if (code) return end(code);
    client_enter(machine);
    sessions++;
    session_started = machine->generation;
    return end(OK);
}

NVML nvmlReturn_t nvmlInit_v2(void) { return nvmlInitWithFlags(0); }

NVML nvmlReturn_t nvmlInit(void) { return nvmlInitWithFlags(0); }

NVML nvmlReturn_t nvmlShutdown(void) {
    Machine *machine = machine_lock(NULL);
    if (!machine) return end(DRIVER_NOT_LOADED);
    if (!sessions) return end(UNINITIALIZED);
    if (--sessions == 0) client_leave(machine);
    return end(OK);
}

NVML nvmlReturn_t nvmlDeviceGetCount_v2(unsigned *count) {
    MACHINE;
    NEED(count, INVALID_ARGUMENT);
    *count = (unsigned)call.machine->gpu_count;
    RETURN(OK);
}

static nvmlReturn_t open_gpu(const Call *call, Gpu *gpu, nvmlDevice_t *device) {
    if (!gpu) return NOT_FOUND;
    if (gpu->lost) return GPU_IS_LOST;
    if (session_started != call->machine->generation) return GPU_IS_LOST;
    *device = handle_of(call->machine, gpu);
    return OK;
}

NVML nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned index, nvmlDevice_t *device) {
    MACHINE;
    NEED(device && index < call.machine->gpu_count, INVALID_ARGUMENT);
    RETURN(open_gpu(&call, &call.machine->gpus[call.machine->order[index]], device));
}

static Gpu *find(Machine *machine, const char *text, int by_bus) {
    for (int64_t slot = 0; slot < machine->gpu_count; slot++) {
        Gpu *gpu = &machine->gpus[slot];
        if (!strcmp(by_bus ? gpu->bus_id : gpu->uuid, text)) return gpu;
        /* The one instance of a GPU in MIG mode is named as the GPU is, but for the prefix. */
        if (gpu->mig_enabled && !strncmp(text, "MIG-", 4) && !strcmp(gpu->uuid + 4, text + 4)) return gpu;
    }
    return NULL;
}

NVML nvmlReturn_t nvmlDeviceGetHandleByUUID(const char *uuid, nvmlDevice_t *device) {
    MACHINE;
    NEED(device && uuid, INVALID_ARGUMENT);
    Gpu *gpu = find(call.machine, uuid, 0);
    nvmlReturn_t code = open_gpu(&call, gpu, device);
    if (!code && !strncmp(uuid, "MIG-", 4)) *device = (nvmlDevice_t)((uintptr_t)*device | MIG_BIT);
    RETURN(code);
}

NVML nvmlReturn_t nvmlDeviceGetHandleByPciBusId_v2(const char *bus_id, nvmlDevice_t *device) {
    MACHINE;
    NEED(device && bus_id, INVALID_ARGUMENT);
    RETURN(open_gpu(&call, find(call.machine, bus_id, 1), device));
}

NVML nvmlReturn_t nvmlSystemGetDriverVersion(char *version, unsigned length) {
    MACHINE;
    RETURN(give_text(version, length, call.machine->driver_version));
}

NVML nvmlReturn_t nvmlSystemGetNVMLVersion(char *version, unsigned length) {
    MACHINE;
    RETURN(give_text(version, length, call.machine->nvml_version));
}

NVML nvmlReturn_t nvmlSystemGetCudaDriverVersion(int *version) {
    MACHINE;
    NEED(version, INVALID_ARGUMENT);
    *version = 13000;
    RETURN(OK);
}

/* The driver has a sentence for each code; here the code is enough, and no vendor's text is copied. */
NVML const char *nvmlErrorString(nvmlReturn_t code) {
    static __thread char text[32];
    snprintf(text, sizeof text, "stand-in code %u", code);
    return text;
}
