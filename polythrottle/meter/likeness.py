"""How sure a mean is where what it is made of may resemble its neighbours: power wanders, and short windows follow it.

Batches are taken to be a first-order autoregression. How alike they are shows poorly in a few of them, so it is not
estimated: each way in which queries may resemble each other is weighed by its likelihood, mean, drift and scale
integrated out, and the error of the mean is a mixture of Student's over all of them (Zellner, An Introduction to
Bayesian Inference in Econometrics, 1971, §4.1). That is wide while a window cannot tell its level from its wandering,
and ordinary once its batches are long and know nothing of each other.
"""

import numpy as np
from numpy.typing import NDArray

from polythrottle.sensors import Mixed

Array = NDArray[np.float64]
_QUERIES = np.geomspace(1.0, 40.0, 11)
"""Over how many queries their likeness may fade to 1 / e; evenly likely beforehand."""
_INDEPENDENT = 0.3
"""What is believed beforehand of queries that know nothing of each other."""
_MOST_ALIKE, _NO_NOISE = 0.96, 1e-300


def doubt_of_mean(values: Array, queries: float) -> Mixed:
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
    logs, squares, shares = (np.array(each) for each in zip(*found, strict=True))
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
    size, each = max(1.0, queries), np.exp(-1 / _QUERIES)
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
