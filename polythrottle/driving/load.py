"""A load on a workload: an iterator of requests as they are answered."""

from collections.abc import Generator, Iterator, Mapping
from types import TracebackType

from typing_extensions import Self

from polythrottle.arrivals import Arrivals
from polythrottle.clock import Clock, VirtualClock
from polythrottle.driving.flight import in_flight
from polythrottle.driving.ledger import Ledger, LoadReport
from polythrottle.driving.turns import back_to_back, in_turn
from polythrottle.measurement import Query
from polythrottle.ports import Concurrent, Discounting, Workload
from polythrottle.space import Level

_BATCH = "batch_size"


class Load(Iterator[Query]):
    """Requests in the order in which they are answered, without end; nothing is sent before the first is asked for.

    Made by `drive`. Close it when enough has been seen, or use it as a context manager.
    """

    def __init__(
        self, queries: Generator[Query, None, None], ledger: Ledger, device: Discounting | None = None
    ) -> None:
        self._queries, self._ledger, self._device = queries, ledger, device
        self._left_out_s = 0.0
        self._taken = 0

    def __next__(self) -> Query:
        """Return the next request that is answered.

        Raises:
            TrialError: If a query fails, or takes too long.
        """
        query = next(self._queries)
        self._taken += 1
        if self._device is not None and (busy_s := self._ledger.cpu_s) > self._left_out_s:
            self._device.leave_out(busy_s - self._left_out_s)
            self._left_out_s = busy_s
        return query

    def rest(self, moment_s: float) -> Iterator[Query]:
        """Yield requests until all that were sent before a moment are answered; some sent after it are among them.

        Args:
            moment_s: On the clock of the device; not in the future.

        Raises:
            TrialError: If a query fails, or takes too long.
        """
        while self._ledger.oldest_s < moment_s:
            yield next(self)
        for _ in range(self._ledger.landed - self._taken):
            yield next(self)

    @property
    def report(self) -> LoadReport:
        """What the sender says about itself so far."""
        return self._ledger.report

    def close(self) -> None:
        """Stop: nothing more is sent, and what is under way is given up."""
        self._queries.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def drive(
    workload: Workload,
    arrivals: Arrivals,
    clock: Clock,
    seed: int,
    *,
    batch: int = 1,
    timeout_s: float = 60.0,
    device: object = None,
) -> Load:
    """Begin a load on a workload; use it in a ``with``, and ``for`` each answered request.

    ``Query.latency_s`` counts from ``Query.start_s``, when a request was meant to be sent, so that one that had to wait
    for others is not made to look fast (no coordinated omission). In a closed loop that is when it was sent.

    A workload that is `Concurrent` has several queries under way at once. Any other is one server, before which
    requests queue; it runs in the thread of whoever asks, and on a virtual clock the queue is exact.

    Args:
        workload: Set to its point already.
        arrivals: When requests are meant to be sent.
        clock: Of the device.
        seed: Of the arrivals.
        batch: Requests that one query of this workload answers, see `batch_of`: arrivals are requests, and as many are
            gathered before a query is sent. In a closed loop nothing is gathered, and each query stays whole.
        timeout_s: How long to wait for the next answer at most; longer than a window, nobody needs.
        device: Which is measured meanwhile; where its joules are an estimate from busy processors and it can do so, it
            leaves the sender's out. Whatever else it is, it is left alone.

    Raises:
        BadFile: If the arrivals are a recorded trace that cannot be read.
    """
    times, ledger = arrivals.times(seed), Ledger()
    real = not isinstance(clock, VirtualClock)
    if real and isinstance(workload, Concurrent) and (times is not None or workload.concurrency > 1):
        queries = in_flight(workload, times, clock, ledger, batch, timeout_s)
    elif times is None:
        queries = back_to_back(workload, clock, ledger)
    else:
        queries = in_turn(workload, times, clock, ledger, batch, timeout_s)
    return Load(queries, ledger, device if isinstance(device, Discounting) else None)


def batch_of(workload: Workload, point: Mapping[str, Level]) -> int:
    """Return how many requests one query of a workload answers at a point."""
    return int(point.get(_BATCH, workload.space.default.get(_BATCH, 1)))
