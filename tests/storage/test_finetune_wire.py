"""The line to the trainer."""

import socket
from collections.abc import Iterator

import pytest

from polythrottle.domain.errors import InvalidInput
from polythrottle.storage.json_channel import Channel


@pytest.fixture
def ends() -> Iterator[tuple[Channel, socket.socket]]:
    """Return a line and the bare socket at its other end."""
    ours, its = socket.socketpair()
    line = Channel(ours, 64)
    with its:
        yield line, its
    line.close()


def test_messages_arrive_whole_and_in_order(ends: tuple[Channel, socket.socket]) -> None:
    """Two lines in one packet are two messages."""
    line, other = ends
    other.sendall(b'{"a": 1}\n{"b": 2}\n')
    assert [line.receive(1.0), line.receive(1.0)] == [{"a": 1}, {"b": 2}]


def test_half_a_line_is_waited_for(ends: tuple[Channel, socket.socket]) -> None:
    """What has come of a line in time is kept for the next time."""
    line, other = ends
    other.sendall(b'{"a": ')
    assert line.receive(0.0) is None
    other.sendall(b"1}\n")
    assert line.receive(1.0) == {"a": 1}


def test_a_message_is_sent_as_one_line(ends: tuple[Channel, socket.socket]) -> None:
    """JSON without spaces, closed by a newline."""
    line, other = ends
    line.send({"verb": "slice", "samples": 4})
    assert other.recv(100) == b'{"verb":"slice","samples":4}\n'


@pytest.mark.parametrize("text", [b"nonsense\n", b"[1]\n", b'{"a": 1, "a": 2}\n', b'{"a": NaN}\n', b"x" * 200])
def test_what_is_no_message_is_refused(ends: tuple[Channel, socket.socket], text: bytes) -> None:
    """Nonsense, keys given twice, numbers that are none, and lines without end."""
    line, other = ends
    other.sendall(text)
    with pytest.raises(InvalidInput, match="no message"):
        line.receive(1.0)


def test_hanging_up_is_told(ends: tuple[Channel, socket.socket]) -> None:
    """Whoever waits learns that nobody is there any more."""
    line, other = ends
    other.close()
    with pytest.raises(EOFError):
        line.receive(1.0)
