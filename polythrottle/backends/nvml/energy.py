"""Joules of a GPU: from the driver's energy counter, or integrated from its power readings."""

from collections.abc import Callable
from itertools import pairwise
from statistics import median
from typing import Protocol

from polythrottle.backends.nvml.gpu import WIDE_BLANK, Gpu
from polythrottle.clock import Clock
from polythrottle.errors import DeviceError, KnobRejected
from polythrottle.sensors.integration import Integrated, Power

ENERGY_FIELD, AVERAGE_FIELD, INSTANT_FIELD = 83, 185, 186
SCOPES = {"gpu": 0, "module": 1}
"""Scopes of power readings: the GPU with its memory, or on a Grace superchip the whole module, processor included."""

_PATIENCE_S, _LOOK_S, _STEPS = 1.0, 0.001, 12


class Source(Protocol):
    """A running total of joules, and what it is made of."""

    made_of: str

    def total_j(self) -> float:
        """Return the joules since an arbitrary start; never falls."""

    def look(self) -> None:
        """Take a sample, where the total is made of samples."""


class Counter:
    """The driver's energy counter.

    Args:
        read: Returns mJ since the driver was loaded.
        made_of: Which call that is.
    """

    def __init__(self, read: Callable[[], float], made_of: str) -> None:
        self._read, self.made_of = read, made_of
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
        last_mj, end_s = self._read(), clock.now() + _PATIENCE_S
        while clock.now() < end_s and len(moved) <= _STEPS:
            clock.sleep(_LOOK_S)
            now_mj = self._read()
            if now_mj != last_mj:
                moved.append(clock.now())
                last_mj = now_mj
        return median(late - early for early, late in pairwise(moved)) if len(moved) > 1 else None


def energy_source(gpu: Gpu, clock: Clock, scope: str = "gpu") -> Source | str:
    """Return where the joules of a GPU come from, the best that answers; or why there are none.

    Args:
        gpu: Whose.
        clock: For integration.
        scope: One of `SCOPES`; the counter is the GPU's own, so a module's joules are integrated.
    """
    whys = []
    for attempt in (_counter, _counter_field) if scope == "gpu" else ():
        try:
            return attempt(gpu)
        except KnobRejected as err:
            whys.append(str(err))
    for read, made_of in _powers(gpu, scope):
        try:
            read()
            return Integrated(read, made_of, clock)
        except KnobRejected as err:
            whys.append(str(err))
    return "; ".join(whys)


def _counter(gpu: Gpu) -> Counter:
    def read() -> float:
        return gpu.number("nvmlDeviceGetTotalEnergyConsumption", blank=WIDE_BLANK)

    read()
    return Counter(read, "the driver's energy counter")


def _counter_field(gpu: Gpu) -> Counter:
    def read() -> float:
        return gpu.field(ENERGY_FIELD, blank=WIDE_BLANK).value

    read()
    return Counter(read, f"the driver's energy counter, field {ENERGY_FIELD}")


def _powers(gpu: Gpu, scope: str) -> list[tuple[Callable[[], Power], str]]:
    """Return the ways to read power, the quickest first, with what each is."""
    number = SCOPES[scope]

    def field(which: int) -> Power:
        found = gpu.field(which, number)
        return Power(found.value * 1e-3, found.timestamp_us)

    ways: list[tuple[Callable[[], Power], str]] = [
        (lambda: field(INSTANT_FIELD), "power readings of the moment"),
        (lambda: field(AVERAGE_FIELD), "power readings that average over a second"),
    ]
    if scope == "gpu":
        over = {True: "average over a second", False: "are of the moment", None: "may average over a second"}
        made_of = f"power readings that {over[gpu.averages_power]}"
        ways.append((lambda: Power(gpu.number("nvmlDeviceGetPowerUsage") * 1e-3), made_of))
    return ways


def module_w(gpu: Gpu) -> float | None:
    """Return the power of the module around the GPU in watts, as on Grace Hopper; None where there is none."""
    try:
        return gpu.field(INSTANT_FIELD, SCOPES["module"]).value * 1e-3
    except KnobRejected:
        return None
