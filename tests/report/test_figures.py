"""Figures: where names of points are written."""

import matplotlib

matplotlib.use("svg")

import pytest
from matplotlib import pyplot

from polythrottle.report.figure_style import Box, name_points


def written(names: list[tuple[str, float, float]], others: list[tuple[float, float]]) -> list[Box]:
    """Return where names are written in axes of 400 by 300 points, over 0 to 1 either way, their widths left out."""
    figure = pyplot.figure(figsize=(400 / 72, 300 / 72), dpi=72)
    try:
        axes = figure.add_axes((0.0, 0.0, 1.0, 1.0), xlim=(0, 1), ylim=(0, 1))
        name_points(axes, names, others)
        places = [each.xyann for each in axes.texts]  # type: ignore[attr-defined]
        return [Box(x, y, x, y) for x, y in places]
    finally:
        pyplot.close(figure)


@pytest.mark.parametrize(("x", "side"), [(0.5, 1), (0.99, -1)])
def test_a_name_stands_right_of_its_point_unless_it_would_leave_the_frame(x: float, side: int) -> None:
    """At the right edge it stands on the left."""
    (name,) = written([("maximum", x, 0.5)], [(x, 0.5)])
    assert (name.left - 400 * x) * side > 0


def test_a_name_stays_in_the_frame_even_where_it_covers_points_there() -> None:
    """Half a name says less than a point that is covered."""
    crowd = [(0.85 + 0.01 * i, 0.5 + 0.02 * j) for i in range(15) for j in range(-6, 7)]
    (name,) = written([("maximum", 0.99, 0.5)], crowd)
    assert name.left < 400 * 0.99


def test_names_of_one_place_are_not_written_over_each_other() -> None:
    """The second gives way, though it covers a point there."""
    others = [(0.5, 0.5), *((0.4 + 0.02 * i, 0.4 + 0.02 * j) for i in range(11) for j in range(11) if i < 5)]
    first, second = written([("default", 0.5, 0.5), ("tuned", 0.5, 0.5)], others)
    assert first.left > 200
    assert abs(first.bottom - second.bottom) > 8 or abs(first.left - second.left) > 40
