"""Threads whose start fails rather than hangs."""

import threading

from polythrottle.errors import DeviceError

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
        self._started = _Sign()
        try:
            super().start()
        except RuntimeError as err:
            raise DeviceError(f"cannot start the thread {self.name}: {err}") from err

    def join(self, timeout: float | None = None) -> None:
        """Wait for its end, if it was started."""
        if self._started.is_set():
            super().join(timeout)
