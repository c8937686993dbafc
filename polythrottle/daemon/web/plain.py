"""From values to JSON and to what JSON looks like: one way for every answer."""

import dataclasses
import json
import math
import types
import typing
from collections.abc import Mapping
from enum import Enum
from typing import Any

Schema = dict[str, Any]


def plain(value: Any) -> Any:
    """Return a value as dictionaries, lists, numbers and texts; what is not finite is not known, so None."""
    if isinstance(value, Mapping):
        return {str(name): plain(each) for name, each in value.items()}
    if dataclasses.is_dataclass(value):
        return {each.name: plain(getattr(value, each.name)) for each in dataclasses.fields(value)}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(each) for each in value]
    if isinstance(value, Enum):
        return plain(value.value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, (bool, int, str)) else str(value)


def to_json(value: Any) -> bytes:
    """Return a value as JSON in ASCII, so that not even half a surrogate pair can spoil it."""
    return json.dumps(plain(value), separators=(",", ":"), allow_nan=False).encode()


def schema_of(kind: Any) -> Schema:
    """Return the JSON schema of what `plain` makes of a type; an object's fields may become more, never fewer."""
    inner = [each for each in typing.get_args(kind) if each is not type(None)]
    origin = typing.get_origin(kind)
    if dataclasses.is_dataclass(kind):
        return _object(kind)
    if origin in (typing.Union, types.UnionType):
        several = [schema_of(each) for each in inner]
        nothing = [{"type": "null"}] if type(None) in typing.get_args(kind) else []
        return {"anyOf": [*several, *nothing]}
    if origin is tuple:
        return {"type": "array", "items": schema_of(inner[0])}
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return {"type": "object", "additionalProperties": schema_of(inner[1])}
    names = {bool: "boolean", int: "integer", float: "number", str: "string"}
    return {"type": names[kind]} if kind in names else {}


def _object(kind: Any) -> Schema:
    hints = typing.get_type_hints(kind)
    names = [each.name for each in dataclasses.fields(kind)]
    return {
        "type": "object",
        "description": (kind.__doc__ or "").partition("\n")[0],
        "properties": {name: _finite_or_null(hints[name]) for name in names},
        "required": names,
    }


def _finite_or_null(kind: Any) -> Schema:
    """A float that is not finite is written as null, so that each field of floats may be."""
    return schema_of(kind | None) if kind is float else schema_of(kind)
