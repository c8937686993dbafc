"""Two points of one device measured in turns: A B, B A, …, until it is known which of them takes less energy."""

import math
import random
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace

from polythrottle.arrivals import CLOSED, Arrivals
from polythrottle.backports import StrEnum
from polythrottle.comparing.sequential import interval
from polythrottle.errors import TrialError, Unanswered
from polythrottle.measurement import Interval, Measurement, Window
from polythrottle.meter import measure
from polythrottle.ports import Device, Recorded, Rewindable, Workload
from polythrottle.space import OperatingPoint

MOST_PAIRS = 40
RESOLUTION = 0.005
"""A difference below half a percent is not looked for any longer."""
PRECISION = 0.05
"""A proven saving is told to five points."""
_FAILURES_IN_A_ROW = 5
_BEHIND = 4
"""After so many pairs a side that does not keep up is taken for one that will not."""


class Verdict(StrEnum):
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
            metric: ``energy`` or one of `polythrottle.measurement.METRICS`.
        """
        logs = self._logs(metric)
        if len(logs) < len(self.pairs) or not all(self.keeps_up):
            return Interval(0.0, math.inf)
        found = interval(logs)
        return Interval(_exp(found.low), _exp(found.high))

    def middle(self, metric: str = "energy") -> float | None:
        """Return the geometric mean of B ÷ A; None if it was not measured."""
        logs = self._logs(metric)
        return math.exp(sum(logs) / len(logs)) if logs else None

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
    def verdict(self) -> Verdict:
        """Whether B takes less energy than A, or more, or neither is proven."""
        if self.saving.low > 0:
            return Verdict.SAVES
        return Verdict.COSTS if self.saving.high < 0 else Verdict.NOT_PROVEN

    @property
    def settled(self) -> bool:
        """Whether more pairs would change nothing that matters."""
        if not all(self.keeps_up):
            return len(self.pairs) >= _BEHIND
        width = self.saving.high - self.saving.low
        return width < (2 * RESOLUTION if self.verdict is Verdict.NOT_PROVEN else PRECISION)


def _metric(measurement: Measurement, name: str) -> float | None:
    return measurement.energy_j if name == "energy" else measurement.metric(name)


def _exp(value: float) -> float:
    return math.exp(value) if value < 700 else math.inf


def compare(
    device: Device,
    workload: Workload,
    points: Sequence[OperatingPoint],
    window: Window,
    *,
    arrivals: Arrivals = CLOSED,
    seed: int = 0,
    most_pairs: int = MOST_PAIRS,
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

    Raises:
        TrialError: If five windows in a row told nothing, or nobody answered: at first, or later twice in a row.
        DeviceError: If the device is lost.
    """
    order, recorded = random.Random(seed), isinstance(device, Recorded)
    failed = silent = 0
    found = Comparison((), 0, device.uri, workload.uri, str(arrivals), recorded, tuple(points))
    # A recorded table answers the same at every look: one pair is all there is.
    most = 1 if recorded else most_pairs
    while len(found.pairs) < most and not found.settled:
        number = len(found.pairs) + found.failures
        try:
            pair = _pair(device, workload, points, window, arrivals, seed + number, order.random() < 0.5)
        except TrialError as error:
            failed, silent = failed + 1, silent + isinstance(error, Unanswered)
            found = replace(found, failures=found.failures + 1)
            if failed == _FAILURES_IN_A_ROW or silent > bool(found.pairs):
                raise
            continue
        failed, silent, found = 0, 0, replace(found, pairs=(*found.pairs, pair))
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
