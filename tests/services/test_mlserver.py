"""Models on MLServer, which knows no extension of KServe v2: plain JSON over HTTP, and gRPC."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from services.servers import Installed, Running, mlserver, polythrottle

from polythrottle.domain.errors import DeviceError, InvalidInput, TrialError, UnknownName
from polythrottle.domain.measurement import Query
from polythrottle.domain.ports import Concurrent
from polythrottle.domain.space import OperatingPoint
from polythrottle.workloads import open_workload

pytestmark = [pytest.mark.services, pytest.mark.timeout(600)]

CODE = """
import numpy as np
from mlserver import MLModel
from mlserver.codecs import NumpyCodec
from mlserver.errors import InferenceError
from mlserver.types import InferenceResponse


class Tiny(MLModel):
    async def load(self):
        self._weights = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32)
        return True

    async def predict(self, payload):
        x = NumpyCodec.decode_input(payload.inputs[0])
        if self.name == "fussy" and x.shape[0] > 2:
            raise InferenceError("no more than two at once")
        y = NumpyCodec.encode_output("y", np.tanh(x @ self._weights))
        return InferenceResponse(model_name=self.name, outputs=[y])
"""
SCHEMES = ("kserve", "kserve+grpc")


@pytest.fixture(scope="module")
def server(installed: Installed, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Run MLServer with two models."""
    folder = tmp_path_factory.mktemp("mlserver")
    with mlserver(installed, folder, CODE, "Tiny", {"tiny": 64, "fussy": 64}) as found:
        yield found


def uri(server: Running, scheme: str, model: str = "tiny") -> str:
    """Return where a model is."""
    return f"{scheme}://127.0.0.1:{server.http if scheme == 'kserve' else server.grpc}/{model}"


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_batch_is_answered(server: Running, scheme: str) -> None:
    """Inputs are made up from what the model declares."""
    workload = open_workload(uri(server, scheme), batch_sizes=[1, 3])
    for batch_size in (3, 1):
        workload.apply(OperatingPoint({"batch_size": batch_size}))
        assert workload.query().items == batch_size
    workload.close()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_queries_at_once_and_one_by_one(server: Running, scheme: str) -> None:
    """In an event loop of the caller's, in the workload's own, and in another again."""
    workload = open_workload(uri(server, scheme) + "?concurrency=8")
    assert isinstance(workload, Concurrent)

    async def many() -> list[Query]:
        queries = await asyncio.gather(*[workload.send() for _ in range(20)])
        await workload.hang_up()
        return queries

    assert len(asyncio.run(many())) == 20
    assert workload.query().items == 1
    assert len(asyncio.run(many())) == 20
    workload.close()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_what_cannot_work_is_one_line(server: Running, scheme: str) -> None:
    """A wrong name, a wrong shape, a knob the server has not."""
    with pytest.raises(UnknownName, match="'tony'; did you mean tiny"):
        open_workload(uri(server, scheme, "tony"))
    with pytest.raises(InvalidInput, match="x is batchx64; 32 after the first does not fit"):
        open_workload(uri(server, scheme), inputs=["32"])
    with pytest.raises(DeviceError, match="lacks the extension"):
        open_workload(uri(server, scheme) + "?instances=1,2")


def test_the_wrong_port_is_one_line(server: Running) -> None:
    """HTTP asked of the port for gRPC, and the other way round."""
    with pytest.raises(DeviceError, match="does not answer in proper HTTP"):
        open_workload(f"kserve://127.0.0.1:{server.grpc}/tiny")
    with pytest.raises(DeviceError, match="nothing answers"):
        open_workload(f"kserve+grpc://127.0.0.1:{server.http}/tiny")


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_model_that_errors_on_some_inputs_fails_those_alone(server: Running, scheme: str) -> None:
    """Its message is passed on, in one line."""
    workload = open_workload(uri(server, scheme, "fussy"), batch_sizes=[2, 4])
    workload.apply(OperatingPoint({"batch_size": 4}))
    with pytest.raises(TrialError, match=r"fussy answers with an error .*no more than two at once") as caught:
        workload.query()
    assert "\n" not in str(caught.value)
    workload.apply(OperatingPoint({"batch_size": 2}))
    assert workload.query().items == 2
    workload.close()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_measure_and_tune_from_the_command_line(server: Running, scheme: str, tmp_path: Path) -> None:
    """A measurement of the default point, then a search over batches that finds more items per joule."""
    words = ("--device", "cpu", "--workload", uri(server, scheme), "--queries", "30", "--seconds", "0.3")
    measured = polythrottle(tmp_path, "measure", *words)
    assert measured["queries"] >= 30
    assert measured["energy_kind"] in ("estimated", "measured")
    tuned = polythrottle(tmp_path, "tune", *words, "--batch", "1,8", "--slo", "p99<=1000x", "--trials", "2")
    assert tuned["best"]["point"]["batch_size"] == 8


def test_a_model_that_errors_ends_no_study(server: Running, tmp_path: Path) -> None:
    """The batch it does not take is a failed trial, the one it takes is the answer."""
    words = ("--device", "cpu", "--workload", uri(server, "kserve", "fussy"), "--queries", "20", "--seconds", "0.2")
    tuned = polythrottle(tmp_path, "tune", *words, "--batch", "2,4", "--trials", "2")
    assert tuned["best"]["point"]["batch_size"] == 2
    assert "no more than two at once" in json.dumps(tuned)
