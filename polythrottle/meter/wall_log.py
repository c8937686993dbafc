"""The log of an external meter: a CSV file with a header, times in seconds and watts."""

import csv
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from polythrottle.errors import BadFile

_REST = "(beyond the heading)"
_POWER_ENDS = ("_w", "(w)", "[w]", "watts", "watt")
_NO_POWER = re.compile(r"apparent|reactive|factor|setpoint|limit|target|\b(k?var?|pf|set)\b")
"""Words in columns beside active power that power meters and their programs write."""


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
        path: A CSV file with a header.
        column: Which column is the power; if None the only one whose name says power or watts, and not that it is
            another power (apparent, reactive), a factor, or what was set.
        time_column: Which is the time, in seconds; the first whose name says time if None.

    Raises:
        BadFile: If there is no such file or column, several may be the power, or a line is not two numbers.
    """
    if path.exists() and not path.is_file():
        raise BadFile(f"{path} is no regular file")
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            rows = list(csv.DictReader(file, restkey=_REST))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise BadFile(f"{path} cannot be read: {why}") from error
    if not rows:
        raise BadFile(f"{path} holds no reading")
    power = column or _only_power(path, rows[0])
    times = _named(rows[0], lambda name: "time" in name or name in ("t", "t_s"))
    if not (time_column or times):
        raise BadFile(f"{path}: say which column is the time with --time-column; it has {', '.join(map(str, rows[0]))}")
    time = time_column or times[0]
    try:
        return WallLog(power, tuple((float(row[time]), float(row[power])) for row in rows))
    except KeyError as error:
        raise BadFile(f"{path} has no column {error}; it has {', '.join(rows[0])}") from error
    except (TypeError, ValueError) as error:
        raise BadFile(f"{path} holds something that is not a number: {error}") from error


def _only_power(path: Path, row: Mapping[str, str]) -> str:
    """Return the one column that is active power by its name."""
    found = _named(row, _is_power)
    if len(found) == 1:
        return found[0]
    why = f"{', '.join(found)} may all be the power; " if found else ""
    raise BadFile(f"{path}: {why}say which column it is with --column; it has {', '.join(map(str, row))}")


def _is_power(name: str) -> bool:
    said = "power" in name or name.endswith(_POWER_ENDS)
    return said and not _NO_POWER.search(name.replace("_", " "))


def _named(row: Mapping[str, str], fits: Callable[[str], bool]) -> list[str]:
    return [name for name in row if name and fits(name.strip().lower())]
