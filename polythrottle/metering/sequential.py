"""How sure pairs of measurements make us, looked at after every pair, as often as one likes.

The logarithms of the ratios of paired measurements are taken for normal around an unknown mean, their spread unknown
too. The interval inverts the t-test Bayes factor with a normal prior of variance g on the effect in units of that
spread (Rouder et al. 2009, Psychonomic Bulletin & Review 16, eq. 1 with a fixed g). Under the group of scale changes
this factor is an e-process, so that by Ville's inequality the interval holds at every look together, not only at one
fixed beforehand (Wang and Ramdas, Anytime-valid t-tests and confidence sequences for Gaussian means with unknown
variance, 2023, §4).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean, stdev

from polythrottle.domain.errors import InvalidInput
from polythrottle.domain.measurement import BETWEEN_WINDOWS, Interval

ALPHA = 0.05
PRIOR_VARIANCE = 10.0
"""Chosen for few pairs: an effect of four spreads is found after four of them."""


def half_width(count: int, spread: float, alpha: float = ALPHA) -> float:
    """Return how far the mean of so many values may lie from the truth, at every look together.

    Args:
        count: Of values.
        spread: Their sample standard deviation.
        alpha: The chance that the interval ever misses the truth.

    Returns:
        Half of the interval; inf while there are too few values to tell.
    """
    if count < 2:
        return math.inf
    freedom = count - 1
    ratio = 1.0 + count * PRIOR_VARIANCE
    raised = math.exp(2.0 / count * (math.log(1.0 / alpha) + 0.5 * math.log(ratio)))
    if raised >= ratio:
        return math.inf
    return math.sqrt(freedom * (raised - 1.0) / (1.0 - raised / ratio) / count) * spread


def interval(values: Sequence[float], alpha: float = ALPHA) -> Interval:
    """Return the interval of a mean that holds at every look together; infinite while there are too few values.

    Args:
        values: So far.
        alpha: The chance that it ever misses the truth.
    """
    if len(values) < 2:
        return Interval(-math.inf, math.inf)
    half = half_width(len(values), stdev(values), alpha)
    mean = fmean(values)
    return Interval(mean - half, mean + half)


@dataclass(frozen=True)
class RollbackTest:
    """Whether a new profile is worse than the old one, asked after each pair of samples: a sequential test.

    The logarithms of new over old of samples that alternate between the two are taken for Gaussian. By how much they
    differ is told by them alone (`polythrottle.metering.comparison`): what differs from one pair to the next is mostly
    the load, of which nothing is known beforehand, and a spread that is set too low rolls back good profiles. It is
    never taken for less than windows differ by, however alike the first few pairs happen to be.

    Args:
        harm: The share by which it may not be worse.
        wrongly: The chance to roll a good one back, and to keep for certain one that is worse by ``harm``.
        ratios: The logarithms so far.
    """

    harm: float = 0.02
    wrongly: float = 0.05
    ratios: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if not (self.harm > 0 and 0 < self.wrongly < 0.5):
            raise InvalidInput("a sequential test needs a harm above 0 and a chance below one half")

    def seen(self, new: float, old: float) -> RollbackTest:
        """Return the test after one more pair; a pair with a value that is not positive is not counted."""
        if not (0 < new < math.inf and 0 < old < math.inf):
            return self
        return replace(self, ratios=(*self.ratios, math.log(new / old)))

    @property
    def worse(self) -> bool | None:
        """Whether the new one is to be rolled back; None while that is not known."""
        if len(self.ratios) < 2:
            return None
        spread = max(math.sqrt(2) * BETWEEN_WINDOWS, stdev(self.ratios))
        half = half_width(len(self.ratios), spread, 2 * self.wrongly)  # each end is wrong half as often as both
        mean = math.fsum(self.ratios) / len(self.ratios)
        if mean - half > 0:
            return True
        if mean + half < math.log1p(self.harm):
            return False
        return None
