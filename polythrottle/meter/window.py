"""One window: queries driven, the device looked at between them, and what that amounts to."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from polythrottle.errors import InvalidInput, TrialError
from polythrottle.measurement import Interval, Latency, Measurement, Query, Window
from polythrottle.meter.censor import Censor
from polythrottle.meter.enough import Enough, Goal
from polythrottle.meter.joules import Joules
from polythrottle.meter.looks import Look, course
from polythrottle.meter.percentiles import SHARES, percentile_interval
from polythrottle.meter.validity import check_drift, check_readings, check_undisturbed
from polythrottle.ports import Device
from polythrottle.sensors import Sensor, Student, half_width

_SHARE_OF_STEP, _LOOKS, _GROWTH = 8.0, 40.0, 1.06
_BATCHES = 10
_TIMES = {"ttft": "first_s", "tpot": "per_token_s"}


@dataclass
class Watched:
    """What has been seen of a window so far.

    Args:
        device: Which is looked at.
        sensor: What it reads its energy with.
        queries: Answered, in order; ``ends_s`` are when, on the device's clock.
        looks: At the device.
    """

    device: Device
    sensor: Sensor
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

    def joules(self) -> Joules:
        """Return what the looks say."""
        return Joules(course(self.looks, self.sensor), self.sensor)

    def interval(self, metric: str) -> Interval | None:
        """Return the interval of a metric; None if it has none."""
        if metric in ("power", "throughput", "tokens_per_j"):
            found: Interval | None = getattr(self.joules(), metric)
            return found
        name, _, tail = metric.partition("_")
        values = self.values(_TIMES.get(name, "latency_s"))
        if (tail or metric) in SHARES and values.size > 1:
            return percentile_interval(values, SHARES[tail or metric])
        return mean_interval(values) if metric == "mean" else None

    def values(self, name: str) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        """Return what the queries say of a time, in the order in which they were sent, shape (queries that say,)."""
        ordered = sorted(self.queries, key=lambda query: query.start_s or 0.0)
        return np.array([value for query in ordered if (value := getattr(query, name)) is not None], dtype=float)


def watch(load: Iterator[Query], device: Device, window: Window, sensor: Sensor, goal: Goal) -> tuple[Watched, bool]:
    """Drive a window to where it ends; return what was seen, and whether it was cut short.

    Args:
        load: Queries as they are answered.
        device: To look at.
        window: When to end.
        sensor: What the energy is read with.
        goal: What would be enough, where the window has a precision.
    """
    seen = Watched(device, sensor)
    seen.look()
    censor, enough = Censor(device, window, goal.limits, seen.looks[0].reading), Enough(window, goal)
    least_s = max(window.duration_s, sensor.least_s)
    due = _Due(window, sensor)
    while len(seen.queries) < window.most_queries and seen.elapsed_s < window.timeout_s:
        seen.take(next(load))
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


class _Due:
    """When to look at the device: about forty times a window, and often enough to see a counter step."""

    def __init__(self, window: Window, sensor: Sensor) -> None:
        spaced_s = window.duration_s / _LOOKS
        self._apart_s = min(spaced_s, sensor.step_s / _SHARE_OF_STEP) if sensor.step_s else spaced_s
        self._stepping = sensor.step_s > 0
        self._queries, self._time_s = 0, 0.0

    def now(self, queries: int, elapsed_s: float) -> bool:
        grown = self._stepping or queries >= max(self._queries + 1, math.ceil(self._queries * _GROWTH))
        if not grown or elapsed_s - self._time_s < self._apart_s:
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
    return _moved(seen) and enough.reached(seen.joules(), seen.queries, seen.interval, _per_item_j(seen))


def _moved(seen: Watched) -> bool:
    return seen.device.read().energy_j > seen.looks[0].reading.energy_j


def _per_item_j(seen: Watched) -> float:
    gain_j = seen.looks[-1].reading.energy_j - seen.looks[0].reading.energy_j
    return gain_j * seen.sensor.factor / seen.items


def judged(seen: Watched, censored: bool, closed: bool) -> Measurement:
    """Return the measurement a window amounts to.

    Args:
        seen: All of it.
        censored: Whether it was cut short.
        closed: Whether each query went out as soon as the one before was answered.

    Raises:
        TrialError: If it amounts to none; `Disturbed` if another window may.
    """
    if not seen.queries:
        raise TrialError("no query was answered within the window")
    check_readings(seen.looks, seen.sensor)
    check_undisturbed(seen.looks, seen.queries, seen.ends_s, closed)
    joules = seen.joules()
    if not censored:
        check_drift(joules.drift)
    elapsed_s = seen.looks[-1].reading.time_s - seen.looks[0].reading.time_s
    try:
        return Measurement(
            latency=Latency.of([query.latency_s for query in seen.queries]),
            energy_j=_per_item_j(seen),
            throughput_per_s=seen.items / elapsed_s,
            power_w=_per_item_j(seen) * seen.items / elapsed_s,
            energy_kind=seen.device.energy_kind,
            boundary="; ".join(filter(None, (seen.device.boundary, seen.sensor.note))),
            temperature_c=_hottest(seen.looks),
            window_s=elapsed_s,
            censored=censored,
            intervals=_intervals(seen, joules),
            extras=_extras(seen),
        )
    except InvalidInput as error:
        raise TrialError(f"the window tells nothing: {error}") from error


def _intervals(seen: Watched, joules: Joules) -> dict[str, Interval]:
    """Return every interval there is, by metric."""
    times = ["mean", *SHARES, "throughput", *(f"{name}_{tail}" for name in _TIMES for tail in ("p50", "p99"))]
    found = {"energy": joules.per_item, "power": joules.power, **{name: seen.interval(name) for name in times}}
    if seen.tokens:
        found["tokens_per_j"] = joules.tokens_per_j
    return {name: interval for name, interval in found.items() if interval is not None}


def _extras(seen: Watched) -> dict[str, float]:
    """Return what only some workloads have: times to the first token and between tokens, tokens per joule."""
    found: dict[str, float] = {}
    for name, attribute in _TIMES.items():
        values = seen.values(attribute)
        if values.size:
            p50, p99 = np.quantile(values, [0.5, 0.99], method="inverted_cdf").tolist()
            found |= {f"{name}_p50": p50, f"{name}_p99": p99}
    if seen.tokens:
        found["tokens_per_j"] = seen.tokens / (_per_item_j(seen) * seen.items)
    return found


def mean_interval(values: np.ndarray[tuple[int], np.dtype[np.float64]]) -> Interval | None:
    """Return the 95 % interval of a mean by batch means; None if there are too few values.

    Args:
        values: In order, shape (values,).
    """
    size = len(values) // _BATCHES
    if size == 0:
        return None
    means = values[len(values) - size * _BATCHES :].reshape(_BATCHES, size).mean(axis=1)
    half = half_width([Student(float(means.std(ddof=1)) / math.sqrt(_BATCHES), _BATCHES - 1)])
    mean = float(values.mean())
    return Interval(max(0.0, mean - half), mean + half)


def _hottest(looks: Sequence[Look]) -> float | None:
    return max((look.reading.temperature_c for look in looks if look.reading.temperature_c is not None), default=None)
