"""A TensorRT engine as a workload, run through TensorRT's Python API, or by trtexec where that is not here.

The API is that of named tensors, from TensorRT 8.6 on: python/src/infer/pyCore.cpp of NVIDIA/TensorRT.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polythrottle.domain.errors import BadFile, DeviceError, InvalidInput, KnobRejected, TrialError
from polythrottle.domain.measurement import Query
from polythrottle.domain.ports import Placement, Target, Workload
from polythrottle.domain.space import BATCH_SIZE, Knob, OperatingPoint, SearchSpace
from polythrottle.storage.untrusted import read_plain
from polythrottle.workloads.command import CommandWorkload
from polythrottle.workloads.cuda import Driver, Stream
from polythrottle.workloads.foreign_calls import guarded, one_line
from polythrottle.workloads.inputs import (
    DeclaredInput,
    FedInput,
    batch_knob,
    batch_knobs,
    chosen,
    count,
    fed,
    grid_of,
    parse_inputs,
    random_inputs,
)
from polythrottle.workloads.trtexec import USUAL, engine_command
from polythrottle.workloads.trtexec import found as found_trtexec
from polythrottle.workloads.uris import ModelUri

if TYPE_CHECKING:
    import numpy as np

RUNNERS = ("python", "trtexec")
"""What the option ``by`` may be."""
_MOST_BYTES = 64 * 2**30
_INSTALL = (
    "TensorRT is not here: neither its Python package (on a Jetson apt install python3-libnvinfer, in an environment "
    f"made with --system-site-packages) nor trtexec ({USUAL})"
)
_OLDEST = "8.6"


def open_engine(
    uri: str,
    *,
    inputs: Sequence[str] = (),
    batch_sizes: Sequence[int] | None = None,
    threads: Sequence[int] | None = None,
    timeout_s: float = 60.0,
    target: Target | None = None,
) -> Workload:
    """Return the workload that an engine's file holds.

    Args:
        uri: Path of the file; ``?by=python`` or ``?by=trtexec`` chooses what runs it, else the first that is here.
        inputs: Shapes of one item's inputs, for dimensions that are not fixed; trtexec takes them by name.
        batch_sizes: Levels of ``batch_size``; those of the usual ones that the engine takes by default.
        threads: None: an engine has none.
        timeout_s: When a run of trtexec is given up, in seconds.
        target: The GPU that is tuned, if one is.

    Raises:
        BadFile: If the file is missing, or no engine that this TensorRT runs on this GPU.
        DeviceError: If neither TensorRT nor trtexec is here, or there is no GPU.
        InvalidInput: If shapes are missing or do not fit, or the engine does not take a batch that was asked for.
        UnknownName: If there is no such option.
        TrialError: If the engine does not run.
    """
    model = ModelUri.parse(uri)
    model.only("a TensorRT engine", "by")
    by = next(iter(model.chosen("by", RUNNERS)), None)
    if threads is not None:
        raise InvalidInput(f"{model.name} is run by the GPU and has no threads; leave --threads out")
    if not Path(model.name).is_file():
        raise BadFile(f"there is no file {model.name}")
    tensorrt = None if by == "trtexec" else _python()
    if tensorrt is not None:
        runtime = Runtime(tensorrt, target)
        try:
            return EngineWorkload(uri, runtime, inputs=inputs, batch_sizes=batch_sizes)
        except BaseException:
            runtime.stream.close()
            raise
    program = None if by == "python" else found_trtexec()
    if program is None:
        raise DeviceError(f"{model.name}: {_INSTALL if by is None else f'{by} is not here'}")
    served = _run_by_trtexec(program, model.name, inputs, batch_sizes, timeout_s, target)
    served.uri = uri
    return served


def _run_by_trtexec(
    program: str,
    path: str,
    inputs: Sequence[str],
    batch_sizes: Sequence[int] | None,
    timeout_s: float,
    target: Target | None,
) -> CommandWorkload:
    if batch_sizes is not None and not inputs:
        raise InvalidInput(f"{path}: trtexec needs its inputs to set a batch, such as --input images=3x640x640")
    command = engine_command(program, path, inputs)
    return CommandWorkload(command, batch_sizes=batch_sizes, timeout_s=timeout_s, target=target or Target("a GPU"))


def _python() -> Any:
    """Return TensorRT's Python package; None if it is not installed.

    Raises:
        DeviceError: If it cannot be imported, or is older than the API of named tensors.
    """
    try:
        import tensorrt
    except ModuleNotFoundError:
        return None
    except (ImportError, OSError, RuntimeError) as err:
        raise DeviceError(f"TensorRT's Python package cannot be imported: {one_line(err)}; ?by=trtexec") from err
    if not hasattr(tensorrt.IExecutionContext, "execute_async_v3"):
        raise DeviceError(f"TensorRT {tensorrt.__version__} is older than {_OLDEST}; give ?by=trtexec")
    return tensorrt


class Runtime:
    """TensorRT on one GPU.

    Args:
        tensorrt: Its Python package.
        target: The GPU that is tuned, if one is; the first otherwise.
        driver: CUDA's.

    Raises:
        DeviceError: If there is no driver or no such GPU.
    """

    def __init__(self, tensorrt: Any, target: Target | None = None, driver: Driver | None = None) -> None:
        self.api = tensorrt
        self.number = 0 if target is None else target.number
        self.stream = Stream(driver or Driver(), self.number)
        self.log = _log(tensorrt)
        tensorrt.init_libnvinfer_plugins(self.log, "")

    def engine(self, path: str) -> Any:
        """Return the engine in a file.

        Raises:
            BadFile: If it is none that this TensorRT runs on this GPU.
        """
        data = read_plain(Path(path), _MOST_BYTES)
        with guarded(f"{path} cannot be loaded:"):
            found = self.api.Runtime(self.log).deserialize_cuda_engine(data)
        if found is None:
            why = self.log.last or "it says no more"
            raise BadFile(
                f"{path} is no engine that TensorRT {self.api.__version__} runs on this GPU: {why}; engines are built "
                "for one release and one kind of GPU"
            )
        return found


def _log(tensorrt: Any) -> Any:
    """Return a logger that keeps the newest error and prints nothing."""

    class Log(tensorrt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            tensorrt.ILogger.__init__(self)
            self.last = ""

        def log(self, severity: Any, message: str) -> None:
            if severity in (tensorrt.ILogger.Severity.ERROR, tensorrt.ILogger.Severity.INTERNAL_ERROR):
                self.last = " ".join(str(message).split())[:300]

    return Log()


class EngineWorkload:
    """One run of a TensorRT engine per query, on inputs made up from its declared shapes.

    A query copies its inputs to the GPU, runs the engine on one stream, and copies the outputs back; it is timed by
    CUDA's events around all that, as trtexec's latency is. Of several optimisation profiles the first is taken.

    Args:
        uri: Path of the file, with its options.
        runtime: TensorRT.
        inputs: Shapes of one item's inputs; dimensions that are not fixed are the profile's optimum by default.
        batch_sizes: Levels of ``batch_size``.

    Raises:
        BadFile: If it is no engine that this TensorRT runs on this GPU.
        InvalidInput: If shapes do not fit, the engine does not take a batch that was asked for, or it takes the values
            of an input as a shape.
        TrialError: If it does not run.
    """

    def __init__(
        self, uri: str, runtime: Runtime, *, inputs: Sequence[str] = (), batch_sizes: Sequence[int] | None = None
    ) -> None:
        self.uri = uri
        self._runtime = runtime
        self._stream = runtime.stream
        self._name = ModelUri.parse(uri).name
        self._stream.bind()
        self._engine = runtime.engine(self._name)
        self._context = self._engine.create_execution_context()
        if self._context is None:
            raise TrialError(f"{self._name} gets no context: {runtime.log.last or 'is there room on the GPU?'}")
        names = [self._engine.get_tensor_name(number) for number in range(self._engine.num_io_tensors)]
        modes = {name: self._engine.get_tensor_mode(name) for name in names}
        self._inputs = [name for name in names if modes[name] == runtime.api.TensorIOMode.INPUT]
        self._outputs = [name for name in names if modes[name] == runtime.api.TensorIOMode.OUTPUT]
        self._check_no_shapes()
        self._given_shapes = bool(inputs)
        declared = [self._declared(name) for name in self._inputs]
        self._fed: Sequence[FedInput] = fed(self._name, declared, parse_inputs(inputs))
        self.space: SearchSpace = grid_of(self._batches(batch_sizes))
        self.placement = Placement(f"TensorRT {runtime.api.__version__}", runtime.number)
        self.apply(self.space.default)

    def _check_no_shapes(self) -> None:
        for name in self._inputs:
            if self._engine.is_shape_inference_io(name):
                raise InvalidInput(
                    f"{self._name} takes the values of its input {name} as a shape, which cannot be made up; "
                    "cmd:trtexec --loadEngine=… --shapes=… sets them"
                )

    def _declared(self, name: str) -> DeclaredInput:
        """Return an input as the engine declares it, what is not fixed but the batch at its optimum."""
        import numpy as np

        shape = tuple(self._engine.get_tensor_shape(name))
        written = self._engine.get_tensor_dtype(name)
        if any(size < 0 for size in shape):
            best = tuple(self._profile(name)[1])
        else:
            best = shape
        # What a user gives for a dimension that is not fixed is taken as it is, and checked when it is set.
        known = [place and not self._given_shapes for place in range(len(shape))]
        sizes = tuple(best[place] if known[place] and size < 0 else size for place, size in enumerate(shape))
        try:
            dtype = np.dtype(self._runtime.api.nptype(written)).name
        except TypeError:
            dtype = str(written)
        return DeclaredInput(name, sizes, dtype, str(written))

    def _profile(self, name: str) -> Sequence[Sequence[int]]:
        """Return the least, best and largest shape of an input."""
        found: Sequence[Sequence[int]] = self._engine.get_tensor_profile_shape(name, 0)
        return found

    def _batches(self, levels: Sequence[int] | None) -> list[Knob]:
        knobs: list[Knob] = batch_knobs(self._name, self._fed, levels)
        batched = [each.name for each in self._fed if each.shape and each.shape[0] is None]
        if not batched:
            return knobs
        least = max(1, *(int(self._profile(name)[0][0]) for name in batched))
        most = min(int(self._profile(name)[2][0]) for name in batched)
        sizes = [int(size) for size in knobs[0].levels]
        if levels is None:
            return [batch_knob([size for size in sizes if least <= size <= most] or [least])]
        if not least <= min(sizes) <= max(sizes) <= most:
            raise InvalidInput(f"{self._name} is built for batches from {least} to {most}; leave others out")
        return knobs

    def apply(self, point: OperatingPoint) -> None:
        """Make inputs of the batch size, give every tensor its memory, and run once.

        Raises:
            KnobRejected: If the point is not in the space, or the engine does not take its shapes.
            TrialError: If there is no room, or the engine does not run.
        """
        import numpy as np

        wanted = chosen(self.space, point)
        self._batch_size = count(wanted, BATCH_SIZE)
        self._stream.bind()
        self._stream.free()
        self._up = []
        self._down = []
        with guarded(f"a batch of {self._batch_size} cannot be made:"):
            arrays = random_inputs(self._fed, self._batch_size)
        for name, array in arrays.items():
            if not self._context.set_input_shape(name, tuple(array.shape)):
                shape = "x".join(map(str, array.shape))
                raise KnobRejected(f"{self._name} does not take {shape} for {name}: {self._runtime.log.last}")
        for name, array in arrays.items():
            self._up.append(self._uploaded(name, np.ascontiguousarray(array)))
        for name in self._outputs:
            size = self._size(name)
            self._down.append((self._stream.pinned(size), self._given(name, size), size))
        self.query()  # what TensorRT loads late is loaded now

    def _uploaded(self, name: str, array: np.ndarray[Any, Any]) -> tuple[int, int, int]:
        """Return where an input is on the host and on the GPU, and its size."""
        host = self._stream.pinned(array.nbytes)
        # Into pinned memory: out of any other the driver copies to a buffer of its own first, while the host waits.
        ctypes.memmove(host, array.ctypes.data, array.nbytes)
        return self._given(name, array.nbytes), host, array.nbytes

    def _given(self, name: str, size: int) -> int:
        address = self._stream.memory(size)
        if not self._context.set_tensor_address(name, address):
            raise TrialError(f"{self._name} does not take memory for {name}: {self._runtime.log.last}")
        return address

    def _size(self, name: str) -> int:
        """Return how many bytes an output takes at most with the shapes that are set."""
        shape = tuple(self._context.get_tensor_shape(name))
        size = int(self._context.get_max_output_size(name))
        # Where all dimensions are known the product is exact; where they follow from values, TensorRT bounds them.
        if size < 0 or all(each >= 0 for each in shape):
            size = math.ceil(math.prod(max(0, each) for each in shape) * self._engine.get_tensor_dtype(name).itemsize)
        return size

    def query(self) -> Query:
        """Run the engine once.

        Raises:
            TrialError: If it does not run.
        """
        self._stream.bind()
        with self._stream.timed() as took:
            for address, host, size in self._up:
                self._stream.upload(address, host, size)
            if not self._context.execute_async_v3(self._stream.handle):
                raise TrialError(f"{self._name} does not run: {self._runtime.log.last or 'TensorRT says no more'}")
            for host, address, size in self._down:
                self._stream.download(host, address, size)
        return Query(max(took[0], 1e-9), self._batch_size)

    @property
    def notes(self) -> tuple[str, ...]:
        """What latency is of."""
        return (
            f"{self._name} runs on {self.placement}; latency is by CUDA's events, from the first copy to the GPU to "
            "the last one back",
        )

    def close(self) -> None:
        """Let go of the engine and its memory."""
        # Before the stream, for both hold memory of its context.
        self._context = self._engine = None
        self._stream.close()
