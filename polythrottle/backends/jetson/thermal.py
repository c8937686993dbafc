"""Heat: how hot the board is, and whether its kernel slows it down for that.

Zones are told apart by their ``type``. Where there is ``tj-thermal``, the hottest of all, no other is read:
``cv*-thermal`` always answers EAGAIN on Orin, ``gpu-thermal`` does while the GPU sleeps, and each retry in the driver
takes time. Units are m°C.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from polythrottle.backends.tree import Tree

_JUNCTION = re.compile(r"tj[-_]?therm(?:al)?", re.IGNORECASE)
_SILICON = re.compile(r"(?:[bm]?cpu|gpu|soc\d*|ao|a0|aux|pll)[-_]?therm(?:al)?", re.IGNORECASE)
_SLOWING = ("passive", "hot")
_SANE_C = (-40.0, 150.0)  # beyond this a sensor is off, not hot


@dataclass(frozen=True)
class Zone:
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
        hottest, slowed = None, False
        for zone in self.zones:
            millidegrees = self._tree.number(zone.file)
            if millidegrees is None or not _SANE_C[0] < millidegrees / 1000 < _SANE_C[1]:
                continue
            degrees = millidegrees / 1000
            hottest = degrees if hottest is None else max(hottest, degrees)
            slowed = slowed or (zone.trip_c is not None and degrees >= zone.trip_c)
        return hottest, slowed


def _zone(tree: Tree, folder: Path) -> Zone | None:
    name = tree.text(folder / "type")
    if not name or not (_JUNCTION.fullmatch(name) or _SILICON.fullmatch(name)):
        return None
    trips = []
    for file in tree.found(f"{folder.relative_to(tree.root)}/trip_point_*_type"):
        degrees = tree.number(file.with_name(file.name.replace("_type", "_temp")))
        if tree.text(file) in _SLOWING and degrees is not None and 40_000 < degrees < 130_000:
            trips.append(degrees / 1000)
    return Zone(name, folder / "temp", min(trips, default=None))


def _with_trip(zone: Zone, others_c: list[float]) -> Zone:
    """Return the junction's zone with the lowest trip of those it is the hottest of, if it has none of its own."""
    return zone if zone.trip_c is not None else Zone(zone.name, zone.file, min(others_c, default=None))
