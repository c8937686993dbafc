"""Where in a meter's log a self-test lies: the clock of a meter says little, so the two are laid over each other."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from polythrottle.errors import InvalidInput
from polythrottle.meter.trailing import Slowness, Trace

Array = NDArray[np.float64]
Spectrum = NDArray[np.complex128]
_FINEST_S, _MOST_SHIFTS = 0.02, 200_000
_AS_GOOD, _MOSTLY, _STILL = 0.02, 0.8, 1e-9
_LAGS = (0.0, 0.01, 0.03, 0.1)
"""What a meter's lag may roughly be, as a share of the record."""


@dataclass(frozen=True)
class Overlay:
    """How a record lies in a log.

    Args:
        shift_s: By how much the meter's clock is ahead, roughly.
        lag_s: How slowly the meter follows, roughly.
        correlation: Between the two then; None if one of the two does not move wherever they overlap.
        covered_s: How much of the record the log covers.
    """

    shift_s: float
    lag_s: float
    correlation: float | None
    covered_s: float


def overlay(trace: Trace, meter: Array, period_s: float) -> Overlay:
    """Return where a record and a log go together best; of several such places, the one with the longest overlap.

    Args:
        trace: Of the device.
        meter: Times in seconds and watts, shape (readings, 2).
        period_s: Between two readings of the meter.

    Raises:
        InvalidInput: If the log is too long to look through.
    """
    length_s, step_s = float(meter[-1, 0] - meter[0, 0]), max(period_s / 2, _FINEST_S)
    if (length_s + trace.length_s) / step_s > _MOST_SHIFTS:
        raise InvalidInput(
            f"the meter's log is {length_s / 3600:.1f} h long; cut it down to the time around the self-test, and see "
            f"that its times are in seconds"
        )
    shown_w = np.interp(np.arange(0.0, length_s + step_s / 2, step_s) + meter[0, 0], *meter.T)
    found = [
        each
        for share in _LAGS
        for each in _overlays(trace, Slowness(share * trace.length_s, 1), shown_w, float(meter[0, 0]), step_s)
    ]
    rated = [each for each in found if each.correlation is not None]
    if not rated:
        return max(found, key=lambda each: each.covered_s)
    best = max(each.correlation or 0.0 for each in rated)
    longest_s = max(each.covered_s for each in rated if (each.correlation or 0.0) >= best - _AS_GOOD)
    return max(
        (each for each in rated if each.covered_s >= _MOSTLY * longest_s), key=lambda each: each.correlation or 0.0
    )


def _overlays(trace: Trace, slow: Slowness, shown_w: Array, begin_s: float, step_s: float) -> Sequence[Overlay]:
    """Return how both go together wherever they overlap by half, if the meter is so slow."""
    at_s = np.arange(trace.begin_s, trace.end_s, step_s)
    ours_w = trace.shown_w(at_s, slow, np.zeros_like(at_s))
    turns, counts, correlations = _correlations(shown_w, ours_w)
    kept = counts >= min(len(shown_w), len(ours_w)) / 2
    return [
        Overlay(begin_s + turn * step_s - trace.begin_s, slow.lag_s, None if np.isnan(value) else value, count * step_s)
        for turn, count, value in zip(*(each[kept].tolist() for each in (turns, counts, correlations)), strict=True)
    ]


def _correlations(long: Array, short: Array) -> tuple[Array, Array, Array]:
    """Return shifts of one series over another, how many values overlap then, and the correlation of those.

    All sums over all overlaps at once, by Fourier transforms; a correlation is not a number where one does not move.
    """
    size = len(long) + len(short)
    ones = np.fft.rfft(np.ones(len(long)), size), np.fft.rfft(np.ones(len(short)), size)
    (x, xx), (y, yy) = (_moments(each, size) for each in (long, short))

    def over(ours: Spectrum, theirs: Spectrum) -> Array:
        return np.asarray(np.fft.irfft(ours * np.conj(theirs), size))

    count = np.maximum(np.round(over(ones[0], ones[1])), 1.0)
    sum_x, sum_y = over(x, ones[1]), over(ones[0], y)
    spread = (over(xx, ones[1]) - sum_x**2 / count) * (over(ones[0], yy) - sum_y**2 / count)
    together = over(x, y) - sum_x * sum_y / count
    moves = spread > (_STILL * count) ** 2
    found = np.where(moves, together / np.sqrt(np.where(moves, spread, 1.0)), np.nan)
    places = np.arange(size)
    return np.where(places < len(long), places, places - size).astype(float), count, found


def _moments(values: Array, size: int) -> tuple[Spectrum, Spectrum]:
    """Return the transforms of a series, brought to mean 0 and deviation 1, and of its square."""
    scaled = (values - values.mean()) / (values.std() or 1.0)
    return np.fft.rfft(scaled, size), np.fft.rfft(scaled**2, size)
