"""What physics says before anything is measured: how each kind of knob moves each quantity.

Around the default point the logarithm of a quantity is taken as a sum over knobs of

    slope · x  +  bend · x² / (2 · span),        x = log(level / default level),

so that the elasticity is ``slope`` at the default and changes by ``bend`` over the knob's span. Both have normal
priors, which the Gaussian process integrates out exactly (Rasmussen & Williams 2006, §2.7). The means follow from a
roofline time, t = a/f + c, and from power over a flat-then-linear voltage curve, P = P0 + k f V(f)². A floor under a
clock does nothing at its lowest level and more the higher it is.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from polythrottle.optimize.features import Array, Coordinates
from polythrottle.optimize.quantities import DRAW, TIME
from polythrottle.space import Knob

_POWER = "power"
_NEUTRAL = (0.0, 0.0)
_MEANS: Mapping[str, Mapping[str, tuple[float, float]]] = {
    "clock": {"latency": (-0.3, 0.4), TIME: (-0.3, 0.4), _POWER: (0.4, 0.4)},
    "floor": {"latency": (0.0, -0.3), TIME: (0.0, -0.3), _POWER: (0.0, 0.3)},
    "limit": {"latency": (-0.2, 0.8), TIME: (-0.2, 0.8), _POWER: (0.5, -0.3)},
    "batch": {"latency": (0.6, 0.3), TIME: (-0.4, 0.3), _POWER: (0.2, -0.2)},
}
"""Prior mean of slope and bend by kind of knob and quantity; kinds and quantities that are absent have no direction."""
SLOPE_SD, BEND_SD = 0.3, 0.4
"""Prior deviations of every slope and bend."""


def basis(knobs: Sequence[Knob], where: Coordinates) -> Array:
    """Return the trend's basis functions, each times its coefficient's prior deviation, shape (points, functions).

    The first function is a constant; then the slopes and the bends of the ordered knobs.
    """
    ordered = np.array([knob.ordered for knob in knobs], dtype=bool)
    slope = where.offset[:, ordered]
    bend = slope**2 / (2.0 * where.span[ordered])
    constant = np.ones((len(slope), 1))
    return np.hstack([constant, SLOPE_SD * slope, BEND_SD * bend])


def expected(knobs: Sequence[Knob], where: Coordinates, quantities: Sequence[str]) -> Array:
    """Return the prior mean of each quantity at each point up to a constant, shape (points, quantities)."""
    means = np.array([[_mean(knob, name) for knob in knobs] for name in quantities]).reshape(len(quantities), -1, 2)
    bend = where.offset**2 / (2.0 * where.span)
    total: Array = where.offset @ means[:, :, 0].T + bend @ means[:, :, 1].T
    return total


def _mean(knob: Knob, quantity: str) -> tuple[float, float]:
    return _MEANS.get(_kind(knob), {}).get(_family(quantity), _NEUTRAL)


def _kind(knob: Knob) -> str:
    if knob.name.endswith("_hz"):
        return "floor" if "_min_" in knob.name else "clock"
    if knob.name.endswith("_w"):
        return "limit"
    return "batch" if "batch" in knob.name else "other"


def _family(quantity: str) -> str:
    if quantity in (DRAW, "power"):
        return _POWER
    return quantity if quantity in (TIME, "temperature") else "latency"
