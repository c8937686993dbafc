"""The self-test of a device's energy reading: how often it moves, in what steps, how long it takes to follow.

The device idles and works by turns, and its reading is looked at as fast as may be. The time constant is that of a lag;
a moving average looks like one of half its length. What a board's files say of averaging is believed, and only what
lags besides is a lag.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from polythrottle.errors import TrialError
from polythrottle.meter.calibration import uncalibrated
from polythrottle.ports import Device
from polythrottle.sensors import Sensor

Array = NDArray[np.float64]
_LEAST_STEPS = 5
_PHASE_S, _LOOK_S = 10.0, 0.002
_TURNS = (1.0, 1.0, 0.6, 1.4, 1.0)
PHASES = sum(_TURNS)
"""How many phases of the length that is asked for a self-test lasts."""
_OFTEN, _APART, _BESIDES = 0.7, 1.2, 0.25


@dataclass(frozen=True)
class SelfTest:
    """What a self-test found.

    Args:
        sensor: The device's, as far as it shows.
        idle_w: Power without work.
        loaded_w: Power with it.
        rise_s: Time constant with which readings follow when work begins; None if it is too short to see.
        fall_s: Likewise when it ends.
        readings: Times in seconds and joules, in order.
    """

    sensor: Sensor
    idle_w: float
    loaded_w: float
    rise_s: float | None
    fall_s: float | None
    readings: tuple[tuple[float, float], ...]


def self_test(device: Device, work: Callable[[], object], phase_s: float = _PHASE_S) -> SelfTest:
    """Look at a device's energy reading while it idles and works by turns.

    Args:
        device: Entered.
        work: Does a little work, for some milliseconds.
        phase_s: How long a turn takes, about; there are five, idle first and last.

    Raises:
        TrialError: If the reading does not move, or falls.
    """
    phases = []
    for turn, length in enumerate(_TURNS):  # uneven, so that a meter's log fits at one shift only
        phases.append(_seen(device, work if turn % 2 else lambda: device.clock.sleep(_LOOK_S), length * phase_s))
    idle, loaded = phases[-1], phases[1]
    step_s, quantum_j = _steps(phases)
    idle_w, loaded_w = _power_w(_second_half(idle)), _power_w(_second_half(loaded))
    rise_s, fall_s = _follow_s(loaded, idle_w, loaded_w, step_s), _follow_s(phases[2], loaded_w, idle_w, step_s)
    told = uncalibrated(device)
    besides_s = max(rise_s or 0.0, fall_s or 0.0) - told.late_s
    known = replace(
        told,
        step_s=told.step_s if told.average_s else step_s,
        quantum_j=quantum_j,
        lag_s=besides_s if besides_s > _BESIDES * told.late_s else 0.0,
        source="self-test",
    )
    readings = tuple((float(time_s), float(energy_j)) for time_s, energy_j in np.vstack(phases).tolist())
    return SelfTest(known, idle_w, loaded_w, rise_s, fall_s, readings)


def _seen(device: Device, work: Callable[[], object], phase_s: float) -> Array:
    """Return looks at time and energy, as many as there is time for, shape (looks, 2)."""
    looks, end_s = [], device.clock.now() + phase_s
    while (now := device.read()).time_s < end_s:
        looks.append((now.time_s, now.energy_j))
        work()
    found = np.array(looks, dtype=float)
    if len(found) < _LEAST_STEPS or not np.all(np.isfinite(found)):
        raise TrialError(f"the device was read only {len(found)} times in {phase_s:g} s; it cannot be calibrated")
    if np.any(np.diff(found[:, 1]) < 0):
        raise TrialError("the energy reading falls, so it cannot be calibrated")
    if found[-1, 1] <= found[0, 1]:
        raise TrialError(f"the energy reading did not move in {phase_s:g} s, so it cannot be calibrated")
    return found


def _steps(phases: list[Array]) -> tuple[float, float]:
    """Return how often the total moves, 0 if as often as it was looked at; and the least it moved by."""
    periods, least = [], math.inf
    for looks in phases:
        gains = np.diff(looks[:, 1])
        moved = looks[1:, 0][gains > 0]
        least = min(least, float(gains[gains > 0].min()))
        if len(moved) >= _LEAST_STEPS and np.mean(gains > 0) < _OFTEN:
            periods.append(float(np.median(np.diff(moved))))
    return (float(np.median(periods)), least) if periods else (0.0, 0.0)


def _power_w(looks: Array) -> float:
    return float((looks[-1, 1] - looks[0, 1]) / (looks[-1, 0] - looks[0, 0]))


def _second_half(looks: Array) -> Array:
    return looks[len(looks) // 2 :]


def _follow_s(looks: Array, before_w: float, after_w: float, step_s: float) -> float | None:
    """Return the time constant of a change: the energy missing or left over after it, over the height of the step."""
    if max(before_w, after_w) <= _APART * min(before_w, after_w):
        return None
    elapsed_s = looks[-1, 0] - looks[0, 0]
    missing_j = after_w * elapsed_s - (looks[-1, 1] - looks[0, 1])
    found_s = float(missing_j / (after_w - before_w))
    return found_s if found_s > max(2 * step_s, 0.02) else None
