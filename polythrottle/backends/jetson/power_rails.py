"""Power rails: sensors found by what they say they are, the board's total, its watts integrated to joules.

Jetson-stats instead.
"""

from __future__ import annotations

import os
import re
import stat
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from polythrottle.backends.power import BackgroundSampler
from polythrottle.backends.probe import Tree
from polythrottle.catalog import Board
from polythrottle.catalog.boards import Rails as BoardRails
from polythrottle.domain.backports import removeprefix, removesuffix
from polythrottle.domain.clock import Clock, VirtualClock
from polythrottle.domain.errors import DeviceError, TrialError

# Power rails: sensors found by what they say they are, and which of them make up the board's total.
#
# Units by driver: INA3221 through hwmon mV and mA, INA238 through hwmon µW, the older INA3221 through iio mW (Linux
# ``Documentation/hwmon``; NVIDIA Jetson Linux developer guide). Channels labelled ``NC`` are not connected, and a
# channel without a current is a sum of shunt voltages; neither is a rail.
#
# A value of the INA3221 is the mean of ``samples`` conversions, and there is a new one every ``update_interval``
# milliseconds, the time all of them take (Linux Documentation/hwmon/ina3221.rst). NVIDIA's ``nvpower.sh`` (BSD-3)
# sets 512 and 430 ms on tegra194 and tegra234.

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
        labels = (_label(tree, folder / name) for name in ("power1_label", "in1_label", "label"))
        # A developer kit of Thor has an INA238 at its input, without a label; a carrier's own sensor may be anywhere.
        label = next(filter(None, labels), "VIN" if kind == "ina238" else kind)
        yield Rail(label, (power,), 1e-6)
        return
    interval = folder / "update_interval"
    for file in tree.found(f"{folder.relative_to(tree.root)}/in*_label"):
        number = removesuffix(removeprefix(file.name, "in"), "_label")
        parts = (folder / f"in{number}_input", folder / f"curr{number}_input")
        label = _label(tree, file)
        if label and not _UNUSED.fullmatch(label) and all(map(tree.there, parts)):
            yield Rail(label, parts, 1e-6, interval if tree.there(interval) else None)


def _label(tree: Tree, file: Path) -> str:
    return " ".join((tree.text(file) or "").split())


def _iio(tree: Tree, folder: Path) -> Iterator[Rail]:
    for file in tree.found(f"{folder.relative_to(tree.root)}/rail_name_*"):
        label = _label(tree, file)
        power = folder / f"in_power{removeprefix(file.name, 'rail_name_')}_input"
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
        if self.names:
            return f"{' + '.join(self.names)} ({self.note})"
        return f"unknown: {self.note}"


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


class RailSensors:
    """The rails of a total, their files kept open: opening one anew for each reading costs more than reading it.

    Args:
        tree: The board's files.
        names: The rails to add up.
    """

    def __init__(self, tree: Tree, names: Sequence[str]) -> None:
        self._tree = tree
        self._names = tuple(names)
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


# Joules out of watts: power sampled on the monotonic clock and integrated by the trapezoid rule.
#
# The sensors of a Jetson have no energy counter. A thread reads them while the device is entered; in virtual time
# power is read when somebody asks, and integrated between. What the reading itself costs is measured
# (`Sampler.cost`).

_PATIENCE_S = 2.0
_PATIENCE_SAMPLES = 20


class Sampler:
    """A running total of energy.

    Args:
        source: Of power.
        clock: Readings go by it; a virtual one is sampled only when asked.
        hz: Samples per second.
        factor: What every joule is multiplied by.
    """

    def __init__(self, source: PowerSource, clock: Clock, hz: float, factor: float = 1.0) -> None:
        self._source = source
        self._clock = clock
        self._hz = hz
        self._factor = factor
        self._guard = threading.Lock()
        # The first look is at once, so that a window that begins now has its first power.
        self._background = BackgroundSampler(self._look, 1.0 / hz, clock, "polythrottle-power", at_once=True)
        self._last: tuple[float, float] | None = None
        self._total_j = 0.0
        self._gap_s = 0.0

    @property
    def cost(self) -> tuple[float, int]:
        """Processor seconds that sampling in the background has taken so far, and for how many samples."""
        return self._background.busy_s, self._background.looks

    def total_j(self) -> float:
        """Return the joules so far; never falls.

        Raises:
            DeviceError: If the sensors cannot be read any more.
            TrialError: Once, if they were not read for so long that the joules since are not known.
        """
        try:
            with self._guard:
                if self._source.stale():
                    self._source.renew()
                self._sample()
                if not self._background.users:
                    self._source.close()
                gap_s = self._gap_s
                self._gap_s = 0.0
        except (OSError, ValueError) as err:
            raise DeviceError(f"the power sensors can no longer be read: {err}") from err
        if gap_s:
            raise TrialError(f"power was not sampled for {gap_s:.1f} s, so the joules of this window are not known")
        return self._total_j

    def _sample(self) -> None:
        watts = self._power_w()
        now_s = self._clock.now()
        if self._last is not None:
            elapsed_s = now_s - self._last[0]
            # A total never falls, though single rails may read below zero when idle.
            self._total_j += max(0.0, (watts + self._last[1]) / 2 * elapsed_s * self._factor)
            if self._background.running and elapsed_s > max(_PATIENCE_S, _PATIENCE_SAMPLES / self._hz):
                self._gap_s = max(self._gap_s, elapsed_s)
        self._last = now_s, watts

    def _power_w(self) -> float:
        """Return the power now; sensors that do not answer are looked for once again, for they may have moved."""
        try:
            return self._source.power_w()
        except (OSError, ValueError):
            self._source.renew()
            return self._source.power_w()

    def start(self) -> None:
        """Sample in the background from now on, until `stop` was called as often; in virtual time, when asked."""
        if not self._background.users and not isinstance(self._clock, VirtualClock):
            with self._guard:
                self._last = None
        self._background.start()

    def stop(self) -> None:
        """Stop sampling, unless somebody else has started it too."""
        self._background.stop()
        with self._guard:
            if not self._background.users:
                self._source.close()

    def _look(self) -> None:
        # The next reading meets the same error where somebody can act on it.
        with self._guard, suppress(OSError, ValueError, DeviceError):
            self._sample()


# Power from jetson-stats, for people who already run it: ``jetson?reader=jtop``.
#
# Its readings are seldom (twice a second at best), and its own total is the sum of all rails on boards without an
# input rail, parts counted twice, so the board's total is made up here. It is used only when asked for and never by
# root: its service is spoken to in Python pickle behind a constant key, which must not reach a privileged process
# (jetson_stats, ``jtop/core/config.py``, ``jtop/service.py``).

_PERIOD_S = 0.5


class JetsonStats:
    """The rails as jetson-stats reads them.

    Args:
        entry: The board's entry in the catalogue, if any, which says which rails make up the total.

    Raises:
        DeviceError: If this is root, jetson-stats is not installed, its service does not answer, or it knows no rail.
    """

    def __init__(self, entry: Board | None) -> None:
        if os.geteuid() == 0:
            raise DeviceError(
                "reader=jtop is refused for root: jetson-stats speaks pickle, which must not reach a privileged "
                "process; leave reader=jtop out, and the sensors are read directly"
            )
        self._session: Any = None
        self._failure: type[Exception] = OSError
        self.renew()
        try:
            self.total = find_total(tuple(self._rails()), entry)
            if self.total.names:
                self.power_w()
        except (OSError, ValueError) as err:
            raise DeviceError(f"jetson-stats answers, but not with the power of rails: {err}") from err

    def _rails(self) -> Mapping[str, Any]:
        """Return what jetson-stats says of each rail that is online.

        Raises:
            ValueError: If it says something else.
        """
        power = self._session.power
        rails = None
        if isinstance(power, Mapping):
            rails = power.get("rail")
        if not isinstance(rails, Mapping):
            raise ValueError("this version has no power by rail")
        return {
            str(name): rail for name, rail in rails.items() if isinstance(rail, Mapping) and rail.get("online", True)
        }

    def power_w(self) -> float:
        """Return the power of the total as it was last read, in watts.

        Raises:
            OSError: If the service is gone.
            ValueError: If a rail is, or has no power.
        """
        if self._session is None:
            self.renew()
        try:
            answers = self._session.ok(spin=True)
        except self._failure as err:
            raise OSError(f"the service of jetson-stats does not answer any more: {err}") from err
        if not answers:
            raise OSError("the service of jetson-stats does not answer any more")
        rails = self._rails()
        total_w = 0.0
        for name in self.total.names:
            milliwatts = rails.get(name, {}).get("power")
            if not isinstance(milliwatts, (int, float)):
                raise ValueError(f"rail {name} has no power")
            total_w += milliwatts / 1000
        return total_w

    def stale(self) -> bool:
        """Say whether the service is to be asked anew: never, for it says so itself."""
        return False

    def renew(self) -> None:
        """Connect again.

        Raises:
            DeviceError: If jetson-stats is not installed or its service does not answer.
        """
        self.close()
        try:
            from jtop import JtopException, jtop
        except ImportError as err:
            raise DeviceError(f"reader=jtop needs jetson-stats: pip install 'polythrottle[jetson]' ({err})") from err
        session = jtop(interval=_PERIOD_S)
        try:
            session.start()
        except (JtopException, OSError) as err:
            raise DeviceError(f"the service of jetson-stats does not answer: {err}; is jtop.service running?") from err
        self._session = session
        self._failure = JtopException

    def close(self) -> None:
        """Disconnect."""
        if self._session is not None:
            self._session.close()
            self._session = None
