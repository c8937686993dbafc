"""What is left to try, and the first thing every method tries."""

import numpy as np
from numpy.typing import NDArray

from polythrottle.errors import Exhausted
from polythrottle.space import SearchSpace
from polythrottle.study import Study

Rows = NDArray[np.intp]


def visited_rows(study: Study) -> list[int]:
    """Return the row numbers of the points that have been tried, ascending."""
    space = study.problem.space
    return sorted(space.index(point) for point in study.visited if point in space)


def untried_rows(study: Study) -> Rows:
    """Return the row numbers of the points that have not been tried, ascending, shape (remaining,)."""
    fresh = np.ones(len(study.problem.space), dtype=bool)
    fresh[visited_rows(study)] = False
    return np.flatnonzero(fresh)


def remaining_rows(study: Study) -> Rows:
    """Return the row numbers of the points that have not been tried, ascending, shape (remaining,).

    Raises:
        Exhausted: If there is none.
    """
    rows = untried_rows(study)
    if not len(rows):
        raise Exhausted(f"all {len(study.problem.space)} points of the space have been tried")
    return rows


def generator(study: Study) -> np.random.Generator:
    """Return the randomness of the next trial: a function of the study's seed and the trial's number alone."""
    return np.random.default_rng((study.seed % 2**63, len(study.trials)))


def default_row(space: SearchSpace) -> int:
    """Return the row number of the default point."""
    return space.index(space.default)
