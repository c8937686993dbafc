"""How GPUs of one model differ: drawn for a simulation, calibrated on a node, and flagged where one stands out.

Five clusters of more than 18,800 hours showed that GPUs of one model differ in speed by 8 % on average over programs
and at most by 22 %, with outliers of half as fast again as the median (arXiv 2208.11035, SC'22). A factor here is the
time of a step over that of a node in the middle: 1.04 is 4 % slower.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from random import Random
from statistics import median

from polythrottle.errors import InvalidInput

TYPICAL, WORST = 0.08, 0.22
"""From the fastest to the slowest GPU of one model, without outliers: mean over programs, and most (SC'22)."""
OUTLIER = 1.5
"""How many times slower than the median the slowest outlier was (SC'22)."""
FLAG_MADS = 3.0
"""A node further than this from the middle of its type is named to people."""

_WHISKERS = 5.4  # a box plot's whiskers (quartiles ± 1.5 interquartile ranges) are this many standard deviations apart
_STEP = 0.0025
_LEAST_MAD = 0.005
FEWEST = 4
"""Fewer nodes have no middle worth the name."""


@dataclass(frozen=True)
class Silicon:
    """How the speeds of one type are spread: normal between the whiskers, with a few outliers.

    Attributes:
        spread: From the fastest to the slowest, as a fraction of the middle.
        outliers: Share of GPUs that are outliers, spread evenly up to ``OUTLIER`` times the middle's time.
    """

    spread: float = TYPICAL
    outliers: float = 0.0

    def __post_init__(self) -> None:
        if not (0 <= self.spread < 1 and 0 <= self.outliers <= 1):
            raise InvalidInput(f"a spread is in [0, 1) and a share in [0, 1], not {self.spread} and {self.outliers}")

    def draw(self, chance: Random) -> float:
        """Return the time factor of one GPU."""
        if self.outliers and chance.random() < self.outliers:
            return 1 + self.spread / 2 + chance.random() * (OUTLIER - 1 - self.spread / 2)
        side = self.spread / 2
        return 1 + min(side, max(-side, chance.gauss(0.0, self.spread / _WHISKERS)))


def grade(factor: float) -> int:
    """Return the class of a factor, in steps of a quarter of a per cent, rounded to the slower side.

    Nodes of one class are planned as one, so that a plan costs no more for a thousand nodes than for fifty.
    """
    return ceil(factor / _STEP - 1e-9)


def of_grade(number: int) -> float:
    """Return the factor a class stands for."""
    return number * _STEP


def calibrated(steps_s: Sequence[float], expected_s: float) -> float:
    """Return a node's factor from its windows: their median over what a node in the middle takes.

    Args:
        steps_s: Mean step time of each window, at the default clock, in seconds.
        expected_s: What the fleet knows of the type, in seconds.

    Raises:
        InvalidInput: If there is no window, or a time is not positive.
    """
    if not steps_s or expected_s <= 0 or min(steps_s) <= 0:
        raise InvalidInput("a node is calibrated from at least one window and times above 0 s")
    return median(steps_s) / expected_s


def flagged(factors: Mapping[str, float], mads: float = FLAG_MADS) -> dict[str, float]:
    """Return the nodes that stand out from their type, by how many median absolute deviations; slower is positive.

    Args:
        factors: Time factor of each node of one type.
        mads: From how many on.

    Returns:
        Nothing for fewer than four nodes: three have no middle worth the name.
    """
    if len(factors) < FEWEST:
        return {}
    middle = median(factors.values())
    # Half a per cent is what windows tell apart: a fleet of equals must not flag its noise.
    deviation = max(_LEAST_MAD, median(abs(each - middle) for each in factors.values()))
    away = {name: (each - middle) / deviation for name, each in factors.items()}
    return {name: each for name, each in away.items() if abs(each) > mads}
