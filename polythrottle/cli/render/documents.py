"""What a command found out, as JSON documents for programs: SI units, null for what is not known."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from polythrottle.api.tuning_result import energy_kind
from polythrottle.cli.output import optional
from polythrottle.domain.measurement import BoardEnergy, EnergyKind, Goodput, Interval, Measurement
from polythrottle.domain.metrics import EXTRAS, METRICS, OF_CLASS
from polythrottle.domain.problem import Constraint
from polythrottle.domain.space import OperatingPoint
from polythrottle.domain.study import Cost, Study, Trial
from polythrottle.storage.json_channel import finite
from polythrottle.tuning.remarks import unknown
from polythrottle.tuning.stopping import is_conclusive

if TYPE_CHECKING:
    from polythrottle.api.tuning_result import Tuning
    from polythrottle.tuning.boards_together import BoardAnswer
    from polythrottle.tuning.setup import Setup
    from polythrottle.tuning.sweep import Swept

_STATISTICS = ("mean", "p50", "p90", "p95", "p99")
_FIGURES = ("power_w", "energy_j", "throughput_per_s", "offered_per_s", "backlog_per_s")


def tune_document(tuning: "Tuning") -> dict[str, Any]:
    """Return the JSON document of ``tune``."""
    study = tuning.study
    kind = energy_kind(study)
    return {
        **_problem_fields(study),
        **_answer_fields(study),
        "ended": tuning.ended,
        "search": {"duration_s": study.duration_s, "energy_j": study.cost.energy_j},
        "presets_cost": _cost(study.presets_cost),
        "nothing_to_gain": study.default_will_do and is_conclusive(tuning.ended),
        "risk": tuning.risk,
        "error_budget": _errors(tuning),
        "history": [lesson.line() for lesson in tuning.history],
        "presets": [
            {
                "name": preset.name,
                **_point_and(preset.point, preset.measurement),
                "feasible": study.holds(preset.measurement),
            }
            for preset in study.references
        ],
        **({"boards": [_board_document(board) for board in tuning.boards]} if tuning.boards else {}),
        **({"unmeasured_boards": list(study.unmeasured)} if study.unmeasured else {}),
        "ladder": _ladder(tuning),
        "no_ladder": tuning.unladdered or None,
        "profile": optional(str, tuning.profile_path),
        "profile_kept": tuning.kept,
        "older_profile": tuning.older,
        "older_profile_kept_as": optional(str, tuning.aside),
        "journal": str(tuning.journal_path),
        "report": optional(str, tuning.report_path),
        "boundary": tuning.boundary,
        "simulated": kind is EnergyKind.SIMULATED,
        "energy_kind": optional(str, kind),
    }


def _cost(cost: Cost) -> dict[str, float]:
    return {"duration_s": cost.duration_s, "energy_j": cost.energy_j}


def _problem_fields(study: Study) -> dict[str, Any]:
    return {
        "device": study.problem.device,
        "workload": study.problem.workload,
        "space_size": len(study.problem.space),
        "arrivals": str(study.problem.arrivals),
        "offered_per_s": study.problem.arrivals.offered_per_s,
        "precision": study.problem.window.precision,
        "objective": str(study.problem.objective),
        "method": study.method,
        "seed": study.seed,
    }


def _answer_fields(study: Study) -> dict[str, Any]:
    return {
        "trials": [trial_document(study, trial) for trial in study.trials],
        "default": trial_document(study, study.default),
        "best": trial_document(study, study.best),
        # Until it is known what a relative limit multiplies, to ask for the front raises.
        "front": [trial_document(study, trial) for trial in study.front] if study.judgeable else [],
        "saving_fraction": study.saving_fraction,
        "saving_interval": optional(_ends, study.saving),
        "within_noise": study.within_noise,
        "requests": study.requests,
        "slo": [_constraint(study, index) for index in range(len(study.problem.constraints))],
        "infeasible_trials": len(study.infeasible),
        "infeasible_excess": study.total_excess,
        "stopped_early": len(study.stopped_early),
    }


def _board_document(board: "BoardAnswer") -> dict[str, Any]:
    return {
        "device": board.uri,
        "trials": board.trials,
        "energy_offset": math.expm1(board.offset.energy.mean),
        "latency_offset": math.expm1(board.offset.latency.mean),
        "energy_j": board.measurement.energy_j,
        "saving_fraction": board.saving,
        "saving_interval": optional(_ends, board.between),
        "measured": board.measured,
    }


def measure_document(
    found: "tuple[Setup, OperatingPoint, Measurement]", limits: Sequence[Constraint] = ()
) -> dict[str, Any]:
    """Return the JSON document of ``measure``."""
    setup, point, measurement = found
    return {
        "device": setup.device,
        "workload": setup.workload,
        "arrivals": str(setup.traffic),
        "precision": setup.precision,
        **_point_and(point, measurement),
        "temperature_c": measurement.temperature_c,
        "window_s": measurement.window_s,
        "queries": measurement.latency.queries,
        "requests": measurement.requests,
        "idle_power_w": measurement.idle_power_w,
        "marginal_j": measurement.marginal_j,
        "idle_j": measurement.idle_j,
        **{name: measurement.metric(name) for name in EXTRAS},
        "slo": [_limit(limit, measurement) for limit in limits],
        "goodput": optional(_goodput, measurement.goodput),
        "classes": _classes(measurement),
        "late_p99_s": measurement.late_p99_s,
        "sender_s": measurement.sender_s,
        "cuts_per_s": measurement.cuts_per_s,
        "cut_share": measurement.cut_share,
        "unknown": unknown(measurement, setup.traffic),
        "boundary": measurement.boundary,
        "simulated": measurement.energy_kind is EnergyKind.SIMULATED,
        "energy_kind": str(measurement.energy_kind),
    }


def _limit(limit: Constraint, measurement: Measurement) -> dict[str, Any]:
    """Return how one measurement stands to an absolute limit; whether it holds is null where that is not known."""
    value = measurement.metric(limit.metric)
    holds = None
    if value is not None:
        holds = limit.slack(measurement) >= 0 and measurement.keeps_up and not measurement.censored
    return {"text": str(limit), "metric": limit.metric, "limit": limit.limit, "value": value, "holds": holds}


def _goodput(seen: Goodput) -> dict[str, Any]:
    return {
        "requests": seen.requests,
        "good": seen.good,
        "share": seen.share,
        "good_per_s": seen.per_s,
        "energy_per_good_j": seen.energy_j,
    }


def _classes(measurement: Measurement) -> dict[str, dict[str, Any]]:
    """Return the times of each class of requests, and how many of it held their limits where that was counted."""
    found: dict[str, dict[str, Any]] = {}
    for name, value in measurement.extras.items():
        metric, divided, prompts = name.partition(OF_CLASS)
        if divided:
            found.setdefault(prompts, {})[f"{metric}_s"] = value
    for prompts, (requests, good) in ({} if measurement.goodput is None else measurement.goodput.classes).items():
        found.setdefault(prompts, {}).update({"requests": requests, "good": good})
    return found


def sweep_document(swept: "Swept") -> dict[str, Any]:
    """Return the JSON document of ``sweep``."""
    return {
        "table": str(swept.path),
        "points": swept.points,
        "measured": swept.measured,
        "kept": swept.kept,
        "failed": [{"point": dict(point), "failure": failure} for point, failure in swept.failed],
        "overloaded": swept.overloaded,
        "energy_kind": str(swept.energy_kind),
        "simulated": swept.energy_kind is EnergyKind.SIMULATED,
    }


def _errors(tuning: "Tuning") -> dict[str, Any] | None:
    """Return what was spent of an error budget; None if there is none."""
    if (account := tuning.errors) is None:
        return None
    return {
        "requests": account.most,
        "sent": account.spent.sent,
        "late": {metric: account.spent.late.get(metric, 0) for metric in account.metrics},
        "beyond": {metric: account.spent.beyond.get(metric, 0.0) for metric in account.metrics},
        "forfeited": account.spent.forfeited,
        "left": account.left,
        "words": account.words,
    }


def _ladder(tuning: "Tuning") -> dict[str, Any] | None:
    """Return the points along load in short; the profile holds them whole."""
    if tuning.profile is None or (ladder := tuning.profile.ladder) is None:
        return None
    rungs = [
        {"rate_per_s": rung.rate_per_s, "power_w": rung.power_w, "p99_s": rung.p99_s, "point": dict(rung.service.point)}
        for rung in ladder.rungs
    ]
    return {"slo_s": ladder.slo_s, "rungs": rungs}


def trial_document(study: Study, trial: Trial | None) -> dict[str, Any] | None:
    """Return what is known of a trial; None of none."""
    if trial is None:
        return None
    document = {
        "number": trial.number,
        # As each of `boards` has it. What is called "board" are the device's own sensors beside a meter.
        **({"device": trial.board} if trial.board else {}),
        **_point_and(trial.point, trial.measurement),
        "feasible": study.feasible(trial),
        "state": str(trial.state),
    }
    if trial.measurement and trial.measurement.censored:
        document["censored"] = True
    if trial.failure:
        document["failure"] = trial.failure
    return document


def _point_and(point: OperatingPoint, measurement: Measurement | None) -> dict[str, Any]:
    document: dict[str, Any] = {"point": dict(point)}
    if measurement is None:  # the same keys as of a measured one, for programs that make tables of trials
        return {**document, "latency_s": dict.fromkeys(_STATISTICS), **dict.fromkeys(_FIGURES), "intervals": None}
    document["latency_s"] = {name: measurement.metric(name) for name in _STATISTICS}
    document |= {name: getattr(measurement, name) for name in _FIGURES}
    document["intervals"] = _intervals(measurement)
    if measurement.board:
        document["board"] = _board(measurement.board)
    if measurement.goodput:
        document |= {"goodput": _goodput(measurement.goodput), "classes": _classes(measurement)}
        document["tokens_per_j"] = measurement.metric("tokens_per_j")
    return document


def _board(own: BoardEnergy) -> dict[str, Any]:
    """Return what the device's own sensors said beside a meter."""
    return {
        "energy_j": own.energy_j,
        "interval": optional(_ends, own.interval),
        "energy_kind": str(own.energy_kind),
        "boundary": own.boundary,
    }


def _intervals(measurement: Measurement) -> dict[str, list[float | None] | None]:
    """Return both ends of every interval, null for a metric that was measured and has none."""
    # A metric without an interval is named with null: a program sees that none is known, not that it was forgotten.
    known = measurement.intervals
    named = [name for name in METRICS if name != "temperature" and measurement.metric(name) is not None]
    return {name: optional(_ends, known.get(name)) for name in dict.fromkeys(["energy", *named, *known])}


def _ends(interval: Interval) -> list[float | None]:
    """Return both ends; null for one that is not known."""
    return [finite(interval.low), finite(interval.high)]


def _constraint(study: Study, index: int) -> dict[str, Any]:
    asked = study.problem.constraints[index]
    document: dict[str, Any] = {"text": str(asked), "metric": asked.metric, "limit": None, "best": None, "holds": False}
    if asked.relative and study.default is None and asked.metric not in study.problem.reference:
        return document
    best = study.best
    document["limit"] = study.constraints[index].limit
    if best and best.measurement:
        document["best"] = best.measurement.metric(asked.metric)
    return {**document, "holds": best is not None}
