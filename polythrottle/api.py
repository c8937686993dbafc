"""The Python API: open a device and a workload, and tune, measure or sweep them.

The command line is a thin shell around these functions; whatever it can do, a program can.
"""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from polythrottle.errors import InvalidInput, UnknownName
from polythrottle.journal import Journal
from polythrottle.measurement import EnergyKind, Measurement, Window
from polythrottle.optimize import Options, make_optimizer
from polythrottle.optimize.prior import Primed
from polythrottle.outcome import Tuning, conclude
from polythrottle.past import Past, recalled
from polythrottle.plan import Plan
from polythrottle.ports import Device, Noting, Workload
from polythrottle.problem import Constraint, Objective, Problem
from polythrottle.remarks import afterwards, beforehand, meanwhile, unsteered
from polythrottle.setup import Setup
from polythrottle.space import Level, OperatingPoint, SearchSpace
from polythrottle.stopping import Budget, Rule, span_s
from polythrottle.studies import check_same_problem, open_study
from polythrottle.study import Study

if TYPE_CHECKING:
    from polythrottle.meter import Attribution

_IDLE_S = 1.0
"""How long the device is looked at without work: by `measure`, and by `tune` where the p99 is limited."""


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
    priors: Sequence[Path | str] = (),
    setup: Setup | None = None,
    window: Window | None = None,
    presets: bool = True,
    journal: Path | None = None,
    fresh: bool = False,
    out: Path | None = None,
    force: bool = False,
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
        priors: Profiles, of whatever board, whose points are tried right after the default, each at the nearest point
            of this space.
        setup: Device and workload with all their options; overrides both names.
        window: How long each trial looks.
        presets: Whether to measure the device's presets for comparison.
        journal: The study's file; one under the state folder if None.
        fresh: Start a new study even if an unfinished one is there.
        out: The profile's file; ``profiles/tuned/<device>/<workload>.toml`` if None. A profile that is there and is a
            better answer to the same question stays.
        force: Whether to replace it all the same.
        watcher: Somebody to tell about each change.

    Raises:
        PolythrottleError: Any of its kinds, each with one line that says what to do (`polythrottle.errors`).
    """
    if not 0 <= seed < 2**63:
        raise InvalidInput(f"a seed is a whole number from 0 to 2^63 - 1, not {seed}")
    out = _checked_out(out, journal)
    setup = (setup or Setup(device, workload)).searching
    budget = Budget(trials, None if minutes is None else 60 * minutes, joules)
    rule, goal = Rule(None if horizon is None else span_s(horizon), early_stop), Objective.parse(objective)
    _check_horizon(horizon, goal)
    plan = Plan(setup, budget, rule, presets, out, risk, _asked(history), priors=_points_of(priors))
    board, served = setup.open()
    with contextlib.closing(served):
        plan.check(method)
        _check_joules(board, budget)
        problem = _problem(board, served, slo, window or setup.window(board))
        problem = problem if window else _with_idle(problem, board, setup)
        problem = replace(problem, content=setup.content(board), objective=goal, arrivals=setup.traffic)
        study = Study(problem, method, seed)
        with open_study(study, journal and journal.absolute(), fresh, plan) as (kept, past):
            return _run(board, served, kept, plan, past, force, watcher or Silence())


def resume(
    journal: Path,
    *,
    trials: int | None = None,
    minutes: float | None = None,
    joules: float | None = None,
    horizon: str | None = None,
    early_stop: bool | None = None,
    out: Path | None = None,
    force: bool = False,
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
        force: Whether to replace a profile that is better.
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
            return _run(board, served, kept, plan, recalled(plan.lessons), force, watcher or Silence())


def _points_of(profiles: Sequence[Path | str]) -> tuple[Mapping[str, Level], ...]:
    """Return the points of tuned profiles."""
    from polythrottle.catalog.profiles import find_profile, read_profile

    return tuple(dict(read_profile(find_profile(str(profile))).point) for profile in profiles)


def _asked(history: Sequence[Path | str] | None) -> tuple[str, ...] | None:
    """Return the files somebody named, each in the one form by which it is known again."""
    if history is None:
        return None
    paths = [history] if isinstance(history, str | Path) else history
    if not all(str(path).strip() for path in paths):
        raise InvalidInput("an empty name is no history; name a journal, a table or a folder (. is the current one)")
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
    told: Callable[[str], object] | None = None,
    kept: "Callable[[Attribution], object] | None" = None,
) -> tuple[OperatingPoint, Measurement]:
    """Return the measurement of one point, and the point.

    Args:
        device: Device URI.
        workload: Workload URI.
        point: Levels in SI by knob; knobs that are not named stay at their default.
        preset: Start from this preset of the device instead of its default.
        setup: Device and workload with all their options; overrides both names.
        window: How long to look.
        told: Called with each line a user should read beside the figures.
        kept: Called with the energy of the window request by request (`polythrottle.meter.Attribution`).

    Raises:
        UnknownName: If the device and workload have no such knob or preset.
        InvalidInput: If a knob has no such level; names the nearest. Or if single requests of a recorded table are
            asked for.
        PolythrottleError: As `tune`.
    """
    from polythrottle.meter import measure as measure_point
    from polythrottle.meter.calibration import passed_over

    setup, tell = setup or Setup(device, workload), told or (lambda line: None)
    board, served = setup.open()
    with contextlib.closing(served), board:
        start = _preset(board, preset) if preset is not None else OperatingPoint({})
        whole = start.moved(_point(board.space * served.space, {**start, **(point or {})}, start))
        before = _notes(served)
        for line in (*passed_over(board), *before):
            tell(line)
        looks = window or replace(setup.window(board), idle_s=_IDLE_S)
        found = measure_point(board, served, whole, looks, arrivals=setup.traffic, kept=kept)
        late = tuple(line for line in _notes(served) if line not in before)
        for line in (*late, *afterwards(found, looks, setup.traffic, setup.seconds)):
            tell(line)
        return whole, found


def _notes(served: Workload) -> tuple[str, ...]:
    return served.notes if isinstance(served, Noting) else ()


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


def _with_idle(problem: Problem, board: Device, setup: Setup) -> Problem:
    """Return a problem whose trials look at idle power too where points along load can be made of them."""
    bounded = any(constraint.metric == "p99" for constraint in problem.constraints)
    if not bounded or not setup.traffic.closed or problem.recorded or board.energy_kind is EnergyKind.RELATIVE:
        return problem
    return replace(problem, window=replace(problem.window, idle_s=_IDLE_S))


def _run(
    board: Device, served: Workload, kept: Journal, plan: Plan, past: Past, force: bool, watcher: Watcher
) -> Tuning:
    from polythrottle import tuner
    from polythrottle.meter.calibration import passed_over

    watcher.opened(kept.study, kept.path, plan.budget.trials)
    before = _notes(served)
    advice = "; --no-history starts afresh" if plan.history is None else ""
    known = (*past.words(kept.study.problem, advice), *beforehand(kept.study), *passed_over(board))
    for line in (*known, *unsteered(board), *before):
        watcher.told(line)
    presets = tuple(OperatingPoint({**served.space.default, **point}) for point in board.presets.values())
    optimizer = make_optimizer(kept.study.method, Options(past.studies, plan.risk, presets))
    if plan.priors:
        optimizer = primed = Primed(optimizer, plan.priors)
        watcher.told(primed.words(kept.study.problem.space))
    with contextlib.closing(tuner.tune(board, served, optimizer, kept, plan.budget, plan.rule)) as loop:
        for study in loop:
            watcher.changed(study)
            for line in meanwhile(study, plan.risk):
                watcher.told(line)
    for line in (line for line in _notes(served) if line not in before):
        watcher.told(line)
    if plan.presets:
        with contextlib.closing(tuner.compare(board, served, kept)) as loop:
            for study in loop:
                watcher.changed(study)
    return conclude(kept, board, plan, past, force)
