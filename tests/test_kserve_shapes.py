"""Shapes of outputs against those that a model declares and the batch that was sent."""

import pytest

from polythrottle.errors import TrialError
from polythrottle.workloads.kserve_shapes import Shape, see_declared


@pytest.mark.parametrize(
    ("declared", "found", "batch_size"),
    [((-1, 4), (8, 4), 8), ((-1, -1), (8, 77), 8), ((-1,), (8,), 8), ((-1,), (8, 1), 8), ((-1, 1), (8,), 8),
     ((-1,), (), 1), ((1, 4), (8, 4), 8), ((1, 4), (1, 4), 8), ((-1,), (8, 10), 8), ((-1, 4), (32,), 8), ((), (3,), 8),
     ((-1, 6), (3, 6), None), ((2, 4), (2, 4), None), ((-1, 4), (3, 5, 6), None), ((4,), (3, 5), 2),
     ((-1, 7), (0, 7), 1), ((-1, 7), (5, 7), 1)],
)  # fmt: skip
def test_what_can_be_right_is_taken(declared: Shape, found: Shape, batch_size: int | None) -> None:
    """Dimensions of one come and go, and metadata by hand is rough."""
    see_declared("m", {"y": declared}, {"y": found, "other": (5,)}, batch_size)


@pytest.mark.parametrize(
    ("declared", "found", "batch_size"),
    [((-1, 4), (1, 4), 8), ((-1, 4), (7, 4), 8), ((-1, 4), (8, 5), 8), ((-1,), (1, 1), 8),
     ((-1, 4), (1,), 8), ((-1, 4), (), 8), ((-1,), (0, 10), 8), ((1, 4), (3, 4), 8), ((2, 4), (1, 4), None),
     ((2, 4), (2, 5), None), ((-1, 4), (3, 5), None)],
)  # fmt: skip
def test_what_cannot_be_right_is_refused(declared: Shape, found: Shape, batch_size: int | None) -> None:
    """Another batch, another fixed dimension, or nothing that could be shared out among the items."""
    with pytest.raises(TrialError, match=r"^m answers with .* for its output y, which it declares as"):
        see_declared("m", {"y": declared}, {"y": found}, batch_size)


def test_a_missing_output_is_named() -> None:
    """Whatever the others hold."""
    with pytest.raises(TrialError, match=r"^m answers without y, z, which it declares$"):
        see_declared("m", {"x": (-1,), "z": (), "y": (1,)}, {"x": (8,)}, 8)
