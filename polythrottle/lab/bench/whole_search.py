"""Whole searches: each method by its own defaults to its own end, as `polythrottle tune` makes them, and judged there.

The loop is `polythrottle.tuning.tuner`'s, with its journal, its windows that end when they know enough, and its rule
for when to stop. What is judged is the answer, by the truth at its point, and what the way to it cost.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from polythrottle.domain.errors import TrialError
from polythrottle.domain.measurement import Window
from polythrottle.domain.ports import Optimizer
from polythrottle.domain.space import BATCH_SIZE
from polythrottle.domain.study import RECORDED_ITEMS, Study, Trial
from polythrottle.lab.bench.contest import Rules, Task, run_by
from polythrottle.lab.bench.subjects import Source, Subject, subject
from polythrottle.metering.early_stopping import LEAST_QUERIES, SEARCH_PRECISION
from polythrottle.optimize import Options
from polythrottle.storage.atomic_file import temporary_folder
from polythrottle.storage.journal import Journal, ending
from polythrottle.tuning.stopping import Budget, Rule, Surveyor, said_at_most
from polythrottle.tuning.tuner import tune

if TYPE_CHECKING:
    import pandas as pd

TRIALS = Budget().trials
"""What a search may make at most unless it is said."""
WINDOW = Window(LEAST_QUERIES, 0.0, 1000, timeout_s=3600.0, precision=SEARCH_PRECISION)
"""How long `tune` looks where time is virtual: until it knows enough."""
_CLOSE = 0.02
_NEAR = 0.05


@dataclass(frozen=True)
class WholeSearch:
    """What one search came to, from its first trial to its own end; limits and energy are those of the truth.

    Args:
        table: Name of the subject; see `polythrottle.lab.bench.Record`.
        slo: The limit, as text.
        method: Who searched, as `Entrant.parse` reads it.
        seed: Of the study, and of a simulated board's noise.
        history: How many earlier studies the method was given.
        trials: How many it made.
        infeasible: Those of them at points that truly break the limit.
        items_beyond: Items served in those: what users of a live service would have felt.
        search_j: Energy of the search, on the device's meter.
        search_s: Time it took, on the device's clock.
        regret: Energy at the answer over that at the best point that holds, less one; None without an answer.
        holds: Whether the answer truly holds the limit; False without one.
        saved: Share of the default point's energy that the answer saves; 0 without one.
        to_save: Share that the best point saves.
        promised: Share of the answer's energy that was said to be left to save at most; None if unknown.
        ended: Why it ended, in words.
        strayed: Infeasible trials once a point had been tried that truly holds: what a risk is meant to bound.
    """

    table: str
    slo: str
    method: str
    seed: int
    history: int
    trials: int
    infeasible: int
    items_beyond: float
    search_j: float
    search_s: float
    regret: float | None
    holds: bool
    saved: float
    to_save: float
    promised: float | None
    ended: str
    strayed: int

    @property
    def family(self) -> str:
        """The source of the table, or ``sim``."""
        if self.table.startswith("sim:"):
            return "sim"
        return self.table.partition("__")[0]

    def within(self, fraction: float) -> bool:
        """Return whether the answer holds and takes at most this fraction more than the best point."""
        return self.holds and self.regret is not None and self.regret <= fraction


def search_whole(task: Task) -> WholeSearch:
    """Make one search to its own end.

    Args:
        task: Who searches what; of its rules the trials are the most it may make.

    Raises:
        PolythrottleError: If subject, limit, method or history are not what they should be.
    """
    posed = subject(task.source, task.slo)
    entrant = task.entrant
    known = entrant.knows(posed, task.history)
    risk = task.rules.risk if entrant.risk is None else entrant.risk
    optimizer = entrant.optimizer(Options(known, risk if entrant.learns else None, posed.presets))
    device, workload = task.source.open(task.seed)
    problem = replace(posed.problem, window=WINDOW)
    study = Study(problem, entrant.method, task.seed)
    with temporary_folder() as folder:
        path = folder / "study.jsonl"
        with Journal.create(path, study, {}) as journal:
            try:
                for _ in tune(device, workload, optimizer, journal, Budget(task.rules.trials), Rule()):
                    pass
            except TrialError:
                pass  # given up; the journal says why
            study = journal.study
        ended = ending(path) or ""
    return _judged(task, posed, study, _promised(optimizer, study), len(known), ended)


def run_whole(
    sources: Sequence[Source],
    slos: Sequence[str],
    methods: Sequence[str],
    seeds: int,
    rules: Rules,
    jobs: int = 1,
    advanced: Callable[[int, int], None] = lambda done, total: None,
) -> list[WholeSearch]:
    """Make every search of a benchmark to its own end.

    Args:
        sources: The subjects.
        slos: Limits, each a problem of its own on every subject.
        methods: Who takes part; see `Entrant.parse`.
        seeds: How many seeds, from 0 on.
        rules: History, risk, and how many trials each may make at most; none ends for coming near.
        jobs: How many processes share the work.
        advanced: Told how many searches of how many are done.

    Raises:
        PolythrottleError: If a method, a limit, a subject or the history is not what it should be.
    """
    return run_by(rules, sources, slos, methods, seeds, jobs, advanced, search_whole)


def _judged(task: Task, posed: Subject, study: Study, promised: float | None, history: int, ended: str) -> WholeSearch:
    held = [posed.judge.holds(posed.truth[trial.point]) for trial in study.completed]
    broke = [trial for trial, one in zip(study.completed, held, strict=True) if not one]
    best = study.best
    default = posed.truth[study.problem.space.default]
    answer = None if best is None else posed.truth[best.point]
    return WholeSearch(
        task.source.name, task.slo, task.entrant.label, task.seed, history,
        trials=len(study.trials),
        infeasible=len(broke),
        items_beyond=sum(_items(trial) for trial in broke),
        search_j=study.cost.energy_j,
        search_s=study.cost.duration_s,
        regret=None if answer is None else answer.energy_j / posed.best_j - 1.0,
        holds=answer is not None and posed.judge.holds(answer),
        saved=0.0 if answer is None else 1.0 - answer.energy_j / default.energy_j,
        to_save=1.0 - posed.best_j / default.energy_j,
        promised=promised,
        ended=ended,
        strayed=sum(not one and any(held[:number]) for number, one in enumerate(held)),
    )  # fmt: skip


def _items(trial: Trial) -> float:
    """Return how many items a trial served: those its cost is counted for where the device was recorded."""
    measured = trial.measurement
    if measured is None or measured.requests is None:
        return RECORDED_ITEMS
    return measured.requests * float(trial.point.get(BATCH_SIZE, 1))


def _promised(optimizer: Optimizer, study: Study) -> float | None:
    """Return the share of the answer's objective that is left to save at most, as it is said; None if nobody knows."""
    best = study.best
    if not isinstance(optimizer, Surveyor) or best is None:
        return None
    share = optimizer.most_left(study, best)
    if math.isnan(share):
        return None
    return said_at_most(share) / 100.0


@dataclass(frozen=True)
class WholeSummary:
    """What the whole searches of one method amount to; means over them.

    Args:
        method: Who searched.
        runs: How many searches.
        within_2pct: Share whose answer holds and is within 2 % of the best point.
        within_5pct: The same for 5 %.
        broken: Share whose answer truly breaks the limit.
        unanswered: Share without an answer.
        trials: Trials made.
        infeasible: Those that truly broke the limit.
        strayed: Share of the searches that tried a point which truly breaks it once one had been tried that holds; None
            in documents from before it was counted.
        items_beyond: Items served in those.
        saved: Share of the default's energy saved by answers that hold; others save nothing.
        to_save: Share that the best points save.
        worst: The largest regret of an answer that holds; None if none does.
        promise_kept: Share of the searches that said how much is left to save at most, and left no more than that.
        promised: Median of what they said; None in documents from before it was counted.
        search_j: Median energy of a search.
        search_s: Median time of a search.
    """

    method: str
    runs: int
    within_2pct: float
    within_5pct: float
    broken: float
    unanswered: float
    trials: float
    infeasible: float
    strayed: float | None
    items_beyond: float
    saved: float
    to_save: float
    worst: float | None
    promise_kept: float | None
    promised: float | None
    search_j: float
    search_s: float


def summarise_whole(searches: Sequence[WholeSearch]) -> list[WholeSummary]:
    """Return the summary of each method, in the order of the searches."""
    methods = dict.fromkeys(search.method for search in searches)
    return [_summary(method, [one for one in searches if one.method == method]) for method in methods]


def _summary(method: str, some: Sequence[WholeSearch]) -> WholeSummary:
    mean = statistics.fmean
    told = [one for one in some if one.promised is not None and one.regret is not None]
    return WholeSummary(
        method,
        len(some),
        within_2pct=mean(one.within(_CLOSE) for one in some),
        within_5pct=mean(one.within(_NEAR) for one in some),
        broken=mean(one.regret is not None and not one.holds for one in some),
        unanswered=mean(one.regret is None for one in some),
        trials=mean(one.trials for one in some),
        infeasible=mean(one.infeasible for one in some),
        strayed=mean(one.strayed > 0 for one in some),
        items_beyond=mean(one.items_beyond for one in some),
        saved=mean(one.saved if one.holds else 0.0 for one in some),
        to_save=mean(one.to_save for one in some),
        worst=max((one.regret for one in some if one.holds and one.regret is not None), default=None),
        promise_kept=mean(_kept(one) for one in told) if told else None,
        promised=statistics.median(one.promised or 0.0 for one in told) if told else None,
        search_j=statistics.median(one.search_j for one in some),
        search_s=statistics.median(one.search_s for one in some),
    )


def _kept(search: WholeSearch) -> bool:
    """Return whether no more was left than was said."""
    assert search.regret is not None
    assert search.promised is not None
    return 1.0 - 1.0 / (1.0 + max(search.regret, 0.0)) <= search.promised


def whole_document(searches: Sequence[WholeSearch]) -> dict[str, Any]:
    """Return the JSON document of a benchmark of whole searches."""
    return {
        "searches": [asdict(one) for one in searches],
        "methods": {summary.method: asdict(summary) for summary in summarise_whole(searches)},
    }


def whole_dataframe(searches: Sequence[WholeSearch]) -> "pd.DataFrame":
    """Return a pandas frame with a row for each search: the fields of `WholeSearch`."""
    import pandas as pd

    values = {one.name: [getattr(search, one.name) for search in searches] for one in fields(WholeSearch)}
    frame: pd.DataFrame = pd.DataFrame(values).astype({"regret": "float64", "promised": "float64"})
    return frame
