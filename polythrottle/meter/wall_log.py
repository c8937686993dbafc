"""The log of an external meter: a CSV file with a header, times and watts."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from polythrottle.errors import BadFile
from polythrottle.tables import Table, read

_POWER_ENDS = ("_w", "(w)", "[w]", "watts", "watt")
_NO_POWER = re.compile(r"apparent|reactive|factor|setpoint|limit|target|\b(k?var?|pf|set)\b")
"""Words in columns beside active power that power meters and their programs write."""
_TIME = re.compile(r"(.*[^a-z])?(time|timestamp|datetime|epoch)([^a-z].*)?|t([^a-z]*|_[mun]?s)")
_UNIT = re.compile(r"[^a-z](m|u|µ|n|milli|micro|nano)?s(?:ecs?|econds?)?[^a-z]*$")
_PARTS_S = {"m": 1e-3, "milli": 1e-3, "u": 1e-6, "µ": 1e-6, "micro": 1e-6, "n": 1e-9, "nano": 1e-9}
_EPOCHS = ((1e17, 1e-9), (1e14, 1e-6), (1e11, 1e-3))
"""Above which a time without a unit is one since 1970 in parts of a second: in whole ones it would be the year 5000."""
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
            ``time_ms``, else in seconds, unless it is so large that it can only be in parts of one, since 1970.

    Raises:
        BadFile: If there is no such file or column, several may be the power, or a line is not two numbers.
    """
    table = read(path, loose=True, most_rows=_MOST_READINGS)
    power = column or _only_power(table)
    times = [name for name in table.names if _TIME.fullmatch(name.strip().lower())]
    if not (time_column or times):
        raise BadFile(f"{path}: say which column is the time with --time-column; it has {', '.join(table.names)}")
    name = time_column or times[0]
    moments, powers_w = _numbers(table, name), _numbers(table, power)
    unit_s = _unit_s(name, moments)
    return WallLog(power, tuple((moment * unit_s, power_w) for moment, power_w in zip(moments, powers_w, strict=True)))


def _numbers(table: Table, column: str) -> list[float]:
    """Return a column of numbers; there must be one of that name and no more."""
    if (count := table.names.count(column)) != 1:
        has = f"{count} columns {column!r}; rename one" if count else f"no column {column!r}"
        raise BadFile(f"{table.path} has {has}; it has {', '.join(table.names)}")
    found: list[float] = table.numbers(column).tolist()
    return found


def _only_power(table: Table) -> str:
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
