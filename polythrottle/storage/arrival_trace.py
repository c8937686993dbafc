"""A table of recorded arrivals: a CSV file, gzipped or not, with a column of times."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from polythrottle.domain.errors import BadFile
from polythrottle.storage.cells import iso_time
from polythrottle.storage.tables import Table, parts

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_MOST_ARRIVALS = 20_000_000
_LEAST_S = 1e-12
_MOST_S = 1e24
"""Traces of any unit are within, and what is computed of them is far from where numbers end."""
_COLUMN = re.compile(r"(?:arrivals?|arrived|arrival_time|timestamp|time|t)(?:_(s|ms|us|ns))?", re.IGNORECASE)
_UNITS_S = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}


def recorded(path: Path) -> NDArray[np.float64]:
    """Return the arrivals a CSV file holds, in seconds since the first; see `polythrottle.domain.arrivals.Trace`.

    Raises:
        BadFile: If the file cannot be read, or is no such table.
    """
    import numpy as np

    pieces = []
    last_s = -math.inf
    for part in parts(path, (), loose=True, most_rows=_MOST_ARRIVALS):
        column, unit_s = _column(path, part.names)
        times = _times(part, column, unit_s)
        if not times.size:  # rows of separators alone; the reader refuses a table that ends without any other
            continue
        # The last of the piece before comes first: pieces end where the reader is full, not where the trace pauses.
        if (back := np.flatnonzero(times < np.concatenate(([last_s], times[:-1])))).size:
            line = part.at(int(back[0])).line
            raise BadFile(f"{path}, line {line}: goes back in time; sort the file by arrival first")
        last_s = float(times[-1])
        pieces.append(times)
    times = np.concatenate(pieces)
    if len(times) < 2 or times[-1] <= times[0]:
        raise BadFile(f"{path} holds {len(times)} arrivals over no time; two at different times are the least")
    if not _LEAST_S <= (span_s := times[-1].item() - times[0].item()) <= _MOST_S:
        raise BadFile(f"{path} goes over {span_s:g} s, which cannot be stretched to a rate; look at its times")
    return np.asarray(times - times[0])


_PROMPTS = re.compile(r"(?:prompt|context|input)_?tokens", re.IGNORECASE)
_OUTPUTS = re.compile(r"(?:output|generated|completion)_?tokens", re.IGNORECASE)
_MOST_TOKENS = 100_000_000


def recorded_lengths(path: Path) -> tuple[NDArray[np.int64], NDArray[np.int64]] | None:
    """Return the tokens of prompts and answers a CSV file of arrivals holds; None if it has no such columns.

    They are called ``prompt_tokens`` and ``output_tokens``, or as in Azure's traces, ``ContextTokens`` and
    ``GeneratedTokens``.

    Raises:
        BadFile: If the file cannot be read, has only one of the two, or holds something else than whole numbers.
    """
    import numpy as np

    columns: tuple[list[NDArray[np.int64]], list[NDArray[np.int64]]] = ([], [])
    for part in parts(path, (), loose=True, most_rows=_MOST_ARRIVALS):
        names = [next((name for name in part.names if form.fullmatch(name)), None) for form in (_PROMPTS, _OUTPUTS)]
        if names == [None, None]:
            return None
        for name, pieces in zip(names, columns, strict=True):
            if name is None:
                raise BadFile(f"{path} holds tokens of prompts or of answers, and not both")
            tokens = part.numbers(name, 1, _MOST_TOKENS)
            if (bad := np.flatnonzero(tokens % 1)).size:
                raise BadFile(f"{path}, line {part.at(int(bad[0])).line}: {name} is no whole number")
            pieces.append(tokens.astype(np.int64))
    return np.concatenate(columns[0]), np.concatenate(columns[1])


def _times(part: Table, column: str, unit_s: float) -> NDArray[np.float64]:
    """Return the times of some rows in seconds: numbers all at once, dates one by one."""
    import numpy as np

    texts = part.texts(column)
    try:
        # Through objects: an array of texts gives each the room of the longest.
        times = np.array(texts, dtype=object).astype(np.float64) * unit_s
    except ValueError:
        times = np.array([_time_s(text, unit_s) for text in texts])
    if (bad := np.flatnonzero(~np.isfinite(times))).size:
        cells = part.at(int(bad[0]))
        shown = cells.cells[column][:40]
        raise BadFile(f"{cells.path}, line {cells.line}: {shown!r} is neither a number nor an ISO date")
    return times


def _column(path: Path, names: Sequence[str]) -> tuple[str, float]:
    """Return which column holds the times and its unit in seconds."""
    for name in names:
        if match := _COLUMN.fullmatch(name):
            return name, _UNITS_S[(match[1] or "s").lower()]
    shown = ", ".join(name[:20] for name in names[:6]) or "nothing"
    raise BadFile(f"{path}, line 1: no column arrival_s or timestamp among: {shown}")


def _time_s(text: str, unit_s: float) -> float:
    """Return a time in seconds; NaN if the text is neither a number nor a date."""
    try:
        return float(text) * unit_s
    except ValueError:
        return _date_s(text)


def _date_s(text: str) -> float:
    try:
        date = iso_time(text)
    except ValueError:
        return math.nan
    # Not `timestamp()`, which reads a time without a zone as this machine's, with a summer time that goes back.
    return (date - datetime(1970, 1, 1, tzinfo=date.tzinfo)).total_seconds()
