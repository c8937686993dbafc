"""Operations of ONNX operators, a multiply-add counted as two; after their definitions at onnx.ai/onnx/operators.

``shape(name)`` gives the dimensions of a tensor, all known. Operators without a formula move bytes only.
"""

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

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
    formula = _FORMULAS.get(node.op_type) if node.domain in ("", "ai.onnx") else None
    return None if formula is None else float(formula(node, shape))


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
    inner = rows[0] if attributes(node).get("transA", 0) else rows[1]
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
