"""Why a job is slower than its machines together should be.

Shortfall, input stalls, causes, and remedies that are kept only if they help.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from polythrottle.domain.backports import StrEnum
from polythrottle.domain.errors import InvalidInput
from polythrottle.domain.fleet.gpu_variability import FEWEST_NODES, flagged

# Whether a job is slower than its machines together should be: measured against predicted speed, per generation.
#
# CM-DARE (ICDCS 2020) compares a cluster's speed after a warm-up with the sum of its workers' own and flags more than
# 6.7 % short. Here the reference belongs to a generation and is learnt again for the next: after a change of
# membership nothing measured before says anything.

THRESHOLD = 0.067
"""Largest shortfall that is not called a bottleneck (CM-DARE's default)."""
WARM_UP_S = 30.0
"""How long after a group was formed its speed says nothing (CM-DARE)."""
FEWEST_WINDOWS = 3
"""Windows that a verdict is made of at least."""
_ROUNDING = 1e-9


@dataclass(frozen=True)
class SpeedWindow:
    """The speed of a job over a while.

    Attributes:
        generation: Of the group.
        since_s: From the forming of the group to the window's beginning, in seconds.
        steps_per_s: Speed of the whole job.
    """

    generation: int
    since_s: float
    steps_per_s: float

    def __post_init__(self) -> None:
        if not (self.since_s >= 0 and self.steps_per_s >= 0):
            raise InvalidInput(f"a window begins after the group was formed and has a speed of at least 0, not {self}")


@dataclass(frozen=True)
class Shortfall:
    """How far a job is behind what is expected of it.

    Attributes:
        generation: Of the group.
        measured: Median speed of its windows, in steps per second; None before there are enough.
        expected: What its machines should do together, in steps per second.
        threshold: Largest shortfall that is not called a bottleneck.
        reason: Why there is no verdict; empty if there is one.
    """

    generation: int
    measured: float | None
    expected: float
    threshold: float = THRESHOLD
    reason: str = ""

    @property
    def short(self) -> float | None:
        """Return by which fraction it is short, negative if it is faster; None without a verdict."""
        if self.measured is None:
            return None
        return 1 - self.measured / self.expected

    @property
    def found(self) -> bool:
        """Return whether this is a bottleneck."""
        return self.short is not None and self.short > self.threshold + _ROUNDING


def shortfall(
    windows: Sequence[SpeedWindow], expected: float, threshold: float = THRESHOLD, warm_up_s: float = WARM_UP_S
) -> Shortfall:
    """Return how far the newest generation is behind.

    Args:
        windows: What was measured, oldest first; those of earlier generations and of the warm-up are passed over.
        expected: What its machines should do together, in steps per second, each by several windows of its own: a low
            reference hides a bottleneck (the published one of ResNet-15 on P100 is 13 % low).
        threshold: Largest shortfall that is not called a bottleneck.
        warm_up_s: How long after its forming a group's speed says nothing, in seconds.

    Raises:
        InvalidInput: If the expectation is not positive, or the threshold not in [0, 1).
    """
    if not expected > 0 or not 0 <= threshold < 1:
        raise InvalidInput(f"an expected speed is above 0 and a threshold in [0, 1), not {expected} and {threshold}")
    if not windows:
        return Shortfall(0, None, expected, threshold, "nothing was measured yet")
    newest = max(window.generation for window in windows)
    speeds = [each.steps_per_s for each in windows if each.generation == newest and each.since_s >= warm_up_s]
    if len(speeds) < FEWEST_WINDOWS:
        words = f"{len(speeds)} of {FEWEST_WINDOWS} windows since {warm_up_s:g} s after generation {newest} was formed"
        return Shortfall(newest, None, expected, threshold, words)
    return Shortfall(newest, median(speeds), expected, threshold)


# How long training waits for its input, by three measurements that each differ in one thing (DS-Analyzer).


@dataclass(frozen=True)
class Ingest:
    """How many samples a second a node takes in.

    Attributes:
        synthetic: From data that lie on the GPU already: what computing alone can take.
        cached: From data in memory, prepared as usual.
        cold: From where they are kept, with an empty cache.
    """

    synthetic: float
    cached: float
    cold: float

    def __post_init__(self) -> None:
        if not min(self.synthetic, self.cached, self.cold) > 0:
            raise InvalidInput(f"rates of samples are above 0, not {self}")

    @property
    def preparing(self) -> float:
        """Return the share of the time that goes into waiting for the preparation of samples."""
        return max(0.0, 1 - self.cached / self.synthetic)

    @property
    def fetching(self) -> float:
        """Return the share of the time that goes into waiting for the fetching of samples, with a cold cache."""
        return max(0.0, 1 - self.cold / min(self.cached, self.synthetic))


# What a bottleneck is: named from what each node says and what the job itself has seen; never from one word alone.


class Cause(StrEnum):
    """Why a job is slow."""

    THROTTLED = "throttled"  # a node slows itself down: heat or power
    STRAGGLER = "straggler"  # a node that is slow by itself
    INPUT = "input"  # samples are not ready in time
    NETWORK = "network"  # every node is well, and they are not fast together: the exchange between them
    UNKNOWN = "unknown"  # not enough was measured to say


@dataclass(frozen=True)
class NodeMeasurement:
    """One node in one generation, measured.

    Attributes:
        name: Its name.
        step_s: Its own step time in seconds, without waiting for others.
        usual_s: What it should take: the fleet's step time, times its calibrated silicon and its cap; None if unknown.
        throttled: Whether its board says that it slows itself down.
        ingest: Its rates of samples, None if not measured.
        waiting: Share of its own time in which it waits for samples, where its rates are not known; None if unknown.
    """

    name: str
    step_s: float
    usual_s: float | None = None
    throttled: bool = False
    ingest: Ingest | None = None
    waiting: float | None = None


@dataclass(frozen=True)
class Bottleneck:
    """A cause with its evidence.

    Attributes:
        cause: What it is.
        nodes: Whom it concerns; empty for the job as a whole.
        words: The evidence.
    """

    cause: Cause
    nodes: tuple[str, ...]
    words: str


def causes(short: Shortfall, nodes: Sequence[NodeMeasurement], threshold: float = THRESHOLD) -> tuple[Bottleneck, ...]:
    """Return what makes a job slow, most certain first; nothing where it is not slow.

    Args:
        short: How far it is behind.
        nodes: What is known of every node in this generation.
        threshold: From which share on a node's delay or stall is a cause.
    """
    if not short.found:
        return ()
    bottlenecks = (*_throttled(nodes, threshold), *_stragglers(nodes, threshold), *_input(nodes, threshold))
    if bottlenecks:
        return bottlenecks
    if not nodes or any(node.usual_s is None for node in nodes):
        words = f"{_short(short)}; what each node should do alone is not known"
        return (Bottleneck(Cause.UNKNOWN, (), words),)
    words = f"{_short(short)}, and every node alone is as fast as it should be: the exchange between them is the limit"
    return (Bottleneck(Cause.NETWORK, (), words),)


def _throttled(nodes: Sequence[NodeMeasurement], threshold: float) -> tuple[Bottleneck, ...]:
    return tuple(
        Bottleneck(Cause.THROTTLED, (node.name,), f"{node.name} is throttled{_late(node)}")
        for node in nodes
        if node.throttled and (node.usual_s is None or node.step_s > node.usual_s * (1 + threshold))
    )


def _stragglers(nodes: Sequence[NodeMeasurement], threshold: float) -> tuple[Bottleneck, ...]:
    if len(nodes) < FEWEST_NODES:  # no middle worth the name: against what each should do
        return tuple(
            Bottleneck(Cause.STRAGGLER, (node.name,), f"{node.name} is slow{_late(node)}")
            for node in nodes
            if node.usual_s is not None and not node.throttled and _delayed(node, nodes, threshold)
        )
    away = flagged({node.name: node.step_s / (node.usual_s or 1.0) for node in nodes})
    return tuple(
        Bottleneck(
            Cause.STRAGGLER, (node.name,), f"{node.name} is {away[node.name]:.0f} deviations slower{_late(node)}"
        )
        for node in nodes
        if away.get(node.name, 0.0) > 0 and not node.throttled and _delayed(node, nodes, threshold)
    )


def _input(nodes: Sequence[NodeMeasurement], threshold: float) -> tuple[Bottleneck, ...]:
    waiting = [(node, node.ingest) for node in nodes if node.ingest is not None]
    alone = tuple(
        Bottleneck(
            Cause.INPUT,
            (node.name,),
            f"{node.name} waits for samples {node.waiting:.0%} of its own time; a second epoch will tell fetching from"
            " preparing",
        )
        for node in nodes
        if node.ingest is None and node.waiting is not None and node.waiting > threshold
    )
    return alone + tuple(
        Bottleneck(
            Cause.INPUT,
            (node.name,),
            f"{node.name} waits for input: {ingest.preparing:.0%} of its time for preparation,"
            f" {ingest.fetching:.0%} for fetching while its cache is cold",
        )
        for node, ingest in waiting
        if max(ingest.preparing, ingest.fetching) > threshold
    )


def _delayed(node: NodeMeasurement, nodes: Sequence[NodeMeasurement], threshold: float) -> bool:
    """Return whether a node is late by more than the threshold, against what it should do or against the others."""
    times = sorted(each.step_s for each in nodes)
    if node.usual_s is not None:
        usual_s = node.usual_s
    else:
        usual_s = times[len(times) // 2]
    return node.step_s > usual_s * (1 + threshold)


def _late(node: NodeMeasurement) -> str:
    if node.usual_s is None:
        return ""
    return f": {node.step_s:.3g} s a step, {node.usual_s:.3g} s expected"


def _short(short: Shortfall) -> str:
    return f"{short.measured:.3g} steps/s of {short.expected:.3g} expected"


# What to do about a bottleneck: proposed for each cause, done only where allowed, and kept only if it has helped.

_LEAST_GAIN = 0.02
"""A remedy that gains less than this is taken back: it costs a machine, and windows scatter by as much."""


class Remedy(StrEnum):
    """What can be done."""

    DROP = "drop the node"
    REPLACE = "replace the node"
    COOL = "cap the node below where it throttles"
    FEWER = "train with fewer nodes"
    BATCH = "give each worker more samples a step, so that they exchange less often"
    CACHE = "keep more of the data in memory"
    LOADERS = "load samples in processes of their own, Context(loading=N)"
    LOOK = "measure what is missing"


_FOR = {
    Cause.THROTTLED: (Remedy.COOL, Remedy.REPLACE),
    Cause.STRAGGLER: (Remedy.DROP, Remedy.REPLACE),
    Cause.INPUT: (Remedy.LOADERS, Remedy.CACHE),
    Cause.NETWORK: (Remedy.BATCH, Remedy.FEWER),
    Cause.UNKNOWN: (Remedy.LOOK,),
}


@dataclass(frozen=True)
class Proposal:
    """A remedy for a finding.

    Attributes:
        finding: What is wrong.
        remedy: What could be done.
        gain: Expected gain in speed as a fraction, estimated; None where only trying can tell.
        words: Why.
    """

    finding: Bottleneck
    remedy: Remedy
    gain: float | None
    words: str


@dataclass(frozen=True)
class RemedyTrial:
    """A remedy that was tried.

    Attributes:
        proposal: What was tried.
        before: Speed before, in steps per second.
        after: Speed in the generation after.
        kept: Whether it was kept.
    """

    proposal: Proposal
    before: float
    after: float
    kept: bool

    @property
    def gain(self) -> float:
        """Return by which fraction the job became faster, measured."""
        return self.after / self.before - 1


def proposals(findings: Sequence[Bottleneck], nodes: Sequence[NodeMeasurement]) -> tuple[Proposal, ...]:
    """Return what could be done, best first; a remedy that is expected to make it slower is left out.

    Args:
        findings: What is wrong.
        nodes: Every node of the generation; all wait for the slowest at each step.
    """
    stragglers = [
        Proposal(finding, remedy, gain, _words(remedy, gain))
        for finding in findings
        for remedy in _FOR[finding.cause]
        if (gain := _gain(remedy, finding, nodes)) is None or gain > 0
    ]
    return tuple(sorted(stragglers, key=lambda each: -1.0 if each.gain is None else -1.0 - each.gain))


def worth_keeping(before: float, after: float) -> bool:
    """Return whether a speed measured after a remedy is so much above that before it that the remedy is kept."""
    return after > before * (1 + _LEAST_GAIN)


def _gain(remedy: Remedy, finding: Bottleneck, nodes: Sequence[NodeMeasurement]) -> float | None:
    """Return the expected gain of a remedy for one node; None where only trying can tell."""
    times = {node.name: node.step_s for node in nodes}
    rest = [step_s for name, step_s in times.items() if name not in finding.nodes]
    if remedy not in (Remedy.DROP, Remedy.REPLACE) or not finding.nodes or not rest:
        return None
    if remedy is Remedy.REPLACE:
        middle = sorted(rest)[len(rest) // 2]
        rest = [*rest, *[middle] * (len(times) - len(rest))]
    return _speed(rest) / _speed(list(times.values())) - 1


def _speed(steps_s: Sequence[float]) -> float:
    return len(steps_s) / max(steps_s)


def _words(remedy: Remedy, gain: float | None) -> str:
    if gain is None:
        return f"{remedy}; what it brings is known only after trying"
    return f"{remedy}: {gain:.1%} faster expected"
