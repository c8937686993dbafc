"""What a user should be told of a study while it runs, a line each, at the moment it becomes so."""

import math
from collections.abc import Iterator
from dataclasses import replace

from polythrottle.actuation.limits import KNOBS
from polythrottle.domain.arrivals import FEWEST_CYCLES, LATENCY_CYCLES, Arrivals, Trace
from polythrottle.domain.errors import BadFile
from polythrottle.domain.measurement import MOST_QUERIES, Measurement, Window
from polythrottle.domain.ports import Device, Inspectable, findings_of
from polythrottle.domain.problem import Objective
from polythrottle.domain.study import Reference, Study, TrialState
from polythrottle.domain.units import show, show_name

EVERY = 10
"""After every so many completed trials without a feasible one it is said that there is none."""
_SPARE = 1.2
"""How many times the queries that are needed on average are advised, for how many come in a time is chance."""
_LOOSE = 300
"""A limit this many times above what the default takes holds nothing back, and none so many times below it can be held;
seconds for milliseconds are 1,000."""
_LONGER = 10
"""A window so many times as long tells a p99 to a third of what its own most queries do."""
_CHANCE, _BEHIND = 3.0, 0.1
"""So many deviations of a Poisson count, and so large a share of what was to come, are no chance."""
_ONE_GOAL = frozenset({"paper", "paper-joint", "gradient", "tpe", "gp"})


def beforehand(study: Study) -> Iterator[str]:
    """Yield what is known before the first trial: a method that does not look for what was asked.

    Args:
        study: As it begins or goes on.
    """
    if study.problem.objective is Objective.PARETO and study.method in _ONE_GOAL:
        yield f"--method {study.method} looks for the least energy only; the front is what it happens to pass"


def strange_limit(study: Study) -> str | None:
    """Return why a limit on latency looks as if its unit were wrong: it is far from what the default takes.

    Args:
        study: With a trial at the default; before it nothing is known.
    """
    if study.default is None:
        default = None
    else:
        default = study.default.measurement
    for constraint in study.problem.constraints:
        if default is None or not constraint.timed or constraint.relative:
            continue
        value = default.metric(constraint.metric)
        if value is not None and constraint.limit >= _LOOSE * value:
            meant = replace(constraint, limit=constraint.limit / 1000)
            times = f"{constraint.limit / value:,.0f} times"
        elif value is not None and value >= _LOOSE * constraint.limit:
            meant = replace(constraint, limit=constraint.limit * 1000)
            times = f"1/{value / constraint.limit:,.0f} of"
        else:
            continue
        return (
            f"{constraint} is {times} what the default takes, {show(value, 's')}: "
            f"was {str(meant).replace(' ', '')} meant?"
        )
    return None


def passed_over(study: Study) -> Iterator[tuple[str, str]]:
    """Yield what measured less than the answer and why it is not the answer, each with its name; nothing if none did.

    Args:
        study: Ended, or not yet.
    """
    best = study.best
    objective = study.problem.objective
    if best is None or best.measurement is None:
        return
    least = objective.of(best.measurement)
    fewer = [
        (objective.of(trial.measurement), trial, trial.measurement)
        for trial in study.completed
        if trial.measurement is not None and objective.of(trial.measurement) < least
    ]
    broken = [each for each in fewer if not study.feasible(each[1])]
    again = [each for each in fewer if study.feasible(each[1]) and each[1].point == best.point]
    doubted = [each for each in fewer if study.feasible(each[1]) and each[1].point != best.point]
    for some, why in (
        (broken, "it breaks the SLO"),
        (again, f"it is the same point as the answer, trial {best.number}, "),
        (doubted, "the model of all trials expects its point to take more than the answer's, or to break the SLO"),
    ):
        if some:
            value, trial, measured = min(some, key=lambda each: (each[0], each[1].number))
            reason = why
            if some is doubted:
                reason = _luck(study, measured) or why
            elif some is again:
                reason += "in another window" if trial.board == best.board else "on another board"
            elif some is broken and _in_doubt(study, measured):
                reason = f"{why}, by less than its window can tell{_longer(study.problem.window)}"
            more = ""
            if len(some) > 1:
                more = f"; {len(some) - 1} more likewise"
            yield "not taken", f"trial {trial.number} measured {1 - value / least:.1%} less, but {reason}{more}"
    for preset in study.references:
        value = objective.of(preset.measurement)
        if value < least and study.holds(preset.measurement):
            yield (
                "not taken",
                f"preset {preset.name} measured {1 - value / least:.1%} less, but {_why_not(study, preset)}",
            )


def _longer(window: Window) -> str:
    """Return which window would tell more, to follow other words; empty where none may be as long."""
    queries = _LONGER * window.most_queries
    if queries > MOST_QUERIES:
        return ""
    return f"; --queries {queries} tells more"


def _in_doubt(study: Study, measured: Measurement) -> bool:
    """Return whether a window that broke limits may have broken each of them by bad luck, as their intervals tell."""
    broken = [constraint for constraint in study.constraints if constraint.slack(measured) < 0]
    for constraint in broken:
        interval = measured.intervals.get(constraint.metric)
        if interval is None or constraint.limit not in interval:
            return False
    return bool(broken)


def _luck(study: Study, measured: Measurement) -> str:
    """Return which limit a window that held may have held by luck, as its interval tells; empty if none."""
    for constraint in study.constraints:
        interval = measured.intervals.get(constraint.metric)
        if interval is None or constraint.at_least or interval.high <= constraint.limit:
            continue
        if not interval.known:
            return f"its window is too short to tell that its {constraint.metric} holds"
        return f"its {constraint.metric} may be up to {constraint.show(interval.high)}, which breaks the SLO"
    return ""


def _why_not(study: Study, preset: Reference) -> str:
    """Return why a preset that holds the SLO for less is not the answer."""
    held = [show_name(name) for name in preset.point if name not in study.problem.space.names]
    if held:
        were = "was" if len(held) == 1 else "were"
        return f"it also sets {', '.join(held)}, which {were} not searched; --knobs adds knobs"
    return "presets are measured once, after the search, and are not searched"


def unsteered(device: Device) -> Iterator[str]:
    """Yield why nothing of a real device is searched, if so.

    Args:
        device: Looked at without writing anything; that may take a second.
    """
    if len(device.space) > 1 or not isinstance(device, Inspectable):
        return
    reasons = [each for each in device.findings() if each.works is False and each.subject in KNOBS]
    why = ""
    if reasons:
        why = f": {reasons[0].subject}: {reasons[0].explanation}"
    yield f"no knob of {device.title} is searched{why}; polythrottle doctor says more"


def narrowed(device: Device) -> Iterator[str]:
    """Yield what the mode a device is in hides of its range, and how to have it.

    Args:
        device: Looked at without writing anything; that may take a second.
    """
    for each in findings_of(device):
        if each.subject == "range":
            yield f"{each.explanation}: {each.remedy}"


def afterwards(
    measured: Measurement, window: Window, arrivals: Arrivals, asked_s: float | None = None
) -> Iterator[str]:
    """Yield what should be known of a window beside its figures; nothing of a recorded one.

    Args:
        measured: What it saw.
        window: How long it was to be.
        arrivals: When requests were meant to be sent.
        asked_s: How long somebody asked for; if None, what the window says, unless that is the usual.
    """
    length_s = measured.window_s
    served = measured.latency.queries
    rate_per_s = arrivals.offered_per_s
    if length_s is None or served is None:
        return
    if measured.backlog_per_s and measured.offered_per_s:
        yield (
            f"more comes than is served: {measured.offered_per_s:.4g}/s offered, {measured.throughput_per_s:.4g}/s "
            f"served; the queue grows, and the latencies are those of this window only"
        )
    if rate_per_s is not None and length_s < (least_s := LATENCY_CYCLES * arrivals.cycle_s):
        none = length_s < FEWEST_CYCLES * arrivals.cycle_s
        lacks = "latency has no interval"
        if none:
            lacks = "nothing has an interval"
        yield (
            f"{length_s / arrivals.cycle_s:.2g} cycles of burst and calm were seen, so {lacks}; energy needs "
            f"{FEWEST_CYCLES:.0f}, latency {LATENCY_CYCLES:.0f}: --seconds {least_s:.0f} --queries "
            f"{_needed(rate_per_s * least_s)}"
        )
    whole = not isinstance(arrivals, Trace) or _saw_all(arrivals, length_s)
    if not whole:
        yield "± are those of the part of the trace that was seen, not of all of it"
    if rate_per_s is not None and whole and not arrivals.cycle_s and not measured.backlog_per_s:
        yield from _fell_behind(rate_per_s * length_s, served)
    if not measured.censored:
        yield from _cut_short(measured, window, length_s, served, asked_s)


def _saw_all(trace: Trace, length_s: float) -> bool:
    """Return whether a window is as long as a trace; not if its file is gone meanwhile."""
    try:
        return length_s >= trace.length_s
    except BadFile:
        return False


def _fell_behind(offered: float, served: int) -> Iterator[str]:
    """Yield that fewer requests were answered than chance has it, though no queue was seen to grow.

    An engine that takes all that come answers each more slowly instead, and a short window does not see where it ends.
    """
    if offered - served > max(_CHANCE * math.sqrt(offered), _BEHIND * offered):
        yield (
            f"{served:,} requests were answered where some {offered:,.0f} were to come: more may come than is served; "
            f"a longer window tells: --queries {_needed(_LONGER * offered)}"
        )


def _cut_short(
    measured: Measurement, window: Window, length_s: float, served: int, asked_s: float | None
) -> Iterator[str]:
    """Yield that a window ended before what somebody asked for, if so."""
    if asked_s is None and window.duration_s != Window.duration_s:
        asked_s = window.duration_s
    if served < window.queries:
        yield f"the window was given up after {show(length_s, 's')}, with {served:,} of {window.queries:,} queries"
    elif asked_s is not None and length_s < asked_s:
        queries = _needed(served / length_s * asked_s)
        fits = queries <= MOST_QUERIES
        if fits:
            advice = f"--queries {queries} makes it last"
        else:
            advice = f"none of {MOST_QUERIES:,} queries lasts so long"
        yield f"the window ended with {served:,} queries, before {asked_s:g} s; {advice}"


def _needed(queries: float) -> int:
    return math.ceil(_SPARE * queries)


def unknown(measured: Measurement, arrivals: Arrivals) -> dict[str, str]:
    """Return why what is not known of a measurement is not known, by name.

    Args:
        measured: Of whatever kind.
        arrivals: When requests were meant to be sent.
    """
    reasons: dict[str, str] = {}
    if measured.temperature_c is None:
        reasons["temperature_c"] = "the device has no temperature that can be read"
    if measured.idle_power_w is None:
        reasons["idle_power_w"] = "it was not measured, or the energy reading did not go on evenly without work"
    elif measured.idle_j is None:
        reasons["idle_j"] = "idle power was not below that of the window"
    if not measured.intervals:
        reasons["intervals"] = "the measurement was recorded without them"
    if measured.window_s is not None and measured.window_s < LATENCY_CYCLES * arrivals.cycle_s:
        cycles = f"{measured.window_s / arrivals.cycle_s:.2g} cycles of burst and calm were seen"
        reasons["intervals"] = f"{cycles}; energy needs {FEWEST_CYCLES:.0f}, latency {LATENCY_CYCLES:.0f}"
    elif measured.intervals and "energy" not in measured.intervals:
        reasons["intervals"] = "those that are null: the window was too short to tell"
    return reasons


def meanwhile(study: Study, risk: float | None) -> Iterator[str]:
    """Yield what the trial that has just ended shows.

    Args:
        study: After a trial; one that still runs shows nothing.
        risk: Highest chance of breaking a limit that was asked for; None if none was.
    """
    if study.trials and (absent := study.trials[-1].absent) is not None:
        yield f"{show_name(absent)} is left out from now on: {study.trials[-1].failure}"
    if not study.trials or study.trials[-1].state is not TrialState.COMPLETED or not study.judgeable:
        return
    default = study.default
    problem = study.problem
    if default == study.trials[-1] and default.measurement is not None:
        yield from afterwards(default.measurement, problem.window, problem.arrivals)
    if risk is not None and default == study.trials[-1] and not study.feasible(default):
        yield (
            f"the default point breaks the SLO: until a point is found that holds it, --risk {risk:g} cannot be kept "
            f"and trials break it too"
        )
    if default == study.trials[-1] and (before := _before(study)) is not None and default.measurement is not None:
        times = " and ".join(show(measurement.latency.mean_s, "s") for measurement in (before, default.measurement))
        yield f"the default was measured again, because others were far better: mean {times}; the newer counts"
    made = len(study.completed)
    if study.best is None and made % EVERY == 0:
        yield f"nothing feasible yet after {made} trials{_nearest(study)}; is the SLO within reach of these knobs?"


def _before(study: Study) -> Measurement | None:
    """Return what was seen at the default before its newest trial; None if that is the first."""
    default = study.default
    measurements = [
        trial.measurement for trial in study.completed if default is not None and trial.point == default.point
    ]
    if len(measurements) > 1:
        return measurements[-2]
    return None


def _nearest(study: Study) -> str:
    closest = study.closest
    if closest is None or closest.measurement is None or (limit := study.most_broken(closest.measurement)) is None:
        return ""
    return f": trial {closest.number} is closest, {limit.show_excess(closest.measurement)} {limit.beyond}"
