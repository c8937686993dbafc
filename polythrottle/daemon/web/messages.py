"""Bodies of requests and of responses: what may be sent, its reading, and the status that each error becomes.

Values become JSON here, types of values its schemas, and a document is checked against its schema.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import typing
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from polythrottle.daemon.budgets import LEAST_S, LEAST_W, LEAST_WH, MOST_S, MOST_W, MOST_WH
from polythrottle.domain.backports import removeprefix, removesuffix
from polythrottle.domain.errors import (
    BadFile,
    ClaimFailed,
    DeviceError,
    InvalidInput,
    PermissionDenied,
    PolythrottleError,
    SloUnmet,
    StorageError,
    TrialError,
    UnknownName,
)
from polythrottle.domain.units import is_finite
from polythrottle.storage.json_channel import depth, finite, no_number
from polythrottle.storage.untrusted import printable

# From values to JSON and to what JSON looks like: one way for every answer.

Schema = typing.Dict[str, Any]
_OR_NONE = " | None"
_GENERIC = {"tuple": typing.Tuple, "Mapping": typing.Mapping, "Optional": typing.Optional}


def plain(value: Any) -> Any:
    """Return a value as dictionaries, lists, numbers and texts; what is not finite is not known, so None."""
    # Before dataclasses, for an operating point is one too, and its levels are meant.
    if isinstance(value, Mapping):
        return {str(name): plain(each) for name, each in value.items()}
    if dataclasses.is_dataclass(value):
        return {each.name: plain(getattr(value, each.name)) for each in dataclasses.fields(value)}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(each) for each in value]
    if isinstance(value, Enum):
        return plain(value.value)
    if isinstance(value, float):
        return finite(value)
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
        return _schema_of_fields(kind)
    if origin is typing.Union:
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


def _schema_of_fields(kind: Any) -> Schema:
    hints = _hints(kind)
    names = [each.name for each in dataclasses.fields(kind)]
    return {
        "type": "object",
        "description": (kind.__doc__ or "").partition("\n")[0],
        "properties": {name: _finite_or_null(hints[name]) for name in names},
        "required": names,
    }


def _hints(kind: Any) -> Mapping[str, Any]:
    """Return the types of a dataclass's fields; Python 3.8 knows neither ``tuple[…]`` nor ``… | None``."""
    texts = {each.name: str(each.type) for each in dataclasses.fields(kind)}
    known = {
        name: f"Optional[{removesuffix(text, _OR_NONE)}]" if text.endswith(_OR_NONE) else text
        for name, text in texts.items()
    }
    stand_in = type(kind.__name__, (), {"__annotations__": known, "__module__": kind.__module__})
    return typing.get_type_hints(stand_in, localns=_GENERIC)


def _finite_or_null(kind: Any) -> Schema:
    """A float that is not finite is written as null, so that each field of floats may be."""
    if kind is float:
        return schema_of(typing.Optional[kind])
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
        SchemaViolation: If it is something else.
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
    if not is_finite(value):
        raise SchemaViolation(f"{where} must be finite")
    if value < schema.get("minimum", -math.inf) or value > schema.get("maximum", math.inf):
        raise SchemaViolation(f"{where} must be {_range(schema)}")
    if value <= schema.get("exclusiveMinimum", -math.inf):
        raise SchemaViolation(f"{where} must be {_range(schema)}")


def _range(schema: Schema) -> str:
    words = {"minimum": "at least", "exclusiveMinimum": "above", "maximum": "at most"}
    return " and ".join(f"{word} {schema[name]:g}" for name, word in words.items() if name in schema)


def _is_number(value: Any) -> bool:
    # To Python, true is an int.
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _whole(value: Any) -> bool:
    # What is not finite passes, for `_check_number` says what is wrong with it, and int() would raise.
    return _is_number(value) and (not is_finite(value) or value == int(value))


_KINDS: Mapping[str, Callable[[Any], bool]] = {
    "null": lambda value: value is None,
    "boolean": lambda value: isinstance(value, bool),
    "integer": _whole,
    "number": _is_number,
    "string": lambda value: isinstance(value, str),
    "object": lambda value: isinstance(value, Mapping),
    "array": lambda value: isinstance(value, list),
}


# What a request is answered when it cannot be done: a status and one line, by the class of the error.

HEADERS = {
    "cache-control": "no-store",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}
"""Of every answer."""

_STATUS: tuple[tuple[type[PolythrottleError], int], ...] = (
    (InvalidInput, 400),
    (UnknownName, 404),
    (BadFile, 409),
    (SloUnmet, 409),
    (PermissionDenied, 403),
    (DeviceError, 503),
    (TrialError, 409),
    (StorageError, 507),
    (ClaimFailed, 409),
)
_MOST_WORDS = 2000

REFUSAL: Schema = {
    "type": "object",
    "description": "Why not: a class of the project's errors, and one line for people.",
    "properties": {
        "error": {
            "type": "object",
            "properties": {"kind": {"type": "string"}, "words": {"type": "string"}},
            "required": ["kind", "words"],
        }
    },
    "required": ["error"],
}


class Refusal(Exception):
    """A request that is not carried out.

    Args:
        status: Of HTTP.
        kind: The class a client raises.
        words: For people.
        headers: That the status asks for.
    """

    def __init__(self, status: int, kind: type[PolythrottleError], words: str, **headers: str) -> None:
        super().__init__(words)
        self.status = status
        self.kind = kind
        self.headers = headers

    def reply(self) -> Response:
        """Return what is answered."""
        return refused(self.status, self.kind.__name__, str(self), self.headers)


def json_reply(value: Any, status: int = 200) -> Response:
    """Return an answer in JSON."""
    return Response(value if isinstance(value, bytes) else to_json(value), status, HEADERS, "application/json")


def error_reply(error: PolythrottleError) -> Response:
    """Return what an error is answered."""
    status = next((code for kind, code in _STATUS if isinstance(error, kind)), 409)
    headers = {}
    if status == 503:
        headers["retry-after"] = "1"
    return refused(status, type(error).__name__, str(error), headers)


def refused(status: int, kind: str, words: str, headers: dict[str, str] | None = None) -> Response:
    """Return an answer that says why not."""
    body = to_json({"error": {"kind": kind, "words": printable(words[:_MOST_WORDS])}})
    named = {name.replace("_", "-"): value for name, value in (headers or {}).items()}
    return Response(body, status, {**HEADERS, **named}, "application/json")


# What may be sent: a schema for each body and each query, and the reading of them.

BODY_BYTES_MOST = 64 * 1024
_DEEPEST = 32

_DAY_S = 86_400
_WORDS = r"^[^\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]*$"
"""Neither controls, separators of lines, nor what turns the direction of writing."""


def _object(properties: Mapping[str, Schema], *required: str) -> Schema:
    named = {}
    if required:
        named["required"] = list(required)
    return {"type": "object", "properties": dict(properties), **named, "additionalProperties": False}


def _number(most: float, words: str, least: float | None = None, **further: Any) -> Schema:
    bound: Schema = {"exclusiveMinimum": 0}
    if least is not None:
        bound = {"minimum": least}
    return {"type": ["number", "null"], **bound, "maximum": most, "description": words, **further}


def _count(most: int, words: str, least: int = 0, kinds: str | list[str] = "integer") -> Schema:
    return {"type": kinds, "minimum": least, "maximum": most, "description": words}


def _text(pattern: str, words: str = "") -> Schema:
    return {"type": "string", "pattern": pattern, "maxLength": 64, **({"description": words} if words else {})}


_FIGURE = r"^[0-9]+(\.[0-9]+)?$"

TUNE_OPTIONS: dict[str, Schema] = {
    "risk": _text(_FIGURE),
    "error_budget": _text(r"^[0-9]+(\.[0-9]+)?(%|min|m|h|d)?$"),
    "seed": _text(r"^[0-9]{1,9}$"),
    "method": _text(r"^[a-z][a-z0-9-]*$"),
    "objective": _text(r"^[a-z]+$"),
    "minutes": _text(_FIGURE),
    "joules": _text(_FIGURE),
    "horizon": _text(r"^[0-9]+(\.[0-9]+)?(s|m|h|d)$"),
    "precision": _text(r"^[0-9]+(\.[0-9]+)?%$"),
    "seconds": _text(_FIGURE),
    "queries": _text(r"^[1-9][0-9]{0,8}$"),
}
"""Words of ``polythrottle tune`` a client may add. No file, device or workload among them: a workload can be any
command, and would run as the daemon's user."""

APPLY = _object(
    {
        "profile": {
            "type": "string",
            "minLength": 1,
            "maxLength": 240,
            "pattern": _WORDS,
            "description": "A file the daemon can read, or <device>/<workload>.",
        },
        "within_s": _number(_DAY_S, "The profile before comes back then unless confirmed; null keeps it.", default=60),
    },
    "profile",
)
RELEASE = _object({"reason": {"type": "string", "maxLength": 200, "pattern": _WORDS, "description": "For people."}})
NOTHING = _object({})
_NULL: Schema = {"type": "null"}


def _supply(*names: str) -> Schema:
    """Return the schema of a budget with these fields and not the others'; without any it has no carbon either."""
    others = {"battery_wh", "last_s", "wh_per_day", *(() if names else ("carbon",))} - set(names)
    given: Schema = {name: {"type": "number"} for name in names}
    return {"required": list(names), "properties": {**given, **dict.fromkeys(sorted(others), _NULL)}}


BUDGET = {
    **_object(
        {
            "power_w": _number(MOST_W, "Most mean power.", LEAST_W),
            "battery_wh": _number(MOST_WH, "What there is.", LEAST_WH),
            "last_s": _number(MOST_S, "How long it must last.", LEAST_S),
            "wh_per_day": _number(MOST_WH, "Most energy a day.", LEAST_WH),
            "carbon": {
                "type": ["string", "null"],
                "minLength": 1,
                "maxLength": 240,
                "pattern": _WORDS,
                "description": "A CSV file of carbon intensity along time that the daemon can read.",
            },
        }
    ),
    "description": "power_w, battery_wh with last_s or wh_per_day, or power_w beside one of these two, which carbon "
    "shares out.",
    "anyOf": [_supply(), _supply("battery_wh", "last_s"), _supply("wh_per_day")],
}
NODE_POWER = {
    **_object(
        {
            "power_w": _number(MOST_W, "Most power of the whole server over a second; null lifts the limit.", LEAST_W),
            "within_s": _number(3600.0, "By when it must hold, which is told of as a fault if it does not.", 1.0),
        },
        "power_w",  # a body that was forgotten must not lift the limit of a server
    ),
    "description": "What all services together may draw, the rest of the server included.",
}
STUDY = _object(
    {
        "trials": {**_count(10_000, "At most.", 1), "default": 30},
        "options": {**_object(TUNE_OPTIONS), "description": "Further words of polythrottle tune."},
    }
)
HOST = _object(
    {
        "host": {"type": "string", "maxLength": 64, "description": "Who asks, for people."},
        "claim": {"type": "string", "maxLength": 64, "description": "As the first answer named it; empty to claim."},
        "trials": _count(10_000, "Made so far."),
        "best_j": _number(1e12, "Energy of the best point so far, joules."),
        "late": _number(
            1e12, "Requests late so far beyond the SLO's own share, where a study was lent with a bound.", 0
        ),
        "sent": _count(10**12, "Requests sent so far, where the study was lent to be counted."),
        "bound": {**TUNE_OPTIONS["error_budget"], "description": "How many may be late, as the study was begun with."},
        "leaves": {"type": "boolean", "description": "Whether it gives the claim up; another host may go on."},
        "ended": {"type": "boolean", "description": "Whether the study has ended."},
        "failed": {"type": "boolean", "description": "Whether it went wrong: it is not made again."},
        "words": {"type": "string", "maxLength": 300, "description": "Why, for people."},
        "profile": {"type": "string", "maxLength": 60_000, "description": "What was found: the text of its file."},
    },
    "host",
)
_PERHAPS = ["integer", "null"]
_MOST_REQUESTS = 10**7
"""Of one report: no board answers as many within the seconds from one to the next."""
_MEAN_MOST = 100.0
"""Times the p99 that a mean may be: the slowest hundredth would have to take ten thousand times the p99 otherwise."""
REPORT = _object(
    {
        "arrived": _count(_MOST_REQUESTS, "Requests that came since the report before."),
        "answered": _count(_MOST_REQUESTS, "Requests that ended since, also those that failed.", kinds=_PERHAPS),
        "failed": _count(_MOST_REQUESTS, "Of those that ended since, how many failed.", kinds=_PERHAPS),
        "waiting": _count(_MOST_REQUESTS, "Requests that wait now.", kinds=_PERHAPS),
        "p99_s": _number(1e6, "Of the requests answered lately.", 0),
        "mean_s": _number(1e6, "Likewise.", 0),
        "model": {"type": "string", "maxLength": 200, "pattern": _WORDS, "description": "The model's contents' name."},
        "worst_s": _number(1e6, "The longest of those answered since.", 0),
    }
)


def check_report(sent: Mapping[str, Any]) -> None:
    """Refuse a report whose figures contradict each other.

    Raises:
        Refusal: If more failed than ended, or how many ended is not said beside how many failed, or the mean is so far
            above the p99 that no hundredth of the requests could make it up.
    """
    answered = sent.get("answered")
    failed = sent.get("failed")
    if failed and answered is None:
        raise _contradiction(f"failed is {failed}, of how many says answered, which is missing")
    if failed is not None and answered is not None and failed > answered:
        raise _contradiction(f"of {answered} requests that ended (answered) {failed} cannot have failed")
    mean_s = sent.get("mean_s")
    p99_s = sent.get("p99_s")
    if mean_s is not None and p99_s is not None and mean_s > _MEAN_MOST * p99_s:
        raise _contradiction(f"a mean of {mean_s:g} s cannot go with a p99 of {p99_s:g} s; are both in seconds?")


def _contradiction(words: str) -> Refusal:
    # No 422, for that is what a body that does not hold its schema is answered, and no schema compares two fields.
    return Refusal(409, InvalidInput, f"the report contradicts itself: {words}")


EVENTS_QUERY = {
    "after": _count(2**53, "Number of the last event that is known; without it, the last ones are meant."),
    "limit": {**_count(1000, "At most so many.", 1), "default": 1000},
}
LAST_EVENT: Schema = {"type": "string", "pattern": "^[0-9]{1,15}$"}
HISTORY_QUERY = {"minutes": {**_count(60 * 24 * 30, "How many.", 1), "default": 60}}


async def read_body(request: Request, schema: Schema) -> dict[str, Any]:
    """Return the document of a request.

    Raises:
        Refusal: If it is not called JSON, too large, no JSON, or not what the schema says.
    """
    _check_type(request)
    data = await _read(request)
    try:
        document = json.loads(data or b"{}", parse_constant=no_number)
        if depth(document) > _DEEPEST:
            raise ValueError("nested too deep")
    except (ValueError, RecursionError):
        raise Refusal(400, InvalidInput, "the body is no JSON document") from None
    _checked(document, schema, "the body")
    return {name: _read_as(schema["properties"][name], value) for name, value in document.items()}


def read_query(request: Request, schemas: Mapping[str, Schema]) -> dict[str, Any]:
    """Return the whole numbers of a query; those that are not there have their default, or are None.

    Raises:
        Refusal: If one is none, is repeated, or is not known.
    """
    found: dict[str, Any] = {}
    for name, text in request.query_params.multi_items():
        if name in found:
            raise Refusal(422, InvalidInput, f"{name[:40]} is given twice")
        digits = removeprefix(text, "-")
        if digits.isascii() and digits.isdecimal() and len(digits) < 20:
            found[name] = int(text)
        else:
            # Left a text, which the schema refuses in the words it has for it.
            found[name] = text
    _checked(found, _object(schemas), "the query")
    return {name: found.get(name, schema.get("default")) for name, schema in schemas.items()}


def _check_type(request: Request) -> None:
    """Demand JSON by its name, which a foreign page cannot send without being allowed to first (CSRF)."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json" or request.headers.get("content-encoding", "identity").lower() != "identity":
        words = "what changes something is sent as Content-Type: application/json, not compressed"
        raise Refusal(415, InvalidInput, words, connection="close")


def _read_as(schema: Schema, value: Any) -> Any:
    """Return a whole number as one, however it is written: to JSON 3.0 is one too."""
    whole = "integer" in schema.get("type", ()) and isinstance(value, float)
    if whole:
        return int(value)
    return value


def last_event(request: Request) -> int | None:
    """Return the number of the last event a client that comes back knows; None if it is new.

    Raises:
        Refusal: If it is no number.
    """
    text = request.headers.get("last-event-id")
    if text is None:
        return None
    _checked({"Last-Event-ID": text}, _object({"Last-Event-ID": LAST_EVENT}), "the head")
    return int(text)


async def _read(request: Request) -> bytes:
    declared = request.headers.get("content-length", "0")
    if declared.isdecimal() and int(declared[:20]) > BODY_BYTES_MOST:
        raise _large()
    data = bytearray()
    try:
        # What comes in chunks has declared nothing.
        async for part in request.stream():
            data += part
            if len(data) > BODY_BYTES_MOST:
                raise _large()
    except ClientDisconnect:
        raise Refusal(400, InvalidInput, "the body ends too early") from None
    return bytes(data)


def _large() -> Refusal:
    return Refusal(413, InvalidInput, f"the body is larger than {BODY_BYTES_MOST // 1024} KiB", connection="close")


def _checked(document: Any, schema: Schema, where: str) -> None:
    try:
        check(document, {"type": "object", **schema}, where)
    except SchemaViolation as malformed:
        raise Refusal(422, InvalidInput, str(malformed)) from None
