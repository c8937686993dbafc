"""The figure of a benchmark: how regret falls with trials, and what each method breaks until it arrives."""

import math
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from polythrottle.bench import Runner
from polythrottle.errors import InvalidInput, StorageError
from polythrottle.report.ink import BLUE, GREEN, INK, MUTED, PURPLE, VERMILLION, styled
from polythrottle.report.labels import name_points

FORMATS = (".png", ".svg", ".pdf")
_WIDTH_IN, _HEIGHT_IN, _DPI = 9.6, 4.3, 160
_FLOOR, _CEILING = 1e-3, 1.0
_TICKS = (0.001, 0.01, 0.05, 0.1, 0.5, 1.0)
# Okabe-Ito first, then its lighter members; what is left is grey with dashes.
_COLOURS = (VERMILLION, BLUE, PURPLE, "#e69f00", "#56b4e9", "#8c6d31", INK, MUTED)
_OURS = ("#00614a", GREEN, "#5f8f1f", "#9bbf3a")
_OWN = "bayes"
_DASHES = (0, (4, 2))


def check_figure(path: Path) -> None:
    """Refuse a path to which no figure can be written, before the work that would fill it.

    Raises:
        InvalidInput: If its ending is none of `FORMATS`.
        StorageError: If its folder is not there or it is not a regular file.
    """
    if path.suffix not in FORMATS:
        raise InvalidInput(f"{path} names no figure; it ends in one of {', '.join(FORMATS)}")
    if not path.absolute().parent.is_dir():
        raise StorageError(f"{path} cannot be written: there is no folder {path.parent}")
    if path.exists() and not path.is_file():
        raise StorageError(f"{path} cannot be written: it is not a regular file")


def write_race(runners: Sequence[Runner], path: Path, title: str = "") -> None:
    """Write the figure of a benchmark; its ending says the format.

    Raises:
        InvalidInput: If the ending is none of `FORMATS`.
        StorageError: If the file cannot be written.
    """
    check_figure(path)
    with styled():
        save_figure(race(runners, title), path)


def save_figure(figure: Figure, path: Path) -> None:
    """Write a figure; its ending says the format.

    Raises:
        InvalidInput: If the ending is none of `FORMATS`.
        StorageError: If the file cannot be written.
    """
    check_figure(path)
    try:
        blank = {"Software": None} if path.suffix == ".png" else {}
        figure.savefig(path, dpi=_DPI, facecolor="white", metadata=blank)
    except OSError as error:
        raise StorageError(f"{path} cannot be written: {error.strerror}") from error


def race(runners: Sequence[Runner], title: str = "") -> Figure:
    """Return the figure: best regret so far on the left, broken limits against trials on the right."""
    figure = Figure(figsize=(_WIDTH_IN, _HEIGHT_IN), dpi=72, layout="constrained")
    left, right = figure.subplots(1, 2)
    colours = _colours(runners)
    _curves(left, runners, colours)
    _spots(right, runners, colours)
    figure.suptitle(title.replace("<=", " ≤ ").replace(">=", " ≥ "), x=0.01, ha="left", color=INK, fontsize=10)
    handles, labels = left.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(len(runners), 6), frameon=False)
    figure.draw_without_rendering()
    figure.set_layout_engine("none")
    spots = [(runner.name, runner.trials[0], runner.broken[0]) for runner in runners]
    name_points(right, spots, [(x, y) for _, x, y in spots], right.lines)
    return figure


def _colours(runners: Sequence[Runner]) -> dict[str, str]:
    ours = [runner.name for runner in runners if runner.name.startswith(_OWN)]
    others = [runner.name for runner in runners if not runner.name.startswith(_OWN)]
    own = {name: _OURS[min(place, len(_OURS) - 1)] for place, name in enumerate(ours)}
    return {**own, **{name: _COLOURS[min(place, len(_COLOURS) - 1)] for place, name in enumerate(others)}}


def _curves(axes: Axes, runners: Sequence[Runner], colours: dict[str, str]) -> None:
    """Draw the median regret against trials; bands for the first method and for our own at their usual risk."""
    for place, runner in enumerate(runners):
        own = runner.name.startswith(_OWN)
        numbers = range(1, len(runner.middle) + 1)
        colour, width, layer = colours[runner.name], 2.2 if own else 1.3, 4 if own else 3
        (line,) = axes.plot(numbers, _shown(runner.middle), label=runner.name, color=colour, linewidth=width)
        line.set(drawstyle="steps-post", zorder=layer, linestyle=_DASHES if "@" in runner.name else "-")
        if place == 0 or (own and "@" not in runner.name):
            band = (_clipped(runner.low), _clipped(runner.high))
            axes.fill_between(numbers, *band, color=colour, alpha=0.13, linewidth=0, step="post", zorder=1)
    axes.axhline(0.05, color=MUTED, linewidth=0.8, linestyle=(0, (4, 3)), zorder=2)
    axes.set(yscale="log", ylim=(_FLOOR * 0.9, _CEILING * 1.05))
    axes.set_xlim(1, max(len(runner.middle) for runner in runners))
    axes.yaxis.set_major_locator(FixedLocator(_TICKS))
    axes.yaxis.set_major_formatter(FuncFormatter(_percent))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    axes.set_title("regret of the best so far: median and quartiles", loc="left", color=INK)
    axes.set_xlabel("trial")


def _percent(value: float, _: int | None) -> str:
    return f"{'≤ ' if value <= _FLOOR else ''}{100 * value:g} %"


def _shown(values: Sequence[float]) -> list[float]:
    """Return values with the unknown ones left out and the least ones at the floor."""
    return [max(value, _FLOOR) if math.isfinite(value) else math.nan for value in values]


def _clipped(values: Sequence[float]) -> list[float]:
    return [min(max(value, _FLOOR), 2 * _CEILING) for value in values]


def _spots(axes: Axes, runners: Sequence[Runner], colours: dict[str, str]) -> None:
    """Draw what each method needed and broke, with intervals and its name beside it."""
    for runner in runners:
        (x, left, right), (y, low, high) = runner.trials, runner.broken
        colour, own = colours[runner.name], runner.name.startswith(_OWN)
        axes.plot([left, right], [y, y], color=colour, linewidth=1, alpha=0.6, zorder=2)
        axes.plot([x, x], [low, high], color=colour, linewidth=1, alpha=0.6, zorder=2)
        axes.plot([x], [y], "*" if own else "o", color=colour, markersize=12 if own else 6, zorder=4)
    axes.set_xscale("log")
    ends = [end for runner in runners for end in runner.trials]
    axes.set_xlim(min(ends) / 1.3, max(ends) * 1.35)
    axes.set_ylim(bottom=-0.1 * axes.get_ylim()[1])  # Room for names under the methods that break nothing.
    axes.xaxis.set_major_locator(FixedLocator((1, 2, 3, 5, 7, 10, 15, 20, 30, 45, 60)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_title("trials that broke the limit before then", loc="left", color=INK)
    axes.set_xlabel("trials to within 5 % of the best (geometric mean)")
