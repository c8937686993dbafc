"""What a search method may be told beside the study itself.

Earlier studies, risk and presets, and points to try first.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from polythrottle.domain.backports import StrEnum
from polythrottle.domain.errors import InvalidInput
from polythrottle.domain.ports import Chooser, Forecaster, Optimizer, RiskBound, Wary
from polythrottle.domain.space import Level, OperatingPoint, SearchSpace
from polythrottle.domain.study import Daring, Study, Trial
from polythrottle.domain.units import show_name, show_number

# What a search method may be told beside the study itself.


class Ingredient(StrEnum):
    """What the default search is made of; each can be left out to see what it is good for."""

    MEANS = "means"
    """Prior means of the trends' coefficients: what physics says before anything is measured."""
    TREND = "trend"
    """Trends at all: without them only distances count."""
    HINGES = "hinges"
    """Trends that may turn at quarters of a knob's range."""
    APART = "apart"
    """Time and draw modelled apart rather than energy at once."""
    CAP = "cap"
    """The cap on the risk of a trial while a feasible point is known."""


@dataclass(frozen=True)
class Options:
    """What a search method may be told beside the study itself; a method takes what it can use.

    Args:
        history: Earlier studies to learn from, of other workloads, other devices, or both.
        risk: Chance that a whole search may have of breaking a limit once feasible points are known, above 0 and at
            most 1; None leaves it to the method.
        presets: The vendor's named points.
        without: Ingredients of the default search to leave out, for ablations.

    Raises:
        InvalidInput: If the risk is out of range.
    """

    history: Sequence[Study] = field(default=())
    risk: float | None = None
    presets: Sequence[OperatingPoint] = field(default=())
    without: frozenset[Ingredient] = frozenset()

    def __post_init__(self) -> None:
        if self.risk is not None and not 0.0 < self.risk <= 1.0:
            raise InvalidInput(f"a risk is a chance above 0 and at most 1, not {self.risk:g}")


# Points to try first: what another board or an earlier firmware was tuned to, offered to any search method.

_OTHER_NAME_OCTAVES = 10.0  # further apart than any two clocks of one table


class WarmStart:
    """A search method that begins at the default, then at given points, and goes on as it would have.

    Args:
        method: Which.
        priors: Levels by knob; each stands for the nearest point of the space.
        origin: Where they come from, for people.
    """

    def __init__(self, method: Optimizer, priors: Sequence[Mapping[str, Level]], origin: str = "a profile") -> None:
        self._method = method
        self._priors = priors
        self._origin = origin

    def suggest(self, study: Study) -> OperatingPoint:
        """Return the default, then each prior's point, then what the method suggests.

        Raises:
            Exhausted: As the method does.
        """
        left = self._left(study)
        if left:
            return left[0]
        return self._method.suggest(study)

    def saving_left(self, study: Study) -> float:
        """Return what the method expects; inf while a prior is to be tried or nothing is known."""
        if self._left(study) or not isinstance(self._method, Forecaster):
            return math.inf
        return self._method.saving_left(study)

    def most_left(self, study: Study, answer: Trial) -> float:
        """Return what the method says; NaN if it says nothing."""
        if not hasattr(self._method, "most_left"):
            return math.nan
        return float(self._method.most_left(study, answer))

    def dares(self, study: Study) -> Daring:
        """Return what the method says; nothing while a prior is to be tried."""
        if self._left(study) or not isinstance(self._method, Wary):
            return Daring.NOTHING
        return self._method.dares(study)

    def held_back(self, study: Study) -> str:
        """Return what the method says; nothing while a prior is to be tried."""
        if self._left(study) or not isinstance(self._method, RiskBound):
            return ""
        return self._method.held_back(study)

    def answer(self, study: Study) -> Trial | None:
        """Return the trial the method chooses; by the figures alone where it chooses none itself.

        Raises:
            InvalidInput: If a relative limit has nothing to multiply.
        """
        if isinstance(self._method, Chooser):
            return self._method.answer(study)
        return study.best

    def words(self, space: SearchSpace) -> str:
        """Return in a line which points of a space come right after the default."""
        points = [
            ", ".join(f"{show_name(name)}={show_number(name, level)}" for name, level in point.items())
            for point in self._first(space)[1:]
        ]
        return f"offered by {self._origin} and tried right after the default: {'; '.join(points)}"

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
