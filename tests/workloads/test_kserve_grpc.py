"""Models behind KServe v2 over gRPC, on a server that answers as it is told to; the real ones are in tests/services."""

import asyncio
import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from polythrottle.domain.errors import DeviceError, TrialError
from polythrottle.workloads import open_workload
from polythrottle.workloads.services import kserve_grpc
from polythrottle.workloads.services.kserve_grpc import GrpcLine
from polythrottle.workloads.uris import Address

Made = Callable[[Any], None]


class Servicer(service_pb2_grpc.GRPCInferenceServiceServicer):  # type: ignore[misc]
    """One model of one input; what an answer holds is put there by ``made``."""

    def __init__(self) -> None:
        self.made: Made = lambda answer: None
        self.outputs, self.refusal = ["y"], ""

    def ServerMetadata(self, request: Any, context: Any) -> Any:
        """Answer."""
        return service_pb2.ServerMetadataResponse(name="fake")

    def ModelMetadata(self, request: Any, context: Any) -> Any:
        """Answer, or refuse."""
        if self.refusal:
            context.abort(grpc.StatusCode.NOT_FOUND, self.refusal)
        found = service_pb2.ModelMetadataResponse(name="m")
        found.inputs.add(name="x", datatype="FP32", shape=[-1, 4])
        for name in self.outputs:
            found.outputs.add(name=name, datatype="FP32", shape=[-1, 4])
        return found

    def ModelInfer(self, request: Any, context: Any) -> Any:
        """Answer."""
        answer = service_pb2.ModelInferResponse(model_name="m")
        self.made(answer)
        return answer


@pytest.fixture
def served() -> Iterator[tuple[Servicer, str]]:
    """Run a server on the loopback; return what it answers with, and its URI."""
    servicer, server = Servicer(), grpc.server(ThreadPoolExecutor(2))
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield servicer, f"kserve+grpc://127.0.0.1:{port}/m"
    server.stop(None).wait()


def put(answer: Any, *, datatype: str = "FP32", shape: Any = (1, 4), raw: int | None = None, **contents: Any) -> None:
    """Add an output named y, its tensor as so many bytes or in fields."""
    output = answer.outputs.add(name="y", datatype=datatype, shape=shape)
    if raw is not None:
        answer.raw_output_contents.append(b"\0" * raw)
    for name, values in contents.items():
        getattr(output.contents, name).extend(values)


@pytest.mark.parametrize(
    "output",
    [{"raw": 16}, {"fp32_contents": [1.0] * 4}, {"datatype": "INT8", "int_contents": [1] * 4},
     {"datatype": "UINT16", "uint_contents": [1] * 4}, {"datatype": "BOOL", "bool_contents": [True] * 4},
     {"datatype": "BYTES", "raw": 99}, {"datatype": "BYTES", "bytes_contents": [b"a"] * 4},
     {"datatype": "FP16", "raw": 8}, {"shape": (), "raw": 4}],
)  # fmt: skip
def test_an_answer_that_holds_what_it_says_is_taken(served: tuple[Servicer, str], output: dict[str, Any]) -> None:
    """As bytes or in the field of its type."""
    servicer, uri = served
    servicer.made = lambda answer: put(answer, **output)
    workload = open_workload(uri)
    assert workload.query().items == 1
    workload.close()


@pytest.mark.parametrize(
    ("output", "line"),
    [
        ({"raw": 12}, "answers with 12 bytes for its output y, which it calls FP32 1x4$"),
        ({"raw": 0}, "answers with 0 bytes"),
        ({"fp32_contents": [1.0] * 3}, "answers with 3 elements"),
        ({"fp64_contents": [1.0] * 4}, "answers with 0 elements"),
        ({}, "answers with 0 elements"),
        ({"datatype": "FLOAT", "raw": 16}, "which is not KServe v2"),
        ({"shape": (-1, 4), "raw": 16}, "which is not KServe v2"),
    ],
)
def test_an_answer_that_does_not_hold_what_it_says_spoils_the_query(
    served: tuple[Servicer, str], output: dict[str, Any], line: str
) -> None:
    """Its own shape and type are what it is held to."""
    servicer, uri = served
    servicer.made = lambda answer: put(answer, **output)
    workload = open_workload(uri)
    with pytest.raises(TrialError, match=f"^m .*{line}"):
        workload.query()
    workload.close()


def test_missing_tensors_and_outputs_spoil_the_query(served: tuple[Servicer, str]) -> None:
    """No output, one tensor for two, and an output that the model declares but does not answer with."""
    servicer, uri = served
    workload = open_workload(uri)
    with pytest.raises(TrialError, match="m answers with no outputs"):
        workload.query()

    def two(answer: Any) -> None:
        put(answer)
        put(answer, raw=16)

    servicer.made = two
    with pytest.raises(TrialError, match="answers with 1 tensors for 2 outputs"):
        workload.query()
    workload.close()
    servicer.outputs = ["y", "z"]
    servicer.made = lambda answer: put(answer, raw=16)
    workload = open_workload(uri)
    with pytest.raises(TrialError, match="m answers without z, which it declares"):
        workload.query()
    workload.close()


@pytest.mark.parametrize(
    ("shape", "line"),
    [
        ([1, 4], "1x4 for its output y, which it declares as [?]x4; the batch that was sent is 8"),
        ([8, 3], "8x3 for its output y, which it declares as [?]x4; the batch that was sent is 8"),
        ([0, 4], "[?]x4 for its output y"),
    ],
)
def test_an_answer_to_another_batch_spoils_the_query(served: tuple[Servicer, str], shape: Any, line: str) -> None:
    """Else one item would be counted as eight."""
    servicer, uri = served
    workload = open_workload(uri, batch_sizes=[8])
    servicer.made = lambda answer: put(answer, shape=shape, raw=4 * math.prod(shape))
    with pytest.raises(TrialError, match=f"^m answers with {line}"):
        workload.query()
    servicer.made = lambda answer: put(answer, shape=[8, 4], raw=128)
    assert workload.query().items == 8
    workload.close()


def test_a_server_without_models_refuses(served: tuple[Servicer, str]) -> None:
    """What it lacks is passed on in its words."""
    servicer, uri = served
    servicer.refusal = "no\nsuch model"
    with pytest.raises(DeviceError, match=r"refuses \(NOT_FOUND\): no such model"):
        open_workload(uri)


class Answers:
    """A client that answers as Triton's does."""

    async def get_model_repository_index(self, as_json: bool) -> dict[str, Any]:
        """Return models: ready, and not with and without a reason."""
        assert as_json
        return {"models": [{"name": "a", "state": "READY"}, {"name": "b", "reason": "no file"}, {"name": "c"}]}

    async def get_model_config(self, model: str, version: str, as_json: bool) -> dict[str, Any]:
        """Return the configuration of the version that is asked for."""
        assert as_json
        assert version == "2"
        return {"config": {"name": model, "max_batch_size": 8}}


def test_what_a_server_says_of_its_models_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reason counts more than a state; the configuration is that of the version that was named."""
    monkeypatch.setattr(kserve_grpc, "InferenceServerClient", lambda where: Answers())
    line = GrpcLine(Address("kserve+grpc://h:1/m", "kserve+grpc", "h", 1, "m", {"version": "2"}))
    assert asyncio.run(line.models()) == {"a": "READY", "b": "no file", "c": ""}
    assert asyncio.run(line.config())["max_batch_size"] == 8
