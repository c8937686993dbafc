"""Requests as the serving program itself reports them."""

from dataclasses import replace

from polythrottle.daemon.ports import Seen
from polythrottle.daemon.signals import Target

QUIET_S = 5.0
"""After so long without a report the workload is taken to be down."""


class ReportedTraffic:
    """What the serving program says of its own requests; satisfies the port ``Traffic``.

    Reports since the last look are folded into one: counts are added, the slowest counts, the rest is as said last.

    Args:
        quiet_s: How long nothing may be reported before the workload is taken to be down.
        uri: The text that opens it again.
    """

    def __init__(self, quiet_s: float = QUIET_S, uri: str = "report") -> None:
        self._quiet_s, self._uri = quiet_s, uri
        self._news: Seen | None = None
        self._known: Seen | None = None
        self._heard_s = 0.0
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
            return self._known
        if self._known is None or now_s - self._heard_s > self._quiet_s:
            self._known = None
            return None
        return replace(self._known, arrived=0, answered=0, failed=0, worst_s=None)

    def serve(self, target: Target) -> None:
        """Do nothing: the answer to each report says what is to hold."""

    def close(self) -> None:
        """Release nothing; there is nothing."""


def folded(first: Seen, second: Seen) -> Seen:
    """Return two reports as one: counts added, the slowest kept, the rest as said last."""
    return Seen(
        _sum(first.arrived, second.arrived),
        _sum(first.answered, second.answered),
        _sum(first.failed, second.failed),
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
