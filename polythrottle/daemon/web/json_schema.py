"""Values as JSON, the schemas of values, and the checking of a document against its schema."""

import dataclasses
import json
import math
import re
import types
import typing
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any

# From values to JSON and to what JSON looks like: one way for every answer.

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
        if math.isfinite(value):
            return value
        return None
    if value is None or isinstance(value, (bool, int, str)):
        return value
    return str(value)


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
        if type(None) in typing.get_args(kind):
            nothing = [{"type": "null"}]
        else:
            nothing = []
        return {"anyOf": [*several, *nothing]}
    if origin is tuple:
        return {"type": "array", "items": schema_of(inner[0])}
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return {"type": "object", "additionalProperties": schema_of(inner[1])}
    names = {bool: "boolean", int: "integer", float: "number", str: "string"}
    if kind in names:
        return {"type": names[kind]}
    return {}


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
    if kind is float:
        return schema_of(kind | None)
    return schema_of(kind)


# Check a document against its JSON schema: the part of the language the API's own schemas are written in.


class SchemaViolation(Exception):
    """A document is not what its schema says; the words name the field."""


def check(value: Any, schema: Schema, where: str = "the body") -> None:
    """Check a document.

    Args:
        value: As JSON was read.
        schema: Of ``type``, ``enum``, ``properties``, ``required``, ``additionalProperties`` false, ``minProperties``,
            ``anyOf``, bounds of numbers, lengths and patterns of texts.
        where: What to call it.

    Raises:
        Malformed: If it is something else.
    """
    kinds = schema.get("type", [])
    if isinstance(kinds, str):
        wanted = [kinds]
    else:
        wanted = kinds
    if wanted and not any(_KINDS[each](value) for each in wanted):
        raise SchemaViolation(f"{where} must be {' or '.join(wanted)}")
    if "enum" in schema and value not in schema["enum"]:
        raise SchemaViolation(f"{where} must be one of {', '.join(map(str, schema['enum']))}")
    if isinstance(value, str):
        _check_text(value, schema, where)
    elif isinstance(value, Mapping):
        _check_object(value, schema, where)
    elif value is not None and not isinstance(value, (bool, list)):
        _check_number(value, schema, where)
    if "anyOf" in schema:
        _any_of(value, schema, where)


def _any_of(value: Any, schema: Schema, where: str) -> None:
    for each in schema["anyOf"]:
        try:
            check(value, each, where)
            return
        except SchemaViolation:
            continue
    raise SchemaViolation(f"{where} fits none of what it may be: {schema.get('description', 'see /openapi.json')}")


def _check_object(value: Mapping[str, Any], schema: Schema, where: str) -> None:
    known = schema.get("properties", {})
    unknown = sorted(set(value) - set(known))
    if unknown and schema.get("additionalProperties") is False:
        shown = ", ".join(name[:40] for name in unknown[:5])
        raise SchemaViolation(f"{where} has no field {shown}; known: {', '.join(known) or 'none'}")
    if missing := [name for name in schema.get("required", ()) if name not in value]:
        raise SchemaViolation(f"{where} lacks {', '.join(missing)}")
    for name, each in value.items():
        if name in known:
            check(each, known[name], name)


def _check_text(value: str, schema: Schema, where: str) -> None:
    """Check a text; to JSON schema, unlike to Python, ``$`` does not match before a line's end."""
    if any("\ud800" <= each <= "\udfff" for each in value):
        raise SchemaViolation(f"{where} is no valid text: it holds half a surrogate pair")
    if not schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", math.inf):
        raise SchemaViolation(f"{where} must have {schema.get('minLength', 0)} to {schema.get('maxLength')} letters")
    if "pattern" in schema and not re.search(re.sub(r"\$$", r"\\Z", schema["pattern"]), value):
        raise SchemaViolation(f"{where} must look like {schema['pattern']}")


def _check_number(value: float, schema: Schema, where: str) -> None:
    if not math.isfinite(value):
        raise SchemaViolation(f"{where} must be finite")
    if value < schema.get("minimum", -math.inf) or value > schema.get("maximum", math.inf):
        raise SchemaViolation(f"{where} must be {_range(schema)}")
    if value <= schema.get("exclusiveMinimum", -math.inf):
        raise SchemaViolation(f"{where} must be {_range(schema)}")


def _range(schema: Schema) -> str:
    words = {"minimum": "at least", "exclusiveMinimum": "above", "maximum": "at most"}
    return " and ".join(f"{word} {schema[name]:g}" for name, word in words.items() if name in schema)


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _whole(value: Any) -> bool:
    return _number(value) and math.isfinite(value) and value == int(value)


_KINDS: Mapping[str, Callable[[Any], bool]] = {
    "null": lambda value: value is None,
    "boolean": lambda value: isinstance(value, bool),
    "integer": _whole,
    "number": _number,
    "string": lambda value: isinstance(value, str),
    "object": lambda value: isinstance(value, Mapping),
    "array": lambda value: isinstance(value, list),
}
