"""Models: what a served network computes and moves, so that a simulator knows how long it takes on a board.

A language model is told by its shape, and by how a server runs it: from both follows what each engine step asks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from polythrottle.catalog.boards import PRECISIONS
from polythrottle.catalog.documents import locate, read_document
from polythrottle.domain.errors import InvalidInput
from polythrottle.domain.space import BATCH_SIZE, Knob, SearchSpace

MARK = "key_value_heads"
"""The key that tells a description of a language model from that of any other model."""
BYTES = {"bf16": 2.0, "fp8": 1.0, "mxfp4": 0.53125, "int4": 0.53125}
"""Bytes of one weight of the layers; four bits carry a scale of eight bits (OCP MX: 32 weights) or 16 (AWQ: 128)."""
_WIDE = 2.0
"""Bytes of embeddings, of attention where only experts are quantised, and of one key or value."""


@dataclass(frozen=True)
class Experts:
    """A mixture of experts.

    Args:
        count: Experts of a layer.
        chosen: Experts that a token goes to.
        width: Inner width of one.
        shared_width: Inner width of what every token passes besides; 0 if nothing.
        layers: Layers that have experts; 0 if all.
        parallel: Whether whole experts are spread over the GPUs of a group, rather than slices of each.
    """

    count: int
    chosen: int
    width: int
    shared_width: int = 0
    layers: int = 0
    parallel: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.chosen <= self.count or self.width < 1:
            raise InvalidInput("experts need a width, and a token goes to at least one of them and at most all")


@dataclass(frozen=True)
class Lengths:
    """How long prompts and answers are where no trace says: log-normal.

    Args:
        prompt_tokens: Mean of prompts.
        output_tokens: Mean of answers.
        spread: Standard deviation of the logarithm of both.
        longest: Tokens of a prompt and its answer at most.
    """

    prompt_tokens: float
    output_tokens: float
    spread: float
    longest: int

    def __post_init__(self) -> None:
        if min(self.prompt_tokens, self.output_tokens) < 1 or self.spread > 3 or self.longest < 2:
            raise InvalidInput("prompts and answers have at least one token, and a spread of at most 3")


@dataclass(frozen=True)
class ServerArguments:
    """How the engine is started.

    Args:
        max_batched_tokens: Tokens of one step.
        max_sequences: Sequences of one step at most.
        memory_share: Of the GPU's memory that the engine takes.
        reserve_bytes: Of that, what activations and CUDA graphs take.
        start_s: Before a request reaches the scheduler.
        token_s: Between a step's end and a token's arrival at the client.
    """

    max_batched_tokens: int
    max_sequences: int
    memory_share: float
    reserve_bytes: float
    start_s: float
    token_s: float

    def __post_init__(self) -> None:
        if not (self.max_batched_tokens >= 1 and 1 <= self.max_sequences <= 16_384 and 0 < self.memory_share <= 1):
            raise InvalidInput("an engine takes at least one token a step, one sequence, and a share of the memory")


@dataclass(frozen=True)
class LanguageModel:
    """A language model of the catalogue, on a group of GPUs.

    Args:
        name: What it was asked for by: a name in ``profiles/workloads/`` or the path of a file.
        title: The name people know it by.
        precision: Of the layers' weights, one of `BYTES`.
        gpus: GPUs of a group; attention and dense layers are cut into as many slices (tensor parallelism).
        layers: Decoder layers.
        hidden: Width of the residual stream.
        heads: Query heads.
        key_value_heads: Key and value heads.
        head_width: Width of one head.
        width: Inner width of a dense layer; 0 if all layers have experts.
        vocabulary: Tokens of it.
        window_tokens: How far back a windowed layer looks; 0 if there is none.
        window_layers: Layers that look back so far only.
        state_bytes: What recurrent layers keep of a sequence, read and written every step; 0 if there are none.
        server: How the engine is started.
        lengths: How long prompts and answers are where no trace says.
        concurrency: Requests in flight to choose from.
        experts: Mixture of experts, if it is one.
    """

    name: str
    title: str
    precision: str
    gpus: int
    layers: int
    hidden: int
    heads: int
    key_value_heads: int
    head_width: int
    width: int
    vocabulary: int
    server: ServerArguments
    lengths: Lengths
    concurrency: tuple[int, ...]
    experts: Experts | None = None
    window_tokens: int = 0
    window_layers: int = 0
    state_bytes: float = 0.0

    def __post_init__(self) -> None:
        if self.precision not in BYTES:
            raise InvalidInput(f"precision must be {', '.join(BYTES)}, not {self.precision!r}")
        wrong = min(self.gpus, self.layers, self.hidden, self.heads, self.key_value_heads, self.head_width) < 1
        if wrong or self.vocabulary < 1 or (self.width < 1 and self.experts is None):
            raise InvalidInput("a language model needs GPUs, layers, heads and widths of at least 1")
        if self.window_layers > self.layers or (self.window_layers and not self.window_tokens):
            raise InvalidInput("windowed layers are layers, and need window_tokens")
        if not self.concurrency or any(count < 1 for count in self.concurrency):
            raise InvalidInput("concurrency is a list of whole numbers of at least 1")

    @property
    def expert_layers(self) -> int:
        """Layers that have experts."""
        if self.experts is None:
            return 0
        return self.experts.layers or self.layers

    @property
    def expert_weights(self) -> float:
        """Weights of one expert of one layer."""
        if self.experts is None:
            return 0.0
        return 3.0 * self.hidden * self.experts.width

    @property
    def dense_weights(self) -> float:
        """Weights that every token passes, embeddings left out."""
        # Two matrices have the query heads' width (queries, output), two that of keys and values.
        attention = self.hidden * self.head_width * 2.0 * (self.heads + self.key_value_heads)
        if self.experts is None:
            shared = 0
        else:
            shared = self.experts.shared_width
        # Three matrices: gate, up and down, as in gated (SwiGLU) layers.
        dense = (self.layers - self.expert_layers) * 3.0 * self.hidden * self.width
        return self.layers * attention + dense + self.expert_layers * 3.0 * self.hidden * shared

    @property
    def dense_bytes(self) -> float:
        """Bytes of those, and of the matrix that makes logits, which a step reads once."""
        quarter = BYTES[self.precision] < 1 and self.experts is not None
        each = _WIDE if quarter else BYTES[self.precision]
        return self.dense_weights * each + self.hidden * self.vocabulary * _WIDE

    @property
    def weight_bytes(self) -> float:
        """Bytes of all weights."""
        experts = 0.0
        if self.experts is not None:
            experts = self.expert_layers * self.experts.count * self.expert_weights * BYTES[self.precision]
        # The second matrix over the vocabulary: tokens are looked up in it, so it takes memory but no step reads it.
        return self.dense_bytes + self.hidden * self.vocabulary * _WIDE + experts

    @property
    def token_flops(self) -> float:
        """Operations of one token, attention over others and logits left out; a multiply-add counts as two."""
        chosen = 0 if self.experts is None else self.experts.chosen
        return 2.0 * (self.dense_weights + self.expert_layers * chosen * self.expert_weights)

    @property
    def token_bytes(self) -> float:
        """Bytes of the keys and values of one token on one GPU, of all layers."""
        # Engines copy a head to several GPUs where there are more of these than heads.
        held = max(self.key_value_heads / self.gpus, 1.0)
        return 2.0 * held * self.head_width * _WIDE * self.layers

    def blocks(self, memory_bytes: float, block_tokens: int) -> int:
        """Return how many blocks of keys and values fit beside the weights on each GPU of the group.

        Raises:
            InvalidInput: If not even the longest request fits.
        """
        taken = self.weight_bytes / self.gpus + self.server.reserve_bytes
        room = memory_bytes * self.server.memory_share - taken
        blocks = 0
        if room > 0:
            blocks = int(room / (self.token_bytes * block_tokens))
        if blocks * block_tokens < self.lengths.longest:
            need = taken + self.lengths.longest * self.token_bytes
            raise InvalidInput(
                f"{self.title} needs {need / 1e9:.3g} GB on each GPU and the engine may take "
                f"{memory_bytes * self.server.memory_share / 1e9:.3g} GB; take a smaller model, more GPUs or a larger "
                f"device"
            )
        return blocks


def is_language_model(name: str) -> bool:
    """Say whether a name in ``profiles/workloads/`` or a path describes a language model.

    Raises:
        UnknownName: If there is no such file; names the nearest.
        BadFile: If it cannot be read.
    """
    return MARK in read_document(locate("profiles/workloads", "workload", name)).values


def load_language_model(name: str) -> LanguageModel:
    """Return a language model by its name in ``profiles/workloads/`` or the path of its ``.toml`` file.

    Raises:
        UnknownName: If there is no such file; names the nearest.
        BadFile: If the file does not hold what it should; names the key and what was expected.
    """
    return read_document(locate("profiles/workloads", "workload", name)).fill(LanguageModel, name=name)


@dataclass(frozen=True)
class Efficiency:
    """Share of the full rate a model's kernels reach once all lanes have work, on either kind of unit."""

    vector: float
    tensor: float

    def __post_init__(self) -> None:
        if not (0 < self.vector <= 1 and 0 < self.tensor <= 1):
            raise InvalidInput("an efficiency is a share above 0 and at most 1")


@dataclass(frozen=True)
class Model:
    """A served model of the catalogue.

    Args:
        name: What it was asked for by: a name in ``profiles/workloads/`` or the path of a file.
        title: The name people know it by.
        precision: One of `PRECISIONS`.
        operations: Per item, a multiply-add counted as two.
        weight_bytes: Moved once per query.
        traffic_bytes: Moved per item besides, activations for the most part.
        memory_bytes: Held while serving, whatever the batch.
        memory_item_bytes: Held per item of the batch besides.
        parallelism: Lanes that one item keeps at work; a batch keeps as many times more.
        efficiency: Of its kernels.
        kernels: Launched per query.
        preprocess_cycles: CPU cycles per item before the GPU can start.
        handoff_cycles: CPU cycles per item between two queries during which the GPU waits.
        batch_sizes: Items per query to choose from.
        batch_default: Items per query nobody chose.
    """

    name: str
    title: str
    precision: str
    operations: float
    weight_bytes: float
    traffic_bytes: float
    memory_bytes: float
    memory_item_bytes: float
    parallelism: float
    efficiency: Efficiency
    kernels: float
    preprocess_cycles: float
    handoff_cycles: float
    batch_sizes: tuple[int, ...]
    batch_default: int = 1

    def __post_init__(self) -> None:
        if self.precision not in PRECISIONS:
            raise InvalidInput(f"precision must be {', '.join(PRECISIONS)}, not {self.precision!r}")
        for name in ("operations", "traffic_bytes", "parallelism", "kernels"):
            if not getattr(self, name) > 0:
                raise InvalidInput(f"{name} must be above 0")
        if any(size < 1 or size % 1 for size in self.batch_sizes):
            raise InvalidInput("batch sizes are whole numbers of at least 1")
        if self.batch_default not in self.batch_sizes:
            raise InvalidInput(f"the default batch of {self.batch_default} is not among the batch sizes")

    def need_bytes(self, batch_size: int) -> float:
        """Return the memory in bytes that serving batches of a size takes."""
        return self.memory_bytes + batch_size * self.memory_item_bytes

    def space(self, memory_bytes: float) -> SearchSpace:
        """Return the batch sizes that fit into a memory of so many bytes; if the default does not, the smallest is.

        Raises:
            InvalidInput: If none fits.
        """
        sizes = tuple(size for size in sorted(self.batch_sizes) if self.need_bytes(size) <= memory_bytes)
        if not sizes:
            need = self.need_bytes(min(self.batch_sizes))
            raise InvalidInput(
                f"{self.title} needs {need / 1e9:.3g} GB of memory and there are {memory_bytes / 1e9:.3g} GB; "
                "take a smaller model or a larger device"
            )
        if self.batch_default in sizes:
            default = self.batch_default
        else:
            default = sizes[0]
        return SearchSpace.grid([Knob(BATCH_SIZE, sizes)], {BATCH_SIZE: default})


def load_model(name: str) -> Model:
    """Return a model by its name in ``profiles/workloads/`` or the path of its ``.toml`` file.

    Raises:
        UnknownName: If there is no such file; names the nearest.
        BadFile: If the file does not hold what it should; names the key and what was expected.
        InvalidInput: If it describes a language model.
    """
    given: Mapping[str, object] = {"name": name}
    document = read_document(locate("profiles/workloads", "workload", name))
    if MARK in document.values:
        raise InvalidInput(f"{name} is a language model; tune, sweep and measure serve it on a simulated card")
    return document.fill(Model, **given)
