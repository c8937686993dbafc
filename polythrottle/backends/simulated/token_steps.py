"""What one step of a language-model engine takes and draws: rooflines with clocks, and power with a cap.

A step takes ``t = sum of terms``, each of which follows the SM clock by a share of its own: what moves bytes follows it
a little (L2 cache and network on chip run with it), what computes follows it wholly. Power is a floor plus energy that
goes with the clock and the square of the voltage, plus energy of bytes; a cap is the highest clock that keeps to it.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from polythrottle.catalog.boards import LanguageSimulation
from polythrottle.catalog.models import BYTES, LanguageModel, Lengths

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
