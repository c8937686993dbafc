"""Servers that do wrong whatever HTTP allows and forbids: each is one clear line within the timeout, and no latency."""

import gzip
import json
from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest
from fake_servers import Answer, FakeServer, Handler, kserve, listening, openai, piece, usage

from polythrottle.domain.errors import DeviceError, TrialError
from polythrottle.workloads import open_workload

KINDS = {"kserve": "application/json", "openai": "text/event-stream"}
ANSWER = {"outputs": [{"name": "y", "datatype": "FP32", "shape": [1, 4], "data": [0.5] * 4}]}
WHOLE = {
    "kserve": json.dumps(ANSWER).encode(),
    "openai": piece("a") + piece("b", "stop") + usage(2) + b"data: [DONE]\n\n",
}
ASKED = {"kserve": ("POST", "/v2/models/m/infer"), "openai": ("POST", "/v1/chat/completions")}
X = {"name": "x", "datatype": "FP32", "shape": [-1, 4]}
OK = b"HTTP/1.1 200 OK\r\n"
PATIENCE_S, SHORT_S = 30.0, 2.0


def sending(*parts: bytes) -> Answer:
    """Return what sends bytes as they are and hangs up."""

    def answer(handler: Handler, _: bytes) -> None:
        handler.close_connection = True
        handler.wfile.write(b"".join(parts))

    return answer


def endless(head: bytes, part: bytes, every_s: float = 0.0) -> Answer:
    """Return what sends a part again and again until the other side has gone."""

    def answer(handler: Handler, _: bytes) -> None:
        handler.close_connection = True
        handler.wfile.write(head)
        while not handler.server.over.wait(every_s):
            handler.wfile.write(part)

    return answer


def with_length(head: bytes, length: object, body: bytes) -> Answer:
    """Return what sends a body and claims a length."""
    return sending(head, f"Content-Length: {length}\r\n\r\n".encode(), body)


Fault = Callable[[bytes, bytes], Answer]
CHUNKED = b"Transfer-Encoding: chunked\r\n\r\n"
FAULTS: dict[str, tuple[Fault, str]] = {
    "cut off": (lambda head, body: with_length(head, len(body), body[: len(body) // 2]), "was cut off"),
    # What is wrong behind the head of an answer may arrive with it or after it, which is not told in the same words.
    "a length too short": (
        lambda head, body: with_length(head, len(body) // 2, body),
        "proper HTTP|cut off|no JSON",
    ),
    "two lengths": (lambda head, body: sending(head, b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n"), "proper HTTP"),
    "a negative length": (lambda head, body: with_length(head, -5, body), "proper HTTP"),
    "a length that is none": (lambda head, body: with_length(head, "long", body), "proper HTTP"),
    "a page": (lambda head, body: with_length(OK, 11, b"<html>hello"), "no JSON|instead of a stream"),
    "an empty answer": (lambda head, body: with_length(head, 0, b""), "cut off"),
    "nothing": (lambda head, body: sending(), "closed the connection"),
    "sent on": (
        lambda head, body: with_length(b"HTTP/1.1 302 Found\r\nLocation: /there\r\n", 0, b""),
        "sends on to /there",
    ),
    "packed": (
        lambda head, body: with_length(
            head + b"Content-Encoding: gzip\r\n", len(gzip.compress(body)), gzip.compress(body)
        ),
        "packs",
    ),
    "packed badly": (lambda head, body: with_length(head + b"Content-Encoding: gzip\r\n", 4, b"gzip"), "packs"),
    "a chunk of no size": (
        lambda head, body: sending(head, CHUNKED, b"zz\r\nabc\r\n"),
        "proper HTTP|not answer within",
    ),
    "a chunk too large": (
        lambda head, body: sending(head, CHUNKED, b"f" * 30 + b"\r\nabc\r\n"),
        "proper HTTP|not answer within",
    ),
    "chunks without end": (lambda head, body: endless(head + CHUNKED, b"1\r\n \r\n"), "not answer within|1 MiB"),
    "a body by drops": (lambda head, body: endless(head + b"\r\n", b" ", 0.02), "not answer within"),
    "headers by drops": (lambda head, body: endless(OK, b"X: y\r\n", 0.02), "not answer within"),
    "headers without end": (lambda head, body: endless(OK, b"X: " + b"y" * 5000 + b"\r\n"), "proper HTTP"),
    "a header without end": (lambda head, body: endless(OK + b"X: ", b"y" * 5000), "proper HTTP"),
    "promises": (lambda head, body: endless(b"", b"HTTP/1.1 100 Continue\r\n\r\n", 0.02), "not answer within"),
    "another protocol": (lambda head, body: sending(b"SSH-2.0-OpenSSH_9.6\r\n"), "proper HTTP"),
    "no status": (lambda head, body: sending(b"HTTP/1.1 abc OK\r\n\r\n"), "proper HTTP"),
    "no content": (lambda head, body: sending(b"HTTP/1.1 204 No Content\r\n\r\n"), r"error \(204\)"),
    "a status of its own": (lambda head, body: with_length(b"HTTP/1.1 999 What\r\n", 3, b"shh"), r"error \(999\): shh"),
    "an error without end": (lambda head, body: endless(b"HTTP/1.1 500 No\r\n\r\n", b"e" * 65536), "more than 16 MiB"),
    "no text": (lambda head, body: with_length(head, 9, b"data: \xff\xfe\n"), "no JSON"),
    "zeros": (lambda head, body: with_length(head, 9, b"\0" * 9), "cut off"),
}


# Where waiting is what ends it, one of each kind is enough for every run.
NAMES = [
    pytest.param(name, marks=pytest.mark.slow if "not answer within" in line and name != "headers by drops" else ())
    for name, (_, line) in FAULTS.items()
]


def served(scheme: str) -> FakeServer:
    """Return a server that answers well."""
    server = kserve([X]) if scheme == "kserve" else openai(WHOLE["openai"])
    server.answers[ASKED[scheme]] = lambda handler, _: handler.raw(WHOLE[scheme], kind=KINDS[scheme])
    return server


def opened(scheme: str, server: FakeServer, line: str = "") -> Any:
    """Open the model of a server; a fault is waited for only where waiting is what ends it."""
    model = "m" if scheme == "kserve" else "org/m"
    return open_workload(
        f"{scheme}://{server.where}/{model}", timeout_s=SHORT_S if "not answer within" in line else PATIENCE_S
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("scheme", KINDS)
def test_a_bad_answer_spoils_its_query(scheme: str, name: str) -> None:
    """One line says how; the next query is answered, over a connection that holds nothing of the last."""
    fault, line = FAULTS[name]
    with listening(served(scheme)) as server, closing(opened(scheme, server)) as workload:
        whole = server.answers[ASKED[scheme]]
        server.answers[ASKED[scheme]] = fault(OK + f"Content-Type: {KINDS[scheme]}\r\n".encode(), WHOLE[scheme])
        with pytest.MonkeyPatch.context() as patch:
            if "not answer within" in line:  # what is answered well, before and after, may take its time
                patch.setattr(workload, "_timeout_s", SHORT_S)
            with pytest.raises(TrialError, match=line) as caught:
                workload.query()
        assert "\n" not in str(caught.value)
        assert len(str(caught.value)) < 500
        server.answers[ASKED[scheme]] = whole
        assert workload.query().items == 1


@pytest.mark.parametrize("name", NAMES)
def test_a_bad_description_is_no_server(name: str) -> None:
    """Whatever comes instead of what the model takes, one line says that this is no KServe v2 server."""
    fault, line = FAULTS[name]
    with listening(served("kserve")) as server:
        server.answers["GET", "/v2/models/m"] = fault(OK, WHOLE["kserve"])
        with pytest.raises(DeviceError) as caught:
            opened("kserve", server, line)
    assert "\n" not in str(caught.value)


def test_an_answer_larger_than_memory_is_not_read_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """A quarter of what is free is the most it may take."""
    from polythrottle.workloads.services import kserve

    with listening(served("kserve")) as server:
        monkeypatch.setattr(kserve, "available_bytes", lambda: 8 << 20)
        head = b"HTTP/1.1 200 OK\r\nContent-Length: 1073741824\r\n\r\n"
        server.answers[ASKED["kserve"]] = endless(head, b" " * 65536)
        with (
            closing(opened("kserve", server)) as workload,
            pytest.raises(TrialError, match="answers with more than 2 MiB; it was not read on"),
        ):
            workload.query()
