"""The posterior of every modelled quantity at every point, from a study and earlier ones.

Also as plain arrays, for explaining a study.
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from botorch.models import SingleTaskGP
from botorch.utils.sampling import manual_seed
from torch import Tensor

from polythrottle.domain.space import OperatingPoint, SearchSpace
from polythrottle.domain.study import Study, Trial, TrialState
from polythrottle.optimize.features import Array, Rows, coordinates
from polythrottle.optimize.options import Ingredient, Options
from polythrottle.optimize.quantities import doubts, table
from polythrottle.optimize.surrogate import (
    QuantityPosterior,
    basis,
    expected,
    fit_posterior,
    fitted,
    noise_ahead,
    one_thread,
    posterior_at,
    prior_covariance,
    trials_root,
)
from polythrottle.optimize.transfer import transfer_posterior

# What is believed of each quantity at each point: a study, and what was known before it, as a posterior.
#
# Loads torch.


def study_posterior(study: Study, quantities: tuple[str, ...], options: Options) -> QuantityPosterior | None:
    """Return what the completed trials say of each quantity at each point; None if they say nothing.

    Trials that run, of which there is one per board where several search together, count as ended as they are expected
    to.
    """
    trials = [trial for trial in study.completed if trial.point in study.problem.space]
    measurements = [trial.measurement for trial in trials if trial.measurement]
    values = table(measurements, quantities)
    whole = np.isfinite(values).all(axis=1)
    seen = rows_of(study, trials)[whole]
    kept = [measurements[int(i)] for i in np.flatnonzero(whole)]
    prior = prior_mean(study, quantities, options)
    running = running_rows(study)
    told = values[whole] - prior.numpy()[seen]
    belief = posterior_given(study, seen, told, options, doubts(kept, quantities), running)
    if belief is None:
        return None
    found = QuantityPosterior(belief.mean + prior, belief.variance, belief.noise)
    if options.history:
        found = transfer_posterior(study, quantities, seen, kept, found, options.history)
    return found.foreseen(belief.left)


def running_rows(study: Study) -> Rows:
    """Return the row number of each point that a trial is at now, shape (running,)."""
    space = study.problem.space
    return rows_of(study, [each for each in study.trials if each.state is TrialState.RUNNING and each.point in space])


def posterior_given(
    study: Study,
    seen: Rows,
    values: Array,
    options: Options,
    doubt: Array | None = None,
    running: Rows | None = None,
) -> QuantityPosterior | None:
    """Return the posterior given values at some rows; None if there is none.

    Args:
        study: Whose space and seed they are of.
        seen: The rows, shape (trials,).
        values: Shape (trials, quantities).
        options: Which ingredients to leave out.
        doubt: The variance of each value that is known; None for none.
        running: Rows that are being measured now; None for none.
    """
    space = study.problem.space
    where = coordinates(space)
    functions = basis(space.knobs, where, options.without)
    try:
        if not len(seen):
            return None
        if doubt is None:
            doubt = np.zeros_like(values)
        return fit_posterior(where.unit, functions, seen, values, study.seed, doubt, running)
    except RuntimeError:  # what torch and gpytorch raise when a matrix cannot be decomposed
        return None


def rows_of(study: Study, trials: Sequence[Trial]) -> Rows:
    """Return the row number of each trial's point, shape (trials,)."""
    return np.array([study.problem.space.index(trial.point) for trial in trials], dtype=np.intp)


def prior_mean(study: Study, quantities: Sequence[str], options: Options) -> Tensor:
    """Return what physics expects of each quantity at each point up to a constant, shape (points, quantities)."""
    space = study.problem.space
    if options.without & {Ingredient.MEANS, Ingredient.TREND}:
        return torch.zeros((len(space), len(quantities)), dtype=torch.double)
    return torch.from_numpy(expected(space.knobs, coordinates(space), quantities))


# What the models of a study say, as plain arrays: for explaining, not for searching.
#
# Loads torch.


@dataclass(frozen=True, eq=False)
class PosteriorArrays:
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


def posterior_arrays(
    study: Study, quantities: Sequence[str], asked: Sequence[OperatingPoint]
) -> PosteriorArrays | None:
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
    return PosteriorArrays(mean[:size], variance[:size], mean[rows], covariance, noise, kept, missed)


def _widened(space: SearchSpace, asked: Sequence[OperatingPoint]) -> tuple[SearchSpace, Rows]:
    """Return the space with the points asked for added to its end, and their row numbers in it."""
    new = [point for point in dict.fromkeys(asked) if point not in space]
    added = [[knob.levels.index(point[knob.name]) for knob in space.knobs] for point in new]
    rows = np.vstack([space.rows, np.array(added, dtype=np.int32).reshape(len(new), len(space.knobs))])
    wide = SearchSpace.of_rows(space.knobs, rows, space.default)
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
        root = trials_root(model, inputs[seen], targets.shape[1])
        inverse = torch.cholesky_inverse(root)
        weights = inverse @ targets.T.unsqueeze(-1)
        missed = weights.squeeze(-1) / torch.diagonal(inverse, dim1=-2, dim2=-1)
        mean, variance = posterior_at(model, inputs, inputs[seen], targets, root)
        joint = _joint(model, inputs[asked], inputs[seen], inverse)
    mean = mean + torch.from_numpy(prior + centre)
    return tuple(_array(one) for one in (mean, variance, joint, noise_ahead(model, doubt), missed.T))


def _array(tensor: Tensor) -> Array:
    return np.asarray(tensor.detach().numpy(), dtype=float)


def _joint(model: SingleTaskGP, asked: Tensor, seen: Tensor, inverse: Tensor) -> Tensor:
    """Return the posterior covariance among the points asked for, shape (quantities, asked, asked)."""
    cross = prior_covariance(model, asked, seen)
    return prior_covariance(model, asked, asked) - cross @ inverse @ cross.mT
