"""Every sample exactly once an epoch, however often the number of workers changes; pure.

The state is one place: how many samples of which epoch are done, over all workers. What comes next follows from it,
from the seed and from the present number of workers, so a place in a checkpoint is enough to go on from.
"""

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil, sqrt
from typing import Any

import numpy as np
import numpy.typing as npt

from polythrottle.domain.backports import StrEnum
from polythrottle.domain.errors import InvalidInput

Order = npt.NDArray[np.int64]


class BatchRule(StrEnum):
    """What stays the same when the number of workers changes."""

    FIXED = "fixed"  # samples per step, by accumulation: the loss curve does not depend on membership
    ICAC = "icac"  # samples per step of each worker; the learning rate follows the square root of their number

    def batch(self, asked: int, workers: int) -> int:
        """Return samples per step over all workers, for the number the script asked for."""
        if self is BatchRule.FIXED:
            return asked
        return asked * workers

    def rate_factor(self, workers: int) -> float:
        """Return what the script's learning rate is multiplied by.

        ICAC 2019 ("Speeding up Deep Learning with Transient Servers", §6; Tensor2Tensor divides the rate by √n) has n
        workers that update asynchronously, each at rate/√n: n such updates move as far as one synchronous update of
        the n batches' mean at rate × √n, which is what this returns.
        """
        if self is BatchRule.FIXED:
            return 1.0
        return sqrt(workers)


@dataclass(frozen=True)
class SamplerPosition:
    """Where a training stands.

    Attributes:
        step: Updates of the weights so far, over all generations.
        epoch: The one that has begun, from 0.
        consumed: Samples of it that are done, over all workers.
    """

    step: int = 0
    epoch: int = 0
    consumed: int = 0

    def after(self, samples: int, total: int) -> "SamplerPosition":
        """Return the place one step on.

        Args:
            samples: Samples of the step, over all workers.
            total: Samples in an epoch.
        """
        consumed = self.consumed + samples
        if consumed >= total:
            return SamplerPosition(self.step + 1, self.epoch + 1, 0)
        return SamplerPosition(self.step + 1, self.epoch, consumed)


@dataclass(frozen=True)
class Micro:
    """One pass forward and back on one worker.

    Attributes:
        samples: Indices of the samples; a worker with no share of a short last step gets one that counts nothing.
        weight: What the mean loss is multiplied by, so that the workers' mean gradient is that of the whole step.
        last: Whether the weights are updated after it.
        total: Samples of the whole step, over all workers.
    """

    samples: tuple[int, ...]
    weight: float
    last: bool
    total: int


def order(samples: int, seed: int, epoch: int) -> Order:
    """Return the order of an epoch's samples, shape (samples,): the same on every worker.

    Raises:
        InvalidInput: If there are no samples.
    """
    if samples < 1:
        raise InvalidInput("the data set has no samples")
    return np.random.Generator(np.random.PCG64([seed, epoch])).permutation(samples).astype(np.int64)


def fingerprint(order: Order) -> int:
    """Return a number by which workers see that they shuffle alike (NumPy may change how it does)."""
    return zlib.crc32(order.tobytes())


def micros(order: Order, consumed: int, batch: int, most: int, rank: int, workers: int) -> Iterator[Micro]:
    """Yield what one worker does from a place to the end of the epoch.

    Args:
        order: The epoch's order, shape (samples,).
        consumed: Samples of it that are done.
        batch: Samples of a step, over all workers.
        most: Samples a worker takes at once: what its memory holds.
        rank: The worker's.
        workers: How many there are.
    """
    for start in range(consumed, len(order), batch):
        whole = order[start : start + batch]
        mine = whole[len(whole) * rank // workers : len(whole) * (rank + 1) // workers]
        if not len(mine):
            yield Micro((int(whole[0]),), 0.0, True, len(whole))
            continue
        parts = np.array_split(mine, ceil(len(mine) / most))
        for number, part in enumerate(parts, 1):
            weight = len(part) * workers / len(whole)
            yield Micro(tuple(int(each) for each in part), weight, number == len(parts), len(whole))


def place_from(document: dict[str, Any], total: int) -> SamplerPosition:
    """Return the place in a checkpoint.

    Args:
        document: Its step, epoch and consumed.
        total: Samples in an epoch of the data set at hand.

    Raises:
        InvalidInput: If it cannot be a place in this data set.
    """
    step, epoch, consumed = (int(document[key]) for key in ("step", "epoch", "consumed"))
    if min(step, epoch, consumed) < 0 or consumed >= total:
        raise InvalidInput(f"a checkpoint at sample {consumed} is not of a data set of {total} samples")
    return SamplerPosition(step, epoch, consumed)
