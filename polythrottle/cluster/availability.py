"""When spot machines could be had, from a recorded cluster or from a trace of SkyPilot's, read in place."""

import json
from pathlib import Path
from typing import Any

from polythrottle.cluster.plan.deadline import Availability
from polythrottle.cluster.simulate.trace import read_trace
from polythrottle.errors import BadFile, InvalidInput

_MOST_POINTS = 5_000_000


def read_availability(path: Path, machines: int = 1) -> Availability:
    """Return when at least so many machines could be had at once.

    Args:
        path: A table with the columns time_s and n_nodes, or JSON as in github.com/skypilot-org/spot-traces: an object
            with ``metadata`` and its ``gap_seconds``, and ``data``, one number of machines (or 0 and 1) per gap.
        machines: How many are wanted.

    Raises:
        BadFile: If it is neither.
    """
    if path.suffix == ".json":
        return _of_json(path, machines)
    trace = read_trace(path)
    return Availability.of_counts(trace.times_s, trace.counts, trace.ends_s, machines)


def _of_json(path: Path, machines: int) -> Availability:
    try:
        document: Any = json.loads(path.read_text(encoding="utf-8"))
        gap_s, data = float(document["metadata"]["gap_seconds"]), document["data"]
        counts = [int(value) for value in data]
    except OSError as error:
        raise BadFile(f"cannot read the trace {path}: {error.strerror}") from error
    except (ValueError, TypeError, KeyError, RecursionError, OverflowError) as error:
        raise BadFile(
            f"{path} is no trace of availability: it needs metadata.gap_seconds and data, a list of numbers ({error})"
        ) from error
    if not 0 < gap_s < 1e9 or not 0 < len(counts) < _MOST_POINTS:
        raise BadFile(f"{path} is no trace of availability: a gap above 0 s and at least one point are needed")
    kept = [index for index, count in enumerate(counts) if not index or count != counts[index - 1]]
    times_s = [index * gap_s for index in kept]
    try:
        return Availability.of_counts(times_s, [counts[index] for index in kept], len(counts) * gap_s, machines)
    except InvalidInput as error:
        raise BadFile(f"{path} is no trace of availability: {error}") from error
