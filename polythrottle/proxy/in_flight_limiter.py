"""The proxy itself: it listens, lets requests go to the server within the limit, and has the limit changed.

Its own resources lie below ``/polythrottle/``: ``in_flight`` (GET, and PUT ``{"limit": 16}``), ``metrics``, and
``prompts``, a stream of events. Whatever else is asked for is the server's, and each POST counts as one request in
flight.
"""

import asyncio
import gc
import json
import os
import resource
import signal
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from polythrottle.domain.errors import DeviceError, InvalidInput
from polythrottle.proxy.answers import Counted
from polythrottle.proxy.relay import ClientConnection, Exchange, Request
from polythrottle.proxy.traffic import KIND, Admission, Figures, Gauges, InFlight, Prompts
from polythrottle.storage.untrusted import MALFORMED, is_address, is_loopback, printable

OWN = "/polythrottle/"
LIMIT_PATH = f"{OWN}in_flight"
METRICS_PATH = f"{OWN}metrics"
PROMPTS_PATH = f"{OWN}prompts"
_BACKLOG = 2048
_SWEEP_S = 5.0
_PATIENCE_S = {"request": 120.0, "rest": 60.0, "read": 60.0}
"""For so long a client is waited for: for its next request, the rest of one, to read what it asked for."""
_ANY = ("0.0.0.0", "::")
"""Hosts to listen on that stand for every address of this machine."""
_SPARE_FILES = 64
_FOLLOWERS_MOST = 16
_APART_S = 0.02
"""Events about prompts come no closer than this."""
_BEAT_S = 0.2
"""So often one comes while anything is under way; ten times as seldom while nothing is."""
_OK = 200
_REDIRECT = 300


@dataclass(frozen=True)
class ProxyOptions:
    """How a proxy works.

    Args:
        server: ``http`` or ``https``, with host and port; a path of ``/v1`` is left out.
        listen: Host and port; port 0 is any that is free.
        limit: How many requests may be under way at once.
        most_waiting: How many may be in line.
        grace_s: How long those under way may go on once the proxy is to end.
    """

    server: str
    listen: str
    limit: int
    most_waiting: int = 1024
    grace_s: float = 30.0


class Server:
    """The server behind the proxy; its name is looked up again only where nobody answers.

    Args:
        address: As `ProxyOptions.server`.

    Raises:
        InvalidInput: If it is no such address.
    """

    def __init__(self, address: str) -> None:
        form = "write http://host:port"
        try:
            parts = urlsplit(address)
            port = parts.port
        except ValueError:
            raise InvalidInput(f"{printable(address)[:80]!r} is no server; {form}") from None
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.username is not None or parts.query:
            raise InvalidInput(f"{printable(address)[:80]!r} is no server; {form}")
        if parts.path.rstrip("/") not in ("", "/v1"):
            raise InvalidInput(f"{printable(address)[:80]!r} has a path; {form}, which paths are appended to")
        self._name = parts.hostname
        self._port = port or {"http": 80, "https": 443}[parts.scheme]
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._found: list[tuple[int, Any]] = []
        bracketed = f"[{self._name}]" if ":" in self._name else self._name
        self.where = f"{bracketed}:{self._port}"
        self.host = self.where.encode("idna" if not self.where.isascii() else "ascii")

    def is_at(self, host: str, port: int) -> bool:
        """Return whether this server is what listens there, as far as the names tell: requests would go in a circle."""
        alike = self._name == host or (host in _ANY and is_loopback(self._name))
        local = "localhost" in (self._name, host) and is_loopback(self._name) and is_loopback(host)
        return port == self._port and (alike or local)

    async def connect(self, protocol: asyncio.BufferedProtocol) -> None:
        """Open a connection.

        Raises:
            OSError: If nobody answers.
        """
        for known in (True, False):
            if not known or not self._found:
                await self._look_up()
            failure: OSError | None = None
            for family, address in self._found:
                try:
                    await self._connect(protocol, family, address)
                except OSError as error:
                    failure = failure or error
                else:
                    return
        raise failure or OSError("it has no address")

    async def _look_up(self) -> None:
        loop = asyncio.get_running_loop()
        entries = await loop.getaddrinfo(self._name, self._port, type=socket.SOCK_STREAM)
        self._found = [(family, address) for family, _, _, _, address in entries]

    async def _connect(self, protocol: asyncio.BufferedProtocol, family: int, address: Any) -> None:
        loop = asyncio.get_running_loop()
        connection = socket.socket(family, socket.SOCK_STREAM)
        try:
            connection.setblocking(False)
            await loop.sock_connect(connection, address)
        except BaseException:
            connection.close()
            raise
        name = self._name if self._tls is not None else None
        await loop.create_connection(lambda: protocol, sock=connection, ssl=self._tls, server_hostname=name)


class Proxy:
    """Requests of many clients to one server, at most so many under way.

    Args:
        options: How it works.

    Raises:
        InvalidInput: If they cannot be met.
    """

    def __init__(self, options: ProxyOptions) -> None:
        self.figures = Figures()
        self.in_flight: InFlight[Exchange] = InFlight(options.limit, options.most_waiting)
        self.port = 0
        self._options = options
        self._server = Server(options.server)
        self._listen = _host_and_port(options.listen)
        if self._server.is_at(*self._listen):
            raise InvalidInput(
                f"{self._server.where} is where the proxy itself would listen; give it another address with --listen"
            )
        self._prompts: Prompts[Exchange] = Prompts()
        self._followers: set[ClientConnection] = set()
        self._telling: asyncio.TimerHandle | None = None
        self._told_s = 0.0
        self._connections: set[ClientConnection] = set()
        self._exchanges: set[Exchange] = set()
        self._ending = False
        self._idle: asyncio.Event | None = None
        self._room = 0
        self._listener: asyncio.AbstractServer | None = None

    @property
    def where(self) -> str:
        """Where it listens: host and port."""
        host = self._listen[0]
        return f"[{host}]:{self.port}" if ":" in host else f"{host}:{self.port}"

    async def open(self) -> None:
        """Begin to listen.

        Raises:
            DeviceError: If it cannot.
        """
        self._idle = asyncio.Event()
        # Each request takes two: the client's connection and the server's.
        self._room = (_most_files() - _SPARE_FILES) // 2
        host, port = self._listen
        loop = asyncio.get_running_loop()
        try:
            self._listener = await loop.create_server(
                lambda: ClientConnection(self), host, port, backlog=_BACKLOG, reuse_address=True
            )
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
            # asyncio puts the address before the reason once more.
            if error.errno is not None and error.errno > 0:
                reason = os.strerror(error.errno).lower()
            raise DeviceError(f"the proxy cannot listen on {self._options.listen}: {reason}") from error
        self.port = self._listener.sockets[0].getsockname()[1]
        loop.call_later(_SWEEP_S, self._sweep, loop)

    async def close(self) -> None:
        """End: nobody new is let in, and those under way may go on for a while."""
        self._ending = True
        if self._listener is not None:
            self._listener.close()
        for exchange in self.in_flight.clear_line():
            exchange.turn_away(503, "the proxy ends")
        for connection in tuple(self._connections):
            if connection.exchange is None:
                connection.close()
        if self._exchanges and self._idle is not None:
            self._idle.clear()
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._idle.wait(), self._options.grace_s)
        for connection in tuple(self._connections):
            connection.close()
        await asyncio.sleep(0)  # what is closed is closed in the loop's next turn

    def set_limit(self, limit: object) -> None:
        """Change how many requests may be under way at once; those in line that have room now start.

        Raises:
            InvalidInput: If it is no limit.
        """
        for exchange in self.in_flight.set_limit(limit):  # type: ignore[arg-type]
            self._start(exchange)

    # What connections tell.

    def opened(self, connection: ClientConnection) -> None:
        """Take note of a new connection; one too many is told so."""
        self._connections.add(connection)
        if len(self._connections) > self._room:
            connection.refuse(503, f"the proxy has {self._room} connections, as many as its open files allow")

    def closed(self, connection: ClientConnection) -> None:
        """Take note that one is closed."""
        self._connections.discard(connection)
        self._followers.discard(connection)

    def asked(self, connection: ClientConnection, request: Request) -> None:
        """Serve a request."""
        if request.target.startswith(OWN.encode()):
            self._own(connection, request)
            return
        if not request.target.startswith(b"/"):
            connection.refuse(400, "the proxy takes paths, not whole addresses")
            return
        exchange = Exchange(
            request, connection, self, came_s=asyncio.get_running_loop().time(), bounded=request.method == b"POST"
        )
        connection.exchange = exchange
        self._exchanges.add(exchange)
        if self._ending:
            exchange.turn_away(503, "the proxy ends")
            return
        if exchange.bounded:
            self._prompts.came(exchange, request.body, exchange.came_s)
            self._tell_soon(_APART_S)
        admission = self.in_flight.enter(exchange) if exchange.bounded else Admission.RUNS
        if admission is Admission.REFUSED:
            under_way = f"{self.in_flight.running} requests are under way and {self.in_flight.waiting} in line"
            exchange.turn_away(429, f"{under_way}, which is all the room there is; try again later")
        elif admission is Admission.RUNS:
            self._start(exchange)

    def _start(self, exchange: Exchange) -> None:
        now_s = asyncio.get_running_loop().time()
        if exchange.bounded:
            self.figures.started(now_s - exchange.came_s)
            self._prompts.sent(exchange)
        exchange.start(self._server)

    # What exchanges tell.

    def began(self, exchange: Exchange) -> None:
        """Take note that the first piece of a stream has come."""
        self._prompts.began(exchange, asyncio.get_running_loop().time())
        self._tell_soon(_APART_S)

    def passed(self, pieces: int) -> None:
        """Count pieces of streams that were passed on."""
        self.figures.pieces += pieces
        self._prompts.passed(pieces)

    def over(self, exchange: Exchange, outcome: str) -> None:
        """Take note that a request has ended."""
        self._exchanges.discard(exchange)
        if exchange.bounded:
            for each in self.in_flight.leave(exchange):
                self._start(each)
            self.figures.ended(outcome)
            counted = None
            if outcome == "answered" and _OK <= exchange.status < _REDIRECT:
                counted = exchange.tokens.counted()
                self._note(exchange, counted)
            self._prompts.ended(exchange, exchange.tokens.pieces, counted)
        if not self._exchanges and self._idle is not None:
            self._idle.set()

    def _note(self, exchange: Exchange, counted: Counted) -> None:
        tokens = exchange.tokens
        self.figures.answered(
            whole_s=asyncio.get_running_loop().time() - exchange.came_s,
            first_s=None if tokens.first_s is None else tokens.first_s - exchange.came_s,
            per_token_s=tokens.per_token_s(counted.completion),
            prompt=counted.prompt,
            completion=counted.completion,
            by_server=counted.by_server,
        )

    # Its own resources.

    def _own(self, connection: ClientConnection, request: Request) -> None:
        path = request.target.decode("latin-1").partition("?")[0]
        if path == METRICS_PATH and request.method == b"GET":
            connection.answer(_OK, self.figures.page(self._gauges()), keeps=request.keeps, kind=KIND)
        elif path == PROMPTS_PATH and request.method == b"GET":
            self._follow(connection)
        elif path == LIMIT_PATH and request.method == b"GET":
            connection.answer(_OK, self._shown(), keeps=request.keeps)
        elif path == LIMIT_PATH and request.method == b"PUT":
            self._set(connection, request)
        elif path in (LIMIT_PATH, METRICS_PATH, PROMPTS_PATH):
            connection.refuse(405, f"{path} is read with GET{' and set with PUT' * (path == LIMIT_PATH)}")
        else:
            connection.refuse(404, f"the proxy has {LIMIT_PATH}, {METRICS_PATH} and {PROMPTS_PATH}")

    def _follow(self, connection: ClientConnection) -> None:
        """Have a client told of prompts from now on."""
        if len(self._followers) >= _FOLLOWERS_MOST:
            connection.refuse(503, f"{_FOLLOWERS_MOST} clients follow {PROMPTS_PATH}, as many as may")
            return
        connection.begin_events()
        self._followers.add(connection)
        self._tell_soon(_APART_S)

    def _tell_soon(self, apart_s: float) -> None:
        """Have followers told, so long after the last time."""
        if not self._followers or self._ending:
            return
        loop = asyncio.get_running_loop()
        due_s = max(self._told_s + apart_s, loop.time())
        if self._telling is not None:
            if self._telling.when() <= due_s:
                return
            self._telling.cancel()
        self._telling = loop.call_at(due_s, self._tell)

    def _tell(self) -> None:
        now_s = asyncio.get_running_loop().time()
        self._telling = None
        self._told_s = now_s
        line = self._prompts.line(now_s)
        for connection in tuple(self._followers):
            connection.event(line)
        self._tell_soon(_BEAT_S if self._prompts.under_way else 10 * _BEAT_S)

    def _set(self, connection: ClientConnection, request: Request) -> None:
        if not _of_this_machine(connection.peer, request):
            connection.refuse(403, "the limit is set from the machine that the proxy runs on")
            return
        try:
            found = json.loads(request.body)
            self.set_limit(found["limit"])
        except InvalidInput as error:
            connection.refuse(400, str(error))
        except MALFORMED:
            connection.refuse(400, 'write for example {"limit": 16}')
        else:
            connection.answer(_OK, self._shown(), keeps=request.keeps)

    def _shown(self) -> dict[str, int]:
        now = self._gauges()
        return {"limit": now.limit, "running": now.running, "waiting": now.waiting}

    def _gauges(self) -> Gauges:
        known = self.in_flight
        return Gauges(known.limit, known.running, known.waiting, self.figures.pieces)

    def _sweep(self, loop: asyncio.AbstractEventLoop) -> None:
        """Close connections whose clients have kept the proxy waiting for too long."""
        now_s = loop.time()
        for connection in tuple(self._connections):
            awaited = connection.waited_for
            if awaited and now_s - connection.since_s > _PATIENCE_S[awaited]:
                if awaited == "rest":
                    connection.refuse(408, f"the rest of the request did not come in {_PATIENCE_S[awaited]:g} s")
                elif awaited == "request":
                    connection.close()
                else:
                    connection.abort()
        if not self._ending:
            loop.call_later(_SWEEP_S, self._sweep, loop)


def _of_this_machine(peer: str, request: Request) -> bool:
    """Return whether somebody on this machine asks, and no page of a browser that was told a name for this address."""
    host = dict(request.headers).get(b"host", b"").decode("latin-1")
    name = urlsplit(f"//{host}").hostname or ""
    own = is_loopback(peer.partition("%")[0].removeprefix("::ffff:"))
    return own and (name == "localhost" or is_address(name))


def _host_and_port(text: str) -> tuple[str, int]:
    try:
        parts = urlsplit(f"//{text}")
        port = parts.port
    except ValueError:
        port = None
        parts = urlsplit("")
    if not parts.hostname or port is None or parts.path or parts.username is not None:
        raise InvalidInput(
            f"{printable(text)[:60]!r} is no address to listen on; write host:port such as 127.0.0.1:8001"
        )
    return parts.hostname, port


def _most_files() -> int:
    """Return how many files may be open, having raised the soft limit to the hard one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
    return 1 << 20 if soft == resource.RLIM_INFINITY else soft


def run_proxy(
    options: ProxyOptions, told: Callable[[Proxy], None], complain: Callable[[str], None]
) -> tuple[Proxy, int]:
    """Serve until a signal comes.

    Args:
        options: How.
        told: Called once the proxy listens.
        complain: Called with each fault of the proxy's own, in one line.

    Returns:
        The proxy, for what it has counted, and the number of the signal.

    Raises:
        InvalidInput: If the options cannot be met.
        DeviceError: If it cannot listen.
    """
    proxy = Proxy(options)
    number = asyncio.run(_served(proxy, told, complain))
    return proxy, number


async def _served(proxy: Proxy, told: Callable[[Proxy], None], complain: Callable[[str], None]) -> int:
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: complain(_fault(context)))
    signals: asyncio.Queue[int] = asyncio.Queue()
    for each in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        loop.add_signal_handler(each, signals.put_nowait, int(each))
    await proxy.open()
    # What is there now lives as long as the proxy: looking through it again and again would hold up tokens.
    gc.collect()
    gc.freeze()
    told(proxy)
    number = await signals.get()
    closing = loop.create_task(proxy.close())
    # A second signal is somebody who does not want to wait for the requests under way.
    again = loop.create_task(signals.get())
    await asyncio.wait({closing, again}, return_when=asyncio.FIRST_COMPLETED)
    again.cancel()
    closing.cancel()
    return number


def _fault(context: dict[str, Any]) -> str:
    error = context.get("exception")
    return printable(f"{context.get('message', 'fault')}: {type(error).__name__ if error else ''} {error or ''}")[:300]
