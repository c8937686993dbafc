"""What a report says first: the saving and what it rests on."""

from collections.abc import Iterable, Iterator

from polythrottle.card import CAUTIONS
from polythrottle.measurement import METRICS, EnergyKind, Measurement
from polythrottle.problem import Constraint, Objective
from polythrottle.report.digest import Digest
from polythrottle.report.markup import Html, joined, tag
from polythrottle.stopping import show_span
from polythrottle.study import RECORDED_ITEMS, WORTHWHILE, TrialState
from polythrottle.units import show

_NO_INTERVAL = "The saving compares two single trials; its interval is not known."
_SHOWN_UNITS = {"s": "s", "w": "W", "c": "°C", "per_s": "/s", "per_j": "/J"}


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
    saving, goal = digest.saving_fraction, digest.objective_name
    if not digest.measured:
        return "No trial was completed"
    if digest.best is None:
        judged = digest.closest is not None
        return "No point that was tried holds the SLO" if judged else "The SLO could not be judged"
    if saving is None:
        return f"{_energy(digest, digest.best.measurement)} {digest.energy_name} at the tuned point"
    if digest.default_is_best:
        alone = len(digest.measured) == 1
        return "Only the default was measured" if alone else "Nothing that was tried beats the default"
    if saving > 0:
        return f"{percent(saving)} less {goal} than the default"
    return f"{percent(-saving)} more {goal} than the default" if saving else f"The same {goal} as the default"


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
    words = [CAUTIONS[kind] for kind in _kinds(digest) if kind in CAUTIONS]
    if digest.saving_fraction and not digest.default_is_best:
        words.append(_interval(digest))
    if digest.default_will_do:
        words.append(f"Nothing is gained: the default is within {percent(WORTHWHILE)} of the best found.")
    return (tag("p", text, class_="caution") for text in words)


def _interval(digest: Digest) -> str:
    """Return between what the saving is, and whether that proves one."""
    found = digest.study.saving
    if found is None:
        return _NO_INTERVAL
    between = f"between {100 * found.low:.3g} % and {100 * found.high:.3g} % with 95 % confidence"
    if found.low <= 0 <= found.high:
        return f"The saving is not proven: it is {between}."
    return f"The saving is {between}, two single trials compared."


def _energy(digest: Digest, seen: Measurement) -> str:
    return digest.energy_scale.quantity(seen.energy_j)


def _stats(digest: Digest) -> Iterable[Html]:
    for bound in digest.constraints or ():
        yield _slo(digest, bound)
    for bound in digest.study.problem.constraints if digest.constraints is None else ():
        yield _stat(_title(bound.metric), "–", f"SLO {bound}; what it multiplies was not measured")
    if not digest.study.problem.constraints:
        yield _stat("SLO", "none", "every point is allowed")
    if digest.study.problem.objective is not Objective.ENERGY:
        yield _stat("objective", str(digest.study.problem.objective), digest.study.problem.objective.words)
    count = len(digest.study.trials)
    size = len(digest.study.problem.space)
    yield _stat("trials", f"{count:,}", f"in a space of {size:,} point{'s' * (size > 1)}")
    worst, all_in_all = percent(digest.worst_excess), percent(digest.total_excess)
    over = f", worst by {worst}, together {all_in_all}" if digest.broken else ""
    unknown = f", {digest.unjudged:,} not judged" if digest.unjudged else ""
    yield _stat("broke the SLO", f"{len(digest.broken):,}", f"infeasible trials{over}{unknown}")
    yield from _effort(digest)
    for state in (TrialState.FAILED, TrialState.RUNNING):
        if others := len(digest.in_state(state)):
            yield _stat(str(state), f"{others:,}", f"trial{'s' * (others > 1)} without a measurement")


def _effort(digest: Digest) -> Iterator[Html]:
    """Yield what the search took, and how many trials it did not have to see to their end."""
    if early := len(digest.study.stopped_early):
        yield _stat("stopped early", f"{early:,}", f"trial{'s' * (early > 1)} that plainly broke the SLO")
    cost = digest.study.cost
    if cost.duration_s:
        counted = f"; {RECORDED_ITEMS:,} items a trial, as recorded" if digest.study.problem.recorded else ""
        energy = f"and {show(cost.energy_j, 'J')}, {digest.kind}" if digest.energy_unit else ""
        yield _stat("search", show_span(cost.duration_s), f"{energy}{counted}".lstrip("; ") or "on the device's clock")


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
