"""A model on Triton, which knows every extension: tensors as bytes, batches up to a limit, levers on the server."""

import json
import os
import shutil
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from services.servers import Installed, Running, free_ports, polythrottle, running, shown

from polythrottle.domain.errors import DeviceError, UnknownName
from polythrottle.domain.space import OperatingPoint
from polythrottle.workloads import open_workload

pytestmark = [pytest.mark.services, pytest.mark.timeout(600)]

CODE = """
import numpy as np
import triton_python_backend_utils as triton


class TritonPythonModel:
    def execute(self, requests):
        tensors = [triton.get_input_tensor_by_name(each, "x").as_numpy() for each in requests]
        return [triton.InferenceResponse([triton.Tensor("y", np.tanh(x).astype(np.float32))]) for x in tensors]
"""
CONFIG = """
name: "tiny"
backend: "python"
max_batch_size: 4
input [ { name: "x" data_type: TYPE_FP32 dims: [ 3, -1 ] } ]
output [ { name: "y" data_type: TYPE_FP32 dims: [ 3, -1 ] } ]
instance_group [ { kind: KIND_CPU count: 1 } ]
dynamic_batching { max_queue_delay_microseconds: 100 }
"""
SCHEMES = ("kserve", "kserve+grpc")


def triton(installed: Installed, folder: Path, *words: str) -> Any:
    """Return a Triton that runs while it is entered."""
    http, grpc = free_ports(2)
    shipped = installed.packages / "pytriton" / "tritonserver"
    backend = folder / "backends" / "python"
    shutil.copytree(shipped / "backends" / "python", backend)
    version = installed.packages.parent.name.removeprefix("python")
    shutil.copy(shipped / "python_backend_stubs" / version / "triton_python_backend_stub", backend)
    (folder / "models" / "tiny" / "1").mkdir(parents=True)
    (folder / "models" / "tiny" / "1" / "model.py").write_text(CODE)
    (folder / "models" / "tiny" / "config.pbtxt").write_text(CONFIG)
    for program in (backend / "triton_python_backend_stub", shipped / "bin" / "tritonserver"):
        program.chmod(0o755)
    command = [
        str(shipped / "bin" / "tritonserver"),
        *("--model-repository", str(folder / "models"), "--backend-directory", str(folder / "backends")),
        *("--http-port", str(http), "--http-address", "127.0.0.1"),
        *("--grpc-port", str(grpc), "--grpc-address", "127.0.0.1", "--allow-metrics", "false", *words),
    ]
    environment = {
        "LD_LIBRARY_PATH": str(installed.packages / "nvidia_pytriton.libs"),
        "PATH": f"{installed.triton / 'bin'}:{os.environ['PATH']}",
    }
    return running(command, "/v2/health/ready", folder, environment, http, grpc)


@pytest.fixture(scope="module")
def server(installed: Installed, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Run Triton so that models are loaded on request."""
    folder = tmp_path_factory.mktemp("triton")
    with triton(installed, folder, "--model-control-mode", "explicit", "--load-model", "tiny") as found:
        yield found


def uri(server: Running, scheme: str, rest: str = "tiny") -> str:
    """Return where a model is."""
    return f"{scheme}://127.0.0.1:{server.http if scheme == 'kserve' else server.grpc}/{rest}"


def held(server: Running) -> tuple[int, int]:
    """Return queue delay in microseconds and instances, as the server says itself."""
    with urllib.request.urlopen(f"http://127.0.0.1:{server.http}/v2/models/tiny/config", timeout=10) as answer:
        config = json.load(answer)
    return config["dynamic_batching"]["max_queue_delay_microseconds"], config["instance_group"][0]["count"]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_batches_go_up_to_what_the_server_takes(server: Running, scheme: str) -> None:
    """The model's configuration tells; every batch is answered."""
    workload = open_workload(uri(server, scheme), inputs=["3x5"])
    assert workload.space.knob("batch_size").levels == (1, 2, 4)
    for point in workload.space:
        workload.apply(point)
        assert workload.query().items == point["batch_size"]
    workload.close()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_wrong_model_lists_those_there_are(server: Running, scheme: str) -> None:
    """From the repository index."""
    with pytest.raises(UnknownName, match="did you mean tiny"):
        open_workload(uri(server, scheme, "tinny"))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_delay_and_instances_are_set_and_put_back(server: Running, scheme: str) -> None:
    """The server itself says what holds, during and after."""
    assert held(server) == (100, 1)
    workload = open_workload(uri(server, scheme, "tiny?queue_delay_us=0,2000&instances=1,2"), inputs=["3x5"])
    workload.apply(OperatingPoint({"queue_delay_s": 0.002, "instances": 2}))
    assert workload.query().items == 1
    assert held(server) == (2000, 2)
    workload.close()
    assert held(server) == (100, 1)


def test_tune_from_the_command_line(server: Running, tmp_path: Path) -> None:
    """Batch and delay are searched together over gRPC; what was found on the server is put back."""
    where = uri(server, "kserve+grpc", "tiny?queue_delay_us=0&concurrency=4")
    words = ("--device", "cpu", "--workload", where, "--input", "3x5", "--queries", "30", "--seconds", "0.3")
    tuned = polythrottle(tmp_path, "tune", *words, "--slo", "p99<=1000x", "--trials", "4")
    assert set(tuned["best"]["point"]) >= {"batch_size", "queue_delay_s"}
    assert held(server) == (100, 1)


def test_a_server_that_loads_nothing_on_request_is_named(installed: Installed, tmp_path: Path) -> None:
    """Levers are refused with the server's own words; the rest works."""
    with triton(installed, tmp_path) as server:
        with pytest.raises(DeviceError, match=r"not allowed.*--model-control-mode=explicit"):
            open_workload(uri(server, "kserve", "tiny?instances=1,2"), inputs=["3x5"])
        workload = open_workload(uri(server, "kserve"), inputs=["3x5"])
        assert workload.query().items == 1
        workload.close()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_what_the_readme_shows_works(server: Running, scheme: str, tmp_path: Path) -> None:
    """At this server's address, and in two trials."""
    commands = shown(scheme, uri(server, scheme))
    assert commands
    for words in commands:
        tuned = polythrottle(tmp_path, *words, "--input", "3x5", "--trials", "2")
        assert len(tuned["trials"]) == 2
    assert held(server) == (100, 1)
