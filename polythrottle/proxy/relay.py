"""Requests on their way: to the server once they may start, and the answer back, byte for byte as it comes.

The head of each message is h11's; bodies are passed on as they are, in the callback that has received them, so that a
token waits for no task and no queue. Every request has a connection of its own to the server: what ends there, or is
killed, ends for one client. A client's own connection carries its requests one after the other.
"""

import asyncio
import contextlib
import errno
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import h11

from polythrottle.proxy.answers import Body, Tokens, body_of
from polythrottle.storage.untrusted import printable

HEAD_BYTES = 64 << 10
"""A head may be this long: of a request or of an answer."""
_CONNECT_S = 10.0
_SERVER_FAULT = 500
_BUFFER = bytearray(256 << 10)
"""What is received lies here until the callback that received it returns; the loop runs one at a time."""
_ROOM = memoryview(_BUFFER)
# Source: RFC 9110, section 7.6.1: what concerns one connection is not passed on.
_OF_ONE_CONNECTION = (b"connection", b"keep-alive", b"proxy-connection", b"te", b"upgrade")
_ASKED_ANEW = (*_OF_ONE_CONNECTION, b"host", b"content-length", b"transfer-encoding", b"expect")


@dataclass(frozen=True)
class Request:
    """What a client has sent, whole.

    Args:
        method: In capital letters.
        target: Path and query.
        headers: As they came, names in small letters.
        body: All of it.
        old: Whether it is of HTTP/1.0, which knows no chunks.
        keeps: Whether the client wants to use its connection again.
    """

    method: bytes
    target: bytes
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes
    old: bool
    keeps: bool

    def sent_to(self, host: bytes) -> tuple[h11.Connection, bytes]:
        """Return what parses the answer, and the bytes to send to a server.

        Args:
            host: The server's, for its header.
        """
        headers = [(name, value) for name, value in self.headers if name not in _ASKED_ANEW]
        headers += [(b"host", host), (b"connection", b"close")]
        # Of methods that usually have a body some servers demand a length even where it is 0 (RFC 9110, section 8.6).
        if self.body or self.method in (b"POST", b"PUT", b"PATCH"):
            headers.append((b"content-length", b"%d" % len(self.body)))
        parser = h11.Connection(h11.CLIENT, max_incomplete_event_size=HEAD_BYTES)
        head = parser.send(h11.Request(method=self.method, target=self.target, headers=headers)) or b""
        if self.body:
            parser.send(h11.Data(data=self.body))
        parser.send(h11.EndOfMessage())
        if self.old:
            # h11 speaks HTTP/1.1 alone; asked in 1.0, the server sends no chunks, which such a client cannot read.
            line, rest = head.split(b"\r\n", 1)
            head = line.replace(b"HTTP/1.1", b"HTTP/1.0") + b"\r\n" + rest
        return parser, head + self.body


class Client(Protocol):
    """Where the answer goes."""

    @property
    def stalled(self) -> bool:
        """Whether it takes no more for now."""

    def forward(self, data: bytes) -> None:
        """Send bytes on."""

    def complete(self, keeps: bool) -> None:
        """Have the answer ended; ``keeps`` whether the connection can be used again."""

    def cut(self) -> None:
        """Have the answer broken off, after what was sent."""

    def refuse(self, status: int, why: str) -> None:
        """Answer with an error instead."""


class Observer(Protocol):
    """Whoever keeps count."""

    def began(self, exchange: "Exchange") -> None:
        """Take note that the first piece of a stream has come; called once, if at all."""

    def passed(self, pieces: int) -> None:
        """Count pieces of streams that were passed on."""

    def over(self, exchange: "Exchange", outcome: str) -> None:
        """Take note that a request has ended; called once."""


class Exchange(asyncio.BufferedProtocol):
    """One request and its answer.

    Args:
        request: To be sent.
        client: Where the answer goes.
        observer: Told how it ends.
        came_s: When the request was there, on the clock of the loop.
        bounded: Whether it counts as one in flight.
    """

    def __init__(self, request: Request, client: Client, observer: Observer, came_s: float, bounded: bool) -> None:
        self.tokens = Tokens()
        self.status = 0
        self.came_s = came_s
        self.bounded = bounded
        self._request: Request | None = request
        self._method = request.method
        self._keeps = request.keeps
        self._client: Client | None = client
        self._observer = observer
        self._loop = asyncio.get_running_loop()
        self._work: asyncio.Task[None] | None = None
        self._transport: asyncio.Transport | None = None
        self._parser: h11.Connection | None = None
        self._body: Body | None = None

    def start(self, server: "Upstream") -> None:
        """Connect to the server and send the request."""
        self._work = self._loop.create_task(self._connect(server))

    async def _connect(self, server: "Upstream") -> None:
        try:
            await asyncio.wait_for(server.connect(self), _CONNECT_S)
        except (OSError, asyncio.TimeoutError) as error:
            self._give_up(502, f"nothing answers at {server.where} ({_reason(error)})", "unreachable")
            return
        if self._transport is None or self._request is None:
            return
        self._parser, sent = self._request.sent_to(server.host)
        self._request = None  # a prompt may be megabytes, and its answer take minutes
        self._transport.write(sent)
        if self._client is not None and self._client.stalled:
            self.pause()

    def leave(self) -> None:
        """End it because the client has gone; the server learns of it by its closed connection."""
        self._end("left")

    def turn_away(self, status: int, why: str) -> None:
        """End it before it has begun, with an error."""
        self._give_up(status, why, "refused")

    def pause(self) -> None:
        """Receive nothing until `resume`, as the client takes nothing: the server must wait too."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()

    def resume(self) -> None:
        """Receive again."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    # What the event loop calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the connection; close it at once if the client has gone meanwhile."""
        assert isinstance(transport, asyncio.Transport)
        if self._client is None:
            transport.abort()
            return
        self._transport = transport

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return where bytes may be received."""
        return _ROOM

    def buffer_updated(self, nbytes: int) -> None:
        """Pass on what was received."""
        client = self._client
        if client is None:
            return
        # A copy: what the client does not take at once is kept, and the next connection writes over the buffer.
        data = bytes(_ROOM[:nbytes])
        body = self._body
        try:
            if body is None:
                data, body = self._opened(client, data)
                if body is None:
                    return
            taken = body.take(data)
        except (h11.RemoteProtocolError, ValueError) as error:
            self._give_up(502, f"the server does not answer in proper HTTP: {printable(str(error))}"[:300], "failed")
            return
        if taken < len(data):
            data = data[:taken]
        if data:
            client.forward(data)
            before = self.tokens.pieces
            self.tokens.take(data, self._loop.time())
            if not before and self.tokens.pieces:
                self._observer.began(self)
            self._observer.passed(self.tokens.pieces - before)
        if body.over:
            self._whole()

    def eof_received(self) -> bool:
        """Let the connection be closed."""
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """See whether the answer was whole."""
        if self._client is None:
            return
        if self._body is None:
            self._give_up(502, "the server closed the connection instead of answering", "failed")
        elif exc is None and not self._body.framed:
            self._whole()
        else:
            self._give_up(502, "", "cut")

    def _opened(self, client: Client, data: bytes) -> tuple[bytes, Body | None]:
        """Take in bytes of the head; returns those behind it and the body they begin, None if it is not there yet."""
        parser = self._parser
        if parser is None:  # a server that answers before it is asked
            raise ValueError("it answers before it is asked")
        parser.receive_data(data)
        event = parser.next_event()
        while isinstance(event, h11.InformationalResponse):
            event = parser.next_event()
        if not isinstance(event, h11.Response):
            return b"", None
        headers: Mapping[bytes, bytes] = dict(event.headers)
        self.status = event.status_code
        self._body = body = body_of(self._method, event.status_code, headers)
        self.tokens.streamed = headers.get(b"content-type", b"").lower().startswith(b"text/event-stream")
        self._keeps = self._keeps and body.framed
        client.forward(_head(event, b"transfer-encoding" in headers, self._keeps))
        rest = parser.trailing_data[0]
        self._parser = None
        return rest, body

    def _whole(self) -> None:
        client = self._client
        keeps = self._keeps
        self._end("answered" if self.status < _SERVER_FAULT else "failed")
        if client is not None:
            client.complete(keeps)

    def _give_up(self, status: int, why: str, outcome: str) -> None:
        """Tell the client that there is no answer, or no more of it."""
        client = self._client
        begun = bool(self.status)
        self._end("cut" if begun else outcome)
        if client is None:
            return
        if begun:
            client.cut()
        else:
            client.refuse(status, why)

    def _end(self, outcome: str) -> None:
        if self._client is None:
            return
        self._client = None
        if self._transport is not None:
            self._transport.abort()
            self._transport = None
        # Its own task is about to end anyway; cancelled here, it would not get to tell the client.
        elif self._work is not None and not self._work.done() and self._work is not _current():
            self._work.cancel()
        self._observer.over(self, outcome)


def _reason(error: Exception) -> str:
    if not isinstance(error, OSError) or isinstance(error, TimeoutError):
        return f"not within {_CONNECT_S:g} s"
    # asyncio puts words of its own in place of the system's; an error of names has numbers of its own.
    known = error.errno in errno.errorcode
    return printable(os.strerror(error.errno or 0) if known else error.strerror or str(error)).lower()


def _current() -> "asyncio.Task[None] | None":
    with contextlib.suppress(RuntimeError):
        return asyncio.current_task()
    return None


def _head(event: h11.Response, chunked: bool, keeps: bool) -> bytes:
    dropped = (*_OF_ONE_CONNECTION, b"content-length") if chunked else _OF_ONE_CONNECTION
    lines = [b"HTTP/1.1 %d %s" % (event.status_code, event.reason)]
    lines += [b"%s: %s" % (name, value) for name, value in event.headers.raw_items() if name.lower() not in dropped]
    if not keeps:
        lines.append(b"Connection: close")
    return b"\r\n".join(lines) + b"\r\n\r\n"


class Upstream(Protocol):
    """The server that requests go to."""

    @property
    def where(self) -> str:
        """Host and port, for people."""

    @property
    def host(self) -> bytes:
        """For the header of that name."""

    async def connect(self, protocol: asyncio.BufferedProtocol) -> None:
        """Open a connection.

        Raises:
            OSError: If nobody answers.
        """


BODY_BYTES = 64 << 20
"""A request may be this long: a prompt of a million tokens is a tenth of it, pictures are the rest."""
_HIGH_BYTES = 256 << 10
"""So much of an answer may wait for a client before the server waits too."""
_REASONS = {400: "Bad Request", 403: "Forbidden", 404: "Not Found", 405: "Method Not Allowed", 408: "Request Timeout"}
_REASONS |= {413: "Content Too Large", 429: "Too Many Requests", 431: "Request Header Fields Too Large"}
_REASONS |= {200: "OK", 501: "Not Implemented", 502: "Bad Gateway", 503: "Service Unavailable"}
_BUSY = (429, 503)


class ProxiedService(Protocol):
    """What is behind the connections."""

    def opened(self, connection: "ClientConnection") -> None:
        """Take note of a new connection."""

    def closed(self, connection: "ClientConnection") -> None:
        """Take note that one is closed."""

    def asked(self, connection: "ClientConnection", request: Request) -> None:
        """Serve a request: begin an exchange, or have the connection answer or refuse."""


class ClientConnection(asyncio.Protocol):
    """One connection of one client.

    Args:
        service: What is behind it.
    """

    def __init__(self, service: ProxiedService) -> None:
        self.exchange: Exchange | None = None
        self.stalled = False
        self.since_s = 0.0
        """When what it waits for now began: for a request, for its end, or for the client to take what was sent."""
        self._service = service
        self._transport: asyncio.Transport | None = None
        self._loop = asyncio.get_running_loop()
        self._early = b""
        self._anew()

    def _anew(self) -> None:
        self._parser = h11.Connection(h11.SERVER, max_incomplete_event_size=HEAD_BYTES)
        self._head: h11.Request | None = None
        self._pieces: list[bytes] = []
        self._size = 0
        self._serving = False
        self._begun = False
        self.since_s = self._loop.time()

    @property
    def peer(self) -> str:
        """The address of the client; empty if it is gone."""
        name = None if self._transport is None else self._transport.get_extra_info("peername")
        return str(name[0]) if name else ""

    @property
    def waited_for(self) -> str:
        """What the client is waited for: a ``request``, the ``rest`` of one, to ``read``; empty if for nothing."""
        if self.stalled:
            return "read"
        if self._serving:
            return ""
        return "rest" if self._begun else "request"

    # What the event loop calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.set_write_buffer_limits(high=_HIGH_BYTES)
        self._service.opened(self)

    def data_received(self, data: bytes) -> None:
        """Take in bytes of a request, or keep those of the next one."""
        if self._serving:
            self._early += data
            if len(self._early) > HEAD_BYTES:  # nobody sends that much ahead of its answer
                self.close()
            return
        self._begun = True
        try:
            self._parser.receive_data(data)
            self._parse()
        except h11.RemoteProtocolError as error:
            self.refuse(error.error_status_hint, str(error))

    def eof_received(self) -> bool:
        """Let the connection be closed: who will not send any more will not wait for an answer either."""
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """End what was going on for this client, and nothing else."""
        self._transport = None
        exchange = self.exchange
        self.exchange = None
        if exchange is not None:
            exchange.leave()
        self._service.closed(self)

    def pause_writing(self) -> None:
        """Let the server wait: the client takes no more for now."""
        self.stalled = True
        self.since_s = self._loop.time()
        if self.exchange is not None:
            self.exchange.pause()

    def resume_writing(self) -> None:
        """Go on."""
        self.stalled = False
        self.since_s = self._loop.time()
        if self.exchange is not None:
            self.exchange.resume()

    # Requests.

    def _parse(self) -> None:
        parser = self._parser
        while not self._serving:
            event = parser.next_event()
            if event is h11.NEED_DATA:
                if parser.they_are_waiting_for_100_continue and self._transport is not None:
                    self._transport.write(parser.send(h11.InformationalResponse(status_code=100, headers=[])) or b"")
                return
            if isinstance(event, h11.Request):
                self._head = event
                length = dict(event.headers).get(b"content-length", b"0")
                # Before the body comes, which a client that waits for 100 Continue then need not send.
                self._see_that_it_fits(int(length))
            elif isinstance(event, h11.Data):
                self._size += len(event.data)
                self._see_that_it_fits(self._size)
                self._pieces.append(bytes(event.data))
            elif isinstance(event, h11.EndOfMessage):
                self._arrived()
            else:
                return

    def _see_that_it_fits(self, size: int) -> None:
        if size > BODY_BYTES:
            raise h11.RemoteProtocolError(f"a request may have {BODY_BYTES >> 20} MiB", error_status_hint=413)

    def _arrived(self) -> None:
        head = self._head
        assert head is not None
        self._serving = True
        self._early = self._parser.trailing_data[0]
        headers = tuple((bytes(name), bytes(value)) for name, value in head.headers)
        old = head.http_version < b"1.1"
        closing = any(name == b"connection" and b"close" in value.lower() for name, value in headers)
        request = Request(
            method=bytes(head.method),
            target=bytes(head.target),
            headers=headers,
            body=b"".join(self._pieces),
            old=old,
            keeps=not old and not closing,
        )
        self._pieces = []
        self._service.asked(self, request)

    # Answers.

    def forward(self, data: bytes) -> None:
        """Send bytes on."""
        if self._transport is not None:
            self._transport.write(data)

    def complete(self, keeps: bool) -> None:
        """Have the answer ended; go on with the next request if the connection can be used again."""
        self.exchange = None
        if not keeps:
            self.close()
            return
        early = self._early
        self._early = b""
        self._anew()
        if early:
            # In a turn of its own: a client that sends thousands at once must not hold up the others.
            self._loop.call_soon(self._go_on, early)

    def _go_on(self, early: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self.data_received(early)

    def cut(self) -> None:
        """Break the answer off behind what was sent: its framing shows that it is not whole."""
        self.exchange = None
        self.close()

    def refuse(self, status: int, why: str) -> None:
        """Answer with an error, in the form that OpenAI's API has for them, and close the connection."""
        kind = "invalid_request_error"
        if status in _BUSY:
            kind = "rate_limit_error"
        elif status >= 500:
            kind = "server_error"
        self.exchange = None
        self.answer(status, {"error": {"message": why, "type": kind, "code": status}}, keeps=False)

    def answer(self, status: int, found: object, *, keeps: bool, kind: str = "application/json") -> None:
        """Answer with a document, or with a text of another kind."""
        body = found if isinstance(found, bytes) else json.dumps(found).encode() + b"\n"
        more = "Retry-After: 1\r\n" if status in _BUSY else ""
        more += "" if keeps else "Connection: close\r\n"
        line = f"HTTP/1.1 {status} {_REASONS.get(status, 'Error')}\r\n"
        head = f"{line}Content-Type: {kind}\r\nContent-Length: {len(body)}\r\n{more}\r\n"
        self._serving = True
        self.forward(head.encode() + body)
        self.complete(keeps)

    def begin_events(self) -> None:
        """Begin an answer of server-sent events, which ends with the connection; see `event`."""
        self._serving = True
        self.forward(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n")

    def event(self, line: str) -> None:
        """Send one event; it is left out where the client has not taken the ones before."""
        if not self.stalled:
            self.forward(f"data: {line}\n\n".encode())

    def close(self) -> None:
        """Close the connection behind what was sent."""
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """Close the connection at once."""
        if self._transport is not None:
            self._transport.abort()
