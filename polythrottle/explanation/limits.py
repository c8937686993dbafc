"""What holds the chosen point where it is: limits that are reached, and ends of knobs' ranges."""

from dataclasses import dataclass, replace

import numpy as np

from polythrottle.explanation.evidence import Evidence, shown
from polythrottle.problem import Constraint
from polythrottle.space import Knob, Level, OperatingPoint
from polythrottle.study import WORTHWHILE, Trial

VAGUE = 0.5
"""Standard deviation of a predicted logarithm beyond which a figure would say nothing."""


@dataclass(frozen=True)
class Limit:
    """How a constraint stands at the chosen point.

    Args:
        constraint: With its absolute limit.
        value: The metric as measured there.
        slack: What is left of the limit, in the metric's unit; negative where it is broken.
        noise: Standard deviation of one measurement of the metric as the models see it, in its unit.
        saving: Share of the objective that could likeliest be saved without this limit, all others held; None where no
            point holds the limits.
        sure: Likewise, with one standard deviation of what is only predicted to spare.
    """

    constraint: Constraint
    value: float
    slack: float
    noise: float
    saving: float | None = None
    sure: float | None = None

    @property
    def slack_fraction(self) -> float:
        """What is left as a share of the limit."""
        return self.slack / self.constraint.limit

    @property
    def binds(self) -> bool:
        """Whether a better objective could surely be had without this limit: enough to be told from noise."""
        return self.sure is not None and self.sure >= WORTHWHILE


@dataclass(frozen=True)
class End:
    """A knob at the end of its range at the chosen point.

    Args:
        knob: Its name.
        level: Its level there.
        highest: Whether that is the upper end.
        levels: How many levels the knob has among the points of the space.
        inward: By what share the objective changes one level further in, the other knobs held, as measured or else
            predicted; None where that is no point of the space, or the models know next to nothing of it.
        measured: Whether that point was visited.
    """

    knob: str
    level: Level
    highest: bool
    levels: int
    inward: float | None
    measured: bool = False

    @property
    def binds(self) -> bool:
        """Whether the knob is drawn to the end: further in costs enough of the objective to be told from noise."""
        return self.inward is not None and self.inward >= WORTHWHILE


def limits(evidence: Evidence, at: Trial) -> tuple[Limit, ...]:
    """Return how every constraint stands at a measured trial."""
    assert at.measurement is not None
    found = []
    for index, constraint in enumerate(evidence.study.constraints):
        value = at.measurement.metric(constraint.metric)
        assert value is not None
        noise = _noise(evidence, constraint.metric, value)
        slack = constraint.slack(at.measurement)
        found.append(Limit(constraint, value, slack, noise, *_saving_without(evidence, index)))
    return tuple(found)


def _noise(evidence: Evidence, metric: str, value: float) -> float:
    unit = value if metric != "temperature" else float(shown(metric, 1.0))
    return evidence.noise(metric) * unit


def _saving_without(evidence: Evidence, index: int) -> tuple[float, float] | tuple[None, None]:
    """Return what share of the objective is saved without one limit: likeliest, and with one deviation to spare."""
    held = evidence.cheapest(evidence.bounds)
    if held is None:
        return None, None
    values = evidence.modelled(evidence.goal, evidence.likely)
    allowed = evidence.allowed([one for i, one in enumerate(evidence.bounds) if i != index])
    doubtful = values + np.where(evidence.seen, 0.0, evidence.std(evidence.goal))
    likeliest, sure = (float(-np.expm1(one[allowed].min() - values[held])) for one in (values, doubtful))
    return likeliest, max(0.0, sure)


def ends(evidence: Evidence, at: OperatingPoint) -> tuple[End, ...]:
    """Return the ordered knobs that stand at an end of the range they have among the points of the space."""
    space = evidence.study.problem.space
    found = []
    for column, knob in enumerate(space.knobs):
        used = sorted({int(index) for index in space.rows[:, column]})
        place = used.index(knob.levels.index(at[knob.name]))
        if knob.ordered and len(used) > 1 and place in (0, len(used) - 1):
            inner = used[1 if place == 0 else -2]
            found.append(End(knob.name, at[knob.name], place > 0, len(used), *_inward(evidence, at, knob, inner)))
    return tuple(found)


def _inward(evidence: Evidence, at: OperatingPoint, knob: Knob, inner: int) -> tuple[float | None, bool]:
    """Return by what share the objective changes one level further in, and whether that was measured."""
    space = evidence.study.problem.space
    point = at.moved({knob.name: knob.levels[inner]})
    if point not in space:
        return None, False
    row, values = space.index(point), evidence.modelled(evidence.goal, evidence.likely)
    measured = bool(evidence.seen[row])
    if not measured and evidence.std(evidence.goal)[row] > VAGUE:
        return None, False
    return float(np.expm1(values[row] - values[space.index(at)])), measured


def moved(constraint: Constraint, limit: float) -> Constraint:
    """Return a constraint with another absolute limit."""
    return replace(constraint, limit=limit)
