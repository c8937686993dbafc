"""Constrained Bayesian optimisation over a finite space: expected improvement × probability of feasibility.

After Gardner et al. 2014 (ICML), with energy per item modelled as power × time per item and every point of the space
scored. A suggestion is a function of the study alone.
"""

import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

from polythrottle.errors import InvalidInput
from polythrottle.optimize.choice import beyond_caps, equals
from polythrottle.optimize.options import Options
from polythrottle.optimize.remaining import generator, remaining_rows, untried_rows
from polythrottle.problem import Constraint, Objective
from polythrottle.space import OperatingPoint
from polythrottle.study import Study, Trial

if TYPE_CHECKING:
    from polythrottle.optimize.worth import Worth


class ConstrainedBayes:
    """Constrained Bayesian optimisation, from the default point on.

    Args:
        options: Earlier studies to learn from, the risk a trial may take, and ingredients to leave out.
    """

    def __init__(self, options: Options | None = None) -> None:
        self._options = options or Options()
        self._newest: tuple[Study, Worth] | None = None

    def suggest(self, study: Study) -> OperatingPoint:
        """Return the default point, then the point whose trial is worth most; the seed chooses between equals.

        Raises:
            Exhausted: If every point has been tried, or none that is left is within the risk that was asked for.
            InvalidInput: If a constraint is on a quantity that is not measured here.
        """
        space, rows = study.problem.space, remaining_rows(study)
        if space.default not in study.visited:
            return space.default
        if len(rows) == 1 and self._options.risk is None:
            return space[int(rows[0])]
        return space[int(generator(study).choice(equals(self._worth(study), rows, self._options)))]

    def saving_left(self, study: Study) -> float:
        """Return what one more trial is expected to take off the objective; inf while that is unknown or a front."""
        best, rows = study.best, untried_rows(study)
        objective = study.problem.objective
        if best is None or best.measurement is None or objective is Objective.PARETO:
            return math.inf
        if not len(rows):
            return 0.0
        worth = self._worth(study)
        if not worth.improving:
            return math.inf
        return objective.of(best.measurement) * math.exp(min(float(np.nanmax(worth.total[rows])), 0.0))

    def dares(self, study: Study) -> bool:
        """Return whether the next point is beyond every cap on risk, as where nothing is to be gained within them."""
        rows = untried_rows(study)
        if not len(rows) or not (worth := self._worth(study)).improving or self._options.risk is not None:
            return False
        return beyond_caps(worth, equals(worth, rows, self._options))

    def answer(self, study: Study) -> Trial | None:
        """Return the trial whose point is best as the models have it; None if no trial holds every limit.

        Of windows that differ by chance the luckiest is rarely at the best point. What is on record, which has no
        intervals, does not: there it is the least figure.

        Raises:
            InvalidInput: If a relative limit has nothing to multiply.
        """
        held = {trial.point for trial in study.completed if study.feasible(trial)}
        by_chance = any(trial.measurement and trial.measurement.intervals for trial in study.completed)
        if len(held) < 2 or not by_chance:
            return study.best
        with _quiet():
            from polythrottle.optimize.answer import likeliest  # loads torch

            return likeliest(study, self._options)

    def _worth(self, study: Study) -> "Worth":
        """Return what a trial at each point is worth; remembered, because a study is asked about more than once."""
        if self._newest is None or self._newest[0] is not study:
            self._newest = study, _appraise(study, self._options)
        return self._newest[1]


def _appraise(study: Study, options: Options) -> "Worth":
    """Return what a trial at each point is worth."""
    with _quiet():
        from polythrottle.optimize.worth import appraise  # loads torch

        return appraise(study, _constraints(study), options)


@contextmanager
def _quiet() -> Iterator[None]:
    """Hold warnings back.

    The import of gpytorch uses deprecated parts of torch, and the models' inputs are not scaled the way BoTorch advises
    because they have units.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _constraints(study: Study) -> tuple[Constraint, ...]:
    """Return the constraints with absolute limits; those that wait for the default's trial do not count yet."""
    try:
        return study.constraints
    except InvalidInput:
        return tuple(constraint for constraint in study.problem.constraints if not constraint.relative)
