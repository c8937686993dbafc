"""Made-up model inputs: shapes as people write them, and arrays of fixed random values."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import psutil
from numpy.typing import NDArray

from polythrottle.errors import InvalidInput

_FLOATS = ("float32", "float64", "float16")
_WHILE_MADE_BYTES = 8
DTYPES = (*_FLOATS, "int64", "int32", "int16", "int8", "uint8", "uint16", "uint32", "uint64", "bool")
_INPUT = re.compile(r"(?:(?P<name>[^=]+)=)?(?P<shape>\d{1,12}(?:x\d{1,12})*)?(?::(?P<dtype>\w+))?")


@dataclass(frozen=True)
class Input:
    """One input of a model, for one item.

    Args:
        shape: Without the batch dimension.
        name: None if given by position.
        dtype: One of `DTYPES`; None if not stated.
    """

    shape: tuple[int, ...]
    name: str | None = None
    dtype: str | None = None

    @classmethod
    def parse(cls, text: str) -> "Input":
        """Return the input a text means: ``3x224x224``, ``ids=128:int64``, ``score=`` for one number.

        Raises:
            InvalidInput: If the text is not of that form, a size is zero, or the type is not known.
        """
        match = _INPUT.fullmatch(text.strip())
        if not text.strip() or match is None:
            raise InvalidInput(f"{text!r} is not an input's shape; write for example 3x224x224 or ids=128:int64")
        shape = tuple(int(size) for size in (match["shape"] or "").split("x") if size)
        if 0 in shape:
            raise InvalidInput(f"{text!r}: a dimension cannot be 0")
        if match["dtype"] and match["dtype"] not in DTYPES:
            raise InvalidInput(f"{text!r}: unknown type {match['dtype']!r}; known: {', '.join(DTYPES)}")
        return cls(shape, match["name"], match["dtype"])


def parse_inputs(texts: Sequence[str]) -> tuple[Input, ...]:
    """Return several inputs.

    Raises:
        InvalidInput: If one is malformed, a name repeats, or only some are named.
    """
    inputs = tuple(Input.parse(text) for text in texts)
    names = [each.name for each in inputs if each.name is not None]
    if len(set(names)) != len(names):
        raise InvalidInput(f"an input is given twice among {', '.join(names)}")
    if names and len(names) != len(inputs):
        raise InvalidInput("name all inputs or none of them")
    return inputs


def random_array(shape: Sequence[int], dtype: str, seed: int = 0) -> NDArray[np.generic]:
    """Return an array that is always the same for the same arguments.

    Floats are standard normal. Integers are 0 or 1, which is valid as token, mask, segment or index almost everywhere.

    Raises:
        InvalidInput: If it does not fit into memory.
    """
    random = np.random.default_rng(seed)
    try:
        if math.prod(shape) * _WHILE_MADE_BYTES > psutil.virtual_memory().available:
            raise MemoryError  # asked first, as some systems hand out memory that is not there
        if dtype in _FLOATS:
            return random.standard_normal(tuple(shape), dtype=np.float32).astype(dtype)
        return random.integers(0, 2, tuple(shape)).astype(dtype)
    except (MemoryError, ValueError) as error:
        raise InvalidInput(f"an input of shape {'x'.join(map(str, shape))} does not fit into memory") from error
