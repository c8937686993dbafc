"""Whether a window may be believed: sensors that stop or fall, devices that slow down, somebody who came between."""

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from statistics import median

from polythrottle.errors import TrialError
from polythrottle.measurement import Query, Reading
from polythrottle.meter.looks import Look
from polythrottle.sensors import Sensor

DRIFT_MOST = 0.05
"""By what fraction power may drift over a window; more is a board that has not settled."""
_HOLE_S, _HOLES = 0.25, 20.0
_STILL, _STILL_S = 2.5, 0.25
_FEWEST_MOVES, _BRIEF_S = 5, 0.01
_STEADY, _UNSTEADY = 2.0, 4.0
"""How many times the power of any other stretch one may show: back to back, and where requests come unevenly."""


class Disturbed(TrialError):
    """A window that something came into; another one may be better."""


class LockLost(Disturbed):
    """A window in which a clock ran above what had been applied; another one is worth it once that is applied again."""


def check_readings(looks: Sequence[Look], sensor: Sensor, closed: bool) -> None:
    """Check that clock and energy went forward, evenly enough to be believed.

    Args:
        looks: At the device.
        sensor: What it reads its energy with.
        closed: Whether it worked all the time, so that its power was steady.

    Raises:
        Disturbed: If the energy fell, stood still for a while, or jumped; in another window it may not.
        TrialError: If it is no number or never moves, the clock went back, or the window is shorter than a step.
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
            raise Disturbed(f"the energy reading fell by {before.energy_j - after.energy_j:.3g} J within the window")
    if last.energy_j <= first.energy_j:
        raise TrialError(f"the energy reading did not move in {elapsed_s:.3g} s; use a longer window")
    if elapsed_s < sensor.step_s:
        raise TrialError(
            f"the window took {elapsed_s:.3g} s, and the energy reading moves every {sensor.step_s:.3g} s; use a "
            f"longer window"
        )
    moved = [looks[0].reading, *(after for before, after in _pairs(looks) if after.energy_j > before.energy_j)]
    step_s = max(sensor.step_s, median(after.time_s - before.time_s for before, after in pairwise(moved)))
    _check_moving(looks, step_s)
    _check_even(moved, step_s, _STEADY if closed else _UNSTEADY)


def _pairs(looks: Sequence[Look]) -> Iterator[tuple[Reading, Reading]]:
    return pairwise(look.reading for look in looks)


def _check_moving(looks: Sequence[Look], step_s: float) -> None:
    """Check that the total never stood still for far longer than it usually does, at the end neither."""
    since_s = looks[0].reading.time_s
    for before, after in _pairs(looks):
        if after.energy_j > before.energy_j:
            since_s = after.time_s
        elif (still_s := after.time_s - since_s) > max(_STILL * step_s, _STILL_S):
            end_s = looks[-1].reading.time_s
            if since_s >= max(now.time_s for was, now in _pairs(looks) if now.energy_j > was.energy_j):
                raise Disturbed(f"the energy reading stopped moving {end_s - since_s:.3g} s before the window ended")
            raise Disturbed(f"the energy reading stood still for {still_s:.3g} s or more within the window")


def _check_even(moved: Sequence[Reading], step_s: float, most: float) -> None:
    """Check that no stretch between two moves shows many times the power of any other.

    A step is added to each, for a move that is seen late makes the next stretch seem short.
    """
    stretches = [(b.energy_j - a.energy_j, b.time_s - a.time_s + step_s) for a, b in pairwise(_apart(moved))]
    if len(stretches) < _FEWEST_MOVES:
        return
    second_w, largest_w = sorted(gain_j / span_s for gain_j, span_s in stretches)[-2:]
    if largest_w > most * second_w:
        gain_j, span_s = max(stretches, key=lambda each: each[0] / each[1])
        raise Disturbed(
            f"the energy reading jumped by {gain_j:.3g} J in {span_s - step_s:.3g} s, {largest_w / second_w:.2g} times "
            f"the power of any other time"
        )


def _apart(moved: Sequence[Reading]) -> list[Reading]:
    """Return readings that are `_BRIEF_S` apart at least: in less, who had the processor makes power uneven."""
    kept = list(moved[:1])
    for reading in moved:
        if reading.time_s - kept[-1].time_s >= _BRIEF_S:
            kept.append(reading)
    return kept


def check_undisturbed(looks: Sequence[Look], queries: Sequence[Query], ends_s: Sequence[float], closed: bool) -> None:
    """Check that the device neither slowed itself down nor ran faster than it was set to, and nothing held up queries.

    Args:
        looks: At the device.
        queries: Of the window.
        ends_s: When each was answered, on the device's clock.
        closed: Whether each query went out as soon as the one before was answered.

    Raises:
        Disturbed: If something did; `LockLost` if a clock that was set did not hold.
    """
    for look in looks[1:]:  # the first one tells of the time before
        if look.reading.overrun:
            raise LockLost(f"{look.reading.overrun}: the lock did not hold, or another program has lifted it")
    for look in looks:
        if look.reading.throttled:
            reading = look.reading
            why = reading.cause or ("" if reading.temperature_c is None else f"at {reading.temperature_c} °C")
            raise Disturbed(f"the device was throttled{f' ({why})' if why else ''}, so the window is not valid")
    whole = not any(query.more for query in queries)  # of a run that answers many, the start is no hole
    if closed and whole and (hole_s := _hole_s(queries, ends_s)) is not None:
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
