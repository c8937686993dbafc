"""One node and what it may spend on learning: the fleet's own rules, on caps that were recorded. Simulated."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

from polythrottle.domain.errors import InvalidInput
from polythrottle.domain.fleet.transient_machine import Cap, Lifetime, next_loss_s
from polythrottle.storage.fleet_knowledge import CapObservation
from polythrottle.training.elastic.nodes.power_cap_search import WINDOWS, Exploring, best


@dataclass(frozen=True)
class Lone:
    """A node that knows nothing and trains until it is taken away or the job ends.

    Attributes:
        caps: What its caps do, the default first; each needs a limit, except the default.
        lifetime: How long it is kept.
        horizon_s: How long the job lasts, in seconds.
        starting_s: From the order to its first step, in seconds.
        warming_s: From its first step until windows say anything, in seconds.
        window_s: Length of a window, in seconds.
        noise: Standard deviation of a window's step time and power, as a fraction.
        longer: How much longer a step may take than at the default.
        margin: How many times its cost a look must be expected to bring.
    """

    caps: tuple[Cap, ...]
    lifetime: Lifetime
    horizon_s: float = 86400.0
    starting_s: float = 165.0
    warming_s: float = 60.0
    window_s: float = 20.0
    noise: float = 0.02
    longer: float = 0.03
    margin: float = 2.0

    def __post_init__(self) -> None:
        if any(cap.limit_w is None for cap in self.caps[1:]) or self.window_s <= 0 or self.noise < 0:
            raise InvalidInput("every cap below the default needs a limit, and a window takes time")


@dataclass
class Saved:
    """What came of one node's life.

    Attributes:
        default_j: What its work would have taken at the default cap, in joules.
        spent_j: What it took.
        work_s: The work, in seconds at the default cap.
        lost_s: How much longer the work took than at the default, in seconds.
        looks: Caps it looked at, the default among them.
    """

    default_j: float = 0.0
    spent_j: float = 0.0
    work_s: float = 0.0
    lost_s: float = 0.0
    looks: list[CapObservation] = field(default_factory=list)


def lived(lone: Lone, seed: int) -> Saved:
    """Return what came of one life: calibrate at the default, walk down while it pays, stay at the best. Simulated."""
    chance = Random(seed)
    ends_s = min(lone.horizon_s, next_loss_s(lone.lifetime, 0.0, 1 - chance.random()))
    saved = Saved()
    now_s = lone.starting_s
    limits_w = tuple(cap.limit_w for cap in lone.caps[1:] if cap.limit_w is not None)
    exploring = Exploring(limits_w, lone.lifetime, lone.horizon_s, lone.longer, margin=lone.margin)
    now_s = _worked(lone, saved, lone.caps[0], now_s, min(ends_s, now_s + lone.warming_s))
    cap: Cap | None = lone.caps[0]
    while cap is not None and now_s < ends_s:
        until_s = now_s + WINDOWS * lone.window_s * cap.slowdown
        now_s = _worked(lone, saved, cap, now_s, min(ends_s, until_s))
        saved.looks.append(_look(lone, cap, chance))
        limit_w = exploring.next_limit_w(saved.looks, now_s, WINDOWS * lone.window_s)
        cap = None if limit_w is None else _of(lone.caps, limit_w)
    if now_s < ends_s:
        _worked(lone, saved, _of(lone.caps, best(saved.looks, lone.longer).limit_w), now_s, ends_s)
    return saved


def _worked(lone: Lone, saved: Saved, cap: Cap, from_s: float, to_s: float) -> float:
    span_s = max(0.0, to_s - from_s)
    work_s = span_s / cap.slowdown
    saved.work_s += work_s
    saved.spent_j += span_s * cap.power_w
    saved.default_j += work_s * lone.caps[0].power_w
    saved.lost_s += span_s - work_s
    return max(from_s, to_s)


def _look(lone: Lone, cap: Cap, chance: Random) -> CapObservation:
    """Return what the middle of some noisy windows says."""
    steps = sorted(cap.slowdown * (1 + chance.gauss(0, lone.noise)) for _ in range(WINDOWS))
    powers = sorted(cap.power_w * (1 + chance.gauss(0, lone.noise)) for _ in range(WINDOWS))
    limit_w = None if cap == lone.caps[0] else cap.limit_w
    return CapObservation(limit_w, steps[WINDOWS // 2], powers[WINDOWS // 2], WINDOWS)


def _of(caps: Sequence[Cap], limit_w: float | None) -> Cap:
    if limit_w is None:
        return caps[0]
    return next(cap for cap in caps[1:] if cap.limit_w == limit_w)
