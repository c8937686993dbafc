"""The computation graph of an ONNX file: its nodes, their shapes and operations.

No part of the model is run but what computes shapes.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from polythrottle.domain.errors import BadFile, DeviceError, InvalidInput, TrialError
from polythrottle.workloads.foreign_calls import guarded, one_line
from polythrottle.workloads.graph_operators import Access, Graph, Sketch, Tensor
from polythrottle.workloads.inputs import DeclaredInput, FedInput, batch_knobs, fed, parse_inputs
from polythrottle.workloads.onnx_model import check_weights

# Operations of ONNX operators, a multiply-add counted as two; after their definitions at onnx.ai/onnx/operators.
#
# ``shape(name)`` gives the dimensions of a tensor, all known. Operators without a formula move bytes only.

Shape = Callable[[str], tuple[int, ...]]

POINTWISE = frozenset(
    re.findall(
        r"\w+",
        """
        Abs Acos Acosh Add And Asin Asinh Atan Atanh BatchNormalization BitShift BitwiseAnd BitwiseNot BitwiseOr
        BitwiseXor Cast CastLike Ceil Celu Clip Cos Cosh Div Elu Equal Erf Exp Floor Gelu Greater GreaterOrEqual
        HardSigmoid HardSwish IsInf IsNaN LeakyRelu Less LessOrEqual Log Max Mean Min Mish Mod Mul Neg Not Or PRelu Pow
        Reciprocal Relu Round Selu Shrink Sigmoid Sign Sin Sinh Softplus Softsign Sqrt Sub Sum Swish Tan Tanh
        ThresholdedRelu Transpose Where Xor
        """,
    )
)
"""Operators of which each result depends on one place of the inputs, the same or, for Transpose, another."""

QUANTISED = frozenset(
    {"ConvInteger", "DequantizeLinear", "DynamicQuantizeLinear", "MatMulInteger", "QLinearConv", "QLinearMatMul"}
    | {"QuantizeLinear"}
)
"""Operators on quantised numbers."""


RECURRENT = frozenset({"LSTM", "GRU", "RNN"})
"""Layers that run once per step of a sequence."""


def attributes(node: Any) -> dict[str, Any]:
    """Return the attributes of a node by name."""
    from onnx import helper

    return {each.name: helper.get_attribute_value(each) for each in node.attribute}


def operations(node: Any, shape: Shape) -> float | None:
    """Return what one run of a node computes; None if there is no formula for it."""
    formula = None
    if node.domain in ("", "ai.onnx"):
        formula = _FORMULAS.get(node.op_type)
    if formula is None:
        return None
    return float(formula(node, shape))


def holds_formula(graph: Any) -> bool:
    """Return whether a graph inside a node, or one inside that, has an operator whose work counts."""
    inner = [each.g for node in graph.node for each in node.attribute if each.HasField("g")]
    return any(node.op_type in (*_FORMULAS, *RECURRENT) for node in graph.node) or any(map(holds_formula, inner))


def _conv(node: Any, shape: Shape) -> float:
    """Conv: every result takes the products of one kernel, W of shape (M, C/group, k₁, k₂, …)."""
    return 2.0 * math.prod(shape(node.output[0])) * math.prod(shape(node.input[1])[1:])


def _conv_transpose(node: Any, shape: Shape) -> float:
    """ConvTranspose: every input goes into the products of one kernel, W of shape (C, M/group, k₁, k₂, …)."""
    return 2.0 * math.prod(shape(node.input[0])) * math.prod(shape(node.input[1])[1:])


def _gemm(node: Any, shape: Shape) -> float:
    """Gemm: (M, K) times (K, N), the first transposed if transA."""
    rows = shape(node.input[0])
    if attributes(node).get("transA", 0):
        inner = rows[0]
    else:
        inner = rows[1]
    return 2.0 * math.prod(shape(node.output[0])) * inner


def _matmul(node: Any, shape: Shape) -> float:
    """MatMul, as numpy: every result takes K products, K the last dimension of the first factor."""
    return 2.0 * math.prod(shape(node.output[0])) * shape(node.input[0])[-1]


def _attention(node: Any, shape: Shape) -> float:
    """Attention: queries times keys, and weights times values, whatever the mask; heads folded or unfolded."""
    query, key, value = (shape(name) for name in node.input[:3])
    if len(query) == 3:
        heads = int(attributes(node)["q_num_heads"])
        depth = query[2] + value[2] // int(attributes(node)["kv_num_heads"]) * heads
        return 2.0 * query[0] * query[1] * key[1] * depth
    return 2.0 * query[0] * query[1] * query[2] * key[2] * (query[3] + value[3])


def _einsum(node: Any, shape: Shape) -> float:
    """Einsum of two factors: one multiply-add for every combination of the letters."""
    terms = attributes(node)["equation"].decode().replace(" ", "").partition("->")[0].split(",")
    sizes: dict[str, int] = {}
    for term, name in zip(terms, node.input, strict=True):
        spread = shape(name)[: len(shape(name)) - len(term.replace("...", ""))]
        letters = term.replace("...", "".join(chr(0x1D400 + i) for i in range(len(spread))))
        sizes.update(
            {letter: max(size, sizes.get(letter, 1)) for letter, size in zip(letters, shape(name), strict=True)}
        )
    return 2.0 * math.prod(sizes.values()) * max(1, len(terms) - 1)


_FORMULAS: Mapping[str, Callable[[Any, Shape], float]] = {
    "Conv": _conv,
    "ConvTranspose": _conv_transpose,
    "Gemm": _gemm,
    "MatMul": _matmul,
    "Attention": _attention,
    "Einsum": _einsum,
}

# The shapes of an ONNX graph, node by node: inferred by onnx, with the small values that shapes are computed from.

_SMALL = 4096
"""Values of tensors of at most so many elements are followed; shapes are far below."""


class Shapes:
    """Types, shapes and small values of the tensors of a graph, as far as its nodes have been followed.

    Args:
        path: The file, for messages.
        model: The model; its weights need not be loaded.
        given: Dimensions of its inputs.

    Raises:
        InvalidInput: If its operator set is not one this version of onnx knows.
    """

    def __init__(self, path: str, model: Any, given: Mapping[str, Sequence[int]]) -> None:
        from onnx import helper

        self._path = path
        self._opsets = {each.domain: each.version for each in model.opset_import}
        self._imports = list(model.opset_import)
        self._types: dict[str, Any] = {}
        self._values: dict[str, Any] = {}
        for each in model.graph.input:
            if each.name in given:
                kind = each.type.tensor_type.elem_type
                self._types[each.name] = helper.make_tensor_type_proto(kind, list(given[each.name]))
        for each in model.graph.initializer:
            self._types[each.name] = helper.make_tensor_type_proto(each.data_type, list(each.dims))
            if math.prod(each.dims) <= _SMALL and not each.external_data:
                self._values[each.name] = each

    def follow(self, node: Any) -> None:
        """Note what a node makes.

        Raises:
            InvalidInput: If shapes do not fit together.
        """
        from onnx import defs, shape_inference

        inner = any(each.HasField("g") for each in node.attribute)  # an inner graph reads what is around it
        if inner:
            known = self._types
        else:
            known = {name: self._types[name] for name in node.input if name in self._types}
        if any(name and name not in known for name in node.input):
            return
        try:
            schema = defs.get_schema(node.op_type, self._opsets.get(node.domain, 1), node.domain)
            made = shape_inference.infer_node_outputs(schema, node, known, self._values, opset_imports=self._imports)
        except defs.SchemaError:
            return
        except (shape_inference.InferenceError, ValueError, RuntimeError) as err:
            raise InvalidInput(f"{self._path}: its shapes do not fit together: {one_line(err)}") from err
        self._types.update(made)
        if not inner:
            self._compute(node)

    def _compute(self, node: Any) -> None:
        """Note the value a node makes if it is small and follows from shapes and small values."""
        from onnx import numpy_helper

        name = node.output[0]
        shape = self.known(name)
        if node.op_type in ("Shape", "Size") and self.known(node.input[0]) is not None:
            inputs: Mapping[str, Any] = {node.input[0]: _empty(self.known(node.input[0]) or ())}
        elif shape is None or math.prod(shape) > _SMALL or any(x and x not in self._values for x in node.input):
            return
        else:
            inputs = {each: numpy_helper.to_array(self._values[each]) for each in node.input if each}
        made = self._run(node, inputs)
        if made is not None:
            self._values[name] = numpy_helper.from_array(made, name)

    def _run(self, node: Any, inputs: Mapping[str, Any]) -> Any:
        """Return the first output of a node; None if onnx cannot compute it."""
        import numpy as np
        from onnx import ValueInfoProto, helper
        from onnx.reference import ReferenceEvaluator

        takes, makes = ([ValueInfoProto(name=name) for name in names if name] for names in (inputs, node.output))
        try:
            with guarded("onnx raised"):
                graph = helper.make_graph([node], "one", takes, makes)
                made: Any = ReferenceEvaluator(graph, opsets=self._opsets).run(None, dict(inputs))
                first = made[0]
        except TrialError:  # what is not known only leaves shapes unknown
            return None
        if isinstance(first, np.ndarray | np.generic):
            return first
        return None

    def kind(self, name: str) -> int:
        """Return the element type of a tensor as onnx numbers it; 0 if it is not known."""
        if name in self._types:
            return int(self._types[name].tensor_type.elem_type)
        return 0

    def known(self, name: str) -> tuple[int, ...] | None:
        """Return the dimensions of a tensor; None if one of them is not known."""
        if name not in self._types or not self._types[name].tensor_type.HasField("shape"):
            return None
        dims = self._types[name].tensor_type.shape.dim
        if all(each.HasField("dim_value") for each in dims):
            return tuple(each.dim_value for each in dims)
        return None

    def of(self, name: str) -> tuple[int, ...]:
        """Return the dimensions of a tensor.

        Raises:
            InvalidInput: If one of them is not known.
        """
        shape = self.known(name)
        if shape is None:
            raise InvalidInput(
                f"{self._path}: the size of {name!r} is not known before the model runs, or an operator in front of it "
                "is not one onnx knows; export the model with fixed shapes and standard operators"
            )
        return shape


def _empty(shape: Sequence[int]) -> Any:
    """Return an array of a shape that takes no memory."""
    import numpy as np

    return np.broadcast_to(np.float32(0), tuple(shape))


# The graph of an ONNX file, read from its nodes; no part of the model is run but what computes shapes.

_ALIASES = frozenset({"Reshape", "Flatten", "Squeeze", "Unsqueeze", "Identity", "Dropout"})
_KNOWN_BEFORE = frozenset({"Shape", "Size"})
_PARTS = frozenset({"Gather", "Slice", "Split"})
_LOOKUPS = frozenset({"Gather", "GatherElements", "GatherND"})


def trace_onnx(path: str, inputs: Sequence[str], batch_size: int | None) -> tuple[Graph, tuple[FedInput, ...], int]:
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
    from google.protobuf.message import DecodeError

    if not Path(path).is_file():
        raise BadFile(f"there is no file {path}")
    check_weights(Path(path))
    try:
        model = onnx.load(path, load_external_data=False)
    except (DecodeError, OSError, ValueError) as err:
        raise BadFile(f"{path} is not an ONNX model that can be read: {one_line(err)}") from err
    if not model.graph.node:
        raise BadFile(f"{path} is not an ONNX model: it holds no operators")
    if model.functions:
        return inliner.inline_local_functions(model)
    return model


def _declared(value: Any) -> DeclaredInput:
    import onnx

    kind = value.type.tensor_type
    dims = tuple(each.dim_value or each.dim_param or None for each in kind.shape.dim)
    written = onnx.TensorProto.DataType.Name(kind.elem_type).lower()
    try:
        return DeclaredInput(value.name, dims, str(onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type)), written)
    except KeyError:
        return DeclaredInput(value.name, dims, "", "value that is no tensor")


class _Reading:
    """One pass over the nodes of a graph."""

    def __init__(self, path: str, model: Any, given: Sequence[FedInput], items: int) -> None:
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
        shape = self._shapes.of(given)
        state_shape = self._shapes.of(recurrent)
        if attributes(node).get("layout", 0):
            steps, items = shape[1::-1]
        else:
            steps, items = shape[:2]
        gates = math.prod(state_shape[:2]) * items
        work = [2.0 * items * math.prod(each) for each in (self._shapes.of(weights), state_shape)]
        reads = [self._access(given), self._access(weights)]
        (place,) = self._sketch.step(node.op_type, reads, [Tensor(steps * gates)], operations=steps * work[0])
        made = [self._made(name) for name in names]
        places = []
        state: list[Access] = []
        for i in range(steps):
            reads = [Access(place, gates, i * gates), self._access(recurrent), *state]
            if i == steps - 1:
                ends = made
            else:
                ends = [Tensor(math.prod(state_shape[::2]) * items)]
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
