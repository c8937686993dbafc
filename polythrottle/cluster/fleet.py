"""What a store knows, as people want to see it: caps, nodes, who stands out, and what slack would give each node."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polythrottle.cluster.recorded_tables import caps_of_table
from polythrottle.domain.errors import InvalidInput
from polythrottle.domain.fleet.gpu_variability import Pace, grade, pace
from polythrottle.domain.fleet.transient_machine import Cap
from polythrottle.domain.space import BATCH_SIZE
from polythrottle.storage.fleet_knowledge import (
    CapObservation,
    Knowledge,
    KnowledgeStore,
    NodeReport,
    keep,
    recall,
    stored,
)


@dataclass(frozen=True)
class NodeView:
    """One node.

    Attributes:
        name: Its name.
        factor: Its step time at the default over the fleet's middle, measured; None if it has not looked there.
        mads: By how many median absolute deviations it stands out; None if it does not.
        cap: What it would run under if it trained in step with the others; None if that is not known.
    """

    name: str
    factor: float | None
    mads: float | None
    cap: Cap | None


@dataclass(frozen=True)
class FleetView:
    """What is known of one type and network.

    Attributes:
        gpu: GPU model.
        network: What is trained.
        caps: What the caps do, the default first; medians over nodes, measured.
        seen: How many nodes have looked at each cap.
        nodes: Every node.
        saving: Share of joules that slack would save with all of them in step, estimated; None if unknown.
        longer: By how much the barrier may open later, as a fraction.
    """

    gpu: str
    network: str
    caps: tuple[Cap, ...]
    seen: tuple[int, ...]
    nodes: tuple[NodeView, ...]
    saving: float | None
    longer: float

    def record(self) -> dict[str, Any]:
        """Return it as a document."""
        return {
            "gpu": self.gpu,
            "network": self.network,
            "caps": [{**_cap(cap), "nodes": count} for cap, count in zip(self.caps, self.seen, strict=True)],
            "nodes": [
                {
                    "name": node.name,
                    "factor": node.factor,
                    "flagged_mads": node.mads,
                    "cap": None if node.cap is None else _cap(node.cap),
                }
                for node in self.nodes
            ],
            "slack_saving_estimated": self.saving,
            "longer": self.longer,
        }


def shown(knowledge: Knowledge, longer: float = 0.0, idle_w: float = 0.0) -> FleetView:
    """Return what is known of a type and network, with the caps under which its nodes would just meet the slowest.

    Args:
        knowledge: What its nodes say.
        longer: By how much the barrier may open later, as a fraction.
        idle_w: What a node draws at the barrier, in watts; 0 saves least by slack.

    Raises:
        InvalidInput: If ``longer`` is negative.
    """
    caps = knowledge.caps()
    factors = knowledge.factors()
    away = knowledge.flagged()
    # By grade, so that a view of a thousand nodes costs no more than one of fifty.
    grades = {name: grade(factor) for name, factor in factors.items()}
    counts: dict[int, int] = {}
    for number in grades.values():
        counts[number] = counts.get(number, 0) + 1
    plan, plain = _paces(counts, caps, idle_w, 1 + longer)
    nodes = tuple(
        NodeView(
            each.node,
            factors.get(each.node),
            away.get(each.node),
            plan.caps[grades[each.node]] if plan is not None and each.node in grades else None,
        )
        for each in knowledge.told
    )
    observed = (len(factors), *(sum(cap.limit_w in each.slowdowns() for each in knowledge.told) for cap in caps[1:]))
    saving = None
    if plan is not None and plain is not None:
        saving = 1 - plan.joules / plain.joules
    return FleetView(knowledge.gpu, knowledge.network, caps, observed[: len(caps)], nodes, saving, longer)


def fleets(store: KnowledgeStore, gpu: str = "", network: str = "") -> tuple[tuple[Knowledge, ...], tuple[str, ...]]:
    """Return all that a store knows, perhaps of one type or network only, and a line for each unreadable file.

    Raises:
        StorageError: If the store cannot be reached.
    """
    known: list[Knowledge] = []
    notes: list[str] = []
    for each_gpu, each_network in stored(store):
        if gpu in ("", each_gpu) and network in ("", each_network):
            try:
                knowledge, said = recall(store, each_gpu, each_network)
            except InvalidInput as error:
                notes.append(f"a folder of the store's knowledge is left out: {error}")
                continue
            known.append(knowledge)
            notes += said
    return tuple(known), tuple(notes)


def learn(
    store: KnowledgeStore, table: Path, node: str, gpu: str, network: str, batch_size: int | None = None
) -> NodeReport:
    """Keep what a sweep over power limits has measured on a node as what that node says, and return it.

    Args:
        store: Where the fleet's knowledge is kept.
        table: A table with ``power_limit_w``, times and powers, such as ``polythrottle sweep`` writes.
        node: The node's name.
        gpu: GPU model.
        network: What was trained.
        batch_size: Which batch size, where the table has several.

    Raises:
        BadFile: If it is no such table.
        InvalidInput: If the batch size has to be named, or a name cannot be one.
        StorageError: If the store cannot be written.
    """
    caps = caps_of_table(table, batch_size)
    if len(caps) < 2:
        raise InvalidInput(f"{table} has one power limit only; a node's knowledge compares several with the highest")
    said = NodeReport(node, gpu, network, tuple(_looks(caps, table, batch_size)))
    keep(store, said)
    return said


def _looks(caps: Sequence[Cap], table: Path, batch_size: int | None) -> list[CapObservation]:
    """Return what a table says of each cap; its rows are scaled to the time at the highest limit."""
    from polythrottle.backends.replay import Table

    read = Table.read(table)
    (step_s,) = (
        measured.latency.mean_s or 0.0
        for point, measured in zip(read.points, read.measurements, strict=True)
        if point["power_limit_w"] == caps[0].limit_w
        and (batch_size is None or point.get(BATCH_SIZE) in (None, batch_size))
    )
    return [
        CapObservation(cap.limit_w if index else None, step_s * cap.slowdown, cap.power_w)
        for index, cap in enumerate(caps)
    ]


def _paces(
    counts: dict[int, int], caps: tuple[Cap, ...], idle_w: float, stretch: float
) -> tuple[Pace | None, Pace | None]:
    if not counts or not caps:
        return None, None
    return pace(counts, caps, idle_w, stretch), pace(counts, caps[:1], idle_w)


def _cap(cap: Cap) -> dict[str, float | None]:
    return {"limit_w": cap.limit_w, "slowdown": cap.slowdown, "power_w": cap.power_w}
