"""What a simulated training job runs under: the machines that come and go, and the policies of their fleet.

Machines are recorded, or drawn from lifetimes. A policy is pure functions: power caps per silicon grade, checkpoint
interval, learnt hazard and when newcomers are admitted.
"""

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from math import ceil, exp, inf, log
from random import Random
from typing import Protocol

from polythrottle.cluster.plan.costs import ENERGY, Blend, Exposure, Terms, Weights, apart, blended, joint, reference_s
from polythrottle.cluster.recorded_tables import Trace
from polythrottle.domain.errors import InvalidInput
from polythrottle.domain.fleet.gpu_variability import UNKNOWN, Ladder, met, paces
from polythrottle.domain.fleet.transient_machine import (
    HOUR_S,
    Cap,
    CheckpointCost,
    Lifetime,
    LossRate,
    MachineType,
    lost_before,
    next_loss_s,
)

# The training job that is simulated: how much work, what interrupts it, and what an interruption takes.

MEASURED = CheckpointCost(1.03, 6.67)
"""A checkpoint of 204 MB: on the local disk, and after that until it is in the bucket (CM-DARE's files)."""


@dataclass(frozen=True)
class SimulatedJob:
    """A data-parallel training job on however many machines there are.

    The times have measured defaults: a checkpoint of 204 MB takes 1.03 s on the local disk and 7.7 s until it is in
    the bucket, and a new machine's framework and data 79 s (CM-DARE's files); torchrun forms a smaller or larger group
    in 7.8 s (measured, TorchElastic with a keep-alive of 1 s).

    Attributes:
        work: What is to be done, in seconds of one machine in the middle of its type at its default clock; infinite to
            train for as long as the simulation lasts.
        checkpoint: What one checkpoint costs.
        reform_s: How long all stand still when the group is formed anew, in seconds.
        cold_s: From a machine's being there until it can join, in seconds.
        noticed: Share of losses that are announced early enough to write a checkpoint first, in [0, 1].
        synchronous: Whether all wait for the slowest at each step; else each goes at its own speed (asynchronous, with
            a parameter server that is not taken away), and a loss undoes nothing.
        overhead: Largest share of the time that checkpoints may stop training.
        speedups: Speed with 1, 2, … machines over that of one, where it is known; a larger group keeps the last one's
            speed per machine. None given is even scaling.
        verify_s: Training time after which a newcomer is calibrated: two or three windows of steps, in seconds.
    """

    work: float = inf
    checkpoint: CheckpointCost = MEASURED
    reform_s: float = 7.8
    cold_s: float = 79.0
    noticed: float = 0.0
    synchronous: bool = True
    overhead: float = 0.035
    verify_s: float = 60.0
    speedups: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        times = (self.reform_s, self.cold_s, self.verify_s)
        if self.work <= 0 or not all(0 <= each < inf for each in times):
            raise InvalidInput("a job has work to do, and its times are at least 0 and finite")
        if not 0 <= self.noticed <= 1:
            raise InvalidInput(f"the share of announced losses is in [0, 1], not {self.noticed}")
        if not 0 < self.overhead <= 1:
            raise InvalidInput(f"the share that checkpoints may take is in (0, 1], not {self.overhead}")

    def share(self, machines: int) -> float:
        """Return what each of so many machines does of what it would do alone."""
        if not self.speedups:
            return 1.0
        known = min(machines, len(self.speedups))
        return self.speedups[known - 1] / known


# Machines that come and go whatever the job does, as recorded or drawn from lifetimes: a stream of changes.

_SHORTEST_S = 1.0
"""No machine is taken away before it was there for a second: else virtual time would stand still."""


@dataclass(frozen=True)
class Change:
    """A machine is there, or is taken away.

    Attributes:
        time_s: When, in seconds of virtual time.
        machine: Its number; a machine that is taken away never comes back, its successor has a number of its own.
        there: Whether it comes.
    """

    time_s: float
    machine: int
    there: bool


class Supply(Protocol):
    """Where machines come from."""

    def changes(self, seed: int) -> Iterator[Change]:
        """Yield what happens in the order of time, without end unless nothing can happen any more."""


@dataclass(frozen=True)
class RecordedSupply:
    """A recorded trace, replayed end to end.

    A record says how many machines were there, not which of them were lost: those are drawn, all alike. A fleet smaller
    than the record is a draw of its places; a larger one is several copies of it, each from another moment on.

    Attributes:
        trace: The record.
        machines: Places in the fleet, >= 1; how many are taken at a time is the record's.
    """

    trace: Trace
    machines: int

    def __post_init__(self) -> None:
        if self.machines < 1:
            raise InvalidInput(f"a fleet has at least one machine, not {self.machines}")

    def changes(self, seed: int) -> Iterator[Change]:
        """Yield the changes of every copy of the record in the order of time."""
        chance = Random(seed)
        left = self.machines
        numbers = count()
        copies: list[Iterator[Change]] = []
        while left > 0:
            places = min(left, self.trace.most)
            begins_s = 0.0
            if copies:
                begins_s = chance.random() * self.trace.ends_s
            copies.append(self._copy(Random(chance.random()), places, begins_s, numbers))
            left -= places
        return heapq.merge(*copies, key=lambda change: change.time_s)

    def _copy(self, chance: Random, places: int, begins_s: float, numbers: "count[int]") -> Iterator[Change]:
        """Yield the changes of some of the record's places, from a moment of it on."""
        mine = set(chance.sample(range(self.trace.most), places))
        there: list[int] = []  # the record's places that are filled
        empty = list(range(self.trace.most))
        filled: dict[int, int] = {}
        for time_s, wanted in self._counts(begins_s):
            while len(there) != wanted:
                source, target = (empty, there) if len(there) < wanted else (there, empty)
                place = _drawn(source, chance)
                target.append(place)
                if place in mine:
                    coming = target is there
                    filled[place] = next(numbers) if coming else filled[place]
                    yield Change(time_s, filled[place], coming)

    def _counts(self, begins_s: float) -> Iterator[tuple[float, int]]:
        """Yield when the number of machines is which, from a moment of the record on, at 0 s."""
        trace = self.trace
        yield 0.0, next(number for at_s, number in _backwards(trace) if at_s <= begins_s)
        for lap in count():
            if len(set(trace.counts)) == 1:  # nothing ever happens again
                return
            for at_s, number in zip(trace.times_s, trace.counts, strict=True):
                time_s = lap * trace.ends_s + at_s - begins_s
                if time_s > 0:
                    yield time_s, number


def _backwards(trace: Trace) -> Iterator[tuple[float, int]]:
    return zip(reversed(trace.times_s), reversed(trace.counts), strict=True)


def _drawn(places: list[int], chance: Random) -> int:
    """Take one place out of a list, in a time that does not depend on its length."""
    index = int(chance.random() * len(places))
    places[index], places[-1] = places[-1], places[index]
    return places.pop()


@dataclass(frozen=True)
class DrawnSupply:
    """Machines with drawn lifetimes; a lost one is ordered again at once.

    Attributes:
        machines: Places in the fleet, >= 1.
        lifetime: How long a machine is kept.
        order_s: From the loss of a machine until its successor is there, in seconds.
    """

    machines: int
    lifetime: Lifetime
    order_s: float = 90.0

    def __post_init__(self) -> None:
        if self.machines < 1 or self.order_s < 0:
            raise InvalidInput("a fleet has at least one machine, and an order takes no negative time")

    def changes(self, seed: int) -> Iterator[Change]:
        """Yield arrivals and losses in the order of time."""
        return (change for change, _ in drawn_changes((self.lifetime,) * self.machines, self.order_s, Random(seed)))


def drawn_changes(lifetimes: Sequence[Lifetime], order_s: float, chance: Random) -> Iterator[tuple[Change, int]]:
    """Yield arrivals and losses of machines with drawn lifetimes in the order of time, each with the machine's place.

    Args:
        lifetimes: How long machines are kept in each place.
        order_s: From the loss of a machine until its successor is there, in seconds; infinite for none.
        chance: Where lifetimes are drawn from.
    """
    machines = count()
    coming: list[tuple[float, int, int]] = [(0.0, next(machines), place) for place in range(len(lifetimes))]
    going: list[tuple[float, int, int]] = []
    while (time_s := min(heap[0][0] for heap in (coming, going) if heap)) < inf:
        if coming and coming[0][0] == time_s:
            _, machine, place = heapq.heappop(coming)
            life_s = max(_SHORTEST_S, next_loss_s(lifetimes[place], 0.0, 1 - chance.random()))
            heapq.heappush(going, (time_s + life_s, machine, place))
            yield Change(time_s, machine, True), place
        else:
            _, machine, place = heapq.heappop(going)
            heapq.heappush(coming, (time_s + order_s, next(machines), place))
            yield Change(time_s, machine, False), place


# How often a running job is interrupted: learnt from its own interruptions, or known from lifetimes and ages.

_LOOK_S = 600.0


@dataclass
class LearnedHazard:
    """Interruptions counted with forgetting: statistics of revocation age within months, and differ by the hour.

    A burst that takes many machines within one re-forming is one interruption: the job loses its work once. So it is
    the job's time that is counted, where a controller of real nodes counts losses per node (`JobProgress`).

    Attributes:
        prior_per_h: Interruptions of the job per hour before anything was counted.
        prior_s: How much counted time the prior is worth, in seconds, > 0.
        half_s: After how long what was counted counts half, in seconds, > 0.
    """

    prior_per_h: float = 1.0
    prior_s: float = HOUR_S
    half_s: float = 6 * HOUR_S
    _losses: float = field(default=0.0, init=False)
    _time_s: float = field(default=0.0, init=False)
    _last_s: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        self.prior = LossRate(self.prior_per_h * self.prior_s / HOUR_S, self.prior_s)
        if self.half_s <= 0:
            raise InvalidInput("what is learnt of interruptions is forgotten by half in a time above 0")

    def interrupted(self, now_s: float) -> None:
        """Take note of an interruption."""
        self._aged(now_s)
        self._losses += 1

    def per_s(self, now_s: float) -> float:
        """Return the interruptions to expect per second, from now on."""
        self._aged(now_s)
        return self.prior.updated(self._losses, self._time_s).per_s

    def _aged(self, now_s: float) -> None:
        span_s = max(0.0, now_s - self._last_s)
        rate = log(2) / self.half_s
        kept = exp(-rate * span_s)
        self._losses *= kept
        self._time_s = self._time_s * kept + (1 - kept) / rate
        self._last_s += span_s


def known_per_s(lifetime: Lifetime, ages_s: Mapping[float, int]) -> float:
    """Return the interruptions per second of machines of known ages.

    Args:
        lifetime: The distribution of every machine's life.
        ages_s: How many machines there are of each age in seconds; ages may be rounded, a sum over a few will do.
    """
    alone = sum(number * min(1.0, lost_before(lifetime, age_s, _LOOK_S)) for age_s, number in ages_s.items())
    return alone / _LOOK_S


# Whether machines that are ready are let in now, or with the next interruption, when all stand still anyway.


def admitted(ready: int, training: int, interruptions_per_s: float, pause_s: float) -> bool:
    """Return whether to form the group anew for machines that are ready.

    They work for the time until the next interruption, which would let them in for nothing; all stand still for the
    pause. So it pays where ready × time > (training + ready) × pause.

    Args:
        ready: Machines that could join.
        training: Machines that train now.
        interruptions_per_s: How often the group is formed anew anyway, per second.
        pause_s: How long all stand still for it, in seconds, the checkpoint before it included.

    Raises:
        InvalidInput: If a number is negative.
    """
    if min(ready, training, interruptions_per_s, pause_s) < 0:
        raise InvalidInput("machines, rates and pauses are at least 0")
    if interruptions_per_s:
        quiet_s = 1 / interruptions_per_s
    else:
        quiet_s = inf
    return ready > 0 and (training == 0 or ready * quiet_s > (training + ready) * pause_s)


# What a fleet runs under: caps for every grade of silicon and a checkpoint interval, decided as pure functions.
#
# Four policies, from nothing to everything: `DefaultPolicy`; `IndependentPolicy`, a cap and an interval chosen apart;
# `JointPolicy`, both chosen together for a fleet of equals; `TunedPolicy`, which also turns the slack of the faster
# nodes into joules.

STRETCHES = (*(1 + step / 400 for step in range(20)), *(1 + step / 100 for step in range(5, 31)))
"""How much later than at default clocks the barrier may open: by quarters of a per cent up to 5 %, then up to 30 %."""
_WORTH = 0.005
"""Share of the joules that an interval other than Daly's must save: the optimum is flat, and the rest is luck."""
_LUCK = 0.0003
"""Kept back of the time allowed: losses undo more or less than is expected of an interval."""


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
class Turn:
    """How a share of the steps is taken.

    Attributes:
        share: Of the steps, in (0, 1].
        cap: The cap of every node; None where each gets the one that just meets the barrier.
        stretch: How much later than at default clocks the barrier opens; only without a common cap.
    """

    share: float
    cap: Cap | None
    stretch: float = 1.0

    def caps(self, nodes: Mapping[int, int], rungs: Ladder) -> dict[int, Cap]:
        """Return what nodes of each grade run under in a group of these nodes.

        Args:
            nodes: How many there are of each grade; the slowest known one sets the barrier.
            rungs: What each can run under.
        """
        if self.cap is None:
            return met(nodes, rungs, self.stretch)
        return dict.fromkeys(nodes, self.cap)


@dataclass(frozen=True)
class Decision:
    """What a fleet runs under until it decides again.

    Attributes:
        interval_s: Training time between checkpoints, in seconds.
        turns: What it runs under; where there are two, by turns, each for minutes, all nodes together.
        slowdown: Time of a step over that at default clocks which two turns should come to on average, or None where
            their shares are fixed.
    """

    interval_s: float
    turns: tuple[Turn, ...]
    slowdown: float | None = None

    def shares(self, steps: Sequence[float], plain: float) -> tuple[float, ...]:
        """Return each turn's share of the steps, so that they come to the slowdown wanted of the group as it is.

        Args:
            steps: Time of a step in each turn, as it comes out.
            plain: Time of a step at default clocks.
        """
        if self.slowdown is None or len(steps) < 2 or steps[1] <= steps[0]:
            return tuple(turn.share for turn in self.turns)
        late = min(1.0, max(0.0, (self.slowdown * plain - steps[0]) / (steps[1] - steps[0])))
        return 1 - late, late


class FleetPolicy(Protocol):
    """Decides for a fleet."""

    @property
    def name(self) -> str:
        """What people call it."""

    def decide(self, situation: Situation) -> Decision:
        """Return what to run under in a situation; the same answer for the same situation."""


@dataclass(frozen=True)
class DefaultPolicy:
    """Default clocks.

    Attributes:
        every_s: A fixed interval between checkpoints in seconds, or None for the one that is best for time (Daly).
    """

    every_s: float | None = None
    name: str = "default"

    def decide(self, situation: Situation) -> Decision:
        """Return the default cap for all."""
        if self.every_s is not None:
            every_s = self.every_s
        else:
            every_s = reference_s(situation.terms())
        return Decision(every_s, (Turn(1.0, situation.machine.default),))


@dataclass
class _Remembered:
    """A policy that works a situation out once.

    Attributes:
        longer: How much longer the whole may take than at default clocks, losses and checkpoints included (but for
            `IndependentPolicy`, which looks at a step alone).
        weights: What counts.
    """

    longer: float = 0.03
    weights: Weights = ENERGY
    _known: dict[object, tuple[Decision, float]] = field(default_factory=dict, repr=False)

    def decide(self, situation: Situation) -> Decision:
        """Return the best decision: the one for a situation much the same, its interval for the hazard of this one."""
        key = _rounded(situation)
        daly_s = reference_s(situation.terms())
        if key not in self._known:
            self._known[key] = self._best(situation), daly_s
        decision, then_s = self._known[key]
        if inf in (decision.interval_s, daly_s, then_s):
            return decision
        return replace(decision, interval_s=float(ceil(decision.interval_s * daly_s / then_s - 1e-9)))

    def _best(self, situation: Situation) -> Decision:
        raise NotImplementedError


@dataclass
class IndependentPolicy(_Remembered):
    """One cap for all, as if nothing were lost, and Daly's interval at the default clock, as if nothing was capped."""

    name: str = "apart"

    def _best(self, situation: Situation) -> Decision:
        chosen = apart(situation.terms(), self.weights, self.longer)
        return Decision(chosen.interval_s, (Turn(1.0, chosen.cap),))


@dataclass
class JointPolicy(_Remembered):
    """One cap for all and the interval, chosen together."""

    name: str = "joint"

    def _best(self, situation: Situation) -> Decision:
        chosen = joint(situation.terms(), self.weights, self.longer)
        return Decision(chosen.interval_s, (Turn(1.0, chosen.cap),))


@dataclass
class TunedPolicy(_Remembered):
    """The pace of the whole fleet and the interval chosen together, with each node's slack turned into joules.

    Exactly, as `blended` does: within a pace every node has the cap of fewest joules that meets the barrier, and two
    paces by turns use up the time that is allowed.
    """

    name: str = "tuned"

    def _best(self, situation: Situation) -> Decision:
        terms = situation.terms()
        if not situation.synchronous:  # nobody waits for anybody
            alone = blended(terms, self.weights, self.longer)
            return _taking_turns(alone, {cap: (cap, 1.0) for cap in (alone.first, alone.second)})
        machine = situation.machine
        ((_, default),) = paces(situation.nodes, machine.caps[:1], machine.idle_w, (1.0,))
        slowed = [cap for _, cap in paces(situation.nodes, machine.caps, machine.idle_w, STRETCHES)]
        fleet = replace(machine, caps=(default, *slowed))
        chosen = self._steady(replace(terms, machine=fleet), max(0.0, self.longer - _LUCK))
        ways = {cap: (None, stretch) for cap, stretch in reversed([*zip(slowed, STRETCHES, strict=True)])}
        decision = _taking_turns(chosen, {**ways, default: (machine.default, 1.0)})
        return replace(decision, slowdown=chosen.choice.cap.slowdown)

    def _steady(self, terms: Terms, longer: float) -> Blend:
        """Return the best blend; with Daly's interval unless another is worth its luck with losses."""
        best = blended(terms, self.weights, longer)
        plain = blended(terms, self.weights, longer, reference_s(terms))
        worth = plain.choice.value(self.weights) > (1 + _WORTH) * best.choice.value(self.weights)
        if worth:
            return best
        return plain


def _taking_turns(chosen: Blend, ways: Mapping[Cap, tuple[Cap | None, float]]) -> Decision:
    """Return the decision that a blend of paces is, by what each pace stands for."""
    parts = ((chosen.first, 1 - chosen.share), (chosen.second, chosen.share))
    return Decision(chosen.choice.interval_s, tuple(Turn(share, *ways[cap]) for cap, share in parts if share))


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
