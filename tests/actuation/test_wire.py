"""The line to the actuator: what travels, what does not, and what a client is told when nobody answers."""

import json
import math
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polythrottle.actuation import wire
from polythrottle.actuation.client import connection
from polythrottle.actuation.client.connection import Line
from polythrottle.actuation.wire import Later, LeaseOver, Lent, error_from, error_line
from polythrottle.domain import errors
from polythrottle.domain.errors import (
    DeviceError,
    InvalidInput,
    KnobAbsent,
    KnobRejected,
    PermissionDenied,
    PolythrottleError,
    UnknownName,
)
from polythrottle.domain.space import Knob, SearchSpace
from polythrottle.storage.json_channel import decode, encode
from polythrottle.storage.space_codec import space_document

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@given(st.dictionaries(st.text(), st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()))
def test_what_is_sent_arrives(message: dict[str, object]) -> None:
    """A message is one line, and the same after its journey."""
    line = encode(message)
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    assert decode(line) == message


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (b"", "no message"),
        (b"[1]", "object"),
        (b"7", "object"),
        (b'{"a":1,"a":2}', "twice"),
        (b'{"p":{"a":1,"a":2}}', "twice"),
        (b'{"a":NaN}', "NaN"),
        (b'{"a":-Infinity}', "Infinity"),
        (b'{"a":1e999}', "1e999"),
        (b"\xff\xfe", "utf-8"),
        (b'{"a":' + b"[" * 9 + b"]" * 9 + b"}", "nested deeper"),
        (b"[" * 16000, "nested too deep"),
        (b'{"a":' + b"9" * 5000 + b"}", "digits"),
    ],
)
def test_what_is_no_message_is_refused(line: bytes, says: str) -> None:
    """Each in one line that says what is wrong."""
    with pytest.raises(InvalidInput, match=says) as caught:
        decode(line)
    assert "\n" not in str(caught.value)


@given(st.binary(max_size=300))
def test_any_bytes_are_a_message_or_refused(line: bytes) -> None:
    """Nothing else comes of it."""
    with suppress(InvalidInput):
        assert isinstance(decode(line), dict)


@given(PLAIN)
def test_what_is_no_number_is_never_sent(value: object) -> None:
    """NaN is refused wherever it hides."""
    with pytest.raises(ValueError, match="JSON"):
        encode({"a": [value, {"b": math.nan}]})


KINDS = [each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, PolythrottleError)]


def test_an_absent_knob_keeps_its_name() -> None:
    """Who tunes through the actuator leaves it out too."""
    found = error_from(json.loads(json.dumps(error_line(KnobAbsent("why", "mem_hz")))))
    assert isinstance(found, KnobAbsent)
    assert (found.knob, str(found)) == ("mem_hz", "why")


@pytest.mark.parametrize("kind", [each for each in [*KINDS, LeaseOver, Lent] if each is not UnknownName])
def test_an_error_arrives_as_what_it_was(kind: type[PolythrottleError]) -> None:
    """Class, exit code and words."""
    found = error_from(json.loads(json.dumps(error_line(kind("why")))))
    assert (type(found), str(found), found.exit_code) == (kind, "why", kind.exit_code)


def test_errors_with_parts_arrive_with_their_words() -> None:
    """A name's neighbours and the time to wait are not lost; a class nobody here knows is a fault of the device."""
    name = UnknownName("knob", "gpu_mx_hz", ["gpu_max_hz"])
    assert str(error_from(error_line(name))) == str(name)
    later = error_from(error_line(Later("wait", 0.25)))
    assert isinstance(later, Later)
    assert later.after_s == 0.25

    class Odd(KnobRejected):
        """A class that only the sender knows."""

    assert type(error_from(error_line(Odd("x")))) is KnobRejected
    for strange in ({"kind": "Newer", "words": "x"}, {}, None, {"kind": "Exception"}):
        assert type(error_from(strange)) is DeviceError


def test_a_search_space_arrives_whole() -> None:
    """Knobs, points, default and the label of names; what is none is refused."""
    knobs = [Knob("gpu_max_hz", (1, 2, 3)), Knob("power_mode", ("15W", "MAXN"), label=True)]
    space = SearchSpace.grid(knobs, {"gpu_max_hz": 3, "power_mode": "MAXN"}, lambda point: point["gpu_max_hz"] != 2)
    line = json.loads(json.dumps(space_document(space)))
    assert wire.space_from(line).fingerprint == space.fingerprint
    assert wire.space_from(space_document(SearchSpace.unit())).fingerprint == SearchSpace.unit().fingerprint
    for bad in ({}, {**line, "rows": "x"}, {**line, "size": 1}, {**line, "default": {}}):
        with pytest.raises(DeviceError, match="no search space"):
            wire.space_from(bad)


@contextmanager
def answering(path: Path, *answers: bytes) -> Iterator[None]:
    """Answer the first connection's first request with bytes, and hang up."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(os.fspath(path))
        listener.listen()

        def serve() -> None:
            way, _ = listener.accept()
            with way:
                way.recv(65536)
                for each in answers:
                    way.sendall(each)

        thread = threading.Thread(target=serve)
        thread.start()
        yield
        thread.join()


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (b"", "hung up"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "no actuator"),
        (b'{"v":1,"id":9,"answer":{}}\n', "no actuator"),
        (b'{"v":1,"id":1}\n', "no actuator"),
        (b'{"v":1,"id":1,"answer":[]}\n', "no actuator"),
    ],
)
def test_a_server_that_is_no_actuator_is_told_apart(answer: bytes, says: str, tmp_path: Path) -> None:
    """One clear line, whatever it says."""
    with answering(tmp_path / "s", answer):
        line = Line(tmp_path / "s")
        with pytest.raises(DeviceError, match=says):
            line.ask("hello")
        line.close()


def test_an_answer_without_end_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither memory nor time without bounds."""
    monkeypatch.setattr(connection, "MOST_ANSWER", 1000)
    with answering(tmp_path / "s", b"x" * 100_000):
        line = Line(tmp_path / "s")
        with pytest.raises(DeviceError, match="too long"):
            line.ask("hello")
        line.close()


def test_whom_nobody_answers_is_told_what_to_do(tmp_path: Path) -> None:
    """No socket, nobody behind it, no answer in time, too long a request: each has its own words."""
    with pytest.raises(DeviceError, match="start it: polythrottle daemon actuator"):
        Line(tmp_path / "none").ask("hello")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(os.fspath(tmp_path / "s"))
        with pytest.raises(DeviceError, match="no actuator listens"):
            Line(tmp_path / "s").ask("hello")
        listener.listen()
        line = Line(tmp_path / "s", patience_s=0.05)
        with pytest.raises(DeviceError, match="did not answer within"):
            line.ask("hello")
        with pytest.raises(InvalidInput, match="too long"):
            line.ask("apply", point={"x" * wire.MOST_REQUEST: 1})
        line.close()
    with pytest.raises(DeviceError, match="cannot be reached"):
        Line(tmp_path / ("x" * 200)).ask("hello")
    assert issubclass(PermissionDenied, DeviceError)


def test_an_actuator_with_too_many_at_its_door_is_busy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is waited for a little while; as soon as there is room one is let in."""
    monkeypatch.setattr(connection, "_AT_THE_DOOR_S", 0.05)
    with socket.socket(socket.AF_UNIX) as listener, ExitStack() as waiting:
        listener.bind(os.fspath(tmp_path / "s"))
        listener.listen(0)
        status = 0
        while not status:
            way = waiting.enter_context(socket.socket(socket.AF_UNIX))
            way.setblocking(False)
            status = way.connect_ex(os.fspath(tmp_path / "s"))
        with pytest.raises(DeviceError, match="is busy: too many wait at its door; ask again"):
            Line(tmp_path / "s", patience_s=600.0).ask("hello")
        listener.accept()[0].close()
        with pytest.raises(DeviceError, match="did not answer within"):
            Line(tmp_path / "s", patience_s=0.05).ask("hello")
