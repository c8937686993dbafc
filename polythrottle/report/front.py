"""The figure of a plan: every way on its front, in hours against dollars and in hours against joules."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from polythrottle.report.axes import fit
from polythrottle.report.ink import BLUE, CARD, GREEN, INK, MUTED, PURPLE, VERMILLION, styled
from polythrottle.report.race import save_figure

_WIDTH_IN, _HEIGHT_IN = 9.6, 4.3
_COLOURS = (BLUE, PURPLE, "#e69f00", "#56b4e9", "#8c6d31", INK, MUTED)
_SHAPES = ("o", "^", "s", "D", "v")
_DASHES = (0, (4, 3))


@dataclass(frozen=True)
class Way:
    """One way to do a job, as a figure shows it; all figures are expectations.

    Attributes:
        machine: Type of its machines: a colour.
        market: How they are rented: a shape.
        time_h: Hours.
        usd: Dollars.
        energy_kwh: Kilowatt-hours.
        feasible: Whether it keeps the limits as surely as asked for; hollow if not.
        chosen: Whether it is the plan.
    """

    machine: str
    market: str
    time_h: float
    usd: float
    energy_kwh: float
    feasible: bool
    chosen: bool = False


def write_front(
    ways: Sequence[Way], path: Path, deadline_h: float | None, budget_usd: float | None, title: str
) -> None:
    """Write the figure of a plan; its ending says the format.

    Args:
        ways: Those on the front, at least one.
        path: Where to write it.
        deadline_h: Drawn as a line, None for none.
        budget_usd: Drawn as a line, None for none.
        title: What is trained.

    Raises:
        InvalidInput: If the ending is no format.
        StorageError: If the file cannot be written.
    """
    with styled():
        save_figure(front(ways, deadline_h, budget_usd, title), path)


def front(ways: Sequence[Way], deadline_h: float | None, budget_usd: float | None, title: str) -> Figure:
    """Return the figure: dollars on the left, kilowatt-hours on the right, hours below both."""
    figure = Figure(figsize=(_WIDTH_IN, _HEIGHT_IN), dpi=72, layout="constrained")
    left, right = figure.subplots(1, 2)
    _panel(left, ways, [way.usd for way in ways], "dollars, expected", budget_usd)
    _panel(right, ways, [way.energy_kwh for way in ways], "kilowatt-hours, expected", None)
    for axes in (left, right):
        if deadline_h is not None:
            axes.axvline(deadline_h, color=VERMILLION, linewidth=1, linestyle=_DASHES, zorder=1)
    said = f"{title}: estimated; filled where the limits are kept, star: the plan"
    figure.suptitle(said, x=0.01, ha="left", color=INK, fontsize=10)
    handles, labels = left.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(len(labels), 4), frameon=False)
    return figure


def _panel(axes: Axes, ways: Sequence[Way], heights: Sequence[float], name: str, limit: float | None) -> None:
    types, markets = _places(way.machine for way in ways), _places(way.market for way in ways)
    for kind, market in dict.fromkeys((way.machine, way.market) for way in ways):
        colour, shape = _COLOURS[types[kind] % len(_COLOURS)], _SHAPES[markets[market] % len(_SHAPES)]
        mine = [(w, y) for w, y in zip(ways, heights, strict=True) if (w.machine, w.market) == (kind, market)]
        faces = [colour if way.feasible else CARD for way, _ in mine]
        spots = ([way.time_h for way, _ in mine], [y for _, y in mine])
        axes.scatter(*spots, 26, c=faces, marker=shape, edgecolors=colour, linewidths=0.9, zorder=3)
        axes.scatter([], [], 26, c=colour, marker=shape, label=f"{kind}, {market}")
    for way, height in zip(ways, heights, strict=True):
        if way.chosen:
            axes.scatter([way.time_h], [height], 150, c=GREEN, marker="*", edgecolors=CARD, zorder=5)
    if limit is not None:
        axes.axhline(limit, color=VERMILLION, linewidth=1, linestyle=_DASHES, zorder=1)
    fit(axes.xaxis, [way.time_h for way in ways])
    fit(axes.yaxis, heights)
    axes.set_title(name, loc="left", color=INK)
    axes.set_xlabel("hours, expected")


def _places(names: Iterable[str]) -> dict[str, int]:
    return {name: place for place, name in enumerate(dict.fromkeys(names))}
