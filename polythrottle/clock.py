"""Time: every wait and every timestamp in polythrottle goes through one of these clocks."""

import time
from typing import Protocol


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
        time.sleep(max(0.0, duration_s))


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
