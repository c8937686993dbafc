"""Points to try first: what another board or an earlier firmware was tuned to, offered to any search method."""

import math
from collections.abc import Mapping, Sequence

import numpy as np

from polythrottle.ports import Chooser, Forecaster, Optimizer, Wary
from polythrottle.space import Level, OperatingPoint, SearchSpace
from polythrottle.study import Study, Trial
from polythrottle.units import show_name, show_number

_OTHER_NAME_OCTAVES = 10.0  # further apart than any two clocks of one table


class Primed:
    """A search method that begins at the default, then at given points, and goes on as it would have.

    Args:
        method: Which.
        priors: Levels by knob; each stands for the nearest point of the space.
    """

    def __init__(self, method: Optimizer, priors: Sequence[Mapping[str, Level]]) -> None:
        self._method, self._priors = method, priors

    def suggest(self, study: Study) -> OperatingPoint:
        """Return the default, then each prior's point, then what the method suggests.

        Raises:
            Exhausted: As the method does.
        """
        left = self._left(study)
        return left[0] if left else self._method.suggest(study)

    def saving_left(self, study: Study) -> float:
        """Return what the method expects; inf while a prior is to be tried or nothing is known."""
        if self._left(study) or not isinstance(self._method, Forecaster):
            return math.inf
        return self._method.saving_left(study)

    def dares(self, study: Study) -> bool:
        """Return whether the method does; never while a prior is to be tried."""
        return not self._left(study) and isinstance(self._method, Wary) and self._method.dares(study)

    def answer(self, study: Study) -> Trial | None:
        """Return the trial the method chooses; by the figures alone where it chooses none itself.

        Raises:
            InvalidInput: If a relative limit has nothing to multiply.
        """
        return self._method.answer(study) if isinstance(self._method, Chooser) else study.best

    def words(self, space: SearchSpace) -> str:
        """Return in a line which points of a space come right after the default."""
        points = [
            ", ".join(f"{show_name(name)}={show_number(name, level)}" for name, level in point.items())
            for point in self._first(space)[1:]
        ]
        return f"offered by a profile and tried right after the default: {'; '.join(points)}"

    def _first(self, space: SearchSpace) -> list[OperatingPoint]:
        return [space.default, *(nearest_point(space, prior) for prior in self._priors)]

    def _left(self, study: Study) -> list[OperatingPoint]:
        first = self._first(study.problem.space)
        return [point for point in first if point not in study.visited and study.reachable(point)]


def nearest_point(space: SearchSpace, levels: Mapping[str, Level]) -> OperatingPoint:
    """Return the point of a space nearest to some levels; knobs that are not named count at the default.

    Near is a small distance in octaves for numbers above zero, and the same name for names.

    Args:
        space: Any.
        levels: By knob; knobs the space does not have are ignored.
    """
    wanted = {**space.default, **levels}
    distance = np.zeros(len(space))
    for column, knob in enumerate(space.knobs):
        apart = np.array([_apart(level, wanted[knob.name]) for level in knob.levels])
        distance += apart[space.rows[:, column]] ** 2
    return space[int(distance.argmin())]


def _apart(level: Level, wanted: Level) -> float:
    if isinstance(level, str) or isinstance(wanted, str) or level <= 0 or wanted <= 0:
        return _OTHER_NAME_OCTAVES * (level != wanted)
    return math.log2(level / wanted)
