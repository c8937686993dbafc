"""The figures of a study: the energy-latency plane, convergence, the tuned point against default and presets.

Energy against each knob.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from textwrap import wrap

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator

from polythrottle.domain.space import Knob, Level
from polythrottle.domain.units import show_name, show_number
from polythrottle.report.digest import Digest, Mark, Role, Scale
from polythrottle.report.figure_style import (
    CARD,
    GREEN,
    INK,
    MUTED,
    PURPLE,
    VERMILLION,
    Spot,
    blank,
    canvas,
    differ_widely,
    draw,
    fit,
    name_points,
    short,
    strip,
)

# The figures of a study: the energy–latency plane, convergence, and the tuned point against default and presets.

_WIDTH_PT = 310
_HEIGHT_PT = 232
_ROW_PT = 24
_OVERVIEW_PT = 84
_OVERVIEW_GAP_PT = 30
_REACH = 0.75
"""How far around the trials that hold the SLO the large figure may reach, in their own span."""
_SQUEEZED = 0.4
"""A figure is cut to its interesting region where that would take less than this share of the whole one's area."""
_DASHES = (0, (4, 3))
_DOTS = (0, (1, 2))
_BAR_COLOURS = {Role.TUNED: GREEN, Role.DEFAULT: MUTED, Role.PRESET: PURPLE}


def plane(digest: Digest, energy: Scale) -> Figure:
    """Return the energy–latency plane: every trial and preset, the front of those that hold the SLO, and its limit.

    Where a few points far away would squeeze the others, the large figure leaves them out, and a small one above shows
    every point.
    """
    metric = digest.latency_metric
    everything = (*digest.trials, *digest.presets)
    drawn = [(mark, value) for mark in everything if (value := mark.measurement.metric(metric)) is not None]
    latency = Scale.of((value for _, value in drawn), "s")
    spots = [(value / latency.factor, mark.measurement.energy_j / energy.factor) for mark, value in drawn]
    limit = None
    if digest.latency_limit_s is not None:
        limit = digest.latency_limit_s / latency.factor
    marks = [mark for mark, _ in drawn]
    # One point at ten times the energy would squeeze all that is of interest into a corner.
    near = region(marks, spots)
    higher = 0
    if near is not None:
        higher = _OVERVIEW_PT + _OVERVIEW_GAP_PT
    figure, axes = canvas(_WIDTH_PT, _HEIGHT_PT, energy.titled(digest.energy_name), above_pt=higher)
    axes.set_xlabel(latency.titled(f"{metric} latency"))
    if near is None:
        _scatter(axes, digest, marks, spots, limit)
        return figure
    shown = [(mark, spot) for mark, spot in zip(marks, spots, strict=True) if near.holds(spot)]
    bound = None
    if limit is not None and near.left <= limit <= near.right:
        bound = limit
    _scatter(axes, digest, [mark for mark, _ in shown], [spot for _, spot in shown], bound)
    above = strip(figure, _OVERVIEW_PT)
    _scatter(above, digest, marks, spots, limit, unnamed=[mark for mark, _ in shown])
    # A frame in the overview shows which part of it the large figure is.
    left, right = axes.get_xlim()
    bottom, top = axes.get_ylim()
    frame = Rectangle((left, bottom), right - left, top - bottom, fill=False, edgecolor=MUTED, linewidth=0.8, zorder=7)
    above.add_patch(frame)
    return figure


@dataclass(frozen=True)
class Region:
    """A part of the energy–latency plane, in the units of its axes."""

    left: float
    right: float
    bottom: float
    top: float

    def holds(self, spot: Spot) -> bool:
        """Return whether a point lies within."""
        return self.left <= spot[0] <= self.right and self.bottom <= spot[1] <= self.top


def region(marks: Sequence[Mark], spots: Sequence[Spot]) -> Region | None:
    """Return the part of the plane around the trials that hold the SLO, if other points would squeeze it.

    The default and all such trials are in it, unless those themselves lie so far apart that it would not help.

    Args:
        marks: Every point.
        spots: Where each is, above zero, in the same order.

    Returns:
        The part; None if the whole plane shows it well enough.
    """
    tried = [(mark, spot) for mark, spot in zip(marks, spots, strict=True) if mark.role is not Role.PRESET]
    held = [spot for mark, spot in tried if mark.verdict]
    own = [spot for mark, spot in tried if mark.verdict and mark.role is not Role.DEFAULT]
    # First with the default in view, since savings are judged against it; without it only where it is itself far away.
    for core, most in ((held, math.inf), (own, 3.0)):
        across = [_around([spot[axis] for spot in core], [spot[axis] for spot in spots], most) for axis in (0, 1)]
        if across[0] is None or across[1] is None:
            continue
        part = Region(*across[0], *across[1])
        shown = [spot for spot in spots if part.holds(spot)]
        shares = [_share([spot[axis] for spot in shown], [spot[axis] for spot in spots]) for axis in (0, 1)]
        if math.prod(shares) < _SQUEEZED:
            return part
    return None


def _around(values: Sequence[float], everything: Sequence[float], most: float) -> tuple[float, float] | None:
    """Return between what some values lie, with room around; None if they do not differ.

    Args:
        values: Of some points.
        everything: Of all points, which say what the axis is like.
        most: How many times as far above the least one as the median they are taken into account.
    """
    if not values:
        return None
    there, back = _straightened(everything)
    low, middle, high = (there(value) for value in (min(values), median(values), max(values)))
    # A single trial that holds the SLO by luck far out must not widen the region to where it squeezes again.
    if middle > low:
        high = min(high, low + most * (middle - low))
    room = _REACH * (high - low)
    if room > 0:
        return (back(low - room), back(high + room))
    return None


def _share(values: Sequence[float], everything: Sequence[float]) -> float:
    """Return what share of an axis that shows everything some values take."""
    there, _ = _straightened(everything)
    whole = there(max(everything)) - there(min(everything))
    if whole > 0:
        return (there(max(values)) - there(min(values))) / whole
    return 1.0


def _straightened(everything: Sequence[float]) -> tuple[Callable[[float], float], Callable[[float], float]]:
    """Return what leads from a value to its place on an axis, and back."""
    # Room has to look even on the axis that is drawn, which is logarithmic where values differ widely.
    if differ_widely(everything):
        return (math.log, math.exp)
    return (float, float)


def _scatter(
    axes: Axes,
    digest: Digest,
    marks: Sequence[Mark],
    spots: Sequence[Spot],
    limit: float | None,
    *,
    unnamed: Sequence[Mark] = (),
) -> None:
    """Draw points, their front, the limit and the names of those that have one and are not left unnamed."""
    fit(axes.xaxis, [x for x, _ in spots] + ([] if limit is None else [limit]))
    fit(axes.yaxis, [y for _, y in spots])
    if limit is not None:
        axes.axvline(limit, color=VERMILLION, linewidth=1, linestyle=_DASHES, zorder=1)
    held = [spot for mark, spot in zip(marks, spots, strict=True) if mark.verdict and mark.role is not Role.PRESET]
    # Of points that hold the SLO alone: a front through others would promise what may not be used.
    front = pareto(held)
    axes.step([x for x, _ in front], [y for _, y in front], where="post", color=MUTED, linewidth=1, zorder=2)
    draw(axes, marks, spots)
    names = [(mark, spot) for mark, spot in zip(marks, spots, strict=True) if mark not in unnamed]
    name_points(axes, _names(digest, [mark for mark, _ in names], [spot for _, spot in names]), spots, axes.lines)


def convergence(digest: Digest) -> Figure:
    """Return the best objective so far against the trial's number, trials that break the SLO or failed marked."""
    goal = digest.objective_scale
    objective = digest.study.problem.objective
    figure, axes = canvas(_WIDTH_PT, _HEIGHT_PT, goal.titled(digest.objective_axis))
    spots = [(float(mark.number or 0), objective.of(mark.measurement) / goal.factor) for mark in digest.trials]
    # Failed trials have no energy but took their turn, so the axis counts all of them.
    last = max(len(digest.study.trials) - 1, 1)
    axes.set_xlabel("trial")
    axes.set_xlim(-0.04 * last, 1.04 * last)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    fit(axes.yaxis, [y for _, y in spots])
    if digest.default is not None:
        level = objective.of(digest.default.measurement) / goal.factor
        axes.axhline(level, color=INK, linewidth=1, linestyle=_DOTS, zorder=1)
    path = [*(best := best_so_far(digest.trials, spots)), *((float(last), y) for _, y in best[-1:])]
    axes.step([x for x, _ in path], [y for _, y in path], where="post", color=GREEN, linewidth=1.6, zorder=2)
    draw(axes, digest.trials, spots)
    failed = [trial.number for trial in digest.study.trials if trial.failure is not None]
    floor = axes.get_xaxis_transform()
    axes.plot(failed, [0.03] * len(failed), "|", color=MUTED, markersize=8, transform=floor, zorder=3)
    return figure


def comparison(digest: Digest, energy: Scale) -> Figure:
    """Return bars of energy and of latency for the tuned point, the default and the presets."""
    marks = compared(digest)
    metric = digest.latency_metric
    latencies = [mark.measurement.metric(metric) for mark in marks]
    latency = Scale.of(latencies, "s")
    names = [short(mark.name) for mark in marks]
    title = wrap(energy.titled(digest.energy_name), 18)
    figure, left, right = _side_by_side(names, 10 + 12 * len(title))
    _bars(left, marks, [mark.measurement.energy_j for mark in marks], energy, None)
    _bars(right, marks, latencies, latency, digest.latency_limit_s)
    left.set_yticks(range(len(marks)), names, color=INK)
    heads = {left: title, right: [f"{metric} latency", f"({latency.unit})", *[""] * (len(title) - 2)]}
    for axes, lines in heads.items():
        axes.set_title("\n".join(lines), loc="left", color=MUTED, pad=5)
    return figure


def _side_by_side(names: Sequence[str], head_pt: float) -> tuple[Figure, Axes, Axes]:
    """Return a figure with two panels of rows, and room for the names on the left and for a head above."""
    rows_pt = _ROW_PT * len(names)
    height = head_pt + rows_pt
    start = 10 + 5.2 * max(map(len, names))
    width = (_WIDTH_PT - start - 12) / 2
    figure = blank(_WIDTH_PT, height)
    size = (width / _WIDTH_PT, rows_pt / height)
    left, right = (figure.add_axes((x / _WIDTH_PT, 0, *size)) for x in (start, start + width + 10))
    return figure, left, right


def compared(digest: Digest) -> list[Mark]:
    """Return what the comparison shows: the tuned point, the default unless it is the same, the presets."""
    if digest.default_is_best:
        own = [digest.best]
    else:
        own = [digest.best, digest.default]
    return [*(mark for mark in own if mark is not None), *digest.presets]


def pareto(spots: Iterable[Spot]) -> list[Spot]:
    """Return the points that no other beats in both coordinates, by the first."""
    front: list[Spot] = []
    for x, y in sorted(spots):
        if not front or y < front[-1][1]:
            front.append((x, y))
    return front


def best_so_far(marks: Sequence[Mark], spots: Sequence[Spot]) -> list[Spot]:
    """Return each point that holds the SLO and is better than all before it."""
    steps: list[Spot] = []
    for mark, (x, y) in zip(marks, spots, strict=True):
        if mark.verdict and (not steps or y < steps[-1][1]):
            steps.append((x, y))
    return steps


def _names(digest: Digest, marks: Sequence[Mark], spots: Sequence[Spot]) -> list[tuple[str, float, float]]:
    named = [(mark, spot) for mark, spot in zip(marks, spots, strict=True) if mark.name]
    ranked = sorted(named, key=lambda pair: (Role.TUNED, Role.DEFAULT, Role.PRESET).index(pair[0].role))
    return [(short(_title(digest, mark)), x, y) for mark, (x, y) in ranked]


def _title(digest: Digest, mark: Mark) -> str:
    if mark.role is Role.TUNED and digest.default_is_best:
        return "default = tuned"
    return mark.name


def _bars(axes: Axes, marks: Sequence[Mark], values: Sequence[float | None], scale: Scale, limit: float | None) -> None:
    """Draw bars over the left of the axes and their values in a column at the right, where no line crosses them."""
    longs = [0.0 if value is None else value / scale.factor for value in values]
    most = max(longs) or 1.0
    if limit is None:
        reach = most
    else:
        # A limit far above all bars would flatten them; then its line is left out.
        reach = max(most, min(limit / scale.factor, 2 * most))
    axes.set(xlim=(0, 1.5 * reach), ylim=(len(marks) - 0.5, -0.5), xticks=[], yticks=[])
    axes.spines["bottom"].set_visible(False)
    axes.grid(visible=False)
    axes.tick_params(length=0)
    for row, (mark, long, value) in enumerate(zip(marks, longs, values, strict=True)):
        # What breaks the SLO is hatched, so that it is seen on paper and without telling colours apart.
        colour = _BAR_COLOURS[mark.role]
        face, hatch = (CARD, "/////") if mark.verdict is False else (colour, None)
        axes.barh(row, long, height=0.62, facecolor=face, edgecolor=colour, hatch=hatch, linewidth=0.8)
        axes.text(1.5 * reach, row, scale.number(value), ha="right", va="center", color=INK)
    if limit is not None and limit / scale.factor <= reach:
        axes.axvline(limit / scale.factor, color=VERMILLION, linewidth=1, linestyle=_DASHES)


# Energy against the levels of each knob: one small figure per knob that was free.

_KNOB_WIDTH_PT = 209
_KNOB_HEIGHT_PT = 150
_FEW_LEVELS = 8
_LEVEL_LETTERS = 12
_ACROSS_PT = 160
_SLANTED_PT = 26
_SLANTED_LEVELS = 14


def free_knobs(digest: Digest) -> list[Knob]:
    """Return the knobs that have more than one level among the points of the space."""
    space = digest.study.problem.space
    return [knob for i, knob in enumerate(space.knobs) if len(set(space.rows[:, i].tolist())) > 1]


def knob_figure(digest: Digest, knob: Knob, energy: Scale) -> Figure:
    """Return the energy of every trial against the level of one knob."""
    extra = 0
    if _stepped(knob) and _crowded(knob) and not knob.ordered:
        extra = _SLANTED_PT
    figure, axes = canvas(_KNOB_WIDTH_PT, _KNOB_HEIGHT_PT + extra, energy.titled(digest.energy_name), 36 + extra)
    knob_panel(axes, digest, knob, energy)
    return figure


def knob_panel(axes: Axes, digest: Digest, knob: Knob, energy: Scale) -> None:
    """Draw the energy of every trial against the level of one knob."""
    stepped = _stepped(knob)
    axes.set_xlabel(titled(knob.name))
    places = {level: float(i) if stepped else number(knob.name, level) for i, level in enumerate(knob.levels)}
    if stepped:
        _ticks(axes, knob)
    else:
        fit(axes.xaxis, list(places.values()), ticks=4)
    marks = [mark for mark in digest.trials if mark.point.get(knob.name) in places]
    spots = [(places[mark.point[knob.name]], mark.measurement.energy_j / energy.factor) for mark in marks]
    fit(axes.yaxis, [y for _, y in spots], ticks=4)
    draw(axes, marks, spots)


def _stepped(knob: Knob) -> bool:
    return not knob.ordered or len(knob.levels) <= _FEW_LEVELS


def titled(name: str) -> str:
    """Return a knob's name with its unit as people write it: ``gpu_max_mhz``."""
    return show_name(name)


def bare(name: str, level: Level) -> str:
    """Return a level as people write it, without the unit."""
    return show_number(name, level)


def number(name: str, level: Level) -> float:
    """Return a numeric level in the unit of `titled`."""
    return float(bare(name, level))


def _ticks(axes: Axes, knob: Knob) -> None:
    """Name every level if there is room, else slanted, or only every few."""
    texts = _texts(knob)
    slanted = _crowded(knob) and not knob.ordered
    # Slanted names need the height of a line each, level ones their whole width.
    if slanted:
        every = math.ceil(len(texts) / _SLANTED_LEVELS)
    else:
        every = math.ceil(_needed_pt(texts) / _ACROSS_PT)
    axes.set_xticks(range(0, len(texts), every), texts[::every])
    if slanted:
        axes.tick_params("x", labelrotation=35)
        for text in axes.get_xticklabels():
            text.set(ha="right", rotation_mode="anchor")
    axes.set_xlim(-0.5, len(texts) - 0.5)


def _crowded(knob: Knob) -> bool:
    return _needed_pt(_texts(knob)) > _ACROSS_PT


def _needed_pt(texts: list[str]) -> float:
    return 5.4 * (max(map(len, texts)) + 1) * len(texts)


def _texts(knob: Knob) -> list[str]:
    return [short(bare(knob.name, level), _LEVEL_LETTERS) for level in knob.levels]
