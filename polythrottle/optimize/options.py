"""What a search method may be told beside the study itself."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from polythrottle.backports import StrEnum
from polythrottle.errors import InvalidInput
from polythrottle.space import OperatingPoint
from polythrottle.study import Study


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
