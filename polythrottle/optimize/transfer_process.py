"""A Gaussian prior over the points of a space, how well it foretold the trials, and what it says after them.

The prior of one quantity is  m(x) + Σ_j a_j b_j(x) + d(x) r(x) + noise  with a_j ~ N(0, 1) and r a Matérn-5/2 process
of variance one, so that its covariance is  B Bᵀ + (d dᵀ) ∘ R  (Rasmussen & Williams 2006, §2.7). Nothing is fitted: the
scales are part of the prior, and several priors are weighed by their evidence instead.
"""

import math
from dataclasses import dataclass

import numpy as np

from polythrottle.optimize.features import Array
from polythrottle.optimize.quantities import usual
from polythrottle.optimize.remaining import Rows
from polythrottle.optimize.surrogate import LENGTH

_JITTER = 1e-9
_LEAST_VARIANCE = 1e-10


@dataclass(frozen=True, eq=False)
class Prior:
    """A Gaussian prior of one quantity.

    Args:
        mean: Shape (points,).
        functions: Each times its coefficient's deviation, shape (points, functions).
        doubt: Deviation of what the functions leave over, shape (points,).
        noise_sd: Deviation of one measurement besides its own doubt.
    """

    mean: Array
    functions: Array
    doubt: Array
    noise_sd: float


@dataclass(frozen=True, eq=False)
class Correlation:
    """The Matérn-5/2 correlation of the measured points, with each other and with every point.

    Args:
        seen: Row number of each measured point, shape (trials,).
        near: Shape (trials, trials).
        far: Shape (trials, points).
    """

    seen: Rows
    near: Array
    far: Array

    @classmethod
    def of(cls, unit: Array, seen: Rows) -> "Correlation":
        """Return the correlations of points with these coordinates, shape (points, columns)."""
        length = LENGTH * math.sqrt(max(1, unit.shape[1]))
        squares = (unit[seen] ** 2).sum(axis=1)[:, None] + (unit**2).sum(axis=1) - 2.0 * unit[seen] @ unit.T
        distance = np.sqrt(5.0 * np.maximum(squares, 0.0)) / length
        far = (1.0 + distance + distance**2 / 3.0) * np.exp(-distance)
        return cls(seen, far[:, seen], far)


@dataclass(frozen=True, eq=False)
class Posterior:
    """A prior after the trials (Rasmussen & Williams 2006, algorithm 2.1).

    Args:
        prior: What was believed before.
        correlation: Of the points.
        root: Cholesky factor of the covariance of the measurements, shape (trials, trials).
        white: The measurements less the prior mean, whitened by it, shape (trials,).
        noise: Variance one more measurement adds.
    """

    prior: Prior
    correlation: Correlation
    root: Array
    white: Array
    noise: float

    @classmethod
    def of(cls, prior: Prior, correlation: Correlation, values: Array, known: Array) -> "Posterior":
        """Return the posterior given a value at each measured point, and its known variance, shape (trials,) each.

        Raises:
            numpy.linalg.LinAlgError: If the covariance cannot be decomposed.
        """
        seen = correlation.seen
        functions, doubt = prior.functions[seen], prior.doubt[seen]
        covariance = functions @ functions.T + np.outer(doubt, doubt) * correlation.near
        covariance[np.diag_indices(len(seen))] += prior.noise_sd**2 + known + _JITTER
        root = np.asarray(np.linalg.cholesky(covariance), dtype=float)
        white = np.linalg.solve(root, values - prior.mean[seen])
        noise = prior.noise_sd**2 + float(usual(known))
        return cls(prior, correlation, root, np.asarray(white, dtype=float), noise)

    @property
    def log_evidence(self) -> float:
        """Log density of the measurements under the prior, up to a constant (Rasmussen & Williams 2006, eq. 2.30)."""
        return float(-0.5 * self.white @ self.white - np.log(np.diag(self.root)).sum())

    def predict(self) -> tuple[Array, Array]:
        """Return mean and variance at every point, shape (points,) each."""
        prior, seen = self.prior, self.correlation.seen
        cross = (
            prior.functions[seen] @ prior.functions.T + prior.doubt[seen][:, None] * self.correlation.far * prior.doubt
        )
        half = np.linalg.solve(self.root, cross)
        variance = (prior.functions**2).sum(axis=1) + prior.doubt**2 - (half**2).sum(axis=0)
        return prior.mean + half.T @ self.white, np.maximum(variance, _LEAST_VARIANCE)
