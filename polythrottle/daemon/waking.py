"""The machine's clock with a sleep that another thread or a signal can end."""

import os
import select

from polythrottle.clock import SystemClock


class WakingClock(SystemClock):
    """A system clock whose `sleep` ends early when `wake` is called; use as the control loop's."""

    def __init__(self) -> None:
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def sleep(self, duration_s: float) -> None:
        """Sleep for ``duration_s`` seconds, or until somebody wakes it."""
        if select.select([self._bell], [], [], max(0.0, duration_s))[0]:
            os.eventfd_read(self._bell)

    def wake(self) -> None:
        """End the sleep under way, or the next one; may be called from any thread and from a signal handler."""
        os.eventfd_write(self._bell, 1)

    def close(self) -> None:
        """Release the bell; nobody may wake it any more."""
        os.close(self._bell)
