"""When a window may end: its limits are plainly broken, it is precise enough, or its point is not worth more."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from polythrottle.domain.measurement import Interval, Query, Reading, Window
from polythrottle.domain.metrics import FLOORS, PromptClass, split_metric
from polythrottle.domain.ports import Workload
from polythrottle.domain.problem import Constraint
from polythrottle.domain.space import CONCURRENCY, IN_FLIGHT
from polythrottle.metering.energy import EnergyEstimate
from polythrottle.metering.intervals import SHARES
from polythrottle.metering.window import Checks, Watched

# When a window need not be looked at to its end: the trial is plainly failing, and more queries would not save it.
#
# The rules are sound rather than quick. A percentile is given up only once more queries are over the limit than the
# longest window allows, so that the verdict cannot change. A mean is given up only when the lower end of its 99.9 %
# interval is 5 % beyond the limit. The interval is Student's over ten batch means, which allows for queries that
# resemble their neighbours (Law and Kelton, Simulation Modeling and Analysis, §9.5.3).

LEAST_CENSORED_QUERIES = 30
LEAST_SHARE = 0.1
MARGIN = 1.05
# two-sided 99.9 % quantile at 9 degrees of freedom
_BATCHES = 10
_STUDENT = 4.781
_LOOKS = 40


class Censor:
    """Looks on while a window is driven, and says when it is plainly going to break a limit.

    Args:
        device: Whose clock the window goes by, and whose energy is read if power is bounded.
        window: What would be enough.
        limits: Absolute limits; temperature is never judged early, for it is judged by its end.
        start: The reading the window began with.
    """

    def __init__(self, device: Watched, window: Window, limits: Sequence[Constraint], start: Reading) -> None:
        self._device = device
        self._window = window
        self._limits = tuple(limits)
        if any(limit.metric == "power" for limit in limits):
            self._readings = [start]
        else:
            self._readings = []
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
        if len(queries) < LEAST_CENSORED_QUERIES or share < LEAST_SHARE - 1e-9:
            return False
        return any(self._broken(limit, queries) for limit in self._limits)

    def _share(self, queries: int, elapsed_s: float) -> float:
        """Return how much of the window is over, as a fraction."""
        window = self._window
        least = min(queries / window.queries, elapsed_s / window.duration_s if window.duration_s else math.inf)
        return max(queries / window.most_queries, elapsed_s / window.timeout_s, least)

    def _broken(self, limit: Constraint, queries: Sequence[Query]) -> bool:
        latencies_s = np.array([query.latency_s for query in queries])
        if limit.metric in SHARES:
            most = self._window.most_queries
            allowed = most - math.ceil(SHARES[limit.metric] * most - 1e-9)
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
        if np.all(times_s > 0):
            return np.asarray(gains_j / times_s)
        return np.empty(0)


def _at_least(values: NDArray[np.float64]) -> float:
    """Return the lower end of the 99.9 % interval of a mean; -inf if there are too few values to tell."""
    size = len(values) // _BATCHES
    if size == 0:
        return -math.inf
    means = values[len(values) - size * _BATCHES :].reshape(_BATCHES, size).mean(axis=1)
    return float(means.mean() - _STUDENT * means.std(ddof=1) / math.sqrt(_BATCHES))


# When a window knows enough: it is precise, its limits are clear, or its point is plainly not worth more.
#
# A window with a precision goes on until one of these is so. That the point breaks a limit for certain is seen by
# `Censor`. That it is certainly worse than the best so far is said once the lower end of its energy, its interval
# widened for the many looks, is above that one's upper end; a percentile that is bounded has then been seen at least
# once.

SEARCH_PRECISION = 0.02
"""Of a search's windows: as good an answer as fixed ones give, for a fifth of the requests (benchmarks/windows.md)."""
LEAST_QUERIES = 30
MOST_AT_ONCE = 4000
"""Queries of a window at most where requests in flight are searched.

Those that are in flight together wait for each other, so that many of them are late together: a thousand tell the p99
to the first token of 128 in flight to a quarter only (``benchmarks/llm_tune.md``).
"""
_LOOKED_OFTEN = 1.3
"""By what a 95 % interval is widened where a verdict is looked for again and again: to 99 %."""
_LEAST_BATCHES = 10
"""How many a window must have before it may end because its energy seems precise: of six, too many do so by luck."""
_MARGIN = 0.01
"""Windows at one point differ by more than their intervals say: by this fraction of the energy, assumed."""


def most_queries(served: Workload | None) -> int:
    """Return after how many queries a window ends at the latest, if nobody asks for more."""
    if served is not None and {CONCURRENCY, IN_FLIGHT}.intersection(served.space.names):
        return MOST_AT_ONCE
    return Window.most_queries


@dataclass(frozen=True)
class Goal:
    """What a window is looked through for.

    Args:
        limits: Absolute limits the point must hold.
        precise: Metrics that others will be judged by, so that they must be precise themselves.
        beat_j: The energy per item of the best point so far; None if there is none, or energy is not what is minimised.
        judged: Absolute limits that requests are counted by, though no window is cut short for breaking one.
    """

    limits: tuple[Constraint, ...] = ()
    precise: tuple[str, ...] = ()
    beat_j: float | None = None
    judged: tuple[Constraint, ...] = ()

    @property
    def counted(self) -> tuple[Constraint, ...]:
        """All limits that requests are counted by, each once: those that bound the times of nearly all of them.

        Of what a mean or a median is to be, no request says that it is kept.
        """
        every = dict.fromkeys((*self.limits, *self.judged))
        return tuple(limit for limit in every if limit.timed and not limit.relative and limit.of_each)

    @property
    def classes(self) -> tuple[PromptClass, ...]:
        """The classes of requests that any of it is about, each once."""
        names = (*self.precise, *(limit.metric for limit in (*self.limits, *self.judged)))
        found = (split_metric(name)[1] for name in names)
        return tuple(dict.fromkeys(each for each in found if each is not None))


class StoppingRule(Checks):
    """Says when a window can end.

    Args:
        window: Has a precision, or this never says so.
        goal: What it is for.
    """

    def __init__(self, window: Window, goal: Goal) -> None:
        self._window = window
        self._goal = goal
        bounded = [SHARES[name] for name in (*(limit.metric for limit in goal.limits), *goal.precise) if name in SHARES]
        if bounded and window.precision is not None:
            rarest = math.ceil(1 / (1 - max(bounded)) - 1e-9)
        else:
            rarest = 0
        super().__init__(window, min(window.most_queries, max(window.queries, rarest)))

    def enough(self, joules: EnergyEstimate, interval: Callable[[str], Interval | None]) -> bool:
        """Return whether the window may end.

        Args:
            joules: Of the window so far.
            interval: Returns the interval of a metric so far, or None if it has none.
        """
        energy = joules.per_item
        value_j = joules.item_j
        if energy is None:
            return False
        best_j = self._goal.beat_j
        if best_j is not None and value_j - _LOOKED_OFTEN * energy.half > best_j * (1 + _MARGIN):
            return True
        tight = joules.batches >= _LEAST_BATCHES and energy.half <= self._tolerance * value_j
        return (
            tight and all(map(self._clear, self._goal.limits, map(interval, self._metrics))) and self._known(interval)
        )

    @property
    def _tolerance(self) -> float:
        return self._window.precision or 0.0

    @property
    def _metrics(self) -> list[str]:
        return [limit.metric for limit in self._goal.limits]

    def _known(self, interval: Callable[[str], Interval | None]) -> bool:
        """Return whether all that must be precise is; a percentile is, only once the whole window has been seen.

        Whoever ends a window when a percentile looks precise ends it, too often, before its first cluster of misses.
        """
        if any(name in SHARES for name in self._goal.precise):
            return False
        found = [interval(name) for name in self._goal.precise]
        return all(each is None or (each.known and each.half <= self._tolerance * each.high) for each in found)

    def _clear(self, limit: Constraint, seen: Interval | None) -> bool:
        """Return whether a limit plainly holds or not, or is known to the precision; what has no interval passes."""
        if seen is None:
            return True
        if limit.metric in FLOORS:
            decided = seen.low > limit.limit or seen.high < limit.limit
        else:
            decided = seen.high < limit.limit or seen.low > limit.limit
        return decided or seen.half <= self._tolerance * limit.limit
