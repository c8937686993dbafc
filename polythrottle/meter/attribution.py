"""Joules of single requests that overlap, so that they sum exactly to the meter."""

import math
from collections.abc import Sequence

import numpy as np

from polythrottle.errors import InvalidInput
from polythrottle.measurement import Query, Reading


def attribute(queries: Sequence[Query], readings: Sequence[Reading]) -> tuple[tuple[float, ...], float]:
    """Return the energy of each query in joules, and what nobody asked for.

    Between two readings power is taken as even. At every moment it is shared by the queries under way then, by their
    items; while there is none, it goes to nobody: idle. Together these are all the readings counted, to the last bit
    but rounding: the sum is `math.fsum`'s.

    Args:
        queries: Each with the time it was sent, ``start_s``, on the clock of the readings; they may overlap.
        readings: In order of time; energy never falls.

    Raises:
        InvalidInput: If a query does not say when it was sent, there are fewer than two readings, or they go back.
    """
    times, totals = _totals(readings)
    spans = [_span(query) for query in queries]
    cuts = np.unique(np.concatenate([times, np.clip(np.ravel(spans), times[0], times[-1])])) if spans else times
    gains = np.diff(np.interp(cuts, times, totals))
    weights, under_way = np.zeros(len(cuts) - 1), []
    for query, (start_s, end_s) in zip(queries, spans, strict=True):
        first, last = np.searchsorted(cuts, [max(start_s, times[0]), min(end_s, times[-1])])
        weights[first:last] += query.items
        under_way.append((first, max(first, last)))
    per_item = np.divide(gains, weights, out=np.zeros_like(gains), where=weights > 0)
    shares = [float(q.items * per_item[first:last].sum()) for q, (first, last) in zip(queries, under_way, strict=True)]
    return tuple(shares), float(totals[-1] - totals[0]) - math.fsum(shares)


def _totals(readings: Sequence[Reading]) -> tuple[np.ndarray[tuple[int], np.dtype[np.float64]], ...]:
    times = np.array([reading.time_s for reading in readings], dtype=float)
    totals = np.array([reading.energy_j for reading in readings], dtype=float)
    if len(times) < 2 or np.any(np.diff(times) < 0) or np.any(np.diff(totals) < 0) or times[0] == times[-1]:
        raise InvalidInput("energy is shared between two readings or more, of which none goes back")
    return times, totals


def _span(query: Query) -> tuple[float, float]:
    if query.start_s is None:
        raise InvalidInput("a query without the time it was sent cannot be given its share of energy")
    return query.start_s, query.start_s + query.latency_s
