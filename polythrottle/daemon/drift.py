"""Drift: whether energy and latency still are what the profile predicts, asked after every sample.

A residual is the logarithm of observed over predicted, so that 8 % is the same distance at every point. Cumulative sums
(Page, Continuous inspection schemes, Biometrika 41, 1954) of residuals in units of their spread raise an alarm when
they pass a threshold. That is set for the mean time between false alarms by Page's integral equation for Gaussian
residuals, solved by quadrature as Goel and Wu did (Determination of A.R.L. and a contour nomogram for CUSUM charts to
control normal mean, Technometrics 13, 1971); in plain Python, for the daemon is to load no more than it must.
Siegmund's formula, the usual short cut, promises up to a half more time than there is where the drift is large beside
the spread.

Samples are means over `SAMPLE_S` of load, a minute: what windows at one point differ by for longer than a sample, such
as heat, would otherwise look like drift, and means over many queries are nearly Gaussian.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from statistics import stdev

from polythrottle.comparing.sequential import half_width
from polythrottle.errors import InvalidInput
from polythrottle.measurement import BETWEEN_WINDOWS

SAMPLE_S = 60.0
"""How long a sample is."""
WEEK_S = 7 * 24 * 3600.0
_NODES, _NODES_PER_SPREAD = 24, 2.0
"""Of the quadrature: run lengths are right to better than a tenth of a per cent."""
_HALVINGS = 16
_THRESHOLD_MOST = 64.0
_CHARTS = 4
"""Energy and latency, upwards and downwards: each may raise a quarter of the false alarms."""
_LEAST = 10
_CLIP = 4.0
"""So many spreads at most one sample counts for: a single broken one is no drift."""


@dataclass(frozen=True)
class Baseline:
    """What residuals of one quantity are like while nothing drifts.

    Args:
        mean: Of the logarithm of observed over predicted: what the prediction is off by from the beginning.
        spread: Its standard deviation; above 0.
    """

    mean: float = 0.0
    spread: float = 0.02

    def __post_init__(self) -> None:
        if not (math.isfinite(self.mean) and 0 < self.spread < math.inf):
            raise InvalidInput(f"residuals cannot spread by {self.spread} around {self.mean}")

    @classmethod
    def of(cls, residuals: Sequence[float]) -> "Baseline":
        """Return what residuals are like, from some that were seen when the profile was new.

        The spread is raised by what so few tell too little about it (the upper end of its 90 % interval, Wilson and
        Hilferty's chi-square) and by how little is known of the mean, so that false alarms do not become more
        frequent; it is never below `BETWEEN_WINDOWS`, which a few samples at one point do not show.

        Raises:
            InvalidInput: If there are fewer than ten.
        """
        if len(residuals) < _LEAST:
            raise InvalidInput(f"a baseline needs {_LEAST} samples, not {len(residuals)}")
        freedom = len(residuals) - 1
        low = freedom * (1 - 2 / (9 * freedom) - 1.645 * math.sqrt(2 / (9 * freedom))) ** 3
        mean = math.fsum(residuals) / len(residuals)
        spread = math.sqrt(math.fsum((each - mean) ** 2 for each in residuals) / freedom)
        raised = spread * math.sqrt(freedom / low) * math.sqrt(1 + 1 / len(residuals))
        return cls(mean, max(BETWEEN_WINDOWS, raised))


def run_length(shift: float, slack: float, threshold: float) -> float:
    """Return after how many samples on average a one-sided sum of Gaussian residuals passes its threshold.

    Args:
        shift: Of the mean, in spreads; 0 while nothing drifts.
        slack: What is taken off each sample.
        threshold: What is passed; above 0.
    """
    nodes, weights = _gauss_legendre(max(_NODES, math.ceil(_NODES_PER_SPREAD * threshold)))
    sums = [0.0, *((1 + node) * threshold / 2 for node in nodes)]
    shares = [weight * threshold / 2 for weight in weights]
    drop = slack - shift
    rows = []
    for number, here in enumerate(sums):
        falls = 0.5 * math.erfc((here - drop) / math.sqrt(2))
        moves = (share * _density(there - here + drop) for share, there in zip(shares, sums[1:], strict=True))
        row = [-falls, *(-move for move in moves), 1.0]
        row[number] += 1.0
        rows.append(row)
    return _solved(rows)[0]


def _density(spreads: float) -> float:
    return math.exp(-spreads * spreads / 2) / math.sqrt(2 * math.pi)


@lru_cache(maxsize=16)
def _gauss_legendre(count: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return nodes and weights of Gaussian quadrature on (-1, 1): Newton's method on the Legendre polynomial."""
    nodes, weights = [], []
    for number in range(count):
        node, slope = math.cos(math.pi * (number + 0.75) / (count + 0.5)), 1.0
        for _ in range(8):
            before, value = 1.0, node
            for order in range(2, count + 1):
                before, value = value, ((2 * order - 1) * node * value - (order - 1) * before) / order
            slope = count * (node * value - before) / (node * node - 1)
            node -= value / slope
        nodes.append(node)
        weights.append(2 / ((1 - node * node) * slope * slope))
    return tuple(nodes), tuple(weights)


def _solved(rows: list[list[float]]) -> list[float]:
    """Return the solution of linear equations, each row with its right side last: elimination with row exchange."""
    size = len(rows)
    for column in range(size):
        best = max(range(column, size), key=lambda row: abs(rows[row][column]))
        rows[column], rows[best] = rows[best], rows[column]
        pivot = rows[column]
        for row in range(column + 1, size):
            factor = rows[row][column] / pivot[column]
            pairs = zip(rows[row][column:], pivot[column:], strict=True)
            rows[row][column:] = [value - factor * above for value, above in pairs]
    found = [0.0] * size
    for row in reversed(range(size)):
        rest = sum(rows[row][column] * found[column] for column in range(row + 1, size))
        found[row] = (rows[row][-1] - rest) / rows[row][row]
    return found


@lru_cache(maxsize=256)
def threshold_for(slack: float, samples: float) -> float:
    """Return the threshold that is passed after so many samples on average while nothing drifts.

    Args:
        slack: What is taken off each sample, in spreads.
        samples: The mean run length, at least 2.
    """
    low, high = 1e-3, 1.0
    while run_length(0.0, slack, high) < samples and high < _THRESHOLD_MOST:
        low, high = high, 2 * high
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if run_length(0.0, slack, middle) < samples else (low, middle)
    return high


@dataclass(frozen=True)
class Chart:
    """The cumulative sums of one quantity, upwards and downwards.

    Args:
        baseline: What its residuals are like.
        shift: The drift to be found, as a fraction: 0.08.
        false_alarm_s: The mean time of load between false alarms of this chart, both sides together.
        sample_s: The time between samples.
        up: The sum upwards, in spreads; ``down`` downwards.
    """

    baseline: Baseline
    shift: float = 0.08
    false_alarm_s: float = 2 * WEEK_S
    sample_s: float = SAMPLE_S
    up: float = 0.0
    down: float = 0.0

    @property
    def slack(self) -> float:
        """Half of the drift to be found, in spreads."""
        return math.log1p(self.shift) / self.baseline.spread / 2

    @property
    def threshold(self) -> float:
        """What a sum must pass, in spreads."""
        return threshold_for(self.slack, 2 * self.false_alarm_s / self.sample_s)

    @property
    def delay_s(self) -> float:
        """How long it takes on average to find the drift once it is there."""
        return self.sample_s * run_length(2 * self.slack, self.slack, self.threshold)

    @property
    def drifts(self) -> float | None:
        """An estimate of the drift's sign and least size as a fraction once a sum has passed; None if none has."""
        if max(self.up, self.down) <= 0 or max(self.up, self.down) <= self.threshold:
            return None
        return self.shift if self.up >= self.down else -self.shift

    def seen(self, observed: float, predicted: float) -> "Chart":
        """Return the chart after one more sample.

        Args:
            observed: Positive; a value that is none, as of a broken sensor, is not counted.
            predicted: In the same unit.
        """
        if not (0 < observed < math.inf and 0 < predicted < math.inf):
            return self
        spreads = (math.log(observed / predicted) - self.baseline.mean) / self.baseline.spread
        limit = _CLIP + 2 * self.slack
        spreads = min(limit, max(-limit, spreads))
        return replace(
            self, up=max(0.0, self.up + spreads - self.slack), down=max(0.0, self.down - spreads - self.slack)
        )


@dataclass(frozen=True)
class Watch:
    """Energy and latency together: one false alarm a week of load, whichever raises it.

    Args:
        energy: Of the energy per request.
        latency: Of the mean latency.
    """

    energy: Chart
    latency: Chart

    @classmethod
    def over(cls, energy: Baseline, latency: Baseline, false_alarm_s: float = WEEK_S) -> "Watch":
        """Return a watch whose charts share the false alarms."""
        each_s = false_alarm_s * _CHARTS / 2
        return cls(Chart(energy, false_alarm_s=each_s), Chart(latency, false_alarm_s=each_s))

    def seen(self, energy_j: float, energy_predicted_j: float, latency_s: float, latency_predicted_s: float) -> "Watch":
        """Return the watch after one more sample under load."""
        return Watch(self.energy.seen(energy_j, energy_predicted_j), self.latency.seen(latency_s, latency_predicted_s))

    @property
    def words(self) -> str | None:
        """What has drifted, for people; None if nothing has."""
        found = [
            f"{name} {'above' if drifts > 0 else 'below'} what the profile predicts, by about {abs(drifts):.0%} or more"
            for name, drifts in (("energy is", self.energy.drifts), ("latency is", self.latency.drifts))
            if drifts is not None
        ]
        return " and ".join(found) or None


@dataclass(frozen=True)
class Rollback:
    """Whether a new profile is worse than the old one, asked after each pair of samples: a sequential test.

    The logarithms of new over old of samples that alternate between the two are taken for Gaussian. By how much they
    differ is told by them alone (`polythrottle.comparing`): what differs from one pair to the next is mostly
    the load, of which nothing is known beforehand, and a spread that is set too low rolls back good profiles. It is
    never taken for less than windows differ by, however alike the first few pairs happen to be.

    Args:
        harm: The share by which it may not be worse.
        wrongly: The chance to roll a good one back, and to keep for certain one that is worse by ``harm``.
        ratios: The logarithms so far.
    """

    harm: float = 0.02
    wrongly: float = 0.05
    ratios: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if not (self.harm > 0 and 0 < self.wrongly < 0.5):
            raise InvalidInput("a sequential test needs a harm above 0 and a chance below one half")

    def seen(self, new: float, old: float) -> "Rollback":
        """Return the test after one more pair; a pair with a value that is not positive is not counted."""
        if not (0 < new < math.inf and 0 < old < math.inf):
            return self
        return replace(self, ratios=(*self.ratios, math.log(new / old)))

    @property
    def worse(self) -> bool | None:
        """Whether the new one is to be rolled back; None while that is not known."""
        if len(self.ratios) < 2:
            return None
        spread = max(math.sqrt(2) * BETWEEN_WINDOWS, stdev(self.ratios))
        half = half_width(len(self.ratios), spread, 2 * self.wrongly)  # each end is wrong half as often as both
        mean = math.fsum(self.ratios) / len(self.ratios)
        if mean - half > 0:
            return True
        return False if mean + half < math.log1p(self.harm) else None
