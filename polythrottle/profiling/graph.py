"""What a model does in one query: its operators, and the tensors they read and write."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Tensor:
    """A tensor that is written once.

    Args:
        elements: How many values it holds.
        item_bytes: Bytes of one value; None for real numbers, whose size the precision served in decides.
        constant: Whether it is the same in every query: a weight, or what follows from weights alone.
    """

    elements: int
    item_bytes: int | None = None
    constant: bool = False


@dataclass(frozen=True)
class Access:
    """A part of a tensor that an operator reads or writes.

    Args:
        tensor: Its place among the graph's tensors.
        elements: How many values.
        start: Where they begin, which tells parts of one size apart.
        looked_up: Whether they are rows picked from a table, so that a larger batch reads more of them.
    """

    tensor: int
    elements: int
    start: int = 0
    looked_up: bool = False


@dataclass(frozen=True)
class Operator:
    """One step of a model.

    Args:
        name: What the framework calls it.
        reads: What it reads.
        writes: What it writes.
        operations: Multiply-adds counted as two; None if there is no formula for it.
        pointwise: Whether each result depends on one place of its inputs only, so that it fuses with what made them.
    """

    name: str
    reads: tuple[Access, ...]
    writes: tuple[Access, ...]
    operations: float | None = None
    pointwise: bool = False


@dataclass(frozen=True)
class Graph:
    """Everything a model does in one query.

    Args:
        tensors: All tensors.
        operators: In the order they run.
        inputs: Places of the tensors it is given.
        outputs: Places of the tensors it answers with.
        parameters: Values that were trained.
    """

    tensors: tuple[Tensor, ...]
    operators: tuple[Operator, ...]
    inputs: frozenset[int]
    outputs: frozenset[int]
    parameters: int

    @property
    def bytes_only(self) -> Counter[str]:
        """Operators that are counted for the bytes they move alone, by name; pointwise ones left out."""
        return Counter(step.name for step in self.operators if step.operations is None and not step.pointwise)


@dataclass
class Sketch:
    """A graph while it is being drawn."""

    tensors: list[Tensor] = field(default_factory=list)
    operators: list[Operator] = field(default_factory=list)
    inputs: set[int] = field(default_factory=set)

    def add(self, tensor: Tensor) -> int:
        """Note a tensor and return its place."""
        self.tensors.append(tensor)
        return len(self.tensors) - 1

    def feed(self, tensor: Tensor) -> int:
        """Note an input and return its place."""
        self.inputs.add(place := self.add(tensor))
        return place

    def step(
        self,
        name: str,
        reads: Sequence[Access],
        made: Sequence[Tensor],
        *,
        operations: float | None = None,
        pointwise: bool = False,
    ) -> list[int]:
        """Note a step and return the places of what it makes.

        A step that reads constants alone is no step: its result is known before the first query.
        """
        constant = all(self.tensors[read.tensor].constant for read in reads)
        places = [self.add(Tensor(each.elements, each.item_bytes, constant)) for each in made]
        if not constant:
            writes = tuple(Access(place, each.elements) for place, each in zip(places, made, strict=True))
            self.operators.append(Operator(name, tuple(reads), writes, operations, pointwise))
        return places

    def finished(self, outputs: Iterable[int], parameters: int | None) -> Graph:
        """Return the graph.

        Args:
            outputs: Places of the tensors the model answers with.
            parameters: Values that were trained; if None, all constants that are real numbers.
        """
        if parameters is None:
            parameters = sum(each.elements for each in self.tensors if each.constant and each.item_bytes is None)
        return Graph(tuple(self.tensors), tuple(self.operators), frozenset(self.inputs), frozenset(outputs), parameters)
