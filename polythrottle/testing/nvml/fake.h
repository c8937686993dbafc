/* The machine that the stand-in libnvidia-ml.so.1 pretends to drive: one struct in a file that all processes map.
 *
 * Units are the driver's own, as NVIDIA's NVML reference gives them: MHz, mW, mJ, microseconds, degrees Celsius.
 * Every number is an int64_t named once, in the lists below; Python reads and writes them by that name (control.c).
 */
#ifndef FAKE_H
#define FAKE_H

#include <stddef.h>
#include <stdint.h>

enum { GPUS = 8, MEMORIES = 8, CLOCKS = 512, POINTS = 256, FAULTS = 32, PROCESSES = 16, CLIENTS = 64, TEXT = 96 };

/* NVML return codes, https://docs.nvidia.com/deploy/nvml-api/group__nvmlDeviceEnumvs.html */
enum {
    OK = 0,
    UNINITIALIZED = 1,
    INVALID_ARGUMENT = 2,
    NOT_SUPPORTED = 3,
    NO_PERMISSION = 4,
    NOT_FOUND = 6,
    INSUFFICIENT_SIZE = 7,
    DRIVER_NOT_LOADED = 9,
    GPU_IS_LOST = 15,
    RESET_REQUIRED = 16,
    ARGUMENT_VERSION_MISMATCH = 25
};

/* What a fault does to the call it hits; the same order as FaultKind in Python. */
enum { REFUSE, LATE, IGNORE, SKEW, OVERWRITE, REORDER, DIE_BEFORE, DIE_AFTER, LOSE };

/* What blank readings replace: bits of Gpu.blank. */
enum { BLANK_POWER = 1, BLANK_ENERGY = 2, BLANK_TEMPERATURE = 4, BLANK_CLOCK = 8 };

#define MACHINE_NUMBERS(X)                                                                                             \
    X(gpu_count) X(init_code) X(privileged) X(refuse_off_table) X(forget_without_persistence) X(generation)            \
    X(frozen_us) X(shift_us) X(tick_us) X(epoch_us) X(setter_calls)

#define MACHINE_TEXTS(X) X(driver_version) X(nvml_version)

#define GPU_NUMBERS(X)                                                                                                 \
    /* what it is */                                                                                                   \
    X(architecture) X(compute_major) X(compute_minor) X(memory_bytes) X(device_id) X(base_mhz) X(period_us)            \
    X(limit_min_mw) X(limit_max_mw) X(limit_default_mw)                                                                \
    X(has_gpu_lock) X(has_memory_lock) X(has_power_limit) X(has_energy) X(has_tables) X(has_power_fields)              \
    X(has_memory_power) X(has_module_power) X(has_memory_temperature) X(has_mig) X(has_profiles) X(has_serial)         \
    X(averages_power) X(deprecates_temperature) X(compute_memory_mhz) X(counts_module) X(lacks_gpu_scope)              \
    X(has_offsets) X(offset_min_mhz) X(offset_max_mhz) X(mem_offset_min_mhz) X(mem_offset_max_mhz)                     \
    /* its made-up physics */                                                                                          \
    X(static_mw) X(memory_mw) X(gpu_mw) X(settle_us) X(ambient_c) X(limit_c) X(millikelvin_per_w)                      \
    /* what it is told: volatile, as in a driver */                                                                    \
    X(gpu_lock_min_mhz) X(gpu_lock_max_mhz) X(live_min_mhz) X(live_max_mhz) X(live_at_us) X(settling)                  \
    X(memory_lock_min_mhz) X(memory_lock_max_mhz) X(power_limit_mw) X(persistence) X(requested_profiles)               \
    X(gpu_offset_mhz) X(mem_offset_mhz)                                                                                \
    /* what happens to it */                                                                                           \
    X(load_permille) X(outer_limit_mw) X(ceiling_mhz) X(forced_reasons) X(forced_temperature_c) X(mig_enabled)         \
    X(lost) X(reset_required) X(blank) X(energy_stuck) X(energy_seen_mj)

#define GPU_TEXTS(X) X(name) X(uuid) X(bus_id) X(serial) X(vbios)

/* From here on the GPU draws power_mw, having drawn energy_uj before. */
typedef struct {
    int64_t time_us, energy_uj, power_mw, gpu_mhz, memory_mhz;
} Point;

typedef struct {
#define X(field) int64_t field;
    GPU_NUMBERS(X)
#undef X
#define X(field) char field[TEXT];
    GPU_TEXTS(X)
#undef X
    int64_t memory_count, memory_mhz[MEMORIES], clock_count[MEMORIES], clock_mhz[MEMORIES][CLOCKS]; /* descending */
    int64_t process_count, process_pid[PROCESSES], process_bytes[PROCESSES];
    int64_t point_count; /* ever pushed; the last POINTS of them are kept */
    Point points[POINTS];
} Gpu;

typedef struct {
    char function[TEXT]; /* "" where the slot is free, "*" for any setter */
    int64_t gpu, skip, times, kind, code, value;
} Fault;

typedef struct {
#define X(field) int64_t field;
    MACHINE_NUMBERS(X)
#undef X
#define X(field) char field[TEXT];
    MACHINE_TEXTS(X)
#undef X
    int64_t order[GPUS]; /* index as NVML shows it -> slot in gpus */
    int64_t clients[CLIENTS];
    Fault faults[FAULTS];
    Gpu gpus[GPUS];
} Machine;

/* machine.c */
Machine *machine_lock(const char *folder); /* NULL where there is no state; every call is followed by an unlock */
void machine_unlock(void);
void machine_forget(void);
const char *machine_folder(void);
int machine_create(const char *folder);
int64_t now_us(const Machine *machine);
void reload_driver(Machine *machine);
void clients_settle(Machine *machine);
void client_enter(Machine *machine);
void client_leave(Machine *machine);
Fault *fault_hit(Machine *machine, const char *function, int64_t gpu, int is_setter);
void log_line(const char *call, const char *uuid, const char *arguments, int code, const char *note);
void die(void);

/* board.c */
void board_update(const Machine *machine, Gpu *gpu);
void board_reset(Gpu *gpu);
int64_t memory_index(const Gpu *gpu, int64_t mhz);
int64_t clock_at_most(const Gpu *gpu, int64_t memory_mhz, int64_t mhz);
int64_t memory_at_most(const Gpu *gpu, int64_t mhz);
int64_t memory_when_busy(const Gpu *gpu);
int64_t gpu_clock_mhz(const Gpu *gpu);
int64_t memory_clock_mhz(const Gpu *gpu);
int64_t power_now_mw(const Gpu *gpu);
int64_t memory_power_mw(const Gpu *gpu);
int64_t enforced_limit_mw(const Gpu *gpu);
uint64_t event_reasons(const Gpu *gpu);
uint64_t enforced_profiles(const Gpu *gpu);
uint64_t supported_profiles(const Gpu *gpu);
uint64_t profile_conflicts(unsigned profile);
int64_t temperature_c(const Gpu *gpu);
int64_t refreshed_us(const Gpu *gpu, int64_t time_us);
int64_t energy_at_uj(const Gpu *gpu, int64_t time_us);
const Point *point_at(const Gpu *gpu, int64_t time_us);

#endif
