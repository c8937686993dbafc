"""What is tuned is what runs: where models run, who chose it, and what a study says of it.

ONNX Runtime's GPU build is not here: a stand-in for its session keeps to the documented API (InferenceSession, in
onnxruntime.ai/docs/api/python) and runs the graph on the processor, naming in its profile the providers that a GPU
build would.
"""

import json
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from builders import FakeDevice, FakeWorkload
from onnx import TensorProto, helper, numpy_helper

import polythrottle
from polythrottle.api.tuning_result import report_facts
from polythrottle.catalog.tuned_profiles import read_profile
from polythrottle.domain.errors import DeviceError, InvalidInput, UnknownName
from polythrottle.domain.ports import Placement, Target
from polythrottle.domain.space import SearchSpace
from polythrottle.tuning.setup import Setup, check_placed, slug, target_of
from polythrottle.workloads import open_workload
from polythrottle.workloads.cuda import Driver
from polythrottle.workloads.onnx_model import UsedProviders
from polythrottle.workloads.python_callable import workload_of
from polythrottle.workloads.uris import ModelUri

TENSORRT, CUDA, CPU = "TensorrtExecutionProvider", "CUDAExecutionProvider", "CPUExecutionProvider"
JETSON = Target("NVIDIA Jetson Orin Nano")


@pytest.fixture
def model(tmp_path: Path) -> str:
    """A matrix product and a rectifier, batched."""
    weights = numpy_helper.from_array(np.eye(16, dtype=np.float32), "w")
    nodes = [helper.make_node("MatMul", ["x", "w"], ["h"]), helper.make_node("Relu", ["h"], ["y"])]
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 16])]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)]
    made = helper.make_model(
        helper.make_graph(nodes, "g", inputs, outputs, [weights]), opset_imports=[helper.make_opsetid("", 17)]
    )
    made.ir_version = 8
    onnx.save(made, tmp_path / "model.onnx")
    return str(tmp_path / "model.onnx")


class GpuBuild:
    """ONNX Runtime as its GPU build answers.

    Args:
        monkeypatch: Puts it in place.
        starts: The providers that start here, of those that are built in.
        runs: Which provider runs an operator of a name.
    """

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, starts: tuple[str, ...], runs: Callable[[str], str] | None = None
    ) -> None:
        self.asked: list[list[Any]] = []
        self.sizes: list[int] = []
        self._starts, self._runs = starts, runs
        self._real = onnxruntime.InferenceSession
        monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: [TENSORRT, CUDA, CPU])
        monkeypatch.setattr(onnxruntime, "InferenceSession", self._session)
        monkeypatch.setattr(onnxruntime, "preload_dlls", lambda: None)

    def _session(self, path: str, options: Any, providers: list[Any]) -> "Session":
        print("EP Error … Falling back")  # as the real one prints where a provider does not start
        self.asked.append(providers)
        names = [each if isinstance(each, str) else each[0] for each in providers]
        registered = [name for name in names if name in (*self._starts, CPU)]
        return Session(self, self._real(path, options, providers=[CPU]), registered)

    def provider(self, operator: str, registered: list[str]) -> str:
        """Return what runs an operator: the first provider that is registered unless it is said otherwise."""
        return registered[0] if self._runs is None else self._runs(operator)


class Session:
    """A session of it."""

    def __init__(self, build: GpuBuild, real: Any, registered: list[str]) -> None:
        self._build, self._real, self._registered = build, real, registered

    def get_inputs(self) -> Any:
        """Return the graph's inputs."""
        return self._real.get_inputs()

    def get_providers(self) -> list[str]:
        """Return the providers that are registered."""
        return self._registered

    def run(self, names: None, feeds: Mapping[str, Any]) -> Any:
        """Run the graph, on the processor."""
        self._build.sizes.append(len(feeds["x"]))
        return self._real.run(names, feeds)

    def end_profiling(self) -> str:
        """Write the profile with other providers in it, and return its name."""
        path = Path(self._real.end_profiling())
        events = json.loads(path.read_text())
        for event in events:
            if event.get("cat") == "Node":
                event["args"]["provider"] = self._build.provider(event["args"]["op_name"], self._registered)
        path.write_text(json.dumps(events))
        return str(path)


def opened(uri: str, target: Target | None = JETSON, **options: Any) -> Any:
    """Return a workload with a GPU as its target."""
    return open_workload(uri, target=target, **options)


# ONNX Runtime


@pytest.mark.parametrize(
    ("query", "target", "starts", "asked", "told"),
    [
        ("", JETSON, (TENSORRT, CUDA), [TENSORRT, CUDA, CPU], "the GPU, by ONNX Runtime with TensorRT"),
        ("", JETSON, (CUDA,), [TENSORRT, CUDA, CPU], "the GPU, by ONNX Runtime with CUDA"),
        ("", None, (TENSORRT, CUDA), [CPU], "the processor, by ONNX Runtime"),
        ("?providers=cuda", JETSON, (TENSORRT, CUDA), [CUDA, CPU], "the GPU, by ONNX Runtime with CUDA"),
        ("?providers=cuda", None, (TENSORRT, CUDA), [CUDA, CPU], "the GPU, by ONNX Runtime with CUDA"),
        ("?providers=cuda,tensorrt", JETSON, (TENSORRT, CUDA), [CUDA, TENSORRT, CPU], "with CUDA"),
        ("?providers=cpu", JETSON, (TENSORRT, CUDA), [CPU], "the processor, by ONNX Runtime"),
    ],
)
def test_tensorrt_then_cuda_then_the_processor(
    model: str,
    monkeypatch: pytest.MonkeyPatch,
    query: str,
    target: Target | None,
    starts: tuple[str, ...],
    asked: list[str],
    told: str,
) -> None:
    """In this order where a GPU is tuned, those that were chosen where somebody chose, else the processor alone."""
    build = GpuBuild(monkeypatch, starts)
    served = opened(model + query, target)
    assert [each if isinstance(each, str) else each[0] for each in build.asked[0]] == asked
    assert told in str(served.placement)
    assert served.placement.asked is bool(query)
    assert served.query().latency_s > 0


def test_the_gpu_that_is_tuned_is_the_one_that_runs(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """ONNX Runtime is told its number in CUDA's order."""
    build = GpuBuild(monkeypatch, (CUDA,))
    assert opened(model, Target("NVIDIA H100", ("GPU-3",), lambda: 3)).placement.gpu == 3
    assert build.asked == [[(TENSORRT, {"device_id": "3"}), (CUDA, {"device_id": "3"}), CPU]]


def test_on_a_gpu_threads_are_no_knob_unless_asked_for(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are the processor's, and each level would build TensorRT's engine anew."""
    GpuBuild(monkeypatch, (CUDA,))
    assert opened(model).space.names == ("batch_size",)
    assert opened(model, threads=[1, 2]).space.names == ("batch_size", "threads")
    assert opened(model, None).space.names == ("batch_size", "threads")


def test_a_new_batch_size_is_run_once_before_anything_is_timed(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """TensorRT builds its engine for it then."""
    build = GpuBuild(monkeypatch, (TENSORRT,))
    served = opened(model)
    served.apply(served.space.default.moved({"batch_size": 8}))
    assert build.sizes == [1, 8]


def test_operators_that_run_elsewhere_are_told(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Counted in ONNX Runtime's own profile; what it prints stays off standard output."""
    GpuBuild(monkeypatch, (CUDA,), lambda operator: CPU if operator == "Relu" else CUDA)
    served = opened(model)
    assert served.notes == (
        f"{model} runs on the GPU, by ONNX Runtime with CUDA; operators of a query: 1 by CUDA, 1 by CPU",
    )
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("starts", "runs", "why"),
    [
        ((), None, "TensorRT and CUDA did not start"),
        ((CUDA,), lambda operator: CPU, "all its operators went there, as CUDA has none of them"),
    ],
)
def test_a_registered_provider_that_runs_nothing_is_the_processor(
    model: str, monkeypatch: pytest.MonkeyPatch, starts: tuple[str, ...], runs: Callable[[str], str] | None, why: str
) -> None:
    """What counts is what ran."""
    GpuBuild(monkeypatch, starts, runs)
    served = opened(model)
    assert served.placement.gpu is None
    with pytest.raises(InvalidInput, match=why):
        check_placed(gpu_device(), served)


def test_a_provider_that_is_not_there_is_refused(model: str) -> None:
    """With what is there and how to get it; a name that is none is unknown."""
    with pytest.raises(DeviceError, match=r"has no CUDA provider \(it has cpu\); install ONNX Runtime's GPU build"):
        opened(f"{model}?providers=cuda")
    with pytest.raises(UnknownName, match="did you mean cuda"):
        opened(f"{model}?providers=cud")
    with pytest.raises(UnknownName, match="did you mean providers"):
        opened(f"{model}?provider=cuda")
    with pytest.raises(InvalidInput, match="not an option"):
        opened(f"{model}?cpu")


@pytest.mark.parametrize("text", ["", "[", "[1]", '[{"cat": "Node", "name": "x_kernel_time"}]', "{}", "null"])
def test_a_profile_that_cannot_be_understood_tells_nothing(tmp_path: Path, text: str) -> None:
    """It is another program's file."""
    path = tmp_path / "profile.json"
    path.write_text(text)
    assert UsedProviders.read(path) == UsedProviders.read(tmp_path / "none") == UsedProviders()


# Studies


def gpu_device(*knobs: str) -> Any:
    """Return a test device that is a Jetson by its URI."""
    device: Any = FakeDevice()
    device.uri, device.title = "jetson", "NVIDIA Jetson Orin Nano"
    return device


@pytest.mark.parametrize("uri", ["jetson", "nvml:GPU-1"])
def test_a_study_of_gpu_clocks_with_a_model_on_the_processor_is_refused(model: str, uri: str) -> None:
    """One line that says why, what to install, and how to have it so all the same."""
    device = gpu_device()
    device.uri = uri
    setup = Setup.of(device, model)
    board, served = setup.open()
    with pytest.raises(InvalidInput) as caught:
        setup.check_placed(board, served)
    told = str(caught.value)
    assert f"{model} runs on the processor" in told
    assert "no provider for NVIDIA GPUs; install ONNX Runtime's GPU build" in told
    assert told.endswith(f"to have it there all the same: {model}?providers=cpu")
    assert "\n" not in told
    for run in (polythrottle.tune, polythrottle.sweep):
        with pytest.raises(InvalidInput, match="would be tuned"):
            run(device, model)


def test_who_asks_for_the_processor_gets_it(model: str) -> None:
    """And the problem says so, which makes it another one."""
    setup = Setup.of(gpu_device(), f"{model}?providers=cpu")
    board, served = setup.open()
    setup.check_placed(board, served)
    assert setup.content(board, served)["runs_on"] == "the processor, by ONNX Runtime"
    assert set(setup.content(board, served)) == {"model", "runs_on"}


@pytest.mark.parametrize("uri", ["cpu", "sim:test", "replay:t.csv"])
def test_no_other_device_is_concerned(model: str, uri: str) -> None:
    """Where no GPU is tuned nothing is said, and journals of before keep their problem."""
    device = gpu_device()
    device.uri = uri
    assert target_of(device) is None
    served = opened(model, target_of(device))
    check_placed(device, served)
    assert served.notes == ()
    assert "runs_on" not in Setup.of(device, model).content(device, served)


def test_other_knobs_of_a_board_may_be_studied_with_the_processor(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The processor's clocks of a Jetson are what such a model runs by."""
    device = gpu_device()
    knob = replace(device.space.knobs[0], name="cpu_max_hz")
    monkeypatch.setattr(FakeDevice, "space", SearchSpace.grid((knob,), {"cpu_max_hz": knob.levels[-1]}))
    check_placed(device, opened(model))


def test_a_model_on_another_gpu_is_refused() -> None:
    """Numbers are CUDA's; NVML counts otherwise."""
    device, served = gpu_device(), FakeWorkload(FakeDevice())
    device.uri, device.identity, device.findings = "nvml:GPU-2", {"uuid": "GPU-2"}, tuple
    served.placement = Placement("torch", gpu=1)  # type: ignore[attr-defined]
    with pytest.raises(InvalidInput, match=r"runs on GPU 1 of CUDA, and .* which is GPU 0 of CUDA; move it there"):
        check_placed(device, served)


def test_what_ran_where_is_in_journal_profile_and_report(tmp_path: Path) -> None:
    """A study on the GPU says by what."""
    device = gpu_device()
    served: Any = FakeWorkload(device)
    served.placement = Placement("TensorRT 10.3.0", gpu=0)
    journal = tmp_path / "a.jsonl"
    found = polythrottle.tune(device, served, method="grid", trials=3, journal=journal, out=tmp_path / "p.toml")
    assert found.study.problem.content["runs_on"] == "the GPU, by TensorRT 10.3.0"
    assert polythrottle.read_journal(journal).problem.content["runs_on"] == "the GPU, by TensorRT 10.3.0"
    assert read_profile(tmp_path / "p.toml").provenance["runs_on"] == "the GPU, by TensorRT 10.3.0"
    assert report_facts(journal)["runs on"] == "the GPU, by TensorRT 10.3.0"
    assert found.report_path is not None
    assert "the GPU, by TensorRT 10.3.0" in found.report_path.read_text()


# Torch


def torch_uri(kind: str, folder: Path) -> str:
    """Write a linear layer as TorchScript, as an export, or in a Python module, and return what opens it."""
    layer, example = torch.nn.Linear(4, 2).eval(), (torch.ones(2, 4),)
    if kind == "model.pt":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            torch.jit.trace(layer, example, check_trace=False).save(str(folder / kind))
    elif kind == "model.pt2":
        torch.export.save(torch.export.export(layer, example), str(folder / kind))
    else:
        (folder / "placed_net.py").write_text("import torch\nnet = torch.nn.Linear(4, 2)\ndef bare(): pass\n")
        return kind
    return str(folder / kind)


@pytest.fixture(autouse=True)
def importable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Modules of the test's own folder, forgotten afterwards."""
    monkeypatch.syspath_prepend(str(tmp_path))
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    sys.modules.pop("placed_net", None)


@pytest.mark.parametrize("kind", ["model.pt", pytest.param("model.pt2", marks=pytest.mark.slow), "placed_net:net"])
def test_a_torch_model_is_where_its_parameters_are(tmp_path: Path, kind: str) -> None:
    """On the processor it is refused beside GPU clocks, unless that was asked for."""
    inputs, uri = () if kind == "model.pt2" else ("4",), torch_uri(kind, tmp_path)
    served = opened(uri, inputs=inputs)
    assert served.placement.gpu is None
    with pytest.raises(InvalidInput) as caught:
        check_placed(gpu_device(), served)
    assert "its parameters are on cpu" in str(caught.value)
    assert str(caught.value).endswith(f"{uri}?device=cpu")
    chosen = opened(f"{uri}?device=cpu", inputs=inputs)
    check_placed(gpu_device(), chosen)
    assert chosen.query().items in (1, 2)
    with pytest.raises(DeviceError, match=r"torch finds no CUDA here \(torch.cuda.is_available"):
        opened(f"{uri}?device=cuda", inputs=inputs)
    with pytest.raises(UnknownName, match="unknown device of"):
        opened(f"{uri}?device=gpu", inputs=inputs)


def test_a_module_without_parameters_and_plain_code_are_nobodys_business(tmp_path: Path) -> None:
    """Where they run is not known, so nothing is refused."""
    torch_uri("placed_net:net", tmp_path)
    assert workload_of("x", torch.nn.ReLU(), inputs=["4"]).placement is None
    check_placed(gpu_device(), opened("placed_net:bare"))
    with pytest.raises(InvalidInput, match="takes no device"):
        opened("placed_net:bare?device=cpu")


class Events:
    """What torch.cuda tells of time on a stream: an event holds when it was passed, in milliseconds."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def __call__(self, *, enable_timing: bool) -> "Events":
        """Make an event that tells time."""
        assert enable_timing
        return self

    def record(self) -> None:
        """Put a mark on the stream."""
        self.log.append("record")

    def synchronize(self) -> None:
        """Wait for the mark."""
        self.log.append("synchronize")

    def elapsed_time(self, end: "Events") -> float:
        """Return 7 ms."""
        assert self.log == ["record", "forward", "record", "synchronize"]
        return 7.0


def test_work_on_a_gpu_is_timed_by_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.cuda.Event, recorded around the forward pass on its stream."""
    events = Events()
    module = torch.nn.Linear(4, 2)
    served: Any = workload_of("x:net", module, inputs=["4"])
    monkeypatch.setattr(torch.cuda, "Event", events)
    monkeypatch.setattr(torch.cuda, "device", lambda device: torch.inference_mode())
    monkeypatch.setattr(served, "_device", torch.device("cuda:0"))
    module.register_forward_hook(lambda *_: events.log.append("forward"))
    assert served.query().latency_s == 0.007


# URIs and CUDA's numbers


def test_options_stand_behind_a_question_mark(tmp_path: Path) -> None:
    """Unless a file is called so; the name of a study leaves them out."""
    assert ModelUri.parse("a/b.onnx?providers=cuda,cpu").chosen("providers", ("cuda", "cpu")) == ("cuda", "cpu")
    odd = tmp_path / "why?.onnx"
    odd.touch()
    assert ModelUri.parse(str(odd)) == ModelUri(str(odd))
    assert Setup(workload="a/b.onnx?providers=cpu").model_file == Path("a/b.onnx")
    assert slug("a/b.engine?x=1") == "b"
    assert Setup(workload="cmd:trtexec --loadEngine=a.engine").model_file is None


class Library:
    """libcuda as the CUDA Driver API reference has it, for a machine with GPUs at some places."""

    def __init__(self, *places: str, broken: int = 0) -> None:
        self.places, self.broken = places, broken

    def cuInit(self, flags: int) -> int:
        """Start."""
        return self.broken

    def cuDeviceGetByPCIBusId(self, device: Any, bus_id: bytes) -> int:
        """Tell the number of the GPU at a place; CUDA_ERROR_INVALID_DEVICE is 101."""
        if bus_id.decode() not in self.places:
            return 101
        device._obj.value = self.places.index(bus_id.decode())
        return 0

    def cuGetErrorString(self, code: int, text: Any) -> int:
        """Say what an error means."""
        text._obj.value = {101: b"invalid device ordinal", 100: b"no CUDA-capable device is detected"}[code]
        return 0


def test_cudas_number_is_found_by_the_place_on_the_bus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its order is not NVML's; a GPU that is hidden from this process is told so."""
    assert Driver(Library("0000:af:00.0", "0000:3b:00.0")).number("0000:3b:00.0") == 1
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with pytest.raises(DeviceError, match="does not show it to this process; CUDA_VISIBLE_DEVICES=0 may hide it"):
        Driver(Library("0000:af:00.0")).number("0000:3b:00.0")
    with pytest.raises(DeviceError, match="no CUDA-capable device is detected"):
        Driver(Library(broken=100))


def test_of_a_group_the_first_gpu_runs_what_runs_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model in this process may be on any of them; a command sees them all."""
    library = Library("0000:af:00.0", "0000:3b:00.0")
    monkeypatch.setattr("polythrottle.workloads.cuda.ctypes.CDLL", lambda name: library)
    device = gpu_device()
    device.uri, device.findings = "nvml:GPU-1,GPU-2", tuple
    device.identity = {"uuid": "GPU-1, GPU-2", "pci": "00000000:3B:00.0, 00000000:AF:00.0"}
    target = target_of(device)
    assert target is not None
    assert (target.uuids, target.number) == (("GPU-1", "GPU-2"), 1)
    served: Any = FakeWorkload(FakeDevice())
    for number in (0, 1):
        served.placement = Placement("torch", gpu=number)
        check_placed(device, served)


def test_a_command_sees_the_gpu_that_is_tuned(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """By its UUID, unless somebody has set the variable."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    script = f"import os; open({str(tmp_path / 'seen')!r}, 'a').write(os.environ.get('CUDA_VISIBLE_DEVICES', '') + ' ')"
    uri = f'cmd:{sys.executable} -c "{script}"'
    opened(uri, Target("NVIDIA H100", ("GPU-7",))).query()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2")
    opened(uri, Target("NVIDIA H100", ("GPU-7",))).query()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    opened(uri).query()
    assert (tmp_path / "seen").read_text() == "GPU-7 2  "
