"""What is to be improved on, as sums of modelled logarithms: energy, energy × delay, delay, or a front of both.

Loads torch.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from polythrottle.measurement import Measurement
from polythrottle.optimize.acquisition import log_expected_improvement
from polythrottle.optimize.front import log_improvement
from polythrottle.optimize.quantities import DRAW, TIME, Bound, table
from polythrottle.optimize.surrogate import Belief
from polythrottle.problem import Objective
from polythrottle.study import Study

_MARGIN = 0.1
"""How far beyond the front's worst its reference point lies, as a share of its extent, so that its ends count too."""
_LEAST_EXTENT = 0.01
Normal = tuple[Tensor, Tensor]
"""Mean and variance at each point, shape (points,) each."""


def delay(study: Study) -> str | None:
    """Return which latency the objective needs a model of, beside energy; None for energy alone."""
    objective = study.problem.objective
    if objective is Objective.PARETO:
        return study.front_metric
    return None if objective is Objective.ENERGY else "mean"


def terms(study: Study) -> tuple[str, ...]:
    """Return the quantities whose sum is the logarithm of the objective; of a front, that of energy."""
    objective = study.problem.objective
    if objective is Objective.LATENCY:
        return ("mean",)
    return (TIME, DRAW, "mean") if objective is Objective.EDP else (TIME, DRAW)


def log_objective(study: Study, belief: Belief, quantities: Sequence[str], energy: Normal) -> Normal:
    """Return mean and variance of the logarithm of what is minimised; of a front, that of energy.

    Args:
        study: Says what that is.
        belief: Of the quantities.
        quantities: Their names.
        energy: Mean and variance of log energy per item.
    """
    if study.problem.objective not in (Objective.EDP, Objective.LATENCY):
        return energy
    late = _of(belief, quantities, "mean")
    return late if study.problem.objective is Objective.LATENCY else (energy[0] + late[0], energy[1] + late[1])


def log_gain(
    study: Study,
    belief: Belief,
    quantities: Sequence[str],
    energy: Normal,
    held: Sequence[Measurement],
    bounds: Sequence[Bound],
) -> Tensor:
    """Return the log of what a trial is expected to improve, shape (points,).

    For one objective that is its logarithm; for a front it is the area below the front of log energy over log latency,
    per unit of the latter, so that both are shares of an energy.

    Args:
        study: Says what is minimised.
        belief: Of the quantities.
        quantities: Their names.
        energy: Mean and variance of log energy per item.
        held: What was seen at the trials that hold the limits, at least one.
        bounds: The limits; beyond one on the front's latency nothing counts.
    """
    objective = study.problem.objective
    if objective is not Objective.PARETO:
        mean, variance = log_objective(study, belief, quantities, energy)
        best = min(objective.of(one) for one in held)
        return log_expected_improvement(mean, variance.sqrt(), math.log(best))
    late = _of(belief, quantities, study.front_metric)
    mean, std = torch.stack([late[0], energy[0]], dim=1), torch.stack([late[1], energy[1]], dim=1).sqrt()
    parts = torch.from_numpy(table(held, (study.front_metric, TIME, DRAW)))
    seen = torch.stack([parts[:, 0], parts[:, 1] + parts[:, 2]], dim=1)
    limit = min((one.limit for one in bounds if one.quantity == study.front_metric), default=math.inf)
    reference, extent = _reference(mean, seen, limit)
    return log_improvement(mean, std, seen, reference) - extent[0].log()


def _of(belief: Belief, quantities: Sequence[str], name: str) -> Normal:
    k = list(quantities).index(name)
    return belief.mean[:, k], belief.variance[:, k]


def _reference(mean: Tensor, seen: Tensor, limit: float) -> tuple[Tensor, Tensor]:
    """Return a point worse than the whole front, as seen and as foretold, and the front's extent; shape (2,) each.

    The front reaches from the fastest point to the one of least energy: the worst of these two in each quantity, but
    no latency beyond its limit.
    """
    ends = torch.cat([seen, mean[mean.argmin(dim=0)]])
    worst, best = ends.max(dim=0).values, ends.min(dim=0).values
    reference = worst + _MARGIN * (worst - best).clamp_min(_LEAST_EXTENT)
    reference = torch.minimum(reference, reference.new_tensor([limit, math.inf]))
    return reference, (reference - best).clamp_min(_LEAST_EXTENT)
