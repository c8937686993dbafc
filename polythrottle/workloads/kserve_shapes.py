"""Whether outputs in an answer of KServe v2 have the shapes that the model declares, for the batch that was sent."""

import math
from collections.abc import Collection, Mapping
from itertools import zip_longest

from polythrottle.errors import TrialError

Shape = tuple[int, ...]
Shapes = Mapping[str, Shape]
"""Shapes of tensors by name; declared ones have numbers below one where any size will do."""

UNBATCHED = "unbatched"
"""The option of a URI that lists outputs whose first dimension is not the batch."""


def see_declared(
    who: str, declared: Shapes, found: Shapes, batch_size: int | None, unbatched: Collection[str] = ()
) -> None:
    """Look whether an answer has every declared output, in its shape.

    Args:
        who: The model, for people.
        declared: Empty where the model declares none; a shape without dimensions says nothing.
        found: What the answer holds.
        batch_size: How many items were sent; None if the model's inputs have no open dimension for them.
        unbatched: Outputs whose first dimension is not the batch where it is open: it counts something of its own, such
            as the objects found in all pictures.

    Raises:
        TrialError: If an output is missing, or is of another size than was declared or sent.
    """
    if missing := sorted(declared.keys() - found.keys()):
        raise TrialError(f"{who} answers without {', '.join(missing)[:100]}, which it declares")
    # For a single item an open dimension may count what was found in it, such as the objects in a picture.
    items = None if batch_size == 1 else batch_size
    for name, shape in declared.items():
        if shape and not _fits(shape, found[name], None if name in unbatched else items):
            told = f"{_written(found[name])} for its output {name}, which it declares as {_written(shape)}"
            sent = "" if batch_size is None else f"; the batch that was sent is {batch_size:,}"
            own = f"; if the first dimension counts something else, add {UNBATCHED}={name} to the URI's options"
            raise TrialError(f"{who} answers with {told}{sent}{own if _fits(shape, found[name], None) else ''}")


def see_counted(
    who: str, declared: Shapes, found: Shapes, batch_size: int | None, vouched: Collection[str] = ()
) -> None:
    """Look whether an answer shows that it is one for every item that was sent.

    Where no output does, a server that answers each batch like a single item would seem to serve it for less.

    Args:
        who: The model, for people.
        declared: As for `see_declared`.
        found: What the answer holds.
        batch_size: As there.
        vouched: Outputs of which somebody said that they count something else.

    Raises:
        TrialError: If none of the other outputs comes with the batch as its first dimension, and there is one.
    """
    others = sorted(found.keys() - set(vouched))
    if batch_size is None or batch_size == 1 or not others:
        return
    if not any(_carries(declared.get(name, ()), found[name], batch_size) for name in others):
        told = ", ".join(f"{name} {_written(found[name])}" for name in others)[:100]
        raise TrialError(
            f"{who} answers a batch of {batch_size:,} with {told}: nothing there counts {batch_size:,} items, so what "
            f"one takes cannot be told; leave batches above 1 out, or, if it does answer every item, add "
            f"{UNBATCHED}={','.join(sorted({*others, *vouched}))} to the URI's options"
        )


def _carries(declared: Shape, found: Shape, batch_size: int) -> bool:
    """Return whether the first dimension of an output is the batch, or one that is declared open holds it."""
    return found[:1] == (batch_size,) or (declared[:1] < (1,) and declared != () and _fits(declared, found, batch_size))


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
