"""What the control loop sees of board and traffic, through ports: both, and what came of them since the look before."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

from polythrottle.actuation.client.board import Board
from polythrottle.daemon.control.events import Observation, Target
from polythrottle.domain.errors import PolythrottleError
from polythrottle.domain.measurement import Reading

Amount = TypeVar("Amount", int, float)

# What the control loop needs to know of the requests that are served.


@dataclass(frozen=True)
class RequestStats:
    """What was seen of a workload's requests since the look before; what is not known is None.

    Args:
        arrived: Requests that came; None where only the workload itself can be seen.
        answered: Of them or of earlier ones, how many ended since; ``failed`` of those, without an answer.
        waiting: Requests that wait to be sent, now.
        p99_s: Of the requests answered lately, over as long a time as the SLO is meant for.
        mean_s: Likewise.
        worst_s: The longest of those answered since the look before.
        model: A name for the contents of the served model; another one means that it was changed. Empty if unknown.
        p99_least_s: What the p99 of that whole time comes to at least, while it has not passed yet: what the guard goes
            by. None where only the p99 is known.
        tokens_in: Tokens of prompts, of a language model; ``tokens_out`` that were generated.
        tokens_out: Since the look before.
        ttft_p99_s: 99 % of the requests answered lately had their first token within this time.
        tpot_p99_s: Likewise, each request's mean time per token after it.
        firsts: Tokens of each prompt that had its first token in the last minute, and the seconds until then; empty
            where nobody tells of single prompts.
    """

    arrived: int | None = 0
    answered: int | None = None
    failed: int | None = None
    waiting: int | None = None
    p99_s: float | None = None
    mean_s: float | None = None
    model: str = ""
    worst_s: float | None = None
    p99_least_s: float | None = None
    tokens_in: int | None = None
    tokens_out: int | None = None
    ttft_p99_s: float | None = None
    tpot_p99_s: float | None = None
    firsts: tuple[tuple[float, float], ...] = ()


def known_sum(first: Amount | None, second: Amount | None) -> Amount | None:
    """Return the sum of two amounts of which either may be unknown, which then counts as nothing; None if both are."""
    if first is None:
        return second
    if second is None:
        return first
    return first + second


def failed_of(first: RequestStats, second: RequestStats) -> int | None:
    """Return how many requests failed of those that two looks saw end; None unless both know, for it is of both."""
    known = [each for each in (first, second) if each.answered is not None]
    if any(each.failed is None for each in known):
        return None
    failed = [each.failed for each in (first, second) if each.failed is not None]
    if failed:
        return sum(failed)
    return None


class Traffic(Protocol):
    """Where the daemon learns of requests, and where it says how they are to be batched."""

    @property
    def uri(self) -> str:
        """The text that opens it again."""

    def look(self, now_s: float) -> RequestStats | None:
        """Return what was seen since the look before; None while the workload is not up. Never blocks over 0.2 s.

        Args:
            now_s: When, on the clock of the control loop.
        """

    @property
    def note(self) -> str:
        """What a user should know of how requests are seen now, such as what went wrong; empty if nothing."""

    def serve(self, target: Target) -> None:
        """Tell the server the batch and the time to gather of a point, where it can be told.

        Raises:
            TrialError: If the server refuses.
        """

    def close(self) -> None:
        """Release what it holds."""


# One look at traffic and board: what came since the look before, joined into what the controller observes.

JUMP_S = 5.0
"""A look that comes so late tells of a clock that jumped or a machine that stood still, and of no rate and no power."""
_LEAST_S = 0.02
"""Power over less than this is noise of the sensor."""
_RATE_LEAST_S = 0.05
"""A rate over less than this, half the time between hurried looks, is chance: 3 requests in 2 ms are not 1500/s."""


@dataclass(frozen=True)
class ControlPeriod:
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
    seen: RequestStats | None
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
        if self.unread_s or self.shared:
            return None
        return self.joules

    @property
    def rate_per_s(self) -> float | None:
        """Requests that came per second; None while they are not seen, or the period is too short or none."""
        if self.seen is None or self.seen.arrived is None or self.jumped or self.period_s < _RATE_LEAST_S:
            return None
        return self.seen.arrived / self.period_s

    def per_s(self, tokens: int | None) -> float | None:
        """Return tokens since the look before as a rate; None as `rate_per_s`."""
        if tokens is None or self.jumped or self.period_s < _RATE_LEAST_S:
            return None
        return tokens / self.period_s

    @property
    def errors(self) -> float | None:
        """The share of requests that failed; None if that is not known."""
        if self.seen is None or self.seen.failed is None:
            return None
        ended = max(self.seen.answered or 0, self.seen.failed)
        if ended:
            return self.seen.failed / ended
        return None

    @property
    def observed(self) -> Observation:
        """The same as the controller is told."""
        seen = self.seen or RequestStats()
        reading = self.reading
        return Observation(
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
            seen.ttft_p99_s,
            seen.tpot_p99_s,
            seen.firsts,
        )


class Observer:
    """The eyes of the control loop.

    Args:
        board: Read once per period, and at each peek if ``peaks``.
        traffic: Looked at each time.
        now_s: The time.
        peaks: Whether the highest power within a period matters.
    """

    def __init__(self, board: Board, traffic: Traffic, now_s: float, peaks: bool = False) -> None:
        self.faults: dict[str, str] = {}
        self._board = board
        self._traffic = traffic
        self._peaks = peaks
        self._last_s = now_s
        self._gathered: RequestStats | None = None
        self._reading: Reading | None = None
        self._sample: Reading | None = None
        self._highest_w: float | None = None
        self._unread_s = 0.0
        self._anew = _anew(board)

    def peek(self, now_s: float) -> int:
        """Look at the traffic between two control periods.

        Args:
            now_s: When.

        Returns:
            How many requests wait.
        """
        seen = self._gather(now_s)
        if self._peaks:
            self._sampled(self._read())
        if seen is None:
            return 0
        return seen.waiting or 0

    def look(self, now_s: float, shared: bool = False) -> ControlPeriod:
        """Return what was seen since the look before.

        Args:
            now_s: When.
            shared: Whether others than the workload draw now, such as a trainer beside it.
        """
        self._gather(now_s)
        period_s = now_s - self._last_s
        seen = self._gathered
        self._last_s = now_s
        self._gathered = None
        reading = self._read()
        self._sampled(reading)
        peak_w = self._highest_w
        self._highest_w = None
        jumped = not 0 < period_s < JUMP_S
        before, unread_s = self._read_before(reading, period_s, jumped)
        joules, power_w = (None, None) if jumped else _drawn(before, reading)
        before_anew = self._anew
        self._anew = _anew(self._board)
        return ControlPeriod(
            now_s=now_s,
            # Two looks at the same moment of a virtual clock: nothing may be divided by zero.
            period_s=max(period_s, 1e-9),
            seen=seen,
            reading=reading,
            power_w=power_w,
            peak_w=None if jumped else peak_w,
            joules=joules,
            jumped=jumped,
            unread_s=unread_s,
            anew=self._anew != before_anew,
            shared=shared,
        )

    def _read_before(self, reading: Reading | None, period_s: float, jumped: bool) -> tuple[Reading | None, float]:
        """Return the reading before this one, and how long the sensors could not be read between that and the period.

        The counter goes on where a reading fails: what was drawn meanwhile is known with the next.
        """
        before = self._reading
        unread_s = self._unread_s
        # After a jump of the clock nobody can say how long the sensors were silent.
        if reading is None and not jumped:
            self._unread_s += period_s
        else:
            self._reading = reading
            self._unread_s = 0.0
        return before, unread_s

    def _gather(self, now_s: float) -> RequestStats | None:
        """Look, add that to what the period has shown so far, and return this look alone; None if it saw nothing."""
        try:
            seen = self._traffic.look(now_s)
        except PolythrottleError as error:
            self.faults["traffic"] = f"requests cannot be seen: {error}"
            return None
        self._noted(getattr(self._traffic, "note", ""))
        # What was counted has come, even if the workload goes, or cannot be seen, before the period is over.
        if seen is not None:
            self._gathered = seen if self._gathered is None else _both(self._gathered, seen)
        return seen

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
            # Unknown, and not 0: a guard would take 0 W for well.
            return None
        self.faults.pop("sensors", None)
        return reading

    def _sampled(self, reading: Reading | None) -> None:
        before = self._sample
        self._sample = reading
        _, power_w = _drawn(before, reading)
        if power_w is not None:
            self._highest_w = max(power_w, self._highest_w or power_w)


def _anew(board: Board) -> int:
    """Return how often the board's counter of energy began anew, where it tells that."""
    count = getattr(board, "anew", 0)
    if isinstance(count, int):
        return count
    return 0


def _both(first: RequestStats, second: RequestStats) -> RequestStats:
    """Return two looks as one: counts added, the rest as it was seen last."""
    return replace(
        second,
        arrived=known_sum(first.arrived, second.arrived),
        answered=known_sum(first.answered, second.answered),
        failed=failed_of(first, second),
        model=second.model or first.model,
        tokens_in=known_sum(first.tokens_in, second.tokens_in),
        tokens_out=known_sum(first.tokens_out, second.tokens_out),
        worst_s=max((each.worst_s for each in (first, second) if each.worst_s is not None), default=None),
    )


def _drawn(before: Reading | None, after: Reading | None) -> tuple[float | None, float | None]:
    """Return joules and mean watts between two readings; None if either is missing or the counter began anew."""
    if before is None or after is None:
        return None, None
    # The readings' own times: a board's clock may run apart from the loop's, and its joules go with its own.
    time_s = after.time_s - before.time_s
    joules = after.energy_j - before.energy_j
    if time_s >= _LEAST_S and joules >= 0:
        return (joules, joules / time_s)
    return (None, None)
