"""What a trial at each point of a space is worth, given what a study has seen.

Loads torch; `bayes` imports it when a suggestion needs a model.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from polythrottle.measurement import Measurement
from polythrottle.optimize.acquisition import log_probability_below
from polythrottle.optimize.beliefs import learnt, measured, prior_mean, rows_of
from polythrottle.optimize.features import Array
from polythrottle.optimize.goal import delay, log_gain, log_objective, terms
from polythrottle.optimize.options import Ingredient, Options
from polythrottle.optimize.quantities import ENERGY, Bound, bound, names
from polythrottle.optimize.surrogate import Belief
from polythrottle.optimize.threads import one_thread
from polythrottle.problem import Constraint
from polythrottle.study import Study, TrialState

WIDER = 1.5
"""Models of few trials are surer than they should be: deviations are this much wider where a limit must not break."""
_FAILED = 0.3
"""What stands for a failure where the models' scales are those of logarithms: a third."""


@dataclass(frozen=True, eq=False)
class Worth:
    """What a trial at each point promises; logarithms, shape (points,) each.

    Args:
        gain: Expected improvement of the log objective, of a front per unit of log latency; while no feasible point is
            known, less the log objective.
        feasible: Probability that it holds every limit, model's doubt and noise counted.
        sound: Probability that it does not fail.
        improving: Whether there is a feasible trial to improve on.
        assured: As ``feasible``, with the doubt widened by `WIDER`: for searches that must not break a limit.
    """

    gain: Array
    feasible: Array
    sound: Array
    improving: bool
    assured: Array

    @property
    def total(self) -> Array:
        """Gain, if it holds and does not fail."""
        return self.gain + self.feasible + self.sound


@one_thread()
def appraise(study: Study, constraints: Sequence[Constraint], options: Options) -> Worth:
    """Return what a trial at each point is worth.

    While no feasible point is known there is nothing to improve on, and feasibility leads.

    Args:
        study: What has been seen.
        constraints: What must hold, with absolute limits.
        options: Earlier studies to learn from, and which ingredients to leave out.

    Raises:
        InvalidInput: If a constraint is on a quantity that is not measured here.
    """
    held = _held(study, constraints)
    bounds = [bound(constraint) for constraint in constraints]
    quantities = modelled(bounds, delay(study), options)
    sound, belief = _log_sound(study, options), measured(study, quantities, options)
    if belief is None:
        gain = -prior_mean(study, terms(study), options).sum(dim=1)
        unknown = np.zeros(len(gain))
        return Worth(_array(gain), unknown, _array(sound), improving=False, assured=unknown)
    feasible = _log_feasible(belief, quantities, bounds)
    energy = log_energy(belief, options)
    if held:
        gain = log_gain(study, belief, quantities, energy, held, bounds)
    else:
        gain = -log_objective(study, belief, quantities, energy)[0]
    assured = _array(_log_feasible(belief, quantities, bounds, WIDER))
    return Worth(_array(gain), _array(feasible), _array(sound), improving=bool(held), assured=assured)


def modelled(bounds: Sequence[Bound], delay: str | None, options: Options) -> tuple[str, ...]:
    """Return every quantity to model; without keeping time and draw apart, energy for itself is the last."""
    found = tuple(dict.fromkeys((*names(bounds), *(() if delay is None else (delay,)))))
    return found if Ingredient.APART not in options.without else (*found, ENERGY)


def log_energy(belief: Belief, options: Options) -> tuple[Tensor, Tensor]:
    """Return mean and variance of log energy per item, shape (points,) each."""
    return belief.energy if Ingredient.APART not in options.without else (belief.mean[:, -1], belief.variance[:, -1])


def _array(worth: Tensor) -> Array:
    return np.asarray(worth.numpy(), dtype=float)


def _held(study: Study, constraints: Sequence[Constraint]) -> list[Measurement]:
    """Return what was seen at the trials that hold the constraints."""
    seen = [trial.measurement for trial in study.completed if trial.measurement is not None]
    return [m for m in seen if min((constraint.slack(m) for constraint in constraints), default=0.0) >= 0.0]


def _log_feasible(belief: Belief, quantities: tuple[str, ...], bounds: Sequence[Bound], wider: float = 1.0) -> Tensor:
    """Return the log probability that a trial holds every bound, shape (points,), quantities taken as independent."""
    total = torch.zeros(len(belief.mean), dtype=torch.double)
    for one in bounds:
        k = quantities.index(one.quantity)
        std = wider * (belief.variance[:, k] + belief.noise[k]).sqrt()
        total = total + log_probability_below(belief.mean[:, k], std, one.limit)
    return total


def _log_sound(study: Study, options: Options) -> Tensor:
    """Return the log probability that a trial does not fail, shape (points,); 0 while none has failed.

    Failing is regressed on like any other quantity, from 0 for a trial that was measured to `_FAILED` for one that
    failed, and a point is sound below half of that (least-squares classification, Rasmussen & Williams 2006, §6.5).
    """
    ended = [
        trial
        for trial in study.trials
        if trial.state is not TrialState.RUNNING and trial.absent is None and trial.point in study.problem.space
    ]
    outcome = np.array([[_FAILED * (trial.state is TrialState.FAILED)] for trial in ended])
    belief = learnt(study, rows_of(study, ended), outcome, options) if outcome.any() else None
    if belief is None:
        return torch.zeros(len(study.problem.space), dtype=torch.double)
    return log_probability_below(belief.mean[:, 0], belief.variance[:, 0].sqrt(), _FAILED / 2.0)
