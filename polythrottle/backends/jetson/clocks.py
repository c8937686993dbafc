"""The clocks of a board's processors: the GPU's limits and governor, the CPU clusters' limits and their cores online.

*The GPU*: the limits of its devfreq, in Hz, and the parameters of the governor that chooses between them. The folder is
found by what it says it drives (``device/of_node/name``), or by its name where it has no node, as on Thor; its index
and place move between releases. The driver refuses a minimum above the maximum, so the order of the two writes depends
on the direction, and it rounds a frequency off its table to a neighbour without a word, so only levels of the table are
written and each is read back (NVIDIA Jetson Linux developer guide; Linux ``drivers/devfreq/devfreq.c``).

*The CPU*: the clock limit of each cluster (cpufreq, kHz), and how many cores are online.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from polythrottle.actuation.actuator import Actuator
from polythrottle.actuation.drivers.controls import Control, Setting, span
from polythrottle.actuation.limits import Limits
from polythrottle.backends.cpu.cpufreq import MAX as CPU_MAX
from polythrottle.backends.cpu.cpufreq import Policy, fastest_hz
from polythrottle.backends.probe import KIND, Capability, Tree, unavailable, within
from polythrottle.domain.backports import paired, removeprefix
from polythrottle.domain.errors import PolythrottleError
from polythrottle.domain.space import Level
from polythrottle.domain.units import show_level
from polythrottle.storage.untrusted import printable

GPU_MIN = "gpu_min_hz"
GPU_MAX = "gpu_max_hz"
GPU_NAMES = (GPU_MIN, GPU_MAX)
_PLACES = ("sys/class/devfreq/*", "sys/devices/*/devfreq/*", "sys/devices/platform/*/devfreq/*")
_NODES = ("gpu", "gp10b", "gv11b", "ga10b", "ga10b_gpu")
_FOLDER = re.compile(r"(?:[0-9a-f]+\.)?(?:gpu|gp10b|gv11b|ga10b)|gpu-gpc-\d+")
# Held awake and let go again, as the driver writes them.
_WAKING = (
    ("device/railgate_enable", "0", "1"),
    ("device/power/control", "on", "auto"),
    ("device/../power/control", "on", "auto"),  # Thor: the GPU's PCI function is one folder up
)
# jetson_stats, docs of its page for Thor: k, load_target, load_margin; schlafly1/camera-pipe1, start_thor.sh: polling
# every 10 ms and k = 3 as found, and that up_freq_margin takes no write, without a word.
_GOVERNED = ("k", "load_target", "load_margin", "load_max", "up_freq_margin")
_LONGEST = 200
_GPU_PINNED = (
    "its limits were found equal, so that there is nothing to choose",
    "if jetson_clocks did that: sudo jetson_clocks --restore",
)


@dataclass(frozen=True)
class Awake:
    """The switch that keeps the GPU from sleeping."""

    file: Path
    held: str
    free: str

    @property
    def control(self) -> Control:
        """What may be written to it."""
        return Control(str(self.file), frozenset({self.held, self.free}))


class GpuClock:
    """The GPU's two clock limits.

    Levels are the board's own table between the limits found, within the administrator's: nobody's cap or floor is
    crossed. At the default the lowest and the highest of them hold.

    Args:
        tree: The board's files.
        actuator: Knows the limits as they were before anyone tuned them.
        limits: The administrator's.
    """

    def __init__(self, tree: Tree, actuator: Actuator, limits: Limits) -> None:
        self._tree = tree
        self._actuator = actuator
        self.folder = find_gpu_folder(tree)
        if self.folder is not None:
            self.table = tree.numbers(self.folder / "available_frequencies")
        else:
            self.table = ()
        self.capabilities = self._probed(limits)
        self.works = all(each.works for each in self.capabilities)
        self._awake = self._switch() if self.works else None
        actuator.allow(*self._controls())

    @property
    def files(self) -> tuple[Path, ...]:
        """What it reads and may write."""
        if self.folder is None:
            return ()
        names = ("available_frequencies", "min_freq", "max_freq", "cur_freq", "governor", "device/of_node/name")
        governed = ("polling_interval", *(f"nvhost_podgov/{name}" for name in _GOVERNED))
        return (
            *(self.folder / name for name in (*names, *governed)),
            *(self.folder / place for place, _, _ in _WAKING),
        )

    @property
    def governor(self) -> str:
        """What chooses the clock between the limits, and its parameters as they are found; empty if nobody tells.

        They are told here, and set only where somebody names them (`GpuGovernor`): at equal limits there is nothing to
        choose, and at least one of them (``up_freq_margin``) takes a write without a word and keeps what it held.
        """
        if self.folder is None or not (name := self._tree.text(self.folder / "governor")):
            return ""
        found = {each: self._tree.text(self.folder / "nvhost_podgov" / each) for each in _GOVERNED}
        parameters = [f"{each} {text}" for each, text in found.items() if text]
        every_ms = self._tree.number(self.folder / "polling_interval")
        told = ", ".join((name, *([f"looks every {every_ms} ms"] if every_ms else ()), *parameters))
        return printable(told)[:_LONGEST]

    def _probed(self, limits: Limits) -> tuple[Capability, ...]:
        if self.folder is None:
            return unavailable(GPU_NAMES, "no devfreq folder of this board says that it drives a GPU")
        self._min, self._max, self._now = (self.folder / f"{name}_freq" for name in ("min", "max", "cur"))
        if not self.table:
            return unavailable(GPU_NAMES, f"{self.folder}/available_frequencies lists no clocks")
        if refusal := self._tree.refusal(self._min, self._max):
            return unavailable(GPU_NAMES, refusal, "run as root, or give this user the file with a udev rule")
        try:
            low, high = (int(self._actuator.original(str(file))) for file in (self._min, self._max))
        except (PolythrottleError, ValueError) as err:
            remedy = "a GPU that sleeps may not answer: start what it serves first, or keep it awake"
            return unavailable(GPU_NAMES, f"the limits in {self.folder} cannot be read: {err}", remedy)
        return self._between(low, high, limits)

    def _between(self, low: int, high: int, limits: Limits) -> tuple[Capability, ...]:
        lows, highs = (within(name, self.table, low, high, limits) for name in GPU_NAMES)
        if not lows or not highs or lows[0] > highs[-1]:
            between = f"{show_level(GPU_MIN, low)} to {show_level(GPU_MAX, high)}"
            return unavailable(GPU_NAMES, f"no clock of the table lies within the limits found ({between}) and allowed")
        if len(lows) == len(highs) == 1:
            return unavailable(GPU_NAMES, *_GPU_PINNED)
        return Capability(GPU_MIN, lows, lows[0]), Capability(GPU_MAX, highs, highs[-1])

    def _switch(self) -> Awake | None:
        assert self.folder is not None
        for place, held, free in _WAKING:
            file = self.folder / place
            if self._tree.refusal(file) is None and self._original(file.resolve()) == free:
                return Awake(file.resolve(), held, free)
        return None

    def _original(self, file: Path) -> str | None:
        try:
            return self._actuator.original(str(file))
        except PolythrottleError:
            return None

    def _controls(self) -> Iterator[Control]:
        if self.works:
            for file, capability in paired((self._min, self._max), self.capabilities):
                yield Control(str(file), frozenset(map(str, capability.levels)))
        if self._awake is not None:
            yield self._awake.control

    @property
    def clock_hz(self) -> int | None:
        """What runs now; None while the GPU sleeps or if nobody can tell."""
        if self.folder is not None:
            return self._tree.number(self.folder / "cur_freq") or None
        return None

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Keep a GPU that sleeps awake for as long as this lasts, so that its files answer; no longer, as it costs."""
        if self._awake is None or self.clock_hz is not None:
            yield
            return
        self._actuator.write(str(self._awake.file), self._awake.held)
        try:
            yield
        finally:
            self._actuator.write(str(self._awake.file), self._awake.free)

    def apply(self, low_hz: int, high_hz: int) -> None:
        """Set both limits, in the order the driver takes them."""
        live_high = int(self._actuator.live(str(self._max)))
        self._actuator.apply(span(str(self._min), str(self._max), low_hz, high_hz, live_high))

    def unsettled(self, low_hz: int, high_hz: int) -> str | None:
        """Return what still runs outside two limits, or None once the clock is within them or the GPU sleeps."""
        now = self.clock_hz
        if now is None or low_hz <= now <= high_hz:
            return None
        now_mhz, low_mhz, high_mhz = (show_level(GPU_MAX, each) for each in (now, low_hz, high_hz))
        return f"the GPU runs at {now_mhz}, not between {low_mhz} and {high_mhz}"

    def overrun(self, high_hz: int) -> str | None:
        """Return that the GPU runs above its limit, by more than a clock may seem to; None if it does not."""
        now = self.clock_hz
        most = allowed_hz(high_hz, self.table)
        if now is None or most is None or now <= most:
            return None
        return f"the GPU clock was limited to {high_hz // 10**6} MHz and ran at {now // 10**6} MHz"


def allowed_hz(high_hz: int, table: Sequence[int]) -> int | None:
    """Return up to what a clock may seem to run below a limit: half-way to the next level, and no less than 2 %.

    Nothing if the limit is the highest there is. Of a table whose levels are closer than that, up to the next.
    """
    above_hz = next((level for level in table if level > high_hz), None)
    if above_hz is None:
        return None
    return high_hz + min(above_hz - high_hz, max((above_hz - high_hz) // 2, high_hz // 50))


def find_gpu_folder(tree: Tree) -> Path | None:
    """Return the devfreq folder of a board's GPU, or None."""
    folders = [each for each in tree.found(*_PLACES) if tree.there(each / "available_frequencies")]
    by_node = [each for each in folders if tree.text(each / "device/of_node/name") in _NODES]
    by_name = [each for each in folders if _FOLDER.fullmatch(each.name)]
    return next(iter((*by_node, *by_name)), None)


# Parameters of the GPU's governor, nvhost_podgov, as knobs: never searched unless they are named.
#
# Between its two limits the governor chooses the clock. How often it looks and how sharply it answers are files beside
# them: on Thor it looks every 10 ms with k = 3, load_target 200, load_margin 100 (jetson_stats). A slower ramp, 50 ms
# and k = 10, was seen to end over-current events there, and ``up_freq_margin`` to take a write without keeping it
# (schlafly1/camera-pipe1, ``start_thor.sh``), so every write is read back. Nobody has published what range the driver
# takes: levels go from half to five times what was found.

GOVERNOR_FILES: Mapping[str, str] = {
    "podgov_poll_s": "polling_interval",
    "podgov_k": "nvhost_podgov/k",
    "podgov_load_target": "nvhost_podgov/load_target",
    "podgov_load_margin": "nvhost_podgov/load_margin",
    "podgov_load_max": "nvhost_podgov/load_max",
    "podgov_up_freq_margin": "nvhost_podgov/up_freq_margin",
}
"""Where each knob is written, below the GPU's devfreq folder."""
GOVERNOR_KNOBS: Mapping[str, str] = {place.rpartition("/")[2]: name for name, place in GOVERNOR_FILES.items()}
_GOVERNOR = "nvhost_podgov"
_SHARES = (0.5, 1.0, 2.0, 3.0, 5.0)
_PER_S = 1000  # the kernel counts milliseconds
_MOST = 1_000_000
_TOLD = "searched only if named: half to five times what was found, as nobody has published what the driver takes"


class GpuGovernor:
    """The parameters of a GPU's governor that are there; none where another governor is in charge.

    Args:
        tree: The board's files.
        actuator: Knows each as it was before anyone tuned it.
        limits: The administrator's.
        folder: Devfreq folder of the GPU, or None.
    """

    def __init__(self, tree: Tree, actuator: Actuator, limits: Limits, folder: Path | None) -> None:
        self._actuator = actuator
        self._files: dict[str, str] = {}
        self._texts: dict[str, dict[Level, str]] = {}
        found: list[Capability] = []
        if folder is not None and tree.text(folder / "governor") == _GOVERNOR:
            for name, place in GOVERNOR_FILES.items():
                if tree.there(folder / place):
                    found.append(self._probed(tree, limits, name, folder / place))
        self.capabilities = tuple(found)

    def _probed(self, tree: Tree, limits: Limits, name: str, file: Path) -> Capability:
        if refusal := tree.refusal(file):
            return unavailable([name], refusal, "run as root, or give this user the file with a udev rule")[0]
        try:
            number = int(self._actuator.original(str(file)))
        except (PolythrottleError, ValueError) as err:
            return unavailable([name], f"{file} cannot be read: {err}")[0]
        if not 0 < number <= _MOST:
            return unavailable([name], f"{file} holds {number}, of which there are no multiples to choose from")[0]
        texts: dict[Level, str] = {}
        for each in sorted({max(1, round(number * share)) for share in _SHARES}):
            texts[each / _PER_S if name.endswith("_s") else each] = str(each)
        default = next(level for level, text in texts.items() if text == str(number))
        low, high = limits.span(KIND, name)
        allowed = {level: text for level, text in texts.items() if level == default or low <= float(level) <= high}
        if len(allowed) < 2:
            return unavailable([name], "the administrator's limits leave no choice")[0]
        self._files[name] = str(file)
        self._texts[name] = allowed
        self._actuator.allow(Control(str(file), frozenset(allowed.values())))
        return Capability(name, tuple(allowed), default, _TOLD)

    def apply(self, point: Mapping[str, Level]) -> None:
        """Set what a point names of the parameters, each read back.

        Raises:
            KnobRejected: If one is not kept, as up_freq_margin is not.
        """
        named = [name for name in self._files if name in point]
        self._actuator.apply([Setting(self._files[name], self._texts[name][point[name]]) for name in named])


CORES = "cpu_cores"
_CPU = "sys/devices/system/cpu"
_SLACK = 1.05  # some drivers count cycles over a moment instead of telling the clock that was set
_BEHIND = 0.6
_BEHIND_LOOKS = 3
_BEHIND_EVERY_S = 0.4
_REMEDY = "run as root, or give this user the file with a udev rule"
# AGX Xavier in its 15W: nvpmodel sets 1200000 kHz as the least and as the most (nvpmodel_t194.conf).
_CPU_PINNED = (
    "another power mode may leave room (doctor lists them); if jetson_clocks did that: sudo jetson_clocks --restore"
)


@dataclass(frozen=True)
class Cluster(Policy):
    """A policy whose floor is written only as it was found, after a power mode has rewritten it.

    Args:
        cores: Their numbers.
    """

    cores: frozenset[int]


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
            return (), unavailable([CPU_MAX], "this kernel has no cpufreq")[0]
        if refusal := self._tree.refusal(*self._limit_files()):
            return (), unavailable([CPU_MAX], refusal, _REMEDY)[0]
        clusters = []
        for folder in self._folders:
            try:
                clusters.append(self._cluster(folder, limits))
            except (PolythrottleError, ValueError) as err:
                return (), unavailable([CPU_MAX], f"the limits in {folder} cannot be read: {err}")[0]
        levels = sorted({khz * 1000 for cluster in clusters for khz in cluster.caps_khz})
        if len(levels) == 1 and all(cluster.caps_khz for cluster in clusters):
            held = f"its limits were found equal, at {levels[0] / 1e6:.10g} MHz, so that there is nothing to choose"
            return tuple(clusters), unavailable([CPU_MAX], held, _CPU_PINNED)[0]
        if not all(cluster.caps_khz for cluster in clusters) or len(levels) < 2:
            return (), unavailable([CPU_MAX], "no clocks to choose from lie within the limits found and allowed")[0]
        return tuple(clusters), Capability(CPU_MAX, tuple(levels), levels[-1])

    def _cluster(self, folder: Path, limits: Limits) -> Cluster:
        table = self._tree.numbers(folder / "scaling_available_frequencies")
        if not table:
            raise ValueError("there is no table of clocks")
        low, high = (int(self._actuator.original(str(folder / f"scaling_{side}_freq"))) for side in ("min", "max"))
        levels_hz = within(CPU_MAX, (khz * 1000 for khz in table), low * 1000, high * 1000, limits)
        words = (self._tree.text(folder / "related_cpus") or "").split() or [removeprefix(folder.name, "policy")]
        cores = frozenset(int(word) for word in words)
        return Cluster(folder, tuple(hz // 1000 for hz in levels_hz), (low,), cores)

    @property
    def clock_hz(self) -> int | None:
        """The clock of the fastest cluster, or None if nobody can tell."""
        return fastest_hz(self._tree, self._folders)

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
                return f"{cluster.folder.name} runs at {_shown(now)}, above {_shown(cap)}"
        return None


def _shown(clock_khz: int) -> str:
    """Return a clock of cpufreq as people write it."""
    return show_level(CPU_MAX, clock_khz * 1000)


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
