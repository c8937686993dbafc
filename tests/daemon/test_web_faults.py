"""What clients do wrong, and what they do to harm: nothing of it reaches the control loop or stays behind."""

import random
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path

import pytest
from http_over_socket import ask
from scripted import Script, daemon, until

from polythrottle.daemon.web import ApiServer
from polythrottle.daemon.web import server as connections
from polythrottle.daemon.web.access import AccessControl, Role, Tcp, Visitor

HEAD = b"GET /v1/status HTTP/1.1\r\nHost: x\r\n"


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[Script, ApiServer, Path]]:
    """Return a scripted control loop, what serves it, and where."""
    with daemon(tmp_path / "d.sock") as (script, server):
        yield script, server, tmp_path / "d.sock"


def connected(where: Path) -> socket.socket:
    """Return a line to the daemon."""
    line = socket.socket(socket.AF_UNIX)
    line.settimeout(60)
    until(lambda: line.connect_ex(str(where)) == 0)  # EAGAIN: too many are at the door
    return line


def answered(where: Path, data: bytes) -> bytes:
    """Send bytes and return all that comes back until the daemon closes."""
    found = b""
    with connected(where) as line:
        with suppress(BrokenPipeError):  # it was closed before all was sent; what it said can still be read
            line.sendall(data)
        with suppress(ConnectionResetError):
            while part := line.recv(65536):
                found += part
    return found


@pytest.mark.parametrize(
    "data",
    [
        b"\x00" * 100,
        b"\x16\x03\x01\x02\x00\x01\x00",
        b"G\xffT / HTTP/1.1\r\n\r\n",
        b"GET /\xc3\xa9 HTTP/1.1\r\nHost: x\r\n\r\n",
        HEAD + b"X: " + b"a" * 400_000,
        HEAD + b"Content-Length: -1\r\n\r\n",
        HEAD + b"Content-Length: 3\r\nContent-Length: 4\r\n\r\nabcd",
        HEAD + b"Host: y\r\n\r\n",
    ],
)
def test_what_is_no_http_is_told_so_and_closed(served: tuple[Script, ApiServer, Path], data: bytes) -> None:
    """400 as JSON, and the daemon goes on."""
    found = answered(served[2], data)
    assert found.startswith(b"HTTP/1.1 400 ")
    assert found.endswith(b"}}")
    assert ask(served[2], "GET", "/v1/status")[0] == 200


@pytest.mark.parametrize(
    "data",
    [
        HEAD + b"Connection: close\r\nX: " + b"a" * 20_000 + b"\r\n\r\n",
        HEAD + b"X: a\r\n" * 4_000 + b"\r\n",
        b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /v1/events?after=" + b"1" * 20_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
    ],
)
def test_a_head_has_sixteen_kilobytes_at_most(served: tuple[Script, ApiServer, Path], data: bytes) -> None:
    """Whether it is one long line or many, and though it comes in one piece."""
    assert answered(served[2], data).startswith(b"HTTP/1.1 431 ")


def test_a_body_that_turns_to_garbage_cuts_the_line(served: tuple[Script, ApiServer, Path]) -> None:
    """A chunk of no size in the middle of a body is the end."""
    head = b"POST /v1/take HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
    assert answered(served[2], head + b"zz\r\n{}\r\n0\r\n\r\n") == b""
    assert served[0].wishes == []


def test_a_body_of_unknown_length_is_bounded(served: tuple[Script, ApiServer, Path]) -> None:
    """What comes in chunks is counted."""
    head = b"POST /v1/take HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
    found = answered(served[2], head + b"8000\r\n" + b" " * 0x8000 + b"\r\n8001\r\n" + b" " * 0x8001 + b"\r\n")
    assert found.startswith(b"HTTP/1.1 413 ")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"GET",
        HEAD,
        b"POST /v1/take HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n{",
    ],
)
def test_half_a_request_is_given_up(
    served: tuple[Script, ApiServer, Path], data: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever sends no more is cut off after a while, wherever it stopped."""
    monkeypatch.setattr(connections, "REQUEST_S", 0.1)
    found = answered(served[2], data)
    assert found == b""
    assert served[0].wishes == []


def test_a_request_that_trickles_is_given_up(
    served: tuple[Script, ApiServer, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A letter now and then does not prolong the time a request may take."""
    monkeypatch.setattr(connections, "REQUEST_S", 0.2)
    with connected(served[2]) as line:
        line.settimeout(0.01)
        cut = False
        for letter in (HEAD + b"X: " + b"a" * 10_000)[:10_000]:
            try:
                line.sendall(bytes([letter]))
                cut = line.recv(1) == b""
            except TimeoutError:
                continue
            except (BrokenPipeError, ConnectionResetError):
                cut = True
            if cut:
                break
    assert cut


def test_an_answer_nobody_takes_is_given_up(
    served: tuple[Script, ApiServer, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests in a row whose answers are not read fill a buffer, and then the line is cut."""
    monkeypatch.setattr(connections, "STALLED_S", 0.1)
    _, server, where = served
    with connected(where) as line:
        line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        try:
            while True:
                line.sendall(HEAD + b"\r\n")
        except (BrokenPipeError, ConnectionResetError):
            pass
    until(lambda: not server._house.state.connections)
    assert ask(where, "GET", "/v1/status")[0] == 200


def test_one_too_many_is_told_to_come_back(served: tuple[Script, ApiServer, Path]) -> None:
    """64 lines are kept, and room is there again as soon as one ends."""
    _, server, where = served
    lines = [connected(where) for _ in range(64)]
    until(lambda: len(server._house.state.connections) == 64)
    assert answered(where, HEAD + b"\r\n").startswith(b"HTTP/1.1 503 ")
    lines.pop().close()
    until(lambda: len(server._house.state.connections) < 64)
    assert ask(where, "GET", "/v1/status")[0] == 200
    for line in lines:
        line.close()


def test_others_cannot_lock_the_owner_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last eight lines are kept for root and the daemon's own user."""
    peers = iter([*[Visitor(Role.READ)] * 57, Visitor(Role.CONTROL, trusted=True)])
    monkeypatch.setattr(AccessControl, "admitted", lambda self, connection: next(peers))
    with daemon(tmp_path / "d.sock") as (_, server):
        lines = [connected(tmp_path / "d.sock") for _ in range(56)]
        until(lambda: len(server._house.state.connections) == 56)
        assert answered(tmp_path / "d.sock", HEAD + b"\r\n").startswith(b"HTTP/1.1 503 ")
        assert ask(tmp_path / "d.sock", "GET", "/v1/status")[0] == 200
        for line in lines:
            line.close()


def test_who_comes_over_tcp_takes_no_room_of_the_socket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Anybody may connect there before a token is asked for: 32 at once, and the socket's own places stay free."""
    monkeypatch.setattr(AccessControl, "admitted", lambda self, connection: Visitor(Role.READ))
    path, token = tmp_path / "d.sock", tmp_path / "token"
    token.write_text("t" * 40)
    token.chmod(0o600)
    tcp = Tcp("127.0.0.1", 0, token_file=token)
    with (
        daemon(path, lambda options: replace(options, tcp=tcp)) as (_, server),
        ExitStack() as lines,
    ):
        address = ("127.0.0.1", server.port)
        first = [lines.enter_context(socket.create_connection(address, timeout=60)) for _ in range(32)]
        until(lambda: server._house.over_tcp == 32)
        beyond = [lines.enter_context(socket.create_connection(address, timeout=60)) for _ in range(32)]
        for each in beyond:
            assert each.recv(65536).startswith(b"HTTP/1.1 503 ")
        assert ask(path, "GET", "/v1/status")[0] == 200
        kept = [lines.enter_context(connected(path)) for _ in range(56)]
        until(lambda: len(server._house.state.connections) == 32 + len(kept))
        assert answered(path, HEAD + b"\r\n").startswith(b"HTTP/1.1 503 ")
        first[0].close()
        until(lambda: server._house.over_tcp == 31)


def test_strangers_take_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight may wait to be told that they may not, the others are closed at once."""
    monkeypatch.setattr(AccessControl, "admitted", lambda self, connection: Visitor(Role.NOTHING))
    monkeypatch.setattr(connections, "STRANGER_S", 0.2)
    with daemon(tmp_path / "d.sock") as (_, server):
        lines = [connected(tmp_path / "d.sock") for _ in range(30)]
        assert answered(tmp_path / "d.sock", b"").startswith(b"HTTP/1.1 503 ")
        until(lambda: not server._house.strangers)  # they are cut off though they say nothing
        for line in lines:
            line.close()


@pytest.mark.slow
def test_ten_thousand_fast_connections_leave_nothing(served: tuple[Script, ApiServer, Path]) -> None:
    """Some say nothing, some garbage, some half a request; no line, task or follower is left."""
    script, server, where = served
    chance = random.Random(7)
    says: tuple[Callable[[], bytes], ...] = (
        lambda: b"",
        lambda: chance.randbytes(50),
        lambda: HEAD,
        lambda: HEAD + b"\r\n",
        lambda: b"GET /v1/events HTTP/1.1\r\nHost: x\r\nAccept: text/event-stream\r\n\r\n",
    )

    def hammer() -> None:
        for _ in range(2500):
            with connected(where) as line:
                try:
                    line.sendall(chance.choice(says)())
                except (BrokenPipeError, ConnectionResetError):
                    continue

    hammers = [threading.Thread(target=hammer) for _ in range(4)]
    for each in hammers:
        each.start()
    for each in hammers:
        each.join()
    house = server._house
    until(lambda: not (house.state.connections or house.state.tasks or server._shelf.followers))
    turn = ask(where, "GET", "/v1/status")[1]["turn"]
    until(lambda: ask(where, "GET", "/v1/status")[1]["turn"] != turn)
    assert script.wishes == []


def test_two_requests_in_one_go_are_answered_in_order(served: tuple[Script, ApiServer, Path]) -> None:
    """Pipelining works, though nobody needs it."""
    close = b"GET /v1/devices HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    found = answered(served[2], HEAD + b"\r\n" + close)
    assert found.count(b"HTTP/1.1 200") == 2
    assert found.index(b'"turn"') < found.index(b'"devices"')


def test_an_upgrade_is_not_taken(served: tuple[Script, ApiServer, Path]) -> None:
    """A web socket's request is answered as any other."""
    upgrade = b"Connection: close, upgrade\r\nUpgrade: websocket\r\n\r\n"
    assert answered(served[2], HEAD + upgrade).startswith(b"HTTP/1.1 200 ")


def test_a_fault_of_the_daemons_own_is_one_line_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The traceback is for the log, not for the client."""

    def broken(minutes: int) -> list[dict[str, object]]:
        raise RuntimeError("secret")

    with daemon(tmp_path / "d.sock", lambda options: replace(options, history=broken)):
        status, answer, _ = ask(tmp_path / "d.sock", "GET", "/v1/history")
    assert status == 500
    assert "secret" not in str(answer)
    assert "secret" in caplog.text
