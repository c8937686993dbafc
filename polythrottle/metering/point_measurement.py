"""The meter: apply a point, warm up, drive a window, judge it, repeat it if it was disturbed, read idle power."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Protocol, runtime_checkable

from typing_extensions import Self

from polythrottle.domain.arrivals import CLOSED, Arrivals, SelfPaced
from polythrottle.domain.errors import InvalidInput, KnobRejected, TrialError
from polythrottle.domain.measurement import Measurement, Query, Reading, Window
from polythrottle.domain.ports import Device, Recorded, Sensor, Workload
from polythrottle.domain.problem import Constraint
from polythrottle.domain.space import OperatingPoint
from polythrottle.metering.calibration import sensor_of
from polythrottle.metering.early_stopping import Goal
from polythrottle.metering.energy import Attribution, attributed
from polythrottle.metering.error_budget_guard import RequestWatch
from polythrottle.metering.load import batch_of, drive
from polythrottle.metering.observed_window import ObservedWindow, idle_power_w, measurement_of, observe_window
from polythrottle.metering.validity import Disturbed, LockLost, check_moves
from polythrottle.metering.window import Gate, warm_up

# What a point does on a workload: everything around a window, and another window where one was disturbed.

REPEATS = 2
_COOLING_S = 1.0
_COOLING_MOST_S = 300.0
_UNTOLD = 3


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
    watch: RequestWatch | None = None,
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
        watch: Of the requests, none of which is sent that it does not permit.

    Raises:
        InvalidInput: If single requests are to be kept or watched of a recorded device, which knows none, or watched
            of a workload that sends them itself.
        TrialError: If a level is refused, a query fails, or the window tells nothing.
        DeviceError: If the device cannot be reached.
    """
    if kept is not None and isinstance(device, Recorded):
        raise InvalidInput("a recorded table knows no single requests, so none has a share; leave --attribute out")
    if watch is not None and (why := unwatched(device, workload)):
        raise InvalidInput(why)
    own = set(workload.space.names)
    workload.apply(point.only(own))
    if isinstance(device, Recorded):
        return device.recall(point)
    set_there = point.only(set(point) - own)
    device.apply(set_there)
    sensor = sensor_of(device) if sensor is None else sensor
    goal = Goal(tuple(limits)) if goal is None else goal
    check_moves(sensor, window)
    _cool(device, window)
    asked = Asked(window, sensor, goal, arrivals, seed)
    with run_of(device, workload, point, asked, watch) as run:
        found, requests, seen = _repeated(device, set_there, run, watch)
        if kept is None:
            queries = []
        else:
            queries = [*seen.queries, *run.rest(seen.looks[-1].reading.time_s)]
        late_p99_s, sender_s = run.sender
    idle_w = run.idle_power_w()
    if kept is not None:
        kept(attributed(queries, seen.readings, sensor.factor, idle_w))
    return replace(found, requests=requests, idle_power_w=idle_w, late_p99_s=late_p99_s, sender_s=sender_s or None)


def unwatched(device: Device, workload: Workload) -> str:
    """Return why nobody here sees each request before it is sent; empty where somebody does."""
    leave = "leave --error-budget out"
    if isinstance(device, Recorded):
        return f"a recorded table serves no requests, so none is late; {leave}"
    if isinstance(workload, SelfPaced):
        return f"a simulated server of language models sends its requests itself, so no error budget bounds it; {leave}"
    return ""


@dataclass(frozen=True)
class Asked:
    """What a window is asked for.

    Args:
        window: How long to look.
        sensor: What the energy is read with.
        goal: What would be enough.
        arrivals: When queries are meant to be sent.
        seed: Of the arrivals.
    """

    window: Window
    sensor: Sensor
    goal: Goal
    arrivals: Arrivals
    seed: int


class Run(Protocol):
    """A load on a workload, of which one window after another is looked at."""

    def window(self) -> tuple[int, ObservedWindow, bool]:
        """Warm up and drive a window; return with how many queries, what was seen, and whether it was cut short."""

    @property
    def sender(self) -> tuple[float | None, float]:
        """How late 99 % of the queries were sent at most, and the processor time the sender took."""

    def rest(self, moment_s: float) -> Iterator[Query]:
        """Yield what was sent before a moment and is not answered yet."""

    def idle_power_w(self) -> float | None:
        """Return the power without work, once the load has ended; None if that was not asked or cannot be told."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


@runtime_checkable
class Hosted(Protocol):
    """A workload that runs elsewhere, where its windows are driven too."""

    @property
    def concurrency(self) -> int:
        """How many queries a closed loop keeps under way where the point does not say it."""

    def run(self, device: Device, point: OperatingPoint, asked: Asked, watch: RequestWatch | None) -> Run:
        """Return a load on it at its part of a point, watched there; nothing is sent before the first window."""


@runtime_checkable
class Closing(Protocol):
    """A device far away, of which a reading comes with the end of what was driven on it: asking takes as long again."""

    def close_with(self, reading: Reading | None) -> None:
        """Keep the reading that was told at the end; None while something is driven."""

    def closing(self) -> Reading:
        """Return that reading, once, or else one that is taken now."""


def run_of(
    device: Device, workload: Workload, point: OperatingPoint, asked: Asked, watch: RequestWatch | None = None
) -> Run:
    """Return a load on a workload at a point: driven and watched here, or where the workload runs."""
    if isinstance(workload, Hosted):
        return workload.run(device, point, asked, watch)
    return OwnRun(device, workload, point, asked, watch)


class OwnRun:
    """A load that is driven in this process."""

    def __init__(
        self, device: Device, workload: Workload, point: OperatingPoint, asked: Asked, gate: Gate | None = None
    ) -> None:
        self._device = device
        self._asked = asked
        batch = batch_of(workload, point)
        self._load = drive(
            workload,
            asked.arrivals,
            device.clock,
            asked.seed,
            batch=batch,
            timeout_s=asked.window.timeout_s,
            device=device,
            gate=gate,
        )

    def window(self) -> tuple[int, ObservedWindow, bool]:
        """Warm up and drive a window."""
        asked = self._asked
        count = warm_up(self._load, self._device.clock, asked.window, asked.sensor)
        seen, censored = observe_window(
            self._load, self._device, asked.window, asked.sensor, asked.goal, asked.arrivals
        )
        return count, seen, censored

    @property
    def sender(self) -> tuple[float | None, float]:
        """How late 99 % of the queries were sent at most, and the processor time the sender took."""
        report = self._load.report
        return report.late_p99_s, report.cpu_s

    def rest(self, moment_s: float) -> Iterator[Query]:
        """Yield what was sent before a moment and is not answered yet."""
        return self._load.rest(moment_s)

    def idle_power_w(self) -> float | None:
        """Return the power without work."""
        return idle_power_w(self._device, self._asked.window.idle_s, self._asked.sensor)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._load.close()


def _repeated(
    device: Device, point: OperatingPoint, run: Run, watch: RequestWatch | None
) -> tuple[Measurement, int, ObservedWindow]:
    """Return the first window that was not disturbed, how many queries that took, and what was seen.

    Where a clock did not hold, the point is applied once more before the next. After requests were cut short there is
    no other.

    Raises:
        TrialError: If all were.
    """
    requests = 0
    before = ""
    for left in range(REPEATS, -1, -1):
        warming, seen, censored = run.window()
        requests += warming + len(seen.queries)
        if watch is not None and watch.cut:
            return _cut(watch, seen), requests, seen
        try:
            return measurement_of(seen, censored), requests, seen
        except Disturbed as error:
            if not left:
                raise TrialError(f"{error} (and so in {REPEATS + 1} windows)") from error
            before = f"{error}; in the window after it "
            if isinstance(error, LockLost):
                _apply_again(device, point, before)
        except TrialError as error:
            raise TrialError(f"{before}{error}") from error
    raise AssertionError


def _cut(watch: RequestWatch, seen: ObservedWindow) -> Measurement:
    """Return what requests that were cut short amount to, where they show that the point breaks its limit.

    Raises:
        TrialError: If they do not, or too little was seen.
    """
    if not watch.broken:
        raise TrialError(watch.cut)
    try:
        return measurement_of(seen, censored=True)
    except TrialError as error:
        raise TrialError(watch.cut) from error


def _apply_again(device: Device, point: OperatingPoint, before: str) -> None:
    try:
        device.apply(point)
    except KnobRejected as error:
        raise KnobRejected(f"{before}{error}") from error


def _cool(device: Device, window: Window) -> None:
    """Let the device stand idle until it is as cool as the window wants, for five minutes at most.

    One that tells no temperature at three looks in a row is not waited for.

    Raises:
        TrialError: If it does not get there.
    """
    if window.cool_c is None:
        return
    end_s = device.clock.now() + _COOLING_MOST_S
    untold = 0
    now_c = math.nan
    while untold < _UNTOLD:
        told_c = device.read().temperature_c
        if told_c is None:  # a sensor may be silent for a moment, which says nothing of its heat
            untold += 1
        else:
            untold = 0
            now_c = told_c
            if now_c <= window.cool_c:
                return
        if device.clock.now() >= end_s:
            raise TrialError(f"the device is at {now_c:.1f} °C and does not cool down to {window.cool_c:.1f} °C")
        device.clock.sleep(_COOLING_S)
