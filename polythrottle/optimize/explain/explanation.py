"""The whole explanation of a study: what holds the chosen point, what a looser limit would buy.

What each knob changed.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from polythrottle.domain.errors import InvalidInput
from polythrottle.domain.problem import Constraint
from polythrottle.domain.space import Knob, Level, OperatingPoint
from polythrottle.domain.study import ENOUGH, WORTHWHILE, Study, Trial
from polythrottle.optimize.explain.modelled_study import Evidence, gather, goal, metrics, shown
from polythrottle.optimize.explain.shares import Effect, Mixtures, effect
from polythrottle.optimize.quantities import bound

# What holds the chosen point where it is: limits that are reached, and ends of knobs' ranges.

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
    if metric != "temperature":
        unit = value
    else:
        unit = float(shown(metric, 1.0))
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
    row = space.index(point)
    values = evidence.modelled(evidence.goal, evidence.likely)
    measured = bool(evidence.seen[row])
    if not measured and evidence.std(evidence.goal)[row] > VAGUE:
        return None, False
    return float(np.expm1(values[row] - values[space.index(at)])), measured


def moved(constraint: Constraint, limit: float) -> Constraint:
    """Return a constraint with another absolute limit."""
    return replace(constraint, limit=limit)


# What a looser limit would buy, and what a tighter one would cost: shadow prices, point by point.

_STEP_S = 1e-3
_STEP = 0.05
_SMALL = 0.01
_LARGE = 0.2
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
    if suits:
        return _STEP_S
    return _STEP * constraint.limit


def prices(evidence: Evidence, index: int) -> tuple[Price, ...]:
    """Return the best known point under each of several limits in place of one constraint's, tightest first."""
    constraint = evidence.study.constraints[index]
    others = [one for i, one in enumerate(evidence.bounds) if i != index]
    now = evidence.cheapest(evidence.bounds)
    found = [_price(evidence, other, evidence.cheapest([*others, bound(other)]), now) for other in _ladder(constraint)]
    return (*found, _price(evidence, None, evidence.cheapest(others), now))


def _ladder(constraint: Constraint) -> Iterator[Constraint]:
    limit = constraint.limit
    small = step(constraint)
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
    values = evidence.modelled(evidence.goal, evidence.likely)
    seen = bool(evidence.seen[row])
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


# The whole explanation of a study, from its trials alone.

_FEW = 2


@dataclass(frozen=True)
class Accuracy:
    """How well the models foretell one metric of each trial from all the others.

    Args:
        metric: ``energy``, ``edp`` or one of `METRICS`.
        typical: Median absolute error as a fraction of the value, or in the unit for temperature.
        rms: Root mean square error, likewise.
        noise: Standard deviation of one measurement as the models see it, likewise.
    """

    metric: str
    typical: float
    rms: float
    noise: float


@dataclass(frozen=True)
class Explanation:
    """Why the chosen point is where it is.

    Args:
        study: What is explained.
        nothing: Why there is nothing to explain; all below is empty then.
        at: The chosen trial: the best, or where no trial holds the limits the closest.
        limits: Every constraint as it stands there.
        ends: The knobs at the end of their range there.
        effects: What changed since the default point, by metric; empty if the chosen point is the default.
        prices: For every constraint, what other limits would buy.
        accuracy: How far the models can be trusted.
        hope: Where no trial holds the limits: the point the models deem closest to holding them.
        outside: How many of the mixtures the shares are made of are no points of the space, and of how many.
    """

    study: Study
    nothing: str | None = None
    at: Trial | None = None
    limits: tuple[Limit, ...] = ()
    ends: tuple[End, ...] = ()
    effects: tuple[Effect, ...] = ()
    prices: tuple[tuple[Price, ...], ...] = ()
    accuracy: tuple[Accuracy, ...] = ()
    hope: "Hope | None" = None
    outside: tuple[int, int] = (0, 0)

    @property
    def feasible(self) -> bool:
        """Whether the chosen trial holds every limit."""
        return self.at is not None and self.study.feasible(self.at)

    @property
    def saving_fraction(self) -> float | None:
        """The share of the default's objective that the models say is saved; None if the default is chosen."""
        wanted = goal(self.study.problem.objective)
        found = next((one for one in self.effects if one.metric == wanted), None)
        if found is None:
            return None
        return 1.0 - found.predicted_after / found.predicted_before


@dataclass(frozen=True)
class Hope:
    """The point that the models deem closest to holding every limit.

    Args:
        point: Where.
        excess: By what fraction the worst limit is exceeded there as predicted; 0 if all hold.
        measured: Whether it was visited.
    """

    point: OperatingPoint
    excess: float
    measured: bool


def explain(study: Study) -> Explanation:
    """Return what binds at a study's best point, what each knob gave, what other limits would buy.

    Raises:
        InvalidInput: If a limit is on a metric that was not measured.
    """
    count = len(study.completed)
    if count < _FEW:
        return Explanation(study, _too_few(study))
    if not study.judgeable:
        return Explanation(study, "nothing to explain yet: the limits multiply what the default was never measured at")
    if not study.well_searched:
        return Explanation(study, _too_few(study))
    at = study.best or study.closest
    assert at is not None
    mixtures = Mixtures(study.problem.space.default, at.point, study.seed)
    evidence = gather(study, mixtures.points)
    if evidence is None:
        return Explanation(study, "nothing can be explained: no model can be fitted to these trials")
    return _explained(evidence, at, mixtures)


def _too_few(study: Study) -> str:
    count = len(study.completed)
    return f"not enough trials to explain anything: {count} completed, and it takes {ENOUGH} or every point there is"


def _explained(evidence: Evidence, at: Trial, mixtures: Mixtures) -> Explanation:
    study = evidence.study
    named = metrics(evidence.study)
    return Explanation(
        study,
        at=at,
        limits=limits(evidence, at),
        ends=ends(evidence, at.point),
        effects=tuple(effect(evidence, mixtures, metric) for metric in named) if mixtures.knobs else (),
        prices=tuple(prices(evidence, index) for index in range(len(study.constraints))),
        accuracy=tuple(_accuracy(evidence, metric) for metric in named),
        hope=None if study.feasible(at) else _hope(evidence),
        outside=(sum(point not in study.problem.space for point in mixtures.points), len(mixtures.points)),
    )


def _accuracy(evidence: Evidence, metric: str) -> Accuracy:
    missed = np.abs(evidence.modelled(metric, evidence.anatomy.missed))
    unit = 1.0
    if metric == "temperature":
        unit = float(shown(metric, 1.0))
    typical = float(np.median(missed))
    rms = float(np.sqrt(np.square(missed).mean()))
    return Accuracy(metric, typical * unit, rms * unit, evidence.noise(metric) * unit)


def _hope(evidence: Evidence) -> Hope | None:
    if not evidence.bounds or not evidence.open.any():
        return None
    over = np.column_stack(
        [evidence.likely[:, evidence.quantities.index(one.quantity)] - one.limit for one in evidence.bounds]
    ).max(axis=1)
    row = int(np.argmin(np.where(evidence.open, over, np.inf)))
    excess = max(0.0, float(np.expm1(over[row])))
    return Hope(evidence.study.problem.space[row], excess, bool(evidence.tried[row]))
