"""Whether a window is valid: sensors that stop or fall, clocks that do not hold, disturbances, growing queues."""

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from statistics import median

import numpy as np

from polythrottle.domain.errors import TrialError
from polythrottle.domain.measurement import Measurement, Query, Reading, Window
from polythrottle.domain.ports import Sensor
from polythrottle.domain.problem import Constraint
from polythrottle.metering.window import WindowSample

# Whether a window may be believed: sensors that stop or fall, devices that slow down, somebody who came between.

DRIFT_MOST = 0.05
"""By what fraction power may drift over a window; more is a board that has not settled."""
_HOLE_S = 0.25
_HOLES = 20.0
_STILL = 2.5
_STILL_S = 0.25
_FEWEST_MOVES = 5
_BRIEF_S = 0.01
_STEADY = 2.0
_UNSTEADY = 4.0
"""How many times the power of any other stretch one may show: back to back, and where requests come unevenly."""


class Disturbed(TrialError):
    """A window that something came into; another one may be better."""


class LockLost(Disturbed):
    """A window in which a clock ran above what had been applied; another one is worth it once that is applied again."""


def check_readings(looks: Sequence[WindowSample], sensor: Sensor, closed: bool) -> None:
    """Check that clock and energy went forward, evenly enough to be believed.

    Args:
        looks: At the device.
        sensor: What it reads its energy with.
        closed: Whether it worked all the time, so that its power was steady.

    Raises:
        Disturbed: If the energy fell, stood still for a while, or jumped; in another window it may not.
        TrialError: If it is no number or never moves, the clock went back, or the window is shorter than a step.
    """
    first = looks[0].reading
    last = looks[-1].reading
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


def _pairs(looks: Sequence[WindowSample]) -> Iterator[tuple[Reading, Reading]]:
    return pairwise(look.reading for look in looks)


def _check_moving(looks: Sequence[WindowSample], step_s: float) -> None:
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


def check_undisturbed(
    looks: Sequence[WindowSample], queries: Sequence[Query], ends_s: Sequence[float], closed: bool
) -> None:
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
    if longest > max(_HOLE_S, _HOLES * usual_s):
        return longest
    return None


# Whether requests that do not wait for answers come faster than they are served.

_PARTS = 5
_FEWEST = 20
_LEAST = 1.0
_LOW = 0.1
_HIGH = 0.9


def backlog_per_s(queries: Sequence[Query], served_per_s: float, offered_per_s: float) -> float | None:
    """Return by how many requests a second the queue grew over a window; None if it did not, as far as can be seen.

    It did if fewer were served than were offered, and nine of ten requests of the last fifth waited for longer than
    nine of ten of the first, by one request at least. In simulated queues at 80 % of what the server can do that is
    seen in none of 100 windows of 1,000 requests, at 90 % in up to 3, at 110 % in 97 or more, from 120 % on in all; of
    100 requests a window at 150 % is told with 95 %.

    Args:
        queries: Of the window, each with the time it was meant to be sent.
        served_per_s: How many were answered in a second.
        offered_per_s: How many were meant to be sent.
    """
    if len(queries) < _FEWEST or served_per_s >= offered_per_s:
        return None
    ordered = sorted(queries, key=lambda query: query.start_s or 0.0)
    waited_s = np.array([query.latency_s for query in ordered])
    part = len(waited_s) // _PARTS
    grown_s = float(np.quantile(waited_s[-part:], _LOW) - np.quantile(waited_s[:part], _HIGH))
    if grown_s * offered_per_s >= _LEAST:
        return offered_per_s - served_per_s
    return None


def check_reference(default: Measurement, constraints: Iterable[Constraint]) -> None:
    """Check that relative limits have something to multiply: no latency that grows for as long as one looks.

    Args:
        default: What was seen at the default point.
        constraints: Of the problem.

    Raises:
        TrialError: If more came than was served there, and a limit is relative.
    """
    relative = next((constraint for constraint in constraints if constraint.relative), None)
    if relative is not None and default.backlog_per_s:
        raise TrialError(
            f"the default point serves {default.throughput_per_s:.4g}/s of {default.offered_per_s:.4g}/s, so the queue "
            f"grows and {relative} multiplies nothing; let fewer come, or give an absolute limit"
        )


def check_moves(sensor: Sensor, window: Window) -> None:
    """Check that a sensor moves within the longest window, often enough to tell, before anybody waits for it.

    Raises:
        TrialError: If it does not.
    """
    if sensor.step_s > window.timeout_s:
        raise TrialError(
            f"the energy reading moves every {sensor.step_s:.3g} s, and a window takes "
            f"{window.timeout_s:.3g} s at most; run polythrottle calibrate again, or give --seconds {sensor.step_s:.0f}"
        )
    if sensor.least_s > window.timeout_s:
        raise TrialError(
            f"the energy reading tells an interval from {sensor.least_s:.3g} s on, and a window takes "
            f"{window.timeout_s:.3g} s at most; give --seconds {math.ceil(sensor.least_s)}"
        )
