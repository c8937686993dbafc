"""Shapes of outputs against those that a model declares and the batch that was sent."""

import pytest

from polythrottle.domain.errors import TrialError
from polythrottle.workloads.services.kserve_protocol import Shape, check_declared_shapes, check_item_count


@pytest.mark.parametrize(
    ("declared", "found", "batch_size"),
    [((-1, 4), (8, 4), 8), ((-1, -1), (8, 77), 8), ((-1,), (8,), 8), ((-1,), (8, 1), 8), ((-1, 1), (8,), 8),
     ((-1,), (), 1), ((1, 4), (8, 4), 8), ((1, 4), (1, 4), 8), ((-1,), (8, 10), 8), ((-1, 4), (32,), 8), ((), (3,), 8),
     ((-1, 6), (3, 6), None), ((2, 4), (2, 4), None), ((-1, 4), (3, 5, 6), None), ((4,), (3, 5), 2),
     ((-1, 7), (0, 7), 1), ((-1, 7), (5, 7), 1)],
)  # fmt: skip
def test_what_can_be_right_is_taken(declared: Shape, found: Shape, batch_size: int | None) -> None:
    """Dimensions of one come and go, and metadata by hand is rough."""
    check_declared_shapes("m", {"y": declared}, {"y": found, "other": (5,)}, batch_size)


@pytest.mark.parametrize(
    ("declared", "found", "batch_size"),
    [((-1, 4), (1, 4), 8), ((-1, 4), (7, 4), 8), ((-1, 4), (8, 5), 8), ((-1,), (1, 1), 8),
     ((-1, 4), (1,), 8), ((-1, 4), (), 8), ((-1,), (0, 10), 8), ((1, 4), (3, 4), 8), ((2, 4), (1, 4), None),
     ((2, 4), (2, 5), None), ((-1, 4), (3, 5), None)],
)  # fmt: skip
def test_what_cannot_be_right_is_refused(declared: Shape, found: Shape, batch_size: int | None) -> None:
    """Another batch, another fixed dimension, or nothing that could be shared out among the items."""
    with pytest.raises(TrialError, match=r"^m answers with .* for its output y, which it declares as"):
        check_declared_shapes("m", {"y": declared}, {"y": found}, batch_size)


def test_a_missing_output_is_named() -> None:
    """Whatever the others hold."""
    with pytest.raises(TrialError, match=r"^m answers without y, z, which it declares$"):
        check_declared_shapes("m", {"x": (-1,), "z": (), "y": (1,)}, {"x": (8,)}, 8)


def test_an_output_may_count_something_of_its_own() -> None:
    """Objects found in all pictures of a batch are not the batch, if somebody says so; other dimensions hold."""
    declared, found = {"boxes": (-1, 7), "seen": (-1,)}, {"boxes": (21, 7), "seen": (8,)}
    with pytest.raises(
        TrialError, match=r"the batch that was sent is 8; if the first .* add unbatched=boxes to the URI"
    ):
        check_declared_shapes("m", declared, found, 8)
    check_declared_shapes("m", declared, found, 8, {"boxes"})
    check_declared_shapes("m", declared, {**found, "boxes": (0, 7)}, 8, {"boxes"})
    with pytest.raises(TrialError, match=r"21x6 for its output boxes, which it declares as \?x7; the batch .* is 8$"):
        check_declared_shapes("m", declared, {**found, "boxes": (21, 6)}, 8, {"boxes"})


@pytest.mark.parametrize(
    ("declared", "found", "batch_size"),
    [({"y": (-1, 2)}, {"y": (8, 2)}, 8), ({"y": (-1,)}, {"y": (8, 1)}, 8), ({"y": (-1, 4)}, {"y": (32,)}, 8),
     ({}, {"y": (8,)}, 8), ({"y": (1, 4)}, {"y": (8, 4)}, 8), ({"y": (-1, 2)}, {"y": (1, 2)}, 1),
     ({"y": (-1, 2)}, {"y": (1, 2)}, None), ({"y": (-1, 7), "n": (-1,)}, {"y": (21, 7), "n": (8,)}, 8)],
)  # fmt: skip
def test_an_answer_counts_its_items_by_one_output(
    declared: dict[str, Shape], found: dict[str, Shape], batch_size: int | None
) -> None:
    """The others may be of any length; a single item needs no count."""
    check_item_count("m", declared, found, batch_size)


@pytest.mark.parametrize(("declared", "found"), [((-1, 2), (1, 2)), ((1, 4), (1, 4)), ((), (3,)), ((-1, 7), (21, 7))])
def test_an_answer_that_counts_no_items_is_refused_unless_somebody_vouches(declared: Shape, found: Shape) -> None:
    """All outputs are named then; those of which it was said already stay so."""
    with pytest.raises(TrialError, match=r"^m answers a batch of 8 with y .*; leave batches above 1 .* unbatched=y to"):
        check_item_count("m", {"y": declared}, {"y": found}, 8)
    with pytest.raises(TrialError, match=r"add unbatched=x,y to the URI"):
        check_item_count("m", {"y": declared}, {"y": found, "x": (8,)}, 8, {"x"})
    check_item_count("m", {"y": declared}, {"y": found}, 8, {"y"})
