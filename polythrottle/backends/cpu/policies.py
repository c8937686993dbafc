"""cpufreq: the clock limits of each policy, as knobs that mean the same on unlike cores."""

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from polythrottle.actuation.actuator import Actuator
from polythrottle.actuation.controls import Control, Setting, span
from polythrottle.actuation.limits import Limits
from polythrottle.backends.capability import Capability, off
from polythrottle.backends.tree import Tree
from polythrottle.errors import DeviceError, PolythrottleError

MAX, MIN = "cpu_max_hz", "cpu_min_hz"
KIND = "cpu"
REMEDY = "run as root, or grant this user the file with a udev rule"
_FOLDER = "sys/devices/system/cpu/cpufreq"
_NAMES = (
    *("scaling_min_freq", "scaling_max_freq", "scaling_cur_freq", "scaling_available_frequencies"),
    *("scaling_governor", "scaling_driver"),
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
        self._tree, self._actuator, self._limits = tree, actuator, limits
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
            return off([MAX], self.refusal, REMEDY if self.folders else "")[0]
        levels = sorted({khz * 1000 for policy in self.all for khz in policy.caps_khz})
        if not levels:
            return off([MAX], "the administrator's limits leave no clock")[0]
        return Capability(MAX, tuple(levels), levels[-1])

    @cached_property
    def lower(self) -> Capability:
        """The lower limit as a knob."""
        reason = self.refusal or refusal(self._tree, [folder / "scaling_min_freq" for folder in self.folders])
        if reason:
            return off([MIN], reason, REMEDY if self.folders else "")[0]
        levels = sorted({khz * 1000 for policy in self.all for khz in policy.floors_khz})
        if not levels or not all(policy.floors_khz for policy in self.all):
            return off([MIN], "the administrator's limits leave no clock")[0]
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
            floor, live = min(policy.floor_khz(floor_hz), cap), self._actuator.live(policy.max_file)
            writes += span(policy.min_file, policy.max_file, floor, cap, int(live) if live.isdigit() else cap)
        return writes


def refusal(tree: Tree, paths: Iterable[Path]) -> str | None:
    """Return why one of these files may not be written, or None if all may."""
    for path in paths:
        if why := tree.refusal(path):
            closed = path.exists() and os.statvfs(path).f_flag & os.ST_RDONLY
            return f"{path} is mounted read-only, as sysfs is in a container" if closed else why
    return None


def _steps(lowest_khz: int, highest_khz: int) -> list[int]:
    """Return a handful of clocks between two, in whole 100 MHz as processors without a table take them."""
    between = [lowest_khz + (highest_khz - lowest_khz) * step / (_STEPS - 1) for step in range(1, _STEPS - 1)]
    return [lowest_khz, *(round(khz / 100_000) * 100_000 for khz in between), highest_khz]
