"""What the records of a benchmark amount to: means per method, ratios with intervals.

Curves of regret for its figure.
"""

import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from polythrottle.lab.bench.contest import Record

if TYPE_CHECKING:
    import pandas as pd

# What the records of a benchmark amount to: means per method, ratios with intervals.

YARDSTICK = "paper"
SAMPLERS = ("tpe", "gp")
"""The methods that are Optuna's."""
_RESAMPLES = 2000
Interval = tuple[float, float]


@dataclass(frozen=True)
class Summary:
    """What the records of one method amount to.

    Args:
        method: Who searched, as in the records.
        runs: How many searches.
        share_within_5pct: Of the searches that came within 5 %.
        trials_to_5pct: Geometric mean; see `Record.arrived`.
        infeasible_before_5pct: Mean.
        final_regret: Mean over the searches that found a feasible point.
        suggest_seconds: Median.
        ratio_to_paper: Of the trials, paired by subject, SLO and seed; None without the paper's method.
        ratio_interval: Its 95 % bootstrap interval over subjects.
        ratio_to_optuna: The same over whichever of Optuna's samplers needs the fewest trials here; None without any.
        optuna_interval: Its 95 % bootstrap interval over subjects.
        infeasible: Mean of all trials that broke the limit.
        share_broken_after_two: Of the searches that broke the limit once two feasible points had been visited.
        excess_total: Mean of the sum of fractions by which the limit was broken.
        regret_30: Mean after 30 trials, as ``final_regret``; None if fewer were allowed.
        history: Mean number of earlier studies given.
    """

    method: str
    runs: int
    share_within_5pct: float
    trials_to_5pct: float
    infeasible_before_5pct: float
    final_regret: float | None
    suggest_seconds: float
    ratio_to_paper: float | None = None
    ratio_interval: Interval | None = None
    ratio_to_optuna: float | None = None
    optuna_interval: Interval | None = None
    infeasible: float = 0.0
    share_broken_after_two: float = 0.0
    excess_total: float = 0.0
    regret_30: float | None = None
    history: float = 0.0


def summarise(records: Sequence[Record]) -> list[Summary]:
    """Return the summary of each method, in the order of the records."""
    methods = by_method(records)
    samplers = [name for name in SAMPLERS if name in methods]
    best = min(samplers, key=lambda name: _trials(methods[name]), default=None)
    paper = methods.get(YARDSTICK)
    optuna = None if best is None else methods[best]
    return [_summary(method, some, paper, optuna) for method, some in methods.items()]


def by_method(records: Sequence[Record]) -> dict[str, list[Record]]:
    """Return the records of each method, in their order."""
    methods: dict[str, list[Record]] = {}
    for record in records:
        methods.setdefault(record.method, []).append(record)
    return methods


def _trials(records: Sequence[Record]) -> float:
    return statistics.geometric_mean(record.arrived for record in records)


def _summary(
    method: str, records: Sequence[Record], paper: Sequence[Record] | None, optuna: Sequence[Record] | None
) -> Summary:
    ratio, interval = (None, None) if paper is None else _ratio(records, paper)
    to_optuna, optuna_interval = (None, None) if optuna is None else _ratio(records, optuna)
    return Summary(
        method,
        len(records),
        statistics.fmean(record.trials_to_5pct is not None for record in records),
        _trials(records),
        statistics.fmean(record.infeasible_before_5pct for record in records),
        _mean([record.final_regret for record in records]),
        statistics.median(record.suggest_seconds_median for record in records),
        ratio,
        interval,
        to_optuna,
        optuna_interval,
        statistics.fmean(record.infeasible for record in records),
        statistics.fmean(record.infeasible_after_two_feasible > 0 for record in records),
        statistics.fmean(record.excess_total for record in records),
        _mean([record.regret_30 for record in records]),
        statistics.fmean(record.history for record in records),
    )


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    if known:
        return statistics.fmean(known)
    return None


def _ratio(records: Sequence[Record], yardstick: Sequence[Record]) -> tuple[float | None, Interval | None]:
    """Return the geometric mean of trials over the yardstick's and its 95 % interval, over what both have searched."""
    against = {(record.table, record.slo, record.seed): record.arrived for record in yardstick}
    pairs = [(one, against.get((one.table, one.slo, one.seed))) for one in records]
    logs = by_subject((one.table, math.log(one.arrived / other)) for one, other in pairs if other is not None)
    if not logs:
        return None, None
    means = np.array([statistics.fmean(some) for some in logs.values()])
    low, high = np.exp(interval(means)).tolist()
    return math.exp(float(means.mean())), (low, high)


def by_subject(values: Iterable[tuple[str, float]]) -> dict[str, list[float]]:
    """Return the values of each subject."""
    found: dict[str, list[float]] = {}
    for name, value in values:
        found.setdefault(name, []).append(value)
    return found


def interval(means: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the 95 % bootstrap interval of the mean of means per subject, shape (2,), resampling whole subjects."""
    draws = np.random.default_rng(0).choice(means, (_RESAMPLES, len(means))).mean(axis=1)
    found: NDArray[np.float64] = np.quantile(draws, [0.025, 0.975])
    return found


class Run(Protocol):
    """One search of a benchmark, whatever is told of it."""

    @property
    def family(self) -> str:
        """The source of its table, or ``sim``."""

    @property
    def slo(self) -> str:
        """The limit, as text."""


R = TypeVar("R", bound=Run)


def groups(records: Sequence[R]) -> Iterator[tuple[str, list[R]]]:
    """Yield the records of each family, of each SLO, and all, with what they have in common."""
    keys: tuple[Callable[[R], str], ...] = (lambda record: record.family, lambda record: record.slo)
    for key in keys:
        for name, some in itertools.groupby(sorted(records, key=key), key):
            yield name, list(some)
    yield "all", list(records)


def to_dataframe(records: Sequence[Record]) -> "pd.DataFrame":
    """Return a pandas frame with a row for each search: the fields of `Record` but for regret trial by trial."""
    import pandas as pd

    names = [one.name for one in fields(Record) if one.name != "regrets"]
    values = {name: [getattr(record, name) for record in records] for name in names}
    whole = dict.fromkeys(("trials_to_5pct", "trials_to_1pct"), "Int64")
    real = dict.fromkeys(("final_regret", "regret_30"), "float64")
    frame: pd.DataFrame = pd.DataFrame(values).astype({**whole, **real})
    return frame


def document(records: Sequence[Record]) -> dict[str, Any]:
    """Return the JSON document of a benchmark."""
    return {
        "records": [asdict(record) for record in records],
        "methods": {summary.method: asdict(summary) for summary in summarise(records)},
    }


# What the figure of a benchmark shows of each method: curves of regret, and what it needed and broke.


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
    across = np.exp(interval(arrived)).tolist()
    up = interval(broken).tolist()
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
