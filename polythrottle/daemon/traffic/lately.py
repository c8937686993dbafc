"""How long requests took lately: a sliding window of latencies with its p99 and its mean."""

import math
from bisect import bisect_left, insort
from collections import deque

WINDOW_S = 60.0
"""How far back is looked: an SLO is meant for minutes."""
LEAST = 20
"""Fewer requests than this say nothing of a p99."""
_MOST = 60_000


class Lately:
    """Latencies of the requests answered in the last `WINDOW_S`, bounded in number: the oldest go first.

    Args:
        window_s: How far back to look.
        most: How many requests to remember at most.
    """

    def __init__(self, window_s: float = WINDOW_S, most: int = _MOST) -> None:
        self._window_s, self._most = window_s, most
        self._times: deque[tuple[float, float]] = deque()
        self._sorted: list[float] = []
        self._sum_s = 0.0
        self._begun_s: float | None = None
        self._now_s = -math.inf

    def __len__(self) -> int:
        return len(self._times)

    def add(self, at_s: float, latency_s: float) -> None:
        """Note a request.

        Args:
            at_s: When it was answered; not before any noted earlier.
            latency_s: How long it took.
        """
        self._begun_s = at_s if self._begun_s is None else self._begun_s
        self._now_s = max(self._now_s, at_s)
        self._times.append((at_s, latency_s))
        insort(self._sorted, latency_s)
        self._sum_s += latency_s
        if len(self._times) > self._most:
            self._forget()

    def until(self, now_s: float) -> None:
        """Forget what lies further back than the window."""
        self._now_s = max(self._now_s, now_s)
        while self._times and self._times[0][0] <= now_s - self._window_s:
            self._forget()

    def clear(self) -> None:
        """Forget everything."""
        self._times.clear()
        self._sorted.clear()
        self._sum_s = 0.0
        self._begun_s = None

    @property
    def p99_s(self) -> float | None:
        """The time 99 % of them stayed within; None of fewer than `LEAST`."""
        count = len(self._sorted)
        return self._sorted[math.ceil(0.99 * count) - 1] if count >= LEAST else None

    @property
    def p99_least_s(self) -> float | None:
        """What the p99 of the whole window comes to if all that is yet to come until it is full takes no time.

        It is the p99 as soon as the window is full. Before that one in a hundred is a handful: three requests that a
        switch of clocks delayed make the p99 of four seconds, and none of a minute at the same rate.
        """
        count = len(self._sorted)
        if count < LEAST or self._begun_s is None:
            return None
        passed_s = self._now_s - self._begun_s
        full = count >= self._most or passed_s >= self._window_s
        whole = count if full else int(min(self._most, count * self._window_s / max(passed_s, 1e-3)))
        beyond = whole - math.ceil(0.99 * whole)
        return self._sorted[count - beyond - 1] if beyond < count else 0.0

    @property
    def mean_s(self) -> float | None:
        """Their mean; None of none."""
        return self._sum_s / len(self._times) if self._times else None

    def _forget(self) -> None:
        _, latency_s = self._times.popleft()
        del self._sorted[bisect_left(self._sorted, latency_s)]
        # A sum of many additions and subtractions drifts; an empty window is exact again.
        self._sum_s = self._sum_s - latency_s if self._times else 0.0
