"""Drift: whether energy and latency still are what the profile predicts, asked after every sample.

A residual is the logarithm of observed over predicted, so that 8 % is the same distance at every point. What is left of
it once what a prediction is off by from the beginning has been taken off is summed up as the logarithm of how much
likelier it is with the drift than without (Page, Continuous inspection schemes, Biometrika 41, 1954; no test is quicker
at as few false alarms: Moustakides, Optimal stopping times for detecting changes in distributions, Annals of
Statistics 14, 1986). A sum that passes its threshold raises an alarm. The threshold is set for the mean time between
false alarms by Page's integral equation for Gaussian residuals, solved by quadrature as Goel and Wu did (Determination
of A.R.L. and a contour nomogram for CUSUM charts to control normal mean, Technometrics 13, 1971); in plain Python, for
the daemon is to load no more than it must. Siegmund's formula, the usual short cut, promises up to a half more time
than there is where the drift is large beside the spread; it is taken where it is right.

What a prediction is off by is learnt at each rung, and goes on being learnt after the watch has begun: each residual is
taken against what those before it say, with a variance that counts how little they say (recursive residuals, which are
independent and Gaussian while nothing drifts: Brown, Durbin and Evans, Techniques for testing the constancy of
regression relationships over time, Journal of the Royal Statistical Society B 37, 1975). So the watch need not wait
until a rung is known well, and one that is known badly raises no alarm.

By how much residuals spread is learnt from minutes: what minutes of the same load differ by, such as heat or a burst,
lasts for longer than a sample, and samples alone would not show it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial

from polythrottle.domain.backports import paired
from polythrottle.domain.errors import InvalidInput
from polythrottle.domain.measurement import BETWEEN_WINDOWS

SAMPLE_S = 10.0
"""How much load a sample of energy is made of."""
MINUTE_S = 60.0
"""What spreads are those of, and how much load a sample of latency is made of."""
WEEK_S = 7 * 24 * 3600.0
_NODES = 24
_NODES_PER_SPREAD = 2.0
"""Of the quadrature: run lengths are right to better than a tenth of a per cent."""
_SMALL = 0.3
_OVERSHOOT = 1.166
"""Below this slack Siegmund's formula is right to 2 per mille; by how much he raises the threshold."""
_HALVINGS = 40
_EXACT = 1e-5
_THRESHOLD_MOST = 1024.0
_CHARTS = 4
"""Energy and latency, upwards and downwards: each may raise a quarter of the false alarms."""
_FIRST = 20
"""How many minutes a spread is made of before it is asked for drift."""
_LATELY = 240
"""How many minutes it is made of at most, later ones counting for more: a load may become rougher."""
_LEARNT = 240.0
"""How many minutes of a rung it is learnt from what its prediction is off by; then it stays, or slow drift is lost."""
_CLIP = 4.0
"""So many spreads beyond the drift at most one sample counts for: a single broken one is no drift."""
_MINUTE_MOST = 9.0
"""And so many squares of the spread one minute counts for in it, once it is known: so is a single broken one."""
_HELD = 10
"""For so many minutes one is kept before the spread is learnt from it: a drift is not to hide itself."""
_NATS = 11.0
"""About what a sum must pass for a week without a false alarm, in natural logarithms of likelihood."""
_STEP = 1.01
"""Spreads are rounded up to a power of it, so that few thresholds need be computed."""
_UNKNOWN = 1.0
"""The variance of what a prediction is off by while nothing has been learnt."""


def run_length(shift: float, slack: float, threshold: float) -> float:
    """Return after how many samples on average a one-sided sum of Gaussian residuals passes its threshold.

    Args:
        shift: Of the mean, in spreads; 0 while nothing drifts.
        slack: What is taken off each sample.
        threshold: What is passed; above 0.
    """
    nodes, weights = _gauss_legendre(max(_NODES, math.ceil(_NODES_PER_SPREAD * threshold)))
    # The sum is 0 with a probability of its own, which no density has: a state beside the nodes.
    sums = [0.0, *((1 + node) * threshold / 2 for node in nodes)]
    shares = [weight * threshold / 2 for weight in weights]
    drop = slack - shift
    rows = []
    for number, here in enumerate(sums):
        # By erfc: one plus erf would cancel where a fall is unlikely.
        falls = 0.5 * math.erfc((here - drop) / math.sqrt(2))
        moves = (share * _density(there - here + drop) for share, there in paired(shares, sums[1:]))
        row = [-falls, *(-move for move in moves), 1.0]
        row[number] += 1.0
        rows.append(row)
    return _solved(rows)[0]


def _density(spreads: float) -> float:
    return math.exp(-spreads * spreads / 2) / math.sqrt(2 * math.pi)


@lru_cache(maxsize=16)
def _gauss_legendre(count: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return nodes and weights of Gaussian quadrature on (-1, 1): Newton's method on the Legendre polynomial."""
    nodes = []
    weights = []
    for number in range(count):
        # So near the root that each step doubles the digits, and eight are ample (as gauleg in Numerical Recipes).
        node = math.cos(math.pi * (number + 0.75) / (count + 0.5))
        slope = 1.0
        for _ in range(8):
            before = 1.0
            value = node
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
            pairs = paired(rows[row][column:], pivot[column:])
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
    if slack < _SMALL:
        length = _siegmund
    else:
        length = partial(run_length, 0.0)
    low = 1e-3
    high = 1.0
    while length(slack, high) < samples and high < _THRESHOLD_MOST:
        low = high
        high = 2 * high
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if length(slack, middle) < samples else (low, middle)
        if high - low < _EXACT * high:
            break
    # The upper end, for a threshold too high means fewer false alarms, never more.
    return high


def _siegmund(slack: float, threshold: float) -> float:
    """Return about the run length while nothing drifts (Siegmund, Sequential Analysis, 1985, equation 2.57)."""
    twice = 2 * slack * (threshold + _OVERSHOOT)
    # By expm1: exp(x) - 1 loses its digits at the small slacks that this is for.
    return (math.expm1(twice) - twice) / (2 * slack * slack)


@dataclass(frozen=True)
class ResidualSpread:
    """By how much minutes of residuals differ while nothing drifts.

    Args:
        minutes: How many it is made of; at most `_LATELY`.
        squares: The sum of their squares.
    """

    minutes: float = 0.0
    squares: float = 0.0

    @property
    def known(self) -> bool:
        """Whether there were enough to ask for drift."""
        return self.minutes >= _FIRST

    @property
    def value(self) -> float:
        """The standard deviation of a minute that thresholds are made with.

        The rate of false alarms goes with exp(-n s²/σ²), where the sums must pass n and σ² is known as s² only. So
        that it is right on average over what so few minutes may say (chi-square with as many degrees of freedom), s² is
        raised. It is never below `BETWEEN_WINDOWS`, which a few minutes at one point do not show.
        """
        if self.minutes < 1:
            return BETWEEN_WINDOWS
        freedom = max(_FIRST, self.minutes)
        raised = freedom / (2 * _NATS) * math.expm1(2 * _NATS / freedom)
        steps = math.log(max(1.0, math.sqrt(raised * self.squares / self.minutes) / BETWEEN_WINDOWS), _STEP)
        return BETWEEN_WINDOWS * _STEP ** math.ceil(steps)

    def seen(self, minute: float) -> ResidualSpread:
        """Return the spread after one more minute's residual."""
        square = min(minute * minute, _MINUTE_MOST * self.value**2 if self.known else math.inf)
        kept = min(1.0, (_LATELY - 1) / max(1.0, self.minutes))
        return ResidualSpread(kept * self.minutes + 1, kept * self.squares + square)


@dataclass(frozen=True)
class Offsets:
    """What the predictions of rungs are off by from the beginning, as logarithms.

    They are taken to be Gaussian around what they have in common, of which nothing is known beforehand.

    Args:
        between: How much they differ from rung to rung, a standard deviation.
        learnt: By the rung's number, how many minutes it was learnt from, and their mean.
    """

    between: float
    learnt: Mapping[int, tuple[float, float]] = field(default_factory=dict)

    def at(self, rung: int, spread: float) -> tuple[float, float]:
        """Return what a rung's prediction is off by, and the variance of that.

        Args:
            rung: Its number.
            spread: Of a minute's residuals around it.
        """
        ratio = (spread / self.between) ** 2
        weights = {number: minutes / (minutes + ratio) for number, (minutes, _) in self.learnt.items()}
        total = math.fsum(weights.values())
        if total <= 0:
            return 0.0, _UNKNOWN
        common = math.fsum(weight * self.learnt[number][1] for number, weight in weights.items()) / total
        minutes, mean = self.learnt.get(rung, (0.0, 0.0))
        own = minutes / (minutes + ratio)
        around = self.between**2
        return own * mean + (1 - own) * common, (1 - own) * around + (1 - own) ** 2 * around / total

    def with_one(self, rung: int, minutes: float, residual: float) -> Offsets:
        """Return what is known after one more residual at a rung, until enough of it is."""
        before, mean = self.learnt.get(rung, (0.0, 0.0))
        if before >= _LEARNT:
            return self
        after = before + minutes
        return replace(self, learnt={**self.learnt, rung: (after, mean + (residual - mean) * minutes / after)})


@dataclass(frozen=True)
class Chart:
    """The cumulative sums of one quantity, upwards and downwards.

    Args:
        spread: Of a minute's residuals.
        shift: The drift to be found, as a fraction: 0.08.
        false_alarm_s: The mean time of load between false alarms of this chart, both sides together.
        sample_s: How much load a sample is made of.
        up: The sum upwards, in natural logarithms of likelihood; ``down`` downwards.
    """

    spread: float = BETWEEN_WINDOWS
    shift: float = 0.08
    false_alarm_s: float = WEEK_S * _CHARTS / 2
    sample_s: float = SAMPLE_S
    up: float = 0.0
    down: float = 0.0

    def __post_init__(self) -> None:
        if not 0 < self.spread < math.inf:
            raise InvalidInput(f"residuals cannot spread by {self.spread}")

    @property
    def slack(self) -> float:
        """Half of the drift to be found, in spreads of a sample."""
        return math.log1p(self.shift) / self.spread / math.sqrt(MINUTE_S / self.sample_s) / 2

    @property
    def threshold(self) -> float:
        """What a sum must pass."""
        return 2 * self.slack * threshold_for(self.slack, 2 * self.false_alarm_s / self.sample_s)

    @property
    def delay_s(self) -> float:
        """How long it takes on average to find the drift once it is there."""
        return self.sample_s * run_length(2 * self.slack, self.slack, self.threshold / 2 / self.slack)

    @property
    def drifts(self) -> float | None:
        """An estimate of the drift's sign and least size as a fraction once a sum has passed; None if none has."""
        # Asked first, for the threshold takes a quadrature, which a sum at 0 does not need.
        if max(self.up, self.down) <= 0 or max(self.up, self.down) <= self.threshold:
            return None
        if self.up >= self.down:
            return self.shift
        return -self.shift

    def variance(self, length_s: float, unsure: float = 0.0) -> float:
        """Return the variance of a sample.

        Args:
            length_s: How much load it is made of.
            unsure: The variance of what its prediction is off by.
        """
        return self.spread**2 * MINUTE_S / length_s + unsure

    def seen(self, residual: float, length_s: float, unsure: float = 0.0) -> Chart:
        """Return the chart after one more sample.

        Args:
            residual: The logarithm of observed over expected.
            length_s: As for `variance`; ``unsure`` likewise.
            unsure: Likewise.
        """
        variance = self.variance(length_s, unsure)
        drift = math.log1p(self.shift)
        limit = _CLIP * math.sqrt(variance) + drift
        residual = min(limit, max(-limit, residual))
        up, down = (drift * (side * residual - drift / 2) / variance for side in (1, -1))
        return replace(self, up=max(0.0, self.up + up), down=max(0.0, self.down + down))


@dataclass(frozen=True)
class Quantity:
    """One quantity that is watched: what is known of its residuals, and its chart.

    Args:
        offsets: What its predictions are off by.
        chart: Its sums.
        spread: Of its minutes.
        minute: The sum of residuals, each in units of its deviation, that are no minute yet; ``samples`` how many,
            ``seconds`` how much load they are made of.
        held: Minutes that the spread is not learnt from yet, oldest first.
    """

    offsets: Offsets
    chart: Chart = field(default_factory=Chart)
    spread: ResidualSpread = field(default_factory=ResidualSpread)
    minute: float = 0.0
    samples: int = 0
    seconds: float = 0.0
    held: tuple[float, ...] = ()

    @property
    def drifts(self) -> float | None:
        """What is found, as `Chart.drifts`; None too while too little is known."""
        if self.spread.known:
            return self.chart.drifts
        return None

    def at(self, rung: int) -> tuple[float, float]:
        """Return what a rung's prediction is off by, and the variance of that."""
        return self.offsets.at(rung, self.chart.spread)

    def seen(self, residual: float, length_s: float, unsure: float) -> Quantity:
        """Return what is known after one more sample; one that is no number, as of a broken sensor, is not counted.

        Args:
            residual: The logarithm of observed over expected, which is predicted times what that is off by.
            length_s: How much load it is made of.
            unsure: The variance of what the prediction is off by.
        """
        if not math.isfinite(residual):
            return self
        if self.spread.known:
            chart = self.chart.seen(residual, length_s, unsure)
        else:
            chart = self.chart
        own = chart.variance(length_s)
        if unsure > own:  # it tells of the rung more than of what minutes differ by
            return replace(self, chart=chart)
        sum_ = self.minute + residual / math.sqrt(own + unsure)
        samples = self.samples + 1
        seconds = self.seconds
        grown = replace(self, chart=chart, minute=sum_, samples=samples, seconds=seconds + length_s)
        if grown.seconds < MINUTE_S:
            return grown
        return grown._over()

    def _over(self) -> Quantity:
        """Return the same with a minute that is over: the spread is learnt from it, once known from one of before."""
        done = replace(self, minute=0.0, samples=0, seconds=0.0)
        # A sum of n deviations of one spreads by the root of n, so that this is a minute's residual, however many it
        # had.
        held = (*self.held, self.minute / math.sqrt(self.samples) * self.chart.spread)
        if self.spread.known and len(held) <= _HELD:
            return replace(done, held=held)
        spread = self.spread.seen(held[0])
        return replace(done, held=held[1:], spread=spread, chart=replace(self.chart, spread=spread.value))

    def learnt(self, rung: int, length_s: float, residual: float) -> Quantity:
        """Return what is known after a rung's observed over predicted, as a logarithm, was seen for so long."""
        if not math.isfinite(residual):
            return self
        offset, unsure = self.at(rung)
        if self.spread.known:
            limit = _CLIP * math.sqrt(self.chart.variance(length_s, unsure))
            residual = min(offset + limit, max(offset - limit, residual))
        return replace(self, offsets=self.offsets.with_one(rung, length_s / MINUTE_S, residual))

    def again(self) -> Quantity:
        """Return the same with sums that begin anew; minutes not learnt from yet may have drifted and are forgotten."""
        return replace(self, chart=replace(self.chart, up=0.0, down=0.0), held=())


def words_of(energy: Quantity, latency: Quantity) -> str | None:
    """Return what has drifted, for people; None if nothing has."""
    found = [
        f"{name} {'above' if drifts > 0 else 'below'} what the profile predicts, by about {abs(drifts):.0%} or more"
        for name, drifts in (("energy is", energy.drifts), ("latency is", latency.drifts))
        if drifts is not None
    ]
    return " and ".join(found) or None
