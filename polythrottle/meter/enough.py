"""When a window knows enough: it is precise, its limits are clear, or its point is plainly not worth more.

A window with a precision goes on until one of these is so. That the point breaks a limit for certain is seen by
`Censor`. That it is certainly worse than the best so far is said once the lower end of its energy, its interval widened
for the many looks, is above that one's upper end; a percentile that is bounded has then been seen at least once.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from polythrottle.measurement import FLOORS, Interval, Window
from polythrottle.meter.joules import Joules
from polythrottle.meter.percentiles import SHARES
from polythrottle.problem import Constraint

SEARCH_PRECISION = 0.02
"""Of a search's windows: as good an answer as fixed ones give, for a fifth of the requests (benchmarks/windows.md)."""
LEAST_QUERIES = 30
_GROWTH = 1.1
_LOOKED_OFTEN = 1.3
"""By what a 95 % interval is widened where a verdict is looked for again and again: to 99 %."""
_LEAST_BATCHES = 10
"""How many a window must have before it may end because its energy seems precise: of six, too many do so by luck."""
_MARGIN = 0.01
"""Windows at one point differ by more than their intervals say: by this fraction of the energy, assumed."""


@dataclass(frozen=True)
class Goal:
    """What a window is looked through for.

    Args:
        limits: Absolute limits the point must hold.
        precise: Metrics that others will be judged by, so that they must be precise themselves.
        beat_j: The energy per item of the best point so far; None if there is none, or energy is not what is minimised.
    """

    limits: tuple[Constraint, ...] = ()
    precise: tuple[str, ...] = ()
    beat_j: float | None = None


class Enough:
    """Says when a window can end.

    Args:
        window: Has a precision, or this never says so.
        goal: What it is for.
    """

    def __init__(self, window: Window, goal: Goal) -> None:
        self._window, self._goal = window, goal
        bounded = [SHARES[name] for name in (*(limit.metric for limit in goal.limits), *goal.precise) if name in SHARES]
        rarest = math.ceil(1 / (1 - max(bounded)) - 1e-9) if bounded and window.precision is not None else 0
        self.least = min(window.most_queries, max(window.queries, rarest))
        self._next = self.least

    def due(self, queries: int) -> bool:
        """Return whether it is time to ask again."""
        if self._window.precision is None or queries < self._next:
            return False
        self._next = max(queries + 1, math.ceil(queries * _GROWTH))
        return True

    def reached(self, joules: Joules, interval: Callable[[str], Interval | None]) -> bool:
        """Return whether the window may end.

        Args:
            joules: Of the window so far.
            interval: Returns the interval of a metric so far, or None if it has none.
        """
        energy, value_j = joules.per_item, joules.item_j
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
