"""Inputs as a model declares them, filled up with what the user gives: the shapes and types that are fed."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from polythrottle.errors import InvalidInput, UnknownName
from polythrottle.space import Knob
from polythrottle.workloads.knobs import batch_knob
from polythrottle.workloads.tensors import DTYPES, Input, random_array


@dataclass(frozen=True)
class Declared:
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
class Fed:
    """One input of a model as it is fed.

    Args:
        name: Its name in the model.
        shape: Its dimensions; None where the batch size goes.
        dtype: As numpy names it.
    """

    name: str
    shape: tuple[int | None, ...]
    dtype: str


def fed(uri: str, declared: Sequence[Declared], given: Sequence[Input]) -> tuple[Fed, ...]:
    """Return how each declared input is fed, dimensions that are not fixed taken from what was given.

    A first dimension that is not fixed is the batch.

    Raises:
        InvalidInput: If shapes are missing or do not fit, or an input holds no numbers.
        UnknownName: If the model has no input of a name that was given.
    """
    return tuple(_each_fed(uri, declared, given))


def _each_fed(uri: str, declared: Sequence[Declared], given: Sequence[Input]) -> Iterator[Fed]:
    names = [each.name for each in declared]
    unnamed = [each for each in given if each.name is None]
    if unnamed and len(unnamed) != len(names):
        raise InvalidInput(f"{uri} has the inputs {', '.join(names)}, but {len(unnamed)} shapes are given")
    stated = dict(zip(names, unnamed, strict=True)) if unnamed else {each.name: each for each in given}
    for name in stated:
        if name not in names:
            raise UnknownName(f"input of {uri}", str(name), names)
    # A symbol that is somewhere a first dimension means the batch wherever it stands.
    batch = {each.shape[0] for each in declared if each.shape and not _fixed(each.shape[0])}
    for each in declared:
        shape = tuple(None if not place and not _fixed(size) else size for place, size in enumerate(each.shape))
        shape = tuple(None if isinstance(size, str) and size in batch else size for size in shape)
        own = stated.get(each.name)
        yield Fed(each.name, _filled(uri, each.name, shape, own), _dtype(uri, each, own))


def made_up(inputs: Sequence[Fed], batch_size: int) -> dict[str, NDArray[Any]]:
    """Return arrays of fixed random values for a batch, by input name."""
    return {
        each.name: random_array([batch_size if size is None else size for size in each.shape], each.dtype, seed)
        for seed, each in enumerate(inputs)
    }


def batch_knobs(uri: str, inputs: Sequence[Fed], levels: Sequence[int] | None) -> list[Knob]:
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
    return [batch_knob([fixed])] if fixed else []


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
        mine == size or not _fixed(size) for mine, size in zip(own.shape, shape[1:], strict=True)
    )
    if not fits:
        raise InvalidInput(
            f"{uri}: input {name} is {written}; {'x'.join(map(str, own.shape))} after the first does not fit"
        )
    return (*shape[:1], *own.shape)


def _written(size: int | str) -> str:
    return "?" if isinstance(size, int) and size <= 0 else str(size)


def _dtype(uri: str, each: Declared, own: Input | None) -> str:
    if each.dtype not in DTYPES:
        raise InvalidInput(f"{uri}: input {each.name} is a {each.written}; only numbers can be made up")
    if own is not None and own.dtype not in (None, each.dtype):
        raise InvalidInput(f"{uri}: input {each.name} is {each.dtype}, not {own.dtype}")
    return each.dtype
