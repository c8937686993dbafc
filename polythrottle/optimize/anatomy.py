"""What the models of a study say, as plain arrays: for explaining, not for searching.

Loads torch.
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from botorch.models import SingleTaskGP
from botorch.utils.sampling import manual_seed
from linear_operator.utils.cholesky import psd_safe_cholesky
from torch import Tensor

from polythrottle.optimize.features import Array, coordinates
from polythrottle.optimize.quantities import doubts, table
from polythrottle.optimize.remaining import Rows
from polythrottle.optimize.surrogate import fitted, noise_ahead, noise_of
from polythrottle.optimize.threads import one_thread
from polythrottle.optimize.trend import basis, expected
from polythrottle.space import OperatingPoint, SearchSpace
from polythrottle.study import Study, Trial

_JITTER = 1e-8
_BLOCK = 8192


@dataclass(frozen=True, eq=False)
class Anatomy:
    """The posterior of each quantity, and how well each trial is foretold by the others.

    Args:
        mean: At every point of the study's space, shape (points, quantities).
        variance: Likewise, of the quantity itself, without noise.
        mixed: Posterior mean at the points asked for beside, shape (asked, quantities).
        covariance: Posterior covariance among those, shape (quantities, asked, asked).
        noise: Variance one more measurement adds, shape (quantities,).
        trials: The trials the models are made of.
        missed: What each of them measured less what the others foretell, shape (trials, quantities).
    """

    mean: Array
    variance: Array
    mixed: Array
    covariance: Array
    noise: Array
    trials: tuple[Trial, ...]
    missed: Array


def dissect(study: Study, quantities: Sequence[str], asked: Sequence[OperatingPoint]) -> Anatomy | None:
    """Return what the models of a study's completed trials say; None if there is nothing to fit them to.

    The models are those of `bayes` without history. A trial is foretold from all others with the scales fitted to all
    (Rasmussen & Williams 2006, eq. 5.10-5.12).

    Args:
        study: At least one trial of it is completed.
        quantities: Names as in `quantities`.
        asked: Points of the study's knobs and levels; they need not be in its space.
    """
    trials = [trial for trial in study.completed if trial.point in study.problem.space]
    measurements = [trial.measurement for trial in trials if trial.measurement]
    values = table(measurements, quantities)
    whole = np.isfinite(values).all(axis=1)
    if not whole.any():
        return None
    wide, rows = _widened(study.problem.space, asked)
    seen = np.array([wide.index(trial.point) for trial in trials], dtype=np.intp)[whole]
    kept = tuple(trials[int(i)] for i in np.flatnonzero(whole))
    try:
        with warnings.catch_warnings(), one_thread():
            warnings.simplefilter("ignore")
            doubt = doubts([trial.measurement for trial in kept if trial.measurement], quantities)
            found = _posterior(wide, quantities, (rows, seen), (values[whole], doubt), study.seed)
    except RuntimeError:  # what torch and gpytorch raise when a matrix cannot be decomposed
        return None
    size, (mean, variance, covariance, noise, missed) = len(study.problem.space), found
    return Anatomy(mean[:size], variance[:size], mean[rows], covariance, noise, kept, missed)


def _widened(space: SearchSpace, asked: Sequence[OperatingPoint]) -> tuple[SearchSpace, Rows]:
    """Return the space with the points asked for added to its end, and their row numbers in it."""
    new = [point for point in dict.fromkeys(asked) if point not in space]
    added = [[knob.levels.index(point[knob.name]) for knob in space.knobs] for point in new]
    rows = np.vstack([space.rows, np.array(added, dtype=np.int32).reshape(len(new), len(space.knobs))])
    wide = SearchSpace(space.knobs, rows, space.default)
    return wide, np.array([wide.index(point) for point in asked], dtype=np.intp)


def _posterior(
    wide: SearchSpace, quantities: Sequence[str], rows: tuple[Rows, Rows], told: tuple[Array, Array], seed: int
) -> tuple[Array, ...]:
    """Return mean and variance everywhere, covariance among the rows asked for, noise, and what each trial misses by.

    With K the covariance of the trials with their noise, k that between trials and other points, and y the values less
    the trend's prior mean: the posterior mean is kᵀK⁻¹y, the covariance the prior's less kᵀK⁻¹k, and trial i is missed
    by [K⁻¹y]ᵢ / [K⁻¹]ᵢᵢ.
    """
    (asked, seen), (values, doubt), where = rows, told, coordinates(wide)
    inputs = torch.from_numpy(np.hstack([where.unit, basis(wide.knobs, where)]))
    prior = expected(wide.knobs, where, quantities)
    centre = (values - prior[seen]).mean(axis=0)
    targets = torch.from_numpy(values - prior[seen] - centre)
    with manual_seed(seed):
        model = fitted(inputs[seen], targets, where.unit.shape[1], doubt)
    with torch.no_grad():
        inverse = _inverse(model, inputs[seen], targets.shape[1])
        weights = inverse @ targets.T.unsqueeze(-1)
        missed = weights.squeeze(-1) / torch.diagonal(inverse, dim1=-2, dim2=-1)
        mean, variance = _everywhere(model, inputs, inputs[seen], inverse, weights)
        joint = _joint(model, inputs[asked], inputs[seen], inverse)
    mean = mean + torch.from_numpy(prior + centre)
    return tuple(_array(one) for one in (mean, variance, joint, noise_ahead(model, doubt), missed.T))


def _array(tensor: Tensor) -> Array:
    return np.asarray(tensor.detach().numpy(), dtype=float)


def _covariance(model: SingleTaskGP, one: Tensor, other: Tensor) -> Tensor:
    """Return the prior covariance between two lists of points, shape (quantities, one, other)."""
    found: Tensor = model.covar_module(one, other).to_dense().reshape(-1, len(one), len(other))
    return found


def _inverse(model: SingleTaskGP, seen: Tensor, count: int) -> Tensor:
    """Return K⁻¹, shape (quantities, trials, trials)."""
    noise = torch.diag_embed(noise_of(model, count, len(seen)) + _JITTER)
    return torch.cholesky_inverse(psd_safe_cholesky(_covariance(model, seen, seen) + noise))


def _everywhere(
    model: SingleTaskGP, inputs: Tensor, seen: Tensor, inverse: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor]:
    """Return mean and variance at every point, shape (points, quantities) each; in blocks, to keep memory small."""
    means, variances = [], []
    for block in torch.split(inputs, _BLOCK):
        cross = _covariance(model, block, seen)
        own = model.covar_module(block, diag=True).reshape(-1, len(block))
        means.append((cross @ weights).squeeze(-1))
        variances.append((own - ((cross @ inverse) * cross).sum(dim=-1)).clamp_min(0.0))
    return torch.cat(means, dim=1).T, torch.cat(variances, dim=1).T


def _joint(model: SingleTaskGP, asked: Tensor, seen: Tensor, inverse: Tensor) -> Tensor:
    """Return the posterior covariance among the points asked for, shape (quantities, asked, asked)."""
    cross = _covariance(model, asked, seen)
    return _covariance(model, asked, asked) - cross @ inverse @ cross.mT
