"""Meters that are files: hwmon's of the kernel, and a CSV log of times and watts that another program writes."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timezone
from pathlib import Path
from statistics import median
from typing import IO

from polythrottle.actuation.drivers.controls import text_of
from polythrottle.backends.meters.live_meter import Sample, power_sensor
from polythrottle.backends.power import NAMES, channels
from polythrottle.domain.backports import paired, pairwise, removesuffix
from polythrottle.domain.errors import BadFile, DeviceError, InvalidInput, PermissionDenied
from polythrottle.domain.ports import Sensor
from polythrottle.storage.cells import iso_time
from polythrottle.storage.tables import Table, read
from polythrottle.storage.untrusted import check_plain, printable

# The log of an external meter: a CSV file with a header, times and watts.

_POWER_ENDS = ("_w", "(w)", "[w]", "watts", "watt")
_NO_POWER = re.compile(r"apparent|reactive|factor|setpoint|limit|target|\b(k?var?|pf|set)\b")
"""Words in columns beside active power that power meters and their programs write."""
_TIME = re.compile(r"(.*[^a-z])?(time|timestamp|datetime|epoch|unix)([^a-z].*)?|t([^a-z]*|_[mun]?s)")
_UNIT = re.compile(r"[^a-z](m|u|µ|n|milli|micro|nano)?s(?:ecs?|econds?)?[^a-z]*$")
_PARTS_S = {"m": 1e-3, "milli": 1e-3, "u": 1e-6, "µ": 1e-6, "micro": 1e-6, "n": 1e-9, "nano": 1e-9}
_EPOCHS = ((1e17, 1e-9), (1e14, 1e-6), (1e11, 1e-3))
"""Above which a time without a unit is one since 1970 in parts of a second: in whole ones it would be the year 5000."""
_UNIT_W = " W"
_MOST_READINGS = 20_000_000


@dataclass(frozen=True)
class WallLog:
    """What an external meter recorded.

    Args:
        column: Which column is the power.
        readings: Times in seconds and watts.
    """

    column: str
    readings: tuple[tuple[float, float], ...]


def read_wall(path: Path, column: str | None = None, time_column: str | None = None) -> WallLog:
    """Return the log of an external meter.

    Args:
        path: A CSV file with a header, its fields separated by commas, semicolons or tabs.
        column: Which column is the power; if None the only one whose name says power or watts, and not that it is
            another power (apparent, reactive), a factor, or what was set.
        time_column: Which is the time; the first whose name says time if None. It is in the unit after its name, as in
            ``time_ms``, else in seconds, unless it is so large that it can only be in parts of one, since 1970; or
            it is a date with a time of day (ISO 8601).

    Raises:
        BadFile: If there is no such file or column, several may be the power, or a line is not two numbers.
    """
    table = read(path, loose=True, most_rows=_MOST_READINGS)
    power = power_column(path, table.names, column)
    name = time_column_of(path, table.names, time_column)
    moments = _moments(table, name)
    powers_w = _watts(table, power)
    unit = unit_s(name, moments)
    return WallLog(power, tuple((moment * unit, power_w) for moment, power_w in paired(moments, powers_w)))


def time_column_of(path: Path, names: Sequence[str], given: str | None = None) -> str:
    """Return which column is the time: the first whose name says so, if nobody does.

    Raises:
        BadFile: If none does.
    """
    times = [name for name in names if _TIME.fullmatch(name.strip().lower())]
    if not (given or times):
        raise BadFile(f"{path}: say which column is the time with --time-column; it has {', '.join(names)}")
    return given or times[0]


def _numbers(table: Table, column: str) -> list[float]:
    """Return a column of numbers; there must be one of that name and no more."""
    if (count := table.names.count(column)) != 1:
        if count:
            has = f"{count} columns {column!r}; rename one"
        else:
            has = f"no column {column!r}"
        raise BadFile(f"{table.path} has {has}; it has {', '.join(table.names)}")
    found: list[float] = table.numbers(column).tolist()
    return found


def _watts(table: Table, column: str) -> list[float]:
    """Return a column of watts, each of which may have its unit after it."""
    if table.names.count(column) == 1 and any(text.rstrip().endswith(_UNIT_W) for text in table.texts(column)):
        bare = {column: [_bare(text) for text in table.texts(column)]}
        table = replace(table, frame=table.frame.assign(**bare))
    return _numbers(table, column)


def _bare(text: str) -> str:
    """Return watts without their unit, which nvidia-smi writes after them unless it is told nounits."""
    return removesuffix(text.strip(), _UNIT_W)


def _moments(table: Table, column: str) -> list[float]:
    """Return a column of times, each a number or a date with a time of day."""
    try:
        return _numbers(table, column)
    except BadFile:
        if column not in table.names:
            raise
        try:
            return [_moment_of(text) for text in table.texts(column)]
        except ValueError:
            pass
        raise


def _moment_of(text: str) -> float:
    """Return a time: a number as it stands, a date with a time of day in seconds since 1970.

    Raises:
        ValueError: If it is neither.
    """
    try:
        return float(text)
    except ValueError:
        when = iso_time(text.strip().strip('"').replace("/", "-"))
        return (when if when.tzinfo else when.replace(tzinfo=timezone.utc)).timestamp()


def power_column(path: Path, names: Sequence[str], given: str | None = None) -> str:
    """Return which column is the power: the only one that is active power by its name, if nobody says.

    Raises:
        BadFile: If none is, or several may be.
    """
    if given:
        found = [given]
    else:
        found = [name for name in names if _is_power(name.strip().lower())]
    if len(found) == 1:
        return found[0]
    why = ""
    if found:
        why = f"{', '.join(found)} may all be the power; "
    raise BadFile(
        f"{path}: {why}say which column it is, with --column or as a meter's ?column=; it has {', '.join(names)}"
    )


def _is_power(name: str) -> bool:
    said = "power" in name or name.endswith(_POWER_ENDS)
    return said and not _NO_POWER.search(name.replace("_", " "))


def unit_s(name: str, moments: Sequence[float]) -> float:
    """Return the unit of a column of times, in seconds.

    Args:
        name: Of the column, which may end in the unit.
        moments: Some of it.
    """
    if said := _UNIT.search(name.strip().lower()):
        return _PARTS_S.get(said[1], 1.0)
    typical = median(moments) if moments else 0.0
    return next((unit_s for least, unit_s in _EPOCHS if typical > least), 1.0)


# Meters that are files: hwmon's of the kernel, and a log that another program writes.
#
# hwmon (Documentation/hwmon/sysfs-interface.rst): ``powerN_input`` and ``powerN_average`` in µW, the latter over
# ``powerN_average_interval`` in ms, ``energyN_input`` in µJ, ``update_interval`` in ms, ``powerN_label`` and
# ``name``.

_MICRO = 1e-6
_MILLI = 1e-3
_HWMON = re.compile(r"(power\d+)_(?:input|average)|(energy\d+)_input")
_PREFERRED = ("energy1_input", "power1_average", "power1_input")
_AVERAGING = ("ina",)
"""Chips whose ``update_interval`` is what they average over, as INA226 and INA260 (Documentation/hwmon/ina2xx.rst)."""
_MOST_TEXT = 64
_MOST_LINE = 4096
_TAIL_BYTES = 1 << 16
_PART = 1 << 20


class HwmonMeter:
    """A power or energy file of hwmon, or the folder of a chip that has one.

    Args:
        path: Of either.

    Raises:
        DeviceError: If there is no such file, or it is neither.
        PermissionDenied: If it cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self._file = _hwmon_file(path)
        self.counts = self._file.name.startswith("energy")
        chip = _text(self._file.parent / "name") or self._file.parent.name
        label = _text(self._file.parent / f"{self._file.name.partition('_')[0]}_label")
        self.boundary = f"{' '.join(filter(None, (chip, label)))}, hwmon at {self._file}"

    @property
    def sensor(self) -> Sensor:
        """What the files beside it say; without them it is new at every look."""
        folder = self._file.parent
        kind = self._file.name.partition("_")[0]
        step_s = _milliseconds(folder / "update_interval")
        if self.counts:
            return Sensor(step_s=step_s, quantum_j=_MICRO, source="hwmon", counts=True)
        if self._file.name.endswith("_average"):
            average_s = _milliseconds(folder / f"{kind}_average_interval")
        elif _text(folder / "name").startswith(_AVERAGING):
            average_s = step_s
        else:
            average_s = 0.0
        return power_sensor(step_s or average_s, average_s, source="hwmon")

    def sample(self) -> tuple[Sample, ...]:
        """Return what the file says now.

        Raises:
            DeviceError: If it cannot be read, or says no number.
        """
        try:
            text = text_of(self._file)[:_MOST_TEXT]  # by descriptor: a sensor that sleeps answers EAGAIN
        except OSError as err:
            raise DeviceError(f"{self._file} cannot be read: {err.strerror}") from err
        try:
            value = float(text) * _MICRO
        except ValueError:
            raise DeviceError(f"{self._file} says {printable(text)[:40]!r}, which is no number") from None
        return (Sample(energy_j=value) if self.counts else Sample(value),)

    def close(self) -> None:
        """Nothing is held."""


class GraceMeter(HwmonMeter):
    """One of the power meters of a Grace superchip's firmware.

    Args:
        name: One of `polythrottle.backends.power.NAMES`.
        socket: Of which; of the only one if None.
        root: Where ``sys`` hangs.

    Raises:
        InvalidInput: If there is no such name, or there are several sockets and none is named.
        DeviceError: If this machine has no such meter.
    """

    def __init__(self, name: str, socket: int | None = None, root: Path = Path("/")) -> None:
        if name not in NAMES:
            raise InvalidInput(f"grace:{name} is no power meter of a Grace superchip; they are {', '.join(NAMES)}")
        there = channels(root)
        found = [each for each in there if each.name == name and socket in (None, each.socket)]
        if not found:
            known = ", ".join(f"grace:{each.name}?socket={each.socket}" for each in there) or "none"
            raise DeviceError(f"there is no such power meter of a Grace superchip here; found {known}")
        if len(found) > 1:
            sockets = " or ".join(f"socket={each.socket}" for each in found)
            raise InvalidInput(f"there are {len(found)} meters of that name; say which: grace:{name}?{sockets}")
        super().__init__(found[0].file)
        self.boundary = f"{found[0].label}: {found[0].covers}"


def _hwmon_file(path: Path) -> Path:
    try:
        if path.is_dir():
            names = sorted(each.name for each in path.iterdir())
        else:
            names = [path.name]
    except PermissionError as err:
        raise PermissionDenied(f"{path} cannot be read by this user") from err
    found = [name for name in (*_PREFERRED, *names) if name in names and _HWMON.fullmatch(name)]
    file = path / found[0] if path.is_dir() and found else path
    if not path.exists():
        raise DeviceError(f"{path} is not there; hwmon folders are numbered anew at each start, see /sys/class/hwmon")
    if not found:
        raise DeviceError(f"{path} is no power or energy file of hwmon, such as power1_input or energy1_input")
    check_plain(file)
    try:
        file.open().close()
    except PermissionError as err:
        raise PermissionDenied(f"{file} cannot be read by this user; as root it can, or with a udev rule") from err
    except OSError as err:
        raise DeviceError(f"{file} cannot be read: {err.strerror}") from err
    return file


def _text(path: Path) -> str:
    try:
        check_plain(path)
        return printable(text_of(path)[:_MOST_TEXT].strip())
    except (OSError, BadFile):
        return ""


def _milliseconds(path: Path) -> float:
    text = _text(path)
    if text.isdecimal():
        return int(text) * _MILLI
    return 0.0


class CsvMeter:
    """A log of times and watts, followed as it grows; the total goes by its own times.

    Args:
        path: With a header.
        column: Which column is the power; the only one whose name says so if None.
        time: Which is the time; the first whose name says so if None.

    Raises:
        BadFile: If there is no such file or column.
    """

    counts = False

    def __init__(self, path: Path, column: str | None = None, time: str | None = None) -> None:
        self._path = path
        self._file: IO[bytes] | None = None
        self._rest = b""
        self._seen = 0
        header, tail = self._head()
        names = next(csv.reader(io.StringIO(header), delimiter=self._delimiter), [])
        self._power = _place(path, names, power_column(path, names, column))
        self._time = 0
        self._time = _place(path, names, time_column_of(path, names, time))
        moments = [moment for each in tail if (moment := self._moment(each)) is not None]
        self._unit_s = unit_s(names[self._time], moments)
        gaps = [after - before for before, after in pairwise(moments) if after > before]
        self._step_s = median(gaps) * self._unit_s if gaps else 1.0
        self.boundary = f"{names[self._power].strip()} of {path.name}"

    def _head(self) -> tuple[str, list[str]]:
        """Return the header and some of the last lines."""
        check_plain(self._path)
        try:
            with open(self._path, "rb") as file:
                header = file.readline(_MOST_LINE).decode("utf-8-sig", "replace")
                begin = max(file.tell(), self._path.stat().st_size - _TAIL_BYTES)
                file.seek(begin)
                lines = file.read(_TAIL_BYTES).decode("utf-8", "replace").splitlines()
        except OSError as err:
            raise BadFile(f"{self._path} cannot be read: {err.strerror}") from err
        self._delimiter = next((each for each in (";", "\t") if each in header), ",")
        return header, lines

    @property
    def sensor(self) -> Sensor:
        """A mean over the time between two of its lines, as loggers write them."""
        return power_sensor(self._step_s, self._step_s, source="the times of the log, its means assumed")

    def _moment(self, line: str) -> float | None:
        fields = line.split(self._delimiter)
        try:
            return _moment_of(fields[self._time])
        except (ValueError, IndexError):
            return None

    def sample(self) -> tuple[Sample, ...]:
        """Return the lines that came since the last call; at first none, for the last may be of yesterday.

        Raises:
            DeviceError: If it is gone, was begun anew, or a line is not two numbers.
        """
        try:
            if self._file is None:
                check_plain(self._path)
                self._file = open(self._path, "rb")  # noqa: SIM115  held while it is followed
                self._seen = self._file.seek(0, io.SEEK_END)
                self._rest = b""
            if self._path.stat().st_size < self._seen:
                raise DeviceError(f"{self._path} became shorter: it was begun anew")
            part = self._file.read(_PART)
        except OSError as err:
            raise DeviceError(f"{self._path} cannot be read: {err.strerror}") from err
        self._seen += len(part)
        *lines, self._rest = (self._rest + part).split(b"\n")
        if len(self._rest) > _MOST_LINE:
            raise DeviceError(f"{self._path} has a line of more than {_MOST_LINE} characters; that is no log")
        whole = [line.decode("utf-8", "replace").strip() for line in lines if line.strip()]
        found = []
        for line in whole:
            fields = line.split(self._delimiter)
            try:
                power_w = float(_bare(fields[self._power]))
                moment = _moment_of(fields[self._time])
            except (ValueError, IndexError):
                told = printable(line)[:60]
                raise DeviceError(f"{self._path} has the line {told!r}, which is no time and power") from None
            found.append(Sample(power_w, time_s=moment * self._unit_s))
        return tuple(found)

    def close(self) -> None:
        """Let go of the file."""
        if self._file is not None:
            self._file.close()
            self._file = None


def _place(path: Path, names: list[str], name: str) -> int:
    if names.count(name) != 1:
        many = "no column"
        if name in names:
            many = f"{names.count(name)} columns"
        raise BadFile(f"{path} has {many} {name!r}; it has {', '.join(names)}")
    return names.index(name)
