"""Figures of a study or a profile for notebooks and papers: the report's own, with a legend and a white ground.

Each function returns a `matplotlib.figure.Figure` that shows itself in a notebook and is written with ``savefig``;
pyplot and its settings are neither used nor touched.
"""

import math
import warnings
from collections.abc import Iterable

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from polythrottle.api.tuning_result import Tuning
from polythrottle.domain.errors import InvalidInput
from polythrottle.domain.profile import Profile
from polythrottle.domain.study import Study
from polythrottle.report import figures
from polythrottle.report.digest import Digest, Mark
from polythrottle.report.figure_style import (
    CARD,
    GREEN,
    INK,
    MUTED,
    VERMILLION,
    MarkerStyle,
    blank,
    canvas,
    fit,
    styled,
)
from polythrottle.report.figures import free_knobs, knob_panel
from polythrottle.report.page import front_words, limit_words, named_looks

_ROW_PT = 14
_ABREAST = 3
_PANEL_PT = 209
_PANEL_HIGH_PT = 140
_LEFT_PT = 38
_ABOVE_PT = 24
_BELOW_PT = 42
_SLANTED_PT = 66
_DASHES = (0, (4, 3))
_DOTS = (0, (1, 2))


def convergence(study: Study | Tuning) -> Figure:
    """Return the best objective so far against the number of the trial.

    Args:
        study: Finished or not; of a tuning its study.
    """
    digest = _digest(study)
    with styled():
        handles = [_line("best so far", GREEN)] * (digest.best is not None)
        if digest.default is not None:
            handles.append(_line(f"{digest.study.problem.objective.words} of the default", INK, _DOTS))
        return _finished(figures.convergence(digest), [*_keys(digest, digest.trials), *handles])


def energy_latency(study: Study | Tuning) -> Figure:
    """Return energy per item against latency: every trial and preset, the front of the feasible ones and the limit.

    Args:
        study: Finished or not; of a tuning its study.
    """
    digest = _digest(study)
    with styled():
        front = front_words(digest)
        handles = [] if front is None else [_line(front, MUTED)]
        if (limit := limit_words(digest)) is not None:
            handles.append(_line(limit, VERMILLION, _DASHES))
        marks = (*digest.trials, *digest.presets)
        return _finished(figures.plane(digest, digest.energy_scale), [*_keys(digest, marks), *handles])


def knobs(study: Study | Tuning) -> Figure:
    """Return energy per item against the level of each knob that had more than one, a panel for each.

    Args:
        study: Finished or not; of a tuning its study.

    Raises:
        InvalidInput: If no knob of the study has more than one level.
    """
    digest = _digest(study)
    free = free_knobs(digest)
    if not free:
        raise InvalidInput("no knob of this study has more than one level, so there is nothing to draw")
    across = min(_ABREAST, len(free))
    down = math.ceil(len(free) / _ABREAST)
    row_pt = _PANEL_HIGH_PT + (_BELOW_PT if all(knob.ordered for knob in free) else _SLANTED_PT)
    width = across * _PANEL_PT
    height = down * row_pt
    with styled():
        figure = blank(width, height)
        for place, knob in enumerate(free):
            left = place % across * _PANEL_PT
            top = height - place // across * row_pt
            size = (_PANEL_PT - _LEFT_PT - 10, _PANEL_HIGH_PT - _ABOVE_PT)
            spot = (left + _LEFT_PT, top - _PANEL_HIGH_PT)
            axes = figure.add_axes((spot[0] / width, spot[1] / height, size[0] / width, size[1] / height))
            axes.tick_params(length=0, pad=4)
            knob_panel(axes, digest, knob, digest.energy_scale)
            title = digest.energy_scale.titled(digest.energy_name)
            axes.annotate(title, (left + 2, top - 12), xycoords="figure points", color=MUTED, annotation_clip=False)
        return _finished(figure, _keys(digest, digest.trials))


def ladder(profile: Profile | Tuning) -> Figure:
    """Return the predicted mean power along load: the rung that is followed at each rate, and the highest one alone.

    Args:
        profile: With a ladder, as of a study that bounds the p99 and measured idle power; of a tuning its profile.

    Raises:
        InvalidInput: If it has none, or is no profile.
    """
    if isinstance(profile, Tuning) and profile.profile is not None:
        profile = profile.profile
    if not isinstance(profile, Profile):
        raise InvalidInput(
            f"a ladder is drawn of a profile, such as that of a tuning that holds its SLO, not {profile!r}"
        )
    if profile.ladder is None:
        raise InvalidInput(
            "this profile has no ladder; tune with a limit on p99 on a device whose power is read in watts"
        )
    rungs = profile.ladder.rungs
    with styled():
        title = f"mean power, predicted from {profile.measurement.energy_kind} energy (W)"
        figure, axes = canvas(360, 232, title)
        starts = (0.0, *(rung.rate_per_s for rung in rungs))
        seen = []
        for start, rung in zip(starts, rungs, strict=False):
            # In steps, for power along one rung is no straight line: fuller batches take less for each request.
            rates = [start + (rung.rate_per_s - start) * i / 20 for i in range(21)]
            powers_w = [rung.power_at(rate) for rate in rates]
            axes.plot(rates, powers_w, color=GREEN, linewidth=1.6, zorder=3)
            axes.plot(rates[-1:], powers_w[-1:], "o", color=GREEN, markersize=4, zorder=4)
            seen += powers_w
        top = [rungs[-1].power_at(rate) for rate in starts]
        axes.plot(starts, top, color=INK, linewidth=1, linestyle=_DOTS, zorder=2)
        axes.set_xlabel(f"requests per second, each rate with a p99 of at most {1e3 * profile.ladder.slo_s:.4g} ms")
        axes.set_xlim(0, 1.03 * rungs[-1].rate_per_s)
        fit(axes.yaxis, [*seen, *top])
        return _finished(figure, [_line(f"ladder of {len(rungs)}", GREEN), _line("highest rung alone", INK, _DOTS)])


def _digest(study: Study | Tuning) -> Digest:
    if not isinstance(study, Study | Tuning):
        raise InvalidInput(f"a study or a tuning can be drawn, not {study!r}; read_journal() opens a journal")
    if isinstance(study, Tuning):
        return Digest(study.study)
    return Digest(study)


def _finished(figure: Figure, handles: list[Artist]) -> Figure:
    """Give a figure its legend above everything and a ground, and settle what depends on the style.

    Names in a figure hang from its lower left corner in points, so room is made above.
    """
    width, height = (72 * inches for inches in figure.get_size_inches())
    columns = max(1, int(width // 105))
    rows = math.ceil(len(handles) / columns)
    taller = height + _ROW_PT * rows + 4
    figure.set_size_inches(width / 72, taller / 72)
    for axes in figure.axes:
        _lower(axes, height / taller)
    for text in figure.texts:
        text.set_y(text.get_position()[1] * height / taller)
    figure.legend(
        handles=handles, loc="upper left", ncols=columns, frameon=False, borderaxespad=0.1, handlelength=1.6,
        columnspacing=1.2, labelcolor=INK,
    )  # fmt: skip
    figure.set_facecolor(CARD)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from", UserWarning)
        figure.draw_without_rendering()  # ticks are made when they are drawn first: in this style, not in the caller's
    return figure


def _lower(axes: Axes, share: float) -> None:
    place = axes.get_position()
    axes.set_position((place.x0, place.y0 * share, place.width, place.height * share))


def _keys(digest: Digest, marks: Iterable[Mark]) -> list[Artist]:
    return [_key(how, name) for how, name in named_looks(digest, marks)]


def _key(how: MarkerStyle, name: str) -> Line2D:
    size = math.sqrt(how.area_pt2)
    return Line2D([], [], linestyle="none", marker=how.shape, markersize=min(size, 8.0), markerfacecolor=how.face,
                  markeredgecolor=how.edge, label=name)  # fmt: skip


def _line(name: str, colour: str, dashes: object = "-") -> Line2D:
    return Line2D([], [], color=colour, linewidth=1.2, linestyle=dashes, label=name)  # type: ignore[arg-type]


__all__ = ["convergence", "energy_latency", "knobs", "ladder"]
