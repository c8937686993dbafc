"""When spot machines could be had, from a recorded cluster or from a trace of SkyPilot's, read in place."""

import json
from pathlib import Path
from typing import Any

from polythrottle.cluster.plan.deadline import Availability
from polythrottle.cluster.simulate.trace import read_trace
from polythrottle.errors import BadFile, InvalidInput

_MOST_POINTS = 5_000_000
_LONGEST_S = 100 * 365.25 * 86400


def read_availability(path: Path, machines: int = 1) -> Availability:
    """Return when at least so many machines could be had at once.

    Args:
        path: A table with the columns time_s and n_nodes, or JSON as in github.com/skypilot-org/spot-traces: an object
            with ``metadata`` and its ``gap_seconds``, and ``data``, one number of machines (or 0 and 1) per gap.
        machines: How many are wanted.

    Raises:
        BadFile: If it is neither.
    """
    if path.suffix.lower() == ".json":
        return _of_json(path, machines)
    trace = read_trace(path)
    _check_length(path, trace.ends_s)
    return Availability.of_counts(trace.times_s, trace.counts, trace.ends_s, machines)


def _check_length(path: Path, length_s: float) -> None:
    if length_s > _LONGEST_S:
        raise BadFile(f"{path} is no trace of availability: it lasts {length_s:.3g} s, more than a century")


def _of_json(path: Path, machines: int) -> Availability:
    try:
        document: Any = json.loads(path.read_text(encoding="utf-8"))
        gap_s, data = float(document["metadata"]["gap_seconds"]), document["data"]
        counts = [_count(value) for value in data]
    except OSError as error:
        raise BadFile(f"cannot read the trace {path}: {error.strerror}") from error
    except (ValueError, TypeError, KeyError, RecursionError, OverflowError) as error:
        raise BadFile(
            f"{path} is no trace of availability: it needs metadata.gap_seconds, a number, and data, a list of whole"
            " numbers of at least 0"
        ) from error
    if not 0 < gap_s < 1e9 or not 0 < len(counts) < _MOST_POINTS:
        raise BadFile(f"{path} is no trace of availability: a gap above 0 s and at least one point are needed")
    _check_length(path, len(counts) * gap_s)
    kept = [index for index, count in enumerate(counts) if not index or count != counts[index - 1]]
    times_s = [index * gap_s for index in kept]
    try:
        return Availability.of_counts(times_s, [counts[index] for index in kept], len(counts) * gap_s, machines)
    except InvalidInput as error:
        raise BadFile(f"{path} is no trace of availability: {error}") from error


def _count(value: object) -> int:
    """Return a number of machines.

    Raises:
        ValueError: If it is none.
    """
    if not isinstance(value, int | float) or value != int(value) or value < 0:
        raise ValueError(value)
    return int(value)
