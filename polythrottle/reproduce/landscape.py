"""The noiseless truth of a simulated board over a whole space of points, and the best of it."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from polythrottle.backends.simulated import SimulatedDevice
from polythrottle.catalog import load_board, load_model
from polythrottle.measurement import Measurement
from polythrottle.space import SearchSpace

Array = NDArray[np.float64]
SEARCHED = ("gpu_max_hz", "mem_hz")
"""The knobs the paper's searches moved besides the batch size: every bar of random search is the size of their grid
(52 and 143 points, with five batch sizes 260 and 715) over a whole number."""
FULL = ("gpu_min_hz", "gpu_max_hz", "mem_hz")
"""The knobs of its grid search: 1,820 and 5,005 points."""
NEAR = 0.05


@dataclass(frozen=True, eq=False)
class Landscape:
    """What every point of a space does.

    Args:
        space: Device knobs and batch size.
        truth: One measurement per point, in the order of the space.
    """

    space: SearchSpace
    truth: tuple[Measurement, ...]

    @cached_property
    def energy_j(self) -> Array:
        """Energy per item, shape (points,)."""
        return np.array([measured.energy_j for measured in self.truth])

    @cached_property
    def latency_s(self) -> Array:
        """Mean latency, shape (points,)."""
        return np.array([measured.latency.mean_s for measured in self.truth])

    @cached_property
    def batch(self) -> Array:
        """Batch size, shape (points,)."""
        return self.space.column("batch_size")

    def within(self, factor: float | None) -> NDArray[np.bool_]:
        """Return which points take at most ``factor`` times the shortest latency of all; all of them if None."""
        if factor is None:
            return np.ones(len(self.truth), dtype=bool)
        return np.asarray(self.latency_s <= factor * self.latency_s.min() * (1.0 + 1e-9))

    def best(self, allowed: NDArray[np.bool_]) -> int:
        """Return the row of least energy among those allowed."""
        return int(np.argmin(np.where(allowed, self.energy_j, np.inf)))

    def near(self, allowed: NDArray[np.bool_]) -> int:
        """Return how many of those allowed cost at most 5 % more than the best of them."""
        return int(np.sum(allowed & (self.energy_j <= (1.0 + NEAR) * self.energy_j[self.best(allowed)])))

    def default_at(self, batch: float) -> int:
        """Return the row of the default clocks at a batch size."""
        return self.space.index(self.space.default.moved({"batch_size": int(batch)}))


@lru_cache(maxsize=64)
def landscape(board: str, model: str, knobs: Sequence[str]) -> Landscape:
    """Return the truth of a model on a simulated board over all levels of some knobs and all batch sizes.

    Args:
        board: Name in ``devices/``.
        model: Name in ``profiles/workloads/``.
        knobs: Names of the board's knobs; the others keep their default. A tuple.

    Raises:
        PolythrottleError: If board, model or knob is not in the catalogue.
    """
    device = SimulatedDevice(load_board(board), noise=0.0, knobs=knobs)
    workload = device.serve(load_model(model))
    space = device.space * workload.space
    return Landscape(space, device.expected_all(workload, space))
