"""What physics says before anything is measured: how each kind of knob moves each quantity.

Around the default point the logarithm of a quantity is taken as a sum over knobs of

    slope · x  +  bend · x² / (2 · span)  +  Σ hinge · width · softplus((x − knee) / width),

    x = log(level / default level),

so that the elasticity is ``slope`` at the default, changes by ``bend`` over the knob's span, and by ``hinge`` at each
knee: the logarithm of a roofline, t = a/f + c or t = a + c·batch, turns from one slope to another within a factor of
about e. All have normal priors, which the Gaussian process integrates out exactly (Rasmussen & Williams 2006, §2.7).
The means of slope and bend follow from such a roofline and from power over a flat-then-linear voltage curve,
P = P0 + k f V(f)²; hinges have mean 0. A floor under a clock does nothing at its lowest level and more the higher it
is.
"""

from collections.abc import Mapping, Sequence, Set

import numpy as np

from polythrottle.optimize.features import Array, Coordinates
from polythrottle.optimize.options import Ingredient
from polythrottle.optimize.quantities import DRAW, ENERGY, TIME
from polythrottle.space import Knob

_POWER = "power"
_NEUTRAL = (0.0, 0.0)
_MEANS: Mapping[str, Mapping[str, tuple[float, float]]] = {
    "clock": {"latency": (-0.3, 0.4), TIME: (-0.3, 0.4), _POWER: (0.4, 0.4)},
    "floor": {"latency": (0.0, -0.3), TIME: (0.0, -0.3), _POWER: (0.0, 0.3)},
    "limit": {"latency": (-0.2, 0.8), TIME: (-0.2, 0.8), _POWER: (0.5, -0.3)},
    "batch": {"latency": (0.4, 0.6), TIME: (-0.6, 0.6), _POWER: (0.2, -0.2)},
}
"""Prior mean of slope and bend by kind of knob and quantity; kinds and quantities that are absent have no direction."""
SLOPE_SD, BEND_SD, HINGE_SD = 0.3, 0.4, 0.3
"""Prior deviations of every slope, bend and hinge."""
_KNEES, _KNEE_WIDTH = (0.2, 0.5, 0.8), 0.5
"""Where hinges sit, as shares of a knob's range, and how soft they are, in units of the logarithm."""


def basis(knobs: Sequence[Knob], where: Coordinates, without: Set[Ingredient] = frozenset()) -> Array:
    """Return the trend's basis functions, each times its coefficient's prior deviation, shape (points, functions).

    The first function is a constant; then, for the ordered knobs, slopes, bends and hinges.
    """
    ordered = np.array([knob.ordered for knob in knobs], dtype=bool)
    slope, span = where.offset[:, ordered], where.span[ordered]
    columns = [np.ones((len(slope), 1))]
    if Ingredient.TREND not in without:
        columns += [SLOPE_SD * slope, BEND_SD * slope**2 / (2.0 * span)]
    if not {Ingredient.TREND, Ingredient.HINGES} & without:
        columns += [HINGE_SD * _hinge(slope, slope.min(axis=0) + share * span) for share in _KNEES]
    return np.hstack(columns)


def _hinge(slope: Array, knee: Array) -> Array:
    """Return a function that is flat below a knee and rises with slope 1 above it, 0 at the default point."""
    rise = np.logaddexp(0.0, (slope - knee) / _KNEE_WIDTH) - np.logaddexp(0.0, -knee / _KNEE_WIDTH)
    return np.asarray(_KNEE_WIDTH * rise)


def expected(knobs: Sequence[Knob], where: Coordinates, quantities: Sequence[str]) -> Array:
    """Return the prior mean of each quantity at each point up to a constant, shape (points, quantities)."""
    means = np.array([[_mean(knob, name) for knob in knobs] for name in quantities]).reshape(len(quantities), -1, 2)
    bend = where.offset**2 / (2.0 * where.span)
    total: Array = where.offset @ means[:, :, 0].T + bend @ means[:, :, 1].T
    return total


def _mean(knob: Knob, quantity: str) -> tuple[float, float]:
    if quantity == ENERGY:
        time, draw = _mean(knob, TIME), _mean(knob, DRAW)
        return time[0] + draw[0], time[1] + draw[1]
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
