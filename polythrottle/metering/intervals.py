"""Errors with a known distribution, and 95 % intervals of sums, of means of correlated batches, and of percentiles."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from polythrottle.domain.measurement import Interval

# Errors with a known distribution, and the 95 % interval of their sum.
#
# Distributions are propagated by drawing from all of them (JCGM 101:2008, Supplement 1 to the Guide to the Expression
# of Uncertainty in Measurement), because the sum is neither normal nor bounded: a counter's edges are triangular,
# what varies is Student's, a rounding that nothing stirs is uniform. The draws are always the same ones.

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Draws = NDArray[np.float64]


_DRAWS = 40_000
_SHARE = 0.95
_HARMONICS = 6


class ErrorDistribution(Protocol):
    """Something that may be off by an amount of known distribution around 0."""

    def draw(self, slot: int) -> Draws:
        """Return draws, shape (draws,), independent of those of other slots."""


@dataclass(frozen=True)
class Student:
    """What varied within the window: an estimated deviation with few degrees of freedom."""

    deviation: float
    freedom: int

    def scaled(self, factor: float) -> Student:
        """Return it times a factor, above 0."""
        return Student(factor * self.deviation, self.freedom)

    def draw(self, slot: int) -> Draws:
        """Return draws."""
        return self.deviation * _student(self.freedom, slot)


@dataclass(frozen=True)
class Mixed:
    """What varied within the window, where several deviations are likely: one of them, each with its weight.

    Args:
        deviations: Of which one is true.
        weights: How likely each is, 1 together.
        freedom: Degrees of freedom each is known with.
    """

    deviations: tuple[float, ...]
    weights: tuple[float, ...]
    freedom: int

    def scaled(self, factor: float) -> Mixed:
        """Return it times a factor, above 0."""
        return Mixed(tuple(factor * each for each in self.deviations), self.weights, self.freedom)

    def draw(self, slot: int) -> Draws:
        """Return draws."""
        import numpy as np

        place = np.searchsorted(np.cumsum(self.weights)[:-1], _uniform(slot), side="right")
        return np.asarray(self.deviations)[place] * _student(self.freedom, slot)


@dataclass(frozen=True)
class Normal:
    """A known deviation."""

    deviation: float

    def draw(self, slot: int) -> Draws:
        """Return draws."""
        return self.deviation * _normal(slot)


@dataclass(frozen=True)
class Triangular:
    """The difference of two phases, each anywhere in a step: at most ``reach`` either way."""

    reach: float

    def draw(self, slot: int) -> Draws:
        """Return draws."""
        return self.reach * (_uniform(slot) - _uniform(slot + 100))


@dataclass(frozen=True)
class Bounded:
    """Anything up to ``reach`` either way."""

    reach: float

    def draw(self, slot: int) -> Draws:
        """Return draws."""
        return self.reach * (2 * _uniform(slot) - 1)


@dataclass(frozen=True)
class Rounded:
    """The mean of readings rounded to ``quantum``, stirred by noise of a deviation: a sawtooth it smooths.

    Without noise all readings are off alike, by anything up to half a quantum; noise of a third of a quantum all but
    removes that (Widrow and Kollar, Quantization Noise, 2008, chapter 5: the sawtooth's harmonics times the
    characteristic function of the noise).
    """

    quantum: float
    stirred: float

    def draw(self, slot: int) -> Draws:
        """Return draws."""
        import numpy as np

        phase = _uniform(slot)
        total = np.zeros(_DRAWS)
        if self.stirred < 0.02 * self.quantum:
            return self.quantum * (phase - 0.5)
        for k in range(1, _HARMONICS + 1):
            left = math.exp(-2 * (math.pi * k * self.stirred / self.quantum) ** 2)
            total += (-1) ** k * left / (math.pi * k) * np.sin(2 * math.pi * k * phase)
        return self.quantum * total


def half_width(errors: Sequence[ErrorDistribution]) -> float:
    """Return what the sum of independent errors stays within, either way, with 95 % probability; 0 without any."""
    import numpy as np

    if not errors:
        return 0.0
    total = sum((error.draw(slot) for slot, error in enumerate(errors)), np.zeros(_DRAWS))
    return float(np.quantile(np.abs(total), _SHARE))


@lru_cache(maxsize=32)
def _student(freedom: int, slot: int) -> Draws:
    import numpy as np

    return np.random.default_rng([freedom, slot, 0]).standard_t(freedom, _DRAWS)


@lru_cache(maxsize=32)
def _normal(slot: int) -> Draws:
    import numpy as np

    return np.random.default_rng([slot, 1]).standard_normal(_DRAWS)


@lru_cache(maxsize=32)
def _uniform(slot: int) -> Draws:
    import numpy as np

    return np.random.default_rng([slot, 2]).random(_DRAWS)


# How sure a mean is where what it is made of may resemble its neighbours: power wanders, and short windows follow it.
#
# Batches are taken to be a first-order autoregression. How alike they are shows poorly in a few of them, so it is not
# estimated: each way in which queries may resemble each other is weighed by its likelihood, mean, drift and scale
# integrated out, and the error of the mean is a mixture of Student's over all of them (Zellner, An Introduction to
# Bayesian Inference in Econometrics, 1971, §4.1). That is wide while a window cannot tell its level from its
# wandering, and ordinary once its batches are long and know nothing of each other.

Array = NDArray[np.float64]
_QUERIES = np.geomspace(1.0, 40.0, 11)
"""Over how many queries their likeness may fade to 1 / e; evenly likely beforehand."""
_INDEPENDENT = 0.3
"""What is believed beforehand of queries that know nothing of each other."""
_MOST_ALIKE = 0.96
_NO_NOISE = 1e-300


def error_of_mean(values: Array, queries: float) -> Mixed:
    """Return the error of the mean of batches, over what its deviation would be if they knew nothing of each other.

    A straight drift is taken out: it is of the window.

    Args:
        values: Of the batches, in order, shape (batches,), at least four.
        queries: In each of them.
    """
    count = len(values)
    parts = np.column_stack([np.ones(count), np.arange(count) - (count - 1) / 2])
    freedom = count - parts.shape[1]
    found = [_regressed(values, parts, held) for held in (0.0, *_held(queries).tolist())]
    logs, squares, shares = (np.array(each) for each in zip(*found))
    prior = np.array([_INDEPENDENT, *[(1 - _INDEPENDENT) / len(_QUERIES)] * len(_QUERIES)])
    likely = logs - freedom / 2 * np.log(np.maximum(squares, _NO_NOISE)) + np.log(prior)
    weights = np.exp(likely - likely.max())
    variances = np.maximum(squares, _NO_NOISE) * shares
    deviations = np.sqrt(variances / variances[0])
    return Mixed(tuple(deviations.tolist()), tuple((weights / weights.sum()).tolist()), freedom)


def _held(queries: float) -> Array:
    """Return the correlations of neighbouring batches that likenesses of queries amount to, shape (likenesses,).

    The mean of n values of an autoregression goes with that of the next n as p (1 - p^n)^2 over n (1 - p^2) - 2 p
    (1 - p^n).
    """
    size = max(1.0, queries)
    each = np.exp(-1 / _QUERIES)
    gone = 1 - each**size
    return np.minimum(_MOST_ALIKE, each * gone**2 / (size * (1 - each**2) - 2 * each * gone))


def _regressed(values: Array, parts: Array, held: float) -> tuple[float, float, float]:
    """Return what a correlation comes to: log of the determinants, sum of squares, and the mean's variance in that."""
    first = np.sqrt(1 - held * held)
    white, design = (np.concatenate([first * each[:1], each[1:] - held * each[:-1]]) for each in (values, parts))
    gram = design.T @ design
    rest = white - design @ np.linalg.solve(gram, design.T @ white)
    _, determinant = np.linalg.slogdet(gram)
    return float(np.log(first) - determinant / 2), float(rest @ rest), float(np.linalg.inv(gram)[0, 0])


# Intervals of percentiles that hold where misses come in clusters.
#
# An order statistic bounds a percentile because the number of queries above the true percentile is known up to
# chance: n queries, share 1 - s. For independent queries that number is binomial (David and Nagaraja, Order
# Statistics, 2003, §7.1). A miss that is often followed by another spreads it: its variance grows by tau = 1 + 2 x
# the sum of the autocorrelations of "is above". So the number is taken as negative binomial with that variance
# (binomial if tau is 1); tau is estimated over `_LAGS` queries with a flat-top window (Politis, J. Nonparametric
# Statistics 15, 2003), and allowed to be wrong by what as few clusters as there are leave open.
#
# Two things a plug-in of tau misses, both seen in simulation (benchmarks/coverage.py): a window that happened to see
# few clusters has a low percentile and a low tau at once, so the upper end takes the largest tau of several higher
# thresholds, and the lower end that of its own. And where fewer than `_LEAST_CLUSTERS` clusters are expected above a
# percentile, its upper end is not known: the lower end is then one-sided.
#
# Before a queue, requests wait together for far longer than `_LAGS`: through a burst, or while a server near its
# limit is never free. There tau is also that of the counts of whole blocks, the largest of several thresholds, for
# both ends.

SHARES = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99}
_LAGS = 24
_DEPTHS = (0.4, 0.3)
_ALL_DEPTHS = (0.3, 0.5, 2.0, 4.0)
_SHALLOWEST = 4.0
_LEAST_CLUSTERS = 3.0
_RARE = 0.2
_TAIL = 0.025
_NODES = tuple(NormalDist().inv_cdf((i + 0.5) / 9) for i in range(9))


def percentile_intervals(latencies_s: Sequence[float], names: Sequence[str] = tuple(SHARES)) -> dict[str, Interval]:
    """Return the 95 % intervals of percentiles, in seconds, by name.

    Args:
        latencies_s: In the order in which the queries were sent, > 0.
        names: Which of `SHARES`.
    """
    times = np.asarray(latencies_s, dtype=float)
    if times.size > 1:
        return {name: percentile_interval(times, SHARES[name]) for name in names}
    return {}


def percentile_interval(times: Array, share: float, block: int = 0) -> Interval:
    """Return the 95 % interval of one percentile.

    Args:
        times: In the order in which the queries were sent, shape (queries,).
        share: Of the queries that stay within it.
        block: How many queries belong together besides, such as those of a burst and a calm; 0 if none do.
    """
    above = Above(times, share, block)
    low_cdf, high_cdf, tau = above.counts()
    if high_cdf[0] > _TAIL or above.expected / tau < _LEAST_CLUSTERS:
        return Interval(min(above.seen, above.at(low_cdf, 1 - 2 * _TAIL)), math.inf)
    ends = (above.at(low_cdf, 1 - _TAIL), above.seen, above.at(high_cdf, _TAIL))
    return Interval(min(ends), max(ends))


class Above:
    """How many queries are above a percentile, by chance.

    Args:
        times: In the order in which the queries were sent.
        share: Of the queries that stay within the percentile.
        block: How many belong together besides.
    """

    def __init__(self, times: Array, share: float, block: int = 0) -> None:
        self._times = times
        self._share = share
        self._block = block
        self._falling = np.sort(times)[::-1]
        self.expected = len(times) * (1 - share)
        self._rank = max(1, math.floor(self.expected + 1e-9))

    @property
    def seen(self) -> float:
        """The percentile of the queries themselves, one of their times (as `Latency.of` has it)."""
        return float(np.quantile(self._times, self._share, method="inverted_cdf"))

    def counts(self) -> tuple[Array, Array, float]:
        """Return the distributions to take the lower and the upper end by, and the variance ratio of the latter."""
        here = self._tau(self._rank)
        if self._block:
            most = max(here, *(self._tau(depth * self._rank) for depth in _ALL_DEPTHS))
            return self._cdf(most), self._cdf(most), most
        low_rank = _rank(self._cdf(here), 1 - _TAIL)
        deeper = [
            self._tau(depth * self._rank)
            for depth in _DEPTHS
            if depth * self._rank >= _SHALLOWEST and self._share > 1 - _RARE
        ]
        highest = max(here, *deeper) if deeper else here
        return self._cdf(self._tau(low_rank)), self._cdf(highest), highest

    def at(self, cdf: Array, level: float) -> float:
        """Return the order statistic that has as many above it; between two of them in proportion."""
        return float(np.interp(_rank(cdf, level), np.arange(len(self._falling)), self._falling))

    def _tau(self, rank: float) -> float:
        place = int(min(max(rank, 2), max(1, len(self._times) - 2)))
        above = self._times > self._falling[min(place, len(self._times) - 1)]
        return max(_variance_ratio(above), _block_ratio(above, self._block) if self._block else 1.0)

    def _cdf(self, tau: float) -> Array:
        """Return the distribution function of the count, shape (counts,), mixed over what tau may be."""
        mean = self.expected
        share = self._share
        most = int(min(len(self._times) - 1, mean + 15 * math.sqrt(mean * tau) + 30))
        spread = min(1.0, math.sqrt(2 * tau / self._rank / share))
        variances = [mean * max(share * (1 + (tau - 1) * math.exp(spread * z)), 0.9 * share) for z in _NODES]
        mixed = sum((_counts(mean, variance, most) for variance in variances), np.zeros(most + 1))
        return np.asarray(mixed / len(_NODES))


def _rank(cdf: Array, level: float) -> float:
    return float(np.interp(level, cdf, np.arange(len(cdf))))


def _variance_ratio(above: NDArray[np.bool_]) -> float:
    """Return tau: the variance of the count of "above" over that of as many independent ones; at least 1."""
    off = above - above.mean()
    whole = float(off @ off)
    if whole == 0:
        return 1.0
    lags = range(1, min(_LAGS, len(off) - 1) + 1)
    return max(1.0, 1 + sum(2 * min(1.0, 2 * (1 - k / (_LAGS + 1))) * float(off[k:] @ off[:-k]) for k in lags) / whole)


def _block_ratio(above: NDArray[np.bool_], block: int) -> float:
    """Return tau as the counts of whole blocks say, for what belongs together beyond `_LAGS` queries."""
    share = float(above.mean())
    blocks = len(above) // block
    if blocks < 2 or not 0 < share < 1:
        return 1.0
    counts = above[len(above) - blocks * block :].reshape(blocks, block).sum(axis=1)
    return float(counts.var(ddof=1)) / (block * share * (1 - share))


def _counts(mean: float, variance: float, most: int) -> Array:
    """Return the distribution function of a count: binomial below, negative binomial above a variance of its mean.

    Both are one recursion, p(k) = p(k - 1) (a + b / k) (Panjer, ASTIN Bulletin 12, 1981).
    """
    a = (variance - mean) / variance
    ratio = a + (mean * (1 - a) - a) / np.arange(1, most + 1)
    logs = np.concatenate([[0.0], np.cumsum(np.log(np.maximum(ratio, 1e-300)))])
    weights = np.exp(logs - logs.max())
    if np.any(ratio <= 0):
        weights[1 + int(np.argmax(ratio <= 0)) :] = 0.0
    return np.asarray(np.cumsum(weights) / weights.sum())


def mean_interval(values: np.ndarray[tuple[int], np.dtype[np.float64]], batches: int = 10) -> Interval | None:
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
