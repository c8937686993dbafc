"""Looks at a device during a window, and the same looks with the steps of its counter found."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from polythrottle.measurement import Reading
from polythrottle.sensors import Sensor

Array = NDArray[np.float64]
_STILL = 0.2
_FEWEST_STEPS = 5


@dataclass(frozen=True)
class Look:
    """A reading, and what had been served by then.

    Args:
        reading: Of the device.
        queries: Answered since the window began; items and tokens likewise.
    """

    reading: Reading
    queries: int = 0
    items: int = 0
    tokens: int = 0


@dataclass(frozen=True)
class Course:
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


def course(looks: Sequence[Look], sensor: Sensor) -> Course:
    """Return what looks say; where the total moves in steps that were seen, only the moments at which it moved.

    At such a moment the total is that of just then, so that what is uncertain of it is the time between two looks, and
    no longer a whole step.

    Args:
        looks: At least two.
        sensor: What made the total.
    """
    whole = every(looks)
    time_s, energy_j, served = whole.time_s, whole.energy_j, whole.served
    step_s = step_seen(sensor, whole)
    moved = np.flatnonzero(np.diff(energy_j) > 0) + 1
    gap_s = float(np.mean(time_s[moved] - time_s[moved - 1])) if len(moved) else step_s
    if step_s == 0 or len(moved) < _FEWEST_STEPS or gap_s > step_s / 2:
        return Course(time_s, energy_j, served, step_s)
    at_s = (time_s[moved] + time_s[moved - 1]) / 2
    there = np.column_stack([np.interp(at_s, time_s, column) for column in served.T])
    return Course(at_s, energy_j[moved], there, gap_s)


def every(looks: Sequence[Look]) -> Course:
    """Return what looks say if each is exact.

    Args:
        looks: At least two.
    """
    first = looks[0].reading
    time_s = np.array([look.reading.time_s - first.time_s for look in looks])
    energy_j = np.array([look.reading.energy_j - first.energy_j for look in looks])
    served = np.array([(look.queries, look.items, look.tokens) for look in looks], dtype=float)
    return Course(time_s, energy_j, served, 0.0)


def step_seen(sensor: Sensor, seen: Course) -> float:
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
