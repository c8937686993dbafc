"""How sure pairs of measurements make us, looked at after every pair, as often as one likes.

The logarithms of the ratios of paired measurements are taken for normal around an unknown mean, their spread unknown
too. The interval inverts the t-test Bayes factor with a normal prior of variance g on the effect in units of that
spread (Rouder et al. 2009, Psychonomic Bulletin & Review 16, eq. 1 with a fixed g). Under the group of scale changes
this factor is an e-process, so that by Ville's inequality the interval holds at every look together, not only at one
fixed beforehand (Wang and Ramdas, Anytime-valid t-tests and confidence sequences for Gaussian means with unknown
variance, 2023, §4).
"""

import math
from collections.abc import Sequence
from statistics import fmean, stdev

from polythrottle.domain.measurement import Interval

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
