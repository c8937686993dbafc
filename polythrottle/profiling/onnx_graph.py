"""The graph of an ONNX file, read from its nodes; no part of the model is run but what computes shapes."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from polythrottle.errors import BadFile, DeviceError, InvalidInput
from polythrottle.profiling.graph import Access, Graph, Sketch, Tensor
from polythrottle.profiling.onnx_formulas import (
    POINTWISE,
    QUANTISED,
    RECURRENT,
    attributes,
    holds_formula,
    operations,
)
from polythrottle.profiling.onnx_shapes import Shapes
from polythrottle.workloads.call import one_line
from polythrottle.workloads.declared import Declared, Fed, batch_knobs, fed
from polythrottle.workloads.onnx_weights import check_weights
from polythrottle.workloads.tensors import parse_inputs

_ALIASES = frozenset({"Reshape", "Flatten", "Squeeze", "Unsqueeze", "Identity", "Dropout"})
_KNOWN_BEFORE = frozenset({"Shape", "Size"})
_PARTS = frozenset({"Gather", "Slice", "Split"})
_LOOKUPS = frozenset({"Gather", "GatherElements", "GatherND"})


def trace_onnx(path: str, inputs: Sequence[str], batch_size: int | None) -> tuple[Graph, tuple[Fed, ...], int]:
    """Return what an ONNX file does with a batch.

    Args:
        path: The file.
        inputs: Shapes of one item's inputs, for dimensions that are not fixed.
        batch_size: Items per query; one, or what the file fixes, if None.

    Returns:
        The graph, its inputs, and the items of one query.

    Raises:
        DeviceError: If the package onnx is not installed.
        BadFile: If the file is missing or no ONNX model.
        InvalidInput: If shapes are missing, do not fit or follow from the data, or the model is quantised.
    """
    model = _loaded(path)
    weights = {each.name for each in model.graph.initializer}
    declared = [_declared(each) for each in model.graph.input if each.name not in weights]
    given = fed(path, declared, parse_inputs(inputs))
    levels = batch_knobs(path, given, None if batch_size is None else [batch_size])
    items = int(levels[0].levels[0]) if levels else 1
    return _Reading(path, model, given, items).graph(), given, items


def _loaded(path: str) -> Any:
    try:
        import onnx
        from onnx import inliner
    except ImportError as err:
        raise DeviceError(f"{path} needs the package onnx; pip install 'polythrottle[onnx]'") from err
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

    if not Path(path).is_file():
        raise BadFile(f"there is no file {path}")
    check_weights(Path(path))
    try:
        model = onnx.load(path, load_external_data=False)
    except (DecodeError, OSError, ValueError) as err:
        raise BadFile(f"{path} is not an ONNX model that can be read: {one_line(err)}") from err
    if not model.graph.node:
        raise BadFile(f"{path} is not an ONNX model: it holds no operators")
    return inliner.inline_local_functions(model) if model.functions else model


def _declared(value: Any) -> Declared:
    import onnx

    kind = value.type.tensor_type
    dims = tuple(each.dim_value or each.dim_param or None for each in kind.shape.dim)
    written = onnx.TensorProto.DataType.Name(kind.elem_type).lower()
    try:
        return Declared(value.name, dims, str(onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type)), written)
    except KeyError:
        return Declared(value.name, dims, "", "value that is no tensor")


class _Reading:
    """One pass over the nodes of a graph."""

    def __init__(self, path: str, model: Any, given: Sequence[Fed], items: int) -> None:
        self._path = path
        self._graph = model.graph
        self._sketch = Sketch()
        sizes = {each.name: [items if size is None else size for size in each.shape] for each in given}
        self._shapes = Shapes(path, model, sizes)
        self._places: dict[str, int] = {}
        for each in self._graph.initializer:
            self._places[each.name] = self._constant(each.name)
        weights = sum(each.elements for each in self._sketch.tensors if each.item_bytes is None)
        self._parameters = weights or None
        for name in sizes:
            self._places[name] = self._sketch.feed(self._made(name))

    def graph(self) -> Graph:
        """Return the graph.

        Raises:
            InvalidInput: If it is quantised, or a shape follows from the data.
            BadFile: If a node reads what nothing makes.
        """
        for node in self._graph.node:
            self._check(node)
            self._shapes.follow(node)
            self._read(node)
        outputs = [self._places[each.name] for each in self._graph.output if each.name in self._places]
        return self._sketch.finished(outputs, self._parameters)

    def _check(self, node: Any) -> None:
        if node.op_type in QUANTISED:
            raise InvalidInput(
                f"{self._path} holds quantised operators ({node.op_type}), which cannot be counted; "
                "profile the model as it was before, with --precision int8"
            )
        if any(holds_formula(each.g) for each in node.attribute if each.HasField("g")):
            raise InvalidInput(f"{self._path}: what its {node.op_type} computes follows from the data; unroll it first")
        for name in node.input:
            if name and name not in self._places:
                raise BadFile(f"{self._path} is not an ONNX model that holds together: nothing makes {name!r}")

    def _read(self, node: Any) -> None:
        names = [name for name in node.output if name]
        if node.op_type in _KNOWN_BEFORE or self._known(node):
            self._places.update({name: self._constant(name) for name in names})
        elif node.op_type in _ALIASES:
            self._places.update(dict.fromkeys(names, self._places[node.input[0]]))
        elif node.op_type in RECURRENT:
            self._read_recurrent(node, names)
        elif node.op_type in _PARTS and all(self._fixed(name) for name in node.input[1:] if name):
            self._read_parts(node, names)
        else:
            self._step(node, names)

    def _known(self, node: Any) -> bool:
        inner = any(each.HasField("g") for each in node.attribute)  # an inner graph may read more than the inputs
        return not inner and all(self._fixed(name) for name in node.input if name)

    def _fixed(self, name: str) -> bool:
        return self._sketch.tensors[self._places[name]].constant

    def _constant(self, name: str) -> int:
        elements = math.prod(self._shapes.known(name) or ())
        return self._sketch.add(_tensor(elements, self._shapes.kind(name), constant=True))

    def _step(self, node: Any, names: Sequence[str]) -> None:
        made = [self._made(name) for name in names]
        reads = [self._access(name) for name in node.input if name]
        if node.op_type in _LOOKUPS:
            reads[0] = Access(reads[0].tensor, min(reads[0].elements, made[0].elements), looked_up=True)
        work = operations(node, self._shapes.of)
        pointwise = node.op_type in POINTWISE
        places = self._sketch.step(node.op_type, reads, made, operations=work, pointwise=pointwise)
        self._places.update(zip(names, places, strict=True))

    def _read_parts(self, node: Any, names: Sequence[str]) -> None:
        """Note the parts a tensor is cut into, each of which reads no more than itself."""
        start = 0
        for name in names:
            made = self._made(name)
            read = Access(self._places[node.input[0]], made.elements, start)
            (self._places[name],) = self._sketch.step(node.op_type, [read], [made], pointwise=True)
            start += made.elements

    def _read_recurrent(self, node: Any, names: Sequence[str]) -> None:
        """Note one product for the inputs of all steps, and one for the state at every step, as they run.

        LSTM, GRU and RNN: W of shape (directions, gates · hidden, inputs), R of (directions, gates · hidden, hidden).
        """
        given, weights, recurrent = node.input[:3]
        shape, state_shape = self._shapes.of(given), self._shapes.of(recurrent)
        steps, items = shape[1::-1] if attributes(node).get("layout", 0) else shape[:2]
        gates = math.prod(state_shape[:2]) * items
        work = [2.0 * items * math.prod(each) for each in (self._shapes.of(weights), state_shape)]
        reads = [self._access(given), self._access(weights)]
        (place,) = self._sketch.step(node.op_type, reads, [Tensor(steps * gates)], operations=steps * work[0])
        made, places = [self._made(name) for name in names], []
        state: list[Access] = []
        for i in range(steps):
            reads = [Access(place, gates, i * gates), self._access(recurrent), *state]
            ends = made if i == steps - 1 else [Tensor(math.prod(state_shape[::2]) * items)]
            places = self._sketch.step(node.op_type, reads, ends, operations=work[1])
            state = [Access(places[0], math.prod(state_shape[::2]) * items)]
        self._places.update(zip(names, places, strict=True))

    def _access(self, name: str) -> Access:
        place = self._places[name]
        return Access(place, self._sketch.tensors[place].elements)

    def _made(self, name: str) -> Tensor:
        return _tensor(math.prod(self._shapes.of(name)), self._shapes.kind(name))


def _tensor(elements: int, kind: int, constant: bool = False) -> Tensor:
    import onnx

    real = {onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16, onnx.TensorProto.DOUBLE, onnx.TensorProto.BFLOAT16}
    try:
        width = max(1, onnx.helper.tensor_dtype_to_np_dtype(kind).itemsize)
    except KeyError:
        width = 1
    return Tensor(elements, None if kind in real else width, constant)
