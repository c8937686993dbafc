"""Joules out of watts: power readings integrated over time, and a thread that takes them several times a second."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from polythrottle.domain.clock import Clock, Thread, VirtualClock
from polythrottle.domain.errors import PolythrottleError

# Joules out of watts: power readings integrated over time.


@dataclass(frozen=True)
class PowerReading:
    """A power reading.

    Args:
        watts: How much.
        timestamp_us: When whoever took it took it, to know a repeated one by; None where it does not say.
    """

    watts: float
    timestamp_us: int | None = None


class PowerIntegrator:
    """Power readings integrated over time by trapezoids; a reading seen before counts once.

    Args:
        read: Returns the power now.
        made_of: Which call that is, and over what time it averages.
        clock: The device's.
    """

    def __init__(self, read: Callable[[], PowerReading], made_of: str, clock: Clock) -> None:
        self._read = read
        self.made_of = made_of
        self._clock = clock
        self._guard = threading.Lock()
        self._last: PowerReading | None = None
        self._last_s = 0.0
        self._total_j = 0.0

    def total_j(self) -> float:
        """Return the joules since the first reading, up to now.

        Raises:
            DeviceError: If the sensor is gone.
        """
        with self._guard:
            self._sample(closing=True)
            return self._total_j

    def look(self) -> None:
        """Take a reading.

        Raises:
            DeviceError: If the sensor is gone.
        """
        with self._guard:
            self._sample(closing=False)

    def _sample(self, *, closing: bool) -> None:
        power = self._read()
        now_s = self._clock.now()
        if self._last is None:
            self._last = power
            self._last_s = now_s
            return
        repeated = power.timestamp_us is not None and power.timestamp_us == self._last.timestamp_us
        if repeated and not closing:
            return  # the next reading that is new spans the time since the last
        self._total_j += (self._last.watts + power.watts) / 2 * (now_s - self._last_s)
        self._last = power
        self._last_s = now_s


# Looks at a sensor several times a second in the background, for what a reading at either end would miss.


class BackgroundSampler:
    """Calls a function at a steady pace in a thread of its own while anybody needs it, and knows what that costs.

    Args:
        look: What to do each time. An error ends the thread; the next reading meets it where somebody can act on it.
        period_s: From one look to the next.
        clock: The device's; in virtual time there is no thread, for time passes only while somebody waits.
        name: Of the thread.
        at_once: Whether the first look is at the start, and not a period later.
    """

    def __init__(
        self, look: Callable[[], None], period_s: float, clock: Clock, name: str, *, at_once: bool = False
    ) -> None:
        self._look = look
        self._period_s = period_s
        self._clock = clock
        self._name = name
        self._at_once = at_once
        self._turn = threading.Lock()
        self._ended = threading.Event()
        self._thread: Thread | None = None
        self.users = 0
        """How many have started it and not stopped it."""
        self.busy_s = 0.0
        """Processor seconds that looking has taken so far."""
        self.looks = 0

    @property
    def running(self) -> bool:
        """Whether there is a thread."""
        return self._thread is not None

    def start(self) -> None:
        """Look from now on, until `stop` was called as often.

        Raises:
            DeviceError: If no thread can be started.
        """
        with self._turn:
            if self.users == 0 and not isinstance(self._clock, VirtualClock):
                self._ended.clear()
                thread = Thread(target=self._run, name=self._name, daemon=True)
                thread.start()
                self._thread = thread
            self.users += 1

    def stop(self) -> None:
        """End after the look in progress, unless somebody else needs it still."""
        with self._turn:
            self.users = max(0, self.users - 1)
            if self.users or self._thread is None:
                return
            self._ended.set()
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        due_s = time.monotonic()
        if not self._at_once:
            due_s += self._period_s
        while not self._ended.wait(max(0.0, due_s - time.monotonic())):
            began_s = time.thread_time()
            try:
                self._look()
            except PolythrottleError:
                return
            self.busy_s += time.thread_time() - began_s
            self.looks += 1
            # A look that was late is made up for once; those before it are lost.
            due_s = max(due_s + self._period_s, time.monotonic() - self._period_s)
