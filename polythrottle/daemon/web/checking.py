"""Check a document against its JSON schema: the part of the language the API's own schemas are written in."""

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from polythrottle.daemon.web.plain import Schema


class Malformed(Exception):
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
    wanted = [kinds] if isinstance(kinds, str) else kinds
    if wanted and not any(_KINDS[each](value) for each in wanted):
        raise Malformed(f"{where} must be {' or '.join(wanted)}")
    if "enum" in schema and value not in schema["enum"]:
        raise Malformed(f"{where} must be one of {', '.join(map(str, schema['enum']))}")
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
        except Malformed:
            continue
    raise Malformed(f"{where} fits none of what it may be: {schema.get('description', 'see /openapi.json')}")


def _check_object(value: Mapping[str, Any], schema: Schema, where: str) -> None:
    known = schema.get("properties", {})
    unknown = sorted(set(value) - set(known))
    if unknown and schema.get("additionalProperties") is False:
        shown = ", ".join(name[:40] for name in unknown[:5])
        raise Malformed(f"{where} has no field {shown}; known: {', '.join(known) or 'none'}")
    if missing := [name for name in schema.get("required", ()) if name not in value]:
        raise Malformed(f"{where} lacks {', '.join(missing)}")
    for name, each in value.items():
        if name in known:
            check(each, known[name], name)


def _check_text(value: str, schema: Schema, where: str) -> None:
    """Check a text; to JSON schema, unlike to Python, ``$`` does not match before a line's end."""
    if any("\ud800" <= each <= "\udfff" for each in value):
        raise Malformed(f"{where} is no valid text: it holds half a surrogate pair")
    if not schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", math.inf):
        raise Malformed(f"{where} must have {schema.get('minLength', 0)} to {schema.get('maxLength')} letters")
    if "pattern" in schema and not re.search(re.sub(r"\$$", r"\\Z", schema["pattern"]), value):
        raise Malformed(f"{where} must look like {schema['pattern']}")


def _check_number(value: float, schema: Schema, where: str) -> None:
    if not math.isfinite(value):
        raise Malformed(f"{where} must be finite")
    if value < schema.get("minimum", -math.inf) or value > schema.get("maximum", math.inf):
        raise Malformed(f"{where} must be {_range(schema)}")
    if value <= schema.get("exclusiveMinimum", -math.inf):
        raise Malformed(f"{where} must be {_range(schema)}")


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
