"""A search space as JSON, as journals keep it and as it travels from the actuator."""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Mapping
from typing import Any

from polythrottle.domain.space import Knob, OperatingPoint, SearchSpace, check_size

_INDEX_BYTES = 4


def space_document(space: SearchSpace) -> dict[str, Any]:
    """Return a search space as JSON: its rows are base64 of zlib of little-endian 32-bit indices."""
    knobs = [{"name": knob.name, "levels": list(knob.levels), "label": knob.label} for knob in space.knobs]
    rows = base64.b64encode(zlib.compress(space.packed, 9)).decode()
    return {"size": len(space), "default": dict(space.default), "knobs": knobs, "rows": rows}


def space_from_document(document: Mapping[str, Any]) -> SearchSpace:
    """Return the search space of a JSON document.

    Raises:
        KeyError: If it lacks something.
        TypeError: If something is of another type.
        ValueError: If its rows are not what they should be.
        zlib.error: If they are damaged.
        PolythrottleError: If they make no space.
    """
    knobs = tuple(Knob(knob["name"], tuple(knob["levels"]), knob["label"]) for knob in document["knobs"])
    size = document["size"]
    if type(size) is not int:
        raise TypeError(f"{size!r} is not of type int")
    # Before anything is unpacked to that size.
    check_size([size])
    packed = _unpacked(document["rows"], size * len(knobs) * _INDEX_BYTES)
    if knobs:
        rows = struct.iter_unpack(f"<{len(knobs)}i", packed)
    else:
        rows = iter([()] * size)
    return SearchSpace(knobs, tuple(rows), OperatingPoint(document["default"]))


def _unpacked(text: str, size: int) -> bytes:
    """Return compressed bytes, of which there must be so many: a few kilobytes could hold gigabytes."""
    data = zlib.decompressobj().decompress(base64.b64decode(text), size + 1)
    if len(data) > size:
        raise ValueError("its space holds more than it says")
    if len(data) < size:
        raise ValueError("its space holds less than it says")
    return data
