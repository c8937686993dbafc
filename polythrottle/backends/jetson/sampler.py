"""Joules out of watts: power sampled on the monotonic clock and integrated by the trapezoid rule.

The sensors of a Jetson have no energy counter. A thread reads them while the device is entered; in virtual time power
is read when somebody asks, and integrated between. What the reading itself costs is measured (`Sampler.cost`).
"""

import threading
import time
from contextlib import suppress

from polythrottle.backends.jetson.rails import PowerSource
from polythrottle.clock import Clock, VirtualClock
from polythrottle.errors import DeviceError, TrialError
from polythrottle.threads import Thread

_PATIENCE_S, _PATIENCE_SAMPLES = 2.0, 20


class Sampler:
    """A running total of energy.

    Args:
        source: Of power.
        clock: Readings go by it; a virtual one is sampled only when asked.
        hz: Samples per second.
        factor: What every joule is multiplied by.
    """

    def __init__(self, source: PowerSource, clock: Clock, hz: float, factor: float = 1.0) -> None:
        self._source, self._clock, self._hz, self._factor = source, clock, hz, factor
        self._guard = threading.Lock()
        self._ended = threading.Event()
        self._thread: Thread | None = None
        self._users = 0
        self._last: tuple[float, float] | None = None
        self._total_j, self._gap_s = 0.0, 0.0
        self._busy_s, self._samples = 0.0, 0

    @property
    def cost(self) -> tuple[float, int]:
        """Processor seconds that sampling in the background has taken so far, and for how many samples."""
        return self._busy_s, self._samples

    def total_j(self) -> float:
        """Return the joules so far; never falls.

        Raises:
            DeviceError: If the sensors cannot be read any more.
            TrialError: Once, if they were not read for so long that the joules since are not known.
        """
        try:
            with self._guard:
                if self._source.stale():
                    self._source.renew()
                self._sample()
                if not self._users:
                    self._source.close()
                gap_s, self._gap_s = self._gap_s, 0.0
        except (OSError, ValueError) as err:
            raise DeviceError(f"the power sensors can no longer be read: {err}") from err
        if gap_s:
            raise TrialError(f"power was not sampled for {gap_s:.1f} s, so the joules of this window are not known")
        return self._total_j

    def _sample(self) -> None:
        watts = self._power_w()
        now_s = self._clock.now()
        if self._last is not None:
            elapsed_s = now_s - self._last[0]
            # A total never falls, though single rails may read below zero when idle.
            self._total_j += max(0.0, (watts + self._last[1]) / 2 * elapsed_s * self._factor)
            if self._thread is not None and elapsed_s > max(_PATIENCE_S, _PATIENCE_SAMPLES / self._hz):
                self._gap_s = max(self._gap_s, elapsed_s)
        self._last = now_s, watts

    def _power_w(self) -> float:
        """Return the power now; sensors that do not answer are looked for once again, for they may have moved."""
        try:
            return self._source.power_w()
        except (OSError, ValueError):
            self._source.renew()
            return self._source.power_w()

    def start(self) -> None:
        """Sample in the background from now on, until `stop` was called as often; in virtual time, when asked."""
        with self._guard:
            self._users += 1
            if self._users > 1:
                return
        if isinstance(self._clock, VirtualClock):
            return
        self._ended.clear()
        self._last = None
        self._thread = Thread(target=self._run, name="polythrottle-power", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop sampling, unless somebody else has started it too."""
        with self._guard:
            self._users = max(0, self._users - 1)
            if self._users:
                return
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        with self._guard:
            self._source.close()

    def _run(self) -> None:
        period_s, started_s = 1.0 / self._hz, time.thread_time()
        due_s = self._clock.now()
        while not self._ended.wait(max(0.0, due_s - self._clock.now())):
            with self._guard:
                # The next reading meets the same error where somebody can act on it.
                with suppress(OSError, ValueError, DeviceError):
                    self._sample()
                self._busy_s, self._samples = time.thread_time() - started_s, self._samples + 1
            due_s = max(due_s + period_s, self._clock.now() - period_s)
