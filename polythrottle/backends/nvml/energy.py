"""Joules of a GPU: from the driver's energy counter, or integrated from its power readings.

On a superchip the counter may be that of the whole module, as on GH200 (ml-energy/zeus pull request 172), and NVML does
not say so. Where power can be read of the module, the counter is held against both.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from enum import Enum
from statistics import median
from typing import Protocol

from polythrottle.backends.nvml.gpu import WIDE_BLANK, Gpu
from polythrottle.backends.power_integrator import PowerIntegrator, PowerReading
from polythrottle.domain.backports import pairwise
from polythrottle.domain.clock import Clock
from polythrottle.domain.errors import DeviceError, KnobRejected

ENERGY_FIELD = 83
AVERAGE_FIELD = 185
INSTANT_FIELD = 186
SCOPES = {"gpu": 0, "module": 1}
"""Scopes of power readings: the GPU with its memory, or on a Grace superchip the whole module, processor included."""

_PATIENCE_S = 1.0
_LOOK_S = 0.001
_STEPS = 12
_COMPARED_S = 1.0
_PAUSE_S = 0.01
_APART = 1.1
_NEAR = 1.3
"""GPU and module must draw so differently to be told apart, and a counter match one of them so closely."""


class CounterScope(Enum):
    """What an energy counter covers."""

    GPU = "the GPU with its memory"
    MODULE = "the whole module"
    UNTOLD = "one of the two, and readings do not tell which"


class EnergySource(Protocol):
    """A running total of joules, and what it is made of."""

    made_of: str

    def total_j(self) -> float:
        """Return the joules since an arbitrary start; never falls."""

    def look(self) -> None:
        """Take a sample, where the total is made of samples."""


class EnergyCounter:
    """The driver's energy counter.

    Args:
        read: Returns mJ since the driver was loaded.
        made_of: Which call that is.
        whose: What it covers.
    """

    def __init__(self, read: Callable[[], float], made_of: str, whose: CounterScope = CounterScope.GPU) -> None:
        self._read = read
        self.made_of = made_of
        self.whose = whose
        self._last_mj = 0.0

    def total_j(self) -> float:
        """Return the joules since the driver was loaded.

        Raises:
            DeviceError: If the driver has been loaded anew since, or is gone.
        """
        now_mj = self._read()
        if now_mj < self._last_mj:
            raise DeviceError("the GPU's energy counter fell back: its driver was loaded anew or the GPU was reset")
        self._last_mj = now_mj
        return now_mj * 1e-3

    def look(self) -> None:
        """Do nothing: the driver counts."""

    def step_s(self, clock: Clock) -> float | None:
        """Return how often the counter moves, in seconds: the median of up to a dozen steps seen within a second.

        Returns:
            None if it moved less than twice in that time.
        """
        moved: list[float] = []
        last_mj = self._read()
        end_s = clock.now() + _PATIENCE_S
        while clock.now() < end_s and len(moved) <= _STEPS:
            clock.sleep(_LOOK_S)
            now_mj = self._read()
            if now_mj != last_mj:
                moved.append(clock.now())
                last_mj = now_mj
        if len(moved) > 1:
            return median(late - early for early, late in pairwise(moved))
        return None


def energy_source(gpu: Gpu, clock: Clock, scope: str = "gpu") -> EnergySource | str:
    """Return where the joules of a GPU come from, the best that answers; or why there are none.

    The counter is the best where it covers what is asked for. Where the GPU's own power is not told, a module's counter
    stands in for it, and says whose it is.

    Args:
        gpu: Whose.
        clock: For integration, and for comparing on a superchip, which takes about a second.
        scope: One of `SCOPES`.
    """
    whys: list[str] = []
    counter = _first_counter(gpu, whys)
    power = _answering(_powers(gpu, scope), whys)
    if counter is not None:
        counter.whose = _whose(gpu, counter, clock)
        wanted = {"gpu": (CounterScope.GPU, CounterScope.UNTOLD), "module": (CounterScope.MODULE,)}[scope]
        if counter.whose in wanted or (scope == "gpu" and _scoped(gpu, scope) is None):
            return counter
    if power is not None:
        return PowerIntegrator(*power, clock)
    return "; ".join(whys)


def covers(source: EnergySource, scope: str) -> CounterScope:
    """Return what a running total covers.

    Args:
        source: As `energy_source` found it.
        scope: What it was asked for.
    """
    if isinstance(source, EnergyCounter):
        return source.whose
    if scope == "module":
        return CounterScope.MODULE
    return CounterScope.GPU


def _first_counter(gpu: Gpu, whys: list[str]) -> EnergyCounter | None:
    for attempt in (_counter, _counter_field):
        try:
            return attempt(gpu)
        except KnobRejected as err:
            whys.append(str(err))
    return None


def _answering(
    ways: list[tuple[Callable[[], PowerReading], str]], whys: list[str]
) -> tuple[Callable[[], PowerReading], str] | None:
    """Return the first way to read power that answers, with what it is; notes why others do not."""
    for read, made_of in ways:
        try:
            read()
            return read, made_of
        except KnobRejected as err:
            whys.append(str(err))
    return None


def _scoped(gpu: Gpu, scope: str) -> Callable[[], PowerReading] | None:
    """Return the way to read power by a field of a scope; None if none answers."""
    found = _answering(_fields(gpu, scope), [])
    if found is None:
        return None
    return found[0]


def _whose(gpu: Gpu, counter: EnergyCounter, clock: Clock) -> CounterScope:
    """Return what a counter covers: where a module's power is told too, what its joules agree with.

    Both powers are sampled between two moves of the counter, half a second apart or more.
    """
    module = _scoped(gpu, "module")
    own = _scoped(gpu, "gpu")
    if module is None or own is None:
        if module is None:
            return CounterScope.GPU
        return CounterScope.MODULE
    moves: list[tuple[float, float]] = []
    watts: list[tuple[float, float]] = []
    last_j = counter.total_j()
    end_s = clock.now() + 2 * _COMPARED_S
    while clock.now() < end_s and not (moves and moves[-1][0] - moves[0][0] >= _COMPARED_S / 2):
        clock.sleep(_PAUSE_S)
        if moves:
            watts.append((own().watts, module().watts))
        if (now_j := counter.total_j()) != last_j:
            moves.append((clock.now(), now_j))
            last_j = now_j
    if len(moves) < 2:
        return CounterScope.UNTOLD
    counted_w = (moves[-1][1] - moves[0][1]) / (moves[-1][0] - moves[0][0])
    return _matching(counted_w, *(sum(each) / len(watts) for each in zip(*watts)))


def _matching(counted_w: float, own_w: float, module_w: float) -> CounterScope:
    if min(counted_w, own_w, module_w) <= 0 or module_w < _APART * own_w:
        return CounterScope.UNTOLD
    away = {
        CounterScope.GPU: abs(math.log(counted_w / own_w)),
        CounterScope.MODULE: abs(math.log(counted_w / module_w)),
    }
    nearest = min(away, key=lambda each: away[each])
    if away[nearest] < math.log(_NEAR):
        return nearest
    return CounterScope.UNTOLD


def _counter(gpu: Gpu) -> EnergyCounter:
    def read() -> float:
        return gpu.number("nvmlDeviceGetTotalEnergyConsumption", blank=WIDE_BLANK)

    read()
    return EnergyCounter(read, "the driver's energy counter")


def _counter_field(gpu: Gpu) -> EnergyCounter:
    def read() -> float:
        return gpu.field(ENERGY_FIELD, blank=WIDE_BLANK).value

    read()
    return EnergyCounter(read, f"the driver's energy counter, field {ENERGY_FIELD}")


def _fields(gpu: Gpu, scope: str) -> list[tuple[Callable[[], PowerReading], str]]:
    """Return the ways to read power by a field, the quickest first, with what each is."""
    number = SCOPES[scope]

    def field(which: int) -> PowerReading:
        found = gpu.field(which, number)
        return PowerReading(found.value * 1e-3, found.timestamp_us)

    return [
        (lambda: field(INSTANT_FIELD), "power readings of the moment"),
        (lambda: field(AVERAGE_FIELD), "power readings that average over a second"),
    ]


def _powers(gpu: Gpu, scope: str) -> list[tuple[Callable[[], PowerReading], str]]:
    """Return the ways to read power, the quickest first, with what each is."""
    ways = _fields(gpu, scope)
    if scope == "gpu":
        over = {True: "average over a second", False: "are of the moment", None: "may average over a second"}
        made_of = f"power readings that {over[gpu.averages_power]}"
        ways.append((lambda: PowerReading(gpu.number("nvmlDeviceGetPowerUsage") * 1e-3), made_of))
    return ways


def module_w(gpu: Gpu) -> float | None:
    """Return the power of the module around the GPU in watts, as on Grace Hopper; None where there is none."""
    try:
        return gpu.field(INSTANT_FIELD, SCOPES["module"]).value * 1e-3
    except KnobRejected:
        return None
