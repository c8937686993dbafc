"""Whether a node may look at a cap that nobody has looked at: only if what is left of its life pays for it."""

from collections.abc import Sequence
from dataclasses import dataclass

from polythrottle.cluster.fleet.knowledge import Look
from polythrottle.cluster.lifetime import Lifetime, remaining_s
from polythrottle.errors import InvalidInput

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
    alive = lifetime.survival(age_s)
    later = lifetime.survival(age_s + prospect.cost_s) / alive if alive > 0 else 0.0
    left_s = later * remaining_s(lifetime, age_s + prospect.cost_s, max(0.0, horizon_s - prospect.cost_s))
    return left_s * prospect.saving_w > margin * prospect.cost_j and left_s > 0


def next_limit(looks: Sequence[Look], limits_w: Sequence[float], longer: float, gpus: int = 1) -> float | None:
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
    default, last = looks[0], looks[-1]
    lowest_w = last.limit_w
    if last.step_s > default.step_s * (1 + longer):
        return None
    if len(looks) > 1 and joules(last) > joules(looks[-2]):
        return None
    felt_w = _FELT * default.power_w / gpus
    if felt_w < _FELT * _LOADED * max(limits_w, default=0.0):
        return None
    below = [limit_w for limit_w in limits_w if limit_w <= felt_w and (lowest_w is None or limit_w < lowest_w)]
    return max(below, default=None)


def prospect(looks: Sequence[Look], windows_s: float, waiting_w: float = 0.0, longer: float = 0.03) -> Prospect:
    """Return what the next step down may bring, from what the last one brought.

    Args:
        looks: What was seen so far, the default first, then by falling limit.
        windows_s: How long the windows of a look take at the default, in seconds.
        waiting_w: Power of the others while they wait for this node's slower steps, in watts.
        longer: How much longer a step may take than at the default; a look is expected to be slower by as much.
    """
    default = looks[0]
    saved_w = (joules(looks[-2]) - joules(looks[-1])) / default.step_s if len(looks) > 1 else default.power_w * _FIRST
    hoped_w = max(0.0, saved_w) * (_HOPE if len(looks) > 1 else 1.0)
    wasted_j = longer * windows_s * (default.power_w + waiting_w)
    return Prospect(hoped_w, windows_s * (1 + longer), wasted_j)


def joules(look: Look) -> float:
    """Return the joules of a step."""
    return look.power_w * look.step_s


def best(looks: Sequence[Look], longer: float) -> Look:
    """Return the look that costs least within the allowed slowdown; the default where none is surely better.

    Args:
        looks: What was seen, the default first.
        longer: How much longer a step may take than at the default.
    """
    default = looks[0]
    within = [look for look in looks if look.step_s <= default.step_s * (1 + longer)]
    found = min(within, key=joules)
    return found if joules(found) < joules(default) * (1 - _LEAST_SAVING) else default


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

    def next_limit_w(self, looks: Sequence[Look], age_s: float, windows_s: float) -> float | None:
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
        return limit_w if pays else None
