"""What a report says first: the saving and what it rests on."""

from collections.abc import Iterable, Iterator

from polythrottle.measurement import METRICS, EnergyKind, Measurement
from polythrottle.problem import Constraint
from polythrottle.report.digest import Digest
from polythrottle.report.markup import Html, joined, tag
from polythrottle.study import TrialState
from polythrottle.units import show

_CAUTION = {
    EnergyKind.SIMULATED: "Simulated: time and energy come from a model of the device. No device was measured.",
    EnergyKind.ESTIMATED: "Estimated: energy is worked out from a stated power figure. It was not read from a meter.",
    EnergyKind.RELATIVE: "Relative: the unit of energy is unknown. Only ratios mean anything.",
}
_NO_INTERVAL = "The saving compares two single trials; its interval is not known."
_SHOWN_UNITS = {"s": "s", "w": "W", "c": "°C", "per_s": "/s"}


def headline(digest: Digest) -> Html:
    """Return the claim, the two energies it compares, the cautions it needs, and the figures beside it."""
    return tag(
        "section",
        tag("p", claim(digest), class_="claim"),
        _energies(digest),
        *_cautions(digest),
        tag("dl", joined(_stats(digest)), class_="stats"),
        class_="headline",
    )


def claim(digest: Digest) -> str:
    """Return in one sentence what the study found."""
    saving, energy = digest.saving_fraction, digest.energy_name
    if not digest.measured:
        return "No trial was completed"
    if digest.best is None:
        judged = digest.closest is not None
        return "No point that was tried holds the SLO" if judged else "The SLO could not be judged"
    if saving is None:
        return f"{_energy(digest, digest.best.measurement)} {energy} at the tuned point"
    if digest.default_is_best:
        alone = len(digest.measured) == 1
        return "Only the default was measured" if alone else "Nothing that was tried beats the default"
    if saving > 0:
        return f"{percent(saving)} less {energy} than the default"
    return f"{percent(-saving)} more {energy} than the default" if saving else f"The same {energy} as the default"


def percent(fraction: float) -> str:
    """Return a fraction as people read it: ``0.314`` gives ``31.4 %``."""
    return f"{100 * fraction:.3g} %" if fraction < 1 else f"{100 * fraction:.0f} %"


def _value(metric: str, value: float | None) -> str:
    """Return one of `METRICS` with its unit; unknown gives ``–``."""
    return show(value, _SHOWN_UNITS[METRICS[metric]])


def _title(metric: str) -> str:
    """Return what a metric is called: ``p99 latency``, ``power``."""
    return f"{metric} latency" if METRICS[metric] == "s" else metric


def _kinds(digest: Digest) -> list[EnergyKind]:
    return sorted({seen.energy_kind for seen in digest.seen})


def _energies(digest: Digest) -> Html:
    if not digest.measured:
        return joined(())
    between = " → " if digest.saving_fraction is not None else "; "
    return tag("p", f"{digest.energy_name.capitalize()}: {between.join(_energy_parts(digest))}", class_="energies")


def _energy_parts(digest: Digest) -> Iterator[str]:
    default, best, closest = digest.default, digest.best, digest.closest
    if default is None:
        yield "not measured at the default"
    else:
        broken = ", which breaks the SLO" if default.verdict is False else ""
        yield f"{_energy(digest, default.measurement)} at the default{broken}"
    if best is not None and not digest.default_is_best:
        yield f"{_energy(digest, best.measurement)} tuned"
    if best is None and closest is not None:
        trial, seen = closest
        yield f"{_energy(digest, seen)} in trial {trial.number}, which comes closest to holding it"


def _cautions(digest: Digest) -> Iterator[Html]:
    words = [_CAUTION[kind] for kind in _kinds(digest) if kind in _CAUTION]
    if digest.saving_fraction:
        words.append(_NO_INTERVAL)
    return (tag("p", text, class_="caution") for text in words)


def _energy(digest: Digest, seen: Measurement) -> str:
    return digest.energy_scale.quantity(seen.energy_j)


def _stats(digest: Digest) -> Iterable[Html]:
    for bound in digest.constraints or ():
        yield _slo(digest, bound)
    for bound in digest.study.problem.constraints if digest.constraints is None else ():
        yield _stat(_title(bound.metric), "–", f"SLO {bound}; what it multiplies was not measured")
    if not digest.study.problem.constraints:
        yield _stat("SLO", "none", "every point is allowed")
    count = len(digest.study.trials)
    size = len(digest.study.problem.space)
    yield _stat("trials", f"{count:,}", f"in a space of {size:,} point{'s' * (size > 1)}")
    worst = f", worst by {percent(digest.worst_excess)}" if digest.broken else ""
    unknown = f", {digest.unjudged:,} not judged" if digest.unjudged else ""
    yield _stat("broke the SLO", f"{len(digest.broken):,}", f"infeasible trials{worst}{unknown}")
    for state in (TrialState.FAILED, TrialState.RUNNING):
        if others := len(digest.in_state(state)):
            yield _stat(str(state), f"{others:,}", f"trial{'s' * (others > 1)} without a measurement")


def _slo(digest: Digest, bound: Constraint) -> Html:
    limit = f"SLO: {'at least' if bound.at_least else 'at most'} {_value(bound.metric, bound.limit)}"
    if digest.best is not None:
        return _held(f"{_title(bound.metric)}, tuned", bound, digest.best.measurement, limit)
    if digest.closest is not None:
        return _held(f"{_title(bound.metric)}, closest trial", bound, digest.closest[1], limit)
    return _stat(_title(bound.metric), "–", limit)


def _held(name: str, bound: Constraint, seen: Measurement, limit: str) -> Html:
    return _stat(name, _value(bound.metric, seen.metric(bound.metric)), f"{limit}; {_room(bound, seen)}")


def _room(bound: Constraint, seen: Measurement) -> str:
    over = bound.excess(seen)
    return f"broken by {percent(over)}" if over else f"{percent(bound.slack(seen) / bound.limit)} to spare"


def _stat(name: str, value: str, note: str) -> Html:
    return tag("div", tag("dt", name), tag("dd", value, class_="value"), tag("dd", note, class_="note"))
