/* Clocks that follow locks and load, power that follows clocks: simulated, simple, and the same on every machine. */
#include "fake.h"

#include <string.h>

enum { IDLE = 0x1, POWER_CAP = 0x4, SW_THERMAL = 0x20 };

/* Work profiles (made up but for their ids): priority is smaller for the stronger; a profile scales the clock's ceiling
 * and the power limit. MAX_P and MAX_Q exclude each other, COMPUTE and MEMORY_BOUND too. */
typedef struct {
    uint64_t conflicts;
    int64_t clock_permille, power_permille;
} Effect;

static const Effect EFFECTS[] = {
    [0] = {1 << 1, 1000, 1000},           /* MAX_P */
    [1] = {1 << 0, 850, 800},             /* MAX_Q */
    [2] = {1 << 3, 1000, 950},            /* COMPUTE */
    [3] = {1 << 2, 800, 900},             /* MEMORY_BOUND */
    [5] = {0, 950, 950},                  /* BALANCED */
    [6] = {1 << 7, 900, 850},             /* LLM_INFERENCE */
    [7] = {1 << 6, 1000, 900},            /* LLM_TRAINING */
};
enum { EFFECTS_COUNT = sizeof EFFECTS / sizeof EFFECTS[0] };

uint64_t supported_profiles(const Gpu *gpu) {
    uint64_t mask = 0;
    for (unsigned profile = 0; gpu->has_profiles && profile < EFFECTS_COUNT; profile++)
        if (EFFECTS[profile].clock_permille) mask |= 1ull << profile;
    return mask;
}

uint64_t profile_conflicts(unsigned profile) { return EFFECTS[profile].conflicts; }

/* Requested is not enforced: of two that exclude each other the one with the smaller number holds. */
uint64_t enforced_profiles(const Gpu *gpu) {
    uint64_t kept = 0;
    for (unsigned profile = 0; profile < EFFECTS_COUNT; profile++)
        if ((uint64_t)gpu->requested_profiles >> profile & 1 && !(EFFECTS[profile].conflicts & kept))
            kept |= 1ull << profile;
    return kept;
}

static int64_t scaled(const Gpu *gpu, int64_t value, int power) {
    uint64_t mask = enforced_profiles(gpu);
    int64_t permille = 1000;
    for (unsigned profile = 0; profile < EFFECTS_COUNT; profile++) {
        int64_t own = power ? EFFECTS[profile].power_permille : EFFECTS[profile].clock_permille;
        if (mask >> profile & 1 && own < permille) permille = own;
    }
    return value * permille / 1000;
}

int64_t memory_index(const Gpu *gpu, int64_t mhz) {
    for (int64_t index = 0; index < gpu->memory_count; index++)
        if (gpu->memory_mhz[index] == mhz) return index;
    return -1;
}

int64_t memory_at_most(const Gpu *gpu, int64_t mhz) {
    for (int64_t index = 0; index < gpu->memory_count; index++)
        if (gpu->memory_mhz[index] <= mhz) return gpu->memory_mhz[index];
    return gpu->memory_mhz[gpu->memory_count - 1];
}

/* The driver rounds down to its table, and up to the table's lowest clock. */
int64_t clock_at_most(const Gpu *gpu, int64_t memory_mhz, int64_t mhz) {
    int64_t row = memory_index(gpu, memory_mhz);
    for (int64_t index = 0; index < gpu->clock_count[row]; index++)
        if (gpu->clock_mhz[row][index] <= mhz) return gpu->clock_mhz[row][index];
    return gpu->clock_mhz[row][gpu->clock_count[row] - 1];
}

int64_t memory_when_busy(const Gpu *gpu) {
    int64_t mhz = gpu->memory_lock_max_mhz ? gpu->memory_lock_max_mhz : gpu->memory_mhz[0];
    return gpu->compute_memory_mhz && mhz > gpu->compute_memory_mhz ? gpu->compute_memory_mhz : mhz;
}

int64_t memory_clock_mhz(const Gpu *gpu) {
    if (gpu->load_permille) return memory_when_busy(gpu);
    return gpu->memory_lock_max_mhz ? gpu->memory_lock_min_mhz : gpu->memory_mhz[gpu->memory_count - 1];
}

int64_t enforced_limit_mw(const Gpu *gpu) {
    int64_t limit = gpu->has_power_limit ? gpu->power_limit_mw : gpu->limit_max_mw;
    limit = scaled(gpu, limit, 1);
    return gpu->outer_limit_mw && gpu->outer_limit_mw < limit ? gpu->outer_limit_mw : limit;
}

int64_t memory_power_mw(const Gpu *gpu) { return gpu->memory_mw * memory_clock_mhz(gpu) / gpu->memory_mhz[0]; }

/* Dynamic power goes with f V^2; the voltage is flat below half of the highest clock and linear above. An offset moves
 * that curve: at the same clock the voltage is that of a clock lower by the offset. */
static int64_t power_at_mw(const Gpu *gpu, int64_t mhz) {
    double ratio = (double)mhz / (double)gpu->clock_mhz[0][0];
    double curve = (double)(mhz - gpu->gpu_offset_mhz) / (double)gpu->clock_mhz[0][0];
    double voltage = 0.65 + 0.35 * (curve > 0.5 ? (curve - 0.5) / 0.5 : 0.0);
    double activity = 0.02 + 0.98 * (double)gpu->load_permille / 1000.0;
    return gpu->static_mw + memory_power_mw(gpu) + (int64_t)((double)gpu->gpu_mw * ratio * voltage * voltage * activity);
}

static int64_t clock_wanted(const Gpu *gpu) {
    int64_t memory = memory_clock_mhz(gpu), top = clock_at_most(gpu, memory, INT64_MAX);
    int64_t most = scaled(gpu, top, 0), least = 0;
    if (gpu->live_max_mhz && gpu->live_max_mhz < most) most = gpu->live_max_mhz;
    if (gpu->ceiling_mhz && gpu->ceiling_mhz < most) most = gpu->ceiling_mhz;
    if (gpu->live_max_mhz) least = gpu->live_min_mhz < most ? gpu->live_min_mhz : most;
    return clock_at_most(gpu, memory, gpu->load_permille ? most : least);
}

/* The limit wins over the lock: the clock steps down the table until the power fits. */
int64_t gpu_clock_mhz(const Gpu *gpu) {
    int64_t memory = memory_clock_mhz(gpu), mhz = clock_wanted(gpu), limit = enforced_limit_mw(gpu), lower;
    while (power_at_mw(gpu, mhz) > limit && (lower = clock_at_most(gpu, memory, mhz - 1)) < mhz) mhz = lower;
    return mhz;
}

int64_t power_now_mw(const Gpu *gpu) { return power_at_mw(gpu, gpu_clock_mhz(gpu)); }

int64_t temperature_c(const Gpu *gpu) {
    if (gpu->forced_temperature_c) return gpu->forced_temperature_c;
    return gpu->ambient_c + power_now_mw(gpu) * gpu->millikelvin_per_w / 1000000;
}

uint64_t event_reasons(const Gpu *gpu) {
    uint64_t reasons = (uint64_t)gpu->forced_reasons;
    if (!gpu->load_permille) reasons |= IDLE;
    if (gpu_clock_mhz(gpu) < clock_wanted(gpu)) reasons |= POWER_CAP;
    if (temperature_c(gpu) >= gpu->limit_c) reasons |= SW_THERMAL;
    return reasons;
}

static void push(Gpu *gpu, int64_t time_us) {
    Point point = {time_us, energy_at_uj(gpu, time_us), power_now_mw(gpu), gpu_clock_mhz(gpu), memory_clock_mhz(gpu)};
    const Point *last = gpu->point_count ? &gpu->points[(gpu->point_count - 1) % POINTS] : NULL;
    if (last && last->power_mw == point.power_mw && last->gpu_mhz == point.gpu_mhz &&
        last->memory_mhz == point.memory_mhz)
        return;
    gpu->points[gpu->point_count % POINTS] = point;
    gpu->point_count++;
}

/* Note what the board does from now on, and that an earlier lock has come to hold meanwhile. */
void board_update(const Machine *machine, Gpu *gpu) {
    int64_t now = now_us(machine);
    if (gpu->settling && now >= gpu->live_at_us) {
        gpu->live_min_mhz = gpu->gpu_lock_min_mhz;
        gpu->live_max_mhz = gpu->gpu_lock_max_mhz;
        gpu->settling = 0;
        push(gpu, gpu->live_at_us);
    }
    push(gpu, now);
}

void board_reset(Gpu *gpu) {
    gpu->gpu_lock_min_mhz = gpu->gpu_lock_max_mhz = gpu->live_min_mhz = gpu->live_max_mhz = gpu->settling = 0;
    gpu->memory_lock_min_mhz = gpu->memory_lock_max_mhz = 0;
    gpu->power_limit_mw = gpu->limit_default_mw;
    gpu->persistence = gpu->requested_profiles = gpu->gpu_offset_mhz = gpu->mem_offset_mhz = 0;
}

/* Sensors and the energy counter are refreshed once a period; between two refreshes they stand still. */
int64_t refreshed_us(const Gpu *gpu, int64_t time_us) { return time_us - time_us % gpu->period_us; }

const Point *point_at(const Gpu *gpu, int64_t time_us) {
    int64_t kept = gpu->point_count < POINTS ? gpu->point_count : POINTS, number = gpu->point_count - 1;
    while (number > gpu->point_count - kept && gpu->points[number % POINTS].time_us > time_us) number--;
    return &gpu->points[number % POINTS];
}

int64_t energy_at_uj(const Gpu *gpu, int64_t time_us) {
    if (!gpu->point_count) return 0;
    const Point *point = point_at(gpu, time_us);
    return point->energy_uj + (time_us - point->time_us) * point->power_mw / 1000;
}
