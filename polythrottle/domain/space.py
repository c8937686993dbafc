"""Knobs, operating points, and the finite sets of points that may be applied.

NumPy is loaded where a space is asked for as an array: what only passes points on does without it, as the daemon at
rest and what runs on a board that is reached over SSH.
"""

from __future__ import annotations

import itertools
import math
import sys
import typing
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter
from typing import TYPE_CHECKING, Union

from polythrottle.domain.backports import paired
from polythrottle.domain.errors import InvalidInput
from polythrottle.domain.units import knob_name, unknown_knob

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_INT32 = "i"
# Not `|`: this is evaluated on import, and the module is carried to boards whose Python is 3.8.
Level = Union[int, float, str]
BATCH_SIZE = "batch_size"
"""The knob that workloads, ladders and batchers know by name: items in a query."""
CONCURRENCY = "concurrency"
"""The knob of a closed loop: queries that are under way at once."""
IN_FLIGHT = "in_flight"
"""The knob of a language model's server, set at the proxy before it: requests that are under way at once."""
MOST_POINTS = 1_000_000
"""Points of a space: what honest boards have is far below, and a million of them take 250 MB."""
MOST_COMBINATIONS = 4_000_000
"""Combinations of levels that are gone through for those that may be applied."""


def check_size(counts: Iterable[int], most: int = MOST_POINTS) -> None:
    """Refuse a product of sizes before it is built.

    Raises:
        InvalidInput: If it is larger than ``most``.
    """
    if (size := math.prod(counts)) > most:
        raise InvalidInput(
            f"{size:.3g} combinations of levels are more than {most:,}; search fewer knobs (--knobs), or fewer levels "
            "of each (search_every in the device's file)"
        )


@dataclass(frozen=True)
class Knob:
    """A named, settable thing and the levels it has.

    Args:
        name: Ends in its unit: ``gpu_max_hz``, ``power_limit_w``; plain counts have none: ``batch_size``.
        levels: Every level the knob can take, distinct; numbers ascending.
        label: True if the levels are names that have no order, even where they are written as numbers.

    Raises:
        InvalidInput: If there is no level, a level is repeated or not finite, or numbers are mixed with text.
    """

    name: str
    levels: tuple[Level, ...]
    label: bool = False

    def __post_init__(self) -> None:
        if not self.levels:
            raise InvalidInput(f"knob {self.name} has no levels")
        if len(set(self.levels)) != len(self.levels):
            raise InvalidInput(f"knob {self.name} repeats a level")
        texts = sum(isinstance(level, str) for level in self.levels)
        if 0 < texts < len(self.levels):
            raise InvalidInput(f"knob {self.name} mixes numbers with text")
        if not texts and not all(math.isfinite(level) for level in self.levels if not isinstance(level, str)):
            raise InvalidInput(f"knob {self.name} has a level that is not finite")
        object.__setattr__(self, "levels", tuple(sorted(self.levels)))

    @property
    def is_clock(self) -> bool:
        """Whether its levels are clocks; what is added to a clock, below zero too, is none."""
        return self.name.endswith("_hz") and not self.name.endswith("_offset_hz")

    @property
    def ordered(self) -> bool:
        """Whether neighbouring levels mean neighbouring behaviour."""
        return not self.label and not isinstance(self.levels[0], str)


@dataclass(frozen=True, init=False, repr=False)
# Of typing: Python 3.8 cannot subscript the one of collections.abc.
class OperatingPoint(typing.Mapping[str, Level]):
    """One level per knob; an immutable mapping from knob name to level, hashable and compared by value."""

    items_: tuple[tuple[str, Level], ...]

    def __init__(self, levels: Mapping[str, Level]) -> None:
        # In one order, however they were named: equality, hash and the text that goes into fingerprints follow from it.
        object.__setattr__(self, "items_", tuple(sorted(levels.items())))

    def __getitem__(self, name: str) -> Level:
        for key, level in self.items_:
            if key == name:
                return level
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        return (name for name, _ in self.items_)

    def __len__(self) -> int:
        return len(self.items_)

    def __repr__(self) -> str:
        return f"OperatingPoint({', '.join(f'{name}={level}' for name, level in self.items_)})"

    def only(self, names: Iterable[str]) -> OperatingPoint:
        """Return the part of this point that concerns the named knobs."""
        wanted = set(names)
        return OperatingPoint({name: level for name, level in self.items_ if name in wanted})

    def moved(self, levels: Mapping[str, Level]) -> OperatingPoint:
        """Return this point with some levels replaced or added."""
        return OperatingPoint({**dict(self.items_), **levels})


@dataclass(frozen=True, eq=False)
class SearchSpace:
    """A finite set of operating points: exactly those that may be applied, never a box around them.

    Args:
        knobs: The knobs, in the order of the columns of ``indices``.
        indices: For each point and knob the index of its level, a distinct row for each point.
        default: The point the device has when nobody tunes it; always one of the points.

    Raises:
        InvalidInput: If the space is empty, knobs repeat, an index or the default is outside, or rows repeat.
    """

    knobs: tuple[Knob, ...]
    indices: tuple[tuple[int, ...], ...]
    default: OperatingPoint

    def __post_init__(self) -> None:
        if len({knob.name for knob in self.knobs}) != len(self.knobs):
            raise InvalidInput(f"a knob has two owners among {', '.join(self.names)}")
        if not self.indices or set(map(len, self.indices)) != {len(self.knobs)}:
            raise InvalidInput("a search space needs at least one point with one level per knob")
        check_size([len(self.indices)])
        for knob, level in ((knob, itemgetter(column)) for column, knob in enumerate(self.knobs)):
            # Python would take a negative index for a level from the other end.
            if min(map(level, self.indices)) < 0 or max(map(level, self.indices)) >= len(knob.levels):
                raise InvalidInput("a point refers to a level its knob does not have")
        if len(self._positions) != len(self.indices):
            raise InvalidInput("a search space holds the same point twice")
        if self.default not in self:
            raise InvalidInput(f"the default point {dict(self.default)} is not in the space")

    @classmethod
    def grid(
        cls,
        knobs: Sequence[Knob],
        default: Mapping[str, Level],
        where: Callable[[Mapping[str, Level]], bool] = lambda _: True,
    ) -> SearchSpace:
        """Return every combination of levels for which ``where`` is true.

        Raises:
            InvalidInput: If no combination is left or the default is not among them.
        """
        # Counted before `where` is asked: rules may leave few points, but every combination is gone through for them.
        check_size((len(knob.levels) for knob in knobs), MOST_COMBINATIONS)
        names = [knob.name for knob in knobs]
        indices = itertools.product(*(range(len(knob.levels)) for knob in knobs))
        levels = [knob.levels for knob in knobs]
        kept = tuple(row for row in indices if where(dict(zip(names, (each[i] for each, i in zip(levels, row))))))
        return cls(tuple(knobs), kept, OperatingPoint(default))

    @classmethod
    def of_rows(cls, knobs: Sequence[Knob], rows: NDArray[np.int32], default: OperatingPoint) -> SearchSpace:
        """Return the space of points given as an array.

        Args:
            knobs: In the order of the columns.
            rows: For each point and knob the index of its level, shape (points, knobs), distinct rows.
            default: One of the points.

        Raises:
            InvalidInput: As the constructor; or if the array is of another shape.
        """
        if rows.ndim != 2:
            raise InvalidInput("a search space needs at least one point with one level per knob")
        return cls(tuple(knobs), tuple(map(tuple, rows.tolist())), default)

    @classmethod
    def of_points(
        cls, points: Sequence[Mapping[str, Level]], default: Mapping[str, Level], labels: Iterable[str] = ()
    ) -> SearchSpace:
        """Return the space of exactly these points, its knobs and levels read off them.

        Raises:
            InvalidInput: If the points name different knobs or one occurs twice.
        """
        if not points:
            raise InvalidInput("a search space needs at least one point")
        names = list(points[0])
        marked = set(labels)
        if any(set(point) != set(names) for point in points):
            raise InvalidInput("the points of a space must name the same knobs")
        # The order of a set may differ from run to run; a knob sorts its levels.
        knobs = tuple(Knob(name, tuple({point[name] for point in points}), name in marked) for name in names)
        place = [{level: i for i, level in enumerate(knob.levels)} for knob in knobs]
        rows = (tuple(place[k][point[name]] for k, name in enumerate(names)) for point in points)
        return cls(knobs, tuple(rows), OperatingPoint(default))

    @classmethod
    def unit(cls) -> SearchSpace:
        """Return the space of one point without knobs: what has nothing to set, and neutral in products."""
        return cls((), ((),), OperatingPoint({}))

    @property
    def names(self) -> tuple[str, ...]:
        """The knob names, in column order."""
        return tuple(knob.name for knob in self.knobs)

    @cached_property
    def rows(self) -> NDArray[np.int32]:
        """The indices as an array that nobody can write to, shape (points, knobs)."""
        import numpy as np

        rows = np.array(self.indices, dtype=np.int32).reshape(len(self.indices), len(self.knobs))
        # All who ask share this one array.
        rows.setflags(write=False)
        return rows

    @cached_property
    def _positions(self) -> dict[tuple[int, ...], int]:
        return {row: i for i, row in enumerate(self.indices)}

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> OperatingPoint:
        return OperatingPoint({knob.name: knob.levels[i] for knob, i in paired(self.knobs, self.indices[index])})

    def __iter__(self) -> Iterator[OperatingPoint]:
        return (self[i] for i in range(len(self)))

    def __contains__(self, point: object) -> bool:
        return isinstance(point, Mapping) and self._find(point) is not None

    def __mul__(self, other: SearchSpace) -> SearchSpace:
        # Before the product is built: two spaces that are each small enough may have too many points together.
        check_size((len(self), len(other)))
        rows = tuple(mine + theirs for mine in self.indices for theirs in other.indices)
        return SearchSpace(self.knobs + other.knobs, rows, self.default.moved(other.default))

    def _find(self, point: Mapping[str, Level]) -> int | None:
        if set(point) != set(self.names):
            return None
        try:
            row = tuple(knob.levels.index(point[knob.name]) for knob in self.knobs)
        # No such level: the point is not of this space, which is an answer and no fault.
        except ValueError:
            return None
        return self._positions.get(row)

    def index(self, point: Mapping[str, Level]) -> int:
        """Return the row number of a point.

        Raises:
            InvalidInput: If the point is not in the space.
        """
        found = self._find(point)
        if found is None:
            raise InvalidInput(f"{dict(point)} is not a point of this space of {len(self)}")
        return found

    def knob(self, name: str) -> Knob:
        """Return the knob of that name, however it is spelled (`units.knob_name`).

        Raises:
            UnknownName: If the space has no such knob.
        """
        for knob in self.knobs:
            if knob.name in (name, knob_name(name)):
                return knob
        raise unknown_knob(name, self.names)

    def column(self, name: str) -> NDArray[np.float64]:
        """Return the level of one numeric knob at every point, shape (points,), in the knob's unit."""
        import numpy as np

        knob = self.knob(name)
        return np.array(knob.levels, dtype=float)[self.rows[:, self.names.index(name)]]

    def holding(self, names: Iterable[str]) -> SearchSpace:
        """Return the points at which the named knobs keep their default level.

        Raises:
            UnknownName: If a name is not a knob of this space.
        """
        kept = self.indices
        for name in names:
            knob = self.knob(name)
            column = self.names.index(knob.name)
            usual = knob.levels.index(self.default[knob.name])
            kept = tuple(row for row in kept if row[column] == usual)
        return SearchSpace(self.knobs, kept, self.default)

    @property
    def packed(self) -> bytes:
        """All indices in a row, as little-endian 32-bit numbers."""
        numbers = array(_INT32, itertools.chain.from_iterable(self.indices))
        # The fingerprint of a space is to be the same on every machine that reads the journal.
        if sys.byteorder == "big":
            numbers.byteswap()
        return numbers.tobytes()

    @property
    def fingerprint(self) -> str:
        """A digest of knobs, points and default: two spaces are the same exactly when it is."""
        import hashlib  # loads OpenSSL: megabytes that what only passes points on need not hold

        digest = hashlib.sha256()
        for knob in self.knobs:
            digest.update(repr((knob.name, knob.levels, knob.label)).encode())
        digest.update(self.packed)
        digest.update(repr(self.default).encode())
        return digest.hexdigest()[:16]
