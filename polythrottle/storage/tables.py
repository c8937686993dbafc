"""The one reader and writer of tables: CSV files, whoever wrote them, and Parquet, into pandas frames and out of them.

Comma, semicolon, tab or bar stands between cells, gzipped or not. A header comes first, below any comments (lines that
begin with ``#``) and empty lines, and may itself be such a comment. Whatever is wrong is one line that names the file,
the line, the column and what was expected.

pandas reads what is regular. Where a file is not (quotes, comments, rows of other lengths), and where a bad cell has to
be named, the file is gone through once more line by line, which is slower and knows where it is. Parquet needs pyarrow.
"""

from __future__ import annotations

import csv
import gzip
import io
import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from itertools import chain, islice
from math import inf
from pathlib import Path
from typing import IO, TYPE_CHECKING, cast

from polythrottle.domain.backports import paired
from polythrottle.domain.errors import BadFile, InvalidInput, StorageError
from polythrottle.storage import cells as parquet
from polythrottle.storage.atomic_file import check_folder, open_replacement
from polythrottle.storage.cells import Cells
from polythrottle.storage.untrusted import check_plain

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd
    from numpy.typing import NDArray

_GZIP = b"\x1f\x8b"
_SEPARATORS = ",;\t|"
ENDINGS = (".csv", ".csv.gz", ".parquet")
"""What tables that are looked for in folders are called."""
MOST_ROWS = 1_000_000
_AT_ONCE = 100_000
"""Rows that are held as text at one time."""
_LONGEST = 1_000_000
"""Characters in a line: without a bound an archive of a few kilobytes could be one line of gigabytes."""
_MOST_AT_ONCE = 100_000_000
"""Characters of the rows that are held as text at one time: a thousand in each."""
_MOST_COLUMNS = 10_000
_MOST_CELLS = 20_000_000
_MOST_UNPACKED = 100_000_000
_MOST_RATIO = 100
"""Characters that a gzipped file may unpack to, and beyond those how many for each byte of it."""
_IRREGULAR = re.compile('["#\0]')
_NAMED = 12
_TOLD = re.compile(r"\s*sep=.\s*", re.IGNORECASE)
"""What a spreadsheet writes first to say what separates its cells."""


@dataclass(frozen=True)
class Table:
    """The rows of a CSV file, as text.

    Attributes:
        path: The file, for messages.
        frame: A column for each name of the header, every cell a text, ``""`` where it is empty.
        begins: How many rows of the file come before these.
        columns: Names that were asked for, by which the header is known again.
    """

    path: Path
    frame: pd.DataFrame
    begins: int = 0
    columns: Sequence[str] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """The names in the header, in their order."""
        return tuple(map(str, self.frame.columns))

    def rows(self) -> Iterator[Cells]:
        """Yield each row."""
        names = self.names
        for index, fields in enumerate(self.frame.to_numpy(dtype=object).tolist()):
            yield Cells(self.path, dict(paired(names, fields)), partial(self._line, index))

    def texts(self, column: str) -> list[str]:
        """Return the cells of a column; of the last of that name."""
        cells: list[str] = self.frame.iloc[:, len(self.names) - 1 - self.names[::-1].index(column)].tolist()
        return cells

    def numbers(self, column: str, least: float = -inf, most: float = inf) -> NDArray[np.float64]:
        """Return a column of numbers within bounds, shape (rows,).

        Raises:
            BadFile: If one of them is none.
        """
        import numpy as np

        texts = self.texts(column)
        try:
            values = np.array(texts, dtype=object).astype(np.float64)
        except ValueError:
            # Not finite, so that the rows are gone through below, where the bad one is named.
            values = np.full(len(texts), np.nan)
        if not (np.isfinite(values) & (values >= least) & (values <= most)).all():
            return np.array([cells.number(column, least, most) for cells in self.rows()], dtype=np.float64)
        return values

    def at(self, index: int) -> Cells:
        """Return one row."""
        return next(islice(self.rows(), index, None))

    def typed(self) -> pd.DataFrame:
        """Return the frame with numbers in each column that holds nothing else; an empty cell is unknown."""
        import pandas as pd

        columns = {name: _typed(self.texts(name)) for name in self.names}
        typed: pd.DataFrame = pd.DataFrame(columns, index=self.frame.index)
        return typed

    def _line(self, index: int) -> int:
        if parquet.is_parquet(self.path):
            return self.begins + index + 1
        cells = next(islice(lines(self.path, self.columns, loose=True), self.begins + index, None), None)
        if cells is None:
            return self.begins + index + 2
        return cells.line


def read(path: Path, columns: Sequence[str] = (), *, loose: bool = False, most_rows: int = MOST_ROWS) -> Table:
    """Return a CSV file that has certain columns, among others, as a frame of texts.

    Args:
        path: The file, gzip-compressed or not; what separates cells is whichever finds most of the columns.
        columns: Names that its header must have.
        loose: Whether rows may be short and names repeat, as in what instruments log.
        most_rows: More are refused.

    Raises:
        BadFile: If it cannot be read, lacks a column, repeats one, is damaged, or holds no rows or too many.
    """
    import pandas as pd

    tables = list(parts(path, columns, loose=loose, most_rows=most_rows))
    if len(tables) == 1:
        whole = tables[0].frame
    else:
        whole = pd.concat([part.frame for part in tables], ignore_index=True)
    return Table(path, whole, 0, columns)


def parts(
    path: Path, columns: Sequence[str] = (), *, loose: bool = False, most_rows: int = MOST_ROWS
) -> Iterator[Table]:
    """Yield what `read` returns in pieces of at most 100,000 rows, so that a long record is never held as text.

    Raises:
        BadFile: As `read`.
    """
    count = 0
    for frame in _frames(path, columns, loose):
        yield Table(path, frame, count, columns)
        count += len(frame)
        if count > most_rows:
            raise _too_long(path, most_rows)
    if not count:
        raise BadFile(f"{path} holds no rows; it needs a header and at least one row")


def lines(
    path: Path, columns: Sequence[str] = (), *, loose: bool = False, most_rows: int = MOST_ROWS
) -> Iterator[Cells]:
    """Yield the rows of a CSV file one by one, without pandas: for short tables in processes that stay small.

    Args:
        path: As `read`.
        columns: As `read`.
        loose: As `read`.
        most_rows: As `read`.

    Raises:
        BadFile: As `read`.
    """
    count = 0
    for names, number, fields in _fields(path, columns, loose):
        count += 1
        if count > most_rows:
            raise _too_long(path, most_rows)
        yield Cells(path, dict(zip(names, fields)), partial(int, number))
    if not count:
        raise BadFile(f"{path} holds no rows; it needs a header and at least one row")


def rows(path: Path, columns: Sequence[str], *, most_rows: int = MOST_ROWS) -> Iterator[list[str]]:
    """Yield the cells of each row of a CSV file that need not have a header; one that is there is a row too.

    Args:
        path: As `read`.
        columns: Names by which a header is known; without one in the first line a comma stands between cells.
        most_rows: As `read`.

    Raises:
        BadFile: If it cannot be read, is damaged, or holds too many rows.
    """
    count = 0
    with _opened(path) as text:
        first = text.readline()
        separator = max(_SEPARATORS, key=lambda each: _fit(first, each, columns)[0])
        for fields in csv.reader(chain([first], text), delimiter=separator, strict=True):
            if any(field.strip() for field in fields):
                count += 1
                if count > most_rows:
                    raise _too_long(path, most_rows)
                yield fields


def header(path: Path, columns: Sequence[str] = ()) -> tuple[str, ...]:
    """Return the names in the header of a CSV file, without its rows being read.

    Args:
        path: As `read`.
        columns: As `read`.

    Raises:
        BadFile: If it cannot be read, lacks a column or is damaged.
    """
    if _parquet_there(path):
        return tuple(_parquet_names(path, columns))
    with _opened(path) as text:
        return tuple(_Head.of(path, text, columns, loose=True).names)


def check_writable(path: Path) -> None:
    """Refuse a path to which no table can be written, before the work that would fill it.

    Args:
        path: Its ending says the format: ``.csv`` or ``.parquet``.

    Raises:
        InvalidInput: If its ending is neither, or pyarrow is needed and not installed.
        StorageError: If it is no regular file, or no folder above it can be written to.
    """
    if path.suffix not in (".csv", ".parquet"):
        raise InvalidInput(f"{path}: the name of a table ends in .csv or .parquet")
    if path.suffix == ".parquet":
        parquet.need_pyarrow(path)
    try:
        if path.exists() and not path.is_file():
            raise StorageError(f"{path} cannot be written: it is not a regular file")
    except OSError as error:
        raise StorageError(f"{path} cannot be written: {error.strerror}") from error
    check_folder(path)


def csv_lines(rows: Iterable[Iterable[object]]) -> bytes:
    """Return rows as lines of a CSV file, without pandas: for what is written row by row."""
    text = io.StringIO()
    # As `write` ends them, so that a table which goes on row by row has one kind of line ends.
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue().encode()


def write(frame: pd.DataFrame, path: Path) -> None:
    """Write a frame as a table, whole or not at all; folders are made.

    Args:
        frame: Its index is left out.
        path: Its ending says the format: ``.csv`` or ``.parquet``.

    Raises:
        InvalidInput: As `check_writable`.
        StorageError: If it cannot be written.
    """
    check_writable(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open_replacement(path) as file:
            if path.suffix == ".parquet":
                frame.to_parquet(file, index=False)
            else:
                frame.to_csv(file, index=False, lineterminator="\n")
    except OSError as error:
        raise StorageError(f"{path} cannot be written: {error.strerror}") from error


def _typed(texts: Sequence[str]) -> NDArray[np.generic] | list[str]:
    """Return whole numbers, numbers or texts, whichever says all there is; texts that are all empty are numbers."""
    import numpy as np

    try:
        values = np.array([text.strip() or "nan" for text in texts], dtype=object).astype(np.float64)
    except ValueError:
        return list(texts)
    whole = bool(len(values)) and all(text.strip().lstrip("+-").isdecimal() for text in texts)
    # Up to there a float holds every whole number exactly.
    if whole and np.abs(values).max() < 2**53:
        return values.astype(np.int64)
    return values


def _parquet_there(path: Path) -> bool:
    _check_file(path)
    return parquet.is_parquet(path)


def _parquet_names(path: Path, columns: Sequence[str]) -> list[str]:
    names = _named(path, parquet.parquet_names(path), columns, trim=False)
    if len(set(names)) < len(names):
        raise BadFile(f"{path}: repeats a column; each may be there once")
    return names


def _too_wide(path: Path) -> BadFile:
    return BadFile(f"{path} has rows of more than a thousand characters each; leave columns out")


def _too_long(path: Path, most_rows: int) -> BadFile:
    return BadFile(f"{path} holds more than {most_rows:,} rows; cut it")


class _Text:
    """A text file that notes whether pandas can read it as it stands, and refuses lines without end."""

    def __init__(self, path: Path, file: IO[str]) -> None:
        self._path = path
        self._file = file
        self._length = 0
        self._left = max(_MOST_UNPACKED, _MOST_RATIO * path.stat().st_size)
        self.at_once = 0
        self.widest: tuple[str, int] | None = None
        self.irregular = False

    def read(self, size: int = -1) -> str:
        """Return the next characters."""
        piece = self._file.read(size if 0 < size < _LONGEST else _LONGEST)
        self._count(len(piece))
        if self.widest is not None:
            separator, most = self.widest
            if piece.lstrip("\r\n").partition("\n")[0].count(separator) > most:
                raise BadFile(f"{self._path}: its first row has more than {most:,} fields")
            self.widest = None
        self.irregular = self.irregular or _IRREGULAR.search(piece) is not None
        end = max(piece.rfind("\n"), piece.rfind("\r"))
        if end < 0:
            self._length = self._length + len(piece)
        else:
            self._length = len(piece) - end
        self._check(self._length)
        return piece

    def readline(self) -> str:
        """Return the next line."""
        line = self._file.readline(_LONGEST + 1)
        self._left -= len(line)
        self._count(0)
        self._check(len(line))
        return line

    def _count(self, length: int) -> None:
        self._left -= length
        self.at_once += length
        if self._left < 0:
            raise BadFile(f"{self._path} unpacks to more than {_MOST_RATIO} times its size; no honest table does")
        if self.at_once > _MOST_AT_ONCE:
            raise _too_wide(self._path)

    def _check(self, length: int) -> None:
        if length > _LONGEST:
            raise BadFile(f"{self._path} is not a CSV file: it has a line of more than {_LONGEST:,} characters")

    def __iter__(self) -> Iterator[str]:
        return iter(self.readline, "")


@contextmanager
def _opened(path: Path) -> Iterator[_Text]:
    """Open a table, gzipped or not; what goes wrong as long as it is open is told in one line."""
    _check_file(path)
    try:
        with path.open("rb") as raw:
            packed = raw.read(2) == _GZIP
        # The mark at the beginning is what spreadsheets write; line ends are left to the csv module, as it asks.
        read = gzip.open if packed else open
        with read(path, "rt", encoding="utf-8-sig", newline="") as file:
            yield _Text(path, cast("IO[str]", file))
    except UnicodeDecodeError as error:
        raise BadFile(f"{path} is not a CSV file in UTF-8, or is damaged; save it as text, UTF-8") from error
    except (EOFError, zlib.error, csv.Error) as error:
        raise BadFile(f"{path} is not a CSV file, or is damaged: {error}") from error
    except OSError as error:  # a bad gzip file is one too
        raise BadFile(f"{path} cannot be read: {error.strerror or error}") from error


def _check_file(path: Path) -> None:
    try:
        there = path.exists()
        whole = path.is_file()
    except (OSError, ValueError) as error:
        raise BadFile(f"{str(path)[:200]} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    if not there:
        raise BadFile(f"there is no file {str(path)!r} to read a table from")
    if not whole:  # a pipe could be read only once, and formats are told apart by looking twice
        raise BadFile(f"{path} is no file that a table can be read from; name a CSV file on disk")
    check_plain(path)


@dataclass(frozen=True)
class _Head:
    """What a table's first lines say: on which line the header ends, its names, and what separates cells."""

    line: int
    names: Sequence[str]
    separator: str

    @classmethod
    def of(cls, path: Path, text: Iterable[str], columns: Sequence[str], loose: bool) -> _Head:
        """Return what the first lines of a table say.

        Raises:
            BadFile: If there is no header with those columns, or it names a column twice and ``loose`` is not given.
        """
        line, header, separator = _header(enumerate(text, start=1), columns)
        if not line:
            named = f" with {', '.join(columns)}" if columns else ""
            raise BadFile(f"{path} has nothing in it; a table needs a header{named} and at least one row")
        names = _named(path, next(csv.reader([header], delimiter=separator), []), columns)
        if not loose and (repeated := sorted({name for name in names if names.count(name) > 1})):
            raise BadFile(f"{path}, line {line}: repeats the column {', '.join(repeated)}; each may be there once")
        return cls(line, names, separator)


def _frames(path: Path, columns: Sequence[str], loose: bool) -> Iterator[pd.DataFrame]:
    """Yield a table in pieces: by pandas for as long as it is regular, then row by row."""
    import pandas as pd

    if _parquet_there(path):
        known = _parquet_names(path, columns)
        for piece in parquet.parquet_frames(path):
            yield piece.set_axis(known, axis="columns")
        return
    done = 0
    with _opened(path) as text:
        head = _Head.of(path, text, columns, loose)
        # pandas fills short rows up to the width of the first one: what is small here can be large there.
        text.widest = (head.separator, _MOST_COLUMNS)
        # Each cell is an object of its own: a wide table is taken in fewer rows.
        at_once = max(1, min(_AT_ONCE, _MOST_CELLS // max(1, len(head.names))))
        try:
            with pd.read_csv(
                # Texts as they stand: NA, 007 and 1e5 may be names.
                cast("IO[str]", text), sep=head.separator, header=None, dtype=object, keep_default_na=False,
                na_values=[], quoting=csv.QUOTE_NONE, chunksize=at_once, engine="c",
            ) as reader:  # fmt: skip
                for piece in reader:
                    if text.irregular or (frame := _regular(piece, head.names, loose)) is None:
                        break
                    yield frame
                    done = done + len(frame)
                    text.at_once = 0
                else:
                    return
        except pd.errors.EmptyDataError:
            return
        except pd.errors.ParserError:  # a row has more cells than the first
            pass
    rows = ([*fields, *[""] * len(names)][: len(names)] for names, _, fields in _fields(path, columns, loose))
    rest = islice(rows, done, None)
    while some := _held(path, islice(rest, at_once)):
        yield pd.DataFrame(some, columns=list(head.names), dtype=object)


def _held(path: Path, rows: Iterable[list[str]]) -> list[list[str]]:
    """Return rows as a list; BadFile if they are more text than is held at one time."""
    held = []
    size = 0
    for row in rows:
        held.append(row)
        size += sum(map(len, row))
        if size > _MOST_AT_ONCE:
            raise _too_wide(path)
    return held


def _regular(frame: pd.DataFrame, names: Sequence[str], loose: bool) -> pd.DataFrame | None:
    """Return a piece as pandas read it under the names of the header; None if it has to be looked at row by row.

    pandas fills short rows with empty cells, so what ends in one may be short.
    """
    if frame.shape[1] != len(names) or not (loose or all(frame.iloc[:, -1])):
        return None
    if not all(map(str.strip, frame.iloc[:, 0])):
        blank = [not any(map(str.strip, row)) for row in frame.itertuples(index=False)]
        frame = frame.loc[[not each for each in blank]]
    frame.columns = list(names)
    kept: pd.DataFrame = frame.reset_index(drop=True)
    return kept


def _fields(path: Path, columns: Sequence[str], loose: bool) -> Iterator[tuple[Sequence[str], int, list[str]]]:
    """Yield the names of a table, and the number and the cells of each row that is not empty."""
    with _opened(path) as text:
        rest = iter(text)
        head = _Head.of(path, rest, columns, loose)
        width = len(head.names)
        # Strict, for otherwise a quote that is never closed takes the rest of the file for one cell.
        reader = csv.reader(map(_uncommented, rest), delimiter=head.separator, strict=True)
        for fields in reader:
            if any(field.strip() for field in fields):
                number = head.line + reader.line_num
                if any(field.strip() for field in fields[width:]):
                    shown = head.separator.join(fields)[:40]
                    point = ""
                    if head.separator == ",":
                        point = "; write 2.5, not 2,5"
                    said = f"{shown!r} has {len(fields)} fields, the header {width}{point}"
                    raise BadFile(f"{path}, line {number}: {said}")
                if len(fields) < width and not loose:
                    raise BadFile(f"{path}, line {number}: {len(fields)} fields, but the header has {width}")
                yield head.names, number, fields


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
    if line.lstrip().startswith("#"):
        return "\n"
    return line


def _named(path: Path, fields: Sequence[str], columns: Sequence[str], trim: bool = True) -> list[str]:
    """Return the names of a header without the empty ones at its end, which spreadsheets leave."""
    names = [field.strip() for field in fields]
    while trim and names and not names[-1]:
        names.pop()
    if len(names) > _MOST_COLUMNS:
        raise BadFile(f"{path} has {len(names):,} columns; {_MOST_COLUMNS:,} is the most")
    if missing := [column for column in columns if column not in names]:
        header = ", ".join(name[:40] for name in names[:_NAMED]) + (", …" if len(names) > _NAMED else "")
        raise BadFile(
            f"{path} has no column {', '.join(missing)}; it needs {', '.join(columns)}"
            f" and has {header or 'nothing'}{_renamed(missing, [name for name in names if name not in columns])}"
        )
    return names


def _renamed(missing: Sequence[str], names: Sequence[str]) -> str:
    """Return which names look like columns that are missing, as the end of a sentence."""
    lowered = {name.lower(): name for name in names}
    pairs = {column: get_close_matches(column, lowered, n=1, cutoff=0.6) for column in missing}
    hints = [f"{lowered[near[0]][:40]!r} to {column!r}" for column, near in pairs.items() if near]
    if hints:
        return f"; perhaps rename {', '.join(hints)}"
    return ""
