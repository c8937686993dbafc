"""From what the control loop knows to the status it publishes: a pure function, called once per turn."""

import os
from dataclasses import dataclass, field, replace
from datetime import datetime

from polythrottle.actuation.client.board import Board
from polythrottle.daemon.control.events import Bounds, Guard, Observation, tripped, waits_of
from polythrottle.daemon.control.state import Phase, State
from polythrottle.daemon.energy_accounts import Accounts
from polythrottle.daemon.followed_profile import FollowedProfile
from polythrottle.daemon.observation import ControlPeriod, Traffic
from polythrottle.daemon.status import FinetuningShown, Front, GuardShown, RungShown, Status, StudyShown, WorkloadShown
from polythrottle.domain.ladder import Ladder

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
        workload=_workload(frame, state.plan is not None or (turn.released and sight.seen is not None), tuned),
        leased=state.leased and not turn.released,
        guards=() if tuned is None else guards_of(tuned.plan.bounds, sight.observed),
        budget=accounts.shown_budget(state.rung),
        saved=accounts.shown_saving(),
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
