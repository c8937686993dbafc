"""Fine-tuning on a simulated board: a frozen backbone's forward pass and a head, as a model the same physics serves.

What nobody published for these boards is assumed, and said so beside each figure.
"""

from dataclasses import replace

import numpy as np

from polythrottle.backends.simulated.engine import Engine
from polythrottle.backends.simulated.power import Array
from polythrottle.backends.simulated.timing import Demand
from polythrottle.catalog.models import Model
from polythrottle.errors import InvalidInput

FEATURES = 2048
"""Width of the backbone's last layer, which the head reads; assumed (B4 has 1792, B7 2560)."""
_PASSES = 3.0
"""Forward, gradient of the weights, gradient of the input: each costs the head as much as its forward pass."""
_COPIES, _BYTES = 4.0, 4.0
"""Weights, gradients and two moments of Adam, four bytes each."""
_KERNELS = 2.0
"""A framework that trains launches this many times the kernels of an engine that only serves; assumed."""


def trained(model: Model, output: int, backward: float = 0.0) -> Model:
    """Return a model that asks per query of ``n`` items what a slice of ``n`` samples asks.

    The backbone is frozen: its forward pass costs what serving an item costs, in the same precision. The head's
    forward and backward pass comes on top, and for adapters inside the backbone a share of its backward pass, whole
    2 times the forward pass. Preparing a sample costs the CPU what preparing a request does.

    Args:
        model: What is served, whose backbone is fine-tuned.
        output: Dimension of the head's output, at least 1.
        backward: Share of the backbone's backward pass that is done: 0 for a head alone, 1 for all layers.

    Raises:
        InvalidInput: If the output is below 1 or the share is not one.
    """
    if output < 1 or not 0 <= backward <= 1:
        raise InvalidInput(f"a head of {output} outputs with {backward:g} of the backward pass cannot be trained")
    head = float(FEATURES * output)
    passes = 1.0 + 2.0 * backward
    return replace(
        model,
        name=f"{model.name}+{output}",
        operations=passes * model.operations + _PASSES * 2.0 * head,
        weight_bytes=passes * model.weight_bytes + _COPIES * _BYTES * head,
        traffic_bytes=passes * model.traffic_bytes,
        kernels=_KERNELS * passes * model.kernels,
    )


def memory_share(engine: Engine, model: Model, batch_size: Array, levels: dict[str, Array]) -> Array:
    """Return how much of a query's work is moving bytes, from 0 to 1, at the highest GPU clock allowed.

    Args:
        engine: The board's physics.
        model: What is served, or `trained`.
        batch_size: Items per query, shape (points,).
        levels: Of every knob of the board; see `Engine.columns`.
    """
    demand, clocks = Demand.of(engine.simulation, model, batch_size), engine.clocks(levels)
    memory_s = demand.memory_s * engine.tops.memory_hz / clocks.memory_hz
    return np.asarray(memory_s / (memory_s + demand.compute_cycles / clocks.gpu_max_hz))
