"""Energy, power and throughput of a window with 95 % intervals, and the joules of single requests that overlap."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from polythrottle.domain.arrivals import CLOSED, FEWEST_CYCLES, Arrivals
from polythrottle.domain.errors import InvalidInput
from polythrottle.domain.measurement import Interval, Query, Reading
from polythrottle.domain.ports import LEAST_BATCHES, Sensor
from polythrottle.metering.intervals import (
    Bounded,
    ErrorDistribution,
    Mixed,
    Normal,
    Rounded,
    Student,
    Triangular,
    error_of_mean,
    half_width,
)
from polythrottle.metering.window import WindowSample

# Looks at a device during a window, and the same looks with the steps of its counter found.

Array = NDArray[np.float64]
_STILL = 0.2
_FEWEST_STEPS = 5


@dataclass(frozen=True)
class Trajectory:
    """How energy and what was served grew over a window.

    Args:
        time_s: Since the window began, shape (points,), rising.
        energy_j: Likewise, never falling.
        served: Queries, items and tokens, shape (points, 3).
        edge_s: How far the time at which an energy was reached may be off, either way.
    """

    time_s: Array
    energy_j: Array
    served: Array
    edge_s: float

    @property
    def window_s(self) -> float:
        """From the first point to the last."""
        return float(self.time_s[-1] - self.time_s[0])


def trajectory(looks: Sequence[WindowSample], sensor: Sensor) -> Trajectory:
    """Return what looks say; where the total moves in steps that were seen, only the moments at which it moved.

    At such a moment the total is that of just then, so that what is uncertain of it is the time between two looks, and
    no longer a whole step.

    Args:
        looks: At least two.
        sensor: What made the total.
    """
    whole = exact_trajectory(looks)
    time_s = whole.time_s
    energy_j = whole.energy_j
    served = whole.served
    step_s = observed_step_s(sensor, whole)
    moved = np.flatnonzero(np.diff(energy_j) > 0) + 1
    if len(moved):
        gap_s = float(np.mean(time_s[moved] - time_s[moved - 1]))
    else:
        gap_s = step_s
    if step_s == 0 or len(moved) < _FEWEST_STEPS or gap_s > step_s / 2:
        return Trajectory(time_s, energy_j, served, step_s)
    at_s = (time_s[moved] + time_s[moved - 1]) / 2
    there = np.column_stack([np.interp(at_s, time_s, column) for column in served.T])
    return Trajectory(at_s, energy_j[moved], there, gap_s)


def exact_trajectory(looks: Sequence[WindowSample]) -> Trajectory:
    """Return what looks say if each is exact.

    Args:
        looks: At least two.
    """
    first = looks[0].reading
    time_s = np.array([look.reading.time_s - first.time_s for look in looks])
    energy_j = np.array([look.reading.energy_j - first.energy_j for look in looks])
    served = np.array([(look.queries, look.items, look.tokens) for look in looks], dtype=float)
    return Trajectory(time_s, energy_j, served, 0.0)


def observed_step_s(sensor: Sensor, seen: Trajectory) -> float:
    """Return the sensor's step; if none is known but the total often stands still, what it then seems to be.

    Args:
        sensor: What made the total.
        seen: Every look.
    """
    moves = int(np.count_nonzero(np.diff(seen.energy_j)))
    still = len(seen.time_s) - 1 - moves
    if sensor.step_s or still <= _STILL * (len(seen.time_s) - 1):
        return sensor.step_s
    return seen.window_s / max(1, moves)


# Joules with error bars: what a window says of energy, power and throughput, each with its 95 % interval.
#
# A ratio such as joules per item is estimated by the window's totals. How much it varies is seen from batches: the
# window is cut into pieces long enough to know nothing of each other (`Sensor.batch_s`), and the deviation of what
# each drew from what its items should have drawn is Student's with two degrees of freedom less than there are batches
# (Law and Kelton, Simulation Modeling and Analysis, §9.5.3), wider by how far queries may resemble each other over
# more than a batch (`polythrottle.metering.intervals`). A straight drift is taken out first: it is of the window, and
# would otherwise pass for chance. What the sensor adds does not show in batches and is added from what is known of
# it.
#
# Where requests come at random around a rate that is known, how many came is chance that can be taken out: energy is
# regressed on requests over the batches, and read off at the rate (a control variate; Law and Kelton, §11.4). Joules
# per item are then those at that rate in the long run, with the error of what requests do not explain.

_MOST_BATCHES = 20
_EDGES = 10.0
_SURE = 4.0
_COVERED = 2.0
QUERIES = 0
ITEMS = 1
TOKENS = 2


@dataclass(frozen=True)
class RatioVariation:
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


class EnergyEstimate:
    """What a window says of energy.

    Args:
        course: Of the window.
        sensor: What the energy was read with.
        arrivals: When requests were meant to be sent, if all of them were served.
    """

    def __init__(self, course: Trajectory, sensor: Sensor, arrivals: Arrivals = CLOSED) -> None:
        self._course = course
        self._sensor = sensor
        self._arrivals = arrivals
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
        if found:
            return Interval(1 / found.high, 1 / found.low if found.low > 0 else math.inf)
        return None

    def _share(self, per: Array) -> float:
        """Return the joules of the course, as a reference meter would have them, over what grew meanwhile."""
        course = self._course
        at = self._at_rate
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
        if seen:
            return _around(seen.ratio, seen.ratio * half_width([seen.error]))
        return None

    @property
    def drift(self) -> float | None:
        """By what fraction power rose over the window, where that is more than chance; None if it is not."""
        course = self._course
        seen = self._varied(course.energy_j, course.time_s, self._edge_j)
        if seen is not None and seen.drifted:
            return seen.drift
        return None

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
        relative: list[ErrorDistribution] = [
            Triangular(self._course.edge_s / self._course.window_s),
            *([Rounded(self._sensor.quantum_w / watts, self._stirred_w() / watts)] if self._sensor.quantum_w else []),
            *([Triangular(self._sensor.quantum_j / watts / self._course.window_s)] if self._sensor.quantum_j else []),
            *([Normal(self._sensor.factor_sd)] if self._sensor.factor_sd else []),
            *([Bounded(hidden)] if (hidden := self._aliasing()) else []),
            seen.error,
        ]
        value = self._share(per)
        return _around(value, value * half_width(relative))

    def _varied(self, what: Array, per: Array, edge: float) -> RatioVariation | None:
        """Return how ``what`` over ``per`` varied; None if the window has too few batches, or one of them did not grow.

        Args:
            what: Running total, shape (points,); ``per`` likewise.
            per: What it is shared by.
            edge: How far a point of ``what`` may be off either way: seen twice in each batch, but not in the sum.
        """
        count = self.batches
        if count < LEAST_BATCHES or what[-1] <= what[0] or per[-1] <= per[0]:
            return None
        gains = np.diff(what[self._places])
        shares = np.diff(per[self._places])
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
        doubt = error_of_mean(off, self._queries / count)
        return RatioVariation(ratio, deviation, doubt, slope * count / float(gains.mean()), drifted)

    @cached_property
    def _at_rate(self) -> RatioVariation | None:
        """How power at the rate of random arrivals varied; None for others, or if the window has too few batches."""
        course = self._course
        rate_per_s = self._arrivals.offered_per_s
        count = self.batches
        if rate_per_s is None or not self._arrivals.random or count < LEAST_BATCHES:
            return None
        gains = np.diff(course.energy_j[self._places])
        times_s = np.diff(course.time_s[self._places])
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
        return RatioVariation(float(fitted[0]), deviation, Student(1.0, count - 3), rose, False)

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
        spans_s = np.diff(course.time_s)
        gains_j = np.diff(course.energy_j)
        apart = spans_s > 0  # two looks may be at the same moment
        spans_s = spans_s[apart]
        gains_j = gains_j[apart]
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
        sensor = self._sensor
        course = self._course
        if sensor.duty == 1 or self._queries == 0:
            return 0.0
        turns = sensor.period_s * self._queries / course.window_s
        wandered = abs(turns - round(turns)) * course.window_s / sensor.period_s
        if wandered >= _COVERED or turns > _MOST_BATCHES:
            return 0.0
        return (1 - sensor.duty) / 2


def _uneven(design: Array, rest: Array) -> float:
    """Return the variance of the first coefficient where batches vary unevenly, as those of more requests do.

    The HC3 estimator of MacKinnon and White, J. Econometrics 29 (1985): each residual stands for its own batch.
    """
    inverse = np.linalg.inv(design.T @ design)
    lever = np.einsum("ij,jk,ik->i", design, inverse, design)
    scores = (design @ inverse[0]) * rest / np.maximum(1 - lever, 0.05)
    return float(scores @ scores)


def _places(course: Trajectory, sensor: Sensor, arrivals: Arrivals) -> Array:
    """Return which points of a course its batches begin and end at, evenly in time; no batch where bursts are few."""
    cycle_s = arrivals.cycle_s
    if course.window_s < FEWEST_CYCLES * cycle_s:
        return np.zeros(1, dtype=int)
    shortest_s = max(sensor.batch_s, cycle_s, _EDGES * course.edge_s if course.edge_s < sensor.step_s else 0.0)
    if shortest_s == 0:
        fits = _MOST_BATCHES
    else:
        fits = int(course.window_s / shortest_s * (1 + 1e-9))
    count = max(
        0, min(_MOST_BATCHES, fits if fits >= LEAST_BATCHES else _enough(course, sensor), len(course.time_s) - 1)
    )
    wanted = course.time_s[0] + course.window_s * np.arange(count + 1) / max(1, count)
    return np.unique(np.abs(course.time_s[:, None] - wanted[None, :]).argmin(axis=0))


def _enough(course: Trajectory, sensor: Sensor) -> int:
    """Return the fewest batches if they are long enough but for the edges, else none."""
    if course.window_s >= 0.9 * sensor.least_s:
        return LEAST_BATCHES
    return 0


def _around(value: float, half: float) -> Interval:
    return Interval(max(0.0, value - half), value + half)


# Joules of single requests that overlap, so that they sum exactly to the meter.

_ROUNDING_S = 1e-9
_LEAST_S = 1e-15


@dataclass(frozen=True)
class Share:
    """What one request took of a window.

    Args:
        intended_s: When it was meant to be sent, in seconds since the window began; negative if before.
        start_s: When it was sent, or taken out of the queue before a single server.
        end_s: When its answer was there; beyond the window's end if after.
        within: The share of the time between the two that lay in the window: 1 but for requests at its edges.
        items: How many.
        energy_j: Its own part of the energy read while it was under way in the window.
        idle_share_j: Its part, by items, of what nobody asked for; 0 if its answer came after the window.
    """

    intended_s: float
    start_s: float
    end_s: float
    within: float
    items: int
    energy_j: float
    idle_share_j: float


@dataclass(frozen=True)
class Attribution:
    """The energy of a window, request by request.

    Args:
        requests: All that were under way in it, in the order in which they were meant to be sent.
        idle_j: What was read while none was.
        window_s: How long it was.
    """

    requests: tuple[Share, ...]
    idle_j: float
    window_s: float

    @property
    def meter_j(self) -> float:
        """The energy read over the window: that of all requests and idle, to the last bit of a float."""
        return math.fsum([*(request.energy_j for request in self.requests), self.idle_j])


def attributed(
    queries: Sequence[Query], readings: Sequence[Reading], factor: float = 1.0, idle_power_w: float | None = None
) -> Attribution:
    """Return what each request took of a window, as `attribute` shares it.

    Args:
        queries: All that were under way in the window, and any others.
        readings: Of the window, in order of time.
        factor: What the joules of the readings are multiplied by to be those of a reference meter.
        idle_power_w: As that meter has it; None if it is not known.

    Raises:
        InvalidInput: As `attribute`; or if nobody says when the queries were under way that one run answered.
    """
    if any(query.more for query in queries):
        raise InvalidInput("a command that prints latencies does not say when each was; leave --attribute out")
    begin_s = readings[0].time_s
    end_s = readings[-1].time_s
    inside = [query for query in queries if _within(query, begin_s, end_s) > 0]
    ordered = sorted(inside, key=lambda query: query.start_s or 0.0)
    scaled = [replace(reading, energy_j=reading.energy_j * factor) for reading in readings]
    shares_j, idle_j = attribute(ordered, scaled, idle_power_w)
    answered = [query.items if _span(query)[1] <= end_s + _ROUNDING_S else 0 for query in ordered]
    each_j = idle_j / max(1, sum(answered))
    requests = (
        Share(
            (query.start_s or 0.0) - begin_s,
            _span(query)[0] - begin_s,
            _span(query)[1] - begin_s,
            _within(query, begin_s, end_s),
            query.items,
            share_j,
            items * each_j,
        )
        for query, share_j, items in zip(ordered, shares_j, answered, strict=True)
    )
    return Attribution(tuple(requests), idle_j, end_s - begin_s)


def attribute(
    queries: Sequence[Query], readings: Sequence[Reading], idle_power_w: float | None = None
) -> tuple[tuple[float, ...], float]:
    """Return the energy of each query in joules, and what nobody asked for.

    At every moment power is shared by the queries under way then, by their items; while there is none, it goes to
    nobody: idle. Between two readings power is even but for the time in which no query is under way, which takes the
    power of the idle device, if that is known and below the mean of all. A query is under way from when it was sent;
    while it still waits for others, or in a queue before a single server, it takes nothing. Together these are all the
    readings counted: what rounding leaves over goes to the largest share, so that `math.fsum` of all is what was read.

    Args:
        queries: Each with the time it was meant to be sent, ``start_s``, on the clock of the readings; they may
            overlap.
        readings: In order of time; energy never falls.
        idle_power_w: What the device draws without work; None if it is not known, for power that is even throughout.

    Raises:
        InvalidInput: If a query does not say when it was sent, there are fewer than two readings, or they go back.
    """
    times, totals = _totals(readings)
    spans = [_span(query) for query in queries]
    if spans:
        cuts = np.unique(np.concatenate([times, np.clip(np.ravel(spans), times[0], times[-1])]))
    else:
        cuts = times
    weights = np.zeros(len(cuts) - 1)
    under_way = []
    for query, (start_s, end_s) in zip(queries, spans, strict=True):
        first, last = np.searchsorted(cuts, [max(start_s, times[0]), min(end_s, times[-1])])
        weights[first:last] += query.items
        under_way.append((first, max(first, last)))
    gains = _gains(times, totals, cuts, weights == 0, math.inf if idle_power_w is None else idle_power_w)
    per_item = np.divide(gains, weights, out=np.zeros_like(gains), where=weights > 0)
    shares = [float(q.items * per_item[first:last].sum()) for q, (first, last) in zip(queries, under_way, strict=True)]
    return _exactly(shares, math.fsum(gains[weights == 0]), readings[-1].energy_j - readings[0].energy_j)


def _gains(times: Array, totals: Array, cuts: Array, idle: NDArray[np.bool_], idle_w: float) -> Array:
    """Return the energy between every two cuts, shape (cuts - 1,).

    Args:
        times: Of the readings, rising.
        totals: Their energies, never falling.
        cuts: All of those times and others, rising.
        idle: Where nothing was under way between two cuts, shape (cuts - 1,).
        idle_w: Power there, as far as between two readings there is so much.
    """
    widths = np.diff(cuts)
    gains = np.diff(totals)
    mean_w = gains / np.diff(times)
    if idle_w > (totals[-1] - totals[0]) / (times[-1] - times[0]):
        return np.diff(np.interp(cuts, times, totals))
    between = np.searchsorted(times, cuts[:-1], side="right") - 1
    idle_s, busy_s = (np.bincount(between, widths * where, len(gains)) for where in (idle, ~idle))
    calm_w = np.where(busy_s > 0, np.minimum(idle_w, gains / np.maximum(idle_s, _LEAST_S)), mean_w)
    busy_w = np.maximum(gains - calm_w * idle_s, 0.0) / np.maximum(busy_s, _LEAST_S)
    return np.asarray(np.where(idle, calm_w[between], busy_w[between]) * widths)


def _exactly(shares_j: list[float], idle_j: float, total_j: float) -> tuple[tuple[float, ...], float]:
    """Return shares and idle that sum to a total; what rounding leaves over goes to the largest of them.

    The sum of the largest and what is left over is rounded too, and what that leaves goes to the next.
    """
    parts_j = [idle_j, *shares_j]
    for place in sorted(range(len(parts_j)), key=lambda place: -parts_j[place]):
        left_j = math.fsum([total_j, *(-part_j for part_j in parts_j)])
        if left_j == 0:
            break
        parts_j[place] += left_j
    return tuple(parts_j[1:]), parts_j[0]


def _totals(readings: Sequence[Reading]) -> tuple[Array, Array]:
    times = np.array([reading.time_s for reading in readings], dtype=float)
    totals = np.array([reading.energy_j for reading in readings], dtype=float)
    if len(times) < 2 or np.any(np.diff(times) < 0) or np.any(np.diff(totals) < 0) or times[0] == times[-1]:
        raise InvalidInput("energy is shared between two readings or more, of which none goes back")
    last = np.append(np.diff(times) > 0, True)  # of readings at the same moment
    return times[last], totals[last]


def _span(query: Query) -> tuple[float, float]:
    """Return from when to when a query was under way."""
    if query.start_s is None:
        raise InvalidInput("a query without the time it was sent cannot be given its share of energy")
    return query.start_s if query.sent_s is None else query.sent_s, query.start_s + query.latency_s


def _within(query: Query, begin_s: float, end_s: float) -> float:
    """Return the share of a query's time that lies between two moments."""
    first_s, last_s = _span(query)
    whole_s = last_s - first_s
    inside_s = min(last_s, end_s) - max(first_s, begin_s)
    if inside_s > 0:
        return round(inside_s / whole_s, 9)
    return 0.0
