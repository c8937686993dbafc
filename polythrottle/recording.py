"""A table of recorded arrivals: a CSV file, gzipped or not, with a column of times."""

from __future__ import annotations

import csv
import gzip
import math
import re
import zlib
from array import array
from datetime import datetime
from pathlib import Path
from typing import IO, TYPE_CHECKING, cast

from polythrottle.errors import BadFile

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


_MOST_ARRIVALS = 20_000_000
_LEAST_S, _MOST_S = 1e-12, 1e24
"""Traces of any unit are within, and what is computed of them is far from where numbers end."""
_COLUMN = re.compile(r"(?:arrivals?|arrived|arrival_time|timestamp|time|t)(?:_(s|ms|us|ns))?", re.IGNORECASE)
_UNITS_S = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
_GZIP = b"\x1f\x8b"


def recorded(path: Path) -> NDArray[np.float64]:
    """Return the arrivals a CSV file holds, in seconds since the first; see `polythrottle.arrivals.Trace`.

    Raises:
        BadFile: If the file cannot be read, or is no such table.
    """
    import numpy as np

    try:
        if not path.is_file():
            raise BadFile(f"there is no file {str(path)!r} to read arrivals from")
        with path.open("rb") as raw:
            packed = raw.read(2) == _GZIP
        with gzip.open(path, "rt", encoding="utf-8") if packed else path.open(encoding="utf-8") as file:
            times = _read(path, cast(IO[str], file))
    except OSError as error:  # a bad gzip file is one too
        raise BadFile(f"{path} cannot be read: {error.strerror or error}") from error
    except (EOFError, zlib.error, UnicodeDecodeError, csv.Error, ValueError) as error:
        raise BadFile(f"{path} is not a CSV file, or is damaged: {error}") from error
    if len(times) < 2 or times[-1] <= times[0]:
        raise BadFile(f"{path} holds {len(times)} arrivals over no time; two at different times are the least")
    if not _LEAST_S <= (span_s := times[-1].item() - times[0].item()) <= _MOST_S:
        raise BadFile(f"{path} goes over {span_s:g} s, which cannot be stretched to a rate; look at its times")
    return np.asarray(times - times[0])


def _read(path: Path, file: IO[str]) -> NDArray[np.float64]:
    import numpy as np

    rows = csv.reader(file)
    names = next(rows, [])
    column, unit_s = _column(path, names)
    times, last_s = array("d"), -math.inf
    for row in rows:
        if not row:
            continue
        if len(row) > len(names):
            shown, where = ",".join(row)[:40], f"{path}, line {rows.line_num}"
            raise BadFile(f"{where}: {shown!r} has {len(row)} fields, the header {len(names)}; write 2.5, not 2,5")
        time_s = _time_s(path, rows.line_num, row[column] if column < len(row) else "", unit_s)
        if time_s < last_s:
            raise BadFile(f"{path}, line {rows.line_num}: goes back in time; sort the file by arrival first")
        times.append(time_s)
        last_s = time_s
        if len(times) > _MOST_ARRIVALS:
            raise BadFile(f"{path} holds more than {_MOST_ARRIVALS:,} arrivals; cut it")
    return np.frombuffer(times, dtype=np.float64) if times else np.zeros(0)


def _column(path: Path, names: list[str]) -> tuple[int, float]:
    """Return which column holds the times and its unit in seconds."""
    for index, name in enumerate(names):
        if match := _COLUMN.fullmatch(name.strip().lstrip("\ufeff")):
            return index, _UNITS_S[(match[1] or "s").lower()]
    seen = ", ".join(name[:20] for name in names[:6]) or "nothing"
    raise BadFile(f"{path}, line 1: no column arrival_s or timestamp among: {seen}")


def _time_s(path: Path, line: int, text: str, unit_s: float) -> float:
    try:
        time_s = float(text) * unit_s
    except ValueError:
        time_s = _date_s(text)
    if not math.isfinite(time_s):
        raise BadFile(f"{path}, line {line}: {text[:40]!r} is neither a number nor an ISO date")
    return time_s


def _date_s(text: str) -> float:
    try:
        date = datetime.fromisoformat(text.strip())
    except ValueError:
        return math.nan
    return (date - datetime(1970, 1, 1, tzinfo=date.tzinfo)).total_seconds()
