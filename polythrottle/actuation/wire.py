"""The line between the privileged actuator and those who ask it: one JSON object per line over a Unix stream socket.

A request has ``v`` (version, 1), ``id`` (a whole number of the asker's choice), ``verb`` and the verb's fields, in at
most 16 KiB; its answer comes in at most 4 MiB and in the order of the requests::

    {"v": 1, "id": 7, "verb": "take", "device": "jetson", "seconds": 30}
    {"v": 1, "id": 7, "answer": {"token": "…", "seconds": 30.0, "resumed": false, "point": {}}}
    {"v": 1, "id": 8, "error": {"kind": "KnobRejected", "words": "…"}}

Types are strict: true is no number, NaN and Infinity are refused, so are a key given twice, a key that the verb does
not have, and anything nested deeper than 8. A line that is no request is answered with ``id`` null; one that is too
long also ends the connection. ``kind`` is a class of `polythrottle.errors`, or one of this module's: `LeaseOver` (the
token is not or no longer good), `Lent` (a study has the board), `Later` (with ``after_s``: too many writes, or too much
is asked at once). `Line.ask` raises them again as what they were.

Who asks is told by the kernel (SO_PEERCRED), what they may by the administrator's permits. ``device`` is a URI the
actuator serves, or "" where it serves only one. Times are seconds. A point is ``{knob: level}``, in SI, of the device's
own knobs; those left out go to their default. The verbs:

``hello`` {}
    → ``versions`` [1], ``polythrottle``, ``pid``, ``you`` {uid, name}, ``read`` and ``control`` (lists of the URIs you
    may read, or set), ``most_s`` 60, ``writes_per_s`` 10, ``burst`` 20.
``devices`` {}
    → ``devices`` [{uri, title, control (whether you may set it), holder (who has it; "" if nobody), lent}].
``describe`` {device}
    → ``uri``, ``title``, ``identity`` {name: text}, ``energy_kind``, ``boundary``, ``sensor`` (fields of
    `Sensor`, where the device's files say how it averages), ``presets`` {name: point},
    ``findings`` [{subject, works, explanation, remedy}], ``knobs`` [{name, levels, label, default, searched}]: every
    knob that works here, with the levels you may set; ``searched`` is whether it is searched unless asked otherwise.
``space`` {device, knobs (list of names, or null: those searched)}
    → ``size``, ``default`` {knob: level}, ``knobs`` [{name, levels, label}], ``rows`` (base64 of zlib of little-endian
    32-bit indices, as a journal keeps them): the points you may set. Takes seconds; see `space_from`.
``take`` {device, seconds, holder (text for people), token (optional: of the lease you had)}
    → ``token``, ``seconds``, ``resumed``, ``point``. Makes you the only one who sets the device, for ``seconds`` (at
    most 60) unless renewed. With the token of a lease that still runs, and the same user, that lease goes on under a
    new token, the old one is void, and ``point`` is what holds; without it a second one is refused with the holder's
    name. ``point`` is empty while the board is as found. After the actuator was started again every token is
    unknown and the board as found: ``take`` with the old token then gives a lease of its own, ``resumed`` false.
``renew`` {token, seconds}
    → ``seconds``, ``lent`` (whether a loan of this lease runs). Also renews a loan, with the loan's token.
``apply`` {token, point}
    → ``point`` (as it holds), ``took_s``. At most 10 a second, 20 in a burst, else `Later`. `Lent` while a loan runs.
``read`` {device}
    → ``time_s`` (monotonic clock of the machine), ``energy_j`` (running total, never falls while the actuator lives),
    ``temperature_c`` (or null), ``clocks_hz`` {domain: Hz}, ``throttled``; where known ``cause`` (why, in
    words), ``cuts``, ``cut_s`` and ``overrun`` (see `Reading`). Needs no lease, only the right to read.
``verify`` {token}
    → ``knobs`` [names]: those that no longer hold what was applied last. Empty while nothing is applied.
``restore`` {token}
    → ``left`` [texts]: what is left as somebody else has set it. Everything as found; the lease goes on. `Lent` while a
    loan runs.
``release`` {token}
    → ``left``, with what could not be put back, which is tried again until it can. Everything as found and the lease
    ended. With a loan's token: the loan alone, the lender sets again.
``lend`` {token, seconds, holder}
    → ``token``, ``seconds``. Another process of the same user sets the device under this second token, which it renews
    itself (at most 60 s at once), while the lender's `apply` is refused. Your own lease must be renewed as before:
    with it the loan ends. A second ``lend`` while one runs is refused.
``take_back`` {token}
    → ``left``. Ends the loan at once, board as found; the lender's token.

A lease or loan that is not renewed in time ends by itself: the board is as found again. Closing the connection alone
ends nothing: whoever comes back in time presents the token. A call under a token that takes half a second or more puts
the end off by as much, once until it is renewed, for its holder cannot renew meanwhile; nobody else's calls do.
"""

import base64
import json
import math
import os
import socket
import time
import zlib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from polythrottle import errors
from polythrottle.errors import DeviceError, InvalidInput, KnobAbsent, PermissionDenied, PolythrottleError
from polythrottle.space import Knob, OperatingPoint, SearchSpace

VERSION = 1
MOST_REQUEST, MOST_ANSWER = 16 * 1024, 4 * 1024 * 1024
"""The longest request and the longest answer, in bytes, the newline included."""
MOST_S = 60.0
"""The longest a lease or a loan lasts without being renewed."""

_DEEPEST = 8
_PATIENCE_S = 60.0
_AT_THE_DOOR_S = 2.0  # how long to wait where the actuator has not even taken in those who came before
_IDLE_S = 60.0  # a line not used for this long may have been dropped by the actuator


class LeaseOver(DeviceError):
    """The token is not good, or no longer: take a new lease."""


class Lent(DeviceError):
    """A loan of the lease runs, so its lender does not set the device."""


class Later(DeviceError):
    """Too much was asked at once.

    Args:
        words: For people.
        after_s: When to ask again, in seconds.
    """

    def __init__(self, words: str, after_s: float = 1.0) -> None:
        super().__init__(words)
        self.after_s = after_s


_KINDS: Mapping[str, type[PolythrottleError]] = {
    **{
        name: kind
        for name, kind in vars(errors).items()
        if isinstance(kind, type) and issubclass(kind, PolythrottleError)
    },
    **{kind.__name__: kind for kind in (LeaseOver, Lent, Later)},
}


def encode(message: Mapping[str, Any]) -> bytes:
    """Return a message as its line.

    Raises:
        ValueError: If a number in it is not finite.
    """
    return json.dumps(message, allow_nan=False, separators=(",", ":")).encode() + b"\n"


def decode(line: bytes) -> dict[str, Any]:
    """Return the message of a line.

    Raises:
        InvalidInput: If it is no JSON object, repeats a key, is nested too deep, or holds a number that is not finite.
    """
    try:
        message = json.loads(
            line.decode("utf-8"), object_pairs_hook=_object, parse_constant=_no_number, parse_float=_finite
        )
        depth = _depth(message)
    except (ValueError, RecursionError) as err:
        raise InvalidInput(f"that is no message: {_short(err)}") from None
    if not isinstance(message, dict):
        raise InvalidInput("that is no message: a JSON object was expected")
    if depth > _DEEPEST:
        raise InvalidInput(f"that is no message: it is nested deeper than {_DEEPEST}")
    return message


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key is given twice")
    return found


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is no number here")


def _finite(text: str) -> float:
    number = float(text)
    return number if math.isfinite(number) else _no_number(text[:20])


def _short(err: Exception) -> str:
    return "it is nested too deep" if isinstance(err, RecursionError) else str(err)[:120]


def _depth(value: Any) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + max(map(_depth, inner), default=0) if isinstance(value, dict | list) else 0


def error_line(err: PolythrottleError) -> dict[str, Any]:
    """Return an error as it travels."""
    kind = next(each.__name__ for each in type(err).__mro__ if _KINDS.get(each.__name__) is each)
    line: dict[str, Any] = {"kind": kind, "words": str(err)}
    if isinstance(err, KnobAbsent):
        return {**line, "knob": err.knob}
    return {**line, "after_s": err.after_s} if isinstance(err, Later) else line


def error_from(line: Any) -> PolythrottleError:
    """Return the error that has travelled as a line; a `DeviceError` if it is of no kind known here."""
    told = line if isinstance(line, dict) else {}
    words, kind = str(told.get("words", "no reason was given")), _KINDS.get(str(told.get("kind")), DeviceError)
    if kind is Later:
        return Later(words, float(told.get("after_s", 1.0)))
    if kind is KnobAbsent:
        return KnobAbsent(words, str(told.get("knob", "")))
    err = kind.__new__(kind)  # some make their words out of parts that have not travelled
    Exception.__init__(err, words)
    return err


def space_line(space: SearchSpace) -> dict[str, Any]:
    """Return a search space as it travels."""
    rows = base64.b64encode(zlib.compress(space.rows.astype("<i4").tobytes(), 9)).decode()
    knobs = [{"name": knob.name, "levels": list(knob.levels), "label": knob.label} for knob in space.knobs]
    return {"size": len(space), "default": dict(space.default), "knobs": knobs, "rows": rows}


def space_from(line: Mapping[str, Any]) -> SearchSpace:
    """Return the search space that has travelled as a line.

    Raises:
        DeviceError: If it is none.
    """
    import numpy as np

    try:
        knobs = tuple(Knob(each["name"], tuple(each["levels"]), each["label"]) for each in line["knobs"])
        rows = np.frombuffer(zlib.decompress(base64.b64decode(line["rows"])), dtype="<i4").astype(np.int32)
        return SearchSpace(knobs, rows.reshape(int(line["size"]), len(knobs)), OperatingPoint(line["default"]))
    except (KeyError, TypeError, ValueError, zlib.error, PolythrottleError) as err:
        raise DeviceError(f"the actuator's answer makes no search space: {err}") from err


class Line:
    """A connection to the actuator; connects when something is asked, and again where that was long ago.

    Not for several threads at once.

    Args:
        path: Of its socket.
        patience_s: How long to wait for an answer.
    """

    def __init__(self, path: Path | str, patience_s: float = _PATIENCE_S) -> None:
        self._path, self._patience_s = Path(path), patience_s
        self._socket: socket.socket | None = None
        self._rest = b""
        self._number = 0
        self._used_s = 0.0

    def ask(self, verb: str, **fields: Any) -> dict[str, Any]:
        """Return the answer to a request.

        Args:
            verb: One of those in this module's docstring.
            fields: Of the verb.

        Raises:
            PermissionDenied: If this user may not ask, or not that.
            DeviceError: If the actuator cannot be reached or does not answer in time.
            PolythrottleError: What it refuses with.
        """
        self._number += 1
        request = encode({"v": VERSION, "id": self._number, "verb": verb, **fields})
        if len(request) > MOST_REQUEST:
            raise InvalidInput(f"a request of {len(request)} bytes is too long for the actuator")
        answer = self._answered(request)
        if "error" in answer:
            raise error_from(answer["error"])
        if answer.get("id") != self._number or not isinstance(answer.get("answer"), dict):
            self.close()
            raise DeviceError(f"what answers at {self._path} is no actuator of this version")
        found: dict[str, Any] = answer["answer"]
        return found

    def _answered(self, request: bytes) -> dict[str, Any]:
        now_s = time.monotonic()
        if self._socket is not None and now_s - self._used_s > _IDLE_S:
            self.close()
        try:
            way = self._socket or self._connected()
            # A server that refuses us says so and hangs up, perhaps before it has read anything.
            with suppress(BrokenPipeError, ConnectionResetError):
                way.sendall(request)
            answer = decode(self._line(way, now_s + self._patience_s))
        except InvalidInput as err:
            self.close()
            raise DeviceError(f"what answers at {self._path} is no actuator: {err}") from err
        except TimeoutError as err:
            self.close()
            raise DeviceError(f"the actuator at {self._path} did not answer within {self._patience_s:g} s") from err
        except OSError as err:
            self.close()
            raise DeviceError(f"the actuator at {self._path} has hung up: {err.strerror or err}; ask again") from err
        self._used_s = time.monotonic()
        return answer

    def _connected(self) -> socket.socket:
        ends_s = time.monotonic() + min(_AT_THE_DOOR_S, self._patience_s)
        while True:
            way = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
            way.settimeout(self._patience_s)
            try:
                way.connect(os.fspath(self._path))
            except BlockingIOError as err:  # too many are at the door, for which a timeout is no help (unix(7))
                way.close()
                if time.monotonic() > ends_s:
                    words = f"the actuator at {self._path} is busy: too many wait at its door; ask again later"
                    raise DeviceError(words) from err
                time.sleep(0.01)
            except OSError as err:
                way.close()
                raise _unreachable(self._path, err) from err
            else:
                self._socket, self._rest = way, b""
                return way

    def _line(self, way: socket.socket, until_s: float) -> bytes:
        parts, size = [self._rest], len(self._rest)
        while b"\n" not in parts[-1]:
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                raise TimeoutError
            way.settimeout(left_s)
            got = way.recv(65536)
            if not got:
                raise ConnectionResetError("it closed the connection")
            parts.append(got)
            size += len(got)
            if size > MOST_ANSWER + len(got):
                raise InvalidInput("its answer is too long")
        line, _, self._rest = b"".join(parts).partition(b"\n")
        return line

    def close(self) -> None:
        """Hang up; the next `ask` connects again."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def _unreachable(path: Path, err: OSError) -> DeviceError:
    if isinstance(err, PermissionError):
        return PermissionDenied(
            f"this user may not ask the actuator at {path}; join the group polythrottle, or run as root"
        )
    if isinstance(err, FileNotFoundError | ConnectionRefusedError):
        return DeviceError(f"no actuator listens at {path}; start it: polythrottle daemon actuator")
    return DeviceError(f"the actuator at {path} cannot be reached: {err.strerror or err}")
