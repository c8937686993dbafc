"""Axes that fit their values: fixed margins, few and round ticks, a logarithm where the values differ widely."""

import io
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter, NullLocator

from polythrottle.report.ink import MUTED

_LEFT_PT, _RIGHT_PT, _TOP_PT = 38, 10, 24
_BELOW, _ABOVE = 0.16, 0.1  # Of the span; the best points lie low and need room for their names.
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
    across, up = width_pt - _LEFT_PT - _RIGHT_PT, height_pt - _TOP_PT - bottom_pt
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
    low, high = min(values), max(values)
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
    return "x" if axis is axis.axes.xaxis else "y"


def _plain(value: float, _: int | None) -> str:
    return f"{value:.10g}".replace("-", "−")
