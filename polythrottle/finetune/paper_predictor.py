"""The interference model of the PolyThrottle paper, as published: linear, static, without clocks."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Self

from polythrottle.errors import InvalidInput
from polythrottle.finetune.corun import LEAST_RUNS, CoRun, Prediction, check_measured, took_s

Array = NDArray[np.float64]


@dataclass(frozen=True)
class PaperModel:
    """T = θ₀ + θ₁·FLOPs + θ₂·AI + θ₃·FLOPs_ft + θ₄·AI_ft + θ₅·batch, no θ below 0; arXiv 2310.19991, section 4.3.

    It holds while clocks do not change and does not know the share of time, as published. The paper predicts no tail;
    here the same form is fitted to the tails as well, so that there is something to compare with.

    Args:
        mean: θ of the mean latency, in seconds per unit of each feature.
        tail: θ of the tail; None if not every co-run had one.
        spread_s: Root mean square of what the fit missed.
    """

    mean: tuple[float, ...]
    tail: tuple[float, ...] | None
    spread_s: float

    @classmethod
    def fit(cls, runs: Sequence[CoRun]) -> Self:
        """Return the model that fits measured co-runs best.

        Raises:
            InvalidInput: If there are too few, one was not measured, or operations could not be counted.
        """
        check_measured(runs, LEAST_RUNS)
        times_s, x = np.array([took_s(run) for run in runs]), np.array([_features(run) for run in runs])
        mean = nonnegative(x, times_s)
        tails_s = [run.tail_s for run in runs if run.tail_s is not None]
        tail = tuple(nonnegative(x, np.array(tails_s)).tolist()) if len(tails_s) == len(runs) else None
        return cls(tuple(mean.tolist()), tail, float(np.sqrt(np.mean((x @ mean - times_s) ** 2))))

    def predict(self, run: CoRun) -> Prediction:
        """Return what is expected of a co-run.

        Raises:
            InvalidInput: If its operations could not be counted.
        """
        x = np.array(_features(run))
        tail_s = None if self.tail is None else float(x @ self.tail)
        return Prediction(float(x @ self.mean), self.spread_s, tail_s)

    def seen(self, run: CoRun) -> Self:
        """Return the model as it is: the paper fits once, before deployment."""
        return self


def _features(run: CoRun) -> tuple[float, ...]:
    known = (run.operations, run.intensity, run.step_operations, run.step_intensity)
    values = [value for value in known if value is not None]
    if len(values) < len(known):
        raise InvalidInput(
            "the paper's model needs the operations of inference and of fine-tuning, and these cannot be counted here; "
            "the model of this project does without"
        )
    return (1.0, *values, float(run.batch))


def nonnegative(x: Array, y: Array) -> Array:
    """Return the least-squares coefficients of which none is below 0, shape (columns,).

    With so few columns every set of columns that may be above 0 is tried: the best that needs no sign is the optimum
    (Lawson and Hanson, Solving Least Squares Problems, 1974, chapter 23).

    Args:
        x: Features, shape (rows, columns).
        y: Shape (rows,).
    """
    scale = np.abs(x).max(axis=0)
    scaled = x / np.where(scale > 0, scale, 1.0)
    best, least = np.zeros(x.shape[1]), float(y @ y)
    for count in range(1, x.shape[1] + 1):
        for columns in map(list, combinations(range(x.shape[1]), count)):
            found = np.linalg.lstsq(scaled[:, columns], y, rcond=None)[0]
            error = float(np.sum((scaled[:, columns] @ found - y) ** 2))
            if (found >= 0).all() and error < least:
                best, least = np.zeros(x.shape[1]), error
                best[columns] = found
    return np.asarray(best / np.where(scale > 0, scale, 1.0))
