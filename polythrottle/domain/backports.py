"""What newer Pythons brought and older ones lack, in one place that shrinks as they go.

JetPack 6 has Python 3.10, and NVIDIA builds torch and onnxruntime with CUDA for that one only: the whole package runs
there. What is carried to a board over SSH (`polythrottle.board`) also runs on 3.8, as JetPack 5 has it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from concurrent.futures import ThreadPoolExecutor

if sys.version_info >= (3, 11):
    from enum import StrEnum  # novermin

    import tomllib  # novermin
else:
    from enum import Enum

    import tomli as tomllib

    class StrEnum(str, Enum):
        """An enumeration whose members are strings, also when formatted."""

        __str__ = str.__str__
        __format__ = str.__format__  # type: ignore[assignment]


A = TypeVar("A")
B = TypeVar("B")


def removeprefix(text: str, prefix: str) -> str:
    """Return a text without a prefix that it may have; ``str.removeprefix`` is of 3.9."""
    if prefix and text.startswith(prefix):
        return text[len(prefix) :]
    return text


def removesuffix(text: str, suffix: str) -> str:
    """Return a text without a suffix that it may have; ``str.removesuffix`` is of 3.9."""
    if suffix and text.endswith(suffix):
        return text[: -len(suffix)]
    return text


def pairwise(values: Iterable[A]) -> Iterator[tuple[A, A]]:
    """Yield each value with the next; ``itertools.pairwise`` is of 3.10."""
    kept = list(values)
    return paired(kept[:-1], kept[1:])


def paired(first: Iterable[A], second: Iterable[B]) -> Iterator[tuple[A, B]]:
    """Yield what two iterables hold, side by side; ``zip(strict=True)`` is of 3.10.

    Raises:
        ValueError: If one holds more than the other.
    """
    # As lists, for iterators tell no length: a mismatch is to be met before the first pair is used, not after the last.
    left = list(first)
    right = list(second)
    if len(left) != len(right):
        raise ValueError(f"{len(left)} and {len(right)} cannot be paired")
    return zip(left, right)


def dismiss(workers: ThreadPoolExecutor) -> None:
    """Have workers end after what they are at; what still waits is dropped, which Python 3.8 does not know how to."""
    if sys.version_info >= (3, 9):
        workers.shutdown(wait=False, cancel_futures=True)  # novermin
    else:
        workers.shutdown(wait=False)


__all__ = ["StrEnum", "dismiss", "paired", "pairwise", "removeprefix", "removesuffix", "tomllib"]
