"""Methods that do not learn: a random order, and a grid that is refined as it goes."""

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from polythrottle.optimize.remaining import default_row, generator, remaining_rows
from polythrottle.space import OperatingPoint, SearchSpace
from polythrottle.study import Study


class RandomOrder:
    """Random search without replacement, from the default point on."""

    def suggest(self, study: Study) -> OperatingPoint:
        """Return the default point, then any point that has not been tried, all equally likely.

        Raises:
            Exhausted: If every point has been tried.
        """
        space, rows = study.problem.space, remaining_rows(study)
        if space.default not in study.visited:
            return space.default
        return space[int(generator(study).choice(rows))]


class CoarseToFine:
    """Grid search: the default point, the corners, then the points half-way between, and so on.

    However early it is stopped, what it has seen spans the whole space. It has no randomness.
    """

    def suggest(self, study: Study) -> OperatingPoint:
        """Return the default point, then the first point of the refinement that has not been tried.

        Raises:
            Exhausted: If every point has been tried.
        """
        space, rows = study.problem.space, remaining_rows(study)
        order = _refinement(space)
        return space[int(rows[np.argmin(order[rows])])]


@lru_cache(maxsize=4)
def _refinement(space: SearchSpace) -> NDArray[np.intp]:
    """Return when each point's turn comes, shape (points,): 0 for the default, which is first."""
    depths = [_depth(len(knob.levels))[space.rows[:, k]] for k, knob in enumerate(space.knobs)]
    coarse = np.max(depths, axis=0) if depths else np.zeros(len(space), dtype=np.int64)
    coarse[default_row(space)] = -1
    turn = np.empty(len(space), dtype=np.intp)
    turn[np.argsort(coarse, kind="stable")] = np.arange(len(space))
    return turn


def _depth(levels: int) -> NDArray[np.int64]:
    """Return in which round of halving each level of a knob is first used, shape (levels,): 0 for both ends."""
    depth = np.zeros(levels, dtype=np.int64)
    gaps, round_ = [(0, levels - 1)], 0
    while gaps:
        round_ += 1
        middles = [(low, (low + high) // 2, high) for low, high in gaps if high - low > 1]
        depth[[middle for _, middle, _ in middles]] = round_
        gaps = [gap for low, middle, high in middles for gap in ((low, middle), (middle, high))]
    return depth
