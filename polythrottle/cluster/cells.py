"""The lines of CSV files, whoever wrote them: comma, semicolon, tab or bar between cells, gzipped or not.

A header comes first, below any comments (lines that begin with ``#``) and empty lines, and may itself be such a
comment. Whatever is wrong is one line that names the file, the line and what was expected.
"""

import csv
import gzip
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from difflib import get_close_matches
from math import isfinite
from pathlib import Path

from polythrottle.errors import BadFile

_GZIP = b"\x1f\x8b"
_SEPARATORS = ",;\t|"
_MOST_ROWS = 1_000_000
_LEAST, _MOST = 1e-12, 1e24
_MOST_COUNTED = 1_000_000
_NAMED = 12
_FIRST_YEAR, _LAST_YEAR = 1971, 2100
_TOLD = re.compile(r"\s*sep=.\s*", re.IGNORECASE)
"""What a spreadsheet writes first to say what separates its cells."""
_DECIMAL_COMMA = re.compile(r"[+-]?\d+,\d+")


@dataclass(frozen=True)
class Cells:
    """One line of a table, its cells by column.

    Attributes:
        path: The file, for messages.
        line: Number of the line in it.
        cells: Column → text.
    """

    path: Path
    line: int
    cells: Mapping[str, str]

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
            when = datetime.fromisoformat(text)
            when = when.astimezone(UTC).replace(tzinfo=None) if when.tzinfo else when
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


def lines(path: Path, columns: Sequence[str]) -> Iterator[Cells]:
    """Yield the lines of a CSV file that has certain columns, among others.

    Args:
        path: The file, gzip-compressed or not; what separates cells is whichever finds most of the columns.
        columns: Names that its header must have.

    Raises:
        BadFile: If it cannot be read, lacks a column, repeats one, is damaged, or holds no rows.
    """
    _check_file(path)
    try:
        with path.open("rb") as raw:
            packed = raw.read(2) == _GZIP
        with (
            gzip.open(path, "rt", encoding="utf-8-sig", newline="")
            if packed
            else path.open(encoding="utf-8-sig", newline="") as file
        ):
            yield from _cells(path, file, columns)
    except OSError as error:  # a bad gzip file is one too
        raise BadFile(f"{path} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise BadFile(f"{path} is not a CSV file in UTF-8, or is damaged; save it as text, UTF-8") from error
    except (EOFError, zlib.error, csv.Error) as error:
        raise BadFile(f"{path} is not a CSV file, or is damaged: {error}") from error


def _check_file(path: Path) -> None:
    try:
        there, whole = path.exists(), path.is_file()
    except OSError as error:
        raise BadFile(f"{str(path)[:200]} cannot be read: {error.strerror}") from error
    if not there:
        raise BadFile(f"there is no file {str(path)!r} to read a table from")
    if not whole:  # a pipe could be read only once, and formats are told apart by looking twice
        raise BadFile(f"{path} is no file that a table can be read from; name a CSV file on disk")


def _cells(path: Path, file: Iterable[str], columns: Sequence[str]) -> Iterator[Cells]:
    numbered = iter(enumerate(file, start=1))
    begin, header, separator = _header(numbered, columns)
    names = _named(path, next(csv.reader([header], delimiter=separator), []), columns)
    reader = csv.reader((_uncommented(line) for _, line in numbered), delimiter=separator)
    count, width = 0, len(names)
    for fields in reader:
        if not any(field.strip() for field in fields):
            continue
        number = begin + reader.line_num
        if len(fields) < width or any(field.strip() for field in fields[width:]):
            raise BadFile(f"{path}, line {number}: {len(fields)} fields, but the header has {width}")
        count += 1
        if count > _MOST_ROWS:
            raise BadFile(f"{path} holds more than {_MOST_ROWS:,} rows; cut it")
        yield Cells(path, number, dict(zip(names, fields, strict=False)))
    if not count:
        raise BadFile(f"{path} holds no rows; it needs a header and at least one row")


def _header(numbered: Iterator[tuple[int, str]], columns: Sequence[str]) -> tuple[int, str, str]:
    """Return the number of the header's line, the line, and what separates its names."""
    for number, line in numbered:
        text = line.lstrip("# \t") if line.lstrip().startswith("#") else line
        separator = max(_SEPARATORS, key=lambda each: _fit(text, each, columns))
        whole = bool(columns) and _fit(text, separator, columns)[0] == len(columns)
        if text.strip() and (whole or text is line) and not _TOLD.fullmatch(line):
            return number, text, separator
    return 0, "", ","


def _fit(line: str, separator: str, columns: Sequence[str]) -> tuple[int, int]:
    """Return how many of the columns a separator finds in a header, and how many names."""
    names = [name.strip() for name in next(csv.reader([line], delimiter=separator), [])]
    return sum(column in names for column in columns), len(names)


def _uncommented(line: str) -> str:
    return "\n" if line.lstrip().startswith("#") else line


def _named(path: Path, fields: Sequence[str], columns: Sequence[str]) -> list[str]:
    """Return the names of a header without the empty ones at its end, which spreadsheets leave."""
    names = [field.strip() for field in fields]
    while names and not names[-1]:
        names.pop()
    if missing := [column for column in columns if column not in names]:
        found = ", ".join(name[:40] for name in names[:_NAMED]) + (", …" if len(names) > _NAMED else "")
        raise BadFile(
            f"{path} has no column {', '.join(missing)}; it needs {', '.join(columns)}"
            f" and has {found or 'nothing'}{_renamed(missing, [name for name in names if name not in columns])}"
        )
    if len(set(names)) < len(names):
        raise BadFile(f"{path} has a column twice in its header; each may be there once")
    return names


def _renamed(missing: Sequence[str], names: Sequence[str]) -> str:
    """Return which names look like columns that are missing, as the end of a sentence."""
    lowered = {name.lower(): name for name in names}
    pairs = {column: get_close_matches(column, lowered, n=1, cutoff=0.6) for column in missing}
    hints = [f"{lowered[near[0]][:40]!r} to {column!r}" for column, near in pairs.items() if near]
    return f"; perhaps rename {', '.join(hints)}" if hints else ""
