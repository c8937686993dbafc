"""Following the daemon by server-sent events."""

import http.client
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from http_over_socket import Line, ask
from scripted import Script, daemon, until

from polythrottle.daemon.status import StudyShown
from polythrottle.daemon.web import ApiServer
from polythrottle.daemon.web import event_stream as streams


class Followed:
    """A stream, message by message."""

    def __init__(self, path: Path, route: str = "/v1/events", **headers: str) -> None:
        self.line = Line(path)
        named = {name.replace("_", "-"): text for name, text in headers.items()}
        self.line.request("GET", route, headers={"Accept": "text/event-stream", **named})
        self.answer: http.client.HTTPResponse = self.line.getresponse()

    def messages(self) -> Iterator[tuple[dict[str, str], Any]]:
        """Yield the fields and the document of each message."""
        fields: dict[str, str] = {}
        while raw := self.answer.readline():
            line = raw.decode().rstrip("\n")
            if not line and "data" in fields:
                yield fields, json.loads(fields["data"])
            if not line:
                fields = {}
            elif not line.startswith(":"):
                name, _, text = line.partition(": ")
                fields[name] = text

    def close(self) -> None:
        """Go away."""
        self.answer.close()
        self.line.close()


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[Script, ApiServer, Path]]:
    """Return a scripted control loop, what serves it, and where."""
    with daemon(tmp_path / "d.sock") as (script, server):
        yield script, server, tmp_path / "d.sock"


def numbers(followed: Followed, count: int) -> list[int]:
    """Return the numbers of the next events."""
    found: list[int] = []
    for fields, shown in followed.messages():
        if fields["event"] == "event":
            assert fields["id"] == str(shown["number"])
            found.append(shown["number"])
        if len(found) == count:
            break
    return found


def test_each_event_comes_once_and_in_order(served: tuple[Script, ApiServer, Path]) -> None:
    """Those that were missed first, then those that happen."""
    script, _, where = served
    script.tell("a", "b", "c")
    followed = Followed(where, "/v1/events?after=1")
    assert numbers(followed, 2) == [2, 3]
    script.tell("d")
    assert numbers(followed, 1) == [4]
    followed.close()


def test_a_follower_takes_up_where_it_was(served: tuple[Script, ApiServer, Path]) -> None:
    """Last-Event-ID goes before the address, which a browser keeps from its first connection."""
    script, _, where = served
    script.tell("a", "b", "c")
    followed = Followed(where, "/v1/events?after=0", Last_Event_ID="2")
    assert numbers(followed, 1) == [3]
    followed.close()


def test_a_number_from_another_count_begins_anew(served: tuple[Script, ApiServer, Path]) -> None:
    """Where the daemon lost its record, a follower who knows event 900 is told the first again."""
    script, _, where = served
    script.tell("a")
    followed = Followed(where, Last_Event_ID="900")
    assert numbers(followed, 1) == [1]
    followed.close()


def test_words_with_line_ends_stay_one_message(served: tuple[Script, ApiServer, Path]) -> None:
    """Nobody can make up events with words of his own."""
    script, _, where = served
    script.tell("a\n\nevent: status\ndata: {}\n\n")
    followed = Followed(where, "/v1/events?after=0")
    fields, shown = next(each for each in followed.messages() if each[0]["event"] == "event")
    assert shown["words"] == "a\n\nevent: status\ndata: {}\n\n"
    assert fields["id"] == "1"
    followed.close()


def test_statuses_come_once_a_second_at_most(
    served: tuple[Script, ApiServer, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of many turns between two messages only the last is shown."""
    monkeypatch.setattr(streams, "_STATUS_S", 0.2)
    _, _, where = served
    followed = Followed(where)
    turns = [shown["turn"] for fields, shown in (next(followed.messages()) for _ in range(3))]
    followed.close()
    assert turns[1] - turns[0] > 2  # the script turns each 20 ms
    assert turns[2] > turns[1]


def test_a_quiet_stream_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that both ends know of a line that is cut."""
    monkeypatch.setattr(streams, "_SILENCE_S", 0.05)
    with daemon(tmp_path / "d.sock", period_s=60) as _:
        followed = Followed(tmp_path / "d.sock")
        found = [followed.answer.readline() for _ in range(12)]
        followed.close()
    assert b": nothing new\n" in found


def test_a_study_is_followed_to_its_end(served: tuple[Script, ApiServer, Path]) -> None:
    """Then the stream ends."""
    script, _, where = served
    script.show(study=StudyShown("s1", "running", 1, 3))
    until(lambda: ask(where, "GET", "/v1/studies")[1]["studies"])
    followed = Followed(where, "/v1/studies/s1/events")
    found = []
    for _, shown in followed.messages():
        found.append((shown["state"], shown["trials"]))
        if shown["trials"] == 1:
            script.show(study=StudyShown("s1", "ended", 3, 3))
    followed.close()
    assert found == [("running", 1), ("ended", 3)]


def test_closing_the_server_ends_every_stream(served: tuple[Script, ApiServer, Path]) -> None:
    """The reader sees the end of the stream, not a broken line."""
    _, server, where = served
    followed = Followed(where)
    closer = threading.Thread(target=server.close)
    closer.start()
    assert list(followed.messages()) is not None
    closer.join()
    followed.close()


def test_followers_are_bounded(served: tuple[Script, ApiServer, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """One too many is told to come back, and there is room again when another has left."""
    monkeypatch.setattr(streams, "FOLLOWERS_MOST", 2)
    _, _, where = served
    first, second = Followed(where), Followed(where)
    third = Followed(where)
    assert third.answer.status == 503
    third.close()
    first.close()
    status = 503
    while status == 503:
        again = Followed(where)
        status = again.answer.status
        again.close()
    assert status == 200
    second.close()


def test_who_never_reads_is_dropped_and_holds_up_nobody(
    served: tuple[Script, ApiServer, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its line is cut once the buffers are full, while others are answered."""
    monkeypatch.setattr("polythrottle.daemon.web.server.STALLED_S", 0.2)
    script, server, where = served
    mute = socket.socket(socket.AF_UNIX)
    mute.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    mute.connect(str(where))
    mute.sendall(b"GET /v1/events HTTP/1.1\r\nHost: x\r\nAccept: text/event-stream\r\n\r\n")
    connections = server._house.state.connections
    until(lambda: connections)
    stuck = next(iter(connections))
    while stuck in connections:
        script.tell(*["x" * 1000] * 100)
        assert ask(where, "GET", "/v1/status")[0] == 200
    mute.close()
