"""What the controller knows: its phase, why it holds a point, where it stands."""

import math
from dataclasses import dataclass, field

from polythrottle.backports import StrEnum
from polythrottle.daemon.following import Footing, Manner
from polythrottle.daemon.forecast import Forecast
from polythrottle.daemon.signals import Plan, Raise, Target
from polythrottle.ladder import Rung


class Phase(StrEnum):
    """Where the daemon is; see the drawing in `polythrottle.daemon.controller`."""

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
    """

    phase: Phase = Phase.DOWN
    plan: Plan | None = None
    forecast: Forecast = field(default_factory=Forecast)
    footing: Footing = field(default_factory=lambda: Footing(0))
    hold: Hold | None = None
    left_s: tuple[float, float] = (-math.inf, 0.0)
    budget_w: float | None = None
    heat_w: float | None = None
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
    untold: tuple[Raise, ...] = ()
    manner: Manner = field(default_factory=Manner)
    finetunes: bool = False

    @property
    def steers(self) -> bool:
        """Whether the board is the daemon's or its study's to set, and not left as it was found."""
        return self.phase not in (Phase.DOWN, Phase.YIELDED) and self.leased

    @property
    def rung(self) -> Rung | None:
        """The rung one stands on; None without a ladder."""
        if self.plan is None or self.plan.ladder is None:
            return None
        return self.plan.ladder.rungs[self.footing.rung]
