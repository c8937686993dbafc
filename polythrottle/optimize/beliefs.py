"""What is believed of each quantity at each point: a study, and what was known before it, as a posterior.

Loads torch.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from polythrottle.optimize.features import Array, coordinates
from polythrottle.optimize.options import Ingredient, Options
from polythrottle.optimize.quantities import doubts, table
from polythrottle.optimize.remaining import Rows
from polythrottle.optimize.surrogate import Belief, believe
from polythrottle.optimize.transfer import informed
from polythrottle.optimize.trend import basis, expected
from polythrottle.study import Study, Trial


def measured(study: Study, quantities: tuple[str, ...], options: Options) -> Belief | None:
    """Return what the completed trials say of each quantity at each point; None if they say nothing."""
    trials = [trial for trial in study.completed if trial.point in study.problem.space]
    measurements = [trial.measurement for trial in trials if trial.measurement]
    values = table(measurements, quantities)
    whole = np.isfinite(values).all(axis=1)
    seen, kept = rows_of(study, trials)[whole], [measurements[int(i)] for i in np.flatnonzero(whole)]
    prior = prior_mean(study, quantities, options)
    belief = learnt(study, seen, values[whole] - prior.numpy()[seen], options, doubts(kept, quantities))
    cold = belief and Belief(belief.mean + prior, belief.variance, belief.noise)
    if cold is None or not options.history:
        return cold
    return informed(study, quantities, seen, kept, cold, options.history)


def learnt(study: Study, seen: Rows, values: Array, options: Options, doubt: Array | None = None) -> Belief | None:
    """Return the posterior given values at some rows; None if there is none.

    Args:
        study: Whose space and seed they are of.
        seen: The rows, shape (trials,).
        values: Shape (trials, quantities).
        options: Which ingredients to leave out.
        doubt: The variance of each value that is known; None for none.
    """
    space = study.problem.space
    where = coordinates(space)
    functions = basis(space.knobs, where, options.without)
    try:
        known = np.zeros_like(values) if doubt is None else doubt
        return believe(where.unit, functions, seen, values, study.seed, known) if len(seen) else None
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
