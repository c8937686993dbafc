"""Fine-tuning on a simulated GPU, alone and beside inference: both take turns, and each turn costs something."""

from dataclasses import dataclass, replace

import numpy as np

from polythrottle.backends.simulated.engine import Engine
from polythrottle.backends.simulated.physics import Array, Demand, QueryCycle
from polythrottle.catalog.models import Model
from polythrottle.domain.errors import InvalidInput
from polythrottle.domain.space import OperatingPoint

# Fine-tuning on a simulated board: a frozen backbone's forward pass and a head, as a model the same physics serves.
#
# What nobody published for these boards is assumed, and said so beside each figure.

FEATURES = 2048
"""Width of the backbone's last layer, which the head reads; assumed (B4 has 1792, B7 2560)."""
_PASSES = 3.0
"""Forward, gradient of the weights, gradient of the input: each costs the head as much as its forward pass."""
_COPIES = 4.0
_BYTES = 4.0
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
    demand = Demand.of(engine.simulation, model, batch_size)
    clocks = engine.clocks(levels)
    memory_s = demand.memory_s * engine.tops.memory_hz / clocks.memory_hz
    return np.asarray(memory_s / (memory_s + demand.compute_cycles / clocks.gpu_max_hz))


# Two kinds of work on one simulated GPU: they take turns, and each turn costs something.
#
# Edge GPUs isolate nothing: streams, MPS and MIG are missing, contexts take turns (arXiv 2310.19991, section on
# workload interference). The lengths below are not published for these boards; all of them are assumed, moderately.

FAIR = 0.5
"""The share of the time that each of two contexts gets when nobody says otherwise."""


@dataclass(frozen=True)
class Sharing:
    """What taking turns costs; every figure is assumed.

    Args:
        turn_s: How long a context keeps the GPU while another waits.
        switch_s: What saving one context and loading another takes.
        refill_s: What a turn loses on caches that the other has filled.
        contention: By how much work that only moves bytes slows other such work: copies and loaders do not take turns.
        warmup_s: What the first query or slice after work of the other kind loses, when they do not share.

    Raises:
        InvalidInput: If one of them is negative, or a turn has no length.
    """

    turn_s: float = 2e-3
    switch_s: float = 5e-5
    refill_s: float = 5e-5
    contention: float = 0.15
    warmup_s: float = 1e-3

    def __post_init__(self) -> None:
        if self.turn_s <= 0 or min(self.switch_s, self.refill_s, self.contention, self.warmup_s) < 0:
            raise InvalidInput("turns are longer than 0 s, and what they cost is not negative")

    @property
    def useful(self) -> float:
        """The share of the time that is left for work while contexts take turns."""
        return self.turn_s / (self.turn_s + self.switch_s + self.refill_s)


ASSUMED = Sharing()


@dataclass(frozen=True)
class Paces:
    """What each kind of work gets done in a second, in seconds of what it would have alone.

    Args:
        inference: Of inference.
        training: Of fine-tuning.
    """

    inference: float
    training: float


def paces(inference_memory: float, training_memory: float, share: float = FAIR, sharing: Sharing = ASSUMED) -> Paces:
    """Return how fast both kinds of work go on while both have some.

    Args:
        inference_memory: How much of inference is moving bytes, 0 to 1; see `training.memory_share`.
        training_memory: The same of fine-tuning.
        share: Of the time that fine-tuning gets; at 0 or 1 nobody takes turns.
        sharing: What taking turns costs.

    Raises:
        InvalidInput: If the share is not one.
    """
    if not 0 <= share <= 1:
        raise InvalidInput(f"fine-tuning gets between 0 and all of the time, not {share:g} of it")
    if share in (0.0, 1.0):
        return Paces(1.0 - share, share)
    left = sharing.useful / (1.0 + sharing.contention * inference_memory * training_memory)
    return Paces(left * (1.0 - share), left * share)


def busy(point: OperatingPoint) -> OperatingPoint:
    """Return the point whose GPU never falls below its highest clock: what a governor does that sees no gap."""
    if "gpu_min_hz" in point:
        return point.moved({"gpu_min_hz": point["gpu_max_hz"]})
    return point


@dataclass(frozen=True)
class CoRun:
    """Inference beside fine-tuning while neither runs out of work, without noise.

    Args:
        latency_s: Of one query, from sending to answer.
        interval_s: Between two answers.
        slice_s: Of one slice of the fine-tuning; infinite if it gets no time.
        power_w: Mean besides leakage.
    """

    latency_s: float
    interval_s: float
    slice_s: float
    power_w: float


def co_run(
    engine: Engine,
    serving: tuple[Model, int],
    training: tuple[Model, int],
    point: OperatingPoint,
    share: float = FAIR,
    sharing: Sharing = ASSUMED,
) -> CoRun:
    """Return what a co-run on a board would measure without noise.

    Args:
        engine: The board's physics.
        serving: What is served, and items per query.
        training: What is fine-tuned (`training.trained`), and samples per slice.
        point: Levels of every knob of the board.
        share: Of the time that fine-tuning gets, 0 to below 1; at 0 inference is alone.
        sharing: What taking turns costs.

    Raises:
        InvalidInput: If inference would get no time, or the share is not one.
    """
    if share >= 1:
        raise InvalidInput("inference needs some of the time; give fine-tuning less than all of it")
    alone = engine.columns([point])
    levels = engine.columns([busy(point)])
    if share == 0:
        one = _cycle(engine, serving, alone)
        return CoRun(one.latency_s.item(), one.interval_s.item(), np.inf, one.dynamic_w.item())
    one = _cycle(engine, serving, levels)
    other = _cycle(engine, training, levels)
    mine, theirs = (memory_share(engine, *_sized(each), levels).item() for each in (serving, training))
    pace = paces(mine, theirs, share, sharing)
    power_w = (1.0 - share) * one.dynamic_w + share * other.dynamic_w
    stretch = 1.0 / pace.inference
    return CoRun(
        (one.latency_s * stretch).item(),
        (one.interval_s * stretch).item(),
        (other.interval_s / pace.training).item(),
        power_w.item(),
    )


def _sized(work: tuple[Model, int]) -> tuple[Model, Array]:
    return work[0], np.array([float(work[1])])


def _cycle(engine: Engine, work: tuple[Model, int], levels: dict[str, Array]) -> QueryCycle:
    model, size = _sized(work)
    return engine.cycle(model, size, levels, waited_s=0.0, hot=False)
