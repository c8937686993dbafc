"""The figures on the page: each with its title, what it says in words, its keys and its remarks."""

from collections.abc import Iterator

from polythrottle.report.digest import Digest
from polythrottle.report.figures import compared, comparison, convergence, plane
from polythrottle.report.headline import claim
from polythrottle.report.ink import svg
from polythrottle.report.knobs import free_knobs, knob_figure
from polythrottle.report.legend import convergence_keys, plane_keys, trial_keys
from polythrottle.report.markup import Html, joined, tag
from polythrottle.report.scale import Scale
from polythrottle.report.tables import knob_table
from polythrottle.study import TrialState
from polythrottle.units import show_name

_FAILURES_SHOWN = 5


def gallery(digest: Digest) -> Iterator[Html]:
    """Return the figures of a study in which anything was measured."""
    energy = digest.energy_scale
    cards = [_plane(digest, energy)]
    if digest.trials:
        cards.append(_convergence(digest))
    if len(compared(digest)) > 1:
        cards.append(_comparison(digest, energy))
    if digest.best is not None and digest.study.problem.space.names:
        cards.append(tag("section", tag("h2", "What to set"), knob_table(digest), class_="card"))
    yield tag("div", joined(cards), class_="pair")
    if len(digest.trials) > 1 and free_knobs(digest):
        yield _knobs(digest, energy)


def _plane(digest: Digest, energy: Scale) -> Html:
    count = f"{len(digest.trials)} trials and {len(digest.presets)} presets"
    alt = f"{digest.energy_name} against {digest.latency_metric} latency of {count}. {claim(digest)}."
    figure = plane(digest, energy)
    parts = [_note("The small figure shows every point; the large one what its frame holds.")]
    remarks = (*(parts if len(figure.axes) > 1 else ()), *_unseen(digest), *_failures(digest))
    return _card("Energy and latency", svg(figure, "plane", alt), plane_keys(digest), *remarks)


def _convergence(digest: Digest) -> Html:
    best = digest.best
    found = (
        "No trial is known to hold the SLO."
        if best is None
        else f"The best {digest.objective_name} was found in trial {best.number}."
    )
    alt = f"Best {digest.objective_axis} so far against the number of the trial. {found}"
    return _card("Convergence", svg(convergence(digest), "convergence", alt), convergence_keys(digest), _note(found))


def _comparison(digest: Digest, energy: Scale) -> Html:
    marks = compared(digest)
    rows = ", ".join(f"{mark.name} {energy.quantity(mark.measurement.energy_j)}" for mark in marks)
    alt = f"{digest.energy_name} and {digest.latency_metric} latency side by side: {rows}."
    broken = [mark for mark in marks if mark.verdict is False]
    remarks = [_note(f"Hatched bars break the SLO: {', '.join(mark.name for mark in broken)}.")] if broken else []
    return _card("Tuned, default and presets", svg(comparison(digest, energy), "comparison", alt), *remarks)


def _knobs(digest: Digest, energy: Scale) -> Html:
    panels = [
        svg(
            knob_figure(digest, knob, energy),
            f"knob{i}",
            f"{digest.energy_name} of every trial against {show_name(knob.name)}.",
        )
        for i, knob in enumerate(free_knobs(digest))
    ]
    return _card("Energy by knob", tag("div", joined(panels), class_="grid"), trial_keys(digest))


def _card(title: str, *content: Html) -> Html:
    return tag("figure", tag("h2", title), *content, class_="card")


def _note(text: str) -> Html:
    return tag("p", text, class_="note")


def _unseen(digest: Digest) -> Iterator[Html]:
    missing = sum(seen.metric(digest.latency_metric) is None for seen in digest.seen)
    if missing:
        yield _note(f"{missing} without a {digest.latency_metric} latency: not drawn here, but in the table.")


def _failures(digest: Digest) -> Iterator[Html]:
    failed = digest.in_state(TrialState.FAILED)
    shown = [tag("li", f"Trial {trial.number} failed: {trial.failure}") for trial in failed[:_FAILURES_SHOWN]]
    if len(failed) > len(shown):
        shown.append(tag("li", f"{len(failed) - len(shown)} more failed; see the table."))
    if shown:
        yield tag("ul", joined(shown), class_="failures")
