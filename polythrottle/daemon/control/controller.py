"""What to do next: a pure function from a state and an event to the next state and what is to be done.

::

                      WorkloadUp                     a guard trips, Refused
      ┌────────┐ ───────────────────▶ ┌───────────┐ ─────────────────────────▶ ┌────────┐
      │  DOWN  │                      │ FOLLOWING │                            │  SAFE  │
      │restored│ ◀─────────────────── │ the load  │ ◀───────────────────────── │or cool │
      └────────┘  WorkloadDown, from  └───────────┘  every guard ok for        └────────┘
           ▲      wherever it is        │  ▲   │     hold_s, a ladder there     │  ▲  │
           │              StudyOffered, │  │   │                               │  │  │ Refused
           │         if one is wanted   ▼  │   │ third ForeignWrite            │  │  │
           │                      ┌───────────┐│ in ten minutes                │  │  │
           │        StudyEnded ─▶ │ STUDYING  │┼───────── a guard trips ───────┼──┘  │
           │        (back up)     └───────────┘▼ StudyOffered (no ladder) ◀────┘     ▼
           │                      ┌───────────┐                               (to YIELDED)
           └───────────────────── │  YIELDED  │  Reclaim: back to FOLLOWING
                                  │ restored  │
                                  └───────────┘

    Beside that, in every phase:
      Suspend … Resume          nothing is done in between; then what holds is verified and set anew
      LeaseLost … LeaseGained   nothing is written in between, for the board is restored by whoever keeps the lease;
                                then what holds is verified and set anew
      DriverReload              what holds is verified and set anew
      ForeignWrite              likewise, twice in ten minutes; the third time the daemon gives way (YIELDED), and tries
                                again after two minutes, then four, … an hour
      ModelChanged              the new model's ladder, or SAFE and a study wanted if it has none
      Replanned                 another profile for the same workload; its load stays known, a guard that holds goes on
      DriftFound                a study is wanted; the phase stays
      StudyAsked                a study is wanted and offered at once
      Finetuned                 while a trainer works beside the workload no study begins, one that runs is ended and
                                wanted again, and DriftFound is passed over: its joules are not the profile's fault
      ClockWanted               where a language model's prompts are followed, another clock than the rung's: a higher
                                one while they wait, a lower one between; none above the rung's where power is bounded
      PowerShare                bounds the rung by what it draws at full load, in every phase in which the board is set
      PowerBudget, heat         bound the choice of the rung; if none is within, the one that draws least; while a
                                budget is below what the load takes, a broken p99 is its price and trips no guard
      requests come late        the load is taken for higher than it is ("pressure"), for minutes
      too many requests wait    the rate since the last look is believed at once, and the looks come sooner (`hurried`)

What is to be done follows from the state alone: the target of its phase is compared with what was applied last, so that
no path can forget to restore. A guard for the device's sake (power, heat, throttling) leads to the cool point, one for
the users' sake (p99, errors) to the safe point, in the same step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Tuple

from polythrottle.daemon.control.events import (
    GPU_CLOCK,
    Action,
    Alert,
    Apply,
    ApplyRefused,
    ClockWanted,
    ControlPlan,
    DriftFound,
    DriverReload,
    Event,
    ForeignWrite,
    GoSafe,
    LeaseGained,
    LeaseLost,
    ModelChanged,
    Observation,
    PowerBudget,
    PowerShare,
    Reclaim,
    Replanned,
    Restore,
    Resume,
    StartStudy,
    StopStudy,
    StudyAsked,
    StudyEnded,
    StudyOffered,
    Suspend,
    Target,
    TrainerChanged,
    Trip,
    Verify,
    WorkloadDown,
    WorkloadUp,
    tripped,
)
from polythrottle.daemon.control.state import Hold, Phase, RungPosition, State, follow_within, patience, pressed_by
from polythrottle.domain.ladder import Ladder
from polythrottle.domain.load.forecast import Forecast

_FOREIGN_MOST = 3
_FOREIGN_S = 600.0
_UNTOLD = 16
_AGAIN_S = 60.0
_HOLD_MOST_S = 600.0
_GIVING_S = 120.0
_GIVEN_MOST_S = 3600.0
_WARM_C = 5.0
_COOLED_C = 8.0
_COOLING = 0.95
"""How near its limit a temperature takes power away, how far below it gives it back, and what is left at each look."""


Told = Tuple[State, Tuple[Alert, ...]]


def step(state: State, event: Event) -> tuple[State, tuple[Action, ...]]:
    """Return the next state, and what is to be done in this order.

    Args:
        state: What is known.
        event: What happened.
    """
    after, told = _folded(state, event)
    stops, after = _stopped(_kept_within(after))
    if after.suspended:
        return replace(after, untold=(*after.untold, *told)[-_UNTOLD:]), stops
    told = (*after.untold, *told)
    done, writes = _written(replace(after, untold=()))
    starts: tuple[Action, ...] = ()
    if done.phase is Phase.STUDYING and not done.study_runs:
        starts = (StartStudy(done.study_wanted),)
        # It sets what nobody here knows: whatever comes next is written, or restored, in any case.
        done = replace(done, study_runs=True, study_wanted="", touched=True, applied=None)
    # Stops first, or a study could still write over the safe point.
    return done, (*stops, *writes, *starts, *told)


def hurried(state: State, waiting: int) -> bool:
    """Return whether so many requests wait that an `Observation` should come at once, not with the next period."""
    rung = state.rung
    following = state.phase is Phase.FOLLOWING
    if not following or rung is None or state.plan is None or state.plan.ladder is None:
        return False
    return waiting > patience(state.plan.ladder, rung, state.forecast.lull)


def reason(state: State) -> str:
    """Return why what is to hold now is to hold; no study may run."""
    return _target(state)[1]


def _stopped(state: State) -> tuple[tuple[Action, ...], State]:
    """End a study that may no longer set the board; it is wanted as before."""
    allowed = state.phase is Phase.STUDYING and state.leased and not state.suspended and not state.finetunes
    if allowed or not state.study_runs:
        return (), state
    interrupted = state.plan is not None and state.phase in (Phase.STUDYING, Phase.SAFE)
    wanted = state.study_wanted or ("it was interrupted" if interrupted else "")
    if state.phase is Phase.STUDYING:
        phase = Phase.FOLLOWING
    else:
        phase = state.phase
    # What it has set since is unknown, so that `applied` is forgotten.
    return (StopStudy("the board is needed"),), _up(
        replace(state, phase=phase, study_runs=False, study_wanted=wanted, applied=None)
    )


def _written(state: State) -> tuple[State, tuple[Action, ...]]:
    """Bring the board to the target of the phase."""
    if not state.leased or state.phase is Phase.STUDYING:
        return state, ()
    wanted, why = _target(state)
    if wanted is None:
        # A daemon that has set nothing restores nothing: what others set meanwhile stays.
        clean = replace(state, stale="", applied=None, touched=False)
        return clean, (Restore(why),) if state.touched else ()
    if wanted == state.applied and not state.stale:
        return state, ()
    verify = (Verify(state.stale),) if state.stale else ()
    act = GoSafe(wanted, why) if state.phase is Phase.SAFE else Apply(wanted, why)
    return replace(state, stale="", applied=wanted, touched=True), (*verify, act)


def _target(state: State) -> tuple[Target | None, str]:
    if state.plan is None or state.phase is Phase.DOWN:
        return None, "the workload is down"
    if state.phase is Phase.YIELDED:
        return None, "another program sets the board, or the board refuses"
    if state.hold is not None:
        return _bounded(state, state.hold.target), state.hold.reason
    rung = state.rung
    assert rung is not None
    clock = state.clock
    if clock.gpu_hz is not None:
        point = clock.moved(rung.service.point, state.bounded)
        return Target(point, rung.gather_s), f"{clock.words}: {int(point[GPU_CLOCK]) // 10**6} MHz"
    demand = state.forecast.demand_per_s
    if demand is None:
        load = "a load not yet known"
    else:
        load = f"a load of {demand:.3g}/s"
    return Target(rung.service.point, rung.gather_s), f"{load} ({rung.rate_per_s:.3g}/s can be answered)"


def _bounded(state: State, target: Target) -> Target:
    """Return a point that is held, or the highest rung within the share where that point could draw more."""
    ladder = None if state.plan is None else state.plan.ladder
    if state.share_w is None or ladder is None:
        return target
    allowed = ladder.within(state.share_w)
    if any(target == Target(ladder.rungs[number].service.point, ladder.rungs[number].gather_s) for number in allowed):
        return target
    top = ladder.rungs[allowed[-1]]
    return Target(top.service.point, top.gather_s)


def _kept_within(state: State) -> State:
    """Return the state on a rung within the share, which goes before everything that wants another."""
    ladder = None if state.plan is None else state.plan.ladder
    if state.share_w is None or ladder is None:
        return state
    allowed = ladder.within(state.share_w)
    if state.footing.rung in allowed:
        return state
    demand_per_s = state.forecast.demand_per_s
    able = [number for number in allowed if demand_per_s is not None and ladder.rungs[number].rate_per_s > demand_per_s]
    return replace(state, footing=RungPosition(able[0] if able else allowed[-1]))


def _folded(state: State, event: Event) -> Told:
    if isinstance(event, WorkloadUp):
        return _begun(state, event.plan), ()
    if isinstance(event, WorkloadDown):
        return replace(state, phase=Phase.DOWN, plan=None, hold=None, study_wanted="", foreign_s=()), ()
    if isinstance(event, Observation):
        return _observed(state, event)
    if isinstance(event, (PowerBudget, PowerShare, ClockWanted)):
        return _limited(state, event), ()
    if isinstance(event, Replanned):
        return _replanned(state, event.plan), ()
    if isinstance(event, ForeignWrite):
        return _interfered(state, event)
    if isinstance(event, Reclaim):
        taken = replace(state, phase=Phase.FOLLOWING, given_s=None, giving_s=_GIVING_S)
        return (_up(taken) if _is(state, Phase.YIELDED) else state), ()
    if isinstance(event, ApplyRefused):
        return _refused(state, event.words), (Alert("refused", event.words),)
    if isinstance(event, (ModelChanged, DriftFound, StudyOffered, StudyAsked, StudyEnded)):
        return _learnt(state, event)
    return _machine(state, event)


def _limited(state: State, event: PowerBudget | PowerShare | ClockWanted) -> State:
    if isinstance(event, ClockWanted):
        return replace(state, clock=event)
    if isinstance(event, PowerBudget):
        return replace(state, budget_w=event.limit_w)
    return replace(state, share_w=event.limit_w)


def _learnt(state: State, event: ModelChanged | DriftFound | StudyOffered | StudyAsked | StudyEnded) -> Told:
    if isinstance(event, ModelChanged):
        return _changed(state, event.ladder), (Alert("model", "the model has changed"),)
    if isinstance(event, DriftFound):
        if state.finetunes:
            return state, ()
        wanted = event.words if state.plan is not None else ""
        return replace(state, study_wanted=wanted), (Alert("drift", event.words),)
    if isinstance(event, StudyOffered):
        return _offered(state), ()
    if isinstance(event, StudyAsked):
        return _offered(state if state.plan is None else replace(state, study_wanted=event.words)), ()
    return _studied(state, event.ladder), ()


def _machine(state: State, event: Suspend | Resume | DriverReload | LeaseLost | LeaseGained | TrainerChanged) -> Told:
    if isinstance(event, TrainerChanged):
        return replace(state, finetunes=event.runs), (Alert("finetuning", event.words),)
    if isinstance(event, Suspend):
        return replace(state, suspended=True), ()
    if isinstance(event, Resume):
        return replace(state, suspended=False, stale="the machine slept"), ()
    if isinstance(event, DriverReload):
        return replace(state, stale="the driver was loaded anew"), (Alert("driver", "the driver was loaded anew"),)
    if isinstance(event, LeaseLost):
        lost = replace(state, leased=False, applied=None, touched=False)
        return lost, (Alert("lease", event.words),)
    return replace(state, leased=True, stale="the right to set the board was lost"), ()


def _is(state: State, *phases: Phase) -> bool:
    return state.plan is not None and state.phase in phases


def _up(state: State) -> State:
    """Return the state with a hold exactly while it is safe, and safe while there is no ladder to follow."""
    if state.plan is None or state.phase not in (Phase.FOLLOWING, Phase.SAFE):
        return replace(state, hold=None)
    if state.plan.ladder is None and state.hold is None:
        return replace(state, phase=Phase.SAFE, hold=Hold(state.plan.safe, "there is no profile for this model"))
    return replace(state, phase=Phase.FOLLOWING if state.hold is None else Phase.SAFE)


def _begun(state: State, plan: ControlPlan) -> State:
    wanted = ""
    if plan.ladder is None:
        wanted = "there is no profile for this model"
    fresh = replace(
        state,
        phase=Phase.FOLLOWING,
        plan=plan,
        hold=None,
        forecast=Forecast(state.forecast.outlook),
        footing=_top(plan),
        pressure=0,
        heat_w=None,
        study_wanted=wanted,
        foreign_s=(),
        given_s=None,
        giving_s=_GIVING_S,
    )
    return _up(fresh)


def _changed(state: State, ladder: Ladder | None) -> State:
    if state.plan is None:
        return state
    begun = _begun(state, replace(state.plan, ladder=ladder))
    if state.phase is Phase.YIELDED:
        return replace(begun, phase=Phase.YIELDED, hold=None)
    # A hold without an end was for want of a ladder; one that a guard began goes on under the new model.
    tripped_before = state.hold is not None and math.isfinite(state.hold.hold_s)
    if tripped_before:
        return replace(begun, phase=Phase.SAFE, hold=state.hold)
    return begun


def _replanned(state: State, plan: ControlPlan) -> State:
    if state.plan is None:
        return state
    hold = state.hold
    demand_per_s = state.forecast.demand_per_s
    if hold is not None:
        hold = replace(hold, target=plan.cool if hold.hardware else plan.safe)
        if plan.ladder is not None and math.isinf(hold.hold_s):
            hold = None
    footing = _top(plan)
    if plan.ladder is not None and demand_per_s is not None:
        footing = RungPosition(plan.ladder.best(demand_per_s, state.forecast.slow_per_s, state.budget_w))
    return _up(replace(state, plan=plan, hold=hold, footing=footing))


def _offered(state: State) -> State:
    bare = _is(state, Phase.SAFE) and state.plan is not None and state.plan.ladder is None
    if not state.study_wanted or not state.leased or state.suspended or state.finetunes:
        return state
    if not (bare or _is(state, Phase.FOLLOWING)):
        return state
    return replace(state, phase=Phase.STUDYING, hold=None)


def _studied(state: State, ladder: Ladder | None) -> State:
    over = replace(state, study_runs=False, applied=None if state.phase is Phase.STUDYING else state.applied)
    if state.plan is None:
        return over
    if ladder is not None:
        return _changed(over, ladder)
    if state.phase is Phase.STUDYING:
        return _up(replace(over, phase=Phase.FOLLOWING))
    return over


def _refused(state: State, words: str) -> State:
    if not _is(state, Phase.FOLLOWING, Phase.SAFE, Phase.STUDYING) or state.plan is None:
        return state
    # What refuses even its safe point takes nothing from here: it is restored and left alone.
    if state.phase is Phase.SAFE:
        return replace(state, phase=Phase.YIELDED, hold=None, applied=None)
    hold = Hold(state.plan.safe, words, hold_s=state.plan.bounds.hold_s)
    return replace(state, phase=Phase.SAFE, hold=hold, applied=None)


def _interfered(state: State, event: ForeignWrite) -> Told:
    lately = (*(at_s for at_s in state.foreign_s if 0 <= event.now_s - at_s < _FOREIGN_S), event.now_s)
    named = ", ".join(event.knobs) or "a knob"
    if not _is(state, Phase.FOLLOWING, Phase.SAFE, Phase.STUDYING):
        return state, ()
    if len(lately) >= _FOREIGN_MOST:
        given = replace(state, phase=Phase.YIELDED, hold=None, foreign_s=())
        return given, (
            Alert("foreign", f"another program keeps setting {named}; the daemon leaves the board alone for a while"),
        )
    again = replace(state, foreign_s=lately, stale=f"another program has set {named}")
    return again, (Alert("foreign", f"another program has set {named}; it is set again"),)


def _observed(state: State, seen: Observation) -> Told:
    forecast = state.forecast.seen(seen.now_s, seen.rate_per_s, seen.period_s)
    if _is(state, Phase.YIELDED):
        return _reconsidered(replace(state, forecast=forecast), seen)
    if (plan := state.plan) is None or state.phase is Phase.DOWN:
        return state, ()
    state = replace(
        state, forecast=forecast.raised(_burst_per_s(plan, seen)) if hurried(state, seen.waiting) else forecast
    )
    trips = tuple(trip for trip in tripped(plan.bounds, seen) if not (trip.guard.latency and _rationed(state)))
    if state.phase is Phase.SAFE:
        return _held(state, seen, trips)
    if trips:
        return _tripping(state, seen, trips)
    return (_followed(state, seen) if state.phase is Phase.FOLLOWING else state), ()


def _burst_per_s(plan: ControlPlan, seen: Observation) -> float | None:
    """Return the rate of a look, over no less than the SLO: a few requests in a tenth of a second are no burst."""
    if plan.ladder is None or seen.rate_per_s is None:
        return seen.rate_per_s
    return seen.rate_per_s * min(1.0, seen.period_s / plan.ladder.slo_s)


def _tripping(state: State, seen: Observation, trips: tuple[Trip, ...]) -> Told:
    assert state.plan is not None
    hardware = any(trip.guard.hardware for trip in trips)
    words = "; ".join(trip.words for trip in trips)
    left_s, last_s = state.left_s
    soon = 0 <= seen.now_s - left_s < _AGAIN_S
    if soon:
        hold_s = min(_HOLD_MOST_S, 2 * last_s)
    else:
        hold_s = state.plan.bounds.hold_s
    target = state.plan.cool if hardware else state.plan.safe
    hold = Hold(target, words, hardware, hold_s)
    return replace(state, phase=Phase.SAFE, hold=hold), (Alert("guard", words, trips),)


def _held(state: State, seen: Observation, trips: tuple[Trip, ...]) -> Told:
    """Stay safe, go from cool to safe or back, or leave."""
    hold = state.hold
    plan = state.plan
    assert hold is not None
    assert plan is not None
    hardware = tuple(trip for trip in trips if trip.guard.hardware)
    if hardware and not hold.hardware:
        words = "; ".join(trip.words for trip in hardware)
        hot = Hold(plan.cool, words, hardware=True, hold_s=hold.hold_s)
        return replace(state, hold=hot), (Alert("guard", words, hardware),)
    well = _since(hold.well_since_s, seen.now_s, not trips)
    sound = _since(hold.sound_since_s, seen.now_s, not hardware)
    hold = replace(hold, well_since_s=well, sound_since_s=sound)
    # Without a ladder a hold has no end, but even then a cool point gives way to the safe one in time.
    if math.isfinite(hold.hold_s):
        wait_s = hold.hold_s
    else:
        wait_s = plan.bounds.hold_s
    if plan.ladder is not None and well is not None and seen.now_s - well >= hold.hold_s:
        return _left(state, seen, hold.hold_s), ()
    if hold.hardware and sound is not None and seen.now_s - sound >= wait_s:
        return replace(state, hold=replace(hold, target=plan.safe, hardware=False)), ()
    return replace(state, hold=hold), ()


def _reconsidered(state: State, seen: Observation) -> Told:
    """Set the board again once way was given for long enough; the next time it is given for twice as long."""
    now_s = seen.now_s
    if state.given_s is None:
        since_s = now_s
    else:
        # After a clock was set back the wait counts from now, and not from a time yet to come.
        since_s = min(state.given_s, now_s)
    if now_s - since_s < state.giving_s:
        return replace(state, given_s=since_s), ()
    longer_s = min(_GIVEN_MOST_S, 2 * state.giving_s)
    again = _up(replace(state, phase=Phase.FOLLOWING, given_s=None, giving_s=longer_s))
    told = Alert("phase", f"the board was left alone for {now_s - since_s:.0f} s; it is set again")
    return _followed(again, seen), (told,)


def _rationed(state: State) -> bool:
    """Return whether requests wait because there is too little energy: a point that draws more is no answer then."""
    plan = state.plan
    demand_per_s = state.forecast.demand_per_s
    if plan is None or plan.ladder is None or demand_per_s is None:
        return False
    mean_per_s = state.forecast.slow_per_s
    wanted = plan.ladder.best(demand_per_s, mean_per_s)
    if state.share_w is not None and wanted not in plan.ladder.within(state.share_w):
        return True
    if state.budget_w is None:
        return False
    return plan.ladder.best(demand_per_s, mean_per_s, state.budget_w) != wanted


def _since(since_s: float | None, now_s: float, holds: bool) -> float | None:
    if not holds:
        return None
    if since_s is None:
        return now_s
    return min(since_s, now_s)


def _left(state: State, seen: Observation, hold_s: float) -> State:
    assert state.plan is not None
    free = replace(state, phase=Phase.FOLLOWING, hold=None, left_s=(seen.now_s, hold_s))
    return _followed(replace(free, footing=_top(state.plan)), seen)


def _top(plan: ControlPlan) -> RungPosition:
    return RungPosition(0 if plan.ladder is None else plan.ladder.top)


def _followed(state: State, seen: Observation) -> State:
    assert state.plan is not None
    if state.plan.ladder is None:
        return _up(state)
    pressure = pressed_by(state.pressure, state.plan.bounds.p99_s, seen, state.forecast.steady, state.manner)
    pressed = replace(state, pressure=pressure, heat_w=_heat_w(state, seen))
    limits_w = [limit_w for limit_w in (pressed.budget_w, pressed.heat_w) if limit_w is not None]
    ladder = state.plan.ladder
    allowed: Sequence[int] = range(len(ladder.rungs))
    if state.share_w is not None:
        allowed = ladder.within(state.share_w)
    footing = follow_within(
        ladder,
        allowed,
        state.footing,
        state.forecast,
        seen.now_s,
        seen.waiting,
        min(limits_w, default=None),
        pressed.pressed_manner,
    )
    return replace(pressed, footing=footing)


def _heat_w(state: State, seen: Observation) -> float | None:
    assert state.plan is not None
    limit_c = state.plan.bounds.temperature_c
    if limit_c is None or seen.temperature_c is None:
        return state.heat_w
    if seen.temperature_c > limit_c - _WARM_C and seen.power_w is not None:
        return _COOLING * min(seen.power_w, state.heat_w or seen.power_w)
    # Between warm and cooled nothing changes, or the limit would come and go with each degree.
    if seen.temperature_c < limit_c - _COOLED_C:
        return None
    return state.heat_w
