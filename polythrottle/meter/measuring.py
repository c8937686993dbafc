"""What a point does on a workload: everything around a window, and another window where one was disturbed."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from polythrottle.arrivals import CLOSED, Arrivals
from polythrottle.clock import Clock
from polythrottle.driving import Load, batch_of, drive
from polythrottle.errors import InvalidInput, KnobRejected, TrialError
from polythrottle.measurement import Measurement, Query, Window
from polythrottle.meter.attribution import Attribution, attributed
from polythrottle.meter.calibration import sensor_of
from polythrottle.meter.enough import Goal
from polythrottle.meter.idle import idle_power_w
from polythrottle.meter.validity import Disturbed, LockLost
from polythrottle.meter.window import Watched, judged, watch
from polythrottle.ports import Device, Recorded, Workload
from polythrottle.problem import Constraint
from polythrottle.sensors import Sensor
from polythrottle.space import OperatingPoint

REPEATS = 2
_COOLING_S, _COOLING_MOST_S, _UNTOLD = 1.0, 300.0, 3


def measure(
    device: Device,
    workload: Workload,
    point: OperatingPoint,
    window: Window,
    limits: Sequence[Constraint] = (),
    *,
    arrivals: Arrivals = CLOSED,
    seed: int = 0,
    goal: Goal | None = None,
    sensor: Sensor | None = None,
    kept: Callable[[Attribution], object] | None = None,
) -> Measurement:
    """Return what a point does on a workload, with 95 % intervals where they can be told.

    A recorded device answers with the window it recorded; any other is driven through a new one. Cooling, settling and
    warming up come before the window, idle power after it. A window that was disturbed is repeated `REPEATS` times.

    Args:
        device: Entered already, so that its original state is saved.
        workload: Serves queries on that device.
        point: Levels for knobs of both; each owner gets its own.
        window: How long to look.
        limits: Absolute limits; a window that is plainly going to break one is cut short, and its measurement censored.
        arrivals: When queries are meant to be sent.
        seed: Of the arrivals.
        goal: What a window with a precision is for; its limits are ``limits`` if not given.
        sensor: What the device reads its energy with; if None, what was calibrated, or is usual for its kind.
        kept: Called with the energy of the window request by request, once all that were under way are answered.

    Raises:
        InvalidInput: If single requests are to be kept of a recorded device, which knows none.
        TrialError: If a level is refused, a query fails, or the window tells nothing.
        DeviceError: If the device cannot be reached.
    """
    if kept is not None and isinstance(device, Recorded):
        raise InvalidInput("a recorded table knows no single requests, so none has a share; leave --attribute out")
    own = set(workload.space.names)
    workload.apply(point.only(own))
    if isinstance(device, Recorded):
        return device.recall(point)
    set_there = point.only(set(point) - own)
    device.apply(set_there)
    sensor = sensor_of(device) if sensor is None else sensor
    goal = Goal(tuple(limits)) if goal is None else goal
    _see_that_it_moves(sensor, window)
    _cool(device, window)
    batch = batch_of(workload, point)
    with drive(workload, arrivals, device.clock, seed, batch=batch, timeout_s=window.timeout_s, device=device) as load:
        found, requests, seen = _repeated(device, set_there, load, window, sensor, goal, arrivals)
        sender = load.report
        queries = [] if kept is None else [*seen.queries, *load.rest(seen.looks[-1].reading.time_s)]
    idle_w = idle_power_w(device, window.idle_s, sensor, window.timeout_s)
    if kept is not None:
        kept(attributed(queries, seen.readings, sensor.factor, idle_w))
    return replace(
        found, requests=requests, idle_power_w=idle_w, late_p99_s=sender.late_p99_s, sender_s=sender.cpu_s or None
    )


def _see_that_it_moves(sensor: Sensor, window: Window) -> None:
    """Check that a sensor moves within the longest window, before anybody waits for it.

    Raises:
        TrialError: If it does not.
    """
    if sensor.step_s > window.timeout_s:
        raise TrialError(
            f"the energy reading moves every {sensor.step_s:.3g} s, and a window takes "
            f"{window.timeout_s:.3g} s at most; run polythrottle calibrate again, or give --seconds {sensor.step_s:.0f}"
        )


def _repeated(
    device: Device,
    point: OperatingPoint,
    load: Load,
    window: Window,
    sensor: Sensor,
    goal: Goal,
    arrivals: Arrivals,
) -> tuple[Measurement, int, Watched]:
    """Return the first window that was not disturbed, how many queries that took, and what was seen.

    Where a clock did not hold, the point is applied once more before the next.

    Raises:
        TrialError: If all were.
    """
    requests, before = 0, ""
    for left in range(REPEATS, -1, -1):
        requests += _warm_up(load, device.clock, window, sensor)
        seen, censored = watch(load, device, window, sensor, goal, arrivals)
        requests += len(seen.queries)
        try:
            return judged(seen, censored), requests, seen
        except Disturbed as error:
            if not left:
                raise TrialError(f"{error} (and so in {REPEATS + 1} windows)") from error
            before = f"{error}; in the window after it "
            if isinstance(error, LockLost):
                _apply_again(device, point, before)
        except TrialError as error:
            raise TrialError(f"{before}{error}") from error
    raise AssertionError


def _apply_again(device: Device, point: OperatingPoint, before: str) -> None:
    try:
        device.apply(point)
    except KnobRejected as error:
        raise KnobRejected(f"{before}{error}") from error


def _warm_up(load: Iterator[Query], clock: Clock, window: Window, sensor: Sensor) -> int:
    """Serve until the warm-up is over and the sensor shows nothing from before; return how many queries that took."""
    start_s, settle_s, count = clock.now(), max(window.settle_s, sensor.settle_s), 0
    more = False
    while more or count < window.warmup or clock.now() - start_s < settle_s:
        more = next(load).more
        count += 1
    return count


def _cool(device: Device, window: Window) -> None:
    """Let the device stand idle until it is as cool as the window wants, for five minutes at most.

    One that tells no temperature at three looks in a row is not waited for.

    Raises:
        TrialError: If it does not get there.
    """
    if window.cool_c is None:
        return
    end_s, untold, now_c = device.clock.now() + _COOLING_MOST_S, 0, math.nan
    while untold < _UNTOLD:
        told_c = device.read().temperature_c
        if told_c is None:  # a sensor may be silent for a moment, which says nothing of its heat
            untold += 1
        else:
            untold, now_c = 0, told_c
            if now_c <= window.cool_c:
                return
        if device.clock.now() >= end_s:
            raise TrialError(f"the device is at {now_c:.1f} °C and does not cool down to {window.cool_c:.1f} °C")
        device.clock.sleep(_COOLING_S)
