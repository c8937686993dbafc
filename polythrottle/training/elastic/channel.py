"""The channel between nodes and controller, client and server: one JSON document each way over HTTP."""

import contextlib
import hmac
import http.client
import io
import os
import secrets
import selectors
import socket
import stat
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from polythrottle.domain.clock import Clock, SystemClock
from polythrottle.domain.errors import BadFile, DeviceError, InvalidInput, StorageError
from polythrottle.storage.atomic_file import open_replacement
from polythrottle.storage.json_channel import decode, encode

# What nodes and workers say to the controller: one JSON document there, one back, over HTTP.
#
# Each request carries the job's token (``Authorization: Bearer``), which is compared in constant time: on loopback,
# too, where every user of the machine can connect. It is kept in a file that only its owner can read; only the file's
# path is handed on, for command lines can be seen by all.

ADDRESS = "POLYTHROTTLE_CLUSTER"
TOKEN_FILE = "POLYTHROTTLE_CLUSTER_TOKEN_FILE"
NODE = "POLYTHROTTLE_CLUSTER_NODE"
GENERATION = "POLYTHROTTLE_CLUSTER_GENERATION"
LARGEST = 1 << 20
TOKEN = "token"
"""The file of a job's own token, in the job's folder."""
_LONGEST_TOKEN = 4096
REGROUP = 75
"""Exit code of a worker that stops for the next generation (EX_TEMPFAIL)."""


class ControllerAway(DeviceError):
    """The controller does not answer; who trains goes on and asks again."""


class WrongToken(InvalidInput):
    """The controller is another job's, or was begun with another token: to ask again is in vain."""


@dataclass(frozen=True)
class ControllerChannel:
    """A way to the controller.

    Attributes:
        host: Where it listens.
        port: On which port.
        token: What lets in.
        timeout_s: When a request is given up, in seconds.
        token_file: Where the token stands, for those to whom the way is handed on.
    """

    host: str
    port: int
    token: str = field(default="", repr=False)
    timeout_s: float = 3.0
    token_file: Path | None = None

    @classmethod
    def through(cls, address: str, token_file: Path | None) -> "ControllerChannel":
        """Return the way to the controller at an address, with the token in a file.

        Raises:
            InvalidInput: If the address is not valid.
            BadFile: If the token cannot be read.
        """
        host, port = parse_address(address)
        return cls(host, port, read_token(token_file), token_file=token_file.absolute() if token_file else None)

    @property
    def address(self) -> str:
        """Return host and port as one text."""
        if ":" in self.host:
            return f"[{self.host}]:{self.port}"
        return f"{self.host}:{self.port}"

    def ask(self, verb: str, **words: Any) -> dict[str, Any]:
        """Send one request and return the answer.

        Args:
            verb: What is asked: join, beat, ready, drain, leave, finish, report, notice, status.
            **words: What is said with it.

        Raises:
            ControllerAway: If nobody answers in time, or it has no time for this one.
            WrongToken: If the token is not its own.
            InvalidInput: If it refuses the request; its own words. Or if a number in that is not finite.
        """
        try:
            body = encode(words)
        except ValueError as err:
            raise InvalidInput(f"{verb}: {err}") from err
        call = http.client.HTTPConnection(self.host, self.port, timeout=self.timeout_s)
        try:
            call.connect()
            call.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            call.request("POST", f"/{verb}", body, self._headers())
            answer = call.getresponse()
            data = answer.read(LARGEST)
        except (OSError, http.client.HTTPException) as err:
            raise ControllerAway(f"no controller answers at {self.address}: {err or type(err).__name__}") from err
        finally:
            call.close()
        return _understood(answer.status, data, self.address)

    def _headers(self) -> Mapping[str, str]:
        head = {"Content-Type": "application/json"}
        return head | ({"Authorization": f"Bearer {self.token}"} if self.token else {})

    def environment(self) -> dict[str, str]:
        """Return the environment by which a worker finds the controller."""
        environment = {ADDRESS: self.address}
        return environment | ({TOKEN_FILE: str(self.token_file)} if self.token_file else {})


def _understood(status: int, data: bytes, address: str) -> dict[str, Any]:
    try:
        document = decode(data)
    except InvalidInput as err:
        raise ControllerAway(f"what answers at {address} is no polythrottle controller") from err
    if status == http.HTTPStatus.OK:
        return document
    reason = str(document.get("error", f"the controller at {address} answered {status}"))
    if status in {http.HTTPStatus.SERVICE_UNAVAILABLE, http.HTTPStatus.REQUEST_TIMEOUT}:
        raise ControllerAway(reason)
    raise WrongToken(reason) if status == http.HTTPStatus.UNAUTHORIZED else InvalidInput(reason)


def parse_address(text: str, port: int | None = None) -> tuple[str, int]:
    """Return host and port of a text such as ``127.0.0.1:7070`` or ``[::1]:7070``.

    Raises:
        InvalidInput: If it is not valid.
    """
    host, colon, number = text.rpartition(":")
    if not colon and port is not None:
        host = text
        number = str(port)
    host = host.removeprefix("[").removesuffix("]")
    if not host or not number.isdecimal() or len(number) > 5 or int(number) > 65535:
        raise InvalidInput(f"an address is written HOST:PORT, for example 127.0.0.1:7070, not {text[:60]!r}")
    return host, int(number)


def read_token(path: Path | None) -> str:
    """Return the token in a file; empty without a file.

    Raises:
        BadFile: If the file cannot be read, is empty, or others may read it.
    """
    if path is None:
        return ""
    try:
        with open(path, "rb", opener=_without_waiting) as file:
            mode = os.fstat(file.fileno()).st_mode
            text = ""
            if stat.S_ISREG(mode):
                text = file.read(_LONGEST_TOKEN + 1).decode().strip()
    except (OSError, UnicodeDecodeError) as err:
        raise BadFile(f"the token file {path} cannot be read: {getattr(err, 'strerror', None) or err}") from err
    if not stat.S_ISREG(mode) or len(text) > _LONGEST_TOKEN:
        raise BadFile(f"the token file {path} is no file of one line")
    if mode & 0o077:
        raise BadFile(f"the token file {path} can be read by others; chmod 600 it")
    if len(text) < 16 or not text.isascii() or not text.isprintable():
        raise BadFile(f"the token in {path} needs at least 16 plain characters")
    return text


def _without_waiting(path: str, flags: int) -> int:
    """Open a file; one that waits for a writer, such as a named pipe, does not hold this process up."""
    return os.open(path, flags | os.O_NONBLOCK)


def own_token(folder: Path) -> Path:
    """Return the file of a job's own token, made now if it is not there yet: a controller that is back keeps it.

    To be called by who holds the job. A token that somebody else has put there does not count.

    Args:
        folder: The job's folder, which must be there.

    Raises:
        BadFile: If what stands there is another user's.
        StorageError: If it cannot be written.
    """
    path = folder / TOKEN
    try:
        with contextlib.suppress(FileNotFoundError):
            if path.lstat().st_uid != os.geteuid():
                raise BadFile(f"{path} is another user's; remove it, or give another --job")
            return path
        with open_replacement(path, mode=0o600) as file:
            file.write(f"{secrets.token_hex(24)}\n".encode())
    except OSError as err:
        raise StorageError(f"the job's token cannot be written to {path}: {err.strerror}") from err
    return path


def admits(token: str, header: str | None) -> bool:
    """Return whether a request's ``Authorization`` header holds the token."""
    return hmac.compare_digest(f"Bearer {token}".encode(), (header or "").encode())


def line_from_environment() -> ControllerChannel | None:
    """Return the way to the controller that an agent left in the environment, None outside an elastic job.

    Raises:
        InvalidInput: If the address there is not valid.
        BadFile: If the token's file cannot be read.
    """
    text = os.environ.get(ADDRESS)
    if not text:
        return None
    file = os.environ.get(TOKEN_FILE)
    return ControllerChannel.through(text, Path(file) if file else None)


# HTTP for a controller: one thread, a fixed number of connections, and nothing of a request is read before its token.
#
# Whoever reaches the address can connect, on loopback every user of the machine. So a connection that has not shown
# the token costs neither a thread nor memory worth naming, and gives way to one that comes after it: who would keep
# others out has to open connections faster than one request is read.

MOST = 256
"""Connections at once; each request is one, and lasts milliseconds."""
UNPROVEN_S = 5.0
PROVEN_S = 10.0
CLOSING_S = 5.0
"""How long a connection may take to show the token, then to say the rest, and at last to end, in seconds."""
HEAD_BYTES = 16 << 10
_CHUNK = 1 << 16
_TICK_S = 0.05
_AT_ONCE = 32
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
        self._token = token
        self._answer = answer
        self._clock = clock or SystemClock()
        self._most = most
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
        bound = self._door.getsockname()
        return str(bound[0]), int(bound[1])

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
        refused = None
        if not connection.verb:
            refused = self._prove(connection)
        if refused is not None:
            self._say(connection, _response(*refused))
        elif connection.verb and len(connection.heard) >= connection.length:
            self._say(connection, self._answered(connection))

    def _prove(self, connection: _Connection) -> Answer | None:
        """Read the head once it is there, and return why the request is refused, None if it is not."""
        head, end, body = bytes(connection.heard).partition(_END)
        if not end:
            if len(head) > HEAD_BYTES:
                return (431, {"error": "the request's head is too long"})
            return None
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
        connection.verb = verb
        connection.length = length
        connection.heard = bytearray(body)
        connection.due_s = self._clock.now() + PROVEN_S
        return None

    def _answered(self, connection: _Connection) -> bytes:
        try:
            words = decode(bytes(connection.heard[: connection.length]) or b"{}")
        except InvalidInput:
            return _response(400, {"error": "a request is one JSON document"})
        try:
            return _response(*self._answer(connection.verb, words))
        except Exception as err:  # a fault in one answer must not end all others
            reason = f"the controller failed at {connection.verb[:20]!r}: {type(err).__name__}: {err}"
            return _response(500, {"error": reason})

    def _say(self, connection: _Connection, response: bytes) -> None:
        connection.unsaid = response
        self._send(connection)

    def _send(self, connection: _Connection) -> None:
        """Send what is left; once all is sent, wait for the other side to end, which might lose it otherwise."""
        with contextlib.suppress(BlockingIOError):
            connection.unsaid = connection.unsaid[connection.way.send(connection.unsaid) :]
        if connection.unsaid:
            self._selector.modify(connection.way, selectors.EVENT_WRITE, connection)
            return
        connection.answered = True
        connection.due_s = self._clock.now() + CLOSING_S
        connection.way.shutdown(socket.SHUT_WR)
        self._selector.modify(connection.way, selectors.EVENT_READ, connection)


def _parsed(head: bytes) -> tuple[str, http.client.HTTPMessage]:
    """Return verb and headers of a request's head.

    Raises:
        ValueError: If it is not valid.
        HTTPException: If its headers are too many or too long.
    """
    first, _, rest = head.partition(b"\r\n")
    method, path, version = first.decode("ascii").split()
    if method != "POST" or not version.startswith("HTTP/1") or not path.strip("/"):
        raise ValueError(first)
    return path.strip("/"), http.client.parse_headers(io.BytesIO(rest))


def _response(status: int, document: Mapping[str, Any]) -> bytes:
    data = encode(document)
    head = f"HTTP/1.0 {status} {http.client.responses.get(status, '')}\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data
