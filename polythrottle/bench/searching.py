"""One search, to its end, and what is counted of it."""

import math
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from polythrottle.bench.entrants import Entrant
from polythrottle.bench.history import study_of
from polythrottle.bench.subjects import Source, Subject, TableFile, subject
from polythrottle.errors import Exhausted
from polythrottle.optimize import Options
from polythrottle.ports import Optimizer
from polythrottle.study import Study, Trial

ITEMS_PER_TRIAL = 1000
"""Items a trial is taken to serve when its energy is counted: the paper's requests per configuration."""
_NEAR, _CLOSE, _MIDWAY = 0.05, 0.01, 30


@dataclass(frozen=True)
class Record:
    """How one search went; feasibility and regret are those of the truth at the points it visited.

    Args:
        table: Name of the subject; what stands before ``__``, or before ``:`` of a simulated board, is its family.
        slo: The limit, as text.
        method: Who searched, as `Entrant.parse` reads it.
        seed: Of the study, and of a simulated board's noise.
        trials: How many were allowed.
        trials_to_5pct: Trials until the best feasible point visited was within 5 % of the best of all; None if never.
        trials_to_1pct: The same for 1 %.
        infeasible_before_5pct: Trials before then (or at all) that broke the limit.
        final_regret: Energy of the best feasible point visited over that of the best of all, less one; None if none.
        search_energy_j: Energy of all trials, each taken to serve `ITEMS_PER_TRIAL` items.
        suggest_seconds_median: Median time of one suggestion.
        history: How many earlier studies the method was given.
        infeasible: All trials that broke the limit.
        infeasible_after_two_feasible: Those of them that came once two feasible points had been visited.
        excess_total: Sum over them of the fraction by which the limit was broken.
        regret_30: As ``final_regret``, after 30 trials; None if none was feasible or fewer were allowed.
        regrets: As ``final_regret``, after each trial made; a method may end before it has used all.
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
    history: int = 0
    infeasible: int = 0
    infeasible_after_two_feasible: int = 0
    excess_total: float = 0.0
    regret_30: float | None = None
    regrets: tuple[float | None, ...] = ()

    @property
    def family(self) -> str:
        """The source of the table, or ``sim``."""
        return "sim" if self.table.startswith("sim:") else self.table.partition("__")[0]

    @property
    def arrived(self) -> float:
        """Trials to within 5 %; an eighth more than those allowed, and at least 45, if it never came there."""
        return float(self.trials_to_5pct or max(45.0, 1.125 * self.trials))


@dataclass(frozen=True)
class _Step:
    """What one trial came to: its regret if its point is feasible, else infinite, and the fraction it broke limits by.

    A failed trial broke no limit; a point just beyond one may break it by a fraction that rounds to 0.
    """

    regret: float
    broke: bool
    excess: float
    energy_j: float
    seconds: float


def search(
    source: Source | Path,
    slo: str,
    method: str,
    seed: int,
    trials: int,
    *,
    history: Sequence[Path] = (),
    risk: float | None = None,
    until: float | None = None,
) -> Record:
    """Search one subject and say how it went.

    Args:
        source: The subject, or the path of a table.
        slo: Its limit.
        method: Who searches, as `Entrant.parse` reads it.
        seed: Of the study.
        trials: How many it may make.
        history: Tables and journals to learn from, for those who can.
        risk: For those who keep to one and have none of their own.
        until: Stop once the regret is no more than this fraction; never if None.

    Raises:
        PolythrottleError: If subject, limit, method or history are not what they should be.
    """
    posed = subject(TableFile(source) if isinstance(source, Path) else source, slo)
    entrant = Entrant.parse(method)
    known = tuple(map(study_of, history)) if entrant.warm else ()
    own = risk if entrant.risk is None else entrant.risk
    options = Options(known, own if entrant.learns else None, posed.presets)
    study = Study(posed.problem, entrant.method, seed)
    steps = _steps(posed, visits(posed, entrant.optimizer(options), study, trials), until)
    return _record((source.name, slo, method, seed, trials), steps, len(known))


def visits(posed: Subject, optimizer: Optimizer, study: Study, trials: int) -> Iterator[tuple[Trial, float]]:
    """Yield each trial of a search and how many seconds its suggestion took, until method or trials are at an end.

    Args:
        posed: What is searched.
        optimizer: The search method.
        study: Of the subject's problem, without trials.
        trials: How many there may be.
    """
    for number in range(min(trials, len(posed.problem.space))):
        start = time.perf_counter()
        try:
            point = optimizer.suggest(study)
        except Exhausted:
            return
        seconds = time.perf_counter() - start
        trial = posed.trial(study.seed, number, point)
        study = study.with_trial(trial)
        yield trial, seconds


def _steps(posed: Subject, made: Iterator[tuple[Trial, float]], until: float | None) -> list[_Step]:
    """Return what each trial came to, up to the first that is near enough."""
    steps = []
    for trial, seconds in made:
        steps.append(_step(posed, trial, seconds))
        if until is not None and steps[-1].regret <= until:
            break
    return steps


def _step(posed: Subject, trial: Trial, seconds: float) -> _Step:
    if trial.measurement is None:
        return _Step(math.inf, False, 0.0, 0.0, seconds)
    truth = posed.truth[trial.point]
    if posed.judge.holds(truth):
        return _Step(truth.energy_j / posed.best_j - 1.0, False, 0.0, trial.measurement.energy_j, seconds)
    return _Step(math.inf, True, posed.judge.excess(truth), trial.measurement.energy_j, seconds)


def _record(what: tuple[str, str, str, int, int], steps: Sequence[_Step], history: int) -> Record:
    """Return the record of a search from its steps."""
    regrets = [min(step.regret for step in steps[: made + 1]) for made in range(len(steps))]
    near = _first(regrets, _NEAR)
    told = tuple(regret if math.isfinite(regret) else None for regret in regrets)
    allowed = what[-1]
    return Record(
        *what,
        trials_to_5pct=near,
        trials_to_1pct=_first(regrets, _CLOSE),
        infeasible_before_5pct=sum(step.broke for step in steps[:near]),
        final_regret=told[-1] if told else None,
        search_energy_j=ITEMS_PER_TRIAL * sum(step.energy_j for step in steps),
        suggest_seconds_median=statistics.median([step.seconds for step in steps] or [0.0]),
        history=history,
        infeasible=sum(step.broke for step in steps),
        infeasible_after_two_feasible=_broken_late(steps),
        excess_total=sum(step.excess for step in steps),
        regret_30=told[:_MIDWAY][-1] if told and allowed >= _MIDWAY else None,
        regrets=told,
    )


def _first(regrets: Sequence[float], most: float) -> int | None:
    return next((number for number, regret in enumerate(regrets, start=1) if regret <= most), None)


def _broken_late(steps: Sequence[_Step]) -> int:
    """Return how many trials broke the limit once two feasible points had been visited."""
    feasible = [math.isfinite(step.regret) for step in steps]
    return sum(step.broke and sum(feasible[:made]) >= 2 for made, step in enumerate(steps))
