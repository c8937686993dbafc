"""All searches of a benchmark: who searches what under which rules, shared among processes."""

import hashlib
import itertools
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from polythrottle.bench.entrants import Entrant, entrants
from polythrottle.bench.history import LEAVE_ONE_OUT, files, nearest, siblings
from polythrottle.bench.searching import Record, search, visits
from polythrottle.bench.subjects import WORKLOADS, Simulated, Source, TableFile, subject
from polythrottle.errors import InvalidInput
from polythrottle.journal import Journal, holds_study, is_finished
from polythrottle.optimize import Options, make_optimizer
from polythrottle.study import Study, Trial

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
class Plan:
    """Everything a benchmark does: first the lessons, then the tasks."""

    lessons: tuple[Lesson, ...]
    tasks: tuple[Task, ...]

    def __len__(self) -> int:
        return len(self.lessons) + len(self.tasks)


def plan(
    sources: Sequence[Source], slos: Sequence[str], methods: Sequence[str], seeds: int, rules: Rules, folder: Path
) -> Plan:
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
    who, library = entrants(methods), _Library(sources, rules.history, folder)
    for source, slo in itertools.product(sources, slos):
        subject(source, slo)
    tasks = tuple(
        Task(source, slo, entrant, seed, rules, library.of(source, slo) if entrant.warm else ())
        for source, slo, entrant, seed in itertools.product(sources, slos, who, range(seeds))
    )
    return Plan(tuple(library.lessons.values()), tasks)


class _Library:
    """Knows what each subject may be learnt from, and which lessons that takes."""

    def __init__(self, sources: Sequence[Source], asked: str | None, folder: Path) -> None:
        self.lessons: dict[Path, Lesson] = {}
        self._folder, self._asked = folder, asked
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
        return () if own is None else siblings(own, self._tables)

    def _lessons_for(self, source: Simulated, slo: str) -> tuple[Path, ...]:
        peers = [one.workload for one in self._boards if replace(one, workload=source.workload) == source]
        others = [name for name in peers if name != source.workload] or [w for w in WORKLOADS if w != source.workload]
        return tuple(self._lesson(replace(source, workload=name), slo) for name in dict.fromkeys(others))

    def _lesson(self, source: Simulated, slo: str) -> Path:
        words = hashlib.sha256(f"{source.name} {slo}".encode()).hexdigest()[:16]
        path = self._folder / f"{words}.jsonl"
        self.lessons[path] = Lesson(source, slo, path)
        return path


def perform(plan: Plan, jobs: int, do: Callable[[Task], T]) -> Iterator[T | None]:
    """Do everything in a plan, and yield as each is done: None for a lesson, a record for a task, in their order.

    Args:
        plan: What to do.
        jobs: How many processes share it.
        do: What is done of a task: `Task.do`, or `polythrottle.bench.search_whole`.

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
    with tempfile.TemporaryDirectory(prefix="polythrottle-") as folder:
        whole = plan(opened, slos, methods, seeds, rules, Path(folder))
        for done, one in enumerate(perform(whole, jobs, do), start=1):
            told += [] if one is None else [one]
            advanced(done, len(whole))
    return told
