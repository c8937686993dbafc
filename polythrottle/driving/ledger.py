"""What the sender of a load says about itself: how much it sent, how late it was, what it cost."""

import math
from dataclasses import dataclass

_STEP = 1.05
_LEAST_S = 1e-6


@dataclass(frozen=True)
class LoadReport:
    """What a load was like, the sender itself apart from what it drove.

    Args:
        sent: Queries that were sent.
        late_p99_s: How late 99 % of them were sent at most, after the moment they were meant to be sent or, where they
            had to wait for a free place, after that was there; to 5 %, rounded up. None if answers decide when the next
            goes out, or nothing was sent yet.
        cpu_s: Processor time the sender itself took; 0 where it cannot be told apart from the model's.
    """

    sent: int
    late_p99_s: float | None
    cpu_s: float


class Ledger:
    """The figures of a load while it runs; one thread writes, others may read.

    ``sent`` counts queries, and ``landed`` the requests of those that were answered.
    """

    def __init__(self) -> None:
        self.sent = 0
        self.landed = 0
        self.cpu_s = 0.0
        self._under_way: dict[int, float] = {}
        self._late: dict[int, int] = {}

    def begin(self, started_s: float) -> int:
        """Count a query that is sent now, and return its number."""
        self.sent += 1
        self._under_way[self.sent] = started_s
        return self.sent

    def end(self, number: int) -> None:
        """Take note that all requests of a query have landed."""
        del self._under_way[number]

    @property
    def oldest_s(self) -> float:
        """When the oldest query was sent that is under way; inf if there is none."""
        return min(self._under_way.copy().values(), default=math.inf)

    def note(self, late_s: float) -> None:
        """Count a query that was sent some seconds late.

        Steps of 5 % suffice, and bound what a long load keeps; HdrHistogram does the same with finer ones.
        """
        step = math.ceil(math.log(max(late_s, _LEAST_S) / _LEAST_S, _STEP))
        self._late[step] = self._late.get(step, 0) + 1

    @property
    def report(self) -> LoadReport:
        """The figures so far."""
        return LoadReport(self.sent, self._p99_s(), self.cpu_s)

    def _p99_s(self) -> float | None:
        late = sorted(self._late.copy().items())
        left = math.ceil(0.99 * sum(count for _, count in late))
        for step, count in late:
            left -= count
            if left <= 0:
                return _LEAST_S * float(_STEP**step)
        return None
