"""A line between a device's power and that of a meter which shows it late, smoothed, rounded, by its own clock."""

import math
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

# What a meter that shows whole steps hides of a slope: two levels that nothing stirs are each off by half a step.

Array = NDArray[np.float64]
_FEWEST = 5
_PLACES = 4
_WHOLE = 0.01
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
    if _whole(apart / step):
        return step
    return _shared(apart)


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
    ordered = np.sort(level_w)
    half = len(level_w) // 2
    wander_w = float((ordered[half:] - ordered[: len(ordered) - half]).min()) / _HALF
    nearest_w2 = np.sort(rest_w**2)[: math.ceil(_KEPT * len(rest_w))]
    noise_w2 = max(0.0, float(np.mean(nearest_w2)) - step_w**2 / 12)
    stirred = (wander_w**2 + noise_w2) / step_w**2
    return step_w**2 / 12 * math.exp(-4 * math.pi**2 * stirred)


# A line between a device's power and that of a meter which shows it late, smoothed, and by a clock of its own.
#
# A meter that follows with a lag never reaches the height of a short phase, so that a line through raw powers is too
# flat: by a sixth at 2 s of lag and phases of 10 s. Here the device's power is first passed through what a meter may
# do, a moving average and one lag or two in a row, and shifted; for each such way the line is found by least squares.
# How slow the meter is shows only in the log itself, and only roughly, so no single way is taken: all are averaged,
# each weighted by its likelihood (uniform in the shift and in the roots of both times), which is also how their doubt
# comes into that of the factor. Noise that resembles itself from one reading to the next counts for as much less
# (first-order autoregression; Law and Kelton, Simulation Modeling and Analysis, §4.4).

Range = tuple[float, float]
_FINE = 40.0
_LEAST_POINTS = 200.0
_MOST_POINTS = 20_000.0
_CELLS = 9
_STAGES = 2
_ROUNDS = 8
_LIKELY = 1e-3
_LEAST_KEPT = 0.5
"""A round narrows no range by more, for its cells may be too wide to show where the best way lies."""
FITTED = 6
"""Slope, intercept, shift, lag and average, and what was before the record began."""
_MOST_ALIKE = 0.9
_NO_NOISE = 1e-12


@dataclass(frozen=True)
class MeterLag:
    """How a meter trails what it shows.

    Args:
        lag_s: Time constant with which it follows.
        stages: How many equal lags that are in a row, ``lag_s`` together.
    """

    lag_s: float
    stages: int


class EnergyCurve:
    """A device's power over a record, as meters of all kinds would show it.

    Args:
        energy: Times in seconds and running total of joules, shape (readings, 2), in order.
        period_s: Between two readings of the meter.
    """

    def __init__(self, energy: Array, period_s: float) -> None:
        moved = np.concatenate([[True], np.diff(energy[:, 1]) > 0])
        time_s, total_j = energy[moved].T
        self.begin_s = float(time_s[0])
        self.end_s = float(time_s[-1])
        points = int(min(_MOST_POINTS, max(_LEAST_POINTS, _FINE * self.length_s / period_s)))
        self._time_s = np.linspace(self.begin_s, self.end_s, points + 1)
        self._step_s = self.length_s / points
        self._power_w = np.diff(np.interp(self._time_s, time_s, total_j)) / self._step_s
        self._totals: dict[MeterLag, Array] = {}

    @property
    def length_s(self) -> float:
        """From its beginning to its end."""
        return self.end_s - self.begin_s

    def shown_w(self, at_s: Array, slow: MeterLag, average_s: Array) -> Array:
        """Return what a meter shows at some times of the record.

        Args:
            at_s: By the device's clock, any shape.
            slow: How it trails.
            average_s: The time it averages over, of a shape that goes with that; a point of the record at least.
        """
        over_s = np.maximum(average_s, self._step_s)
        total_j = self._total(slow)
        until_j, before_j = (np.interp(each, self._time_s, total_j) for each in (at_s, at_s - over_s))
        return np.asarray((until_j - before_j) / over_s)

    def before(self, at_s: Array, slow: MeterLag) -> list[Array]:
        """Return the courses by which a meter forgets what was before the record, each of the shape of the times."""
        if slow.lag_s == 0:
            return []
        gone = (at_s - self.begin_s) / (slow.lag_s / slow.stages)
        return [gone**power * np.exp(-gone) for power in range(slow.stages)]

    def _total(self, slow: MeterLag) -> Array:
        """Return the running total of the power that is shown with a lag, shape (points + 1,)."""
        if slow not in self._totals:
            shown_w = self._power_w
            for _ in range(slow.stages if slow.lag_s else 0):
                shown_w = _lagged(shown_w, slow.lag_s / slow.stages / self._step_s)
            self._totals[slow] = np.concatenate([[0.0], np.cumsum(shown_w) * self._step_s])
        return self._totals[slow]


def _lagged(power_w: Array, points: float) -> Array:
    """Return the mean power of each point as it is shown with a lag; before the first it was as there.

    Args:
        power_w: Shape (points,).
        points: How many of them the lag is long.
    """
    keep = math.exp(-1 / points)
    share = 1 - points * (1 - keep)
    now_w = float(power_w[0])
    found = []
    for each_w in power_w.tolist():
        found.append(now_w + share * (each_w - now_w))
        now_w = each_w + keep * (now_w - each_w)
    return np.array(found)


def lagging(meter: Array, lag_s: float) -> Array:
    """Return a meter's readings as if it followed with a lag, besides its own; power is straight between readings.

    Args:
        meter: Times in seconds and watts, shape (readings, 2).
        lag_s: Time constant; 0 leaves them as they are.
    """
    if lag_s == 0 or len(meter) == 0:
        return meter
    now_w = float(meter[0, 1])
    found = [float(meter[0, 1])]
    for (from_s, from_w), (until_s, until_w) in pairwise(meter.tolist()):
        behind_w = lag_s * (until_w - from_w) / (until_s - from_s)
        now_w = until_w - behind_w + (now_w - from_w + behind_w) * math.exp((from_s - until_s) / lag_s)
        found.append(now_w)
    return np.column_stack([meter[:, 0], found])


@dataclass(frozen=True)
class Line:
    """A line between two powers.

    Args:
        slope: Of the meter's power over the device's.
        slope_sd: One standard deviation of it.
        constant_w: The meter's power where the device has none.
        residual_w: Deviation of single readings from the line.
        shift_s: By how much the meter's clock is ahead, a delay included.
        memory_s: How long a reading of the meter remembers: its lag, and half of what it averages over.
        readings: Of how many that is made.
        correlation: Between the meter and the line.
        rounded_sd: The part of ``slope_sd`` that comes from the meter's steps.
    """

    slope: float
    slope_sd: float
    constant_w: float
    residual_w: float
    shift_s: float
    memory_s: float
    readings: int
    correlation: float
    rounded_sd: float


@dataclass(frozen=True)
class _Box:
    """Shifts in seconds, and roots of lags and of averages in seconds, between which to look."""

    shifts: Range
    lags: Range
    averages: Range

    @property
    def cells(self) -> tuple[Array, Array, Array]:
        """What to look at: shifts, lags and averages in seconds, each of shape (cells,)."""
        shift, lag, average = (np.linspace(*ends, _CELLS) for ends in (self.shifts, self.lags, self.averages))
        return shift, lag**2, average**2

    def holds(self, trace: EnergyCurve, meter: Array) -> Array:
        """Return the readings that are of the record whatever shift and average is true."""
        begin_s = trace.begin_s + self.averages[1] ** 2 + self.shifts[1]
        end_s = trace.end_s + self.shifts[0]
        return meter[(meter[:, 0] >= begin_s) & (meter[:, 0] <= end_s)]

    def narrowed(self, weights: Array) -> "_Box":
        """Return the part in which anything is likely; weights are of shape (lags, stages, averages, shifts)."""
        return _Box(
            _narrowed(self.shifts, weights.max(axis=(0, 1, 2))),
            _narrowed(self.lags, weights.max(axis=(1, 2, 3))),
            _narrowed(self.averages, weights.max(axis=(0, 1, 3))),
        )


def _narrowed(ends: Range, along: Array) -> Range:
    """Return the part of a range in which anything is likely with a cell around it, but half of the range at least."""
    cells = np.linspace(*ends, _CELLS)
    places = np.flatnonzero(along > _LIKELY * along.max())
    low = float(cells[max(0, places[0] - 1)])
    high = float(cells[min(_CELLS - 1, places[-1] + 1)])
    short = max(0.0, _LEAST_KEPT * (ends[1] - ends[0]) - (high - low))
    return max(ends[0], low - short / 2), min(ends[1], high + short / 2)


def line_between(
    trace: EnergyCurve, meter: Array, shifts_s: Range, lag_most_s: float, average_most_s: float, step_w: float = 0.0
) -> Line | None:
    """Return the line between a device's power and a meter's, averaged over the ways in which the meter may show it.

    Args:
        trace: Of the device.
        meter: Times in seconds and watts, shape (readings, 2).
        shifts_s: Between which shifts to look.
        lag_most_s: The longest lag that is considered.
        average_most_s: The longest average.
        step_w: In which the meter shows power; 0 if in none.

    Returns:
        None if too few readings are left.
    """
    box = _Box(shifts_s, (0.0, math.sqrt(lag_most_s)), (0.0, math.sqrt(average_most_s)))
    ways = None
    for _ in range(_ROUNDS):
        box = box if ways is None else box.narrowed(ways.weights)
        held = box.holds(trace, meter)
        if len(held) <= FITTED:
            return None
        ways = _Ways(trace, held, box)
    if ways is None:
        return None
    return ways.line(step_w)


class _Ways:
    """The line that fits best, for each way of a box in which a meter may show power.

    All arrays are of shape (lags, stages, averages, shifts): slope, intercept, the variance of the slope over that of a
    reading, and the sum of the squares that are left.
    """

    def __init__(self, trace: EnergyCurve, meter: Array, box: _Box) -> None:
        self._trace = trace
        self._at_s, self._meter_w = meter.T
        self._shifts_s, self._lags_s, self._averages_s = box.cells
        self._slows = [MeterLag(lag_s, stages + 1) for lag_s in self._lags_s.tolist() for stages in range(_STAGES)]
        found = np.stack([self._fitted(slow) for slow in self._slows], axis=1)
        shaped = found.reshape(len(found), _CELLS, _STAGES, _CELLS, _CELLS)
        self._slope, self._constant_w, self._variance, self._squares = shaped
        self._shown_w, self._rest_w = self._best()
        self._residual_w2 = float(self._squares.min()) / (len(meter) - FITTED)
        self._alike = _alike(self._rest_w)

    @property
    def weights(self) -> Array:
        """The likelihood of each, over that of the likeliest."""
        doubt_w2 = max(self._residual_w2 * self._alike, _NO_NOISE)
        return np.asarray(np.exp((self._squares.min() - self._squares) / (2 * doubt_w2)))

    def line(self, step_w: float) -> Line:
        """Return the average of them all, for a meter that shows power in such steps."""
        share = self.weights / self.weights.sum()
        slope = float(np.sum(share * self._slope))
        constant_w = float(np.sum(share * self._constant_w))
        within = float(np.sum(share * self._variance)) * self._residual_w2 * self._alike
        among = float(np.sum(share * (self._slope - slope) ** 2))
        rounded = slope_variance(step_w, self._meter_w, self._shown_w, self._rest_w)
        memory_s = self._lags_s[:, None, None, None] + self._averages_s[:, None] / 2
        lost = float(self._squares.min()) / max(float(np.var(self._meter_w)) * len(self._meter_w), _NO_NOISE)
        return Line(
            slope=slope,
            slope_sd=math.sqrt(within + among + rounded),
            constant_w=constant_w,
            residual_w=math.sqrt(self._residual_w2),
            shift_s=float(np.sum(share * self._shifts_s)),
            memory_s=float(np.sum(share * memory_s)),
            readings=len(self._meter_w),
            correlation=math.sqrt(max(0.0, 1 - lost)),
            rounded_sd=math.sqrt(rounded),
        )

    def _design(self, slow: MeterLag, averages_s: Array, shifts_s: Array) -> Array:
        """Return what the meter's power is made of, shape (averages, shifts, readings, parts)."""
        at_s = np.tile(self._at_s - shifts_s[:, None], (len(averages_s), 1, 1))
        shown_w = self._trace.shown_w(at_s, slow, averages_s[:, None, None])
        return np.stack([shown_w, np.ones_like(shown_w), *self._trace.before(at_s, slow)], axis=-1)

    def _fitted(self, slow: MeterLag) -> Array:
        """Return the four arrays of a slowness, shape (4, averages, shifts)."""
        design = self._design(slow, self._averages_s, self._shifts_s)
        turned = np.swapaxes(design, -1, -2)
        inverse = np.linalg.pinv(turned @ design, hermitian=True)
        found = inverse @ (turned @ self._meter_w)[..., None]
        rest_w = self._meter_w - (design @ found)[..., 0]
        return np.stack([found[..., 0, 0], found[..., 1, 0], inverse[..., 0, 0], np.sum(rest_w**2, axis=-1)])

    def _best(self) -> tuple[Array, Array]:
        """Return what the meter would show in the likeliest way, and what the line leaves, shape (readings,) each."""
        lag, stages, average, shift = np.unravel_index(int(self._squares.argmin()), self._squares.shape)
        slow = self._slows[int(lag) * _STAGES + int(stages)]
        design = self._design(slow, self._averages_s[[average]], self._shifts_s[[shift]])[0, 0]
        found, *_ = np.linalg.lstsq(design, self._meter_w, rcond=None)
        return design[:, 0], self._meter_w - design @ found


def _alike(rest: Array) -> float:
    """Return by what the variance of a sum is larger because neighbours resemble each other; at least 1.

    A line leaves residuals that seem less alike than they are, by about (1 + 3 r) / n (Kendall, Biometrika 41, 1954).
    """
    whole = float(rest @ rest)
    if whole == 0:
        return 1.0
    seen = float(rest[1:] @ rest[:-1]) / whole
    held = min(_MOST_ALIKE, max(0.0, seen + (1 + 3 * seen) / len(rest)))
    return (1 + held) / (1 - held)
