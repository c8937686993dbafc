"""Joules of a GPU, and what else works on it and what does not, found by reading alone.

Joules come from the driver's energy counter, or are integrated from its power readings. On a superchip the counter may
be that of the whole module, as on GH200 (ml-energy/zeus pull request 172), and NVML does not say so. Where power can be
read of the module, the counter is held against both. An inspection tells the rights it takes, and the power of a Grace
superchip beside the GPU.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from statistics import median
from typing import Any, Protocol

from polythrottle.actuation.drivers.controls import text_of
from polythrottle.actuation.drivers.nvml import PRIVILEGE, NotOffered
from polythrottle.backends.nvml.gpu import BLACKWELL, POWER_CAP, WIDE_BLANK, Gpu, Slowdowns, faults
from polythrottle.backends.nvml.knobs import MEM_KNOB, POWER_KNOB, Dial, Dials
from polythrottle.backends.power import PowerIntegrator, PowerReading, channels
from polythrottle.domain.backports import pairwise
from polythrottle.domain.clock import Clock
from polythrottle.domain.errors import DeviceError, KnobRejected, TrialError
from polythrottle.domain.ports import Finding
from polythrottle.domain.units import show_level

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
    # By ratio, so that counting too much and too little weigh alike.
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

    # Whether the driver has the counter shows only by asking it.
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


# Whether this process may set anything on a GPU, judged without trying.

_SYS_ADMIN = 21  # include/uapi/linux/capability.h


def may_set(status: Path = Path("/proc/self/status")) -> bool:
    """Return whether this process has CAP_SYS_ADMIN, which NVIDIA's driver asks for before it sets anything.

    In a user namespace of its own a process can have it and still be refused.

    Args:
        status: Where the kernel lists the capabilities of this process; if it does not, root is taken to have them all.
    """
    try:
        match = re.search(r"^CapEff:\s*([0-9a-fA-F]+)$", text_of(status), re.MULTILINE)
    except OSError:
        match = None
    if match:
        return bool(int(match[1], 16) >> _SYS_ADMIN & 1)
    return os.geteuid() == 0


# What works on a GPU and what does not, found by reading alone.

_HELD_DOWN = (
    "on a GeForce of this generation a locked memory clock was seen to hold other clocks down too, and performance by "
    "up to 32 % (NVIDIA/open-gpu-kernel-modules#1266); what is measured includes that"
)
_PERSISTENCE = "systemctl enable --now nvidia-persistenced, or nvidia-smi -pm 1"


def identity(gpu: Gpu) -> Mapping[str, str]:
    """Return what identifies a GPU and its firmware; what the driver does not say is left out.

    Raises:
        DeviceError: If the GPU is gone.
    """
    with gpu.library as library:
        asked: dict[str, Callable[[], Any]] = {
            "name": lambda: gpu.ask("nvmlDeviceGetName"),
            "uuid": lambda: gpu.uuid,
            "pci": lambda: _text(gpu.ask("nvmlDeviceGetPciInfo").busId),
            "vbios": lambda: gpu.ask("nvmlDeviceGetVbiosVersion"),
            "architecture": lambda: gpu.architecture,
            "driver": lambda: library.call("nvmlSystemGetDriverVersion"),
            "nvml": lambda: library.call("nvmlSystemGetNVMLVersion"),
        }
        found = {name: _answer(ask) for name, ask in asked.items()}
    return {name: str(value) for name, value in found.items() if value is not None}


def _answer(ask: Callable[[], Any]) -> Any:
    try:
        return ask()
    except NotOffered:
        return None


def _text(value: Any) -> str:
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    return str(value)


def _superchip() -> Iterator[Finding]:
    """Yield what the power meters around the GPU of a Grace superchip tell; they are no part of the GPU's joules."""
    for each in channels():
        mean = f", mean over {each.averaged_s * 1000:g} ms" if each.averaged_s else ""
        told = f"{each.power_w:.1f} W of {each.covers}{mean}, by {each.file}; not counted in the GPU's joules"
        yield Finding(each.label, True, told, f"to measure by it: ?meter=grace:{each.name}")


@dataclass(frozen=True)
class Inspection:
    """One look at a GPU; NVML is open meanwhile.

    Args:
        gpu: Whose.
        dials: Its knobs.
        energy: Where its joules come from, or why they are unknown.
        slowdowns: Its event reasons.
        privileged: Whether this process may set anything.
    """

    gpu: Gpu
    dials: Dials
    energy: EnergySource | str
    slowdowns: Slowdowns
    privileged: bool

    def findings(self, clock: Clock) -> tuple[Finding, ...]:
        """Return everything found, knobs first; measuring the energy counter's step takes up to a second."""
        knobs = tuple(self._knob(dial) for dial in self.dials.knobs.values())
        beside = (*self._module(), *_superchip(), *self._enforced())
        return (self._rights(), *knobs, self._energy(clock), *beside, *self._state())

    def _rights(self) -> Finding:
        if self.privileged:
            return Finding("rights to set", True, "this process has CAP_SYS_ADMIN, which the driver asks for")
        remedy = f"{PRIVILEGE}; tune --knobs none finds the batch size without"
        return Finding("rights to set", False, "this process lacks CAP_SYS_ADMIN, which the driver asks for", remedy)

    def _knob(self, dial: Dial) -> Finding:
        if dial.off:
            return Finding(dial.name, False, _line(dial.off))
        levels = list(dial.texts)
        if len(levels) == 1:
            return Finding(dial.name, False, f"there is only {show_level(dial.name, levels[0])}, so nothing to choose")
        span = f"{len(levels)} levels, {show_level(dial.name, levels[0])} to {show_level(dial.name, levels[-1])}"
        if not self.privileged:
            return Finding(dial.name, False, f"{span}, but it takes more rights to set it", PRIVILEGE)
        beside = f"; {_HELD_DOWN}" if dial.name == MEM_KNOB and self._holds_others_down else ""
        return Finding(dial.name, True, f"{span}; whether the driver takes them shows when one is set{beside}")

    @property
    def _holds_others_down(self) -> bool:
        named = str(self.gpu.maybe("nvmlDeviceGetName"))
        return "GeForce" in named and (self.gpu.architecture or 0) >= BLACKWELL

    def _energy(self, clock: Clock) -> Finding:
        if isinstance(self.energy, str):
            return Finding("energy", False, _line(f"neither energy nor power is reported: {self.energy}"))
        if not isinstance(self.energy, EnergyCounter):
            return Finding("energy", True, f"no energy counter; integrated from {self.energy.made_of}")
        step_s = self.energy.step_s(clock)
        if step_s is None:
            pace = "did not move twice in a second"
        else:
            pace = f"moves every {step_s * 1000:.3g} ms"
        if step_s is None:
            longer = ""
        else:
            longer = f"windows of {max(0.5, 100 * step_s):.2g} s or more see a hundred steps"
        return Finding("energy", step_s is not None, f"{self.energy.made_of} {pace}", longer)

    def _module(self) -> tuple[Finding, ...]:
        watts = module_w(self.gpu)
        if watts is None:
            return ()
        drawn = f"the module around the GPU draws {watts:.0f} W"
        if isinstance(self.energy, EnergyCounter) and self.energy.whose is not CounterScope.GPU:
            return (Finding("power scope", True, f"{drawn}; the energy counter covers {self.energy.whose.value}"),)
        remedy = "?scope=module counts the whole module"
        return (Finding("power scope", True, f"{drawn}; only the GPU's part is counted", remedy),)

    def _enforced(self) -> tuple[Finding, ...]:
        if self.dials.knobs[POWER_KNOB].off:
            return ()
        limit_mw = self.gpu.maybe("nvmlDeviceGetPowerManagementLimit")
        enforced_mw = self.gpu.maybe("nvmlDeviceGetEnforcedPowerLimit")
        if limit_mw is None or enforced_mw is None or enforced_mw >= limit_mw:
            return ()
        explanation = f"set to {limit_mw / 1000:g} W, but {enforced_mw / 1000:g} W are enforced from outside the driver"
        return (Finding("power limit", False, explanation, "see the baseboard controller or the rack's power manager"),)

    def _state(self) -> tuple[Finding, ...]:
        return tuple(each for each in (self._persistence(), self._slowdown(), self._company()) if each is not None)

    def _persistence(self) -> Finding | None:
        mode = self.gpu.maybe("nvmlDeviceGetPersistenceMode")
        if mode is None:
            return None
        if mode:
            return Finding("persistence mode", True, "on: settings stay when the last client leaves")
        explanation = "off: settings may go when the last client leaves, so they hold only while polythrottle runs"
        return Finding("persistence mode", False, explanation, f"to keep them longer: {_PERSISTENCE}")

    def _slowdown(self) -> Finding:
        reasons = self.slowdowns.now()
        if reasons is None:
            return Finding("slowdown", None, "the driver does not say whether the GPU is throttled")
        if causes := faults(reasons):
            remedy = "cool it, or see to its power supply, before anything is measured"
            return Finding("slowdown", False, f"the GPU is throttled now: {causes}", remedy)
        capped = ", held by its power limit" if reasons & POWER_CAP else ""
        return Finding("slowdown", True, f"event reasons are readable; nothing spoils a window now{capped}")

    def _company(self) -> Finding | None:
        try:
            others = self.gpu.maybe("nvmlDeviceGetComputeRunningProcesses")
        except TrialError:
            others = None
        if others is None:
            return None
        if not others:
            return Finding("other work", True, "no process computes on it now")
        return Finding("other work", None, f"{len(others)} processes compute on it now; their joules count too")


def _line(text: str) -> str:
    return " ".join(text.split())
