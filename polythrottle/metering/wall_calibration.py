"""A device's joules against those of a wall meter: the log's shift in time, the factor, and how sure it is."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from polythrottle.domain.errors import InvalidInput
from polythrottle.domain.ports import Sensor
from polythrottle.metering.calibration import PHASES
from polythrottle.metering.intervals import Student, half_width
from polythrottle.metering.lag_model import FITTED, EnergyCurve, Line, MeterLag, lagging, line_between, step_of

# Where in a meter's log a self-test lies: the clock of a meter says little, so the two are laid over each other.

Array = NDArray[np.float64]
Spectrum = NDArray[np.complex128]
_FINEST_S = 0.02
_MOST_SHIFTS = 200_000
_AS_GOOD = 0.02
_LEAST_OVERLAP = 0.8
_STILL = 1e-9
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


def overlay(trace: EnergyCurve, meter: Array, period_s: float) -> Overlay:
    """Return where a record and a log go together best; of several such places, the one with the longest overlap.

    Args:
        trace: Of the device.
        meter: Times in seconds and watts, shape (readings, 2).
        period_s: Between two readings of the meter.

    Raises:
        InvalidInput: If the log is too long to look through.
    """
    length_s = float(meter[-1, 0] - meter[0, 0])
    step_s = max(period_s / 2, _FINEST_S)
    if (length_s + trace.length_s) / step_s > _MOST_SHIFTS:
        raise InvalidInput(
            f"the meter's log is {length_s / 3600:.1f} h long; cut it down to the time around the self-test, and see "
            f"that its times are in seconds"
        )
    shown_w = np.interp(np.arange(0.0, length_s + step_s / 2, step_s) + meter[0, 0], *meter.T)
    found = [
        each
        for share in _LAGS
        for each in _overlays(trace, MeterLag(share * trace.length_s, 1), shown_w, float(meter[0, 0]), step_s)
    ]
    rated = [each for each in found if each.correlation is not None]
    if not rated:
        return max(found, key=lambda each: each.covered_s)
    best = max(each.correlation or 0.0 for each in rated)
    longest_s = max(each.covered_s for each in rated if (each.correlation or 0.0) >= best - _AS_GOOD)
    return max(
        (each for each in rated if each.covered_s >= _LEAST_OVERLAP * longest_s),
        key=lambda each: each.correlation or 0.0,
    )


def _overlays(trace: EnergyCurve, slow: MeterLag, shown_w: Array, begin_s: float, step_s: float) -> Sequence[Overlay]:
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
    sum_x = over(x, ones[1])
    sum_y = over(ones[0], y)
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


# A device's joules against those of an external meter: a factor, how sure it is, and what the meter sees besides.
#
# A straight line goes through both powers; its slope is the factor. A constant, such as a fan or a carrier board the
# sensor does not see, is shown and left out: it does not depend on the point. Meters are slow and have clocks of
# their own, which is part of what is fitted (`polythrottle.metering.lag_model`). The two-run shape, record and then
# compare, is that of MLPerf Power.

_LEAST_PAIRS = 10
_LEAST_CORRELATION = 0.8
_LEAST_COVERED = 0.8
_FACTORS = (0.2, 5.0)
"""What a factor can be: no supply wastes four fifths, and a sensor that sees less than a fifth is none."""
_MOST_HALF = 0.05
_AIMED_HALF = 0.04
"""The widest 95 % interval with which a factor is applied, and the one that is aimed at, as fractions."""
_SLOWEST = 0.6
_LONG_ENOUGH = 3.0
_LONGEST_S = 600.0
"""How slow a meter may be, as a share of a phase, and how many times that a phase should last."""
_SURE = 1.96
_MOSTLY = 0.7
"""The share of a deviation that is half of its variance."""


@dataclass(frozen=True)
class WallFit:
    """A device's power against that of an external meter.

    Args:
        factor: What the device's joules are multiplied by.
        factor_sd: One standard deviation of it, as a fraction.
        constant_w: What the meter sees besides, whatever the load.
        residual_w: Deviation of single readings from the line.
        shift_s: By how much the meter's clock is ahead, a delay included.
        lag_s: How slowly the meter follows, beyond the device's own sensor.
        pairs: Of how many readings of the meter that is made.
        correlation: Between the two.
    """

    factor: float
    factor_sd: float
    constant_w: float
    residual_w: float
    shift_s: float
    lag_s: float
    pairs: int
    correlation: float

    @property
    def half(self) -> float:
        """How far the factor may be off, as a fraction, with 95 % probability."""
        return _SURE * self.factor_sd

    def applied(self, sensor: Sensor, name: str) -> Sensor:
        """Return a sensor with this factor.

        Args:
            sensor: Before.
            name: Of the meter's log.
        """
        return replace(sensor, factor=self.factor, factor_sd=self.factor_sd, source=f"wall meter, {name}")


def fit_wall(device: Sequence[tuple[float, float]], wall: Sequence[tuple[float, float]], lag_s: float = 0.0) -> WallFit:
    """Return how a device's power goes with that of an external meter.

    Args:
        device: Times in seconds and running total of joules, in order: of a self-test, idle and loaded by turns.
        wall: Times in seconds, of whatever clock, and watts; one a second is enough.
        lag_s: Time constant with which the device's own sensor follows.

    Raises:
        InvalidInput: If they have too little in common to say, the meter is too slow for the phases, or the factor is
            none that can be or not known well enough.
    """
    energy = np.array(device, dtype=float)
    meter = np.array(wall, dtype=float)
    _see_that_they_tell(energy, meter)
    period_s = float(np.median(np.diff(meter[:, 0])))
    trace = EnergyCurve(energy, period_s)
    place = overlay(trace, meter, period_s)
    _see_that_they_go_together(place, trace.length_s)
    reach_s = 2 * period_s + place.lag_s
    length_s = trace.length_s
    begin_s = trace.begin_s + place.shift_s - reach_s
    end_s = trace.end_s + place.shift_s + reach_s
    near = meter[(meter[:, 0] >= begin_s) & (meter[:, 0] <= end_s)]
    shifts_s = place.shift_s - reach_s, place.shift_s + reach_s
    step_w = step_of(meter[:, 1])
    phase_s = length_s / PHASES
    line = line_between(trace, lagging(near, lag_s), shifts_s, phase_s, phase_s / 2, step_w)
    if line is None or line.readings < _LEAST_PAIRS - 1:
        raise InvalidInput(f"the meter's log has fewer than {_LEAST_PAIRS} readings in the time of the self-test")
    return _checked(line, phase_s, step_w)


def _see_that_they_tell(energy: Array, meter: Array) -> None:
    """Raise InvalidInput if nothing can be learnt from them."""
    if len(energy) < _LEAST_PAIRS or len(meter) < _LEAST_PAIRS:
        raise InvalidInput(f"a calibration needs {_LEAST_PAIRS} readings of both, not {len(energy)} and {len(meter)}")
    if np.any(np.diff(meter[:, 0]) <= 0) or not np.all(np.isfinite(meter)):
        raise InvalidInput("the meter's times must rise, and its powers be numbers")
    if np.any(meter[:, 1] < 0):
        raise InvalidInput("the meter shows less than 0 W; see whether its clamp is the wrong way round")
    if np.any(np.diff(energy[:, 0]) <= 0) or not np.all(np.isfinite(energy)):
        raise InvalidInput("the self-test's times do not rise; run polythrottle calibrate again")
    _see_that_it_covers(float(meter[-1, 0] - meter[0, 0]), float(energy[-1, 0] - energy[0, 0]))
    if np.ptp(meter[:, 1]) == 0:
        raise InvalidInput(
            f"the meter did not move: it shows {meter[0, 1]:g} W all along; see whether it is the meter of this "
            f"machine, and the column that of the power"
        )


def _see_that_it_covers(covered_s: float, length_s: float) -> None:
    if covered_s < _LEAST_COVERED * length_s:
        raise InvalidInput(
            f"the meter's log covers {covered_s:.1f} s of the {length_s:.1f} s of the self-test; let it record all of "
            f"it, {_LEAST_COVERED:.0%} at least, with times in seconds"
        )


def _see_that_they_go_together(place: Overlay, length_s: float) -> None:
    if place.correlation is None:
        raise InvalidInput("wherever the meter's log is laid over the self-test, one of the two does not move")
    if place.correlation < _LEAST_CORRELATION:
        raise InvalidInput(
            f"the meter's log does not go with the device's power (correlation {place.correlation:.2f}); let it record "
            f"all of a run of polythrottle calibrate"
        )
    _see_that_it_covers(place.covered_s, length_s)


def _checked(line: Line, phase_s: float, step_w: float) -> WallFit:
    """Return a fit whose factor can be, and is known well enough to be applied.

    Raises:
        InvalidInput: If it cannot or is not.
    """
    least, most = _FACTORS
    if not least <= line.slope <= most:
        raise InvalidInput(
            f"a factor of {line.slope:.4g} cannot be right, only {least:g} to {most:g} can: see whether the column is "
            f"power and in watts (not mW or kW), and the meter that of this machine"
        )
    if line.memory_s > _SLOWEST * phase_s:
        raise InvalidInput(
            f"the meter follows within {line.memory_s:.2g} s or more, too slowly for phases of {phase_s:.3g} s; "
            f"{_again(_LONG_ENOUGH * line.memory_s)}"
        )
    sure = half_width([Student(line.slope_sd / line.slope, line.readings - FITTED)])
    if sure > _MOST_HALF:
        told = f"the factor is {line.slope:.3g} give or take {sure:.0%}, and nothing beyond {_MOST_HALF:.0%} is applied"
        raise InvalidInput(f"{told} {_why_open(line, phase_s * (sure / _AIMED_HALF) ** 2, step_w)}")
    return WallFit(
        factor=line.slope,
        factor_sd=sure / _SURE,
        constant_w=line.constant_w,
        residual_w=line.residual_w,
        shift_s=line.shift_s,
        lag_s=line.memory_s,
        pairs=line.readings,
        correlation=line.correlation,
    )


def _why_open(line: Line, enough_s: float, step_w: float) -> str:
    """Return what leaves a factor open, and what to do: no length of time makes up for steps."""
    if line.rounded_sd > _MOSTLY * line.slope_sd:
        return (
            f"(as far as its log shows, the meter moves in steps of {step_w:.3g} W); let it show more decimal places, "
            f"or take a finer meter or a heavier load"
        )
    return (
        f"(the meter's readings are {line.residual_w:.2g} W off and it follows within {line.memory_s:.2g} s); "
        f"{_again(enough_s)}"
    )


def _again(phase_s: float) -> str:
    """Return what to do where phases were too short."""
    seconds = min(_LONGEST_S, 5 * math.ceil(phase_s / 5))
    return f"run polythrottle calibrate --seconds {seconds:g} while the meter records, then compare again"
