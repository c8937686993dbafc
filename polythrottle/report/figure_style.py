"""How figures and pages are drawn: HTML that escapes by itself, palette, marks, SVG that follows light and dark, axes.

Axes fit their values; labels cover little.
"""

import io
import math
import re
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from html import escape
from itertools import pairwise

import matplotlib
import matplotlib.style
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter, NullLocator

from polythrottle.report.digest import Mark, Role

_VOID = frozenset({"meta", "br", "input"})


class Html(str):
    """Text that is markup already."""

    __slots__ = ()


def tag(name: str, /, *children: str, **attributes: str) -> Html:
    """Return one element; children and attributes are escaped unless they are `Html`.

    Args:
        name: Of the element.
        children: Its content.
        attributes: A trailing underscore is dropped (``class_``), others become hyphens (``aria_label``).
    """
    written = "".join(f' {_attribute(key)}="{escape(value)}"' for key, value in attributes.items())
    if name in _VOID:
        return Html(f"<{name}{written}>")
    return Html(f"<{name}{written}>{joined(children)}</{name}>")


def joined(children: Iterable[str], between: str = "") -> Html:
    """Return pieces one after the other, escaped unless they are `Html`."""
    return Html(between.join(child if isinstance(child, Html) else escape(child) for child in children))


def _attribute(key: str) -> str:
    return key.rstrip("_").replace("_", "-")


# How figures look: one palette, one marker per role, and SVG that takes light or dark from the page.

# Okabe-Ito where a colour means something; in the page each becomes a CSS variable of the same name.
INK = "#1f2328"
MUTED = "#676e77"
LINE = "#d9dce1"
CARD = "#fefefe"
BLUE = "#0072b2"
VERMILLION = "#d55e00"
GREEN = "#009e73"
PURPLE = "#cc79a7"
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
class MarkerStyle:
    """A marker: its shape, area in pt², and colours of face and edge."""

    shape: str
    area_pt2: float
    face: str
    edge: str
    layer: int

    def hollow(self) -> "MarkerStyle":
        """Return the same marker unfilled, for a named point that breaks the SLO."""
        return MarkerStyle(self.shape, self.area_pt2, CARD, self.face, self.layer)


LOOKS = {
    Role.FEASIBLE: MarkerStyle("o", 20, BLUE, CARD, 3),
    Role.INFEASIBLE: MarkerStyle("x", 20, VERMILLION, VERMILLION, 3),
    Role.UNJUDGED: MarkerStyle("o", 20, CARD, MUTED, 3),
    Role.PRESET: MarkerStyle("^", 38, PURPLE, CARD, 4),
    Role.DEFAULT: MarkerStyle("D", 36, INK, CARD, 5),
    Role.TUNED: MarkerStyle("*", 130, GREEN, CARD, 6),
}


def look(mark: Mark) -> MarkerStyle:
    """Return the marker of a point; named points that break the SLO are hollow."""
    named = mark.role in (Role.PRESET, Role.DEFAULT)
    if named and mark.verdict is False:
        return LOOKS[mark.role].hollow()
    return LOOKS[mark.role]


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


def _scatter(axes: Axes, xs: list[float], ys: list[float], how: MarkerStyle) -> None:
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
    body = re.sub("|".join(_VARIABLES), lambda match: variable(match[0]), body)
    width, height = figure.get_size_inches() * 72
    return tag("svg", Html(body), viewBox=f"0 0 {width:g} {height:g}", role="img", aria_label=alt)


# Axes that fit their values: fixed margins, few and round ticks, a logarithm where the values differ widely.

_LEFT_PT = 38
_RIGHT_PT = 10
_TOP_PT = 24
# Of the span; the best points lie low and need room for their names.
_BELOW = 0.16
_ABOVE = 0.1
_WIDE = 5.0
_SHOWN_DPI = 144
_LOG_STEPS = {12.0: (1, 2, 3, 5, 7), 1000.0: (1, 2, 5), float("inf"): (1,)}


class Drawing(Figure):
    """A figure that a notebook shows by itself, whether pyplot is loaded there or not."""

    def _repr_png_(self) -> bytes:
        written = io.BytesIO()
        self.savefig(written, format="png", dpi=_SHOWN_DPI)
        return written.getvalue()


def canvas(
    width_pt: float, height_pt: float, title: str, bottom_pt: float = 36, above_pt: float = 0
) -> tuple[Figure, Axes]:
    """Return a figure with one pair of axes, the vertical one named above it where it takes no width.

    Args:
        width_pt: Of the figure.
        height_pt: Likewise, without what is above.
        title: Of the vertical axis.
        bottom_pt: Room below the axes.
        above_pt: Height of what else comes above the title; see `strip`.
    """
    whole_pt = height_pt + above_pt
    figure = blank(width_pt, whole_pt)
    across = width_pt - _LEFT_PT - _RIGHT_PT
    up = height_pt - _TOP_PT - bottom_pt
    axes = figure.add_axes((_LEFT_PT / width_pt, bottom_pt / whole_pt, across / width_pt, up / whole_pt))
    axes.tick_params(length=0, pad=4)
    figure.text(2 / width_pt, (height_pt - 12) / whole_pt, title, color=MUTED)
    return figure, axes


def strip(figure: Figure, height_pt: float) -> Axes:
    """Return further axes as wide as those of `canvas`, at the very top of the figure."""
    width, height = figure.get_size_inches() * 72
    bottom = (height - height_pt - 4) / height
    axes = figure.add_axes((_LEFT_PT / width, bottom, (width - _LEFT_PT - _RIGHT_PT) / width, height_pt / height))
    axes.tick_params(length=0, pad=3)
    return axes


def blank(width_pt: float, height_pt: float) -> Figure:
    """Return an empty figure in which one dot is one point."""
    return Drawing(figsize=(width_pt / 72, height_pt / 72), dpi=72)


def fit(axis: Axis, values: Sequence[float], ticks: int = 5) -> None:
    """Set scale, limits and ticks of one axis so that all values are inside, with room for markers at the edges."""
    if not values:
        axis.set_major_locator(NullLocator())
        return
    low = min(values)
    high = max(values)
    if differ_widely(values):
        _fit_log(axis, low, high, ticks)
        return
    span = high - low or abs(high) or 1.0
    _limit(axis, low - _BELOW * span, high + _ABOVE * span)
    axis.set_major_locator(MaxNLocator(ticks, steps=[1, 2, 2.5, 5, 10]))
    axis.set_major_formatter(FuncFormatter(_plain))


def differ_widely(values: Sequence[float]) -> bool:
    """Return whether an axis shows these values along a logarithm."""
    return min(values) > 0 and max(values) / min(values) > _WIDE


def _fit_log(axis: Axis, low: float, high: float, ticks: int) -> None:
    axis.axes.set(**{f"{_letter(axis)}scale": "log"})
    _limit(axis, low / (high / low) ** _BELOW, high * (high / low) ** _ABOVE)
    steps = next(subs for ratio, subs in _LOG_STEPS.items() if high / low < ratio and len(subs) <= ticks)
    axis.set_major_locator(LogLocator(subs=steps))
    axis.set_major_formatter(FuncFormatter(_plain))
    axis.set_minor_locator(NullLocator())
    axis.set_minor_formatter(NullFormatter())


def _limit(axis: Axis, low: float, high: float) -> None:
    axis.axes.set(**{f"{_letter(axis)}lim": (low, high)})


def _letter(axis: Axis) -> str:
    if axis is axis.axes.xaxis:
        return "x"
    return "y"


def _plain(value: float, _: int | None) -> str:
    return f"{value:.10g}".replace("-", "−")


# Naming points in a crowded figure: each label goes beside its point where it covers the least.

_CAPITAL_PT = 0.76 * TEXT_PT
_LETTER_PT = 0.62 * TEXT_PT
_GAP_PT = 7.0


@dataclass(frozen=True)
class Box:
    """A rectangle in points from the lower left of the figure."""

    left: float
    bottom: float
    right: float
    top: float

    def overlaps(self, other: "Box") -> bool:
        """Return whether the two share any area."""
        return (
            self.left < other.right and other.left < self.right and self.bottom < other.top and other.bottom < self.top
        )

    def inside(self, other: "Box") -> bool:
        """Return whether this lies wholly within the other."""
        across = other.left <= self.left and self.right <= other.right
        return across and other.bottom <= self.bottom and self.top <= other.top


def name_points(
    axes: Axes,
    names: Sequence[tuple[str, float, float]],
    others: Sequence[tuple[float, float]],
    lines: Sequence[Line2D] = (),
) -> None:
    """Write each name beside its point, away from other points, from lines and from names already written.

    Args:
        axes: With its limits final, in a figure of 72 dots per inch.
        names: Name and position in data units, the most important first.
        others: Positions of all points in data units.
        lines: What else had better not be covered.
    """
    frame = _frame(axes)
    points = [_around(*axes.transData.transform(place)) for place in others]
    points += [_around(*place, reach=1.0) for line in lines for place in _along(line)]
    placed: list[Box] = []
    for name, x, y in names:
        left, middle = axes.transData.transform((x, y))
        spots = _spots(left, middle, _width(name))
        best = min(spots, key=lambda spot: _cost(spot, points, placed, frame))
        placed.append(best)
        middle_pt = (best.left + best.right) / 2
        axes.annotate(name, (middle_pt, best.bottom + 2), xycoords="figure points", ha="center", color=INK, zorder=8)


def short(name: str, letters: int = 16) -> str:
    """Return a name on one line, cut to so many letters."""
    flat = " ".join(name.split())
    if len(flat) <= letters:
        return flat
    return f"{flat[: letters - 1]}…"


def _width(name: str) -> float:
    """Return about how wide a name is in points; the page's font is not known here."""
    return sum(_CAPITAL_PT if letter.isupper() else _LETTER_PT for letter in name)


def _spots(x: float, y: float, width: float) -> list[Box]:
    high = TEXT_PT + 1
    lefts = {"right": x + _GAP_PT, "centre": x - width / 2, "left": x - _GAP_PT - width}
    bottoms = {"level": y - high / 2, "above": y + _GAP_PT, "below": y - _GAP_PT - high}
    order = ("right level", "left level", "centre above", "centre below")
    corners = ("right above", "left above", "right below", "left below")
    pairs = [spot.split() for spot in (*order, *corners)]
    near = [(lefts[side], bottoms[height]) for side, height in pairs]
    far = [(left, bottom + shift) for left, bottom in near[2:4] for shift in (2 * high, -2 * high)]
    return [Box(left, bottom, left + width, bottom + high) for left, bottom in near + far]


def _cost(spot: Box, points: Sequence[Box], placed: Sequence[Box], frame: Box) -> float:
    covered = sum(spot.overlaps(point) for point in points)
    clashes = sum(spot.overlaps(other) for other in placed)
    return covered + 50 * clashes + 100 * (not spot.inside(frame))


def _along(line: Line2D) -> Iterator[tuple[float, float]]:
    """Yield places 6 pt apart along a line, in points."""
    corners = line.get_transform().transform(line.get_path().vertices)
    for (x0, y0), (x1, y1) in pairwise(corners.tolist()):
        steps = max(1, round(math.hypot(x1 - x0, y1 - y0) / 6))
        yield from ((x0 + (x1 - x0) * i / steps, y0 + (y1 - y0) * i / steps) for i in range(steps + 1))


def _around(x: float, y: float, reach: float = 3.5) -> Box:
    return Box(x - reach, y - reach, x + reach, y + reach)


def _frame(axes: Axes) -> Box:
    area = axes.get_window_extent()
    return Box(area.x0, area.y0, area.x1 + 6, area.y1 + 6)
