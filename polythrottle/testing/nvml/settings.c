/* The calls that change a board, all through one door that knows permission, faults and the log. */
#include "call.h"

#include <stdio.h>

typedef int64_t Asked;
typedef nvmlReturn_t Apply(const Machine *machine, Gpu *gpu, Asked first, Asked second);

static const Asked TDP = 0xffffff01, UNLIMITED = 0xffffff02;

static void settle(const Machine *machine, Gpu *gpu) {
    gpu->settling = 1;
    gpu->live_at_us = now_us(machine) + gpu->settle_us;
}

static int on_table(const Gpu *gpu, int64_t mhz) { return clock_at_most(gpu, memory_when_busy(gpu), mhz) == mhz; }

/* Limits are both names or both numbers; numbers are rounded to the table of the memory clock that holds. */
static nvmlReturn_t lock_gpu(const Machine *machine, Gpu *gpu, Asked least, Asked most) {
    if (!gpu->has_gpu_lock) return NOT_SUPPORTED;
    if ((least >= TDP) != (most >= TDP) || least > most || most > UNLIMITED || !most) return INVALID_ARGUMENT;
    int64_t memory = memory_when_busy(gpu);
    if (most >= TDP) {
        least = least == TDP ? gpu->base_mhz : INT64_MAX;
        most = most == TDP ? gpu->base_mhz : INT64_MAX;
    } else if (machine->refuse_off_table && !(on_table(gpu, least) && on_table(gpu, most))) {
        return INVALID_ARGUMENT;
    }
    gpu->gpu_lock_min_mhz = clock_at_most(gpu, memory, least);
    gpu->gpu_lock_max_mhz = clock_at_most(gpu, memory, most);
    settle(machine, gpu);
    return OK;
}

static nvmlReturn_t unlock_gpu(const Machine *machine, Gpu *gpu, Asked first, Asked second) {
    (void)first, (void)second;
    if (!gpu->has_gpu_lock) return NOT_SUPPORTED;
    gpu->gpu_lock_min_mhz = gpu->gpu_lock_max_mhz = 0;
    settle(machine, gpu);
    return OK;
}

static nvmlReturn_t lock_memory(const Machine *machine, Gpu *gpu, Asked least, Asked most) {
    if (!gpu->has_memory_lock) return NOT_SUPPORTED;
    if (least > most || !most) return INVALID_ARGUMENT;
    if (machine->refuse_off_table && (memory_index(gpu, least) < 0 || memory_index(gpu, most) < 0))
        return INVALID_ARGUMENT;
    gpu->memory_lock_min_mhz = memory_at_most(gpu, least);
    gpu->memory_lock_max_mhz = memory_at_most(gpu, most);
    return OK;
}

static nvmlReturn_t unlock_memory(const Machine *machine, Gpu *gpu, Asked first, Asked second) {
    (void)machine, (void)first, (void)second;
    if (!gpu->has_memory_lock) return NOT_SUPPORTED;
    gpu->memory_lock_min_mhz = gpu->memory_lock_max_mhz = 0;
    return OK;
}

static nvmlReturn_t limit_power(const Machine *machine, Gpu *gpu, Asked limit_mw, Asked second) {
    (void)machine, (void)second;
    if (!gpu->has_power_limit) return NOT_SUPPORTED;
    if (limit_mw < gpu->limit_min_mw || limit_mw > gpu->limit_max_mw) return INVALID_ARGUMENT;
    gpu->power_limit_mw = limit_mw;
    return OK;
}

static nvmlReturn_t keep_loaded(const Machine *machine, Gpu *gpu, Asked mode, Asked second) {
    (void)machine, (void)second;
    if (mode != 0 && mode != 1) return INVALID_ARGUMENT;
    gpu->persistence = mode;
    return OK;
}

static nvmlReturn_t move_gpu(const Machine *machine, Gpu *gpu, Asked offset_mhz, Asked second) {
    (void)machine, (void)second;
    if (!gpu->has_offsets) return NOT_SUPPORTED;
    if (offset_mhz < gpu->offset_min_mhz || offset_mhz > gpu->offset_max_mhz) return INVALID_ARGUMENT;
    gpu->gpu_offset_mhz = offset_mhz;
    return OK;
}

static nvmlReturn_t move_memory(const Machine *machine, Gpu *gpu, Asked offset_mhz, Asked second) {
    (void)machine, (void)second;
    if (!gpu->has_offsets) return NOT_SUPPORTED;
    if (offset_mhz < gpu->mem_offset_min_mhz || offset_mhz > gpu->mem_offset_max_mhz) return INVALID_ARGUMENT;
    gpu->mem_offset_mhz = offset_mhz;
    return OK;
}

enum { CLEAR, ADD, REPLACE };

static nvmlReturn_t ask_profiles(const Machine *machine, Gpu *gpu, Asked operation, Asked profiles) {
    (void)machine;
    if (!gpu->has_profiles) return NOT_SUPPORTED;
    if (operation < CLEAR || operation > REPLACE || (uint64_t)profiles & ~supported_profiles(gpu))
        return INVALID_ARGUMENT;
    if (operation == CLEAR) gpu->requested_profiles &= ~profiles;
    if (operation == ADD) gpu->requested_profiles |= profiles;
    if (operation == REPLACE) gpu->requested_profiles = profiles;
    return OK;
}

static nvmlReturn_t carry_out(Call *call, Apply *apply, Asked first, Asked second) {
    const Fault *fault = call->fault;
    int64_t kind = fault ? fault->kind : -1, off = kind == SKEW ? fault->value : 0;
    if (kind == REFUSE) return (nvmlReturn_t)fault->code;
    if (!call->machine->privileged) return NO_PERMISSION;
    if (kind == IGNORE) return OK;
    nvmlReturn_t code = apply(call->machine, call->gpu, first - off, second ? second - off : 0);
    if (kind == OVERWRITE && !code) call->gpu->power_limit_mw = fault->value;
    board_update(call->machine, call->gpu);
    return kind == LATE && !code ? (nvmlReturn_t)fault->code : code;
}

static const char *note_of(int64_t kind) {
    static const char *const NOTES[] = {"refused", "late", "ignored", "skewed", "overwritten", "", "died before", "died after"};
    return kind < 0 ? "" : NOTES[kind];
}

static nvmlReturn_t set(const char *name, nvmlDevice_t handle, int count, Asked first, Asked second, Apply *apply) {
    Call call;
    char arguments[64] = "";
    nvmlReturn_t code = begin_on(&call, name, handle, 1);
    if (count == 1) snprintf(arguments, sizeof arguments, "%lld", (long long)first);
    if (count == 2) snprintf(arguments, sizeof arguments, "%lld, %lld", (long long)first, (long long)second);
    if (!call.machine) return end(code);
    int64_t kind = !code && call.fault ? call.fault->kind : -1;
    const char *uuid = call.gpu ? call.gpu->uuid : "";
    call.machine->setter_calls++;
    if (kind == DIE_BEFORE) log_line(name, uuid, arguments, -1, note_of(kind)), die();
    if (!code) code = carry_out(&call, apply, first, second);
    log_line(name, uuid, arguments, (int)code, note_of(kind));
    if (kind == DIE_AFTER) die();
    return end(code);
}

NVML nvmlReturn_t nvmlDeviceSetGpuLockedClocks(nvmlDevice_t device, unsigned least, unsigned most) {
    return set(__func__, device, 2, least, most, lock_gpu);
}

NVML nvmlReturn_t nvmlDeviceResetGpuLockedClocks(nvmlDevice_t device) {
    return set(__func__, device, 0, 0, 0, unlock_gpu);
}

NVML nvmlReturn_t nvmlDeviceSetMemoryLockedClocks(nvmlDevice_t device, unsigned least, unsigned most) {
    return set(__func__, device, 2, least, most, lock_memory);
}

NVML nvmlReturn_t nvmlDeviceResetMemoryLockedClocks(nvmlDevice_t device) {
    return set(__func__, device, 0, 0, 0, unlock_memory);
}

NVML nvmlReturn_t nvmlDeviceSetPowerManagementLimit(nvmlDevice_t device, unsigned limit_mw) {
    return set(__func__, device, 1, limit_mw, 0, limit_power);
}

typedef struct {
    unsigned version, scope, limit_mw;
} PowerValue;

NVML nvmlReturn_t nvmlDeviceSetPowerManagementLimit_v2(nvmlDevice_t device, const PowerValue *asked) {
    if (!asked || asked->scope) return INVALID_ARGUMENT;
    if (asked->version != 0x0200000C) return ARGUMENT_VERSION_MISMATCH;
    return set(__func__, device, 1, asked->limit_mw, 0, limit_power);
}

NVML nvmlReturn_t nvmlDeviceSetPersistenceMode(nvmlDevice_t device, unsigned mode) {
    return set(__func__, device, 1, mode, 0, keep_loaded);
}

typedef struct {
    unsigned version_or_operation, mask[8];
} ProfilesAsked;

/* Profile numbers end at 24; a bit above the first 63 cannot be a profile. */
static Asked profiles_of(const ProfilesAsked *asked) {
    for (int word = 2; word < 8; word++)
        if (asked->mask[word]) return INT64_MIN;
    return (Asked)((uint64_t)asked->mask[1] << 32 | asked->mask[0]);
}

static nvmlReturn_t request(const char *name, nvmlDevice_t device, const ProfilesAsked *asked, Asked operation) {
    if (!asked) return INVALID_ARGUMENT;
    if (asked->version_or_operation != 0x1000024) return ARGUMENT_VERSION_MISMATCH;
    return set(name, device, 2, operation, profiles_of(asked), ask_profiles);
}

NVML nvmlReturn_t nvmlDeviceWorkloadPowerProfileSetRequestedProfiles(nvmlDevice_t device, const ProfilesAsked *asked) {
    return request(__func__, device, asked, ADD);
}

NVML nvmlReturn_t nvmlDeviceWorkloadPowerProfileClearRequestedProfiles(nvmlDevice_t device, const ProfilesAsked *asked) {
    return request(__func__, device, asked, CLEAR);
}

NVML nvmlReturn_t nvmlDeviceWorkloadPowerProfileUpdateProfiles_v1(nvmlDevice_t device, const ProfilesAsked *asked) {
    if (!asked) return INVALID_ARGUMENT;
    return set(__func__, device, 2, asked->version_or_operation, profiles_of(asked), ask_profiles);
}

/* Offsets of the voltage curve: by performance state since driver 555, of which the stand-in takes P0 alone as drivers
 * do; without one by the older calls, which NVIDIA has deprecated. */
typedef struct {
    unsigned version, type, pstate;
    int offset_mhz, least_mhz, most_mhz;
} ClockOffset;

enum { GRAPHICS_DOMAIN = 0, MEMORY_DOMAIN = 2, OFFSET_VERSION = 0x1000018 };

static nvmlReturn_t wrong_offset(const ClockOffset *info) {
    if (!info) return INVALID_ARGUMENT;
    if (info->version != OFFSET_VERSION) return ARGUMENT_VERSION_MISMATCH;
    if (info->type != GRAPHICS_DOMAIN && info->type != MEMORY_DOMAIN) return INVALID_ARGUMENT;
    return info->pstate > 15 ? INVALID_ARGUMENT : OK;
}

NVML nvmlReturn_t nvmlDeviceGetClockOffsets(nvmlDevice_t device, ClockOffset *info) {
    GPU(device);
    nvmlReturn_t wrong = wrong_offset(info);
    NEED(!wrong, wrong);
    NEED(gpu->has_offsets, NOT_SUPPORTED);
    int memory = info->type == MEMORY_DOMAIN, first = !info->pstate;
    info->offset_mhz = first ? (int)(memory ? gpu->mem_offset_mhz : gpu->gpu_offset_mhz) : 0;
    info->least_mhz = first ? (int)(memory ? gpu->mem_offset_min_mhz : gpu->offset_min_mhz) : 0;
    info->most_mhz = first ? (int)(memory ? gpu->mem_offset_max_mhz : gpu->offset_max_mhz) : 0;
    RETURN(OK);
}

NVML nvmlReturn_t nvmlDeviceSetClockOffsets(nvmlDevice_t device, const ClockOffset *info) {
    nvmlReturn_t wrong = wrong_offset(info);
    if (wrong) return wrong;
    if (info->pstate) return OK; /* taken by no other state, without a word */
    return set(__func__, device, 1, info->offset_mhz, 0, info->type == MEMORY_DOMAIN ? move_memory : move_gpu);
}

NVML nvmlReturn_t nvmlDeviceSetGpcClkVfOffset(nvmlDevice_t device, int offset_mhz) {
    return set(__func__, device, 1, offset_mhz, 0, move_gpu);
}

NVML nvmlReturn_t nvmlDeviceSetMemClkVfOffset(nvmlDevice_t device, int offset_mhz) {
    return set(__func__, device, 1, offset_mhz, 0, move_memory);
}
