"""What to do about a bottleneck: proposed for each cause, done only where allowed, and kept only if it has helped."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from polythrottle.backports import StrEnum
from polythrottle.cluster.bottleneck.cause import Cause, Finding, Node
from polythrottle.cluster.bottleneck.shortfall import Shortfall
from polythrottle.errors import InvalidInput

_LEAST_GAIN = 0.02
"""A remedy that gains less than this is taken back: it costs a machine, and windows scatter by as much."""


class Remedy(StrEnum):
    """What can be done."""

    DROP = "drop the node"
    REPLACE = "replace the node"
    COOL = "cap the node below where it throttles"
    ADD_SERVER = "add a parameter server"
    FEWER = "train with fewer nodes"
    BATCH = "give each worker more samples a step, so that they exchange less often"
    CACHE = "keep more of the data in memory"
    LOADERS = "load samples in processes of their own, Context(loading=N)"
    LOOK = "measure what is missing"


_FOR = {
    Cause.LIAR: (Remedy.REPLACE, Remedy.DROP),
    Cause.THROTTLED: (Remedy.COOL, Remedy.REPLACE),
    Cause.STRAGGLER: (Remedy.DROP, Remedy.REPLACE),
    Cause.INPUT: (Remedy.LOADERS, Remedy.CACHE),
    Cause.SERVER: (Remedy.ADD_SERVER, Remedy.FEWER),
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

    finding: Finding
    remedy: Remedy
    gain: float | None
    words: str


@dataclass(frozen=True)
class Tried:
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


def proposals(findings: Sequence[Finding], nodes: Sequence[Node], synchronous: bool) -> tuple[Proposal, ...]:
    """Return what could be done, best first; a remedy that is expected to make it slower is left out.

    Args:
        findings: What is wrong.
        nodes: Every node of the generation.
        synchronous: Whether all wait for the slowest at each step.
    """
    found = [
        Proposal(finding, remedy, gain, _words(remedy, gain))
        for finding in findings
        for remedy in _FOR[finding.cause]
        if (gain := _gain(remedy, finding, nodes, synchronous)) is None or gain > 0
    ]
    return tuple(sorted(found, key=lambda each: -1.0 if each.gain is None else -1.0 - each.gain))


def remedied(
    proposal: Proposal,
    before: Shortfall,
    allowed: Collection[Remedy],
    do: Callable[[Proposal], Shortfall],
    undo: Callable[[Proposal], None],
) -> Tried | None:
    """Do what is proposed if it is allowed, measure, and take it back if it has not helped.

    Whether another parameter server helps depends on the network: CM-DARE's files have 75 % for ResNet-32 and nothing
    for the large shake-shake network. So nothing is kept without a measurement.

    Args:
        proposal: What to do.
        before: The speed before.
        allowed: What may be done without asking.
        do: Does it, and returns the speed of the generation after it, warm.
        undo: Takes it back.

    Returns:
        What came of it; None where it is not allowed.

    Raises:
        InvalidInput: If nothing was measured before.
    """
    if proposal.remedy not in allowed:
        return None
    if before.measured is None or before.measured <= 0:
        raise InvalidInput("a remedy is tried on a job whose speed was measured, to be compared with")
    after = do(proposal)
    helped = after.measured is not None and worth_keeping(before.measured, after.measured)
    if not helped:
        undo(proposal)
    return Tried(proposal, before.measured, after.measured or 0.0, helped)


def worth_keeping(before: float, after: float) -> bool:
    """Return whether a speed measured after a remedy is so much above that before it that the remedy is kept."""
    return after > before * (1 + _LEAST_GAIN)


def _gain(remedy: Remedy, finding: Finding, nodes: Sequence[Node], synchronous: bool) -> float | None:
    """Return the expected gain of a remedy for one node; None where only trying can tell."""
    times = {node.name: node.step_s for node in nodes}
    rest = [step_s for name, step_s in times.items() if name not in finding.nodes]
    if remedy not in (Remedy.DROP, Remedy.REPLACE) or not finding.nodes or not rest:
        return None
    if remedy is Remedy.REPLACE:
        middle = sorted(rest)[len(rest) // 2]
        rest = [*rest, *[middle] * (len(times) - len(rest))]
    return _speed(rest, synchronous) / _speed(list(times.values()), synchronous) - 1


def _speed(steps_s: Sequence[float], synchronous: bool) -> float:
    return len(steps_s) / max(steps_s) if synchronous else sum(1 / step_s for step_s in steps_s)


def _words(remedy: Remedy, gain: float | None) -> str:
    if gain is None:
        return f"{remedy}; what it brings is known only after trying"
    return f"{remedy}: {gain:.1%} faster expected"
