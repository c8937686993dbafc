"""Constrained Bayesian optimisation over a finite space: expected improvement × probability of feasibility.

After Gardner et al. 2014 (ICML), with energy per item modelled as power × time per item and every point of the space
scored. A suggestion is a function of the study alone.
"""

import warnings

import numpy as np
from numpy.typing import NDArray

from polythrottle.errors import InvalidInput
from polythrottle.optimize.options import Options
from polythrottle.optimize.remaining import generator, remaining_rows
from polythrottle.problem import Constraint
from polythrottle.space import OperatingPoint
from polythrottle.study import Study

_TIE = 0.1
"""Points worth less than a tenth below the best count as equals: the models are not surer than that."""


class ConstrainedBayes:
    """Constrained Bayesian optimisation, from the default point on.

    Args:
        options: Earlier studies to learn from, and the risk a trial may take.
    """

    def __init__(self, options: Options | None = None) -> None:
        self._options = options or Options()

    def suggest(self, study: Study) -> OperatingPoint:
        """Return the default point, then the point whose trial is worth most; the seed chooses between equals.

        Raises:
            Exhausted: If every point has been tried.
            InvalidInput: If a constraint is on a quantity that is not measured here.
        """
        space, rows = study.problem.space, remaining_rows(study)
        if space.default not in study.visited:
            return space.default
        if len(rows) == 1:
            return space[int(rows[0])]
        worth = np.nan_to_num(_log_worth(study, self._options)[rows], nan=-np.inf)
        ties = rows[worth >= worth.max() - _TIE]
        return space[int(generator(study).choice(ties))]


def _log_worth(study: Study, options: Options) -> NDArray[np.float64]:
    """Return the logarithm of what a trial at each point is worth, shape (points,).

    Warnings are held back: gpytorch's import uses deprecated parts of torch, and the models' inputs are not scaled the
    way BoTorch advises because they have units.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from polythrottle.optimize.worth import log_worth  # loads torch

        return log_worth(study, _constraints(study), options)


def _constraints(study: Study) -> tuple[Constraint, ...]:
    """Return the constraints with absolute limits; those that wait for the default's trial do not count yet."""
    try:
        return study.constraints
    except InvalidInput:
        return tuple(constraint for constraint in study.problem.constraints if not constraint.relative)
