"""How a training node finds its power cap: a newcomer warms up, calibrates and verifies what the fleet knows.

After that it explores lower caps while that pays.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from statistics import median

from polythrottle.domain.backports import StrEnum
from polythrottle.domain.errors import InvalidInput
from polythrottle.domain.fleet.gpu_variability import calibrated
from polythrottle.domain.fleet.transient_machine import Cap, Lifetime, remaining_s
from polythrottle.storage.fleet_knowledge import CapObservation, Knowledge, NodeReport

# Whether a node may look at a cap that nobody has looked at: only if what is left of its life pays for it.

_HOPE = 0.5
"""Of what the last step down has saved, the next one is expected to save so much: curves of power flatten."""
_FIRST = 0.04
"""Of its power a node that knows nothing expects its first step down to save: half of what the recorded tables give."""

_FELT = 1.25
"""A limit above so many times the mean power is not felt: peaks reach it seldom (recorded tables of three GPUs)."""
_LOADED = 0.4
"""A GPU that draws less than this share of its highest limit waits for something else than its clocks."""
_LEAST_SAVING = 0.03
"""Below this a saving is the luck of noisy windows, and the default is kept."""


@dataclass(frozen=True)
class Prospect:
    """What a look may bring, and what it takes.

    Attributes:
        saving_w: Joules per second it is expected to save from then on, for all who will use it, at least 0.
        cost_s: How long it takes, in seconds.
        cost_j: Joules it wastes meanwhile: the slower steps of the node, and others at its barrier.
    """

    saving_w: float
    cost_s: float
    cost_j: float

    def __post_init__(self) -> None:
        if not (self.saving_w >= 0 and self.cost_s >= 0 and self.cost_j >= 0):
            raise InvalidInput(f"a look saves, takes and wastes at least 0, not {self}")


def worth(prospect: Prospect, lifetime: Lifetime, age_s: float, horizon_s: float, margin: float = 2.0) -> bool:
    """Return whether a look pays: the saving over the life expected after it exceeds what it wastes.

    Args:
        prospect: What it may bring.
        lifetime: How long such a machine is kept.
        age_s: Its age in seconds.
        horizon_s: What is left of the job, in seconds.
        margin: How many times its cost it must bring: what is hoped for is not sure.

    Returns:
        False too where the machine is not expected to live through the look itself.
    """
    # How long it lives on depends on how old it is (CM-DARE), so a mean lifetime would not do.
    alive = lifetime.survival(age_s)
    later = 0.0
    if alive > 0:
        later = lifetime.survival(age_s + prospect.cost_s) / alive
    left_s = later * remaining_s(lifetime, age_s + prospect.cost_s, max(0.0, horizon_s - prospect.cost_s))
    return left_s * prospect.saving_w > margin * prospect.cost_j and left_s > 0


def next_limit(
    looks: Sequence[CapObservation], limits_w: Sequence[float], longer: float, gpus: int = 1
) -> float | None:
    """Return the limit to look at next: one step below the lowest seen, while steps stay short and joules fall.

    A walk down from the default, not a search: the first cap beyond the allowed slowdown ends it, so that no more than
    one look is ever too slow. A limit well above what the GPU draws at the default changes nothing and is passed over;
    so a job that does not load its GPU is left alone.

    Args:
        looks: What was seen so far, the default first, then by falling limit.
        limits_w: The limits there are below the default, in watts.
        longer: How much longer a step may take than at the default.
        gpus: GPUs whose power a look gives together.
    """
    if not looks:
        return None
    default = looks[0]
    last = looks[-1]
    lowest_w = last.limit_w
    # Steps only get longer further down, so nothing below can be allowed.
    if last.step_s > default.step_s * (1 + longer):
        return None
    # A step's joules are taken to have one bottom: past it they only rise.
    if len(looks) > 1 and joules(last) > joules(looks[-2]):
        return None
    felt_w = _FELT * default.power_w / gpus
    if felt_w < _FELT * _LOADED * max(limits_w, default=0.0):
        return None
    below = [limit_w for limit_w in limits_w if limit_w <= felt_w and (lowest_w is None or limit_w < lowest_w)]
    return max(below, default=None)


def prospect(
    looks: Sequence[CapObservation], windows_s: float, waiting_w: float = 0.0, longer: float = 0.03
) -> Prospect:
    """Return what the next step down may bring, from what the last one brought.

    Args:
        looks: What was seen so far, the default first, then by falling limit.
        windows_s: How long the windows of a look take at the default, in seconds.
        waiting_w: Power of the others while they wait for this node's slower steps, in watts.
        longer: How much longer a step may take than at the default; a look is expected to be slower by as much.
    """
    default = looks[0]
    if len(looks) > 1:
        saved_w = (joules(looks[-2]) - joules(looks[-1])) / default.step_s
    else:
        saved_w = default.power_w * _FIRST
    hoped_w = max(0.0, saved_w) * (_HOPE if len(looks) > 1 else 1.0)
    wasted_j = longer * windows_s * (default.power_w + waiting_w)
    return Prospect(hoped_w, windows_s * (1 + longer), wasted_j)


def joules(look: CapObservation) -> float:
    """Return the joules of a step."""
    return look.power_w * look.step_s


def best(looks: Sequence[CapObservation], longer: float) -> CapObservation:
    """Return the look that costs least within the allowed slowdown; the default where none is surely better.

    Args:
        looks: What was seen, the default first.
        longer: How much longer a step may take than at the default.
    """
    default = looks[0]
    # A cap that is a little too slow for the barrier makes every other node wait, which costs more than it saves.
    within = [look for look in looks if look.step_s <= default.step_s * (1 + longer)]
    cheapest = min(within, key=joules)
    if joules(cheapest) < joules(default) * (1 - _LEAST_SAVING):
        return cheapest
    return default


@dataclass(frozen=True)
class Exploring:
    """What a node that knows nothing may do to learn.

    Attributes:
        limits_w: The limits of each GPU below the default, in watts.
        lifetime: How long such a machine is kept.
        horizon_s: How long the job still lasts when the node is new, in seconds.
        longer: How much longer a step may take than at the default.
        waiting_w: Power of the others while they wait for this node's slower steps, in watts.
        gpus: GPUs whose power a look gives together.
        margin: How many times its cost a look must be expected to bring.
    """

    limits_w: tuple[float, ...]
    lifetime: Lifetime
    horizon_s: float
    longer: float = 0.03
    waiting_w: float = 0.0
    gpus: int = 1
    margin: float = 2.0

    def next_limit_w(self, looks: Sequence[CapObservation], age_s: float, windows_s: float) -> float | None:
        """Return the limit to look at now, in watts; None to stay at the `best` of what was seen.

        Args:
            looks: What was seen so far, the default first, then by falling limit.
            age_s: The machine's age in seconds.
            windows_s: How long the windows of a look take at the default, in seconds.
        """
        limit_w = next_limit(looks, self.limits_w, self.longer, self.gpus)
        if limit_w is None:
            return None
        hoped = prospect(looks, windows_s, self.waiting_w, self.longer)
        pays = worth(hoped, self.lifetime, age_s, self.horizon_s - age_s, self.margin)
        if pays:
            return limit_w
        return None


# A node that joins: it waits for its cache, calibrates its silicon, verifies what the fleet knows, and says so.
#
# Pure: what comes next follows from the windows so far. A window is the mean of some steps; while the data cache is
# cold the first epoch waits for input and says nothing about clocks (DS-Analyzer, VLDB 2021).

WINDOWS = 3
"""Windows that a verdict is made of."""
SETTLED = 0.03
"""Windows within this fraction of each other are those of a warm cache."""
PATIENCE = 40
"""After so many windows that never settle, a node is taken as it is, and that is said."""


class NewcomerStep(StrEnum):
    """What a newcomer does next."""

    WARMING = "warming"  # the cache is cold: default clocks, nothing is concluded
    CALIBRATING = "calibrating"  # default clocks, its own speed is measured
    VERIFYING = "verifying"  # the fleet's cap, for a few windows
    KEPT = "kept"  # the cap does here what it does elsewhere
    REFUSED = "refused"  # it does not: default clocks
    UNKNOWN = "unknown"  # the fleet knows no cap worth having
    DEFAULT = "default"  # it is asked to run at its default: others wait for it, or no cap saves anything
    EXPLORING = "exploring"  # a cap that nobody has looked at, for what it will save


@dataclass(frozen=True)
class StepWindow:
    """Some steps of one node.

    Attributes:
        limit_w: Under which limit; None for the default.
        step_s: Mean step time in seconds, without waiting for others.
        power_w: Mean power in watts.
        steps: How many steps.
    """

    limit_w: float | None
    step_s: float
    power_w: float
    steps: int = 20


@dataclass(frozen=True)
class NewcomerDecision:
    """What a newcomer does next, and why.

    Attributes:
        next: What it does.
        cap: Under which cap its next window is.
        factor: Its step time over the fleet's middle; None while that is not known.
        reason: In words.
    """

    next: NewcomerStep
    cap: Cap
    factor: float | None
    reason: str


def judged(windows: Sequence[StepWindow], knowledge: Knowledge, wanted: Cap | None) -> NewcomerDecision:
    """Return what a newcomer does next.

    Args:
        windows: All windows so far, oldest first.
        knowledge: What the fleet knows of its type and network.
        wanted: The cap it is to run under, out of the fleet's; None where there is none worth having.
    """
    default = Cap(None, 1.0, _power_w(windows))
    mine = [window for window in windows if window.limit_w is None]
    settled = _settled(mine)
    if settled is None:
        return NewcomerDecision(
            NewcomerStep.WARMING, default, None, f"{len(mine)} windows, not settled to {SETTLED:.0%} yet"
        )
    if len(settled) < WINDOWS:
        return NewcomerDecision(
            NewcomerStep.CALIBRATING, default, None, f"{len(settled)} of {WINDOWS} windows at default clocks"
        )
    # Medians, because now and then a window holds a checkpoint.
    step_s = median(window.step_s for window in settled)
    factor = None
    if knowledge.default is not None:
        factor = calibrated([window.step_s for window in settled], knowledge.default.step_s)
    if wanted is None:
        return NewcomerDecision(NewcomerStep.UNKNOWN, default, factor, "the fleet knows no cap that is worth having")
    if wanted.limit_w is None:
        return NewcomerDecision(
            NewcomerStep.DEFAULT,
            default,
            factor,
            "no cap it knows of would let it keep up with the others for fewer joules",
        )
    under_cap = [window for window in windows if window.limit_w == wanted.limit_w]
    if len(under_cap) < WINDOWS:
        return NewcomerDecision(
            NewcomerStep.VERIFYING, wanted, factor, f"{len(under_cap)} of {WINDOWS} windows at {wanted.limit_w:g} W"
        )
    return _verified(under_cap[-WINDOWS:], settled, step_s, wanted, factor, knowledge, default)


def told(node: str, knowledge: Knowledge, windows: Sequence[StepWindow]) -> NodeReport:
    """Return what a node has to say to the fleet: a look for every limit with enough windows, its warm-up left out."""
    mine = [window for window in windows if window.limit_w is None]
    groups: dict[float | None, list[StepWindow]] = {None: list(_settled(mine) or ())}
    for window in windows:
        if window.limit_w is not None:
            groups.setdefault(window.limit_w, []).append(window)
    looks = tuple(
        CapObservation(limit_w, median(w.step_s for w in group), median(w.power_w for w in group), len(group))
        for limit_w, group in groups.items()
        if len(group) >= WINDOWS
    )
    return NodeReport(node, knowledge.gpu, knowledge.network, looks)


def explored(
    verdict: NewcomerDecision, said: NodeReport, windows: Sequence[StepWindow], exploring: Exploring, age_s: float
) -> NewcomerDecision:
    """Return what a newcomer does where the fleet knows nothing: look on while that pays, or hold the best it saw.

    Args:
        verdict: That the fleet knows no cap; its silicon is kept.
        said: What the newcomer has to say so far.
        windows: All its windows, oldest first.
        exploring: What it may do to learn.
        age_s: The machine's age in seconds.
    """
    looks = sorted(said.looks, key=lambda look: -(look.limit_w or inf))
    if not looks or looks[0].limit_w is not None:
        return verdict
    default = looks[0]
    limits_w = {look.limit_w for look in looks}
    begun = next((window.limit_w for window in reversed(windows) if window.limit_w not in limits_w), None)
    wanted = begun or exploring.next_limit_w(looks, age_s, _length_s(windows) * WINDOWS)
    if wanted is not None:
        words = f"nobody has looked at {wanted:g} W; what is left of this node's life is expected to pay for it"
        return NewcomerDecision(NewcomerStep.EXPLORING, Cap(wanted, 1.0, default.power_w), verdict.factor, words)
    lowest = best(looks, exploring.longer)
    if lowest.limit_w is None:
        return verdict
    saved = 1 - lowest.power_w * lowest.step_s / (default.power_w * default.step_s)
    cap = Cap(lowest.limit_w, lowest.step_s / default.step_s, lowest.power_w)
    return NewcomerDecision(
        NewcomerStep.KEPT, cap, verdict.factor, f"{saved:.1%} fewer joules than at its default, by its own looks"
    )


def _length_s(windows: Sequence[StepWindow]) -> float:
    """Return how long a window takes at the default, in seconds."""
    lengths = [window.steps * window.step_s for window in windows if window.limit_w is None]
    if lengths:
        return median(lengths)
    return 0.0


def _settled(windows: Sequence[StepWindow]) -> Sequence[StepWindow] | None:
    """Return the windows since the cache was warm: the last ones that agree; None while there are none."""
    for first in range(len(windows) - 1):
        rest = windows[first:]
        # The first that agree end the warm-up; later drift with heat is no reason to begin anew.
        times = [window.step_s for window in rest[:WINDOWS]]
        if max(times) <= min(times) * (1 + SETTLED):
            return rest
    if len(windows) >= PATIENCE:
        return windows[-WINDOWS:]
    return None


def _verified(
    seen: Sequence[StepWindow],
    settled: Sequence[StepWindow],
    step_s: float,
    wanted: Cap,
    factor: float | None,
    knowledge: Knowledge,
    default: Cap,
) -> NewcomerDecision:
    slowdown = median(window.step_s for window in seen) / step_s
    power_w = median(window.power_w for window in settled)
    share = median(window.power_w for window in seen) / power_w
    doubt = knowledge.doubt(wanted.limit_w or 0.0)
    if abs(slowdown - wanted.slowdown) > doubt and slowdown > wanted.slowdown:
        words = f"{slowdown:.3f} × its default step, the fleet has {wanted.slowdown:.3f} ± {doubt:.3f}"
        return NewcomerDecision(NewcomerStep.REFUSED, default, factor, words)
    if slowdown * share >= 1:
        return NewcomerDecision(
            NewcomerStep.REFUSED, default, factor, f"{slowdown * share:.3f} × the joules of its default"
        )
    return NewcomerDecision(
        NewcomerStep.KEPT,
        Cap(wanted.limit_w, slowdown, share * power_w),
        factor,
        f"{1 - slowdown * share:.1%} fewer joules",
    )


def _power_w(windows: Sequence[StepWindow]) -> float:
    powers = [window.power_w for window in windows if window.limit_w is None]
    if powers:
        return median(powers)
    return 1.0
