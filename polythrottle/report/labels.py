"""Naming points in a crowded figure: each label goes beside its point where it covers the least."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from polythrottle.report.ink import INK, TEXT_PT

_CAPITAL_PT, _LETTER_PT = 0.76 * TEXT_PT, 0.62 * TEXT_PT
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
    return flat if len(flat) <= letters else f"{flat[: letters - 1]}…"


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
