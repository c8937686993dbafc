"""The meter: apply a point, warm up, drive a window, judge it, repeat it if it was disturbed, read idle power."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from types import TracebackType
from typing import Protocol, runtime_checkable

import numpy as np
from typing_extensions import Self

from polythrottle.backends.meters import unmetered
from polythrottle.domain.arrivals import CLOSED, LATENCY_CYCLES, Arrivals, SelfPaced
from polythrottle.domain.errors import InvalidInput, KnobRejected, TrialError
from polythrottle.domain.measurement import BoardEnergy, Interval, Latency, Measurement, Query, Reading, Window
from polythrottle.domain.ports import EXACT_SENSOR, Device, Recorded, Sensor, Workload
from polythrottle.domain.problem import Constraint
from polythrottle.domain.space import OperatingPoint
from polythrottle.metering.calibration import sensor_of
from polythrottle.metering.early_stopping import Censor, Goal, StoppingRule
from polythrottle.metering.energy import (
    Attribution,
    EnergyEstimate,
    attributed,
    exact_trajectory,
    trajectory,
)
from polythrottle.metering.idle_power import idle_power_w
from polythrottle.metering.intervals import SHARES, mean_interval, percentile_interval
from polythrottle.metering.load import batch_of, drive
from polythrottle.metering.request_watch import RequestWatch
from polythrottle.metering.validity import (
    Disturbed,
    LockLost,
    backlog_per_s,
    check_drift,
    check_moves,
    check_readings,
    check_undisturbed,
)
from polythrottle.metering.window import Gate, Watched, WindowLog, WindowSample, observe, warm_up

# One window: queries driven, the device looked at between them, and what that amounts to.

_BATCHES = 10
_BATCHES_QUEUED = 5
_BLOCKS = 10
_EDGES = 10.0
_ROUNDING = 1e-9
_SINGLE = 0.95
"""A single query lies below a percentile of so large a share with 95 % probability, which bounds it from below."""
_TIMES = {"ttft": "first_s", "tpot": "per_token_s"}
_OWED = {"first_s": 1, "per_token_s": 2}
"""How many tokens an answer has at least that should tell a time."""
_MOST_UNTOLD = 0.01
"""Of so many answers that do not tell it a p99 can still be known; what is missing is not just any of them."""


@dataclass
class ObservedWindow(WindowLog):
    """What has been seen of a window so far, and what that says.

    Args:
        device: Which is looked at.
        arrivals: When requests were meant to be sent.
    """

    device: Device
    arrivals: Arrivals = CLOSED

    @property
    def source(self) -> Watched:
        """What tells time and energy while the window is driven."""
        return self.device

    @property
    def backlog_per_s(self) -> float | None:
        """By how many requests a second the queue grew; None if it did not."""
        sure_per_s = self.arrivals.sure_per_s(self.looked_s)
        if sure_per_s is None:
            return None
        return backlog_per_s(self.queries, len(self.queries) / self.looked_s, sure_per_s)

    @property
    def looked_s(self) -> float:
        """From the first look to the last."""
        return self.looks[-1].reading.time_s - self.looks[0].reading.time_s

    @property
    def readings(self) -> list[Reading]:
        """Time and energy as the sensor tells them, no closer together than it can tell: the first, and on to the last.

        A total that moves in steps is off by what is drawn in one, so that close to each other two of them say nothing.
        """
        seen = trajectory(self.looks, self.sensor)
        begin_s = self.looks[0].reading.time_s
        apart_s = max(self.sensor.batch_s, _EDGES * seen.edge_s)
        points = list(zip(seen.time_s.tolist(), seen.energy_j.tolist(), strict=True))
        taken = [points[0]]
        for time_s, energy_j in points[1:-1]:
            if min(time_s - taken[-1][0], points[-1][0] - time_s) >= apart_s:
                taken.append((time_s, energy_j))
        return [Reading(begin_s + time_s, energy_j) for time_s, energy_j in (*taken, points[-1])]

    def joules(self) -> EnergyEstimate:
        """Return what the looks say; at the rate of the arrivals, where that is what was served."""
        served = CLOSED if self.backlog_per_s else self.arrivals
        return EnergyEstimate(trajectory(self.looks, self.sensor), self.sensor, served)

    def interval(self, metric: str) -> Interval | None:
        """Return the interval of a metric; None if it has none."""
        if metric == "throughput":
            return EnergyEstimate(exact_trajectory(self.looks), EXACT_SENSOR, self.arrivals).throughput
        if metric in ("power", "tokens_per_j"):
            found: Interval | None = getattr(self.joules(), metric)
            return found
        found = self._of_times(metric)
        if found is not None and (step_s := max((query.step_s for query in self.queries), default=0.0)):
            found = Interval(max(0.0, found.low - step_s), found.high + step_s)
        if found is None or not self.backlog_per_s:
            return found
        return Interval(found.low, math.inf)

    def _of_times(self, metric: str) -> Interval | None:
        """Return the interval of a mean or a percentile, if nothing changes; None where too few bursts were seen."""
        name, _, tail = metric.partition("_")
        values = self.values(_TIMES.get(name, "latency_s"))
        cycle_s = self.arrivals.cycle_s
        if self.looked_s < LATENCY_CYCLES * cycle_s:
            return None
        batches = _BATCHES if self.arrivals.closed else _BATCHES_QUEUED
        if (share := SHARES.get(tail or metric, 0.0)) >= _SINGLE and values.size == 1:
            return Interval(float(values[0]), math.inf)
        if share and values.size > 1:
            block = max(values.size // _BLOCKS, math.ceil(values.size * cycle_s / self.looked_s))
            return percentile_interval(values, share, 0 if self.arrivals.closed else block)
        if metric == "mean":
            return mean_interval(values, batches)
        return None

    def values(self, name: str) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        """Return what the queries say of a time, in the order in which they were sent, shape (queries that say,).

        Nothing where too many do not say that should, such as time per token where tokens come all in one piece.
        """
        ordered = sorted(self.queries, key=lambda query: query.start_s or 0.0)
        told = [value for query in ordered if (value := getattr(query, name)) is not None]
        owed = sum((query.tokens or 0) >= _OWED[name] for query in ordered) if name in _OWED else 0
        return np.array(told if len(told) >= (1 - _MOST_UNTOLD) * owed else [], dtype=float)


def observe_window(
    load: Iterator[Query], device: Device, window: Window, sensor: Sensor, goal: Goal, arrivals: Arrivals = CLOSED
) -> tuple[ObservedWindow, bool]:
    """Drive a window to where it ends; return what was seen, and whether it was cut short.

    Args:
        load: Queries as they are answered.
        device: To look at.
        window: When to end.
        sensor: What the energy is read with.
        goal: What would be enough, where the window has a precision.
        arrivals: When the queries were meant to be sent.
    """
    seen = ObservedWindow(device, sensor, arrivals=arrivals)
    return seen, observe(seen, load, window, Verdict(window, goal))


class Verdict(StoppingRule):
    """Says when a window can end: because it knows enough, or is plainly going to break a limit.

    Args:
        window: When it ends at the latest.
        goal: What it is for.
    """

    def __init__(self, window: Window, goal: Goal) -> None:
        super().__init__(window, goal)
        self._censor: Censor | None = None

    def begin(self, seen: WindowLog) -> None:
        """Take note of the first look."""
        assert isinstance(seen, ObservedWindow)
        self._censor = Censor(seen.source, self._window, self._goal.limits, seen.looks[0].reading)

    def reached(self, seen: WindowLog) -> bool:
        """Return whether the window knows enough."""
        assert isinstance(seen, ObservedWindow)
        return self.enough(seen.joules(), seen.interval)

    def gives_up(self, seen: WindowLog) -> bool:
        """Return whether the window is plainly going to break a limit."""
        assert self._censor is not None
        return self._censor.gives_up(seen.queries)


def measurement_of(seen: ObservedWindow, censored: bool) -> Measurement:
    """Return the measurement a window amounts to.

    Args:
        seen: All of it.
        censored: Whether it was cut short.

    Raises:
        TrialError: If it amounts to none; `Disturbed` if another window may.
    """
    if not seen.queries:
        raise TrialError("no query was answered within the window")
    closed = seen.arrivals.closed
    check_readings(seen.looks, seen.sensor, closed)
    check_undisturbed(seen.looks, seen.queries, seen.ends_s, closed)
    joules = seen.joules()
    if not censored:
        check_drift(joules.drift)
    try:
        return with_intervals(_values(seen, joules, censored), _intervals(seen, joules))
    except InvalidInput as error:
        raise TrialError(f"the window tells nothing: {error}") from error


def _values(seen: ObservedWindow, joules: EnergyEstimate, censored: bool) -> Measurement:
    """Return what a window saw, without intervals."""
    each = seen.items / len(seen.queries)
    offered_per_s = seen.arrivals.offered_per_s
    grown_per_s = seen.backlog_per_s
    return Measurement(
        latency=Latency.of([query.latency_s for query in seen.queries]),
        energy_j=joules.item_j,
        throughput_per_s=seen.items / seen.looked_s,
        power_w=joules.watts,
        energy_kind=seen.device.energy_kind,
        boundary="; ".join(filter(None, (seen.device.boundary, seen.sensor.note))),
        temperature_c=_hottest(seen.looks),
        window_s=seen.looked_s,
        censored=censored,
        extras=_extras(seen, joules),
        offered_per_s=None if offered_per_s is None else offered_per_s * each,
        backlog_per_s=None if grown_per_s is None else grown_per_s * each,
        cuts_per_s=_grown_per_s(seen, "cuts"),
        cut_share=_grown_per_s(seen, "cut_s"),
        board=_board(seen),
    )


def _board(seen: ObservedWindow) -> BoardEnergy | None:
    """Return what the device's own sensors said beside an external meter; None where they said nothing that holds."""
    device = unmetered(seen.device)
    totals_j = [look.reading.board_j for look in seen.looks]
    known_j = [each for each in totals_j if each is not None and math.isfinite(each)]
    rising = all(before <= after for before, after in pairwise(known_j))
    if len(known_j) < len(totals_j) or not rising or known_j[-1] <= known_j[0]:
        return None
    sensor = sensor_of(device)
    looks = [
        replace(look, reading=replace(look.reading, energy_j=total_j))
        for look, total_j in zip(seen.looks, known_j, strict=True)
    ]
    joules = EnergyEstimate(trajectory(looks, sensor), sensor, CLOSED if seen.backlog_per_s else seen.arrivals)
    interval = joules.per_item
    return BoardEnergy(
        energy_j=joules.item_j,
        energy_kind=device.energy_kind,
        boundary="; ".join(filter(None, (device.boundary, sensor.note))),
        interval=interval if interval is not None and interval.known else None,
    )


def _grown_per_s(seen: ObservedWindow, name: str) -> float | None:
    """Return by how much a second a running total of the readings grew; None where it is not told at both ends."""
    first, last = (getattr(look.reading, name) for look in (seen.looks[0], seen.looks[-1]))
    return None if first is None or last is None or last < first else (last - first) / seen.looked_s


def with_intervals(found: Measurement, intervals: Mapping[str, Interval]) -> Measurement:
    """Return a measurement with its intervals, each of which holds its value.

    Args:
        found: Without them.
        intervals: By metric.

    Raises:
        TrialError: If a value is not in its interval: then neither can be believed.
    """
    held = {}
    for name, interval in intervals.items():
        value = found.energy_j if name == "energy" else found.metric(name) or math.nan
        wider = Interval(interval.low * (1 - _ROUNDING), interval.high * (1 + _ROUNDING))
        if value not in wider:
            raise TrialError(f"{name} is {value:.6g} and its interval {interval.low:.6g} to {interval.high:.6g}")
        held[name] = Interval(min(interval.low, value), max(interval.high, value))
    return replace(found, intervals=held)


def _intervals(seen: ObservedWindow, joules: EnergyEstimate) -> dict[str, Interval]:
    """Return every interval there is, by metric."""
    times = ["mean", *SHARES, "throughput", *(f"{name}_{tail}" for name in _TIMES for tail in ("p50", "p99"))]
    found = {"energy": joules.per_item, "power": joules.power, **{name: seen.interval(name) for name in times}}
    if seen.tokens:
        found["tokens_per_j"] = joules.tokens_per_j
    return {name: interval for name, interval in found.items() if interval is not None}


def _extras(seen: ObservedWindow, joules: EnergyEstimate) -> dict[str, float]:
    """Return what only some workloads have: times to the first token and between tokens, tokens per joule."""
    found: dict[str, float] = {}
    for name, attribute in _TIMES.items():
        values = seen.values(attribute)
        if values.size:
            p50, p99 = np.quantile(values, [0.5, 0.99], method="inverted_cdf").tolist()
            found |= {f"{name}_p50": p50, f"{name}_p99": p99}
    gaps_s = [np.asarray(query.gaps_s) for query in seen.queries if len(query.gaps_s)]
    if gaps_s:
        p50, p99 = np.quantile(np.concatenate(gaps_s), [0.5, 0.99], method="inverted_cdf").tolist()
        found |= {"itl_p50": p50, "itl_p99": p99}
    if seen.tokens:
        found["tokens_per_j"] = 1 / joules.token_j
    return found


def _hottest(looks: Sequence[WindowSample]) -> float | None:
    return max((look.reading.temperature_c for look in looks if look.reading.temperature_c is not None), default=None)


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
            where they are sent elsewhere.
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
        queries = [] if kept is None else [*seen.queries, *run.rest(seen.looks[-1].reading.time_s)]
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
    if isinstance(workload, Hosted):
        return f"over SSH the requests are sent on the board, where no error budget bounds them yet; {leave}"
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

    def run(self, device: Device, point: OperatingPoint, asked: Asked) -> Run:
        """Return a load on it at its part of a point; nothing is sent before the first window."""


def run_of(device: Device, workload: Workload, point: OperatingPoint, asked: Asked, gate: Gate | None = None) -> Run:
    """Return a load on a workload at a point: driven here, or where the workload runs, which heeds no gate."""
    if isinstance(workload, Hosted):
        return workload.run(device, point, asked)
    return OwnRun(device, workload, point, asked, gate)


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
