"""Waiting for a moment: asleep for most of the time, awake for the last of it."""

import select
import selectors
import time

from polythrottle.clock import Clock, VirtualClock

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
