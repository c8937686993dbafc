"""Describes a board that was met as an entry of devices/, so that it can be simulated.

Knobs, levels and presets are the board's own. What nobody can read off a board, the coefficients of the simulator, are
those of the nearest board in devices/, scaled by the top clocks, and every one is marked as assumed.
"""

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import tomli_w

from polythrottle.backends import open_device
from polythrottle.catalog import Board, load_board, names
from polythrottle.domain.errors import PolythrottleError
from polythrottle.domain.ports import Device
from polythrottle.domain.space import Level, SearchSpace
from polythrottle.domain.units import to_file

_KINDS = {"jetson": "jetson", "nvml": "card"}
_KNOBS = ("gpu_min_hz", "gpu_max_hz", "mem_hz", "cpu_max_hz", "power_limit_w")
_NEEDED = ("gpu_max_hz", "mem_hz")
_READ = "read from the board, within the limits it was found with"
_NO_KIND = "only Jetson boards and NVIDIA GPUs can be simulated; it opens as a tree"


@dataclass(frozen=True)
class ObservedKnob:
    """A knob as it was met.

    Args:
        levels: In SI.
        default: As found.
        search: Whether it is searched by default.
        every: How far the levels that are searched by default lie apart, counted from the highest.
        source: Where the levels come from.
    """

    levels: tuple[float, ...]
    default: float
    search: bool
    every: int = 1
    source: str = _READ


def simulated_board(device: Device, title: str) -> tuple[bytes, str]:
    """Return a board as a file of devices/, and in a sentence how it came about; empty and why, if there is none.

    Args:
        device: Not entered; nothing is written to it.
        title: What to call it.
    """
    kind = _KINDS.get(device.uri.partition(":")[0].partition("?")[0])
    if kind is None:
        return b"", _NO_KIND
    met = _met(device)
    # Its own entry where there is one: coefficients that were fitted to this board beat those of a neighbour.
    near = _own(device) or _nearest(kind, title, met)
    if near is None:
        return b"", "no board of its kind is in devices/"
    whole = {**{name: _borrowed(near, name) for name in _NEEDED if name not in met}, **met}
    entry = tomli_w.dumps(_entry(device, title, near, whole)).encode()
    if problem := _problem(entry):
        return b"", f"what was read does not make a board that can be simulated: {problem}"
    return entry, f"coefficients of {near.name}, scaled by the top clocks: assumed"


def _problem(entry: bytes) -> str:
    """Return why a file of devices/ cannot be simulated; empty if it can."""
    # Tried, not checked: what a board has to have is for the reader of devices/ to say.
    with TemporaryDirectory(prefix="polythrottle-") as folder:
        file = Path(folder) / "board.toml"
        file.write_bytes(entry)
        try:
            open_device(f"sim:{file}")
        except PolythrottleError as err:
            return " ".join(str(err).replace(f"{file}: ", "").split())
    return ""


def _met(device: Device) -> dict[str, ObservedKnob]:
    """Return the knobs that the simulator knows, each with all levels the board offers."""
    found = {}
    for name in _KNOBS:
        space = _space(device, (name,))
        if space:
            knob = next((knob for knob in space.knobs if knob.name == name), None)
        else:
            knob = None
        if knob:
            numbers = [level for level in knob.levels if not isinstance(level, str)]
        else:
            numbers = []
        default = space.default.get(name) if space else None
        if numbers and not isinstance(default, str) and default is not None:
            searched = name in device.space.names
            every = 1
            if searched:
                every = _every(numbers, default, device.space.knob(name).levels)
            found[name] = ObservedKnob(tuple(numbers), default, searched, every)
    return found


def _every(levels: Sequence[float], default: float, searched: Sequence[Level]) -> int:
    """Return how far the searched levels lie apart among all; 1 if they follow no such rule."""
    fits = (step for step in range(1, len(levels)) if {*levels[::-step], default} == set(searched))
    return next(fits, 1)


def _space(device: Device, knobs: Sequence[str]) -> SearchSpace | None:
    try:
        return open_device(device.uri, knobs).space
    except PolythrottleError:
        return None  # the knob is off on this board


def _borrowed(near: Board, name: str) -> ObservedKnob:
    knob = near.knob(name)
    return ObservedKnob(
        (knob.default,), knob.default, False, source=f"assumed to be the default of {near.name}: not offered here"
    )


def _own(device: Device) -> Board | None:
    """Return the entry of a board that says which of the catalogue's it is."""
    from polythrottle.backends.jetson import JetsonDevice

    own = None
    if isinstance(device, JetsonDevice):
        own = device.entry
    if own is not None and own.simulation:
        return own
    return None


def _nearest(kind: str, title: str, met: Mapping[str, ObservedKnob]) -> Board | None:
    boards = [board for board in map(load_board, names("devices")) if board.kind == kind and board.simulation]
    # Siblings share their tables (jetson-tx2, jetson-tx2-4gb): of those as near, the one that others are named after.
    return min(boards, key=lambda board: (_distance(board, title, met), len(board.name)), default=None)


def _distance(board: Board, title: str, met: Mapping[str, ObservedKnob]) -> float:
    """Return how unlike two boards are: by words of their names and levels not shared, and by their top levels."""
    theirs = {knob.name: knob.levels for knob in board.knobs}
    shared = [name for name in met if name in theirs]
    apart = [_unlike(set(met[name].levels), set(theirs[name])) for name in shared]
    apart += [abs(math.log(met[name].levels[-1] / theirs[name][-1])) for name in shared]
    return _unlike(_words(title), _words(board.title)) + sum(apart) / max(1, len(shared))


def _unlike(some: Set[object], others: Set[object]) -> float:
    """Return the share of what two sets do not have in common."""
    return 1.0 - len(some & others) / max(1, len(some | others))


def _words(title: str) -> set[str]:
    return set(re.sub(r"[^a-z0-9]+", " ", title.lower()).split()) - {"nvidia", "developer", "kit", "jetson"}


def _entry(device: Device, title: str, near: Board, knobs: Mapping[str, ObservedKnob]) -> Mapping[str, Any]:
    limit = knobs.get("power_limit_w")
    watts = f"assumed to be that of {near.name}"
    power_max_w = near.power_max_w
    if limit:
        watts = "read from the board"
        power_max_w = limit.levels[-1]
    return {
        "title": title,
        "kind": near.kind,
        "memory_bytes": near.memory_bytes,
        "power_max_w": power_max_w,
        "source": {"memory_bytes": f"assumed to be that of {near.name}", "power_max_w": watts},
        "knobs": dict(_knob(name, met) for name, met in knobs.items()),
        **_rules(device, knobs),
        "rails": dataclasses.asdict(near.rails),
        **_presets(device, knobs),
        "simulation": _coefficients(near, _scales(near, knobs)),
    }


def _knob(name: str, met: ObservedKnob) -> tuple[str, dict[str, Any]]:
    key = to_file(name, met.default)[0]
    levels = [to_file(name, level)[1] for level in met.levels]
    values = {"levels": levels, "default": to_file(name, met.default)[1], "search": met.search}
    if met.every > 1:
        values["search_every"] = met.every
    return key, {**values, "source": met.source}


def _rules(device: Device, knobs: Mapping[str, ObservedKnob]) -> dict[str, Any]:
    rules: dict[str, Any] = {}
    if {"gpu_min_hz", "gpu_max_hz"} <= set(knobs):
        rules["ordered"] = [{"low": "gpu_min_mhz", "high": "gpu_max_mhz"}]
    pairs = None
    if len(knobs["mem_hz"].levels) > 1:
        pairs = _space(device, _NEEDED)
    if dependent := _dependent(pairs, knobs["gpu_max_hz"].levels[-1]) if pairs else []:
        rules["dependent"] = dependent
    return rules


def _dependent(pairs: SearchSpace, top_hz: float) -> list[dict[str, Any]]:
    """Return the memory clocks at which the GPU goes less high than it can."""
    highest: dict[float, float] = {}
    for point in pairs:
        memory_hz = float(point["mem_hz"])
        gpu_hz = float(point["gpu_max_hz"])
        highest[memory_hz] = max(gpu_hz, highest.get(memory_hz, 0.0))
    return [
        {
            **{"knob": "mem_mhz", "level": to_file("mem_hz", memory_hz)[1], "limited": "gpu_max_mhz"},
            **{"most": to_file("gpu_max_hz", most_hz)[1], "source": _READ},
        }
        for memory_hz, most_hz in sorted(highest.items())
        if most_hz < top_hz
    ]


def _presets(device: Device, knobs: Mapping[str, ObservedKnob]) -> dict[str, Any]:
    found = {}
    for name, point in device.presets.items():
        levels = {knob: level for knob, level in point.items() if _has(knobs, knob, level)}
        low = knobs["gpu_min_hz"].default if "gpu_min_hz" in knobs else 0
        if levels and low <= float(levels.get("gpu_max_hz", math.inf)):
            found[name] = {**dict(to_file(knob, float(level)) for knob, level in levels.items()), "source": _READ}
    if found:
        return {"presets": found}
    return {}


def _has(knobs: Mapping[str, ObservedKnob], name: str, level: Level) -> bool:
    return name in knobs and level in knobs[name].levels


@dataclass(frozen=True)
class _Scales:
    gpu: float
    memory: float
    cpu: float


def _scales(near: Board, knobs: Mapping[str, ObservedKnob]) -> _Scales:
    """Return the top clocks over those of the nearest board."""
    tops = {knob.name: float(knob.levels[-1]) for knob in near.knobs}

    def scale(name: str) -> float:
        if name in knobs and name in tops:
            return knobs[name].levels[-1] / tops[name]
        return 1.0

    return _Scales(scale("gpu_max_hz"), scale("mem_hz"), scale("cpu_max_hz"))


def _coefficients(near: Board, scales: _Scales) -> dict[str, Any]:
    assert near.simulation is not None
    tables = dataclasses.asdict(near.simulation)
    scaled = {
        ("gpu", "power_w"): scales.gpu,
        ("memory", "bandwidth_bytes_per_s"): scales.memory,
        ("memory", "power_w"): scales.memory,
        ("cpu", "clock_hz"): scales.cpu,
        ("cpu", "core_w"): scales.cpu,
    }
    for (table, key), scale in scaled.items():
        value = tables[table][key] * scale
        if key == "clock_hz":
            tables[table][key] = round(value)
        else:
            tables[table][key] = float(f"{value:.6g}")
    return _sourced(tables, f"assumed: that of {near.name}, powers, bandwidth and CPU clock scaled by the top clocks")


def _sourced(tables: Mapping[str, Any], source: str) -> dict[str, Any]:
    found: dict[str, Any] = {
        key: _sourced(value, source) if isinstance(value, dict) else value for key, value in tables.items()
    }
    figures = any(isinstance(value, int | float) for value in tables.values())
    if figures:
        return {**found, "source": source}
    return found
