"""The lines of a journal: values as JSON, and back."""

import math
from collections.abc import Collection, Mapping
from dataclasses import asdict, fields
from typing import Any, TypeVar

from polythrottle.domain.arrivals import Arrivals
from polythrottle.domain.error_budget import LateRequests
from polythrottle.domain.measurement import BoardEnergy, EnergyKind, Goodput, Interval, Latency, Measurement, Window
from polythrottle.domain.problem import Constraint, Objective, Problem
from polythrottle.domain.study import Cost, Reference, Study, Trial
from polythrottle.storage.json_channel import finite
from polythrottle.storage.space_codec import space_document, space_from_document

FORMAT = 2
"""The newest format, and the one written."""
_NEWER = (
    "idle_power_w",
    "requests",
    "extras",
    "offered_per_s",
    "backlog_per_s",
    "late_p99_s",
    "sender_s",
    "cuts_per_s",
    "cut_share",
    "board",
    "goodput",
)
_KINDS: Mapping[type, str] = {
    str: "a text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    dict: "an object with keys",
    list: "a list",
}
_TIMES = frozenset(each.name for each in fields(Latency))
_FIGURES = frozenset(each.name for each in fields(Measurement)) - {
    "latency",
    "energy_kind",
    "boundary",
    "censored",
    "intervals",
    "extras",
    "board",
    "goodput",
}
T = TypeVar("T")


def check_format(line: Mapping[str, Any]) -> None:
    """Check that a line is of a format this version reads.

    Raises:
        ValueError: If it is not.
    """
    if not isinstance(line, dict) or type(line.get("v")) is not int or line["v"] < 1:
        raise ValueError("it has no format version")
    if line["v"] > FORMAT:
        raise ValueError(f"format {line['v']} is newer than {FORMAT}, the newest this version reads; upgrade it")


def study_line(study: Study) -> dict[str, Any]:
    """Return the problem of a study, its method and its seed, whole, as the first line of a journal keeps them."""
    problem = study.problem
    return {
        "problem": problem.fingerprint,
        "device": problem.device,
        "workload": problem.workload,
        "constraints": [asdict(constraint) for constraint in problem.constraints],
        "reference": dict(problem.reference),
        "window": problem.window.fields,
        "content": dict(problem.content),
        "objective": str(problem.objective),
        **({} if problem.arrivals.closed else {"arrivals": str(problem.arrivals)}),
        "method": study.method,
        "seed": study.seed,
        "space": space_document(problem.space),
    }


def study_from(line: Mapping[str, Any]) -> Study:
    """Return the study without trials that a first line describes.

    Raises:
        KeyError: If it lacks something, as do all readers here; TypeError or ValueError if something is not what it
            should be, PolythrottleError if it makes no problem.
    """
    content = typed(line["content"], dict, "content")
    # Format 1 knew no other.
    objective = line.get("objective", "energy")
    # As a list: before Python 3.12 an enumeration raises TypeError if it is asked for a plain text.
    if objective not in list(Objective):
        raise ValueError(f"objective is one of {', '.join(Objective)}, not {objective!r}")
    problem = Problem(
        space_from_document(typed(line["space"], dict, "space")),
        tuple(Constraint(**constraint) for constraint in line["constraints"]),
        typed(line["device"], str, "device"),
        typed(line["workload"], str, "workload"),
        dict(typed(line["reference"], dict, "reference")),
        Window(**typed(line["window"], dict, "window")),
        {typed(name, str, "content"): typed(digest, str, f"content.{name}") for name, digest in content.items()},
        Objective(objective),
        Arrivals.parse(typed(line.get("arrivals", "closed"), str, "arrivals")),
    )
    # Somebody has changed the line by hand: the trials below are of another problem.
    if problem.fingerprint != line["problem"]:
        raise ValueError("the problem it describes does not match its fingerprint")
    return Study(problem, typed(line["method"], str, "method"), typed(line["seed"], int, "seed"))


def measurement_line(measurement: Measurement) -> dict[str, Any]:
    """Return a measurement as a journal keeps it; what is not known of intervals, idling and extras is left out.

    An end of an interval that is not known is null.
    """
    line = asdict(measurement)
    ends = {name: [finite(i.low), finite(i.high)] for name, i in measurement.intervals.items()}
    newer = {**{name: line.pop(name) for name in _NEWER}, "intervals": ends}
    if (board := measurement.board) is not None and board.interval is not None:
        newer["board"]["interval"] = [finite(board.interval.low), finite(board.interval.high)]
    if measurement.goodput is not None:
        newer["goodput"]["classes"] = {name: list(each) for name, each in measurement.goodput.classes.items()}
    # A journal of a study that has none of them reads as it always did, in earlier versions too.
    return {**line, **{name: value for name, value in newer.items() if value not in (None, {})}}


def _intervals(line: Any) -> dict[str, Interval]:
    return {name: _interval(pair, f"the interval of {name}") for name, pair in typed(line, dict, "intervals").items()}


def _interval(pair: Any, name: str) -> Interval:
    """Return an interval that a line keeps as its two ends."""
    if len(typed(pair, list, name)) != 2:
        raise ValueError(f"{name} has two ends, not {len(pair)}")
    low, high = (_figure(end, name) for end in pair)
    return Interval(-math.inf if low is None else low, math.inf if high is None else high)


def _board(line: Any) -> BoardEnergy:
    line = typed(line, dict, "board")
    ends = line.get("interval")
    return BoardEnergy(
        energy_j=typed(line["energy_j"], float, "board.energy_j"),
        energy_kind=_kind(line["energy_kind"]),
        boundary=typed(line["boundary"], str, "board.boundary"),
        interval=None if ends is None else _interval(ends, "board.interval"),
    )


def _goodput(line: Any) -> Goodput:
    line = typed(line, dict, "goodput")
    classes = typed(line["classes"], dict, "goodput.classes")
    if any(len(typed(pair, list, f"goodput of {name}")) != 2 for name, pair in classes.items()):
        raise ValueError("a class of requests has two counts: how many there were, and how many were good")
    energy_j = line.get("energy_j")
    return Goodput(
        requests=typed(line["requests"], int, "goodput.requests"),
        good=typed(line["good"], int, "goodput.good"),
        per_s=typed(line["per_s"], float, "goodput.per_s"),
        energy_j=None if energy_j is None else typed(energy_j, float, "goodput.energy_j"),
        classes={name: (typed(a, int, name), typed(b, int, name)) for name, (a, b) in classes.items()},
    )


def _kind(word: Any) -> EnergyKind:
    """Return how energy came about, as a line says it."""
    if word not in list(EnergyKind):
        raise ValueError(f"energy_kind is one of {', '.join(EnergyKind)}, not {word!r}")
    return EnergyKind(word)


def measurement_from(line: Any) -> Measurement:
    """Return the measurement a line keeps; raises as `study_from`."""
    left = dict(typed(line, dict, "measurement"))
    times = _figures(typed(left.pop("latency"), dict, "latency"), _TIMES, ("mean_s",))
    censored = typed(left.pop("censored", False), bool, "censored")
    intervals = _intervals(left.pop("intervals", {}))
    extras = {name: typed(value, float, name) for name, value in typed(left.pop("extras", {}), dict, "extras").items()}
    board = left.pop("board", None)
    goodput = left.pop("goodput", None)
    kind = _kind(left.pop("energy_kind"))
    boundary = typed(left.pop("boundary"), str, "boundary")
    figures = _figures(left, _FIGURES, ("energy_j", "throughput_per_s"))
    return Measurement(
        latency=Latency(**times),  # type: ignore[arg-type]
        energy_kind=kind,
        boundary=boundary,
        censored=censored,
        intervals=intervals,
        extras=extras,
        board=None if board is None else _board(board),
        goodput=None if goodput is None else _goodput(goodput),
        **figures,  # type: ignore[arg-type]
    )


def _figures(line: Mapping[str, Any], known: Collection[str], needed: Collection[str]) -> dict[str, float | None]:
    """Return figures by name.

    Args:
        line: Holds them.
        known: The names it may have.
        needed: Those of them that are there in any case.
    """
    if strange := sorted(set(line) - set(known)):
        raise ValueError(f"{strange[0]!r} is no figure of a measurement")
    figures = {name: _figure(value, name) for name, value in line.items()}
    for name in needed:
        if figures[name] is None:
            raise ValueError(f"{name} is null, and every measurement has one")
    return figures


def cost_line(visit: Trial | Reference) -> dict[str, float] | None:
    """Return what a trial or preset took, as a journal keeps it; None if that is unknown."""
    if visit.cost is None:
        return None
    return {"seconds": visit.cost.duration_s, "joules": visit.cost.energy_j}


def cost_from(line: Any) -> Cost | None:
    """Return what a trial or preset took; None if its line does not say."""
    if line is None:
        return None
    line = typed(line, dict, "cost")
    return Cost(*(_figure(line[name], f"cost.{name}") or 0.0 for name in ("seconds", "joules")))


def late_line(spent: LateRequests) -> dict[str, Any]:
    """Return what a trial has spent of an error budget, as a journal keeps it."""
    return {"sent": spent.sent, "late": dict(spent.late)}


def late_from(line: Any) -> LateRequests:
    """Return what a trial has spent of an error budget; raises as `study_from`."""
    line = typed(line, dict, "requests")
    late = typed(line["late"], dict, "requests.late")
    sent = typed(line["sent"], int, "requests.sent")
    return LateRequests.of_trial(sent, {str(name): typed(count, int, str(name)) for name, count in late.items()})


def reserved_from(line: Mapping[str, Any]) -> float:
    """Return how much of an error budget a trial was begun with; 0 where there is none."""
    reserved = _figure(line.get("reserved", 0.0), "reserved") or 0.0
    if not 0 <= reserved < math.inf:
        raise ValueError(f"reserved is {reserved}, which is no number of requests")
    return reserved


def _figure(value: Any, name: str) -> float | None:
    """Return a number or None as it is, unless it is larger than any that can be reckoned with."""
    if type(value) is int:
        try:
            float(value)
        except OverflowError:
            raise ValueError(f"{name} is a number too large to reckon with") from None
        return value
    if value is None:
        return None
    return typed(value, float, name)


def typed(value: Any, kind: type[T], name: str) -> T:
    """Return a value of exactly the kind it should be.

    Raises:
        ValueError: If it is of another; says of which name it is.
    """
    if type(value) is not kind:
        raise ValueError(f"{name} is {value!r:.40}, not {_KINDS[kind]}")
    return value
