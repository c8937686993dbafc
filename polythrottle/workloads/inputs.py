"""What one query carries: knobs for batch size and threads, and made-up inputs in the shapes a model declares."""

from __future__ import annotations

import math
import os
import random
import re
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from polythrottle.domain.backports import paired
from polythrottle.domain.errors import InvalidInput, KnobRejected, UnknownName
from polythrottle.domain.space import BATCH_SIZE, Knob, OperatingPoint, SearchSpace

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

# The two knobs a workload on a processor can have, batch size and threads, and their levels.

THREADS = "threads"
_BATCH_SIZES = (1, 2, 4, 8, 16)
_MOST = 1_000_000
_MOST_THREADS = 64


def batch_knob(levels: Sequence[int] | None) -> Knob:
    """Return the knob for items per query.

    Raises:
        InvalidInput: If a level is below one or repeated, or there is none.
    """
    return _counts(BATCH_SIZE, _BATCH_SIZES if levels is None else levels)


def threads_knob(levels: Sequence[int] | None) -> Knob:
    """Return the knob for threads that share one query.

    Raises:
        InvalidInput: If a level is below one or repeated, there is none, or one is so high that it only costs memory.
    """
    most = max(_MOST_THREADS, 4 * processors())
    if levels is not None and max(levels, default=0) > most:
        raise InvalidInput(f"{max(levels)} threads are too many for {processors()} processors; use at most {most}")
    return _counts(THREADS, _powers_up_to(processors()) if levels is None else levels)


def processors() -> int:
    """Return how many processors this process may run on."""
    # Not `os.cpu_count()`: a cpuset of a container, or taskset, may leave this process fewer.
    return len(os.sched_getaffinity(0))


def _powers_up_to(count: int) -> tuple[int, ...]:
    return tuple(sorted({2**power for power in range(count.bit_length())} | {count}))


def _counts(name: str, levels: Sequence[int]) -> Knob:
    for level in levels:
        if not 1 <= level <= _MOST:
            raise InvalidInput(f"{name} must be at least 1 and at most {_MOST:,}, not {level}")
    return Knob(name, tuple(levels))


def grid_of(knobs: Sequence[Knob]) -> SearchSpace:
    """Return the space of these knobs, its default what runs untuned: the smallest batch, the most threads."""
    default = {knob.name: knob.levels[-1 if knob.name == THREADS else 0] for knob in knobs}
    for knob in knobs:
        if knob.name == THREADS and processors() in knob.levels:
            # More threads than processors may be asked for, but nobody runs them untuned.
            default[THREADS] = processors()
    return SearchSpace.grid(knobs, default)


def chosen(space: SearchSpace, point: OperatingPoint) -> OperatingPoint:
    """Return ``point`` with the default's level for every knob it leaves out.

    Raises:
        KnobRejected: If that is not a point of the space.
    """
    wanted = space.default.moved(point)
    if wanted not in space:
        known = ", ".join(f"{knob.name} in {list(knob.levels)}" for knob in space.knobs) or "no knobs"
        raise KnobRejected(f"the workload cannot run with {dict(point)}; it has {known}")
    return wanted


def count(point: OperatingPoint, name: str) -> int:
    """Return the level of a count in a point, 1 if the point has no such knob."""
    return int(point.get(name, 1))


# Made-up model inputs: shapes as people write them, and arrays of fixed random values.

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
    def parse(cls, text: str) -> Input:
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
    import numpy as np

    random = np.random.default_rng(seed)
    try:
        if math.prod(shape) * _WHILE_MADE_BYTES > available_bytes():
            raise MemoryError  # asked first, as some systems hand out memory that is not there
        if dtype in _FLOATS:
            # In single precision whatever is asked for: NumPy draws no half precision.
            return random.standard_normal(tuple(shape), dtype=np.float32).astype(dtype)
        return random.integers(0, 2, tuple(shape)).astype(dtype)
    except (MemoryError, ValueError) as error:
        raise _too_large(shape) from error


def _too_large(shape: Sequence[int]) -> InvalidInput:
    return InvalidInput(f"an input of shape {'x'.join(map(str, shape))} does not fit into memory")


def available_bytes() -> int:
    """Return how much memory programs may still take before the machine swaps (proc(5), MemAvailable)."""
    with open("/proc/meminfo", encoding="ascii") as lines:
        kib = next((line.split()[1] for line in lines if line.startswith("MemAvailable:")), "0")
    return int(kib) * 1024


_CODES = {"float16": "e", "float32": "f", "float64": "d", "bool": "?"}
_CODES.update({f"int{8 * size}": code for size, code in ((1, "b"), (2, "h"), (4, "i"), (8, "q"))})
_CODES.update({f"u{name}": code.upper() for name, code in _CODES.items() if name.startswith("int")})
"""How `struct` calls each of `DTYPES`."""
_DRAWN = 1 << 16


@dataclass(frozen=True)
class PlainArray:
    """Made-up numbers where NumPy is not installed: as much of an array as can be sent, by NumPy's names.

    Args:
        shape: Its dimensions.
        dtype: One of `DTYPES`.
        content: The numbers, little-endian.
    """

    shape: tuple[int, ...]
    dtype: str
    content: bytes

    @classmethod
    def random(cls, shape: Sequence[int], dtype: str, seed: int = 0) -> PlainArray:
        """Return an array that is always the same for the same arguments, of what `random_array` holds.

        Raises:
            InvalidInput: If it does not fit into memory.
        """
        count = math.prod(shape)
        width = struct.calcsize(_CODES[dtype])
        if count * width > available_bytes():
            raise _too_large(shape)
        source = random.Random(seed)
        drawn = min(count, _DRAWN)
        if dtype in _FLOATS:
            numbers = [source.gauss(0.0, 1.0) for _ in range(drawn)]
        else:
            numbers = [source.getrandbits(1) for _ in range(drawn)]
        # Over and over: a board's Python would take seconds to draw a batch of pictures, and a model computes the same.
        block = struct.pack(f"<{drawn}{_CODES[dtype]}", *numbers)
        content = block * -(-count // max(drawn, 1))
        return cls(tuple(shape), dtype, content[: count * width])

    def tobytes(self) -> bytes:
        """Return the numbers as bytes."""
        return self.content

    def ravel(self) -> PlainArray:
        """Return it without its shape, which `tolist` does not regard."""
        return self

    def tolist(self) -> list[Any]:
        """Return the numbers, one after another."""
        return list(struct.unpack(f"<{math.prod(self.shape)}{_CODES[self.dtype]}", self.content))


# Inputs as a model declares them, filled up with what the user gives: the shapes and types that are fed.


@dataclass(frozen=True)
class DeclaredInput:
    """One input as a model declares it.

    Args:
        name: Its name in the model.
        shape: Its dimensions; anything but a number above zero where they are not fixed, a symbol where it has one.
        dtype: As numpy names it, if numpy has such a type.
        written: The type as the model writes it.
    """

    name: str
    shape: tuple[int | str | None, ...]
    dtype: str
    written: str


@dataclass(frozen=True)
class FedInput:
    """One input of a model as it is fed.

    Args:
        name: Its name in the model.
        shape: Its dimensions; None where the batch size goes.
        dtype: As numpy names it.
    """

    name: str
    shape: tuple[int | None, ...]
    dtype: str


def fed(uri: str, declared: Sequence[DeclaredInput], given: Sequence[Input]) -> tuple[FedInput, ...]:
    """Return how each declared input is fed, dimensions that are not fixed taken from what was given.

    A first dimension that is not fixed is the batch.

    Raises:
        InvalidInput: If shapes are missing or do not fit, or an input holds no numbers.
        UnknownName: If the model has no input of a name that was given.
    """
    return tuple(_each_fed(uri, declared, given))


def _each_fed(uri: str, declared: Sequence[DeclaredInput], given: Sequence[Input]) -> Iterator[FedInput]:
    names = [each.name for each in declared]
    unnamed = [each for each in given if each.name is None]
    if unnamed and len(unnamed) != len(names):
        raise InvalidInput(f"{uri} has the inputs {', '.join(names)}, but {len(unnamed)} shapes are given")
    stated = dict(paired(names, unnamed)) if unnamed else {each.name: each for each in given}
    for name in stated:
        if name not in names:
            raise UnknownName(f"input of {uri}", str(name), names)
    # A symbol that is somewhere a first dimension means the batch wherever it stands.
    batch = {each.shape[0] for each in declared if each.shape and not _fixed(each.shape[0])}
    for each in declared:
        shape = tuple(None if not place and not _fixed(size) else size for place, size in enumerate(each.shape))
        shape = tuple(None if isinstance(size, str) and size in batch else size for size in shape)
        own = stated.get(each.name)
        yield FedInput(each.name, _filled(uri, each.name, shape, own), _dtype(uri, each, own))


def random_inputs(inputs: Sequence[FedInput], batch_size: int) -> dict[str, NDArray[Any]]:
    """Return arrays of fixed random values for a batch, by input name."""
    return {
        each.name: random_array([batch_size if size is None else size for size in each.shape], each.dtype, seed)
        for seed, each in enumerate(inputs)
    }


def sent_inputs(inputs: Sequence[FedInput], batch_size: int) -> dict[str, NDArray[Any] | PlainArray]:
    """Return what `random_inputs` does, or the same of Python's own where NumPy is not installed, as on many boards.

    Only for what sends its inputs elsewhere: models that run here take NumPy's arrays.
    """
    try:
        return {**random_inputs(inputs, batch_size)}
    except ImportError:
        return {
            each.name: PlainArray.random(
                [batch_size if size is None else size for size in each.shape], each.dtype, seed
            )
            for seed, each in enumerate(inputs)
        }


def batch_knobs(uri: str, inputs: Sequence[FedInput], levels: Sequence[int] | None) -> list[Knob]:
    """Return the batch knob: with one level if the model fixes its batch, none if it has no dimension for it.

    Raises:
        InvalidInput: If other levels are asked for than the model has, or one is below one or repeated.
    """
    if any(None in each.shape for each in inputs):
        return [batch_knob(levels)]
    fixed = next((each.shape[0] for each in inputs if each.shape), None)
    if levels is not None and set(levels) != {fixed or 1}:
        raise InvalidInput(
            f"{uri} is exported with a batch of {fixed or 1}; leave out other batch sizes, "
            "or export it with a dynamic batch"
        )
    if fixed:
        return [batch_knob([fixed])]
    return []


def _fixed(size: int | str | None) -> bool:
    return isinstance(size, int) and size > 0


def _filled(uri: str, name: str, shape: tuple[Any, ...], own: Input | None) -> tuple[int | None, ...]:
    """Return a declared shape with the dimensions after the first taken from what was given."""
    written = "x".join("batch" if size is None else _written(size) for size in shape) or "a single number"
    if own is None:
        if all(size is None or _fixed(size) for size in shape):
            return shape
        raise InvalidInput(
            f"{uri}: input {name} is {written}; give every dimension after the first, such as "
            f"--input {name}={'x'.join(str(size) if _fixed(size) else '128' for size in shape[1:])}"
        )
    fits = len(own.shape) == len(shape[1:]) and all(
        mine == size or not _fixed(size) for mine, size in paired(own.shape, shape[1:])
    )
    if not fits:
        raise InvalidInput(
            f"{uri}: input {name} is {written}; {'x'.join(map(str, own.shape))} after the first does not fit"
        )
    return (*shape[:1], *own.shape)


def _written(size: int | str) -> str:
    if isinstance(size, int) and size <= 0:
        return "?"
    return str(size)


def _dtype(uri: str, each: DeclaredInput, own: Input | None) -> str:
    if each.dtype not in DTYPES:
        raise InvalidInput(f"{uri}: input {each.name} is a {each.written}; only numbers can be made up")
    if own is not None and own.dtype not in (None, each.dtype):
        raise InvalidInput(f"{uri}: input {each.name} is {each.dtype}, not {own.dtype}")
    return each.dtype
