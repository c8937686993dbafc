"""How far the tail of the latency lies above its mean, and how that grows with what runs beside."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Self

from polythrottle.finetune.corun import CoRun, took_s

Array = NDArray[np.float64]

TAIL = 0.99
"""The share of queries that stay within the tail."""
_QUANTILE = 2.326
"""Standard deviations to that share of a normal distribution."""
_CENTRE, _WIDTH = np.array([0.1, 0.1, 0.0, 0.0, 0.0]), np.array([0.1, 0.2, 0.1, 0.05, 0.1])
_NOISE = 0.04
"""Of the logarithm of a window's tail over its mean: a percentile of some hundred queries; assumed."""
_STEP = 0.05
_KEPT = 0.99


@dataclass(frozen=True, eq=False)
class Tail:
    """The logarithm of tail over mean: linear in the share and in the sizes of query and step, Bayesian.

    Args:
        mean: Coefficients, shape (features,).
        precision: Inverse of their covariance.
        raised: What single requests have added since: they lay above the tail more often than they should.
    """

    mean: Array
    precision: Array
    raised: float = 0.0

    @classmethod
    def fit(cls, runs: Sequence[CoRun]) -> Self | None:
        """Return what measured co-runs tell of tails; None if none does."""
        told = cls(_CENTRE, np.diag(1.0 / _WIDTH**2))
        known = [run for run in runs if run.tail_s is not None]
        for run in known:
            told = told._window(run, kept=1.0)
        return told if known else None

    def ratio(self, run: CoRun) -> float:
        """Return the tail over the mean, at least 1."""
        return float(np.exp(max(0.0, float(_features(run) @ self.mean) + self.raised)))

    def spread(self, run: CoRun) -> float:
        """Return the standard deviation of the logarithm of single requests that would give this tail."""
        return float(np.log(self.ratio(run))) / _QUANTILE

    def seen(self, run: CoRun, mean_s: float) -> Self:
        """Return the same after one more window, or one request of which ``mean_s`` seconds were expected.

        A request moves the quantile up by 99 parts if it lies above, down by one if below, which comes to rest where
        one in a hundred lies above (Robbins and Monro, Ann. Math. Statist. 22, 1951).
        """
        if run.tail_s is not None:
            return self._window(run, _KEPT)
        above = took_s(run) > mean_s * self.ratio(run)
        moved = (
            _STEP * max(self.spread(run), _NOISE / _QUANTILE) * ((TAIL if above else 0.0) - (1.0 - TAIL) * (not above))
        )
        return replace(self, raised=self.raised + moved)

    def _window(self, run: CoRun, kept: float) -> Self:
        assert run.tail_s is not None
        x, told = _features(run), float(np.log(run.tail_s / took_s(run)))
        precision = kept * self.precision + (1.0 - kept) * np.diag(1.0 / _WIDTH**2) + np.outer(x, x) / _NOISE**2
        off = told - float(x @ self.mean) - self.raised
        return replace(self, mean=self.mean + np.linalg.solve(precision, x) * off / _NOISE**2, precision=precision)


def _features(run: CoRun) -> Array:
    share, size = run.share, float(np.log2(run.batch))
    step = float(np.log2(max(run.step_batch, 1)))
    return np.array([1.0, share, share * (step - size), size / 4.0, share * share])
