"""One connection: uvicorn's HTTP/1.1, with an end to everything a client may draw out."""

import asyncio
import json
import logging
from dataclasses import dataclass, field
from typing import Any

import h11
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from polythrottle.daemon.web.rights import Doorkeeper, Role, Visitor

CONNECTIONS_MOST = 64
TCP_MOST = 32
"""Connections over TCP, counted apart: anybody who reaches the port may open them, and a token is shown only later."""
_KEPT_FREE = 8
"""Of the connections, for root and the daemon's own user, so that nobody else can lock them out."""
_STRANGERS_MOST = 8
"""Connections that wait to be told that they may not; beyond that they are not even told."""
REQUEST_S, STRANGER_S, STALLED_S, IDLE_S = 10.0, 2.0, 10.0, 30
"""How long a request may take to arrive, a stranger's, how long an answer may wait to be taken, a line lie idle."""

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
    door: Doorkeeper
    state: ServerState = field(default_factory=ServerState)
    strangers: int = 0
    over_tcp: int = 0

    def unix(self) -> "Connection":
        """Return what handles the next connection of the Unix socket."""
        return Connection(self, tcp=False)

    def tcp(self) -> "Connection":
        """Return what handles the next connection over TCP."""
        return Connection(self, tcp=True)

    def room(self, visitor: Visitor) -> bool:
        """Return whether one more may be served."""
        if visitor.tcp:
            return self.over_tcp < TCP_MOST
        if visitor.role is Role.NOTHING:
            return self.strangers < _STRANGERS_MOST
        most = CONNECTIONS_MOST if visitor.trusted else CONNECTIONS_MOST - _KEPT_FREE
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
        body = _body("DeviceError", "too many are connected to the daemon; ask again later")
        transport.write(_FULL % (len(body), body))
        transport.close()


def _body(kind: str, words: str) -> bytes:
    told: dict[str, Any] = {"error": {"kind": kind, "words": words}}
    return json.dumps(told).encode()
