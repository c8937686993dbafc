"""Which board this is, and what protects it and slows it down.

*The board*: chip, model, release of its software, and its entry in the catalogue if it has one. Chip and model come
from the device tree, the release from ``/etc/nv_tegra_release`` or the package ``nvidia-l4t-core`` (NVIDIA Jetson Linux
developer guide; jetson_stats, ``jtop/core/jetson_variables.py``).

*Its protection*: heat, and over-current events; the everyday ones are told from those that spoil a window.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from polythrottle.backends.probe import Tree
from polythrottle.catalog import Board, load_board
from polythrottle.domain.errors import DeviceError

# By chip, the boards of the catalogue with the words of their model names and the part numbers of their modules, the
# rarer before those whose words they share (part numbers: jetson_stats, jtop/core/jetson_variables.py).
_KNOWN: Mapping[str, Mapping[str, tuple[str, str]]] = {
    "tegra210": {"jetson-nano-2gb": ("nano 2gb", "p3448-0003"), "jetson-nano": ("nano", "p3448|p3450")},
    "tegra186": {
        "jetson-tx2i": ("tx2i", "p3489-0000"),
        "jetson-tx2-4gb": ("tx2 4gb", "p3489-0888"),
        "jetson-tx2": ("tx2", "p3310"),
    },
    "tegra194": {"jetson-xavier-nx": ("xavier nx", "p3668"), "jetson-agx-xavier": ("agx xavier", "p2888|p2972")},
    "tegra234": {
        "jetson-agx-orin": ("agx orin", "p3701"),
        "jetson-orin-nx": ("orin nx", r"p3767-000[0-2]"),
        "jetson-orin-nano": ("orin nano", r"p3767-000[3-5]"),
    },
    "tegra264": {"jetson-thor": ("thor", "p3834")},
}
_CHIP = re.compile(r"nvidia,(tegra\d+)")
_RELEASE = re.compile(r"#?\s*R(\d+)\s*\(release\),\s*REVISION:\s*([\d.]+)")
_PACKAGE = re.compile(r"^Package: nvidia-l4t-core$.*?^Version: ([\d.]+)", re.MULTILINE | re.DOTALL)
_JETPACK = (
    ("32", "4"),
    ("35", "5"),
    ("36.4.3", "6.2"),
    ("36.4.4", "6.2.1"),
    ("36.4.7", "6.2.1"),
    ("36.4", "6.1 or 6.2"),
    ("36.5", "6.2.2"),
    ("36", "6"),
    ("38", "7.0 or 7.1"),
    ("39.2", "7.2"),
    ("39", "7"),
)


@dataclass(frozen=True)
class BoardId:
    """What a board is.

    Args:
        chip: Such as ``tegra234``.
        model: As the device tree says it.
        compatible: Everything the device tree says it is compatible with.
        release: Version of Jetson Linux (L4T), such as ``35.4.1``; None if it cannot be told.
    """

    chip: str
    model: str
    compatible: tuple[str, ...]
    release: str | None

    @classmethod
    def read(cls, tree: Tree) -> BoardId:
        """Return what the board of a tree is.

        Raises:
            DeviceError: If it is no Jetson.
        """
        folder = tree.below("proc/device-tree")
        compatible = tuple(filter(None, re.split(r"[\0\s]+", tree.text(folder / "compatible") or "")))
        chips = [match[1] for match in map(_CHIP.fullmatch, compatible) if match]
        if not chips:
            raise DeviceError(
                f"there is no Jetson in {tree.root}: {folder / 'compatible'} names no NVIDIA Tegra chip; "
                "in a container, /proc/device-tree and /sys must be those of the host"
            )
        model = " ".join((tree.text(folder / "model") or "").split())
        return cls(chips[-1], model or f"a Jetson with {chips[-1]}", compatible, _release(tree))

    @property
    def title(self) -> str:
        """The model's name; that of the catalogue where the device tree has only a code name, such as quill."""
        told = any(word in self.model.lower() for word in ("nvidia", "orin", "xavier", "thor", "tx", "nano"))
        if told or self.entry is None:
            return self.model
        return self.entry.title

    @property
    def jetpack(self) -> str | None:
        """The JetPack this release of Jetson Linux belongs to, as far as it tells."""
        parts = (self.release or "").split(".")
        for length in (3, 2, 1):
            for start, jetpack in _JETPACK:
                if start == ".".join(parts[:length]):
                    return jetpack
        return None

    @property
    def identity(self) -> Mapping[str, str]:
        """What a tuned answer for this board depends on."""
        known = {"board": self.model, "soc": self.chip, "l4t": self.release, "jetpack": self.jetpack}
        return {name: text for name, text in known.items() if text}

    @cached_property
    def name(self) -> str | None:
        """The board's name in the catalogue, or None if it is not there.

        The number of its module says it before the name of its model: an Orin Nano, of six cores and 7.4 GiB, is called
        "Orin NX Engineering Reference Developer Kit" in a public record, after the kit it was flashed for.
        """
        boards = _KNOWN.get(self.chip, {})
        parts = " ".join(self.compatible)
        if numbered := next((name for name, (_, part) in boards.items() if re.search(part, parts)), None):
            return numbered
        words = re.sub(r"[^a-z0-9]+", " ", self.model.lower()).split()
        for name, (tokens, _) in boards.items():
            if set(tokens.split()) <= set(words):
                if "nx" in words and "nx" not in tokens.split():
                    return None
                return name
        return None

    @cached_property
    def entry(self) -> Board | None:
        """The board's entry in the catalogue, or None."""
        if self.name:
            return load_board(self.name)
        return None


def board_files(tree: Tree) -> tuple[Path, ...]:
    """Return the files that say what a board is."""
    places = ("proc/device-tree/compatible", "proc/device-tree/model", "etc/nv_tegra_release")
    return tuple(map(tree.below, places))


def _release(tree: Tree) -> str | None:
    match = _RELEASE.match(tree.text(tree.root / "etc/nv_tegra_release") or "")
    if match:
        return f"{match[1]}.{match[2]}"
    package = _PACKAGE.search(tree.text(tree.root / "var/lib/dpkg/status") or "")
    if package:
        return package[1]
    return None


# Heat: how hot the board is, and whether its kernel slows it down for that.
#
# Zones are told apart by their ``type``. Where there is ``tj-thermal``, the hottest of all, no other is read:
# ``cv*-thermal`` always answers EAGAIN on Orin, ``gpu-thermal`` does while the GPU sleeps, and each retry in the
# driver takes time. Units are m°C.

_JUNCTION = re.compile(r"tj[-_]?therm(?:al)?", re.IGNORECASE)
_SILICON = re.compile(r"(?:[bm]?cpu|gpu|soc\d*|ao|a0|aux|pll)[-_]?therm(?:al)?", re.IGNORECASE)
_SLOWING = ("passive", "hot")
_SANE_C = (-40.0, 150.0)  # beyond this a sensor is off, not hot


@dataclass(frozen=True)
class ThermalZone:
    """One sensor.

    Args:
        name: Its type.
        file: Of its temperature.
        trip_c: Where the kernel begins to slow things down, in °C; None if it says nothing.
    """

    name: str
    file: Path
    trip_c: float | None


class Thermal:
    """The board's temperature.

    Args:
        tree: The board's files.
    """

    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        zones = [zone for folder in tree.found("sys/class/thermal/thermal_zone*") if (zone := _zone(tree, folder))]
        junction = [zone for zone in zones if _JUNCTION.fullmatch(zone.name)]
        silicon = [zone for zone in zones if _SILICON.fullmatch(zone.name)]
        trips = [zone.trip_c for zone in silicon if zone.trip_c is not None]
        self.zones = tuple(_with_trip(zone, trips) for zone in junction[:1]) or tuple(silicon)

    @property
    def files(self) -> tuple[Path, ...]:
        """What it reads."""
        folders = [zone.file.parent for zone in self.zones]
        return tuple(path for folder in folders for path in (folder / "type", folder / "temp"))

    def look(self) -> tuple[float | None, bool]:
        """Return the highest temperature in °C, None if unknown, and whether the kernel slows things down for it."""
        hottest = None
        slowed = False
        for zone in self.zones:
            millidegrees = self._tree.number(zone.file)
            if millidegrees is None or not _SANE_C[0] < millidegrees / 1000 < _SANE_C[1]:
                continue
            degrees = millidegrees / 1000
            if hottest is None:
                hottest = degrees
            else:
                hottest = max(hottest, degrees)
            slowed = slowed or (zone.trip_c is not None and degrees >= zone.trip_c)
        return hottest, slowed


def _zone(tree: Tree, folder: Path) -> ThermalZone | None:
    name = tree.text(folder / "type")
    if not name or not (_JUNCTION.fullmatch(name) or _SILICON.fullmatch(name)):
        return None
    trips = []
    for file in tree.found(f"{folder.relative_to(tree.root)}/trip_point_*_type"):
        degrees = tree.number(file.with_name(file.name.replace("_type", "_temp")))
        if tree.text(file) in _SLOWING and degrees is not None and 40_000 < degrees < 130_000:
            trips.append(degrees / 1000)
    return ThermalZone(name, folder / "temp", min(trips, default=None))


def _with_trip(zone: ThermalZone, others_c: list[float]) -> ThermalZone:
    """Return the junction's zone with the lowest trip of those it is the hottest of, if it has none of its own."""
    if zone.trip_c is not None:
        return zone
    return ThermalZone(zone.name, zone.file, min(others_c, default=None))


# Over-current protection: which of a board's events spoil a window, and which are its everyday life.
#
# Orin and Thor count three kinds of event in files ``ocN_event_cnt``, Xavier six in ``ocN_irq_cnt`` (NVIDIA's drivers
# tegra234-oc-event.c and tegra-oc-event.c); the number of their folder varies. What an event's number means differs by
# chip:
#
# * Xavier (tegra194): 1 current above the limit at any moment, 2 supply below 4.5 V, 3 mean current above the limit
#   (NVIDIA for Xavier NX with JetPack 5.1: forums.developer.nvidia.com, topics 276251 and 307919).
# * Orin (tegra234): 1 supply below its limit, 2 mean power above the limit, 3 power above the limit for a moment
# (Jetson
#   Linux 36.4 developer guide, Platform Power and Performance).
# * Thor (tegra264): taken to count as Orin does; its OC3 rises about 11 times a minute under the stock governor
#   (schlafly1/camera-pipe1, ``start_thor.sh``).
#
# On Orin Nano and NX in the Super modes OC3 rises 1 to 30 times a second, at rest too, and halves the clocks for
# about a millisecond each time; NVIDIA calls that expected (topics 321989 and 279417). So OC3 spoils nothing on Orin
# and Thor: it is reported as a rate. How long the clocks were cut is told by the firmware (BPMP) in
# ``soctherm/oc<N-1>/event_time``: 33,569 units for each event in a public log, 1.07 ms if a unit is a tick of Orin's
# 31.25 MHz counter, which nobody documents. The firmware brings its counters up to date about every two seconds, by
# the same log.

COUNTERS = tuple(
    f"sys/class/hwmon/hwmon*/{place}oc*_{what}_cnt" for what in ("event", "irq") for place in ("", "device/")
)
"""Where events are counted."""
_NUMBER = re.compile(r"oc(\d+)_(?:event|irq)_cnt")
_TIME = "sys/kernel/debug/bpmp/debug/soctherm/oc{}/event_time"
_TICKS_PER_S = {"tegra234": 31_250_000}
_UPTIME = "proc/uptime"
_XAVIER = {1: "current above its limit", 2: "supply below 4.5 V", 3: "mean current above its limit"}
_ORIN = {1: "supply voltage too low", 2: "mean power above its limit", 3: "power above its limit for a moment"}
_MEANINGS: Mapping[str, Mapping[int, str]] = {"tegra194": _XAVIER, "tegra234": _ORIN, "tegra264": _ORIN}
_EVERYDAY: Mapping[str, frozenset[int]] = {"tegra234": frozenset({3}), "tegra264": frozenset({3})}


@dataclass(frozen=True)
class Cuts:
    """What has cut the clocks since the board was started and is normal on it.

    Args:
        count: How often; None if that kind is not counted here.
        seconds: For how long together; None if nobody tells.
    """

    count: int | None
    seconds: float | None


class OverCurrent:
    """The counters of a board's over-current events.

    Args:
        tree: The board's files.
        chip: Such as ``tegra234``; all events of one that is not known spoil a window.
    """

    def __init__(self, tree: Tree, chip: str) -> None:
        self._tree = tree
        self._meanings = _MEANINGS.get(chip, {})
        self._everyday = _EVERYDAY.get(chip, frozenset())
        self._ticks_per_s = _TICKS_PER_S.get(chip)
        self._counters = tree.found(*COUNTERS)

    @property
    def files(self) -> tuple[Path, ...]:
        """What it reads."""
        times = (self._tree.root / _TIME.format(number - 1) for number in sorted(self._everyday))
        return (*self._counters, *times)

    def counts(self) -> Mapping[int, int]:
        """Return how often each kind of event has come since the board was started, by its number."""
        found = {counter: self._tree.number(counter) for counter in self._counters}
        if None in found.values():  # the folder has another number now
            self._counters = self._tree.found(*COUNTERS)
            found = {counter: self._tree.number(counter) for counter in self._counters}
        counts: dict[int, int] = {}
        for counter, count in found.items():
            match = _NUMBER.fullmatch(counter.name)
            if match and count is not None:
                counts[int(match[1])] = counts.get(int(match[1]), 0) + count
        return counts

    def spoiling(self, counts: Mapping[int, int]) -> Mapping[int, int]:
        """Return those of some counts that spoil a window."""
        return {number: count for number, count in counts.items() if number not in self._everyday}

    def cuts(self, counts: Mapping[int, int]) -> Cuts:
        """Return what has cut the clocks and is normal here, by some counts."""
        everyday = [count for number, count in counts.items() if number in self._everyday]
        if not everyday or self._ticks_per_s is None:
            return Cuts(sum(everyday) if everyday else None, None)
        ticks = [self._tree.number(self._tree.root / _TIME.format(number - 1)) for number in self._everyday]
        known = [each for each in ticks if each is not None]
        return Cuts(sum(everyday), sum(known) / self._ticks_per_s if known else None)

    def named(self, number: int) -> str:
        """Return a kind of event in words."""
        meaning = self._meanings.get(number)
        if meaning:
            return f"OC{number} ({meaning})"
        return f"OC{number}"

    @property
    def explanation(self) -> str:
        """What is counted, what spoils a window, and how the rest has come so far."""
        counts = self.counts()
        if not counts:
            return "over-current events are not counted here"
        spoiling = " and ".join(map(self.named, sorted(self.spoiling(counts))))
        told = [f"over-current: {spoiling or 'nothing'} would spoil a window"]
        if (cuts := self.cuts(counts)).count is not None:
            everyday = " and ".join(map(self.named, sorted(counts.keys() & self._everyday)))
            told.append(f"{everyday} is normal here and reported; {self._pace(cuts)}")
        return "; ".join(told)

    def _pace(self, cuts: Cuts) -> str:
        """Return how often and for which share of the time the clocks have been cut since the start."""
        uptime = (self._tree.text(self._tree.root / _UPTIME) or "").split()
        try:
            up_s = float(uptime[0])
        except (IndexError, ValueError):
            up_s = 0.0
        if not 0 < up_s < math.inf:
            return f"{cuts.count} times since the start"
        if cuts.seconds is None:
            share = ""
        else:
            share = f", for {cuts.seconds / up_s:.2%} of the time"
        return f"{(cuts.count or 0) / up_s:.2g} times a second since the start{share}"
