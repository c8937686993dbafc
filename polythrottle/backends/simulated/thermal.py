"""Heat: one body warmed by the power it draws, cooled towards the air."""

import math

import numpy as np

from polythrottle.backends.simulated.power import Array, static_w
from polythrottle.catalog.simulation import Thermal


def warmed_c(thermal: Thermal, temperature_c: float, power_w: float, duration_s: float) -> float:
    """Return the temperature after drawing a power for a while."""
    settled_c = thermal.ambient_c + thermal.resistance_c_per_w * power_w
    return settled_c + (temperature_c - settled_c) * math.exp(-duration_s / thermal.time_constant_s)


def settled_c(thermal: Thermal, dynamic_w: Array) -> Array:
    """Return the temperature at which heat and leakage balance while the dynamic power stays; infinite if never."""
    cold_c = thermal.ambient_c + thermal.resistance_c_per_w * (dynamic_w + static_w(thermal, thermal.ambient_c))
    feedback = thermal.resistance_c_per_w * thermal.static_w * thermal.leakage_per_c
    if feedback >= 1.0:
        return np.full_like(cold_c, math.inf)
    return np.asarray(thermal.ambient_c + (cold_c - thermal.ambient_c) / (1.0 - feedback))


def sustainable_w(thermal: Thermal) -> float:
    """Return the power in watts that holds the board at its temperature limit; 0 if even the air is too hot."""
    return max(0.0, (thermal.limit_c - thermal.ambient_c) / thermal.resistance_c_per_w)


def capped_c(thermal: Thermal, power_w: Array) -> Array:
    """Return the temperature a board settles at while a cap holds it at a power; at most its limit."""
    return np.minimum(thermal.limit_c, thermal.ambient_c + thermal.resistance_c_per_w * power_w)
