"""One row of a table, its cells by column: texts, numbers and times, with a line for what is none of them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from math import isfinite
from pathlib import Path

from polythrottle.errors import BadFile

_LEAST, _MOST = 1e-12, 1e24
_MOST_COUNTED = 1_000_000
_FIRST_YEAR, _LAST_YEAR = 1971, 2100
_CLOCK = re.compile(r"(.+[T ]\d\d:\d\d:\d\d)(?:[.,](\d+))?(Z|[+-]\d\d:\d\d)?")
_DECIMAL_COMMA = re.compile(r"[+-]?\d+,\d+")


@dataclass(frozen=True)
class Cells:
    """One line of a table, its cells by column.

    Attributes:
        path: The file, for messages.
        cells: Column → text.
        counted: Returns the number of the line in the file.
    """

    path: Path
    cells: Mapping[str, str]
    counted: Callable[[], int]

    @property
    def line(self) -> int:
        """The number of the line in the file."""
        return self.counted()

    def text(self, column: str) -> str:
        """Return a text that may not be empty, in one line.

        Raises:
            BadFile: If it is, or holds what cannot be printed.
        """
        if not (text := " ".join(self.cells.get(column, "").split())):
            raise self.bad(column, "is empty; it needs a name")
        if not text.isprintable():
            raise self.bad(column, f"is {text[:40]!r}; it needs a name that can be printed")
        return text

    def number(self, column: str, least: float = _LEAST, most: float = _MOST) -> float:
        """Return a number within bounds.

        Raises:
            BadFile: If it is missing, no number, or not within them.
        """
        text = self.cells.get(column, "").strip()
        try:
            value = float(text)
        except ValueError:
            point = "; write a decimal point, not a comma" if _DECIMAL_COMMA.fullmatch(text) else ""
            raise self.bad(column, f"is {text[:40]!r}; it needs a number{point}") from None
        if not (isfinite(value) and least <= value <= most):
            asked = f"of at least {least:g}" if value < least else f"from {least:g} to {most:g}"
            raise self.bad(column, f"is {text[:40]}; it needs a number {asked}")
        return value

    def whole(self, column: str, least: int = 1) -> int:
        """Return a whole number, at most a million.

        Raises:
            BadFile: If it is none.
        """
        value = self.number(column, least, _MOST_COUNTED)
        if value != int(value):
            raise self.bad(column, f"is {value:g}; it needs a whole number")
        return int(value)

    def holds(self, column: str) -> bool:
        """Return whether a cell is there and says something."""
        return self.cells.get(column, "").strip().lower() not in {"", "nan", "none", "null", "na"}

    def perhaps(self, column: str, least: float = _LEAST) -> float | None:
        """Return a number, or None where the cell is empty or the column missing.

        Raises:
            BadFile: If something else is there.
        """
        return self.number(column, least) if self.holds(column) else None

    def time(self, column: str) -> datetime:
        """Return a time of day with its date, in UTC and without saying so; one without a zone is taken for UTC.

        Raises:
            BadFile: If it is no ISO 8601 time of 1971 to 2100.
        """
        text = self.cells.get(column, "").strip()
        try:
            when = iso_time(text)
            when = when.replace(tzinfo=None) - (when.utcoffset() or timedelta())
        except (ValueError, OverflowError):
            raise self.bad(column, f"is {text[:40]!r}; it needs a time such as 2019-02-18T23:40:00") from None
        if not _FIRST_YEAR <= when.year <= _LAST_YEAR:
            raise self.bad(column, f"is {text[:40]!r}; it needs a year from {_FIRST_YEAR} to {_LAST_YEAR}")
        return when

    def flag(self, column: str) -> bool:
        """Return what 0 or 1 says.

        Raises:
            BadFile: If something else is there.
        """
        if (text := self.text(column)) not in {"0", "1"}:
            raise self.bad(column, f"is {text[:40]!r}; it is 0 or 1")
        return text == "1"

    def bad(self, column: str, what: str) -> BadFile:
        """Return an error that names file, line and column."""
        return BadFile(f"{self.path}, line {self.line}: {column} {what}")


def iso_time(text: str) -> datetime:
    """Return an ISO 8601 time, also with a Z, or with parts of a second in any number of digits (Python 3.10 has not).

    Raises:
        ValueError: If it is none.
    """
    if (match := _CLOCK.fullmatch(text.strip())) is None:
        return datetime.fromisoformat(text.strip())
    begin, parts, zone = match.groups(default="")
    return datetime.fromisoformat(f"{begin}{f'.{parts[:6]:0<6}' if parts else ''}{'+00:00' if zone == 'Z' else zone}")
