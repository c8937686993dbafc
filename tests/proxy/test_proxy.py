"""The proxy in front of a language model's server: its line, what it passes on, what it does when either side dies."""

import asyncio
import contextlib
import itertools
import json
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager, nullcontext
from typing import Any

import pytest
from fake_servers import event, piece, usage
from hypothesis import given
from hypothesis import strategies as st

from polythrottle.cli.commands import run as cli
from polythrottle.domain.errors import DeviceError, InvalidInput
from polythrottle.proxy.answers import ChunkedBody, Tokens
from polythrottle.proxy.in_flight_limiter import Proxy, ProxyOptions, Server
from polythrottle.proxy.traffic import OUTCOMES, Admission, Figures, InFlight

PATIENCE_S = 20.0
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
LAST = b"0\r\n\r\n"
DONE = b"data: [DONE]\n\n"


def chunk(data: bytes) -> bytes:
    """Return bytes as one chunk."""
    return b"%x\r\n%s\r\n" % (len(data), data)


WHOLE = HEAD + b"".join(map(chunk, (piece("Hel"), piece("lo", "length"), usage(7), DONE))) + LAST


# --- the line --------------------------------------------------------------------------------------------------------


def test_so_many_run_and_the_others_wait_in_the_order_they_came() -> None:
    """Whoever leaves lets the next one start; one that leaves the line is passed over."""
    line: InFlight[str] = InFlight(2, 3)
    assert [line.enter(each) for each in "abcde"] == [Admission.RUNS] * 2 + [Admission.WAITS] * 3
    assert line.enter("f") is Admission.REFUSED
    assert line.leave("c") == []
    assert line.leave("a") == ["d"]
    assert (line.running, line.waiting) == (2, 1)


def test_a_lower_limit_ends_nobody_and_a_higher_one_starts_those_who_wait() -> None:
    """A limit of 0 lets nobody start, as while a server is started anew."""
    line: InFlight[str] = InFlight(2, 9)
    for each in "abcd":
        line.enter(each)
    assert line.set_limit(0) == []
    assert line.running == 2
    assert line.leave("a") == line.leave("b") == []
    assert line.set_limit(5) == ["c", "d"]


@given(st.lists(st.tuples(st.sampled_from(["enter", "leave", "limit"]), st.integers(0, 6)), max_size=60))
def test_whatever_happens_the_limit_holds_and_nobody_is_forgotten(steps: list[tuple[str, int]]) -> None:
    """Requests start once, in the order they came, and never above the limit that holds then."""
    line: InFlight[int] = InFlight(2, 4)
    came, running = 0, []
    for what, number in steps:
        if what == "enter":
            came += 1
            started = [came] if line.enter(came) is Admission.RUNS else []
        elif what == "leave":
            started = line.leave(running.pop(number % len(running)) if running else came)
        else:
            started = line.set_limit(number)
        running += started
        assert started == sorted(started)
        assert not started or len(running) <= line.limit
        assert line.running == len(running)
        assert not line.waiting or len(running) >= line.limit


@pytest.mark.parametrize("limit", [-1, 1.5, True, None, "4", 10**7])
def test_a_limit_that_is_none_is_refused(limit: Any) -> None:
    """In one line, and the limit before stays."""
    line: InFlight[str] = InFlight(3, 1)
    with pytest.raises(InvalidInput, match="whole number from 0"):
        line.set_limit(limit)
    assert line.limit == 3


# --- answers ---------------------------------------------------------------------------------------------------------


@given(st.lists(st.binary(min_size=1, max_size=40), max_size=5), st.integers(1, 30), st.sampled_from([b"", b";x=1"]))
def test_a_body_in_chunks_ends_where_it_ends_however_it_is_cut(parts: list[bytes], size: int, extra: bytes) -> None:
    """Trailers belong to it; what follows does not."""
    text = b"".join(b"%X%s\r\n%s\r\n" % (len(each), extra, each) for each in parts) + b"0\r\nName: value\r\n\r\n"
    sent, body, taken = text + b"HTTP/1.1", ChunkedBody(), 0
    for at in range(0, len(sent), size):
        if body.over:
            break
        taken += body.take(sent[at : at + size])
    assert body.over
    assert taken == len(text)


@pytest.mark.parametrize("text", [b"x\r\n", b"-1\r\n", b"\r\n", b"1" * 40 + b"\r\n", b"1" * 20_000])
def test_a_chunk_without_a_length_is_no_chunk(text: bytes) -> None:
    """It is an error, not a guess."""
    with pytest.raises(ValueError, match="length of a chunk"):
        ChunkedBody().take(text)


def test_tokens_are_those_the_server_counts_whatever_the_model_says() -> None:
    """A count within the text of an answer is no count; without one, pieces are counted, but not the last word."""
    counted = Tokens(streamed=True)
    for now_s, data in enumerate((piece('"completion_tokens": 99'), piece("b"), usage(7), DONE)):
        counted.take(chunk(data), float(now_s))
    assert (counted.counted().prompt, counted.counted().completion) == (3, 7)
    assert counted.per_token_s(7) == pytest.approx((3.0 - 0.0) / 6)
    bare = Tokens(streamed=True)
    bare.take(chunk(piece("a")) + chunk(piece("b")) + chunk(DONE), 1.0)
    assert (bare.counted().completion, bare.counted().by_server) == (2, False)
    assert bare.per_token_s(2) is None


@pytest.mark.parametrize(
    ("reads", "at"),
    [
        ((b"data: a\n\n", b"data: b\n\n"), (0, 1)),
        ((b"9\r\n", b"data: a\n\n\r\n9\r\n", b"data: b\n\n\r\n"), (1, 2)),
        ((b"d", b"a", b"ta", b": a\r\n", b"\r\ndata", b": b\r\n\r\n"), (3, 5)),
        ((b": ping\n\nevent: x\n", b"data: a\n\n: ping\n\nevent: x\n", b"data: b\n\n"), (1, 2)),
        ((b"data: a\n\ndata: b\n\n", b": ping\n\n"), (0, 0)),
        ((b"data: a\ndat", b"e: b\n\n", b"\n", b"data: b\n\n"), (0, 3)),
        ((b"data: a", b"data: still a\n\n", b"data: b\n\n"), (0, 2)),
    ],
)
def test_an_event_counts_when_its_first_word_is_there_however_it_was_cut(
    reads: tuple[bytes, ...], at: tuple[int, int]
) -> None:
    """Two tokens each: a server may write the length of a chunk by itself, and a network may cut any word."""
    tokens = Tokens(streamed=True)
    for now_s, data in enumerate(reads):
        tokens.take(data, float(now_s))
    assert (tokens.pieces, tokens.first_s, tokens.last_s) == (2, *map(float, at))


def test_what_a_server_counts_is_found_where_it_writes_each_line_by_itself() -> None:
    """Length, event and end of line of a chunk are three reads each, and [DONE] and the last chunk follow the count."""
    tokens = Tokens(streamed=True)
    for data in (piece("a"), piece("b"), usage(7), DONE):
        for part in (b"%x\r\n" % len(data), data, b"\r\n"):
            tokens.take(part, 0.0)
    tokens.take(LAST, 0.0)
    assert (tokens.counted().prompt, tokens.counted().completion, tokens.counted().by_server) == (3, 7, True)


@pytest.mark.parametrize("size", [1, 50, 5000])
def test_no_more_than_the_end_of_an_answer_is_kept(size: int) -> None:
    """Four reads, or as many short ones as make a few hundred bytes."""
    tokens = Tokens()
    for _ in range(1000):
        tokens.take(b"x" * size, 0.0)
    assert sum(map(len, tokens._tail)) <= 4 * max(size, 2 * 64)


@given(
    st.lists(st.sampled_from([b"data: a\n\n", b"data:b\r\n\r\n", b": data:\n\n", b"event: x\ndata: \ndata: c\n\n"])),
    st.booleans(),
    st.lists(st.integers(0, 200)),
)
def test_events_are_as_many_however_they_are_cut(events: list[bytes], chunked: bool, cuts: list[int]) -> None:
    """One for each line with data."""
    text = b"".join(map(chunk, events) if chunked else events)
    cut = Tokens(streamed=True)
    edges = sorted({0, *(each for each in cuts if each < len(text)), len(text)})
    for begin, end in itertools.pairwise(edges):
        cut.take(text[begin:end], 0.0)
    assert cut.pieces == sum(len(re.findall(rb"(?m)^data:", each)) for each in events)


# --- the proxy between a client and a server that do as the test says ------------------------------------------------


class Asked:
    """One request at the server, and its answer."""

    def __init__(self, head: bytes, body: bytes, writer: asyncio.StreamWriter, reader: asyncio.StreamReader) -> None:
        self.head, self.body = head, body
        self._writer, self._reader = writer, reader

    async def send(self, *parts: bytes) -> None:
        """Send bytes."""
        for part in parts:
            self._writer.write(part)
        await self._writer.drain()

    def kill(self) -> None:
        """Die: the kernel resets the connection where something was left unread."""
        self._writer.transport.abort()

    async def end(self) -> None:
        """Close the connection."""
        self._writer.close()
        await self._writer.wait_closed()

    async def left(self) -> bool:
        """Wait until the other side closes the connection."""
        try:
            return await within(self._reader.read()) == b""
        except ConnectionError:
            return True


class Site:
    """A server of the test's, and the proxy in front of it."""

    def __init__(self, limit: int, most_waiting: int) -> None:
        self.requests: asyncio.Queue[Asked] = asyncio.Queue()
        self.limit, self.most_waiting = limit, most_waiting
        self.proxy: Proxy
        self.open: list[asyncio.StreamWriter] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Take in a request, and leave the rest to the test."""
        self.open.append(writer)
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError:
            writer.close()
            return
        length = [int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
        await self.requests.put(Asked(head, await reader.readexactly(*length or [0]), writer, reader))

    async def request(self) -> Asked:
        """Return the next request that has reached the server."""
        return await within(self.requests.get())

    async def ask(self, text: bytes = b"", path: bytes = b"/v1/chat/completions") -> "Client":
        """Send a request through the proxy, or these very bytes."""
        client = await self.connect()
        client.send(text or b"POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\n{}" % path)
        return client

    async def connect(self, **words: int) -> "Client":
        """Connect to the proxy."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.proxy.port, **words)
        self.open.append(writer)
        return Client(reader, writer)

    async def own(self, method: str, path: str, body: bytes = b"", host: str = "localhost") -> tuple[int, bytes]:
        """Ask the proxy itself."""
        head = f"{method} /polythrottle/{path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n"
        client = await self.ask(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        head_and_body = (await client.all()).split(b"\r\n\r\n", 1)
        return int(head_and_body[0].split()[1]), head_and_body[1]

    async def figure(self, name: str) -> float:
        """Return one figure of the proxy's metrics."""
        _, page = await self.own("GET", "metrics")
        return next(float(line.split()[-1]) for line in page.decode().splitlines() if line.startswith(name))


class Client:
    """A client of the proxy."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    def send(self, data: bytes) -> None:
        """Send bytes."""
        self.writer.write(data)

    async def until(self, end: bytes) -> bytes:
        """Return what comes until then."""
        return await within(self.reader.readuntil(end))

    async def all(self) -> bytes:
        """Return all that comes until the connection is closed."""
        found = await within(self.reader.read())
        self.writer.close()
        return found

    def kill(self) -> None:
        """Die."""
        self.writer.transport.abort()


async def within(work: Awaitable[Any]) -> Any:
    """Wait for it; a bound on hangs alone."""
    return await asyncio.wait_for(work, PATIENCE_S)


async def until(holds: Callable[[], bool]) -> None:
    """Let the loop turn until something holds; a bound on hangs alone."""

    async def turning() -> None:
        while not holds():
            await asyncio.sleep(0.001)

    await within(turning())


@asynccontextmanager
async def site(limit: int = 4, most_waiting: int = 100) -> AsyncIterator[Site]:
    """Open server and proxy."""
    made = Site(limit, most_waiting)
    server = await asyncio.start_server(made.serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    made.proxy = Proxy(ProxyOptions(f"http://127.0.0.1:{port}", "127.0.0.1:0", limit, most_waiting, grace_s=0.01))
    await made.proxy.open()
    try:
        yield made
    finally:
        for writer in made.open:
            writer.transport.abort()
        server.close()
        await made.proxy.close()
        for _ in range(3):  # closed transports are let go in the loop's next turns
            await asyncio.sleep(0)


def run(work: Coroutine[Any, Any, None]) -> None:
    """Run a test's coroutine."""
    asyncio.run(work)


def test_an_answer_passes_byte_for_byte_as_it_comes() -> None:
    """Each piece is there before the next one is sent; the client's connection is used again."""

    async def story() -> None:
        async with site() as made:
            client = await made.ask()
            asked = await made.request()
            assert asked.body == b"{}"
            assert b"connection: close" in asked.head.lower()
            await asked.send(HEAD)
            assert b"text/event-stream" in await client.until(b"\r\n\r\n")
            for data in (piece("a"), piece("b"), usage(2), DONE):
                await asked.send(chunk(data))
                assert await client.until(b"\n\n\r\n") == chunk(data)
            await asked.send(LAST)
            assert await client.until(LAST) == LAST
            client.send(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n")
            again = await made.request()
            assert again.head.startswith(b"POST /v1/completions HTTP/1.1")
            assert await made.figure("polythrottle_proxy_generation_tokens_total") == 2
            assert await made.figure("polythrottle_proxy_time_to_first_token_seconds_count") == 1
            assert await made.figure("polythrottle_proxy_time_per_output_token_seconds_count") == 1
            assert await made.figure('polythrottle_proxy_requests_total{outcome="answered"}') == 1

    run(story())


def test_the_limit_bounds_what_reaches_the_server_and_changes_at_run_time() -> None:
    """The others start when one ends, or when the limit is raised by a PUT."""

    async def story() -> None:
        async with site(limit=1) as made:
            clients = [await made.ask() for _ in range(4)]
            first = await made.request()
            await until(lambda: made.proxy.in_flight.waiting == 3)
            assert json.loads((await made.own("GET", "in_flight"))[1]) == {"limit": 1, "running": 1, "waiting": 3}
            assert made.requests.empty()
            await first.send(WHOLE)
            assert (await clients[0].until(LAST)).endswith(LAST)
            await made.request()
            assert made.requests.empty()
            assert await made.own("PUT", "in_flight", b'{"limit": 3}') == (
                200,
                b'{"limit": 3, "running": 3, "waiting": 0}\n',
            )
            await made.request()
            await made.request()

    run(story())


STREAMED = b'{"stream": true, "prompt": "%s"}'


async def told(follower: Client) -> dict[str, Any]:
    """Return what the next event tells."""
    while not (line := await follower.until(b"\n")).startswith(b"data:"):
        pass
    found: dict[str, Any] = json.loads(line[5:])
    return found


async def told_until(follower: Client, holds: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """Return the first event that tells what is waited for."""
    while not holds(found := await told(follower)):
        pass
    return found


def posted(body: bytes) -> bytes:
    """Return a request with a body."""
    return b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)


def test_whoever_follows_is_told_of_prompts_as_they_wait_and_as_they_begin() -> None:
    """One that is in line has not been sent; each is guessed by its bytes; the first piece ends the waiting."""

    async def story() -> None:
        async with site(limit=1) as made:
            follower = await made.ask(b"GET /polythrottle/prompts HTTP/1.1\r\nHost: x\r\n\r\n")
            assert b"200 OK" in await follower.until(b"\r\n\r\n")
            nothing = await told(follower)
            assert (nothing["prompts"], nothing["waiting"], nothing["arrived"]) == ([], 0, 0)
            body = STREAMED % (b"a" * 4000)
            clients = [await made.ask(posted(body)) for _ in range(2)]
            both = await told_until(follower, lambda found: found["waiting"] == 2)
            assert both["sent"] == 1
            assert [tokens for tokens, _ in both["prompts"]] == [pytest.approx(len(body) / 4, abs=1)] * 2
            assert all(0 <= age_s < PATIENCE_S for _, age_s in both["prompts"])
            asked = await made.request()
            await asked.send(HEAD, chunk(piece("a")), chunk(piece("b")))
            begun = await told_until(follower, lambda found: bool(found["streams"]))
            assert (begun["waiting"], begun["firsts"]) == (1, 1)
            assert begun["begun"] == pytest.approx(len(body) / 4, abs=1)
            used = {"choices": [], "usage": {"prompt_tokens": 2000, "completion_tokens": 2}}
            await asked.send(chunk(event(used)), chunk(DONE), LAST)
            await clients[0].until(LAST)
            over = await told_until(follower, lambda found: found["sent"] == 1 and not found["streams"])
            assert over["made"] >= 2
            clients.append(await made.ask(posted(body)))
            learnt = await told_until(follower, lambda found: found["waiting"] == 2)
            assert learnt["prompts"][1][0] > 1.4 * learnt["prompts"][0][0], "the server counted twice as many a byte"
            clients[2].kill()
            await told_until(follower, lambda found: found["waiting"] == 1)

    run(story())


def test_an_answer_that_is_not_streamed_is_load_and_waits_for_no_first_token() -> None:
    """Nobody sees when its prompt was computed."""

    async def story() -> None:
        async with site() as made:
            follower = await made.ask(b"GET /polythrottle/prompts HTTP/1.1\r\nHost: x\r\n\r\n")
            await made.ask(posted(b'{"prompt": "%s"}' % (b"a" * 400)))
            found = await told_until(follower, lambda found: bool(found["arrived"]))
            assert (found["waiting"], found["prompts"]) == (0, [])

    run(story())


def test_so_many_may_follow_and_one_that_left_makes_room() -> None:
    """Another is told that there is none."""

    async def story() -> None:
        async with site() as made:
            text = b"GET /polythrottle/prompts HTTP/1.1\r\nHost: x\r\n\r\n"
            followers = [await made.ask(text) for _ in range(16)]
            for follower in followers:
                await told(follower)
            assert b"503" in (await (await made.ask(text)).all()).split(b"\r\n")[0]
            followers[0].kill()
            await until(lambda: len(made.proxy._followers) == 15)
            await told(await made.ask(text))
            assert (await made.own("PUT", "prompts"))[0] == 405

    run(story())


def test_a_full_line_says_so_and_what_is_no_post_needs_no_place() -> None:
    """Status 429 with Retry-After; the list of models comes all the same."""

    async def story() -> None:
        async with site(limit=1, most_waiting=0) as made:
            await made.ask()
            await made.request()
            refused = await (await made.ask()).all()
            assert refused.startswith(b"HTTP/1.1 429 ")
            assert b"Retry-After: 1" in refused
            assert json.loads(refused.partition(b"\r\n\r\n")[2])["error"]["type"] == "rate_limit_error"
            await made.ask(b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n")
            assert (await made.request()).head.startswith(b"GET /v1/models ")

    run(story())


def test_a_killed_client_loses_nobody_elses_tokens() -> None:
    """The server is told by a closed connection, the place is free again, and the other stream goes on."""

    async def story() -> None:
        async with site(limit=2) as made:
            doomed, other = await made.ask(), await made.ask()
            one, two = await made.request(), await made.request()
            waiting, gone = await made.ask(), await made.ask()
            await until(lambda: made.proxy.in_flight.waiting == 2)
            gone.kill()
            await until(lambda: made.proxy.in_flight.waiting == 1)
            for asked in (one, two):
                await asked.send(HEAD, chunk(piece("a")))
            await doomed.until(b"\n\n\r\n")
            doomed.kill()
            assert await one.left()
            third = await made.request()
            await two.send(chunk(piece("b")), chunk(DONE), LAST)
            text = await other.until(LAST)
            assert [each in text for each in (piece("a"), piece("b"), DONE)] == [True] * 3
            await third.send(WHOLE)
            assert DONE in await waiting.until(LAST)
            assert await made.figure('polythrottle_proxy_requests_total{outcome="left"}') == 2

    run(story())


def test_a_killed_server_loses_no_token_that_it_sent_and_its_answer_shows_that_it_is_not_whole() -> None:
    """The connection ends without the last chunk; other answers are not touched, and the next request is served."""

    async def story() -> None:
        async with site() as made:
            client, other = await made.ask(), await made.ask()
            one, two = await made.request(), await made.request()
            await one.send(HEAD, chunk(piece("a")), chunk(piece("b")))
            await client.until(piece("b") + b"\r\n")
            await one.send(chunk(piece("c")))
            one.kill()
            assert await client.all() == chunk(piece("c"))
            await two.send(WHOLE)
            assert DONE in await other.until(LAST)
            assert await made.figure('polythrottle_proxy_requests_total{outcome="cut"}') == 1
            again = await made.ask()
            await (await made.request()).send(WHOLE)
            assert DONE in await again.until(LAST)

    run(story())


def test_a_client_that_reads_slowly_holds_up_its_own_server_alone() -> None:
    """What it has not read waits at the server, not in the proxy; another stream passes; nothing is lost in the end."""

    async def story() -> None:
        async with site() as made:
            slow = await made.connect(limit=1024)
            slow.send(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n")
            asked = await made.request()
            (connection,) = made.proxy._connections
            part, sent = chunk(b"data: " + b"x" * 65_000 + b"\n\n"), 0

            async def pour() -> None:
                nonlocal sent
                await asked.send(HEAD)
                while not connection.stalled:
                    await asked.send(part)
                    sent += 1
                await asked.send(part, LAST)

            pouring = asyncio.ensure_future(pour())
            await until(lambda: connection.stalled)
            other = await made.ask()
            await (await made.request()).send(WHOLE)
            assert DONE in await other.until(LAST)
            await until(lambda: connection.stalled)
            text = await slow.until(b"\r\n\r\n")
            while not text.endswith(LAST):
                text += await within(slow.reader.read(1 << 20))
            await within(pouring)
            assert text.count(b"data: ") == sent + 1

    run(story())


def test_a_server_that_dies_behind_a_slow_client_still_has_its_tokens_delivered() -> None:
    """What it sent before lies with the kernel until the client reads again."""

    async def story() -> None:
        async with site() as made:
            client = await made.ask()
            asked = await made.request()
            await asked.send(HEAD)
            await client.until(b"\r\n\r\n")
            (connection,) = made.proxy._connections
            connection.pause_writing()
            await asked.send(chunk(piece("a")), chunk(piece("b")))
            await asked.end()
            connection.resume_writing()
            assert await client.all() == chunk(piece("a")) + chunk(piece("b"))

    run(story())


def test_without_a_server_a_request_is_refused_in_the_form_clients_know() -> None:
    """Status 502, where nobody listens, where the answer is no HTTP, where it ends before it begins."""

    async def story() -> None:
        async with site() as made:
            for sent, told in ((b"hello\r\n\r\n", b"proper HTTP"), (b"", b"closed the connection")):
                client = await made.ask()
                asked = await made.request()
                await asked.send(sent)
                await asked.end()
                found = await client.all()
                assert found.startswith(b"HTTP/1.1 502 ")
                assert told in found
            assert made.proxy.in_flight.running == 0
        async with site() as made:
            made.proxy._server = Server("http://127.0.0.1:9")
            assert b"nothing answers at 127.0.0.1:9 (connection refused)" in await (await made.ask()).all()

    run(story())


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"hello there\r\n\r\n", b"400"),
        (b"GET http://elsewhere/ HTTP/1.1\r\nHost: x\r\n\r\n", b"400"),
        (b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999\r\n\r\n", b"413"),
        (b"GET / HTTP/1.1\r\nHost: x\r\nName: " + b"x" * 70_000, b"431"),
        (b"GET /polythrottle/nothing HTTP/1.1\r\nHost: x\r\n\r\n", b"404"),
        (b"DELETE /polythrottle/in_flight HTTP/1.1\r\nHost: x\r\n\r\n", b"405"),
        (b'PUT /polythrottle/in_flight HTTP/1.1\r\nHost: x.example\r\nContent-Length: 11\r\n\r\n{"limit":1}', b"403"),
        (b'PUT /polythrottle/in_flight HTTP/1.1\r\nHost: [::1]\r\nContent-Length: 12\r\n\r\n{"limit":-1}', b"400"),
        (b"PUT /polythrottle/in_flight HTTP/1.1\r\nHost: [::1]\r\nContent-Length: 4\r\n\r\n[[[[", b"400"),
        (b"PUT /polythrottle/in_flight HTTP/1.1\r\nHost: [::1]\r\nContent-Length: 2\r\n\r\n{}", b"400"),
    ],
)
def test_what_is_wrong_with_a_request_is_one_line(sent: bytes, status: bytes) -> None:
    """In the form that clients of such servers know, and nothing reaches the server."""

    async def story() -> None:
        async with site() as made:
            found = await (await made.ask(sent)).all()
            assert found.split()[1] == status
            assert json.loads(found.partition(b"\r\n\r\n")[2])["error"]["message"]
            assert made.requests.empty()
            assert made.proxy.in_flight.limit == 4

    run(story())


def test_old_clients_heads_alone_and_those_who_ask_first_are_served() -> None:
    """HTTP/1.0 reaches the server as such; HEAD has no body; 100-continue is said by the proxy."""

    async def story() -> None:
        async with site() as made:
            old = await made.ask(b"POST /v1/completions HTTP/1.0\r\nContent-Length: 2\r\n\r\n{}")
            asked = await made.request()
            assert asked.head.startswith(b"POST /v1/completions HTTP/1.0\r\n")
            await asked.send(b"HTTP/1.0 200 OK\r\n\r\nwhole")
            await asked.end()
            assert (await old.all()).endswith(b"\r\n\r\nwhole")
            head = await made.ask(b"HEAD / HTTP/1.1\r\nHost: x\r\n\r\nGET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n")
            await (await made.request()).send(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n")
            assert b"Content-Length: 5" in await head.until(b"\r\n\r\n")
            assert (await made.request()).head.startswith(b"GET /v1/models ")
            first = await made.ask(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nExpect: 100-continue\r\n\r\n")
            assert (await first.until(b"\r\n\r\n")).startswith(b"HTTP/1.1 100 ")
            first.send(b"{}")
            assert (await made.request()).body == b"{}"

    run(story())


def test_the_end_lets_answers_go_on_and_refuses_those_in_line() -> None:
    """Nobody new is let in; what is under way may end within its time."""

    async def story() -> None:
        async with site(limit=1) as made:
            made.proxy._options = ProxyOptions("http://x:1", "x:1", 1, grace_s=PATIENCE_S)
            client = await made.ask()
            asked = await made.request()
            in_line = await made.ask()
            await until(lambda: made.proxy.in_flight.waiting == 1)
            ending = asyncio.ensure_future(made.proxy.close())
            assert b"the proxy ends" in await in_line.all()
            await asked.send(WHOLE)
            assert DONE in await client.until(LAST)
            await within(ending)

    run(story())


@pytest.mark.parametrize(
    ("server", "listen", "line"),
    [
        ("127.0.0.1:8000", "127.0.0.1:0", "is no server; write http://host:port"),
        ("http://x:99999", "127.0.0.1:0", "is no server"),
        ("http://u:p@x:1", "127.0.0.1:0", "is no server"),
        ("http://x:1/other", "127.0.0.1:0", "has a path"),
        ("http://x:1/v1", "8001", "no address to listen on"),
        ("http://x:1/v1", "x:y", "no address to listen on"),
    ],
)
def test_addresses_that_are_none_are_refused(server: str, listen: str, line: str) -> None:
    """In one line each."""
    with pytest.raises(InvalidInput, match=line):
        Proxy(ProxyOptions(server, listen, 1))


@pytest.mark.parametrize(
    ("server", "listen", "circle"),
    [
        ("http://127.0.0.1:8001", "127.0.0.1:8001", True),
        ("http://localhost:8001/v1", "127.0.0.1:8001", True),
        ("http://127.0.0.1:8001", "0.0.0.0:8001", True),
        ("http://127.0.0.1:8000", "127.0.0.1:8001", False),
        ("http://127.0.0.2:8001", "127.0.0.1:8001", False),
        ("http://orin:8001", "0.0.0.0:8001", False),
    ],
)
def test_a_proxy_is_not_its_own_server(server: str, listen: str, circle: bool) -> None:
    """Each request would wait for itself."""
    refused = pytest.raises(InvalidInput, match="give it another address with --listen") if circle else nullcontext()
    with refused:
        Proxy(ProxyOptions(server, listen, 1))


def test_a_port_that_is_taken_is_said_in_one_line() -> None:
    """Two proxies cannot listen at one address."""

    async def story() -> None:
        async with site() as made:
            with pytest.raises(DeviceError, match=r"cannot listen on 127.0.0.1:\d+: address already in use$"):
                await Proxy(ProxyOptions("http://x:1", f"127.0.0.1:{made.proxy.port}", 1)).open()

    run(story())


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("127.0.0.1:8000",), "is no server; write http://host:port"),
        (("http://x:1", "--in-flight", "-1"), "requests in flight are a whole number from 0"),
        (("http://x:1", "--queue", "-1"), "--queue -1 is no number from 0"),
        (("http://x:1", "--grace", "nan"), "--grace nan is no number of seconds"),
        (("http://x:1", "--listen", "8001"), "is no address to listen on"),
    ],
)
def test_what_the_command_cannot_do_is_one_line(
    words: tuple[str, ...], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the exit code of malformed input."""
    assert cli(["proxy", *words]) == 2
    found = capsys.readouterr().err
    assert line in found
    assert found.count("\n") == 1


def test_clients_that_keep_the_proxy_waiting_are_let_go() -> None:
    """Half a request gets status 408; who asks or reads nothing is let go; an answer itself may take hours."""

    async def story() -> None:
        async with site() as made:
            half, idle, stalled, long = (
                await made.ask(b"POST / HTTP/1.1\r\nHost: x\r\n"),
                await made.connect(),
                await made.ask(),
                await made.ask(),
            )
            asked, _ = await made.request(), await made.request()
            await until(lambda: len(made.proxy._connections) == 4)
            by_port = {
                each._transport.get_extra_info("peername")[1]: each
                for each in made.proxy._connections
                if each._transport
            }
            reader = by_port[stalled.writer.get_extra_info("sockname")[1]]
            loop = asyncio.get_running_loop()
            await until(lambda: by_port[half.writer.get_extra_info("sockname")[1]].waited_for == "rest")
            reader.pause_writing()
            for each in by_port.values():
                each.since_s -= 121.0
            made.proxy._sweep(loop)
            assert (await half.all()).startswith(b"HTTP/1.1 408 ")
            assert await idle.all() == b""
            with contextlib.suppress(ConnectionError):
                assert await stalled.all() == b""
            del asked
            assert by_port[long.writer.get_extra_info("sockname")[1]] in made.proxy._connections

    run(story())


@pytest.mark.slow
def test_the_command_serves_until_it_is_asked_to_end() -> None:
    """SIGTERM ends it with exit code 0 and SIGINT with 130; what passed is the answer."""
    for number, code in ((signal.SIGTERM, 0), (signal.SIGINT, 130)):
        words = ("proxy", "http://127.0.0.1:9", "--listen", "127.0.0.1:0", "--json")
        process = subprocess.Popen(
            [sys.executable, "-m", "polythrottle", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert process.stderr is not None
        line = process.stderr.readline()
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(f"{line.split()[1]}/v1/completions", data=b"{}", timeout=PATIENCE_S)
        assert refused.value.code == 502
        refused.value.close()
        process.send_signal(number)
        out, err = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == code, err
        assert json.loads(out)["unreachable"] == 1


def test_totals_say_how_requests_ended_and_what_tokens_there_were() -> None:
    """Each outcome is there from the start; tokens that nobody told count as none."""
    figures = Figures()
    assert set(figures.totals().values()) == {0}
    for outcome in (OUTCOMES[0], OUTCOMES[0], OUTCOMES[1]):
        figures.ended(outcome)
    figures.answered(whole_s=1.0, first_s=0.1, per_token_s=0.01, prompt=7, completion=90, by_server=True)
    figures.answered(whole_s=1.0, first_s=None, per_token_s=None, prompt=None, completion=3, by_server=False)
    totals = figures.totals()
    assert (totals[OUTCOMES[0]], totals[OUTCOMES[1]], totals[OUTCOMES[-1]]) == (2, 1, 0)
    assert (totals["prompt_tokens"], totals["generation_tokens"]) == (7, 93)
