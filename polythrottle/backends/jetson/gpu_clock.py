"""The GPU's clock: the limits of its devfreq, in Hz, and the parameters of the governor that chooses between them.

The folder is found by what it says it drives (``device/of_node/name``), or by its name where it has no node, as on
Thor; its index and place move between releases. The driver refuses a minimum above the maximum, so the order of the two
writes depends on the direction, and it rounds a frequency off its table to a neighbour without a word, so only levels
of the table are written and each is read back (NVIDIA Jetson Linux developer guide; Linux
``drivers/devfreq/devfreq.c``).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from polythrottle.actuation.actuator import Actuator
from polythrottle.actuation.drivers.controls import Control, Setting, span
from polythrottle.actuation.limits import Limits
from polythrottle.backends.probe import KIND, Capability, Tree, unavailable, within
from polythrottle.domain.backports import paired
from polythrottle.domain.errors import PolythrottleError
from polythrottle.domain.space import Level
from polythrottle.storage.untrusted import printable

MIN = "gpu_min_hz"
MAX = "gpu_max_hz"
NAMES = (MIN, MAX)
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
_PINNED = (
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
        self.folder = find(tree)
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
            return unavailable(NAMES, "no devfreq folder of this board says that it drives a GPU")
        self._min, self._max, self._now = (self.folder / f"{name}_freq" for name in ("min", "max", "cur"))
        if not self.table:
            return unavailable(NAMES, f"{self.folder}/available_frequencies lists no clocks")
        if refusal := self._tree.refusal(self._min, self._max):
            return unavailable(NAMES, refusal, "run as root, or give this user the file with a udev rule")
        try:
            low, high = (int(self._actuator.original(str(file))) for file in (self._min, self._max))
        except (PolythrottleError, ValueError) as err:
            remedy = "a GPU that sleeps may not answer: start what it serves first, or keep it awake"
            return unavailable(NAMES, f"the limits in {self.folder} cannot be read: {err}", remedy)
        return self._between(low, high, limits)

    def _between(self, low: int, high: int, limits: Limits) -> tuple[Capability, ...]:
        lows, highs = (within(name, self.table, low, high, limits) for name in NAMES)
        if not lows or not highs or lows[0] > highs[-1]:
            return unavailable(
                NAMES, f"no clock of the table lies within the limits found ({low} to {high} Hz) and allowed"
            )
        if len(lows) == len(highs) == 1:
            return unavailable(NAMES, *_PINNED)
        return Capability(MIN, lows, lows[0]), Capability(MAX, highs, highs[-1])

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
        return f"the GPU runs at {now} Hz, not between {low_hz} and {high_hz}"

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


def find(tree: Tree) -> Path | None:
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
