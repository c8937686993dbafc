"""A co-run of an inference query beside fine-tuning, and the PolyThrottle paper's linear model of its latency."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from polythrottle.domain.errors import InvalidInput

if TYPE_CHECKING:
    from typing_extensions import Self

# One co-run: an inference query, the fine-tuning that ran beside it, the clocks, and how long the query took.

LEAST_RUNS = 8
"""Co-runs that a model is fitted from at least."""


@dataclass(frozen=True)
class CoRun:
    """One inference query beside fine-tuning, measured or to be predicted.

    What cannot be counted is None, never 0: the operations of a model that runs elsewhere, say.

    Args:
        operations: Of the query, all its items together, a multiply-add counted as two.
        traffic_bytes: What the query moves between memory and chip.
        batch: Its items.
        step_operations: Of the fine-tuning step beside it; 0 alone.
        step_bytes: What that step moves; 0 alone.
        step_batch: Its samples; 0 alone.
        gpu_hz: Clock of the GPU; any constant where there is none.
        memory_hz: Clock of the memory; any constant where it is not known.
        cpu_hz: Clock of the CPU; any constant where it is not known.
        share: Of the device's time that fine-tuning could take, 0 to 1; 0 alone.
        intensity: Of the query, see `intensity`.
        step_intensity: Of the step; 0 alone.
        latency_s: Mean over the queries of a window, or of the one query; None to be predicted.
        tail_s: The time that 99 % of a window's queries stayed within; None to be predicted, or of one query.

    Raises:
        InvalidInput: If a figure is not finite, a clock or time not positive, a share not one, or alone half meant.
    """

    operations: float | None
    traffic_bytes: float | None
    batch: int
    step_operations: float | None
    step_bytes: float | None
    step_batch: int
    gpu_hz: float
    memory_hz: float
    cpu_hz: float
    share: float
    intensity: float | None
    step_intensity: float | None
    latency_s: float | None = None
    tail_s: float | None = None

    def __post_init__(self) -> None:
        for name in ("gpu_hz", "memory_hz", "cpu_hz", "latency_s", "tail_s"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise InvalidInput(f"a co-run needs a positive, finite {name}, not {value}")
        for name in ("operations", "traffic_bytes", "intensity"):
            self._check_count(name, getattr(self, name), least_excluded=True)
        for name in ("step_operations", "step_bytes", "step_intensity"):
            self._check_count(name, getattr(self, name), least_excluded=False)
        if self.batch < 1 or self.step_batch < 0:
            raise InvalidInput(f"a co-run has a batch of at least 1 beside steps of at least 0, not {self.batches}")
        if not 0 <= self.share <= 1:
            raise InvalidInput(f"a share of the device's time lies between 0 and 1, not {self.share}")
        if (self.step_batch == 0) != (self.share == 0):
            raise InvalidInput(f"a step of {self.step_batch} samples cannot have a share of {self.share:g}")

    @staticmethod
    def _check_count(name: str, value: float | None, least_excluded: bool) -> None:
        if value is not None and not (0 <= value < math.inf and (value > 0 or not least_excluded)):
            wanted = "at least 0"
            if least_excluded:
                wanted = "above 0"
            raise InvalidInput(f"a co-run's {name} is {wanted} and finite, or None where unknown; not {value}")

    @property
    def batches(self) -> str:
        """Both batch sizes, for messages."""
        return f"{self.batch} beside {self.step_batch}"

    @property
    def unmeasured(self) -> Self:
        """The same, yet to be predicted."""
        return replace(self, latency_s=None, tail_s=None)

    @property
    def counted(self) -> bool:
        """Whether operations and bytes of the query and of the step are known."""
        return None not in (self.operations, self.traffic_bytes, self.step_operations, self.step_bytes)


@dataclass(frozen=True)
class Prediction:
    """How long a query is expected to take.

    Args:
        mean_s: The mean.
        std_s: Standard deviation of a measured mean around ``mean_s``: what the model does not know, and noise.
        tail_s: The time that 99 % stay within; None if no co-run told of tails.
    """

    mean_s: float
    std_s: float
    tail_s: float | None


class Predictor(Protocol):
    """Predicts how long a query takes beside fine-tuning."""

    def predict(self, run: CoRun) -> Prediction:
        """Return what is expected of a co-run; its measured times are not looked at."""
        ...

    def seen(self, run: CoRun) -> Self:
        """Return the predictor as it is after one more measured co-run or request."""
        ...


def intensity(operations: float | None, moved_bytes: float | None, element_bytes: int) -> float | None:
    """Return multiply-adds per element moved; None if either is not known.

    It is the arithmetic intensity of arXiv 2310.19991, which for a convolution is
    N·K·P·Q·C·R·S / (N·C·H·W + K·C·R·S + N·K·P·Q): elements, not bytes, and a multiply-add counted as one.

    Args:
        operations: A multiply-add counted as two.
        moved_bytes: Inputs, weights and outputs.
        element_bytes: Of one element.
    """
    if operations is None or not moved_bytes:
        if operations is None or moved_bytes is None:
            return None
        return 0.0
    return operations / 2 / (moved_bytes / element_bytes)


def check_measured(runs: Sequence[CoRun], least: int) -> None:
    """Check that there are enough co-runs and that all were measured.

    Raises:
        InvalidInput: If there are fewer than ``least``, or one was not measured.
    """
    if len(runs) < least:
        raise InvalidInput(f"{len(runs)} co-runs are too few: take at least {least}, at different batches and shares")
    for run in runs:
        took_s(run)


def took_s(run: CoRun) -> float:
    """Return the mean latency of a co-run in seconds.

    Raises:
        InvalidInput: If it was not measured.
    """
    if run.latency_s is None:
        raise InvalidInput(f"the co-run of batches {run.batches} has no measured latency; measure it first")
    return run.latency_s


# The interference model of the PolyThrottle paper, as published: linear, static, without clocks.

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
        times_s = np.array([took_s(run) for run in runs])
        x = np.array([_features(run) for run in runs])
        mean = nonnegative(x, times_s)
        tails_s = [run.tail_s for run in runs if run.tail_s is not None]
        if len(tails_s) == len(runs):
            tail = tuple(nonnegative(x, np.array(tails_s)).tolist())
        else:
            tail = None
        return cls(tuple(mean.tolist()), tail, float(np.sqrt(np.mean((x @ mean - times_s) ** 2))))

    def predict(self, run: CoRun) -> Prediction:
        """Return what is expected of a co-run.

        Raises:
            InvalidInput: If its operations could not be counted.
        """
        x = np.array(_features(run))
        tail_s = None
        if self.tail is not None:
            tail_s = float(x @ self.tail)
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
    best = np.zeros(x.shape[1])
    least = float(y @ y)
    for count in range(1, x.shape[1] + 1):
        for columns in map(list, combinations(range(x.shape[1]), count)):
            coefficients = np.linalg.lstsq(scaled[:, columns], y, rcond=None)[0]
            error = float(np.sum((scaled[:, columns] @ coefficients - y) ** 2))
            if (coefficients >= 0).all() and error < least:
                best = np.zeros(x.shape[1])
                least = error
                best[columns] = coefficients
    return np.asarray(best / np.where(scale > 0, scale, 1.0))
