"""The tuning loop: suggest, journal, measure, journal, again."""

import contextlib
import math
from collections.abc import Callable, Generator, Iterator
from dataclasses import replace

from polythrottle.backends.meters import unmetered
from polythrottle.domain.error_budget import NOTHING_SPENT, LateRequests
from polythrottle.domain.errors import Exhausted, InvalidInput, KnobAbsent, StorageError, TrialError
from polythrottle.domain.measurement import Measurement, Reading
from polythrottle.domain.metrics import why_untold
from polythrottle.domain.ports import Chooser, Concurrent, Device, Optimizer, Recorded, Rewindable, Workload
from polythrottle.domain.problem import Constraint, Objective, Problem
from polythrottle.domain.space import CONCURRENCY, OperatingPoint
from polythrottle.domain.study import RECORDED_ITEMS, Cost, Reference, Study, Trial, TrialState
from polythrottle.metering.early_stopping import Goal
from polythrottle.metering.error_budget_guard import CUT, RequestWatch
from polythrottle.metering.load import batch_of
from polythrottle.metering.point_measurement import Closing, Hosted, measure, unwatched
from polythrottle.metering.validity import check_reference
from polythrottle.storage.journal import Journal
from polythrottle.tuning.plan import StudyPlan
from polythrottle.tuning.stopping import ALL_TRIED, Budget, Outlook, Rule, with_most_left

FAILURES_IN_A_ROW = 5
ERRORS_USED = "error budget used"
_LEAST_SEEN = 3
"""How many requests a window has before it is cut short for what they show, so that it shows something."""
_REFERENCE_NUMBERS = 1_000_000
_REST_S = 1.0


def tune(
    device: Device,
    workload: Workload,
    optimizer: Optimizer,
    journal: Journal,
    budget: Budget,
    rule: Rule,
    most_late: float | None = None,
    entered: Callable[[], object] = lambda: None,
) -> Generator[Study]:
    """Continue a study until its budget is used or going on is not worth it; yields it when a trial starts or ends.

    The journal is written before the device is touched and again once the trial is known, so a study killed at any
    moment goes on from there. The device is restored whenever the loop is left, however that happens.

    Args:
        device: Not entered yet.
        workload: Serves queries on that device.
        optimizer: Suggests the next point; if it is a `Forecaster`, it is asked before what that would be worth.
        journal: Of this problem; holds the trials made so far, and in the end why there are no more.
        budget: What the study may use in the end, earlier trials counted.
        rule: When one more trial is not worth it.
        most_late: How many requests may be late beyond the SLO's own share, earlier trials counted; any number if None.
        entered: Is called once the device is entered, before any trial; raises if none is to be made.

    Raises:
        InvalidInput: If that cannot be seen of each request before it is sent.
        TrialError: If the default point cannot be measured, or `FAILURES_IN_A_ROW` trials in a row failed.
        DeviceError: If the device is lost.
        StorageError: If the journal cannot be written.
    """
    # A journal that is reopened may already be hopeless: then the hardware is not touched at all.
    _give_up_if_hopeless(journal)
    outlook = Outlook(optimizer)
    costs = _Costs(device)
    with device:
        entered()
        while (used := budget.used(journal.study)) is None:
            # Before the search method is asked: where time is real, its thinking is part of what the trial costs.
            costs.begin(len(journal.study.trials))
            enough = rule.reason(journal.study, outlook.saving_left, outlook.dares, outlook.held_back)
            if enough is not None:
                _finish(journal, optimizer, enough)
                return
            try:
                point = _next(optimizer, journal.study, device, budget)
            except Exhausted as error:
                count = len(journal.study.visited)
                points = len(journal.study.problem.space)
                _finish(journal, optimizer, f"{ALL_TRIED}: {points}" if count >= points else str(error))
                return
            trial = Trial(len(journal.study.trials), point)
            watch = (
                None
                if most_late is None
                else watch_of(journal.study.problem, workload, point, most_late, journal.spent)
            )
            if watch is not None and not watch.affordable:
                _finish(journal, optimizer, f"{ERRORS_USED}: {watch.shortage}")
                return
            with _counted(journal, trial, watch):
                # On disk before the hardware is touched: a crash then leaves a trial that is known to have failed.
                yield journal.started(trial, None if watch is None else watch.allowance)
                study = _visit(device, workload, journal, trial, costs=costs, watch=watch)
            yield study
            if watch is not None and watch.last and watch.cut:
                _finish(journal, optimizer, f"{ERRORS_USED}: {watch.cut.partition(': ')[2]} in the last trial")
                return
            _give_up_if_hopeless(journal)
        _finish(journal, optimizer, used)


def watch_of(
    problem: Problem, workload: Workload, point: OperatingPoint, most_late: float, spent: LateRequests
) -> RequestWatch:
    """Return what watches the requests of a trial, given what those before it have spent.

    Args:
        problem: Whose limits count.
        workload: Serves the requests.
        point: Where the trial goes.
        most_late: How many requests may be late beyond the SLO's own share, all trials together.
        spent: What trials before have spent.
    """
    warmup = problem.window.warmup
    if not problem.arrivals.closed:
        under_way = batch_of(workload, point)
    elif isinstance(workload, (Concurrent, Hosted)):
        under_way = int(point.get(CONCURRENCY, workload.concurrency))
        warmup = max(warmup, under_way)
    else:
        under_way = 1
    return RequestWatch(
        problem.constraints,
        spent,
        most_late,
        under_way=under_way,
        least=warmup + _LEAST_SEEN,
    )


def check_errors(plan: StudyPlan, board: Device, served: Workload, problem: Problem) -> None:
    """Check that an error budget can be kept here, and suffices for a first request.

    Raises:
        InvalidInput: If not.
    """
    if plan.errors is None:
        return
    if why := unwatched(unmetered(board), served):
        raise InvalidInput(why)
    most = plan.errors.requests(problem, plan.budget.trials)
    watch = watch_of(problem, served, problem.space.default, most, NOTHING_SPENT)
    if not watch.affordable:
        raise InvalidInput(f"an error budget of {plan.errors} is too small to begin: {watch.shortage}; write more")


@contextlib.contextmanager
def _counted(journal: Journal, trial: Trial, watch: RequestWatch | None) -> Iterator[None]:
    """Have a trial that is left before it has ended spend of the error budget what it did, and not all it might have.

    Args:
        journal: Of the study.
        trial: Which has been begun.
        watch: Of its requests; None where none are counted.
    """
    try:
        yield
    # GeneratorExit and Ctrl-C as well: whoever goes through the trials may stop in the middle of one.
    except BaseException:
        if watch is not None and trial.number < len(journal.study.trials):
            # Without that line all that the trial was allowed counts as spent, which is too much and never too little.
            with contextlib.suppress(StorageError):
                journal.interrupted(trial, watch.spent)
        raise


def compare(
    device: Device, workload: Workload, journal: Journal, budget: Budget, told: Callable[[str], None]
) -> Generator[Study]:
    """Measure the presets of the device that the study does not know yet; yields the study after each.

    A preset that cannot be measured is left out: it is there for comparison only. So are those that would begin when
    the time or energy of the budget is used up, by trials and presets together.

    Args:
        device: Not entered yet.
        workload: Serves queries on that device.
        journal: Of the study, whose search has ended.
        budget: What the study may use in the end.
        told: Called with a line that names the presets for which it does not suffice.
    """
    known = {reference.name for reference in journal.study.references}
    costs = _Costs(device)
    lost = Cost()
    with device:
        for number, (name, point) in enumerate(device.presets.items()):
            if name in known:
                continue
            if (used := budget.spent(_used(journal.study) + lost)) is not None:
                names = (each for each in list(device.presets)[number:] if each not in known)
                told(f"{used}; presets not measured for comparison: {', '.join(names)}")
                return
            # Numbers of their own, so that a simulated board draws for presets what it draws for no trial.
            costs.begin(_REFERENCE_NUMBERS + number)
            whole = OperatingPoint({**workload.space.default, **point})
            try:
                problem = journal.study.problem
                measurement = measure(
                    device,
                    workload,
                    whole,
                    problem.window,
                    arrivals=problem.arrivals,
                    seed=journal.study.seed,
                    goal=_goal(journal.study, ()),
                )
                measurement = _judged(journal.study, measurement)
            # Journalled nowhere, so the next study asks for it again.
            except TrialError:
                lost += costs.end(None)
                continue
            yield journal.referred(Reference(name, whole, measurement, costs.end(measurement)))


def _used(study: Study) -> Cost:
    """Return what trials and presets took together."""
    return study.cost + study.presets_cost


def _finish(journal: Journal, optimizer: Optimizer, reason: str) -> None:
    """End a study, with the point that its search method chooses, if it does."""
    if isinstance(optimizer, Chooser) and journal.study.judgeable:
        chosen = optimizer.answer(journal.study)
    else:
        chosen = None
    words = with_most_left(reason, optimizer, journal.study, chosen or journal.study.best)
    journal.finish(words, None if chosen is None else chosen.number)


def _next(optimizer: Optimizer, study: Study, device: Device, budget: Budget) -> OperatingPoint:
    """Return the next point; the default while nothing else tells what relative limits multiply, and once in doubt.

    A recorded window cannot be looked through again.

    Raises:
        Exhausted: If there is none, or what the presets of a study that ended before took has left nothing for it.
    """
    default = study.problem.space.default
    # A saving too good to be true is more often a wrong default than a miracle, so that is measured again.
    again = study.doubtful and not isinstance(device, Recorded)
    if again or (not study.judgeable and default not in study.visited):
        point = default
    else:
        point = optimizer.suggest(study)
    # Last, so that whatever else ended a study is still said once it is resumed.
    if (used := budget.spent(_used(study))) is not None:
        raise Exhausted(used)
    return point


def _visit(
    device: Device,
    workload: Workload,
    journal: Journal,
    trial: Trial,
    *,
    costs: "_Costs",
    watch: RequestWatch | None,
) -> Study:
    study = journal.study
    try:
        limits = _limits(study, trial)
        problem = study.problem
        measurement = measure(
            device,
            workload,
            trial.point,
            problem.window,
            limits,
            arrivals=problem.arrivals,
            seed=study.seed,
            goal=_goal(study, limits),
            watch=watch,
        )
        measurement = _judged(study, measurement)
        if trial.point == problem.space.default:
            check_reference(measurement, problem.constraints)
    except TrialError as error:
        absent = error.knob if isinstance(error, KnobAbsent) and error.knob in trial.point else None
        failed = replace(trial, failure=str(error), cost=costs.end(None), absent=absent)
        return journal.failed(failed, _spent(watch))
    return journal.completed(replace(trial, measurement=measurement, cost=costs.end(measurement)), _spent(watch))


def _spent(watch: RequestWatch | None) -> LateRequests | None:
    return None if watch is None else watch.spent


def _limits(study: Study, trial: Trial) -> tuple[Constraint, ...]:
    """Return what a trial may be cut short for breaking: nothing at the default, which all others are judged by."""
    if trial.point == study.problem.space.default or not study.judgeable:
        return ()
    return study.constraints


def _goal(study: Study, limits: tuple[Constraint, ...]) -> Goal:
    """Return what a trial is to find out: what others will be judged by, later whether it is any better."""
    asked = study.constraints if study.judgeable else study.problem.constraints
    judged = tuple(constraint for constraint in asked if not constraint.relative)
    if not limits:
        return Goal(precise=tuple(constraint.metric for constraint in study.problem.constraints), judged=judged)
    best = study.best if study.problem.objective is Objective.ENERGY else None
    return Goal(limits, beat_j=best.measurement.energy_j if best and best.measurement else None, judged=judged)


def _judged(study: Study, measurement: Measurement) -> Measurement:
    """Return a measurement that holds all the study needs to judge it."""
    for constraint in study.problem.constraints:
        if measurement.metric(constraint.metric) is None:
            lack = f"{constraint.metric} is not measured here{why_untold(constraint.metric)}"
            raise TrialError(f"{lack}, so {constraint} cannot be judged")
    return measurement


class _Costs:
    """What trials cost, each from where the one before it ended: over SSH a reading is a round trip.

    Args:
        device: On which they are made; entered before the first.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._start: Reading | None = None
        self._ended_s = -math.inf

    def begin(self, number: int) -> None:
        """Begin a trial, before it is known where it goes."""
        if isinstance(self._device, Rewindable):
            self._device.rewind(number)
            self._start = None
        # Whoever goes through the trials may rest between two of them, which is no cost of the next.
        if self._start is None or self._device.clock.now() - self._ended_s > _REST_S:
            self._start = self._device.read()

    def end(self, measurement: Measurement | None) -> Cost:
        """Return what a trial took; on a recorded device, what serving `RECORDED_ITEMS` items there would have taken.

        Args:
            measurement: What it measured; None if it failed.
        """
        if isinstance(self._device, Recorded):
            if measurement is None:
                return Cost()
            return Cost(RECORDED_ITEMS / measurement.throughput_per_s, RECORDED_ITEMS * measurement.energy_j)
        start = self._start
        assert start is not None
        if isinstance(self._device, Closing):
            end = self._device.closing()
        else:
            end = self._device.read()
        self._start = end
        self._ended_s = self._device.clock.now()
        return Cost(max(0.0, end.time_s - start.time_s), max(0.0, end.energy_j - start.energy_j))


def _give_up_if_hopeless(journal: Journal) -> None:
    """End a study that has nothing to compare with, or in which nothing works any more."""
    trials = journal.study.trials
    if not trials or trials[-1].state is not TrialState.FAILED:
        return
    # Those that the error budget cut short say nothing against the device or the workload.
    newest = [trial for trial in trials if not (trial.failure or "").startswith(CUT)][-FAILURES_IN_A_ROW:]
    if trials[-1].point == journal.study.problem.space.default and journal.study.default is None:
        reason = f"the default point cannot be measured: {trials[-1].failure}"
    elif len(newest) == FAILURES_IN_A_ROW and all(trial.state is TrialState.FAILED for trial in newest):
        reason = f"{FAILURES_IN_A_ROW} trials in a row failed; the last: {trials[-1].failure}"
    else:
        return
    journal.finish(f"given up: {reason}")
    raise TrialError(reason)
