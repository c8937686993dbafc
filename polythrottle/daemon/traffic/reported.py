"""Requests as the serving program itself reports them."""

import math
from dataclasses import replace

from polythrottle.daemon.ports import Seen, failed_of
from polythrottle.daemon.signals import Target

QUIET_S = 5.0
"""After so long without a report the workload is taken to be down."""


class ReportedTraffic:
    """What the serving program says of its own requests; satisfies the port ``Traffic``.

    Reports since the last look are folded into one: counts are added, the slowest counts, the rest is as said last.
    Requests that came are spread over the looks until the next report, as fast as they came since the report before.

    Args:
        quiet_s: How long nothing may be reported before the workload is taken to be down.
        uri: The text that opens it again.
    """

    def __init__(self, quiet_s: float = QUIET_S, uri: str = "report") -> None:
        self._quiet_s, self._uri = quiet_s, uri
        self._news: Seen | None = None
        self._known: Seen | None = None
        self._heard_s = 0.0
        self._told = _Spread()
        self.note = ""

    @property
    def uri(self) -> str:
        """The text that opens it again."""
        return self._uri

    def report(self, seen: Seen, now_s: float) -> None:
        """Take in a report.

        Args:
            seen: Since the report before.
            now_s: On the clock of the control loop.
        """
        self._news = seen if self._news is None else folded(self._news, seen)
        self._heard_s = now_s

    def look(self, now_s: float) -> Seen | None:
        """Return what was reported since the look before; None while nothing was for too long."""
        if self._news is not None:
            self._known, self._news = self._news, None
            self._told.add(self._known.arrived, self._heard_s)
            return replace(self._known, arrived=self._told.look(now_s))
        if self._known is None or now_s - self._heard_s > self._quiet_s:
            self._known, self._told = None, _Spread()
            return None
        return replace(self._known, arrived=self._told.look(now_s), answered=None, failed=None, worst_s=None)

    def serve(self, target: Target) -> None:
        """Do nothing: the answer to each report says what is to hold."""

    def close(self) -> None:
        """Release nothing; there is nothing."""


class _Spread:
    """Requests told of at once, over the looks until the next report; each is counted once."""

    def __init__(self) -> None:
        self._left: int | None = None
        self._heard_s: float | None = None
        self._looked_s = 0.0
        self._span_s, self._per_s, self._due = 0.0, math.inf, 0.0

    def add(self, arrived: int | None, heard_s: float) -> None:
        """Take in how many came until the last report."""
        self._left = _sum(self._left, arrived)
        self._span_s = 0.0 if self._heard_s is None else heard_s - self._heard_s
        self._heard_s = heard_s
        self._per_s = (self._left or 0) / self._span_s if self._span_s > 0 else math.inf

    def look(self, now_s: float) -> int | None:
        """Return how many are to be counted since the look before; None while a report is yet to come."""
        passed_s, self._looked_s = now_s - self._looked_s, now_s
        if self._left is None or self._heard_s is None:
            return None
        if self._left == 0:
            self._due = 0.0
            return None if 0 < now_s - self._heard_s < 2 * self._span_s else 0
        come = self._left if self._per_s == math.inf else self._per_s * max(0.0, passed_s)
        self._due = min(self._left, self._due + come)
        counted = int(self._due + 1e-9)  # however the sum was rounded
        self._left, self._due = self._left - counted, self._due - counted
        return counted


def folded(first: Seen, second: Seen) -> Seen:
    """Return two reports as one: counts added, the slowest kept, the rest as said last."""
    return Seen(
        _sum(first.arrived, second.arrived),
        _sum(first.answered, second.answered),
        failed_of(first, second),
        first.waiting if second.waiting is None else second.waiting,
        _most(first.p99_s, second.p99_s),
        first.mean_s if second.mean_s is None else second.mean_s,
        second.model or first.model,
        _most(first.worst_s, second.worst_s),
    )


def _sum(first: int | None, second: int | None) -> int | None:
    return None if first is None and second is None else (first or 0) + (second or 0)


def _most(first: float | None, second: float | None) -> float | None:
    return max((value for value in (first, second) if value is not None), default=None)
