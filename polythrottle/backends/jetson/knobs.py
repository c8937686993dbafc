"""All knobs of a board together: the space they span, and how a point of it is applied.

Order of writing: power mode, cores that come online, memory, GPU, processors, cores that go offline. A knob that was
neither searched nor named keeps what it was found with and is never written; once a power mode other than that found
is applied, the knobs it rewrites follow it unless they are set too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from pathlib import Path

from polythrottle.actuation.actuator import Actuator
from polythrottle.actuation.limits import Limits
from polythrottle.backends.cpu.cpufreq import MAX as CPU_MAX
from polythrottle.backends.jetson.clocks import (
    CORES,
    GOVERNOR_KNOBS,
    GPU_MAX,
    GPU_MIN,
    GPU_NAMES,
    Clusters,
    Cores,
    GpuClock,
    GpuGovernor,
)
from polythrottle.backends.jetson.memory_clock import NAME as MEMORY
from polythrottle.backends.jetson.memory_clock import MemoryClock
from polythrottle.backends.jetson.power_modes import NAME as MODE
from polythrottle.backends.jetson.power_modes import Mode, presets
from polythrottle.backends.probe import Capability, Tree, thinned
from polythrottle.catalog import Board
from polythrottle.domain.clock import Clock
from polythrottle.domain.errors import DeviceError, InvalidInput, KnobRejected
from polythrottle.domain.ports import Finding, Offer
from polythrottle.domain.space import Knob, Level, OperatingPoint, SearchSpace
from polythrottle.domain.units import no_level, show_level, show_name, unknown_knob

_USUAL = (*GPU_NAMES, MEMORY)
_NEVER_UNASKED = (CORES, MODE)
_SETTLE_S = 1.0
_LOOK_S = 0.005
_OWNERS = {
    **{"min_freq": GPU_MIN, "max_freq": GPU_MAX, "online": CORES},
    **{"scaling_min_freq": CPU_MAX, "scaling_max_freq": CPU_MAX},
    **GOVERNOR_KNOBS,
}


class Knobs:
    """The knobs of a board.

    Args:
        tree: The board's files.
        actuator: The only writer.
        limits: The administrator's.
        entry: The board's entry in the catalogue, which says what is searched by default; probing decides without one.
        searched: Which knobs to search instead.

    Raises:
        UnknownName: If a Jetson has no knob of a name in ``searched``.
        InvalidInput: If power mode and cores are both to be searched, of which one sets the other.
        DeviceError: If a knob in ``searched`` is off on this board.
    """

    def __init__(
        self, tree: Tree, actuator: Actuator, limits: Limits, entry: Board | None, searched: Sequence[str] | None
    ) -> None:
        self._gpu = GpuClock(tree, actuator, limits)
        self._governor = GpuGovernor(tree, actuator, limits, self._gpu.folder)
        self._memory = MemoryClock(tree, actuator, limits)
        self._clusters = Clusters(tree, actuator, limits)
        self._cores = Cores(tree, actuator, limits)
        self._mode = Mode(tree, actuator, self._gpu.folder)
        self._tables: Mapping[str, Sequence[int]] = {
            **dict.fromkeys(GPU_NAMES, self._gpu.table),
            MEMORY: self._memory.table,
            CPU_MAX: self._clusters.table,
            CORES: self._cores.table,
        }
        self._highest = {each.name: each.levels[-1] for each in self.all if each.works}
        self._mode.probe(self._tables, self._highest)
        self._known = {each.name: each for each in self.all if each.works}
        self.presets, self._source = presets(self._mode, entry, self._tables, self._known)
        self._searched = self._chosen(entry, searched)
        self._touched = set(self._searched)
        self._held: tuple[Callable[[], str | None], ...] = ()

    @property
    def all(self) -> tuple[Capability, ...]:
        """Every knob a Jetson can have, as it was found here."""
        return (
            *self._gpu.capabilities,
            self._memory.capability,
            self._clusters.capability,
            self._cores.capability,
            self._mode.capability,
            *self._governor.capabilities,
        )

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Every knob in one line, and where the presets come from."""
        names = ", ".join(self.presets) or "none within the limits found"
        governor = self._gpu.governor
        named = ", ".join(show_name(each.name) for each in self._governor.capabilities if each.works)
        unless = f" unless named as knobs: {named}" if named else ""
        told = f"{governor}: it chooses between the limits that are set; its parameters are left as found{unless}"
        return (
            *(each.finding for each in self.all),
            *([Finding("GPU governor", True, told)] if governor else []),
            *self._mode.range_findings(self._highest),
            Finding("presets", bool(self.presets), f"{names}; {self._source}"),
        )

    @property
    def files(self) -> tuple[Path, ...]:
        """Every file a knob reads or may write."""
        return tuple(
            file for part in (self._gpu, self._memory, self._clusters, self._cores, self._mode) for file in part.files
        )

    @property
    def clocks_hz(self) -> Mapping[str, int]:
        """What runs now, by domain; what cannot be told is left out."""
        clocks = {"gpu": self._gpu.clock_hz, "mem": self._memory.clock_hz, "cpu": self._clusters.clock_hz}
        return {name: clock for name, clock in clocks.items() if clock}

    def held_back(self, now_s: float) -> str:
        """Return which processors run far below the clock their governor has asked for, as told; empty if none do."""
        return self._clusters.held_back(now_s)

    def awake(self) -> AbstractContextManager[None]:
        """Return what keeps a GPU that sleeps awake for as long as it lasts."""
        return self._gpu.awake()

    def _chosen(self, entry: Board | None, searched: Sequence[str] | None) -> tuple[str, ...]:
        if searched is None:
            usual = _USUAL if entry is None else tuple(knob.name for knob in entry.knobs if knob.search)
            return tuple(name for name in self._known if name in usual and name not in _NEVER_UNASKED)
        capabilities = {each.name: each for each in self.all}
        for name in searched:
            if name not in capabilities:
                raise unknown_knob(name, capabilities)
            if name not in self._known:
                raise DeviceError(f"{show_name(name)} is off on this board: {capabilities[name].reason}")
        if set(_NEVER_UNASKED) <= set(searched):
            raise InvalidInput("a power mode sets how many cores are online; search power_mode or cpu_cores, not both")
        return tuple(dict.fromkeys(searched))

    @property
    def offers(self) -> tuple[Offer, ...]:
        """Every knob that works."""
        known = self._known.values()
        return tuple(Offer(_knob(each), each.default, each.name in self._searched) for each in known)

    @property
    def default(self) -> OperatingPoint:
        """The board as found, over the knobs that are searched."""
        return OperatingPoint({name: self._known[name].default for name in self._searched})

    @cached_property
    def space(self) -> SearchSpace:
        """The points over the knobs that are searched, of a long table a part of its levels (`thinned`)."""
        if not self._searched:
            return SearchSpace.unit()
        knobs = [Knob(name, thinned(self._known[name].levels, self._kept(name))) for name in self._searched]
        return SearchSpace.grid(knobs, self.default, lambda point: self._conflict(point) is None)

    def _kept(self, name: str) -> set[Level]:
        """Return the levels of a knob that are searched whatever its table: the default's and the presets'."""
        return {self._known[name].default, *(point[name] for point in self.presets.values() if name in point)}

    def _refusal(self, point: Mapping[str, Level]) -> str | None:
        """Return why the board would refuse a point, or None."""
        for name, level in point.items():
            if name not in self._known:
                return f"{name} is no knob of this board; it has {', '.join(self._known) or 'none'}"
            if level not in self._known[name].levels:
                return no_level(name, level, self._known[name].levels)
        return self._conflict(point)

    def _conflict(self, point: Mapping[str, Level]) -> str | None:
        """Return which levels of a point do not go together, or None."""
        if not point.keys().isdisjoint(GPU_NAMES):
            low, high = self._both(point.get(GPU_MIN), point.get(GPU_MAX))
            if low > high:
                above = f"{show_name(GPU_MAX)} {show_level(GPU_MAX, high)}"
                return f"{show_name(GPU_MIN)} {show_level(GPU_MIN, low)} lies above {above}"
        if self._switched(point) and not self._mode.allows(str(point[MODE]), point):
            return f"power mode {point[MODE]} does not allow {dict(point)}"
        return None

    def _whole(self, point: Mapping[str, Level]) -> dict[str, Level]:
        """Return a point over all knobs that are to be written: those never touched stay out of it."""
        if self._switched(point):
            followers = set(self._tables)
        else:
            followers = set()
        kept = [name for name in self._known if name not in point and name not in followers]
        return {**{name: self._known[name].default for name in kept}, **point}

    def _switched(self, point: Mapping[str, Level]) -> bool:
        return MODE in point and point[MODE] != self._known[MODE].default

    def apply(self, point: Mapping[str, Level], clock: Clock) -> None:
        """Set every knob of a point, those touched before to their default, and wait until the clocks agree.

        Raises:
            KnobRejected: If the board refuses a level, does not keep it, or does not settle.
            DeviceError: If it cannot be steered.
        """
        if problem := self._refusal(point):
            raise KnobRejected(problem)
        self._touched |= self._involved(point)
        # While the clocks are moved, nothing is expected of them.
        self._held = ()
        whole = {name: level for name, level in self._whole(point).items() if name in self._touched}
        if MODE in whole:
            self._mode.apply(str(whole[MODE]))
        count = whole.get(CORES)
        if count is not None:
            self._cores.start(int(count))
        self._governor.apply(whole)
        # A GPU that sleeps need not answer for its clock, and would never seem to settle.
        with self.awake():
            self._settle(self._set_clocks(whole, count), clock)
        if count is not None:
            self._cores.stop(int(count))
        self._held = self._overruns(whole, count)

    def overrun(self) -> str:
        """Return which clocks run above what was applied last, in words; empty if none does."""
        return "; ".join(said for look in self._held if (said := look()) is not None)

    def forget(self) -> None:
        """Expect nothing of the clocks any more."""
        self._held = ()

    def _overruns(self, whole: Mapping[str, Level], count: Level | None) -> tuple[Callable[[], str | None], ...]:
        """Return what tells whether a clock of a point that was applied runs above it."""
        looks: list[Callable[[], str | None]] = []
        if (rate := whole.get(MEMORY)) is not None:
            looks.append(lambda: self._memory.overrun(int(rate)))
        if not whole.keys().isdisjoint(GPU_NAMES):
            _, high_hz = self._both(whole.get(GPU_MIN), whole.get(GPU_MAX))
            looks.append(lambda: self._gpu.overrun(high_hz))
        if (limit := whole.get(CPU_MAX)) is not None:
            online = self._running(count)
            looks.append(lambda: self._clusters.unsettled(int(limit), online))
        return tuple(looks)

    def _running(self, count: Level | None) -> frozenset[int]:
        """Return the cores that are online at a level of theirs; those that are now if there is none."""
        if count is None:
            return self._cores.online()
        return self._cores.chosen(int(count))

    def _involved(self, point: Mapping[str, Level]) -> set[str]:
        """Return the knobs a point writes: the GPU's limits go together, and a power mode rewrites the others."""
        names = set(point)
        if names & set(GPU_NAMES):
            names |= set(GPU_NAMES)
        if self._switched(point):
            names |= set(self._tables) & set(self._known)
        return names

    def _set_clocks(self, whole: Mapping[str, Level], count: Level | None) -> list[Callable[[], str | None]]:
        """Write the clocks of a point and return what tells whether each has taken effect."""
        looks: list[Callable[[], str | None]] = []
        if (rate := whole.get(MEMORY)) is not None:
            self._memory.apply(int(rate))
            looks.append(lambda: self._memory.unsettled(int(rate)))
        low = whole.get(GPU_MIN)
        high = whole.get(GPU_MAX)
        if low is not None or high is not None:
            low_hz, high_hz = self._both(low, high)
            self._gpu.apply(low_hz, high_hz)
            looks.append(lambda: self._gpu.unsettled(low_hz, high_hz))
        if (limit := whole.get(CPU_MAX)) is not None:
            online = self._running(count)
            self._clusters.apply(int(limit), online)
            looks.append(lambda: self._clusters.unsettled(int(limit), online))
        return looks

    def _both(self, low: Level | None, high: Level | None) -> tuple[int, int]:
        """Return both limits of the GPU, that which is not set at its default."""
        lowest = self._known[GPU_MIN].default
        highest = self._known[GPU_MAX].default
        return int(lowest if low is None else low), int(highest if high is None else high)

    def _settle(self, looks: Sequence[Callable[[], str | None]], clock: Clock) -> None:
        """Wait until the clocks that run are those that were set, for at most a second."""
        until_s = clock.now() + _SETTLE_S
        while True:
            problem = next((said for look in looks if (said := look()) is not None), None)
            if problem is None:
                return
            if clock.now() >= until_s:
                raise KnobRejected(f"{problem}, {_SETTLE_S:g} s after it was set")
            clock.sleep(_LOOK_S)


def _knob(capability: Capability) -> Knob:
    return Knob(capability.name, capability.levels)


def knob_behind(key: str) -> str | None:
    """Return the knob that writes a control; None if it belongs to none, as what keeps a GPU awake."""
    if key.startswith("nvpmodel:"):
        return MODE
    name = key.rpartition("/")[2]
    if key.endswith("/power/control"):
        return None
    return _OWNERS.get(name, MEMORY)
