"""The report: one HTML file that needs nothing else, made from a study alone, with its figures and their keys."""

import shlex
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from importlib.resources import files
from pathlib import Path
from types import MappingProxyType

from polythrottle.domain.errors import StorageError
from polythrottle.domain.space import BATCH_SIZE
from polythrottle.domain.study import Study, TrialState
from polythrottle.domain.units import show_name
from polythrottle.report.digest import Digest, Mark, Role, Scale
from polythrottle.report.figure_style import (
    GREEN,
    INK,
    LOOKS,
    MUTED,
    VERMILLION,
    Html,
    MarkerStyle,
    joined,
    look,
    styled,
    svg,
    tag,
    variable,
)
from polythrottle.report.figures import compared, comparison, convergence, free_knobs, knob_figure, plane
from polythrottle.report.tables import TrialTable, about, claim, headline, knob_table, rows
from polythrottle.storage.atomic_file import open_replacement
from polythrottle.storage.untrusted import check_plain

# The keys to the figures, as HTML, so that they wrap on a phone and never cover a point.

_SHAPES = {
    "o": "M12.2 8A4.2 4.2 0 1 1 3.8 8A4.2 4.2 0 1 1 12.2 8Z",
    "x": "M4.5 4.5L11.5 11.5M11.5 4.5L4.5 11.5",
    "^": "M8 3L13 12.5L3 12.5Z",
    "D": "M8 2.6L13.4 8L8 13.4L2.6 8Z",
    "*": "M8 1L9.7 6L15 6L10.7 9.2L12.3 14.4L8 11.2L3.7 14.4L5.3 9.2L1 6L6.3 6Z",
}
_NAMES = {
    Role.FEASIBLE: "holds the SLO",
    Role.INFEASIBLE: "breaks the SLO",
    Role.UNJUDGED: "SLO cannot be judged",
    Role.PRESET: "preset",
    Role.DEFAULT: "default",
    Role.TUNED: "tuned",
}


def plane_keys(digest: Digest) -> Html:
    """Return the keys of the energy–latency plane."""
    front = front_words(digest)
    if front is None:
        lines = []
    else:
        lines = [_line(front, MUTED)]
    if (limit := limit_words(digest)) is not None:
        lines.append(_line(limit, VERMILLION, "4 3"))
    return _list(_marks(digest, (*digest.trials, *digest.presets)), lines)


def front_words(digest: Digest) -> str | None:
    """Return what the line of the front is; None where there is none."""
    # Through one point there is no line.
    if sum(bool(mark.verdict) for mark in digest.trials) < 2:
        return None
    if digest.study.problem.constraints:
        return "front of the trials that hold the SLO"
    return "front of the trials"


def limit_words(digest: Digest) -> str | None:
    """Return what the line of the limit means: ``limit p99 ≤ 25 ms``; None if there is none."""
    if digest.latency_limit_s is None:
        return None
    bounds = (bound for bound in digest.constraints or () if bound.metric == digest.latency_metric)
    return f"limit {', '.join(str(bound).replace('<=', ' ≤ ') for bound in bounds)}"


def convergence_keys(digest: Digest) -> Html:
    """Return the keys of the convergence figure."""
    if digest.best is not None:
        lines = [_line("best so far", GREEN)]
    else:
        lines = []
    if digest.default is not None:
        lines.append(_line(f"{digest.study.problem.objective.words} of the default", INK, "1.5 2.5"))
    if any(trial.failure is not None for trial in digest.study.trials):
        lines.append(_key(_stroke("M8 3V13", MUTED), "failed"))
    return _list(_marks(digest, digest.trials), lines)


def trial_keys(digest: Digest) -> Html:
    """Return the keys of figures that show nothing but trials."""
    return _list(_marks(digest, digest.trials), ())


def named_looks(digest: Digest, marks: Iterable[Mark]) -> list[tuple[MarkerStyle, str]]:
    """Return each marker that occurs, with what it means, in the order of the roles."""
    # By look, not by role: a preset that breaks the SLO is drawn in another way than one that holds it.
    looks = {look(mark): mark for mark in marks}
    ranked = sorted(looks.items(), key=lambda pair: list(LOOKS).index(pair[1].role))
    if digest.study.problem.constraints:
        names = _NAMES
    else:
        names = {**_NAMES, Role.FEASIBLE: "trial"}
    return [(how, f"{names[mark.role]}{_remark(how, mark)}") for how, mark in ranked]


def _marks(digest: Digest, marks: Iterable[Mark]) -> list[Html]:
    return [_key(_glyph(how), name) for how, name in named_looks(digest, marks)]


def _remark(how: MarkerStyle, mark: Mark) -> str:
    if how == LOOKS[mark.role]:
        return ""
    return ", breaks the SLO"


def _glyph(how: MarkerStyle) -> Html:
    if how.shape == "x":
        return _stroke(_SHAPES["x"], how.edge)
    return tag("path", d=_SHAPES[how.shape], fill=variable(how.face), stroke=variable(how.edge))


def _stroke(path: str, colour: str, dashes: str = "none") -> Html:
    return tag("path", d=path, fill="none", stroke=variable(colour), stroke_width="1.8", stroke_dasharray=dashes)


def _line(text: str, colour: str, dashes: str = "none") -> Html:
    return _key(_stroke("M0 8H16", colour, dashes), text)


def _key(drawing: Html, text: str) -> Html:
    return tag("li", tag("svg", drawing, viewBox="0 0 16 16", aria_hidden="true"), text)


def _list(*groups: Iterable[Html]) -> Html:
    return tag("ul", joined(key for group in groups for key in group), class_="keys")


# The figures on the page: each with its title, what it says in words, its keys and its remarks.

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
    if best is None:
        sentence = "No trial is known to hold the SLO."
    else:
        sentence = f"The best {digest.objective_name} was found in trial {best.number}."
    alt = f"Best {digest.objective_axis} so far against the number of the trial. {sentence}"
    return _card("Convergence", svg(convergence(digest), "convergence", alt), convergence_keys(digest), _note(sentence))


def _comparison(digest: Digest, energy: Scale) -> Html:
    marks = compared(digest)
    rows = ", ".join(f"{mark.name} {energy.quantity(mark.measurement.energy_j)}" for mark in marks)
    alt = f"{digest.energy_name} and {digest.latency_metric} latency side by side: {rows}."
    broken = [mark for mark in marks if mark.verdict is False]
    if broken:
        remarks = [_note(f"Hatched bars break the SLO: {', '.join(mark.name for mark in broken)}.")]
    else:
        remarks = []
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
    missing = sum(measurement.metric(digest.latency_metric) is None for measurement in digest.measurements)
    if missing:
        yield _note(f"{missing} without a {digest.latency_metric} latency: not drawn here, but in the table.")


def _failures(digest: Digest) -> Iterator[Html]:
    failed = digest.in_state(TrialState.FAILED)
    shown = [tag("li", f"Trial {trial.number} failed: {trial.failure}") for trial in failed[:_FAILURES_SHOWN]]
    if len(failed) > len(shown):
        shown.append(tag("li", f"{len(failed) - len(shown)} more failed; see the table."))
    if shown:
        yield tag("ul", joined(shown), class_="failures")


# The report: one HTML file that needs nothing else, made from a study alone.

# The page may load nothing at all: what it shows is inside it.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"


def write_report(
    study: Study,
    path: Path,
    *,
    title: str = "",
    facts: Mapping[str, str] = MappingProxyType({}),
    profile: Path | None = None,
    boards: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Write the report of a study as one HTML file; the file is replaced whole or not at all.

    Args:
        study: What to report, finished or not.
        path: Where to; missing folders are made.
        title: Of the page; by default the workload and the device.
        facts: More to say about the study, such as where its journal is.
        profile: File with the answer; the page says how to apply it.
        boards: What there is to say of each of several boards, by its URI.

    Raises:
        StorageError: If the file cannot be written, or would replace something that is not a page.
    """
    # Before the page is made, which takes seconds for a long study.
    _check_replaceable(path)
    # A device may be called by bytes that are no text; a page with a question mark is better than none.
    page = report_html(study, title=title, facts=facts, profile=profile, boards=boards).encode("utf-8", "replace")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open_replacement(path, mode=None) as file:
            file.write(page)
    except (OSError, ValueError) as err:  # ValueError: a path with a null character.
        why = getattr(err, "strerror", None) or err
        raise StorageError(f"cannot write the report to {path}: {why}; name a file that can be written") from err


def report_html(
    study: Study,
    *,
    title: str = "",
    facts: Mapping[str, str] = MappingProxyType({}),
    profile: Path | None = None,
    boards: Mapping[str, str] = MappingProxyType({}),
) -> str:
    """Return the report of a study as one HTML document, the same for the same study.

    Args:
        study: What to report, finished or not.
        title: Of the page; by default the workload and the device.
        facts: More to say about the study.
        profile: File with the answer; the page says how to apply it.
        boards: What there is to say of each of several boards, by its URI.
    """
    digest = Digest(study)
    heading = title or f"{study.problem.workload or 'workload'} on {study.where or 'device'}"
    # matplotlib's settings are global, so those of a caller are put back.
    with styled():
        body = tag("main", *_sections(digest, heading, (facts, boards), profile))
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", f"{heading} · polythrottle"),
        tag("style", _part("page.css")),
    )
    return f"<!doctype html>\n{tag('html', head, tag('body', body, tag('script', _part('page.js'))), lang='en')}\n"


def _sections(
    digest: Digest, heading: str, told: tuple[Mapping[str, str], Mapping[str, str]], profile: Path | None
) -> Iterator[Html]:
    facts, boards = told
    kind = ""
    if digest.kind:
        kind = tag("span", f"{digest.kind} energy", class_="kind")
    yield tag("header", tag("p", "polythrottle report ", kind, class_="over"), tag("h1", heading))
    yield headline(digest)
    if profile is not None and digest.best is not None:
        yield _apply(profile, served=BATCH_SIZE in digest.best.point)
    if boards:
        yield tag("section", tag("h2", "Boards"), rows(boards), class_="card")
    if digest.measurements:
        yield from gallery(digest)
    if digest.study.trials or digest.study.references:
        yield _trials(TrialTable(digest))
    yield tag("section", tag("h2", "About this study"), about(digest, facts), class_="card")


def _apply(profile: Path, served: bool) -> Html:
    """Return the command that applies the answer, with a button that only a script makes visible."""
    command = tag("code", f"polythrottle apply {shlex.quote(str(profile))}", id="apply")
    copy = tag("button", "Copy", type="button", id="copy", hidden="")
    # Said beside the command, because whoever copies it would be surprised otherwise.
    words = "The settings revert after a minute unless you confirm them."
    if served:
        words += " The batch size is set where the model is served."
    return tag(
        "section",
        tag("h2", "Apply it"),
        tag("p", joined((command, copy), " "), class_="command"),
        tag("p", words, class_="note"),
        class_="card",
    )


def _trials(table: TrialTable) -> Html:
    """Return the table of trials; columns that few readers miss are shown on demand."""
    head = [tag("h2", "Trials")]
    if table.more:
        box = tag("input", type="checkbox", id="all")
        head.append(tag("label", box, f" Show {', '.join(table.more)} too", class_="note"))
    if table.note:
        note = [tag("p", table.note, class_="note")]
    else:
        note = []
    # Scrolled by keyboard too, which needs the focus.
    wide = tag("div", table.html(), class_="wide", tabindex="0")
    return tag("section", tag("div", joined(head), class_="bar"), wide, *note, class_="card trials-card")


def _check_replaceable(path: Path) -> None:
    try:
        with suppress(FileNotFoundError, NotADirectoryError):
            if not path.is_file() and path.exists():
                raise StorageError(f"cannot write the report to {path}: it is not a regular file")
            check_plain(path)
            with path.open("rb") as file:
                begun = file.read(15).lower()
            if begun not in (b"", b"<!doctype html>"):
                raise StorageError(f"cannot write the report to {path}: something else is there; name another file")
    except (OSError, ValueError) as err:
        why = getattr(err, "strerror", None) or err
        raise StorageError(f"cannot write the report to {path}: {why}; name a file that can be written") from err


def _part(name: str) -> Html:
    return Html(files("polythrottle.report").joinpath(name).read_text("utf-8"))
