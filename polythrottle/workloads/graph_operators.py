"""The operators of one query and the tensors they read and write, and their operations, bytes and memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from polythrottle.domain.backports import paired

# What a model does in one query: its operators, and the tensors they read and write.


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
            writes = tuple(Access(place, each.elements) for place, each in paired(places, made))
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


# Counts a graph: operations, bytes with and without fusion, and the memory activations take.


@dataclass(frozen=True)
class Counts:
    """What one query computes and moves.

    Args:
        operations: A multiply-add counted as two.
        weight_bytes: Constants read, once by every operator that reads them.
        traffic_bytes: Activations read and written between groups of fused operators.
        unfused_bytes: Activations read and written if every operator ran alone; an upper bound.
        activations: Values written to memory between groups.
        tensors: In how many tensors.
        kernels: How many groups there are.
        peak_bytes: The most activations held at once.
    """

    operations: float
    weight_bytes: float
    traffic_bytes: float
    unfused_bytes: float
    activations: int
    tensors: int
    kernels: int
    peak_bytes: float


def count(graph: Graph, real_bytes: int) -> Counts:
    """Return what one query of a graph computes and moves.

    Args:
        graph: The model.
        real_bytes: Bytes of a real number in the precision it is served in.
    """
    groups = fuse(graph)
    alone = [[step] for step in graph.operators]
    written = [write for group, writes in paired(groups, _written(graph, groups)) for write in writes]
    constants, traffic = _moved(graph, groups, real_bytes)
    return Counts(
        operations=sum(step.operations or 0.0 for step in graph.operators),
        weight_bytes=constants,
        traffic_bytes=traffic,
        unfused_bytes=_moved(graph, alone, real_bytes)[1],
        activations=sum(write.elements for write in written),
        tensors=len(written),
        kernels=len(groups),
        peak_bytes=_peak(graph, groups, real_bytes),
    )


def fuse(graph: Graph) -> list[list[Operator]]:
    """Return the operators in groups that run as one kernel each.

    A pointwise operator joins the latest group it reads from if what it reads there is as large as what it makes, as
    compilers for inference do with bias, normalisation, activation and residual sum. All else it reads was made
    earlier, so the groups can run in their order.
    """
    groups: list[list[Operator]] = []
    home: dict[int, int] = {}
    for step in graph.operators:
        latest = max((home[read.tensor] for read in step.reads if read.tensor in home), default=-1)
        fits = step.pointwise and any(
            home.get(read.tensor) == latest and read.elements == step.writes[0].elements for read in step.reads
        )
        if latest < 0 or not fits:
            groups.append([])
            latest = len(groups) - 1
        groups[latest].append(step)
        home.update({write.tensor: latest for write in step.writes})
    return groups


def _written(graph: Graph, groups: Sequence[Sequence[Operator]]) -> list[list[Access]]:
    """Return what each group writes for others to read."""
    home = {write.tensor: i for i, group in enumerate(groups) for step in group for write in step.writes}
    needed = set(graph.outputs)
    for i, group in enumerate(groups):
        needed |= {read.tensor for step in group for read in step.reads if home.get(read.tensor) != i}
    return [[write for step in group for write in step.writes if write.tensor in needed] for group in groups]


def _moved(graph: Graph, groups: Sequence[Sequence[Operator]], real_bytes: int) -> tuple[float, float]:
    """Return the bytes of constants and of activations that groups move."""
    constants = traffic = 0.0
    for group, writes in paired(groups, _written(graph, groups)):
        own = {write.tensor for step in group for write in step.writes}
        reads = {read for step in group for read in step.reads if read.tensor not in own}
        weights = {read for read in reads if graph.tensors[read.tensor].constant and not read.looked_up}
        constants += _size(graph, weights, real_bytes)
        traffic += _size(graph, reads - weights, real_bytes) + _size(graph, writes, real_bytes)
    return constants, traffic


def _size(graph: Graph, accesses: Iterable[Access], real_bytes: int) -> float:
    return sum(access.elements * float(graph.tensors[access.tensor].item_bytes or real_bytes) for access in accesses)


def _peak(graph: Graph, groups: Sequence[Sequence[Operator]], real_bytes: int) -> float:
    """Return the most bytes of activations that are held at once, each from being written to being last read."""
    last = {read.tensor: i for i, group in enumerate(groups) for step in group for read in step.reads}
    last.update(dict.fromkeys(graph.outputs, len(groups)))
    held = {place: last.get(place, 0) for place in graph.inputs}
    peak = _held(graph, held, real_bytes)
    for i, writes in enumerate(_written(graph, groups)):
        held.update({write.tensor: last.get(write.tensor, i) for write in writes})
        peak = max(peak, _held(graph, held, real_bytes))
        held = {place: end for place, end in held.items() if end > i}
    return peak


def _held(graph: Graph, places: Iterable[int], real_bytes: int) -> float:
    tensors = [graph.tensors[place] for place in places]
    return sum(each.elements * float(each.item_bytes or real_bytes) for each in tensors)
