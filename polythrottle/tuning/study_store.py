"""Where studies are kept, which journal a study goes into, which earlier ones it may learn from, and by what method."""

import contextlib
import hashlib
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from polythrottle.backends.meters import unmetered
from polythrottle.backends.replay import Table
from polythrottle.domain.error_budget import ErrorBudget
from polythrottle.domain.errors import BadFile, InvalidInput
from polythrottle.domain.ports import Device, Optimizer, Workload
from polythrottle.domain.problem import Constraint, Problem
from polythrottle.domain.space import OperatingPoint, SearchSpace
from polythrottle.domain.study import Study, Trial, TrialState
from polythrottle.optimize import Options, make_optimizer
from polythrottle.optimize.features import shared_coordinates
from polythrottle.optimize.options import WarmStart
from polythrottle.storage import journal
from polythrottle.storage import journal as journals
from polythrottle.storage.boards_journal import boards_in
from polythrottle.storage.identity import disagreement, identity_of, without_options
from polythrottle.storage.journal import Journal
from polythrottle.storage.paths import state_dir
from polythrottle.storage.tables import ENDINGS
from polythrottle.storage.untrusted import members_of
from polythrottle.tuning.boards_together import BoardsView
from polythrottle.tuning.plan import LEARNERS, StudyPlan
from polythrottle.tuning.setup import device_name, slug, workload_name

# Earlier studies to learn from: journals of the local store, and journals or tables that somebody names.

MOST = 12
LEAST_TRIALS = 3
_MOST_FILES = 20_000
_NEWEST = 1000
_NAMES_SHOWN = 3


@dataclass(frozen=True)
class PriorStudy:
    """An earlier study, and exactly which bytes of which file it was read from.

    Args:
        path: The journal or table.
        size: How many bytes of it, from the first on.
        sha256: Of those bytes, in hexadecimal.
        study: What they tell; a table gives a trial per row.
        identity: Hardware and firmware it was begun on; empty where the journal does not tell.
    """

    path: Path
    size: int
    sha256: str
    study: Study
    identity: Mapping[str, str] = field(default_factory=dict)

    def line(self) -> dict[str, str | int]:
        """Return what finds this study again, as a journal keeps it."""
        trials = len(self.study.completed)
        return {"path": str(self.path), "trials": trials, "bytes": self.size, "sha256": self.sha256}


@dataclass(frozen=True)
class PriorStudies:
    """What there is to learn from.

    Args:
        lessons: The earlier studies.
        found: How many could have been learnt from, of which `MOST` are taken.
        skipped: How many files were passed over because they could not be read.
        lost: How many studies learnt from before have changed or gone.
        apart: The files that were named but have no knob that means the same, so that nothing can be learnt there.
    """

    lessons: tuple[PriorStudy, ...] = ()
    found: int = 0
    skipped: int = 0
    lost: int = 0
    apart: tuple[Path, ...] = ()

    @property
    def studies(self) -> tuple[Study, ...]:
        """The earlier studies alone."""
        return tuple(lesson.study for lesson in self.lessons)

    def answers(self, problem: Problem, identity: Mapping[str, str]) -> tuple[OperatingPoint, ...]:
        """Return the answer that another board of one kind has to the same question; the newest, none if there is none.

        Args:
            problem: The question.
            identity: Hardware and firmware of the board at hand.
        """
        for one in self.lessons:
            earlier = one.study.problem
            there = without_options(earlier.device) != without_options(problem.device)
            asked = (earlier.constraints, earlier.objective) == (problem.constraints, problem.objective)
            if not (there and asked and _one_kind(one.identity, identity) and _kinship(_facts(earlier), problem)[1]):
                continue
            # A relative limit may have nothing to multiply there, where the default could not be measured.
            with contextlib.suppress(InvalidInput):
                if (best := one.study.answered) is not None:
                    return (best.point,)
        return ()

    def words(self, problem: Problem, advice: str = "") -> Iterator[str]:
        """Yield what a user should know of it, a line each.

        Args:
            problem: What is to be tuned.
            advice: What to say behind the studies learnt from.
        """
        if self.lessons:
            count = len(self.lessons)
            of = f" of {self.found}" if self.found > count else ""
            yield (
                f"learning from {count}{of} earlier stud{'ies' if max(count, self.found) > 1 else 'y'} "
                f"({_names(self.studies)}){_where(self.studies, problem)}{advice}"
            )
        if self.apart:
            names = ", ".join(path.name for path in self.apart[:_NAMES_SHOWN]) + ", …" * (
                len(self.apart) > _NAMES_SHOWN
            )
            yield f"left out {names}: no knob there is one of {', '.join(problem.space.names)}"
        if self.skipped:
            yield f"{self.skipped} file{'s' * (self.skipped > 1)} skipped: no study can be read from there"
        if self.lost:
            yield (
                f"{self.lost} of the studies learnt from before changed or went; going on without, "
                f"so trials may differ from those of a study left alone"
            )


def stored(folder: Path, problem: Problem, identity: Mapping[str, str] = MappingProxyType({})) -> PriorStudies:
    """Return the earlier studies of a store that concern the device, or its kind, or the workload of a problem.

    Studies of both come first, then the newest; those with fewer than `LEAST_TRIALS` completed trials, or without a
    knob that means the same, do not count.

    Args:
        folder: Searched with all folders below, the newest thousand journals at most; need not exist.
        problem: What is to be tuned.
        identity: Hardware and firmware of the device; of one kind are those that agree in them. Empty if not known.
    """
    near = []
    skipped = 0
    for path in sorted(_files(folder, (".jsonl",), math.inf), key=_age)[:_NEWEST]:
        try:
            # The first line alone: of a thousand journals most are of other devices and need not be read.
            line = journal.heading(path)
        except BadFile:
            skipped += 1
            continue
        device, workload = _kinship(line, problem)
        kinship = (device or _one_kind(_identity_in(line), identity), workload)
        if any(kinship):
            near.append((not all(kinship), _age(path), path))
    return _first((path for _, _, path in sorted(near)), problem, skipped)


def named(paths: Sequence[Path], problem: Problem) -> PriorStudies:
    """Return the earlier studies in journals, tables, and folders of either.

    Args:
        paths: Files and folders; a file that is named itself has to be readable.
        problem: What is to be tuned; if there are more than `MOST` studies, those next to it are taken.

    Raises:
        BadFile: If a file cannot be read, or a folder holds no study.
        InvalidInput: If a file holds fewer than `LEAST_TRIALS` completed trials, or a folder too many files.
    """
    lessons: dict[Path, PriorStudy] = {}
    skipped = 0
    for path in paths:
        if not path.is_dir():
            # By its real place: a file that is named twice, or lies in a folder named as well, teaches once.
            lessons[path.resolve()] = _enough(lesson(path))
            continue
        some, unread = _readable(_files(path, (".jsonl", *ENDINGS), _MOST_FILES))
        if not some:
            raise BadFile(f"{path} holds no journal and no table with {LEAST_TRIALS} trials to learn from")
        lessons |= {one.path.resolve(): one for one in some}
        skipped += unread
    related = [one for one in lessons.values() if _shares_knob(one.study.problem, problem)]
    apart = tuple(one.path for one in lessons.values() if one not in related)
    ranked = sorted(related, key=lambda one: (_distance(one.study.problem, problem), _age(one.path), one.path))
    return PriorStudies(tuple(ranked[:MOST]), len(ranked), skipped, apart=apart)


def recalled(lines: Iterable[Mapping[str, Any]]) -> PriorStudies:
    """Return the earlier studies that a journal says were learnt from, as they were then.

    Args:
        lines: From `PriorStudy.line`. A journal that has grown since is read as far as it went.
    """
    lessons = []
    lost = 0
    for line in lines:
        try:
            again = lesson(Path(line["path"]), line["bytes"])
        except BadFile:
            lost += 1
            continue
        lessons += [again] * (again.sha256 == line["sha256"])
        lost += again.sha256 != line["sha256"]
    return PriorStudies(tuple(lessons), len(lessons), 0, lost)


def lesson(path: Path, size: int | None = None) -> PriorStudy:
    """Return the earlier study in a journal or a table.

    Args:
        path: A table if its name ends in ``.csv``, ``.csv.gz`` or ``.parquet``, else a journal.
        size: How many bytes of a journal to read; all whole lines if None.

    Raises:
        BadFile: If it cannot be read.
    """
    if not path.exists():
        raise BadFile(f"there is no {path} to learn from")
    data = journal.content(path)
    if path.name.endswith(ENDINGS):
        return PriorStudy(path.absolute(), len(data), hashlib.sha256(data).hexdigest(), _study_of(Table.read(path)))
    whole, study = journal.told(path, data[:size])
    if boards := boards_in(data[:whole]):
        study = BoardsView(_ended(study), boards).told()
    digest = hashlib.sha256(data[:whole]).hexdigest()
    return PriorStudy(path.absolute(), whole, digest, _ended(study), _identity_in(journal.heading(path)))


def _study_of(table: Table) -> Study:
    """Return a table as a study that visited every row, the default first."""
    rows = zip(table.points, table.measurements, strict=True)
    # The first trial of a study is its default, which relative figures are judged by.
    ordered = sorted(rows, key=lambda row: row[0] != table.space.default)
    trials = tuple(Trial(number, point, measurement) for number, (point, measurement) in enumerate(ordered))
    return Study(Problem(table.space, (), f"replay:{table.path}", "recorded"), "grid", 0, trials)


def _ended(study: Study) -> Study:
    """Return a study without the trial that runs now."""
    return replace(study, trials=tuple(trial for trial in study.trials if trial.state is not TrialState.RUNNING))


def _enough(one: PriorStudy) -> PriorStudy:
    count = len(one.study.completed)
    if count < LEAST_TRIALS:
        raise InvalidInput(f"{one.path} has {count} completed trials; it takes {LEAST_TRIALS} to learn from")
    return one


def _first(paths: Iterable[Path], problem: Problem, skipped: int) -> PriorStudies:
    """Return the first studies that can be read and share a knob with a problem, at most `MOST`."""
    lessons: list[PriorStudy] = []
    for path in paths:
        some, unread = _readable([path])
        lessons += [one for one in some if _shares_knob(one.study.problem, problem)]
        skipped += unread
        if len(lessons) == MOST:
            break
    return PriorStudies(tuple(lessons), len(lessons), skipped)


def _readable(paths: Iterable[Path]) -> tuple[list[PriorStudy], int]:
    """Return the studies long enough to learn from, and how many files could not be read."""
    lessons = []
    skipped = 0
    for path in paths:
        try:
            lessons.append(_enough(lesson(path)))
        # Too short to learn from, as a study that was just begun: no fault of the file's.
        except InvalidInput:
            continue
        except BadFile:
            skipped += 1
    return lessons, skipped


def _files(folder: Path, endings: tuple[str, ...], most: float) -> Iterator[Path]:
    """Yield the files below a folder that are named like journals or tables."""
    count = 0
    for place, below, names in os.walk(folder):
        # In place, for os.walk goes into them in this order: two machines then learn from the same files.
        below.sort()
        count += len(names) + len(below)
        if count > most:
            raise InvalidInput(f"{folder} holds more than {most:,} files; name a folder of studies alone")
        yield from (Path(place, name) for name in sorted(names) if name.endswith(endings))


def _age(path: Path) -> float:
    """Return how long ago a file was written, on a scale of its own: less is newer."""
    try:
        return -path.stat().st_mtime
    except OSError:
        # Gone since it was listed: as if it were the oldest.
        return 0.0


def _kinship(line: Mapping[str, Any], problem: Problem) -> tuple[bool, bool]:
    """Return whether a journal's first line tells of the same device, and of the same workload under the same load."""
    content = line.get("content")
    content = members_of(content)
    device = line.get("device")
    if isinstance(device, str):
        device = without_options(device)
    # How a model does under one load says little of how it does under another.
    load = line.get("arrivals", "closed") == str(problem.arrivals)
    return (
        _same(device, without_options(problem.device), content.get("board"), problem.content.get("board")),
        load and _same(line.get("workload"), problem.workload, content.get("model"), problem.content.get("model")),
    )


def _same(one: object, two: str, digest: object, other: str | None) -> bool:
    """Return whether two words, or the files they stand for, are the same."""
    return (one == two and bool(two)) or (digest is not None and digest == other)


def _identity_in(line: Mapping[str, Any]) -> Mapping[str, str]:
    """Return which hardware and firmware a journal's first line tells of."""
    identity = members_of(members_of(line.get("plan")).get("identity"))
    return {name: text for name, text in identity.items() if isinstance(text, str)}


def _one_kind(one: Mapping[str, str], other: Mapping[str, str]) -> bool:
    return bool(one) and bool(other) and disagreement(one, other) is None


def _facts(problem: Problem) -> dict[str, Any]:
    """Return of a problem what the first line of its journal tells."""
    return {
        "device": problem.device,
        "workload": problem.workload,
        "content": dict(problem.content),
        "arrivals": str(problem.arrivals),
    }


def _distance(one: Problem, two: Problem) -> int:
    device, workload = _kinship(_facts(one), two)
    if not _alike(one.space, two.space):
        return 3 - 2 * device - workload
    return -2 * device - workload


def _shares_knob(earlier: Problem, target: Problem) -> bool:
    """Return whether any knob of the one is, or means the same as, a knob of the other."""
    return len(shared_coordinates(earlier, target).knobs) < len(earlier.space.knobs) + len(target.space.knobs)


def _alike(one: SearchSpace, two: SearchSpace) -> bool:
    return set(one.names) == set(two.names)


def _names(studies: Sequence[Study]) -> str:
    names = list(dict.fromkeys(map(_name, studies)))
    return ", ".join(names[:_NAMES_SHOWN]) + ", …" * (len(names) > _NAMES_SHOWN)


def _name(study: Study) -> str:
    problem = study.problem
    if problem.recorded:
        table = Path(without_options(problem.device).removeprefix("replay:")).name
        return table.removesuffix(".gz").removesuffix(".csv")[:40]
    return Path(problem.workload).name[:40] or "unnamed"


def _where(studies: Sequence[Study], problem: Problem) -> str:
    here = [without_options(study.problem.device) == without_options(problem.device) for study in studies]
    if all(here):
        return " on this device"
    live = not any(study.problem.recorded for study in studies)
    elsewhere = live and not any(here) and all(study.problem.workload == problem.workload for study in studies)
    if elsewhere:
        return " on other devices"
    return ""


# Where studies are kept: which journal a study goes into, and what it may learn from.


@contextlib.contextmanager
def open_study(
    study: Study, path: Path | None, fresh: bool, plan: StudyPlan, kind: type[Journal] = Journal
) -> Iterator[tuple[Journal, PriorStudies]]:
    """Open the study's journal: the given file, or the newest of this problem that is not finished, or a new one.

    With it comes what there is to learn from: for a new study what is there now, for another what it began with.

    Args:
        study: Without trials.
        path: The given file; None for the usual place under the state folder.
        fresh: Whether to start a new study even if an unfinished one is there.
        plan: Kept in the journal of a new study.
        kind: What the journal is opened as; `BoardsJournal` for a study of several boards.

    Raises:
        InvalidInput: If a new study is wanted in a file that holds one, or the history cannot be used.
        BadFile: If the file is not a journal, or that of another study, or the history cannot be read.
        StorageError: If the file cannot be written.
    """
    path = path or _default_path(study, fresh, plan.variant)
    if fresh and journals.holds_study(path):
        raise InvalidInput(f"{path} holds a study already; give a new file or leave --fresh out")
    if not journals.holds_study(path):
        past = _past(study, plan)
        plan = replace(plan, lessons=tuple(lesson.line() for lesson in past.lessons))
        with kind.create(path, study, plan.line()) as kept:
            yield kept, past
        return
    with kind.reopen(path) as kept:
        begun = StudyPlan.of(kept.plan)
        check_same_problem(path, kept.study, study)
        _same_means(path, begun, plan)
        yield kept, recalled(begun.lessons)


def _past(study: Study, plan: StudyPlan) -> PriorStudies:
    """Return what a new study can learn from; a table is replayed without unless something is named."""
    if study.method not in LEARNERS:
        return PriorStudies()
    if plan.history is not None:
        return named([Path(path) for path in plan.history], study.problem)
    if study.problem.recorded:
        return PriorStudies()
    return stored(state_dir() / "studies", study.problem, plan.identity)


def _same_means(path: Path, begun: StudyPlan, asked: StudyPlan) -> None:
    """Check that a study goes on with the risk and the history it was begun with."""
    pairs = (
        ("risk", begun.risk, asked.risk),
        ("history", begun.history, asked.history),
        ("error budget", _text(begun.errors), _text(asked.errors)),
    )
    if begun.priors != asked.priors:
        raise BadFile(
            f"{path} is the journal of another problem: it was begun with other priors. Give another --journal"
        )
    for name, was, now in pairs:
        if was != now:
            raise BadFile(
                f"{path} is the journal of another problem: its {name} is {_means(was)}, not {_means(now)}. "
                f"Give another --journal"
            )


def _text(errors: ErrorBudget | None) -> str:
    if errors is None:
        return "unlimited"
    return str(errors)


def _means(value: float | str | tuple[str, ...] | None) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, tuple):
        return ", ".join(value) or "none"
    if value is None:
        return "the default"
    return f"{value:g}"


def _default_path(study: Study, fresh: bool, variant: str) -> Path:
    problem = study.problem
    folder = state_dir() / "studies" / device_name(problem) / workload_name(problem)
    number = 1
    while True:
        words = (problem.fingerprint, slug(study.method), str(study.seed), variant, str(number))
        path = folder / f"{'-'.join(filter(None, words))}.jsonl"
        if not journals.holds_study(path) or not (fresh or journals.is_finished(path)):
            return path
        number += 1


def _shown(constraints: Iterable[Constraint]) -> str:
    return ", ".join(map(str, constraints)) or "none"


def check_same_problem(path: Path, kept: Study, asked: Study) -> None:
    """Check that a journal's study is the one that is asked for.

    Args:
        path: The journal, for the message.
        kept: What it holds.
        asked: What is wanted.

    Raises:
        BadFile: If problem, method or seed differ; says how.
    """
    if (kept.problem.fingerprint, kept.method, kept.seed) == (asked.problem.fingerprint, asked.method, asked.seed):
        return
    pairs = {
        "device": (kept.problem.device, asked.problem.device),
        "workload": (kept.problem.workload, asked.problem.workload),
        "SLO": (_shown(kept.problem.constraints), _shown(asked.problem.constraints)),
        "objective": (kept.problem.objective, asked.problem.objective),
        "method": (kept.method, asked.method),
        "seed": (kept.seed, asked.seed),
        **{
            f"window's {name}": (was, getattr(asked.problem.window, name))
            for name, was in vars(kept.problem.window).items()
        },
        "arrivals": (kept.problem.arrivals, asked.problem.arrivals),
    }
    if kept.problem.space.fingerprint != asked.problem.space.fingerprint:
        pairs["space"] = (f"{len(kept.problem.space)} points", f"{len(asked.problem.space)} other points")
    differences = [f"its {name} is {was}, not {now}" for name, (was, now) in pairs.items() if was != now]
    before = kept.problem.content
    after = asked.problem.content
    differences += [f"its {name} has changed" for name in {**before, **after} if before.get(name) != after.get(name)]
    raise BadFile(f"{path} is the journal of another problem: {'; '.join(differences)}. Give another --journal")


# How a study is searched, given what others have found.


def method_of(
    study: Study,
    where: tuple[Device, Workload],
    plan: StudyPlan,
    past: PriorStudies,
    told: Callable[[str], object],
    own: Optimizer | None = None,
) -> Optimizer:
    """Return the search method of a study, which tries points that others have proven first if there are any.

    Those are the points of other profiles, or the answer of another board of one kind to the same question.

    Args:
        study: Names it.
        where: A device, whose presets it may use, and the workload there.
        plan: Holds the risk, and the points of other profiles.
        past: Earlier studies to learn from.
        told: Called with a line that names such points.
        own: A search method that was given as an object.
    """
    board, served = where
    presets = tuple(OperatingPoint({**served.space.default, **point}) for point in board.presets.values())
    optimizer = own or make_optimizer(study.method, Options(past.studies, plan.risk, presets))
    priors = plan.priors
    origin = "a profile"
    # Where each late request counts, the method itself decides whether a point may be tried.
    if not priors and plan.risk is None and plan.errors is None:
        priors = past.answers(study.problem, identity_of(unmetered(board)))
        origin = "another board of this kind"
    if not priors:
        return optimizer
    primed = WarmStart(optimizer, priors, origin)
    told(primed.words(study.problem.space))
    return primed
