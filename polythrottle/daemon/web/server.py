"""The thread that serves the API: its sockets, its limits on connections, its event loop, and the end of all three."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import ssl
import threading
import typing
from collections.abc import Callable, Coroutine, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import h11
from starlette.types import ASGIApp
from typing_extensions import Self
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from polythrottle.actuation.server.unix_socket import check_folder, check_path, listen_at
from polythrottle.daemon.loop.mailbox import Mailbox
from polythrottle.daemon.web.access import HEAD_BYTES_MOST, AccessControl, Role, Tcp, Visitor, WebOptions
from polythrottle.daemon.web.event_stream import StatusCache
from polythrottle.daemon.web.handlers import Api
from polythrottle.daemon.web.routes import build_app
from polythrottle.domain.backports import dismiss
from polythrottle.domain.errors import DeviceError, InvalidInput, StorageError

# The sockets the API listens at: made, permitted, and taken away.

BACKLOG = 128


def unix_socket(path: Path, groups: frozenset[int]) -> socket.socket:
    """Return a listening socket that those may open who may be let in; who they are is looked at again.

    Raises:
        InvalidInput: If its path is too long.
        DeviceError: If another daemon answers there.
        StorageError: If it cannot be made, or something else is there.
        PermissionDenied: If others may write to its folder.
    """
    check_path(path)
    try:
        path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        check_folder(path)
        _clear(path)
        listening = listen_at(path, BACKLOG, lambda made: _permit(made, groups))
    except OSError as error:
        raise StorageError(f"the socket {path} cannot be made: {error.strerror or error}") from error
    listening.setblocking(False)
    return listening


def _clear(path: Path) -> None:
    """Take away the socket of a daemon that has died; a living one's stays."""
    if not path.exists():
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(2.0)
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            path.unlink(missing_ok=True)
            return
        # Too many are at its door, or it is busy: either way it lives.
        except (TimeoutError, socket.timeout, BlockingIOError):
            pass
    raise DeviceError(f"another daemon answers at {path}; end it with polythrottle daemon stop, or name another socket")


def _permit(path: Path, groups: frozenset[int]) -> None:
    """Let the groups open the socket: one through its own bits, several only through everybody's."""
    if not groups:
        return
    if len(groups) == 1:
        # Only root, and a member of the group, may hand a file to it (chown(2)); else the door alone decides.
        with suppress(PermissionError):
            os.chown(path, -1, next(iter(groups)))
            path.chmod(0o660)
            return
    path.chmod(0o666)


def tcp_socket(tcp: Tcp) -> socket.socket:
    """Return a listening socket.

    Raises:
        InvalidInput: If there is no such host, or it cannot be listened on there.
    """
    try:
        found = socket.getaddrinfo(tcp.host, tcp.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (socket.gaierror, UnicodeError) as error:
        raise InvalidInput(f"{tcp.option} {tcp.host}: {error}") from error
    family, kind, protocol, _, address = found[0]
    listening = socket.socket(family, kind, protocol)
    try:
        # Lines of the daemon before may still be in TIME_WAIT, which would keep this one from the port (socket(7)).
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.setblocking(False)
        listening.bind(address)
        listening.listen(BACKLOG)
    except OSError as error:
        listening.close()
        raise InvalidInput(f"{tcp.option} {tcp.host}:{tcp.port} cannot be listened on: {error.strerror}") from error
    return listening


def remove(path: Path, inode: int) -> None:
    """Take the socket's file away unless another daemon has put its own there."""
    with suppress(OSError):
        if path.lstat().st_ino == inode:
            path.unlink()


# One connection: uvicorn's HTTP/1.1, with an end to everything a client may draw out.

CONNECTIONS_MOST = 64
TCP_MOST = 32
"""Connections over TCP, counted apart: anybody who reaches the port may open them, and a token is shown only later."""
_KEPT_FREE = 8
"""Of the connections, for root and the daemon's own user, so that nobody else can lock them out."""
_STRANGERS_MOST = 8
"""Connections that wait to be told that they may not; beyond that they are not even told."""
REQUEST_S = 10.0
STRANGER_S = 2.0
STALLED_S = 10.0
IDLE_S = 30
"""How long a request may take to arrive, a stranger's, how long an answer may wait to be taken, a line lie idle."""

_GRACE_S = 1.0
"""How long answers under way may take yet when the server ends."""

LOG = "polythrottle.daemon.web"
"""Where a fault of the daemon's own is told of."""
_FULL = (
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nretry-after: 1\r\nconnection: close\r\n"
    b"content-length: %d\r\n\r\n%s"
)


@dataclass
class House:
    """What all connections share.

    Args:
        config: Of uvicorn.
        door: Tells who may come in.
        state: Of uvicorn: connections and tasks.
        strangers: How many connections wait to be told that they may not come in.
        over_tcp: How many connections came over TCP.
    """

    config: Config
    door: AccessControl
    state: ServerState = field(default_factory=ServerState)
    strangers: int = 0
    over_tcp: int = 0

    @classmethod
    def of(cls, app: ASGIApp, door: AccessControl) -> Self:
        """Return what the connections to an application share."""
        # uvicorn warns of each request that is none: its sender is told, and could fill the log else
        logging.getLogger(LOG).setLevel(logging.ERROR)
        config = Config(
            app,
            log_config=None,
            lifespan="off",
            ws="none",
            proxy_headers=False,
            access_log=False,
            timeout_keep_alive=IDLE_S,
            h11_max_incomplete_event_size=HEAD_BYTES_MOST,
        )
        return cls(config, door)

    async def emptied(self) -> None:
        """Let answers under way end, and close all connections."""
        for connection in list(self.state.connections):
            connection.shutdown()
        if tasks := list(self.state.tasks):
            await asyncio.wait(tasks, timeout=_GRACE_S)
        for connection in list(self.state.connections):
            connection.transport.abort()
        rest = [each for each in asyncio.all_tasks() if each is not asyncio.current_task()]
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)
        await asyncio.sleep(0)  # so that closed transports let go of their sockets

    def unix(self) -> Connection:
        """Return what handles the next connection of the Unix socket."""
        return Connection(self, tcp=False)

    def tcp(self) -> Connection:
        """Return what handles the next connection over TCP."""
        return Connection(self, tcp=True)

    def room(self, visitor: Visitor) -> bool:
        """Return whether one more may be served."""
        if visitor.tcp:
            return self.over_tcp < TCP_MOST
        if visitor.role is Role.NOTHING:
            return self.strangers < _STRANGERS_MOST
        if visitor.trusted:
            most = CONNECTIONS_MOST
        else:
            most = CONNECTIONS_MOST - _KEPT_FREE
        return len(self.state.connections) - self.strangers - self.over_tcp < most


class _Patience:
    """A time after which a line is cut, unless it is ended before."""

    def __init__(self) -> None:
        self._timer: asyncio.TimerHandle | None = None

    @property
    def runs(self) -> bool:
        """Whether it has begun and not ended."""
        return self._timer is not None

    def begin(self, line: asyncio.Transport, patience_s: float) -> None:
        """Cut the line in so many seconds."""
        self.end()
        self._timer = asyncio.get_running_loop().call_later(patience_s, line.abort)

    def end(self) -> None:
        """Leave the line as it is."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class Connection(H11Protocol):
    """Reads requests of one peer, each within a time and a size."""

    def __init__(self, house: House, tcp: bool) -> None:
        super().__init__(house.config, house.state, {})
        self.access_log = False
        self.logger = logging.getLogger(LOG)
        self._house = house
        self._tcp = tcp
        self._stranger = False
        self._served = False
        self._late = _Patience()
        self._stalled = _Patience()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Look who it is."""
        visitor = Visitor(Role.NOTHING, tcp=True)
        if not self._tcp:
            visitor = self._house.door.admitted(transport.get_extra_info("socket"))
        if not self._house.room(visitor):
            self._turn_away(transport)
            return
        super().connection_made(transport)
        self._served = True
        self.app_state = {"visitor": visitor}
        self._stranger = visitor.role is Role.NOTHING and not visitor.tcp
        self._house.strangers += self._stranger
        self._house.over_tcp += self._tcp
        self._late.begin(self.transport, STRANGER_S if self._stranger else REQUEST_S)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget it."""
        self._late.end()
        self._stalled.end()
        if not self._served:
            return
        self._house.strangers -= self._stranger
        self._house.over_tcp -= self._tcp
        self._served = self._stranger = False
        super().connection_lost(exc)
        # uvicorn stops its timer only where a line ended in order; left, it holds a cut one for half a minute.
        self._unset_keepalive_if_required()

    def data_received(self, data: bytes) -> None:
        """Read on, and see to it that the request is whole in time."""
        if not self._served:
            return
        super().data_received(data)
        arriving = self.conn.their_state in (h11.IDLE, h11.SEND_BODY) and not self._answering()
        if not arriving and not self._stranger:
            self._late.end()
        elif not self._late.runs:
            self._late.begin(self.transport, REQUEST_S)

    def on_response_complete(self) -> None:
        """Give up on a peer that sends the rest of a body nobody reads."""
        super().on_response_complete()
        if self.conn.their_state is not h11.SEND_BODY:
            self._late.end()

    def send_400_response(self, msg: str) -> None:
        """Say that this is no HTTP, as JSON, and close."""
        if self.cycle is not None and not self.cycle.response_complete:  # in the middle of an answer
            self.transport.abort()
            return
        body = _body("InvalidInput", "this is no HTTP/1.1 request, or its head is larger than 16 KiB")
        headers = [("content-type", "application/json"), ("connection", "close"), ("content-length", str(len(body)))]
        for event in (h11.Response(status_code=400, headers=headers), h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def pause_writing(self) -> None:
        """Stop answering a peer that does not read, and drop it if it goes on like that."""
        super().pause_writing()
        self._stalled.begin(self.transport, STALLED_S)

    def resume_writing(self) -> None:
        """Go on answering."""
        super().resume_writing()
        self._stalled.end()

    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete and not self.cycle.more_body

    def _turn_away(self, transport: asyncio.Transport) -> None:
        body = _body("DeviceError", "too many are connected; ask again later")
        transport.write(_FULL % (len(body), body))
        transport.close()


def _body(kind: str, words: str) -> bytes:
    told: dict[str, Any] = {"error": {"kind": kind, "words": words}}
    return json.dumps(told).encode()


# The thread that serves the API: its sockets, its event loop, and the end of both.

SHAKE_S = 5.0
_SHAKES_MOST = 16
"""How long a client over TLS may take to shake hands, and how many may at once; others wait in the backlog."""


class LoopServer:
    """Serves from an event loop in a thread of its own, from `_begin` until `close`.

    Until it begins, who makes it runs the loop: whatever is wrong is then raised where it was asked for.
    """

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()

    def _begin(self, name: str) -> None:
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    async def _wound_up(self) -> None:
        """Stop listening, and let answers under way end; runs on the loop."""
        raise NotImplementedError

    def _let_go(self) -> None:
        """Give back what was held; the loop runs no more."""
        self._loop.close()

    def close(self) -> None:
        """Stop listening, let answers under way end, and give back what was held; again it does nothing."""
        if self._loop.is_closed():
            return
        asyncio.run_coroutine_threadsafe(self._wound_up(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._let_go()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class ApiServer(LoopServer):
    """An API that is served until `close`.

    Args:
        desk: Where the control loop is met.
        options: Where and to whom.

    Raises:
        InvalidInput: If a group is unknown, or where to listen is nowhere.
        DeviceError: If another daemon answers at the socket.
        StorageError: If the socket cannot be made.
        BadFile: If certificate, key or token cannot be used.
        PermissionDenied: If others could read the token, or listen at the socket first.
    """

    def __init__(self, desk: Mailbox, options: WebOptions) -> None:
        super().__init__()
        self._path = options.socket
        self._inode: int | None = None
        self._aside = ThreadPoolExecutor(1, "polythrottle-web-aside")
        self._shelf = StatusCache(desk, self._loop)
        self._shelves = [self._shelf]
        self._servers: list[asyncio.Server] = []
        self._listening: list[socket.socket] = []
        self._accepting: asyncio.Task[None] | None = None
        try:
            self._house = self._furnished(Api(desk, self._shelf, options, self._aside), options)
            self._open(options)
        except BaseException:
            self._let_go()
            raise
        self._begin("polythrottle-web")

    @property
    def port(self) -> int | None:
        """The port it listens on; None without TCP."""
        if len(self._listening) > 1:
            port: int = self._listening[1].getsockname()[1]
            return port
        return None

    def _furnished(self, api: Api, options: WebOptions) -> House:
        app = build_app(api, self._services(options))
        return House.of(app, AccessControl.of(options.readers, options.writers))

    def _services(self, options: WebOptions) -> Mapping[str, Api] | None:
        """Return the API of each of several services; None where there is one alone."""
        if options.node is None:
            return None
        return _ServiceApis(options, self._loop, self._aside, self._shelves)

    def _open(self, options: WebOptions) -> None:
        unix = unix_socket(options.socket, self._house.door.groups)
        self._listening.append(unix)
        self._inode = self._path.lstat().st_ino
        self._run(self._serve(unix, self._house.unix))
        if options.tcp is None:
            return
        secured = options.tcp.secured()
        self._listening.append(tcp_socket(options.tcp))
        if secured is None:
            self._run(self._serve(self._listening[1], self._house.tcp))
        else:
            self._accepting = self._loop.create_task(self._serve_secured(self._listening[1], secured))

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        self._loop.run_until_complete(work)

    async def _serve(self, listening: socket.socket, factory: Callable[[], Connection]) -> None:
        loop = asyncio.get_running_loop()
        self._servers.append(await loop.create_server(factory, sock=listening, backlog=BACKLOG))

    async def _serve_secured(self, listening: socket.socket, secured: ssl.SSLContext) -> None:
        """Accept only as many as may shake hands at once, for before that they are not among the counted."""
        loop = asyncio.get_running_loop()
        room = asyncio.Semaphore(_SHAKES_MOST)
        shaking: set[asyncio.Task[None]] = set()
        while True:
            await room.acquire()
            try:
                line, _ = await loop.sock_accept(listening)
            except OSError:  # it has gone again, or this process has no more files
                room.release()
                await asyncio.sleep(1.0)
                continue
            task = loop.create_task(self._shake(line, secured))
            # Held here, for the event loop itself holds tasks weakly and one could vanish (asyncio, create_task).
            shaking.add(task)
            task.add_done_callback(shaking.discard)
            task.add_done_callback(lambda _: room.release())

    async def _shake(self, line: socket.socket, secured: ssl.SSLContext) -> None:
        with suppress(OSError):  # what goes wrong while shaking hands, TLS' own errors included
            await asyncio.get_running_loop().connect_accepted_socket(
                self._house.tcp, line, ssl=secured, ssl_handshake_timeout=SHAKE_S
            )

    async def _wound_up(self) -> None:
        for server in self._servers:
            server.close()
        for shelf in self._shelves:
            shelf.close()
            shelf.desk.close()  # the loop has ended: whoever waits for it is told so, and not cut off
        await self._house.emptied()

    def _let_go(self) -> None:
        for shelf in self._shelves:
            shelf.close()
        if self._inode is not None:
            remove(self._path, self._inode)
        for listening in self._listening:
            listening.close()
        dismiss(self._aside)
        super()._let_go()


class _ServiceApis(typing.Mapping[str, Api]):
    """The API of each service there is at the moment; that of one that is gone is let go.

    After it was made it belongs to the thread of the event loop.

    Args:
        options: Of the server, with the doors of its services.
        loop: What is shown is filled on.
        aside: Does what takes long.
        shelves: Of all APIs, to be closed with the server.
    """

    def __init__(
        self,
        options: WebOptions,
        loop: asyncio.AbstractEventLoop,
        aside: ThreadPoolExecutor,
        shelves: list[StatusCache],
    ) -> None:
        self._options = options
        self._loop = loop
        self._aside = aside
        self._shelves = shelves
        self._made: dict[str, Api] = {}
        # Made now and not when first asked for: from here on each keeps its last seconds.
        for name in options.services:
            self.get(name)

    def __getitem__(self, name: str) -> Api:
        door = self._options.services.get(name)
        for gone in [each for each in self._made if each not in self._options.services]:
            self._let_go(gone)
        if door is None:
            raise KeyError(name)
        known = self._made.get(name)
        # By identity: a pod that went and came again under its name has another mailbox.
        if known is not None and known.desk is door.desk:
            return known
        if known is not None:
            self._let_go(name)
        shelf = StatusCache(door.desk, self._loop)
        self._shelves.append(shelf)
        own = replace(self._options, history=door.history, state=door.state, services={}, node=None)
        self._made[name] = Api(door.desk, shelf, own, self._aside)
        return self._made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(tuple(self._options.services))

    def __len__(self) -> int:
        return len(self._options.services)

    def _let_go(self, name: str) -> None:
        shelf = self._made.pop(name).shelf
        shelf.close()
        self._shelves.remove(shelf)


def serve(desk: Mailbox, options: WebOptions) -> ApiServer:
    """Serve the API from a thread of its own; `Server` says what can be wrong with the options."""
    return ApiServer(desk, options)
