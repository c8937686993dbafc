"""The log of an external meter: a CSV file with a header, times and watts."""

import csv
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from polythrottle.errors import BadFile

_POWER_ENDS = ("_w", "(w)", "[w]", "watts", "watt")
_NO_POWER = re.compile(r"apparent|reactive|factor|setpoint|limit|target|\b(k?var?|pf|set)\b")
"""Words in columns beside active power that power meters and their programs write."""
_TIME = re.compile(r"(.*[^a-z])?(time|timestamp|datetime|epoch)([^a-z].*)?|t([^a-z]*|_[mun]?s)")
_UNIT = re.compile(r"[^a-z](m|u|µ|n|milli|micro|nano)?s(?:ecs?|econds?)?[^a-z]*$")
_PARTS_S = {"m": 1e-3, "milli": 1e-3, "u": 1e-6, "µ": 1e-6, "micro": 1e-6, "n": 1e-9, "nano": 1e-9}
_EPOCHS = ((1e17, 1e-9), (1e14, 1e-6), (1e11, 1e-3))
"""Above which a time without a unit is one since 1970 in parts of a second: in whole ones it would be the year 5000."""
_SEPARATORS = ",;\t|"


@dataclass(frozen=True)
class WallLog:
    """What an external meter recorded.

    Args:
        column: Which column is the power.
        readings: Times in seconds and watts.
    """

    column: str
    readings: tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class _Table:
    """A file with a header: the names, and each row that is not empty with the number of its last line."""

    path: Path
    names: tuple[str, ...]
    rows: tuple[tuple[int, tuple[str, ...]], ...]

    def numbers(self, column: str) -> list[float]:
        """Return a column of numbers.

        Raises:
            BadFile: If there is none or more than one of that name, or something in it is no finite number.
        """
        if (count := self.names.count(column)) != 1:
            has = f"{count} columns {column!r}; rename one" if count else f"no column {column!r}"
            raise BadFile(f"{self.path} has {has}; it has {', '.join(self.names)}")
        place = self.names.index(column)
        return [self._number(line, row[place] if place < len(row) else "", column) for line, row in self.rows]

    def _number(self, line: int, text: str, column: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not math.isfinite(value):
            hint = "; write 2.5, not 2,5" if "," in text else ""
            raise BadFile(f"{self.path}, line {line}: {text[:40]!r} in column {column} is not a number{hint}")
        return value


def read_wall(path: Path, column: str | None = None, time_column: str | None = None) -> WallLog:
    """Return the log of an external meter.

    Args:
        path: A CSV file with a header, its fields separated by commas, semicolons or tabs.
        column: Which column is the power; if None the only one whose name says power or watts, and not that it is
            another power (apparent, reactive), a factor, or what was set.
        time_column: Which is the time; the first whose name says time if None. It is in the unit after its name, as in
            ``time_ms``, else in seconds, unless it is so large that it can only be in parts of one, since 1970.

    Raises:
        BadFile: If there is no such file or column, several may be the power, or a line is not two numbers.
    """
    table = _read(path)
    power = column or _only_power(table)
    times = [name for name in table.names if _TIME.fullmatch(name.strip().lower())]
    if not (time_column or times):
        raise BadFile(f"{path}: say which column is the time with --time-column; it has {', '.join(table.names)}")
    name = time_column or times[0]
    moments, powers_w = table.numbers(name), table.numbers(power)
    unit_s = _unit_s(name, moments)
    return WallLog(power, tuple((moment * unit_s, power_w) for moment, power_w in zip(moments, powers_w, strict=True)))


def _read(path: Path) -> _Table:
    if path.exists() and not path.is_file():
        raise BadFile(f"{path} is no regular file")
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            separator = max(_SEPARATORS, key=file.readline().count)
            file.seek(0)
            reader = csv.reader(file, delimiter=separator)
            names = tuple(next(reader, ()))
            rows = tuple((reader.line_num, tuple(row)) for row in reader if row)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise BadFile(f"{path} cannot be read: {why}") from error
    if not rows:
        raise BadFile(f"{path} holds no reading")
    _see_that_rows_fit(path, names, rows, separator)
    return _Table(path, names, rows)


def _see_that_rows_fit(
    path: Path, names: Sequence[str], rows: Sequence[tuple[int, Sequence[str]]], separator: str
) -> None:
    """Refuse a row with more fields than the header: a decimal comma makes two numbers of one."""
    for line, row in rows:
        if any(field.strip() for field in row[len(names) :]):
            shown = separator.join(row)[:40]
            raise BadFile(
                f"{path}, line {line}: {shown!r} has {len(row)} fields, the header {len(names)}; write 2.5, not 2,5"
            )


def _only_power(table: _Table) -> str:
    """Return the one column that is active power by its name."""
    found = [name for name in table.names if _is_power(name.strip().lower())]
    if len(found) == 1:
        return found[0]
    why = f"{', '.join(found)} may all be the power; " if found else ""
    raise BadFile(f"{table.path}: {why}say which column it is with --column; it has {', '.join(table.names)}")


def _is_power(name: str) -> bool:
    said = "power" in name or name.endswith(_POWER_ENDS)
    return said and not _NO_POWER.search(name.replace("_", " "))


def _unit_s(name: str, moments: Sequence[float]) -> float:
    """Return the unit of a column of times, in seconds."""
    if said := _UNIT.search(name.strip().lower()):
        return _PARTS_S.get(said[1], 1.0)
    typical = median(moments)
    return next((unit_s for least, unit_s in _EPOCHS if typical > least), 1.0)
