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
