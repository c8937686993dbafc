"""The HTTP client of services: what it reads however it is cut, which connections it keeps, what it says of TLS."""

import asyncio
import socket
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest
from fake_servers import FakeServer, Handler, listening

from polythrottle.domain.errors import TrialError
from polythrottle.workloads.services.http_client import Answer, Web
from polythrottle.workloads.uris import Address

CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
WHOLE = {
    "by its length": b"HTTP/1.1 200 OK\r\nContent-Length: 11\r\n\r\nhello world",
    "in chunks": CHUNKED + b"5\r\nhello\r\n1;x=y\r\n \r\n005\r\nworld\r\n0\r\nX: y\r\n\r\n",
    "until the end": b"HTTP/1.0 200 OK\n\nhello world",
    "behind promises": b"HTTP/1.1 103 Early\r\nLink: x\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 11\r\n\r\nhello world",
}


def asking(where: str, *does: Callable[[Web], Awaitable[Any]], scheme: str = "http") -> list[Any]:
    """Return what some questions to a server are answered, in one event loop."""

    async def ask() -> list[Any]:
        web = Web(where, f"{scheme}://{where}", {})
        try:
            return [await each(web) for each in does]
        finally:
            await web.close()

    return asyncio.run(ask())


def getting(path: str, method: str = "GET", **headers: str) -> Callable[[Web], Awaitable[Answer]]:
    """Return what asks for a path."""
    return lambda web: web.fetch(method, path, b"x" if method == "POST" else None, headers)


@pytest.fixture
def server() -> Iterator[FakeServer]:
    """Return a server that tells which connection each request came over."""
    made = FakeServer()
    for method in ("GET", "POST"):
        made.answers[method, "/who"] = lambda handler, _: handler.document(handler.client_address[1])
    with listening(made):
        yield made


@pytest.mark.parametrize("step", [1, 3, 7, 1000])
@pytest.mark.parametrize("kind", WHOLE)
def test_an_answer_is_whole_however_it_is_cut(server: FakeServer, kind: str, step: int) -> None:
    """Lengths, chunks with extensions and trailers, the end of the connection, and heads that only promise one."""

    def drip(handler: Handler, _: bytes) -> None:
        handler.close_connection = True
        handler.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for place in range(0, len(WHOLE[kind]), step):
            handler.wfile.write(WHOLE[kind][place : place + step])

    server.answers["GET", "/drip"] = drip
    (answer,) = asking(server.where, getting("/drip"))
    assert (answer.status, answer.body) == (200, b"hello world")


def test_a_connection_is_kept_unless_somebody_ends_it(server: FakeServer) -> None:
    """The next request goes over it; not where we or the server say that it ends, or something came unasked."""
    server.answers["GET", "/more"] = lambda handler, _: handler.wfile.write(WHOLE["by its length"] + b"more")
    asked = (getting("/who"), getting("/who", "POST"), getting("/who", Connection="close"), getting("/who"))
    first, second, third, fourth = (each.document for each in asking(server.where, *asked))
    assert first == second == third != fourth
    before, _, after = (
        each.document for each in asking(server.where, getting("/who"), getting("/more"), getting("/who"))
    )
    assert before != after


def test_a_connection_that_ended_meanwhile_costs_a_question_nothing(server: FakeServer) -> None:
    """A question that changes nothing is asked again over another; an inference is not, for it may have been made."""

    def leaving(handler: Handler, _: bytes) -> None:
        if handler.client_address[1] == server.seen_first:  # type: ignore[attr-defined]
            handler.close_connection = True
        else:
            handler.document("whole")

    def first(handler: Handler, _: bytes) -> None:
        server.seen_first = handler.client_address[1]  # type: ignore[attr-defined]
        handler.document(None)

    server.answers["GET", "/first"] = first
    server.answers["GET", "/leave"] = server.answers["POST", "/leave"] = leaving
    assert asking(server.where, getting("/first"), getting("/leave"))[1].document == "whole"
    with pytest.raises(ConnectionResetError, match="closed the connection instead of answering"):
        asking(server.where, getting("/first"), getting("/leave", "POST"))


def test_a_large_answer_is_read_no_faster_than_it_is_taken(server: FakeServer) -> None:
    """All of it arrives, though much more came than is kept at a time."""
    server.answers["GET", "/large"] = lambda handler, _: handler.raw(b"0123456789" * 1_000_000)

    async def slowly(web: Web) -> tuple[int, int]:
        sizes = []
        async with web.asked("GET", "/large") as answer:
            async for piece in answer.pieces():
                sizes.append(len(piece))
                await asyncio.sleep(0.001)
        return sum(sizes), max(sizes)

    ((size, largest),) = asking(server.where, slowly)
    assert size == 10_000_000
    assert largest < 4_000_000


@pytest.mark.parametrize(
    ("head", "line"),
    [
        (b"Transfer-Encoding: gzip, chunked\r\n", "Only Transfer-Encoding: chunked is supported"),
        (b"Content-Length: 1_0\r\n", "bad Content-Length"),
        (b"Content-Length: 5, 6\r\n", "conflicting Content-Length"),
        (b" folded: x\r\n", "continuation line at start of headers"),
        (b"no header\r\n", "illegal header line"),
    ],
)
def test_a_head_that_is_none_is_named(server: FakeServer, head: bytes, line: str) -> None:
    """What may be read in two ways is not read."""
    server.answers["GET", "/odd"] = lambda handler, _: (
        handler.wfile.write(b"HTTP/1.1 200 OK\r\n" + head + b"\r\n") and None
    )
    with pytest.raises(TrialError, match=f"does not answer in proper HTTP: {line}"):
        asking(server.where, getting("/odd"))


def test_who_cannot_be_reached_is_one_line(server: FakeServer) -> None:
    """Nobody there, no such host, a name that is none, and no TLS where it is asked for."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    for where, scheme, why in (
        (f"127.0.0.1:{port}", "http", "connection refused"),
        (f"localhost:{port}", "http", "connection refused"),
        (f"{'a' * 70}.invalid:80", "http", ""),
        ("nowhere.invalid:80", "http", ""),
        (server.where, "https", "TLS: "),
    ):
        with pytest.raises(ConnectionRefusedError, match=rf"nothing answers at {where} \({why}") as caught:
            asking(where, getting("/who"), scheme=scheme)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("host", "here"),
    [("127.0.0.1", True), ("127.0.0.7", True), ("[::1]", True), ("192.0.2.7", False), ("nowhere.invalid", False)],
)
def test_an_address_of_this_machine_is_told_from_others(host: str, here: bool) -> None:
    """Whose joules they are depends on it; nothing is sent there, and no package is needed to know."""
    assert Address.parse(f"kserve://{host}:8000/m", ()).here is here
