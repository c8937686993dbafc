"""Which quantities of a measurement are modelled, how energy and constraints are made of them.

How sure each is; slow queries by their pooled tails.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from polythrottle.domain.measurement import Measurement
from polythrottle.domain.metrics import FLOORS, OF_CLASS
from polythrottle.domain.problem import Constraint
from polythrottle.optimize.features import Array

# How slow the slowest queries of a point are, from all windows of a study.
#
# A percentile far out, seen through few queries, is mostly luck and mostly too low: stragglers are rare and come in
# clusters, so that a short window has seen none. But how much slower they are than the median is much alike at points
# of one device and one model, and the median is known from few queries. So the logarithm of percentile over median is
# taken as normal about a mean that all windows share, points differing by a deviation that the windows tell (a
# random-effects model: DerSimonian and Laird, Controlled Clinical Trials 7, 1986), and each window's own is drawn
# towards that mean as far as it is vague. What a window says is the middle of its interval, of logarithms as all of
# this: the percentile itself is mostly too low and sometimes far too high, and the middle of the times is far above the
# truth where an interval reaches four times as far up as down, as on a busy processor. Of a window whose upper end is
# not known only the lower end counts.
#
# Where queries come at times of their own, queues make the tail, which differs from point to point: each window then
# speaks for itself. So it does of the first token of a language model, which waits for the prompts of those that are in
# flight with it: on a simulated H100 its p99 is 4.2 times the median at 256 in flight and 6.3 times at 64 and a lower
# clock, and what all windows share made 1.30 s of the 0.91 s that it is.

MEDIANS = {"p90": "p50", "p95": "p50", "p99": "p50", "tpot_p99": "tpot_p50"}
"""The median of each percentile that is far out, be it of all requests or of a class of them."""
APART_SD = 0.05
APART_WINDOWS = 2.0
"""By how much points differ besides luck, as a logarithm, and how many windows that assumption counts for; assumed."""
_LEAST_SD = 1e-3
_TWO_SIDED = 1.96
_ONE_SIDED = 1.645
"""Deviations that an interval of 95 % reaches to both sides, and one end of it alone (normal quantiles)."""
_NORMAL = NormalDist()


@dataclass(frozen=True)
class _Tail:
    """The logarithm of a percentile over its median, as one window has it.

    Args:
        median: Logarithm of the median.
        ratio: The middle of what it may be.
        least: The lower end.
        variance: Of that; None if the upper end is not known.
        queries: How many it is made of.
    """

    median: float
    ratio: float
    least: float
    variance: float | None
    queries: int


def pooled(measurements: Sequence[Measurement], quantity: str) -> tuple[Array, Array] | None:
    """Return the logarithm of a percentile in each window as all of them together tell it, and its variance.

    Shape (measurements,) each, NaN where nothing is pooled; None if no window's percentile is known at both ends.

    Args:
        measurements: Of one study.
        quantity: A percentile far out, one of `MEDIANS`; of any other there is nothing to pool.
    """
    tails = [_tail(measurement, quantity) for measurement in measurements]
    known = [tail for tail in tails if tail is not None and tail.variance is not None]
    if not known:
        return None
    mean, apart, unsure, per_query = _shared(known)
    told = [_told(tail, mean, apart + unsure, per_query) for tail in tails]
    values, variances = np.array(told, dtype=float).T
    return values, variances


def _tail(measurement: Measurement, quantity: str) -> _Tail | None:
    """Return what a window says of its tail; None if it does not, or if a queue may have made it."""
    name, divided, prompts = quantity.partition(OF_CLASS)
    if name not in MEDIANS or measurement.offered_per_s is not None:
        return None
    value = measurement.metric(quantity)
    median = measurement.metric(f"{MEDIANS[name]}{divided}{prompts}")
    interval = measurement.intervals.get(quantity)
    queries = measurement.latency.queries
    if value is None or median is None or interval is None or not queries or interval.low <= 0:
        return None
    log_median = math.log(median)
    least = math.log(interval.low) - log_median
    if not interval.known:
        return _Tail(log_median, math.log(value) - log_median, least, None, queries)
    most = math.log(interval.high) - log_median
    variance = ((most - least) / 2 / _TWO_SIDED) ** 2
    return _Tail(log_median, (least + most) / 2, least, variance, queries)


def _shared(known: Sequence[_Tail]) -> tuple[float, float, float, float]:
    """Return mean, variance between points, variance of the mean, and variance of one window times its queries.

    The latter is one for all, because a window that was lucky calls itself precise.
    """
    ratios, queries = (np.array([getattr(tail, name) for tail in known]) for name in ("ratio", "queries"))
    per_query = float(np.median([(tail.variance or 0.0) * tail.queries for tail in known]))
    apart = _apart(ratios, np.maximum(per_query / queries, _LEAST_SD**2))
    weights = 1.0 / (apart + np.maximum(per_query / queries, _LEAST_SD**2))
    return float(weights @ ratios / weights.sum()), apart, float(1.0 / weights.sum()), per_query


def _apart(ratios: Array, variances: Array) -> float:
    """Return the variance between points (DerSimonian and Laird's), with that assumed counted as some windows."""
    more = len(ratios) - 1
    assumed = APART_SD**2
    if not more:
        return assumed
    weights = 1.0 / variances
    beyond = float(weights @ (ratios - weights @ ratios / weights.sum()) ** 2) - more
    seen = max(0.0, beyond / float(weights.sum() - weights @ weights / weights.sum()))
    return max((APART_WINDOWS * assumed + more * seen) / (APART_WINDOWS + more), _LEAST_SD**2)


def _told(tail: _Tail | None, mean: float, variance: float, per_query: float) -> tuple[float, float]:
    """Return the logarithm of a window's percentile, and its variance; NaN of none."""
    if tail is None:
        return math.nan, math.nan
    if tail.variance is None:
        ratio, left = _above(mean, math.sqrt(variance), tail.least)
        return tail.median + ratio, left
    own = max(per_query / tail.queries, _LEAST_SD**2)
    share = variance / (variance + own)
    return tail.median + mean + share * (tail.ratio - mean), share * own


def _above(mean: float, deviation: float, least: float) -> tuple[float, float]:
    """Return mean and variance of a normal that is known to be above a value."""
    z = (least - mean) / deviation
    beyond = 1.0 - _NORMAL.cdf(z)
    if beyond < 1e-6:
        return least, deviation**2
    pull = _NORMAL.pdf(z) / beyond
    return mean + deviation * pull, deviation**2 * max(1.0 + z * pull - pull * pull, 0.05)


# Which quantities of a measurement are modelled, and how energy and constraints are made of them.
#
# All are logarithms, so that products become sums: energy per item is power × time per item, and a limit on
# throughput is one on time per item. Temperature is the exception: it enters in units of 40 °C.

TIME = "time"
"""Log seconds per item, from throughput."""
DRAW = "draw"
"""Log watts the energy per item amounts to: energy per item × throughput."""
ENERGY = "energy"
"""Log joules per item, where it is modelled for itself."""
_TEMPERATURE_UNIT_C = 40.0
_MOST = 10.0
_INTERVALS = {TIME: "throughput", DRAW: "power"}
"""Which interval tells of a quantity, where that is not the one of its own name."""
_JOULES = frozenset({DRAW, ENERGY, "power", "tokens_per_j"})


@dataclass(frozen=True)
class Bound:
    """An upper limit on one modelled quantity, both on that quantity's scale."""

    quantity: str
    limit: float


def bound(constraint: Constraint) -> Bound:
    """Return an absolute constraint as an upper limit on a modelled quantity."""
    if constraint.metric == "throughput":
        return Bound(TIME, -math.log(constraint.limit))
    return Bound(constraint.metric, _scaled(constraint.metric, constraint.limit))


def names(bounds: Sequence[Bound]) -> tuple[str, ...]:
    """Return every quantity to model: time and draw first, then those that are bounded."""
    return tuple(dict.fromkeys((TIME, DRAW, *(bound.quantity for bound in bounds))))


def table(measurements: Sequence[Measurement], quantities: Sequence[str]) -> Array:
    """Return the quantities of each measurement, shape (measurements, quantities); NaN where one is missing.

    A percentile far out is as all of the measurements tell it; see `tails`.
    """
    rows = [[_value(measurement, name) for name in quantities] for measurement in measurements]
    values = np.array(rows, dtype=float).reshape(len(measurements), len(quantities))
    for k, name in enumerate(quantities):
        if (tails := pooled(measurements, name)) is not None:
            values[:, k] = np.where(np.isnan(tails[0]), values[:, k], tails[0])
    return values


def doubts(measurements: Sequence[Measurement], quantities: Sequence[str]) -> Array:
    """Return the variance of each quantity that its 95 % interval tells of, shape (measurements, quantities).

    It is 0 where no window tells an interval. One that is open above, as of a p99 seen through few queries, or that a
    window could not tell beside others, is taken to be as wide as the widest there is; of a window that was cut short
    because it plainly broke a limit only how far the value may be below counts, because above there is nothing but more
    of the same.

    What all intervals of energy have at least may be an error they share, such as that of a sensor's factor, which
    moves no point against another: only what they have beyond it counts, and if it is not shared, the noise that is
    fitted to the values finds it.
    """
    return np.column_stack([_doubt(measurements, name) for name in quantities])


def usual(doubt: Array) -> Array:
    """Return the doubt of a measurement as most are, shape (quantities,)."""
    return np.asarray(np.median(doubt, axis=0), dtype=float)


def _doubt(measurements: Sequence[Measurement], quantity: str) -> Array:
    found = [_deviations(measurement, quantity) for measurement in measurements]
    closed, least = np.array(found, dtype=float).reshape(-1, 2).T
    # Too few answers to tell how far chance may be from the truth make nothing sure.
    tells = np.array([bool(measurement.intervals) for measurement in measurements], dtype=bool)
    least = np.where(np.isnan(least) & tells, 0.0, least)
    broken = np.array([measurement.censored for measurement in measurements], dtype=bool)
    widest = np.where(broken, 0.0, np.nanmax(closed, initial=0.0))
    doubt = np.where(np.isnan(closed), np.maximum(least, widest), closed) ** 2
    if (tails := pooled(measurements, quantity)) is not None:
        doubt = np.where(np.isnan(tails[1]), doubt, tails[1])
    shared = 0.0
    if quantity in _JOULES:
        shared = np.nanmin(doubt, initial=math.inf)
    excess: Array = np.nan_to_num(doubt - shared, nan=0.0)
    return excess


def _deviations(measurement: Measurement, quantity: str) -> tuple[float, float]:
    """Return the deviation an interval tells of, and the least one that is open does; NaN for what is not so."""
    unknown = float("nan")
    scale = _unit(measurement, quantity)
    interval = measurement.intervals.get(_INTERVALS.get(quantity, quantity))
    if interval is None or scale is None:
        return unknown, unknown
    if interval.known:
        half = interval.half / scale
        # Of a percentile the interval may reach four times as far up as down, and half of it is no deviation of the
        # logarithm then: one such window made all look vague whose upper end is not known.
        if quantity != "temperature" and interval.low > 0:
            half = min(half, math.log(interval.high / interval.low) / 2)
        return min(half / _TWO_SIDED, _MOST), unknown
    below = (scale - interval.low) / scale / _ONE_SIDED
    return unknown, min(max(0.0, below), _MOST)


def _unit(measurement: Measurement, quantity: str) -> float | None:
    """Return what a change by one on a quantity's scale is worth in the unit of its interval, at a measurement."""
    if quantity == "temperature":
        return _TEMPERATURE_UNIT_C
    if quantity == ENERGY:
        return measurement.energy_j
    if quantity == DRAW:
        return measurement.energy_j * measurement.throughput_per_s
    return measurement.metric(_INTERVALS.get(quantity, quantity))


def _value(measurement: Measurement, quantity: str) -> float:
    if quantity == TIME:
        return -math.log(measurement.throughput_per_s)
    if quantity == ENERGY:
        return math.log(measurement.energy_j)
    if quantity == DRAW:
        return math.log(measurement.energy_j) + math.log(measurement.throughput_per_s)
    value = measurement.metric(quantity)
    if value is None:
        return float("nan")
    return _scaled(quantity, value)


def _scaled(metric: str, value: float) -> float:
    if metric in FLOORS:
        return -math.log(value)
    if metric == "temperature":
        return value / _TEMPERATURE_UNIT_C
    return math.log(value)


def metric_quantity(metric: str) -> str:
    """Return the modelled quantity that a metric is a function of: `TIME` for throughput, else its own."""
    if metric == "throughput":
        return TIME
    return metric


def in_units(metric: str, value: Array) -> Array:
    """Return a metric in its own unit, given values of its modelled quantity; same shape."""
    if metric == "temperature":
        return value * _TEMPERATURE_UNIT_C
    if metric in FLOORS:
        value = -value
    found: Array = np.exp(value)
    return found
