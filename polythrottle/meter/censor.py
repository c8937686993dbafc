"""When a window need not be looked at to its end: the trial is plainly failing, and more queries would not save it.

The rules are sound rather than quick. A percentile is given up only once more queries are over the limit than the
longest window allows, so that the verdict cannot change. A mean is given up only when the lower end of its 99.9 %
interval is 5 % beyond the limit. The interval is Student's over ten batch means, which allows for queries that resemble
their neighbours (Law and Kelton, Simulation Modeling and Analysis, §9.5.3).
"""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from polythrottle.measurement import Query, Reading, Window
from polythrottle.ports import Device
from polythrottle.problem import Constraint

LEAST_QUERIES, LEAST_SHARE = 30, 0.1
MARGIN = 1.05
_BATCHES, _STUDENT = 10, 4.781  # two-sided 99.9 % quantile at 9 degrees of freedom
_LOOKS = 40
_SHARES = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99}


class Censor:
    """Looks on while a window is driven, and says when it is plainly going to break a limit.

    Args:
        device: Whose clock the window goes by, and whose energy is read if power is bounded.
        window: What would be enough.
        limits: Absolute limits; temperature is never judged early, for it is judged by its end.
        start: The reading the window began with.
    """

    def __init__(self, device: Device, window: Window, limits: Sequence[Constraint], start: Reading) -> None:
        self._device, self._window, self._limits = device, window, tuple(limits)
        self._readings = [start] if any(limit.metric == "power" for limit in limits) else []
        self._start_s = start.time_s
        self._ends_s: list[float] = []
        self._look = 0

    def gives_up(self, queries: Sequence[Query]) -> bool:
        """Return whether the window can end here; called once after every query, or all that came with it.

        Args:
            queries: All of the window so far.
        """
        self._ends_s += [self._device.clock.now() - self._start_s] * (len(queries) - len(self._ends_s))
        share = self._share(len(queries), self._ends_s[-1])
        look = math.floor(share * _LOOKS + 1e-9)
        if not self._limits or look == self._look:
            return False
        self._look = look
        if self._readings:
            self._readings.append(self._device.read())
        if len(queries) < LEAST_QUERIES or share < LEAST_SHARE - 1e-9:
            return False
        return any(self._broken(limit, queries) for limit in self._limits)

    def _share(self, queries: int, elapsed_s: float) -> float:
        """Return how much of the window is over, as a fraction."""
        window = self._window
        least = min(queries / window.queries, elapsed_s / window.duration_s if window.duration_s else math.inf)
        return max(queries / window.most_queries, elapsed_s / window.timeout_s, least)

    def _broken(self, limit: Constraint, queries: Sequence[Query]) -> bool:
        latencies_s = np.array([query.latency_s for query in queries])
        if limit.metric in _SHARES:
            most = self._window.most_queries
            allowed = most - math.ceil(_SHARES[limit.metric] * most - 1e-9)
            return int(np.sum(latencies_s > limit.limit)) > allowed
        if limit.metric == "mean":
            return _at_least(latencies_s) > MARGIN * limit.limit
        if limit.metric == "throughput":
            items = np.array([query.items for query in queries])
            return _at_least(np.diff(self._ends_s, prepend=0.0) / items) > MARGIN / limit.limit
        return limit.metric == "power" and _at_least(self._powers_w()) > MARGIN * limit.limit

    def _powers_w(self) -> NDArray[np.float64]:
        """Return the mean power between readings, shape (readings - 1,); nothing if time stood still."""
        times_s = np.diff([reading.time_s for reading in self._readings])
        gains_j = np.diff([reading.energy_j for reading in self._readings])
        return np.asarray(gains_j / times_s) if np.all(times_s > 0) else np.empty(0)


def _at_least(values: NDArray[np.float64]) -> float:
    """Return the lower end of the 99.9 % interval of a mean; -inf if there are too few values to tell."""
    size = len(values) // _BATCHES
    if size == 0:
        return -math.inf
    means = values[len(values) - size * _BATCHES :].reshape(_BATCHES, size).mean(axis=1)
    return float(means.mean() - _STUDENT * means.std(ddof=1) / math.sqrt(_BATCHES))
