"""The figures that commands write: a benchmark's race, a fine-tuning run along time, a plan's front."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from polythrottle.domain.errors import InvalidInput, StorageError
from polythrottle.lab.bench import Runner
from polythrottle.report.figure_style import BLUE, CARD, GREEN, INK, MUTED, PURPLE, VERMILLION, fit, name_points, styled
from polythrottle.training.beside.serving_loop import Result

# The figure of a benchmark: how regret falls with trials, and what each method breaks until it arrives.

FORMATS = (".png", ".svg", ".pdf")
_SIZE_IN = (9.6, 4.3)
_DPI = 160
# A logarithmic axis has no place for 0, the regret of whoever has found the best point.
_FLOOR = 1e-3
_CEILING = 1.0
_TICKS = (0.001, 0.01, 0.05, 0.1, 0.5, 1.0)
# Okabe-Ito first, then its lighter members; what is left is grey with dashes.
_MACHINE_COLOURS = (BLUE, PURPLE, "#e69f00", "#56b4e9", "#8c6d31", INK, MUTED)
_COLOURS = (VERMILLION, *_MACHINE_COLOURS)
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
        # matplotlib names its own version in a PNG, and equal figures would differ between two installations.
        blank = {"Software": None} if path.suffix == ".png" else {}
        figure.savefig(path, dpi=_DPI, facecolor="white", metadata=blank)
    except OSError as error:
        raise StorageError(f"{path} cannot be written: {error.strerror}") from error


def race(runners: Sequence[Runner], title: str = "") -> Figure:
    """Return the figure: best regret so far on the left, broken limits against trials on the right."""
    figure = Figure(figsize=_SIZE_IN, dpi=72, layout="constrained")
    left, right = figure.subplots(1, 2)
    colours = _colours(runners)
    _curves(left, runners, colours)
    _spots(right, runners, colours)
    figure.suptitle(title.replace("<=", " ≤ ").replace(">=", " ≥ "), x=0.01, ha="left", color=INK, fontsize=10)
    handles, labels = left.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(len(runners), 6), frameon=False)
    # Names are placed beside what is drawn, so the layout must be final before they are.
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
        colour = colours[runner.name]
        width = {True: 2.2, False: 1.3}[own]
        layer = 3 + own  # our own lies above its rivals
        (line,) = axes.plot(numbers, _shown(runner.middle), label=runner.name, color=colour, linewidth=width)
        line.set(drawstyle="steps-post", zorder=layer, linestyle=_DASHES if "@" in runner.name else "-")
        if place == 0 or (own and "@" not in runner.name):
            band = (_clipped(runner.low), _clipped(runner.high))
            axes.fill_between(numbers, *band, color=colour, alpha=0.13, linewidth=0, step="post", zorder=1)
    axes.axhline(0.05, color=MUTED, linewidth=0.8, linestyle=(0, (4, 3)), zorder=2)
    axes.set(yscale="log", ylim=(_FLOOR * 0.9, _CEILING * 1.05))
    axes.set_xlim(1, max(2, *(len(runner.middle) for runner in runners)))  # a search may end with its first trial
    axes.yaxis.set_major_locator(FixedLocator(_TICKS))
    axes.yaxis.set_major_formatter(FuncFormatter(_percent_tick))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    axes.set_title("regret of the best so far: median and quartiles", loc="left", color=INK)
    axes.set_xlabel("trial")


def _percent_tick(value: float, _: int | None) -> str:
    return f"{'≤ ' if value <= _FLOOR else ''}{100 * value:g} %"


def _shown(values: Sequence[float]) -> list[float]:
    """Return values with the unknown ones left out and the least ones at the floor."""
    return [max(value, _FLOOR) if math.isfinite(value) else math.nan for value in values]


def _clipped(values: Sequence[float]) -> list[float]:
    # Beyond the axes, so that a band without an upper end runs out of the picture.
    return [min(max(value, _FLOOR), 2 * _CEILING) for value in values]


def _spots(axes: Axes, runners: Sequence[Runner], colours: dict[str, str]) -> None:
    """Draw what each method needed and broke, with intervals and its name beside it."""
    for runner in runners:
        (x, left, right), (y, low, high) = runner.trials, runner.broken
        colour = colours[runner.name]
        own = runner.name.startswith(_OWN)
        axes.plot([left, right], [y, y], color=colour, linewidth=1, alpha=0.6, zorder=2)
        axes.plot([x, x], [low, high], color=colour, linewidth=1, alpha=0.6, zorder=2)
        marker, size = {True: ("*", 12), False: ("o", 6)}[own]
        axes.plot([x], [y], marker, color=colour, markersize=size, zorder=4)
    # Trials differ by factors between methods, and ratios of them are what the text compares.
    axes.set_xscale("log")
    ends = [end for runner in runners for end in runner.trials]
    axes.set_xlim(min(ends) / 1.3, max(ends) * 1.35)
    axes.set_ylim(bottom=-0.1 * axes.get_ylim()[1])  # Room for names under the methods that break nothing.
    axes.xaxis.set_major_locator(FixedLocator((1, 2, 3, 5, 7, 10, 15, 20, 30, 45, 60)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_title("trials that broke the limit before then", loc="left", color=INK)
    axes.set_xlabel("trials to within 5 % of the best (geometric mean)")


# The figure of a run: the latency of each request along time, and below how much of the time was fine-tuned.

_BINS = 120


def write_beside(found: Result, path: Path) -> None:
    """Write the figure of a run; its ending says the format.

    Raises:
        InvalidInput: If no request was answered, or the ending is none that is known.
        StorageError: If the file cannot be written.
    """
    with styled():
        save_figure(beside(found), path)


def beside(found: Result) -> Figure:
    """Return the figure: latencies and the limit above, the share of time with a slice under way below.

    Raises:
        InvalidInput: If no request was answered.
    """
    if not found.latencies_s:
        raise InvalidInput("no request was answered, so there is nothing to draw")
    figure = Figure(figsize=_SIZE_IN, dpi=72, layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(4, 1))
    at_s = np.array(found.arrived_s)
    took_ms = 1e3 * np.array(found.latencies_s)
    late = took_ms > 1e3 * found.slo_s
    above.plot(at_s[~late], took_ms[~late], ".", color=BLUE, markersize=3, label="in time")
    above.plot(at_s[late], took_ms[late], ".", color=VERMILLION, markersize=4, label="late")
    above.axhline(1e3 * found.slo_s, color=INK, linewidth=0.9, linestyle=(0, (4, 2)), label="limit")
    above.set_ylim(bottom=0.0)
    above.set_ylabel("latency, ms")
    above.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    edges_s = np.linspace(0.0, max(found.span_s, float(at_s.max())), _BINS + 1)
    below.stairs(100 * shares(found.slices_s, edges_s), edges_s, fill=True, color=GREEN)
    below.set(ylim=(0, 100), ylabel="fine-tuned, %", xlabel="s")
    kind = " (simulated)" * found.simulated
    below.set_xlabel("seconds since the first request could come", color=MUTED)
    figure.suptitle(f"{found.policy}, {found.arrivals}{kind}: {found.title}", x=0.01, ha="left", color=INK, fontsize=9)
    return figure


def shares(
    slices_s: Sequence[tuple[float, float]], edges_s: "np.ndarray[tuple[int], np.dtype[np.float64]]"
) -> np.ndarray:
    """Return how much of each bin lies within a slice, 0 to 1.

    Args:
        slices_s: From when to when each was under way, one after another.
        edges_s: Of the bins, ascending, shape (n + 1,), in seconds.

    Returns:
        The shares, shape (n,).
    """
    spent_s = np.zeros(len(edges_s) - 1)
    for begin_s, end_s in slices_s:
        spent_s += np.clip(np.minimum(end_s, edges_s[1:]) - np.maximum(begin_s, edges_s[:-1]), 0.0, None)
    return spent_s / np.diff(edges_s)


# The figure of a plan: every way on its front, in hours against dollars and in hours against joules.

_SHAPES = ("o", "^", "s", "D", "v")
_LIMIT_DASHES = (0, (4, 3))


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
    figure = Figure(figsize=_SIZE_IN, dpi=72, layout="constrained")
    left, right = figure.subplots(1, 2)
    _panel(left, ways, [way.usd for way in ways], "dollars, expected", budget_usd)
    _panel(right, ways, [way.energy_kwh for way in ways], "kilowatt-hours, expected", None)
    for axes in (left, right):
        if deadline_h is not None:
            axes.axvline(deadline_h, color=VERMILLION, linewidth=1, linestyle=_LIMIT_DASHES, zorder=1)
    said = f"{title}: estimated; filled where the limits are kept, star: the plan"
    figure.suptitle(said, x=0.01, ha="left", color=INK, fontsize=10)
    handles, labels = left.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(len(labels), 4), frameon=False)
    return figure


def _panel(axes: Axes, ways: Sequence[Way], heights: Sequence[float], name: str, limit: float | None) -> None:
    types = _places(way.machine for way in ways)
    markets = _places(way.market for way in ways)
    for kind, market in dict.fromkeys((way.machine, way.market) for way in ways):
        colour = _MACHINE_COLOURS[types[kind] % len(_MACHINE_COLOURS)]
        shape = _SHAPES[markets[market] % len(_SHAPES)]
        mine = [(w, y) for w, y in zip(ways, heights, strict=True) if (w.machine, w.market) == (kind, market)]
        faces = [colour if way.feasible else CARD for way, _ in mine]
        spots = ([way.time_h for way, _ in mine], [y for _, y in mine])
        axes.scatter(*spots, 26, c=faces, marker=shape, edgecolors=colour, linewidths=0.9, zorder=3)
        # For the legend alone, filled: the first that is drawn may be a hollow one.
        axes.scatter([], [], 26, c=colour, marker=shape, label=f"{kind}, {market}")
    for way, height in zip(ways, heights, strict=True):
        if way.chosen:
            axes.scatter([way.time_h], [height], 150, c=GREEN, marker="*", edgecolors=CARD, zorder=5)
    if limit is not None:
        axes.axhline(limit, color=VERMILLION, linewidth=1, linestyle=_LIMIT_DASHES, zorder=1)
    fit(axes.xaxis, [way.time_h for way in ways])
    fit(axes.yaxis, heights)
    axes.set_title(name, loc="left", color=INK)
    axes.set_xlabel("hours, expected")


def _places(names: Iterable[str]) -> dict[str, int]:
    return {name: place for place, name in enumerate(dict.fromkeys(names))}
