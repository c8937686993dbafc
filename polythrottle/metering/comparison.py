"""Two points measured in turns until it is known which takes less energy, and a profile checked by new windows."""

import math
import random
import re
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from statistics import geometric_mean, stdev

from polythrottle.domain.arrivals import CLOSED, Arrivals
from polythrottle.domain.backports import StrEnum
from polythrottle.domain.errors import TrialError, Unanswered
from polythrottle.domain.measurement import BETWEEN_WINDOWS, Interval, Measurement, Window
from polythrottle.domain.metrics import why_untold
from polythrottle.domain.ports import Device, Recorded, Rewindable, Workload
from polythrottle.domain.problem import Constraint
from polythrottle.domain.space import OperatingPoint
from polythrottle.metering.intervals import Student, half_width
from polythrottle.metering.point_measurement import measure
from polythrottle.metering.sequential import interval

# Two points of one device measured in turns: A B, B A, …, until it is known which of them takes less energy.

MOST_PAIRS = 40
RESOLUTION = 0.005
"""A difference below half a percent is not looked for any longer."""
PRECISION = 0.05
"""A proven saving is told to five points."""
_FAILURES_IN_A_ROW = 5
_BEHIND = 4
"""After so many pairs a side that does not keep up is taken for one that will not."""


class ComparisonVerdict(StrEnum):
    """What a comparison has come to."""

    SAVES = "saves"
    COSTS = "costs"
    NOT_PROVEN = "not proven"


@dataclass(frozen=True)
class Comparison:
    """Measurements of A and B, taken in turns.

    Args:
        pairs: Of A and B, in the order they were taken.
        failures: Windows that told nothing and were taken again.
        device: URI of what they were taken on.
        workload: URI of what was served.
        arrivals: When requests were meant to be sent.
        recorded: Whether they were looked up in a table, which answers the same every time.
        points: A and B, whole.
    """

    pairs: tuple[tuple[Measurement, Measurement], ...] = ()
    failures: int = 0
    device: str = ""
    workload: str = ""
    arrivals: str = str(CLOSED)
    recorded: bool = False
    points: tuple[OperatingPoint, ...] = ()

    def ratio(self, metric: str = "energy") -> Interval:
        """Return the 95 % interval of B ÷ A, valid however often it is looked at; (0, inf) while unknown.

        It stays unknown where a side does not keep up: what a growing queue shows depends on how long one looks.

        Args:
            metric: ``energy`` or one of `polythrottle.domain.metrics.METRICS`.
        """
        logs = self._logs(metric)
        if len(logs) < len(self.pairs) or not all(self.keeps_up):
            return Interval(0.0, math.inf)
        found = interval(logs)
        return Interval(_exp(found.low), _exp(found.high))

    def middle(self, metric: str = "energy") -> float | None:
        """Return the geometric mean of B ÷ A; None if it was not measured."""
        logs = self._logs(metric)
        if logs:
            return math.exp(sum(logs) / len(logs))
        return None

    def _logs(self, metric: str) -> list[float]:
        seen = [(_metric(a, metric), _metric(b, metric)) for a, b in self.pairs]
        return [math.log(b / a) for a, b in seen if a is not None and b is not None]

    @property
    def keeps_up(self) -> tuple[bool, bool]:
        """Whether A and B each served what came, in most of their windows: a single one may be mistaken."""
        behind = [sum(not pair[side].keeps_up for pair in self.pairs) for side in (0, 1)]
        a, b = (count == 0 or 2 * count < len(self.pairs) for count in behind)
        return a, b

    @property
    def saving(self) -> Interval:
        """The share of A's energy per item that B saves, as a 95 % interval."""
        ratio = self.ratio()
        return Interval(1.0 - ratio.high, 1.0 - ratio.low)

    @property
    def verdict(self) -> ComparisonVerdict:
        """Whether B takes less energy than A, or more, or neither is proven."""
        if self.saving.low > 0:
            return ComparisonVerdict.SAVES
        if self.saving.high < 0:
            return ComparisonVerdict.COSTS
        return ComparisonVerdict.NOT_PROVEN

    @property
    def settled(self) -> bool:
        """Whether more pairs would change nothing that matters."""
        if not all(self.keeps_up):
            return len(self.pairs) >= _BEHIND
        width = self.saving.high - self.saving.low
        return width < (2 * RESOLUTION if self.verdict is ComparisonVerdict.NOT_PROVEN else PRECISION)


def _metric(measurement: Measurement, name: str) -> float | None:
    if name == "energy":
        return measurement.energy_j
    return measurement.metric(name)


def _exp(value: float) -> float:
    if value < 700:
        return math.exp(value)
    return math.inf


def compare(
    device: Device,
    workload: Workload,
    points: Sequence[OperatingPoint],
    window: Window,
    *,
    arrivals: Arrivals = CLOSED,
    seed: int = 0,
    most_pairs: int = MOST_PAIRS,
    enough: Callable[[Comparison], bool] = lambda found: found.settled,
) -> Generator[Comparison]:
    """Measure two points in turns until it is settled which takes less energy; yields the comparison after each pair.

    Which of the two comes first in a pair is drawn anew, so that heat and drift favour neither.

    Args:
        device: Entered already.
        workload: Serves queries on that device.
        points: A and B, whole.
        window: How long each look is.
        arrivals: When queries are meant to be sent.
        seed: Of the order and the arrivals.
        most_pairs: After how many pairs to give up.
        enough: Says when more pairs would change nothing.

    Raises:
        TrialError: If five windows in a row told nothing, or nobody answered: at first, or later twice in a row.
        DeviceError: If the device is lost.
    """
    order = random.Random(seed)
    recorded = isinstance(device, Recorded)
    failed = silent = 0
    found = Comparison((), 0, device.uri, workload.uri, str(arrivals), recorded, tuple(points))
    # A recorded table answers the same at every look: one pair is all there is.
    most = 1 if recorded else most_pairs
    while len(found.pairs) < most and not enough(found):
        number = len(found.pairs) + found.failures
        try:
            pair = _pair(device, workload, points, window, arrivals, seed + number, order.random() < 0.5)
        except TrialError as error:
            failed = failed + 1
            silent = silent + isinstance(error, Unanswered)
            found = replace(found, failures=found.failures + 1)
            if failed == _FAILURES_IN_A_ROW or silent > bool(found.pairs):
                raise
            continue
        failed = 0
        silent = 0
        found = replace(found, pairs=(*found.pairs, pair))
        yield found


def _pair(
    device: Device,
    workload: Workload,
    points: Sequence[OperatingPoint],
    window: Window,
    arrivals: Arrivals,
    seed: int,
    swapped: bool,
) -> tuple[Measurement, Measurement]:
    seen: dict[int, Measurement] = {}
    for turn, which in enumerate((1, 0) if swapped else (0, 1)):
        if isinstance(device, Rewindable):
            device.rewind(2 * seed + turn)
        seen[which] = measure(device, workload, points[which], window, arrivals=arrivals, seed=seed)
    return seen[0], seen[1]


# A profile held to its word: what windows measured now prove of its energy and of its limits.
#
# A profile's energy is of one window. Windows at the same point differ by more than the ± of each says, and that one
# is no better than the others: how far it may have been off is added, as its own ± and the deviation between windows.
# The windows of now show that deviation, which is never taken for less than `BETWEEN_WINDOWS`.

LEAST_WINDOWS = 4
_NORMAL = 1.96
"""How many deviations, where they are known, a draw stays within with 95 % probability."""
_PERCENTILE = re.compile(r"(.*_)?p\d+( for .*)?")


@dataclass(frozen=True)
class ProfileCheck:
    """What measuring a profile's point again has shown.

    Args:
        energy: Energy per item now ÷ then, a 95 % interval.
        limits: For each of the profile's limits, the quantity now ÷ the limit.
        windows: How many windows were measured.
        most: The share by which energy may have grown.
        measured: The windows.
        device: URI of what they were measured on.
        workload: URI of what was served.
        arrivals: When requests were meant to be sent.
        tuned_at: When they were while the profile was tuned; None if it does not say, as older ones do not.
        short: Limits on percentiles that these windows are too short to show, and the quantity now ÷ the limit as far
            as they do: it has no upper end, for the tail is what few queries miss.
        recorded: Whether they were looked up in a table, which answers the same every time.
        middle: Energy per item now ÷ then, the geometric mean of the windows.
        over: For limits that some windows speak against though not enough to prove them broken, how many do.
        sure: Whether the profile says how well its energy is known; if not, nothing is proven of energy.
        spent: Whether nothing is proven of energy, and only the profile's one window leaves that open: no number of
            windows of now would change it.
    """

    energy: Interval
    limits: dict[str, Interval]
    windows: int
    most: float
    measured: tuple[Measurement, ...] = ()
    device: str = ""
    workload: str = ""
    arrivals: str = str(CLOSED)
    tuned_at: str | None = None
    short: Mapping[str, Interval] = field(default_factory=dict, hash=False)
    recorded: bool = False
    middle: float = math.nan
    over: Mapping[str, int] = field(default_factory=dict, hash=False)
    sure: bool = True
    spent: bool = False

    @property
    def regressed(self) -> bool:
        """Whether it is proven that energy has grown by more than allowed."""
        return self.energy.low > 1.0 + self.most

    @property
    def broken(self) -> tuple[str, ...]:
        """The limits that are proven not to hold any more, and the rate if it is not kept up with."""
        rate = () if self._keeps_up else (f"the rate of {self.arrivals}",)
        return (*(name for name, ratio in self.limits.items() if ratio.low > 1.0), *rate)

    @property
    def sound(self) -> bool:
        """Whether it is proven that energy has not grown by more than allowed, and that every limit holds."""
        return self._keeps_up and self._within and all(ratio.high <= 1.0 for ratio in self.limits.values())

    @property
    def _within(self) -> bool:
        return self.energy.high <= 1.0 + self.most

    @property
    def _keeps_up(self) -> bool:
        """Whether most windows served what came: a single one may be mistaken, as it may in a comparison."""
        behind = sum(not look.keeps_up for look in self.measured)
        return behind == 0 or 2 * behind < len(self.measured)

    @property
    def settled(self) -> bool:
        """Whether more windows would change nothing."""
        seen = {**self.limits, **self.short}
        told = self._within or self.spent or not self.sure
        clear = told and all(ratio.high <= 1.0 for ratio in seen.values())
        return self.windows >= LEAST_WINDOWS and (clear or self.regressed or bool(self.broken))


def check_windows(
    then: Measurement, limits: Sequence[Constraint], seen: Sequence[Measurement], most: float
) -> ProfileCheck:
    """Return what windows at a profile's point prove of it.

    Args:
        then: What the profile says was measured there.
        limits: That it holds, absolute.
        seen: The windows of now, at least one.
        most: The share by which energy per item may have grown.

    Raises:
        TrialError: If a limit is on something that was not measured.
    """
    told = {limit: _ratio([_excess(limit, look) for look in seen]) for limit in limits}
    over = {limit: found for limit, ratio in told.items() if ratio.low <= 1 and (found := _over(limit, seen))}
    own = _own_half(then)
    energy, spent = _energy([look.energy_j / then.energy_j for look in seen], own, most)
    return ProfileCheck(
        energy,
        limits={str(limit): _held(limit, ratio, [] if limit in over else seen) for limit, ratio in told.items()},
        windows=len(seen),
        most=most,
        measured=tuple(seen),
        short={str(limit): ratio for limit, ratio in told.items() if limit in over or not _shown(limit, seen)},
        middle=geometric_mean(look.energy_j / then.energy_j for look in seen),
        over={str(limit): found for limit, found in over.items()},
        sure=own is not None,
        spent=spent,
    )


def _own_half(then: Measurement) -> float | None:
    """Return how far the logarithm of a window's energy may be off by what was seen in it; None if it does not say."""
    known = then.intervals.get("energy")
    if known is None or not known.known or known.low <= 0:
        return None
    return abs(math.log(min(known.high / then.energy_j, then.energy_j / known.low)))


def _energy(ratios: Sequence[float], own: float | None, most: float) -> tuple[Interval, bool]:
    """Return energy now ÷ then, and whether only the window of then leaves it open.

    The mean of now holds at every look; that of then is one draw, which no look changes. So they add in quadrature.

    Args:
        ratios: Of each window of now to that of then.
        own: How far that of then may be off by itself; None if nobody knows.
        most: The share by which energy may have grown.
    """
    if own is None or len(ratios) < 2:
        return Interval(0.0, math.inf), False
    logs = [math.log(ratio) for ratio in ratios]
    now = interval(logs)
    bound = math.log1p(most)
    if not now.known:
        return Interval(0.0, math.inf), False
    spread = max(BETWEEN_WINDOWS, stdev(logs))
    middle = (now.low + now.high) / 2
    half = math.hypot(now.half, own, _reach(len(logs) - 1) * spread)
    # More windows tell the deviation between windows better; once it is known, this much is left.
    left = math.hypot(own, _NORMAL * BETWEEN_WINDOWS)
    return Interval(math.exp(middle - half), _exp(middle + half)), now.high - left <= bound < now.low + left


@lru_cache(maxsize=64)
def _reach(freedom: int) -> float:
    """Return how many sample deviations a draw stays within with 95 % probability."""
    return half_width([Student(1.0, freedom)])


def _over(limit: Constraint, seen: Sequence[Measurement]) -> int:
    """Return how many windows speak against a limit on a percentile.

    Such are those above it by their lower end, and those above it that have no upper end: slow queries that come close
    together leave some windows calm and hide in the others how many there are, so that the calm ones prove nothing.
    """
    if not _PERCENTILE.fullmatch(limit.metric):
        return 0
    owns = [(look, look.intervals.get(limit.metric)) for look in seen]
    return sum(
        own.low > limit.limit if own is not None and own.known else _excess(limit, look) > 1.0 for look, own in owns
    )


def _held(limit: Constraint, ratio: Interval, seen: Sequence[Measurement]) -> Interval:
    """Return a ratio with the upper end that only windows may give whose own has one.

    A percentile of few queries lies too low, so that what they show above the limit is above it all the same.
    """
    shown = _shown(limit, seen)
    if shown:
        high = _ratio([_excess(limit, look) for look in shown]).high
    else:
        high = math.inf
    return Interval(ratio.low, max(ratio.low, high))


def _shown(limit: Constraint, seen: Sequence[Measurement]) -> list[Measurement]:
    """Return the windows that show how high a quantity is; none if most do not, for the rest are then the calm ones."""
    if not _PERCENTILE.fullmatch(limit.metric):
        return list(seen)
    shown = [look for look in seen if (own := look.intervals.get(limit.metric)) is not None and own.known]
    if 2 * len(shown) >= len(seen):
        return shown
    return []


def _excess(limit: Constraint, look: Measurement) -> float:
    """Return a quantity as a share of its limit, above 1 where it is broken."""
    value = look.metric(limit.metric)
    if value is None or value <= 0:
        raise TrialError(f"{limit.metric} is not measured here{why_untold(limit.metric)}, so {limit} cannot be checked")
    if limit.at_least:
        return limit.limit / value
    return value / limit.limit


def _ratio(values: Sequence[float]) -> Interval:
    found = interval([math.log(value) for value in values])
    return Interval(math.exp(found.low), _exp(found.high))
