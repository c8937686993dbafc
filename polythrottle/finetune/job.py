"""A fine-tuning job, and the slices in which it is done."""

import math
from dataclasses import dataclass

from polythrottle.errors import InvalidInput


@dataclass(frozen=True)
class Job:
    """What is to be fine-tuned: a head on a frozen backbone, over some data, for some epochs.

    Args:
        samples: Of the data; each is used once per epoch.
        batch: Samples of one optimiser step; the last step of an epoch takes what is left.
        epochs: How often the data is gone through.
        output: Dimension of the head's output.
        model: Name of the backbone.

    Raises:
        InvalidInput: If one of the counts is not at least 1.
    """

    samples: int
    batch: int
    epochs: int
    output: int
    model: str

    def __post_init__(self) -> None:
        for name in ("samples", "batch", "epochs", "output"):
            if getattr(self, name) < 1:
                raise InvalidInput(f"a fine-tuning job needs at least 1 for its {name}, not {getattr(self, name)}")

    @property
    def steps_per_epoch(self) -> int:
        """Optimiser steps that go through the data once."""
        return -(-self.samples // self.batch)

    @property
    def steps(self) -> int:
        """Optimiser steps of the whole job."""
        return self.steps_per_epoch * self.epochs

    @property
    def work(self) -> int:
        """Samples of the whole job."""
        return self.samples * self.epochs

    def step_samples(self, step: int) -> int:
        """Return how many samples an optimiser step takes, steps of the whole job counted from 0."""
        return min(self.batch, self.samples - step % self.steps_per_epoch * self.batch)


@dataclass(frozen=True)
class Slice:
    """A part of a step between two points where it may be pre-empted, run while nothing else runs.

    Args:
        samples: Of the step's batch.
        alone_s: How long it takes on average.
        tail_s: The time that 99 % of such slices stay within.
        joules: Everything the device draws meanwhile; None where unknown.

    Raises:
        InvalidInput: If there is no sample, a time is not positive and finite, or the tail is shorter than the mean.
    """

    samples: int
    alone_s: float
    tail_s: float
    joules: float | None = None

    def __post_init__(self) -> None:
        if self.samples < 1 or not 0 < self.alone_s <= self.tail_s < math.inf:
            raise InvalidInput(
                f"a slice of {self.samples} samples cannot take {self.alone_s:g} s on average "
                f"and {self.tail_s:g} s at the 99th percentile"
            )
