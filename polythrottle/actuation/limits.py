"""The administrator's limits: what polythrottle never leaves, whoever asks.

``/etc/polythrottle/limits.toml`` (``$POLYTHROTTLE_LIMITS`` names another file) has a table per kind of device,
``jetson``, ``nvml`` or ``cpu``, or per device by its identity, and in it a knob with its bounds in the unit its name
ends in::

    [nvml]
    power_limit_w = { min = 250 }
    gpu_max_mhz = { min = 600, max = 1600 }

They bind restoring too, for a record says what others may have written into it: an original outside them is put back
only where it is what the driver itself begins with, as after a reboot. Nothing is set that could not be put back so.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Tuple, TypeVar

from polythrottle.actuation.drivers.controls import Controls, factory
from polythrottle.domain.backports import paired, removeprefix
from polythrottle.domain.errors import BadFile, DeviceError, KnobRejected
from polythrottle.domain.units import to_file, to_si
from polythrottle.storage.untrusted import read_toml

_FILE = "/etc/polythrottle/limits.toml"
_BEYOND = 1e15
_MOST_BYTES = 1_000_000
_FILES = {
    "scaling_max_freq": ("cpu_max_hz", 1000.0),
    "scaling_min_freq": ("cpu_min_hz", 1000.0),
    "max_freq": ("gpu_max_hz", 1.0),
    "min_freq": ("gpu_min_hz", 1.0),
    "rate": ("mem_hz", 1.0),
}
_NVML = {
    "gpu_clocks": ("gpu_max_hz", 1e6),
    "mem_clocks": ("mem_hz", 1e6),
    "power_limit_mw": ("power_limit_w", 1e-3),
    "gpu_offset_mhz": ("gpu_offset_hz", 1e6),
    "mem_offset_mhz": ("mem_offset_hz", 1e6),
}
"""The knob behind a control, by the last part of its key, and what one of the control's units is of the knob's."""
KINDS = ("jetson", "nvml", "cpu")
KNOBS = (
    "gpu_min_hz",
    "gpu_max_hz",
    "mem_hz",
    "cpu_min_hz",
    "cpu_max_hz",
    "cpu_cores",
    "power_limit_w",
    "power_mode",
    "power_profile",
    "gpu_offset_hz",
    "mem_offset_hz",
)
"""The knobs of real devices that have numbers to bound."""
Bounds = Tuple[float, float]
Level = TypeVar("Level", int, float, str, "int | float | str")


@dataclass(frozen=True)
class Limits:
    """Bounds of knobs, by kind or identity of device.

    Args:
        bounds: For each kind or identity, lowest and highest level of a knob, in SI.
    """

    bounds: Mapping[str, Mapping[str, Bounds]] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path | None = None) -> Limits:
        """Return the administrator's limits; none if there is no such file.

        Raises:
            BadFile: If there is one that cannot be read or understood: then nothing may be steered.
        """
        file = path if path is not None else Path(os.environ.get("POLYTHROTTLE_LIMITS") or _FILE)
        try:
            if not file.exists() and not file.is_symlink():
                return cls()
            tables = read_toml(file, _MOST_BYTES)
        except BadFile as err:
            raise BadFile(f"the administrator's limits: {err}") from err
        except (OSError, ValueError, RecursionError) as err:
            raise BadFile(f"cannot read the administrator's limits: {file}: {err}") from err
        return cls({kind: _table(file, kind, table) for kind, table in tables.items()})

    def within(self, kind: str, name: str, levels: Sequence[Level], identity: str = "") -> tuple[Level, ...]:
        """Return the levels of a knob that keep the limits.

        Args:
            kind: ``jetson``, ``nvml`` or ``cpu``.
            name: The knob's, with its SI unit.
            levels: In SI.
            identity: Of this very device, whose own table counts besides.
        """
        low, high = self.span(kind, name, identity)
        return tuple(level for level in levels if isinstance(level, str) or low <= level <= high)

    def span(self, kind: str, name: str, identity: str = "") -> Bounds:
        """Return the lowest and the highest level a knob may take, in SI; infinite where nothing is said."""
        stated = [self.bounds.get(each, {}).get(name, (-math.inf, math.inf)) for each in (kind, identity)]
        return max(low for low, _ in stated), min(high for _, high in stated)

    def refusal(self, key: str, text: str, controls: Controls) -> str:
        """Return why a value on record may not be put back to a control; empty if it may.

        Args:
            key: Of the control.
            text: The value.
            controls: How to reach it, to learn what its driver itself begins with.
        """
        place, _, what = key.rpartition("/")
        name, unit = (_NVML if key.startswith("nvml:") else _FILES).get(what, ("", 1.0))
        last = text.rpartition(",")[2]
        if not name or not last[last[:1] == "-" :].isdecimal() or not self.bounds:
            return ""
        if key.startswith("nvml:"):
            kinds = ["nvml"]
        elif name.startswith("cpu_"):
            kinds = ["jetson", "cpu"]  # both write the same files of cpufreq
        else:
            kinds = ["jetson"]
        spans = [self.span(kind, name, removeprefix(place, "nvml:")) for kind in kinds]
        low = max(each[0] for each in spans)
        high = min(each[1] for each in spans)
        if low <= float(last) * unit <= high:
            return ""
        with suppress(OSError, DeviceError, KnobRejected):
            if factory(controls, key) == text:
                return ""
        return "outside the administrator's limits, and not what the driver begins with"


def _table(file: Path, kind: str, table: Any) -> dict[str, Bounds]:
    if not isinstance(table, dict):
        raise BadFile(f"{file}: {kind} must be a table, such as [nvml]")
    if get_close_matches(kind, KINDS, n=1, cutoff=0.7) and kind not in KINDS:
        raise BadFile(f"{file}: there is no kind of device {kind!r}; known: {', '.join(KINDS)}, or a device's identity")
    bounds = [_bounds(file, f"{kind}.{key}", key, value) for key, value in table.items()]
    if len(dict(bounds)) < len(bounds):
        raise BadFile(f"{file}: [{kind}] bounds a knob twice, in two units; leave one out")
    return dict(bounds)


def _bounds(file: Path, where: str, key: str, value: Any) -> tuple[str, Bounds]:
    sides = ("min", "max")
    sound = isinstance(value, dict) and value and set(value) <= set(sides)
    if not sound or not all(is_number(each) for each in value.values()):
        raise BadFile(f"{file}: {where} must have the form {{ min = 300, max = 1200 }}, either may be left out")
    name = to_si(key, 0)[0]
    if name not in KNOBS:
        raise BadFile(f"{file}: {where} is no knob; known: {', '.join(to_file(knob, 0)[0] for knob in KNOBS)}")
    low, high = (
        to_si(key, value[side])[1] if side in value else bound for side, bound in paired(sides, (-math.inf, math.inf))
    )
    if low > high:
        raise BadFile(f"{file}: {where} has its minimum above its maximum")
    return name, (low, high)


def is_number(value: Any) -> bool:
    """Return whether a value of a file is a number that something can be measured in."""
    return type(value) in (int, float) and abs(value) < _BEYOND  # neither "inf" nor "nan" is below it
