"""What is surely within a limit although nobody has been there: how much slower a point can be than one that was seen.

Loads torch.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from polythrottle.domain.measurement import Measurement
from polythrottle.domain.space import Knob, SearchSpace
from polythrottle.domain.study import Study
from polythrottle.optimize.features import (
    BATCH_PART,
    CORES,
    IN_WATTS,
    LIMIT_PART,
    UNKNOWN_PART,
    Array,
    Rows,
    log_levels,
    part_of,
)
from polythrottle.optimize.quantities import TIME

# How much slower a point can be than one that was measured, whatever the workload.
#
# Serving takes t = Σ a_d / f_d + c, a part for each clock domain, so that a query takes longer by no more than the
# factor of the domain that is slowed most; cores are slowed like the clock they share. A batch takes no more than its
# items one after the other. A power limit that is above what was drawn does nothing, and below that slows no more than
# what is left for work shrinks. More of a clock or a limit never takes longer; of cores it may. Where nothing of that
# bounds what a knob does, as of names, nothing is said, nor of a knob once two trials have contradicted it.

IDLE_SHARE = 0.7
"""Of the lowest power limit, what a device draws before it does any work; assumed, high, as that says more slowdown."""
SLACK_SD = 0.04
SLACK_PER_FOLD = 0.1
"""By how much a point may lie beyond its bound: a deviation, half of it where the bound does not grow, and what it
grows by for each e-fold of the bound; assumed, near what pairs of rows of recorded tables show."""
EDGE_SD = 0.25
"""Beyond what was looked at a quantity may turn steeper, up to its bound, and no trial before the edge foretells it:
the deviation, as a share of what the bound grows by from the nearest trial on. Near that of the trend's hinges."""
UNTRIED_SD = 0.5
"""At a level that no trial had, of a knob of which physics says nothing, such as the name of a cluster of cores, a
quantity may be anything near: the deviation; assumed, as some clusters of a processor take twice as long as others."""
_CERTAIN = 1.6
"""Deviations by which bounds are compared: the lowest is where so much is allowed for."""
_PLAIN = 3.0
"""By how many deviations two trials must contradict a bound for it to be given up."""
_APART = frozenset({BATCH_PART, LIMIT_PART, UNKNOWN_PART})
_NODES = 64
_FARTHEST = 5.0
_LEAST_MASS = 1e-9
_BLOCK = 4096
Levels = NDArray[np.int32]
"""Points by the numbers of their levels, shape (points, knobs)."""
_LATENCIES = frozenset({TIME, "mean"})
_PERCENTILES = frozenset({"p50", "p90", "p95", "p99"})


@dataclass(frozen=True, eq=False)
class Ceiling:
    """An upper bound on a quantity at every point that is itself not quite certain.

    Args:
        mean: Shape (points,); inf where nothing is known.
        deviation: Likewise.
        unlooked: How much less is known of the quantity than a smooth process would have it: a deviation, shape
            (points,).
    """

    mean: Array
    deviation: Array
    unlooked: Array


def bounded(quantity: str) -> bool:
    """Return whether a quantity is a time, which physics bounds from above."""
    return quantity in _LATENCIES or quantity.rpartition("_")[2] in _PERCENTILES


def ceiling(
    study: Study, seen: Rows, values: Array, variances: Array, measurements: Sequence[Measurement], quantity: str
) -> Ceiling:
    """Return how slow each point can be at most, given what was seen at some.

    Args:
        study: Whose space it is.
        seen: Row number of each measured point, shape (trials,).
        values: The quantity there, a logarithm, shape (trials,).
        variances: How uncertain each is, shape (trials,).
        measurements: All there is of those.
        quantity: Its name.
    """
    space = study.problem.space
    mean = np.full(len(space), np.inf)
    deviation = np.zeros(len(space))
    unlooked = _untried(space, seen)
    if not bounded(quantity) or not len(seen):
        return Ceiling(mean, deviation, unlooked)
    growth = _Growth(space, queued=not study.problem.arrivals.closed, per_item=quantity == TIME)
    edge = np.full(len(space), np.inf)
    growth = _Growth(space, not study.problem.arrivals.closed, quantity == TIME)
    growth = replace(growth, doubted=_contradicted(growth, seen, values, variances, measurements))
    for row, value, variance, measurement in zip(seen, values, variances, measurements, strict=True):
        served = growth.of_service(int(row), measurement, space.rows)
        edge = np.minimum(edge, served)
        grown = growth.queued_too(served)
        doubt = _doubt(grown, variance)
        lower = value + grown + _CERTAIN * doubt < mean + _CERTAIN * deviation
        mean = np.where(lower, value + grown, mean)
        deviation = np.where(lower, doubt, deviation)
    return Ceiling(mean, deviation, np.maximum(unlooked, EDGE_SD * np.where(np.isfinite(edge), edge, 0.0)))


def _untried(space: SearchSpace, seen: Rows) -> Array:
    """Return how much less is known at levels that no trial had of knobs of which physics says nothing.

    All at another name; at another number as much as it is an e-fold away. What is added to a clock the model knows.

    Returns:
        A deviation, shape (points,).
    """
    unknown = np.zeros(len(space))
    for column, knob in enumerate(space.knobs):
        if part_of(knob) != UNKNOWN_PART or not len(seen) or knob.name.endswith("_offset_hz"):
            continue
        tried = np.unique(space.rows[seen, column])
        if not knob.ordered or isinstance(knob.levels[0], str):
            away = np.ones(len(knob.levels))
            away[tried] = 0.0
        elif knob.levels[0] > 0:
            logs = log_levels(knob)
            away = np.abs(logs[:, None] - logs[None, tried]).min(axis=1)
        else:
            continue
        unknown = np.maximum(unknown, UNTRIED_SD * np.minimum(away, 1.0)[space.rows[:, column]])
    return unknown


def slowed(study: Study) -> Array:
    """Return by how much each point can be slower than the one that came closest, a logarithm, shape (points,).

    0 where nothing is slowed that physics knows of, inf where it says nothing.

    Args:
        study: Whose space it is; every limit has an absolute value, and none of its trials holds them all.
    """
    space = study.problem.space
    closest = study.closest
    if closest is None or closest.measurement is None or closest.point not in space:
        return np.zeros(len(space))
    growth = _Growth(space, queued=not study.problem.arrivals.closed, per_item=False)
    return growth.of_service(space.index(closest.point), closest.measurement, space.rows)


def _doubt(grown: Array, variance: float) -> Array:
    """Return by how much points may lie beyond their bounds, shape (points,)."""
    slack = np.where(grown > 0, SLACK_SD, 0.5 * SLACK_SD) + SLACK_PER_FOLD * np.where(np.isfinite(grown), grown, 0.0)
    return np.asarray(np.sqrt(slack**2 + variance), dtype=float)


def _contradicted(
    growth: "_Growth", seen: Rows, values: Array, variances: Array, measurements: Sequence[Measurement]
) -> frozenset[str]:
    """Return the knobs that do not do here what physics says, as two trials show that differ in them.

    What a knob is doubted for already explains other pairs that differ in it.
    """
    levels = growth.space.rows[seen]
    broken: list[Rows] = []
    for here, (row, measurement) in enumerate(zip(seen, measurements, strict=True)):
        grown = growth.queued_too(growth.of_service(int(row), measurement, levels))
        beyond = values - values[here] - grown > _PLAIN * np.sqrt(_doubt(grown, variances[here]) ** 2 + variances)
        broken += [np.flatnonzero(levels[there] != levels[here]) for there in np.flatnonzero(beyond)]
    doubted: set[int] = set()
    for columns in sorted(broken, key=len):
        if doubted.isdisjoint(columns.tolist()):
            doubted |= set(columns.tolist())
    return frozenset(growth.space.knobs[column].name for column in doubted)


@dataclass(frozen=True)
class _Growth:
    """By how much a quantity can grow from one point to others.

    Args:
        space: Of the points.
        queued: Whether requests come at times of their own: then a queue may grow by more than service does, and only
            what is not slowed at all is bounded.
        per_item: Whether the quantity is the time of an item instead of a query.
        doubted: Knobs of which nothing is taken for certain.
    """

    space: SearchSpace
    queued: bool
    per_item: bool
    doubted: frozenset[str] = frozenset()

    def of_service(self, row: int, measurement: Measurement, to: Levels) -> Array:
        """Return the logarithm of the factor at other points, queues apart, shape (points,); inf where not bounded.

        Args:
            row: Where was measured.
            measurement: What was.
            to: The points, by the numbers of their levels, shape (points, knobs).
        """
        domains: dict[str, Array] = {}
        for column, knob in enumerate(self.space.knobs):
            if len(knob.levels) > 1:
                levels = self._levels(knob, int(self.space.rows[row, column]), measurement)
                domain = part_of(knob)
                domains[domain] = domains.get(domain, np.zeros(len(to))) + levels[to[:, column]]
        total = np.zeros(len(to))
        clocks = [grown for name, grown in domains.items() if name not in _APART]
        if clocks:
            total = total + np.max(clocks, axis=0)
        for name in sorted(_APART & set(domains)):
            total = total + domains[name]
        return total

    def queued_too(self, served: Array) -> Array:
        """Return the same with what a queue may add."""
        if not self.queued:
            return served
        return np.where(served > 0, np.inf, served)

    def _levels(self, knob: Knob, here: int, measurement: Measurement) -> Array:
        """Return the logarithm of the factor at every level of a knob, shape (levels,)."""
        kind = part_of(knob)
        doubted = kind == UNKNOWN_PART or knob.name in self.doubted
        if doubted or not knob.ordered or isinstance(knob.levels[0], str) or knob.levels[0] <= 0:
            return np.where(np.arange(len(knob.levels)) == here, 0.0, np.inf)
        if kind == LIMIT_PART:
            return self._limits(knob, here, measurement)
        away = log_levels(knob)[here] - log_levels(knob)
        if kind == BATCH_PART and not self.per_item:
            away = -away
        if knob.name == CORES:  # work that is split among more of them may take longer
            away = np.where(away < 0, np.inf, away)
        return np.asarray(np.maximum(away, 0.0))

    def _limits(self, knob: Knob, here: int, measurement: Measurement) -> Array:
        """Return the same of a power limit in watts."""
        levels = np.array(knob.levels, dtype=float)
        drawn = levels[here]
        if not self.queued and measurement.power_w is not None and measurement.energy_kind in IN_WATTS:
            drawn = min(drawn, measurement.power_w)
        idle = IDLE_SHARE * levels[0]
        most = np.log(np.maximum(drawn - idle, 1e-9) / (levels - idle))
        return np.asarray(np.where(np.arange(len(levels)) >= here, 0.0, np.maximum(most, 0.0)))


def log_below(mean: Tensor, deviation: Tensor, limit: float, above: Ceiling) -> Tensor:
    """Return log P(y ≤ limit) of y ~ N(mean, deviation²) that is known to lie below a ceiling z, shape (points,).

    By Bayes P(y > limit | y < z) = ∫ over y > limit of N(y) P(z > y) over the same of all y; both integrals are sums
    over equal steps of y. Where the ceiling contradicts the process, the surer of the two counts.

    Args:
        mean: Shape (points,).
        deviation: Likewise, > 0.
        limit: What is not to be exceeded.
        above: The ceiling.
    """
    most, doubt = torch.from_numpy(above.mean), torch.from_numpy(above.deviation)
    deviation = (deviation.square() + torch.from_numpy(above.unlooked).square()).sqrt()
    found: Tensor = torch.special.log_ndtr((limit - mean) / deviation)
    for block in torch.split(torch.nonzero(torch.isfinite(most)).flatten(), _BLOCK):
        process = (mean[block], deviation[block])
        below = _integral(*process, -math.inf, limit, most[block], doubt[block])
        total = below + _integral(*process, limit, math.inf, most[block], doubt[block])
        ceiled = torch.special.log_ndtr((limit - most[block]) / doubt[block])
        told = torch.where(total > _LEAST_MASS, (below / total.clamp_min(_LEAST_MASS)).clamp(0.0, 1.0).log(), ceiled)
        found[block] = torch.maximum(found[block], told)
    return found


def _integral(mean: Tensor, deviation: Tensor, low: float, high: float, most: Tensor, doubt: Tensor) -> Tensor:
    """Return ∫ N(y; mean, deviation²) P(z > y) dy between two values, shape (points,), by the midpoint rule."""
    first = ((low - mean) / deviation).clamp(-_FARTHEST, _FARTHEST)
    width = ((high - mean) / deviation).clamp(-_FARTHEST, _FARTHEST) - first
    shares = (torch.arange(_NODES, dtype=torch.double) + 0.5) / _NODES
    at = first[:, None] + width[:, None] * shares
    density = (-0.5 * at.square()).exp() / math.sqrt(2.0 * math.pi)
    under = torch.special.ndtr((most[:, None] - mean[:, None] - deviation[:, None] * at) / doubt[:, None])
    area: Tensor = (density * under).sum(dim=1) * width / _NODES
    return area
