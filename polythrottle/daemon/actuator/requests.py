"""Requests: which fields each verb has, and that they are what they should be."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from polythrottle.actuation.wire import MOST_S, VERSION
from polythrottle.errors import InvalidInput, UnknownName

_LONGEST = 1000
_MOST_KNOBS = 64
_HIGHEST_ID = 2**53


@dataclass(frozen=True)
class Request:
    """A request whose fields are sound.

    Args:
        verb: What is asked.
        fields: Every field of the verb; None where it was left out.
    """

    verb: str
    fields: Mapping[str, Any]

    @property
    def text(self) -> Mapping[str, str]:
        """The fields that are text, "" where they were left out."""
        return {name: each for name, each in self.fields.items() if isinstance(each, str)}


def _text(name: str, value: Any) -> None:
    if not isinstance(value, str) or len(value) > _LONGEST or not value.isprintable():
        raise InvalidInput(f"{name} must be a text of at most {_LONGEST} printable characters")


def _seconds(name: str, value: Any) -> None:
    if type(value) not in (int, float) or not 0 < value <= MOST_S:
        raise InvalidInput(f"{name} must be a number above 0 and at most {MOST_S:g}")


def _point(name: str, value: Any) -> None:
    if not isinstance(value, dict) or len(value) > _MOST_KNOBS:
        raise InvalidInput(f"{name} must be an object of at most {_MOST_KNOBS} knobs, each with its level")
    for knob, level in value.items():
        if type(level) not in (int, float, str):
            raise InvalidInput(f"the level of {knob[:60]!r} must be a number or a name")


def _names(name: str, value: Any) -> None:
    if not isinstance(value, list) or len(value) > _MOST_KNOBS or not all(isinstance(each, str) for each in value):
        raise InvalidInput(f"{name} must be a list of at most {_MOST_KNOBS} names")


Check = Callable[[str, Any], None]
_DEVICE: Mapping[str, Check] = {"device": _text}
_TOKEN: Mapping[str, Check] = {"token": _text}
_NEEDED: Mapping[str, Mapping[str, Check]] = {
    "hello": {},
    "devices": {},
    "describe": _DEVICE,
    "space": _DEVICE,
    "take": {**_DEVICE, "seconds": _seconds},
    "renew": {**_TOKEN, "seconds": _seconds},
    "apply": {**_TOKEN, "point": _point},
    "read": _DEVICE,
    "verify": _TOKEN,
    "restore": _TOKEN,
    "release": _TOKEN,
    "lend": {**_TOKEN, "seconds": _seconds},
    "take_back": _TOKEN,
}
_OPTIONAL: Mapping[str, Mapping[str, Check]] = {
    "space": {"knobs": _names},
    "take": {"holder": _text, "token": _text},
    "lend": {"holder": _text},
}
VERBS = tuple(_NEEDED)


def number_of(message: Mapping[str, Any]) -> int | None:
    """Return the id of a message, None if it has none that is a whole number."""
    number = message.get("id")
    return number if type(number) is int and 0 <= number <= _HIGHEST_ID else None


def request_from(message: Mapping[str, Any]) -> Request:
    """Return the request a message makes.

    Raises:
        InvalidInput: If the version is not this one, or a field is missing, too many, or not what it should be.
        UnknownName: If there is no such verb.
    """
    version, verb = message.get("v"), message.get("verb")
    if type(version) is not int or version != VERSION:
        told = version if type(version) is int else "none"
        raise InvalidInput(
            f"this actuator speaks version {VERSION}, the request is of version {told}; update the older one"
        )
    if number_of(message) is None:
        raise InvalidInput("id must be a whole number, not negative")
    if not isinstance(verb, str) or verb not in _NEEDED:
        raise UnknownName("verb", str(verb)[:60], VERBS)
    return Request(
        verb, _fields(verb, {name: value for name, value in message.items() if name not in ("v", "id", "verb")})
    )


def _fields(verb: str, given: Mapping[str, Any]) -> Mapping[str, Any]:
    needed, optional = _NEEDED[verb], _OPTIONAL.get(verb, {})
    if missing := [name for name in needed if name not in given]:
        raise InvalidInput(f"{verb} needs {', '.join(missing)}")
    if odd := [name[:60] for name in given if name not in needed and name not in optional]:
        raise InvalidInput(f"{verb} has no field {', '.join(map(repr, odd[:3]))}")
    for name, value in given.items():
        if name in needed or value is not None:
            {**needed, **optional}[name](name, value)
    return {**dict.fromkeys((*needed, *optional)), **given}
