"""An ONNX file as a workload, run by ONNX Runtime on the processor."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polythrottle.errors import BadFile, DeviceError, InvalidInput, KnobRejected, UnknownName
from polythrottle.measurement import Query
from polythrottle.space import Knob, OperatingPoint, SearchSpace
from polythrottle.workloads.call import guarded, one_line, timed
from polythrottle.workloads.knobs import BATCH_SIZE, THREADS, batch_knob, chosen, count, grid_of, threads_knob
from polythrottle.workloads.tensors import DTYPES, Input, parse_inputs, random_array

_NUMPY_NAMES = {"float": "float32", "double": "float64"}
_SILENT = 4


@dataclass(frozen=True)
class Fed:
    """One input of a graph as it is fed.

    Args:
        name: Its name in the graph.
        shape: Its dimensions; None where the batch size goes.
        dtype: As numpy names it.
    """

    name: str
    shape: tuple[int | None, ...]
    dtype: str


class OnnxWorkload:
    """One run of an ONNX graph per query, on inputs made up from its declared shapes.

    An input whose first dimension is not fixed is batched.

    Args:
        uri: Path of the file.
        inputs: Shapes of one item's inputs, for other dimensions that are not fixed.
        batch_sizes: Levels of ``batch_size``; usual ones by default, the one there is if the graph fixes it.
        threads: Levels of ``threads`` within an operator; usual ones by default.

    Raises:
        DeviceError: If ONNX Runtime is not installed.
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
    ) -> None:
        self.uri = uri
        workers = threads_knob(threads)
        self._threads = count(grid_of([workers]).default, THREADS)
        self._session = _session(uri, self._threads)
        self._fed = tuple(_fed(uri, self._session.get_inputs(), parse_inputs(inputs)))
        self.space: SearchSpace = grid_of([*_batch_knobs(uri, self._fed, batch_sizes), workers])
        self.apply(self.space.default)

    def apply(self, point: OperatingPoint) -> None:
        """Make inputs of the batch size; load the graph again if the number of threads changes.

        Raises:
            KnobRejected: If the point is not in the space, or the graph does not load with so many threads.
        """
        wanted = chosen(self.space, point)
        if count(wanted, THREADS) != self._threads:
            self._reload(count(wanted, THREADS))
        self._batch_size = count(wanted, BATCH_SIZE)
        with guarded(f"a batch of {self._batch_size} cannot be made:"):
            self._feeds = {each.name: self._random(each, seed) for seed, each in enumerate(self._fed)}

    def _random(self, each: Fed, seed: int) -> Any:
        return random_array([self._batch_size if size is None else size for size in each.shape], each.dtype, seed)

    def _reload(self, threads: int) -> None:
        # The old one goes first: a large model may not fit into memory twice.
        self._session, self._threads = None, 0
        try:
            self._session = _session(self.uri, threads)
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


def _session(path: str, threads: int) -> Any:
    """Return the loaded graph.

    Raises:
        DeviceError: If ONNX Runtime is not installed.
        BadFile: If it does not load.
    """
    try:
        import onnxruntime
    except ImportError as err:
        raise DeviceError(f"{path} needs ONNX Runtime; pip install 'polythrottle[onnx]'") from err
    if not Path(path).is_file():
        raise BadFile(f"there is no file {path}")
    options = onnxruntime.SessionOptions()
    options.log_severity_level = _SILENT  # what goes wrong is raised as well
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    # Waiting threads that spin would be charged to the model as busy time.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    try:
        return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    except Exception as err:  # its exceptions share no narrower class
        raise BadFile(f"{path} is not an ONNX model that runs here: {one_line(err)}") from err


def _fed(uri: str, declared: Sequence[Any], given: Sequence[Input]) -> Iterator[Fed]:
    """Yield how each declared input is fed, dimensions that are not fixed taken from what was given."""
    names = [each.name for each in declared]
    unnamed = [each for each in given if each.name is None]
    if unnamed and len(unnamed) != len(names):
        raise InvalidInput(f"{uri} has the inputs {', '.join(names)}, but {len(unnamed)} shapes are given")
    stated = dict(zip(names, unnamed, strict=True)) if unnamed else {each.name: each for each in given}
    for name in stated:
        if name not in names:
            raise UnknownName(f"input of {uri}", str(name), names)
    # A symbol that is somewhere a first dimension means the batch wherever it stands.
    batch = {each.shape[0] for each in declared if each.shape and not _fixed(each.shape[0])}
    for each in declared:
        shape = tuple(None if not place and not _fixed(size) else size for place, size in enumerate(each.shape))
        shape = tuple(None if isinstance(size, str) and size in batch else size for size in shape)
        own = stated.get(each.name)
        yield Fed(each.name, _filled(uri, each.name, shape, own), _dtype(uri, each.name, each.type, own))


def _fixed(size: int | str | None) -> bool:
    return isinstance(size, int) and size > 0


def _filled(uri: str, name: str, shape: tuple[Any, ...], own: Input | None) -> tuple[int | None, ...]:
    """Return a declared shape with the dimensions after the first taken from what was given."""
    written = "x".join("batch" if size is None else str(size) for size in shape) or "a single number"
    if own is None:
        if all(size is None or _fixed(size) for size in shape):
            return shape
        raise InvalidInput(
            f"{uri}: input {name} is {written}; give every dimension after the first, such as "
            f"--input {name}={'x'.join(str(size) if _fixed(size) else '128' for size in shape[1:])}"
        )
    fits = len(own.shape) == len(shape[1:]) and all(
        mine == size or not _fixed(size) for mine, size in zip(own.shape, shape[1:], strict=True)
    )
    if not fits:
        raise InvalidInput(
            f"{uri}: input {name} is {written}; {'x'.join(map(str, own.shape))} after the first does not fit"
        )
    return (*shape[:1], *own.shape)


def _dtype(uri: str, name: str, declared: str, own: Input | None) -> str:
    """Return the numpy name of a declared type such as ``tensor(float)``."""
    inner = declared.removeprefix("tensor(").removesuffix(")")
    dtype = _NUMPY_NAMES.get(inner, inner)
    if dtype not in DTYPES:
        raise InvalidInput(f"{uri}: input {name} is a {declared}; only numbers can be made up")
    if own is not None and own.dtype not in (None, dtype):
        raise InvalidInput(f"{uri}: input {name} is {dtype}, not {own.dtype}")
    return dtype


def _batch_knobs(uri: str, fed: Sequence[Fed], levels: Sequence[int] | None) -> list[Knob]:
    """Return the batch knob: with one level if the graph fixes its batch, none if it has no dimension for it."""
    if any(None in each.shape for each in fed):
        return [batch_knob(levels)]
    fixed = next((each.shape[0] for each in fed if each.shape), None)
    if levels is not None and set(levels) != {fixed or 1}:
        raise InvalidInput(
            f"{uri} is exported with a batch of {fixed or 1}; leave out other batch sizes, "
            "or export it with a dynamic batch"
        )
    return [batch_knob([fixed])] if fixed else []
