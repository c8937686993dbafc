"""What a user should be told of a study while it runs, a line each, at the moment it becomes so."""

from collections.abc import Iterator

from polythrottle.actuation.limits import KNOBS
from polythrottle.measurement import Measurement
from polythrottle.ports import Device, Inspectable
from polythrottle.problem import Objective
from polythrottle.study import Study, TrialState
from polythrottle.units import show, show_excess

EVERY = 10
"""After every so many completed trials without a feasible one it is said that there is none."""
_ONE_GOAL = frozenset({"paper", "paper-joint", "gradient", "tpe", "gp"})


def beforehand(study: Study) -> Iterator[str]:
    """Yield what is known before the first trial: a method that does not look for what was asked.

    Args:
        study: As it begins or goes on.
    """
    if study.problem.objective is Objective.PARETO and study.method in _ONE_GOAL:
        yield f"--method {study.method} looks for the least energy only; the front is what it happens to pass"


def unsteered(device: Device) -> Iterator[str]:
    """Yield why nothing of a real device is searched, if so.

    Args:
        device: Looked at without writing anything; that may take a second.
    """
    if len(device.space) > 1 or not isinstance(device, Inspectable):
        return
    reasons = [each for each in device.findings() if each.works is False and each.subject in KNOBS]
    why = f": {reasons[0].subject}: {reasons[0].explanation}" if reasons else ""
    yield f"no knob of {device.title} is searched{why}; polythrottle doctor says more"


def meanwhile(study: Study, risk: float | None) -> Iterator[str]:
    """Yield what the trial that has just ended shows.

    Args:
        study: After a trial; one that still runs shows nothing.
        risk: Highest chance of breaking a limit that was asked for; None if none was.
    """
    if not study.trials or study.trials[-1].state is not TrialState.COMPLETED or not study.judgeable:
        return
    default = study.default
    if risk is not None and default == study.trials[-1] and not study.feasible(default):
        yield (
            f"the default point breaks the SLO: until a point is found that holds it, --risk {risk:g} cannot be kept "
            f"and trials break it too"
        )
    if default == study.trials[-1] and (before := _before(study)) is not None and default.measurement is not None:
        times = " and ".join(show(seen.latency.mean_s, "s") for seen in (before, default.measurement))
        yield f"the default was measured again, because others were far better: mean {times}; the newer counts"
    made = len(study.completed)
    if study.best is None and made % EVERY == 0:
        yield f"nothing feasible yet after {made} trials{_nearest(study)}; is the SLO within reach of these knobs?"


def _before(study: Study) -> Measurement | None:
    """Return what was seen at the default before its newest trial; None if that is the first."""
    default = study.default
    seen = [trial.measurement for trial in study.completed if default is not None and trial.point == default.point]
    return seen[-2] if len(seen) > 1 else None


def _nearest(study: Study) -> str:
    closest = study.closest
    if closest is None or closest.measurement is None:
        return ""
    return f": trial {closest.number} is closest, {show_excess(study.excess(closest.measurement))} over"
