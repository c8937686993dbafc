"""Which quantities of a measurement are modelled, and how energy and constraints are made of them.

All are logarithms, so that products become sums: energy per item is power × time per item, and a limit on throughput
is one on time per item. Temperature is the exception: it enters in units of 40 °C.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from polythrottle.measurement import FLOORS, Measurement
from polythrottle.optimize.features import Array
from polythrottle.problem import Constraint

TIME = "time"
"""Log seconds per item, from throughput."""
DRAW = "draw"
"""Log watts the energy per item amounts to: energy per item × throughput."""
ENERGY = "energy"
"""Log joules per item, where it is modelled for itself."""
_TEMPERATURE_UNIT_C = 40.0
_TWO_SIDED, _ONE_SIDED = 1.96, 1.645
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
    """Return the quantities of each measurement, shape (measurements, quantities); NaN where one is missing."""
    rows = [[_value(measurement, name) for name in quantities] for measurement in measurements]
    return np.array(rows, dtype=float).reshape(len(measurements), len(quantities))


def doubts(measurements: Sequence[Measurement], quantities: Sequence[str]) -> Array:
    """Return the variance of each quantity that its 95 % interval tells of, shape (measurements, quantities).

    It is 0 where there is no interval. One that is open above, as of a p99 seen through few queries, is taken to be as
    wide as the widest there is; of a window that was cut short because it plainly broke a limit only how far the value
    may be below counts, because above there is nothing but more of the same.

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
    broken = np.array([measurement.censored for measurement in measurements], dtype=bool)
    widest = np.where(broken, 0.0, np.nanmax(closed, initial=0.0))
    doubt = np.where(np.isnan(closed), np.maximum(least, widest), closed) ** 2
    shared = np.nanmin(doubt, initial=math.inf) if quantity in _JOULES else 0.0
    excess: Array = np.nan_to_num(doubt - shared, nan=0.0)
    return excess


def _deviations(measurement: Measurement, quantity: str) -> tuple[float, float]:
    """Return the deviation an interval tells of, and the least one that is open does; NaN for what is not so."""
    unknown, scale = float("nan"), _unit(measurement, quantity)
    interval = measurement.intervals.get(_INTERVALS.get(quantity, quantity))
    if interval is None or scale is None:
        return unknown, unknown
    if interval.known:
        return min(interval.half / scale / _TWO_SIDED, _MOST), unknown
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
    return float("nan") if value is None else _scaled(quantity, value)


def _scaled(metric: str, value: float) -> float:
    if metric in FLOORS:
        return -math.log(value)
    return value / _TEMPERATURE_UNIT_C if metric == "temperature" else math.log(value)


def metric_quantity(metric: str) -> str:
    """Return the modelled quantity that a metric is a function of: `TIME` for throughput, else its own."""
    return TIME if metric == "throughput" else metric


def in_units(metric: str, value: Array) -> Array:
    """Return a metric in its own unit, given values of its modelled quantity; same shape."""
    if metric == "temperature":
        return value * _TEMPERATURE_UNIT_C
    found: Array = np.exp(-value if metric in FLOORS else value)
    return found
