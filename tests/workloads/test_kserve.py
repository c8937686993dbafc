"""Models behind KServe v2, on servers that answer well and badly; the real ones are in tests/services."""

import asyncio
import json
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
from fake_servers import HEADER_LENGTH, FakeServer, Handler, kserve, listening

from polythrottle.domain.errors import DeviceError, InvalidInput, KnobRejected, TrialError, UnknownName
from polythrottle.domain.ports import Concurrent, Noting, Workload
from polythrottle.domain.space import OperatingPoint
from polythrottle.testing import WorkloadContract
from polythrottle.workloads import open_workload

X = {"name": "x", "datatype": "FP32", "shape": [-1, 4]}
TRITON = ("binary_tensor_data", "model_configuration", "model_repository")
CONFIG = {
    "name": "m",
    "max_batch_size": 8,
    "backend": "python",
    "dynamic_batching": {"preferred_batch_size": [8], "max_queue_delay_microseconds": 100},
    "instance_group": [{"name": "m_0", "kind": "KIND_CPU", "count": 1}],
}
INFER = ("POST", "/v2/models/m/infer")
LOAD = ("POST", "/v2/repository/models/m/load")
Serve = Callable[..., FakeServer]
Y = {"name": "y", "datatype": "FP32", "shape": [1, 4]}
NUMBERS = [1.0, 2.0, 3.0, 4.0]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Return what starts a server; it ends with the test."""
    with ExitStack() as stack:
        yield lambda *inputs, **more: stack.enter_context(listening(kserve(list(inputs) or [X], **more)))


@contextmanager
def opened(server: FakeServer, options: str = "", **words: Any) -> Iterator[Workload]:
    """Open the workload ``m`` of a server and close it in the end."""
    workload = open_workload(f"kserve://{server.where}/m{options}", **words)
    try:
        yield workload
    finally:
        workload.close()


def sent(server: FakeServer, path: tuple[str, str]) -> list[bytes]:
    """Return the bodies that were sent to a path."""
    return [body for method, where, _, body in server.seen if (method, where) == path]


class TestKserveContract(WorkloadContract):
    """The contract of every workload, for a served model."""

    @pytest.fixture(autouse=True)
    def _serve(self, serve: Serve) -> None:
        self.server = serve()

    def make(self) -> Workload:
        """Return a model with two batch sizes."""
        return open_workload(f"kserve://{self.server.where}/m", batch_sizes=(1, 4))


# --- requests --------------------------------------------------------------------------------------------------------


def test_a_server_without_extensions_gets_json(serve: Serve) -> None:
    """Tensors go as numbers in JSON, and nothing but the infer request is asked for."""
    server = serve()
    with opened(server, batch_sizes=[2]) as workload:
        assert workload.query().items == 2
    (body,) = sent(server, INFER)
    (tensor,) = json.loads(body)["inputs"]
    assert (tensor["name"], tensor["datatype"], tensor["shape"], len(tensor["data"])) == ("x", "FP32", [2, 4], 8)
    assert not sent(server, LOAD)


def test_a_server_with_the_binary_extension_gets_bytes(serve: Serve) -> None:
    """The tensor follows the JSON, whose length a header tells."""
    server = serve(X, extensions=("binary_tensor_data",))
    with opened(server) as workload:
        workload.query()
    *_, (_, _, headers, body) = server.seen
    text = json.loads(body[: int(headers[HEADER_LENGTH])])
    assert text["inputs"][0]["parameters"]["binary_data_size"] == 16
    assert len(body) == int(headers[HEADER_LENGTH]) + 16


def test_the_same_request_is_sent_again_and_again(serve: Serve) -> None:
    """What a request holds changes with the batch size only."""
    server = serve()
    with opened(server, batch_sizes=[1, 2]) as workload:
        for batch_size in (1, 1, 2):
            workload.apply(OperatingPoint({"batch_size": batch_size}))
            workload.query()
    first, second, other = sent(server, INFER)
    assert first == second != other


def test_making_a_request_is_not_part_of_a_query(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is made once for a point, however often it is sent."""
    from polythrottle.workloads.services.kserve import HttpLine

    server, made, make = serve(), [], HttpLine.request
    monkeypatch.setattr(HttpLine, "request", lambda *words: made.append(words) or make(*words))
    with opened(server) as workload:
        for _ in range(3):
            workload.query()
    assert len(made) == 1


def test_the_largest_batch_is_what_the_server_takes(serve: Serve) -> None:
    """Powers of two up to the configuration's max_batch_size; more is refused."""
    server = serve(X, extensions=("model_configuration",), config={"max_batch_size": 6})
    with opened(server) as workload:
        assert workload.space.knob("batch_size").levels == (1, 2, 4, 6)
    with pytest.raises(InvalidInput, match="takes batches up to 6, not 8"), opened(server, batch_sizes=[8]):
        pass


def test_open_dimensions_must_be_given(serve: Serve) -> None:
    """All but the batch: one line says how."""
    server = serve({"name": "x", "datatype": "FP32", "shape": [-1, 3, -1, -1]})
    with pytest.raises(InvalidInput, match=r"x is batchx3x\?x\?; give .* --input x=3x128x128"), opened(server):
        pass
    with pytest.raises(InvalidInput, match="does not fit"), opened(server, inputs=["4x8x8"]):
        pass
    with opened(server, inputs=["3x8x8"]) as workload:
        assert workload.query().items == 1


def test_a_fixed_batch_is_kept(serve: Serve) -> None:
    """A model that declares a batch of two is fed two."""
    server = serve({"name": "x", "datatype": "FP32", "shape": [2, 4]})
    with opened(server) as workload:
        assert workload.query().items == 2
    with pytest.raises(InvalidInput, match="batch of 2"), opened(server, batch_sizes=[4]):
        pass


def test_a_model_that_declares_nothing_is_told_what_its_inputs_are() -> None:
    """Name, shape and type then come from the user."""
    with listening(kserve([])) as server:
        with pytest.raises(InvalidInput, match="--input x=3x224x224:float32"), opened(server):
            pass
        with opened(server, inputs=["tokens=4:float32"]) as workload:
            assert workload.query().items == 1
        assert json.loads(sent(server, INFER)[0])["inputs"][0]["name"] == "tokens"


def test_text_cannot_be_made_up(serve: Serve) -> None:
    """Inputs that hold no numbers are refused before anything is measured."""
    server = serve({"name": "prompt", "datatype": "BYTES", "shape": [-1, 1]})
    with pytest.raises(InvalidInput, match="prompt is a BYTES; only numbers"), opened(server):
        pass


# --- several at once -------------------------------------------------------------------------------------------------


def test_concurrency_is_an_option_or_a_knob(serve: Serve) -> None:
    """One level fixes it, several are searched."""
    server = serve()
    with opened(server, "?concurrency=8") as workload:
        assert isinstance(workload, Concurrent)
        assert workload.concurrency == 8
        assert "concurrency" not in workload.space.names
    with opened(server, "?concurrency=1,4") as workload:
        assert isinstance(workload, Concurrent)
        workload.apply(OperatingPoint({"concurrency": 4}))
        assert workload.concurrency == 4


def test_many_queries_are_under_way_at_once(serve: Serve) -> None:
    """All of them reach the server before any is answered; afterwards a single query works too."""
    server, together = serve(), threading.Barrier(5)
    whole = server.answers[INFER]

    def meeting(handler: Handler, body: bytes) -> None:
        together.wait(20)
        whole(handler, body)

    async def five(workload: Concurrent) -> int:
        queries = await asyncio.gather(*[workload.send() for _ in range(5)])
        await workload.hang_up()
        return len(queries)

    with opened(server) as workload:
        assert isinstance(workload, Concurrent)
        server.answers[INFER] = meeting
        assert asyncio.run(five(workload)) == 5
        server.answers[INFER] = whole
        assert workload.query().items == 1


def test_a_service_has_threads_of_its_own(serve: Serve) -> None:
    """--threads is refused."""
    with pytest.raises(InvalidInput, match="leave --threads out"), opened(serve(), threads=[1]):
        pass


# --- bad addresses ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rest", "line"),
    [
        ("", "write kserve://host:port/model"),
        ("host/m", "write kserve://host:port/model"),
        ("host:99999/m", "write kserve://host:port/model"),
        ("host:80", "write kserve://host:port/model"),
        ("host:80/m#x", "write kserve://host:port/model"),
        ("[::1/m", "not a service"),
        ("me:secret@host:80/m", "leave name and password out"),
        ("host:80/m?concurrency=0", "whole numbers from 1"),
        ("host:80/m?concurrency=x", "whole numbers from 1"),
        ("host:80/m?concurrency=", "whole numbers from 1"),
        ("host:80/m?concurrency=4,123456789", "write whole numbers from 1 to 1000000 such as 4"),
        ("host:80/m?concurrency=123456789", "write whole numbers from 1 to 1000000 such as 4"),
        ("host:80/m?concurrency=4,1000001", "write whole numbers from 1 to 1000000 such as 4"),
        ("host:80/m?concurrency=4,", "whole numbers from 1"),
        ("host:80/m?concurrency=5000", "at most 4096"),
        ("host:80/m?concurrency=1&concurrency=2", "given twice"),
    ],
)
def test_a_malformed_address_is_one_line(rest: str, line: str) -> None:
    """It says what was wrong, and never repeats a password."""
    with pytest.raises(InvalidInput, match=line) as caught:
        open_workload(f"kserve://{rest}")
    assert "secret" not in str(caught.value)


def test_an_unknown_option_names_the_nearest() -> None:
    """A misspelt option is not ignored."""
    with pytest.raises(UnknownName, match="did you mean concurrency"):
        open_workload("kserve://host:80/m?concurency=4")


@pytest.mark.parametrize("timeout_s", [0.0, -1.0, float("nan"), float("inf")])
def test_an_impossible_timeout_is_refused(timeout_s: float) -> None:
    """It must be above zero and end."""
    with pytest.raises(InvalidInput, match="timeout of a service"):
        open_workload("kserve://host:80/m", timeout_s=timeout_s)


# --- bad servers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["kserve", "kserve+grpc"])
def test_a_server_that_is_down_is_one_line(scheme: str) -> None:
    """It says where nothing answers, and what to look at."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(
        DeviceError, match=rf"nothing answers at 127.0.0.1:{port} \(connection refused\); is the server up"
    ):
        open_workload(f"{scheme}://127.0.0.1:{port}/m")


def test_a_wrong_model_lists_those_there_are(serve: Serve) -> None:
    """The nearest are named."""
    server = serve()
    with pytest.raises(UnknownName, match=r"unknown model at .* 'mobilnet'; did you mean mobilenet"):
        open_workload(f"kserve://{server.where}/mobilnet")


def test_a_wrong_model_where_the_server_lists_none_says_what_it_said(serve: Serve) -> None:
    """Not every server has the repository index."""
    server = serve()
    del server.answers["POST", "/v2/repository/index"]
    with pytest.raises(DeviceError, match=r"refuses \(404\): no /v2/models/other here"):
        open_workload(f"kserve://{server.where}/other")


def test_a_model_that_is_not_ready_says_why(serve: Serve) -> None:
    """The server's own reason is passed on."""
    server = serve()
    server.answers["GET", "/v2/models/m"] = lambda handler, _: handler.document({"error": "unavailable"}, 400)
    server.answers["POST", "/v2/repository/index"] = lambda handler, _: handler.document(
        [{"name": "m", "state": "UNAVAILABLE", "reason": "out of memory"}]
    )
    with pytest.raises(DeviceError, match="m is not ready: out of memory"), opened(server):
        pass


@pytest.mark.parametrize(
    ("body", "line"),
    [
        (b"<html>hello</html>", "describes m in something that is no JSON$"),
        (b"[" * 100_000, "describes m in something that is no JSON$"),
        (b"[]", r"describes the model as \[\], which is not KServe v2$"),
        (b"7", "describes the model as 7, which is not KServe v2$"),
        (b'{"inputs": 5}', r"describes the model as {'inputs': 5}, which is not"),
        (b'{"inputs": [], "outputs": "y"}', "which is not KServe v2$"),
        (b'{"inputs": [5]}', "describes an input as 5, which is not"),
        (b'{"inputs": [{"name": "x", "datatype": "FP32"}]}', "describes an input as"),
        (b'{"inputs": [{"name": "x", "datatype": "FP32", "shape": [Infinity]}]}', "describes an input as"),
    ],
)
def test_metadata_that_is_none_is_called_that(serve: Serve, body: bytes, line: str) -> None:
    """The server lists the model as ready, so that is not what is wrong."""
    server = serve()
    server.answers["GET", "/v2/models/m"] = lambda handler, _: handler.raw(body)
    with pytest.raises(DeviceError, match=line), opened(server):
        pass


def test_an_input_that_does_not_fit_into_memory_is_refused(serve: Serve) -> None:
    """Whether the server or the user gives its shape."""
    server = serve({"name": "x", "datatype": "FP32", "shape": [-1, 100_000_000_000]})
    with pytest.raises(InvalidInput, match="1x100000000000 does not fit into memory"), opened(server):
        pass
    server = serve({"name": "x", "datatype": "INT64", "shape": [-1, -1, -1]})
    with pytest.raises(InvalidInput, match="does not fit"), opened(server, inputs=["1000000x100000000"]):
        pass


@pytest.mark.parametrize(
    "config",
    [[], "x", {"max_batch_size": "many"}, {"max_batch_size": -1}, {"dynamic_batching": 3}, {"instance_group": [1]},
     {"instance_group": 5}, {"dynamic_batching": {"max_queue_delay_microseconds": None}}],
)  # fmt: skip
def test_a_configuration_of_another_form_is_refused(serve: Serve, config: Any) -> None:
    """One line says that it is not Triton's."""
    server = serve(X, extensions=TRITON, config=config)
    with pytest.raises(DeviceError, match="a configuration that is not Triton's"), opened(server):
        pass


@pytest.mark.parametrize("index", [[], [5], {"a": 1}, "x", [{"state": "READY"}], None])
def test_a_list_of_models_of_another_form_says_nothing(serve: Serve, index: Any) -> None:
    """What the server said of the model is passed on."""
    server = serve()
    server.answers["GET", "/v2/models/m"] = lambda handler, _: handler.document({"error": "gone"}, 404)
    server.answers["POST", "/v2/repository/index"] = lambda handler, _: handler.document(index)
    with pytest.raises(DeviceError, match=r"refuses \(404\): gone"), opened(server):
        pass


@pytest.mark.parametrize("body", [b"<html>hello</html>", b"[]", b"{}", b"", b"\xff\xfe"])
def test_a_server_of_another_kind_is_called_that(serve: Serve, body: bytes) -> None:
    """Whatever it answers to the first question."""
    server = serve()
    server.answers["GET", "/v2"] = lambda handler, _: handler.raw(body)
    with pytest.raises(DeviceError, match="answers, but not as a KServe v2 server"), opened(server):
        pass


def test_a_server_that_speaks_no_http_is_called_that() -> None:
    """As gRPC's port does when asked in HTTP."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

        def speak() -> None:
            caller, _ = listener.accept()
            with caller:
                caller.recv(65536)
                caller.sendall(b"\x00\x00\x18\x04\x00\x00\x00\x00\r\n\r\n")

        thread = threading.Thread(target=speak, daemon=True)
        thread.start()
        with pytest.raises(DeviceError, match=r"does not answer in proper HTTP: illegal status line"):
            open_workload(f"kserve://127.0.0.1:{port}/m")
        thread.join()


def test_a_model_that_errors_spoils_the_query_alone(serve: Serve) -> None:
    """Its message is passed on in one line, and the next query may work."""
    server = serve()
    with opened(server) as workload:
        whole = server.answers[INFER]
        server.answers[INFER] = lambda handler, _: handler.document({"error": "CUDA\nout of memory"}, 500)
        with pytest.raises(TrialError, match=r"^m answers with an error \(500\): CUDA out of memory$"):
            workload.query()
        server.answers[INFER] = whole
        assert workload.query().items == 1


@pytest.mark.parametrize(
    "answer",
    [
        lambda handler, _: handler.raw(b'{"outputs": [{"name"', length=100),
        lambda handler, _: handler.raw(b'{"outputs": [{"name"', length=-1),
        lambda handler, _: handler.raw(b"", length=-1),
        lambda handler, _: handler.document({"outputs": []}),
        lambda handler, _: handler.document({"model_name": "m"}),
        lambda handler, _: handler.document([1]),
    ],
    ids=["short of its length", "without a length", "empty", "no outputs", "no field", "a list"],
)
def test_an_answer_that_is_cut_off_spoils_the_query(serve: Serve, answer: Callable[[Handler, bytes], None]) -> None:
    """Half an answer is never a latency."""
    server = serve()
    with opened(server) as workload:
        server.answers[INFER] = answer
        with pytest.raises(TrialError, match=r"cut off|no outputs"):
            workload.query()


def test_a_later_answer_that_is_cut_off_spoils_its_query(serve: Serve) -> None:
    """Though only the first answer to a request is looked through to the last number."""
    server = serve()
    with opened(server) as workload:
        workload.query()
        server.answers[INFER] = lambda handler, _: handler.raw(b'{"outputs": [{"name": "y", "data": [1.0, 2', length=-1)
        with pytest.raises(TrialError, match="cut off"):
            workload.query()


def test_tensors_short_of_their_size_spoil_the_query(serve: Serve) -> None:
    """Bytes behind the JSON are counted."""
    server = serve(X, extensions=("binary_tensor_data",))
    head = {"name": "y", "datatype": "FP32", "shape": [1, 4], "parameters": {"binary_data_size": 16}}
    text = json.dumps({"outputs": [head]}).encode()
    server.answers[INFER] = lambda handler, _: handler.raw(text + b"\0" * 12, **{HEADER_LENGTH: str(len(text))})
    with opened(server) as workload, pytest.raises(TrialError, match="cut off"):
        workload.query()


@pytest.mark.parametrize(
    ("outputs", "line"),
    [
        ([{**Y, "data": NUMBERS[:3]}], "answers with 3 elements for its output y, which it calls FP32 1x4$"),
        ([{**Y, "data": [*NUMBERS, 5.0]}], "answers with 5 elements for its output y"),
        ([{**Y, "data": []}], "answers with 0 elements"),
        ([{**Y, "data": [[1.0, 2.0], 3.0]}], "answers with 3 elements"),
        ([Y], "answers without data for its output y"),
        ([{**Y, "data": 5.0}], "answers without data"),
        ([{**Y, "data": [None] * 4}], r"answers with null, perhaps in place of NaN, in its output y"),
        ([{**Y, "data": ["1", "2", "3", "4"]}], "answers with str in its output y, which it calls FP32"),
        ([{**Y, "data": [True] * 4}], "answers with bool"),
        ([{**Y, "data": [{}] * 4}], "answers with dict"),
        ([{**Y, "datatype": "BYTES", "data": NUMBERS}], "answers with float in its output y, which it calls BYTES"),
        ([{**Y, "datatype": "FLOAT", "data": NUMBERS}], "describes an output as .* which is not KServe v2"),
        ([{**Y, "shape": [-1, 4], "data": NUMBERS}], "describes an output as"),
        ([{**Y, "shape": "4", "data": NUMBERS}], "describes an output as"),
        ([{"data": NUMBERS}], "describes an output as {'data'"),
        ([5], "describes an output as 5"),
        ([{**Y, "data": NUMBERS}, {**Y, "name": "z", "data": []}], "answers with 0 elements for its output z"),
        ({"y": NUMBERS}, "answers with no outputs"),
    ],
)
def test_an_answer_that_does_not_hold_what_it_says_spoils_the_query(serve: Serve, outputs: Any, line: str) -> None:
    """Its own shape and type are what it is held to."""
    server = serve()
    with opened(server) as workload:
        server.answers[INFER] = lambda handler, _: handler.document({"outputs": outputs})
        with pytest.raises(TrialError, match=f"^m {line}"):
            workload.query()


@pytest.mark.parametrize(
    "output",
    [{**Y, "data": [[1, 2], [3, 4.5]]}, {**Y, "shape": [0, 4], "data": []}, {**Y, "shape": [], "data": [1.0]},
     {**Y, "datatype": "BYTES", "data": ["a", "b", "c", "d"]}, {**Y, "datatype": "BOOL", "data": [True, False, 1, 0]},
     {**Y, "parameters": None, "data": NUMBERS}],
)  # fmt: skip
def test_an_answer_that_holds_what_it_says_is_taken(serve: Serve, output: Any) -> None:
    """Nested or flat, empty where its shape is, of any type."""
    server = serve()
    server.answers[INFER] = lambda handler, _: handler.document({"outputs": [output]})
    with opened(server) as workload:
        assert workload.query().items == 1


@pytest.mark.parametrize("word", ["NaN", "Infinity", "-Infinity"])
def test_what_json_cannot_hold_spoils_the_query(serve: Serve, word: str) -> None:
    """Over gRPC it could be; that is said."""
    server, text = serve(), json.dumps({"outputs": [{**Y, "data": NUMBERS}]}).replace("3.0", word)
    server.answers[INFER] = lambda handler, _: handler.raw(text.encode())
    with opened(server) as workload, pytest.raises(TrialError, match=f"answers with {word}, which is no JSON"):
        workload.query()


def test_an_error_beside_outputs_spoils_the_query(serve: Serve) -> None:
    """Though the status is that of an answer."""
    server = serve()
    whole = {"outputs": [{**Y, "data": NUMBERS}], "error": {"message": "ran out\nof memory"}}
    server.answers[INFER] = lambda handler, _: handler.document(whole)
    with opened(server) as workload, pytest.raises(TrialError, match="m answers with an error: ran out of memory"):
        workload.query()


def test_an_answer_without_a_declared_output_spoils_the_query(serve: Serve) -> None:
    """A model that leaves out some of its work is not measured as if it did all of it."""
    server = serve()
    declared = {"name": "m", "inputs": [X], "outputs": [Y, {**Y, "name": "z"}]}
    server.answers["GET", "/v2/models/m"] = lambda handler, _: handler.document(declared)
    server.answers[INFER] = lambda handler, _: handler.document({"outputs": [{**Y, "data": NUMBERS}]})
    with opened(server) as workload, pytest.raises(TrialError, match=r"^m answers without z, which it declares$"):
        workload.query()


@pytest.mark.parametrize("binary", [False, True])
def test_an_answer_to_another_batch_spoils_the_query(serve: Serve, binary: bool) -> None:
    """Else one item would be counted as eight; what the model declares says how many there are."""
    server = serve(X, extensions=("binary_tensor_data",) if binary else ())
    declared = {"name": "m", "inputs": [X], "outputs": [{**Y, "shape": [-1, 4]}]}
    server.answers["GET", "/v2/models/m"] = lambda handler, _: handler.document(declared)

    def answering(rows: int, columns: int) -> Callable[[Handler, bytes], None]:
        head, count = {**Y, "shape": [rows, columns]}, rows * columns
        if not binary:
            return lambda handler, _: handler.document({"outputs": [{**head, "data": [0.5] * count}]})
        text = json.dumps({"outputs": [{**head, "parameters": {"binary_data_size": 4 * count}}]}).encode()
        return lambda handler, _: handler.raw(text + b"\0" * 4 * count, **{HEADER_LENGTH: str(len(text))})

    with opened(server, batch_sizes=[8]) as workload:
        for rows, columns in ((1, 4), (7, 4), (8, 3)):
            server.answers[INFER] = answering(rows, columns)
            with pytest.raises(
                TrialError, match=rf"^m answers with {rows}x{columns} for its output y, which .* is 8(;|$)"
            ):
                workload.query()
        server.answers[INFER] = answering(8, 4)
        assert workload.query().items == 8


def test_detections_of_a_batch_need_not_be_as_many(serve: Serve) -> None:
    """The URI names those that count their own, so that nobody takes one answer for that of every item."""

    def finding(most: int | None) -> FakeServer:
        tells: tuple[str, ...] = () if most is None else ("model_configuration",)
        server = serve(X, extensions=tells, config={"name": "m", "max_batch_size": most})
        declared = {"name": "m", "inputs": [X], "outputs": [{**Y, "shape": [-1, 7]}]}
        server.answers["GET", "/v2/models/m"] = lambda handler, _: handler.document(declared)
        found = {"outputs": [{**Y, "shape": [5, 7], "data": [0.0] * 35}]}
        server.answers[INFER] = lambda handler, _: handler.document(found)
        return server

    for most in (0, None, 8):
        with opened(finding(most), "?unbatched=y", batch_sizes=[2]) as workload:
            assert workload.query().items == 2
    for most in (0, None, 8):
        refused = pytest.raises(TrialError, match="add unbatched=y to the URI")
        with opened(finding(most), batch_sizes=[2]) as workload, refused:
            workload.query()
    with pytest.raises(UnknownName, match="unknown output of m 'z'"):
        open_workload(f"kserve://{finding(None).where}/m?unbatched=z")


def test_a_server_that_answers_every_batch_with_one_row_is_refused_above_1(serve: Serve) -> None:
    """Though its configuration has no batches, so that each dimension is its own: sixteen items are not answered."""
    server = serve(X, extensions=("model_configuration",), config={"name": "m", "max_batch_size": 0})
    declared = {"name": "m", "inputs": [X], "outputs": [{**Y, "shape": [-1, 2]}]}
    server.answers["GET", "/v2/models/m"] = lambda handler, _: handler.document(declared)
    one_row = {"outputs": [{**Y, "shape": [1, 2], "data": [0.1, 0.2]}]}
    server.answers[INFER] = lambda handler, _: handler.document(one_row)
    with opened(server, batch_sizes=[1, 16]) as workload:
        workload.apply(OperatingPoint({"batch_size": 1}))
        assert workload.query().items == 1
        workload.apply(OperatingPoint({"batch_size": 16}))
        with pytest.raises(TrialError, match=r"a batch of 16 with y 1x2: nothing there counts 16 .* add unbatched=y "):
            workload.query()


def test_outputs_need_no_batch_where_inputs_have_none(serve: Serve) -> None:
    """An open first dimension is then something else, such as how many objects were found."""
    server = serve()
    fixed = {"name": "m", "inputs": [{**X, "shape": [2, 4]}], "outputs": [{**Y, "shape": [-1, 4]}]}
    server.answers["GET", "/v2/models/m"] = lambda handler, _: handler.document(fixed)
    server.answers[INFER] = lambda handler, _: handler.document({"outputs": [{**Y, "data": NUMBERS}]})
    with opened(server) as workload:
        assert workload.query().items == 2


@pytest.mark.parametrize("shape", [None, "x", [None], 5, [[1]]])
def test_an_output_whose_declared_shape_is_none_is_known_by_name_only(serve: Serve, shape: Any) -> None:
    """Nothing can be compared then."""
    server = serve()
    declared = {"name": "m", "inputs": [X], "outputs": [{"name": "y", "datatype": "FP32", "shape": shape}]}
    server.answers["GET", "/v2/models/m"] = lambda handler, _: handler.document(declared)
    server.answers[INFER] = lambda handler, _: handler.document({"outputs": [{**Y, "data": NUMBERS}]})
    with opened(server, "?unbatched=y", batch_sizes=[8]) as workload:
        assert workload.query().items == 8


def test_long_answers_like_one_that_was_whole_are_not_looked_through_again(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parsing them would cost joules of the machine that is measured; short ones and others are looked through."""
    from polythrottle.workloads.services import kserve

    server, seen, see = serve(), [], kserve.check_json_answer
    monkeypatch.setattr(kserve, "check_json_answer", lambda *words: seen.append(words) or see(*words))
    head = {**Y, "shape": [1, 10_000]}
    with opened(server) as workload:
        server.answers[INFER] = lambda handler, _: handler.document({"outputs": [{**head, "data": [0.5] * 10_000}]})
        workload.query()
        workload.query()
        assert len(seen) == 1
        server.answers[INFER] = lambda handler, _: handler.document({"outputs": [{**head, "data": [0.5] * 8_000}]})
        with pytest.raises(TrialError, match="answers with 8,000 elements"):
            workload.query()


@pytest.mark.parametrize(
    ("size", "tensor", "shape", "length", "line"),
    [
        (12, 12, [1, 4], None, "answers with 12 bytes for its output y, which it calls FP32 1x4"),
        (16, 16, [1, 5], None, "answers with 16 bytes for its output y"),
        (16, 20, [1, 4], None, "20 bytes behind the JSON instead of 16"),
        (-16, 16, [1, 4], None, "says that its output y has -16 bytes"),
        ("16", 16, [1, 4], None, "says that its output y has 16 bytes"),
        (16, 16, [1, 4], "9999", "of which 9999 are JSON: it is cut off"),
        (16, 16, [1, 4], "-1", "of which -1 are JSON"),
        (16, 16, [1, 4], "abc", "of which abc are JSON"),
    ],
)
def test_tensors_that_are_not_what_they_are_called_spoil_the_query(
    serve: Serve, size: Any, tensor: int, shape: list[int], length: str | None, line: str
) -> None:
    """As many bytes as elements of the type take, as many behind the JSON as it says."""
    server = serve(X, extensions=("binary_tensor_data",))
    head = {**Y, "shape": shape, "parameters": {"binary_data_size": size}}
    text = json.dumps({"outputs": [head]}).encode()
    more = {HEADER_LENGTH: length or str(len(text))}
    server.answers[INFER] = lambda handler, _: handler.raw(text + b"\0" * tensor, **more)
    with opened(server) as workload, pytest.raises(TrialError, match=line):
        workload.query()


def test_an_answer_that_does_not_come_is_given_up(serve: Serve) -> None:
    """After the timeout, in one line."""
    server = serve()
    with opened(server, timeout_s=1.0) as workload:
        server.answers[INFER] = lambda *_: server.over.wait() and None
        with pytest.raises(TrialError, match=r"did not answer within 1 s"):
            workload.query()


def test_a_server_that_hangs_up_spoils_the_query(serve: Serve) -> None:
    """A connection closed instead of an answer is no latency; nor does it end the study."""
    server = serve()
    with opened(server) as workload:
        server.answers[INFER] = lambda handler, _: handler.connection.shutdown(socket.SHUT_RDWR)
        with pytest.raises(TrialError, match="closed the connection instead of answering"):
            workload.query()


def test_a_server_that_dies_spoils_the_query_and_not_the_study() -> None:
    """It may be back for the next trial, so the device is not called lost."""
    with ExitStack() as stack:
        server = stack.enter_context(listening(kserve([X])))
        workload = open_workload(f"kserve://{server.where}/m")
        server.answers[INFER] = lambda handler, _: setattr(handler, "close_connection", True)
        with pytest.raises(TrialError):
            workload.query()
        stack.close()
        with pytest.raises(TrialError, match="nothing answers"):
            workload.query()
        workload.close()


def test_a_service_on_another_machine_is_noted(monkeypatch: pytest.MonkeyPatch, serve: Serve) -> None:
    """Its joules are not those of this machine; those of the loopback are."""
    with opened(serve()) as workload:
        assert isinstance(workload, Noting)
        assert workload.notes == ()
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_: [(2, 1, 6, "", ("192.0.2.7", 80))])
        assert "another machine" in workload.notes[0]


def test_a_missing_client_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The extra is named."""
    for name in [name for name in sys.modules if name.startswith(("polythrottle.workloads.", "tritonclient"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tritonclient", None)
    with pytest.raises(DeviceError, match=r"pip install 'polythrottle\[triton\]'"):
        open_workload("kserve+grpc://127.0.0.1:1/m")


# --- what is set on the server ---------------------------------------------------------------------------------------


def loads(server: FakeServer) -> list[tuple[int, int]]:
    """Return delay in microseconds and instances of each configuration the model was loaded with."""
    configs = [json.loads(json.loads(body)["parameters"]["config"]) for body in sent(server, LOAD)]
    return [
        (each["dynamic_batching"]["max_queue_delay_microseconds"], each["instance_group"][0]["count"])
        for each in configs
    ]


def test_nothing_is_set_on_a_server_unless_asked(serve: Serve) -> None:
    """A server that could load models is left alone."""
    server = serve(X, extensions=TRITON, config=CONFIG)
    with opened(server) as workload:
        workload.query()
        assert workload.space.names == ("batch_size",)
    assert not sent(server, LOAD)


def test_delay_and_instances_are_set_read_back_and_put_back(serve: Serve) -> None:
    """What was found is the default, one load tries whether it can be set, and the last puts it back."""
    server = serve(X, extensions=TRITON, config=CONFIG)
    with opened(server, "?queue_delay_us=0,500&instances=1,2", batch_sizes=[1]) as workload:
        assert dict(workload.space.default) == {"batch_size": 1, "instances": 1, "queue_delay_s": 0.0001}
        assert workload.space.knob("queue_delay_s").levels == (0.0, 0.0001, 0.0005)
        for delay_s, instances in ((0.0005, 2), (0.0005, 2), (0.0, 1)):
            workload.apply(OperatingPoint({"queue_delay_s": delay_s, "instances": instances}))
            workload.query()
    assert loads(server) == [(100, 1), (500, 2), (0, 1), (100, 1)]
    last = json.loads(json.loads(sent(server, LOAD)[-1])["parameters"]["config"])
    assert last == CONFIG


def test_a_server_that_ignores_a_level_is_found_out(serve: Serve) -> None:
    """The configuration is read back; the trial fails, and what was found is put back."""
    server = serve(X, extensions=TRITON, config=CONFIG)
    server.answers[LOAD] = lambda handler, _: handler.raw(b"")
    with opened(server, "?instances=1,2") as workload, pytest.raises(KnobRejected, match=r"with {'instances': 1}, not"):
        workload.apply(OperatingPoint({"instances": 2}))


def test_what_cannot_be_read_back_is_put_back(serve: Serve) -> None:
    """The level may hold although the server does not say so; closing loads the model as it was, without additions."""
    config = {name: value for name, value in CONFIG.items() if name != "dynamic_batching"}
    server = serve(X, extensions=TRITON, config=config)
    tell = server.answers["GET", "/v2/models/m/config"]
    with opened(server, "?queue_delay_us=500") as workload:
        server.answers["GET", "/v2/models/m/config"] = lambda handler, _: handler.raw(b"", 500)
        with pytest.raises(KnobRejected, match="does not load with"):
            workload.apply(OperatingPoint({"queue_delay_s": 0.0005}))
        server.answers["GET", "/v2/models/m/config"] = tell
    found = [json.loads(json.loads(body)["parameters"]["config"]) for body in sent(server, LOAD)]
    assert found[1]["dynamic_batching"] == {"max_queue_delay_microseconds": 500}
    assert found[0] == found[2] == config


def test_a_server_that_refuses_a_level_fails_the_trial(serve: Serve) -> None:
    """Its reason is passed on, and the next level can be set."""
    server = serve(X, extensions=TRITON, config=CONFIG)
    load = server.answers[LOAD]
    with opened(server, "?instances=1,2,4") as workload:
        server.answers[LOAD] = lambda handler, _: handler.document({"error": "no memory"}, 400)
        with pytest.raises(KnobRejected, match=r"does not load with {'instances': 4}: .* no memory"):
            workload.apply(OperatingPoint({"instances": 4}))
        server.answers[LOAD] = load
        workload.apply(OperatingPoint({"instances": 2}))
    assert loads(server)[-1] == (100, 1)


def test_a_model_that_cannot_be_put_back_is_said(serve: Serve) -> None:
    """Closing says what is left to do by hand."""
    server = serve(X, extensions=TRITON, config=CONFIG)
    workload = open_workload(f"kserve://{server.where}/m?instances=1,2")
    workload.apply(OperatingPoint({"instances": 2}))
    server.answers[LOAD] = lambda handler, _: handler.document({"error": "shutting down"}, 503)
    with pytest.raises(DeviceError, match="shutting down; load the model as it was by hand"):
        workload.close()


def test_a_server_that_loads_nothing_on_request_is_named(serve: Serve) -> None:
    """Triton says so in its own words; the option to start it with is added."""
    server = serve(X, extensions=TRITON, config=CONFIG)
    said = "explicit model load / unload is not allowed if polling is enabled"
    server.answers[LOAD] = lambda handler, _: handler.document({"error": said}, 400)
    with (
        pytest.raises(DeviceError, match=r"is not allowed .* --model-control-mode=explicit"),
        opened(server, "?instances=2"),
    ):
        pass


@pytest.mark.parametrize(
    ("options", "extensions", "config", "error", "line"),
    [
        ("?instances=2", (), None, DeviceError, "lacks the extension model_configuration"),
        ("?instances=2", TRITON[:2], CONFIG, DeviceError, "lacks the extension model_repository"),
        ("?queue_delay_us=5", TRITON, {"max_batch_size": 0}, InvalidInput, "has no batches on the server"),
        (
            "?instances=2",
            TRITON,
            {**CONFIG, "instance_group": []},
            InvalidInput,
            "several groups of instances, or none",
        ),
        ("?instances=0", TRITON, CONFIG, InvalidInput, "whole numbers from 1"),
        ("?queue_delay_us=-1", TRITON, CONFIG, InvalidInput, "whole numbers from 0"),
    ],
)
def test_levers_that_are_not_there_are_refused(
    serve: Serve, options: str, extensions: tuple[str, ...], config: Any, error: type[Exception], line: str
) -> None:
    """One line says what the server or the model lacks."""
    server = serve(X, extensions=extensions, config=config)
    with pytest.raises(error, match=line), opened(server, options):
        pass
