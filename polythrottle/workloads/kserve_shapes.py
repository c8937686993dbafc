"""Whether outputs in an answer of KServe v2 have the shapes that the model declares, for the batch that was sent."""

import math
from collections.abc import Mapping
from itertools import zip_longest

from polythrottle.errors import TrialError

Shape = tuple[int, ...]
Shapes = Mapping[str, Shape]
"""Shapes of tensors by name; declared ones have numbers below one where any size will do."""


def see_declared(who: str, declared: Shapes, found: Shapes, batch_size: int | None) -> None:
    """Look whether an answer has every declared output, in its shape.

    Args:
        who: The model, for people.
        declared: Empty where the model declares none; a shape without dimensions says nothing.
        found: What the answer holds.
        batch_size: How many items were sent; None if the model's inputs have no open dimension for them.

    Raises:
        TrialError: If an output is missing, or is of another size than was declared or sent.
    """
    if missing := sorted(declared.keys() - found.keys()):
        raise TrialError(f"{who} answers without {', '.join(missing)[:100]}, which it declares")
    # For a single item an open dimension may count what was found in it, such as the objects in a picture.
    items = None if batch_size == 1 else batch_size
    for name, shape in declared.items():
        if shape and not _fits(shape, found[name], items):
            told = f"{_written(found[name])} for its output {name}, which it declares as {_written(shape)}"
            sent = "" if batch_size is None else f"; the batch that was sent is {batch_size:,}"
            raise TrialError(f"{who} answers with {told}{sent}")


def _fits(declared: Shape, found: Shape, batch_size: int | None) -> bool:
    shared = min(len(declared), len(found))
    if any(size != 1 for size in (*declared[shared:], *found[shared:])):
        return _divides(declared, found, batch_size)
    # Dimensions of one are left out and added freely: MLServer answers with [8, 1] where [-1] is declared.
    (first, size), *rest = zip_longest(declared, found, fillvalue=1)
    known = {each for each in (first, batch_size) if each is not None and each > 0}
    return (not known or size in known) and all(one < 1 or one == other for one, other in rest)


def _divides(declared: Shape, found: Shape, batch_size: int | None) -> bool:
    """Return whether an output of another rank can hold something for each item: what is declared by hand is rough."""
    elements = math.prod(found)
    return declared[0] > 0 or batch_size is None or (elements > 0 and elements % batch_size == 0)


def _written(shape: Shape) -> str:
    return "x".join("?" if size < 1 else str(size) for size in shape) or "one number"
