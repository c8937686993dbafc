"""A listener answers who has the token, whatever others do with its address."""

import http.client
import json
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing
from typing import Any

import pytest

from polythrottle.domain.clock import SystemClock, VirtualClock
from polythrottle.domain.errors import InvalidInput
from polythrottle.training.elastic import channel
from polythrottle.training.elastic.channel import ControllerAway, ControllerChannel, Listener

TOKEN = "a-token-of-plain-characters"
MOST = 16
WAIT_S = 60.0


@pytest.fixture
def clock() -> VirtualClock:
    """Return the listener's clock, which stands still until it is set forward, however long the test takes."""
    return VirtualClock()


@pytest.fixture
def listener(clock: VirtualClock) -> Iterator[Listener]:
    """Answer with what was asked, on loopback, and stumble over what cannot be."""

    def answer(verb: str, words: Mapping[str, Any]) -> tuple[int, Mapping[str, Any]]:
        if verb == "garble":
            return 200, {"loss": float("nan")}
        return 200, {"verb": verb, **words} | ({"none": 1 / 0} if verb == "stumble" else {})

    with closing(Listener("127.0.0.1", 0, TOKEN, answer, clock, MOST)) as held:
        held.start()
        yield held


@pytest.fixture
def idle(listener: Listener) -> Iterator[Callable[[], socket.socket]]:
    """Open connections to the listener, and close them after the test."""
    with ExitStack() as stack:
        yield lambda: stack.enter_context(socket.create_connection(listener.address, WAIT_S))


def line(listener: Listener) -> ControllerChannel:
    """Return the way to it."""
    return ControllerChannel(*listener.address, TOKEN, WAIT_S)


def said(way: socket.socket) -> tuple[int, str]:
    """Return what a connection is told until it ends: status and error."""
    text = b"".join(iter(lambda: way.recv(4096), b""))
    head, _, body = text.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)["error"]


def test_idle_connections_cost_no_thread_and_keep_nobody_out(
    listener: Listener, idle: Callable[[], socket.socket]
) -> None:
    """Many times more than are kept: each that is too many is told so in a line, and who has the token is answered."""
    before = threading.active_count()
    held = [idle() for _ in range(20 * MOST)]
    assert line(listener).ask("beat", node="a") == {"verb": "beat", "node": "a"}
    assert threading.active_count() == before
    for way in held[: -2 * MOST]:
        status, error = said(way)
        assert status == 503
        assert f"keeps {MOST} connections" in error
    assert len(listener._connections) <= MOST


def test_who_says_nothing_or_one_byte_at_a_time_is_ended(
    listener: Listener, idle: Callable[[], socket.socket], clock: VirtualClock
) -> None:
    """The time to show the token is counted from the beginning, whatever comes meanwhile."""
    silent, slow = idle(), idle()
    slow.sendall(b"POST /status HTTP/1.1\r\nX")
    assert line(listener).ask("status")["verb"] == "status"
    clock.sleep(channel.UNPROVEN_S / 2)
    slow.sendall(b"-")
    assert line(listener).ask("status")["verb"] == "status"
    clock.sleep(channel.UNPROVEN_S)
    for way in (silent, slow):
        assert said(way) == (408, "no request came in time")


def test_a_request_in_pieces_is_answered(listener: Listener, idle: Callable[[], socket.socket]) -> None:
    """Its body may be long, and come when it comes."""
    body = json.dumps({"text": "x" * 500_000}).encode()
    head = f"POST /echo HTTP/1.1\r\nAuthorization: Bearer {TOKEN}\r\nContent-Type: application/json\r\n"
    way = idle()
    way.sendall(head.encode())
    assert line(listener).ask("status")["verb"] == "status"
    way.sendall(f"Content-Length: {len(body)}\r\n\r\n".encode() + body[:1000])
    assert line(listener).ask("status")["verb"] == "status"
    way.sendall(body[1000:])
    text = b"".join(iter(lambda: way.recv(1 << 16), b""))
    assert text.startswith(b"HTTP/1.0 200 ")
    assert json.loads(text.partition(b"\r\n\r\n")[2])["text"] == "x" * 500_000


@pytest.mark.parametrize(
    ("text", "status"),
    [
        (b"\r\n\r\n", 400),
        (b"GET /status HTTP/1.1\r\n\r\n", 400),
        (b"\xff\xfe\xfd \xff \xff\r\n\r\n", 400),
        (b"POST /status HTTP/1.1\r\n" + b"A: b\r\n" * 200 + b"\r\n", 400),
        (b"POST /status HTTP/1.1\r\nContent-Length: many\r\n\r\n", 400),
        (b"POST /status HTTP/1.1\r\nContent-Type: application/json\r\n\r\n", 401),
        (b"POST /status HTTP/1.1\r\nX: " + b"y" * 200_000, 431),
    ],
)
def test_what_is_no_request_is_one_line(
    listener: Listener, idle: Callable[[], socket.socket], text: bytes, status: int
) -> None:
    """And others are answered as before."""
    way = idle()
    way.sendall(text)
    assert said(way)[0] == status
    assert line(listener).ask("status")["verb"] == "status"


@pytest.mark.parametrize(
    "body",
    [
        b'{"a": NaN}',
        b'{"a": 1e999}',
        b'{"a": 1, "a": 2}',
        b'{"a": ' * 9 + b"1" + b"}" * 9,
        b"[" * 100_000,
        b"[]",
        b"\xff",
    ],
)
def test_a_request_is_read_as_strictly_as_every_message(listener: Listener, body: bytes) -> None:
    """No number that is not finite, no key twice, nothing nested deep; and others are answered as before."""
    call = http.client.HTTPConnection(*listener.address, timeout=WAIT_S)
    call.request("POST", "/status", body, line(listener)._headers())
    answer = call.getresponse()
    assert (answer.status, json.loads(answer.read())) == (400, {"error": "a request is one JSON document"})
    call.close()
    assert line(listener).ask("status")["verb"] == "status"


@pytest.mark.parametrize("body", [b'{"stop": NaN}', b'{"stop": 1, "stop": 0}', b"[" * 100_000, b"[]", b"\xff"])
def test_an_answer_is_read_as_strictly_as_every_message(body: bytes) -> None:
    """Whoever gives another is no controller."""
    with pytest.raises(ControllerAway, match="no polythrottle controller"):
        channel._understood(200, body, "127.0.0.1:7070")


def test_what_is_no_number_travels_neither_way(listener: Listener) -> None:
    """Who asks with one, and who would be answered with one, is told; the listener goes on."""
    with pytest.raises(InvalidInput, match="report: Out of range float"):
        line(listener).ask("report", loss=float("nan"))
    with pytest.raises(InvalidInput, match="'garble': ValueError"):
        line(listener).ask("garble")
    assert line(listener).ask("status")["verb"] == "status"


def test_a_fault_in_one_answer_ends_no_other(listener: Listener) -> None:
    """It is named to who asked."""
    with pytest.raises(InvalidInput, match="'stumble': ZeroDivisionError"):
        line(listener).ask("stumble")
    assert line(listener).ask("status")["verb"] == "status"


def test_where_all_have_the_token_the_next_is_asked_to_come_again(
    listener: Listener, idle: Callable[[], socket.socket]
) -> None:
    """Nobody who was let in is turned away for who comes later; who trains asks again."""
    head = f"POST /status HTTP/1.1\r\nAuthorization: Bearer {TOKEN}\r\nContent-Type: application/json\r\n"
    held = [idle() for _ in range(MOST)]
    for way in held:
        way.sendall(f"{head}Content-Length: 2\r\n\r\n{{".encode())
    _wait(lambda: all(each.proven for each in list(listener._connections.values())) and _full(listener))
    assert said(idle()) == (503, f"the controller is busy with {MOST} requests: ask again")
    with pytest.raises(ControllerAway):
        line(listener).ask("status")
    for way in held:
        way.sendall(b"}")
        assert way.recv(4096).startswith(b"HTTP/1.0 200 ")


def _full(listener: Listener) -> bool:
    return len(listener._connections) == MOST


def _wait(true: Callable[[], bool]) -> None:
    """Wait until something is so."""
    clock = SystemClock()
    end_s = clock.now() + WAIT_S
    while not true():
        assert clock.now() < end_s
        clock.sleep(0.01)
