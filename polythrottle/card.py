"""What a notebook shows of a study or a profile: a heading, what the joules are, and a few named lines."""

from collections.abc import Iterable
from html import escape

from polythrottle.measurement import EnergyKind, Interval, Measurement
from polythrottle.space import OperatingPoint
from polythrottle.units import show, show_name, show_number

CAUTIONS = {
    EnergyKind.SIMULATED: "Simulated: time and energy come from a model of the device. No device was measured.",
    EnergyKind.ESTIMATED: "Estimated: energy is worked out from a stated power figure. It was not read from a meter.",
    EnergyKind.RELATIVE: "Relative: the unit of energy is unknown. Only ratios mean anything.",
}
"""What has to be said of joules that were not read from a meter."""
_CELL = "text-align:left;vertical-align:top;padding:2px 12px 2px 0"


def card_html(heading: str, lines: Iterable[tuple[str, str]], kinds: Iterable[EnergyKind] = ()) -> str:
    """Return a small table as HTML that needs no style sheet; every text is escaped.

    Args:
        heading: What it is of.
        lines: Name and text of each row; a row without a text is left out.
        kinds: How the joules in it came about.
    """
    rows = "".join(
        f'<tr><th style="{_CELL};font-weight:normal;opacity:0.7">{escape(name)}</th>'
        f'<td style="{_CELL}">{escape(text)}</td></tr>'
        for name, text in lines
        if text
    )
    cautions = "".join(f"<p><em>{escape(CAUTIONS[kind])}</em></p>" for kind in sorted(set(kinds)) if kind in CAUTIONS)
    return f'<div class="polythrottle"><p><strong>{escape(heading)}</strong></p><table>{rows}</table>{cautions}</div>'


def show_energy(seen: Measurement) -> str:
    """Return energy per item with its ± and how it came about: ``812 mJ ± 1.1 % per item, simulated``."""
    unit = "" if seen.energy_kind is EnergyKind.RELATIVE else "J"
    between = seen.intervals.get("energy")
    around = f" ± {100 * between.half / seen.energy_j:.2g} %" if between is not None and between.known else ""
    return f"{show(seen.energy_j, unit).strip()}{around} per item, {seen.energy_kind}"


def show_saving(fraction: float | None, between: Interval | None, of: str = "energy per item") -> str:
    """Return what share is saved, with its 95 % interval; empty if it is unknown.

    Args:
        fraction: Of the default's; negative if more is taken.
        between: The interval; None if it is not known.
        of: What is saved.
    """
    if fraction is None:
        return ""
    claim = f"{_percent(abs(fraction))} {'less' if fraction >= 0 else 'more'} {of} than the default"
    if between is None or not between.known:
        return f"{claim}; its interval is not known"
    ends = f"{_percent(between.low)} to {_percent(between.high)} with 95 % confidence"
    return f"{claim}; not proven: {ends}" if between.low <= 0 <= between.high else f"{claim}: {ends}"


def show_point(point: OperatingPoint) -> str:
    """Return a point as ``--point`` takes it: ``batch_size=4, gpu_max_mhz=828.75``."""
    return ", ".join(f"{show_name(name)}={show_number(name, level)}" for name, level in point.items())


def _percent(fraction: float) -> str:
    return f"{100 * fraction:.1f} %"
