"""An ONNX file as a workload: its weights, its execution providers, and one run of ONNX Runtime per query."""

from __future__ import annotations

import json
import mmap
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from polythrottle.domain.backports import removeprefix, removesuffix
from polythrottle.domain.errors import BadFile, DeviceError, KnobRejected
from polythrottle.domain.measurement import Query
from polythrottle.domain.ports import Placement, Target
from polythrottle.domain.space import BATCH_SIZE, OperatingPoint, SearchSpace
from polythrottle.storage.atomic_file import temporary_folder
from polythrottle.storage.untrusted import MALFORMED, check_plain
from polythrottle.workloads.foreign_calls import guarded, one_line, timed
from polythrottle.workloads.inputs import (
    THREADS,
    DeclaredInput,
    batch_knobs,
    chosen,
    count,
    fed,
    grid_of,
    parse_inputs,
    random_inputs,
    threads_knob,
)
from polythrottle.workloads.uris import ModelUri

# Where an ONNX model keeps its weights: in itself, or in files beside it and nowhere else.
#
# A tensor may name a file and an offset (``TensorProto.external_data``, onnx.proto). ONNX Runtime has read whatever
# path stood there, and takes one name for an address in memory. The file is walked field by field: neither onnx nor
# protobuf need be installed, and weights in the file itself are skipped, not read.

_INNER = {
    "model": {7: "graph", 20: "training", 25: "function"},
    "training": {1: "graph", 2: "graph"},
    "graph": {1: "node", 5: "tensor", 15: "sparse"},
    "function": {7: "node", 11: "attribute"},
    "node": {5: "attribute"},
    "attribute": {5: "tensor", 6: "graph", 10: "tensor", 11: "graph", 22: "sparse", 23: "sparse"},
    "sparse": {1: "tensor", 2: "tensor"},
    "tensor": {13: "entry"},
}
"""Messages within messages, by the numbers of their fields in onnx.proto."""
_KEY = 1
_VALUE = 2
_LOCATION = b"location"
_VARINT = 0
_EIGHT = 1
_BYTES = 2
_FOUR = 5
_LONGEST_VARINT = 10


def check_weights(path: Path) -> None:
    """Refuse a model whose weights lie outside its own folder.

    Raises:
        BadFile: If it cannot be read, is no ONNX model, or names a file elsewhere or none.
    """
    check_plain(path)
    try:
        if not path.stat().st_size:
            raise ValueError("it is empty")
        # Mapped, for weights of gigabytes are skipped and their pages need never be read.
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            names = set(_locations(data))
    except (OSError, ValueError) as err:
        reason = err.strerror if isinstance(err, OSError) and err.strerror else err
        raise BadFile(f"{path} is not an ONNX model that can be read: {reason}") from err
    for name in sorted(names):
        _check_location(path, name.decode(errors="replace"))


def _check_location(path: Path, name: str) -> None:
    lexical = PurePosixPath(name)
    shown = name[:80]
    if lexical.is_absolute() or ".." in lexical.parts or "\0" in name or not name:
        raise BadFile(f"{path} is refused: it keeps weights in {shown!r}, outside its own folder")
    folder = path.resolve().parent
    # Links followed as well: the name may be harmless and what lies there lead elsewhere.
    beside = (folder / name).resolve()
    if folder not in beside.parents:
        raise BadFile(f"{path} is refused: it keeps weights in {shown!r}, which leads out of its own folder")
    if not beside.is_file():
        raise BadFile(f"{path} keeps weights in {shown!r}, which is not there; put it beside the model")


def _locations(data: mmap.mmap) -> Iterator[bytes]:
    """Yield the names of files in a model; ValueError if it is none."""
    waiting = [("model", 0, len(data))]
    while waiting:
        kind, begin, end = waiting.pop()
        if kind == "entry":
            texts = {number: data[start:stop] for number, start, stop in _fields(data, begin, end)}
            if texts.get(_KEY) == _LOCATION:
                yield texts.get(_VALUE, b"")
            continue
        inner = _INNER[kind]
        waiting += [
            (inner[number], start, stop) for number, start, stop in _fields(data, begin, end) if number in inner
        ]


def _fields(data: mmap.mmap, at: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Yield number, begin and end of every field of bytes in a message (protobuf.dev, encoding)."""
    while at < end:
        tag, at = _varint(data, at, end)
        kind = tag & 7
        if kind == _VARINT:
            _, at = _varint(data, at, end)
        elif kind in (_EIGHT, _FOUR):
            at += 8 if kind == _EIGHT else 4
        elif kind == _BYTES:
            size, at = _varint(data, at, end)
            if size > end - at:
                raise ValueError("it is cut off, or something else")
            yield tag >> 3, at, at + size
            at += size
        else:
            raise ValueError("it is something else")
    if at > end:
        raise ValueError("it is cut off, or something else")


def _varint(data: mmap.mmap, at: int, end: int) -> tuple[int, int]:
    value = 0
    for place in range(_LONGEST_VARINT):
        if at >= end:
            raise ValueError("it is cut off, or something else")
        byte = data[at]
        value = value | (byte & 0x7F) << 7 * place
        at = at + 1
        if byte < 0x80:
            return value, at
    raise ValueError("it is something else")


# What ONNX Runtime runs a graph with: TensorRT, then CUDA, where they are there and a GPU is tuned.
#
# That a provider is registered does not mean that it runs anything: operators it does not have go to the processor.
# Which one ran where is read from ONNX Runtime's own profile of a query (onnxruntime.ai, "Profiling Tools": events of
# category Node name their provider).

PROVIDERS: Mapping[str, str] = {
    "tensorrt": "TensorrtExecutionProvider",
    "cuda": "CUDAExecutionProvider",
    "cpu": "CPUExecutionProvider",
}
"""Execution providers by the names the option ``providers`` has for them, in the order they are taken."""
_SHORT = {name: short for short, name in PROVIDERS.items()}
_NAMED = {"tensorrt": "TensorRT", "cuda": "CUDA", "cpu": "CPU"}
_INSTALL = "install ONNX Runtime's GPU build (onnxruntime-gpu; on a Jetson NVIDIA's own for its JetPack)"


@dataclass(frozen=True)
class RequestedProviders:
    """The providers a session is to have.

    Args:
        names: As ONNX Runtime calls them, the first the most wanted; the processor is the last.
        asked: Whether somebody chose them.
        number: Of the GPU, in CUDA's order.
        lacking: Why there is none for a GPU, where a GPU is tuned.
    """

    names: tuple[str, ...]
    asked: bool = False
    number: int = 0
    lacking: str = ""

    @property
    def gpu(self) -> bool:
        """Whether one of them is for a GPU."""
        return self.names != (PROVIDERS["cpu"],)

    @property
    def options(self) -> list[Any]:
        """As ``InferenceSession`` takes them."""
        given = {"device_id": str(self.number)}
        return [name if name == PROVIDERS["cpu"] else (name, given) for name in self.names]


def wanted(uri: str, chosen: Sequence[str], available: Sequence[str], target: Target | None) -> RequestedProviders:
    """Return the providers of a session.

    Args:
        uri: Of the model, for messages.
        chosen: Short names somebody gave; empty where nobody did.
        available: What this ONNX Runtime is built with.
        target: The GPU that is tuned, if one is.

    Raises:
        DeviceError: If a provider that was chosen is not there.
    """
    number = 0 if target is None else target.number
    if chosen:
        missing = next((name for name in chosen if PROVIDERS[name] not in available), None)
        if missing is not None:
            here = ", ".join(_SHORT[name] for name in available if name in _SHORT)
            raise DeviceError(f"{uri}: this ONNX Runtime has no {_NAMED[missing]} provider (it has {here}); {_INSTALL}")
        names = dict.fromkeys((*(PROVIDERS[name] for name in chosen), PROVIDERS["cpu"]))
        return RequestedProviders(tuple(names), asked=True, number=number)
    if target is None:
        return RequestedProviders((PROVIDERS["cpu"],))
    names = dict.fromkeys(name for name in PROVIDERS.values() if name in available)
    lacking = "this ONNX Runtime has no provider for NVIDIA GPUs"
    if len(names) > 1:
        lacking = ""
    return RequestedProviders(tuple(names), number=number, lacking=lacking)


@dataclass(frozen=True)
class UsedProviders:
    """Which provider ran how many operators of a query.

    Args:
        operators: Their count by the provider's short name; what a provider has fused counts as one.
    """

    operators: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> UsedProviders:
        """Return what a profile of ONNX Runtime tells; nothing if it cannot be understood."""
        try:
            events = json.loads(path.read_text(encoding="utf-8", errors="replace"))
            providers = [
                event["args"]["provider"]
                for event in events
                if event.get("cat") == "Node" and str(event.get("name", "")).endswith("_kernel_time")
            ]
        except (*MALFORMED, OSError):
            return cls()
        return cls(Counter(_SHORT.get(str(name), str(name)) for name in providers))

    @property
    def words(self) -> str:
        """The counts, in words."""
        return ", ".join(f"{count} by {_NAMED.get(name, name)}" for name, count in self.operators.items())


def placement(uri: str, sought: RequestedProviders, registered: Sequence[str], ran: UsedProviders) -> Placement:
    """Return what a session runs on.

    Args:
        uri: Of the model, for messages.
        sought: What it was to have.
        registered: What it has, as the session tells.
        ran: Which operators ran where, if that is known.
    """
    short = [_SHORT[name] for name in registered if name in _SHORT and name != PROVIDERS["cpu"]]
    if ran.operators:
        used = [name for name in short if ran.operators.get(name)]
    else:
        used = short
    if used:
        by = " and ".join(_NAMED[name] for name in used)
        return Placement(f"ONNX Runtime with {by}", gpu=sought.number, asked=sought.asked)
    why = sought.lacking
    remedy = _INSTALL
    if not why and short:
        idle = " and ".join(_NAMED[name] for name in short)
        why = f"all its operators went there, as {idle} has none of them ({ran.words})"
        remedy = "export it with operators that run on the GPU"
    elif not why:
        tried = " and ".join(_NAMED[_SHORT[name]] for name in sought.names[:-1])
        why = f"{tried} did not start"
        remedy = "see that CUDA, cuDNN and TensorRT are of the versions this ONNX Runtime is built for"
    asked = sought.asked and not sought.gpu
    return Placement("ONNX Runtime", None, asked, why, remedy, f"{uri}?providers=cpu")


# An ONNX file as a workload, run by ONNX Runtime on the GPU that is tuned, else on the processor.

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
        if self._wanted.gpu and threads is None:
            workers = []
        else:
            workers = [threads_knob(threads)]
        self._threads = count(grid_of(workers).default, THREADS)
        with temporary_folder() as folder:
            self._session = _session(self._path, self._threads, self._wanted, f"{folder}/profile")
            declared = [_declared(each) for each in self._session.get_inputs()]
            self._fed = fed(uri, declared, parse_inputs(inputs))
            self.space: SearchSpace = grid_of([*batch_knobs(uri, self._fed, batch_sizes), *workers])
            self.apply(self.space.default)
            if self._wanted.gpu:
                self._ran = UsedProviders.read(Path(self._session.end_profiling()))
            else:
                self._ran = UsedProviders()
        self.placement: Placement = placement(model.name, self._wanted, self._session.get_providers(), self._ran)

    @property
    def notes(self) -> tuple[str, ...]:
        """What runs the graph, where a GPU is tuned or somebody chose; and how many operators run elsewhere."""
        if not (self._wanted.gpu or self._wanted.asked or self._wanted.lacking):
            return ()
        split = ""
        if len(self._ran.operators) > 1:
            split = f"; operators of a query: {self._ran.words}"
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
            self._feeds = random_inputs(self._fed, self._batch_size)
        if self._wanted.gpu:
            self.query()  # TensorRT builds its engine for a new shape now, which may take minutes

    def _reload(self, threads: int) -> None:
        # The old one goes first: a large model may not fit into memory twice.
        self._session = None
        self._threads = 0
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
        self._session = None
        self._threads = 0


def _wanted(model: ModelUri, target: Target | None) -> RequestedProviders:
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
        raise DeviceError(
            f"{path} needs ONNX Runtime, which {sys.executable} lacks; pip install 'polythrottle[onnx]', or on a board "
            "onnxruntime (on a Jetson NVIDIA's own for its JetPack)"
        ) from err
    return onnxruntime


def _session(path: str, threads: int, providers: RequestedProviders, profile: str | None = None) -> Any:
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
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    # Waiting threads that spin would be charged to the model as busy time.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    if providers.gpu and profile is not None:
        options.enable_profiling = True
        options.profile_file_prefix = profile
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


def _declared(each: Any) -> DeclaredInput:
    """Return an input as the graph declares it, its type such as ``tensor(float)`` by the name numpy has for it."""
    inner = removesuffix(removeprefix(each.type, "tensor("), ")")
    return DeclaredInput(each.name, tuple(each.shape), _NUMPY_NAMES.get(inner, inner), each.type)
