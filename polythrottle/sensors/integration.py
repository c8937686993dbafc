"""Joules out of watts: power readings integrated over time."""

import threading
from collections.abc import Callable
from dataclasses import dataclass

from polythrottle.clock import Clock


@dataclass(frozen=True)
class Power:
    """A power reading.

    Args:
        watts: How much.
        timestamp_us: When whoever took it took it, to know a repeated one by; None where it does not say.
    """

    watts: float
    timestamp_us: int | None = None


class Integrated:
    """Power readings integrated over time by trapezoids; a reading seen before counts once.

    Args:
        read: Returns the power now.
        made_of: Which call that is, and over what time it averages.
        clock: The device's.
    """

    def __init__(self, read: Callable[[], Power], made_of: str, clock: Clock) -> None:
        self._read, self.made_of, self._clock = read, made_of, clock
        self._guard = threading.Lock()
        self._last: Power | None = None
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
        power, now_s = self._read(), self._clock.now()
        if self._last is None:
            self._last, self._last_s = power, now_s
            return
        repeated = power.timestamp_us is not None and power.timestamp_us == self._last.timestamp_us
        if repeated and not closing:
            return  # the next reading that is new spans the time since the last
        self._total_j += (self._last.watts + power.watts) / 2 * (now_s - self._last_s)
        self._last, self._last_s = power, now_s
