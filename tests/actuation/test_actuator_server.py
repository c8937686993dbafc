"""The actuator's socket under clients that are slow, silent, hostile, too many, or not permitted."""

import json
import os
import random
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from actuators import ALICE, BOB, MEM, Bench, bench, until
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from polythrottle.actuation import wire
from polythrottle.actuation.client import connection as actuator_client
from polythrottle.actuation.server import server
from polythrottle.actuation.server import server as connection
from polythrottle.actuation.server.permits import Permit, Permits
from polythrottle.actuation.server.request_handler import VERBS
from polythrottle.actuation.server.unix_socket import Peer
from polythrottle.actuation.wire import Later
from polythrottle.domain.errors import PermissionDenied
from polythrottle.testing import FakeKernel

EVERYONE = Permits([Permit(None, ALICE.uid, control=True), Permit(None, BOB.uid, control=True)], own=0)


@pytest.fixture
def board(tmp_path: Path) -> Iterator[Bench]:
    """An actuator that root, Alice and Bob may ask everything."""
    with bench(tmp_path, EVERYONE) as found:
        yield found


def raw(board: Bench, peer: Peer | None = None) -> socket.socket:
    """Return a connection without manners."""
    board.peer = peer
    way = socket.socket(socket.AF_UNIX)
    way.settimeout(30)
    way.connect(os.fspath(board.path))
    return way


def answers(way: socket.socket) -> list[dict[str, Any]]:
    """Return all answers until the connection ends."""
    found = []
    # The kernel tells of what was sent and not read by whoever hung up, after all that was said.
    with suppress(ConnectionResetError), way, way.makefile("rb") as file:
        for line in file:
            found.append(json.loads(line))
    return found


def exchange(board: Bench, data: bytes, peer: Peer | None = None) -> list[dict[str, Any]]:
    """Send bytes, hang up that side, and return all answers."""
    way = raw(board, peer)
    with suppress(OSError):  # it may have been hung up already; what it said is there to be read
        way.sendall(data)
        way.shutdown(socket.SHUT_WR)
    return answers(way)


def message(**fields: Any) -> bytes:
    """Return a request."""
    return (json.dumps({"v": 1, "id": 1, **fields}) + "\n").encode()


def test_requests_are_answered_in_their_order(board: Bench) -> None:
    """Also when they come all at once, and the sender has hung up meanwhile."""
    verbs = ["hello", "devices", "describe", "nonsense", "read", "hello"]
    fields = {"describe": {"device": ""}, "read": {"device": ""}}
    sent = b"".join(message(id=i, verb=verb, **fields.get(verb, {})) for i, verb in enumerate(verbs))
    found = exchange(board, sent)
    assert [each["id"] for each in found] == list(range(6))
    assert ["error" in each for each in found] == [verb == "nonsense" for verb in verbs]


def test_a_search_space_does_not_hold_others_up(board: Bench) -> None:
    """It is computed beside the loop; who asked gets it before the next answer."""
    way = raw(board)
    way.sendall(message(verb="space", device="") + message(id=2, verb="hello"))
    board.line(ALICE).ask("hello")
    way.shutdown(socket.SHUT_WR)
    found = answers(way)
    assert [each["id"] for each in found] == [1, 2]
    assert found[0]["answer"]["size"] > 1


def test_who_holds_a_device_is_answered_before_readers(board: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long each of them takes, and though they came first: a lease that is renewed in time goes on."""
    readers = [raw(board, BOB) for _ in range(server.MOST_PER_USER)]
    first, holder = board.line(), board.line(ALICE)
    token = holder.ask("take", device="", seconds=3)["token"]
    holding = board.service.holdings[0]
    read, waits, goes_on = holding.read, threading.Event(), threading.Event()

    def slow() -> dict[str, Any]:
        board.time.now_s += 1.0
        return read()

    def hold_up() -> dict[str, Any]:
        waits.set()
        assert goes_on.wait(30)
        monkeypatch.setattr(holding, "read", slow)
        return read()

    monkeypatch.setattr(holding, "read", hold_up)
    for line in (first, holder):
        assert line._channel is not None
    first._channel._connection.sendall(message(verb="read", device=""))
    assert waits.wait(30)
    for way in readers:
        way.sendall(message(verb="read", device=""))
    holder._channel._connection.sendall(message(verb="renew", token=token, seconds=3))
    goes_on.set()
    with holder._channel._connection.makefile("rb") as file:
        assert json.loads(file.readline())["answer"] == {"seconds": 3.0, "lent": False}
    for way in readers:
        way.shutdown(socket.SHUT_WR)
        assert len(answers(way)) == 1


@pytest.mark.parametrize("asked", ["renew", "verify"])
def test_a_slow_call_of_one_client_ends_no_other_clients_lease(
    board: Bench, monkeypatch: pytest.MonkeyPatch, asked: str
) -> None:
    """Whoever has asked something meanwhile lives: its lease does not end for having had to wait for another's call."""
    reader, holder = board.line(), board.line(ALICE)
    token = holder.ask("take", device="", seconds=3)["token"]
    holding = board.service.holdings[0]
    read, waits, goes_on = holding.read, threading.Event(), threading.Event()

    def slow() -> dict[str, Any]:
        waits.set()
        assert goes_on.wait(30)
        board.time.now_s += 35.0
        return read()

    monkeypatch.setattr(holding, "read", slow)
    assert reader._channel is not None
    reader._channel._connection.sendall(message(verb="read", device=""))
    assert waits.wait(30)
    assert holder._channel is not None
    fields = {"seconds": 3} if asked == "renew" else {}
    holder._channel._connection.sendall(message(verb=asked, token=token, **fields))
    goes_on.set()
    with holder._channel._connection.makefile("rb") as file:
        assert "answer" in json.loads(file.readline())
    assert holding.terms.lease is not None
    assert holding.terms.lease.token == token


def test_a_slow_call_does_not_prolong_the_lease_of_who_says_nothing(
    board: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends right after the call, before the next request is answered."""
    reader, holder = board.line(), board.line(ALICE)
    holder.ask("take", device="", seconds=3)
    holding = board.service.holdings[0]
    read = holding.read

    def slow() -> dict[str, Any]:
        board.time.now_s += 35.0
        return read()

    monkeypatch.setattr(holding, "read", slow)
    reader.ask("read", device="")
    monkeypatch.setattr(holding, "read", read)
    reader.ask("hello")
    assert holding.terms.lease is None


@pytest.mark.slow
def test_no_more_spaces_are_computed_than_two_at_once(board: Bench) -> None:
    """The third is told to ask again."""
    ways = [raw(board) for _ in range(3)]
    for way in ways:
        way.sendall(message(verb="space", device=""))
        way.shutdown(socket.SHUT_WR)
    kinds = [each.get("error", {}).get("kind") for way in ways for each in answers(way)]
    assert sorted(map(str, kinds)) == ["Later", "None", "None"]


def test_a_line_too_long_ends_the_connection(board: Bench) -> None:
    """With or without an end, and after a good one; it is answered first."""
    long = b"x" * (wire.MOST_REQUEST + 1)
    for data in (long, long + b"\n", message(verb="hello") + long + b"\n" + message(verb="hello")):
        found = exchange(board, data)
        assert found[-1]["id"] is None
        assert "too long" in found[-1]["error"]["words"]
        assert len(found) == (2 if data.startswith(b"{") else 1)
    exactly = message(verb="hello", x="y" * (wire.MOST_REQUEST - len(message(verb="hello", x=""))))
    assert len(exactly) == wire.MOST_REQUEST
    assert "no field" in exchange(board, exactly)[0]["error"]["words"]


def test_half_a_line_is_waited_for_and_not_for_ever(board: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line may come in parts; who does not finish it is dropped, while others are served."""
    way = raw(board)
    for part in (b'{"v":1,', b'"id":3,"verb"', b':"hello"}\n'):
        way.sendall(part)
        board.line(ALICE).ask("hello")
        board.lines.pop().close()
    monkeypatch.setattr(connection, "STUCK_S", 0.2)
    way.sendall(b'{"v":1,')
    assert [each["id"] for each in answers(way)] == [3]


def test_the_silent_are_dropped(board: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who asks nothing keeps no place; a client connects again when it has something to ask."""
    line = board.line()
    monkeypatch.setattr(connection, "SILENT_S", 0.05)
    assert answers(raw(board)) == []
    monkeypatch.setattr(actuator_client, "_IDLE_S", 0.0)
    assert line.ask("hello")


def test_a_slow_reader_holds_nobody_up(board: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who asks and does not read is not listened to any more, then dropped; everybody else is answered meanwhile."""
    slow = raw(board, ALICE)
    slow.setblocking(False)
    sent = 0
    with suppress(BlockingIOError):
        while sent < 4_000_000:
            sent += slow.send(message(verb="describe", device="") * 50)
    line = board.line(BOB)
    for _ in range(20):
        line.ask("hello")
    monkeypatch.setattr(connection, "STUCK_S", 0.2)
    line.ask("hello")
    until(lambda: len(board.server._connections) == 1)
    assert sent < 4_000_000
    slow.close()


def test_there_are_no_more_connections_than_so_many(board: Bench) -> None:
    """Four of a user, thirty-two in all; who is one too many is told so, and a place that is free is given."""
    mine = [board.line(ALICE) for _ in range(server.MOST_PER_USER)]
    with pytest.raises(Later, match="too many connections"):
        board.line(ALICE)
    mine[0].close()
    until(lambda: len(board.server._connections) == server.MOST_PER_USER - 1)
    board.line(ALICE)
    ways = [raw(board) for _ in range(server.MOST_CONNECTIONS - server.MOST_PER_USER)]
    with pytest.raises(Later, match="too many connections"):
        board.line(BOB)
    for way in ways:
        way.close()
    until(lambda: len(board.server._connections) == server.MOST_PER_USER)
    board.line(BOB)


def test_a_user_who_is_not_permitted_is_hung_up_on(board: Bench, state_folder: Path) -> None:
    """Nothing is answered but the refusal, and it is on record."""
    stranger = Peer(7, 4999, frozenset({4999}))
    (found,) = exchange(board, message(verb="hello") * 3, stranger)
    assert found["error"]["kind"] == "PermissionDenied"
    with pytest.raises(PermissionDenied, match="4999 may not ask here"):
        board.line(stranger)
    audit = next((state_folder / "originals").glob("actuator@*.audit")).read_text()
    assert "refused 4999 (process 7) (user 4999)" in audit


AS_ANOTHER = """
import os, sys
from polythrottle.actuation.client.connection import Line
from polythrottle.domain.errors import PermissionDenied
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
try:
    Line(sys.argv[1]).ask("hello")
except PermissionDenied as err:
    print(err)
"""


@pytest.mark.slow
def test_the_kernel_and_the_actuator_both_refuse_another_user() -> None:
    """The socket's mode first, and who gets past it is recognised; with another user where there can be one."""
    # Not in the tests' own folder, which is closed to others.
    with TemporaryDirectory(dir="/tmp") as folder, bench(Path(folder), Permits([], own=0)) as board:
        assert board.path.stat().st_mode & 0o777 == 0o660
        if os.geteuid() != 0:
            with pytest.raises(PermissionDenied, match="may not ask here"):
                board.line(ALICE)
            return
        board.really = True
        for each in (Path(folder), board.path.parent):
            each.chmod(0o755)
        told = []
        for mode in (0o660, 0o666):
            board.path.chmod(mode)
            command = [sys.executable, "-c", AS_ANOTHER, str(board.path)]
            told.append(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
        assert "join the group polythrottle" in told[0]
        assert "may not ask here" in told[1]


LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(VERBS)
ANYTHING = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner))
KEYS = st.sampled_from(["v", "id", "verb", "device", "token", "seconds", "point", "knobs", "holder", "x"])
REQUESTS = st.dictionaries(KEYS, ANYTHING, max_size=8) | st.fixed_dictionaries(
    {"v": st.just(1), "id": st.integers(0, 9), "verb": st.sampled_from([each for each in VERBS if each != "space"])},
    optional={"device": st.just("") | ANYTHING, "token": ANYTHING, "seconds": ANYTHING, "point": ANYTHING},
)
LINES = st.binary(max_size=400) | REQUESTS.map(lambda each: json.dumps(each).encode())


@pytest.mark.slow
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(LINES, min_size=1, max_size=8))
def test_no_message_without_a_lease_changes_anything(board: Bench, lines: list[bytes]) -> None:
    """Whatever is sent, every answer is JSON, the board is untouched, and the next client is served."""
    before, written = board.held(), len(FakeKernel(board.root).writes())
    for answer in exchange(board, b"\n".join(lines) + b"\n"):
        assert "error" in answer or "answer" in answer
    board.service.holdings[0].end("the next example")  # one of them may have been a good take
    assert board.held() == before
    assert len(FakeKernel(board.root).writes()) == written
    board.line().ask("hello")
    board.lines.pop().close()


def mutilated(chance: random.Random) -> bytes:
    """Return a message that is none: cut, flipped, repeated, nested, too long, of wrong types or versions."""
    verb = chance.choice(VERBS)
    good = {"v": 1, "id": 1, "verb": verb, "device": "", "token": "0" * 32, "seconds": 9, "point": {MEM: 204000000}}
    odd = chance.choice([None, True, -1, 10**400, 1e308, "", "\0", "é" * 50, [], {}, [[]] * 9, {"a": {"a": {}}}])
    text = json.dumps({**good, chance.choice(list(good)): odd, chance.choice("abc"): 0}).encode()
    kinds = (
        lambda: bytearray(text[: chance.randrange(len(text))]),
        lambda: bytearray(each ^ (chance.random() < 0.05) * chance.randrange(256) for each in text),
        lambda: bytearray(text.replace(b"{", b'{"v":1,', 1)),
        lambda: bytearray(b"[" * chance.randrange(2, 9000)),
        lambda: bytearray(chance.randbytes(chance.randrange(1, 300))),
        lambda: bytearray(text.replace(b"9", b"NaN")),
        lambda: bytearray(b"x" * chance.choice((wire.MOST_REQUEST + 1, 3 * wire.MOST_REQUEST))),
        lambda: bytearray(text),
    )
    weights = (10, 10, 5, 2, 10, 5, 1, 10)
    return bytes(chance.choices(kinds, weights)[0]()).replace(b"\n", b" ") + b"\n" * (chance.random() < 0.98)


@pytest.mark.slow
def test_ten_thousand_bad_messages_change_nothing(board: Bench) -> None:
    """While a lease runs and a point is applied; the holder is not disturbed, and nothing grows."""
    holder = board.line(ALICE)
    token = holder.ask("take", device="", seconds=60)["token"]
    before_it = board.held()
    holder.ask("apply", token=token, point={MEM: 2133000000})
    before, written = board.held(), len(FakeKernel(board.root).writes())
    assert before != before_it
    chance, sent, answered = random.Random(7), 0, 0
    while sent < 10_000:
        lines = [mutilated(chance) for _ in range(chance.choice((1, 5, 100)))]
        sent += len(lines)
        found = exchange(board, b"".join(lines))
        assert all("error" in each for each in found)
        answered += len(found)
    assert answered > 4000
    assert board.held() == before
    assert len(FakeKernel(board.root).writes()) == written
    assert holder.ask("renew", token=token, seconds=60) == {"seconds": 60.0, "lent": False}
    assert len(board.server._connections) == 1
    holder.ask("release", token=token)
    assert board.held() == before_it


def test_a_fault_of_its_own_ends_one_answer_and_not_the_actuator(
    board: Bench, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The asker is told, the log says what it was, and the next request is answered."""
    line = board.line()

    def broken() -> dict[str, Any]:
        raise RuntimeError("a bug")

    with monkeypatch.context() as patch:
        patch.setattr(board.service.holdings[0], "read", broken)
        with pytest.raises(Exception, match="fault of its own"):
            line.ask("read", device="")
    assert "RuntimeError: a bug" in capfd.readouterr().err
    with monkeypatch.context() as patch:
        patch.setattr(board.service.holdings[0], "read", lambda: {"energy_j": float("nan")})
        with pytest.raises(Exception, match="a number that is not finite"):
            line.ask("read", device="")
    assert line.ask("read", device="")["energy_j"] >= 0


def test_a_client_can_go_at_any_moment(board: Bench) -> None:
    """While its answer is made, while it comes, and between; handles are not lost."""
    for data in (
        b"",
        b"{",
        message(verb="hello"),
        message(verb="space", device=""),
        message(verb="describe", device=""),
    ):
        raw(board).close()
        way = raw(board)
        way.sendall(data)
        way.close()
    until(lambda: not board.server._connections)
    assert board.line()
