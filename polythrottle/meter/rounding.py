"""What a meter that shows whole steps hides of a slope: two levels that nothing stirs are each off by half a step."""

import math

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
_FEWEST, _PLACES, _WHOLE = 5, 4, 0.01
_HALF = 1.349
"""In how many deviations the shortest interval lies that holds half of a normal distribution."""
_KEPT = 0.85
"""How many of the readings show the noise: those at edges, far off the line, would make too much of it."""


def step_of(values: Array) -> float:
    """Return the largest step of which all values can be multiples, some constant aside; 0 if there is none.

    Where only few values are seen, what lies between them says little: then they are multiples themselves. The true
    step is that or a fraction of it, so that what is hidden is rather overestimated.

    Args:
        values: Shape (values,).
    """
    seen = np.unique(values)
    if len(seen) < _FEWEST:
        return _shared(seen)
    apart = np.diff(seen)
    step = float(apart.min())
    return step if _whole(apart / step) else _shared(apart)


def _shared(values: Array) -> float:
    """Return the greatest number of few decimal places of which all are multiples; 0 if there is none."""
    for places in range(_PLACES + 1):
        turns = values * 10**places
        if _whole(turns):
            return math.gcd(*np.round(turns).astype(int).tolist()) / float(10**places)
    return 0.0


def _whole(turns: Array) -> bool:
    return bool(np.all(np.abs(turns - np.round(turns)) < _WHOLE))


def slope_variance(step_w: float, meter_w: Array, shown_w: Array, rest_w: Array) -> float:
    """Return the variance that a meter's rounding adds to a slope, of which the residuals show nothing.

    The slope goes through two levels, idle and working. Each is off by anything up to half a step, and less the more
    noise and changing power stir it (Widrow and Kollar, Quantization Noise, 2008, chapter 5: the first harmonic).

    Args:
        step_w: Of the meter; 0 if it has none.
        meter_w: What the meter shows, shape (readings,).
        shown_w: The device's power as the meter would see it, likewise.
        rest_w: What the line through the two leaves, likewise.
    """
    high = shown_w > (shown_w.max() + shown_w.min()) / 2
    if step_w == 0 or high.all() or not high.any():
        return 0.0
    apart_w = float(np.median(shown_w[high]) - np.median(shown_w[~high]))
    slope = float(np.median(meter_w[high]) - np.median(meter_w[~high])) / apart_w
    off = sum(_off_w2(step_w, slope * shown_w[each], rest_w[each]) for each in (high, ~high))
    return off / apart_w**2


def _off_w2(step_w: float, level_w: Array, rest_w: Array) -> float:
    """Return the variance of the mean of readings around one level."""
    ordered, half = np.sort(level_w), len(level_w) // 2
    wander_w = float((ordered[half:] - ordered[: len(ordered) - half]).min()) / _HALF
    nearest_w2 = np.sort(rest_w**2)[: math.ceil(_KEPT * len(rest_w))]
    noise_w2 = max(0.0, float(np.mean(nearest_w2)) - step_w**2 / 12)
    stirred = (wander_w**2 + noise_w2) / step_w**2
    return step_w**2 / 12 * math.exp(-4 * math.pi**2 * stirred)
