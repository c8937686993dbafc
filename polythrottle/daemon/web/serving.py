"""The thread that serves the API: its sockets, its event loop, and the end of both."""

import asyncio
import logging
import socket
import ssl
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from types import TracebackType
from typing import Any

from typing_extensions import Self
from uvicorn.config import Config

from polythrottle.daemon.desk import Desk
from polythrottle.daemon.web.answering import Api
from polythrottle.daemon.web.app import build_app
from polythrottle.daemon.web.connection import IDLE_S, LOG, Connection, House
from polythrottle.daemon.web.gate import HEAD_BYTES_MOST
from polythrottle.daemon.web.listening import BACKLOG, remove, tcp_socket, unix_socket
from polythrottle.daemon.web.options import WebOptions
from polythrottle.daemon.web.rights import Doorkeeper
from polythrottle.daemon.web.shelf import Shelf

_GRACE_S = 1.0
_SHAKE_S, _SHAKES_MOST = 5.0, 16
"""How long a client over TLS may take to shake hands, and how many may at once; others wait in the backlog."""


class Server:
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

    def __init__(self, desk: Desk, options: WebOptions) -> None:
        self._path = options.socket
        self._inode: int | None = None
        self._loop = asyncio.new_event_loop()
        self._aside = ThreadPoolExecutor(1, "polythrottle-web-aside")
        self._shelf = Shelf(desk, self._loop)
        self._servers: list[asyncio.Server] = []
        self._listening: list[socket.socket] = []
        self._accepting: asyncio.Task[None] | None = None
        try:
            self._house = self._furnished(Api(desk, self._shelf, options, self._aside), options)
            self._open(options)
        except BaseException:
            self._let_go()
            raise
        self._thread = threading.Thread(target=self._loop.run_forever, name="polythrottle-web", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int | None:
        """The port it listens on; None without TCP."""
        return self._listening[1].getsockname()[1] if len(self._listening) > 1 else None

    def close(self) -> None:
        """Stop listening, let answers under way end, and take the socket away; again it does nothing."""
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

    def _furnished(self, api: Api, options: WebOptions) -> House:
        # uvicorn warns of each request that is none: its sender is told, and could fill the log else
        logging.getLogger(LOG).setLevel(logging.ERROR)
        config = Config(
            build_app(api),
            log_config=None,
            lifespan="off",
            ws="none",
            proxy_headers=False,
            access_log=False,
            timeout_keep_alive=IDLE_S,
            h11_max_incomplete_event_size=HEAD_BYTES_MOST,
        )
        return House(config, Doorkeeper.of(options.readers, options.writers))

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
        loop, room = asyncio.get_running_loop(), asyncio.Semaphore(_SHAKES_MOST)
        shaking = set[asyncio.Task[None]]()
        while True:
            await room.acquire()
            try:
                line, _ = await loop.sock_accept(listening)
            except OSError:  # it has gone again, or this process has no more files
                room.release()
                await asyncio.sleep(1.0)
                continue
            task = loop.create_task(self._shake(line, secured))
            shaking.add(task)
            task.add_done_callback(shaking.discard)
            task.add_done_callback(lambda _: room.release())

    async def _shake(self, line: socket.socket, secured: ssl.SSLContext) -> None:
        with suppress(OSError):  # what goes wrong while shaking hands, TLS' own errors included
            await asyncio.get_running_loop().connect_accepted_socket(
                self._house.tcp, line, ssl=secured, ssl_handshake_timeout=_SHAKE_S
            )

    async def _wound_up(self) -> None:
        for server in self._servers:
            server.close()
        self._shelf.close()
        for connection in list(self._house.state.connections):
            connection.shutdown()
        if tasks := list(self._house.state.tasks):
            await asyncio.wait(tasks, timeout=_GRACE_S)
        for connection in list(self._house.state.connections):
            connection.transport.abort()
        rest = [each for each in asyncio.all_tasks() if each is not asyncio.current_task()]
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)
        await asyncio.sleep(0)  # so that closed transports let go of their sockets

    def _let_go(self) -> None:
        self._shelf.close()
        if self._inode is not None:
            remove(self._path, self._inode)
        for listening in self._listening:
            listening.close()
        self._aside.shutdown(wait=False, cancel_futures=True)
        self._loop.close()


def serve(desk: Desk, options: WebOptions) -> Server:
    """Serve the API from a thread of its own; `Server` says what can be wrong with the options."""
    return Server(desk, options)
