"""One query after another in the thread of whoever asks: closed loops, and a single server with a queue before it."""

import time
from collections.abc import Generator, Iterator
from dataclasses import replace
from itertools import islice

from polythrottle.clock import Clock
from polythrottle.driving.ledger import Ledger
from polythrottle.driving.sharing import shared
from polythrottle.driving.waiting import wait_until
from polythrottle.errors import TrialError
from polythrottle.measurement import Query
from polythrottle.ports import Concurrent, Workload


def back_to_back(workload: Workload, clock: Clock, ledger: Ledger) -> Generator[Query, None, None]:
    """Yield one query after another, each sent when the one before is answered.

    Args:
        workload: What answers.
        clock: Of the device.
        ledger: Of the sender; the processor time of a service that runs elsewhere is all the sender's.
    """
    elsewhere = isinstance(workload, Concurrent)
    while True:
        started_s, begun_s = clock.now(), time.thread_time() if elsewhere else 0.0
        query = workload.query()
        ledger.sent += 1
        ledger.landed += 1
        ledger.cpu_s += time.thread_time() - begun_s if elsewhere else 0.0
        yield query if query.start_s is not None else replace(query, start_s=started_s)


def in_turn(
    workload: Workload, times: Iterator[float], clock: Clock, ledger: Ledger, batch: int, timeout_s: float
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
        started_s = clock.now()
        query = workload.query()
        ended_s = clock.now()
        if query.more:
            raise TrialError("what answers several requests a run sends them itself; leave --arrivals out")
        ledger.sent += 1
        ledger.landed += batch
        ledger.note(started_s - ready_s)
        yield from shared(query, intended_s, started_s, ended_s)
