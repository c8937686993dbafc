"""What the controller knows, and which rung of the ladder a load needs: up at once, down only when it pays."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from polythrottle.daemon.control.events import Alert, ClockWanted, ControlPlan, Observation, Target
from polythrottle.domain.backports import StrEnum
from polythrottle.domain.ladder import Ladder, Rung
from polythrottle.domain.load.forecast import Forecast
from polythrottle.domain.space import BATCH_SIZE, Level, OperatingPoint

# From a load to a rung of the ladder: up at once, down only when it pays and the load has stayed low.

_PATIENCE = 0.5
_ALERT = 0.2
_NEAR = 0.95
"""The shares of what is cleared within the SLO that may wait: under a steady load, where a few do by chance, and in a
lull, where they are likely the first of many."""
_FAR = 0.8
_FULL = 0.9
_BACK_S = 5.0
"""The shares of the p99's limit below which a steady load is taken for lower, and above which it is not; how soon."""


@dataclass(frozen=True)
class Switching:
    """What it takes to go from one point to another.

    A clock takes effect after about 1 ms (CPU), 5 ms (GPU) and 8 ms (memory) on Orin, during less than 0.1 ms of which
    the domain stands still (arXiv 2606.16106); writing one file of the kernel takes 17 ms (arXiv 2310.19991).

    Args:
        write_s: Per knob that changes.
        gpu_s: Until a GPU clock has taken effect; ``memory_s`` and ``cpu_s`` likewise.
    """

    write_s: float = 0.017
    gpu_s: float = 0.005
    memory_s: float = 0.008
    cpu_s: float = 0.001

    def delay_s(self, before: Mapping[str, Level], after: Mapping[str, Level]) -> float:
        """Return how long it takes until all of a point holds; the batch is the workload's and costs nothing."""
        changed = {name for name in after if name != BATCH_SIZE and after[name] != before.get(name)}
        domains = {name.partition("_")[0] for name in changed}
        effects = {"gpu": self.gpu_s, "mem": self.memory_s, "cpu": self.cpu_s}
        return len(changed) * self.write_s + sum(effects.get(domain, 0.0) for domain in domains)

    def cost_j(self, before: OperatingPoint, after: OperatingPoint, power_w: float) -> float:
        """Return the energy a switch takes if the device did nothing useful meanwhile, which is the most it can be."""
        return self.delay_s(before, after) * power_w


@dataclass(frozen=True)
class FollowingPolicy:
    """How eagerly a load is followed.

    The defaults did best of some fifty tried in rounds on a recorded trace, on bursts of 20 s and on a day
    (benchmarks/following.py): where one goes up within a tenth of a second, a quarter of the recent peak is enough to
    be prepared for, and much is gained by coming down soon. `alarm` and `trifle`, and the quick average of `Outlook`,
    came later, from the minutes that were missed: they brought those from 24 to 14 in sixty replays, and in thirty that
    they were not chosen on from 14 to 12, at the same energy.

    Args:
        headroom: Demand is multiplied by this.
        slack: The demand must be below this share of a lower rung's rate before one goes down to it.
        dwell_s: For how long.
        stay_s: How long one is likely to stay, over which a switch must pay.
        clear: In how many times the SLO requests that wait are to be worked off, besides those that arrive.
        press: The load is taken for this many times higher with each step of pressure.
        press_most: The most steps.
        relief_s: How long it takes until one of them is taken back.
        relax_most: The most steps below zero; ``relax_s`` how long one takes.
        reserve: The share of the load's recent peak that one is always prepared for.
        alarm: The share of it that one is prepared for once more requests wait than may.
        trifle: By how much more may be drawn, as a share, for a rung that answers more.
        switching: What a switch takes.
    """

    headroom: float = 1.0
    slack: float = 0.9
    dwell_s: float = 3.0
    stay_s: float = 20.0
    clear: float = 0.75
    press: float = 1.25
    press_most: int = 4
    relief_s: float = 180.0
    relax_most: float = 3.0
    relax_s: float = 60.0
    reserve: float = 0.25
    alarm: float = 1.0
    trifle: float = 0.01
    switching: Switching = field(default_factory=Switching)


@dataclass(frozen=True)
class RungPosition:
    """Where one stands on the ladder.

    Args:
        rung: Its number.
        low_since_s: Since when the load has asked for less; None if it does not.
        low_rung: The highest rung it asked for since then.
    """

    rung: int
    low_since_s: float | None = None
    low_rung: int = 0


def follow(
    ladder: Ladder,
    footing: RungPosition,
    forecast: Forecast,
    now_s: float,
    waiting: int,
    budget_w: float | None = None,
    manner: FollowingPolicy | None = None,
) -> RungPosition:
    """Return where to stand next.

    Args:
        ladder: The rungs.
        footing: Where one stands.
        forecast: Of the load; the top rung as long as nothing is known of it.
        now_s: The time.
        waiting: Requests that wait to be sent.
        budget_w: The most mean power; it goes before the load, and at once.
        manner: How eagerly.
    """
    manner = manner or FollowingPolicy()
    here = ladder.rungs[min(footing.rung, ladder.top)]
    demand_per_s = needed_per_s(ladder, here, forecast, waiting, manner)
    if demand_per_s is None:
        return RungPosition(ladder.best(ladder.rungs[-1].rate_per_s, 0.0, budget_w))
    mean_per_s = forecast.slow_per_s
    wanted = _roomiest(ladder, demand_per_s, mean_per_s, budget_w, manner)
    if demand_per_s > here.rate_per_s or (budget_w is not None and here.power_at(mean_per_s) > budget_w):
        return RungPosition(wanted)
    calmer = _roomiest(ladder, demand_per_s / manner.slack, mean_per_s, budget_w, manner)
    if not _pays(ladder, footing.rung, calmer, mean_per_s, manner):
        return replace(footing, low_since_s=None, low_rung=0)
    if footing.low_since_s is None:
        since_s = now_s
    else:
        # A clock that was set back must not keep the dwell from ever passing.
        since_s = min(now_s, footing.low_since_s)
    low = max(calmer, footing.low_rung if footing.low_since_s is not None else 0)
    # While the load rises for certain, one would have to come back at once: two switches for nothing.
    if now_s - since_s < manner.dwell_s or forecast.rises:
        return RungPosition(footing.rung, since_s, low)
    if _pays(ladder, footing.rung, low, mean_per_s, manner):
        return RungPosition(low)
    return RungPosition(footing.rung, now_s, calmer)


def needed_per_s(ladder: Ladder, here: Rung, forecast: Forecast, waiting: int, manner: FollowingPolicy) -> float | None:
    """Return the rate that a rung must be able to answer now, with what waits already; None while no load is known.

    Args:
        ladder: The rungs.
        here: The one that is followed.
        forecast: Of the load.
        waiting: Requests that wait to be sent.
        manner: How eagerly.
    """
    if forecast.demand_per_s is None:
        return None
    if waiting > patience(ladder, here, forecast.lull):
        queued = waiting
    else:
        # The others wait no longer than they may.
        queued = 0
    demand_per_s = forecast.demand_per_s * manner.headroom + queued / (manner.clear * ladder.slo_s)
    share = max(manner.reserve * manner.headroom, manner.alarm if queued else 0.0)
    return max(demand_per_s, share * forecast.peak_per_s)


def follow_within(
    ladder: Ladder,
    allowed: Sequence[int],
    footing: RungPosition,
    forecast: Forecast,
    now_s: float,
    waiting: int,
    budget_w: float | None = None,
    manner: FollowingPolicy | None = None,
) -> RungPosition:
    """Return where to stand next on some rungs of a ladder; as `follow` does where all are allowed.

    Args:
        ladder: The rungs; the others as `follow` takes them.
        allowed: The numbers of those that may be stood on, ascending; at least one.
        footing: Where one stands, also on a rung that is no longer allowed.
        forecast: Of the load.
        now_s: The time.
        waiting: Requests that wait to be sent.
        budget_w: The most mean power.
        manner: How eagerly.
    """
    if len(allowed) == len(ladder.rungs):
        return follow(ladder, footing, forecast, now_s, waiting, budget_w, manner)
    part = Ladder(ladder.slo_s, tuple(ladder.rungs[number] for number in allowed))
    if footing.rung in allowed:
        low = max(0, bisect_right(allowed, footing.low_rung) - 1)
        here = RungPosition(allowed.index(footing.rung), footing.low_since_s, low)
    else:
        # Nobody may stay there: the next one below, from which the load says where to go at once.
        here = RungPosition(max(0, bisect_right(allowed, footing.rung) - 1))
    after = follow(part, here, forecast, now_s, waiting, budget_w, manner)
    return replace(after, rung=allowed[after.rung], low_rung=allowed[after.low_rung])


def _roomiest(
    ladder: Ladder, demand_per_s: float, mean_per_s: float, budget_w: float | None, manner: FollowingPolicy
) -> int:
    """Return the rung that answers most among those that draw hardly more than the cheapest for a demand.

    Where rungs idle alike, as on a large GPU, room for what comes next costs next to nothing; and what comes before one
    has gone up is most of what is late.
    """
    best = ladder.best(demand_per_s, mean_per_s, budget_w)
    most_w = (1 + manner.trifle) * ladder.rungs[best].power_at(mean_per_s)
    if budget_w is not None:
        most_w = min(most_w, budget_w)
    near = [number for number, rung in enumerate(ladder.rungs) if _within(rung, demand_per_s, mean_per_s, most_w)]
    return max(near, key=lambda number: ladder.rungs[number].service.most_per_s, default=best)


def _within(rung: Rung, demand_per_s: float, mean_per_s: float, most_w: float) -> bool:
    return rung.rate_per_s >= demand_per_s and rung.power_at(mean_per_s) <= most_w


def pressed_by(
    pressure: float, limit_s: float | None, seen: Observation, steady: bool, manner: FollowingPolicy
) -> float:
    """Return the pressure after a look: a step more with requests that were too late, and less with time.

    Under a steady load it goes on below zero while the p99 stays far from its limit, for a ladder is made to hold in
    nearly every minute, and comes back when the p99 draws near.

    Args:
        pressure: Before it, in steps.
        limit_s: Of the p99; None presses nobody.
        seen: Where the slowest request of the look is not known, a p99 near its limit is taken for too late.
        steady: Whether the load has had no peaks lately.
        manner: How much.
    """
    if limit_s is None:
        return pressure
    share = None if seen.p99_s is None else seen.p99_s / limit_s
    near = seen.worst_s is None and share is not None and share > _NEAR
    if near or (seen.worst_s is not None and seen.worst_s > limit_s):
        # From below zero it is a step above it at once: a late request ends what was relaxed.
        return min(manner.press_most, max(0.0, pressure) + 1)
    if pressure > 0:
        return max(0.0, pressure - seen.period_s / manner.relief_s)
    if not steady or share is None or share > _FULL:
        return min(0.0, pressure + seen.period_s / _BACK_S)
    if share < _FAR:
        return max(-manner.relax_most, pressure - seen.period_s / manner.relax_s)
    return pressure


def patience(ladder: Ladder, rung: Rung, lull: bool = False) -> int:
    """Return how many requests may wait at a rung before one should look: a share of what it clears within the SLO.

    It is never less than one more than a batch, which waits to be gathered.

    Args:
        ladder: The rungs.
        rung: The one that is followed.
        lull: Whether the load stood far higher lately than it does now.
    """
    spare_s = ladder.slo_s - rung.service.tail_s
    if lull:
        share = _ALERT
    else:
        share = _PATIENCE
    return rung.service.batch + max(1, int(share * spare_s * rung.service.most_per_s))


def _pays(ladder: Ladder, now: int, then: int, mean_per_s: float, manner: FollowingPolicy) -> bool:
    """Return whether what a rung saves while one stays on it exceeds what going there takes."""
    before = ladder.rungs[now]
    after = ladder.rungs[then]
    saved_w = before.power_at(mean_per_s) - after.power_at(mean_per_s)
    cost_j = manner.switching.cost_j(before.service.point, after.service.point, before.power_at(mean_per_s))
    return saved_w * manner.stay_s > cost_j


# What the controller knows: its phase, why it holds a point, where it stands.


class Phase(StrEnum):
    """Where the daemon is; see the drawing in `polythrottle.daemon.control.controller`."""

    DOWN = "down"
    FOLLOWING = "following"
    SAFE = "safe"
    STUDYING = "studying"
    YIELDED = "yielded"


@dataclass(frozen=True)
class Hold:
    """Why and for how long the safe or the cool point is held.

    Args:
        target: Which.
        reason: Why.
        hardware: Whether for the device's sake.
        hold_s: How long all must be well; infinite if only a new ladder ends it.
        well_since_s: Since when it is; None if it is not.
        sound_since_s: Since when the device is, whatever the users see.
    """

    target: Target
    reason: str
    hardware: bool = False
    hold_s: float = math.inf
    well_since_s: float | None = None
    sound_since_s: float | None = None


@dataclass(frozen=True)
class State:
    """All the controller knows; bounded in size.

    Args:
        phase: Where it is.
        plan: Of the workload that is up.
        forecast: Of its load.
        footing: On its ladder.
        hold: While safe.
        left_s: When the safe point was left last, and for how long it had been held.
        budget_w: The most mean power somebody allows.
        heat_w: The most mean power heat leaves.
        share_w: The most that may be drawn at full load, where services share a budget.
        pressure: How many steps the load is taken for higher than it is.
        suspended: Whether the machine sleeps.
        leased: Whether the daemon may write.
        stale: Why what was applied may no longer hold; empty if nothing says so.
        applied: What was applied last; None if the board is as found, or a study has set it.
        touched: Whether the board may differ from how it was found.
        study_runs: Whether a study was started and has not ended.
        study_wanted: Why a study is wanted; empty if none is.
        foreign_s: When somebody else wrote, lately.
        given_s: Since when way is given; ``giving_s`` for how long it is before the board is set again.
        untold: What happened while the machine slept.
        manner: How eagerly the load is followed.
        finetunes: Whether a trainer works beside the workload, whose joules and delays are not the profile's.
        clock: That prompts and tokens of a language model need, in place of the rung's.
    """

    phase: Phase = Phase.DOWN
    plan: ControlPlan | None = None
    forecast: Forecast = field(default_factory=Forecast)
    footing: RungPosition = field(default_factory=lambda: RungPosition(0))
    hold: Hold | None = None
    left_s: tuple[float, float] = (-math.inf, 0.0)
    budget_w: float | None = None
    heat_w: float | None = None
    share_w: float | None = None
    pressure: float = 0.0
    suspended: bool = False
    leased: bool = True
    stale: str = ""
    applied: Target | None = None
    touched: bool = False
    study_runs: bool = False
    study_wanted: str = ""
    foreign_s: tuple[float, ...] = ()
    given_s: float | None = None
    giving_s: float = 120.0
    untold: tuple[Alert, ...] = ()
    manner: FollowingPolicy = field(default_factory=FollowingPolicy)
    finetunes: bool = False
    clock: ClockWanted = field(default_factory=lambda: ClockWanted(None))

    @property
    def bounded(self) -> bool:
        """Whether the power is bounded, so that nothing above the rung may be set."""
        guards = self.plan is not None and (self.plan.bounds.power_w, self.plan.bounds.peak_w) != (None, None)
        return guards or (self.budget_w, self.heat_w, self.share_w) != (None, None, None)

    @property
    def steers(self) -> bool:
        """Whether the board is the daemon's or its study's to set, and not left as it was found."""
        return self.phase not in (Phase.DOWN, Phase.YIELDED) and self.leased

    @property
    def pressed_manner(self) -> FollowingPolicy:
        """How the load is followed under the pressure there is."""
        return replace(self.manner, headroom=self.manner.headroom * self.manner.press**self.pressure)

    @property
    def rung(self) -> Rung | None:
        """The rung one stands on; None without a ladder."""
        if self.plan is None or self.plan.ladder is None:
            return None
        return self.plan.ladder.rungs[self.footing.rung]
