"""Where the trials of an earlier study lie among the points of another space, and on what scale.

Knobs are matched by name: what is left of it without its unit and without words that only say "the clock", so that
``gpu_max_hz`` is the ``gpu_freq_mhz`` of another space. Levels of the same knob are compared as they are where they can
be: on the same device, for plain counts such as a batch size, or if the spaces share half of the levels. Otherwise both
count from their highest level, as clocks of different chips do. A knob that one side lacks stays at its default there.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from polythrottle.optimize.features import Array, Coordinates, log_levels
from polythrottle.problem import Problem
from polythrottle.space import Knob, SearchSpace

_UNITS = {"hz": 1.0, "khz": 1e3, "mhz": 1e6, "ghz": 1e9, "w": 1.0, "mw": 1e-3, "kw": 1e3}
_SILENT = frozenset({"freq", "frequency", "clock", "max", *_UNITS})
_SAME = 0.005
"""Levels within half a per cent are the same level."""


@dataclass(frozen=True, eq=False)
class Common:
    """The points of an earlier study's space and those of a target space, in the target's coordinates.

    Args:
        knobs: Those of the target, then those that only the earlier space has.
        where: The earlier points, then the target's; shape (earlier + points, columns).
    """

    knobs: tuple[Knob, ...]
    where: Coordinates


@dataclass(frozen=True, eq=False)
class _Column:
    """One knob at the points of both spaces.

    Args:
        knob: The target's if it has it.
        levels: For an ordered knob logarithms, on the target's scale; else numbers of labels; shape (points,).
        default: The same at the target's default.
        ends: Range that spans 0 to 1 in the unit cube.
        labels: How many labels there are; 0 for an ordered knob.
    """

    knob: Knob
    levels: Array
    default: float
    ends: tuple[float, float]
    labels: int = 0

    @property
    def unit(self) -> Array:
        """Coordinates for distances, shape (points, columns)."""
        if self.labels > 1:
            return np.asarray(np.eye(self.labels)[self.levels.astype(int)] / math.sqrt(2.0))
        low, high = self.ends
        return (
            np.asarray((self.levels - low) / (high - low))[:, None] if high > low else np.zeros((len(self.levels), 0))
        )


def common(earlier: Problem, target: Problem) -> Common:
    """Return the points of both problems' spaces in one system of coordinates."""
    same_device = bool(target.device) and earlier.device == target.device
    columns = [_column(old, new, earlier.space, target.space, same_device) for old, new in _pairs(earlier, target)]
    ordered = [np.zeros(len(column.levels)) if column.labels else column.levels - column.default for column in columns]
    count = len(earlier.space) + len(target.space)
    offset = np.column_stack(ordered) if columns else np.zeros((count, 0))
    span = np.array([high - low for low, high in (column.ends for column in columns)])
    unit = np.hstack([column.unit for column in columns]) if columns else np.zeros((count, 0))
    where = Coordinates(unit, np.clip(offset, -8.0, 8.0), np.where(span > 0, span, 1.0))
    return Common(tuple(column.knob for column in columns), where)


def _pairs(earlier: Problem, target: Problem) -> list[tuple[Knob | None, Knob | None]]:
    """Return each knob of either space with its like in the other: the target's first, in order."""
    left = list(earlier.space.knobs)
    pairs: list[tuple[Knob | None, Knob | None]] = []
    for knob in target.space.knobs:
        like = _like(knob, left)
        pairs.append((like, knob))
        left = [other for other in left if other is not like]
    return pairs + [(knob, None) for knob in left]


def _like(knob: Knob, others: Sequence[Knob]) -> Knob | None:
    """Return the knob of the same name, or else the only one that means the same."""
    same = [other for other in others if other.name == knob.name]
    means = [other for other in others if _stem(other) == _stem(knob)]
    return same[0] if same else means[0] if len(means) == 1 else None


def _stem(knob: Knob) -> tuple[str, ...]:
    return tuple(word for word in knob.name.lower().split("_") if word not in _SILENT)


def _column(
    old: Knob | None, new: Knob | None, earlier: SearchSpace, target: SearchSpace, same_device: bool
) -> _Column:
    """Return one knob at the points of both spaces."""
    knob = new or old
    assert knob is not None
    if not all(one.ordered for one in (old, new) if one):
        return _labels(knob, old, new, earlier, target)
    theirs, ours = _logs(old), _logs(new)
    if old and new:
        theirs = theirs + _shift(old, new, theirs, ours, same_device)
    at_theirs, at_ours = _at(earlier, old, theirs), _at(target, new, ours)
    stock = ours[_stock(target, new)] if new else theirs[_stock(earlier, old)]
    before = at_theirs if old else np.full(len(earlier), stock)
    after = at_ours if new else np.full(len(target), stock)
    spread = ours if np.ptp(ours) > 0 else theirs
    return _Column(knob, np.concatenate([before, after]), float(stock), (float(spread.min()), float(spread.max())))


def _labels(knob: Knob, old: Knob | None, new: Knob | None, earlier: SearchSpace, target: SearchSpace) -> _Column:
    """Return a knob whose levels are names in at least one of the spaces."""
    names = sorted({str(level) for one in (old, new) if one for level in one.levels})
    places = [np.array([names.index(str(level)) for level in one.levels], float) if one else None for one in (old, new)]
    stock = float(names.index(str(target.default[new.name] if new else earlier.default[knob.name])))
    before = _at(earlier, old, places[0]) if old and places[0] is not None else np.full(len(earlier), stock)
    after = _at(target, new, places[1]) if new and places[1] is not None else np.full(len(target), stock)
    shown = Knob(knob.name, knob.levels, label=True)
    return _Column(shown, np.concatenate([before, after]), stock, (0.0, 1.0), len(names))


def _logs(knob: Knob | None) -> Array:
    """Return the logarithms of a knob's levels in SI units, shape (levels,)."""
    if knob is None:
        return np.zeros(1)
    unit = _UNITS.get(knob.name.lower().rpartition("_")[2], 1.0)
    return np.asarray(log_levels(knob) + math.log(unit))


def _at(space: SearchSpace, knob: Knob | None, levels: Array) -> Array:
    return levels[space.rows[:, space.knobs.index(knob)]] if knob else np.zeros(len(space))


def _stock(space: SearchSpace, knob: Knob | None) -> int:
    return knob.levels.index(space.default[knob.name]) if knob else 0


def _shift(old: Knob, new: Knob, theirs: Array, ours: Array, same_device: bool) -> float:
    """Return what is added to the logarithms of the earlier levels: 0, or what brings the highest levels together."""
    shared = sum(bool(np.abs(ours - level).min() <= _SAME) for level in theirs)
    meet = theirs.min() <= ours.max() and ours.min() <= theirs.max()
    counts = new.name.lower().rpartition("_")[2] not in _UNITS
    as_they_are = 2 * shared >= min(len(theirs), len(ours)) or (meet and (same_device or counts))
    return 0.0 if as_they_are else float(ours.max() - theirs.max())
