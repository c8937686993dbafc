"""One window: queries driven, the device looked at between them, and what that amounts to."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from polythrottle.arrivals import CLOSED, LATENCY_CYCLES, Arrivals
from polythrottle.errors import InvalidInput, TrialError
from polythrottle.measurement import Interval, Latency, Measurement, Query, Reading, Window
from polythrottle.meter.backlog import backlog_per_s
from polythrottle.meter.censor import Censor
from polythrottle.meter.enough import Enough, Goal
from polythrottle.meter.joules import Joules
from polythrottle.meter.looks import Look, course, every
from polythrottle.meter.percentiles import SHARES, percentile_interval
from polythrottle.meter.validity import check_drift, check_readings, check_undisturbed
from polythrottle.ports import Device
from polythrottle.sensors import EXACT, Sensor, Student, half_width

_SHARE_OF_STEP, _LOOKS, _GROWTH = 8.0, 40.0, 1.06
_BATCHES, _BATCHES_QUEUED, _BLOCKS, _EDGES = 10, 5, 10, 10.0
_ROUNDING, _SINGLE = 1e-9, 0.95
"""A single query lies below a percentile of so large a share with 95 % probability, which bounds it from below."""
_TIMES = {"ttft": "first_s", "tpot": "per_token_s"}
_OWED = {"first_s": 1, "per_token_s": 2}
"""How many tokens an answer has at least that should tell a time."""
_MOST_UNTOLD = 0.01
"""Of so many answers that do not tell it a p99 can still be known; what is missing is not just any of them."""


@dataclass
class Watched:
    """What has been seen of a window so far.

    Args:
        device: Which is looked at.
        sensor: What it reads its energy with.
        queries: Answered, in order; ``ends_s`` are when, on the device's clock.
        looks: At the device.
        arrivals: When requests were meant to be sent.
    """

    device: Device
    sensor: Sensor
    arrivals: Arrivals = CLOSED
    queries: list[Query] = field(default_factory=list)
    ends_s: list[float] = field(default_factory=list)
    looks: list[Look] = field(default_factory=list)
    items: int = 0
    tokens: int = 0

    def look(self) -> None:
        """Look at the device."""
        self.looks.append(Look(self.device.read(), len(self.queries), self.items, self.tokens))

    def take(self, query: Query) -> None:
        """Add a query that was just answered."""
        self.queries.append(query)
        self.ends_s.append(self.device.clock.now())
        self.items += query.items
        self.tokens += query.tokens or 0

    @property
    def elapsed_s(self) -> float:
        """Since the first look."""
        return self.device.clock.now() - self.looks[0].reading.time_s

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
        seen, begin_s = course(self.looks, self.sensor), self.looks[0].reading.time_s
        apart_s = max(self.sensor.batch_s, _EDGES * seen.edge_s)
        points = list(zip(seen.time_s.tolist(), seen.energy_j.tolist(), strict=True))
        taken = [points[0]]
        for time_s, energy_j in points[1:-1]:
            if min(time_s - taken[-1][0], points[-1][0] - time_s) >= apart_s:
                taken.append((time_s, energy_j))
        return [Reading(begin_s + time_s, energy_j) for time_s, energy_j in (*taken, points[-1])]

    def joules(self) -> Joules:
        """Return what the looks say; at the rate of the arrivals, where that is what was served."""
        served = CLOSED if self.backlog_per_s else self.arrivals
        return Joules(course(self.looks, self.sensor), self.sensor, served)

    def interval(self, metric: str) -> Interval | None:
        """Return the interval of a metric; None if it has none."""
        if metric == "throughput":
            return Joules(every(self.looks), EXACT, self.arrivals).throughput
        if metric in ("power", "tokens_per_j"):
            found: Interval | None = getattr(self.joules(), metric)
            return found
        found = self._of_times(metric)
        if found is not None and (step_s := max((query.step_s for query in self.queries), default=0.0)):
            found = Interval(max(0.0, found.low - step_s), found.high + step_s)
        return found if found is None or not self.backlog_per_s else Interval(found.low, math.inf)

    def _of_times(self, metric: str) -> Interval | None:
        """Return the interval of a mean or a percentile, if nothing changes; None where too few bursts were seen."""
        name, _, tail = metric.partition("_")
        values, cycle_s = self.values(_TIMES.get(name, "latency_s")), self.arrivals.cycle_s
        if self.looked_s < LATENCY_CYCLES * cycle_s:
            return None
        batches = _BATCHES if self.arrivals.closed else _BATCHES_QUEUED
        if (share := SHARES.get(tail or metric, 0.0)) >= _SINGLE and values.size == 1:
            return Interval(float(values[0]), math.inf)
        if share and values.size > 1:
            block = max(values.size // _BLOCKS, math.ceil(values.size * cycle_s / self.looked_s))
            return percentile_interval(values, share, 0 if self.arrivals.closed else block)
        return mean_interval(values, batches) if metric == "mean" else None

    def values(self, name: str) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        """Return what the queries say of a time, in the order in which they were sent, shape (queries that say,).

        Nothing where too many do not say that should, such as time per token where tokens come all in one piece.
        """
        ordered = sorted(self.queries, key=lambda query: query.start_s or 0.0)
        told = [value for query in ordered if (value := getattr(query, name)) is not None]
        owed = sum((query.tokens or 0) >= _OWED[name] for query in ordered) if name in _OWED else 0
        return np.array(told if len(told) >= (1 - _MOST_UNTOLD) * owed else [], dtype=float)


def watch(
    load: Iterator[Query], device: Device, window: Window, sensor: Sensor, goal: Goal, arrivals: Arrivals = CLOSED
) -> tuple[Watched, bool]:
    """Drive a window to where it ends; return what was seen, and whether it was cut short.

    Args:
        load: Queries as they are answered.
        device: To look at.
        window: When to end.
        sensor: What the energy is read with.
        goal: What would be enough, where the window has a precision.
        arrivals: When the queries were meant to be sent.
    """
    seen = Watched(device, sensor, arrivals)
    seen.look()
    censor, enough = Censor(device, window, goal.limits, seen.looks[0].reading), Enough(window, goal)
    least_s = max(window.duration_s, sensor.least_s)
    due = _Due(window, sensor)
    # The most queries end no window that its sensor cannot tell anything of yet: quick ones may be over in a moment.
    while seen.elapsed_s < window.timeout_s and (
        len(seen.queries) < window.most_queries or seen.elapsed_s < sensor.least_s
    ):
        _take_whole(seen, load)
        if due.now(len(seen.queries), seen.elapsed_s):
            seen.look()
        if _over(seen, window, least_s, enough):
            break
        if censor.gives_up(seen.queries) and len(seen.queries) < window.most_queries and _moved(seen):
            seen.look()
            return seen, True
    if seen.looks[-1].queries < len(seen.queries):
        seen.look()
    return seen, False


def _take_whole(seen: Watched, load: Iterator[Query]) -> None:
    """Take the next query, and those answered with it: the energy of one run is that of all of them."""
    while True:
        seen.take(query := next(load))
        if not query.more:
            return


class _Due:
    """When to look at the device: about forty times a window, and often enough to see a counter step.

    A window may end by its most queries long before its time.
    """

    def __init__(self, window: Window, sensor: Sensor) -> None:
        spaced_s = window.duration_s / _LOOKS
        self._apart_s = min(spaced_s, sensor.step_s / _SHARE_OF_STEP) if sensor.step_s else spaced_s
        self._stepping, self._many = sensor.step_s > 0, math.ceil(window.most_queries / _LOOKS)
        self._queries, self._time_s = 0, 0.0

    def now(self, queries: int, elapsed_s: float) -> bool:
        grown = self._stepping or queries >= max(self._queries + 1, math.ceil(self._queries * _GROWTH))
        soon = elapsed_s - self._time_s < self._apart_s and queries - self._queries < self._many
        if not grown or soon:
            return False
        self._queries, self._time_s = queries, elapsed_s
        return True


def _over(seen: Watched, window: Window, least_s: float, enough: Enough) -> bool:
    """Return whether the window has seen what it is for."""
    if seen.elapsed_s < least_s or len(seen.queries) < enough.least:
        return False
    if window.precision is None:
        return True
    if not enough.due(len(seen.queries)):
        return False
    seen.look()
    return _moved(seen) and enough.reached(seen.joules(), seen.interval)


def _moved(seen: Watched) -> bool:
    return seen.device.read().energy_j > seen.looks[0].reading.energy_j


def judged(seen: Watched, censored: bool) -> Measurement:
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


def _values(seen: Watched, joules: Joules, censored: bool) -> Measurement:
    """Return what a window saw, without intervals."""
    each, offered_per_s, grown_per_s = seen.items / len(seen.queries), seen.arrivals.offered_per_s, seen.backlog_per_s
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
    )


def _grown_per_s(seen: Watched, name: str) -> float | None:
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


def _intervals(seen: Watched, joules: Joules) -> dict[str, Interval]:
    """Return every interval there is, by metric."""
    times = ["mean", *SHARES, "throughput", *(f"{name}_{tail}" for name in _TIMES for tail in ("p50", "p99"))]
    found = {"energy": joules.per_item, "power": joules.power, **{name: seen.interval(name) for name in times}}
    if seen.tokens:
        found["tokens_per_j"] = joules.tokens_per_j
    return {name: interval for name, interval in found.items() if interval is not None}


def _extras(seen: Watched, joules: Joules) -> dict[str, float]:
    """Return what only some workloads have: times to the first token and between tokens, tokens per joule."""
    found: dict[str, float] = {}
    for name, attribute in _TIMES.items():
        values = seen.values(attribute)
        if values.size:
            p50, p99 = np.quantile(values, [0.5, 0.99], method="inverted_cdf").tolist()
            found |= {f"{name}_p50": p50, f"{name}_p99": p99}
    if seen.tokens:
        found["tokens_per_j"] = 1 / joules.token_j
    return found


def mean_interval(values: np.ndarray[tuple[int], np.dtype[np.float64]], batches: int = _BATCHES) -> Interval | None:
    """Return the 95 % interval of a mean by batch means; None if there are too few values.

    Args:
        values: In order, shape (values,).
        batches: How many; fewer and longer ones where values resemble each other for long.
    """
    size = len(values) // batches
    if size == 0:
        return None
    means = values[len(values) - size * batches :].reshape(batches, size).mean(axis=1)
    half = half_width([Student(float(means.std(ddof=1)) / math.sqrt(batches), batches - 1)])
    mean = float(values.mean())
    return Interval(max(0.0, mean - half), mean + half)


def _hottest(looks: Sequence[Look]) -> float | None:
    return max((look.reading.temperature_c for look in looks if look.reading.temperature_c is not None), default=None)
