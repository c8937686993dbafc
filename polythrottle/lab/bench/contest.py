"""Who takes part in a benchmark, one search to its end, and all searches shared among processes."""

import hashlib
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from polythrottle import optimize
from polythrottle.domain.errors import Exhausted, InvalidInput, UnknownName
from polythrottle.domain.ports import Optimizer
from polythrottle.domain.study import Study, Trial
from polythrottle.lab.bench.subjects import (
    LEAVE_ONE_OUT,
    WORKLOADS,
    Simulated,
    Source,
    Subject,
    TableFile,
    files,
    nearest,
    siblings,
    study_of,
    subject,
)
from polythrottle.optimize import METHODS, Options, make_optimizer
from polythrottle.storage.atomic_file import temporary_folder
from polythrottle.storage.journal import Journal, holds_study, is_finished

# Who takes part: a method, and whether it may learn from history and which risk it may take.
#
# bayes            as the rules of the benchmark say bayes+cold       without history, whatever the rules say
# bayes@0.05       at most this chance of breaking a limit, whatever the rules say bayes+cold@0.05  both
# bayes+oracle     with one earlier study that knows the truth at every point, whatever the rules say: no method of
#                  use to anybody, but how far the best history there could be would take ours

ABLATIONS: Mapping[str, Callable[[Options], Optimizer]] = getattr(optimize, "ABLATIONS", {})
"""Our method with one ingredient taken out, by name."""
_LEARNERS = frozenset({"bayes", *ABLATIONS})
_COLD = "cold"
_ORACLE = "oracle"


@dataclass(frozen=True)
class Entrant:
    """One competitor of a benchmark.

    Args:
        label: As it was written, and as it stands in the records.
        method: Name of the search method.
        cold: Whether it goes without history.
        oracle: Whether its history is the truth.
        risk: Its own highest chance of breaking a limit; that of the rules if None.

    Raises:
        UnknownName: If there is no such method.
        InvalidInput: If the method takes neither history nor risk but something is said about either, or the risk is
            out of range.
    """

    label: str
    method: str
    cold: bool = False
    oracle: bool = False
    risk: float | None = None

    def __post_init__(self) -> None:
        if self.method not in (known := {**METHODS, **ABLATIONS}):
            raise UnknownName("search method", self.method, known)
        if (self.cold or self.oracle or self.risk is not None) and not self.learns:
            raise InvalidInput(f"{self.label}: {self.method} takes neither history nor risk; leave + and @ out")
        Options(risk=self.risk)

    @classmethod
    def parse(cls, label: str) -> "Entrant":
        """Return what a label means: a method, then perhaps ``+cold`` or ``+oracle``, then perhaps ``@`` and a risk.

        Raises:
            UnknownName: If there is no such method.
            InvalidInput: If the label is not of that form.
        """
        body, at, risk = label.partition("@")
        method, plus, word = body.partition("+")
        if plus and word not in (_COLD, _ORACLE):
            raise InvalidInput(
                f"{label!r}: behind + stands cold, for a run without history, or oracle, for one that knows the truth"
            )
        return cls(label, method, word == _COLD, word == _ORACLE, _chance(label, risk) if at else None)

    @property
    def learns(self) -> bool:
        """Whether the method can use history and keeps to a risk."""
        return self.method in _LEARNERS

    @property
    def warm(self) -> bool:
        """Whether it is given the history there is."""
        return self.learns and not (self.cold or self.oracle)

    def knows(self, posed: Subject, history: Iterable[Path]) -> tuple[Study, ...]:
        """Return the earlier studies it may learn from.

        Args:
            posed: What is asked.
            history: Tables and journals of others.
        """
        if self.oracle:
            seen = enumerate(posed.truth.items())
            return (Study(posed.problem, trials=tuple(Trial(number, point, true) for number, (point, true) in seen)),)
        if self.warm:
            return tuple(map(study_of, history))
        return ()

    def optimizer(self, options: Options) -> Optimizer:
        """Return the search method, told what it may know."""
        return {**METHODS, **ABLATIONS}[self.method](options)


def entrants(methods: Iterable[str]) -> list[Entrant]:
    """Return who takes part, each once.

    Raises:
        UnknownName: If there is no such method.
        InvalidInput: If nobody takes part or a label cannot be read.
    """
    labels = dict.fromkeys(filter(None, (method.strip() for method in methods)))
    if not labels:
        raise InvalidInput(f"name at least one search method of {', '.join(METHODS)}")
    return [Entrant.parse(label) for label in labels]


def _chance(label: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise InvalidInput(f"{label!r}: {text!r} is not a risk; write for example bayes@0.05") from None


# One search, to its end, and what is counted of it.

ITEMS_PER_TRIAL = 1000
"""Items a trial is taken to serve when its energy is counted: the paper's requests per configuration."""
_NEAR = 0.05
_CLOSE = 0.01
_MIDWAY = 30


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
        if self.table.startswith("sim:"):
            return "sim"
        return self.table.partition("__")[0]

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
    known = entrant.knows(posed, history)
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


# All searches of a benchmark: who searches what under which rules, shared among processes.

LESSON_TRIALS = 30
_TEACHER = "bayes"
T = TypeVar("T")


@dataclass(frozen=True)
class Rules:
    """What holds for every search of a benchmark.

    Args:
        trials: How many each may make.
        history: `LEAVE_ONE_OUT`, a folder or pattern of tables and journals, or None.
        risk: For those who keep to one.
        until: Stop each search once its regret is no more than this fraction.

    Raises:
        InvalidInput: If a number is out of range.
    """

    trials: int = 40
    history: str | None = None
    risk: float | None = None
    until: float | None = None

    def __post_init__(self) -> None:
        if self.trials < 1:
            raise InvalidInput("seeds, trials and jobs must be at least 1")
        if self.until is not None and not 0.0 < self.until < 1.0:
            raise InvalidInput(f"a search stops within a fraction between 0 and 1 of the best, not {self.until:g}")
        Options(risk=self.risk)


@dataclass(frozen=True)
class Lesson:
    """A study of another workload on the same simulated board, made so that a search can learn from it.

    Args:
        source: What is studied.
        slo: Its limit.
        journal: Where it is kept.
    """

    source: Simulated
    slo: str
    journal: Path

    def do(self) -> None:
        """Make the study by ``bayes``, without history, unless its journal holds it already.

        Raises:
            PolythrottleError: If the board cannot be studied or the journal cannot be written.
        """
        if holds_study(self.journal) and is_finished(self.journal):
            return
        self.journal.unlink(missing_ok=True)
        posed = subject(self.source, self.slo)
        study = Study(posed.problem, _TEACHER)
        with Journal.create(self.journal, study, {}) as kept:
            for trial, _ in visits(posed, make_optimizer(_TEACHER), study, LESSON_TRIALS):
                kept.started(Trial(trial.number, trial.point))
                (kept.completed if trial.failure is None else kept.failed)(trial)
            kept.finish(f"{LESSON_TRIALS} trials made")


@dataclass(frozen=True)
class Task:
    """One search that is to be made; the arguments of `search`."""

    source: Source
    slo: str
    entrant: Entrant
    seed: int
    rules: Rules
    history: tuple[Path, ...] = ()

    def do(self) -> Record:
        """Make the search.

        Raises:
            PolythrottleError: As `search`.
        """
        rules = self.rules
        return search(
            self.source,
            self.slo,
            self.entrant.label,
            self.seed,
            rules.trials,
            history=self.history,
            risk=rules.risk,
            until=rules.until,
        )


@dataclass(frozen=True)
class ContestPlan:
    """Everything a benchmark does: first the lessons, then the tasks."""

    lessons: tuple[Lesson, ...]
    tasks: tuple[Task, ...]

    def __len__(self) -> int:
        return len(self.lessons) + len(self.tasks)


def plan(
    sources: Sequence[Source], slos: Sequence[str], methods: Sequence[str], seeds: int, rules: Rules, folder: Path
) -> ContestPlan:
    """Return everything a benchmark will do, after a look at every subject.

    Args:
        sources: The subjects.
        slos: Limits, each a problem of its own on every subject.
        methods: Who takes part; see `Entrant.parse`.
        seeds: How many seeds, from 0 on.
        rules: What holds for every search.
        folder: Where lessons are kept.

    Raises:
        PolythrottleError: If a method, a limit, a subject or the history is not what it should be.
    """
    if seeds < 1:
        raise InvalidInput("seeds, trials and jobs must be at least 1")
    who = entrants(methods)
    library = _Library(sources, rules.history, folder)
    for source, slo in itertools.product(sources, slos):
        subject(source, slo)
    tasks = tuple(
        Task(source, slo, entrant, seed, rules, library.of(source, slo) if entrant.warm else ())
        for source, slo, entrant, seed in itertools.product(sources, slos, who, range(seeds))
    )
    return ContestPlan(tuple(library.lessons.values()), tasks)


class _Library:
    """Knows what each subject may be learnt from, and which lessons that takes."""

    def __init__(self, sources: Sequence[Source], asked: str | None, folder: Path) -> None:
        self.lessons: dict[Path, Lesson] = {}
        self._folder = folder
        self._asked = asked
        self._named = () if asked in (None, LEAVE_ONE_OUT) else files(str(asked))
        self._tables = [source.path for source in sources if isinstance(source, TableFile)]
        self._boards = [source for source in sources if isinstance(source, Simulated)]

    def of(self, source: Source, slo: str) -> tuple[Path, ...]:
        """Return the tables and journals that a subject may be learnt from."""
        if self._asked is None:
            return ()
        own = source.path if isinstance(source, TableFile) else None
        if self._asked != LEAVE_ONE_OUT:
            return nearest(self._named, subject(source, slo).problem, own)
        if isinstance(source, Simulated):
            return self._lessons_for(source, slo)
        if own is None:
            return ()
        return siblings(own, self._tables)

    def _lessons_for(self, source: Simulated, slo: str) -> tuple[Path, ...]:
        peers = [one.workload for one in self._boards if replace(one, workload=source.workload) == source]
        others = [name for name in peers if name != source.workload] or [w for w in WORKLOADS if w != source.workload]
        return tuple(self._lesson(replace(source, workload=name), slo) for name in dict.fromkeys(others))

    def _lesson(self, source: Simulated, slo: str) -> Path:
        words = hashlib.sha256(f"{source.name} {slo}".encode()).hexdigest()[:16]
        path = self._folder / f"{words}.jsonl"
        self.lessons[path] = Lesson(source, slo, path)
        return path


def perform(plan: ContestPlan, jobs: int, do: Callable[[Task], T]) -> Iterator[T | None]:
    """Do everything in a plan, and yield as each is done: None for a lesson, a record for a task, in their order.

    Args:
        plan: What to do.
        jobs: How many processes share it.
        do: What is done of a task: `Task.do`, or `polythrottle.lab.bench.search_whole`.

    Raises:
        PolythrottleError: If a search cannot be made.
    """
    if jobs < 1:
        raise InvalidInput("seeds, trials and jobs must be at least 1")
    if not len(plan):
        return
    with ProcessPoolExecutor(min(jobs, len(plan))) as pool:
        yield from pool.map(Lesson.do, plan.lessons)
        yield from pool.map(do, plan.tasks)


def run(
    sources: Sequence[Source | Path],
    slos: Sequence[str],
    methods: Sequence[str],
    seeds: int,
    trials: int,
    jobs: int = 1,
    advanced: Callable[[int, int], None] = lambda done, total: None,
    *,
    history: str | None = None,
    risk: float | None = None,
    until: float | None = None,
) -> list[Record]:
    """Run every search of a benchmark.

    Args:
        sources: Subjects, or paths of tables.
        slos: Limits, each a problem of its own on every subject.
        methods: Who takes part; see `Entrant.parse`.
        seeds: How many seeds, from 0 on.
        trials: How many trials each search makes.
        jobs: How many processes share the work.
        advanced: Told how many searches of how many are done.
        history: What may be learnt from; see `Rules`.
        risk: For those who keep to one.
        until: Stop each search once its regret is no more than this fraction.

    Raises:
        PolythrottleError: If a method, a limit, a subject or the history is not what it should be.
    """
    return run_by(Rules(trials, history, risk, until), sources, slos, methods, seeds, jobs, advanced, Task.do)


def run_by(
    rules: Rules,
    sources: Sequence[Source | Path],
    slos: Sequence[str],
    methods: Sequence[str],
    seeds: int,
    jobs: int,
    advanced: Callable[[int, int], None],
    do: Callable[[Task], T],
) -> list[T]:
    """Return what is told of every search of a benchmark; the arguments are those of `run` and `perform`."""
    opened = [TableFile(source) if isinstance(source, Path) else source for source in sources]
    told: list[T] = []
    with temporary_folder() as folder:
        whole = plan(opened, slos, methods, seeds, rules, folder)
        for done, one in enumerate(perform(whole, jobs, do), start=1):
            told += [] if one is None else [one]
            advanced(done, len(whole))
    return told
