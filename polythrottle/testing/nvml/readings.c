/* The calls that read a board: tables, clocks, power, energy, fields, samples, profiles. */
#include "call.h"

#include <string.h>

static const unsigned BLANK = 0x7FFFFFF0u; /* finite to look at, and no reading: DCGM's blank int32 */
static const unsigned long long BLANK_LONG = 0x7FFFFFFFFFFFFFF0ull;

enum { GRAPHICS, SM, MEMORY, VIDEO };

static const int64_t MODULE_MW = 200000; /* the module's own parts, made up */

static unsigned long long energy_mj(const Machine *machine, Gpu *gpu) {
    int64_t until = refreshed_us(gpu, now_us(machine)), now = energy_at_uj(gpu, until) / 1000;
    if (gpu->counts_module) now += until / 1000 * MODULE_MW / 1000;
    if (gpu->blank & BLANK_ENERGY) return BLANK_LONG;
    if (!gpu->energy_stuck) gpu->energy_seen_mj = now > 0 ? now : 0;
    return (unsigned long long)gpu->energy_seen_mj;
}

static unsigned average_mw(const Gpu *gpu, int64_t time_us) {
    int64_t until = refreshed_us(gpu, time_us);
    return (unsigned)((energy_at_uj(gpu, until) - energy_at_uj(gpu, until - 1000000)) / 1000);
}

static unsigned instant_mw(const Gpu *gpu, int64_t time_us) {
    return (unsigned)point_at(gpu, refreshed_us(gpu, time_us))->power_mw;
}

static unsigned blanked(const Gpu *gpu, int64_t bit, int64_t value) {
    return gpu->blank & bit ? BLANK : (unsigned)value;
}

/* A call that gives one number of the GPU, where it has it. */
#define NUMBER(name, type, condition, value)                                                                           \
    NVML nvmlReturn_t name(nvmlDevice_t device, type *out) {                                                           \
        GPU(device);                                                                                                   \
        NEED(condition, NOT_SUPPORTED);                                                                                \
        NEED(out, INVALID_ARGUMENT);                                                                                   \
        *out = (type)(value);                                                                                          \
        RETURN(OK);                                                                                                    \
    }
#define TEXT_OF(name, condition, value)                                                                                \
    NVML nvmlReturn_t name(nvmlDevice_t device, char *out, unsigned length) {                                          \
        GPU(device);                                                                                                   \
        NEED(condition, NOT_SUPPORTED);                                                                                \
        RETURN(give_text(out, length, value));                                                                         \
    }

static unsigned shown_index(const Machine *machine, const Gpu *gpu) {
    unsigned index = 0;
    while (machine->order[index] != gpu - machine->gpus) index++;
    return index;
}

TEXT_OF(nvmlDeviceGetName, 1, gpu->name)
TEXT_OF(nvmlDeviceGetUUID, 1, gpu->uuid)
TEXT_OF(nvmlDeviceGetSerial, gpu->has_serial, gpu->serial)
TEXT_OF(nvmlDeviceGetVbiosVersion, 1, gpu->vbios)
NUMBER(nvmlDeviceGetIndex, unsigned, 1, shown_index(call.machine, gpu))
NUMBER(nvmlDeviceGetMinorNumber, unsigned, 1, gpu - call.machine->gpus)
NUMBER(nvmlDeviceGetArchitecture, unsigned, 1, gpu->architecture)
NUMBER(nvmlDeviceGetPersistenceMode, unsigned, 1, gpu->persistence)
NUMBER(nvmlDeviceGetPerformanceState, unsigned, 1, gpu->load_permille ? 0 : 8)
NUMBER(nvmlDeviceGetPowerState, unsigned, 1, gpu->load_permille ? 0 : 8)
NUMBER(nvmlDeviceGetPowerManagementMode, unsigned, 1, gpu->has_power_limit)
NUMBER(nvmlDeviceGetPowerManagementLimit, unsigned, gpu->has_power_limit, gpu->power_limit_mw)
NUMBER(nvmlDeviceGetPowerManagementDefaultLimit, unsigned, gpu->has_power_limit, gpu->limit_default_mw)
NUMBER(nvmlDeviceGetEnforcedPowerLimit, unsigned, gpu->has_power_limit, enforced_limit_mw(gpu))
NUMBER(nvmlDeviceGetGpcClkVfOffset, int, gpu->has_offsets, gpu->gpu_offset_mhz)
NUMBER(nvmlDeviceGetMemClkVfOffset, int, gpu->has_offsets, gpu->mem_offset_mhz)
NUMBER(nvmlDeviceGetTotalEnergyConsumption, unsigned long long, gpu->has_energy, energy_mj(call.machine, gpu))
NUMBER(nvmlDeviceGetCurrentClocksEventReasons, unsigned long long, 1, event_reasons(gpu))
NUMBER(nvmlDeviceGetCurrentClocksThrottleReasons, unsigned long long, 1, event_reasons(gpu))
NUMBER(nvmlDeviceGetSupportedClocksEventReasons, unsigned long long, 1, 0x1ff)
NUMBER(nvmlDeviceGetSupportedClocksThrottleReasons, unsigned long long, 1, 0x1ff)
NUMBER(nvmlDeviceGetMaxMigDeviceCount, unsigned, 1, gpu->has_mig ? 7 : 0)
NUMBER(nvmlDeviceGetPowerUsage, unsigned, 1,
       blanked(gpu, BLANK_POWER, (gpu->averages_power ? average_mw : instant_mw)(gpu, now_us(call.machine))))

NVML nvmlReturn_t nvmlDeviceGetGpcClkMinMaxVfOffset(nvmlDevice_t device, int *least_mhz, int *most_mhz) {
    GPU(device);
    NEED(gpu->has_offsets, NOT_SUPPORTED);
    NEED(least_mhz && most_mhz, INVALID_ARGUMENT);
    *least_mhz = (int)gpu->offset_min_mhz;
    *most_mhz = (int)gpu->offset_max_mhz;
    RETURN(OK);
}

NVML nvmlReturn_t nvmlDeviceGetMemClkMinMaxVfOffset(nvmlDevice_t device, int *least_mhz, int *most_mhz) {
    GPU(device);
    NEED(gpu->has_offsets, NOT_SUPPORTED);
    NEED(least_mhz && most_mhz, INVALID_ARGUMENT);
    *least_mhz = (int)gpu->mem_offset_min_mhz;
    *most_mhz = (int)gpu->mem_offset_max_mhz;
    RETURN(OK);
}

NVML nvmlReturn_t nvmlDeviceGetMigMode(nvmlDevice_t device, unsigned *current, unsigned *pending) {
    GPU(device);
    NEED(gpu->has_mig, NOT_SUPPORTED);
    *current = *pending = (unsigned)gpu->mig_enabled;
    RETURN(OK);
}

NVML nvmlReturn_t nvmlDeviceGetMigDeviceHandleByIndex(nvmlDevice_t device, unsigned index, nvmlDevice_t *instance) {
    GPU(device);
    NEED(gpu->has_mig, NOT_SUPPORTED);
    NEED(gpu->mig_enabled && !index, NOT_FOUND); /* one instance stands for all */
    *instance = (nvmlDevice_t)((uintptr_t)device | MIG_BIT);
    RETURN(OK);
}

NVML nvmlReturn_t nvmlDeviceIsMigDeviceHandle(nvmlDevice_t device, unsigned *is_instance) {
    MACHINE;
    NEED(is_instance, INVALID_ARGUMENT);
    *is_instance = ((uintptr_t)device & MIG_BIT) != 0;
    RETURN(OK);
}

NVML nvmlReturn_t nvmlDeviceGetDeviceHandleFromMigDeviceHandle(nvmlDevice_t instance, nvmlDevice_t *device) {
    MACHINE;
    NEED(device && (uintptr_t)instance & MIG_BIT, INVALID_ARGUMENT);
    *device = (nvmlDevice_t)((uintptr_t)instance & ~(uintptr_t)MIG_BIT);
    RETURN(OK);
}

NVML nvmlReturn_t nvmlDeviceGetCudaComputeCapability(nvmlDevice_t device, int *major, int *minor) {
    GPU(device);
    *major = (int)gpu->compute_major;
    *minor = (int)gpu->compute_minor;
    RETURN(OK);
}

typedef struct {
    char legacy[16];
    unsigned domain, bus, device, device_id, subsystem_id;
    char bus_id[32];
} PciInfo;

NVML nvmlReturn_t nvmlDeviceGetPciInfo_v3(nvmlDevice_t device, PciInfo *info) {
    GPU(device);
    memset(info, 0, sizeof *info);
    info->bus = (unsigned)(gpu - call.machine->gpus) + 1;
    info->device_id = (unsigned)gpu->device_id;
    memcpy(info->bus_id, gpu->bus_id, sizeof info->bus_id - 1);
    memcpy(info->legacy, gpu->bus_id + 4, sizeof info->legacy - 1);
    RETURN(OK);
}

typedef struct {
    unsigned long long total, free, used;
} MemoryInfo;

static int64_t used_bytes(const Gpu *gpu) {
    int64_t used = 0;
    for (int64_t number = 0; number < gpu->process_count; number++) used += gpu->process_bytes[number];
    return used;
}

NVML nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t device, MemoryInfo *info) {
    GPU(device);
    int64_t used = used_bytes(gpu);
    *info = (MemoryInfo){(unsigned long long)gpu->memory_bytes, (unsigned long long)(gpu->memory_bytes - used),
                         (unsigned long long)used};
    RETURN(OK);
}

typedef struct {
    unsigned gpu, memory;
} Utilization;

NVML nvmlReturn_t nvmlDeviceGetUtilizationRates(nvmlDevice_t device, Utilization *rates) {
    GPU(device);
    NEED(!gpu->mig_enabled, NOT_SUPPORTED);
    rates->gpu = (unsigned)(gpu->load_permille / 10);
    rates->memory = rates->gpu / 2;
    RETURN(OK);
}

typedef struct {
    unsigned pid;
    unsigned long long bytes;
    unsigned gpu_instance, compute_instance;
} Process;

NVML nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v3(nvmlDevice_t device, unsigned *count, Process *processes) {
    GPU(device);
    unsigned room = *count;
    *count = (unsigned)gpu->process_count;
    NEED(room >= *count, INSUFFICIENT_SIZE);
    for (unsigned number = 0; number < *count; number++)
        processes[number] = (Process){(unsigned)gpu->process_pid[number],
                                      (unsigned long long)gpu->process_bytes[number], ~0u, ~0u};
    RETURN(OK);
}

NVML nvmlReturn_t nvmlDeviceGetPowerManagementLimitConstraints(nvmlDevice_t device, unsigned *least, unsigned *most) {
    GPU(device);
    NEED(gpu->has_power_limit, NOT_SUPPORTED);
    *least = (unsigned)gpu->limit_min_mw;
    *most = (unsigned)gpu->limit_max_mw;
    RETURN(OK);
}

/* Tables: ask with no room to learn the length. */
static nvmlReturn_t give_table(const int64_t *values, int64_t length, unsigned *count, unsigned *out) {
    unsigned room = *count;
    *count = (unsigned)length;
    if (room < *count) return INSUFFICIENT_SIZE;
    for (unsigned index = 0; index < *count; index++) out[index] = (unsigned)values[index];
    return OK;
}

NVML nvmlReturn_t nvmlDeviceGetSupportedMemoryClocks(nvmlDevice_t device, unsigned *count, unsigned *clocks_mhz) {
    GPU(device);
    NEED(gpu->has_tables && !gpu->mig_enabled, NOT_SUPPORTED);
    NEED(count, INVALID_ARGUMENT);
    RETURN(give_table(gpu->memory_mhz, gpu->memory_count, count, clocks_mhz));
}

NVML nvmlReturn_t nvmlDeviceGetSupportedGraphicsClocks(nvmlDevice_t device, unsigned memory_mhz, unsigned *count,
                                                       unsigned *clocks_mhz) {
    GPU(device);
    NEED(gpu->has_tables && !gpu->mig_enabled, NOT_SUPPORTED);
    NEED(count, INVALID_ARGUMENT);
    int64_t row = memory_index(gpu, memory_mhz);
    NEED(row >= 0, NOT_FOUND);
    RETURN(give_table(gpu->clock_mhz[row], gpu->clock_count[row], count, clocks_mhz));
}

static int64_t by_domain(unsigned domain, int64_t gpu_mhz, int64_t memory_mhz) {
    if (domain == MEMORY) return memory_mhz;
    return domain == VIDEO ? gpu_mhz * 17 / 20 : gpu_mhz;
}

NVML nvmlReturn_t nvmlDeviceGetClockInfo(nvmlDevice_t device, unsigned domain, unsigned *clock_mhz) {
    GPU(device);
    NEED(clock_mhz && domain <= VIDEO, INVALID_ARGUMENT);
    *clock_mhz = blanked(gpu, BLANK_CLOCK, by_domain(domain, gpu_clock_mhz(gpu), memory_clock_mhz(gpu)));
    RETURN(OK);
}

NVML nvmlReturn_t nvmlDeviceGetMaxClockInfo(nvmlDevice_t device, unsigned domain, unsigned *clock_mhz) {
    GPU(device);
    NEED(clock_mhz && domain <= VIDEO, INVALID_ARGUMENT);
    *clock_mhz = (unsigned)by_domain(domain, gpu->clock_mhz[0][0], gpu->memory_mhz[0]);
    RETURN(OK);
}

NVML nvmlReturn_t nvmlDeviceGetTemperature(nvmlDevice_t device, unsigned sensor, unsigned *celsius) {
    GPU(device);
    NEED(celsius && sensor == 0, INVALID_ARGUMENT);
    NEED(!gpu->deprecates_temperature, 26);
    *celsius = blanked(gpu, BLANK_TEMPERATURE, temperature_c(gpu));
    RETURN(OK);
}

typedef struct {
    unsigned version, sensor;
    int celsius;
} Temperature;

NVML nvmlReturn_t nvmlDeviceGetTemperatureV(nvmlDevice_t device, Temperature *temperature) {
    GPU(device);
    NEED(temperature && temperature->sensor == 0, INVALID_ARGUMENT);
    NEED(temperature->version == 0x100000C, ARGUMENT_VERSION_MISMATCH);
    temperature->celsius = (int)blanked(gpu, BLANK_TEMPERATURE, temperature_c(gpu));
    RETURN(OK);
}

NVML nvmlReturn_t nvmlDeviceGetTemperatureThreshold(nvmlDevice_t device, unsigned kind, unsigned *celsius) {
    GPU(device);
    NEED(celsius && kind <= 3, INVALID_ARGUMENT);
    static const int ABOVE[] = {10, 5, 2, 0}; /* shutdown, slowdown, memory, GPU */
    *celsius = (unsigned)(gpu->limit_c + ABOVE[kind]);
    RETURN(OK);
}

enum { UNSIGNED = 1, UNSIGNED_LONG_LONG = 3 };

typedef union {
    double real;
    unsigned small;
    unsigned long long big;
} Value;

typedef struct {
    uint32_t field, scope;
    int64_t timestamp_us, latency_us;
    uint32_t type;
    nvmlReturn_t code;
    Value value;
} Field;

enum { SCOPE_GPU, SCOPE_MODULE, SCOPE_MEMORY };
enum { MEMORY_TEMPERATURE = 82, ENERGY = 83, AVERAGE = 185, INSTANT, LIMIT_MIN, LIMIT_MAX, LIMIT_DEFAULT, LIMIT_NOW };
enum { LIMIT_REQUESTED = 192 };

static nvmlReturn_t power_field(const Machine *machine, const Gpu *gpu, Field *field) {
    int64_t now = now_us(machine);
    int64_t power = field->field == AVERAGE ? average_mw(gpu, now) : instant_mw(gpu, now);
    if (!gpu->has_power_fields) return NOT_SUPPORTED;
    if (field->scope == SCOPE_MEMORY && !gpu->has_memory_power) return NOT_SUPPORTED;
    if (field->scope == SCOPE_MODULE && !gpu->has_module_power) return NOT_SUPPORTED;
    if (field->scope == SCOPE_GPU && gpu->lacks_gpu_scope) return NOT_SUPPORTED;
    if (field->scope > SCOPE_MEMORY) return INVALID_ARGUMENT;
    if (field->scope == SCOPE_MEMORY) power = memory_power_mw(gpu);
    if (field->scope == SCOPE_MODULE) power += MODULE_MW;
    field->value.small = blanked(gpu, BLANK_POWER, power);
    return OK;
}

static nvmlReturn_t limit_field(const Gpu *gpu, Field *field) {
    int64_t limits[] = {gpu->limit_min_mw, gpu->limit_max_mw, gpu->limit_default_mw, enforced_limit_mw(gpu)};
    if (!gpu->has_power_fields || !gpu->has_power_limit || field->scope) return NOT_SUPPORTED;
    field->value.small = (unsigned)(field->field == LIMIT_REQUESTED ? gpu->power_limit_mw
                                                                    : limits[field->field - LIMIT_MIN]);
    return OK;
}

static nvmlReturn_t fill(const Machine *machine, Gpu *gpu, Field *field) {
    field->type = UNSIGNED;
    field->timestamp_us = refreshed_us(gpu, now_us(machine)) + machine->epoch_us;
    field->latency_us = 20;
    if (field->field == ENERGY && gpu->has_energy) {
        field->type = UNSIGNED_LONG_LONG;
        field->value.big = energy_mj(machine, gpu);
        return OK;
    }
    if (field->field == MEMORY_TEMPERATURE && gpu->has_memory_temperature) {
        field->value.small = blanked(gpu, BLANK_TEMPERATURE, temperature_c(gpu) + 8);
        return OK;
    }
    if (field->field == AVERAGE || field->field == INSTANT) return power_field(machine, gpu, field);
    if ((field->field >= LIMIT_MIN && field->field <= LIMIT_NOW) || field->field == LIMIT_REQUESTED)
        return limit_field(gpu, field);
    return NOT_SUPPORTED;
}

NVML nvmlReturn_t nvmlDeviceGetFieldValues(nvmlDevice_t device, int count, Field *fields) {
    GPU(device);
    NEED(fields && count > 0, INVALID_ARGUMENT);
    for (int number = 0; number < count; number++) fields[number].code = fill(call.machine, gpu, &fields[number]);
    RETURN(OK);
}

typedef struct {
    unsigned long long timestamp_us;
    Value value;
} Sample;

enum { SAMPLES = 120, TOTAL_POWER = 0, CLOCK_SAMPLES = 5, MEMORY_CLOCK_SAMPLES = 6, MODULE_POWER = 7 };

static unsigned sample_at(const Gpu *gpu, unsigned kind, int64_t time_us) {
    const Point *point = point_at(gpu, time_us);
    if (kind == CLOCK_SAMPLES) return (unsigned)point->gpu_mhz;
    if (kind == MEMORY_CLOCK_SAMPLES) return (unsigned)point->memory_mhz;
    return (unsigned)(point->power_mw + (kind == MODULE_POWER ? MODULE_MW : 0));
}

static int has_samples(const Gpu *gpu, unsigned kind) {
    if (kind == MODULE_POWER) return gpu->has_module_power != 0;
    return gpu->has_power_fields && (kind == TOTAL_POWER || kind == CLOCK_SAMPLES || kind == MEMORY_CLOCK_SAMPLES);
}

NVML nvmlReturn_t nvmlDeviceGetSamples(nvmlDevice_t device, unsigned kind, unsigned long long last_us, unsigned *type,
                                       unsigned *count, Sample *samples) {
    GPU(device);
    NEED(has_samples(gpu, kind), NOT_SUPPORTED);
    NEED(count && type, INVALID_ARGUMENT);
    *type = UNSIGNED;
    unsigned room = samples ? *count : 0, filled = 0;
    *count = SAMPLES;
    NEED(samples, OK);
    int64_t newest = refreshed_us(gpu, now_us(call.machine));
    int64_t since = gpu->points[gpu->point_count > POINTS ? gpu->point_count % POINTS : 0].time_us;
    for (int64_t back = SAMPLES - 1; back >= 0 && filled < room; back--) {
        int64_t time = newest - back * gpu->period_us, stamp = time + call.machine->epoch_us;
        if (time < since || (unsigned long long)stamp <= last_us) continue;
        samples[filled++] = (Sample){(unsigned long long)stamp, {.small = sample_at(gpu, kind, time)}};
    }
    *count = filled;
    RETURN(filled ? OK : NOT_FOUND);
}

typedef struct {
    unsigned version, id, priority, conflicts[8];
} ProfileInfo;

typedef struct {
    unsigned version, mask[8];
    ProfileInfo profiles[255];
} ProfilesInfo;

typedef struct {
    unsigned version, supported[8], requested[8], enforced[8];
} ProfilesNow;

NVML nvmlReturn_t nvmlDeviceWorkloadPowerProfileGetProfilesInfo(nvmlDevice_t device, ProfilesInfo *info) {
    GPU(device);
    NEED(info, INVALID_ARGUMENT);
    NEED(info->version == 0x1002bf8, ARGUMENT_VERSION_MISMATCH);
    NEED(gpu->has_profiles, NOT_SUPPORTED);
    info->mask[0] = (unsigned)supported_profiles(gpu);
    for (unsigned profile = 0; profile < 32; profile++)
        if (info->mask[0] >> profile & 1)
            info->profiles[profile] =
                (ProfileInfo){0x100002c, profile, profile, {(unsigned)profile_conflicts(profile)}};
    RETURN(OK);
}

NVML nvmlReturn_t nvmlDeviceWorkloadPowerProfileGetCurrentProfiles(nvmlDevice_t device, ProfilesNow *now) {
    GPU(device);
    NEED(now, INVALID_ARGUMENT);
    NEED(now->version == 0x1000064, ARGUMENT_VERSION_MISMATCH);
    NEED(gpu->has_profiles, NOT_SUPPORTED);
    now->supported[0] = (unsigned)supported_profiles(gpu);
    now->requested[0] = (unsigned)gpu->requested_profiles;
    now->enforced[0] = (unsigned)enforced_profiles(gpu);
    RETURN(OK);
}
