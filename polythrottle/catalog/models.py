"""Models: what a served network computes and moves, so that a simulator knows how long it takes on a board."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from polythrottle.catalog.boards import PRECISIONS
from polythrottle.catalog.documents import locate, read_document
from polythrottle.catalog.language_models import MARK
from polythrottle.domain.errors import InvalidInput
from polythrottle.domain.space import BATCH_SIZE, Knob, SearchSpace


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
