"""Learning from earlier studies: each is a Gaussian prior over the points of a space.

Weighed by how well it foretells the trials so far.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from polythrottle.domain.measurement import Measurement
from polythrottle.domain.problem import Problem
from polythrottle.domain.study import Study
from polythrottle.optimize.features import Array, Coordinates, Rows, SharedCoordinates, coordinates, shared_coordinates
from polythrottle.optimize.quantities import DRAW, ENERGY, doubts, table, usual
from polythrottle.optimize.surrogate import LENGTH, RESIDUAL_SD, QuantityPosterior, basis, expected, fit_posterior

# What an earlier study says of each point of another space: a posterior fitted to its trials.

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
    seen = _past_trials(question.earlier, question.quantities, _most_rows(len(question.target.space)))
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
class _PastTrials:
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


def _past_trials(study: Study, quantities: Sequence[str], most: int) -> _PastTrials:
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
    return _PastTrials(rows, values[whole][:, known], doubt[:, known], known)


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


def _posterior(shared: SharedCoordinates, quantities: Sequence[str], seen: _PastTrials) -> tuple[Array, Array] | None:
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


# A Gaussian prior over the points of a space, how well it foretold the trials, and what it says after them.
#
# The prior of one quantity is  m(x) + Σ_j a_j b_j(x) + d(x) r(x) + noise  with a_j ~ N(0, 1) and r a Matérn-5/2
# process of variance one, so that its covariance is  B Bᵀ + (d dᵀ) ∘ R  (Rasmussen & Williams 2006, §2.7). Nothing is
# fitted: the scales are part of the prior, and several priors are weighed by their evidence instead.

_JITTER = 1e-9
_LEAST_VARIANCE = 1e-10


@dataclass(frozen=True, eq=False)
class Prior:
    """A Gaussian prior of one quantity.

    Args:
        mean: Shape (points,).
        functions: Each times its coefficient's deviation, shape (points, functions).
        doubt: Deviation of what the functions leave over, shape (points,).
        noise_sd: Deviation of one measurement besides its own doubt.
    """

    mean: Array
    functions: Array
    doubt: Array
    noise_sd: float


@dataclass(frozen=True, eq=False)
class Correlation:
    """The Matérn-5/2 correlation of the measured points, with each other and with every point.

    Args:
        seen: Row number of each measured point, shape (trials,).
        near: Shape (trials, trials).
        far: Shape (trials, points).
    """

    seen: Rows
    near: Array
    far: Array

    @classmethod
    def of(cls, unit: Array, seen: Rows) -> "Correlation":
        """Return the correlations of points with these coordinates, shape (points, columns)."""
        length = LENGTH * math.sqrt(max(1, unit.shape[1]))
        squares = (unit[seen] ** 2).sum(axis=1)[:, None] + (unit**2).sum(axis=1) - 2.0 * unit[seen] @ unit.T
        distance = np.sqrt(5.0 * np.maximum(squares, 0.0)) / length
        far = (1.0 + distance + distance**2 / 3.0) * np.exp(-distance)
        return cls(seen, far[:, seen], far)


@dataclass(frozen=True, eq=False)
class Posterior:
    """A prior after the trials (Rasmussen & Williams 2006, algorithm 2.1).

    Args:
        prior: What was believed before.
        correlation: Of the points.
        root: Cholesky factor of the covariance of the measurements, shape (trials, trials).
        white: The measurements less the prior mean, whitened by it, shape (trials,).
        noise: Variance one more measurement adds.
    """

    prior: Prior
    correlation: Correlation
    root: Array
    white: Array
    noise: float

    @classmethod
    def of(cls, prior: Prior, correlation: Correlation, values: Array, known: Array) -> "Posterior":
        """Return the posterior given a value at each measured point, and its known variance, shape (trials,) each.

        Raises:
            numpy.linalg.LinAlgError: If the covariance cannot be decomposed.
        """
        seen = correlation.seen
        functions = prior.functions[seen]
        doubt = prior.doubt[seen]
        covariance = functions @ functions.T + np.outer(doubt, doubt) * correlation.near
        covariance[np.diag_indices(len(seen))] += prior.noise_sd**2 + known + _JITTER
        root = np.asarray(np.linalg.cholesky(covariance), dtype=float)
        white = np.linalg.solve(root, values - prior.mean[seen])
        noise = prior.noise_sd**2 + float(usual(known))
        return cls(prior, correlation, root, np.asarray(white, dtype=float), noise)

    @property
    def log_evidence(self) -> float:
        """Log density of the measurements under the prior, up to a constant (Rasmussen & Williams 2006, eq. 2.30)."""
        return float(-0.5 * self.white @ self.white - np.log(np.diag(self.root)).sum())

    def predict(self) -> tuple[Array, Array]:
        """Return mean and variance at every point, shape (points,) each."""
        prior = self.prior
        seen = self.correlation.seen
        cross = (
            prior.functions[seen] @ prior.functions.T + prior.doubt[seen][:, None] * self.correlation.far * prior.doubt
        )
        half = np.linalg.solve(self.root, cross)
        variance = (prior.functions**2).sum(axis=1) + prior.doubt**2 - (half**2).sum(axis=0)
        return prior.mean + half.T @ self.white, np.maximum(variance, _LEAST_VARIANCE)


# Learning from earlier studies: each is an opinion, and the trials so far say whose opinion counts.
#
# For each quantity there are several voices: the physics a cold search starts from, every earlier study, and all
# earlier studies together, whose mean is their precision-weighted mean and whose doubt is how far they lie apart.
# Each voice is a few Gaussian priors that differ in how tightly they hold to it. A voice's weight is its odds times
# the evidence of the trials so far; the belief is the mixture, so that a misleading study loses its say within a few
# trials (Bayesian model averaging; in the spirit of the ranking-weighted ensembles of Feurer et al. 2018 and the
# stacked residual processes of Golovin et al. 2017).
#
# Loads torch.

MOST_STUDIES = 16
"""Earlier studies that are used, the most related first."""
COLD_ODDS = 0.1
STRANGE_COLD_ODDS = 0.6
"""Prior weight of the cold search's own physics: if an earlier workload is alike, and if the only one is not."""
JOINT_ODDS = 0.55
"""Share of the rest for all earlier studies together, if there are several."""
LEVEL_SD = 3.0
"""Deviation of a quantity's level: workloads differ by factors, so the level is learnt from the trials alone."""
SCALE_SD = 0.2
"""How much more or less sensitive a workload may be than another: deviation of the factor on a surface."""
SHARED = 0.5
"""Share of the evidence on the other quantity that counts for one."""
_DRAW_SD = 0.2
_FLOOR = 0.05
_SAME_WORKLOAD = 0.6
_TREND_SHARES = (0.15, 0.5)
_TIGHT = 0.1
_LOOSE = 0.3
_TRUST = 0.9
_DOUBTS = (0.03, 0.08, 0.2)
_NOISES = (0.007, 0.03)
_COLD_DOUBTS = (0.08, 0.15, 0.3)
_APART = 0.05
_LEAST_VOICE = 0.003
_LEAST_PRIOR = 0.02


@dataclass(frozen=True, eq=False)
class PriorGroup:
    """Priors that say the same, more and less tightly.

    Args:
        odds: Before any trial.
        priors: Equally probable ones.
        cold: Whether the cold search's belief, whose scales are fitted, speaks for it.
    """

    odds: float
    priors: Sequence[Prior]
    cold: bool = False


@dataclass(frozen=True, eq=False)
class WeighedGroup:
    """A voice after the trials.

    Args:
        voice: Whose.
        posteriors: Of its priors.
        shares: Their weights within the voice, shape (priors,).
        log_evidence: Of the voice.
    """

    voice: PriorGroup
    posteriors: Sequence[Posterior]
    shares: Array
    log_evidence: float

    @classmethod
    def of(cls, voice: PriorGroup, correlation: Correlation, values: Array, doubt: Array) -> "WeighedGroup":
        """Return a voice after values at the measured points, and their known variances, shape (trials,) each."""
        posteriors = [Posterior.of(prior, correlation, values, doubt) for prior in voice.priors]
        logs = np.array([posterior.log_evidence for posterior in posteriors])
        weights = np.exp(logs - logs.max())
        shares = np.where(weights < _LEAST_PRIOR * weights.sum(), 0.0, weights)
        log_evidence = float(logs.max() + math.log(weights.mean()))
        return cls(voice, posteriors, shares / shares.sum(), log_evidence)


def transfer_posterior(
    study: Study,
    quantities: tuple[str, ...],
    seen: Rows,
    measurements: Sequence[Measurement],
    cold: QuantityPosterior,
    history: Sequence[Study],
) -> QuantityPosterior:
    """Return the belief of a study that has earlier ones to learn from.

    Args:
        study: What has been seen.
        quantities: Names; time and draw first.
        seen: Row number of each measured point, shape (trials,).
        measurements: What was measured there; each has all quantities.
        cold: What would be believed without the earlier studies.
        history: The earlier studies.
    """
    names = (*quantities, ENERGY)
    problem = study.problem
    told = [(past, surface(past, problem, names)) for past in _nearest(history, problem)]
    sources = [(past, found) for past, found in told if found is not None]
    if not sources:
        return cold
    values = table(measurements, quantities)
    doubt = doubts(measurements, names)
    whole = np.column_stack([values, values[:, 0] + values[:, 1]])
    likeness = _likeness(sources, problem, seen, whole[:, 1])
    kinship = _kinship(sources, problem, likeness)
    surfaces = [found for _, found in sources]
    correlation = Correlation.of(coordinates(problem.space).unit, seen)
    level = whole.mean(axis=0)
    try:
        heard = [
            [
                WeighedGroup.of(voice, correlation, whole[:, k] - level[k], doubt[:, k])
                for voice in _voices(problem, surfaces, kinship, likeness, names, k)
            ]
            for k in range(len(names))
        ]
    except np.linalg.LinAlgError:
        return cold
    return _mixture(heard, level, cold)


def _nearest(history: Sequence[Study], problem: Problem) -> list[Study]:
    """Return the earlier studies that are used: same device and same workload first, then the longest."""

    def rank(past: Study) -> tuple[int, int]:
        same = _named(past.problem.device, problem.device) + _named(past.problem.workload, problem.workload)
        return same, len(past.completed)

    return sorted(history, key=rank, reverse=True)[:MOST_STUDIES]


def _likeness(sources: Sequence[tuple[Study, Surface]], problem: Problem, seen: Rows, draw: Array) -> Array:
    """Return how alike each earlier workload is to this one, 0 to 1, shape (studies,).

    What a workload draws at the default point says how much of the device it keeps busy, and so how it will answer to
    clocks, limits and batches: those that draw alike there are taken to be alike.
    """
    at = np.flatnonzero(seen == problem.space.index(problem.space.default))
    gaps = np.array([found.level[1] - draw[at[0]] if len(at) else np.nan for _, found in sources])
    likeness = np.exp(-0.5 * np.square(np.nan_to_num(gaps / _DRAW_SD, nan=1.0)))
    same = [_named(past.problem.workload, problem.workload) for past, _ in sources]
    return np.asarray(np.where(same, np.maximum(likeness, _SAME_WORKLOAD), likeness))


def _named(one: str, other: str) -> bool:
    """Return whether two words name the same thing, and not just something that was recorded."""
    return one == other and one not in ("", "recorded")


def _kinship(sources: Sequence[tuple[Study, Surface]], problem: Problem, likeness: Array) -> Array:
    """Return how much each earlier study counts, shape (studies,), summing to 1: by likeness, and by its words.

    Twofold for the same device, threefold for the same workload.
    """
    named = [
        (1.0 + _named(past.problem.device, problem.device))
        * (1.0 + 2.0 * _named(past.problem.workload, problem.workload))
        for past, _ in sources
    ]
    kinship = (_FLOOR + likeness) * np.array(named)
    return np.asarray(kinship / kinship.sum())


def _voices(
    problem: Problem, surfaces: Sequence[Surface], kinship: Array, likeness: Array, names: Sequence[str], k: int
) -> Iterator[PriorGroup]:
    """Yield the voices on quantity ``k``: cold, every earlier study, and all of them together."""
    space = problem.space
    where = coordinates(space)
    trend = basis(space.knobs, where)[:, 1:]
    level = np.full((len(space), 1), LEVEL_SD)
    mean = expected(space.knobs, where, names[k : k + 1])[:, 0]
    functions = np.hstack([level, trend])
    doubts = [np.full(len(space), doubt) for doubt in _COLD_DOUBTS]
    count = len(surfaces)
    cold_odds = COLD_ODDS + (STRANGE_COLD_ODDS - COLD_ODDS) * (1.0 - float(likeness.max())) / count
    yield PriorGroup(
        cold_odds, [Prior(mean, functions, doubt, noise) for doubt in doubts for noise in _NOISES], cold=True
    )
    means = np.array([found.mean[:, k] for found in surfaces])
    variances = np.array([found.variance[:, k] for found in surfaces])
    joint = (1.0 - cold_odds) * JOINT_ODDS * (count > 1)
    for share, like, mean, variance in zip(kinship, likeness, means, variances, strict=True):
        shares = (min(1.0, _TIGHT + (1.0 - _TRUST * like) / count), min(1.0, _LOOSE + 1.0 / count))
        priors = _priors(mean, variance, SCALE_SD * mean[:, None], level, trend, shares)
        yield PriorGroup((1.0 - cold_odds - joint) * share, priors)
    if count > 1:
        yield PriorGroup(joint, _together(means, variances, kinship, level, trend))


def _together(means: Array, variances: Array, kinship: Array, level: Array, trend: Array) -> list[Prior]:
    """Return the priors of all earlier studies together, given means and variances, shape (studies, points)."""
    weights = kinship[:, None] / (variances + _APART**2)
    weights = weights / weights.sum(axis=0)
    mean = (weights * means).sum(axis=0)
    variance = (weights**2 * variances).sum(axis=0)
    spread = (means - mean).T * np.sqrt(kinship * len(means) / (len(means) - 1))
    return _priors(mean, variance, np.column_stack([spread, SCALE_SD * mean]), level, trend, _TREND_SHARES)


def _priors(
    mean: Array, variance: Array, functions: Array, level: Array, trend: Array, shares: Sequence[float]
) -> list[Prior]:
    """Return the priors around a surface, from holding to it tightly to loosely."""
    return [
        Prior(mean, np.hstack([level, functions, share * trend]), np.sqrt(doubt**2 + variance), noise)
        for share in shares
        for doubt in _DOUBTS
        for noise in _NOISES
    ]


def _mixture(heard: Sequence[Sequence[WeighedGroup]], level: Array, cold: QuantityPosterior) -> QuantityPosterior:
    """Return the mixture of the voices on each quantity, energy last, by its mean and variance."""
    count = cold.mean.shape[1]
    evidence = np.array([[one.log_evidence for one in voices] for voices in heard])
    moments = []
    for k, voices in enumerate(heard):
        logs = np.log([one.voice.odds for one in voices]) + _counted(evidence, k, energy=k == count)
        weights = np.exp(logs - logs.max())
        kept = np.where(weights < _LEAST_VOICE * weights.sum(), 0.0, weights)
        moments.append(_moments(voices, kept / kept.sum(), level[k], _cold(cold, k)))
    means, variances, noises = (np.array(column) for column in zip(*moments, strict=True))
    points = torch.from_numpy(means).T, torch.from_numpy(variances).T
    return QuantityPosterior(
        points[0][:, :count],
        points[1][:, :count],
        torch.from_numpy(noises[:count]),
        energy_mean=points[0][:, count],
        energy_variance=points[1][:, count],
    )


def _counted(evidence: Array, k: int, energy: bool) -> Array:
    """Return the log evidence that counts for each voice on quantity ``k``, shape (voices,).

    A study that foretells the time is likelier to foretell the draw.
    """
    if energy:
        return np.asarray((1.0 - SHARED) * evidence[k] + SHARED * evidence[:2].sum(axis=0))
    return np.asarray(evidence[k] + SHARED * evidence[int(k != 1)])


def _cold(cold: QuantityPosterior, k: int) -> tuple[Array, Array, float]:
    """Return mean, variance and noise of the cold belief of a quantity; of energy behind the last."""
    if k < cold.mean.shape[1]:
        return cold.mean[:, k].numpy(), cold.variance[:, k].numpy(), float(cold.noise[k])
    return cold.mean[:, :2].sum(dim=1).numpy(), cold.variance[:, :2].sum(dim=1).numpy(), float(cold.noise[:2].sum())


def _moments(
    voices: Sequence[WeighedGroup], weights: Array, level: float, cold: tuple[Array, Array, float]
) -> tuple[Array, Array, float]:
    """Return mean, variance and noise of a mixture of voices."""
    parts: list[tuple[float, Array, Array, float]] = []
    for weight, one in zip(weights, voices, strict=True):
        if one.voice.cold:
            parts.append((weight, *cold))
        elif weight:
            some = zip(one.shares, one.posteriors, strict=True)
            parts += [(weight * share, *_said(posterior, level)) for share, posterior in some if share]
    mean = np.asarray(sum(weight * m for weight, m, _, _ in parts))
    square = np.asarray(sum(weight * (v + (m - mean) ** 2) for weight, m, v, _ in parts))
    return mean, np.maximum(square, _LEAST_VARIANCE), float(sum(weight * noise for weight, _, _, noise in parts))


def _said(posterior: Posterior, level: float) -> tuple[Array, Array, float]:
    mean, variance = posterior.predict()
    return mean + level, variance, posterior.noise
