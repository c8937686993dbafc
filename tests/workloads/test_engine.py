"""TensorRT engines through its Python API, on stubs of TensorRT and of CUDA's driver that refuse what the real ones do.

The stub of TensorRT has the calls of python/src/infer/pyCore.cpp of NVIDIA/TensorRT as releases 8.6.1 and 10.3.0 have
them, and says of shapes and addresses what their docstrings say; that of the driver has those of the CUDA Driver API
reference, counts what is given back, and has a time of its own. Neither is the real thing: nothing here ran on a GPU.
"""

import ctypes
import enum
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from polythrottle.domain.errors import BadFile, DeviceError, InvalidInput, KnobRejected, TrialError
from polythrottle.domain.ports import Target
from polythrottle.domain.space import OperatingPoint
from polythrottle.testing import WorkloadContract
from polythrottle.workloads import cuda, open_workload

OUT_OF_MEMORY, INVALID_VALUE, INVALID_CONTEXT, INVALID_DEVICE = 2, 1, 201, 101
PER_ITEM_MS, PER_MEGABYTE_MS = 2.0, 0.1


class Gpu:
    """libcuda.so.1 with one or two GPUs, a stream at a time, and a clock that moves with what is put on it."""

    def __init__(self, gpus: int = 1, room: int = 1 << 30) -> None:
        self.gpus, self.room = gpus, room
        self.ms = 100.0
        self.current: int | None = None
        self.device: int | None = None
        self.memory: dict[int, bytearray] = {}
        self.host: dict[int, Any] = {}
        self.events: dict[int, float | None] = {}
        self.streams: set[int] = set()
        self.retained = 0
        self._next = 0x7F0000000000

    def _new(self, size: int = 1) -> int:
        self._next += (size + 511) // 256 * 256
        return self._next

    def cuInit(self, flags: int) -> int:
        """Start."""
        return 0

    def cuGetErrorString(self, code: int, text: Any) -> int:
        """Say what an error means."""
        text._obj.value = {2: b"out of memory", 101: b"invalid device ordinal"}.get(code, b"an error")
        return 0

    def cuDeviceGet(self, device: Any, number: int) -> int:
        """Return a GPU."""
        device._obj.value = number
        return 0 if number < self.gpus else INVALID_DEVICE

    def cuDevicePrimaryCtxRetain(self, context: Any, device: Any) -> int:
        """Take its context."""
        self.retained += 1
        self.device = device.value
        context._obj.value = 0xC0 + device.value
        return 0

    def cuDevicePrimaryCtxRelease_v2(self, device: Any) -> int:
        """Give its context back."""
        self.retained -= 1
        return 0

    def cuCtxSetCurrent(self, context: Any) -> int:
        """Make it the calling thread's."""
        self.current = context.value
        return 0

    def cuStreamCreate(self, stream: Any, flags: int) -> int:
        """Make a stream."""
        stream._obj.value = self._new()
        self.streams.add(stream._obj.value)
        return 0 if self.current else INVALID_CONTEXT

    def cuStreamDestroy_v2(self, stream: Any) -> int:
        """End a stream."""
        self.streams.remove(stream.value)
        return 0

    def cuStreamSynchronize(self, stream: Any) -> int:
        """Wait for it."""
        return 0 if stream.value in self.streams else INVALID_VALUE

    def cuEventCreate(self, event: Any, flags: int) -> int:
        """Make an event."""
        event._obj.value = self._new()
        self.events[event._obj.value] = None
        return 0

    def cuEventDestroy_v2(self, event: Any) -> int:
        """End an event."""
        del self.events[event.value]
        return 0

    def cuEventRecord(self, event: Any, stream: Any) -> int:
        """Note the time when the stream gets here."""
        self.events[event.value] = self.ms
        return 0 if stream.value in self.streams else INVALID_VALUE

    def cuEventSynchronize(self, event: Any) -> int:
        """Wait for it."""
        return 0 if self.events[event.value] is not None else INVALID_VALUE

    def cuEventElapsedTime(self, elapsed: Any, start: Any, end: Any) -> int:
        """Tell the milliseconds between two."""
        before, after = self.events[start.value], self.events[end.value]
        if before is None or after is None:
            return INVALID_VALUE
        elapsed._obj.value = after - before
        return 0

    def cuMemAlloc_v2(self, address: Any, size: Any) -> int:
        """Give out memory."""
        if sum(map(len, self.memory.values())) + size.value > self.room:
            return OUT_OF_MEMORY
        address._obj.value = self._new(size.value)
        self.memory[address._obj.value] = bytearray(size.value)
        return 0

    def cuMemFree_v2(self, address: Any) -> int:
        """Take memory back."""
        return 0 if self.memory.pop(address.value, None) is not None else INVALID_VALUE

    def cuMemAllocHost_v2(self, address: Any, size: Any) -> int:
        """Give out memory of the host."""
        held = ctypes.create_string_buffer(size.value)
        address._obj.value = ctypes.addressof(held)
        self.host[address._obj.value] = held
        return 0

    def cuMemFreeHost(self, address: Any) -> int:
        """Take memory of the host back."""
        return 0 if self.host.pop(address.value, None) is not None else INVALID_VALUE

    def cuMemcpyHtoDAsync_v2(self, to: Any, source: Any, size: Any, stream: Any) -> int:
        """Copy to the GPU."""
        self.memory[to.value][: size.value] = self.host[source.value].raw[: size.value]
        self.ms += PER_MEGABYTE_MS * size.value / 1e6
        return 0

    def cuMemcpyDtoHAsync_v2(self, to: Any, source: Any, size: Any, stream: Any) -> int:
        """Copy from the GPU."""
        ctypes.memmove(to.value, bytes(self.memory[source.value][: size.value]), size.value)
        self.ms += PER_MEGABYTE_MS * size.value / 1e6
        return 0

    @property
    def clean(self) -> bool:
        """Whether everything was given back."""
        return not (self.memory or self.host or self.events or self.streams or self.retained)


class DataType(enum.Enum):
    """tensorrt.DataType, with the property itemsize."""

    FLOAT = ("float32", 4)
    HALF = ("float16", 2)
    INT32 = ("int32", 4)
    INT64 = ("int64", 8)
    BF16 = ("bfloat16", 2)

    @property
    def itemsize(self) -> int:
        """Its size in bytes."""
        return self.value[1]


class Mode(enum.Enum):
    """tensorrt.TensorIOMode."""

    NONE = 0
    INPUT = 1
    OUTPUT = 2


class Logger:
    """tensorrt.ILogger: whoever does not call its constructor cannot be used, as with pybind11's classes."""

    class Severity(enum.Enum):
        """How bad a message is."""

        INTERNAL_ERROR = 0
        ERROR = 1
        WARNING = 2

    def __init__(self) -> None:
        self.made = True


class Context:
    """tensorrt.IExecutionContext, with the calls for named tensors alone."""

    def __init__(self, engine: "Engine") -> None:
        self.engine = engine
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.addresses: dict[str, int] = {}
        self.runs: list[dict[str, tuple[int, ...]]] = []

    def _error(self, text: str) -> bool:
        logger = self.engine.logger
        assert logger.made
        logger.log(Logger.Severity.ERROR, text)
        logger.log(Logger.Severity.WARNING, "a warning after it")
        return False

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        """Set the shape of an input, if it lies within the profile."""
        tensor = self.engine.tensors[name]
        low, _, high = tensor.get("profile", [tensor["shape"]] * 3)
        sizes = zip(low, shape, high, strict=True) if len(shape) == len(low) else [(1, 0, 0)]
        if not all(least <= size <= most for least, size, most in sizes):
            return self._error(
                f"IExecutionContext::setInputShape: Error Code 3: API Usage Error: given {shape}, min {low}, max {high}"
            )
        self.shapes[name] = tuple(shape)
        return True

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor, -1 where it is not known yet."""
        if name in self.shapes:
            return self.shapes[name]
        shape = self.engine.tensors[name]["shape"]
        batch = next(iter(self.shapes.values()), (-1,))[0]
        return tuple(batch if size == -1 and not place else size for place, size in enumerate(shape))

    def get_max_output_size(self, name: str) -> int:
        """Return the most bytes an output takes within the profile; -1 before shapes are set."""
        if not self.shapes:
            return -1
        tensor = self.engine.tensors[name]
        most = [size if size >= 0 else tensor.get("most", 8) for size in tensor["shape"]]
        return int(np.prod(most)) * DataType[tensor["dtype"]].itemsize

    def set_tensor_address(self, name: str, memory: int) -> bool:
        """Set where a tensor is."""
        if name not in self.engine.tensors or not isinstance(memory, int):
            return self._error(f"IExecutionContext::setTensorAddress: no tensor {name}")
        self.addresses[name] = memory
        return True

    def execute_async_v3(self, stream_handle: int) -> bool:
        """Run, if every shape and address is set and the memory is there and large enough."""
        gpu = self.engine.gpu
        if stream_handle not in gpu.streams or not gpu.current:
            return self._error("IExecutionContext::enqueueV3: Error Code 1: Cuda Runtime (invalid resource handle)")
        for name, tensor in self.engine.tensors.items():
            shape = self.get_tensor_shape(name)
            size = int(np.prod([max(each, 0) for each in shape])) * DataType[tensor["dtype"]].itemsize
            held = gpu.memory.get(self.addresses.get(name, 0))
            if (tensor["mode"] == "INPUT" and -1 in shape) or held is None or len(held) < size:
                return self._error(
                    f"IExecutionContext::enqueueV3: Error Code 3: API Usage Error (Parameter check: {name})"
                )
            if tensor["mode"] == "INPUT" and size and not any(held):
                return self._error(f"{name} was never copied to the GPU")
        if self.engine.broken:
            return self._error("IExecutionContext::enqueueV3: Error Code 1: Myelin (out of memory)")
        self.runs.append({name: self.get_tensor_shape(name) for name in self.engine.tensors})
        gpu.ms += PER_ITEM_MS * next(iter(self.shapes.values()), (1,))[0]
        return True


class Engine:
    """tensorrt.ICudaEngine of a file that holds its tensors as JSON."""

    def __init__(self, told: dict[str, Any], logger: Any, gpu: Gpu) -> None:
        self.tensors, self.broken, self.gpu, self.logger = told["tensors"], told.get("broken"), gpu, logger
        self.contexts: list[Context] = []
        self._roomless = told.get("roomless")

    @property
    def num_io_tensors(self) -> int:
        """How many there are."""
        return len(self.tensors)

    def get_tensor_name(self, index: int) -> str:
        """Return the name of one."""
        return list(self.tensors)[index]

    def get_tensor_mode(self, name: str) -> Mode:
        """Return whether it is an input or an output."""
        return Mode[self.tensors[name]["mode"]]

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        """Return its shape, -1 where it is not fixed."""
        return tuple(self.tensors[name]["shape"])

    def get_tensor_dtype(self, name: str) -> DataType:
        """Return its type."""
        return DataType[self.tensors[name]["dtype"]]

    def get_tensor_profile_shape(self, name: str, profile_index: int) -> list[tuple[int, ...]]:
        """Return the least, best and largest shape of an input."""
        assert profile_index == 0
        return [tuple(each) for each in self.tensors[name]["profile"]]

    def is_shape_inference_io(self, name: str) -> bool:
        """Return whether its values are a shape."""
        return bool(self.tensors[name].get("values"))

    def create_execution_context(self) -> Context | None:
        """Return what runs it; None where there is no room."""
        if self._roomless:
            return None
        self.contexts.append(Context(self))
        return self.contexts[-1]


def stub(version: str, gpu: Gpu) -> Any:
    """Return the package ``tensorrt`` of a release."""
    made: Any = ModuleType("tensorrt")
    made.__version__, made.engines = version, []
    made.ILogger, made.TensorIOMode, made.DataType = Logger, Mode, DataType
    made.IExecutionContext = Context
    known = {"FLOAT": np.float32, "HALF": np.float16, "INT32": np.int32}
    if not version.startswith("8."):
        known["INT64"] = np.int64  # since release 9

    def nptype(kind: DataType) -> Any:
        if kind.name not in known:
            raise TypeError("Could not resolve TensorRT datatype to an equivalent numpy datatype.")
        return known[kind.name]

    class Runtime:
        def __init__(self, logger: Any) -> None:
            assert logger.made
            self.logger = logger

        def deserialize_cuda_engine(self, serialized_engine: bytes) -> Engine | None:
            assert gpu.current, "no context is current"
            told = json.loads(serialized_engine) if serialized_engine.startswith(b"{") else {}
            if told.get("release") != version.partition(".")[0]:
                # As in github.com/NVIDIA/TensorRT/issues/2041 and many others.
                text = "The engine plan file is not compatible with this version of TensorRT, please rebuild."
                self.logger.log(Logger.Severity.ERROR, f"IRuntime::deserializeCudaEngine: Error Code 6: {text}")
                return None
            made.engines.append(Engine(told, self.logger, gpu))
            return made.engines[-1]

    made.nptype, made.Runtime = nptype, Runtime
    made.init_libnvinfer_plugins = lambda logger, namespace: logger.made
    return made


IMAGES = {
    "mode": "INPUT",
    "shape": [-1, 3, 8, 8],
    "dtype": "FLOAT",
    "profile": [[1, 3, 8, 8], [4, 3, 8, 8], [8, 3, 8, 8]],
}
SCORES = {"mode": "OUTPUT", "shape": [-1, 6], "dtype": "HALF"}

Setting = Callable[..., tuple[str, Gpu, Any]]


@pytest.fixture(params=["8.6.1", "10.3.0"])
def release(request: pytest.FixtureRequest) -> str:
    """A release of TensorRT."""
    return str(request.param)


@pytest.fixture
def setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, release: str) -> Setting:
    """Return a maker of an engine's file with TensorRT and a GPU around it."""

    def make(tensors: dict[str, Any] | None = None, gpu: Gpu | None = None, **more: Any) -> tuple[str, Gpu, Any]:
        gpu = gpu or Gpu()
        package = stub(release, gpu)
        monkeypatch.setitem(sys.modules, "tensorrt", package)
        monkeypatch.setattr(cuda.ctypes, "CDLL", lambda name: gpu)
        path = tmp_path / "model.engine"
        told = {
            "release": release.partition(".")[0],
            "tensors": tensors or {"images": IMAGES, "scores": SCORES},
            **more,
        }
        path.write_text(json.dumps(told))
        return str(path), gpu, package

    return make


class TestEngineContract(WorkloadContract):
    """The contract of every workload, for an engine."""

    @pytest.fixture(autouse=True)
    def _engine(self, setting: Setting) -> None:
        self.path, self.gpu, _ = setting()

    def make(self) -> Any:
        """Return an engine with a batch."""
        return open_workload(self.path)


def test_a_query_is_timed_by_events_around_copies_and_run(setting: Setting) -> None:
    """From the first copy in to the last one out, on the GPU's clock; the host's does not matter."""
    path, _, package = setting()
    served = open_workload(path)
    served.apply(served.space.default.moved({"batch_size": 8}))
    query = served.query()
    copied = 8 * 3 * 8 * 8 * 4 + 8 * 6 * 2
    assert query.latency_s == pytest.approx((8 * PER_ITEM_MS + PER_MEGABYTE_MS * copied / 1e6) / 1000, rel=1e-4)
    assert query.items == 8
    assert package.engines[0].contexts[0].runs[-1] == {"images": (8, 3, 8, 8), "scores": (8, 6)}


def test_batches_are_those_the_profile_takes(setting: Setting) -> None:
    """Of the usual ones, by default; another that was asked for is refused."""
    path, _, _ = setting()
    assert open_workload(path).space.knob("batch_size").levels == (1, 2, 4, 8)
    assert open_workload(path, batch_sizes=[3, 8]).space.knob("batch_size").levels == (3, 8)
    with pytest.raises(InvalidInput, match="built for batches from 1 to 8; leave others out"):
        open_workload(path, batch_sizes=[16])
    with pytest.raises(InvalidInput, match="has no threads"):
        open_workload(path, threads=[2])


def test_an_engine_of_one_shape_has_one_batch(setting: Setting) -> None:
    """That it was built for."""
    path, _, _ = setting({"x": {"mode": "INPUT", "shape": [2, 4], "dtype": "INT32"}, "y": {**SCORES, "shape": [2, 6]}})
    served = open_workload(path)
    assert served.space.knob("batch_size").levels == (2,)
    assert served.query().items == 2


def test_other_dimensions_are_the_profiles_best_or_the_users(setting: Setting) -> None:
    """Within the profile; a shape outside is refused with what TensorRT says."""
    profile = [[1, 3, 4, 4], [4, 3, 8, 8], [8, 3, 16, 16]]
    path, _, package = setting({"images": {**IMAGES, "shape": [-1, 3, -1, -1], "profile": profile}, "scores": SCORES})
    open_workload(path)
    assert package.engines[-1].contexts[0].runs[-1]["images"] == (1, 3, 8, 8)
    open_workload(path, inputs=["3x16x4"])
    assert package.engines[-1].contexts[0].runs[-1]["images"] == (1, 3, 16, 4)
    with pytest.raises(KnobRejected, match=r"does not take 1x3x32x32 for images: .*setInputShape: Error Code 3"):
        open_workload(path, inputs=["images=3x32x32"])
    with pytest.raises(InvalidInput, match="does not fit"):
        open_workload(path, inputs=["4x8x8"])


def test_an_output_whose_size_depends_on_data_has_room_for_the_most(setting: Setting) -> None:
    """As of a detector's boxes."""
    boxes = {"mode": "OUTPUT", "shape": [-1, -1, 4], "dtype": "FLOAT", "most": 300}
    path, gpu, _ = setting({"images": IMAGES, "boxes": boxes})
    open_workload(path)
    assert max(map(len, gpu.memory.values())) >= 300 * 4 * 4


def test_it_runs_on_the_gpu_that_is_tuned(setting: Setting) -> None:
    """By its number in CUDA's order, and says so; one that is not there is refused."""
    path, gpu, _ = setting(gpu=Gpu(gpus=2))
    served: Any = open_workload(path, target=Target("NVIDIA H100", ("GPU-9",), lambda: 1))
    assert (gpu.device, served.placement.gpu) == (1, 1)
    assert str(served.placement).startswith("the GPU, by TensorRT ")
    assert "by CUDA's events" in served.notes[0]
    with pytest.raises(DeviceError, match=r"shows no GPU 2 to this process: .*invalid device ordinal"):
        open_workload(path, target=Target("NVIDIA H100", ("GPU-9",), lambda: 2))


def test_everything_is_given_back(setting: Setting) -> None:
    """At the end, and where an engine cannot be opened."""
    path, gpu, _ = setting()
    served = open_workload(path)
    for size in (8, 1):
        served.apply(OperatingPoint({"batch_size": size}))
    assert len(gpu.memory) == 2
    served.close()
    assert gpu.clean
    with pytest.raises(InvalidInput):
        open_workload(path, batch_sizes=[16])
    assert gpu.clean


def test_a_file_that_is_no_engine_here_says_what_tensorrt_said(setting: Setting) -> None:
    """Another release's, or any other file."""
    path, gpu, _ = setting()
    for text in (json.dumps({"release": "7", "tensors": {}}), "no engine"):
        Path(path).write_text(text)
        with pytest.raises(BadFile, match=r"is no engine that TensorRT .* not compatible with this version"):
            open_workload(path)
    assert gpu.clean


@pytest.mark.parametrize(
    ("more", "error", "told"),
    [
        ({"broken": True}, TrialError, "does not run: .*Myelin"),
        ({"roomless": True}, TrialError, "gets no context"),
        ({"tensors": {"n": {**IMAGES, "values": True}}}, InvalidInput, "takes the values of its input n as a shape"),
        ({"tensors": {"x": {**IMAGES, "dtype": "BF16"}}}, InvalidInput, "is a DataType.BF16; only numbers"),
    ],
)
def test_an_engine_that_cannot_be_served_is_refused(
    setting: Setting, more: dict[str, Any], error: type[Exception], told: str
) -> None:
    """In one line, with what TensorRT said."""
    path, gpu, _ = setting(**more)
    with pytest.raises(error, match=told) as caught:
        open_workload(path)
    assert "\n" not in str(caught.value)
    assert gpu.clean


def test_a_batch_without_room_spoils_its_trial(setting: Setting) -> None:
    """And a smaller one runs after it."""
    path, _, _ = setting(gpu=Gpu(room=2000))
    served = open_workload(path)
    with pytest.raises(TrialError, match="out of memory"):
        served.apply(OperatingPoint({"batch_size": 8}))
    served.apply(OperatingPoint({"batch_size": 1}))
    assert served.query().items == 1


def test_a_release_without_named_tensors_is_refused(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trtexec of that release may do."""
    path, _, package = setting()
    package.IExecutionContext, package.__version__ = object, "8.2.1"
    with pytest.raises(DeviceError, match=r"TensorRT 8.2.1 is older than 8.6; give \?by=trtexec"):
        open_workload(path)


def test_without_a_driver_one_line_says_so(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where TensorRT's wheel is installed on a machine without a GPU."""
    path, _, _ = setting()

    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(cuda.ctypes, "CDLL", missing)
    with pytest.raises(DeviceError, match=r"there is no CUDA driver here \(libcuda.so.1\)"):
        open_workload(path)
