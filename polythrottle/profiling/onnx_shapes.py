"""The shapes of an ONNX graph, node by node: inferred by onnx, with the small values that shapes are computed from."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from polythrottle.errors import InvalidInput, TrialError
from polythrottle.workloads.call import guarded, one_line

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
        known = self._types if inner else {name: self._types[name] for name in node.input if name in self._types}
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
        return first if isinstance(first, np.ndarray | np.generic) else None

    def kind(self, name: str) -> int:
        """Return the element type of a tensor as onnx numbers it; 0 if it is not known."""
        return int(self._types[name].tensor_type.elem_type) if name in self._types else 0

    def known(self, name: str) -> tuple[int, ...] | None:
        """Return the dimensions of a tensor; None if one of them is not known."""
        if name not in self._types or not self._types[name].tensor_type.HasField("shape"):
            return None
        dims = self._types[name].tensor_type.shape.dim
        return tuple(each.dim_value for each in dims) if all(each.HasField("dim_value") for each in dims) else None

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
