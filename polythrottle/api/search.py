"""Open a device and a workload, tune them, and ask of a study, a profile or a machine."""

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Integral, Real
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING

from polythrottle.api.experiments import (
    IDLE_S,
    Watcher,
    energy,
    measure,
    notes,
    slo_texts,
    study_progress,
    sweep,
)
from polythrottle.api.many_boards import TogetherOptions, resume_together, tune_together
from polythrottle.api.tuning_result import Tuning, conclude, find_study, on_all_boards, planned, read_study, usual_path
from polythrottle.backends.device_uri import uris_in
from polythrottle.domain.error_budget import ErrorBudget
from polythrottle.domain.errors import BadFile, InvalidInput
from polythrottle.domain.measurement import EnergyKind, Window
from polythrottle.domain.ports import Device, Meter, Optimizer, Workload
from polythrottle.domain.problem import Objective, Problem
from polythrottle.domain.space import Level
from polythrottle.domain.study import Study
from polythrottle.optimize import PACKAGES
from polythrottle.storage.boards_journal import BoardsJournal, journal_kind
from polythrottle.storage.journal import Journal
from polythrottle.tuning.file_trust import accept_resumed, begun_on, checked_plan
from polythrottle.tuning.objects import Served, checked_optimizer, type_name
from polythrottle.tuning.plan import StudyPlan, check_importable
from polythrottle.tuning.remarks import beforehand, meanwhile, narrowed, unsteered
from polythrottle.tuning.setup import Setup, problem_of
from polythrottle.tuning.stopping import Budget
from polythrottle.tuning.study_store import PriorStudies, check_same_problem, method_of, open_study, recalled
from polythrottle.tuning.tuner import check_errors

if TYPE_CHECKING:
    from polythrottle.inspect.examination import Examination
    from polythrottle.metering.comparison import ProfileCheck
    from polythrottle.optimize.explain import Explanation

# The Python API: open a device and a workload, tune them, and ask of a study, a profile or a machine.
#
# The command line is a thin shell around these functions; whatever it can do, a program can.


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
    error_budget: str | None = None,
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
    Device, workload and method may be objects that satisfy `polythrottle.domain.ports`. A study of objects has a
    journal too, but `resume` cannot open them again: it goes on when `tune` is called again with the same objects.

    Args:
        device: Device URI, or a device; ``auto`` takes the real one that is here. Several URIs with commas between them
            search together, or those of a file (``@fleet.txt``, ``@fleet.txt:group``): boards of one kind, a trial at a
            time on each; presets are not measured then.
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
        risk: Chance that the search breaks a limit once a point is known that holds it; presets are not measured then.
            The method's own choice if None.
        error_budget: How many requests all trials together may make late beyond the share that the SLO allows: a share
            of what they may send (``0.1%``), a number (``200``), or what comes in a time (``5min``). Each request is
            counted before it is sent, so that this is never overdrawn; presets are not measured then. Any number if
            None.
        history: Journals, tables, or folders of them to learn from; if None, the studies of this device or workload in
            the state folder, unless the device is a recorded table; if empty, nothing.
        priors: Profiles, of whatever board, whose points are tried right after the default, each at the nearest point
            of this space.
        setup: Device and workload with all their options; its names override both, objects given beside it stay.
        meter: An external meter whose joules count instead of the device's own
            (`polythrottle.domain.ports.EnergyMeter`, `polythrottle.domain.ports.PowerMeter`).
        window: How long each trial looks.
        presets: Whether to measure the device's presets for comparison, after the search; never with a risk, an error
            budget or several boards.
        journal: The study's file; one under the state folder if None.
        fresh: Start a new study even if an unfinished one is there.
        out: The profile's file; one in the state folder for this device, workload and SLO if None. A profile that is
            there and is a better answer to the same question stays.
        force: Whether to replace it all the same.
        progress: Whether to show the newest trials and a bar; if None, on a terminal and in a notebook.
        watcher: Somebody to tell about each change, in place of what is shown.

    Raises:
        PolythrottleError: Any of its kinds, each with one line that says what to do (`polythrottle.domain.errors`).
    """
    _check_kinds(trials=trials, minutes=minutes, joules=joules, horizon=horizon)
    _check_kinds(risk=risk, error_budget=error_budget, objective=objective, window=window)
    name, optimizer = _method(method)
    setup = Setup.of(device, workload, meter, setup).searching
    plan = StudyPlan(
        setup=setup,
        presets=presets,
        out=_checked_out(out, journal),
        risk=risk,
        history=_asked(history),
        priors=_points_of(priors),
        objects=(*setup.objects.fleeting, *["method"] * (optimizer is not None)),
        errors=_error_budget(error_budget),
    ).changed(trials=trials, minutes=minutes, joules=joules, horizon=horizon, early_stop=early_stop)
    options = TuneOptions(
        plan=plan,
        method=name,
        optimizer=optimizer,
        slo=slo_texts(slo),
        objective=Objective.parse(objective),
        window=window,
        seed=seed,
        journal=_absolute(journal),
        fresh=fresh,
    )
    return _begin(options, force, progress, watcher)


def _begin(options: "TuneOptions", force: bool, progress: bool | None, watcher: Watcher | None) -> Tuning:
    """Return what a new study comes to, or one that is continued."""
    if uris := _several_in(options.plan.setup):
        _check_packages(options.method)
        asked = TogetherOptions(uris, options.plan, options.journal, options.fresh, force, options.optimizer)
        return tune_together(asked, options.study, progress, watcher)
    board, served = options.plan.setup.open()
    with options.plan.setup.closing(served):
        study = options.study(board, served)
        # Imports what takes seconds, and is the last of the checks for that.
        _check_packages(study.method)
        with (
            open_study(study, options.journal, options.fresh, begun_on(options.plan, board)) as (kept, past),
            study_progress(progress, watcher, options.plan.resumed_by) as shown,
        ):
            return _Search(board, served, kept, options.plan, past, shown).run(force, options.optimizer)


@dataclass(frozen=True)
class TuneOptions:
    """What `tune` was asked for: each word parsed and checked once, before a device is opened.

    Args:
        plan: Device and workload, what the search may use, and when it ends.
        method: Name of the search method.
        optimizer: The method itself where it was given as an object.
        slo: Constraints as text.
        objective: What is minimised.
        window: How long each trial looks; None as the setup says.
        seed: Randomness of the method.
        journal: The study's file; None for one in the state folder.
        fresh: Whether to begin anew even if an unfinished study is there.
    """

    plan: StudyPlan
    method: str
    optimizer: Optimizer | None
    slo: tuple[str, ...]
    objective: Objective
    window: Window | None
    seed: int
    journal: Path | None
    fresh: bool

    def __post_init__(self) -> None:
        if not isinstance(self.seed, int) or not 0 <= self.seed < 2**63:
            raise InvalidInput(f"a seed is a whole number from 0 to 2^63 - 1, not {self.seed}")
        if self.plan.rule.horizon_s is not None and self.objective is not Objective.ENERGY:
            raise InvalidInput(
                f"a horizon weighs joules saved against joules spent; it has no meaning for {self.objective}"
            )

    def study(self, board: Device, served: Workload) -> Study:
        """Return the study to begin on a device and a workload.

        Raises:
            PolythrottleError: If they, or what is to be written, cannot do what is asked.
        """
        from polythrottle.catalog.tuned_profiles import check_replaceable

        setup = self.plan.setup
        setup.check_placed(board, served)
        self.plan.check(self.method)
        _check_joules(board, self.plan.budget)
        problem = problem_of(board, served, self.slo, self.window or setup.window(board, served))
        if self.window is None:
            problem = _with_idle(problem, board, setup)
        content = setup.content(board, served)
        problem = replace(problem, content=content, objective=self.objective, arrivals=setup.traffic)
        check_errors(self.plan, board, served, problem)
        check_replaceable(self.plan.out or usual_path(problem))
        return Study(problem, self.method, self.seed)


def _method(method: str | Optimizer) -> tuple[str, Optimizer | None]:
    """Return a search method's name, and the method itself where it was given as an object."""
    if isinstance(method, str):
        return method, None
    return type_name(method), checked_optimizer(method)


_KINDS: dict[str, tuple[tuple[type, ...], str]] = {
    # The numbers' own classes, under which those of NumPy are registered as well.
    "trials": ((Integral, NoneType), "a whole number"),
    "minutes": ((Real, NoneType), "a number of minutes"),
    "joules": ((Real, NoneType), "a number of joules"),
    "risk": ((Real, NoneType), "a number between 0 and 1"),
    "error_budget": ((str, NoneType), "a share, a number of requests or a time as text, such as '0.1%'"),
    "horizon": ((str, NoneType), "a time with its unit, such as '30d'"),
    "objective": ((str,), "energy, edp, latency or pareto"),
    "window": ((Window, NoneType), "a polythrottle.Window, such as Window(duration_s=1.0)"),
}
"""The kinds of what Python passes as it is and the command line has parsed, and what to write instead."""


def _check_kinds(**arguments: object) -> None:
    """Check what kinds arguments of `tune` and `resume` are of.

    Raises:
        InvalidInput: If one is of another kind than its name stands for.
    """
    for name, value in arguments.items():
        types, words = _KINDS[name]
        if not isinstance(value, types):
            raise InvalidInput(f"{name} is {words}, not {value!r}")


def _error_budget(text: str | None) -> ErrorBudget | None:
    if text is None:
        return None
    return ErrorBudget.parse(text)


def _absolute(path: Path | str | None) -> Path | None:
    if path is None or path == "":
        return None
    return Path(path).absolute()


def _check_packages(method: str) -> None:
    """Check, before any trial, that what the search and the report will need can be imported."""
    needs = PACKAGES.get(method, ())
    check_importable(needs, f"method {method}", "install it (pip install torch botorch), or search with method grid")
    check_importable(("matplotlib",), "the report", "install it (pip install matplotlib)")


def resume(
    journal: Path | str,
    device: str | None = None,
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
        device: The device URI that the journal names, once more: needed only of one from elsewhere than the state
            folder that names a tree of files or a socket.
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
        InvalidInput: If it names a device or a place for the profile that the user has to name.
        PolythrottleError: As `tune`.
    """
    _check_kinds(trials=trials, minutes=minutes, joules=joules, horizon=horizon)
    journal = Path(journal)
    out = _checked_out(out, journal)
    with journal_kind(journal).reopen(journal.absolute()) as kept:
        begun = planned(journal, kept.plan)
        if begun.objects:
            raise BadFile(f"{journal} cannot be resumed by itself: {begun.to_go_on}")
        plan = begun.changed(trials=trials, minutes=minutes, joules=joules, horizon=horizon, early_stop=early_stop)
        # Before anything is opened: a journal from elsewhere may name whatever it likes.
        plan = checked_plan(journal, plan, device, out)
        with contextlib.ExitStack() as stack:
            shown = stack.enter_context(study_progress(progress, watcher, plan.resumed_by))
            if isinstance(kept, BoardsJournal):
                _check_packages(kept.study.method)
                return resume_together(kept, plan, device, shown, force)
            board, served = plan.setup.open(accept_resumed(journal, kept.study, plan, device, shown.told))
            stack.enter_context(contextlib.closing(served))
            _check_packages(kept.study.method)
            _check_joules(board, plan.budget)
            plan.setup.check_placed(board, served)
            content = plan.setup.content(board, served)
            asked = replace(kept.study.problem, space=board.space * served.space, content=content)
            # What the journal describes and what was opened now: a model or a table may have changed since.
            check_same_problem(journal, kept.study, replace(kept.study, problem=asked, trials=(), references=()))
            return _Search(board, served, kept, plan, recalled(plan.lessons), shown).run(force)


def read_journal(path: Path | str) -> Study:
    """Return the study a journal holds, finished or not; the file is neither changed nor locked.

    What several boards measured is as the slowest of them would have it, with the energy of the mean one.

    Args:
        path: The study's file, as `tune` names it in ``journal_path``.

    Raises:
        BadFile: If there is no such file, or it is not a journal, or of a newer format; names the line.
    """
    from polythrottle.storage.journal import read

    if not isinstance(path, Path | str):
        raise InvalidInput(f"a journal is the path of its file, not {path!r}")
    return on_all_boards(read(Path(path)), Path(path))


def _points_of(profiles: Sequence[Path | str]) -> tuple[Mapping[str, Level], ...]:
    """Return the points of tuned profiles."""
    from polythrottle.catalog.tuned_profiles import find_profile, read_profile

    return tuple(dict(read_profile(find_profile(str(profile))).point) for profile in profiles)


def _asked(history: Sequence[Path | str] | None) -> tuple[str, ...] | None:
    """Return the files somebody named, each in the one form by which it is known again."""
    if history is None:
        return None
    paths = history
    # One name is a sequence too, of its letters.
    if isinstance(history, str | Path):
        paths = [history]
    if not all(str(path).strip() for path in paths):
        raise InvalidInput("an empty name is no history; name a journal, a table or a folder (. is the current one)")
    return tuple(sorted({str(Path(path).absolute()) for path in paths}))


def _check_joules(board: Device, budget: Budget) -> None:
    if budget.energy_j is not None and board.energy_kind is EnergyKind.RELATIVE:
        raise InvalidInput(f"the energy of {board.title} is only relative, so it cannot be bounded in joules")


def _checked_out(out: Path | str | None, journal: Path | str | None) -> Path | None:
    """Return the profile's path made absolute, before anything runs that could not be kept."""
    from polythrottle.catalog.tuned_profiles import check_replaceable

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
    told: Callable[[str], object] = lambda line: None,
    looked: "Callable[[ProfileCheck], object] | None" = None,
) -> "ProfileCheck":
    """Measure a profile's point again until it is known whether the profile still keeps its word.

    It does not if ``regressed`` (energy per item has grown) or ``broken`` (limits that no longer hold) say so.

    Args:
        profile: Its file, or ``<device>/<workload>``.
        device: Device URI; ``auto`` is the profile's own.
        workload: Workload URI; the profile's own if None.
        max_regress: The share by which energy per item may have grown, from 0 to below 1.
        setup: Device and workload with all their options; overrides both names.
        other_model: Whether to measure another model than the one it was tuned for.
        told: Called with what is run because the profile names it, before it is.
        looked: Called after each window with what is known by then.

    Raises:
        UnknownName: If there is no such profile.
        BadFile: If it is for other hardware or another model, or its joules are not those measured here.
        InvalidInput: If it is for a device elsewhere, such as a tree of files, which ``device`` does not name.
        PolythrottleError: As `measure`.
    """
    from polythrottle.tuning.profile_comparison import check_profile

    if not isinstance(max_regress, int | float):
        raise InvalidInput(f"max_regress is a share such as 0.03, not {max_regress!r}")
    checked = None
    words = setup or Setup(device, workload)
    for checked in check_profile(str(profile), words, max_regress, other_model=other_model, told=told):
        if looked is not None:
            looked(checked)
    assert checked is not None, "a profile is looked at once at least"
    return checked


def explain(study: Study | Tuning | Path | str) -> "Explanation":
    """Return what binds at a study's best point, what each knob saved, and what another limit would buy.

    Args:
        study: A study, what `tune` returned, a journal's path, a profile's file, or ``<device>/<workload>`` for the
            newest study of both in the state folder; finished or not.

    Raises:
        BadFile: If the file is not a journal.
        UnknownName: If there is no study of that name.
    """
    from polythrottle.optimize.explain import explain as explain_study

    if isinstance(study, Tuning):
        return explain_study(study.study)
    if isinstance(study, Study):
        return explain_study(study)
    if not isinstance(study, Path | str):
        raise InvalidInput(f"a study, a tuning or a journal's path can be explained, not {study!r}")
    return explain_study(read_study(find_study(study)))


def doctor(device: str | None = None) -> "Examination":
    """Return what works on this machine and what does not, why, and who else steers the clocks; writes nothing.

    Args:
        device: Device URI; every real device that is here if None.

    Raises:
        InvalidInput: If the URI is malformed.
        UnknownName: If its scheme is not known.
    """
    from polythrottle.inspect.examination import examine

    return examine(device)


def _with_idle(problem: Problem, board: Device, setup: Setup) -> Problem:
    """Return a problem whose trials look at idle power too where points along load can be made of them."""
    bounded = any(constraint.metric == "p99" for constraint in problem.constraints)
    if not bounded or not setup.traffic.closed or problem.recorded or board.energy_kind is EnergyKind.RELATIVE:
        return problem
    return replace(problem, window=replace(problem.window, idle_s=IDLE_S))


@dataclass(frozen=True)
class _Search:
    """A study on an open device, to be searched to its end.

    Args:
        board: The device.
        served: The workload.
        kept: The study and its file.
        plan: What is intended with it.
        past: Earlier studies to learn from.
        watcher: Who looks on.
    """

    board: Device
    served: Workload
    kept: Journal
    plan: StudyPlan
    past: PriorStudies
    watcher: Watcher

    def run(self, force: bool, own: Optimizer | None = None) -> Tuning:
        """Return what the search came to, its profile and report written.

        Args:
            force: Whether to replace a profile that is better.
            own: A search method that was given as an object.
        """
        from polythrottle.tuning import tuner

        self.watcher.opened(self.kept.study, self.kept.path, self.plan.budget.trials)
        before = notes(self.served)
        self._tell((*self._remarks(), *before))
        optimizer = method_of(self.kept.study, (self.board, self.served), self.plan, self.past, self.watcher.told, own)
        # As it was begun: more trials on resuming are no reason for more late requests.
        account = StudyPlan.of(self.kept.plan).account(self.kept.study.problem, self.kept.spent)
        most_late = None if account is None else account.most
        loop = tuner.tune(self.board, self.served, optimizer, self.kept, self.plan.budget, self.plan.rule, most_late)
        # Not left to the garbage collector: where a watcher raises, the device is restored before anybody goes on.
        with contextlib.closing(loop):
            for study in loop:
                self.watcher.changed(study)
                self._tell(meanwhile(study, self.plan.risk))
        self._tell(line for line in notes(self.served) if line not in before)
        # Presets are measured for comparison only, which is not worth a late request to whoever bounds them.
        if self.plan.presets and account is None and self.plan.risk is None:
            presets = tuner.compare(self.board, self.served, self.kept, self.plan.budget, self.watcher.told)
            with contextlib.closing(presets) as loop:
                for study in loop:
                    self.watcher.changed(study)
        return conclude(self.kept, self.board, self.plan, self.past, force)

    def _tell(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.watcher.told(line)

    def _remarks(self) -> tuple[str, ...]:
        """Return what is to be known before the first trial."""
        from polythrottle.metering.calibration import passed_over

        study = self.kept.study
        advice = ""
        if self.plan.history is None:
            advice = "; --no-history starts afresh"
        known = (*self.past.words(study.problem, advice), *beforehand(study), *passed_over(self.board))
        if self.plan.setup is not None and self.plan.setup.knobs == ():  # as was asked for
            return (*known, *narrowed(self.board))
        return (*known, *unsteered(self.board), *narrowed(self.board))


def _several_in(setup: Setup) -> tuple[str, ...]:
    """Return the boards that a setup names, if there is more than one.

    Raises:
        InvalidInput: If one is named twice.
    """
    if setup.objects.device is not None:
        return ()
    found = uris_in(setup.device)
    if len(found) > 1:
        return found
    return ()


__all__ = ["check", "doctor", "energy", "explain", "measure", "read_journal", "resume", "sweep", "tune"]
