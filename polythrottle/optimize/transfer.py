"""Learning from earlier studies: each is an opinion, and the trials so far say whose opinion counts.

For each quantity there are several voices: the physics a cold search starts from, every earlier study, and all earlier
studies together, whose mean is their precision-weighted mean and whose doubt is how far they lie apart. Each voice is a
few Gaussian priors that differ in how tightly they hold to it. A voice's weight is its odds times the evidence of the
trials so far; the belief is the mixture, so that a misleading study loses its say within a few trials (Bayesian model
averaging; in the spirit of the ranking-weighted ensembles of Feurer et al. 2018 and the stacked residual processes of
Golovin et al. 2017).

Loads torch.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from polythrottle.measurement import Measurement
from polythrottle.optimize.features import Array, coordinates
from polythrottle.optimize.quantities import ENERGY, doubts, table
from polythrottle.optimize.remaining import Rows
from polythrottle.optimize.surrogate import Belief
from polythrottle.optimize.transfer_process import Correlation, Posterior, Prior
from polythrottle.optimize.transfer_surface import Surface, surface
from polythrottle.optimize.trend import basis, expected
from polythrottle.problem import Problem
from polythrottle.study import Study

MOST_STUDIES = 16
"""Earlier studies that are used, the most related first."""
COLD_ODDS, STRANGE_COLD_ODDS = 0.1, 0.6
"""Prior weight of the cold search's own physics: if an earlier workload is alike, and if the only one is not."""
JOINT_ODDS = 0.55
"""Share of the rest for all earlier studies together, if there are several."""
LEVEL_SD = 3.0
"""Deviation of a quantity's level: workloads differ by factors, so the level is learnt from the trials alone."""
SCALE_SD = 0.2
"""How much more or less sensitive a workload may be than another: deviation of the factor on a surface."""
SHARED = 0.5
"""Share of the evidence on the other quantity that counts for one."""
_DRAW_SD, _FLOOR, _SAME_WORKLOAD = 0.2, 0.05, 0.6
_TREND_SHARES, _TIGHT, _LOOSE, _TRUST = (0.15, 0.5), 0.1, 0.3, 0.9
_DOUBTS, _NOISES = (0.03, 0.08, 0.2), (0.007, 0.03)
_COLD_DOUBTS = (0.08, 0.15, 0.3)
_APART = 0.05
_LEAST_VOICE, _LEAST_PRIOR, _LEAST_VARIANCE = 0.003, 0.02, 1e-10


@dataclass(frozen=True, eq=False)
class Voice:
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
class Heard:
    """A voice after the trials.

    Args:
        voice: Whose.
        posteriors: Of its priors.
        shares: Their weights within the voice, shape (priors,).
        log_evidence: Of the voice.
    """

    voice: Voice
    posteriors: Sequence[Posterior]
    shares: Array
    log_evidence: float

    @classmethod
    def of(cls, voice: Voice, correlation: Correlation, values: Array, doubt: Array) -> "Heard":
        """Return a voice after values at the measured points, and their known variances, shape (trials,) each."""
        posteriors = [Posterior.of(prior, correlation, values, doubt) for prior in voice.priors]
        logs = np.array([posterior.log_evidence for posterior in posteriors])
        weights = np.exp(logs - logs.max())
        shares = np.where(weights < _LEAST_PRIOR * weights.sum(), 0.0, weights)
        log_evidence = float(logs.max() + math.log(weights.mean()))
        return cls(voice, posteriors, shares / shares.sum(), log_evidence)


def informed(
    study: Study,
    quantities: tuple[str, ...],
    seen: Rows,
    measurements: Sequence[Measurement],
    cold: Belief,
    history: Sequence[Study],
) -> Belief:
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
    values, doubt = table(measurements, quantities), doubts(measurements, names)
    whole = np.column_stack([values, values[:, 0] + values[:, 1]])
    likeness = _likeness(sources, problem, seen, whole[:, 1])
    kinship = _kinship(sources, problem, likeness)
    surfaces = [found for _, found in sources]
    correlation = Correlation.of(coordinates(problem.space).unit, seen)
    level = whole.mean(axis=0)
    try:
        heard = [
            [
                Heard.of(voice, correlation, whole[:, k] - level[k], doubt[:, k])
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
) -> Iterator[Voice]:
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
    yield Voice(cold_odds, [Prior(mean, functions, doubt, noise) for doubt in doubts for noise in _NOISES], cold=True)
    means = np.array([found.mean[:, k] for found in surfaces])
    variances = np.array([found.variance[:, k] for found in surfaces])
    joint = (1.0 - cold_odds) * JOINT_ODDS * (count > 1)
    for share, like, mean, variance in zip(kinship, likeness, means, variances, strict=True):
        shares = (min(1.0, _TIGHT + (1.0 - _TRUST * like) / count), min(1.0, _LOOSE + 1.0 / count))
        priors = _priors(mean, variance, SCALE_SD * mean[:, None], level, trend, shares)
        yield Voice((1.0 - cold_odds - joint) * share, priors)
    if count > 1:
        yield Voice(joint, _together(means, variances, kinship, level, trend))


def _together(means: Array, variances: Array, kinship: Array, level: Array, trend: Array) -> list[Prior]:
    """Return the priors of all earlier studies together, given means and variances, shape (studies, points)."""
    weights = kinship[:, None] / (variances + _APART**2)
    weights = weights / weights.sum(axis=0)
    mean, variance = (weights * means).sum(axis=0), (weights**2 * variances).sum(axis=0)
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


def _mixture(heard: Sequence[Sequence[Heard]], level: Array, cold: Belief) -> Belief:
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
    return Belief(
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
    return np.asarray(evidence[k] + SHARED * evidence[0 if k == 1 else 1])


def _cold(cold: Belief, k: int) -> tuple[Array, Array, float]:
    """Return mean, variance and noise of the cold belief of a quantity; of energy behind the last."""
    if k < cold.mean.shape[1]:
        return cold.mean[:, k].numpy(), cold.variance[:, k].numpy(), float(cold.noise[k])
    return cold.mean[:, :2].sum(dim=1).numpy(), cold.variance[:, :2].sum(dim=1).numpy(), float(cold.noise[:2].sum())


def _moments(
    voices: Sequence[Heard], weights: Array, level: float, cold: tuple[Array, Array, float]
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
