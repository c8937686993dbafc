"""How good a search method is: trials, broken limits and energy it takes on subjects whose optimum is known.

A subject is a recorded table, or a simulated board with a model. Every search runs through the optimiser's port alone.
"""

import glob
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from polythrottle.backends.replay import Table
from polythrottle.errors import BadFile, InvalidInput
from polythrottle.optimize import make_optimizer
from polythrottle.problem import Constraint, Problem
from polythrottle.study import Study, Trial

ITEMS_PER_TRIAL = 1000
"""Items a trial is taken to serve when its energy is counted: the paper's requests per configuration."""
YARDSTICK = "paper"
_RESAMPLES = 2000


@dataclass(frozen=True)
class Record:
    """How one search went.

    Args:
        table: Name of the subject; what stands before ``__`` is its family.
        slo: The limit, as text.
        method: Name of the method.
        seed: Of the study.
        trials: How many were allowed.
        trials_to_5pct: Trials until the best feasible one was within 5 % of the best feasible row; None if never.
        trials_to_1pct: The same for 1 %.
        infeasible_before_5pct: Trials before then (or at all) that broke the limit.
        final_regret: Energy of the best feasible trial at the end over that of the best row, less one; None if none.
        search_energy_j: Energy of all trials, each taken to serve `ITEMS_PER_TRIAL` items.
        suggest_seconds_median: Median time of one suggestion.
    """

    table: str
    slo: str
    method: str
    seed: int
    trials: int
    trials_to_5pct: int | None
    trials_to_1pct: int | None
    infeasible_before_5pct: int
    final_regret: float | None
    search_energy_j: float
    suggest_seconds_median: float

    @property
    def family(self) -> str:
        """The source of the table."""
        return self.table.partition("__")[0]

    @property
    def arrived(self) -> float:
        """Trials to within 5 %; one and a half times those allowed, and at least 45, if it never came there."""
        return float(self.trials_to_5pct or max(45.0, 1.5 * self.trials))


def tables(pattern: str) -> list[Path]:
    """Return the tables a folder, a file or a pattern means, sorted.

    Raises:
        BadFile: If it means none.
    """
    path = Path(pattern)
    found = [*path.glob("*.csv"), *path.glob("*.csv.gz")] if path.is_dir() else map(Path, glob.glob(pattern))
    files = sorted(path for path in found if path.is_file())
    if not files:
        raise BadFile(f"{pattern} means no table; give a folder, a file or a pattern of .csv or .csv.gz tables")
    return files


def search(path: Path, slo: str, method: str, seed: int, trials: int) -> Record:
    """Search one table to the end and say how it went.

    Raises:
        InvalidInput: If the table does not record what the SLO bounds, or no row holds it.
    """
    problem, recorded, best_j = _subject(path, slo)
    study, optimizer, times = Study(problem, method, seed), make_optimizer(method), []
    regrets, infeasible = [], []
    for number in range(min(trials, len(problem.space))):
        start = time.perf_counter()
        point = optimizer.suggest(study)
        times.append(time.perf_counter() - start)
        study = study.with_trial(Trial(number, point, recorded[point]))
        best = study.best
        regrets.append(best.measurement.energy_j / best_j - 1.0 if best and best.measurement else math.inf)
        infeasible.append(len(study.infeasible))
    near, close = _first_below(regrets, 0.05), _first_below(regrets, 0.01)
    return Record(
        table=path.name,
        slo=slo,
        method=method,
        seed=seed,
        trials=trials,
        trials_to_5pct=near,
        trials_to_1pct=close,
        infeasible_before_5pct=infeasible[(near or len(infeasible)) - 1],
        final_regret=regrets[-1] if math.isfinite(regrets[-1]) else None,
        search_energy_j=ITEMS_PER_TRIAL
        * sum(trial.measurement.energy_j for trial in study.trials if trial.measurement),
        suggest_seconds_median=statistics.median(times),
    )


@lru_cache(maxsize=8)
def _subject(path: Path, slo: str) -> tuple[Problem, Mapping[Any, Any], float]:
    """Return the problem a table poses, what it records at each point, and the energy of the best feasible row."""
    table, constraint = Table.read(path), Constraint.parse(slo)
    fastest = table.fastest.metric(constraint.metric)
    missing = [m for m in table.measurements if m.metric(constraint.metric) is None]
    if missing or fastest is None:
        raise InvalidInput(f"{path.name} does not record {constraint.metric} in every row, so {slo} cannot be judged")
    absolute = constraint.resolved(fastest)
    feasible = [m.energy_j for m in table.measurements if absolute.slack(m) >= 0]
    if not feasible:
        raise InvalidInput(f"no row of {path.name} holds {slo}")
    problem = Problem(table.space, (constraint,), f"replay:{path.name}", "recorded", {constraint.metric: fastest})
    return problem, dict(zip(table.points, table.measurements, strict=True)), min(feasible)


def _first_below(regrets: Sequence[float], most: float) -> int | None:
    return next((number for number, regret in enumerate(regrets, start=1) if regret <= most), None)


def run(
    paths: Sequence[Path],
    slos: Sequence[str],
    methods: Sequence[str],
    seeds: int,
    trials: int,
    jobs: int = 1,
    advanced: Callable[[int, int], None] = lambda done, total: None,
) -> list[Record]:
    """Run every search of a benchmark.

    Args:
        paths: Tables.
        slos: Limits, each a problem of its own on every table.
        methods: Names of search methods.
        seeds: How many seeds, from 0 on.
        trials: How many trials each search makes.
        jobs: How many processes share the work.
        advanced: Told how many searches of how many are done.

    Raises:
        PolythrottleError: If a method, an SLO or a table is not what it should be.
    """
    if min(seeds, trials, jobs) < 1:
        raise InvalidInput("seeds, trials and jobs must be at least 1")
    for method in methods:
        make_optimizer(method)
    tasks = list(itertools.product(paths, slos, methods, range(seeds), (trials,)))
    records = []
    with ProcessPoolExecutor(jobs) as pool:
        for record in pool.map(search, *zip(*tasks, strict=True), chunksize=1):
            records.append(record)
            advanced(len(records), len(tasks))
    return records


@dataclass(frozen=True)
class Summary:
    """What the records of one method amount to.

    Args:
        method: Its name.
        runs: How many searches.
        share_within_5pct: Of the searches that came within 5 %.
        trials_to_5pct: Geometric mean; see `Record.arrived`.
        infeasible_before_5pct: Mean.
        final_regret: Mean over the searches that found a feasible row.
        suggest_seconds: Median.
        ratio_to_paper: Of the trials, paired by table, SLO and seed; None without the paper's method.
        ratio_interval: Its 95 % bootstrap interval over tables.
    """

    method: str
    runs: int
    share_within_5pct: float
    trials_to_5pct: float
    infeasible_before_5pct: float
    final_regret: float
    suggest_seconds: float
    ratio_to_paper: float | None = None
    ratio_interval: tuple[float, float] | None = None


def summarise(records: Sequence[Record]) -> list[Summary]:
    """Return the summary of each method, in the order of the records."""
    by_method: dict[str, list[Record]] = {}
    for record in records:
        by_method.setdefault(record.method, []).append(record)
    yardstick = by_method.get(YARDSTICK)
    return [_summary(method, some, yardstick) for method, some in by_method.items()]


def _summary(method: str, records: Sequence[Record], yardstick: Sequence[Record] | None) -> Summary:
    regrets = [record.final_regret for record in records if record.final_regret is not None]
    ratio, interval = (None, None) if yardstick is None else _ratio(records, yardstick)
    return Summary(
        method,
        len(records),
        statistics.fmean(record.trials_to_5pct is not None for record in records),
        statistics.geometric_mean(record.arrived for record in records),
        statistics.fmean(record.infeasible_before_5pct for record in records),
        statistics.fmean(regrets) if regrets else math.inf,
        statistics.median(record.suggest_seconds_median for record in records),
        ratio,
        interval,
    )


def _ratio(records: Sequence[Record], yardstick: Sequence[Record]) -> tuple[float, tuple[float, float]]:
    """Return the geometric mean of trials over the yardstick's, and its 95 % interval, resampling whole tables."""
    against = {(record.table, record.slo, record.seed): record.arrived for record in yardstick}
    logs: dict[str, list[float]] = {}
    for record in records:
        logs.setdefault(record.table, []).append(
            math.log(record.arrived / against[record.table, record.slo, record.seed])
        )
    means = np.array([statistics.fmean(some) for some in logs.values()])
    draws = np.random.default_rng(0).choice(means, (_RESAMPLES, len(means))).mean(axis=1)
    low, high = np.exp(np.quantile(draws, [0.025, 0.975])).tolist()
    return math.exp(float(means.mean())), (low, high)


def groups(records: Sequence[Record]) -> Iterator[tuple[str, list[Record]]]:
    """Yield the records of each family, of each SLO, and all, with what they have in common."""
    for key in (lambda record: record.family, lambda record: record.slo):
        for name, some in itertools.groupby(sorted(records, key=key), key):
            yield name, list(some)
    yield "all", list(records)


def document(records: Sequence[Record]) -> dict[str, Any]:
    """Return the JSON document of a benchmark."""
    return {
        "records": [asdict(record) for record in records],
        "methods": {summary.method: asdict(summary) for summary in summarise(records)},
    }
