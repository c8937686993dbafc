"""What work takes on a simulated board at given knob levels, without noise: a query, fine-tuning, a step of tokens.

*A query*: the physics behind device and ground truth. *Fine-tuning*, alone and beside inference: both take turns, and
each turn costs something. *A step of a language-model engine* takes ``t = sum of terms``, each of which follows the SM
clock by a share of its own: what moves bytes follows it a little (L2 cache and network on chip run with it), what
computes follows it wholly. Power is a floor plus energy that goes with the clock and the square of the voltage, plus
energy of bytes; a cap is the highest clock that keeps to it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from polythrottle.backends.simulated.physics import (
    Array,
    Clocks,
    Demand,
    QueryCycle,
    TopClocks,
    capped,
    idle_w,
    settled_c,
    sustainable_w,
)
from polythrottle.catalog.boards import Board, LanguageSimulation, Simulation
from polythrottle.catalog.models import BYTES, LanguageModel, Lengths, Model
from polythrottle.domain.errors import InvalidInput
from polythrottle.domain.space import Level, OperatingPoint


@dataclass(frozen=True)
class Engine:
    """The physics of one board, at several points at once: whatever it returns has shape (points,).

    Raises:
        InvalidInput: If the board's file has no coefficients to simulate it with.
    """

    board: Board

    def __post_init__(self) -> None:
        if self.board.simulation is None:
            raise InvalidInput(f"{self.board.title} cannot be simulated: its file has no [simulation] table")

    @cached_property
    def simulation(self) -> Simulation:
        """The board's coefficients."""
        assert self.board.simulation is not None
        return self.board.simulation

    @cached_property
    def tops(self) -> TopClocks:
        """The top clock of each domain."""
        return TopClocks(float(self._levels("gpu_max_hz")[-1]), float(self._levels("mem_hz")[-1]))

    def _levels(self, name: str) -> tuple[int | float, ...]:
        return self.board.knob(name).levels

    def columns(self, points: Sequence[Mapping[str, Level]]) -> dict[str, Array]:
        """Return the level of each knob of the board at each point; those not named are at their default."""
        default = self.board.default
        return {
            knob.name: np.array([point.get(knob.name, default[knob.name]) for point in points], dtype=float)
            for knob in self.board.knobs
        }

    def clocks(self, levels: Mapping[str, Array]) -> Clocks:
        """Return what the domains are set to; a board without a lowest GPU clock holds it at the highest."""
        gpu_max = levels["gpu_max_hz"]
        return Clocks(
            gpu_min_hz=levels.get("gpu_min_hz", gpu_max),
            gpu_max_hz=gpu_max,
            memory_hz=levels["mem_hz"],
            cpu_hz=levels.get("cpu_max_hz", np.full_like(gpu_max, self.simulation.cpu.clock_hz)),
        )

    def cap_w(self, levels: Mapping[str, Array]) -> Array:
        """Return the power in watts the board holds itself to: just below its limit, or the most it may ever draw."""
        if "power_limit_w" in levels:
            return levels["power_limit_w"] * self.simulation.gpu.hold
        return np.full_like(levels["gpu_max_hz"], self.board.power_max_w)

    def cycle(
        self, model: Model, batch_size: Array, levels: Mapping[str, Array], waited_s: float, hot: bool
    ) -> QueryCycle:
        """Return the cycle of one query.

        Args:
            model: What is served.
            batch_size: Items per query.
            levels: Of every knob of the board; see `columns`.
            waited_s: How long the board stood idle before; 0 if it did not.
            hot: Whether it has reached its temperature limit and slows itself down.
        """
        cap_w = self.cap_w(levels)
        if hot:
            cap_w = np.minimum(cap_w, sustainable_w(self.simulation.thermal))
        demand = Demand.of(self.simulation, model, batch_size)
        return capped(self.simulation, self.tops, demand, self.clocks(levels), waited_s, cap_w)

    def idle_w(self, levels: Mapping[str, Array]) -> Array:
        """Return what the board draws besides leakage while nothing is served, in watts."""
        return idle_w(self.simulation, self.tops, self.clocks(levels))

    def settled(self, model: Model, batch_size: Array, levels: Mapping[str, Array]) -> tuple[QueryCycle, Array]:
        """Return the cycle and the temperature in °C once the board has settled under full load."""
        heat = self.simulation.thermal
        free = self.cycle(model, batch_size, levels, waited_s=0.0, hot=False)
        temperature_c = settled_c(heat, free.dynamic_w)
        hot = temperature_c > heat.limit_c
        if not np.any(hot):
            return free, temperature_c
        slow = self.cycle(model, batch_size, levels, waited_s=0.0, hot=True)
        slow_c = np.minimum(heat.limit_c, settled_c(heat, slow.dynamic_w))
        return slow.where(hot, free), np.where(hot, slow_c, temperature_c)


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
        power_w: Mean besides leakage.
    """

    latency_s: float
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
        return CoRun(one.latency_s.item(), one.dynamic_w.item())
    one = _cycle(engine, serving, levels)
    other = _cycle(engine, training, levels)
    mine, theirs = (memory_share(engine, *_sized(each), levels).item() for each in (serving, training))
    pace = paces(mine, theirs, share, sharing)
    power_w = (1.0 - share) * one.dynamic_w + share * other.dynamic_w
    return CoRun((one.latency_s * (1.0 / pace.inference)).item(), power_w.item())


def _sized(work: tuple[Model, int]) -> tuple[Model, Array]:
    return work[0], np.array([float(work[1])])


def _cycle(engine: Engine, work: tuple[Model, int], levels: dict[str, Array]) -> QueryCycle:
    model, size = _sized(work)
    return engine.cycle(model, size, levels, waited_s=0.0, hot=False)


TERMS = (
    "dense",
    "experts",
    "context",
    "attention",
    "bytes",
    "exchanges",
    "layers",
    "expert_layers",
    "sequences",
    "step",
)
"""What adds up to a step: weights of dense layers or their arithmetic, of experts, keys and values that decoding reads,
attention of prompts, bytes exchanged, exchanges, layers, layers with experts, sequences, and what every step takes."""
_SHARPNESS = 4.0
"""How sharply the longer of moving weights and computing with them decides; 2 rounds the corner, infinity has none."""
_FP8 = "fp8"
_HALVINGS = 14


@dataclass(frozen=True)
class StepWork:
    """What one step computes: the sum over its sequences.

    Args:
        decodes: Sequences that make their next token.
        decode_context: Tokens those look back on, together.
        prompt_tokens: Tokens of prompts that are computed.
        prompt_pairs: Pairs of one of those and a token it looks back on.
        prompts: Prompts that end in this step, each of which makes a token.
    """

    decodes: int
    decode_context: float
    prompt_tokens: int = 0
    prompt_pairs: float = 0.0
    prompts: int = 0


class StepPhysics:
    """Time and power of the steps of one model on one kind of GPU; of each GPU of a group, all of which do the same.

    Args:
        model: What is served.
        gpu: Coefficients of the GPU.
        top_hz: Its highest SM clock.
    """

    def __init__(self, model: LanguageModel, gpu: LanguageSimulation, top_hz: float) -> None:
        self._model = model
        self._gpu = gpu
        self._top_hz = top_hz
        gpus = model.gpus
        self._dense_bytes = model.dense_bytes / gpus
        self._dense_s = self._dense_bytes / gpu.bandwidth_bytes_per_s * gpu.weight_stretch
        rate = gpu.flops_per_s * (2.0 if model.precision == _FP8 and gpu.fp8 else 1.0) * gpu.gemm_efficiency
        self._token_s = model.token_flops / gpus / rate
        self._logits_s = 2.0 * model.hidden * model.vocabulary / gpus / (gpu.flops_per_s * gpu.gemm_efficiency)
        self._key_bytes = model.token_bytes
        self._state_bytes = 2.0 * model.state_bytes / gpus
        windowed = model.window_layers / model.layers
        self._whole = 1.0 - windowed
        self._windowed = windowed
        self._pair_flops = 4.0 * model.heads * model.head_width * model.layers / gpus
        exchanges = 2 * model.layers if gpus > 1 else 0
        self._exchange_bytes = exchanges * model.hidden * 2.0 * 2.0 * (gpus - 1) / gpus
        self._fixed = (
            exchanges * gpu.exchange_s,
            model.layers * gpu.layer_s,
            model.expert_layers * (gpu.expert_layer_s + (gpu.fp8_expert_layer_s if model.precision == _FP8 else 0.0)),
        )
        self._step_s = gpu.step_s
        shares = {"dense": gpu.memory_clock_share, "experts": gpu.memory_clock_share, "context": gpu.memory_clock_share}
        shares |= {"attention": 1.0, "layers": gpu.layer_clock_share, "expert_layers": gpu.layer_clock_share}
        shares |= {"sequences": gpu.sequence_clock_share}
        self._shares = tuple(shares.get(name, 0.0) for name in TERMS)
        self._dense_share = gpu.memory_clock_share

    @cached_property
    def _expert_bytes(self) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        """Bytes of experts that a step reads, by its tokens up to a few thousand; beyond, all are read."""
        model = self._model
        if model.experts is None:
            return np.zeros(1)
        tokens = np.arange(4096)
        touched = 1.0 - (1.0 - model.experts.chosen / model.experts.count) ** tokens
        whole = model.expert_layers * model.experts.count * model.expert_weights * BYTES[model.precision] / model.gpus
        return np.asarray(touched * whole)

    def expert_bytes(self, tokens: int) -> float:
        """Return the bytes of experts that a step of so many tokens reads, if routing is even and independent."""
        table = self._expert_bytes
        return float(table[min(tokens, len(table) - 1)])

    def context_bytes(self, context: float, sequences: int) -> float:
        """Return the bytes of keys, values and states that decoding moves: of a whole context, or within a window."""
        state = sequences * self._state_bytes
        if not self._windowed:
            return self._key_bytes * context + state
        near = min(context, float(sequences * self._model.window_tokens))
        return self._key_bytes * (self._whole * context + self._windowed * near) + state

    def terms(self, work: StepWork, memory_share: float = 1.0) -> tuple[float, ...]:
        """Return the time in seconds of each of `TERMS` at the top SM clock.

        Args:
            work: What the step computes.
            memory_share: Memory clock over the top memory clock.
        """
        gpu = self._gpu
        tokens = work.decodes + work.prompt_tokens
        logits = work.decodes + work.prompts
        compute_s = tokens * self._token_s + logits * self._logits_s
        read_s = self._dense_s / memory_share
        longer, shorter = max(read_s, compute_s), min(read_s, compute_s)
        dense_s = longer * (1.0 + (shorter / longer) ** _SHARPNESS) ** (1.0 / _SHARPNESS)
        spread = 1.0
        if self._model.experts is not None and self._model.experts.parallel:
            spread = gpu.expert_spread
        rate = gpu.bandwidth_bytes_per_s * memory_share
        experts_s = self.expert_bytes(tokens) / rate * gpu.expert_stretch * spread
        context_s = self.context_bytes(work.decode_context, work.decodes) / rate
        attention_s = work.prompt_pairs * self._pair_flops / (gpu.flops_per_s * gpu.attention_efficiency)
        exchanged_s = tokens * self._exchange_bytes / gpu.link_bytes_per_s
        return (
            dense_s,
            experts_s,
            context_s * gpu.context_stretch,
            attention_s,
            exchanged_s,
            *self._fixed,
            logits * gpu.sequence_s,
            self._step_s,
        )

    def full_step_s(self, sequences: int, lengths: Lengths) -> float:
        """Return about how long a step with so many sequences takes at the top clock, prompts of new ones included."""
        share = sequences / lengths.output_tokens
        prompt = lengths.prompt_tokens
        context = sequences * (prompt + lengths.output_tokens / 2)
        return sum(self.terms(StepWork(sequences, context, round(share * prompt), share * prompt**2 / 2)))

    def split(self, work: StepWork, memory_share: float = 1.0) -> tuple[float, float]:
        """Return the part of a step's time at the top clock that the SM clock leaves alone, and the part it changes."""
        terms = self.terms(work, memory_share)
        clocked = sum(share * term for share, term in zip(self._shares, terms, strict=True))
        # Dense layers follow the clock wholly where they are bound by arithmetic.
        compute_s = (work.decodes + work.prompt_tokens) * self._token_s
        bound = compute_s**_SHARPNESS / (compute_s**_SHARPNESS + (self._dense_s / memory_share) ** _SHARPNESS)
        clocked += terms[0] * bound * (1.0 - self._dense_share)
        return sum(terms) - clocked, clocked

    def duration_s(self, work: StepWork, gpu_hz: float) -> float:
        """Return how long a step takes at an SM clock, in seconds."""
        still_s, clocked_s = self.split(work)
        return still_s + clocked_s * self._top_hz / gpu_hz

    def _volts(self, gpu_hz: float) -> float:
        """Return the square of the voltage over that at the top clock: flat up to the knee, then linear."""
        rise = max(0.0, gpu_hz / self._top_hz - self._gpu.knee) / (1.0 - self._gpu.knee)
        return ((1.0 + (self._gpu.swing - 1.0) * rise) / self._gpu.swing) ** 2

    def use(self, work: StepWork, duration_s: float) -> tuple[float, float]:
        """Return the shares of the memory's bandwidth and of the arithmetic rate that a step uses."""
        tokens = work.decodes + work.prompt_tokens
        moved = self._dense_bytes + self.expert_bytes(tokens) + self.context_bytes(work.decode_context, work.decodes)
        flops = tokens * self._model.token_flops / self._model.gpus + work.prompt_pairs * self._pair_flops
        rate = self._gpu.flops_per_s * (2.0 if self._model.precision == _FP8 and self._gpu.fp8 else 1.0)
        return moved / self._gpu.bandwidth_bytes_per_s / duration_s, flops / rate / duration_s

    def power_w(self, work: StepWork, gpu_hz: float) -> float:
        """Return what one GPU draws during a step at an SM clock, in watts, without a cap."""
        return self._power_w(work, gpu_hz, *self.split(work))

    def _power_w(self, work: StepWork, gpu_hz: float, still_s: float, clocked_s: float) -> float:
        gpu = self._gpu
        duration_s = still_s + clocked_s * self._top_hz / gpu_hz
        memory, compute = self.use(work, duration_s)
        # What computing draws goes with operations a second, so its clock is in the duration already.
        volts = self._volts(gpu_hz)
        clocked_w = gpu.active_w * volts * gpu_hz / self._top_hz
        return gpu.idle_w + clocked_w + gpu.memory_w * memory + gpu.compute_w * compute * volts

    def idle_w(self) -> float:
        """Return what one GPU draws with the engine loaded and nothing to do, in watts."""
        return self._gpu.idle_w

    def run(self, work: StepWork, gpu_hz: float, cap_w: float, memory_share: float = 1.0) -> tuple[float, float, float]:
        """Return duration in seconds, power in watts of one GPU, and the SM clock that runs, of a step.

        Args:
            work: What it computes.
            gpu_hz: Highest clock allowed.
            cap_w: Power limit of one GPU; the lowest clock runs if none keeps to it.
            memory_share: Memory clock over the top memory clock.
        """
        still_s, clocked_s = self.split(work, memory_share)
        power_w = self._power_w(work, gpu_hz, still_s, clocked_s)
        if power_w <= cap_w:
            return still_s + clocked_s * self._top_hz / gpu_hz, power_w, gpu_hz
        low_hz, high_hz = min(gpu_hz, self._top_hz * self._gpu.lowest), gpu_hz
        for _ in range(_HALVINGS):
            middle_hz = (low_hz + high_hz) / 2
            if self._power_w(work, middle_hz, still_s, clocked_s) <= cap_w:
                low_hz = middle_hz
            else:
                high_hz = middle_hz
        power_w = self._power_w(work, low_hz, still_s, clocked_s)
        return still_s + clocked_s * self._top_hz / low_hz, power_w, low_hz
