"""What a trial at each point of a space is worth, given what a study has seen.

Loads torch; `bayes` imports it when a suggestion needs a model.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from polythrottle.optimize.acquisition import log_expected_improvement, log_probability_below
from polythrottle.optimize.beliefs import learnt, measured, prior_mean, rows_of
from polythrottle.optimize.features import Array
from polythrottle.optimize.options import Options
from polythrottle.optimize.quantities import DRAW, TIME, Bound, bound, names
from polythrottle.optimize.surrogate import Belief
from polythrottle.optimize.threads import one_thread
from polythrottle.problem import Constraint
from polythrottle.study import Study, TrialState

_FAILED = 0.3
"""What stands for a failure where the models' scales are those of logarithms: a third."""


@one_thread()
def log_worth(study: Study, constraints: Sequence[Constraint], options: Options) -> Array:
    """Return the logarithm of what a trial at each point is worth, shape (points,).

    It is log expected improvement of log energy per item + log probability of feasibility + log probability that the
    trial does not fail. While no feasible point is known there is nothing to improve on, and feasibility leads.

    Args:
        study: What has been seen.
        constraints: What must hold, with absolute limits.
        options: Earlier studies to learn from, and the risk a trial may take.

    Raises:
        InvalidInput: If a constraint is on a quantity that is not measured here.
    """
    best = _least_log_energy(study, constraints)
    bounds = [bound(constraint) for constraint in constraints]
    quantities = names(bounds)
    sound, belief = _log_sound(study), measured(study, quantities, options)
    if belief is None:
        return _array(sound - prior_mean(study, (TIME, DRAW)).sum(dim=1))
    feasible = _log_feasible(belief, quantities, bounds)
    mean, std = belief.mean[:, :2].sum(dim=1), belief.variance[:, :2].sum(dim=1).sqrt()
    gain = -mean if best is None else log_expected_improvement(mean, std, best)
    return _array(gain + feasible + sound)


def _array(worth: Tensor) -> Array:
    return np.asarray(worth.numpy(), dtype=float)


def _least_log_energy(study: Study, constraints: Sequence[Constraint]) -> float | None:
    """Return log energy per item of the best trial that holds the constraints; None if none does."""
    seen = [trial.measurement for trial in study.completed if trial.measurement is not None]
    held = [m.energy_j for m in seen if min((constraint.slack(m) for constraint in constraints), default=0.0) >= 0.0]
    return math.log(min(held)) if held else None


def _log_feasible(belief: Belief, quantities: tuple[str, ...], bounds: Sequence[Bound]) -> Tensor:
    """Return the log probability that a trial holds every bound, shape (points,), quantities taken as independent."""
    total = torch.zeros(len(belief.mean), dtype=torch.double)
    for one in bounds:
        k = quantities.index(one.quantity)
        std = (belief.variance[:, k] + belief.noise[k]).sqrt()
        total = total + log_probability_below(belief.mean[:, k], std, one.limit)
    return total


def _log_sound(study: Study) -> Tensor:
    """Return the log probability that a trial does not fail, shape (points,); 0 while none has failed.

    Failing is regressed on like any other quantity, from 0 for a trial that was measured to `_FAILED` for one that
    failed, and a point is sound below half of that (least-squares classification, Rasmussen & Williams 2006, §6.5).
    """
    ended = [
        trial for trial in study.trials if trial.state is not TrialState.RUNNING and trial.point in study.problem.space
    ]
    outcome = np.array([[_FAILED * (trial.state is TrialState.FAILED)] for trial in ended])
    belief = learnt(study, rows_of(study, ended), outcome) if outcome.any() else None
    if belief is None:
        return torch.zeros(len(study.problem.space), dtype=torch.double)
    return log_probability_below(belief.mean[:, 0], belief.variance[:, 0].sqrt(), _FAILED / 2.0)
