"""Tables in Parquet, as the texts a CSV file would have; needs pyarrow, which is installed apart."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from polythrottle.errors import BadFile, InvalidInput

if TYPE_CHECKING:
    import pandas as pd
    from pyarrow.parquet import FileMetaData

_MAGIC = b"PAR1"
_MOST_COLUMNS = 1000
_MOST_ROWS, _MOST_GROUPS, _MOST_UNPACKED = 10_000_000, 10_000, 1_000_000_000
_BATCH, _BATCH_BYTES = 4096, 100_000_000
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
    try:
        with path.open("rb") as raw:
            return raw.read(len(_MAGIC)) == _MAGIC
    except OSError as error:
        raise BadFile(f"{path} cannot be read: {error.strerror}") from error


def names(path: Path) -> list[str]:
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


def pieces(path: Path) -> Iterator[pd.DataFrame]:
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
    groups = [metadata.row_group(number) for number in range(min(metadata.num_row_groups, _MOST_GROUPS + 1))]
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
        why = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise BadFile(f"{path} is no Parquet file, or is damaged: {why[:200]}") from error
