"""Whether a job that trains is slower than its nodes together should be, why, and what to do about it; pure.

What is compared with is learnt: what each node's own work took at its best, for its silicon and its cap, and no more
than silicon explains beyond the middle of its type or what the store knows. Waiting for samples and for others is left
out of that, so that both show as what is missing. Nodes train in step and share no server: none is ever blamed.
"""

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median, median_low
from typing import Any

from polythrottle.domain.errors import InvalidInput
from polythrottle.domain.fleet.gpu_variability import WORST
from polythrottle.training.elastic.nodes.bottleneck import (
    THRESHOLD,
    WARM_UP_S,
    Bottleneck,
    Cause,
    Ingest,
    NodeMeasurement,
    Proposal,
    Remedy,
    RemedyTrial,
    Shortfall,
    SpeedWindow,
    causes,
    proposals,
    shortfall,
    worth_keeping,
)
from polythrottle.training.elastic.worker.process import Pace, Tally

LENGTH_S = 5.0
_FEWEST_STEPS = 3
_NEWEST = 6
_SURE = 2
_EPOCH_STEPS = 10
_MANY = 3


@dataclass(frozen=True)
class MonitorTerms:
    """How a job is watched.

    Attributes:
        threshold: Largest shortfall that is not called a bottleneck.
        warm_up_s: How long after its forming a generation's speed says nothing, in seconds.
        allowed: What may be done without asking.
    """

    threshold: float = THRESHOLD
    warm_up_s: float = WARM_UP_S
    allowed: tuple[Remedy, ...] = ()

    def __post_init__(self) -> None:
        if not 0 < self.threshold < 1 or not 0 <= self.warm_up_s < 1e6:
            raise InvalidInput(f"a threshold is a share in (0, 1) and a warm-up at least 0 s, not {self}")


@dataclass(frozen=True)
class ObservedNode:
    """One node as it stands now.

    Attributes:
        name: Its name.
        pace: Its newest pace.
        gpu: Its machine type; empty if not known.
        slowdown: What its cap does to its step; None while that is being measured.
        known_s: Its type's own step as the store knows it, in seconds; None if unknown.
        throttled: Whether its board slows itself down.
    """

    name: str
    pace: Pace
    gpu: str = ""
    slowdown: float | None = 1.0
    known_s: float | None = None
    throttled: bool = False


@dataclass
class _NodeWindows:
    """A node's windows in this generation."""

    before: Tally
    windows: deque[Tally] = field(default_factory=lambda: deque(maxlen=_NEWEST))

    @property
    def own_s(self) -> float:
        """Its own time a step, in seconds."""
        return max(1e-9, median(each.own_s / each.steps for each in self.windows))

    @property
    def data_s(self) -> float:
        """Of that, waiting for samples."""
        return median(each.data_s / each.steps for each in self.windows)

    @property
    def work_s(self) -> float:
        """Its own work a step, without waiting for samples or others, in seconds."""
        return median(_work_s(each) for each in self.windows)


@dataclass(frozen=True)
class _Trial:
    """A remedy that is being tried."""

    proposal: Proposal
    samples_per_s: float
    members: frozenset[str]


@dataclass
class BottleneckMonitor:
    """Watches one job, window by window.

    Attributes:
        terms: How.
        short: How far the job is behind, as of the last window.
        findings: Why, most certain first.
        proposed: What could be done, best first.
        tried: What was tried and what came of it.
    """

    terms: MonitorTerms = field(default_factory=MonitorTerms)
    short: Shortfall = field(default_factory=lambda: Shortfall(0, None, 1.0, reason="nothing was measured yet"))
    findings: tuple[Bottleneck, ...] = ()
    proposed: tuple[Proposal, ...] = ()
    tried: list[RemedyTrial] = field(default_factory=list)
    _generation: int = 0
    _formed_s: float = 0.0
    _begun_s: float = 0.0
    _members: tuple[str, ...] = ()
    _seen: dict[str, _NodeWindows] = field(default_factory=dict)
    _windows: deque[SpeedWindow] = field(default_factory=lambda: deque(maxlen=_NEWEST))
    _best_s: dict[tuple[str, str], float] = field(default_factory=dict)
    _told: frozenset[tuple[Cause, tuple[str, ...]]] = frozenset()
    _alike: int = 0
    _trial: _Trial | None = None
    _last: frozenset[tuple[Cause, tuple[str, ...]]] = frozenset()
    _vain: set[tuple[Remedy, tuple[str, ...]]] = field(default_factory=set)

    def formed(self, generation: int, members: Sequence[str], now_s: float) -> None:
        """Begin anew: what was measured before says nothing of another group."""
        self._generation = generation
        self._members = tuple(members)
        self._formed_s = self._begun_s = now_s
        self._seen.clear()
        self._windows.clear()
        self.short = Shortfall(generation, None, 1.0, self.terms.threshold, "nothing was measured yet")
        self.findings = self.proposed = ()
        self._alike = 0

    def due(self, now_s: float) -> bool:
        """Return whether a window is over."""
        return now_s - self._begun_s >= LENGTH_S

    def look(self, members: Sequence[ObservedNode], now_s: float) -> list[dict[str, Any]]:
        """Take note of where the members stand when a window is due, and return what there is to tell, as events.

        Args:
            members: All whose pace in this generation is known.
            now_s: The time by the controller's clock.
        """
        # A pace of another generation is of another group: its steps waited for other nodes.
        ripe = [each for each in members if each.pace.generation == self._generation]
        for each in ripe:
            self._seen.setdefault(each.name, _NodeWindows(each.pace.tally))
        if len(ripe) < len(self._members) or not ripe:
            return []
        steps = {each.name: each.pace.tally.since(self._seen[each.name].before) for each in ripe}
        if min(each.steps for each in steps.values()) < _FEWEST_STEPS:
            return []
        since_s = self._begun_s - self._formed_s
        self._begun_s = now_s
        for each in ripe:
            self._seen[each.name].before = each.pace.tally
        if since_s < self.terms.warm_up_s:
            self.short = self._judged(1.0)
            return []
        for name, tally in steps.items():
            self._seen[name].windows.append(tally)
        # In step all take the same time, but for when each was asked; the low middle is a time that one had.
        step_s = median_low(each.step_s / each.steps for each in steps.values())
        self._windows.append(SpeedWindow(self._generation, since_s, 1 / max(step_s, 1e-9)))
        return self._judge(ripe)

    def dropping(self, allowed: bool) -> Proposal | None:
        """Return the proposal to drop a node that is to be tried now, None if there is none.

        Args:
            allowed: Whether the group may lose a node.
        """
        if not allowed or self._trial is not None or self._alike < _SURE or Remedy.DROP not in self.terms.allowed:
            return None
        for each in self.proposed:
            if each.remedy is Remedy.DROP and (each.remedy, each.finding.nodes) not in self._vain:
                return each
        return None

    def begin(self, proposal: Proposal, batch: int) -> None:
        """Note that a remedy is being tried from now on, with so many samples in a step."""
        rest = frozenset(self._members) - frozenset(proposal.finding.nodes)
        self._trial = _Trial(proposal, (self.short.measured or 0.0) * batch, rest)

    def result(self, batch: int) -> RemedyTrial | None:
        """Return what came of the remedy that is being tried, once that is known, with so many samples in a step."""
        trial = self._trial
        if trial is None or set(self._members) != trial.members or self.short.measured is None:
            return None
        after = self.short.measured * batch
        kept = worth_keeping(trial.samples_per_s, after)
        judged_trial = RemedyTrial(trial.proposal, trial.samples_per_s, after, kept)
        self._trial = None
        self.tried.append(judged_trial)
        # What did not help once is not tried again: each try costs a generation.
        if not kept:
            self._vain.add((trial.proposal.remedy, trial.proposal.finding.nodes))
        return judged_trial

    def spoilt(self) -> Proposal | None:
        """Return the remedy that can no longer be judged, because somebody else has come or gone; it is given up."""
        trial = self._trial
        if trial is None or set(self._members) in (trial.members, trial.members | set(trial.proposal.finding.nodes)):
            return None
        self._trial = None
        return trial.proposal

    def document(self) -> dict[str, Any]:
        """Return what is known of the job's speed, for JSON; unknown is None, with the reason."""
        short = self.short
        return {
            "measured_steps_per_s": short.measured,
            "expected_steps_per_s": None if short.measured is None else short.expected,
            "short": short.short,
            "threshold": self.terms.threshold,
            "found": short.found,
            "reason": short.reason or None,
            "causes": [finding_document(each) for each in self.findings],
            "proposals": [proposal_document(each) for each in self.proposed],
            "tried": [tried_document(each) for each in self.tried],
        }

    def _judge(self, members: Sequence[ObservedNode]) -> list[dict[str, Any]]:
        for each in members:
            self._learn(each)
        middle = self._middle(members)
        nodes = [self._node(each, middle) for each in members]
        # All wait for the slowest at each step, so that the job goes at that one's speed.
        self.short = self._judged(min(1 / max(each.usual_s or each.step_s, 1e-9) for each in nodes))
        self.findings = gathered(causes(self.short, nodes, self.terms.threshold))
        self.proposed = proposals(self.findings, nodes)
        return self._news()

    def _judged(self, expected: float) -> Shortfall:
        return shortfall(list(self._windows), expected, self.terms.threshold, self.terms.warm_up_s)

    def _learn(self, member: ObservedNode) -> None:
        """Keep what a node's own work takes at its best, at its default clocks: the middle of three windows or more."""
        samples = self._seen[member.name]
        key = (member.name, member.pace.network)
        if len(samples.windows) < _FEWEST_STEPS or not member.slowdown:
            return
        newest = list(samples.windows)[-_FEWEST_STEPS:]
        work_s = median(_work_s(each) for each in newest) / member.slowdown
        self._best_s[key] = min(work_s, self._best_s.get(key, work_s))

    def _node(self, member: ObservedNode, middle: Mapping[tuple[str, str], float]) -> NodeMeasurement:
        samples = self._seen[member.name]
        work_s = samples.work_s
        waiting = min(1.0, samples.data_s / samples.own_s)
        usual_s = work_s if member.slowdown is None else self._usual_s(member, middle)
        ingest = None
        if waiting > self.terms.threshold:
            ingest = _ingest(member.pace)
        return NodeMeasurement(member.name, work_s, usual_s, member.throttled, ingest, waiting)

    def _middle(self, members: Sequence[ObservedNode]) -> dict[tuple[str, str], float]:
        """Return what the own work of nodes of one type takes, in the middle, by type and network."""
        samples: dict[tuple[str, str], list[float]] = {}
        for each in members:
            best_s = self._best_s.get((each.name, each.pace.network))
            if best_s is not None:
                samples.setdefault((each.gpu, each.pace.network), []).append(best_s)
        return {key: median_low(times) for key, times in samples.items()}

    def _usual_s(self, member: ObservedNode, middle: Mapping[tuple[str, str], float]) -> float | None:
        best_s = self._best_s.get((member.name, member.pace.network))
        if best_s is None:
            return None
        reference_s = middle[member.gpu, member.pace.network]
        if member.known_s is not None:
            reference_s = min(reference_s, member.known_s)
        own = best_s <= reference_s * (1 + WORST / 2)
        return (best_s if own else reference_s) * (member.slowdown or 1.0)

    def _news(self) -> list[dict[str, Any]]:
        """Return an event once the same has been found twice in a row, and one once it is over."""
        found = frozenset((each.cause, each.nodes) for each in self.findings)
        if found == self._last:
            self._alike += 1
        else:
            self._alike = 1
        self._last = found
        # Twice in a row: a single window may hold a checkpoint or a burst of other work.
        if self._alike != _SURE or found == self._told:
            return []
        self._told = found
        about = {"measured": self.short.measured, "expected": self.short.expected, "short": self.short.short}
        if not found:
            return [{"event": "no bottleneck", **about}]
        listed = [finding_document(each) for each in self.findings]
        return [
            {"event": "bottleneck", **about, "causes": listed, "proposals": list(map(proposal_document, self.proposed))}
        ]


def allowed_remedies(words: Collection[str]) -> tuple[Remedy, ...]:
    """Return the remedies that may be done, from their words on the command line.

    Raises:
        InvalidInput: If one is none, or one that nobody here can do.
    """
    doable: Mapping[str, Remedy] = {"drop": Remedy.DROP}
    for word in words:
        if word not in doable:
            raise InvalidInput(f"--remedy takes {', '.join(doable)}, not {word[:40]!r}; all others are only proposed")
    return tuple(doable[word] for word in words)


def gathered(findings: Sequence[Bottleneck]) -> tuple[Bottleneck, ...]:
    """Return findings, those of one cause as one where many nodes have it: a fleet that waits is one thing to mend."""
    bottlenecks: list[Bottleneck] = []
    for cause in dict.fromkeys(each.cause for each in findings):
        alike = [each for each in findings if each.cause is cause]
        if len(alike) <= _MANY:
            bottlenecks += alike
        else:
            names = tuple(name for each in alike for name in each.nodes)
            bottlenecks.append(Bottleneck(cause, names, f"{alike[0].words}; {len(alike) - 1} more nodes likewise"))
    return tuple(bottlenecks)


def finding_document(finding: Bottleneck) -> dict[str, Any]:
    """Return a finding for JSON."""
    return {"cause": str(finding.cause), "nodes": list(finding.nodes), "words": finding.words}


def proposal_document(proposal: Proposal) -> dict[str, Any]:
    """Return a proposal for JSON; its gain is estimated, None where only trying can tell."""
    return {
        "remedy": str(proposal.remedy),
        "nodes": list(proposal.finding.nodes),
        "gain_estimated": proposal.gain,
        "words": proposal.words,
    }


def tried_document(tried: RemedyTrial) -> dict[str, Any]:
    """Return what came of a remedy, for JSON; its gain is measured."""
    return {
        "remedy": str(tried.proposal.remedy),
        "nodes": list(tried.proposal.finding.nodes),
        "before_samples_per_s": tried.before,
        "after_samples_per_s": tried.after,
        "gain_measured": tried.gain if tried.before else None,
        "kept": tried.kept,
    }


def _work_s(tally: Tally) -> float:
    return max(1e-9, (tally.own_s - tally.data_s) / tally.steps)


def _ingest(pace: Pace) -> Ingest | None:
    """Return a node's rates of samples: cold in the first epoch it saw, from memory later; None before it can tell."""
    cold = pace.cold
    warm = pace.tally.since(pace.cold)
    if min(cold.steps, warm.steps) < _EPOCH_STEPS or min(cold.own_s, warm.own_s) <= 0:
        return None
    computing_s = sum(_work_s(each) * each.steps for each in (cold, warm)) / (cold.steps + warm.steps)
    rates = (pace.share / seconds for seconds in (computing_s, warm.own_s / warm.steps, cold.own_s / cold.steps))
    return Ingest(*rates)
