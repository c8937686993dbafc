"""Predicts how long inference takes beside fine-tuning: fitted from few co-runs, unsure by what it says, and learning.

The logarithm of the latency is a physical form (`interference_form`) plus a small quadratic for what the form misses.
Both have a prior, so that eight co-runs suffice, and both are moved by every request that is seen afterwards.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from typing_extensions import Self

from polythrottle.finetune.corun import (
    LEAST_RUNS,
    CoRun,
    Prediction,
    Predictor,
    check_measured,
    intensity,
    took_s,
)
from polythrottle.finetune.interference_form import FORM, Array, Columns, Reference, rest_features, slopes
from polythrottle.finetune.interference_tail import Tail
from polythrottle.finetune.paper_predictor import PaperModel

__all__ = ["CoRun", "Interference", "PaperModel", "Prediction", "Predictor", "intensity"]

_STARTS: tuple[dict[str, float], ...] = ({}, {"compute": -2.0}, {"memory": -2.0}, {"compute": -1.5, "launch": 1.5})
_ITERATIONS = 40
_NOISE, _NOISE_RUNS = 0.03, 4.0
"""Noise of a measured mean before any co-run, as a fraction, and how many co-runs that belief is worth; assumed."""
_KEPT = 0.995
"""What is known counts this much after each request: a memory of 200."""
_AVERAGED, _SURPRISED = 0.1, 0.8
"""Weight of one request in the running surprise, and the surprise, in standard deviations, that means a drift.

Without drift it spreads by sqrt(0.1 / 1.9) = 0.23, so that one in a thousand requests is taken for a drift.
"""
_FARTHEST = 4.0
"""A request that lies more standard deviations off moves the model no more than this: it may be a straggler."""


@dataclass(frozen=True, eq=False)
class Interference:
    """Mean and tail of the latency beside fine-tuning, as probabilities; every change makes a new one.

    Args:
        reference: What co-runs are counted from.
        mean: Coefficients of the form and of the rest, shape (coefficients,).
        precision: How well they are known: the inverse of their covariance.
        variance: Of the logarithm of a measured mean around the truth.
        tail: How far the tail lies above the mean; None if no co-run told of tails.
        surprise: Running mean of how far requests lay off, in standard deviations.
    """

    reference: Reference
    mean: Array
    precision: Array
    variance: float
    tail: Tail | None
    surprise: float = 0.0

    @classmethod
    def fit(cls, runs: Sequence[CoRun]) -> Self:
        """Return the model after measured co-runs: the most probable coefficients, Gaussian around them (Laplace).

        Raises:
            InvalidInput: If there are fewer than eight, one was not measured, or operations are known for some only.
        """
        check_measured(runs, LEAST_RUNS)
        reference = Reference.of(runs, _middle_s(runs))
        return cls(reference, *_after(reference, runs), Tail.fit(runs))

    @property
    def counted(self) -> bool:
        """Whether operations and bytes were known; where not, items stand for them."""
        return self.reference.counted

    def predict(self, run: CoRun) -> Prediction:
        """Return what is expected of a co-run.

        Raises:
            InvalidInput: If the model was fitted with operations and this run has none.
        """
        value, gradient = _linear(self.reference, self.mean, self.reference.columns([run]))
        doubt = float(gradient[0] @ np.linalg.solve(self.precision, gradient[0]))
        mean_s = self.reference.time_s * float(np.exp(value[0]))
        tail_s = None if self.tail is None else mean_s * self.tail.ratio(run)
        return Prediction(mean_s, mean_s * float(np.sqrt(doubt + self.variance)), tail_s)

    def seen(self, run: CoRun) -> Self:
        """Return the model after one more measured co-run, or after one request, which has no tail of its own.

        Recursive least squares on the linearised logarithm. What is known fades towards the prior's width, slowly, and
        quickly while requests keep lying off on one side (Fortescue, Kershenbaum and Ydstie, Automatica 17, 1981).

        Raises:
            InvalidInput: If it was not measured, or the model was fitted with operations and this run has none.
        """
        value, gradient = _linear(self.reference, self.mean, self.reference.columns([run]))
        slope, off = gradient[0], float(np.log(took_s(run) / self.reference.time_s)) - float(value[0])
        noise = self.variance + (self.tail.spread(run) ** 2 if self.tail and run.tail_s is None else 0.0)
        scale = float(np.sqrt(noise + slope @ np.linalg.solve(self.precision, slope)))
        bounded = float(np.clip(off / scale, -_FARTHEST, _FARTHEST))
        surprise = (1.0 - _AVERAGED) * self.surprise + _AVERAGED * bounded
        kept = _KEPT * min(1.0, _SURPRISED / max(abs(surprise), 1e-9))
        precision = kept * self.precision + (1.0 - kept) * np.diag(1.0 / self.reference.prior[1] ** 2)
        precision += np.outer(slope, slope) / noise
        mean = self.mean + np.linalg.solve(precision, slope) * bounded * scale / noise
        tail = self.tail and self.tail.seen(run, self.predict(run).mean_s)
        return replace(self, mean=mean, precision=precision, tail=tail, surprise=surprise)


def telling(cases: Sequence[CoRun], runs: Sequence[CoRun]) -> int:
    """Return the place of the case whose measurement tells most of all the others.

    It takes away as much as one can of the variance that is left over all cases, with the model linearised at what is
    most probable so far (Bayesian A-optimality: Chaloner and Verdinelli, Statist. Sci. 10, 1995).

    Args:
        cases: To choose from.
        runs: Measured so far; may be none.

    Raises:
        InvalidInput: If operations are known for some only.
    """
    reference = Reference.of(cases, _middle_s(runs) if runs else 1.0)
    mean, precision, variance = _after(reference, runs)
    gradient = _linear(reference, mean, reference.columns(cases))[1]
    doubt = gradient @ np.linalg.solve(precision, gradient.T)
    return int(np.argmax(np.sum(doubt**2, axis=0) / (np.diag(doubt) + variance)))


def _middle_s(runs: Sequence[CoRun]) -> float:
    return float(np.exp(np.mean(np.log([took_s(run) for run in runs]))))


def _after(reference: Reference, runs: Sequence[CoRun]) -> tuple[Array, Array, float]:
    """Return the most probable coefficients after measured co-runs, their precision, and the variance of the noise."""
    if not runs:
        centre, spread = reference.prior
        return centre, np.diag(1.0 / spread**2), _NOISE**2
    logs = np.log(np.array([took_s(run) for run in runs]) / reference.time_s)
    return _most_probable(reference, reference.columns(runs), logs)


def _linear(reference: Reference, mean: Array, columns: Columns) -> tuple[Array, Array]:
    """Return the logarithm of the relative latency, shape (runs,), and its derivatives, (runs, coefficients)."""
    value, physical = slopes(mean, columns)
    rest = rest_features(columns, reference.reach).T
    return value + rest @ mean[len(FORM) :], np.hstack([physical, rest])


def _most_probable(reference: Reference, columns: Columns, logs: Array) -> tuple[Array, Array, float]:
    """Return the best coefficients from several starts, their precision, and the variance of the noise."""
    variance = _NOISE**2
    starts = [_started(reference, shift) for shift in _STARTS]
    for _ in range(3):
        starts = [_climbed(reference, columns, logs, start, variance) for start in starts]
        mean = min(starts, key=lambda start: _cost(reference, columns, logs, start, variance))
        precision, missed, free = _known(reference, columns, logs, mean, variance)
        variance = (_NOISE_RUNS * _NOISE**2 + missed) / (_NOISE_RUNS + free)
    return mean, precision, variance


def _started(reference: Reference, shift: dict[str, float]) -> Array:
    mean: Array = reference.prior[0].copy()
    for name, by in shift.items():
        mean[list(FORM).index(name)] += by
    return mean


def _known(
    reference: Reference, columns: Columns, logs: Array, mean: Array, variance: float
) -> tuple[Array, float, float]:
    """Return the precision of the coefficients, the squares they miss, and the co-runs left free to tell of noise."""
    value, gradient = _linear(reference, mean, columns)
    precision = gradient.T @ gradient / variance + np.diag(1.0 / reference.prior[1] ** 2)
    used = float(np.trace(gradient @ np.linalg.solve(precision, gradient.T))) / variance
    return precision, float(np.sum((logs - value) ** 2)), len(logs) - used


def _cost(reference: Reference, columns: Columns, logs: Array, mean: Array, variance: float) -> float:
    centre, spread = reference.prior
    value, _ = _linear(reference, mean, columns)
    return float(np.sum((logs - value) ** 2) / variance + np.sum(((mean - centre) / spread) ** 2))


def _climbed(reference: Reference, columns: Columns, logs: Array, mean: Array, variance: float) -> Array:
    """Return coefficients after Levenberg and Marquardt's steps towards the most probable ones."""
    centre, spread = reference.prior
    damping, cost = 1e-2, _cost(reference, columns, logs, mean, variance)
    for _ in range(_ITERATIONS):
        value, gradient = _linear(reference, mean, columns)
        hessian = gradient.T @ gradient / variance + np.diag(1.0 / spread**2)
        downhill = gradient.T @ (logs - value) / variance - (mean - centre) / spread**2
        step = np.linalg.solve(hessian + damping * np.diag(np.diag(hessian)), downhill)
        tried = _cost(reference, columns, logs, mean + step, variance)
        if tried < cost:
            mean, damping = mean + step, damping / 10
            if cost - tried < 1e-4:
                break
            cost = tried
        else:
            damping *= 10
    return mean
