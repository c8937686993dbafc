"""A client's connection: its requests one after the other, and the answer of each."""

import asyncio
import json
from typing import Protocol

import h11

from polythrottle.proxy.relay import HEAD_BYTES, Exchange, Request

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
