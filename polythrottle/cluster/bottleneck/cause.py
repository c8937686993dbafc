"""What a bottleneck is: named from what each node says and what the job itself has seen; never from one word alone."""

from collections.abc import Sequence
from dataclasses import dataclass

from polythrottle.backports import StrEnum
from polythrottle.cluster.bottleneck.shortfall import THRESHOLD, Shortfall
from polythrottle.cluster.bottleneck.stalls import Ingest
from polythrottle.cluster.fleet.silicon import FEWEST, flagged


class Cause(StrEnum):
    """Why a job is slow."""

    LIAR = "liar"  # a node that is not as fast as it says
    THROTTLED = "throttled"  # a node slows itself down: heat or power
    STRAGGLER = "straggler"  # a node that is slow by itself
    INPUT = "input"  # samples are not ready in time
    SERVER = "server"  # every node is well, and they are not fast together: parameter server or network
    NETWORK = "network"  # the same where there is no parameter server: the exchange between the nodes
    UNKNOWN = "unknown"  # not enough was measured to say


@dataclass(frozen=True)
class Node:
    """One node in one generation, measured.

    Attributes:
        name: Its name.
        said_s: Its step time as it says, in seconds, without waiting for others.
        seen_s: Its step time as the job sees it: from the beginning of a step until its gradient is there, or the time
            over its steps that were counted; None where nobody has looked.
        usual_s: What it should take: the fleet's step time, times its calibrated silicon and its cap; None if unknown.
        throttled: Whether its board says that it slows itself down.
        ingest: Its rates of samples, None if not measured.
        waiting: Share of its own time in which it waits for samples, where its rates are not known; None if unknown.
    """

    name: str
    said_s: float
    seen_s: float | None = None
    usual_s: float | None = None
    throttled: bool = False
    ingest: Ingest | None = None
    waiting: float | None = None

    @property
    def step_s(self) -> float:
        """Return its step time: what was seen counts before what was said."""
        return self.seen_s if self.seen_s is not None else self.said_s


@dataclass(frozen=True)
class Finding:
    """A cause with its evidence.

    Attributes:
        cause: What it is.
        nodes: Whom it concerns; empty for the job as a whole.
        words: The evidence.
    """

    cause: Cause
    nodes: tuple[str, ...]
    words: str


def liars(nodes: Sequence[Node], tolerance: float = 0.1) -> tuple[Node, ...]:
    """Return the nodes that are slower than they say, by the job's own count, by more than a fraction."""
    return tuple(node for node in nodes if node.seen_s is not None and node.seen_s > node.said_s * (1 + tolerance))


def causes(
    short: Shortfall, nodes: Sequence[Node], threshold: float = THRESHOLD, servers: bool = True
) -> tuple[Finding, ...]:
    """Return what makes a job slow, most certain first; nothing where it is not slow.

    Args:
        short: How far it is behind.
        nodes: What is known of every node in this generation.
        threshold: From which share on a node's delay or stall is a cause.
        servers: Whether the job has parameter servers; without them what all share is the exchange between the nodes.
    """
    if not short.found:
        return ()
    found = (*_liars(nodes), *_throttled(nodes, threshold), *_stragglers(nodes, threshold), *_input(nodes, threshold))
    if found:
        return found
    if not nodes or any(node.usual_s is None for node in nodes):
        words = f"{_short(short)}; what each node should do alone is not known"
        return (Finding(Cause.UNKNOWN, (), words),)
    shared = "what they share is the limit" if servers else "the exchange between them is the limit"
    words = f"{_short(short)}, and every node alone is as fast as it should be: {shared}"
    return (Finding(Cause.SERVER if servers else Cause.NETWORK, (), words),)


def _liars(nodes: Sequence[Node]) -> tuple[Finding, ...]:
    return tuple(
        Finding(
            Cause.LIAR, (node.name,), f"{node.name} says {node.said_s:.3g} s a step, the job sees {node.seen_s:.3g} s"
        )
        for node in liars(nodes)
    )


def _throttled(nodes: Sequence[Node], threshold: float) -> tuple[Finding, ...]:
    return tuple(
        Finding(Cause.THROTTLED, (node.name,), f"{node.name} is throttled{_late(node)}")
        for node in nodes
        if node.throttled and (node.usual_s is None or node.step_s > node.usual_s * (1 + threshold))
    )


def _stragglers(nodes: Sequence[Node], threshold: float) -> tuple[Finding, ...]:
    if len(nodes) < FEWEST:  # no middle worth the name: against what each should do
        return tuple(
            Finding(Cause.STRAGGLER, (node.name,), f"{node.name} is slow{_late(node)}")
            for node in nodes
            if node.usual_s is not None and not node.throttled and _delayed(node, nodes, threshold)
        )
    away = flagged({node.name: node.step_s / (node.usual_s or 1.0) for node in nodes})
    return tuple(
        Finding(Cause.STRAGGLER, (node.name,), f"{node.name} is {away[node.name]:.0f} deviations slower{_late(node)}")
        for node in nodes
        if away.get(node.name, 0.0) > 0 and not node.throttled and _delayed(node, nodes, threshold)
    )


def _input(nodes: Sequence[Node], threshold: float) -> tuple[Finding, ...]:
    waiting = [(node, node.ingest) for node in nodes if node.ingest is not None]
    alone = tuple(
        Finding(
            Cause.INPUT,
            (node.name,),
            f"{node.name} waits for samples {node.waiting:.0%} of its own time; a second epoch will tell fetching from"
            " preparing",
        )
        for node in nodes
        if node.ingest is None and node.waiting is not None and node.waiting > threshold
    )
    return alone + tuple(
        Finding(
            Cause.INPUT,
            (node.name,),
            f"{node.name} waits for input: {ingest.preparing:.0%} of its time for preparation,"
            f" {ingest.fetching:.0%} for fetching while its cache is cold",
        )
        for node, ingest in waiting
        if max(ingest.preparing, ingest.fetching) > threshold
    )


def _delayed(node: Node, nodes: Sequence[Node], threshold: float) -> bool:
    """Return whether a node is late by more than the threshold, against what it should do or against the others."""
    times = sorted(each.step_s for each in nodes)
    usual_s = node.usual_s if node.usual_s is not None else times[len(times) // 2]
    return node.step_s > usual_s * (1 + threshold)


def _late(node: Node) -> str:
    return "" if node.usual_s is None else f": {node.step_s:.3g} s a step, {node.usual_s:.3g} s expected"


def _short(short: Shortfall) -> str:
    return f"{short.measured:.3g} steps/s of {short.expected:.3g} expected"
