"""The administrator's limits: what polythrottle never leaves, whoever asks.

``/etc/polythrottle/limits.toml`` (``$POLYTHROTTLE_LIMITS`` names another file) has a table per kind of device,
``jetson``, ``nvml`` or ``cpu``, or per device by its identity, and in it a knob with its bounds in the unit its name
ends in::

    [nvml]
    power_limit_w = { min = 250 }
    gpu_max_mhz = { min = 600, max = 1600 }
"""

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar

from polythrottle.backports import tomllib
from polythrottle.errors import BadFile
from polythrottle.units import to_file, to_si

_FILE = "/etc/polythrottle/limits.toml"
_BEYOND = 1e15
KINDS = ("jetson", "nvml", "cpu")
KNOBS = (
    *("gpu_min_hz", "gpu_max_hz", "mem_hz", "cpu_min_hz", "cpu_max_hz"),
    *("cpu_cores", "power_limit_w", "power_mode", "power_profile"),
)
"""The knobs of real devices that have numbers to bound."""
Bounds = tuple[float, float]
Level = TypeVar("Level", int, float, str, int | float | str)


@dataclass(frozen=True)
class Limits:
    """Bounds of knobs, by kind or identity of device.

    Args:
        bounds: For each kind or identity, lowest and highest level of a knob, in SI.
    """

    bounds: Mapping[str, Mapping[str, Bounds]] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path | None = None) -> "Limits":
        """Return the administrator's limits; none if there is no such file.

        Raises:
            BadFile: If there is one that cannot be read or understood: then nothing may be steered.
        """
        file = path if path is not None else Path(os.environ.get("POLYTHROTTLE_LIMITS") or _FILE)
        try:
            if file.exists() and not file.is_file():
                raise BadFile(f"cannot read the administrator's limits: {file} is no plain file")
            tables = tomllib.loads(file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return cls()
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
    if not sound or not all(_is_number(each) for each in value.values()):
        raise BadFile(f"{file}: {where} must have the form {{ min = 300, max = 1200 }}, either may be left out")
    name = to_si(key, 0)[0]
    if name not in KNOBS:
        raise BadFile(f"{file}: {where} is no knob; known: {', '.join(to_file(knob, 0)[0] for knob in KNOBS)}")
    low, high = (
        to_si(key, value[side])[1] if side in value else bound
        for side, bound in zip(sides, (-math.inf, math.inf), strict=True)
    )
    if low > high:
        raise BadFile(f"{file}: {where} has its minimum above its maximum")
    return name, (low, high)


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < _BEYOND  # neither "inf" nor "nan" is below it
