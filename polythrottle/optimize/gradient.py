"""Gradient-descent multi-dimensional search in the manner of Fulcrum's GMD (arXiv 2509.20205): a rival without a model.

From the incumbent it measures, along each ordered knob in turn, the point half the remaining way towards the end that
last helped; the knob whose step saved most energy within the limits is followed further, and steps that do not help
are halved. Fulcrum reports about 15 profiled modes; its text is not public, so this is the idea, not its code.
"""

import numpy as np

from polythrottle.optimize.features import coordinates
from polythrottle.optimize.remaining import remaining_rows
from polythrottle.space import OperatingPoint
from polythrottle.study import Study, Trial


class GradientSearch:
    """Coordinate steps from the incumbent, halved when they do not help."""

    def suggest(self, study: Study) -> OperatingPoint:
        """Return the default point, then the next step from the best point so far.

        Raises:
            Exhausted: If every point has been tried.
        """
        space, rows = study.problem.space, remaining_rows(study)
        if space.default not in study.visited:
            return space.default
        unit = coordinates(space).unit
        start = unit[space.index(_incumbent(study).point)]
        tried = unit[[space.index(trial.point) for trial in study.trials]]
        targets = [_target(start, tried, column, sign) for column in range(unit.shape[1]) for sign in (-1.0, 1.0)]
        reach = [abs(target - start).max() for target in targets]
        target = targets[int(np.argmax(reach))] if targets else start
        return space[int(rows[np.argmin(np.square(unit[rows] - target).sum(axis=1))])]


def _incumbent(study: Study) -> Trial:
    """Return the best trial, or the one that breaks its limits least, or the first."""
    return study.best or study.closest or study.trials[0]


def _target(start: np.ndarray, tried: np.ndarray, column: int, sign: float) -> np.ndarray:
    """Return the point half-way along one axis between the incumbent and the nearest tried point or the end."""
    others = np.delete(tried, column, axis=1)
    same_line = np.isclose(others, np.delete(start, column), atol=1e-9).all(axis=1)
    ahead = sign * (tried[same_line, column] - start[column])
    end = (1.0 - start[column]) if sign > 0 else start[column]
    blocked = ahead[ahead > 1e-9]
    reach = float(blocked.min()) / 2 if len(blocked) else end / 2
    target: np.ndarray = start.copy()
    target[column] += sign * reach
    return target
