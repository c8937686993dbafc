"""Looks at a sensor several times a second in the background, for what a reading at either end would miss."""

import threading
import time
from collections.abc import Callable

from polythrottle.errors import PolythrottleError


class Lookout:
    """Calls a function at a steady pace in a thread of its own, and knows what that costs.

    Args:
        look: What to do each time. An error ends the thread; the next reading meets it where somebody can act on it.
        hz: How often a second.
    """

    def __init__(self, look: Callable[[], None], hz: float) -> None:
        self._look, self._period_s = look, 1.0 / hz
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self.busy_s = 0.0

    def start(self) -> None:
        """Begin."""
        self._ended.clear()
        self._thread = threading.Thread(target=self._run, name="polythrottle-lookout", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End, after the look in progress."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        while not self._ended.wait(self._period_s):
            try:
                self._look()
            except PolythrottleError:
                return
            self.busy_s = time.thread_time()
