"""JSON objects, one per line, over a stream socket: the one channel of the actuator, its clients and the trainer.

Types are strict: a line holds one object, no key twice, no number that is not finite, nothing nested deeper than eight.
What comes as the body of an answer over HTTP, of an elastic job's controller for one, is read by the same rules.
The standard library alone, because the actuator and the trainer load it.
"""

from __future__ import annotations

import json
import math
import socket
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

from polythrottle.domain.errors import InvalidInput

_DEEPEST = 8  # ours; other programs' documents may be deeper
_CHUNK = 65536
_LEAST_S = 1e-6  # a timeout of 0 would make the socket non-blocking


def finite(value: float) -> float | None:
    """Return a number, or None where it has no end or is none: JSON knows neither (RFC 8259, section 6)."""
    if math.isfinite(value):
        return value
    return None


def parse(text: str | bytes, make: Callable[[list[tuple[str, Any]]], Any] | None = None) -> Any:
    """Return what a JSON document holds, without the numbers that Python reads and JSON has not.

    Args:
        text: The document.
        make: Returns an object of its pairs; a dict of them if None.

    Raises:
        RecursionError: If it is nested too deep to be read.
        ValueError: If it is no JSON, or holds a number that is not finite.
    """
    # Python takes NaN and Infinity for numbers, and makes 1e999 infinite.
    return json.loads(text, object_pairs_hook=make, parse_constant=no_number, parse_float=_finite)


def encode(message: Mapping[str, Any]) -> bytes:
    """Return a message as its line.

    Raises:
        ValueError: If a number in it is not finite.
    """
    return json.dumps(message, allow_nan=False, separators=(",", ":")).encode() + b"\n"


def decode(line: bytes, deepest: int = _DEEPEST) -> dict[str, Any]:
    """Return the message of a line.

    Args:
        line: With or without its end.
        deepest: How many objects and lists may lie in each other.

    Raises:
        InvalidInput: If it is no JSON object, repeats a key, is nested too deep, or holds a number that is not finite.
    """
    try:
        message = parse(line.decode("utf-8"), _object)
        too_deep = depth(message) > deepest
    except RecursionError:
        raise InvalidInput("that is no message: it is nested too deep") from None
    except ValueError as err:
        raise InvalidInput(f"that is no message: {str(err)[:120]}") from None
    if not isinstance(message, dict):
        raise InvalidInput("that is no message: a JSON object was expected")
    if too_deep:
        raise InvalidInput(f"that is no message: it is nested deeper than {deepest}")
    return message


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    message = dict(pairs)
    # Python lets the last of two equal keys win.
    if len(message) < len(pairs):
        raise ValueError("a key is given twice")
    return message


def no_number(text: str) -> float:
    """Refuse NaN and Infinity, which Python's reader takes and JSON has not.

    Raises:
        ValueError: Always.
    """
    raise ValueError(f"{text} is no number here")


def _finite(text: str) -> float:
    number = float(text)
    if math.isfinite(number):
        return number
    return no_number(text[:20])


def depth(value: Any) -> int:
    """Return how many objects and lists lie in each other; a RecursionError where it cannot be counted."""
    inner: Collection[Any]
    if isinstance(value, dict):
        inner = value.values()
    elif isinstance(value, list):
        inner = value
    else:
        return 0
    return 1 + max(map(depth, inner), default=0)


class Channel:
    """One end of a connection. Not for several threads at once.

    Args:
        connection: A connected stream socket, which this then owns.
        longest: The longest line it takes, in bytes.
    """

    def __init__(self, connection: socket.socket, longest: int) -> None:
        self._connection = connection
        self._longest = longest
        self._received = bytearray()

    def send(self, message: Mapping[str, Any], timeout_s: float | None = None) -> None:
        """Send a message.

        Raises:
            OSError: If the other side has hung up or does not read.
            ValueError: If a number in it is not finite.
        """
        self.send_line(encode(message), timeout_s)

    def send_line(self, line: bytes, timeout_s: float | None = None) -> None:
        """Send a message that is encoded already.

        Raises:
            OSError: If the other side has hung up or does not read.
        """
        self._connection.settimeout(timeout_s)
        self._connection.sendall(line)

    def receive(self, timeout_s: float | None = None) -> dict[str, Any] | None:
        """Return the next message; None if none has come in time.

        What has come of a line is kept, so that asking again goes on where this stopped.

        Raises:
            EOFError: If the other side has hung up.
            OSError: If the connection is broken.
            InvalidInput: If what comes is no message or too long.
        """
        if timeout_s is None:
            until_s = math.inf
        else:
            until_s = time.monotonic() + timeout_s
        searched = 0
        # Only what is new is searched: an answer of megabytes comes in dozens of chunks.
        while (end := self._received.find(b"\n", searched)) < 0:
            searched = len(self._received)
            if searched > self._longest:
                raise InvalidInput(f"that is no message: a line of more than {self._longest} bytes is too long")
            if not self._receive_chunk(until_s - time.monotonic()):
                return None
        line = bytes(self._received[:end])
        del self._received[: end + 1]
        return decode(line)

    def _receive_chunk(self, left_s: float) -> bool:
        """Wait for more; return whether any has come in time."""
        # Set anew before each call: senders use the same socket with times of their own.
        self._connection.settimeout(None if math.isinf(left_s) else max(left_s, _LEAST_S))
        try:
            chunk = self._connection.recv(_CHUNK)
        except TimeoutError:  # one and the same from Python 3.10 on
            return False
        if not chunk:
            raise EOFError("the other side has hung up")
        self._received += chunk
        return True

    def close(self) -> None:
        """Hang up."""
        self._connection.close()
