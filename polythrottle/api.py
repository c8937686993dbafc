"""The Python API: open a device and a workload, and tune, measure or sweep them.

The command line is a thin shell around these functions; whatever it can do, a program can.
"""

import contextlib
import datetime
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Protocol

from polythrottle import journal as journals
from polythrottle.errors import BadFile, InvalidInput, SloUnmet, StorageError, UnknownName
from polythrottle.journal import Journal
from polythrottle.measurement import Measurement, Window
from polythrottle.optimize import make_optimizer
from polythrottle.ports import Device, Recorded, Workload
from polythrottle.problem import Constraint, Problem
from polythrottle.profile import Profile
from polythrottle.setup import Setup, slug
from polythrottle.space import Level, OperatingPoint, SearchSpace
from polythrottle.state import state_dir
from polythrottle.study import Study


class Watcher(Protocol):
    """Somebody who looks on while a study runs."""

    def opened(self, study: Study, journal: Path, trials: int) -> None:
        """Take note of the study, the file it is kept in, and how many trials it shall have."""

    def changed(self, study: Study) -> None:
        """Take note that a trial started or ended, or a preset was measured."""


class Silence:
    """A watcher that does nothing."""

    def opened(self, study: Study, journal: Path, trials: int) -> None:
        """Do nothing."""

    def changed(self, study: Study) -> None:
        """Do nothing."""


@dataclass(frozen=True)
class Tuning:
    """What a tuning came to.

    Args:
        study: Every trial.
        profile: The answer, or None if no trial held the SLO.
        unmet: If so, which trial came closest and by how much.
        profile_path: Where the profile was written, if there is one.
        journal_path: The study's journal.
        report_path: The HTML report.
        boundary: What the joules cover.
        unwritten: Why the profile or the report could not be written; empty if both were.
    """

    study: Study
    profile: Profile | None
    unmet: str | None
    profile_path: Path | None
    journal_path: Path
    report_path: Path | None
    boundary: str
    unwritten: tuple[str, ...] = ()


def tune(
    device: str = "auto",
    workload: str | None = None,
    slo: Sequence[str] | str = (),
    *,
    trials: int = 30,
    method: str = "bayes",
    seed: int = 0,
    setup: Setup | None = None,
    window: Window | None = None,
    presets: bool = True,
    journal: Path | None = None,
    fresh: bool = False,
    out: Path | None = None,
    watcher: Watcher | None = None,
) -> Tuning:
    """Find the operating point of least energy per item that holds the SLO.

    An unfinished study of the same problem is continued. Profile and report are written beside the journal's answer.

    Args:
        device: Device URI; ``auto`` takes the real one that is here.
        workload: Workload URI.
        slo: Constraints such as ``p99<=25ms``; none minimises energy alone.
        trials: How many points to try at most.
        method: ``bayes``, ``random`` or ``grid``.
        seed: Randomness of the method.
        setup: Device and workload with all their options; overrides both names.
        window: How long each trial looks.
        presets: Whether to measure the device's presets for comparison.
        journal: The study's file; one under the state folder if None.
        fresh: Start a new study even if an unfinished one is there.
        out: The profile's file; ``profiles/tuned/<device>/<workload>.toml`` if None.
        watcher: Somebody to tell about each change.

    Raises:
        PolythrottleError: Any of its kinds, each with one line that says what to do (`polythrottle.errors`).
    """
    if trials < 1:
        raise InvalidInput(f"a study needs at least 1 trial, not {trials}")
    if not 0 <= seed < 2**63:
        raise InvalidInput(f"a seed is a whole number from 0 to 2^63 - 1, not {seed}")
    out = _checked_out(out, journal)
    setup = setup or Setup(device, workload)
    board, served = setup.open()
    with contextlib.closing(served):
        make_optimizer(method)
        problem = _problem(board, served, slo, window or setup.window(board))
        study = Study(replace(problem, content=setup.content(board)), method, seed)
        plan = _Plan(trials, presets, out, setup)
        with _journal(study, journal and journal.absolute(), fresh, plan.line()) as kept:
            return _run(board, served, kept, plan, watcher or Silence())


def resume(
    journal: Path, *, trials: int | None = None, out: Path | None = None, watcher: Watcher | None = None
) -> Tuning:
    """Continue a study from its journal alone.

    Args:
        journal: The study's file.
        trials: How many trials it shall have in the end; as first planned if None.
        out: The profile's file.
        watcher: Somebody to tell about each change.

    Raises:
        BadFile: If the file is not a journal, or the device or workload it names is not the same any more.
        PolythrottleError: As `tune`.
    """
    out = _checked_out(out, journal)
    with Journal.reopen(journal.absolute()) as kept:
        plan = _Plan.of(kept.plan, trials, out)
        board, served = plan.setup.open()
        with contextlib.closing(served):
            asked = replace(kept.study.problem, space=board.space * served.space, content=plan.setup.content(board))
            _same_problem(journal, kept.study, replace(kept.study, problem=asked, trials=(), references=()))
            return _run(board, served, kept, plan, watcher or Silence())


@dataclass(frozen=True)
class _Plan:
    """What is intended with a study, beyond the problem itself; kept in its journal."""

    trials: int
    presets: bool
    out: Path | None
    setup: Setup

    def line(self) -> dict[str, Any]:
        out = None if self.out is None else str(self.out)
        return {"trials": self.trials, "presets": self.presets, "out": out, "setup": asdict(self.setup)}

    @classmethod
    def of(cls, line: Mapping[str, Any], trials: int | None, out: Path | None) -> "_Plan":
        planned, kept_out = line.get("trials", 30), line.get("out")
        if type(planned) is not int or not isinstance(kept_out, str | None):
            raise BadFile("the journal's plan cannot be read")
        if (trials or planned) < 1:
            raise InvalidInput(f"a study needs at least 1 trial, not {trials or planned}")
        out = out or (None if kept_out is None else Path(kept_out))
        return cls(trials or planned, line.get("presets") is not False, out, Setup.planned(line))


def _checked_out(out: Path | None, journal: Path | None) -> Path | None:
    """Return the profile's path made absolute, before anything runs that could not be kept."""
    from polythrottle.catalog.profiles import check_replaceable

    if out is None:
        return None
    if journal is not None and out.absolute() == journal.absolute():
        raise InvalidInput(f"{out} cannot be both the journal and the profile")
    check_replaceable(out)
    return out.absolute()


def measure(
    device: str = "auto",
    workload: str | None = None,
    point: dict[str, Level] | None = None,
    *,
    preset: str | None = None,
    setup: Setup | None = None,
    window: Window | None = None,
) -> tuple[OperatingPoint, Measurement]:
    """Return the measurement of one point, and the point.

    Args:
        device: Device URI.
        workload: Workload URI.
        point: Levels in SI by knob; knobs that are not named stay at their default.
        preset: Start from this preset of the device instead of its default.
        setup: Device and workload with all their options; overrides both names.
        window: How long to look.

    Raises:
        UnknownName: If the device and workload have no such knob or preset.
        InvalidInput: If a knob has no such level; names the nearest.
        PolythrottleError: As `tune`.
    """
    from polythrottle.meter import measure as measure_point

    setup = setup or Setup(device, workload)
    board, served = setup.open()
    with contextlib.closing(served), board:
        start = _preset(board, preset) if preset is not None else OperatingPoint({})
        whole = start.moved(_point(board.space * served.space, {**start, **(point or {})}, start))
        return whole, measure_point(board, served, whole, window or setup.window(board))


def _preset(board: Device, name: str) -> OperatingPoint:
    if name not in board.presets:
        raise UnknownName(f"preset of {board.title}:", name, board.presets)
    return board.presets[name]


def _point(space: SearchSpace, levels: Mapping[str, Level], held: OperatingPoint) -> OperatingPoint:
    """Return the point of a space with these levels; knobs that a preset holds need not be in the space."""
    levels = {name: level for name, level in levels.items() if name in space.names or name not in held}
    for name, level in levels.items():
        knob = space.knob(name)
        if level not in knob.levels:
            near = sorted(knob.levels, key=lambda known: _distance(known, level))[:3]
            raise InvalidInput(f"{name} has no level {level}; the nearest are {', '.join(map(str, near))}")
    point = space.default.moved(levels)
    if point not in space:
        raise InvalidInput(f"{dict(point)} is not a point of this space; its knobs depend on each other")
    return point


def _distance(known: Level, asked: Level) -> float:
    return abs(known - asked) if not isinstance(known, str) and not isinstance(asked, str) else float(known != asked)


def _problem(board: Device, served: Workload, slo: Sequence[str] | str, window: Window) -> Problem:
    from polythrottle.backends.replay import ReplayDevice

    constraints = tuple(Constraint.parse(text) for text in ([slo] if isinstance(slo, str) else slo))
    reference = dict(board.reference) if isinstance(board, ReplayDevice) else {}
    for constraint in constraints:
        if reference and constraint.metric not in reference:
            known = ", ".join(reference)
            raise InvalidInput(f"{constraint}: {board.title} records no {constraint.metric}; it has {known}")
    used = {constraint.metric for constraint in constraints if constraint.relative}
    kept = {metric: value for metric, value in reference.items() if metric in used}
    return Problem(board.space * served.space, constraints, board.uri, served.uri, kept, window)


def _run(board: Device, served: Workload, kept: Journal, plan: _Plan, watcher: Watcher) -> Tuning:
    from polythrottle import tuner

    out = plan.out or _profile_path(kept.study).absolute()
    watcher.opened(kept.study, kept.path, plan.trials)
    changes = [tuner.tune(board, served, make_optimizer(kept.study.method), kept, plan.trials)]
    changes += [tuner.compare(board, served, kept)] if plan.presets else []
    for loop in changes:
        with contextlib.closing(loop):
            for study in loop:
                watcher.changed(study)
    return _concluded(kept, board, out)


def report_path(journal: Path) -> Path:
    """Return where the report of a journal goes: beside it, ``.html`` in place of ``.jsonl``."""
    return (
        journal.with_name(journal.name.removesuffix(".jsonl") + ".html")
        if journal.suffix != ".html"
        else (journal.with_name(journal.name + ".report.html"))
    )


def _concluded(kept: Journal, board: Device, out: Path) -> Tuning:
    """Write profile and report of a study that has ended; what cannot be written is said, and loses nothing else."""
    from polythrottle.catalog.profiles import write_profile
    from polythrottle.report import write_report

    study, page = kept.study, report_path(kept.path)
    facts = {"window": "as recorded"} if isinstance(board, Recorded) else {}
    profile, unmet, problems = None, None, []
    try:
        profile = Profile.of(study, _provenance(kept.path))
        problems.append(_refusal(write_profile, profile, out))
    except SloUnmet as error:
        unmet = str(error)
        problems.append(None)
    problems.append(_refusal(partial(write_report, facts=facts), study, page))
    return Tuning(
        study=study,
        profile=profile,
        unmet=unmet,
        profile_path=out if profile is not None and problems[0] is None else None,
        journal_path=kept.path,
        report_path=page if problems[1] is None else None,
        boundary=board.boundary,
        unwritten=tuple(problem for problem in problems if problem is not None),
    )


def _refusal(write: Callable[[Any, Path], None], what: object, path: Path) -> str | None:
    """Write something and return None, or why it could not be written."""
    try:
        write(what, path)
    except StorageError as error:
        return str(error)
    return None


def _provenance(journal: Path) -> dict[str, str | int]:
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    return {"journal": str(journal), "date": today, "polythrottle": polythrottle_version()}


def polythrottle_version() -> str:
    """Return the version of the installed package, or ``unknown`` in a bare checkout."""
    try:
        return version("polythrottle")
    except PackageNotFoundError:
        return "unknown"


def _profile_path(study: Study) -> Path:
    device, workload = slug(study.problem.device), slug(study.problem.workload)
    return Path("profiles/tuned") / device / f"{workload}.toml"


@contextlib.contextmanager
def _journal(study: Study, path: Path | None, fresh: bool, plan: dict[str, Any]) -> Iterator[Journal]:
    """Open the study's journal: the given file, or the newest of this problem that is not finished, or a new one."""
    path = path or _default_path(study, fresh)
    if fresh and journals.holds_study(path):
        raise InvalidInput(f"{path} holds a study already; give a new file or leave --fresh out")
    if not journals.holds_study(path):
        with Journal.create(path, study, plan) as kept:
            yield kept
        return
    with Journal.reopen(path) as kept:
        _same_problem(path, kept.study, study)
        yield kept


def _default_path(study: Study, fresh: bool) -> Path:
    problem = study.problem
    folder = state_dir() / "studies" / slug(problem.device) / slug(problem.workload)
    number = 1
    while True:
        path = folder / f"{problem.fingerprint}-{study.method}-{study.seed}-{number}.jsonl"
        if not journals.holds_study(path) or not (fresh or journals.is_finished(path)):
            return path
        number += 1


def _same_problem(path: Path, kept: Study, asked: Study) -> None:
    if (kept.problem.fingerprint, kept.method, kept.seed) == (asked.problem.fingerprint, asked.method, asked.seed):
        return
    pairs = {
        "device": (kept.problem.device, asked.problem.device),
        "workload": (kept.problem.workload, asked.problem.workload),
        "SLO": (", ".join(map(str, kept.problem.constraints)), ", ".join(map(str, asked.problem.constraints))),
        "method": (kept.method, asked.method),
        "seed": (kept.seed, asked.seed),
        "window": (kept.problem.window, asked.problem.window),
        "space": (f"{len(kept.problem.space)} points", f"{len(asked.problem.space)} other points"),
    }
    told = [f"its {name} is {was}, not {now}" for name, (was, now) in pairs.items() if was != now]
    before, after = kept.problem.content, asked.problem.content
    told += [f"its {name} has changed" for name in {**before, **after} if before.get(name) != after.get(name)]
    raise BadFile(f"{path} is the journal of another problem: {'; '.join(told)}. Give another --journal")
