"""What is read off a device and a workload: readings, queries, latencies, measurements, and their table columns."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING

from polythrottle.domain.backports import StrEnum, paired
from polythrottle.domain.errors import InvalidInput
from polythrottle.domain.metrics import EXTRAS, METRICS, OF_CLASS, is_metric, split_metric

if TYPE_CHECKING:
    import pandas as pd

# What is read off a device and a workload: readings, queries, latencies, measurements.


class EnergyKind(StrEnum):
    """How the joules of a measurement came about; every figure made from them carries the word."""

    MEASURED = "measured"
    RECORDED = "recorded"  # in a table that does not say how they came about
    ESTIMATED = "estimated"
    RELATIVE = "relative"
    SIMULATED = "simulated"


@dataclass(frozen=True)
class Reading:
    """One timed sample of a device.

    Args:
        time_s: When, on the device's clock.
        energy_j: Running total of energy since an arbitrary start.
        temperature_c: Hottest sensor, or None if there is none.
        clocks_hz: What actually runs, by domain; empty if not readable.
        throttled: Whether the device slows itself down now (heat, current, power).
        cause: Why, in words, where that is known.
        cuts: How often it has cut its clocks for a moment since it was started, as is normal on it and spoils nothing
            (OC3 on Orin and Thor); None if nobody counts.
        cut_s: For how long together; None if nobody tells.
        overrun: Which clock ran above what was applied since the reading before, in words; empty if none did.
        board_j: Running total of the device's own sensors, where ``energy_j`` is an external meter's; else None.
    """

    time_s: float
    energy_j: float
    temperature_c: float | None = None
    clocks_hz: Mapping[str, int] = field(default_factory=dict)
    throttled: bool = False
    cause: str = ""
    cuts: int | None = None
    cut_s: float | None = None
    overrun: str = ""
    board_j: float | None = None


@dataclass(frozen=True)
class Query:
    """One answered query: how long its sender waited, and for how many items.

    Args:
        latency_s: From the moment it was meant to be sent until its answer was there, so that a sender who is late
            himself hides nothing ("coordinated omission": Tene, How NOT to Measure Latency, 2013).
        items: How many.
        start_s: That moment, on the clock of the device; None if whoever sent it did not note it.
        sent_s: When it was sent, or taken out of the queue before a single server; None if that is ``start_s``.
        first_s: From then until the first token, where the answer comes in parts.
        tokens: How many tokens the answer had, where it has any.
        more: Whether what answered this one has answered another already, which comes next.
        lumped: Whether all that it says came in one moment, as from a server or a proxy that holds tokens back.
        step_s: What its latency may be off by because it was told in so many decimal places only.
        prompt_tokens: How many tokens its prompt had, where it has any.
        gaps_s: The times between its tokens, where each of them is known.

    Raises:
        InvalidInput: If the latency is not a positive, finite time, there are no items, or the rest makes no sense.
    """

    latency_s: float
    items: int = 1
    start_s: float | None = None
    first_s: float | None = None
    tokens: int | None = None
    sent_s: float | None = None
    more: bool = False
    lumped: bool = False
    step_s: float = 0.0
    prompt_tokens: int | None = None
    gaps_s: Sequence[float] = field(default=(), compare=False, repr=False)

    def __post_init__(self) -> None:
        if not (math.isfinite(self.latency_s) and self.latency_s > 0) or self.items < 1:
            raise InvalidInput(f"a query took {self.latency_s} s for {self.items} items")
        if self.start_s is not None and not math.isfinite(self.start_s):
            raise InvalidInput(f"a query was sent at {self.start_s} s")
        if self.first_s is not None and not 0 < self.first_s <= self.latency_s:
            raise InvalidInput(
                f"a query had its first token after {self.first_s} s and its last after {self.latency_s} s"
            )
        if self.tokens is not None and self.tokens < 0:
            raise InvalidInput(f"an answer had {self.tokens} tokens")

    @property
    def per_token_s(self) -> float | None:
        """The time per token after the first; None if that is not known: no second one, or all came at once."""
        if self.first_s is None or self.tokens is None or self.tokens < 2:
            return None
        if self.lumped or self.first_s == self.latency_s:
            return None
        return (self.latency_s - self.first_s) / (self.tokens - 1)


@dataclass(frozen=True)
class Latency:
    """How long queries took over one window; a statistic nobody recorded is None, never 0.

    Args:
        mean_s: Mean over queries.
        p50_s: Median; p90_s, p95_s and p99_s likewise: the time that share of queries stayed within.
        std_s: Standard deviation over queries.
        queries: How many queries the statistics are made of.

    Raises:
        InvalidInput: If a time is not positive and finite, or there was no query.
    """

    mean_s: float
    p50_s: float | None = None
    p90_s: float | None = None
    p95_s: float | None = None
    p99_s: float | None = None
    std_s: float | None = None
    queries: int | None = None

    def __post_init__(self) -> None:
        for value in (self.mean_s, self.p50_s, self.p90_s, self.p95_s, self.p99_s):
            if value is not None and not (math.isfinite(value) and value > 0):
                raise InvalidInput(f"a latency must be a positive, finite time, not {value} s")
        if self.std_s is not None and not 0 <= self.std_s < math.inf:
            raise InvalidInput(f"latencies cannot deviate by {self.std_s} s")
        if self.queries is not None and self.queries < 1:
            raise InvalidInput(f"a latency is that of 1 query or more, not of {self.queries}")

    @classmethod
    def of(cls, latencies_s: Sequence[float]) -> Latency:
        """Return the statistics of single latencies in seconds.

        Percentiles are order statistics that were really observed (inverted empirical distribution), not interpolated.

        Raises:
            InvalidInput: If there is none, or one is not a positive, finite time.
        """
        # Not above: the daemon at rest and what runs on a board over SSH pass measurements on without loading NumPy.
        import numpy as np

        times = np.asarray(latencies_s, dtype=float)
        if not times.size:
            raise InvalidInput("no query finished in the window")
        p50, p90, p95, p99 = np.quantile(times, [0.5, 0.9, 0.95, 0.99], method="inverted_cdf").tolist()
        spread = float(times.std(ddof=1)) if times.size > 1 else None
        return cls(float(times.mean()), p50, p90, p95, p99, spread, int(times.size))


@dataclass(frozen=True)
class Interval:
    """What a quantity is between, with 95 % confidence.

    Args:
        low: Lower end, in the quantity's unit; -inf if it is not known.
        high: Upper end; inf if it is not known, as of a p99 seen through too few queries.

    Raises:
        InvalidInput: If the ends are in the wrong order or no numbers.
    """

    low: float
    high: float

    def __post_init__(self) -> None:
        # Asked this way round, NaN is refused too.
        if not self.low <= self.high:
            raise InvalidInput(f"an interval cannot go from {self.low} to {self.high}")

    @property
    def known(self) -> bool:
        """Whether both ends are."""
        return math.isfinite(self.low) and math.isfinite(self.high)

    @property
    def half(self) -> float:
        """Half the width: the ± of people; inf if an end is not known."""
        if self.known:
            return (self.high - self.low) / 2
        return math.inf

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high

    def scaled(self, factor: float) -> Interval:
        """Return the interval of the quantity times a positive factor."""
        return Interval(self.low * factor, self.high * factor)


@dataclass(frozen=True)
class BoardEnergy:
    """What a device's own sensors said of a window whose joules are an external meter's.

    Args:
        energy_j: Energy per item.
        energy_kind: How it came about.
        boundary: What it covers.
        interval: Its 95 % interval; None if it has none.

    Raises:
        InvalidInput: If the energy is not positive and finite.
    """

    energy_j: float
    energy_kind: EnergyKind
    boundary: str
    interval: Interval | None = None

    def __post_init__(self) -> None:
        if not (math.isfinite(self.energy_j) and self.energy_j > 0):
            raise InvalidInput(f"energy must be positive and finite, not {self.energy_j}")


@dataclass(frozen=True)
class Goodput:
    """How many requests of a window held every limit of theirs, and what each of those took.

    Args:
        requests: How many were answered; ``good`` of them held.
        good: A request whose times are not told is none of them.
        per_s: Good ones a second.
        energy_j: The energy of all requests per good one; None if none was.
        classes: The same two counts for each class of requests, by its name.

    Raises:
        InvalidInput: If more were good than there were, or a figure cannot be one.
    """

    requests: int
    good: int
    per_s: float
    energy_j: float | None = None
    # A dict has no hash; equal values still hash alike where it is left out.
    classes: Mapping[str, tuple[int, int]] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        for requests, good in ((self.requests, self.good), *self.classes.values()):
            if not 0 <= good <= requests:
                raise InvalidInput(f"{good} of {requests} requests cannot have held their limits")
        if not 0 <= self.per_s < math.inf:
            raise InvalidInput(f"{self.per_s} requests a second cannot have held their limits")
        if self.energy_j is not None and not 0 < self.energy_j < math.inf:
            raise InvalidInput(f"energy must be positive and finite, not {self.energy_j}")

    @property
    def share(self) -> float:
        """The share of all requests that was good."""
        if self.requests:
            return self.good / self.requests
        return 0.0


_NEVER_NEGATIVE = ("window_s", "requests", "offered_per_s", "sender_s", "cuts_per_s", "cut_share")
"""Figures of a measurement that may be unknown or zero."""


@dataclass(frozen=True)
class Measurement:
    """One operating point on one workload over one window.

    Args:
        latency: Of single queries.
        energy_j: Energy per item, over everything inside ``boundary``.
        throughput_per_s: Items per second.
        power_w: Mean power over the window; None where the source has only energy of unknown unit.
        energy_kind: Measured, estimated, relative or simulated.
        boundary: Which rails, devices or processes the joules cover.
        temperature_c: Highest reading in the window.
        window_s: How long it was.
        censored: Whether the window was cut short because a limit was plainly broken; everything above is then that of
            the shorter window, and the point does not hold, whatever the limit.
        intervals: 95 % intervals by metric, ``energy`` included; those of them that are known.
        idle_power_w: What the device draws at this point without work; None if that was not measured.
        requests: How many queries this took, warm-up and windows that had to be repeated included; None if unknown.
        extras: What only some workloads have, by metric, and times of classes of requests.
        offered_per_s: How many items were meant to be sent in a second, in the long run; None where answers decide.
        backlog_per_s: By how many items a second the queue grew, if it did: then latency is of this window only, and
            grows for as long as requests come like this.
        late_p99_s: How late the sender itself sent 99 % of the queries at most; None where that has no meaning.
        sender_s: Processor seconds the sender took, of those that can be told from the model's; None if unknown.
        cuts_per_s: How often a second the device cut its clocks for a moment, as is normal on it; None if unknown.
        cut_share: For which share of the time; None if unknown.
        board: What the device's own sensors said beside an external meter; None where nothing stands beside.
        goodput: How many requests held every limit on their times; None where answers have no tokens, nothing limits
            single requests, or too many do not tell.

    Raises:
        InvalidInput: If energy or throughput is not positive and finite, power is not finite or negative, an extra
            is not a metric of its kind, or a count, a time or a temperature cannot be one.
    """

    latency: Latency
    energy_j: float
    throughput_per_s: float
    power_w: float | None = None
    energy_kind: EnergyKind = EnergyKind.MEASURED
    boundary: str = ""
    temperature_c: float | None = None
    window_s: float | None = None
    censored: bool = False
    intervals: Mapping[str, Interval] = field(default_factory=dict, hash=False)
    idle_power_w: float | None = None
    requests: int | None = None
    extras: Mapping[str, float] = field(default_factory=dict, hash=False)
    offered_per_s: float | None = None
    backlog_per_s: float | None = None
    late_p99_s: float | None = None
    sender_s: float | None = None
    cuts_per_s: float | None = None
    cut_share: float | None = None
    board: BoardEnergy | None = None
    goodput: Goodput | None = None

    def __post_init__(self) -> None:
        if strange := sorted(
            name for name in set(self.extras) - set(EXTRAS) if not (OF_CLASS in name and is_metric(name))
        ):
            raise InvalidInput(f"{strange[0]} is not among {', '.join(EXTRAS)}")
        if self.idle_power_w is not None and not (math.isfinite(self.idle_power_w) and self.idle_power_w >= 0):
            raise InvalidInput(f"idle power must be finite and not negative, not {self.idle_power_w}")
        for name, value in (("energy", self.energy_j), ("throughput", self.throughput_per_s)):
            if not (math.isfinite(value) and value > 0):
                raise InvalidInput(f"{name} must be positive and finite, not {value}")
        if self.power_w is not None and not (math.isfinite(self.power_w) and self.power_w > 0):
            raise InvalidInput(f"power must be positive and finite, not {self.power_w}")
        if self.temperature_c is not None and not math.isfinite(self.temperature_c):
            raise InvalidInput(f"a temperature must be finite, not {self.temperature_c} °C")
        for name in _NEVER_NEGATIVE:
            value = getattr(self, name)
            if value is not None and not 0 <= value < math.inf:
                raise InvalidInput(f"{name} must be finite and not negative, not {value}")

    def metric(self, name: str) -> float | None:
        """Return one of `METRICS` in its unit, or None if it was not measured."""
        if name == "power":
            return self.power_w
        if name == "temperature":
            return self.temperature_c
        if name == "throughput":
            return self.throughput_per_s
        if name in EXTRAS or OF_CLASS in name:
            return self.extras.get(name)
        value: float | None = getattr(self.latency, f"{name}_s")
        return value

    @property
    def keeps_up(self) -> bool:
        """Whether what came was served, as far as the window shows."""
        return not self.backlog_per_s

    @property
    def idle_j(self) -> float | None:
        """The share of an item's energy that would have been drawn without work; None if it cannot be told.

        That is where idle power is unknown, or was measured above the power of the window itself, as beside other work.
        """
        if self.power_w is None:
            power_w = self.energy_j * self.throughput_per_s
        else:
            power_w = self.power_w
        if self.idle_power_w is None or self.idle_power_w >= power_w:
            return None
        return self.energy_j * self.idle_power_w / power_w

    @property
    def marginal_j(self) -> float | None:
        """The energy an item adds to that; None if the other cannot be told."""
        if self.idle_j is None:
            return None
        return self.energy_j - self.idle_j


BETWEEN_WINDOWS = 0.02
"""By what windows at the same point differ besides what their intervals say: a deviation, as a fraction of the energy.

Assumed, for one window each cannot tell; heat, placement and what else a machine does come to a few per cent (rough
surfaces in figures 5 to 8 of arXiv 2310.19991). `polythrottle measure A B` measures it.
"""


def saving_interval(after: Measurement, before: Measurement) -> Interval | None:
    """Return the 95 % interval of the share of energy per item that ``after`` saves; None if either has none.

    Both intervals and `BETWEEN_WINDOWS` for each are added in quadrature on the logarithm of the ratio.
    """
    both = (after.intervals.get("energy"), before.intervals.get("energy"))
    if both[0] is None or both[1] is None or not (both[0].known and both[1].known):
        return None
    halves = [each.half / seen.energy_j for each, seen in paired(both, (after, before)) if each is not None]
    # On the logarithm, so that no end of the interval says that more than all of the energy is saved.
    half = math.hypot(*halves, 1.96 * math.sqrt(2) * BETWEEN_WINDOWS)
    ratio = after.energy_j / before.energy_j
    return Interval(1 - ratio * math.exp(half), 1 - ratio * math.exp(-half))


LONGEST_S = 86_400.0
MOST_QUERIES = 1_000_000
"""What a window lasts, and how many queries it needs, at most; more is a slip of the pen."""


@dataclass(frozen=True)
class Window:
    """How long a trial looks.

    It ends once both ``queries`` and ``duration_s`` are reached, or at ``most_queries``, or at ``timeout_s``, whichever
    comes first; ``warmup`` queries go before it and are not counted.

    Args:
        queries: Fewest queries.
        duration_s: Shortest time.
        most_queries: Most queries.
        warmup: Queries before it.
        timeout_s: Longest time.
        precision: If given, a window that has seen the least goes on to the most until it knows enough: until the
            energy is known to ± this fraction and every limit is clear, or the point is plainly not worth more.
        settle_s: How long to warm up at least before it.
        cool_c: How cool the device must be before that; None if it may be as warm as it is.
        idle_s: How long to look at the device without work after it; 0 if not at all.

    Raises:
        InvalidInput: If a count or a duration is not positive, or of a size that makes no window, the most is below the
            least, or the precision is no fraction between 0.0001 and 0.5.
    """

    queries: int = 100
    duration_s: float = 2.0
    most_queries: int = 1000
    warmup: int = 5
    timeout_s: float = 60.0
    precision: float | None = None
    settle_s: float = 0.0
    cool_c: float | None = None
    idle_s: float = 0.0

    def __post_init__(self) -> None:
        if self.queries < 1 or self.warmup < 0:
            raise InvalidInput(f"a window needs 1 query or more, and no less than 0 before it, not {self.queries}")
        if self.queries > self.most_queries:
            raise InvalidInput(f"a window cannot need {self.queries} queries and end after {self.most_queries}")
        if self.queries > MOST_QUERIES:
            raise InvalidInput(f"a window holds {MOST_QUERIES:,} queries at most, not {self.queries:,}")
        self._check_times()
        if self.cool_c is not None and not -100 <= self.cool_c <= 200:
            raise InvalidInput(f"a device cools to between -100 °C and 200 °C before a window, not {self.cool_c:g} °C")
        if self.precision is not None and not 1e-4 <= self.precision <= 0.5:
            raise InvalidInput(f"a window can be precise to between 0.01 % and 50 %, not {100 * self.precision:.3g} %")

    def _check_times(self) -> None:
        if not (0 <= self.duration_s < math.inf and 0 < self.timeout_s < math.inf):
            raise InvalidInput(f"a window lasts 0 seconds or more, not {self.duration_s:g}")
        for does, time_s in (("lasts", self.duration_s), ("settles for", self.settle_s), ("idles for", self.idle_s)):
            if LONGEST_S < time_s < math.inf:
                raise InvalidInput(f"a window {does} a day at most ({LONGEST_S:g} seconds), not {time_s:g} seconds")
        if self.duration_s > self.timeout_s:
            raise InvalidInput(f"a window cannot last {self.duration_s:g} s and be given up after {self.timeout_s:g} s")
        if not (0 <= self.settle_s < math.inf and 0 <= self.idle_s < math.inf):
            if 0 <= self.settle_s < math.inf:
                wrong_s = self.idle_s
            else:
                wrong_s = self.settle_s
            raise InvalidInput(f"a window settles for 0 s or more, and so it idles, not for {wrong_s:g} s")

    @property
    def fields(self) -> dict[str, float | None]:
        """The fields by name; newer ones only where they are used, so that older problems keep their fingerprints."""
        unused = {name for name, value in _NEWER.items() if getattr(self, name) == value}
        return {name: value for name, value in asdict(self).items() if name not in unused}


_NEWER = {"precision": None, "settle_s": 0.0, "cool_c": None, "idle_s": 0.0}
"""Fields that came later, and what they are if nobody says."""

# The columns of tables of trials: what each figure of a measurement is called in files and frames, its unit last.

RECORDED: Mapping[str, Callable[[Measurement], object]] = MappingProxyType(
    {
        "latency_s": lambda m: m.latency.mean_s,
        "latency_p50_s": lambda m: m.latency.p50_s,
        "latency_p90_s": lambda m: m.latency.p90_s,
        "latency_p95_s": lambda m: m.latency.p95_s,
        "latency_p99_s": lambda m: m.latency.p99_s,
        "latency_std_s": lambda m: m.latency.std_s,
        "throughput_per_s": lambda m: m.throughput_per_s,
        "power_w": lambda m: m.power_w,
        "energy_j": lambda m: m.energy_j,
        "temperature_c": lambda m: m.temperature_c,
        "energy_kind": lambda m: str(m.energy_kind),
        "boundary": lambda m: m.boundary,
    }
)
"""What a recorded table holds of each point, in this order."""
OFFERED: Mapping[str, Callable[[Measurement], object]] = MappingProxyType(
    {"offered_per_s": lambda m: m.offered_per_s, "backlog_per_s": lambda m: m.backlog_per_s}
)
"""What it holds besides where requests come at times of their own."""
_SEEN: Mapping[str, Callable[[Measurement], object]] = MappingProxyType(
    {
        "idle_power_w": lambda m: m.idle_power_w,
        "window_s": lambda m: m.window_s,
        "requests": lambda m: m.requests,
        "censored": lambda m: m.censored,
    }
)
_QUANTITIES = {
    "energy": ("energy", "j"),
    "mean": ("latency", "s"),
    **{name: (f"latency_{name}", "s") for name in ("p50", "p90", "p95", "p99")},
    "tokens_per_j": ("tokens", "per_j"),
}
"""What a metric is called in columns where that is not its own name, and its unit."""
_TEXTS = frozenset({"energy_kind", "boundary"})
# pandas' own kinds: NumPy's int64 and bool cannot hold the unknowns of failed trials.
_OTHERS = {**dict.fromkeys(_TEXTS, "object"), "requests": "Int64", "censored": "boolean"}


def quantity(metric: str) -> tuple[str, str]:
    """Return what a metric or ``energy`` is called in columns, and its unit: ``p99`` gives ``latency_p99, s``."""
    name, prompts = split_metric(metric)
    stem, unit = _QUANTITIES.get(name) or (name, METRICS[name])
    return (stem if prompts is None else f"{stem}{OF_CLASS}{prompts}", unit)


def measurement_frame(seen: Sequence[Measurement | None]) -> pd.DataFrame:
    """Return a row of figures for each measurement, SI units; a row of unknowns for None.

    Every column of a recorded table is there; tokens, arrivals and intervals are where any measurement has them. The
    ends of a 95 % interval of ``energy_j`` are ``energy_low_j`` and ``energy_high_j``; the energy's are always there.

    Args:
        seen: What was measured.
    """
    import pandas as pd

    known = [each for each in seen if each is not None]
    taken = dict(_columns(known))
    series = {
        name: pd.Series([None if each is None else take(each) for each in seen], dtype=_OTHERS.get(name, "float64"))
        for name, take in taken.items()
    }
    table: pd.DataFrame = pd.DataFrame(series)
    return table


def _columns(known: Sequence[Measurement]) -> Iterator[tuple[str, Callable[[Measurement], object]]]:
    """Yield the columns that some measurements need, in their order, and what takes each from a measurement."""
    yield from ((name, take) for name, take in RECORDED.items() if name not in _TEXTS)
    bounded = {metric for each in known for metric in each.intervals} | {"energy"}
    classed = sorted({metric for each in known for metric in each.extras if OF_CLASS in metric})
    for metric in ("energy", *METRICS, *classed):
        if metric in bounded:
            stem, unit = quantity(metric)
            # Bound as a default: the columns are taken after the loop, when the name stands for its last metric.
            yield f"{stem}_low_{unit}", lambda m, metric=metric: _end(m, metric, "low")  # type: ignore[misc]
            yield f"{stem}_high_{unit}", lambda m, metric=metric: _end(m, metric, "high")  # type: ignore[misc]
    for metric in (*EXTRAS, *classed):
        if any(metric in each.extras for each in known):
            yield "_".join(quantity(metric)), lambda m, metric=metric: m.extras.get(metric)  # type: ignore[misc]
    if any(each.offered_per_s is not None for each in known):
        yield from OFFERED.items()
    yield from _SEEN.items()
    yield from ((name, RECORDED[name]) for name in RECORDED if name in _TEXTS)


def _end(measurement: Measurement, metric: str, end: str) -> float | None:
    found = measurement.intervals.get(metric)
    if found is None:
        value: float | None = None
    else:
        value = getattr(found, end)
    return value
