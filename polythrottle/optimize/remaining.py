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
    """Return the row numbers of the points that have not been tried, ascending, shape (remaining,).

    Points for which a knob would have to be set that the device turned out not to have are left out.
    """
    space = study.problem.space
    fresh = np.ones(len(space), dtype=bool)
    fresh[visited_rows(study)] = False
    for name in study.absent & set(space.names):
        column = space.names.index(name)
        fresh &= space.rows[:, column] == space.rows[default_row(space), column]
    return np.flatnonzero(fresh)


def remaining_rows(study: Study) -> Rows:
    """Return the row numbers of the points that have not been tried, ascending, shape (remaining,).

    Raises:
        Exhausted: If there is none.
    """
    rows = untried_rows(study)
    if not len(rows):
        without = f" that need no {' and no '.join(sorted(study.absent))}" if study.absent else ""
        count = len(study.visited) if study.absent else len(study.problem.space)
        raise Exhausted(f"all {count} points of the space{without} have been tried")
    return rows


def generator(study: Study) -> np.random.Generator:
    """Return the randomness of the next trial: a function of the study's seed and the trial's number alone."""
    return np.random.default_rng((study.seed % 2**63, len(study.trials)))


def default_row(space: SearchSpace) -> int:
    """Return the row number of the default point."""
    return space.index(space.default)
