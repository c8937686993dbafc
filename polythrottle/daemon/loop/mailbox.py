"""Where the control loop and its clients meet: status, events, and commands that wait.

The status is built from what the loop knows by a pure function, called once per turn. The files that commands name are
read beforehand.
"""

from __future__ import annotations

import os
import threading
import typing
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as TooLate  # before Python 3.11 not the builtin one
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Union

from polythrottle.actuation.client.board import Board
from polythrottle.daemon.budgets import Carbon, check_wish
from polythrottle.daemon.commands import Answer, ApplyProfile, Command, SetBudget
from polythrottle.daemon.control.events import Bounds, Guard, Observation, tripped, waits_of
from polythrottle.daemon.control.state import Phase, State
from polythrottle.daemon.energy_accounts import Accounts
from polythrottle.daemon.followed_profile import FollowedProfile, ProfileFile, read_profile_file
from polythrottle.daemon.history_store import HistoryStore
from polythrottle.daemon.observation import ControlPeriod, Traffic
from polythrottle.daemon.status import (
    FinetuningShown,
    Front,
    GuardShown,
    Happened,
    RungShown,
    Status,
    StudyShown,
    WorkloadShown,
)
from polythrottle.domain.errors import DeviceError
from polythrottle.domain.ladder import Ladder

# Kernels for ARM have pages of 16 and 64 KiB too.
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class Frame:
    """What does not change while a daemon runs.

    Args:
        board: Whose board it is.
        traffic: Where requests are seen.
        since: Wall time it began at.
        version: Of polythrottle.
    """

    board: Board
    traffic: Traffic
    since: str
    version: str


@dataclass(frozen=True)
class Turn:
    """What a turn of the control loop found besides what it saw.

    Args:
        number: From 1.
        wall_s: Wall time, seconds since the epoch.
        late_s: How late it began; ``late_p99_s`` over the last thousand.
        reason: Why the present point is held.
        released: Whether a person has asked to leave the board alone.
        faults: What does not work now.
        drift: What has drifted.
        study: That runs, or ran last.
        event_counts: How many events of each kind there were.
        unconfirmed: The profile that must be confirmed; ``confirm_left_s`` within what.
        finetuning: The job beside the workload.
    """

    number: int
    wall_s: float
    late_s: float = 0.0
    late_p99_s: float = 0.0
    reason: str = ""
    released: bool = False
    faults: tuple[str, ...] = ()
    drift: str = ""
    study: StudyShown | None = None
    event_counts: dict[str, int] = field(default_factory=dict)
    unconfirmed: str = ""
    confirm_left_s: float | None = None
    finetuning: FinetuningShown | None = None


def status_of(
    frame: Frame, turn: Turn, state: State, sight: ControlPeriod, tuned: FollowedProfile | None, accounts: Accounts
) -> Status:
    """Return what is shown after a turn."""
    framed = _followed(_seen(_framed(frame, turn), sight), state, tuned)
    return replace(
        framed,
        phase=str(Phase.YIELDED if turn.released else state.phase),
        # What is served does not go away because its board is left alone.
        workload=_workload(frame, state.plan is not None or (turn.released and sight.seen is not None), tuned),
        leased=state.leased and not turn.released,
        guards=() if tuned is None else guards_of(tuned.plan.bounds, sight.observed),
        budget=accounts.shown_budget(state.rung),
        saved=accounts.shown_saving(),
        exploring=accounts.shown_exploring,
        energy_j=accounts.energy_j,
        requests=accounts.requests,
        failed=accounts.failed,
        resident_bytes=resident_bytes(),
    )


def _framed(frame: Frame, turn: Turn) -> Status:
    return Status(
        turn=turn.number,
        at=stamp(turn.wall_s),
        since=frame.since,
        polythrottle=frame.version,
        device=frame.board.uri,
        title=frame.board.title,
        energy_kind=str(frame.board.energy_kind),
        boundary=frame.board.boundary,
        reason=turn.reason,
        drift=turn.drift,
        study=turn.study,
        late_s=turn.late_s,
        late_p99_s=turn.late_p99_s,
        faults=turn.faults,
        told=turn.event_counts,
        unconfirmed=turn.unconfirmed,
        confirm_left_s=turn.confirm_left_s,
        finetuning=turn.finetuning,
    )


def _seen(status: Status, sight: ControlPeriod) -> Status:
    seen = sight.seen
    reading = sight.reading
    if seen is not None:
        status = replace(
            status,
            waiting=seen.waiting,
            p99_s=seen.p99_s,
            mean_s=seen.mean_s,
            ttft_p99_s=seen.ttft_p99_s,
            tpot_p99_s=seen.tpot_p99_s,
            tokens_in_per_s=sight.per_s(seen.tokens_in),
            tokens_out_per_s=sight.per_s(seen.tokens_out),
        )
    if reading is not None:
        clocks = dict(reading.clocks_hz)
        status = replace(
            status, temperature_c=reading.temperature_c, clocks_hz=clocks, throttled=reading.throttled, reachable=True
        )
    return replace(status, rate_per_s=sight.rate_per_s, power_w=sight.power_w, peak_w=sight.peak_w)


def _followed(status: Status, state: State, tuned: FollowedProfile | None) -> Status:
    applied = state.applied
    if applied is not None:
        status = replace(status, point=dict(applied.point), gather_s=applied.gather_s)
    if state.plan is not None:
        status = replace(status, demand_per_s=state.forecast.demand_per_s)
    if tuned is not None:
        ladder = tuned.plan.ladder
        front: tuple[Front, ...] = ()
        if ladder is not None:
            front = _front(ladder)
        status = replace(status, limit_s=tuned.plan.bounds.p99_s, ladder=front)
    return replace(status, rung=_rung(state))


def guards_of(bounds: Bounds, seen: Observation) -> tuple[GuardShown, ...]:
    """Return each guard with what it sees and whether it trips."""
    # Limits for some lengths of prompts have rows of their own, and would trip the row of all prompts.
    trips = {trip.guard for trip in tripped(replace(bounds, ttft_of=()), seen)}
    throttled = None if seen.throttled is None else float(seen.throttled)
    rows = (
        (Guard.P99, seen.p99_s, bounds.p99_s),
        (Guard.ERRORS, seen.errors, bounds.errors),
        (Guard.POWER, seen.power_w, bounds.power_w),
        (Guard.PEAK, seen.peak_w, bounds.peak_w),
        (Guard.TEMPERATURE, seen.temperature_c, bounds.temperature_c),
        (Guard.THROTTLE, throttled, None if bounds.throttling else 0.0),
    )
    of_tokens = ((Guard.TTFT, seen.ttft_p99_s, bounds.ttft_s), (Guard.TPOT, seen.tpot_p99_s, bounds.tpot_s))
    # Of a workload without tokens they would be two rows that never say anything.
    told = [row for row in of_tokens if row[1] is not None or row[2] is not None]
    of_lengths = [
        GuardShown(f"{Guard.TTFT} for {wait.prompts}", wait.p99_s, wait.limit_s, wait.broken)
        for wait in waits_of(bounds, seen)
    ]
    first, *rest = (GuardShown(str(guard), value, limit, guard in trips) for guard, value, limit in (*rows, *told))
    at = len(rest) - len(told)
    return (first, *rest[at:], *of_lengths, *rest[:at])


def stamp(wall_s: float) -> str:
    """Return a wall time for people: ISO 8601 with its zone."""
    return datetime.fromtimestamp(wall_s).astimezone().isoformat(timespec="milliseconds")


def resident_bytes() -> int:
    """Return how much memory this process has in use; 0 where the kernel does not say."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * _PAGE_BYTES
    except (OSError, ValueError, IndexError):
        return 0


def _workload(frame: Frame, up: bool, tuned: FollowedProfile | None) -> WorkloadShown | None:
    if tuned is None:
        return None
    name = tuned.workload.rpartition("/")[2] or tuned.workload
    return WorkloadShown(name, tuned.workload, frame.traffic.uri, tuned.slo, up, tuned.name or None)


def _rung(state: State) -> RungShown | None:
    if (rung := state.rung) is None or state.plan is None or state.plan.ladder is None:
        return None
    return RungShown(state.footing.rung, len(state.plan.ladder.rungs), rung.rate_per_s, rung.power_w, rung.p99_s)


def _front(ladder: Ladder) -> tuple[Front, ...]:
    return tuple(Front(rung.rate_per_s, rung.power_w, rung.p99_s, dict(rung.service.point)) for rung in ladder.rungs)


# The files that wishes name, read before the control loop hears of them: it must never wait for a file.

Named = Union[ProfileFile, Carbon, None]
"""What is in such a file; None where a wish names none."""
Read = typing.Callable[[], Named]
"""Returns it, or raises what was wrong with it."""


def names_file(wish: Command) -> bool:
    """Return whether there is a file to be read for a wish."""
    return isinstance(wish, ApplyProfile) or (isinstance(wish, SetBudget) and wish.carbon is not None)


def read_named(wish: Command) -> Named:
    """Return what is in the file that a wish names; may take seconds.

    Raises:
        UnknownName: If there is no such profile.
        BadFile: If it cannot be used.
        InvalidInput: If the wish makes no sense, whatever is in the file.
    """
    if isinstance(wish, ApplyProfile):
        return read_profile_file(wish.profile)
    if isinstance(wish, SetBudget) and wish.carbon is not None:
        check_wish(wish)
        return Carbon.read(Path(wish.carbon))
    return None


# Where the control loop and those who ask meet: it never waits for them, they may wait for it.

_KEPT = 1000
_WISHES_MOST = 64
_ENDED = "the daemon ends and takes no more requests"
_PATIENCE_S = 10.0


@dataclass(frozen=True)
class PendingCommand:
    """A wish that waits, what is in the file it names where that was read, and where its answer or its error goes."""

    wish: Command
    read: Read | None = None
    answer: Future[Answer] = field(default_factory=Future)


class Mailbox:
    """One status, the last events, and the wishes that wait.

    The control loop calls `publish`, `tell` and `wishes`; every other method may be called from any thread. What is
    handed out is immutable, so that a slow reader holds up nobody.
    """

    def __init__(self, first: Status | None = None) -> None:
        self._status = first or Status()
        self._events: deque[Happened] = deque(maxlen=_KEPT)
        self._wishes: deque[PendingCommand] = deque()
        self._lock = threading.Lock()
        self._wake: Callable[[], None] = lambda: None
        self._closed = False
        self._listeners: list[Callable[[], None]] = []

    @property
    def status(self) -> Status:
        """What the last turn saw."""
        return self._status

    def publish(self, status: Status) -> None:
        """Show a new status and tell those who listen."""
        # No lock: one reference takes another's place, and a reader has the old status or the new one.
        self._status = status
        self._ring()

    def tell(self, events: Sequence[Happened]) -> None:
        """Add events, oldest first, and tell those who listen."""
        with self._lock:
            self._events.extend(events)
        if events:
            self._ring()

    def events(self, after: int = 0) -> tuple[Happened, ...]:
        """Return the events after a number, oldest first; the last thousand are kept here."""
        with self._lock:
            return tuple(each for each in self._events if each.number > after)

    def listen(self, ring: Callable[[], None]) -> Callable[[], None]:
        """Have ``ring`` called, from the control loop's thread and at once, whenever something is new.

        It must not block, as ``loop.call_soon_threadsafe`` does not.

        Returns:
            What ends that.
        """
        with self._lock:
            self._listeners.append(ring)

        def end() -> None:
            with self._lock:
                if ring in self._listeners:
                    self._listeners.remove(ring)

        return end

    def ask(self, wish: Command, patience_s: float = _PATIENCE_S) -> Answer:
        """Hand in a wish and wait for its answer.

        Raises:
            DeviceError: If too many wait already, or the control loop does not answer in time.
            PolythrottleError: What it says no with.
        """
        asked = self.hand_in(wish)
        try:
            return asked.result(timeout=patience_s)
        except TooLate:
            # Nobody waits for it any more: it must not be carried out later, unseen.
            asked.cancel()
            raise DeviceError("the daemon is busy with the device and did not answer in time; ask again") from None

    def hand_in(self, wish: Command, read: Read | None = None) -> Future[Answer]:
        """Hand in a wish; its answer comes through the future.

        Args:
            wish: What is wished.
            read: Returns at once what is in the file that it names, or raises what was wrong with it; without it the
                control loop reads the file itself.

        Raises:
            DeviceError: If too many wait already, or the control loop has ended.
        """
        asked = PendingCommand(wish, read)
        with self._lock:
            if self._closed:
                raise DeviceError(_ENDED)
            if len(self._wishes) >= _WISHES_MOST:
                raise DeviceError("too many requests wait for the daemon; ask again later")
            self._wishes.append(asked)
        self._wake()
        return asked.answer

    def wishes(self) -> list[PendingCommand]:
        """Return the wishes that wait, oldest first, which are then the control loop's to answer."""
        with self._lock:
            taken = list(self._wishes)
            self._wishes.clear()
        # Marks each as under way, after which it cannot be cancelled; leaves out those that were.
        return [each for each in taken if each.answer.set_running_or_notify_cancel()]

    def close(self) -> None:
        """Refuse the wishes that wait and all that come: the control loop has ended, and nobody would answer them."""
        with self._lock:
            # First, so that no wish comes in behind the last look at those that wait.
            self._closed = True
        for asked in self.wishes():
            asked.answer.set_exception(DeviceError(_ENDED))

    def on_wish(self, wake: Callable[[], None]) -> None:
        """Have ``wake`` called when a wish comes in, so that the control loop need not be asked for it."""
        self._wake = wake

    def _ring(self) -> None:
        with self._lock:
            listeners = tuple(self._listeners)
        # Outside the lock, for a listener may stop listening while it is called.
        for ring in listeners:
            ring()


class EventRecorder:
    """Where the parts of the control loop say what happened: noted in the history, counted, and shown to listeners.

    Args:
        record: Numbers and keeps the events.
        mailbox: Shows them.
    """

    def __init__(self, record: HistoryStore, mailbox: Mailbox) -> None:
        self.counts: Counter[str] = Counter()
        self._record = record
        self._mailbox = mailbox
        mailbox.tell(record.recent)

    def tell(self, kind: str, words: str) -> None:
        """Note an event and show it."""
        self.counts[kind] += 1
        self._mailbox.tell([self._record.tell(kind, words)])

    def flush(self) -> None:
        """Have the history write what waits, and tell what it has lost; to be called each turn."""
        self._record.flush()
        for words in self._record.losses():
            self.tell("fault", words)
