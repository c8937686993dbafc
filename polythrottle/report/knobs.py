"""Energy against the levels of each knob: one small figure per knob that was free."""

import math

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from polythrottle.report.axes import canvas, fit
from polythrottle.report.digest import Digest
from polythrottle.report.ink import draw
from polythrottle.report.labels import short
from polythrottle.report.scale import Scale
from polythrottle.space import Knob, Level
from polythrottle.units import show_name, show_number

_WIDTH_PT, _HEIGHT_PT = 209, 150
_FEW_LEVELS = 8
_LEVEL_LETTERS = 12
_ACROSS_PT = 160
_SLANTED_PT, _SLANTED_LEVELS = 26, 14


def free_knobs(digest: Digest) -> list[Knob]:
    """Return the knobs that have more than one level among the points of the space."""
    space = digest.study.problem.space
    return [knob for i, knob in enumerate(space.knobs) if len(set(space.rows[:, i].tolist())) > 1]


def knob_figure(digest: Digest, knob: Knob, energy: Scale) -> Figure:
    """Return the energy of every trial against the level of one knob."""
    extra = _SLANTED_PT if _stepped(knob) and _crowded(knob) and not knob.ordered else 0
    figure, axes = canvas(_WIDTH_PT, _HEIGHT_PT + extra, energy.titled(digest.energy_name), 36 + extra)
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
    every = math.ceil(len(texts) / _SLANTED_LEVELS) if slanted else math.ceil(_needed_pt(texts) / _ACROSS_PT)
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
