"""The lines of a journal: values as JSON, and back."""

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, TypeVar

from polythrottle.domain.arrivals import Arrivals
from polythrottle.domain.measurement import BoardEnergy, EnergyKind, Interval, Latency, Measurement, Window
from polythrottle.domain.problem import Constraint, Objective, Problem
from polythrottle.domain.study import Cost, Study, Trial
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
)
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
    problem = Problem(
        space_from_document(line["space"]),
        tuple(Constraint(**constraint) for constraint in line["constraints"]),
        typed(line["device"], str),
        typed(line["workload"], str),
        dict(line["reference"]),
        Window(**line["window"]),
        {typed(name, str): typed(digest, str) for name, digest in line["content"].items()},
        Objective(line.get("objective", "energy")),
        Arrivals.parse(typed(line.get("arrivals", "closed"), str)),
    )
    if problem.fingerprint != line["problem"]:
        raise ValueError("the problem it describes does not match its fingerprint")
    return Study(problem, typed(line["method"], str), typed(line["seed"], int))


def measurement_line(measurement: Measurement) -> dict[str, Any]:
    """Return a measurement as a journal keeps it; what is not known of intervals, idling and extras is left out.

    An end of an interval that is not known is null.
    """
    line = asdict(measurement)
    ends = {name: [_end(i.low), _end(i.high)] for name, i in measurement.intervals.items()}
    newer = {**{name: line.pop(name) for name in _NEWER}, "intervals": ends}
    if (board := measurement.board) is not None and board.interval is not None:
        newer["board"]["interval"] = [_end(board.interval.low), _end(board.interval.high)]
    return {**line, **{name: value for name, value in newer.items() if value not in (None, {})}}


def _end(value: float) -> float | None:
    if math.isfinite(value):
        return value
    return None


def _intervals(line: Mapping[str, Any]) -> dict[str, Interval]:
    ends = {typed(name, str): [_figure(end) for end in pair] for name, pair in line.items()}
    return {
        name: Interval(-math.inf if low is None else low, math.inf if high is None else high)
        for name, (low, high) in ends.items()
    }


def _board(line: Mapping[str, Any]) -> BoardEnergy:
    ends = line.get("interval")
    return BoardEnergy(
        energy_j=typed(line["energy_j"], float),
        energy_kind=EnergyKind(line["energy_kind"]),
        boundary=typed(line["boundary"], str),
        interval=None if ends is None else _intervals({"board": ends})["board"],
    )


def measurement_from(line: Mapping[str, Any]) -> Measurement:
    """Return the measurement a line keeps; raises as `study_from`."""
    fields = dict(line)
    times = {name: _figure(value) for name, value in fields.pop("latency").items()}
    censored = typed(fields.pop("censored", False), bool)
    intervals = _intervals(fields.pop("intervals", {}))
    extras = {typed(name, str): typed(value, float) for name, value in fields.pop("extras", {}).items()}
    board = fields.pop("board", None)
    kind = EnergyKind(fields.pop("energy_kind"))
    boundary = typed(fields.pop("boundary"), str)
    figures = {name: _figure(value) for name, value in fields.items()}
    return Measurement(
        latency=Latency(**times),  # type: ignore[arg-type]
        energy_kind=kind,
        boundary=boundary,
        censored=censored,
        intervals=intervals,
        extras=extras,
        board=None if board is None else _board(board),
        **figures,  # type: ignore[arg-type]
    )


def cost_line(trial: Trial) -> dict[str, float] | None:
    """Return what a trial took, as a journal keeps it; None if that is unknown."""
    if trial.cost is None:
        return None
    return {"seconds": trial.cost.duration_s, "joules": trial.cost.energy_j}


def cost_from(line: Any) -> Cost | None:
    """Return what a trial took; None if its line does not say."""
    if line is None:
        return None
    return Cost(_figure(line["seconds"]) or 0.0, _figure(line["joules"]) or 0.0)


def _figure(value: Any) -> float | None:
    """Return a number or None as it is; OverflowError if it is larger than any that can be reckoned with."""
    if type(value) is int:
        float(value)
        return value
    if value is None:
        return None
    return typed(value, float)


def typed(value: Any, kind: type[T]) -> T:
    """Return a value of exactly the kind it should be."""
    if type(value) is not kind:
        raise TypeError(f"{value!r} is not of type {kind.__name__}")
    return value
