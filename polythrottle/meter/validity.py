"""Whether a window may be believed: sensors that stop or fall, devices that slow down, somebody who came between."""

import math
from collections.abc import Sequence
from itertools import pairwise
from statistics import median

from polythrottle.errors import TrialError
from polythrottle.measurement import Query
from polythrottle.meter.looks import Look
from polythrottle.sensors import Sensor

DRIFT_MOST = 0.05
"""By what fraction power may drift over a window; more is a board that has not settled."""
_HOLE_S, _HOLES = 0.25, 20.0
_STOPPED, _STOPPED_S = 6.0, 0.5


class Disturbed(TrialError):
    """A window that something came into; another one may be better."""


def check_readings(looks: Sequence[Look], sensor: Sensor) -> None:
    """Check that clock and energy went forward, and did not stop.

    Raises:
        TrialError: If they did not, or the window is shorter than the sensor's step.
    """
    first, last = looks[0].reading, looks[-1].reading
    elapsed_s = last.time_s - first.time_s
    if not all(math.isfinite(look.reading.energy_j) and math.isfinite(look.reading.time_s) for look in looks):
        raise TrialError("the energy reading is not a number, so the window tells nothing")
    if elapsed_s <= 0:
        raise TrialError("the window took no time, so it has no power")
    for before, after in pairwise(look.reading for look in looks):
        if after.time_s < before.time_s:
            raise TrialError(f"the clock went back by {before.time_s - after.time_s:.3g} s within the window")
        if after.energy_j < before.energy_j and last.energy_j > first.energy_j:
            raise TrialError(f"the energy reading fell by {before.energy_j - after.energy_j:.3g} J within the window")
    if last.energy_j <= first.energy_j:
        raise TrialError(f"the energy reading did not move in {elapsed_s:.3g} s; use a longer window")
    if elapsed_s < sensor.step_s:
        raise TrialError(
            f"the window took {elapsed_s:.3g} s, and the energy reading moves every {sensor.step_s:.3g} s; use a "
            f"longer window"
        )
    _check_moving(looks, sensor)


def _check_moving(looks: Sequence[Look], sensor: Sensor) -> None:
    """Check that the total did not stand still at the end for far longer than it ever did before."""
    pairs = list(pairwise(look.reading for look in looks))
    moved_s = [looks[0].reading.time_s, *(after.time_s for before, after in pairs if after.energy_j > before.energy_j)]
    gaps_s = [late - early for early, late in pairwise(moved_s)]
    looked_s = max(after.time_s - before.time_s for before, after in pairs)
    still_s = looks[-1].reading.time_s - moved_s[-1]
    longest_s = max([*gaps_s, sensor.step_s, looked_s])
    if still_s > max(_STOPPED * longest_s, _STOPPED_S):
        raise TrialError(f"the energy reading stopped moving {still_s:.3g} s before the window ended")


def check_undisturbed(looks: Sequence[Look], queries: Sequence[Query], ends_s: Sequence[float], closed: bool) -> None:
    """Check that the device did not slow itself down, and that nothing held up the queries.

    Args:
        looks: At the device.
        queries: Of the window.
        ends_s: When each was answered, on the device's clock.
        closed: Whether each query went out as soon as the one before was answered.

    Raises:
        Disturbed: If so.
    """
    for look in looks:
        if look.reading.throttled:
            raise Disturbed(
                f"the device slowed itself down at {look.reading.temperature_c} °C, so the window is not valid"
            )
    if closed and (hole_s := _hole_s(queries, ends_s)) is not None:
        raise Disturbed(f"nothing was served for {hole_s:.2g} s within the window: something else held it up")


def check_drift(drift: float | None) -> None:
    """Check that power did not drift by more than `DRIFT_MOST` over the window.

    Raises:
        Disturbed: If it did.
    """
    if drift is not None and abs(drift) > DRIFT_MOST:
        raise Disturbed(f"power drifted by {drift:+.1%} over the window; warm up for longer")


def _hole_s(queries: Sequence[Query], ends_s: Sequence[float]) -> float | None:
    """Return the longest time in which nobody waited for an answer; None if it is nothing unusual."""
    spare_s = [end - start - query.latency_s for (start, end), query in zip(pairwise(ends_s), queries[1:], strict=True)]
    if not spare_s or not math.isfinite(longest := max(spare_s)):
        return None
    usual_s = max(median(spare_s), median(query.latency_s for query in queries))
    return longest if longest > max(_HOLE_S, _HOLES * usual_s) else None
