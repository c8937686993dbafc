"""The keys to the figures, as HTML, so that they wrap on a phone and never cover a point."""

from collections.abc import Iterable

from polythrottle.report.digest import Digest, Mark, Role
from polythrottle.report.ink import GREEN, INK, LOOKS, MUTED, VERMILLION, Look, look, variable
from polythrottle.report.markup import Html, joined, tag

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
    lines = [] if front is None else [_line(front, MUTED)]
    if (limit := limit_words(digest)) is not None:
        lines.append(_line(limit, VERMILLION, "4 3"))
    return _list(_marks(digest, (*digest.trials, *digest.presets)), lines)


def front_words(digest: Digest) -> str | None:
    """Return what the line of the front is; None where there is none."""
    if sum(bool(mark.verdict) for mark in digest.trials) < 2:
        return None
    return "front of the trials that hold the SLO" if digest.study.problem.constraints else "front of the trials"


def limit_words(digest: Digest) -> str | None:
    """Return what the line of the limit means: ``limit p99 ≤ 25 ms``; None if there is none."""
    if digest.latency_limit_s is None:
        return None
    bounds = (bound for bound in digest.constraints or () if bound.metric == digest.latency_metric)
    return f"limit {', '.join(str(bound).replace('<=', ' ≤ ') for bound in bounds)}"


def convergence_keys(digest: Digest) -> Html:
    """Return the keys of the convergence figure."""
    lines = [_line("best so far", GREEN)] if digest.best is not None else []
    if digest.default is not None:
        lines.append(_line(f"{digest.study.problem.objective.words} of the default", INK, "1.5 2.5"))
    if any(trial.failure is not None for trial in digest.study.trials):
        lines.append(_key(_stroke("M8 3V13", MUTED), "failed"))
    return _list(_marks(digest, digest.trials), lines)


def trial_keys(digest: Digest) -> Html:
    """Return the keys of figures that show nothing but trials."""
    return _list(_marks(digest, digest.trials), ())


def named_looks(digest: Digest, marks: Iterable[Mark]) -> list[tuple[Look, str]]:
    """Return each marker that occurs, with what it means, in the order of the roles."""
    looks = {look(mark): mark for mark in marks}
    ranked = sorted(looks.items(), key=lambda pair: list(LOOKS).index(pair[1].role))
    names = _NAMES if digest.study.problem.constraints else {**_NAMES, Role.FEASIBLE: "trial"}
    return [(how, f"{names[mark.role]}{_remark(how, mark)}") for how, mark in ranked]


def _marks(digest: Digest, marks: Iterable[Mark]) -> list[Html]:
    return [_key(_glyph(how), name) for how, name in named_looks(digest, marks)]


def _remark(how: Look, mark: Mark) -> str:
    return "" if how == LOOKS[mark.role] else ", breaks the SLO"


def _glyph(how: Look) -> Html:
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
