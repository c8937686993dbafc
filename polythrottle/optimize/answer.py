"""Which of the points that were visited is the answer, as the models have it.

The least of many figures that differ by chance is too low, and rarely that of the best point (the optimizer's curse:
Smith & Winkler, Management Science 52, 2006). The models know every window, how far each is to be trusted, and what its
neighbours saw, so that what they expect at a point has less of its own window's luck.

Loads torch.
"""

from collections.abc import Sequence

import numpy as np

from polythrottle.optimize.beliefs import measured, rows_of
from polythrottle.optimize.features import Array
from polythrottle.optimize.goal import delay, log_objective
from polythrottle.optimize.options import Options
from polythrottle.optimize.quantities import bound
from polythrottle.optimize.threads import one_thread
from polythrottle.optimize.worth import log_energy, modelled
from polythrottle.study import Study, Trial


@one_thread()
def likeliest(study: Study, options: Options) -> Trial | None:
    """Return the trial whose point the models expect to be best of those that held every limit.

    A point at which they expect a limit to be broken, although its own window held it, is none unless all are so. Of a
    front it is the point of least energy.

    Args:
        study: What has been seen; every limit has an absolute value.
        options: Earlier studies to learn from, and which ingredients to leave out.

    Raises:
        InvalidInput: If a relative limit has nothing to multiply.
    """
    held = [trial for trial in study.completed if study.feasible(trial) and trial.point in study.problem.space]
    cost = _expected(study, held, options)
    if cost is None or not np.isfinite(cost).any():
        return study.best
    return held[int(np.argmin(cost))]


def _expected(study: Study, trials: Sequence[Trial], options: Options) -> Array | None:
    """Return the objective's logarithm as expected at each trial's point, inf where a limit is expected to be broken.

    Its shape is (trials,); None if there are no models.
    """
    bounds = [bound(constraint) for constraint in study.constraints]
    quantities = modelled(bounds, delay(study), options)
    belief = measured(study, quantities, options)
    if belief is None or not trials:
        return None
    rows, mean = rows_of(study, trials), belief.mean.numpy()
    cost = log_objective(study, belief, quantities, log_energy(belief, options))[0].numpy()
    broken = [mean[rows, quantities.index(one.quantity)] > one.limit for one in bounds]
    return np.asarray(np.where(np.any(broken, axis=0), np.inf, cost[rows]), dtype=float)
