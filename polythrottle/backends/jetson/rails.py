"""Power rails: sensors found by what they say they are, and which of them make up the board's total.

Units by driver: INA3221 through hwmon mV and mA, INA238 through hwmon µW, the older INA3221 through iio mW (Linux
``Documentation/hwmon``; NVIDIA Jetson Linux developer guide). Channels labelled ``NC`` are not connected, and a channel
without a current is a sum of shunt voltages; neither is a rail.

A value of the INA3221 is the mean of ``samples`` conversions, and there is a new one every ``update_interval``
milliseconds, the time all of them take (Linux Documentation/hwmon/ina3221.rst). NVIDIA's ``nvpower.sh`` (BSD-3) sets
512 and 430 ms on tegra194 and tegra234.
"""

import os
import re
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from polythrottle.backends.tree import Tree
from polythrottle.catalog import Board
from polythrottle.catalog.boards import Rails as BoardRails

_HWMON = ("sys/bus/i2c/drivers/ina*/*-00*/hwmon/hwmon*", "sys/class/hwmon/hwmon*")
_IIO = ("sys/bus/i2c/drivers/ina*/*-00*/iio:device*", "sys/bus/iio/devices/iio:device*")
_UNUSED = re.compile(r"nc|sum.*", re.IGNORECASE)
_INPUTS = ("VDD_IN", "POM_5V_IN", "VIN", "5V_IN")
_ALSO = {"VDD_IN": "5V_IN"}  # Xavier NX has one or the other by its carrier
_READ_BYTES = 32


@dataclass(frozen=True)
class Rail:
    """One power rail.

    Args:
        name: Its label.
        files: Whose readings, multiplied, are its power.
        scale: Watts in one unit of their product.
        interval: File of the milliseconds a value is the mean over and stands for, where there is one.
    """

    name: str
    files: tuple[Path, ...]
    scale: float
    interval: Path | None = None


def find_rails(tree: Tree) -> tuple[Rail, ...]:
    """Return every rail of a board that has a sensor, each label once."""
    rails: dict[str, Rail] = {}
    for folder in tree.found(*_HWMON):
        for rail in _hwmon(tree, folder):
            rails.setdefault(rail.name, rail)
    for folder in tree.found(*_IIO):
        for rail in _iio(tree, folder):
            rails.setdefault(rail.name, rail)
    return tuple(rails.values())


def _hwmon(tree: Tree, folder: Path) -> Iterator[Rail]:
    kind = tree.text(folder / "name") or ""
    if not kind.startswith("ina"):
        return
    power = folder / "power1_input"
    if tree.there(power):
        label = next(
            filter(None, (_label(tree, folder / name) for name in ("power1_label", "in1_label", "label"))), "VIN"
        )
        yield Rail(label, (power,), 1e-6)
        return
    interval = folder / "update_interval"
    for file in tree.found(f"{folder.relative_to(tree.root)}/in*_label"):
        number = file.name.removeprefix("in").removesuffix("_label")
        parts = (folder / f"in{number}_input", folder / f"curr{number}_input")
        label = _label(tree, file)
        if label and not _UNUSED.fullmatch(label) and all(map(tree.there, parts)):
            yield Rail(label, parts, 1e-6, interval if tree.there(interval) else None)


def _label(tree: Tree, file: Path) -> str:
    return " ".join((tree.text(file) or "").split())


def _iio(tree: Tree, folder: Path) -> Iterator[Rail]:
    for file in tree.found(f"{folder.relative_to(tree.root)}/rail_name_*"):
        label, power = _label(tree, file), folder / f"in_power{file.name.removeprefix('rail_name_')}_input"
        if label and not _UNUSED.fullmatch(label) and tree.there(power):
            yield Rail(label, (power,), 1e-3)


@dataclass(frozen=True)
class Total:
    """The rails whose sum is the power of the board, and what they leave out; no rails if the sum cannot be had.

    Args:
        names: Of the rails.
        note: What they cover and what they leave out, or why there is no total.
    """

    names: tuple[str, ...]
    note: str

    @property
    def boundary(self) -> str:
        """What the joules cover, in words."""
        return f"{' + '.join(self.names)} ({self.note})" if self.names else f"unknown: {self.note}"


def find_total(names: Sequence[str], entry: Board | None) -> Total:
    """Return which rails make up the total: by the catalogue, else the input rail, else all that there are.

    Args:
        names: Labels of the rails that have a sensor.
        entry: The board's entry in the catalogue, if any.
    """
    if not names:
        known = entry is not None and not entry.rails.names
        return Total(
            (), entry.rails.note if entry is not None and known else "no power sensor of this board can be read"
        )
    if entry is not None:
        return _listed_total(names, entry.rails)
    inputs = [name for name in _INPUTS if name in names]
    if inputs:
        return Total((inputs[0],), "input of a board that is not in devices/; what it leaves out is not known")
    return Total(tuple(names), "every rail found on a board that is not in devices/; what is missing is not known")


def averaged_s(tree: Tree, names: Sequence[str]) -> float:
    """Return the longest time that a value of some rails is the mean over, in seconds; 0 if their chips say nothing."""
    intervals = {rail.interval for rail in find_rails(tree) if rail.name in names and rail.interval is not None}
    return max((tree.number(interval) or 0 for interval in intervals), default=0) / 1000


def _listed_total(names: Sequence[str], rails: BoardRails) -> Total:
    chosen = {name: _named(name, names) for name in rails.total}
    missing = [name for name, found in chosen.items() if found is None]
    if not missing:
        return Total(tuple(name for name in chosen.values() if name is not None), rails.note)
    if rails.otherwise and set(rails.otherwise) <= set(names):
        return Total(rails.otherwise, f"{rails.otherwise_note}; the sensor of {' and '.join(missing)} is missing")
    return Total((), f"the sensor of {' and '.join(missing)} is missing, found {', '.join(names)}")


def _named(name: str, names: Sequence[str]) -> str | None:
    return next((each for each in (name, _ALSO.get(name)) if each in names), None)


class PowerSource(Protocol):
    """Where watts come from."""

    def power_w(self) -> float:
        """Return the power of the total now, in watts.

        Raises:
            OSError: If a sensor does not answer.
            ValueError: If it answers no number.
        """

    def stale(self) -> bool:
        """Say whether the sensors are no longer where they were."""

    def renew(self) -> None:
        """Look for the sensors again, in case they have moved.

        Raises:
            OSError: If they are gone.
        """

    def close(self) -> None:
        """Release what it holds."""


class Rails:
    """The rails of a total, their files kept open: opening one anew for each reading costs more than reading it.

    Args:
        tree: The board's files.
        names: The rails to add up.
    """

    def __init__(self, tree: Tree, names: Sequence[str]) -> None:
        self._tree, self._names = tree, tuple(names)
        self._open: list[tuple[float, tuple[int, ...]]] = []

    def power_w(self) -> float:
        """Return the sum of the rails now, in watts; a rail may read a little below zero.

        Raises:
            OSError: If a sensor does not answer.
            ValueError: If it answers no number.
        """
        if not self._open:
            self.renew()
        total_w = 0.0
        for scale, handles in self._open:
            product = scale
            for handle in handles:
                product *= int(os.pread(handle, _READ_BYTES, 0))
            total_w += product
        return total_w

    def stale(self) -> bool:
        """Say whether a file that is open is no longer in any folder."""
        return any(os.fstat(handle).st_nlink == 0 for _, handles in self._open for handle in handles)

    def renew(self) -> None:
        """Find the rails again by their labels, whatever their folders are called now, and open them.

        Raises:
            OSError: If one is gone.
        """
        self.close()
        rails = {rail.name: rail for rail in find_rails(self._tree)}
        for name in self._names:
            if name not in rails:
                raise OSError(f"the sensor of {name} is gone")
            handles: list[int] = []
            self._open.append((rails[name].scale, ()))
            for file in rails[name].files:
                handles.append(_opened(file))
                self._open[-1] = (rails[name].scale, tuple(handles))

    def close(self) -> None:
        """Close the files."""
        for _, handles in self._open:
            for handle in handles:
                os.close(handle)
        self._open = []


def _opened(file: Path) -> int:
    handle = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(f"{file} is no plain file")
    return handle
