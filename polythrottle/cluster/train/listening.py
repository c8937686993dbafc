"""HTTP for a controller: one thread, a fixed number of connections, and nothing of a request is read before its token.

Whoever reaches the address can connect, on loopback every user of the machine. So a connection that has not shown the
token costs neither a thread nor memory worth naming, and gives way to one that comes after it: who would keep others
out has to open connections faster than one request is read.
"""

import contextlib
import http.client
import io
import json
import selectors
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from polythrottle.clock import Clock, SystemClock
from polythrottle.cluster.train.wire import LARGEST, admits
from polythrottle.errors import InvalidInput

MOST = 256
"""Connections at once; each request is one, and lasts milliseconds."""
UNPROVEN_S, PROVEN_S, CLOSING_S = 5.0, 10.0, 5.0
"""How long a connection may take to show the token, then to say the rest, and at last to end, in seconds."""
HEAD_BYTES = 16 << 10
_CHUNK, _TICK_S, _AT_ONCE = 1 << 16, 0.05, 32
_END = b"\r\n\r\n"

Answer = tuple[int, Mapping[str, Any]]
"""Status and document."""


@dataclass
class _Connection:
    """One request on its way.

    Attributes:
        way: Its socket.
        due_s: When it is given up, by the listener's clock, in seconds.
        heard: What was read and not yet used.
        verb: What is asked; empty until the token was shown.
        length: Bytes of the request's body.
        unsaid: What is left to send.
        answered: Whether it only waits for the other side to end.
    """

    way: socket.socket
    due_s: float
    heard: bytearray = field(default_factory=bytearray)
    verb: str = ""
    length: int = 0
    unsaid: bytes = b""
    answered: bool = False

    @property
    def proven(self) -> bool:
        """Return whether it has shown the token and has not been answered yet."""
        return bool(self.verb) and not self.answered


class Listener:
    """Answers requests of those who have the token.

    Args:
        host: Where to listen.
        port: On which port; 0 for a free one.
        token: What lets in.
        answer: Answers a verb and its words; called from the one thread.
        clock: Decides who takes too long.
        most: Connections at once.

    Raises:
        InvalidInput: If there is no token, or it cannot listen there.
    """

    def __init__(
        self,
        host: str,
        port: int,
        token: str,
        answer: Callable[[str, Mapping[str, Any]], Answer],
        clock: Clock | None = None,
        most: int = MOST,
    ) -> None:
        if not token:
            raise InvalidInput("a controller needs a token, also on loopback: every user of the machine can connect")
        self._token, self._answer, self._clock, self._most = token, answer, clock or SystemClock(), most
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._door = socket.create_server((host, port), family=family, backlog=128)
        except OSError as err:
            raise InvalidInput(f"cannot listen on {host}:{port}: {err.strerror or err}") from err
        self._door.setblocking(False)
        self._ended = threading.Event()
        self._connections: dict[int, _Connection] = {}
        self._selector = selectors.DefaultSelector()
        self._thread: threading.Thread | None = None

    @property
    def address(self) -> tuple[str, int]:
        """Return host and port."""
        found = self._door.getsockname()
        return str(found[0]), int(found[1])

    def start(self) -> None:
        """Answer from now on."""
        self._selector.register(self._door, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Answer no more, and close all connections."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
        for each in list(self._connections.values()):
            self._drop(each)
        self._door.close()
        self._selector.close()

    def _run(self) -> None:
        while not self._ended.is_set():
            for key, _ in self._selector.select(_TICK_S):
                if key.data is not None:
                    self._serve(key.data)
            for way in self._arrivals():  # after those that are there, of whom fewer are idle then
                self._welcome(way)
            for each in self._overdue():
                self._turn_away(each, 408, "no request came in time")

    def _arrivals(self) -> Iterator[socket.socket]:
        for _ in range(_AT_ONCE):
            try:
                yield self._door.accept()[0]
            except BlockingIOError:
                return
            except OSError:  # it has gone again, or this process has no descriptor left: the oldest gives one back
                self._make_room()
                return

    def _welcome(self, way: socket.socket) -> None:
        way.setblocking(False)
        fresh = _Connection(way, self._clock.now() + UNPROVEN_S)
        full = len(self._connections) >= self._most and not self._make_room()
        self._connections[way.fileno()] = fresh
        self._selector.register(way, selectors.EVENT_READ, fresh)
        if full:
            self._turn_away(fresh, 503, f"the controller is busy with {self._most} requests: ask again")
        else:
            self._serve(fresh)  # most say all they have to say at once

    def _make_room(self) -> bool:
        """Turn the oldest connection away that has not shown the token, and return whether there was one."""
        oldest = next((each for each in self._connections.values() if not each.proven), None)
        if oldest is not None:
            self._turn_away(oldest, 503, f"this controller keeps {self._most} connections, and others have come since")
        return oldest is not None

    def _overdue(self) -> list[_Connection]:
        now_s = self._clock.now()
        return [each for each in self._connections.values() if each.due_s < now_s]

    def _turn_away(self, connection: _Connection, status: int, reason: str) -> None:
        if not connection.answered:
            with contextlib.suppress(OSError):
                connection.way.send(_response(status, {"error": reason}))
                for _ in range(_AT_ONCE):  # what is left unread takes the answer back (RFC 1122, 4.2.2.13)
                    if not connection.way.recv(_CHUNK):
                        break
        self._drop(connection)

    def _drop(self, connection: _Connection) -> None:
        if self._connections.pop(connection.way.fileno(), None) is not None:
            self._selector.unregister(connection.way)
        connection.way.close()

    def _serve(self, connection: _Connection) -> None:
        try:
            if connection.unsaid:
                self._send(connection)
            else:
                self._hear(connection)
        except BlockingIOError:
            return
        except OSError:  # who asked has gone
            self._drop(connection)

    def _hear(self, connection: _Connection) -> None:
        data = connection.way.recv(_CHUNK)
        if not data:
            self._drop(connection)
            return
        if connection.answered:
            return
        connection.heard += data
        refused = None if connection.verb else self._prove(connection)
        if refused is not None:
            self._say(connection, *refused)
        elif connection.verb and len(connection.heard) >= connection.length:
            self._say(connection, *self._answered(connection))

    def _prove(self, connection: _Connection) -> Answer | None:
        """Read the head once it is there, and return why the request is refused, None if it is not."""
        head, end, body = bytes(connection.heard).partition(_END)
        if not end:
            return (431, {"error": "the request's head is too long"}) if len(head) > HEAD_BYTES else None
        try:
            verb, headers = _parsed(head[:HEAD_BYTES] + end)
            length = int(headers.get("Content-Length", "0"))
        except (ValueError, http.client.HTTPException):
            return 400, {"error": "a request is one JSON document"}
        if headers.get("Origin") or headers.get("Content-Type") != "application/json":  # pages must not steer a job
            return 403, {"error": "not a request of a polythrottle node"}
        if not admits(self._token, headers.get("Authorization")):
            return 401, {"error": "this controller needs the job's token: give --token-file"}
        if not 0 <= length <= LARGEST:
            return 413, {"error": "the request is too long"}
        connection.verb, connection.length, connection.heard = verb, length, bytearray(body)
        connection.due_s = self._clock.now() + PROVEN_S
        return None

    def _answered(self, connection: _Connection) -> Answer:
        try:
            words = json.loads(connection.heard[: connection.length] or b"{}")
        except (ValueError, RecursionError):
            words = None
        if not isinstance(words, dict):
            return 400, {"error": "a request is one JSON document"}
        try:
            return self._answer(connection.verb, words)
        except Exception as err:  # a fault in one answer must not end all others
            return 500, {"error": f"the controller failed at {connection.verb[:20]!r}: {type(err).__name__}: {err}"}

    def _say(self, connection: _Connection, status: int, document: Mapping[str, Any]) -> None:
        connection.unsaid = _response(status, document)
        self._send(connection)

    def _send(self, connection: _Connection) -> None:
        """Send what is left; once all is sent, wait for the other side to end, which might lose it otherwise."""
        with contextlib.suppress(BlockingIOError):
            connection.unsaid = connection.unsaid[connection.way.send(connection.unsaid) :]
        if connection.unsaid:
            self._selector.modify(connection.way, selectors.EVENT_WRITE, connection)
            return
        connection.answered, connection.due_s = True, self._clock.now() + CLOSING_S
        connection.way.shutdown(socket.SHUT_WR)
        self._selector.modify(connection.way, selectors.EVENT_READ, connection)


def _parsed(head: bytes) -> tuple[str, http.client.HTTPMessage]:
    """Return verb and headers of a request's head.

    Raises:
        ValueError: If it is none.
        HTTPException: If its headers are too many or too long.
    """
    first, _, rest = head.partition(b"\r\n")
    method, path, version = first.decode("ascii").split()
    if method != "POST" or not version.startswith("HTTP/1") or not path.strip("/"):
        raise ValueError(first)
    return path.strip("/"), http.client.parse_headers(io.BytesIO(rest))


def _response(status: int, document: Mapping[str, Any]) -> bytes:
    data = json.dumps(document).encode()
    head = f"HTTP/1.0 {status} {http.client.responses.get(status, '')}\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data
