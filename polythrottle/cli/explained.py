"""What ``polythrottle explain`` tells programs: one document in SI units."""

from typing import Any

from polythrottle.cli.documents import energy_kind
from polythrottle.explanation import Effect, End, Explanation, Limit, Price
from polythrottle.explanation.prices import step
from polythrottle.measurement import EnergyKind


def explain_document(found: Explanation) -> dict[str, Any]:
    """Return the JSON document of ``explain``."""
    study, kind = found.study, energy_kind(found.study)
    return {
        "device": study.problem.device,
        "workload": study.problem.workload,
        "trials": len(study.trials),
        "completed": len(study.completed),
        "objective": {"name": str(study.problem.objective), "unit": study.problem.objective.unit},
        "nothing": found.nothing,
        "best": None if found.at is None or not found.feasible else _trial(found),
        "closest": None if found.at is None or found.feasible else _trial(found),
        "saving_fraction": study.saving_fraction if found.at else None,
        "predicted_saving_fraction": found.saving_fraction if found.feasible else None,
        "limits": [_limit(limit) for limit in found.limits],
        "ends": [_end(end) for end in found.ends],
        "effects": {effect.metric: _effect(effect) for effect in found.effects},
        "mixtures": {"evaluated": found.outside[1], "outside_space": found.outside[0]},
        "prices": [
            {"constraint": str(limit.constraint), "step": step(limit.constraint), "limits": [*map(_price, ladder)]}
            for limit, ladder in zip(found.limits, found.prices, strict=True)
        ],
        "accuracy": {
            one.metric: {"typical": one.typical, "rms": one.rms, "noise": one.noise} for one in found.accuracy
        },
        "hope": None
        if found.hope is None
        else {"point": dict(found.hope.point), "excess": found.hope.excess, "measured": found.hope.measured},
        "energy_kind": None if kind is None else str(kind),
        "simulated": kind is EnergyKind.SIMULATED,
    }


def _trial(found: Explanation) -> dict[str, Any]:
    assert found.at is not None
    assert found.at.measurement is not None
    return {"number": found.at.number, "point": dict(found.at.point), "energy_j": found.at.measurement.energy_j}


def _limit(limit: Limit) -> dict[str, Any]:
    return {
        "constraint": str(limit.constraint),
        "metric": limit.constraint.metric,
        "limit": limit.constraint.limit,
        "value": limit.value,
        "slack": limit.slack,
        "slack_fraction": limit.slack_fraction,
        "noise": limit.noise,
        "binds": limit.binds,
        "saving_without": limit.saving,
        "sure_saving_without": limit.sure,
    }


def _end(end: End) -> dict[str, Any]:
    side = "highest" if end.highest else "lowest"
    return {
        "knob": end.knob,
        "level": end.level,
        "end": side,
        "levels": end.levels,
        "inward": end.inward,
        "inward_measured": end.measured,
    }


def _effect(effect: Effect) -> dict[str, Any]:
    return {
        "before": effect.before,
        "after": effect.after,
        "predicted_before": effect.predicted_before,
        "predicted_after": effect.predicted_after,
        "shares": [
            {
                "knob": share.knob,
                "before": share.before,
                "after": share.after,
                "change": share.change,
                "change_std": share.change_std,
                "fraction": share.fraction,
            }
            for share in effect.shares
        ],
    }


def _price(price: Price) -> dict[str, Any]:
    return {
        "limit": None if price.constraint is None else price.constraint.limit,
        "point": None if price.point is None else dict(price.point),
        "value": price.value,
        "std_fraction": price.std_fraction,
        "measured": price.measured,
        "tried": price.tried,
        "vague": price.vague,
        "change": price.change,
    }
