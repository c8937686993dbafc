"""What was seen of one window, and the measurement that it amounts to: values, intervals, classes of requests."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np

from polythrottle.backends.meters import unmetered
from polythrottle.domain.arrivals import CLOSED, LATENCY_CYCLES, Arrivals
from polythrottle.domain.errors import InvalidInput, TrialError
from polythrottle.domain.measurement import BoardEnergy, Goodput, Interval, Latency, Measurement, Query, Reading, Window
from polythrottle.domain.metrics import OF_CLASS, PromptClass, split_metric
from polythrottle.domain.ports import EXACT_SENSOR, Device, Sensor
from polythrottle.domain.problem import Constraint
from polythrottle.metering.calibration import sensor_of
from polythrottle.metering.early_stopping import Censor, Goal, StoppingRule
from polythrottle.metering.energy import (
    EnergyEstimate,
    exact_trajectory,
    trajectory,
)
from polythrottle.metering.intervals import SHARES, mean_interval, percentile_interval
from polythrottle.metering.validity import (
    backlog_per_s,
    check_drift,
    check_readings,
    check_undisturbed,
)
from polythrottle.metering.window import Watched, WindowLog, WindowSample, idle_looks, observe

# One window: queries driven, the device looked at between them, and what that amounts to.

_BATCHES = 10
_BATCHES_QUEUED = 5
_BLOCKS = 10
_EDGES = 10.0
_ROUNDING = 1e-9
_SINGLE = 0.95
"""A single query lies below a percentile of so large a share with 95 % probability, which bounds it from below."""
_TIMES = {"ttft": "first_s", "tpot": "per_token_s"}
_GAPS = "itl"
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
        goal: What the window is for; classes of requests that it names are told apart.
    """

    device: Device
    arrivals: Arrivals = CLOSED
    goal: Goal = field(default_factory=Goal)

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
        metric, prompts = split_metric(metric)
        name, _, tail = metric.partition("_")
        if name == _GAPS:
            return None  # an answer's many gaps are no queries, of which alone it is known how alike neighbours are
        values = self.values(_TIMES.get(name, "latency_s"), prompts)
        cycle_s = self.arrivals.cycle_s
        if self.looked_s < LATENCY_CYCLES * cycle_s:
            return None
        if self.arrivals.closed:
            batches = _BATCHES
        else:
            batches = _BATCHES_QUEUED
        if (share := SHARES.get(tail or metric, 0.0)) >= _SINGLE and values.size == 1:
            return Interval(float(values[0]), math.inf)
        if share and values.size > 1:
            block = max(values.size // _BLOCKS, math.ceil(values.size * cycle_s / self.looked_s))
            return percentile_interval(values, share, 0 if self.arrivals.closed else block)
        if metric == "mean":
            return mean_interval(values, batches)
        return None

    def of_class(self, prompts: PromptClass | None) -> list[Query]:
        """Return the queries of a class, or all; none where too many do not say how long their prompts are."""
        if prompts is None:
            return self.queries
        told = [(query, query.prompt_tokens) for query in self.queries if query.prompt_tokens is not None]
        if len(told) < (1 - _MOST_UNTOLD) * len(self.queries):
            return []
        return [query for query, tokens in told if tokens in prompts]

    def values(self, name: str, prompts: PromptClass | None = None) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        """Return what the queries say of a time, in the order in which they were sent, shape (queries that say,).

        Nothing where too many do not say that should, such as time per token where tokens come all in one piece.

        Args:
            name: Of the time, as `Query` has it.
            prompts: The class of the queries; None for all.
        """
        ordered = sorted(self.of_class(prompts), key=lambda query: query.start_s or 0.0)
        told = [value for query in ordered if (value := getattr(query, name)) is not None]
        owed = 0
        if name in _OWED:
            owed = sum((query.tokens or 0) >= _OWED[name] for query in ordered)
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
    seen = ObservedWindow(device, sensor, arrivals=arrivals, goal=goal)
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
        # Of a class that nobody has been of yet nothing is known, which no interval says.
        return all(map(seen.of_class, self._goal.classes)) and self.enough(seen.joules(), seen.interval)

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
        goodput=_goodput(seen, joules),
    )


def _goodput(seen: ObservedWindow, joules: EnergyEstimate) -> Goodput | None:
    """Return how many requests held every limit of theirs; None where that means nothing or too many do not tell."""
    limits = seen.goal.counted
    if not limits or not seen.tokens:
        return None
    kept = [_keeps(query, limits) for query in seen.queries]
    if kept.count(None) > _MOST_UNTOLD * len(kept):
        return None
    good = kept.count(True)
    counts = {}
    for prompts in seen.goal.classes:
        of_class = [held for query, held in zip(seen.queries, kept, strict=True) if _is_of(query, prompts)]
        counts[str(prompts)] = (len(of_class), of_class.count(True))
    each_j = joules.item_j * seen.items / len(kept)
    return Goodput(
        requests=len(kept),
        good=good,
        per_s=good / seen.looked_s,
        energy_j=each_j * len(kept) / good if good else None,
        classes=counts,
    )


def _is_of(query: Query, prompts: PromptClass) -> bool | None:
    """Return whether a query is of a class; None if it does not tell."""
    if query.prompt_tokens is None:
        return None
    return query.prompt_tokens in prompts


def _keeps(query: Query, limits: Sequence[Constraint]) -> bool | None:
    """Return whether a query kept all limits that are for it; None if it breaks none and does not tell of all."""
    kept = [_keeps_one(query, limit) for limit in limits]
    if False in kept:
        return False
    if None in kept:
        return None
    return True


def _keeps_one(query: Query, limit: Constraint) -> bool | None:
    """Return whether a query kept a limit; None if it does not tell.

    Of the times between its own tokens as many may be longer as the limit says of all.
    """
    if limit.prompts is not None:
        of_class = _is_of(query, limit.prompts)
        if of_class is None:
            return None
        if not of_class:
            return True
    name, _, tail = split_metric(limit.metric)[0].rpartition("_")
    if name not in ("", "ttft") and query.tokens is not None and query.tokens < _OWED["per_token_s"]:
        return True
    taken_s = _taken_s(query, name, tail)
    if taken_s is None:
        return None
    return taken_s <= limit.limit


def _taken_s(query: Query, name: str, tail: str) -> float | None:
    """Return the time of a query that a metric without its tail means; None if it does not tell."""
    if name == "":
        return query.latency_s
    if name == "ttft":
        return query.first_s
    if name != _GAPS:
        return query.per_token_s
    if len(query.gaps_s) == 0:
        return None
    return float(np.quantile(np.asarray(query.gaps_s, dtype=float), SHARES[tail], method="inverted_cdf"))


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
        if name == "energy":
            value = found.energy_j
        else:
            value = found.metric(name) or math.nan
        wider = Interval(interval.low * (1 - _ROUNDING), interval.high * (1 + _ROUNDING))
        if value not in wider:
            raise TrialError(f"{name} is {value:.6g} and its interval {interval.low:.6g} to {interval.high:.6g}")
        held[name] = Interval(min(interval.low, value), max(interval.high, value))
    return replace(found, intervals=held)


def _intervals(seen: ObservedWindow, joules: EnergyEstimate) -> dict[str, Interval]:
    """Return every interval there is, by metric."""
    times = ["mean", *SHARES, *(f"{name}_{tail}" for name in _TIMES for tail in ("p50", "p99"))]
    classed = [f"{name}{OF_CLASS}{prompts}" for prompts in seen.goal.classes for name in times]
    named = (*times, "throughput", *classed)
    found = {"energy": joules.per_item, "power": joules.power, **{name: seen.interval(name) for name in named}}
    if seen.tokens:
        found["tokens_per_j"] = joules.tokens_per_j
    return {name: interval for name, interval in found.items() if interval is not None}


def _extras(seen: ObservedWindow, joules: EnergyEstimate) -> dict[str, float]:
    """Return what only some workloads have: times to the first token and between tokens, tokens per joule.

    Of every class of requests that the window is about, all times.
    """
    found = _token_times(seen, None)
    for prompts in seen.goal.classes:
        times = _token_times(seen, prompts)
        if (values := seen.values("latency_s", prompts)).size:
            latency = Latency.of(values.tolist())
            times |= {name: getattr(latency, f"{name}_s") for name in ("mean", *SHARES)}
        found |= {f"{name}{OF_CLASS}{prompts}": value for name, value in times.items()}
    if seen.tokens:
        found["tokens_per_j"] = 1 / joules.token_j
    return found


def _token_times(seen: ObservedWindow, prompts: PromptClass | None) -> dict[str, float]:
    """Return times to the first token, per token, and between tokens of a class of requests, or of all."""
    found: dict[str, float] = {}
    for name, attribute in _TIMES.items():
        values = seen.values(attribute, prompts)
        if values.size:
            p50, p99 = np.quantile(values, [0.5, 0.99], method="inverted_cdf").tolist()
            found |= {f"{name}_p50": p50, f"{name}_p99": p99}
    gaps_s = [np.asarray(query.gaps_s) for query in seen.of_class(prompts) if len(query.gaps_s)]
    if gaps_s:
        p50, p99 = np.quantile(np.concatenate(gaps_s), [0.5, 0.99], method="inverted_cdf").tolist()
        found |= {f"{_GAPS}_p50": p50, f"{_GAPS}_p99": p99}
    return found


def _hottest(looks: Sequence[WindowSample]) -> float | None:
    return max((look.reading.temperature_c for look in looks if look.reading.temperature_c is not None), default=None)


# What a device draws without work, at the point it is set to.


def idle_power_w(device: Device, duration_s: float, sensor: Sensor) -> float | None:
    """Return the power of a device that is left alone, in watts; None if that was not asked or cannot be told.

    Measured right after a window, when the board is as warm as it was in it, for leakage grows with heat. It cannot be
    told where the energy reading stops, falls or jumps meanwhile.

    Args:
        device: Set to a point, and without work.
        duration_s: How long to look at least; 0 if not at all.
        sensor: What its energy is read with.
    """
    if duration_s <= 0:
        return None
    return idle_watts(idle_looks(device, duration_s, sensor), sensor)


def idle_watts(looks: Sequence[WindowSample], sensor: Sensor) -> float | None:
    """Return the power that looks at a device without work say; None if they say none."""
    try:
        check_readings(looks, sensor, closed=False)
    except TrialError:
        return None
    return EnergyEstimate(trajectory(looks, sensor), sensor).watts
