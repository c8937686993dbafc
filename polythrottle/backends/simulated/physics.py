"""The physics of a simulated board: power, heat, time and clocks of one query at several points.

The noise of measuring them.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from polythrottle.catalog.boards import Cpu, Governor, Gpu, Memory, Simulation, Thermal, Voltage
from polythrottle.catalog.models import Model

# What the parts of a board draw: voltage that is flat, then linear in the clock; memory; CPU; leakage with heat.

Array = NDArray[np.float64]
Celsius = TypeVar("Celsius", float, Array)


def relative_power(voltage: Voltage, share: Array) -> Array:
    """Return V²f over its value at the top clock.

    The shape is that of the published Tegra X1 table (Linux ``drivers/gpu/drm/nouveau/nvkm/subdev/volt/gm20b.c``).

    Args:
        voltage: The curve.
        share: Clock over the top clock; above 0, any shape.
    """
    slope = (voltage.swing - 1.0) / (1.0 - voltage.knee)
    volts = 1.0 + slope * np.maximum(0.0, share - voltage.knee)
    return np.asarray(share * (volts / voltage.swing) ** 2)


def gpu_busy_w(gpu: Gpu, share: Array, useful: Array) -> Array:
    """Return the GPU's dynamic power in watts while busy.

    Args:
        gpu: The GPU.
        share: Clock over the top clock.
        useful: Share of the time its lanes have work.
    """
    return gpu.power_w * relative_power(gpu.voltage, share) * (gpu.floor + (1.0 - gpu.floor) * useful)


def gpu_idle_w(gpu: Gpu, share: Array) -> Array:
    """Return the GPU's dynamic power in watts while it waits at a clock over the top clock."""
    return gpu.power_w * gpu.idle * relative_power(gpu.voltage, share)


def memory_w(memory: Memory, share: Array) -> Array:
    """Return the memory's power in watts without traffic, at a clock over the top clock."""
    return np.asarray(memory.power_w * share**memory.exponent)


def core_w(cpu: Cpu, clock_hz: Array) -> Array:
    """Return the dynamic power in watts of one busy CPU core."""
    return cpu.core_w * relative_power(cpu.voltage, clock_hz / cpu.clock_hz)


def static_w(thermal: Thermal, temperature_c: Celsius) -> Celsius:
    """Return the power in watts that no knob changes, leakage at a temperature included."""
    return thermal.static_w * (1.0 + thermal.leakage_per_c * (temperature_c - thermal.reference_c))


# Heat: one body warmed by the power it draws, cooled towards the air.


def warmed_c(thermal: Thermal, temperature_c: float, power_w: float, duration_s: float) -> float:
    """Return the temperature after drawing a power for a while."""
    settled_c = thermal.ambient_c + thermal.resistance_c_per_w * power_w
    return settled_c + (temperature_c - settled_c) * math.exp(-duration_s / thermal.time_constant_s)


def settled_c(thermal: Thermal, dynamic_w: Array) -> Array:
    """Return the temperature at which heat and leakage balance while the dynamic power stays; infinite if never."""
    cold_c = thermal.ambient_c + thermal.resistance_c_per_w * (dynamic_w + static_w(thermal, thermal.ambient_c))
    feedback = thermal.resistance_c_per_w * thermal.static_w * thermal.leakage_per_c
    if feedback >= 1.0:
        return np.full_like(cold_c, math.inf)
    return np.asarray(thermal.ambient_c + (cold_c - thermal.ambient_c) / (1.0 - feedback))


def sustainable_w(thermal: Thermal) -> float:
    """Return the power in watts that holds the board at its temperature limit; 0 if even the air is too hot."""
    return max(0.0, (thermal.limit_c - thermal.ambient_c) / thermal.resistance_c_per_w)


def capped_c(thermal: Thermal, power_w: Array) -> Array:
    """Return the temperature a board settles at while a cap holds it at a power; at most its limit."""
    return np.minimum(thermal.limit_c, thermal.ambient_c + thermal.resistance_c_per_w * power_w)


# How long one query takes: a roofline over GPU and memory clock, launch overhead, and preprocessing on the CPU.

_SHARPNESS = 2.0
"""How sharp the corner of the roofline is: 1 adds compute and memory time, infinity takes the longer."""


@dataclass(frozen=True)
class Clocks:
    """What each domain runs at, and between what the GPU may move; at several points at once, shape (points,)."""

    gpu_min_hz: Array
    gpu_max_hz: Array
    memory_hz: Array
    cpu_hz: Array


@dataclass(frozen=True)
class Demand:
    """What one query asks of a board: everything the clocks do not change; each of shape (points,).

    Args:
        compute_cycles: GPU cycles at the rate the kernels reach, lanes that find no work included.
        useful_share: Share of those cycles in which the lanes have work.
        memory_s: Time its bytes take at the top memory clock.
        traffic_bytes: Those bytes.
        launch_cycles: CPU cycles during which the GPU waits for kernels.
        preprocess_cycles: CPU cycles before the GPU can start.
        handoff_cycles: CPU cycles between two queries during which the GPU waits.
    """

    compute_cycles: Array
    useful_share: Array
    memory_s: Array
    traffic_bytes: Array
    launch_cycles: float
    preprocess_cycles: Array
    handoff_cycles: Array

    @classmethod
    def of(cls, simulation: Simulation, model: Model, batch_size: Array) -> "Demand":
        """Return what queries of ``batch_size`` items ask.

        A batch fills ``parallelism * batch_size`` of the lanes half: time grows as batch + lanes / parallelism, which
        gives the published batch factors 1 : 1.7 : 2.7 : 4.6 (AGX Orin, B7) and 1 : 1.7 : 3.2 : 6.0 (TX2, B4);
        arXiv 2310.19991, figure 2.
        """
        gpu = simulation.gpu
        memory = simulation.memory
        unfilled = gpu.lanes / model.parallelism
        rate = gpu.ops_per_clock(model.precision)
        if model.precision == "fp32":
            tensor = gpu.tensor_fp32
        else:
            tensor = gpu.tensor
        if tensor:
            efficiency = model.efficiency.tensor
        else:
            efficiency = model.efficiency.vector
        spilt = 1.0 + memory.spill * np.log2(batch_size) ** 2
        traffic = model.weight_bytes + batch_size * model.traffic_bytes * spilt
        return cls(
            compute_cycles=model.operations * (batch_size + unfilled) / (rate * efficiency),
            useful_share=batch_size / (batch_size + unfilled),
            memory_s=traffic / (memory.bandwidth_bytes_per_s * memory.achieved),
            traffic_bytes=traffic,
            launch_cycles=model.kernels * gpu.launch_cycles,
            preprocess_cycles=model.preprocess_cycles * batch_size,
            handoff_cycles=model.handoff_cycles * batch_size,
        )

    def burst_s(self, gpu_hz: Array, memory_share: Array, cpu_hz: Array) -> Array:
        """Return how long the GPU is busy with the query at a steady clock, in seconds.

        Args:
            gpu_hz: GPU clock.
            memory_share: Memory clock over the top memory clock.
            cpu_hz: CPU clock.
        """
        compute_s = self.compute_cycles / gpu_hz
        memory_s = self.memory_s / memory_share
        longer = np.maximum(compute_s, memory_s)
        shorter = np.minimum(compute_s, memory_s)
        roofline_s = longer * (1.0 + (shorter / longer) ** _SHARPNESS) ** (1.0 / _SHARPNESS)
        return np.asarray(roofline_s + self.launch_cycles / cpu_hz)


# The stock governor: a burst starts at a low clock and climbs while it lasts, so short bursts run slowly.

_GOVERNOR_HALVINGS = 40
_SAMPLES = 12


@dataclass(frozen=True)
class Climb:
    """The GPU clock over bursts: each starts below its end and approaches it exponentially. Arrays of one shape.

    Args:
        high_hz: What it climbs towards.
        missing_hz: How far below that it starts.
        rise_s: Time to 63 % of the way.
        burst_s: How long the GPU is busy.
    """

    high_hz: Array
    missing_hz: Array
    rise_s: float
    burst_s: Array

    @classmethod
    def after(cls, governor: Governor, low_hz: Array, high_hz: Array, burst_s: Array, gap_s: Array) -> "Climb":
        """Return the climb once bursts and gaps have repeated long enough to be alike.

        In a gap the clock falls towards the lowest; what a burst misses of the highest at its start is then
        ``(high - low) (1 - g) / (1 - g r)``, where ``r`` and ``g`` are what a burst and a gap leave of a difference.

        Args:
            governor: Its time constants.
            low_hz: Lowest clock allowed.
            high_hz: Highest clock allowed.
            burst_s: How long the GPU is busy.
            gap_s: How long it waits between bursts; infinite if long.
        """
        if governor.rise_s <= 0:
            return cls(high_hz, np.zeros_like(high_hz), governor.rise_s, burst_s)
        rest = np.exp(-burst_s / governor.rise_s)
        gap = np.exp(-gap_s / governor.fall_s)
        missing_hz = np.maximum(0.0, high_hz - low_hz) * (1.0 - gap) / (1.0 - gap * rest)
        return cls(high_hz, missing_hz, governor.rise_s, burst_s)

    @property
    def mean_hz(self) -> Array:
        """The mean clock over the burst."""
        if self.rise_s <= 0:
            return self.high_hz
        climbs = self.burst_s / self.rise_s
        return np.asarray(self.high_hz + self.missing_hz / climbs * np.expm1(-climbs))

    @property
    def samples_hz(self) -> Array:
        """Clocks at evenly spaced times of the burst, from which means of other quantities follow; (times, bursts)."""
        if self.rise_s <= 0:
            return self.high_hz[np.newaxis]
        times = (np.arange(_SAMPLES)[:, np.newaxis] + 0.5) / _SAMPLES * self.burst_s
        return np.asarray(self.high_hz - self.missing_hz * np.exp(-times / self.rise_s))


def settle(
    governor: Governor,
    low_hz: Array,
    high_hz: Array,
    burst_s: Callable[[Array], Array],
    gap_s: Callable[[Array], Array],
) -> Climb:
    """Return the climb whose length follows from its mean clock, and its mean clock from its length.

    Args:
        governor: Its time constants.
        low_hz: Lowest clock allowed.
        high_hz: Highest clock allowed.
        burst_s: Length of the burst at a steady clock; falls as the clock rises.
        gap_s: The wait before a burst of some length; never grows with it.
    """
    least = burst_s(high_hz)
    most = burst_s(low_hz)
    if governor.rise_s <= 0 or bool(np.all(low_hz >= high_hz)):
        return Climb.after(governor, low_hz, high_hz, least, np.full_like(least, math.inf))
    for _ in range(_GOVERNOR_HALVINGS):
        middle = (least + most) / 2
        longer = burst_s(Climb.after(governor, low_hz, high_hz, middle, gap_s(middle)).mean_hz) > middle
        least = np.where(longer, middle, least)
        most = np.where(longer, most, middle)
    return Climb.after(governor, low_hz, high_hz, most, gap_s(most))


# One query on one board at several points: how long it takes, what it draws, and the clock a cap leaves it.

_HALVINGS = 30


@dataclass(frozen=True)
class QueryCycle:
    """What one query does to a board, without noise; at several points at once, shape (points,).

    Args:
        latency_s: From sending to answer: preprocessing, handoff and inference.
        interval_s: Between two answers.
        dynamic_j: Energy besides `static_w`.
        gpu_hz: Mean clock of the GPU while busy.
    """

    latency_s: Array
    interval_s: Array
    dynamic_j: Array
    gpu_hz: Array

    @property
    def dynamic_w(self) -> Array:
        """Mean power besides `static_w`, in watts."""
        return self.dynamic_j / self.interval_s

    def where(self, mask: NDArray[np.bool_], other: "QueryCycle") -> "QueryCycle":
        """Return this cycle at the points of a mask, and another elsewhere."""
        pairs = ((getattr(self, field.name), getattr(other, field.name)) for field in fields(self))
        return QueryCycle(*(np.where(mask, mine, theirs) for mine, theirs in pairs))


@dataclass(frozen=True)
class TopClocks:
    """The top clock of each domain, in Hz: what shares are shares of."""

    gpu_hz: float
    memory_hz: float


def query_cycle(simulation: Simulation, tops: TopClocks, demand: Demand, clocks: Clocks, waited_s: float) -> QueryCycle:
    """Return the cycle of one query.

    Preprocessing of the next query overlaps inference of the last, so answers come at the pace of the slower stage.
    After an idle time nothing overlaps, and the governor has let the clock go as far as it falls in that time.

    Args:
        simulation: The board's coefficients.
        tops: Its top clocks.
        demand: What the query asks.
        clocks: What the domains run at.
        waited_s: How long the board stood idle before; 0 if it did not.
    """
    memory_share = clocks.memory_hz / tops.memory_hz
    preprocess_s = demand.preprocess_cycles / clocks.cpu_hz
    handoff_s = demand.handoff_cycles / clocks.cpu_hz

    def interval_s(burst_s: Array) -> Array:
        stage_s = handoff_s + burst_s
        if waited_s > 0:
            return preprocess_s + stage_s
        return np.maximum(preprocess_s, stage_s)

    climb = settle(
        simulation.governor,
        clocks.gpu_min_hz,
        clocks.gpu_max_hz,
        lambda clock_hz: demand.burst_s(clock_hz, memory_share, clocks.cpu_hz),
        lambda burst_s: waited_s + interval_s(burst_s) - burst_s,
    )
    busy_s = climb.burst_s
    whole_s = interval_s(climb.burst_s)
    dynamic_j = _gpu_j(simulation, tops, demand, clocks, climb, whole_s)
    dynamic_j += _memory_j(simulation, tops, demand, clocks, whole_s)
    dynamic_j += core_w(simulation.cpu, clocks.cpu_hz) * (preprocess_s + handoff_s + simulation.cpu.wait * busy_s)
    return QueryCycle(preprocess_s + handoff_s + busy_s, whole_s, dynamic_j, climb.mean_hz)


def _gpu_j(
    simulation: Simulation, tops: TopClocks, demand: Demand, clocks: Clocks, climb: Climb, whole_s: Array
) -> Array:
    useful = np.minimum(1.0, demand.useful_share * demand.compute_cycles / climb.mean_hz / climb.burst_s)
    busy_w = gpu_busy_w(simulation.gpu, climb.samples_hz / tops.gpu_hz, useful).mean(axis=0)
    idle_w = gpu_idle_w(simulation.gpu, clocks.gpu_min_hz / tops.gpu_hz)
    return np.asarray(climb.burst_s * busy_w + (whole_s - climb.burst_s) * idle_w)


def _memory_j(simulation: Simulation, tops: TopClocks, demand: Demand, clocks: Clocks, whole_s: Array) -> Array:
    clocked_w = memory_w(simulation.memory, clocks.memory_hz / tops.memory_hz)
    return whole_s * clocked_w + demand.traffic_bytes * simulation.memory.energy_j_per_byte


def idle_w(simulation: Simulation, tops: TopClocks, clocks: Clocks) -> Array:
    """Return what a board draws besides `static_w` while nothing is served, in watts."""
    gpu_w = gpu_idle_w(simulation.gpu, clocks.gpu_min_hz / tops.gpu_hz)
    return gpu_w + memory_w(simulation.memory, clocks.memory_hz / tops.memory_hz)


def capped(
    simulation: Simulation, tops: TopClocks, demand: Demand, clocks: Clocks, waited_s: float, cap_w: Array
) -> QueryCycle:
    """Return the cycle at the highest GPU clock up to the one asked for whose mean power stays within a cap.

    Power counts leakage at the temperature the cap settles at. If no clock is low enough, the lowest is taken: a tenth
    of the top clock.

    Args:
        simulation: The board's coefficients.
        tops: Its top clocks.
        demand: What the query asks.
        clocks: What the domains are set to.
        waited_s: As for `run`.
        cap_w: The cap in watts, shape (points,).
    """
    most_w = cap_w - static_w(simulation.thermal, capped_c(simulation.thermal, cap_w))

    def at(gpu_hz: Array) -> QueryCycle:
        low_hz = np.minimum(clocks.gpu_min_hz, gpu_hz)
        return query_cycle(simulation, tops, demand, Clocks(low_hz, gpu_hz, clocks.memory_hz, clocks.cpu_hz), waited_s)

    cycle = at(clocks.gpu_max_hz)
    within = cycle.dynamic_w <= most_w
    if np.all(within):
        return cycle
    low_hz = np.minimum(tops.gpu_hz / 10, clocks.gpu_max_hz)
    high_hz = clocks.gpu_max_hz
    for _ in range(_HALVINGS):
        middle_hz = (low_hz + high_hz) / 2
        below = at(middle_hz).dynamic_w <= most_w
        low_hz = np.where(below, middle_hz, low_hz)
        high_hz = np.where(below, high_hz, middle_hz)
    return at(np.where(within, clocks.gpu_max_hz, low_hz))


# Noise of measurements: lognormal, with stragglers that come in clusters.

_BLOCK = 256
_ENTER = 0.008
_STAY = 0.6
"""Chance that a query straggles after one that did not, and after one that did.

A miss follows a miss with up to 74 % on Orin at fixed clocks, arXiv 2606.16106; these values are assumed.
"""
_DELAY_LEAST = 6.0
_DELAY_MEAN = 4.0
"""A straggler takes longer by this many times the noise at least, and by an exponential of this mean more; assumed."""
_WINDOW_TIME = 0.5
"""Spread of a window's time over that of its power; assumed."""


class Noise:
    """One stream of noise: the factors of a window and of its queries, a function of seed and number only.

    Args:
        level: Standard deviation of the log of a query's time and of a window's power; 0 is silence.
        seed: Of all streams.
        number: Which stream.
    """

    def __init__(self, level: float, seed: int, number: int) -> None:
        self._level = level
        self._windows = np.random.default_rng([seed, number, 0])
        self._queries = np.random.default_rng([seed, number, 1])
        self._straggles = False

    def window(self) -> tuple[float, float]:
        """Return the factors on time and on power of the next window; both have mean 1."""
        time, power = self._windows.standard_normal(2).tolist()
        return _lognormal(time, self._level * _WINDOW_TIME), _lognormal(power, self._level)

    def queries(self) -> Iterator[float]:
        """Yield the factor on the time of one query after another."""
        while True:
            yield from self._block(_BLOCK).tolist()

    def _block(self, size: int) -> NDArray[np.float64]:
        jitter = np.exp(self._level * self._queries.standard_normal(size))
        chance = self._queries.random(size)
        delay = _DELAY_LEAST + _DELAY_MEAN * self._queries.standard_exponential(size)
        return np.asarray(jitter * (1.0 + self._level * delay * self._stragglers(chance)), dtype=np.float64)

    def _stragglers(self, chance: NDArray[np.float64]) -> NDArray[np.bool_]:
        found = np.zeros(len(chance), dtype=bool)
        for i, value in enumerate(chance.tolist()):
            self._straggles = value < (_STAY if self._straggles else _ENTER)
            found[i] = self._straggles
        return found


def _lognormal(normal: float, spread: float) -> float:
    return math.exp(spread * normal - spread * spread / 2)


def typical(level: float) -> NDArray[np.float64]:
    """Return a large sample of query factors at a noise level, from which statistics of the stream follow."""
    if level:
        return Noise(level, 0, 0)._block(50_000)
    return np.ones(1)
