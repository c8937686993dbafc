"""What a looser limit would buy, and what a tighter one would cost: shadow prices, point by point."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from polythrottle.errors import InvalidInput
from polythrottle.explanation.evidence import Evidence, shown
from polythrottle.explanation.limits import VAGUE, moved
from polythrottle.optimize.quantities import bound
from polythrottle.problem import Constraint
from polythrottle.space import OperatingPoint

_STEP_S, _STEP = 1e-3, 0.05
_SMALL, _LARGE = 0.01, 0.2
_FACTORS = (1.1, 1.25, 1.5)
_DEGREES = (-1.0, 0.0, 1.0, 5.0, 10.0)


@dataclass(frozen=True)
class Price:
    """The best that is known under another limit, all other limits held.

    Args:
        constraint: With that limit; None for no limit.
        point: Where; None if no point is likelier than not to hold the limits.
        value: The objective there, in its unit.
        std_fraction: Standard deviation of a predicted value as a share of it, for small ones: that of its logarithm;
            0 where the point was tried.
        measured: Whether the point was measured over a whole window, or only the models say so.
        tried: Whether the point was visited at all: also where its window was cut short because a limit was broken.
        change: By what share its objective differs from the best under the limit as it is; None if there is none.
    """

    constraint: Constraint | None
    point: OperatingPoint | None = None
    value: float | None = None
    std_fraction: float = 0.0
    measured: bool = False
    change: float | None = None
    tried: bool = False

    @property
    def vague(self) -> bool:
        """Whether the models know so little of the point that a figure would say nothing."""
        return self.std_fraction > VAGUE


def step(constraint: Constraint) -> float:
    """Return a sensible small step of a limit in its unit: 1 ms for times it suits, 1 °C, else 5 % of the limit."""
    if constraint.metric == "temperature":
        return 1.0
    suits = constraint.timed and _SMALL <= _STEP_S / constraint.limit <= _LARGE
    return _STEP_S if suits else _STEP * constraint.limit


def prices(evidence: Evidence, index: int) -> tuple[Price, ...]:
    """Return the best known point under each of several limits in place of one constraint's, tightest first."""
    constraint = evidence.study.constraints[index]
    others = [one for i, one in enumerate(evidence.bounds) if i != index]
    now = evidence.cheapest(evidence.bounds)
    found = [_price(evidence, other, evidence.cheapest([*others, bound(other)]), now) for other in _ladder(constraint)]
    return (*found, _price(evidence, None, evidence.cheapest(others), now))


def _ladder(constraint: Constraint) -> Iterator[Constraint]:
    limit, small = constraint.limit, step(constraint)
    if constraint.metric == "temperature":
        rungs = [limit + degrees for degrees in _DEGREES]
    elif constraint.at_least:
        rungs = [limit + small, limit, limit - small, *(limit / factor for factor in _FACTORS)]
    else:
        rungs = [limit - small, limit, limit + small, *(limit * factor for factor in _FACTORS)]
    for rung in dict.fromkeys(sorted(rungs, reverse=constraint.at_least)):
        try:
            yield moved(constraint, rung)
        except InvalidInput:  # a limit below or beyond anything that occurs
            continue


def _price(evidence: Evidence, constraint: Constraint | None, row: int | None, now: int | None) -> Price:
    if row is None:
        return Price(constraint)
    values, seen = evidence.modelled(evidence.goal, evidence.likely), bool(evidence.seen[row])
    tried = bool(evidence.tried[row])
    return Price(
        constraint,
        evidence.study.problem.space[row],
        float(shown(evidence.goal, values[row])),
        0.0 if tried else float(evidence.std(evidence.goal)[row]),
        seen,
        None if now is None else float(np.expm1(values[row] - values[now])),
        tried,
    )
