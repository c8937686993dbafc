"""Where the points of a space lie as numbers a model can use, which of them are left to try.

Where the trials of another space lie among them.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from polythrottle.domain.errors import Exhausted
from polythrottle.domain.measurement import EnergyKind
from polythrottle.domain.problem import Problem
from polythrottle.domain.space import BATCH_SIZE, Knob, Level, SearchSpace
from polythrottle.domain.study import Study

# Where the points of a space lie, as numbers a model can use.

Array = NDArray[np.float64]

_FARTHEST = 8.0
"""Levels more than e⁸ = 3,000 times the default count as that far: no trend holds so long."""
_CLOSEST = 1e-6


@dataclass(frozen=True, eq=False)
class Coordinates:
    """The points of a space in two systems of coordinates.

    Args:
        unit: For distances: every knob spans 0 to 1, labels are corners of a simplex whose edges have length 1; shape
            (points, columns).
        offset: For trends: the logarithm of each ordered knob's level over its level at the default point, shape
            (points, knobs); 0 for labels.
        span: The range of each column of ``offset``, shape (knobs,); 1 where it is zero.
    """

    unit: Array
    offset: Array
    span: Array


@lru_cache(maxsize=4)
def coordinates(space: SearchSpace) -> Coordinates:
    """Return the coordinates of every point of a space; computed once per space."""
    tables = [_unit(knob) for knob in space.knobs]
    columns = [table[space.rows[:, k]] for k, table in enumerate(tables)]
    offsets = [_offset(knob, space.default[knob.name])[space.rows[:, k]] for k, knob in enumerate(space.knobs)]
    if columns:
        unit = np.hstack(columns)
    else:
        unit = np.zeros((len(space), 0))
    if offsets:
        offset = np.column_stack(offsets)
    else:
        offset = np.zeros((len(space), 0))
    span = np.ptp(offset, axis=0)
    return Coordinates(unit, offset, np.where(span > 0, span, 1.0))


def _unit(knob: Knob) -> Array:
    """Return a knob's levels as coordinates in the unit cube, shape (levels, columns); no columns if it is constant."""
    if len(knob.levels) == 1:
        return np.zeros((1, 0))
    if not knob.ordered:
        return np.eye(len(knob.levels)) / math.sqrt(2.0)
    scale = log_levels(knob)
    share: Array = (scale - scale[0]) / (scale[-1] - scale[0])
    return share[:, None]


def _offset(knob: Knob, default: Level) -> Array:
    """Return how far each level is from the default's, as a logarithm, shape (levels,)."""
    if not knob.ordered:
        return np.zeros(len(knob.levels))
    scale = log_levels(knob)
    away: Array = np.clip(scale - scale[knob.levels.index(default)], -_FARTHEST, _FARTHEST)
    return away


def log_levels(knob: Knob) -> Array:
    """Return the logarithms of an ordered knob's levels, ascending, shape (levels,).

    A level of zero counts as half the smallest positive one. A knob with negative levels stays linear, scaled to one;
    levels too close to tell apart count as evenly spaced.
    """
    levels = np.array(knob.levels, dtype=float)
    if len(levels) == 1:
        return np.zeros(1)
    if levels[0] < 0:
        scale: Array = levels / np.abs(levels).max()
    else:
        scale = _logs(levels)
    if scale[-1] - scale[0] > _CLOSEST:
        return scale
    return np.linspace(0.0, 1.0, len(levels))


def _logs(levels: Array) -> Array:
    smallest = levels[levels > 0].min()
    logs: Array = np.log(np.maximum(levels, smallest)) - math.log(2.0) * (levels == 0)
    return logs


# What is left to try, and the first thing every method tries.

Rows = NDArray[np.intp]


def visited_rows(study: Study) -> list[int]:
    """Return the row numbers of the points that have been tried, ascending."""
    space = study.problem.space
    return sorted(space.index(point) for point in study.visited if point in space)


def untried_rows(study: Study) -> Rows:
    """Return the row numbers of the points that have not been tried, ascending, shape (remaining,).

    Points for which a knob would have to be set that the device turned out not to have are left out.
    """
    space = study.problem.space
    fresh = np.ones(len(space), dtype=bool)
    fresh[visited_rows(study)] = False
    for name in study.absent & set(space.names):
        column = space.names.index(name)
        fresh &= space.rows[:, column] == space.rows[default_row(space), column]
    return np.flatnonzero(fresh)


def remaining_rows(study: Study) -> Rows:
    """Return the row numbers of the points that have not been tried, ascending, shape (remaining,).

    Raises:
        Exhausted: If there is none.
    """
    rows = untried_rows(study)
    if not len(rows):
        without = ""
        if study.absent:
            without = f" that need no {' and no '.join(sorted(study.absent))}"
        if study.absent:
            count = len(study.visited)
        else:
            count = len(study.problem.space)
        raise Exhausted(f"all {count} points of the space{without} have been tried")
    return rows


_UNBOUND = 1.2
"""A power limit so many times the mean draw, or more, does not bind but for moments."""
IN_WATTS = frozenset({EnergyKind.MEASURED, EnergyKind.SIMULATED})
"""Of which kinds the watts may be held against a power limit in watts."""


def distinct_rows(study: Study, rows: Rows) -> Rows:
    """Return the rows that are not a tried point by another name, ascending.

    Where a device drew far less than its power limit, all limits above that draw are one: on a data-centre GPU most
    points have several such twins, and a search that takes them for others goes through them one by one.

    Args:
        study: What has been measured, and with which draw.
        rows: Of points that have not been tried.
    """
    space = study.problem.space
    kept: Rows = rows
    for column in (place for place, knob in enumerate(space.knobs) if knob.ordered and knob.name.endswith("_limit_w")):
        levels_w = np.array(space.knobs[column].levels, dtype=float)
        for trial in study.completed:
            measured = trial.measurement
            if measured is None or measured.power_w is None or measured.energy_kind not in IN_WATTS:
                continue
            unbound = levels_w >= _UNBOUND * measured.power_w
            if trial.point in space and unbound[(here := space.rows[space.index(trial.point)])[column]]:
                same = space.rows[kept] == here
                same[:, column] = unbound[space.rows[kept, column]]
                kept = kept[~same.all(axis=1)]
    return kept


def generator(study: Study) -> np.random.Generator:
    """Return the randomness of the next trial: a function of the study's seed and the trial's number alone."""
    return np.random.default_rng((study.seed % 2**63, len(study.trials)))


def default_row(space: SearchSpace) -> int:
    """Return the row number of the default point."""
    return space.index(space.default)


# Where the trials of an earlier study lie among the points of another space, and on what scale.
#
# Knobs are matched by name: what is left of it without its unit and without words that only say "the clock", so that
# ``gpu_max_hz`` is the ``gpu_freq_mhz`` of another space. Levels of the same knob are compared as they are where they
# can be: on the same device, for plain counts such as a batch size, or if the spaces share half of the levels.
# Otherwise both count from their highest level, as clocks of different chips do. A knob that one side lacks stays at
# its default there.

_UNITS = {"hz": 1.0, "khz": 1e3, "mhz": 1e6, "ghz": 1e9, "w": 1.0, "mw": 1e-3, "kw": 1e3}
_SILENT = frozenset({"freq", "frequency", "clock", "max", *_UNITS})
_SAME = 0.005
"""Levels within half a per cent are the same level."""


@dataclass(frozen=True, eq=False)
class SharedCoordinates:
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
        if high > low:
            return np.asarray((self.levels - low) / (high - low))[:, None]
        return np.zeros((len(self.levels), 0))


def shared_coordinates(earlier: Problem, target: Problem) -> SharedCoordinates:
    """Return the points of both problems' spaces in one system of coordinates."""
    same_device = bool(target.device) and earlier.device == target.device
    columns = [_column(old, new, earlier.space, target.space, same_device) for old, new in _pairs(earlier, target)]
    ordered = [np.zeros(len(column.levels)) if column.labels else column.levels - column.default for column in columns]
    count = len(earlier.space) + len(target.space)
    if columns:
        offset = np.column_stack(ordered)
    else:
        offset = np.zeros((count, 0))
    span = np.array([high - low for low, high in (column.ends for column in columns)])
    if columns:
        unit = np.hstack([column.unit for column in columns])
    else:
        unit = np.zeros((count, 0))
    where = Coordinates(unit, np.clip(offset, -8.0, 8.0), np.where(span > 0, span, 1.0))
    return SharedCoordinates(tuple(column.knob for column in columns), where)


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
    if same:
        return same[0]
    if len(means) == 1:
        return means[0]
    return None


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
    theirs = _knob_logs(old)
    ours = _knob_logs(new)
    if old and new:
        theirs = theirs + _shift(old, new, theirs, ours, same_device)
    at_theirs = _at(earlier, old, theirs)
    at_ours = _at(target, new, ours)
    if new:
        stock = ours[_stock(target, new)]
    else:
        stock = theirs[_stock(earlier, old)]
    before = at_theirs if old else np.full(len(earlier), stock)
    after = at_ours if new else np.full(len(target), stock)
    spread = ours if np.ptp(ours) > 0 else theirs
    return _Column(knob, np.concatenate([before, after]), float(stock), (float(spread.min()), float(spread.max())))


def _labels(knob: Knob, old: Knob | None, new: Knob | None, earlier: SearchSpace, target: SearchSpace) -> _Column:
    """Return a knob whose levels are names in at least one of the spaces."""
    names = sorted({str(level) for one in (old, new) if one for level in one.levels})
    places = [np.array([names.index(str(level)) for level in one.levels], float) if one else None for one in (old, new)]
    stock = float(names.index(str(target.default[new.name] if new else earlier.default[knob.name])))
    if old and places[0] is not None:
        before = _at(earlier, old, places[0])
    else:
        before = np.full(len(earlier), stock)
    if new and places[1] is not None:
        after = _at(target, new, places[1])
    else:
        after = np.full(len(target), stock)
    shown = Knob(knob.name, knob.levels, label=True)
    return _Column(shown, np.concatenate([before, after]), stock, (0.0, 1.0), len(names))


def _knob_logs(knob: Knob | None) -> Array:
    """Return the logarithms of a knob's levels in SI units, shape (levels,)."""
    if knob is None:
        return np.zeros(1)
    unit = _UNITS.get(knob.name.lower().rpartition("_")[2], 1.0)
    return np.asarray(log_levels(knob) + math.log(unit))


def _at(space: SearchSpace, knob: Knob | None, levels: Array) -> Array:
    if knob:
        return levels[space.rows[:, space.knobs.index(knob)]]
    return np.zeros(len(space))


def _stock(space: SearchSpace, knob: Knob | None) -> int:
    if knob:
        return knob.levels.index(space.default[knob.name])
    return 0


def _shift(old: Knob, new: Knob, theirs: Array, ours: Array, same_device: bool) -> float:
    """Return what is added to the logarithms of the earlier levels: 0, or what brings the highest levels together."""
    shared = sum(bool(np.abs(ours - level).min() <= _SAME) for level in theirs)
    meet = theirs.min() <= ours.max() and ours.min() <= theirs.max()
    counts = new.name.lower().rpartition("_")[2] not in _UNITS
    as_they_are = 2 * shared >= min(len(theirs), len(ours)) or (meet and (same_device or counts))
    if as_they_are:
        return 0.0
    return float(ours.max() - theirs.max())


# What physics says of a knob, whatever the workload.

BATCH_PART = "batch"
CORES = "cpu_cores"
LIMIT_PART = "limit"
UNKNOWN_PART = ""


def part_of(knob: Knob) -> str:
    """Return which part of the work a knob slows; empty if nothing is known of it."""
    if "batch" in knob.name:
        return BATCH_PART
    if knob.name.endswith("_w"):
        return LIMIT_PART
    if knob.is_clock or knob.name == CORES:
        return knob.name.partition("_")[0].rstrip("0123456789")
    return UNKNOWN_PART


def hopeless(study: Study, beyond: float = 1.0) -> NDArray[np.bool_]:
    """Return which points are never faster than one that was too slow, shape (points,).

    Those have no more of any clock or limit, no smaller a batch, and all else is as it was there. Where requests come
    at times of their own, a larger batch may shorten the queue, so there it is as it was too.

    Args:
        study: Whose space it is; every limit has an absolute value.
        beyond: By which factor a limit on a time counts as broken.
    """
    space = study.problem.space
    timed = [each for each in study.constraints if each.timed]
    slower = np.zeros(len(space), dtype=bool)
    for trial in study.completed:
        measurement = trial.measurement
        if measurement is None or trial.point not in space:
            continue
        if any((measurement.metric(each.metric) or 0.0) > beyond * each.limit for each in timed):
            slower |= _never_faster(space, space.index(trial.point), queued=not study.problem.arrivals.closed)
    return slower


def _never_faster(space: SearchSpace, row: int, *, queued: bool) -> NDArray[np.bool_]:
    levels = space.rows
    kept = np.ones(len(space), dtype=bool)
    for column, knob in enumerate(space.knobs):
        here = levels[row, column]
        # A larger budget of tokens to a step, though a batch as well, may bring the first token sooner.
        if knob.name == BATCH_SIZE and knob.ordered and not queued:
            kept &= levels[:, column] >= here
        elif knob.ordered and (part_of(knob) == LIMIT_PART or knob.is_clock):
            kept &= levels[:, column] <= here
        else:
            kept &= levels[:, column] == here
    return kept
