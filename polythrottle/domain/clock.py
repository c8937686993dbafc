"""Clocks, through which every wait and every timestamp goes, and threads whose start fails rather than hangs."""

from __future__ import annotations

import os
import select
import threading
import time
from contextlib import suppress
from typing import Protocol

from polythrottle.domain.errors import DeviceError

# Time: every wait and every timestamp in polythrottle goes through one of these clocks.


class Clock(Protocol):
    """A monotonic clock that can be waited on."""

    def now(self) -> float:
        """Return the time in seconds since an arbitrary start; never goes back."""

    def sleep(self, duration_s: float) -> None:
        """Wait for ``duration_s`` seconds of this clock."""


class SystemClock:
    """The machine's monotonic clock."""

    def now(self) -> float:
        """Return the monotonic time in seconds."""
        return time.perf_counter()

    def sleep(self, duration_s: float) -> None:
        """Sleep for ``duration_s`` seconds."""
        # What is already over due comes as a negative wait, which Python's own refuses.
        time.sleep(max(0.0, duration_s))


class WakingClock(SystemClock):
    """The machine's clock with a sleep that another thread or a signal can end; use as a control loop's."""

    def __init__(self) -> None:
        # A pipe, which a signal handler may write to: it has no lock.
        self._bell, self._cord = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def sleep(self, duration_s: float) -> None:
        """Sleep for ``duration_s`` seconds, or until somebody wakes it."""
        if select.select([self._bell], [], [], max(0.0, duration_s))[0]:
            os.read(self._bell, select.PIPE_BUF)

    def wake(self) -> None:
        """End the sleep under way, or the next one; may be called from any thread and from a signal handler."""
        # A full pipe has been rung often enough.
        with suppress(BlockingIOError):
            os.write(self._cord, b"\0")

    def close(self) -> None:
        """Release the bell; nobody may wake it any more."""
        os.close(self._bell)
        os.close(self._cord)


class VirtualClock:
    """A clock that only moves when told to, so that hours pass in no time."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now(self) -> float:
        """Return the virtual time in seconds."""
        return self._now_s

    def sleep(self, duration_s: float) -> None:
        """Move the virtual time on by ``duration_s`` seconds."""
        self._now_s += max(0.0, duration_s)


# Threads whose start fails rather than hangs.

_PATIENCE_S = 10.0


class _Sign(threading.Event):
    """A new thread's first sign of life, which is not waited for without end."""

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for it.

        Raises:
            RuntimeError: If it does not come.
        """
        if not super().wait(_PATIENCE_S if timeout is None else timeout):
            raise RuntimeError("no memory for a new thread")
        return True


class Thread(threading.Thread):
    """A thread that need not be joined where it could not be started.

    Python's own waits for good for the first sign of life of one that had no memory left for its first call
    (threading.py, `Thread.start`): a board that is set would stay so, and its lease be kept by another thread.
    """

    def start(self) -> None:
        """Start it.

        Raises:
            DeviceError: If that fails, for want of memory or because there are too many.
        """
        # CPython's own event of this name, set anew before `start` waits for it (Lib/threading.py).
        self._started = _Sign()
        try:
            super().start()
        except RuntimeError as err:
            raise DeviceError(f"cannot start the thread {self.name}: {err}") from err

    def join(self, timeout: float | None = None) -> None:
        """Wait for its end, if it was started."""
        # Python's own raises where the thread never started, and what cleans up after that is to go on.
        if self._started.is_set():
            super().join(timeout)
