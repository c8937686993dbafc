"""The vendor's named points of a board, from its own power modes or, where they cannot be read, from the catalogue.

A power mode is expressed by the knobs it limits. What has no knob, such as cores that it takes offline, is left out,
and so is a mode that goes beyond the limits found on the board.
"""

from collections.abc import Mapping, Sequence

from polythrottle.backends.capability import Capability
from polythrottle.backends.jetson.mode import Mode, nearest
from polythrottle.catalog import Board
from polythrottle.space import Level, OperatingPoint

_KNOBS = ("gpu_max_hz", "mem_hz", "cpu_max_hz")


def presets(
    mode: Mode, entry: Board | None, tables: Mapping[str, Sequence[int]], knobs: Mapping[str, Capability]
) -> tuple[Mapping[str, OperatingPoint], str]:
    """Return the named points of a board, and where they come from.

    Args:
        mode: The board's own modes.
        entry: Its entry in the catalogue, if any.
        tables: For each knob everything its driver offers, limits aside.
        knobs: The knobs that work.
    """
    own = {each.name: mode.reach(each, tables) for each in mode.modes}
    if own:
        points = {name: _within(levels, knobs) for name, levels in own.items()}
        return {name: point for name, point in points.items() if point}, "the board's own power modes (nvpmodel.conf)"
    if entry is None:
        return {}, "none: the board has no readable nvpmodel.conf and no entry in devices/"
    points = {name: _within(_rounded(point, tables), knobs) for name, point in entry.presets.items()}
    return {name: point for name, point in points.items() if point}, f"devices/{entry.name}.toml"


def _rounded(point: Mapping[str, Level], tables: Mapping[str, Sequence[int]]) -> Mapping[str, int]:
    """Return a point of the catalogue in the board's own steps, each the nearest."""
    wanted = {knob: level for knob, level in point.items() if isinstance(level, int | float)}
    return {knob: nearest(table, wanted[knob]) for knob, table in tables.items() if table and knob in wanted}


def _within(levels: Mapping[str, int], knobs: Mapping[str, Capability]) -> OperatingPoint | None:
    """Return the levels that have a knob, or None if one of them is not a level of it."""
    wanted = {name: levels[name] for name in _KNOBS if name in knobs and name in levels}
    if not wanted or any(level not in knobs[name].levels for name, level in wanted.items()):
        return None
    return OperatingPoint(dict(wanted))
