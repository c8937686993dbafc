"""Joules of single requests that overlap, so that they sum exactly to the meter."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from polythrottle.errors import InvalidInput
from polythrottle.measurement import Query, Reading

Array = NDArray[np.float64]
_ROUNDING_S, _LEAST_S = 1e-9, 1e-15


@dataclass(frozen=True)
class Share:
    """What one request took of a window.

    Args:
        intended_s: When it was meant to be sent, in seconds since the window began; negative if before.
        start_s: When it was sent, or taken out of the queue before a single server.
        end_s: When its answer was there; beyond the window's end if after.
        within: The share of the time between the two that lay in the window: 1 but for requests at its edges.
        items: How many.
        energy_j: Its own part of the energy read while it was under way in the window.
        idle_share_j: Its part, by items, of what nobody asked for; 0 if its answer came after the window.
    """

    intended_s: float
    start_s: float
    end_s: float
    within: float
    items: int
    energy_j: float
    idle_share_j: float


@dataclass(frozen=True)
class Attribution:
    """The energy of a window, request by request.

    Args:
        requests: All that were under way in it, in the order in which they were meant to be sent.
        idle_j: What was read while none was.
        window_s: How long it was.
    """

    requests: tuple[Share, ...]
    idle_j: float
    window_s: float

    @property
    def meter_j(self) -> float:
        """The energy read over the window: that of all requests and idle, to the last bit of a float."""
        return math.fsum([*(request.energy_j for request in self.requests), self.idle_j])


def attributed(
    queries: Sequence[Query], readings: Sequence[Reading], factor: float = 1.0, idle_power_w: float | None = None
) -> Attribution:
    """Return what each request took of a window, as `attribute` shares it.

    Args:
        queries: All that were under way in the window, and any others.
        readings: Of the window, in order of time.
        factor: What the joules of the readings are multiplied by to be those of a reference meter.
        idle_power_w: As that meter has it; None if it is not known.

    Raises:
        InvalidInput: As `attribute`; or if nobody says when the queries were under way that one run answered.
    """
    if any(query.more for query in queries):
        raise InvalidInput("a command that prints latencies does not say when each was; leave --attribute out")
    begin_s, end_s = readings[0].time_s, readings[-1].time_s
    inside = [query for query in queries if _within(query, begin_s, end_s) > 0]
    ordered = sorted(inside, key=lambda query: query.start_s or 0.0)
    scaled = [replace(reading, energy_j=reading.energy_j * factor) for reading in readings]
    shares_j, idle_j = attribute(ordered, scaled, idle_power_w)
    answered = [query.items if _span(query)[1] <= end_s + _ROUNDING_S else 0 for query in ordered]
    each_j = idle_j / max(1, sum(answered))
    requests = (
        Share(
            (query.start_s or 0.0) - begin_s,
            _span(query)[0] - begin_s,
            _span(query)[1] - begin_s,
            _within(query, begin_s, end_s),
            query.items,
            share_j,
            items * each_j,
        )
        for query, share_j, items in zip(ordered, shares_j, answered, strict=True)
    )
    return Attribution(tuple(requests), idle_j, end_s - begin_s)


def attribute(
    queries: Sequence[Query], readings: Sequence[Reading], idle_power_w: float | None = None
) -> tuple[tuple[float, ...], float]:
    """Return the energy of each query in joules, and what nobody asked for.

    At every moment power is shared by the queries under way then, by their items; while there is none, it goes to
    nobody: idle. Between two readings power is even but for the time in which no query is under way, which takes the
    power of the idle device, if that is known and below the mean of all. A query is under way from when it was sent;
    while it still waits for others, or in a queue before a single server, it takes nothing. Together these are all the
    readings counted: what rounding leaves over goes to the largest share, so that `math.fsum` of all is what was read.

    Args:
        queries: Each with the time it was meant to be sent, ``start_s``, on the clock of the readings; they may
            overlap.
        readings: In order of time; energy never falls.
        idle_power_w: What the device draws without work; None if it is not known, for power that is even throughout.

    Raises:
        InvalidInput: If a query does not say when it was sent, there are fewer than two readings, or they go back.
    """
    times, totals = _totals(readings)
    spans = [_span(query) for query in queries]
    cuts = np.unique(np.concatenate([times, np.clip(np.ravel(spans), times[0], times[-1])])) if spans else times
    weights, under_way = np.zeros(len(cuts) - 1), []
    for query, (start_s, end_s) in zip(queries, spans, strict=True):
        first, last = np.searchsorted(cuts, [max(start_s, times[0]), min(end_s, times[-1])])
        weights[first:last] += query.items
        under_way.append((first, max(first, last)))
    gains = _gains(times, totals, cuts, weights == 0, math.inf if idle_power_w is None else idle_power_w)
    per_item = np.divide(gains, weights, out=np.zeros_like(gains), where=weights > 0)
    shares = [float(q.items * per_item[first:last].sum()) for q, (first, last) in zip(queries, under_way, strict=True)]
    return _exactly(shares, math.fsum(gains[weights == 0]), readings[-1].energy_j - readings[0].energy_j)


def _gains(times: Array, totals: Array, cuts: Array, idle: NDArray[np.bool_], idle_w: float) -> Array:
    """Return the energy between every two cuts, shape (cuts - 1,).

    Args:
        times: Of the readings, rising.
        totals: Their energies, never falling.
        cuts: All of those times and others, rising.
        idle: Where nothing was under way between two cuts, shape (cuts - 1,).
        idle_w: Power there, as far as between two readings there is so much.
    """
    widths, gains = np.diff(cuts), np.diff(totals)
    mean_w = gains / np.diff(times)
    if idle_w > (totals[-1] - totals[0]) / (times[-1] - times[0]):
        return np.diff(np.interp(cuts, times, totals))
    between = np.searchsorted(times, cuts[:-1], side="right") - 1
    idle_s, busy_s = (np.bincount(between, widths * where, len(gains)) for where in (idle, ~idle))
    calm_w = np.where(busy_s > 0, np.minimum(idle_w, gains / np.maximum(idle_s, _LEAST_S)), mean_w)
    busy_w = np.maximum(gains - calm_w * idle_s, 0.0) / np.maximum(busy_s, _LEAST_S)
    return np.asarray(np.where(idle, calm_w[between], busy_w[between]) * widths)


def _exactly(shares_j: list[float], idle_j: float, total_j: float) -> tuple[tuple[float, ...], float]:
    """Return shares and idle that sum to a total; what rounding leaves over goes to the largest of them.

    The sum of the largest and what is left over is rounded too, and what that leaves goes to the next.
    """
    parts_j = [idle_j, *shares_j]
    for place in sorted(range(len(parts_j)), key=lambda place: -parts_j[place]):
        left_j = math.fsum([total_j, *(-part_j for part_j in parts_j)])
        if left_j == 0:
            break
        parts_j[place] += left_j
    return tuple(parts_j[1:]), parts_j[0]


def _totals(readings: Sequence[Reading]) -> tuple[Array, Array]:
    times = np.array([reading.time_s for reading in readings], dtype=float)
    totals = np.array([reading.energy_j for reading in readings], dtype=float)
    if len(times) < 2 or np.any(np.diff(times) < 0) or np.any(np.diff(totals) < 0) or times[0] == times[-1]:
        raise InvalidInput("energy is shared between two readings or more, of which none goes back")
    last = np.append(np.diff(times) > 0, True)  # of readings at the same moment
    return times[last], totals[last]


def _span(query: Query) -> tuple[float, float]:
    """Return from when to when a query was under way."""
    if query.start_s is None:
        raise InvalidInput("a query without the time it was sent cannot be given its share of energy")
    return query.start_s if query.sent_s is None else query.sent_s, query.start_s + query.latency_s


def _within(query: Query, begin_s: float, end_s: float) -> float:
    """Return the share of a query's time that lies between two moments."""
    first_s, last_s = _span(query)
    whole_s, inside_s = last_s - first_s, min(last_s, end_s) - max(first_s, begin_s)
    return round(inside_s / whole_s, 9) if inside_s > 0 else 0.0
