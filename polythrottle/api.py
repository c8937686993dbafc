"""The Python API: open a device and a workload, and tune, measure or sweep them.

The command line is a thin shell around these functions; whatever it can do, a program can.
"""

import contextlib
import datetime
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Protocol

from polythrottle import journal as journals
from polythrottle.errors import BadFile, InvalidInput, SloUnmet, StorageError, UnknownName
from polythrottle.journal import Journal
from polythrottle.measurement import EnergyKind, Measurement, Window
from polythrottle.optimize import Options, make_optimizer
from polythrottle.past import Lesson, Past, recalled
from polythrottle.plan import Plan
from polythrottle.ports import Device, Recorded, Workload
from polythrottle.problem import Constraint, Objective, Problem
from polythrottle.profile import Profile
from polythrottle.setup import Setup, slug
from polythrottle.space import Level, OperatingPoint, SearchSpace
from polythrottle.stopping import Budget, Rule, span_s
from polythrottle.studies import check_same_problem, open_study
from polythrottle.study import Study


class Watcher(Protocol):
    """Somebody who looks on while a study runs."""

    def opened(self, study: Study, journal: Path, trials: int) -> None:
        """Take note of the study, the file it is kept in, and how many trials it shall have."""

    def changed(self, study: Study) -> None:
        """Take note that a trial started or ended, or a preset was measured."""

    def told(self, text: str) -> None:
        """Take note of a line a user should read, such as what the search learns from."""


class Silence:
    """A watcher that does nothing."""

    def opened(self, study: Study, journal: Path, trials: int) -> None:
        """Do nothing."""

    def changed(self, study: Study) -> None:
        """Do nothing."""

    def told(self, text: str) -> None:
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
        ended: Why there were no more trials.
        history: The earlier studies it learnt from.
        risk: Highest chance of breaking a limit that a trial might have; None if that was left to the method.
    """

    study: Study
    profile: Profile | None
    unmet: str | None
    profile_path: Path | None
    journal_path: Path
    report_path: Path | None
    boundary: str
    unwritten: tuple[str, ...] = ()
    ended: str | None = None
    history: tuple[Lesson, ...] = ()
    risk: float | None = None


def tune(
    device: str = "auto",
    workload: str | None = None,
    slo: Sequence[str] | str = (),
    *,
    objective: str = "energy",
    trials: int = 30,
    minutes: float | None = None,
    joules: float | None = None,
    horizon: str | None = None,
    early_stop: bool = True,
    method: str = "bayes",
    seed: int = 0,
    risk: float | None = None,
    history: Sequence[Path | str] | None = None,
    setup: Setup | None = None,
    window: Window | None = None,
    presets: bool = True,
    journal: Path | None = None,
    fresh: bool = False,
    out: Path | None = None,
    watcher: Watcher | None = None,
) -> Tuning:
    """Find the operating point that holds the SLO at the least energy per item, or is best by another objective.

    An unfinished study of the same problem is continued. Profile and report are written beside the journal's answer.

    Args:
        device: Device URI; ``auto`` takes the real one that is here.
        workload: Workload URI.
        slo: Constraints such as ``p99<=25ms``; none minimises energy alone.
        objective: What is minimised: ``energy`` per item, ``edp`` (that times mean latency), mean ``latency``, or
            ``pareto`` for the whole front of latency and energy (`Study.front`).
        trials: How many points to try at most.
        minutes: How long to search at most, on the device's clock; no bound if None.
        joules: How much energy the search may use; no bound if None.
        horizon: How long the answer will be used, such as ``30d``: the search ends when one more trial costs more
            energy than it is expected to save until then.
        early_stop: Whether to end when next to nothing is left to save.
        method: ``bayes``, ``random``, ``grid``, ….
        seed: Randomness of the method.
        risk: Highest chance of breaking a limit a trial may have once a feasible point is known; the method's own
            choice if None.
        history: Journals, tables, or folders of them to learn from; if None, the studies of this device or workload in
            the state folder, unless the device is a recorded table; if empty, nothing.
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
    if not 0 <= seed < 2**63:
        raise InvalidInput(f"a seed is a whole number from 0 to 2^63 - 1, not {seed}")
    out = _checked_out(out, journal)
    setup = setup or Setup(device, workload)
    budget = Budget(trials, None if minutes is None else 60 * minutes, joules)
    rule, goal = Rule(None if horizon is None else span_s(horizon), early_stop), Objective.parse(objective)
    _check_horizon(horizon, goal)
    plan = Plan(setup, budget, rule, presets, out, risk, _asked(history))
    board, served = setup.open()
    with contextlib.closing(served):
        plan.check(method)
        _check_joules(board, budget)
        problem = _problem(board, served, slo, window or setup.window(board))
        study = Study(replace(problem, content=setup.content(board), objective=goal), method, seed)
        with open_study(study, journal and journal.absolute(), fresh, plan) as (kept, past):
            return _run(board, served, kept, plan, past, watcher or Silence())


def resume(
    journal: Path,
    *,
    trials: int | None = None,
    minutes: float | None = None,
    joules: float | None = None,
    horizon: str | None = None,
    early_stop: bool | None = None,
    out: Path | None = None,
    watcher: Watcher | None = None,
) -> Tuning:
    """Continue a study from its journal alone.

    Args:
        journal: The study's file.
        trials: How many trials it shall have in the end; this and the next four as first planned if None.
        minutes: How long it may search in all.
        joules: How much energy it may use in all.
        horizon: How long the answer will be used.
        early_stop: Whether to end when next to nothing is left to save.
        out: The profile's file.
        watcher: Somebody to tell about each change.

    Raises:
        BadFile: If the file is not a journal, or the device or workload it names is not the same any more.
        PolythrottleError: As `tune`.
    """
    out = _checked_out(out, journal)
    with Journal.reopen(journal.absolute()) as kept:
        begun = Plan.of(kept.plan)
        plan = begun.changed(trials=trials, minutes=minutes, joules=joules, horizon=horizon, early_stop=early_stop)
        plan = replace(plan, out=out or plan.out)
        board, served = plan.setup.open()
        with contextlib.closing(served):
            _check_joules(board, plan.budget)
            asked = replace(kept.study.problem, space=board.space * served.space, content=plan.setup.content(board))
            check_same_problem(journal, kept.study, replace(kept.study, problem=asked, trials=(), references=()))
            return _run(board, served, kept, plan, recalled(plan.lessons), watcher or Silence())


def _asked(history: Sequence[Path | str] | None) -> tuple[str, ...] | None:
    """Return the files somebody named, each in the one form by which it is known again."""
    if history is None:
        return None
    paths = [history] if isinstance(history, str | Path) else history
    return tuple(sorted({str(Path(path).absolute()) for path in paths}))


def _check_horizon(horizon: str | None, objective: Objective) -> None:
    if horizon is not None and objective is not Objective.ENERGY:
        raise InvalidInput(f"a horizon weighs joules saved against joules spent; it has no meaning for {objective}")


def _check_joules(board: Device, budget: Budget) -> None:
    if budget.energy_j is not None and board.energy_kind is EnergyKind.RELATIVE:
        raise InvalidInput(f"the energy of {board.title} is only relative, so it cannot be bounded in joules")


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


def _run(board: Device, served: Workload, kept: Journal, plan: Plan, past: Past, watcher: Watcher) -> Tuning:
    from polythrottle import tuner

    watcher.opened(kept.study, kept.path, plan.budget.trials)
    for line in past.words(kept.study.problem, "; --no-history starts afresh" if plan.history is None else ""):
        watcher.told(line)
    presets = tuple(OperatingPoint({**served.space.default, **point}) for point in board.presets.values())
    optimizer = make_optimizer(kept.study.method, Options(past.studies, plan.risk, presets))
    changes = [tuner.tune(board, served, optimizer, kept, plan.budget, plan.rule)]
    changes += [tuner.compare(board, served, kept)] if plan.presets else []
    for loop in changes:
        with contextlib.closing(loop):
            for study in loop:
                watcher.changed(study)
    return _concluded(kept, board, plan, past)


def report_path(journal: Path) -> Path:
    """Return where the report of a journal goes: beside it, ``.html`` in place of ``.jsonl``."""
    return (
        journal.with_name(journal.name.removesuffix(".jsonl") + ".html")
        if journal.suffix != ".html"
        else (journal.with_name(journal.name + ".report.html"))
    )


def _concluded(kept: Journal, board: Device, plan: Plan, past: Past) -> Tuning:
    """Write profile and report of a study that has ended; what cannot be written is said, and loses nothing else."""
    from polythrottle.catalog.profiles import write_profile
    from polythrottle.report import write_report

    study, page = kept.study, report_path(kept.path)
    out = plan.out or _profile_path(study).absolute()
    facts = {
        **Plan.of(kept.plan).facts(kept.finished),
        **({"window": "as recorded"} if isinstance(board, Recorded) else {}),
    }
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
        ended=kept.finished,
        history=past.lessons,
        risk=plan.risk,
    )


def report_facts(journal: Path) -> dict[str, str]:
    """Return what a journal tells that is not in its study: why it ended, the risk taken, what was learnt from."""
    with contextlib.suppress(BadFile):
        return Plan.of(journals.heading(journal)["plan"]).facts(journals.ending(journal))
    return {}


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
