"""Cells of tables: texts, numbers and times by column, and Parquet files as the texts a CSV file would have."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING

from polythrottle.domain.errors import BadFile, InvalidInput
from polythrottle.storage.untrusted import check_plain

if TYPE_CHECKING:
    import pandas as pd
    from pyarrow.parquet import FileMetaData

# One row of a table, its cells by column: texts, numbers and times, with a line for what is none of them.

_LEAST = 1e-12
_MOST = 1e24
_MOST_COUNTED = 1_000_000
_FIRST_YEAR = 1971
_LAST_YEAR = 2100
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
    # Asked for in messages alone: to count may mean to read the file once more.
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
            point = ""
            if _DECIMAL_COMMA.fullmatch(text):
                point = "; write a decimal point, not a comma"
            raise self.bad(column, f"is {text[:40]!r}; it needs a number{point}") from None
        if not (isfinite(value) and least <= value <= most):
            if value < least:
                asked = f"of at least {least:g}"
            else:
                asked = f"from {least:g} to {most:g}"
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
        if self.holds(column):
            return self.number(column, least)
        return None

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


# Tables in Parquet, as the texts a CSV file would have; needs pyarrow, which is installed apart.

_MAGIC = b"PAR1"
_MOST_COLUMNS = 1000
_MOST_ROWS = 10_000_000
_MOST_GROUPS = 10_000
_MOST_UNPACKED = 1_000_000_000
_BATCH = 4096
_BATCH_BYTES = 100_000_000
"""Rows that are unpacked at one time, and what they may take: a small file can hold one large text for all of them."""


def need_pyarrow(path: Path) -> None:
    """Check that Parquet can be read and written.

    Args:
        path: What for, for the message.

    Raises:
        InvalidInput: If pyarrow is not installed.
    """
    try:
        import pyarrow.parquet  # noqa: F401
    except ImportError as error:
        raise InvalidInput(f"{path}: Parquet needs the package pyarrow; pip install 'polythrottle[parquet]'") from error


def is_parquet(path: Path) -> bool:
    """Return whether a regular file begins like Parquet.

    Raises:
        BadFile: If it cannot be read.
    """
    check_plain(path)
    try:
        with path.open("rb") as raw:
            return raw.read(len(_MAGIC)) == _MAGIC
    except OSError as error:
        raise BadFile(f"{path} cannot be read: {error.strerror}") from error


def parquet_names(path: Path) -> list[str]:
    """Return the names of the columns.

    Raises:
        InvalidInput: As `need_pyarrow`.
        BadFile: If the file is damaged, or a column holds lists or records.
    """
    need_pyarrow(path)
    import pyarrow as pa
    import pyarrow.parquet as pq

    with _told(path):
        schema = pq.read_schema(path)
    if nested := [field.name for field in schema if pa.types.is_nested(field.type)]:
        raise BadFile(f"{path}: column {nested[0][:40]} holds lists or records; a table holds numbers and texts")
    if len(schema.names) > _MOST_COLUMNS:
        raise BadFile(f"{path} has more than {_MOST_COLUMNS:,} columns; it is no such table")
    return list(schema.names)


def parquet_frames(path: Path) -> Iterator[pd.DataFrame]:
    """Yield the rows in frames of texts, ``""`` where nothing is.

    Raises:
        BadFile: If the file is damaged, or holds texts of a size that does not occur.
    """
    import pandas as pd
    import pyarrow.parquet as pq

    with _told(path), pq.ParquetFile(path) as file:
        _refuse_if_huge(path, file.metadata)
        for batch in file.iter_batches(_BATCH):
            if batch.nbytes > _BATCH_BYTES:
                raise BadFile(f"{path} holds texts of a size that does not occur in tables; it is no such table")
            cells = {name: [_text(value) for value in batch.column(name).to_pylist()] for name in batch.schema.names}
            yield pd.DataFrame(cells, dtype=object)


def _refuse_if_huge(path: Path, metadata: FileMetaData) -> None:
    """Refuse a file that says itself that it unpacks to more than a table has.

    Raises:
        BadFile: If it does.
    """
    # Not all of them: how many there are is what the file says, too.
    groups = [metadata.row_group(number) for number in range(min(metadata.num_row_groups, _MOST_GROUPS + 1))]
    # A negative size, which only a forged file has, would make room for another.
    unpacked = sum(max(0, group.total_byte_size) for group in groups)
    if metadata.num_rows > _MOST_ROWS or len(groups) > _MOST_GROUPS or unpacked > _MOST_UNPACKED:
        most = f"{_MOST_ROWS:,} rows or {_MOST_UNPACKED // 1_000_000:,} MB"
        raise BadFile(f"{path} unpacks to more than {most}; it is no such table")


def _text(value: object) -> str:
    return "" if value is None or (isinstance(value, float) and value != value) else str(value)  # noqa: PLR0124


@contextmanager
def _told(path: Path) -> Iterator[None]:
    import pyarrow as pa

    try:
        yield
    except (OSError, pa.ArrowException) as error:
        # Arrow's errors go over many lines, some of them of its own source.
        why = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise BadFile(f"{path} is no Parquet file, or is damaged: {why[:200]}") from error
