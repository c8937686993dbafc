"""Several queries under way at once: an event loop in a thread of its own sends them and takes their answers."""

import asyncio
import queue
import sys
import time
from collections.abc import Coroutine, Generator, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from itertools import islice
from typing import Any

from polythrottle.clock import Clock
from polythrottle.driving.ledger import Ledger
from polythrottle.driving.sharing import shared
from polythrottle.driving.waiting import AWAKE_S, PunctualSelector
from polythrottle.errors import Unanswered
from polythrottle.measurement import Query
from polythrottle.ports import Concurrent
from polythrottle.threads import Thread
from polythrottle.workloads.event_loop import EventLoop

_MOST_UNDER_WAY = 256
_PARTING_S = 10.0
_TURN_S = 1e-4
"""How long another thread may hold the interpreter while this one wants it.

With Python's own 5 ms, 1 % of the queries go out 16 ms late where whoever asks computes a fifth of the time; with this,
0.3 ms.
"""


def in_flight(
    workload: Concurrent, times: Iterator[float] | None, clock: Clock, ledger: Ledger, batch: int, timeout_s: float
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

    Raises:
        TrialError: If none comes for that long, or a query fails.
    """
    turn_s = sys.getswitchinterval()
    sys.setswitchinterval(min(_TURN_S, turn_s))
    flight = _Flight(workload, times, clock, ledger, batch)
    try:
        while True:
            yield flight.landed(timeout_s)
    finally:
        flight.end()
        sys.setswitchinterval(turn_s)


class _Flight:
    """The thread that sends, and what has come back to it."""

    def __init__(
        self, workload: Concurrent, times: Iterator[float] | None, clock: Clock, ledger: Ledger, batch: int
    ) -> None:
        self._workload, self._times, self._batch = workload, times, batch
        self._clock, self._ledger = clock, ledger
        self._back: queue.SimpleQueue[Query | BaseException] = queue.SimpleQueue()
        self._loop = asyncio.SelectorEventLoop(PunctualSelector())
        self._over = asyncio.Event()
        self._under_way: set[asyncio.Task[None]] = set()
        self._failure: BaseException | None = None
        self._thread = Thread(target=self._run, name="polythrottle load", daemon=True)
        self._thread.start()

    def landed(self, timeout_s: float) -> Query:
        """Wait for the next request that is answered, or raise what ended the load."""
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
            self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join(_PARTING_S)

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
                self._start(self._send_in_time(self._times))
            else:
                for _ in range(self._workload.concurrency):
                    self._start(self._send_on())
            await self._over.wait()
        finally:
            under_way = set(self._under_way)
            for task in under_way:
                task.cancel()
            await asyncio.gather(*under_way, return_exceptions=True)
            await self._workload.hang_up()
        if self._failure is not None:
            raise self._failure

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._under_way.add(task)
        task.add_done_callback(self._finish)

    def _finish(self, task: "asyncio.Task[None]") -> None:
        """Let the first failure end the load."""
        self._under_way.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._failure = self._failure or task.exception()
            self._over.set()

    async def _send_on(self) -> None:
        """Send one query after another, as others like this do beside it."""
        while True:
            started_s = self._clock.now()
            number = self._ledger.begin(started_s)
            query = await self._workload.send()
            self._land(query if query.start_s is not None else replace(query, start_s=started_s))
            self._ledger.end(number)
            await asyncio.sleep(0)  # a query may come back without waiting for anything

    async def _send_in_time(self, times: Iterator[float]) -> None:
        """Send each query when its last request is meant to be sent, or when there is a place for it again."""
        most = self._workload.concurrency if self._workload.concurrency > 1 else _MOST_UNDER_WAY
        places = asyncio.Semaphore(most)
        begin_s = free_s = self._clock.now()
        while True:
            intended_s = [begin_s + time_s for time_s in islice(times, self._batch)]
            await self._moment(intended_s[-1])
            full = places.locked()
            await places.acquire()
            free_s = self._clock.now() if full else free_s
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
        self._back.put(query)
        self._ledger.landed += 1
