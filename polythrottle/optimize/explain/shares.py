"""Each knob's share in what changed between two points: Shapley values over the mixtures of the two.

A mixture takes some knobs' levels from one point and the others' from the other. A knob's share is what it changes when
it is moved, averaged over all orders in which the knobs could be moved (Shapley 1953); the shares add up to the whole.
"""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from polythrottle.domain.space import Level, OperatingPoint
from polythrottle.optimize.explain.modelled_study import Evidence, shown
from polythrottle.optimize.features import Array

EXACT = 9
"""Up to so many knobs all mixtures are evaluated; beyond, `_ORDERS` orders drawn at random, and their reverses."""
_ORDERS = 64
_NOTHING = 1e-9
_CANCELLED = 0.05


@dataclass(frozen=True)
class Share:
    """What one knob contributes to a change.

    Args:
        knob: Its name.
        before: Its level at the first point; ``after`` at the second.
        change: Contribution in the metric's unit; ``change_std`` its standard deviation by the models.
        fraction: Of the whole change; None where the whole is next to nothing beside what the knobs change each.
    """

    knob: str
    before: Level
    after: Level
    change: float
    change_std: float
    fraction: float | None


@dataclass(frozen=True)
class Effect:
    """How one metric changes from the default point to the chosen one.

    Args:
        metric: ``energy``, ``edp`` or one of `METRICS`.
        before: As measured at the default; ``after`` at the chosen point; None where it was not measured.
        predicted_before: As the models say; ``predicted_after`` likewise.
        shares: One per knob that was moved, greatest first; they add up to the predicted change.
    """

    metric: str
    before: float | None
    after: float | None
    predicted_before: float
    predicted_after: float
    shares: tuple[Share, ...]


@dataclass(frozen=True, eq=False)
class Mixtures:
    """The mixtures of two points that are evaluated, and how shares are made of them.

    Args:
        start: The point the knobs are moved from.
        end: The point they are moved to.
        seed: Of the orders that are drawn where there are too many knobs for all.
    """

    start: OperatingPoint
    end: OperatingPoint
    seed: int = 0

    @cached_property
    def knobs(self) -> tuple[str, ...]:
        """The knobs that differ."""
        return tuple(name for name in self.start if self.start[name] != self.end[name])

    @cached_property
    def sets(self) -> tuple[frozenset[int], ...]:
        """Which knobs have been moved in each mixture: none in the first, all in the last."""
        everything = range(len(self.knobs))
        if len(self.knobs) <= EXACT:
            return tuple(
                frozenset(some) for size in (*everything, len(self.knobs)) for some in _combinations(everything, size)
            )
        found = {frozenset(order[:size]) for order in self._orders for size in range(len(order) + 1)}
        return tuple(sorted(found, key=lambda moved: (len(moved), sorted(moved))))

    @cached_property
    def points(self) -> tuple[OperatingPoint, ...]:
        """The mixtures themselves; they need not be points of any space."""
        return tuple(self.start.moved(self.end.only(self.knobs[i] for i in moved)) for moved in self.sets)

    @cached_property
    def weights(self) -> Array:
        """What each mixture counts for in each knob's share, shape (knobs, mixtures)."""
        place = {moved: i for i, moved in enumerate(self.sets)}
        found = np.zeros((len(self.knobs), len(self.sets)))
        for knob, moved, weight in self._steps():
            found[knob, place[moved]] -= weight
            found[knob, place[moved | {knob}]] += weight
        return found

    def _steps(self) -> Iterator[tuple[int, frozenset[int], float]]:
        """Yield each knob moved from each mixture, and in what share of all orders that happens."""
        count = len(self.knobs)
        if count > EXACT:
            for order in self._orders:
                yield from ((knob, frozenset(order[:i]), 1 / len(self._orders)) for i, knob in enumerate(order))
            return
        for moved in self.sets:
            share = 0.0
            if len(moved) < count:
                share = 1 / (count * math.comb(count - 1, len(moved)))
            yield from ((knob, moved, share) for knob in range(count) if knob not in moved)

    @cached_property
    def _orders(self) -> list[tuple[int, ...]]:
        rng = np.random.default_rng(self.seed % 2**63)
        drawn = [tuple(int(i) for i in rng.permutation(len(self.knobs))) for _ in range(_ORDERS)]
        return drawn + [order[::-1] for order in drawn]


def _combinations(of: range, size: int) -> Iterator[tuple[int, ...]]:
    return itertools.combinations(of, size)


def effect(evidence: Evidence, mixtures: Mixtures, metric: str) -> Effect:
    """Return how a metric changes between the two points of the mixtures, and each knob's share in that."""
    values = evidence.modelled(metric, evidence.anatomy.mixed)
    joint = evidence.anatomy.covariance[evidence.columns(metric)].sum(axis=0)
    parts = mixtures.weights @ values
    spread = np.sqrt(np.maximum(((mixtures.weights @ joint) * mixtures.weights).sum(axis=1), 0.0))
    before, after = (float(shown(metric, values[i])) for i in (0, -1))
    rate = _rate(metric, float(values[0]), float(values[-1]))
    whole = float(parts.sum())
    tells = abs(whole) > max(_NOTHING, _CANCELLED * float(np.abs(parts).sum()))
    shares = [
        Share(
            name,
            mixtures.start[name],
            mixtures.end[name],
            float(parts[i] * rate),
            float(spread[i] * abs(rate)),
            float(parts[i] / whole) if tells else None,
        )
        for i, name in enumerate(mixtures.knobs)
    ]
    shares.sort(key=lambda share: share.change * (1 if after < before else -1))
    start, end = (_measured(evidence, metric, point) for point in (mixtures.start, mixtures.end))
    return Effect(metric, start, end, before, after, tuple(shares))


def _rate(metric: str, start: float, end: float) -> float:
    """Return units of the metric per unit of its models' scale, so that shares add up in both.

    For logarithms this is the logarithmic mean of the two values, as in index decomposition (Ang 2004).
    """
    if abs(end - start) < _NOTHING:
        end = start + 1e-6
    return float(shown(metric, end) - shown(metric, start)) / (end - start)


def _measured(evidence: Evidence, metric: str, point: OperatingPoint) -> float | None:
    space = evidence.study.problem.space
    row = space.index(point)
    if evidence.seen[row]:
        return float(shown(metric, evidence.modelled(metric, evidence.likely[row])))
    return None
