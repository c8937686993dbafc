"""One look at traffic and board: what came since the look before, joined into what the controller observes."""

from dataclasses import dataclass, replace

from polythrottle.daemon.guards import Observed
from polythrottle.daemon.ports import Board, Seen, Traffic, failed_of
from polythrottle.errors import PolythrottleError
from polythrottle.measurement import Reading

JUMP_S = 5.0
"""A look that comes so late tells of a clock that jumped or a machine that stood still, and of no rate and no power."""
_LEAST_S = 0.02
"""Power over less than this is noise of the sensor."""
_RATE_LEAST_S = 0.05
"""A rate over less than this, half the time between hurried looks, is chance: 3 requests in 2 ms are not 1500/s."""


@dataclass(frozen=True)
class Sight:
    """What one control period showed; None for what is not known.

    Args:
        now_s: When, on the clock of the control loop.
        period_s: Since the look before.
        seen: Of the requests; None while the workload is not up.
        reading: Of the board; None if its sensors cannot be read.
        power_w: Mean over the period; ``peak_w`` over its highest part.
        joules: Drawn in the period; None if unknown.
        jumped: Whether the period is no measure of anything.
        unread_s: For how long before the period the sensors could not be read; power and joules cover that too.
        anew: Whether the counter of energy began anew, as when the driver is loaded again.
        shared: Whether others than the workload drew too, such as a trainer beside it.
    """

    now_s: float
    period_s: float
    seen: Seen | None
    reading: Reading | None
    power_w: float | None = None
    peak_w: float | None = None
    joules: float | None = None
    jumped: bool = False
    unread_s: float = 0.0
    anew: bool = False
    shared: bool = False

    @property
    def own_j(self) -> float | None:
        """The joules of the period alone, to be compared with what it was predicted; None if that is not known."""
        return None if self.unread_s or self.shared else self.joules

    @property
    def rate_per_s(self) -> float | None:
        """Requests that came per second; None while they are not seen, or the period is too short or none."""
        if self.seen is None or self.seen.arrived is None or self.jumped or self.period_s < _RATE_LEAST_S:
            return None
        return self.seen.arrived / self.period_s

    @property
    def errors(self) -> float | None:
        """The share of requests that failed; None if that is not known."""
        if self.seen is None or self.seen.failed is None:
            return None
        ended = max(self.seen.answered or 0, self.seen.failed)
        return self.seen.failed / ended if ended else None

    @property
    def observed(self) -> Observed:
        """The same as the controller is told."""
        seen, reading = self.seen or Seen(), self.reading
        return Observed(
            self.now_s,
            self.period_s,
            self.rate_per_s,
            seen.waiting or 0,
            seen.p99_s,
            self.power_w,
            self.peak_w,
            None if reading is None else reading.temperature_c,
            None if reading is None else reading.throttled,
            self.errors,
            seen.worst_s,
            seen.p99_least_s,
        )


class Looking:
    """The eyes of the control loop.

    Args:
        board: Read once per period, and at each peek if ``peaks``.
        traffic: Looked at each time.
        now_s: The time.
        peaks: Whether the highest power within a period matters.

    Attributes:
        shared: Whether others than the workload draw now.
    """

    def __init__(self, board: Board, traffic: Traffic, now_s: float, peaks: bool = False) -> None:
        self.faults: dict[str, str] = {}
        self.shared = False
        self._board, self._traffic, self._peaks = board, traffic, peaks
        self._last_s = now_s
        self._gathered: Seen | None = None
        self._reading: Reading | None = None
        self._sample: Reading | None = None
        self._highest_w: float | None = None
        self._unread_s, self._anew = 0.0, _anew(board)

    def peek(self, now_s: float) -> int:
        """Look at the traffic between two control periods.

        Args:
            now_s: When.

        Returns:
            How many requests wait.
        """
        self._gather(now_s)
        if self._peaks:
            self._sampled(self._read())
        return 0 if self._gathered is None else self._gathered.waiting or 0

    def look(self, now_s: float) -> Sight:
        """Return what was seen since the look before."""
        self._gather(now_s)
        period_s, seen = now_s - self._last_s, self._gathered
        self._last_s, self._gathered = now_s, None
        reading = self._read()
        self._sampled(reading)
        peak_w, self._highest_w = self._highest_w, None
        jumped = not 0 < period_s < JUMP_S
        before, unread_s = self._read_before(reading, period_s, jumped)
        joules, power_w = (None, None) if jumped else _drawn(before, reading)
        peak_w = None if jumped else peak_w
        anew, self._anew = _anew(self._board) != self._anew, _anew(self._board)
        length_s = max(period_s, 1e-9)
        drawn = power_w, peak_w, joules
        return Sight(now_s, length_s, seen, reading, *drawn, jumped, unread_s, anew, self.shared)

    def _read_before(self, reading: Reading | None, period_s: float, jumped: bool) -> tuple[Reading | None, float]:
        """Return the reading before this one, and how long the sensors could not be read between that and the period.

        The counter goes on where a reading fails: what was drawn meanwhile is known with the next.
        """
        before, unread_s = self._reading, self._unread_s
        if reading is None and not jumped:
            self._unread_s += period_s
        else:
            self._reading, self._unread_s = reading, 0.0
        return before, unread_s

    def _gather(self, now_s: float) -> None:
        try:
            seen = self._traffic.look(now_s)
        except PolythrottleError as error:
            self.faults["traffic"] = f"requests cannot be seen: {error}"
            seen = None
        else:
            self._noted(getattr(self._traffic, "note", ""))
        self._gathered = seen if seen is None or self._gathered is None else _both(self._gathered, seen)

    def _noted(self, note: str) -> None:
        if note:
            self.faults["traffic"] = note
        else:
            self.faults.pop("traffic", None)

    def _read(self) -> Reading | None:
        try:
            reading = self._board.read()
        except PolythrottleError as error:
            self.faults["sensors"] = f"the board's sensors cannot be read: {error}"
            return None
        self.faults.pop("sensors", None)
        return reading

    def _sampled(self, reading: Reading | None) -> None:
        before, self._sample = self._sample, reading
        _, power_w = _drawn(before, reading)
        if power_w is not None:
            self._highest_w = max(power_w, self._highest_w or power_w)


def _anew(board: Board) -> int:
    """Return how often the board's counter of energy began anew, where it tells that."""
    count = getattr(board, "anew", 0)
    return count if isinstance(count, int) else 0


def _both(first: Seen, second: Seen) -> Seen:
    """Return two looks as one: counts added, the rest as it was seen last."""
    return replace(
        second,
        arrived=_sum(first.arrived, second.arrived),
        answered=_sum(first.answered, second.answered),
        failed=failed_of(first, second),
        model=second.model or first.model,
        worst_s=max((each.worst_s for each in (first, second) if each.worst_s is not None), default=None),
    )


def _sum(first: int | None, second: int | None) -> int | None:
    return (first or 0) + (second or 0) if (first, second) != (None, None) else None


def _drawn(before: Reading | None, after: Reading | None) -> tuple[float | None, float | None]:
    """Return joules and mean watts between two readings; None if either is missing or the counter began anew."""
    if before is None or after is None:
        return None, None
    time_s, joules = after.time_s - before.time_s, after.energy_j - before.energy_j
    return (joules, joules / time_s) if time_s >= _LEAST_S and joules >= 0 else (None, None)
