"""Speaking HTTP/1.1 to a service: what can go wrong on the way becomes one line.

The protocol is h11's, which needs Python alone and is carried to boards over SSH: figures of both are of one client.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import re
import ssl
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import h11

from polythrottle.domain.errors import TrialError
from polythrottle.storage.untrusted import bounded, printable
from polythrottle.workloads.foreign_calls import one_line

# Servers drop connections that were idle for a few seconds; one about to be dropped must not be used again.
_IDLE_S = 1.0
_BUFFER = 1 << 20
_OK = 200
MOST_BYTES = 1 << 24
"""How long an answer may be that holds no tensors."""
_PORTS = {"http": 80, "https": 443}
_REPEATABLE = ("GET", "PUT")

_MOST_HEAD = 1 << 16
_MARK = b"HTTP/"


@dataclass(frozen=True)
class Answer:
    """A whole answer.

    Args:
        status: Of HTTP.
        body: Of it.
        headers: By their names in lower case.
    """

    status: int
    body: bytes
    headers: Mapping[str, str]

    @property
    def document(self) -> Any:
        """The JSON in it; None if it is something else."""
        try:
            return json.loads(self.body)
        except (ValueError, RecursionError):
            return None


class _CutOff(Exception):
    """The connection ended before the answer did."""


class _Hangup(Exception):
    """The connection ended before an answer began."""


class _Connection(asyncio.Protocol):
    """One connection, and what has come over it that nobody has taken yet."""

    def __init__(self) -> None:
        self.transport: Any = None
        self.parser = h11.Connection(h11.CLIENT, max_incomplete_event_size=_MOST_HEAD)
        self.ended = False
        self.idle_since_s = 0.0
        self._parts: list[bytes] = []
        self._size = 0
        self._waiter: asyncio.Future[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep what can be written to."""
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        """Keep what has come; nothing more is read while nobody takes it."""
        self._parts.append(data)
        self._size += len(data)
        if self._size > _BUFFER:
            self.transport.pause_reading()
        self._wake()

    def eof_received(self) -> None:
        """Let whoever waits know that nothing more comes."""
        self.ended = True
        self._wake()

    def connection_lost(self, error: Exception | None) -> None:
        """Let whoever waits know that nothing more comes."""
        self.ended = True
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    @property
    def usable(self) -> bool:
        """Whether another request may go over it: nothing came unasked, and it is not about to end."""
        return not self.ended and not self._parts and time.monotonic() - self.idle_since_s < _IDLE_S

    def send(self, head: h11.Request, body: bytes | None) -> None:
        """Send a request.

        Raises:
            h11.LocalProtocolError: If it is none.
        """
        # Both at once: a head alone would wait for its acknowledgement where the other side delays that.
        data = self.parser.send(head) or b""
        if body:
            data += self.parser.send(h11.Data(data=body)) or b""
        self.parser.send(h11.EndOfMessage())
        self.transport.write(data)

    async def event(self) -> Any:
        """Return the next part of an answer, waiting for it.

        Raises:
            h11.RemoteProtocolError: If that is no proper HTTP, or the connection has ended before it.
        """
        while (event := self.parser.next_event()) is h11.NEED_DATA:
            # Other protocols have no end of a head, and would be waited for.
            if self.parser.their_state is h11.SEND_RESPONSE and not _MARK.startswith(self.parser.trailing_data[0][:5]):
                raise h11.RemoteProtocolError("no head of an answer")
            self.parser.receive_data(await self._some())
        return event

    async def _some(self) -> bytes:
        """Return what has come, waiting for it; nothing once the connection has ended."""
        while not self._parts and not self.ended:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        found = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        self._parts.clear()
        if self._size > _BUFFER and not self.ended:
            self.transport.resume_reading()
        self._size = 0
        return found

    def goes_on(self) -> bool:
        """Say whether the next request may go over it, which then can be sent."""
        if self.parser.trailing_data[0] or self.parser.states != {h11.CLIENT: h11.DONE, h11.SERVER: h11.DONE}:
            return False
        self.parser.start_next_cycle()
        self.idle_since_s = time.monotonic()
        return True


@dataclass
class Reply:
    """An answer whose head is there.

    Args:
        status: Of HTTP.
        headers: By their names in lower case.
    """

    status: int
    headers: Mapping[str, str]
    _line: _Connection

    async def pieces(self) -> AsyncIterator[bytes]:
        """Yield its content as it comes, each time all that is there."""
        try:
            while isinstance(event := await self._line.event(), h11.Data):
                yield bytes(event.data)
        except h11.RemoteProtocolError as err:
            if self._line.ended:
                raise _CutOff from err
            raise


async def _reply(line: _Connection) -> Reply:
    """Return the next answer on a connection; those that only promise one are passed over.

    Raises:
        h11.RemoteProtocolError: If what comes is no proper HTTP.
        _Hangup: If the connection ends before.
    """
    while True:
        try:
            event = await line.event()
        except h11.RemoteProtocolError as err:
            if line.ended and not line.parser.trailing_data[0]:
                raise _Hangup from err
            raise
        if isinstance(event, h11.ConnectionClosed):
            raise _Hangup
        if isinstance(event, h11.Response):
            headers: dict[str, str] = {}
            for name, value in event.headers:
                # Section 5.2 of RFC 9110: fields of one name are one list.
                before = headers.get(name.decode("ascii"))
                text = value.decode("latin-1")
                headers[name.decode("ascii")] = text if before is None else f"{before}, {text}"
            return Reply(event.status_code, headers, line)


# The connections to one service.


@dataclass
class Web:
    """Connections to one service over HTTP, for the running event loop; no proxy is used and no redirect followed.

    Args:
        where: Host and port, for people.
        root: What every path is appended to, from the scheme on.
        headers: Sent with every request.
    """

    where: str
    root: str
    headers: Mapping[str, str]
    _idle: list[_Connection] = field(default_factory=list)
    _tls: ssl.SSLContext | None = None

    def __post_init__(self) -> None:
        parts = urlsplit(self.root)
        self._host = parts.hostname or ""
        self._port = parts.port or _PORTS[parts.scheme]
        self._path = parts.path
        if parts.scheme == "https":
            self._tls = ssl.create_default_context()
        name = self.where.rpartition(":")[0] if self._port == _PORTS[parts.scheme] else self.where
        # Answers are compared as they were sent, not unpacked at our cost.
        self._common = {"Host": name, "User-Agent": "polythrottle", "Accept": "*/*", "Accept-Encoding": "identity"}

    async def fetch(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        most_bytes: int = MOST_BYTES,
    ) -> Answer:
        """Return the whole answer, whatever its status.

        Raises:
            ConnectionError: If nobody answers.
            TrialError: If the answer is cut off, no HTTP, or larger than ``most_bytes``.
        """
        async with self.asked(method, path, body, headers) as answer:
            return await self.whole(answer, most_bytes)

    async def whole(self, answer: Reply, most_bytes: int = MOST_BYTES) -> Answer:
        """Return an answer that was asked for, once all of it is here.

        Raises:
            TrialError: If it is larger than ``most_bytes``.
        """
        pieces = []
        size = 0
        most_bytes = most_bytes if answer.status == _OK else MOST_BYTES
        async for piece in answer.pieces():
            pieces.append(piece)
            size += len(piece)
            if size > most_bytes:
                raise TrialError(f"{self.where} answers with more than {most_bytes >> 20:,} MiB; it was not read on")
        return Answer(answer.status, b"".join(pieces), answer.headers)

    @asynccontextmanager
    async def asked(
        self, method: str, path: str, body: bytes | None = None, headers: Mapping[str, str] | None = None
    ) -> AsyncIterator[Reply]:
        """Return the context in which an answer can be read piece by piece.

        Raises:
            ConnectionError: If nobody answers.
            TrialError: If the answer is cut off or no HTTP.
        """
        own = dict(headers or {})
        line, reply = await self._sent(method, self._head(method, path, body, own), body)
        try:
            self._see_that_it_is_plain(reply)
            yield reply
        except _CutOff:
            raise TrialError(f"the answer of {self.where} was cut off") from None
        except h11.RemoteProtocolError as err:
            raise self._no_http(err) from err
        finally:
            if line.goes_on():
                self._idle.append(line)
            else:
                line.transport.abort()

    def _head(self, method: str, path: str, body: bytes | None, own: Mapping[str, str]) -> h11.Request:
        fields = {**self._common, **self.headers, **own}
        if body is not None:
            fields["Content-Length"] = str(len(body))
        try:
            headers = [(name.encode("ascii"), value.encode("latin-1")) for name, value in fields.items()]
            return h11.Request(method=method, target=f"{self._path}{path}", headers=headers)
        except (h11.LocalProtocolError, UnicodeEncodeError) as err:
            raise TrialError(f"{self.where} cannot be asked for {path[:80]!r}: {err}") from err

    async def _sent(self, method: str, head: h11.Request, body: bytes | None) -> tuple[_Connection, Reply]:
        """Send a request and return what answers it, where it can be repeated over a second connection."""
        while True:
            line = self._kept()
            used = line is not None
            if line is None:
                line = await self._connected()
            try:
                line.send(head, body)
                return line, await _reply(line)
            except _Hangup:
                line.transport.abort()
                if not used or method not in _REPEATABLE:
                    raise ConnectionResetError(f"{self.where} closed the connection instead of answering") from None
            except h11.RemoteProtocolError as err:
                line.transport.abort()
                raise self._no_http(err) from err
            except BaseException:
                line.transport.abort()
                raise

    def _kept(self) -> _Connection | None:
        while self._idle:
            line = self._idle.pop()
            if line.usable:
                return line
            line.transport.abort()
        return None

    async def _connected(self) -> _Connection:
        loop = asyncio.get_running_loop()
        words: dict[str, Any] = {}
        if self._tls is not None:
            words = {"ssl": self._tls, "server_hostname": self._host}
        try:
            # Both families at once: a name that leads to a dead IPv6 address first must not cost a query its time.
            _, line = await loop.create_connection(
                _Connection, self._host, self._port, happy_eyeballs_delay=0.25, **words
            )
        except (OSError, ValueError) as err:  # a ValueError is of a name that no host can have
            raise ConnectionRefusedError(f"nothing answers at {self.where} ({_reason(err)})") from err
        return line

    def _no_http(self, err: h11.RemoteProtocolError) -> TrialError:
        return TrialError(f"{self.where} does not answer in proper HTTP: {bounded(printable(str(err)), 120)}")

    def _see_that_it_is_plain(self, answer: Reply) -> None:
        packed = answer.headers.get("content-encoding", "identity")
        if packed.lower() != "identity":
            raise TrialError(f"{self.where} packs its answers ({packed[:20]}), which it was asked not to")
        if answer.status // 100 == 3:
            there = "".join(filter(str.isprintable, answer.headers.get("location", "nowhere")))[:200]
            raise TrialError(f"{self.where} sends on to {there}, which is not followed; write the right address")

    async def close(self) -> None:
        """Close the connections."""
        for line in self._idle:
            line.transport.abort()
        self._idle.clear()
        await asyncio.sleep(0)  # the sockets are closed in the loop's next turn


def _reason(err: OSError | ValueError) -> str:
    if isinstance(err, ssl.SSLError):
        return f"TLS: {(err.reason or one_line(err)).replace('_', ' ').lower()}"
    if not isinstance(err, OSError):
        return one_line(err)
    code = err.errno or 0
    # Where a name has several addresses, asyncio puts what went wrong with each into one text.
    if not code and (each := re.search(r"\[Errno (\d+)\]", str(err))):
        code = int(each[1])
    if code in errno.errorcode:
        return os.strerror(code).lower()
    return str(err.strerror or one_line(err))
