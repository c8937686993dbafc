"""The tuning loop: suggest, journal, measure, journal, again."""

from collections.abc import Generator

from polythrottle.errors import Exhausted, TrialError
from polythrottle.journal import Journal
from polythrottle.measurement import Measurement
from polythrottle.meter import measure
from polythrottle.ports import Device, Optimizer, Rewindable, Workload
from polythrottle.space import OperatingPoint
from polythrottle.study import Reference, Study, Trial, TrialState

FAILURES_IN_A_ROW = 5
_REFERENCE_NUMBERS = 1_000_000


def tune(device: Device, workload: Workload, optimizer: Optimizer, journal: Journal, trials: int) -> Generator[Study]:
    """Continue a study up to a number of trials; yields it whenever a trial starts or ends.

    The journal is written before the device is touched and again once the trial is known, so a study killed at any
    moment goes on from there. The device is restored whenever the loop is left, however that happens.

    Args:
        device: Not entered yet.
        workload: Serves queries on that device.
        optimizer: Suggests the next point.
        journal: Of this problem; holds the trials made so far.
        trials: How many trials the study shall have in the end, at least 1.

    Raises:
        TrialError: If the default point cannot be measured, or `FAILURES_IN_A_ROW` trials in a row failed.
        DeviceError: If the device is lost.
        StorageError: If the journal cannot be written.
    """
    _give_up_if_hopeless(journal)
    with device:
        while len(journal.study.trials) < trials:
            try:
                point = optimizer.suggest(journal.study)
            except Exhausted:
                journal.finish(f"all {len(journal.study.problem.space)} points tried")
                return
            trial = Trial(len(journal.study.trials), point)
            yield journal.started(trial)
            yield _visit(device, workload, journal, trial)
            _give_up_if_hopeless(journal)
        journal.finish(f"{trials} trials made")


def compare(device: Device, workload: Workload, journal: Journal) -> Generator[Study]:
    """Measure the presets of the device that the study does not know yet; yields the study after each.

    A preset that cannot be measured is left out: it is there for comparison only.
    """
    known = {reference.name for reference in journal.study.references}
    with device:
        for number, (name, point) in enumerate(device.presets.items()):
            if name in known:
                continue
            _rewind(device, _REFERENCE_NUMBERS + number)
            whole = OperatingPoint({**workload.space.default, **point})
            try:
                measurement = _judged(journal.study, measure(device, workload, whole, journal.study.problem.window))
            except TrialError:
                continue
            yield journal.referred(Reference(name, whole, measurement))


def _visit(device: Device, workload: Workload, journal: Journal, trial: Trial) -> Study:
    _rewind(device, trial.number)
    try:
        measurement = _judged(journal.study, measure(device, workload, trial.point, journal.study.problem.window))
    except TrialError as error:
        return journal.failed(Trial(trial.number, trial.point, failure=str(error)))
    return journal.completed(Trial(trial.number, trial.point, measurement))


def _judged(study: Study, measurement: Measurement) -> Measurement:
    """Return a measurement that holds all the study needs to judge it."""
    for constraint in study.problem.constraints:
        if measurement.metric(constraint.metric) is None:
            raise TrialError(f"{constraint.metric} is not measured here, so {constraint} cannot be judged")
    return measurement


def _rewind(device: Device, number: int) -> None:
    if isinstance(device, Rewindable):
        device.rewind(number)


def _give_up_if_hopeless(journal: Journal) -> None:
    """End a study that has nothing to compare with, or in which nothing works any more."""
    trials = journal.study.trials
    if not trials or trials[-1].state is not TrialState.FAILED:
        return
    newest = trials[-FAILURES_IN_A_ROW:]
    if trials[-1].point == journal.study.problem.space.default and journal.study.default is None:
        reason = f"the default point cannot be measured: {trials[-1].failure}"
    elif len(newest) == FAILURES_IN_A_ROW and all(trial.state is TrialState.FAILED for trial in newest):
        reason = f"{FAILURES_IN_A_ROW} trials in a row failed; the last: {trials[-1].failure}"
    else:
        return
    journal.finish(f"given up: {reason}")
    raise TrialError(reason)
