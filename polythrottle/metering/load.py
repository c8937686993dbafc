"""A load on a workload: queries sent as arrivals say, in turn or several at once, timed from when they were due."""

from __future__ import annotations

import asyncio
import math
import queue
import select
import selectors
import sys
import time
import typing
from collections.abc import Coroutine, Generator, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from itertools import islice
from types import TracebackType
from typing import TYPE_CHECKING, Any

from polythrottle.domain.arrivals import Arrivals, SelfPaced
from polythrottle.domain.clock import Clock, Thread, VirtualClock
from polythrottle.domain.errors import InvalidInput, TrialError, Unanswered
from polythrottle.domain.measurement import Query
from polythrottle.domain.ports import Concurrent, Discounting, Workload
from polythrottle.domain.space import BATCH_SIZE, Level
from polythrottle.metering.window import Gate
from polythrottle.workloads.foreign_calls import EventLoop

if TYPE_CHECKING:
    from typing_extensions import Self

# What the sender of a load says about itself: how much it sent, how late it was, what it cost.

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
    """The figures of a load while one thread writes them: queries ``sent``, requests ``landed`` of those answered."""

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
        """Count a query that was sent late, in steps of 5 %, which bound what a load keeps, as HdrHistogram does."""
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


# Queries that answer several requests: who waited how long.


def shared(query: Query, intended_s: Sequence[float], started_s: float, ended_s: float) -> Iterator[Query]:
    """Yield what each request of a query saw, counted from when it was meant to be sent.

    A request waits until the query starts, and then as long as the query says. Where the server was free again before
    that, as one that prepares the next query while it still computes the last, its requests overlapped with those
    before, so that the wait is shorter by as much.

    Args:
        query: What came back.
        intended_s: When its requests were meant to be sent, on the clock of the device.
        started_s: When the query was sent.
        ended_s: When the server took the next.

    Raises:
        TrialError: If the query's items cannot be shared evenly, or the clock went back.
    """
    count = len(intended_s)
    if ended_s < started_s:
        raise TrialError(f"the clock went back by {started_s - ended_s:.3g} s during a query")
    if query.items % count:
        raise TrialError(f"a query for {count} requests answered {query.items} items")
    taken_s = min(query.latency_s, ended_s - started_s)
    for number, intended in enumerate(intended_s):
        latency_s = max(query.latency_s, started_s - intended + taken_s)
        yield replace(
            query,
            latency_s=latency_s,
            items=query.items // count,
            start_s=intended,
            sent_s=intended + max(0.0, latency_s - query.latency_s),
            first_s=None if query.first_s is None else query.first_s + latency_s - query.latency_s,
            tokens=None if query.tokens is None else query.tokens // count + (number < query.tokens % count),
        )


# Waiting for a moment: asleep for most of the time, awake for the last of it.

AWAKE_S = 0.2e-3
"""How long before a moment whoever waits for it is awake and looks at the clock again and again.

A sleeping thread is woken when its timer has run out (50 µs of slack on Linux, prctl(2), PR_SET_TIMERSLACK), an idle
core has come back from its sleep state and the scheduler has found the thread a place: tenths of a millisecond on a
machine that has other things to do. Whoever looks meanwhile keeps a core busy: half a core at 2,000 queries a second;
0.5 ms would keep seven tenths of it busy and be no more punctual (benchmarks/load.py).
"""
_MOST_HANDLE = 1024


def wait_until(clock: Clock, moment_s: float) -> float:
    """Wait until a moment of a clock and return the processor seconds that took."""
    if isinstance(clock, VirtualClock):
        clock.sleep(moment_s - clock.now())
        return 0.0
    begun_s = time.thread_time()
    while (left_s := moment_s - clock.now()) > 0:
        clock.sleep(left_s - AWAKE_S)
    return time.thread_time() - begun_s


class PunctualSelector(selectors.EpollSelector):
    """What an event loop sleeps in, to the microsecond.

    epoll_wait(2) counts whole milliseconds, and selectors.py rounds up to the next, so that asyncio wakes up to 1 ms
    late. select(2) takes microseconds, and can wait for an epoll handle as for any other (epoll(7)).
    """

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Return what is ready, waiting for up to ``timeout`` seconds."""
        if timeout is None or timeout <= 0 or self.fileno() >= _MOST_HANDLE:
            return super().select(timeout)
        select.select([self.fileno()], [], [], timeout)
        return super().select(0)


# One query after another in the thread of whoever asks: closed loops, and a single server with a queue before it.


def back_to_back(
    workload: Workload, clock: Clock, ledger: Ledger, gate: Gate | None = None
) -> Generator[Query, None, None]:
    """Yield one query after another, each sent when the one before is answered.

    Args:
        workload: What answers.
        clock: Of the device.
        ledger: Of the sender; the processor time of a service that runs elsewhere is all the sender's.
        gate: What may end it.
    """
    elsewhere = isinstance(workload, Concurrent)
    while gate is None or gate.permits(1):
        started_s = clock.now()
        begun_s = time.thread_time() if elsewhere else 0.0
        query = workload.query()
        ledger.sent += 1
        ledger.landed += 1
        ledger.cpu_s += time.thread_time() - begun_s if elsewhere else 0.0
        if gate is not None:
            gate.landed(query)
        yield query if query.start_s is not None else replace(query, start_s=started_s)


def counted(queries: Generator[Query, None, None], ledger: Ledger) -> Generator[Query, None, None]:
    """Yield requests of a workload that sends them itself, and count them."""
    for query in queries:
        ledger.sent += 1
        ledger.landed += 1
        yield query


def in_turn(
    workload: Workload,
    times: Iterator[float],
    clock: Clock,
    ledger: Ledger,
    batch: int,
    timeout_s: float,
    gate: Gate | None = None,
) -> Generator[Query, None, None]:
    """Yield the requests of a first-come-first-served queue before a single server, as they are answered.

    The server takes the next ``batch`` requests as soon as it is free and they are there; the time in which it has
    nothing to do passes on the clock, where a simulated device draws idle power. On a virtual clock this is the queue
    itself, exactly. Whoever asks keeps the server waiting while he does something else between two requests.

    Args:
        workload: The server.
        times: When requests are meant to be sent, in seconds from the first look.
        clock: Of the device.
        ledger: Of the sender.
        batch: Requests in a query.
        timeout_s: How long to wait for the requests of a query at most.
        gate: What may end it.

    Raises:
        TrialError: If they take longer, or a query fails.
    """
    begin_s = ended_s = clock.now()
    while True:
        intended_s = [begin_s + time_s for time_s in islice(times, batch)]
        ready_s = max(ended_s, intended_s[-1])
        if ready_s - ended_s > timeout_s:
            raise TrialError(f"{batch} requests take {ready_s - ended_s:.3g} s to arrive; a window is {timeout_s:g} s")
        ledger.cpu_s += wait_until(clock, intended_s[-1])
        if gate is not None and not gate.permits(batch):
            return
        started_s = clock.now()
        query = workload.query()
        ended_s = clock.now()
        if query.more:
            raise TrialError("what answers several requests a run sends them itself; leave --arrivals out")
        ledger.sent += 1
        ledger.landed += batch
        ledger.note(started_s - ready_s)
        parts = list(shared(query, intended_s, started_s, ended_s))
        if gate is not None:  # of all of them, before whoever asks may lose interest in the rest
            for part in parts:
                gate.landed(part)
        yield from parts


# Several queries under way at once: an event loop in a thread of its own sends them and takes their answers.

_MOST_UNDER_WAY = 256
_PARTING_S = 10.0
_TURN_S = 1e-4
"""How long another thread may hold the interpreter while this one wants it.

With Python's own 5 ms, 1 % of the queries go out 16 ms late where whoever asks computes a fifth of the time; with this,
0.3 ms.
"""


def in_flight(
    workload: Concurrent,
    times: Iterator[float] | None,
    clock: Clock,
    ledger: Ledger,
    batch: int,
    timeout_s: float,
    gate: Gate | None = None,
) -> Generator[Query, None, None]:
    """Yield requests in the order in which they are answered; closing stops the load.

    At most as many queries are under way as the workload says, or 256 if it says one; those that find no place wait
    here, and count from when they were meant to be sent all the same.

    Args:
        workload: What answers.
        times: When requests are meant to be sent, in seconds from the first look; None keeps as many queries under way
            as the workload says.
        clock: Of the device; real.
        ledger: Of the sender.
        batch: Requests in a query, where ``times`` are given.
        timeout_s: How long to wait for the next answer at most.
        gate: What may end it; what is under way then, or when the load is closed, is waited for as long as that says.

    Raises:
        TrialError: If none comes for that long, or a query fails.
    """
    turn_s = sys.getswitchinterval()
    sys.setswitchinterval(min(_TURN_S, turn_s))
    flight = _Flight(workload, times, clock, ledger, batch, gate)
    try:
        while (query := flight.landed(timeout_s)) is not None:
            yield query
    finally:
        flight.end()
        sys.setswitchinterval(turn_s)


class _Flight:
    """The thread that sends, and what has come back to it."""

    def __init__(
        self,
        workload: Concurrent,
        times: Iterator[float] | None,
        clock: Clock,
        ledger: Ledger,
        batch: int,
        gate: Gate | None,
    ) -> None:
        self._workload = workload
        self._times = times
        self._batch = batch
        self._clock = clock
        self._ledger = ledger
        self._gate = gate
        self._back: queue.SimpleQueue[Query | BaseException | None] = queue.SimpleQueue()
        self._loop = asyncio.SelectorEventLoop(PunctualSelector())
        # No event: before Python 3.10 one belongs to the loop of the thread that makes it.
        self._over: asyncio.Future[None] = self._loop.create_future()
        self._under_way: set[asyncio.Task[None]] = set()
        self._schedule: asyncio.Task[None] | None = None
        self._failure: BaseException | None = None
        self._thread = Thread(target=self._run, name="polythrottle load", daemon=True)
        self._thread.start()

    def landed(self, timeout_s: float) -> Query | None:
        """Wait for the next request that is answered, or raise what ended the load; None once the gate has."""
        try:
            back = self._back.get(timeout=timeout_s)
        except queue.Empty:
            raise Unanswered(f"no query was answered in {timeout_s:g} s") from None
        if isinstance(back, BaseException):
            raise back
        return back

    def end(self) -> None:
        """Give up what is under way and wait until the thread has left."""
        with suppress(RuntimeError):  # the loop has ended by itself
            self._loop.call_soon_threadsafe(self._stop)
        self._thread.join(_PARTING_S + (0.0 if self._gate is None else self._gate.patience_s))

    def _run(self) -> None:
        try:
            with closing(EventLoop(self._loop)) as loop:
                loop.run(self._main())
        except BaseException as error:  # whatever it is, it belongs to the thread that asks
            self._back.put(error)

    async def _main(self) -> None:
        """Send until nobody asks for more or something fails; then cancel what is under way."""
        try:
            if self._times is not None:
                self._schedule = self._start(self._send_in_time(self._times))
            else:
                for _ in range(self._workload.concurrency):
                    self._start(self._send_on())
            await self._over
            if self._gate is not None:
                await self._all_landed(self._gate.patience_s)
        finally:
            under_way = set(self._under_way)
            for task in under_way:
                task.cancel()
            await asyncio.gather(*under_way, return_exceptions=True)
            await self._workload.hang_up()
        if self._failure is not None:
            raise self._failure
        self._back.put(None)

    async def _all_landed(self, patience_s: float) -> None:
        """Send nothing more, and wait some time for what is under way, so that it is known how late it was."""
        if self._schedule is not None:
            self._schedule.cancel()
        if under_way := self._under_way - {self._schedule}:
            await asyncio.wait(under_way, timeout=patience_s)

    def _permitted(self, count: int) -> bool:
        """Return whether so many requests may be sent; if not, the load is over."""
        if self._gate is None:
            return True
        if not self._over.done() and self._gate.permits(count):
            return True
        self._stop()
        return False

    def _stop(self) -> None:
        if not self._over.done():
            self._over.set_result(None)

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._under_way.add(task)
        task.add_done_callback(self._finish)
        return task

    def _finish(self, task: asyncio.Task[None]) -> None:
        """Let the first failure end the load."""
        self._under_way.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._failure = self._failure or task.exception()
            self._stop()

    async def _send_on(self) -> None:
        """Send one query after another, as others like this do beside it."""
        while self._permitted(1):
            started_s = self._clock.now()
            number = self._ledger.begin(started_s)
            query = await self._workload.send()
            self._land(query if query.start_s is not None else replace(query, start_s=started_s))
            self._ledger.end(number)
            await asyncio.sleep(0)  # a query may come back without waiting for anything

    async def _send_in_time(self, times: Iterator[float]) -> None:
        """Send each query when its last request is meant to be sent, or when there is a place for it again."""
        if self._workload.concurrency > 1:
            most = self._workload.concurrency
        else:
            most = _MOST_UNDER_WAY
        places = asyncio.Semaphore(most)
        begin_s = free_s = self._clock.now()
        while True:
            intended_s = [begin_s + time_s for time_s in islice(times, self._batch)]
            await self._moment(intended_s[-1])
            full = places.locked()
            await places.acquire()
            free_s = self._clock.now() if full else free_s
            if not self._permitted(self._batch):
                return
            self._start(self._send(intended_s, max(intended_s[-1], free_s), places))

    async def _moment(self, moment_s: float) -> None:
        """Wait until a moment, letting others go on, once at least."""
        await asyncio.sleep(0)
        while (left_s := moment_s - self._clock.now()) > 0:
            await asyncio.sleep(max(0.0, left_s - AWAKE_S))

    async def _send(self, intended_s: Sequence[float], ready_s: float, places: asyncio.Semaphore) -> None:
        started_s = self._clock.now()
        number = self._ledger.begin(started_s)
        self._ledger.note(started_s - ready_s)
        query = await self._workload.send()
        places.release()
        for part in shared(query, intended_s, started_s, self._clock.now()):
            self._land(part)
        self._ledger.end(number)

    def _land(self, query: Query) -> None:
        self._ledger.cpu_s = time.thread_time()
        if self._gate is not None:
            self._gate.landed(query)
        self._ledger.landed += 1  # before it can be taken, so that never more are taken than have landed
        self._back.put(query)


# A load on a workload: an iterator of requests as they are answered.


class Load(typing.Iterator[Query]):
    """Requests in the order in which they are answered, without end unless a gate sets one; made by `drive`.

    Nothing is sent before the first is asked for. Close it when enough has been seen, or use it as a context manager.
    """

    def __init__(
        self, queries: Generator[Query, None, None], ledger: Ledger, device: Discounting | None = None, at_once: int = 0
    ) -> None:
        self._queries = queries
        self._ledger = ledger
        self._device = device
        self._at_once = at_once
        self._left_out_s = 0.0
        self._taken = 0

    def __next__(self) -> Query:
        """Return the next request that is answered.

        Raises:
            StopIteration: If a gate has ended it.
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
        while self._ledger.oldest_s < moment_s and (query := next(self, None)) is not None:
            yield query
        yield from islice(self, self._ledger.landed - self._taken)

    @property
    def at_once(self) -> int:
        """How many queries a closed loop sends in its first moment; 0 where it has begun, or sends one at a time."""
        return 0 if self._taken else self._at_once

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
    gate: Gate | None = None,
) -> Load:
    """Begin a load on a workload; use it in a ``with``.

    ``Query.latency_s`` counts from ``Query.start_s``, when a request was meant to be sent, so that one that had to wait
    for others is not made to look fast (no coordinated omission). In a closed loop that is when it was sent.

    A workload that is `Concurrent` has several queries under way at once. Any other is one server with a queue before
    it; it runs in the thread of whoever asks, and on a virtual clock the queue is exact.

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
        gate: Asked before each query, and told of each answer; what it refuses ends the load.

    Raises:
        BadFile: If the arrivals are a recorded trace that cannot be read.
        InvalidInput: If there is a gate and the workload sends its requests itself.
    """
    ledger = Ledger()
    if isinstance(workload, SelfPaced):
        if gate is not None:
            raise InvalidInput("a simulated server of language models sends its requests itself; nothing bounds them")
        return Load(counted(workload.served(arrivals, seed, timeout_s), ledger), ledger)
    times = arrivals.times(seed)
    real = not isinstance(clock, VirtualClock)
    at_once = 0
    if real and isinstance(workload, Concurrent) and (times is not None or workload.concurrency > 1):
        queries = in_flight(workload, times, clock, ledger, batch, timeout_s, gate)
        if times is None:
            at_once = workload.concurrency
    elif times is None:
        queries = back_to_back(workload, clock, ledger, gate)
    else:
        queries = in_turn(workload, times, clock, ledger, batch, timeout_s, gate)
    return Load(queries, ledger, device if isinstance(device, Discounting) else None, at_once)


def batch_of(workload: Workload, point: Mapping[str, Level]) -> int:
    """Return how many requests one query of a workload answers at a point."""
    return int(point.get(BATCH_SIZE, workload.space.default.get(BATCH_SIZE, 1)))
