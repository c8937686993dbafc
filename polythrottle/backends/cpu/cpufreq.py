"""cpufreq: the clock limits of each policy as knobs that mean the same on unlike cores.

The energy-performance preference.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from polythrottle.actuation.actuator import Actuator
from polythrottle.actuation.drivers.controls import Control, Setting, span
from polythrottle.actuation.limits import Limits
from polythrottle.backends.probe import Capability, Tree, unavailable
from polythrottle.domain.errors import DeviceError, PolythrottleError

# cpufreq: the clock limits of each policy, as knobs that mean the same on unlike cores.

MAX = "cpu_max_hz"
MIN = "cpu_min_hz"
KIND = "cpu"
REMEDY = "run as root, or grant this user the file with a udev rule"
_FOLDER = "sys/devices/system/cpu/cpufreq"
_NAMES = (
    "scaling_min_freq",
    "scaling_max_freq",
    "scaling_cur_freq",
    "scaling_available_frequencies",
    "scaling_governor",
    "scaling_driver",
)
_STEPS = 6


@dataclass(frozen=True)
class Policy:
    """One cpufreq policy: cores that share a clock.

    Args:
        folder: Such as ``/sys/devices/system/cpu/cpufreq/policy0``.
        caps_khz: What its upper limit may be set to, ascending; empty if it is to be left alone.
        floors_khz: What its lower limit may be set to, ascending; empty if it is to be left alone.
    """

    folder: Path
    caps_khz: tuple[int, ...]
    floors_khz: tuple[int, ...]

    @property
    def max_file(self) -> str:
        """The file of its upper limit."""
        return str(self.folder / "scaling_max_freq")

    @property
    def min_file(self) -> str:
        """The file of its lower limit."""
        return str(self.folder / "scaling_min_freq")

    def cap_khz(self, limit_hz: int) -> int:
        """Return the highest cap not above a limit, or the lowest there is."""
        return max((khz for khz in self.caps_khz if khz * 1000 <= limit_hz), default=self.caps_khz[0])

    def floor_khz(self, limit_hz: int) -> int:
        """Return the lowest floor not below a limit, or the highest there is."""
        return min((khz for khz in self.floors_khz if khz * 1000 >= limit_hz), default=self.floors_khz[-1])

    @property
    def controls(self) -> Iterator[Control]:
        """What may be written."""
        yield Control(self.max_file, frozenset(map(str, self.caps_khz)))
        yield Control(self.min_file, frozenset(map(str, self.floors_khz)))


class Policies:
    """The clock limits of all policies: each gets its highest cap not above a level, its lowest floor not below one.

    Only clocks between the limits found are offered, so that nobody's floor or cap is crossed, and only what the
    administrator allows. A policy none of whose clocks is allowed is left alone.

    Args:
        tree: The machine's files.
        actuator: Knows the limits as they were before anyone tuned them.
        limits: The administrator's.
    """

    def __init__(self, tree: Tree, actuator: Actuator, limits: Limits) -> None:
        self._tree = tree
        self._actuator = actuator
        self._limits = limits
        self.folders = tuple(tree.found(f"{_FOLDER}/policy[0-9]*"))

    @property
    def files(self) -> tuple[Path, ...]:
        """What is read and may be written."""
        return tuple(folder / name for folder in self.folders for name in _NAMES)

    def told(self, name: str) -> str:
        """Return what all policies say in a file, without repetition: their governor or driver; empty if none does."""
        texts = (self._tree.text(folder / name) for folder in self.folders)
        return ", ".join(dict.fromkeys(text for text in texts if text))

    @cached_property
    def refusal(self) -> str | None:
        """Why the limits cannot be set here, or None if they can."""
        if not self.folders:
            return "this kernel offers no cpufreq"
        return refusal(self._tree, [folder / "scaling_max_freq" for folder in self.folders])

    @cached_property
    def all(self) -> tuple[Policy, ...]:
        """Every policy that may be steered.

        Raises:
            DeviceError: If cpufreq is there but its files cannot be understood.
        """
        if self.refusal:
            return ()
        try:
            policies = [self._policy(folder) for folder in self.folders]
        except (ValueError, PolythrottleError) as err:
            raise DeviceError(f"cannot read the clock limits in {self.folders[0].parent}: {err}") from err
        for policy in policies:
            self._actuator.allow(*policy.controls)
        return tuple(policy for policy in policies if policy.caps_khz)

    def _policy(self, folder: Path) -> Policy:
        lowest, highest = (
            int(self._actuator.original(str(folder / f"scaling_{side}_freq"))) for side in ("min", "max")
        )
        if not 0 < lowest <= highest:
            raise ValueError(f"{folder.name} has its clock between {lowest} and {highest} kHz")
        table = self._tree.numbers(folder / "scaling_available_frequencies") or _steps(lowest, highest)
        clocks = {khz for khz in table if lowest <= khz <= highest}
        return Policy(folder, self._within(MAX, clocks | {highest}), self._within(MIN, clocks | {lowest}))

    def _within(self, name: str, clocks_khz: Iterable[int]) -> tuple[int, ...]:
        levels_hz = self._limits.within(KIND, name, sorted(khz * 1000 for khz in clocks_khz))
        return tuple(hz // 1000 for hz in levels_hz)

    @cached_property
    def upper(self) -> Capability:
        """The upper limit as a knob."""
        if self.refusal:
            return unavailable([MAX], self.refusal, REMEDY if self.folders else "")[0]
        levels = sorted({khz * 1000 for policy in self.all for khz in policy.caps_khz})
        if not levels:
            return unavailable([MAX], "the administrator's limits leave no clock")[0]
        return Capability(MAX, tuple(levels), levels[-1])

    @cached_property
    def lower(self) -> Capability:
        """The lower limit as a knob."""
        reason = self.refusal or refusal(self._tree, [folder / "scaling_min_freq" for folder in self.folders])
        if reason:
            return unavailable([MIN], reason, REMEDY if self.folders else "")[0]
        levels = sorted({khz * 1000 for policy in self.all for khz in policy.floors_khz})
        if not levels or not all(policy.floors_khz for policy in self.all):
            return unavailable([MIN], "the administrator's limits leave no clock")[0]
        return Capability(MIN, tuple(levels), levels[0], "searched only if named")

    def settings(self, cap_hz: int, floor_hz: int | None) -> list[Setting]:
        """Return the writes that set a cap, and a floor if there is one, on every policy, in an order it accepts.

        Raises:
            DeviceError: If a limit cannot be read.
        """
        writes: list[Setting] = []
        for policy in self.all:
            cap = policy.cap_khz(cap_hz)
            if floor_hz is None:
                writes.append(Setting(policy.max_file, str(cap)))
                continue
            floor = min(policy.floor_khz(floor_hz), cap)
            live = self._actuator.live(policy.max_file)
            writes += span(policy.min_file, policy.max_file, floor, cap, int(live) if live.isdigit() else cap)
        return writes


def fastest_hz(tree: Tree, folders: Iterable[Path]) -> int | None:
    """Return the clock of the fastest policy, or None if nobody can tell."""
    clocks_khz = [tree.number(folder / "scaling_cur_freq") for folder in folders]
    return max((khz * 1000 for khz in clocks_khz if khz), default=None)


def refusal(tree: Tree, paths: Iterable[Path]) -> str | None:
    """Return why one of these files may not be written, or None if all may."""
    for path in paths:
        if why := tree.refusal(path):
            closed = path.exists() and os.statvfs(path).f_flag & os.ST_RDONLY
            if closed:
                return f"{path} is mounted read-only, as sysfs is in a container"
            return why
    return None


def _steps(lowest_khz: int, highest_khz: int) -> list[int]:
    """Return a handful of clocks between two, in whole 100 MHz as processors without a table take them."""
    between = [lowest_khz + (highest_khz - lowest_khz) * step / (_STEPS - 1) for step in range(1, _STEPS - 1)]
    return [lowest_khz, *(round(khz / 100_000) * 100_000 for khz in between), highest_khz]


# The energy-performance preference: what the processor itself weighs when it chooses its clock.
#
# Drivers intel_pstate and amd_pstate in active mode have it (Documentation/admin-guide/pm/intel_pstate.rst and amd-
# pstate.rst in Linux). Under the governor ``performance`` they take no preference but that one, with EBUSY.

EPP = "cpu_epp"
_FILE = "energy_performance_preference"
_TABLE = "energy_performance_available_preferences"
_RESET = "default"  # written, it is never read back: the driver answers with what it stands for


class Preference:
    """The energy-performance preference of all policies, as one knob; the governor is left alone.

    Args:
        tree: The machine's files.
        folders: Of the cpufreq policies.
        actuator: Knows the preference as it was before anyone tuned it.
        limits: The administrator's.
    """

    def __init__(self, tree: Tree, folders: tuple[Path, ...], actuator: Actuator, limits: Limits) -> None:
        self._tree = tree
        self._folders = folders
        self._actuator = actuator
        self._limits = limits

    @property
    def files(self) -> tuple[Path, ...]:
        """What is read and may be written."""
        return tuple(folder / name for folder in self._folders for name in (_FILE, _TABLE))

    @property
    def _controls(self) -> list[str]:
        return [str(folder / _FILE) for folder in self._folders]

    @cached_property
    def capability(self) -> Capability:
        """The preference as a knob, or why there is none."""
        if not self._folders:
            return unavailable([EPP], "this kernel offers no cpufreq")[0]
        if not all(Path(file).exists() for file in self._controls):
            return unavailable([EPP], "the cpufreq driver has no energy-performance preference")[0]
        if any(self._tree.text(folder / "scaling_governor") == "performance" for folder in self._folders):
            remedy = "choose governor powersave, which heeds the preference; polythrottle leaves the governor alone"
            return unavailable([EPP], "governor performance takes no other preference", remedy)[0]
        if reason := refusal(self._tree, map(Path, self._controls)):
            return unavailable([EPP], reason, REMEDY)[0]
        return self._offered()

    def _offered(self) -> Capability:
        try:
            found = {self._actuator.original(file) for file in self._controls}
        except PolythrottleError as err:
            return unavailable([EPP], f"the preference cannot be read: {err}".replace("\n", " "))[0]
        if len(found) != 1:
            return unavailable([EPP], f"cores hold different preferences: {', '.join(sorted(found))}")[0]
        tables = [set((self._tree.text(folder / _TABLE) or "").split()) for folder in self._folders]
        default = found.pop()
        names = (set.intersection(*tables) - {_RESET}) | {default}
        levels = self._limits.within(KIND, EPP, sorted(names))
        if len(levels) < 2:
            return unavailable([EPP], "there is no preference to choose from")[0]
        for file in self._controls:
            self._actuator.allow(Control(file, frozenset(levels)))
        return Capability(EPP, levels, default, "searched only if named")

    def settings(self, level: str) -> list[Setting]:
        """Return the writes that set a preference on every policy."""
        return [Setting(file, level) for file in self._controls]
