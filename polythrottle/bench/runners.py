"""What the figure of a benchmark shows of each method: curves of regret, and what it needed and broke."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from polythrottle.bench.searching import Record
from polythrottle.bench.summary import by_method, by_subject, interval


@dataclass(frozen=True)
class Runner:
    """What one method did, over all its searches.

    Args:
        name: Of the method.
        low: Lower quartile of the regret after each trial; infinite while no feasible point is known.
        middle: Its median.
        high: Its upper quartile.
        trials: Mean trials to within 5 %, and the ends of its interval.
        broken: Mean trials before that broke the limit, and the ends of its interval.
    """

    name: str
    low: tuple[float, ...]
    middle: tuple[float, ...]
    high: tuple[float, ...]
    trials: tuple[float, float, float]
    broken: tuple[float, float, float]


def runners(records: Sequence[Record]) -> list[Runner]:
    """Return what the figure shows of each method, in the order of the records."""
    return [_runner(method, some) for method, some in by_method(records).items()]


def _runner(method: str, records: Sequence[Record]) -> Runner:
    trials = max(record.trials for record in records)
    curves = np.array([_curve(record.regrets, trials) for record in records])
    low, middle, high = np.quantile(curves, [0.25, 0.5, 0.75], axis=0, method="nearest")
    arrived = _means(records, {id(record): math.log(record.arrived) for record in records})
    broken = _means(records, {id(record): float(record.infeasible_before_5pct) for record in records})
    across, up = np.exp(interval(arrived)).tolist(), interval(broken).tolist()
    return Runner(
        method,
        tuple(low.tolist()),
        tuple(middle.tolist()),
        tuple(high.tolist()),
        (float(np.exp(arrived.mean())), *across),
        (float(broken.mean()), *up),
    )


def _curve(regrets: Sequence[float | None], trials: int) -> list[float]:
    """Return the regret after each trial, infinite while none is feasible, as it stays once a search has ended."""
    told = [math.inf if regret is None else regret for regret in regrets] or [math.inf]
    return [*told, *[told[-1]] * (trials - len(told))]


def _means(records: Sequence[Record], values: Mapping[int, float]) -> NDArray[np.float64]:
    """Return the mean per subject, shape (subjects,)."""
    found = by_subject((record.table, values[id(record)]) for record in records)
    return np.array([statistics.fmean(some) for some in found.values()])
