"""Where the points of a space lie, as numbers a model can use."""

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from polythrottle.space import Knob, Level, SearchSpace

Array = NDArray[np.float64]

_FARTHEST = 8.0
"""Levels more than e⁸ = 3,000 times the default count as that far: no trend holds so long."""
_CLOSEST = 1e-6


@dataclass(frozen=True, eq=False)
class Coordinates:
    """The points of a space in two systems of coordinates.

    Args:
        unit: For distances: every knob spans 0 to 1, labels are corners of a simplex whose edges have length 1; shape
            (points, columns).
        offset: For trends: the logarithm of each ordered knob's level over its level at the default point, shape
            (points, knobs); 0 for labels.
        span: The range of each column of ``offset``, shape (knobs,); 1 where it is zero.
    """

    unit: Array
    offset: Array
    span: Array


@lru_cache(maxsize=4)
def coordinates(space: SearchSpace) -> Coordinates:
    """Return the coordinates of every point of a space; computed once per space."""
    tables = [_unit(knob) for knob in space.knobs]
    columns = [table[space.rows[:, k]] for k, table in enumerate(tables)]
    offsets = [_offset(knob, space.default[knob.name])[space.rows[:, k]] for k, knob in enumerate(space.knobs)]
    unit = np.hstack(columns) if columns else np.zeros((len(space), 0))
    offset = np.column_stack(offsets) if offsets else np.zeros((len(space), 0))
    span = np.ptp(offset, axis=0)
    return Coordinates(unit, offset, np.where(span > 0, span, 1.0))


def _unit(knob: Knob) -> Array:
    """Return a knob's levels as coordinates in the unit cube, shape (levels, columns); no columns if it is constant."""
    if len(knob.levels) == 1:
        return np.zeros((1, 0))
    if not knob.ordered:
        return np.eye(len(knob.levels)) / math.sqrt(2.0)
    scale = log_levels(knob)
    share: Array = (scale - scale[0]) / (scale[-1] - scale[0])
    return share[:, None]


def _offset(knob: Knob, default: Level) -> Array:
    """Return how far each level is from the default's, as a logarithm, shape (levels,)."""
    if not knob.ordered:
        return np.zeros(len(knob.levels))
    scale = log_levels(knob)
    away: Array = np.clip(scale - scale[knob.levels.index(default)], -_FARTHEST, _FARTHEST)
    return away


def log_levels(knob: Knob) -> Array:
    """Return the logarithms of an ordered knob's levels, ascending, shape (levels,).

    A level of zero counts as half the smallest positive one. A knob with negative levels stays linear, scaled to one;
    levels too close to tell apart count as evenly spaced.
    """
    levels = np.array(knob.levels, dtype=float)
    if len(levels) == 1:
        return np.zeros(1)
    scale: Array = levels / np.abs(levels).max() if levels[0] < 0 else _logs(levels)
    return scale if scale[-1] - scale[0] > _CLOSEST else np.linspace(0.0, 1.0, len(levels))


def _logs(levels: Array) -> Array:
    smallest = levels[levels > 0].min()
    logs: Array = np.log(np.maximum(levels, smallest)) - math.log(2.0) * (levels == 0)
    return logs
