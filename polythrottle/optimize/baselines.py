"""Methods that do not learn: a random order, a grid that is refined as it goes, and the vendor's presets."""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from polythrottle.errors import Exhausted
from polythrottle.optimize.remaining import default_row, generator, remaining_rows
from polythrottle.space import Knob, OperatingPoint, SearchSpace
from polythrottle.study import Study


class RandomOrder:
    """Random search without replacement, from the default point on."""

    def suggest(self, study: Study) -> OperatingPoint:
        """Return the default point, then any point that has not been tried, all equally likely.

        Raises:
            Exhausted: If every point has been tried.
        """
        space, rows = study.problem.space, remaining_rows(study)
        if space.default not in study.visited:
            return space.default
        return space[int(generator(study).choice(rows))]


class CoarseToFine:
    """Grid search: the default point, the corners, then the points half-way between, and so on.

    However early it is stopped, what it has seen spans the whole space. It has no randomness.
    """

    def suggest(self, study: Study) -> OperatingPoint:
        """Return the default point, then the first point of the refinement that has not been tried.

        Raises:
            Exhausted: If every point has been tried.
        """
        space, rows = study.problem.space, remaining_rows(study)
        order = _refinement(space)
        return space[int(rows[np.argmin(order[rows])])]


@lru_cache(maxsize=4)
def _refinement(space: SearchSpace) -> NDArray[np.intp]:
    """Return when each point's turn comes, shape (points,): 0 for the default, which is first."""
    depths = [_depth(len(knob.levels))[space.rows[:, k]] for k, knob in enumerate(space.knobs)]
    coarse = np.max(depths, axis=0) if depths else np.zeros(len(space), dtype=np.int64)
    coarse[default_row(space)] = -1
    turn = np.empty(len(space), dtype=np.intp)
    turn[np.argsort(coarse, kind="stable")] = np.arange(len(space))
    return turn


def _depth(levels: int) -> NDArray[np.int64]:
    """Return in which round of halving each level of a knob is first used, shape (levels,): 0 for both ends."""
    depth = np.zeros(levels, dtype=np.int64)
    gaps, round_ = [(0, levels - 1)], 0
    while gaps:
        round_ += 1
        middles = [(low, (low + high) // 2, high) for low, high in gaps if high - low > 1]
        depth[[middle for _, middle, _ in middles]] = round_
        gaps = [gap for low, middle, high in middles for gap in ((low, middle), (middle, high))]
    return depth


class PresetOrder:
    """What a careful user does by hand: the default point, then each of the vendor's presets, and no more.

    Where there are no presets, every level of the power limit alone, the highest first; where there is no power limit
    either, every level of the GPU clock alone.

    Args:
        presets: The vendor's named points; those outside the space are passed over.
    """

    def __init__(self, presets: Sequence[OperatingPoint] = ()) -> None:
        self._presets = tuple(presets)

    def suggest(self, study: Study) -> OperatingPoint:
        """Return the default point, then the first preset that has not been tried.

        Raises:
            Exhausted: If all have been tried.
        """
        space = study.problem.space
        named = [point for point in self._presets if point in space] or _alone(space)
        for point in (space.default, *named):
            if point not in study.visited and study.reachable(point):
                return point
        raise Exhausted(f"all {len(set(named) | {space.default})} presets have been tried")


def _alone(space: SearchSpace) -> list[OperatingPoint]:
    """Return every level of the one knob that presets turn, with all else at the default, the highest level first."""
    limits = [knob for knob in space.knobs if knob.name.endswith("_w")]
    clocks = [knob for knob in space.knobs if _steers_the_gpu(knob)]
    points = [space.default.moved({knob.name: level}) for knob in (limits or clocks)[:1] for level in knob.levels]
    return [point for point in reversed(points) if point in space]


def _steers_the_gpu(knob: Knob) -> bool:
    return knob.name.startswith("gpu_") and knob.name.endswith("_hz") and "_min_" not in knob.name
