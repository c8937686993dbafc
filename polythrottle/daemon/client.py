"""The daemon from a program: its status, its events, and what may be asked of it; standard library only."""

import http.client
import json
import os
import re
import socket as sockets
import ssl
import threading
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote, urlsplit

from typing_extensions import Self

from polythrottle.daemon.commands import Answer
from polythrottle.daemon.observation import RequestStats
from polythrottle.daemon.status import Happened, NodeShown, Status, StudyShown
from polythrottle.domain import errors
from polythrottle.domain.clock import SystemClock
from polythrottle.domain.errors import DeviceError, InvalidInput, PermissionDenied, PolythrottleError, error_named
from polythrottle.storage.paths import DAEMON_SOCKET, socket_path

Shown = TypeVar("Shown")

_HOST = re.compile(r"[\w.:%-]+")
"""A name, or an address of IPv4 or IPv6 (RFC 3986, 6874)."""
_AGAIN_S = 0.5
_AGAIN_MOST_S = 5.0
_AT_THE_DOOR_S = 2.0
"""How long to wait where the daemon has not even taken in those who came before."""
_SILENT_S = 20.0
"""A stream says at least that nothing happened twice as often as this."""
# What answers at a URL may be anything, and need not end.
_MOST_BYTES = 64 * 2**20


@dataclass(frozen=True)
class Gone:
    """The daemon does not answer; it is tried again."""

    words: str


class Client:
    """A daemon, through its Unix socket or, where it was told to listen there, over TCP.

    Every method raises the error the daemon said no with, as the class it has there, or `DeviceError` if no daemon
    answers, `PermissionDenied` if it may not be asked.

    Args:
        socket: Path of its socket; by default that of `default_socket`.
        url: ``http://host:port`` or ``https://host:port`` instead.
        token: What a daemon on TCP asks for.
        authority: A certificate to trust with ``https``, such as the daemon's own, in PEM.
        timeout_s: How long an answer may take. By default that is longer than the API itself waits before it says for
            what: 10 s each for a name, a file and the control loop.
        service: Of several services the one that is meant; None for the daemon as a whole.
        called: What messages call it, where the socket's path would tell nobody.

    Raises:
        InvalidInput: If both a socket and a URL are given, or the URL is none.
    """

    def __init__(
        self,
        socket: Path | None = None,
        url: str | None = None,
        token: str | None = None,
        authority: Path | None = None,
        timeout_s: float = 35.0,
        service: str | None = None,
        called: str | None = None,
    ) -> None:
        if socket is not None and url is not None:
            raise InvalidInput("name the daemon by its socket or by a URL, not both")
        if url is not None:
            self._path = None
        else:
            self._path = socket or default_socket()
        self._where = called or (str(self._path) if url is None else url)
        if self._path is not None:
            self._dial = _unix(self._path)
        else:
            self._dial = _tcp(url or "", authority)
        self._token = token
        self._timeout_s = timeout_s
        self._base = ""
        if service is not None:
            self._base = f"/services/{quote(service, safe='')}"
        self._open: set[sockets.socket] = set()
        self._closed = threading.Event()

    @property
    def where(self) -> str:
        """The socket or the URL."""
        return self._where

    def status(self) -> Status:
        """Return what the last turn of its control loop saw."""
        return self._read(Status, self._asked("GET", "/v1/status"))

    def events(self, after: int = 0, limit: int = 1000) -> tuple[Happened, ...]:
        """Return the events after a number, oldest first."""
        found = self._asked("GET", f"/v1/events?after={after}&limit={limit}")
        return tuple(self._read(Happened, each) for each in found["events"])

    def follow(self, after: int | None = None) -> Iterator[Status | Happened | Gone]:
        """Yield a status a second at most and each event, until `close`; a daemon that is gone is tried again.

        Args:
            after: The number of the last event that is known; None begins with the next one.
        """
        last = after
        wait_s = _AGAIN_S
        while not self._closed.is_set():
            try:
                if last is None:
                    # Asked in here, so that a daemon which is not there yet is waited for like one that has gone.
                    last = max((each.number for each in self.events()), default=0)
                for name, shown in self._stream("/v1/events", last):
                    # Not before something was heard: what takes a line and hangs up at once is asked ever less often.
                    wait_s = _AGAIN_S
                    if name == "event":
                        happened = self._read(Happened, shown)
                        last = happened.number
                        yield happened
                    elif name == "status":
                        yield self._read(Status, shown)
                words = f"the daemon at {self._where} has ended"
            # Rights do not come by waiting; it is a `DeviceError` too, which would be tried again without end.
            except PermissionDenied:
                raise
            except DeviceError as error:
                words = str(error)
            if not self._closed.is_set():
                # A line that `close` has cut is no daemon that is gone, hence the question before.
                yield Gone(words)
                self._closed.wait(wait_s)
                wait_s = min(2 * wait_s, _AGAIN_MOST_S)

    def profiles(self) -> list[dict[str, Any]]:
        """Return the profiles it can apply: name, device, workload, SLO, saving."""
        return list(self._asked("GET", "/v1/profiles")["profiles"])

    def seconds(self) -> list[dict[str, Any]]:
        """Return what was seen in each of the last 600 seconds."""
        return list(self._asked("GET", "/v1/seconds")["seconds"])

    def history(self, minutes: int = 60) -> list[dict[str, Any]]:
        """Return what is kept of the last minutes, oldest first."""
        return list(self._asked("GET", f"/v1/history?minutes={minutes}")["minutes"])

    def apply(self, profile: str | Path, within_s: float | None = 60.0) -> Answer:
        """Have the load followed with another profile.

        Args:
            profile: A file, or ``<device>/<workload>``.
            within_s: When the one before comes back unless `confirm` is called; None keeps it.

        Raises:
            InvalidInput: If no file can have that name, or it may not be looked for.
        """
        return self._asked("POST", "/v1/apply", {"profile": _whole_name(profile), "within_s": within_s})

    def confirm(self) -> Answer:
        """Keep the profile applied last."""
        return self._asked("POST", "/v1/confirm", {})

    def release(self, reason: str = "asked for") -> Answer:
        """Have the board put back and left alone until `take`."""
        return self._asked("POST", "/v1/release", {"reason": reason})

    def take(self) -> Answer:
        """Have the board set again."""
        return self._asked("POST", "/v1/take", {})

    def budget(
        self,
        power_w: float | None = None,
        battery_wh: float | None = None,
        last_s: float | None = None,
        wh_per_day: float | None = None,
        carbon: str | Path | None = None,
    ) -> Answer:
        """Have no more drawn than this; nothing given lifts the limit.

        Args:
            power_w: Most mean power.
            battery_wh: What there is.
            last_s: How long it must last.
            wh_per_day: Most energy a day.
            carbon: File of carbon intensity along time, on the daemon's machine.
        """
        asked = {
            "power_w": power_w,
            "battery_wh": battery_wh,
            "last_s": last_s,
            "wh_per_day": wh_per_day,
            "carbon": None if carbon is None else str(Path(carbon).absolute()),
        }
        return self._asked("PUT", "/v1/budget", {name: value for name, value in asked.items() if value is not None})

    def start_study(self, trials: int = 30, options: Mapping[str, str] | None = None) -> Answer:
        """Have it tune again; the answer's ``id`` names the study.

        Args:
            trials: At most.
            options: Further words of ``polythrottle tune``, by name: ``{"risk": "0.05"}``.
        """
        return self._asked("POST", "/v1/studies", {"trials": trials, "options": dict(options or {})})

    def studies(self) -> tuple[StudyShown, ...]:
        """Return the studies since the daemon began, newest first."""
        found = self._asked("GET", "/v1/studies")
        return tuple(self._read(StudyShown, each) for each in found["studies"])

    def study(self, id: str) -> StudyShown:
        """Return one study."""
        return self._read(StudyShown, self._asked("GET", f"/v1/studies/{quote(id, safe='')}"))

    def follow_study(self, id: str) -> Iterator[StudyShown]:
        """Yield a study each time it gets on, until it ends."""
        for name, shown in self._stream(f"/v1/studies/{quote(id, safe='')}/events", None):
            if name == "study":
                yield self._read(StudyShown, shown)

    def stop_study(self, id: str) -> Answer:
        """End a study; its journal keeps what it knows."""
        return self._asked("DELETE", f"/v1/studies/{quote(id, safe='')}")

    def host_study(self, host: str, claim: str = "", **said: Any) -> Answer:
        """Claim the study that is due, or say how far it is, as `polythrottle.daemon.commands.HostStudy` has it."""
        return self._asked("POST", "/v1/study-host", {"host": host, "claim": claim, **said})

    def report(self, seen: RequestStats) -> Answer:
        """Say what a serving program saw since it said so last; the answer holds ``batch`` and ``gather_s``."""
        told = asdict(seen)
        # How sure a p99 is matters where the daemon itself counts; tokens are told by proxies and metric pages.
        for name in ("p99_least_s", "tokens_in", "tokens_out", "ttft_p99_s", "tpot_p99_s", "firsts"):
            del told[name]
        return self._asked("POST", "/v1/report", told)

    def node(self) -> NodeShown:
        """Return all services of a daemon that looks after several, and the watts they share.

        Raises:
            UnknownName: If it looks after one.
        """
        return self._read(NodeShown, self._asked("GET", "/v1/node"))

    def node_power(self, power_w: float | None = None, within_s: float | None = None) -> Answer:
        """Have a server of services draw no more than this; None lifts the limit.

        Args:
            power_w: Most power of the whole server over a second.
            within_s: By when it must hold, which is told of as a fault if it does not.

        Raises:
            UnknownName: If the daemon looks after one service alone.
        """
        return self._asked("PUT", "/v1/node/power", {"power_w": power_w, "within_s": within_s})

    def stop(self) -> Answer:
        """End the daemon; it restores the board."""
        return self._asked("POST", "/v1/stop", {})

    def close(self) -> None:
        """End every `follow`, from whichever thread."""
        self._closed.set()
        # A copy, for the thread that follows takes its socket out meanwhile. Shut down and not closed: a close does not
        # wake who waits in recv(2).
        for each in tuple(self._open):
            with suppress(OSError):
                each.shutdown(sockets.SHUT_RDWR)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: types.TracebackType | None
    ) -> None:
        self.close()

    def _asked(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        line = self._dial(self._timeout_s)
        with closing(line), self._translated():
            answer = self._sent(line, method, path, body)
            return self._document(answer.status, _whole(answer))

    def _stream(self, path: str, after: int | None) -> Iterator[tuple[str, Any]]:
        line = self._dial(_SILENT_S)
        known = {}
        if after is not None:
            known["Last-Event-ID"] = str(after)
        with closing(line), self._translated():
            answer = self._sent(line, "GET", path, None, {"Accept": "text/event-stream", **known})
            if answer.status != 200:
                self._document(answer.status, _whole(answer))
                return
            yield from self._until_closed(line.sock, _messages(answer))

    def _until_closed(self, sock: sockets.socket, messages: Iterator[tuple[str, str]]) -> Iterator[tuple[str, Any]]:
        self._open.add(sock)
        try:
            for name, data in messages:
                yield name, json.loads(data)
        except (OSError, http.client.HTTPException):
            if not self._closed.is_set():
                raise
        finally:
            self._open.discard(sock)

    def _sent(
        self,
        line: http.client.HTTPConnection,
        method: str,
        path: str,
        body: Mapping[str, Any] | None,
        headers: Mapping[str, str] = types.MappingProxyType({}),
    ) -> http.client.HTTPResponse:
        written = {}
        if body is not None:
            written["Content-Type"] = "application/json"
        if self._token is not None:
            written["Authorization"] = f"Bearer {self._token}"
        data = None if body is None else json.dumps(body).encode()
        with suppress(BrokenPipeError, ConnectionResetError):  # it was refused before all was sent; the answer says why
            line.request(method, f"{self._base}{path}", data, {**written, **headers})
        return line.getresponse()

    def _document(self, status: int, data: bytes) -> dict[str, Any]:
        found = json.loads(data)
        if not isinstance(found, dict):
            # `_Translated` says of it that no daemon answers here.
            raise ValueError(f"{found!r}")
        if status >= 400:
            raise _error(status, found)
        return found

    def _read(self, kind: type[Shown], document: Any) -> Shown:
        try:
            return typing.cast("Shown", _value(kind, document))
        except (TypeError, AttributeError) as error:
            raise DeviceError(f"what answers at {self._where} is no daemon of this version: {error}") from error

    def _translated(self) -> "_Translated":
        return _Translated(self._where, self._timeout_s)


def default_socket() -> Path:
    """Return where this user's daemon listens, or else the machine's."""
    return socket_path(DAEMON_SOCKET)


def _whole_name(profile: str | Path) -> str:
    """Return a profile's absolute path if it is a file; else its name as given."""
    if not isinstance(profile, str | os.PathLike):
        raise InvalidInput(f"{str(profile)[:60]} is no profile; name a file or <device>/<workload>")
    path = Path(profile)
    try:
        if path.is_file():
            # The daemon works in another folder than whoever asks.
            return str(path.absolute())
        return str(profile)
    except OSError as error:
        shown = str(profile)
        if len(shown) > 60:
            shown = f"{shown[:57]}..."
        raise InvalidInput(f"{shown!r} is no profile: {error.strerror}; name a file or <device>/<workload>") from error


class _Translated:
    """Turns what a connection fails with into the project's errors."""

    def __init__(self, where: str, timeout_s: float) -> None:
        self._where = where
        self._timeout_s = timeout_s

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: types.TracebackType | None
    ) -> None:
        if error is not None and (words := self._words(error)) is not None:
            refused = isinstance(error, PermissionError)
            raise (PermissionDenied if refused else DeviceError)(words) from error

    def _words(self, error: BaseException) -> str | None:
        where = self._where
        # The first that fits speaks, and OSError is an ancestor of all above it: the narrow ones stand first.
        words: dict[tuple[type[BaseException], ...], str] = {
            (PermissionError,): f"this user may not open {where}; join the group its daemon allows, or ask as root",
            (ssl.SSLCertVerificationError,): f"the certificate of {where} is not trusted; name it as the authority",
            (
                FileNotFoundError,
                ConnectionRefusedError,
            ): f"no daemon runs at {where}; start one: polythrottle daemon run",
            (BlockingIOError,): f"the daemon at {where} is busy: too many wait at its door; ask again later",
            (TimeoutError,): f"the daemon at {where} does not answer",
            (OSError,): f"the daemon at {where} cannot be reached: {error}",
            (http.client.HTTPException, ValueError): f"what answers at {where} is no polythrottle daemon",
        }
        return next((text for kinds, text in words.items() if isinstance(error, kinds)), None)


class _UnixLine(http.client.HTTPConnection):
    """HTTP over a Unix socket."""

    def __init__(self, path: Path, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = path
        self._patience_s = timeout_s

    def connect(self) -> None:
        """Connect to the socket instead of to a host."""
        line = sockets.socket(sockets.AF_UNIX, sockets.SOCK_STREAM)
        try:
            _connect(line, os.fspath(self._path), self._patience_s)
            line.settimeout(self._patience_s)
        except BaseException:
            line.close()
            raise
        self.sock = line


def _connect(line: sockets.socket, path: str, patience_s: float) -> None:
    """Connect; a daemon with too many at its door refuses for a moment, for which a timeout is no help (unix(7))."""
    clock = SystemClock()
    ends_s = clock.now() + min(_AT_THE_DOOR_S, patience_s)
    line.settimeout(0.0)
    while True:
        try:
            line.connect(path)
            return
        except BlockingIOError:
            if clock.now() > ends_s:
                raise
            clock.sleep(0.01)


def _unix(path: Path) -> Callable[[float], http.client.HTTPConnection]:
    return lambda timeout_s: _UnixLine(path, timeout_s)


def _tcp(url: str, authority: Path | None) -> Callable[[float], http.client.HTTPConnection]:
    try:
        parts = urlsplit(url)
        host = parts.hostname
        port = parts.port
    except ValueError:
        host = port = None
    if host is None or not _HOST.fullmatch(host) or parts.scheme not in ("http", "https") or parts.path.strip("/"):
        raise InvalidInput(f"{url!r} is not the address of a daemon; write for example http://127.0.0.1:8080")
    if parts.scheme == "http":
        return lambda timeout_s: http.client.HTTPConnection(host, port, timeout=timeout_s)
    try:
        trusted = ssl.create_default_context(cafile=None if authority is None else os.fspath(authority))
    except (OSError, ssl.SSLError) as error:
        raise errors.BadFile(f"{authority} is not a certificate in PEM: {error}") from error
    return lambda timeout_s: http.client.HTTPSConnection(host, port, timeout=timeout_s, context=trusted)


def _whole(answer: http.client.HTTPResponse) -> bytes:
    """Return the body of an answer, unless it ends early or never."""
    data = answer.read(_MOST_BYTES)
    if answer.length or len(data) >= _MOST_BYTES:
        raise http.client.IncompleteRead(data[:100])
    return data


def _messages(answer: http.client.HTTPResponse) -> Iterator[tuple[str, str]]:
    """Yield name and data of each server-sent event (WHATWG HTML, 9.2.6); comments are passed over."""
    name = "message"
    data = list[str]()
    while line := answer.readline():
        field, _, value = line.decode().rstrip("\r\n").partition(":")
        # One blank after the colon is the format's, any further one is data.
        value = value.removeprefix(" ")
        if not line.strip():
            if data:
                yield name, "\n".join(data)
            name = "message"
            data = []
        elif field == "event":
            name = value
        elif field == "data":
            data.append(value)


def _error(status: int, document: Mapping[str, Any]) -> PolythrottleError:
    """Return the error an answer tells of, as the class it had in the daemon."""
    told = document.get("error")
    if isinstance(told, dict):
        known = told
    else:
        known = {}
    words = str(known.get("words", f"the daemon answered {status}"))
    return error_named(str(known.get("kind")), words)


def _value(kind: Any, found: Any) -> Any:
    """Return a value of a dataclass from its document; fields it does not know are passed over."""
    if is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        known = {each.name: _value(hints[each.name], found[each.name]) for each in fields(kind) if each.name in found}
        return kind(**known)  # type: ignore[operator]
    inner = typing.get_args(kind)
    if typing.get_origin(kind) is tuple:
        return tuple(_value(inner[0], each) for each in found)
    if isinstance(found, dict) and (values := [each for each in inner if is_dataclass(each)]):
        return _value(values[0], found)
    return found
