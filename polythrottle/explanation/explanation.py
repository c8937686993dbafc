"""The whole explanation of a study, from its trials alone."""

from dataclasses import dataclass

import numpy as np

from polythrottle.explanation.evidence import Evidence, gather, goal, metrics, shown
from polythrottle.explanation.limits import End, Limit, ends, limits
from polythrottle.explanation.prices import Price, prices
from polythrottle.explanation.shares import Effect, Mixtures, effect
from polythrottle.space import OperatingPoint
from polythrottle.study import ENOUGH, Study, Trial

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
        return None if found is None else 1.0 - found.predicted_after / found.predicted_before


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
    study, named = evidence.study, metrics(evidence.study)
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
    unit = float(shown(metric, 1.0)) if metric == "temperature" else 1.0
    typical, rms = float(np.median(missed)), float(np.sqrt(np.square(missed).mean()))
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
