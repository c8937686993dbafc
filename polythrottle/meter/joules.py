"""Joules with error bars: what a window says of energy, power and throughput, each with its 95 % interval.

A ratio such as joules per item is estimated by the window's totals. How much it varies is seen from batches: the window
is cut into pieces long enough to know nothing of each other (`Sensor.batch_s`), and the deviation of what each drew
from what its items should have drawn is Student's with two degrees of freedom less than there are batches (Law and
Kelton, Simulation Modeling and Analysis, §9.5.3), wider by how far queries may resemble each other over more than a
batch (`polythrottle.meter.likeness`). A straight drift is taken out first: it is of the window, and would otherwise
pass for chance. What the sensor adds does not show in batches and is added from what is known of it.

Where requests come at random around a rate that is known, how many came is chance that can be taken out: energy is
regressed on requests over the batches, and read off at the rate (a control variate; Law and Kelton, §11.4). Joules per
item are then those at that rate in the long run, with the error of what requests do not explain.
"""

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from polythrottle.arrivals import CLOSED, FEWEST_CYCLES, Arrivals
from polythrottle.measurement import Interval
from polythrottle.meter.likeness import doubt_of_mean
from polythrottle.meter.looks import Array, Course
from polythrottle.sensors import Bounded, Mixed, Normal, Rounded, Sensor, Student, Triangular, half_width
from polythrottle.sensors.errors import Error
from polythrottle.sensors.sensor import LEAST_BATCHES

_MOST_BATCHES, _EDGES = 20, 10.0
_SURE = 4.0
_COVERED = 2.0
QUERIES, ITEMS, TOKENS = 0, 1, 2


@dataclass(frozen=True)
class Varied:
    """How a ratio varied over the batches of a window.

    Args:
        ratio: Of the totals.
        deviation: One standard deviation of it, if batches know nothing of each other.
        doubt: What its error is, over that.
        drift: By what fraction of itself it rose over the window.
        drifted: Whether that is more than chance.
    """

    ratio: float
    deviation: float
    doubt: Student | Mixed
    drift: float
    drifted: bool

    @property
    def error(self) -> Student | Mixed:
        """Its error, as a fraction of it."""
        return self.doubt.scaled(self.deviation / self.ratio)


class Joules:
    """What a window says of energy.

    Args:
        course: Of the window.
        sensor: What the energy was read with.
        arrivals: When requests were meant to be sent, if all of them were served.
    """

    def __init__(self, course: Course, sensor: Sensor, arrivals: Arrivals = CLOSED) -> None:
        self._course, self._sensor, self._arrivals = course, sensor, arrivals
        self._places = _places(course, sensor, arrivals)

    @property
    def item_j(self) -> float:
        """Joules per item."""
        return self._share(self._course.served[:, ITEMS])

    @property
    def per_item(self) -> Interval | None:
        """The interval of joules per item; None if the window is too short to say."""
        return self._energy_interval(self._course.served[:, ITEMS])

    @property
    def watts(self) -> float:
        """Mean power."""
        return self._share(self._course.time_s)

    @property
    def power(self) -> Interval | None:
        """The interval of mean power, in watts."""
        return self._energy_interval(self._course.time_s)

    @property
    def token_j(self) -> float:
        """Joules per token."""
        return self._share(self._course.served[:, TOKENS])

    @property
    def tokens_per_j(self) -> Interval | None:
        """The interval of tokens per joule."""
        found = self._energy_interval(self._course.served[:, TOKENS])
        return Interval(1 / found.high, 1 / found.low if found.low > 0 else math.inf) if found else None

    def _share(self, per: Array) -> float:
        """Return the joules of the course, as a reference meter would have them, over what grew meanwhile."""
        course, at = self._course, self._at_rate
        if per[-1] <= per[0]:
            return math.inf
        if at is None:
            return float(course.energy_j[-1] - course.energy_j[0]) / float(per[-1] - per[0]) * self._sensor.factor
        if per is course.time_s:
            return at.ratio * self._sensor.factor
        each_w = at.ratio / (self._arrivals.offered_per_s or math.nan) * self._sensor.factor
        return each_w / float(per[-1] - per[0]) * self._queries

    @property
    def throughput(self) -> Interval | None:
        """Items per second."""
        seen = self._varied(self._course.served[:, ITEMS], self._course.time_s, 0.0)
        return _around(seen.ratio, seen.ratio * half_width([seen.error])) if seen else None

    @property
    def drift(self) -> float | None:
        """By what fraction power rose over the window, where that is more than chance; None if it is not."""
        course = self._course
        seen = self._varied(course.energy_j, course.time_s, self._edge_j)
        return seen.drift if seen is not None and seen.drifted else None

    @property
    def _sensed_w(self) -> float:
        """Mean power over the course, in watts of the sensor."""
        return float(self._course.energy_j[-1] - self._course.energy_j[0]) / self._course.window_s

    @property
    def _edge_j(self) -> float:
        return self._sensed_w * self._course.edge_s

    def _energy_interval(self, per: Array) -> Interval | None:
        """Return the interval of energy over something that grew; None if it did not, or too little was seen."""
        if per[-1] <= per[0]:
            return None
        seen = self._at_rate or self._varied(self._course.energy_j, per, self._edge_j)
        if seen is None:
            return None
        watts = self._sensed_w
        relative: list[Error] = [
            Triangular(self._course.edge_s / self._course.window_s),
            *([Rounded(self._sensor.quantum_w / watts, self._stirred_w() / watts)] if self._sensor.quantum_w else []),
            *([Triangular(self._sensor.quantum_j / watts / self._course.window_s)] if self._sensor.quantum_j else []),
            *([Normal(self._sensor.factor_sd)] if self._sensor.factor_sd else []),
            *([Bounded(hidden)] if (hidden := self._aliasing()) else []),
            seen.error,
        ]
        value = self._share(per)
        return _around(value, value * half_width(relative))

    def _varied(self, what: Array, per: Array, edge: float) -> Varied | None:
        """Return how ``what`` over ``per`` varied; None if the window has too few batches, or one of them did not grow.

        Args:
            what: Running total, shape (points,); ``per`` likewise.
            per: What it is shared by.
            edge: How far a point of ``what`` may be off either way: seen twice in each batch, but not in the sum.
        """
        count = self.batches
        if count < LEAST_BATCHES or what[-1] <= what[0] or per[-1] <= per[0]:
            return None
        gains, shares = np.diff(what[self._places]), np.diff(per[self._places])
        ratio = float(gains.sum() / shares.sum())
        off = gains - ratio * shares
        along = np.arange(count) - (count - 1) / 2
        slope = float(along @ off / (along @ along))
        rest = off - off.mean() - slope * along
        variance = float(rest @ rest) / (count - 2)
        within = max(variance - edge**2 / 6, 0.1 * variance) * self._hidden
        error = math.sqrt(variance / float(along @ along))
        drifted = abs(slope) > _SURE * error
        deviation = math.sqrt(count * within) / float(shares.sum())
        doubt = doubt_of_mean(off, self._queries / count)
        return Varied(ratio, deviation, doubt, slope * count / float(gains.mean()), drifted)

    @cached_property
    def _at_rate(self) -> Varied | None:
        """How power at the rate of random arrivals varied; None for others, or if the window has too few batches."""
        course, rate_per_s = self._course, self._arrivals.offered_per_s
        count = self.batches
        if rate_per_s is None or not self._arrivals.random or count < LEAST_BATCHES:
            return None
        gains, times_s = np.diff(course.energy_j[self._places]), np.diff(course.time_s[self._places])
        beyond = np.diff(course.served[self._places, QUERIES]) - rate_per_s * times_s
        # Batches end at looks, so they are not equally long, and a long one varies more: each is weighted by that.
        weight = np.sqrt(times_s.mean() / times_s)
        design = np.column_stack([times_s, beyond, np.arange(count) - (count - 1) / 2]) * weight[:, None]
        fitted, _, rank, _ = np.linalg.lstsq(design, gains * weight, rcond=None)
        if rank < design.shape[1] or fitted[0] <= 0:
            return None
        rest = gains * weight - design @ fitted
        variance = float(rest @ rest) / (count - 3)
        # Errors of a batch's ends cancel in the sum of all, but not in the slope by which the rate is gone to. Where
        # steps were found, requests are counted at the same moments, so that only what time alone takes is off, and of
        # the request that is under way then, any part.
        found = course.edge_s < self._sensor.step_s
        edge_j = course.edge_s * abs(float(fitted[0] - (fitted[1] * rate_per_s if found else 0.0)))
        request_j = float(fitted[1]) if found else 0.0
        within = max(variance - (edge_j**2 + request_j**2) / 6, 0.1 * variance) * self._hidden
        alone = 1 / float(design[:, 0] @ design[:, 0])
        sloped = max(0.0, float(np.linalg.inv(design.T @ design)[0, 0]) - alone)
        deviation = math.sqrt(max(within * alone + variance * sloped, _uneven(design, rest) if edge_j == 0 else 0.0))
        rose = float(fitted[2]) * count / float(gains.mean())
        return Varied(float(fitted[0]), deviation, Student(1.0, count - 3), rose, False)

    @property
    def batches(self) -> int:
        """Into how many the window is cut."""
        return len(self._places) - 1

    @property
    def _queries(self) -> float:
        return float(self._course.served[-1, QUERIES] - self._course.served[0, QUERIES])

    @property
    def _hidden(self) -> float:
        """By what the variance of a batch is larger than a sensor with a memory lets it seem."""
        batch_s = self._course.window_s / max(1, self.batches)
        return 1 / (1 - min(0.5, self._sensor.smoothed_s / batch_s))

    def _stirred_w(self) -> float:
        """Return the deviation of single power readings, without what rounding adds to it."""
        course = self._course
        spans_s, gains_j = np.diff(course.time_s), np.diff(course.energy_j)
        spans_s, gains_j = spans_s[spans_s > 0], gains_j[spans_s > 0]  # two looks may be at the same moment
        step_s = self._sensor.step_s or float(np.median(spans_s))
        powers_w = gains_j / spans_s
        readings = max(1.0, float(np.median(spans_s)) / step_s)
        seen = float(np.var(powers_w)) * readings - self._sensor.quantum_w**2 / 12
        return math.sqrt(max(0.0, seen))

    def _aliasing(self) -> float:
        """Return how far, as a fraction, a sensor that looks in step with the queries may be off; 0 if it is not.

        Its looks wander over the phases of a query once every ``1 / |n - period / query|`` periods. A window that does
        not see them all twice may have seen always the same one, which says nothing of the rest.
        """
        sensor, course = self._sensor, self._course
        if sensor.duty == 1 or self._queries == 0:
            return 0.0
        turns = sensor.period_s * self._queries / course.window_s
        wandered = abs(turns - round(turns)) * course.window_s / sensor.period_s
        return 0.0 if wandered >= _COVERED or turns > _MOST_BATCHES else (1 - sensor.duty) / 2


def _uneven(design: Array, rest: Array) -> float:
    """Return the variance of the first coefficient where batches vary unevenly, as those of more requests do.

    The HC3 estimator of MacKinnon and White, J. Econometrics 29 (1985): each residual stands for its own batch.
    """
    inverse = np.linalg.inv(design.T @ design)
    lever = np.einsum("ij,jk,ik->i", design, inverse, design)
    scores = (design @ inverse[0]) * rest / np.maximum(1 - lever, 0.05)
    return float(scores @ scores)


def _places(course: Course, sensor: Sensor, arrivals: Arrivals) -> Array:
    """Return which points of a course its batches begin and end at, evenly in time; no batch where bursts are few."""
    cycle_s = arrivals.cycle_s
    if course.window_s < FEWEST_CYCLES * cycle_s:
        return np.zeros(1, dtype=int)
    shortest_s = max(sensor.batch_s, cycle_s, _EDGES * course.edge_s if course.edge_s < sensor.step_s else 0.0)
    fits = _MOST_BATCHES if shortest_s == 0 else int(course.window_s / shortest_s * (1 + 1e-9))
    count = max(
        0, min(_MOST_BATCHES, fits if fits >= LEAST_BATCHES else _enough(course, sensor), len(course.time_s) - 1)
    )
    wanted = course.time_s[0] + course.window_s * np.arange(count + 1) / max(1, count)
    return np.unique(np.abs(course.time_s[:, None] - wanted[None, :]).argmin(axis=0))


def _enough(course: Course, sensor: Sensor) -> int:
    """Return the fewest batches if they are long enough but for the edges, else none."""
    return LEAST_BATCHES if course.window_s >= 0.9 * sensor.least_s else 0


def _around(value: float, half: float) -> Interval:
    return Interval(max(0.0, value - half), value + half)
