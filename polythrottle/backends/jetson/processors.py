"""The processors: the clock limit of each cluster (cpufreq, kHz), and how many cores are online."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from polythrottle.actuation.actuator import Actuator
from polythrottle.actuation.drivers.controls import Control, Setting
from polythrottle.actuation.limits import Limits
from polythrottle.backends.probe import Capability, Tree, unavailable, within
from polythrottle.domain.backports import removeprefix
from polythrottle.domain.errors import PolythrottleError

MAX = "cpu_max_hz"
CORES = "cpu_cores"
_CPU = "sys/devices/system/cpu"
_SLACK = 1.05  # some drivers count cycles over a moment instead of telling the clock that was set
_BEHIND = 0.6
_BEHIND_LOOKS = 3
_BEHIND_EVERY_S = 0.4
_REMEDY = "run as root, or give this user the file with a udev rule"
# AGX Xavier in its 15W: nvpmodel sets 1200000 kHz as the least and as the most (nvpmodel_t194.conf).
_PINNED = (
    "another power mode may leave room (doctor lists them); if jetson_clocks did that: sudo jetson_clocks --restore"
)


@dataclass(frozen=True)
class Cluster:
    """Cores that share a clock.

    Args:
        folder: Of its cpufreq policy.
        cores: Their numbers.
        levels_khz: The clocks between the limits found, ascending.
        low_khz: The lower limit found.
    """

    folder: Path
    cores: frozenset[int]
    levels_khz: tuple[int, ...]
    low_khz: int

    @property
    def max_file(self) -> str:
        """The file of its upper limit."""
        return str(self.folder / "scaling_max_freq")

    def cap_khz(self, limit_hz: int) -> int:
        """Return the highest level not above a limit, or the lowest there is."""
        return max((khz for khz in self.levels_khz if khz * 1000 <= limit_hz), default=self.levels_khz[0])

    @property
    def controls(self) -> Iterator[Control]:
        """What may be written; the minimum only as it was found, after a power mode has rewritten it."""
        yield Control(self.max_file, frozenset(map(str, self.levels_khz)))
        yield Control(str(self.folder / "scaling_min_freq"), frozenset({str(self.low_khz)}))


class Clusters:
    """The clock limit of every cluster, as one knob: each gets its highest clock not above the level.

    Args:
        tree: The board's files.
        actuator: Knows the limits as they were before anyone tuned them.
        limits: The administrator's.
    """

    def __init__(self, tree: Tree, actuator: Actuator, limits: Limits) -> None:
        self._tree = tree
        self._actuator = actuator
        self._folders = tree.found(f"{_CPU}/cpufreq/policy[0-9]*")
        tables = [tree.numbers(folder / "scaling_available_frequencies") for folder in self._folders]
        self.table = tuple(sorted({khz * 1000 for table in tables for khz in table}))
        self.all, self.capability = self._probed(limits)
        self._behind: dict[Path, int] = {}
        self._looked_s = -math.inf
        for cluster in self.all:
            actuator.allow(*cluster.controls)

    @property
    def files(self) -> tuple[Path, ...]:
        """What it reads and may write."""
        names = (
            "scaling_available_frequencies",
            "scaling_min_freq",
            "scaling_max_freq",
            "scaling_cur_freq",
            "cpuinfo_cur_freq",
        )
        return tuple(folder / name for folder in self._folders for name in (*names, "related_cpus", "scaling_governor"))

    def _limit_files(self) -> list[Path]:
        return [folder / f"scaling_{side}_freq" for folder in self._folders for side in ("min", "max")]

    def _probed(self, limits: Limits) -> tuple[tuple[Cluster, ...], Capability]:
        if not self._folders:
            return (), unavailable([MAX], "this kernel has no cpufreq")[0]
        if refusal := self._tree.refusal(*self._limit_files()):
            return (), unavailable([MAX], refusal, _REMEDY)[0]
        clusters = []
        for folder in self._folders:
            try:
                clusters.append(self._cluster(folder, limits))
            except (PolythrottleError, ValueError) as err:
                return (), unavailable([MAX], f"the limits in {folder} cannot be read: {err}")[0]
        levels = sorted({khz * 1000 for cluster in clusters for khz in cluster.levels_khz})
        if len(levels) == 1 and all(cluster.levels_khz for cluster in clusters):
            held = f"its limits were found equal, at {levels[0] / 1e6:.10g} MHz, so that there is nothing to choose"
            return tuple(clusters), unavailable([MAX], held, _PINNED)[0]
        if not all(cluster.levels_khz for cluster in clusters) or len(levels) < 2:
            return (), unavailable([MAX], "no clocks to choose from lie within the limits found and allowed")[0]
        return tuple(clusters), Capability(MAX, tuple(levels), levels[-1])

    def _cluster(self, folder: Path, limits: Limits) -> Cluster:
        table = self._tree.numbers(folder / "scaling_available_frequencies")
        if not table:
            raise ValueError("there is no table of clocks")
        low, high = (int(self._actuator.original(str(folder / f"scaling_{side}_freq"))) for side in ("min", "max"))
        levels_hz = within(MAX, (khz * 1000 for khz in table), low * 1000, high * 1000, limits)
        words = (self._tree.text(folder / "related_cpus") or "").split() or [removeprefix(folder.name, "policy")]
        cores = frozenset(int(word) for word in words)
        return Cluster(folder, cores, tuple(hz // 1000 for hz in levels_hz), low)

    @property
    def clock_hz(self) -> int | None:
        """The clock of the fastest cluster, or None if nobody can tell."""
        clocks = [self._tree.number(folder / "scaling_cur_freq") for folder in self._folders]
        return max((khz * 1000 for khz in clocks if khz), default=None)

    def held_back(self, now_s: float) -> str:
        """Return which cluster runs far below the clock its governor has asked for, and has done so for several looks.

        A Thor that fell to a quarter of its clock after one over-current event at boot showed none afterwards, and its
        ``scaling_cur_freq`` said 2601000, ``cpuinfo_cur_freq`` 649000 (topic 361188 of NVIDIA's developer forum).
        A single look below proves nothing: a normal event halves the clock for a millisecond.

        Args:
            now_s: The time; asking more often than every 0.4 s looks no more often, as the driver counts cycles for it.
        """
        if now_s - self._looked_s >= _BEHIND_EVERY_S:
            self._looked_s = now_s
            for folder in self._folders:
                if self._is_behind(folder):
                    self._behind[folder] = self._behind.get(folder, 0) + 1
                else:
                    self._behind[folder] = 0
        for folder in (each for each, looks in self._behind.items() if looks >= _BEHIND_LOOKS):
            runs, asked = (self._tree.number(folder / f"{name}_cur_freq") or 0 for name in ("cpuinfo", "scaling"))
            return f"{folder.name} runs at {runs // 1000} MHz where its governor has asked for {asked // 1000} MHz"
        return ""

    def _is_behind(self, folder: Path) -> bool:
        # The governor may ask for another clock meanwhile: the lower of before and after counts.
        names = ("scaling_cur_freq", "cpuinfo_cur_freq", "scaling_cur_freq")
        before, runs, after = (self._tree.number(folder / name) for name in names)
        return bool(before and runs and after and runs < _BEHIND * min(before, after))

    def apply(self, limit_hz: int, online: frozenset[int]) -> None:
        """Set the limit of every cluster that has a core online: without one, it has no clock."""
        running = [each for each in self.all if each.cores & online]
        self._actuator.apply([Setting(each.max_file, str(each.cap_khz(limit_hz))) for each in running])

    def unsettled(self, limit_hz: int, online: frozenset[int]) -> str | None:
        """Return which cluster with a core online still runs above its limit, or None."""
        for cluster in (each for each in self.all if each.cores & online):
            now = self._tree.number(cluster.folder / "scaling_cur_freq")
            cap = cluster.cap_khz(limit_hz)
            if now is not None and now > cap * _SLACK:
                return f"{cluster.folder.name} runs at {now} kHz, above {cap}"
        return None


class Cores:
    """How many of the cores found online stay so: the lowest numbers, core 0 always among them.

    Taking a core offline moves interrupts and breaks programs that are pinned to it, so nothing does so unasked.

    Args:
        tree: The board's files.
        actuator: Knows which were online before anyone tuned them.
        limits: The administrator's.
    """

    def __init__(self, tree: Tree, actuator: Actuator, limits: Limits) -> None:
        self._tree = tree
        self._actuator = actuator
        self._files = {
            int(removeprefix(file.parent.name, "cpu")): file
            for file in tree.found(f"{_CPU}/cpu[0-9]*/online")
            if removeprefix(file.parent.name, "cpu").isdigit()
        }
        self.table = tuple(range(1, len({0, *self._files}) + 1))
        self.found, self.capability = self._probed(limits)
        if self.capability.works:
            switched = (str(self._files[core]) for core in self.found if core != 0)
            actuator.allow(*(Control(file, frozenset({"0", "1"})) for file in switched))

    @property
    def files(self) -> tuple[Path, ...]:
        """What it reads and may write."""
        return tuple(self._files.values())

    def _probed(self, limits: Limits) -> tuple[tuple[int, ...], Capability]:
        others = [core for core in self._files if core != 0]
        if refusal := self._tree.refusal(*(self._files[core] for core in others)):
            return (0,), unavailable([CORES], refusal, _REMEDY)[0]
        try:
            online = [core for core in sorted(others) if self._actuator.original(str(self._files[core])) == "1"]
        except PolythrottleError as err:
            return (0,), unavailable([CORES], f"cannot tell which cores are online: {err}")[0]
        if not online:
            return (0,), unavailable([CORES], "no core but the first can be switched")[0]
        found = (0, *online)
        levels = within(CORES, range(1, len(found) + 1), 1, len(found), limits)
        if len(levels) < 2:
            return found, unavailable([CORES], "the administrator's limits leave no choice")[0]
        return found, Capability(CORES, levels, levels[-1], "searched only if named: offlining breaks pinned programs")

    def chosen(self, count: int) -> frozenset[int]:
        """Return the cores that stay online at a level."""
        return frozenset(self.found[:count])

    def online(self) -> frozenset[int]:
        """Return the cores that are online now; the first always is, and so is one that cannot be switched."""
        return frozenset(core for core, file in self._files.items() if self._tree.text(file) != "0") | {0}

    def start(self, count: int) -> None:
        """Bring the cores of a level online that are not."""
        self._switch(self.chosen(count), "1")

    def stop(self, count: int) -> None:
        """Take the cores found online beyond a level offline."""
        self._switch(frozenset(self.found) - self.chosen(count), "0")

    def _switch(self, cores: frozenset[int], text: str) -> None:
        self._actuator.apply([Setting(str(self._files[core]), text) for core in sorted(cores - {0})])
