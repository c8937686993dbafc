"""What a request is answered when it cannot be done: a status and one line, by the class of the error."""

from typing import Any

from starlette.responses import Response

from polythrottle.daemon.web.plain import Schema, to_json
from polythrottle.errors import (
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
from polythrottle.printable import printable

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
    headers = {"retry-after": "1"} if status == 503 else {}
    return refused(status, type(error).__name__, str(error), headers)


def refused(status: int, kind: str, words: str, headers: dict[str, str] | None = None) -> Response:
    """Return an answer that says why not."""
    body = to_json({"error": {"kind": kind, "words": printable(words[:_MOST_WORDS])}})
    named = {name.replace("_", "-"): value for name, value in (headers or {}).items()}
    return Response(body, status, {**HEADERS, **named}, "application/json")
