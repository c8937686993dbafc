"""The Python API: open a device and a workload, tune them, and ask of a study, a profile or a machine.

The command line is a thin shell around these functions; whatever it can do, a program can.
"""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from numbers import Integral, Real
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING

from polythrottle.errors import BadFile, InvalidInput
from polythrottle.experiments import IDLE_S, energy, measure, notes, sweep
from polythrottle.journal import Journal
from polythrottle.measurement import EXTRAS, METRICS, EnergyKind, Window
from polythrottle.objects import Served, checked_optimizer, type_name
from polythrottle.optimize import PACKAGES, Options, make_optimizer
from polythrottle.optimize.prior import Primed
from polythrottle.outcome import Tuning, conclude, find_study, usual_path
from polythrottle.past import Past, recalled
from polythrottle.plan import Plan
from polythrottle.ports import Device, Meter, Optimizer, Workload
from polythrottle.problem import Constraint, Objective, Problem
from polythrottle.progress import Watcher, study_progress
from polythrottle.remarks import beforehand, meanwhile, narrowed, unsteered
from polythrottle.requirements import check_importable
from polythrottle.setup import Setup
from polythrottle.space import Level, OperatingPoint
from polythrottle.stopping import Budget, Rule, span_s
from polythrottle.studies import check_same_problem, open_study
from polythrottle.study import Study

if TYPE_CHECKING:
    from polythrottle.comparing.checked import Checked
    from polythrottle.diagnosis import Examination
    from polythrottle.explanation import Explanation


__all__ = ["check", "doctor", "energy", "explain", "measure", "read_journal", "resume", "sweep", "tune"]


def tune(
    device: str | Device = "auto",
    workload: str | Served | None = None,
    slo: Sequence[str] | str = (),
    *,
    objective: str = "energy",
    trials: int = 30,
    minutes: float | None = None,
    joules: float | None = None,
    horizon: str | None = None,
    early_stop: bool = True,
    method: str | Optimizer = "bayes",
    seed: int = 0,
    risk: float | None = None,
    history: Sequence[Path | str] | None = None,
    priors: Sequence[Path | str] = (),
    setup: Setup | None = None,
    meter: Meter | None = None,
    window: Window | None = None,
    presets: bool = True,
    journal: Path | str | None = None,
    fresh: bool = False,
    out: Path | str | None = None,
    force: bool = False,
    progress: bool | None = None,
    watcher: Watcher | None = None,
) -> Tuning:
    """Find the operating point that holds the SLO at the least energy per item, or is best by another objective.

    An unfinished study of the same problem is continued. Profile and report are written beside the journal's answer.
    Device, workload and method may be objects that satisfy `polythrottle.ports`. A study of objects has a journal too,
    but `resume` cannot open them again: it goes on when `tune` is called again with the same objects.

    Args:
        device: Device URI, or a device; ``auto`` takes the real one that is here.
        workload: Workload URI, a workload, a function whose every call is one query (``f()``, ``f(batch_size)`` or
            ``f(batch_size, threads)``), or a torch module. A workload given as an object is not closed.
        slo: Constraints such as ``p99<=25ms``; none minimises energy alone.
        objective: What is minimised: ``energy`` per item, ``edp`` (that times mean latency), mean ``latency``, or
            ``pareto`` for the whole front of latency and energy (`Study.front`).
        trials: How many points to try at most.
        minutes: How long to search at most, on the device's clock; no bound if None.
        joules: How much energy the search may use; no bound if None.
        horizon: How long the answer will be used, such as ``30d``: the search ends when one more trial costs more
            energy than it is expected to save until then.
        early_stop: Whether to end when next to nothing is left to save.
        method: ``bayes``, ``random``, ``grid``, …, or a search method.
        seed: Randomness of the method.
        risk: Highest chance of breaking a limit a trial may have once a feasible point is known; the method's own
            choice if None.
        history: Journals, tables, or folders of them to learn from; if None, the studies of this device or workload in
            the state folder, unless the device is a recorded table; if empty, nothing.
        priors: Profiles, of whatever board, whose points are tried right after the default, each at the nearest point
            of this space.
        setup: Device and workload with all their options; its names override both, objects given beside it stay.
        meter: An external meter whose joules count instead of the device's own (`polythrottle.ports.EnergyMeter`,
            `polythrottle.ports.PowerMeter`).
        window: How long each trial looks.
        presets: Whether to measure the device's presets for comparison.
        journal: The study's file; one under the state folder if None.
        fresh: Start a new study even if an unfinished one is there.
        out: The profile's file; one in the state folder for this device, workload and SLO if None. A profile that is
            there and is a better answer to the same question stays.
        force: Whether to replace it all the same.
        progress: Whether to show the newest trials and a bar; if None, on a terminal and in a notebook.
        watcher: Somebody to tell about each change, in place of what is shown.

    Raises:
        PolythrottleError: Any of its kinds, each with one line that says what to do (`polythrottle.errors`).
    """
    from polythrottle.catalog.profiles import check_replaceable

    if not isinstance(seed, int) or not 0 <= seed < 2**63:
        raise InvalidInput(f"a seed is a whole number from 0 to 2^63 - 1, not {seed}")
    _check_types(trials=trials, minutes=minutes, joules=joules, horizon=horizon, objective=objective, risk=risk)
    if not isinstance(window, Window | None):
        raise InvalidInput(f"window is a polythrottle.Window, such as Window(duration_s=1.0), not {window!r}")
    out = _checked_out(out, journal)
    setup = Setup.of(device, workload, meter, setup).searching
    budget = Budget(trials, None if minutes is None else 60 * minutes, joules)
    rule, goal = Rule(None if horizon is None else span_s(horizon), early_stop), Objective.parse(objective)
    _check_horizon(horizon, goal)
    name, own = (method, None) if isinstance(method, str) else (type_name(method), checked_optimizer(method))
    fleeting = (*setup.objects.fleeting, *(("method",) if own else ()))
    plan = Plan(setup, budget, rule, presets, out, risk, _asked(history), priors=_points_of(priors), objects=fleeting)
    board, served = setup.open()
    with setup.closing(served):
        setup.check_placed(board, served)
        plan.check(name)
        _check_joules(board, budget)
        problem = _problem(board, served, slo, window or setup.window(board))
        problem = problem if window else _with_idle(problem, board, setup)
        problem = replace(problem, content=setup.content(board, served), objective=goal, arrivals=setup.traffic)
        study = Study(problem, name, seed)
        check_replaceable(out or usual_path(problem))
        _check_packages(name)  # the last of the checks: it imports what takes seconds
        with (
            open_study(study, Path(journal).absolute() if journal else None, fresh, plan) as (kept, past),
            study_progress(progress, watcher, partial(_to_go_on, plan)) as shown,
        ):
            return _run(board, served, kept, plan, past, force, shown, own)


def _check_types(**given: object) -> None:
    """Check the kinds of what Python passes as it is and the command line has parsed.

    Raises:
        InvalidInput: If one is of another kind; says which.
    """
    kinds: dict[str, tuple[tuple[type, ...], str]] = {
        "trials": ((Integral,), "a whole number"),
        "minutes": ((Real, NoneType), "a number of minutes"),
        "joules": ((Real, NoneType), "a number of joules"),
        "risk": ((Real, NoneType), "a number between 0 and 1"),
        "horizon": ((str, NoneType), "a time with its unit, such as '30d'"),
        "objective": ((str,), "energy, edp, latency or pareto"),
    }
    for name, value in given.items():
        types, words = kinds[name]
        if not isinstance(value, types):
            raise InvalidInput(f"{name} is {words}, not {value!r}")


def _check_packages(method: str) -> None:
    """Check, before any trial, that what the search and the report will need can be imported."""
    needs = PACKAGES.get(method, ())
    check_importable(needs, f"method {method}", "install it (pip install torch botorch), or search with method grid")
    check_importable(("matplotlib",), "the report", "install it (pip install matplotlib)")


def _to_go_on(plan: Plan, journal: Path) -> str:
    """Return how a study that was interrupted goes on, for people who called `tune`."""
    return f"{journal}: {plan.to_go_on}" if plan.objects else f"resume with: polythrottle.resume({str(journal)!r})"


def resume(
    journal: Path | str,
    *,
    trials: int | None = None,
    minutes: float | None = None,
    joules: float | None = None,
    horizon: str | None = None,
    early_stop: bool | None = None,
    out: Path | str | None = None,
    force: bool = False,
    progress: bool | None = None,
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
        progress: Whether to show the newest trials and a bar; if None, on a terminal and in a notebook.
        watcher: Somebody to tell about each change, in place of what is shown.

    Raises:
        BadFile: If the file is not a journal, the device or workload it names is not the same any more, or they were
            objects, which nobody can open again: says to call `tune` with them.
        PolythrottleError: As `tune`.
    """
    journal = Path(journal)
    out = _checked_out(out, journal)
    with Journal.reopen(journal.absolute()) as kept:
        begun = Plan.of(kept.plan)
        if begun.objects:
            raise BadFile(f"{journal} cannot be resumed by itself: {begun.to_go_on}")
        plan = begun.changed(trials=trials, minutes=minutes, joules=joules, horizon=horizon, early_stop=early_stop)
        plan = replace(plan, out=out or plan.out)
        board, served = plan.setup.open()
        with contextlib.closing(served), study_progress(progress, watcher, partial(_to_go_on, plan)) as shown:
            _check_packages(kept.study.method)
            _check_joules(board, plan.budget)
            plan.setup.check_placed(board, served)
            content = plan.setup.content(board, served)
            asked = replace(kept.study.problem, space=board.space * served.space, content=content)
            check_same_problem(journal, kept.study, replace(kept.study, problem=asked, trials=(), references=()))
            return _run(board, served, kept, plan, recalled(plan.lessons), force, shown)


def read_journal(path: Path | str) -> Study:
    """Return the study a journal holds, finished or not; the file is neither changed nor locked.

    Args:
        path: The study's file, as `tune` names it in ``journal_path``.

    Raises:
        BadFile: If there is no such file, or it is not a journal, or of a newer format; names the line.
    """
    from polythrottle.journal import read

    if not isinstance(path, Path | str):
        raise InvalidInput(f"a journal is the path of its file, not {path!r}")
    return read(Path(path))


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


def _checked_out(out: Path | str | None, journal: Path | str | None) -> Path | None:
    """Return the profile's path made absolute, before anything runs that could not be kept."""
    from polythrottle.catalog.profiles import check_replaceable

    if out is None:
        return None
    path = Path(out).absolute()
    if journal is not None and path == Path(journal).absolute():
        raise InvalidInput(f"{out} cannot be both the journal and the profile")
    check_replaceable(path)
    return path


def check(
    profile: Path | str,
    device: str = "auto",
    workload: str | None = None,
    *,
    max_regress: float = 0.03,
    setup: Setup | None = None,
    other_model: bool = False,
    looked: "Callable[[Checked], object] | None" = None,
) -> "Checked":
    """Measure a profile's point again until it is known whether the profile still keeps its word.

    It does not if ``regressed`` (energy per item has grown) or ``broken`` (limits that no longer hold) say so.

    Args:
        profile: Its file, or ``<device>/<workload>``.
        device: Device URI; ``auto`` is the profile's own.
        workload: Workload URI; the profile's own if None.
        max_regress: The share by which energy per item may have grown, from 0 to below 1.
        setup: Device and workload with all their options; overrides both names.
        other_model: Whether to measure another model than the one it was tuned for.
        looked: Called after each window with what is known by then.

    Raises:
        UnknownName: If there is no such profile.
        BadFile: If it is for other hardware or another model, or its joules are not those measured here.
        PolythrottleError: As `measure`.
    """
    from polythrottle.sides import check_profile

    if not isinstance(max_regress, int | float):
        raise InvalidInput(f"max_regress is a share such as 0.03, not {max_regress!r}")
    found = None
    for found in check_profile(str(profile), setup or Setup(device, workload), max_regress, other_model=other_model):
        if looked is not None:
            looked(found)
    assert found is not None
    return found


def explain(study: Study | Tuning | Path | str) -> "Explanation":
    """Return what binds at a study's best point, what each knob saved, and what another limit would buy.

    Args:
        study: A study, what `tune` returned, a journal's path, a profile's file, or ``<device>/<workload>`` for the
            newest study of both in the state folder; finished or not.

    Raises:
        BadFile: If the file is not a journal.
        UnknownName: If there is no study of that name.
    """
    from polythrottle.explanation import explain as explain_study
    from polythrottle.journal import read

    if isinstance(study, Tuning):
        return explain_study(study.study)
    if not isinstance(study, Study | Path | str):
        raise InvalidInput(f"a study, a tuning or a journal's path can be explained, not {study!r}")
    return explain_study(study if isinstance(study, Study) else read(find_study(study)))


def doctor(device: str | None = None) -> "Examination":
    """Return what works on this machine and what does not, why, and who else steers the clocks; writes nothing.

    Args:
        device: Device URI; every real device that is here if None.

    Raises:
        InvalidInput: If the URI is malformed.
        UnknownName: If its scheme is not known.
    """
    from polythrottle.diagnosis import examine

    return examine(device)


def _problem(board: Device, served: Workload, slo: Sequence[str] | str, window: Window) -> Problem:
    from polythrottle.backends.replay import ReplayDevice

    texts = [slo] if isinstance(slo, str) else slo
    if not isinstance(texts, Sequence) or not all(isinstance(text, str) for text in texts):
        raise InvalidInput(f"an SLO is a text such as 'p99<=25ms', or a list of them, not {slo!r}")
    constraints = tuple(map(Constraint.parse, texts))
    reference = dict(board.reference) if isinstance(board, ReplayDevice) else {}
    for constraint in constraints:
        if reference and constraint.metric not in reference:
            known = ", ".join(reference)
            raise InvalidInput(f"{constraint}: {board.title} records no {constraint.metric}; it has {known}")
    _check_simulated(board, constraints)
    used = {constraint.metric for constraint in constraints if constraint.relative}
    kept = {metric: value for metric, value in reference.items() if metric in used}
    return Problem(board.space * served.space, constraints, board.uri, served.uri, kept, window)


def _check_simulated(board: Device, constraints: Sequence[Constraint]) -> None:
    """Check, before any trial, that a simulation has what the limits are on."""
    from polythrottle.backends.simulated import SimulatedDevice

    for constraint in constraints if isinstance(board, SimulatedDevice) else ():
        if constraint.metric in EXTRAS:
            known = ", ".join(metric for metric in METRICS if metric not in EXTRAS)
            raise InvalidInput(
                f"{constraint}: {board.title} simulates whole answers and knows no {constraint.metric}; it has {known}"
            )


def _with_idle(problem: Problem, board: Device, setup: Setup) -> Problem:
    """Return a problem whose trials look at idle power too where points along load can be made of them."""
    bounded = any(constraint.metric == "p99" for constraint in problem.constraints)
    if not bounded or not setup.traffic.closed or problem.recorded or board.energy_kind is EnergyKind.RELATIVE:
        return problem
    return replace(problem, window=replace(problem.window, idle_s=IDLE_S))


def _run(
    board: Device,
    served: Workload,
    kept: Journal,
    plan: Plan,
    past: Past,
    force: bool,
    watcher: Watcher,
    own: Optimizer | None = None,
) -> Tuning:
    from polythrottle import tuner
    from polythrottle.meter.calibration import passed_over

    watcher.opened(kept.study, kept.path, plan.budget.trials)
    before = notes(served)
    advice = "; --no-history starts afresh" if plan.history is None else ""
    known = (*past.words(kept.study.problem, advice), *beforehand(kept.study), *passed_over(board))
    for line in (*known, *unsteered(board), *narrowed(board), *before):
        watcher.told(line)
    presets = tuple(OperatingPoint({**served.space.default, **point}) for point in board.presets.values())
    optimizer = own or make_optimizer(kept.study.method, Options(past.studies, plan.risk, presets))
    if plan.priors:
        optimizer = primed = Primed(optimizer, plan.priors)
        watcher.told(primed.words(kept.study.problem.space))
    with contextlib.closing(tuner.tune(board, served, optimizer, kept, plan.budget, plan.rule)) as loop:
        for study in loop:
            watcher.changed(study)
            for line in meanwhile(study, plan.risk):
                watcher.told(line)
    for line in (line for line in notes(served) if line not in before):
        watcher.told(line)
    if plan.presets:
        with contextlib.closing(tuner.compare(board, served, kept)) as loop:
            for study in loop:
                watcher.changed(study)
    return conclude(kept, board, plan, past, force)
