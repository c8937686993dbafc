"""Intervals of percentiles that hold where misses come in clusters.

An order statistic bounds a percentile because the number of queries above the true percentile is known up to chance: n
queries, share 1 - s. For independent queries that number is binomial (David and Nagaraja, Order Statistics, 2003,
§7.1). A miss that is often followed by another spreads it: its variance grows by tau = 1 + 2 x the sum of the
autocorrelations of "is above". So the number is taken as negative binomial with that variance (binomial if tau is 1);
tau is estimated over `_LAGS` queries with a flat-top window (Politis, J. Nonparametric Statistics 15, 2003), and
allowed to be wrong by what as few clusters as there are leave open.

Two things a plug-in of tau misses, both seen in simulation (benchmarks/coverage.py): a window that happened to see few
clusters has a low percentile and a low tau at once, so the upper end takes the largest tau of several higher
thresholds, and the lower end that of its own. And where fewer than `_LEAST_CLUSTERS` clusters are expected above a
percentile, its upper end is not known: the lower end is then one-sided.

Before a queue, requests wait together for far longer than `_LAGS`: through a burst, or while a server near its limit is
never free. There tau is also that of the counts of whole blocks, the largest of several thresholds, for both ends.
"""

import math
from collections.abc import Sequence
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from polythrottle.measurement import Interval

Array = NDArray[np.float64]
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
    return {name: percentile_interval(times, SHARES[name]) for name in names} if times.size > 1 else {}


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
        self._times, self._share, self._block = times, share, block
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
        mean, share = self.expected, self._share
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
    share, blocks = float(above.mean()), len(above) // block
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
