"""What a fleet runs under: caps for every grade of silicon and a checkpoint interval, decided as pure functions.

Four policies, from nothing to everything: `Default` clocks, a cap and an interval chosen `Apart`, both chosen jointly
for a fleet of equals, and `Tuned`: jointly, and with the slack of the faster nodes turned into joules.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import log
from typing import Protocol

from polythrottle.cluster.fleet.slack import DOUBT, UNKNOWN, met, paces
from polythrottle.cluster.machine import Cap, MachineType
from polythrottle.cluster.plan.caps import ENERGY, Exposure, Terms, Weights, apart, joint, reference_s
from polythrottle.cluster.plan.interval import CheckpointCost

STRETCHES = tuple(1 + step / 400 for step in range(0, 21))
"""How much later than at default clocks the barrier may open, at most 5 %."""


@dataclass(frozen=True)
class Situation:
    """What a fleet is when it decides.

    Attributes:
        nodes: How many train of each grade of silicon; ``UNKNOWN`` for those not calibrated yet.
        hazard_per_s: Interruptions of the job per second.
        noticed: Share of them that are announced in time for a checkpoint.
        machine: The type of all nodes.
        checkpoint: What a checkpoint costs.
        reform_s: How long all stand still after an interruption, in seconds.
        overhead: Largest share of the time that checkpoints may stop training.
        synchronous: Whether all wait for the slowest.
    """

    nodes: Mapping[int, int]
    hazard_per_s: float
    noticed: float
    machine: MachineType
    checkpoint: CheckpointCost
    reform_s: float
    overhead: float = 0.035
    synchronous: bool = True

    def terms(self) -> Terms:
        """Return the situation as the planner takes it; steps are counted in seconds."""
        machines = sum(self.nodes.values())
        exposure = Exposure(machines, self.hazard_per_s, self.reform_s, noticed=self.noticed, undoes=self.synchronous)
        price = min(self.machine.usd_per_h.values(), default=0.0)
        return Terms(self.machine, price, exposure, self.checkpoint, 1.0, self.overhead)


@dataclass(frozen=True)
class Decision:
    """What a fleet runs under until it decides again.

    Attributes:
        interval_s: Training time between checkpoints, in seconds.
        cap: The cap of every node; None where each gets the one that just meets the barrier.
        stretch: How much later than at default clocks the barrier opens; only without a common cap.
    """

    interval_s: float
    cap: Cap | None
    stretch: float = 1.0

    def caps(self, nodes: Mapping[int, int], machine: MachineType) -> dict[int, Cap]:
        """Return what nodes of each grade run under in a group of these nodes.

        Args:
            nodes: How many there are of each grade; the slowest known one sets the barrier.
            machine: Their type.
        """
        if self.cap is not None:
            return dict.fromkeys(nodes, self.cap)
        return met(nodes, machine.caps, machine.idle_w, self.stretch)


class Policy(Protocol):
    """Decides for a fleet."""

    @property
    def name(self) -> str:
        """What people call it."""

    def decide(self, situation: Situation) -> Decision:
        """Return what to run under in a situation; the same answer for the same situation."""


@dataclass(frozen=True)
class Default:
    """Default clocks.

    Attributes:
        every_s: A fixed interval between checkpoints in seconds, or None for the one that is best for time (Daly).
    """

    every_s: float | None = None
    name: str = "default"

    def decide(self, situation: Situation) -> Decision:
        """Return the default cap for all."""
        every_s = self.every_s if self.every_s is not None else reference_s(situation.terms())
        return Decision(every_s, situation.machine.default)


@dataclass(frozen=True)
class Apart:
    """One cap for all, as if nothing were lost, and Daly's interval at the default clock, as if nothing was capped.

    Attributes:
        longer: How much longer a step may take than at the default.
    """

    longer: float = 0.03
    name: str = "apart"

    def decide(self, situation: Situation) -> Decision:
        """Return the two, each chosen without the other."""
        chosen = apart(situation.terms(), ENERGY, self.longer)
        return Decision(chosen.interval_s, chosen.cap)


@dataclass
class Joint:
    """One cap for all and the interval, chosen together.

    Attributes:
        longer: How much longer the whole may take than at the default, losses and checkpoints included.
        weights: What counts.
    """

    longer: float = 0.03
    weights: Weights = ENERGY
    name: str = "joint"
    _known: dict[object, Decision] = field(default_factory=dict, repr=False)

    def decide(self, situation: Situation) -> Decision:
        """Return the best pair."""
        key = _rounded(situation)
        if key not in self._known:
            chosen = joint(situation.terms(), self.weights, self.longer)
            self._known[key] = Decision(chosen.interval_s, chosen.cap)
        return self._known[key]


@dataclass
class Tuned:
    """The pace of the whole fleet and the interval chosen together, with each node's slack turned into joules.

    Attributes:
        longer: How much longer the whole may take than at default clocks, losses and checkpoints included.
        weights: What counts.
    """

    longer: float = 0.03
    weights: Weights = ENERGY
    name: str = "tuned"
    _known: dict[object, Decision] = field(default_factory=dict, repr=False)

    def decide(self, situation: Situation) -> Decision:
        """Return the best pace and interval."""
        key = _rounded(situation)
        if key not in self._known:
            self._known[key] = self._best(situation)
        return self._known[key]

    def _best(self, situation: Situation) -> Decision:
        machine, terms = situation.machine, situation.terms()
        if not situation.synchronous:  # nobody waits for anybody
            alone = joint(terms, self.weights, self.longer)
            return Decision(alone.interval_s, alone.cap)
        ((_, default),) = paces(situation.nodes, machine.caps[:1], machine.idle_w, (1.0,))
        slowed = [cap for _, cap in paces(situation.nodes, machine.caps, machine.idle_w, STRETCHES)]
        fleet = replace(machine, caps=(default, *slowed))
        # Half of the doubt about silicon ends up in the step, on average.
        chosen = joint(replace(terms, machine=fleet), self.weights, max(0.0, self.longer - DOUBT / 2))
        if chosen.cap == default:
            return Decision(chosen.interval_s, machine.default)
        return Decision(chosen.interval_s, None, STRETCHES[slowed.index(chosen.cap)])


def _rounded(situation: Situation) -> object:
    """Return what a decision depends on, to within a fifth: an interval so far off costs less than 1 % more."""
    nodes = situation.nodes
    known = [grade for grade in nodes if grade != UNKNOWN]
    total = sum(nodes.values())
    hazard = situation.hazard_per_s
    return (
        round(5 * log(total)),
        max(known, default=UNKNOWN),
        round(sum(grade * nodes[grade] for grade in known) / max(1, sum(nodes[grade] for grade in known)) / 4),
        round(4 * sum(nodes[grade] for grade in known) / total),
        round(5 * log(hazard)) if hazard else None,
        situation.noticed,
        situation.machine.name,
    )
