"""One query on one board at several points: how long it takes, what it draws, and the clock a cap leaves it."""

from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from polythrottle.backends.simulated.governor import Climb, settle
from polythrottle.backends.simulated.power import Array, core_w, gpu_busy_w, gpu_idle_w, memory_w, static_w
from polythrottle.backends.simulated.thermal import capped_c
from polythrottle.backends.simulated.timing import Clocks, Demand
from polythrottle.catalog.simulation import Simulation

_HALVINGS = 30


@dataclass(frozen=True)
class Cycle:
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

    def where(self, mask: NDArray[np.bool_], other: "Cycle") -> "Cycle":
        """Return this cycle at the points of a mask, and another elsewhere."""
        pairs = ((getattr(self, field.name), getattr(other, field.name)) for field in fields(self))
        return Cycle(*(np.where(mask, mine, theirs) for mine, theirs in pairs))


@dataclass(frozen=True)
class Tops:
    """The top clock of each domain, in Hz: what shares are shares of."""

    gpu_hz: float
    memory_hz: float


def run(simulation: Simulation, tops: Tops, demand: Demand, clocks: Clocks, waited_s: float) -> Cycle:
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
        return preprocess_s + stage_s if waited_s > 0 else np.maximum(preprocess_s, stage_s)

    climb = settle(
        simulation.governor,
        clocks.gpu_min_hz,
        clocks.gpu_max_hz,
        lambda clock_hz: demand.burst_s(clock_hz, memory_share, clocks.cpu_hz),
        lambda burst_s: waited_s + interval_s(burst_s) - burst_s,
    )
    busy_s, whole_s = climb.burst_s, interval_s(climb.burst_s)
    dynamic_j = _gpu_j(simulation, tops, demand, clocks, climb, whole_s)
    dynamic_j += _memory_j(simulation, tops, demand, clocks, whole_s)
    dynamic_j += core_w(simulation.cpu, clocks.cpu_hz) * (preprocess_s + handoff_s + simulation.cpu.wait * busy_s)
    return Cycle(preprocess_s + handoff_s + busy_s, whole_s, dynamic_j, climb.mean_hz)


def _gpu_j(simulation: Simulation, tops: Tops, demand: Demand, clocks: Clocks, climb: Climb, whole_s: Array) -> Array:
    useful = np.minimum(1.0, demand.useful_share * demand.compute_cycles / climb.mean_hz / climb.burst_s)
    busy_w = gpu_busy_w(simulation.gpu, climb.samples_hz / tops.gpu_hz, useful).mean(axis=0)
    idle_w = gpu_idle_w(simulation.gpu, clocks.gpu_min_hz / tops.gpu_hz)
    return np.asarray(climb.burst_s * busy_w + (whole_s - climb.burst_s) * idle_w)


def _memory_j(simulation: Simulation, tops: Tops, demand: Demand, clocks: Clocks, whole_s: Array) -> Array:
    clocked_w = memory_w(simulation.memory, clocks.memory_hz / tops.memory_hz)
    return whole_s * clocked_w + demand.traffic_bytes * simulation.memory.energy_j_per_byte


def idle_w(simulation: Simulation, tops: Tops, clocks: Clocks) -> Array:
    """Return what a board draws besides `static_w` while nothing is served, in watts."""
    gpu_w = gpu_idle_w(simulation.gpu, clocks.gpu_min_hz / tops.gpu_hz)
    return gpu_w + memory_w(simulation.memory, clocks.memory_hz / tops.memory_hz)


def capped(simulation: Simulation, tops: Tops, demand: Demand, clocks: Clocks, waited_s: float, cap_w: Array) -> Cycle:
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

    def at(gpu_hz: Array) -> Cycle:
        low_hz = np.minimum(clocks.gpu_min_hz, gpu_hz)
        return run(simulation, tops, demand, Clocks(low_hz, gpu_hz, clocks.memory_hz, clocks.cpu_hz), waited_s)

    cycle = at(clocks.gpu_max_hz)
    within = cycle.dynamic_w <= most_w
    if np.all(within):
        return cycle
    low_hz, high_hz = np.minimum(tops.gpu_hz / 10, clocks.gpu_max_hz), clocks.gpu_max_hz
    for _ in range(_HALVINGS):
        middle_hz = (low_hz + high_hz) / 2
        below = at(middle_hz).dynamic_w <= most_w
        low_hz, high_hz = np.where(below, middle_hz, low_hz), np.where(below, high_hz, middle_hz)
    return at(np.where(within, clocks.gpu_max_hz, low_hz))
