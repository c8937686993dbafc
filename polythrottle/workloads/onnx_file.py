"""An ONNX file as a workload, run by ONNX Runtime on the GPU that is tuned, else on the processor."""

import sys
import tempfile
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from polythrottle.errors import BadFile, DeviceError, KnobRejected
from polythrottle.measurement import Query
from polythrottle.placement import Placement, Target
from polythrottle.space import OperatingPoint, SearchSpace
from polythrottle.workloads.call import guarded, one_line, timed
from polythrottle.workloads.declared import Declared, batch_knobs, fed, made_up
from polythrottle.workloads.knobs import BATCH_SIZE, THREADS, chosen, count, grid_of, threads_knob
from polythrottle.workloads.model_uri import ModelUri
from polythrottle.workloads.onnx_providers import PROVIDERS, Ran, Wanted, placement, wanted
from polythrottle.workloads.onnx_weights import check_weights
from polythrottle.workloads.tensors import parse_inputs

_NUMPY_NAMES = {"float": "float32", "double": "float64"}
_SILENT = 4


class OnnxWorkload:
    """One run of an ONNX graph per query, on inputs made up from its declared shapes.

    An input whose first dimension is not fixed is batched. Where a GPU is tuned the providers TensorRT and CUDA are
    taken in this order if ONNX Runtime has them, and threads are no knob unless their levels are given. Latency is the
    host's time of a whole run, copies to the GPU and back included: ONNX Runtime tells no events.

    Args:
        uri: Path of the file; ``?providers=`` and some of tensorrt, cuda and cpu chooses what runs it.
        inputs: Shapes of one item's inputs, for other dimensions that are not fixed.
        batch_sizes: Levels of ``batch_size``; usual ones by default, the one there is if the graph fixes it.
        threads: Levels of ``threads`` within an operator; usual ones by default.
        target: The GPU that is tuned, if one is.

    Raises:
        DeviceError: If ONNX Runtime is not installed, or lacks a provider that was chosen.
        UnknownName: If there is no such option or provider.
        BadFile: If the file is missing or not an ONNX graph that runs here.
        InvalidInput: If shapes are missing or do not fit, or the graph's batch is fixed to another size.
    """

    def __init__(
        self,
        uri: str,
        *,
        inputs: Sequence[str] = (),
        batch_sizes: Sequence[int] | None = None,
        threads: Sequence[int] | None = None,
        target: Target | None = None,
    ) -> None:
        self.uri = uri
        model = ModelUri.parse(uri)
        model.only("an ONNX model", "providers")
        self._path = model.name
        self._wanted = _wanted(model, target)
        workers = [] if self._wanted.gpu and threads is None else [threads_knob(threads)]
        self._threads = count(grid_of(workers).default, THREADS)
        with tempfile.TemporaryDirectory(prefix="polythrottle-") as folder:
            self._session = _session(self._path, self._threads, self._wanted, f"{folder}/profile")
            declared = [_declared(each) for each in self._session.get_inputs()]
            self._fed = fed(uri, declared, parse_inputs(inputs))
            self.space: SearchSpace = grid_of([*batch_knobs(uri, self._fed, batch_sizes), *workers])
            self.apply(self.space.default)
            self._ran = Ran.read(Path(self._session.end_profiling())) if self._wanted.gpu else Ran()
        self.placement: Placement = placement(model.name, self._wanted, self._session.get_providers(), self._ran)

    @property
    def notes(self) -> tuple[str, ...]:
        """What runs the graph, where a GPU is tuned or somebody chose; and how many operators run elsewhere."""
        if not (self._wanted.gpu or self._wanted.asked or self._wanted.lacking):
            return ()
        split = f"; operators of a query: {self._ran.words}" if len(self._ran.operators) > 1 else ""
        return (f"{self._path} runs on {self.placement}{split}",)

    def apply(self, point: OperatingPoint) -> None:
        """Make inputs of the batch size; load the graph again if the number of threads changes.

        Raises:
            KnobRejected: If the point is not in the space, or the graph does not load with so many threads.
            TrialError: If the graph does not run on the GPU.
        """
        wanted = chosen(self.space, point)
        if count(wanted, THREADS) != self._threads:
            self._reload(count(wanted, THREADS))
        self._batch_size = count(wanted, BATCH_SIZE)
        with guarded(f"a batch of {self._batch_size} cannot be made:"):
            self._feeds = made_up(self._fed, self._batch_size)
        if self._wanted.gpu:
            self.query()  # TensorRT builds its engine for a new shape now, which may take minutes

    def _reload(self, threads: int) -> None:
        # The old one goes first: a large model may not fit into memory twice.
        self._session, self._threads = None, 0
        try:
            self._session = _session(self._path, threads, self._wanted)
        except BadFile as err:
            raise KnobRejected(f"with {threads} threads: {err}") from err
        self._threads = threads

    def query(self) -> Query:
        """Run the graph once.

        Raises:
            TrialError: If ONNX Runtime raises.
        """
        return Query(timed("onnxruntime raised", lambda: self._session.run(None, self._feeds)), self._batch_size)

    def close(self) -> None:
        """Let go of the graph and its threads."""
        self._session, self._threads = None, 0


def _wanted(model: ModelUri, target: Target | None) -> Wanted:
    """Return the providers a session is to have; raises as `OnnxWorkload`."""
    return wanted(
        model.name,
        chosen=model.chosen("providers", tuple(PROVIDERS)),
        available=_runtime(model.name).get_available_providers(),
        target=target,
    )


def _runtime(path: str) -> Any:
    try:
        import onnxruntime
    except ImportError as err:
        raise DeviceError(f"{path} needs ONNX Runtime; pip install 'polythrottle[onnx]'") from err
    return onnxruntime


def _session(path: str, threads: int, providers: Wanted, profile: str | None = None) -> Any:
    """Return the loaded graph.

    Args:
        path: Of the file.
        threads: Within an operator, on the processor.
        providers: What is to run it.
        profile: How the name of ONNX Runtime's profile begins, where a GPU is to run it; None for no profile.

    Raises:
        DeviceError: If ONNX Runtime is not installed.
        BadFile: If it does not load.
    """
    onnxruntime = _runtime(path)
    if not Path(path).is_file():
        raise BadFile(f"there is no file {path}")
    check_weights(Path(path))
    options = onnxruntime.SessionOptions()
    options.log_severity_level = _SILENT  # what goes wrong is raised as well
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    # Waiting threads that spin would be charged to the model as busy time.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    if providers.gpu and profile is not None:
        options.enable_profiling, options.profile_file_prefix = True, profile
    try:
        # Falling back, ONNX Runtime prints, and standard output belongs to the command line's one document.
        with redirect_stdout(sys.stderr):
            if providers.gpu and hasattr(onnxruntime, "preload_dlls"):
                onnxruntime.preload_dlls()  # CUDA and cuDNN that were installed as packages are on no library path
            return onnxruntime.InferenceSession(path, options, providers=providers.options)
    except _refusals() as err:
        raise BadFile(f"{path} is not an ONNX model that runs here: {one_line(err)}") from err


def _refusals() -> tuple[type[Exception], ...]:
    """Return what ONNX Runtime raises for a model it does not take: its own exceptions share no narrower class."""
    from onnxruntime.capi import onnxruntime_pybind11_state as binding

    own = (kind for kind in vars(binding).values() if isinstance(kind, type) and issubclass(kind, Exception))
    return (*own, RuntimeError, ValueError)


def _declared(each: Any) -> Declared:
    """Return an input as the graph declares it, its type such as ``tensor(float)`` by the name numpy has for it."""
    inner = each.type.removeprefix("tensor(").removesuffix(")")
    return Declared(each.name, tuple(each.shape), _NUMPY_NAMES.get(inner, inner), each.type)
