"""What an earlier study says of each point of another space: a posterior fitted to its trials.

Loads torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from polythrottle.domain.measurement import Measurement
from polythrottle.domain.problem import Problem
from polythrottle.domain.study import Study
from polythrottle.optimize.features import Array, Coordinates, Rows, SharedCoordinates, shared_coordinates
from polythrottle.optimize.quantities import DRAW, doubts, table
from polythrottle.optimize.surrogate import RESIDUAL_SD, basis, expected, fit_posterior

MOST_ROWS = 200
FEWEST_ROWS = 30
"""Trials of one earlier study that are used; more add little and cost their cube. Fewer where there are many points."""
_MOST_PAIRS = 4_000_000
_STAND_INS = {
    "p99": ("p95", "p90", "mean"),
    "p95": ("p99", "p90", "mean"),
    "p90": ("p95", "p99", "mean"),
    "p50": ("mean",),
    "mean": ("p50", "p90"),
    "power": (DRAW,),
}
"""What a quantity goes along with, where a study did not record it: only differences between points are used."""


@dataclass(frozen=True, eq=False)
class Surface:
    """What an earlier study says of each quantity at each point of a target space.

    Args:
        mean: Relative to the target's default point, shape (points, quantities).
        variance: How sure that is, shape (points, quantities), > 0.
        level: What is left out of ``mean``: the quantities at the default point, shape (quantities,); NaN where the
            study did not record one, so that ``mean`` is what physics expects.
    """

    mean: Array
    variance: Array
    level: Array


def surface(earlier: Study, target: Problem, quantities: tuple[str, ...]) -> Surface | None:
    """Return what an earlier study says of the points of a target; None if it says nothing.

    Computed once per study and target space.

    Args:
        earlier: The study to learn from.
        target: The problem to learn for.
        quantities: Their names.
    """
    return _surface(_Question(earlier, target, quantities))


@dataclass(frozen=True, eq=False)
class _Question:
    """The arguments of `surface`; the same if they are the same objects."""

    earlier: Study
    target: Problem
    quantities: tuple[str, ...]

    @property
    def _identity(self) -> tuple[object, ...]:
        return id(self.earlier), id(self.target.space), self.target.device, self.quantities

    def __hash__(self) -> int:
        return hash(self._identity)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Question) and self._identity == other._identity


@lru_cache(maxsize=64)
def _surface(question: _Question) -> Surface | None:
    seen = _seen(question.earlier, question.quantities, _most_rows(len(question.target.space)))
    if not len(seen.rows):
        return None
    shared = shared_coordinates(question.earlier.problem, question.target)
    start = len(question.earlier.problem.space)
    points = np.arange(start, len(shared.where.unit))
    learnt = _posterior(_only(shared, np.concatenate([seen.rows, points])), question.quantities, seen)
    return learnt and _whole(_only(shared, points), question, learnt, seen.known)


def _most_rows(points: int) -> int:
    return max(FEWEST_ROWS, min(MOST_ROWS, _MOST_PAIRS // points))


@dataclass(frozen=True, eq=False)
class _Seen:
    """What trials of an earlier study measured.

    Args:
        rows: Of their points in its space, shape (trials,); none if no quantity is known.
        values: Of the known quantities, shape (trials, known quantities); ``doubt``, their variances, likewise.
        known: Which quantities are, shape (quantities,).
    """

    rows: Rows
    values: Array
    doubt: Array
    known: Rows


def _seen(study: Study, quantities: Sequence[str], most: int) -> _Seen:
    """Return what at most so many trials measured."""
    trials = [trial for trial in study.completed if trial.point in study.problem.space]
    measurements = [trial.measurement for trial in trials if trial.measurement]
    names = _recorded(measurements, quantities)
    values = table(measurements, names)
    known = np.isfinite(values).sum(axis=0) > len(values) // 2
    whole = np.flatnonzero(np.isfinite(values[:, known]).all(axis=1) & known.any())
    if len(whole) > most:
        whole = np.sort(np.random.default_rng(0).permutation(whole)[:most])
    rows = np.array([study.problem.space.index(trials[i].point) for i in whole], dtype=np.intp)
    doubt = doubts([measurements[int(i)] for i in whole], names)
    return _Seen(rows, values[whole][:, known], doubt[:, known], known)


def _recorded(measurements: Sequence[Measurement], quantities: Sequence[str]) -> list[str]:
    """Return the name of each quantity, or of what stands in for it because it was recorded and that was not."""
    names = []
    for name in quantities:
        options = (name, *_STAND_INS.get(name, ()))
        values = table(measurements, options)
        names.append(options[int(np.argmax(np.isfinite(values).sum(axis=0) > len(values) // 2))])
    return names


def _only(shared: SharedCoordinates, rows: Rows) -> SharedCoordinates:
    where = shared.where
    return SharedCoordinates(shared.knobs, Coordinates(where.unit[rows], where.offset[rows], where.span))


def _posterior(shared: SharedCoordinates, quantities: Sequence[str], seen: _Seen) -> tuple[Array, Array] | None:
    """Return mean and variance of what is known, at the points that follow those of the trials; None if there is none.

    The first points are those of the trials.
    """
    names = [name for name, known in zip(quantities, seen.known, strict=True) if known]
    count = len(seen.values)
    prior = expected(shared.knobs, shared.where, names)
    functions = basis(shared.knobs, shared.where)
    first = np.arange(len(seen.values))
    try:
        belief = fit_posterior(shared.where.unit, functions, first, seen.values - prior[:count], 0, seen.doubt)
    except RuntimeError:  # what torch and gpytorch raise when a matrix cannot be decomposed
        return None
    mean = belief.mean.numpy()[count:] + prior[count:]
    fit = bool(np.isfinite(mean).all())
    if fit:
        return (mean, belief.variance.numpy()[count:])
    return None


def _whole(points: SharedCoordinates, question: _Question, learnt: tuple[Array, Array], known: Rows) -> Surface:
    """Return the surface; quantities that were not recorded are what physics expects, as surely as it does."""
    default = question.target.space.index(question.target.space.default)
    mean = expected(points.knobs, points.where, question.quantities)
    doubt = (basis(points.knobs, points.where)[:, 1:] ** 2).sum(axis=1) + RESIDUAL_SD**2
    variance = np.repeat(doubt[:, None], mean.shape[1], axis=1)
    level = np.full(mean.shape[1], np.nan)
    mean[:, known], variance[:, known] = learnt
    level[known] = learnt[0][default]
    return Surface(mean - mean[default], variance, level)
