"""How figures look: one palette, one marker per role, and SVG that takes light or dark from the page."""

import io
import re
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import matplotlib
import matplotlib.style
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from polythrottle.report.digest import Mark, Role
from polythrottle.report.markup import Html, tag

# Okabe-Ito where a colour means something; in the page each becomes a CSS variable of the same name.
INK, MUTED, LINE, CARD = "#1f2328", "#676e77", "#d9dce1", "#fefefe"
BLUE, VERMILLION, GREEN, PURPLE = "#0072b2", "#d55e00", "#009e73", "#cc79a7"
_VARIABLES = {
    INK: "ink",
    MUTED: "muted",
    LINE: "line",
    CARD: "card",
    BLUE: "blue",
    VERMILLION: "vermillion",
    GREEN: "green",
    PURPLE: "purple",
}
TEXT_PT = 9.0
Spot = tuple[float, float]
_STYLE = {
    "font.size": TEXT_PT,
    "axes.titlesize": TEXT_PT,
    "axes.labelsize": TEXT_PT,
    "xtick.labelsize": TEXT_PT,
    "ytick.labelsize": TEXT_PT,
    "text.color": INK,
    "text.parse_math": False,
    "axes.labelcolor": MUTED,
    "axes.edgecolor": LINE,
    "axes.facecolor": "none",
    "figure.facecolor": "none",
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.formatter.use_mathtext": False,
    "axes.formatter.useoffset": False,
    "grid.color": LINE,
    "grid.linewidth": 0.5,
    "xtick.color": LINE,
    "ytick.color": LINE,
    "xtick.labelcolor": MUTED,
    "ytick.labelcolor": MUTED,
    "hatch.linewidth": 0.7,
    "svg.fonttype": "none",
    "svg.hashsalt": "polythrottle",
}


@dataclass(frozen=True)
class Look:
    """A marker: its shape, area in pt², and colours of face and edge."""

    shape: str
    area_pt2: float
    face: str
    edge: str
    layer: int

    def hollow(self) -> "Look":
        """Return the same marker unfilled, for a named point that breaks the SLO."""
        return Look(self.shape, self.area_pt2, CARD, self.face, self.layer)


LOOKS = {
    Role.FEASIBLE: Look("o", 20, BLUE, CARD, 3),
    Role.INFEASIBLE: Look("x", 20, VERMILLION, VERMILLION, 3),
    Role.UNJUDGED: Look("o", 20, CARD, MUTED, 3),
    Role.PRESET: Look("^", 38, PURPLE, CARD, 4),
    Role.DEFAULT: Look("D", 36, INK, CARD, 5),
    Role.TUNED: Look("*", 130, GREEN, CARD, 6),
}


def look(mark: Mark) -> Look:
    """Return the marker of a point; named points that break the SLO are hollow."""
    named = mark.role in (Role.PRESET, Role.DEFAULT)
    return LOOKS[mark.role].hollow() if named and mark.verdict is False else LOOKS[mark.role]


def draw(axes: Axes, marks: Sequence[Mark], spots: Sequence[Spot]) -> None:
    """Draw points where they belong, each by its role.

    Args:
        axes: Where.
        marks: What each point is.
        spots: Where each is, in data units, in the same order.
    """
    for how in dict.fromkeys(map(look, marks)):
        chosen = [spot for mark, spot in zip(marks, spots, strict=True) if look(mark) == how]
        _scatter(axes, [x for x, _ in chosen], [y for _, y in chosen], how)


def _scatter(axes: Axes, xs: list[float], ys: list[float], how: Look) -> None:
    if how.shape == "x":
        axes.scatter(xs, ys, how.area_pt2, c=how.edge, marker="x", linewidths=1.3, zorder=how.layer)
        return
    axes.scatter(
        xs, ys, how.area_pt2, c=how.face, marker=how.shape, edgecolors=how.edge, linewidths=0.8, zorder=how.layer
    )


def variable(colour: str) -> str:
    """Return the page's CSS variable for a colour of the palette."""
    return f"var(--{_VARIABLES[colour]})"


def styled() -> AbstractContextManager[None]:
    """Return the context in which figures are made and saved; whatever the user's own matplotlib is set to."""
    return matplotlib.style.context(["default", _STYLE])


def svg(figure: Figure, name: str, alt: str) -> Html:
    """Return a figure as inline SVG whose colours follow the page, the same bytes for the same figure.

    Args:
        figure: What to draw.
        name: Unique in the page; keeps the identifiers of several figures apart.
        alt: What a reader who cannot see it should know.
    """
    written = io.StringIO()
    blank = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from", UserWarning)  # The browser has other fonts.
        figure.savefig(written, format="svg", metadata=blank)
    body = re.sub(r"^.*?<svg\b[^>]*>|</svg>\s*$", "", written.getvalue(), flags=re.DOTALL)
    body = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{name}-", body)
    body = re.sub("|".join(_VARIABLES), lambda found: variable(found[0]), body)
    width, height = figure.get_size_inches() * 72
    return tag("svg", Html(body), viewBox=f"0 0 {width:g} {height:g}", role="img", aria_label=alt)
