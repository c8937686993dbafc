"""A training job on machines that come and go, event by event in virtual time.

Its checkpoint cycle, its machines, its outcome. Simulated.
"""

import heapq
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import count
from math import floor, inf
from random import Random

from polythrottle.cluster.conditions import (
    Decision,
    FleetPolicy,
    LearnedHazard,
    SimulatedJob,
    Situation,
    Supply,
    admitted,
    known_per_s,
)
from polythrottle.cluster.plan.costs import Ledger, SimulatedOutcome, Use
from polythrottle.domain.errors import InvalidInput
from polythrottle.domain.fleet.gpu_variability import (
    UNKNOWN,
    Pace,
    Silicon,
    by_turns,
    grade,
    ladder,
    of_grade,
    paced,
    slowest,
)
from polythrottle.domain.fleet.transient_machine import Cap, Lifetime, MachineType

# Training and checkpoints by turns, without an event for each: where a job is in its cycle after any span of time.

_ROUNDING_S = 1e-9


@dataclass(frozen=True)
class Cycle:
    """How a job alternates between training and standing still for a checkpoint.

    Attributes:
        interval_s: Training time between checkpoints, in seconds, > 0; infinite for none.
        stall_s: How long each stops training, in seconds.
        persist_s: How much longer it takes until it can be read again, in seconds; training goes on meanwhile.
    """

    interval_s: float
    stall_s: float
    persist_s: float = 0.0

    def trained_s(self, at_s: float) -> float:
        """Return the training time within the first so many seconds of cycles."""
        if self.interval_s == inf:
            return at_s
        laps, within_s = self._lap(at_s)
        return laps * self.interval_s + min(within_s, self.interval_s)

    def wall_s(self, trained_s: float) -> float:
        """Return the first moment by which so much training time has passed, in seconds."""
        if self.interval_s == inf:
            return trained_s
        laps = max(0, floor((trained_s - _ROUNDING_S) / self.interval_s))
        return trained_s + laps * self.stall_s

    def undone_s(self, at_s: float) -> float:
        """Return the training time that a loss at a moment undoes, in seconds: all since the newest whole checkpoint.

        What went before the first second of the cycles is taken to be safe.
        """
        if self.interval_s == inf:
            return at_s
        laps, within_s = self._lap(at_s)
        since_s = min(within_s, self.interval_s)
        if laps >= 1 and within_s < self.persist_s:
            return since_s + self.interval_s
        return since_s

    def written(self, at_s: float) -> int:
        """Return how many checkpoints were begun and held training up within the first so many seconds."""
        if self.interval_s == inf:
            return 0
        return self._lap(at_s)[0]

    def _lap(self, at_s: float) -> tuple[int, float]:
        lap_s = self.interval_s + self.stall_s
        laps = floor(at_s / lap_s + _ROUNDING_S / lap_s)
        return laps, max(0.0, at_s - laps * lap_s)


# The machines of a simulated job: who is starting, who is ready, who trains, and of which silicon they are.


@dataclass
class Group:
    """Machines by what they are doing; counts are kept, so that nothing walks over all of them.

    Attributes:
        silicon: How their GPUs differ.
        noise: Standard deviation of a calibration, as a fraction of a step.
        chance: Where silicon and noise are drawn from.
    """

    silicon: Silicon
    noise: float
    chance: Random
    starting: set[int] = field(default_factory=set)
    ready: set[int] = field(default_factory=set)
    training: set[int] = field(default_factory=set)
    nodes: Counter[tuple[int, int]] = field(default_factory=Counter)
    _born_s: dict[int, float] = field(default_factory=dict)
    _grades: dict[int, tuple[int, int]] = field(default_factory=dict)
    _calibrated: set[int] = field(default_factory=set)
    _new: set[int] = field(default_factory=set)
    _rough: set[int] = field(default_factory=set)

    def came(self, machine: int, now_s: float) -> None:
        """Take a machine in that begins to start now, in seconds of virtual time."""
        self._born_s[machine] = now_s
        # Grades instead of factors: machines of one grade behave alike, so that an event costs by grade, not by
        # machine.
        factor = self.silicon.draw(self.chance)
        if self.noise:
            calibrated = factor * (1 + self.chance.gauss(0.0, self.noise))
        else:
            calibrated = factor
        self._grades[machine] = (grade(calibrated), grade(factor))
        self.starting.add(machine)

    def started(self, machine: int) -> bool:
        """Take note that a machine is ready, and return whether it still is there."""
        if machine not in self.starting:
            return False
        self.starting.discard(machine)
        self.ready.add(machine)
        return True

    def lost(self, machine: int) -> bool:
        """Take a machine out, and return whether it was training."""
        trained = machine in self.training
        if trained:
            self._left(machine)
        for group in (self.starting, self.ready, self.training, self._calibrated, self._new, self._rough):
            group.discard(machine)
        self._grades.pop(machine, None)
        self._born_s.pop(machine, None)
        return trained

    def joined(self) -> None:
        """Let everyone in who is ready."""
        for machine in self.ready:
            self.nodes[self._pair(machine)] += 1
        self.training |= self.ready
        self._new |= self.ready
        self.ready.clear()

    def verified(self) -> bool:
        """Calibrate those who train and were not calibrated, and return whether there was any."""
        for machine in self._new:
            self._left(machine)
            self._calibrated.add(machine)
            self.nodes[self._pair(machine)] += 1
        any_new = bool(self._new)
        self._rough |= self._new
        self._new.clear()
        return any_new

    def refined(self) -> None:
        """Believe what many windows have said by now of those who were calibrated from a few: the noise is gone."""
        for machine in self._rough & self.training:
            self._left(machine)
            _, true = self._grades[machine]
            self._grades[machine] = (true, true)
            self.nodes[self._pair(machine)] += 1
        self._rough.clear()

    def ages_s(self, now_s: float, within_s: float) -> Counter[float]:
        """Return how many train of each age in seconds, rounded to within so many."""
        return Counter(within_s * round((now_s - self._born_s[machine]) / within_s) for machine in self.training)

    @property
    def believed(self) -> Counter[int]:
        """Return how many train of each grade, as far as that is known."""
        grades: Counter[int] = Counter()
        for (known, _), number in self.nodes.items():
            grades[known] += number
        return grades

    def _left(self, machine: int) -> None:
        pair = self._pair(machine)
        self.nodes[pair] -= 1
        if not self.nodes[pair]:
            del self.nodes[pair]

    def _pair(self, machine: int) -> tuple[int, int]:
        seen, true = self._grades[machine]
        return (seen if machine in self._calibrated else UNKNOWN, true)


# A training job on machines that come and go, event by event in virtual time; everything that comes out is simulated.
#
# Between two events nothing changes, so that progress, checkpoints and joules follow in closed form: an event costs
# what the number of different grades of silicon costs, whatever the number of machines.

_DECIDE_S = 600.0
"""How often a fleet decides anew though nothing happens: ages and hazards change."""


class _Event(IntEnum):
    STARTED = 0  # a machine is ready to join
    FORMED = 1  # the group trains
    VERIFIED = 2  # newcomers are calibrated
    DECIDE = 3  # time to look again


@dataclass(frozen=True)
class Scenario:
    """What is simulated.

    Attributes:
        job: What is trained.
        machine: The type of all machines.
        supply: When they come and go.
        policy: Who decides caps and intervals.
        silicon: How the GPUs differ.
        noise: Standard deviation of a node's calibration, as a fraction of a step.
        usd_per_h: Price of a machine along time; None for the least of the machine type's.
        prior_per_h: Interruptions per hour that are expected before any was seen.
        lifetime: How long a machine is kept, where the fleet knows it; None where it learns from its interruptions.
    """

    job: SimulatedJob
    machine: MachineType
    supply: Supply
    policy: FleetPolicy
    silicon: Silicon = field(default_factory=Silicon)
    noise: float = 0.0025
    usd_per_h: Callable[[float], float] | None = None
    prior_per_h: float = 1.0
    lifetime: Lifetime | None = None

    def price(self, time_s: float) -> float:
        """Return what a machine costs per hour at a moment."""
        if self.usd_per_h is not None:
            return self.usd_per_h(time_s)
        return min(self.machine.usd_per_h.values(), default=0.0)


def simulate(
    scenario: Scenario, seed: int, horizon_s: float, told: Callable[[float], None] = lambda time_s: None
) -> SimulatedOutcome:
    """Return what comes of a job, up to its end or to a horizon. Simulated.

    Args:
        scenario: What is simulated.
        seed: Of machines and silicon.
        horizon_s: When to stop looking, in seconds, > 0.
        told: Called now and then with the virtual time.

    Raises:
        InvalidInput: If the horizon is not positive and finite.
    """
    if not 0 < horizon_s < inf:
        raise InvalidInput(f"a simulation lasts for more than 0 s and ends, not {horizon_s} s")
    return _Training(scenario, seed).until(horizon_s, told)


@dataclass
class _Training:
    """The state of one simulated job."""

    scenario: Scenario
    seed: int
    now_s: float = 0.0
    work: float = 0.0
    ledger: Ledger = field(default_factory=Ledger)
    generation: int = 0
    interruptions: int = 0
    losses: int = 0

    def __post_init__(self) -> None:
        chance = Random(self.seed)
        self.group = Group(self.scenario.silicon, self.scenario.noise, Random(chance.random()))
        self.chance = Random(chance.random())
        self.rungs = ladder(self.scenario.machine.caps, self.scenario.machine.idle_w)
        self.hazard = LearnedHazard(self.scenario.prior_per_h)
        self.each_per_s: float | None = None
        self.heap: list[tuple[float, int, int, int]] = []
        self.order = count()
        self.running = False
        self.forming = False
        self.stale = False
        self.writing_s = 0.0
        self.pace = Pace(1.0, {}, 0.0, 0.0, 0.0)
        self.rate = 0.0
        self.cycle = Cycle(inf, 0.0)
        self.at_s = 0.0
        self.decision: Decision | None = None
        self.machine_s = 0.0

    def until(self, horizon_s: float, told: Callable[[float], None]) -> SimulatedOutcome:
        """Let it happen."""
        changes = self.scenario.supply.changes(self.seed)
        change = next(changes, None)
        self._plan(_DECIDE_S, _Event.DECIDE, 0)
        while True:
            event_s = self.heap[0][0]
            change_s = inf if change is None else change.time_s
            if self.stale and min(event_s, change_s) > self.now_s:  # once for all that happens at one moment
                self._set_pace()
            # In closed form until something changes; stepping through checkpoints would take hours for a fleet.
            end_s = min(self._ends_s(), horizon_s)
            if end_s <= min(event_s, change_s):
                self._go(end_s)
                return self._outcome(end_s < horizon_s or self.work >= self.scenario.job.work * (1 - 1e-9))
            if change is not None and change_s <= event_s:
                self._go(change_s)
                if change.there:
                    self._came(change.machine)
                else:
                    self._lost(change.machine)
                change = next(changes, None)
            else:
                self._happens(told)

    def _happens(self, told: Callable[[float], None]) -> None:
        time_s, kind, _, number = heapq.heappop(self.heap)
        self._go(time_s)
        if kind == _Event.STARTED:
            if self.group.started(number):
                self._consider()
        elif kind == _Event.DECIDE:
            self._plan(time_s + _DECIDE_S, _Event.DECIDE, 0)
            self.decision = self.each_per_s = None
            self.group.refined()
            self._consider()
            self._set_pace()
            told(time_s)
        elif number == self.generation:
            if kind == _Event.FORMED:
                self._formed()
            elif self.running and self.group.verified():
                if self.scenario.job.synchronous:
                    self.decision = None
                self.stale = True

    def _plan(self, time_s: float, kind: _Event, number: int) -> None:
        heapq.heappush(self.heap, (time_s, kind, next(self.order), number))

    # -- what happens to machines

    def _came(self, machine: int) -> None:
        self.group.came(machine, self.now_s)
        self._plan(self.now_s + self.scenario.job.cold_s, _Event.STARTED, machine)

    def _lost(self, machine: int) -> None:
        self.losses += 1
        # One that was still starting, or ready but not let in, takes no work with it.
        if not self.group.lost(machine):
            return
        if self.running:
            self.interruptions += 1
            self.hazard.interrupted(self.now_s)
        if not self.scenario.job.synchronous:
            self.stale = True
            return
        # With a notice in time the group writes a last checkpoint, and only its forming is lost.
        noticed = self.running and self.chance.random() < self.scenario.job.noticed
        if self.running and not noticed:
            self._undo()
        self._form(self.scenario.job.checkpoint.stall_s if noticed else 0.0)

    def _consider(self) -> None:
        """Let those who are ready in, if it pays now."""
        job = self.scenario.job
        group = self.group
        if not group.ready or self.forming:
            return
        # Nobody waits for anybody, so a newcomer disturbs no one and need not be worth a pause.
        if not job.synchronous and self.running:
            group.joined()
            self._plan(self.now_s + job.verify_s, _Event.VERIFIED, self.generation)
            self.stale = True
            return
        pause_s = job.reform_s + job.checkpoint.stall_s
        if admitted(len(group.ready), len(group.training), self._hazard_per_s(), pause_s):
            self._form(job.checkpoint.stall_s if self.running else 0.0)

    def _form(self, writing_s: float) -> None:
        """Begin a new generation, perhaps after a checkpoint that stops training for so many seconds.

        Nothing is lost then; what is still to be persisted is, beside the forming of the group.
        """
        self.running = False
        self.forming = True
        self.rate = 0.0
        self.writing_s = writing_s
        self.generation += 1
        self._plan(self.now_s + writing_s + self.scenario.job.reform_s, _Event.FORMED, self.generation)

    def _formed(self) -> None:
        self.forming = False
        self.group.joined()
        if self.group.training:
            self.running = True
            self.at_s = 0.0
            self._plan(self.now_s + self.scenario.job.verify_s, _Event.VERIFIED, self.generation)
            self._set_pace()

    # -- how it runs

    def _set_pace(self) -> None:
        """Run every node under what the policy says for its grade."""
        self.stale = False
        if not self.running:
            return
        if not self.group.training:
            self.running = False
            self.rate = 0.0
            return
        machine = self.scenario.machine
        job = self.scenario.job
        believed = self.group.believed
        if self.decision is None:
            self.decision = self.scenario.policy.decide(self._situation(believed))
        taken = [self._taken(turn.caps(believed, self.rungs)) for turn in self.decision.turns]
        shares = self.decision.shares([each.step for each in taken], slowest(believed) * machine.default.slowdown)
        self.pace = by_turns(tuple(zip(taken, shares, strict=True)))
        machines = len(self.group.training)
        self.rate = machines / self.pace.step * job.share(machines)
        self._set_cycle(self.decision.interval_s)

    def _taken(self, caps: Mapping[int, Cap]) -> Pace:
        """Return the pace under caps of each believed grade."""
        group = self.group
        if self.scenario.job.synchronous:
            return paced(group.nodes, caps, self.scenario.machine.idle_w)
        return _alone(group, caps)

    def _situation(self, believed: dict[int, int]) -> Situation:
        job = self.scenario.job
        return Situation(
            believed,
            self._hazard_per_s(),
            job.noticed,
            self.scenario.machine,
            job.checkpoint,
            job.reform_s,
            job.overhead,
            job.synchronous,
        )

    def _hazard_per_s(self) -> float:
        """Return the interruptions to expect per second; of known lifetimes looked up anew every ten minutes."""
        lifetime = self.scenario.lifetime
        training = len(self.group.training)
        if lifetime is None:
            return self.hazard.per_s(self.now_s)
        if self.each_per_s is None and training:
            self.each_per_s = known_per_s(lifetime, self.group.ages_s(self.now_s, _DECIDE_S)) / training
        return (self.each_per_s or 0.0) * training

    def _set_cycle(self, every_s: float) -> None:
        """Go on with another interval; what was trained since the last checkpoint still counts."""
        if every_s == self.cycle.interval_s and self.at_s:
            return
        since_s = 0.0
        if self.at_s:
            since_s = min(self.cycle.undone_s(self.at_s), every_s)
        cost = self.scenario.job.checkpoint
        self.cycle = Cycle(every_s, cost.stall_s, cost.persist_s)
        self.at_s = since_s

    # -- time and joules

    def _ends_s(self) -> float:
        """Return when the work will be done if nothing happens."""
        left = self.scenario.job.work - self.work
        if not self.running or left == inf:
            return inf
        trained_s = self.cycle.trained_s(self.at_s) + left / self.rate
        return self.now_s + max(0.0, self.cycle.wall_s(trained_s) - self.at_s)

    def _go(self, time_s: float) -> None:
        """Account for the time up to a moment."""
        span_s = time_s - self.now_s
        if span_s <= 0:
            return
        group = self.group
        machine = self.scenario.machine
        numbers = len(group.starting), len(group.ready), len(group.training)
        self.machine_s += sum(numbers) * span_s
        if numbers[0]:
            self._spend(Use.STARTUP, numbers[0] * span_s, machine.idle_w)
        if numbers[1]:
            self._spend(Use.WAITING, numbers[1] * span_s, machine.idle_w)
        if self.running:
            self._trained(span_s)
        elif numbers[2]:
            self._stood(span_s, numbers[2])
        self.now_s = time_s

    def _stood(self, span_s: float, machines: int) -> None:
        """Account for a group that does not train: it writes its last checkpoint, then waits."""
        writing_s = min(span_s, self.writing_s)
        self.writing_s -= writing_s
        self._spend(Use.CHECKPOINT, machines * writing_s, self.scenario.machine.writing_w)
        self._spend(Use.WAITING, machines * (span_s - writing_s), self.scenario.machine.idle_w)

    def _trained(self, span_s: float) -> None:
        group = self.group
        pace = self.pace
        trained_s = self.cycle.trained_s(self.at_s + span_s) - self.cycle.trained_s(self.at_s)
        self.at_s += span_s
        self.work += trained_s * self.rate
        waiting = len(group.training) - pace.busy
        self._spend(Use.USEFUL, pace.busy * trained_s, (pace.power_w - pace.waiting_w) / pace.busy)
        if waiting > 0:
            self._spend(Use.WAITING, waiting * trained_s, pace.waiting_w / waiting)
        if span_s > trained_s:
            self._spend(Use.CHECKPOINT, len(group.training) * (span_s - trained_s), self.scenario.machine.writing_w)

    def _spend(self, use: Use, machine_s: float, power_w: float) -> None:
        self.ledger.spend(use, machine_s, power_w, self.scenario.price(self.now_s))

    def _undo(self) -> None:
        """Write work that a loss has undone under what is done again."""
        undone_s = self.cycle.undone_s(self.at_s)
        self.work = max(0.0, self.work - undone_s * self.rate)
        # The ledger has sums only, so undone joules are moved as a share of them.
        useful = self.ledger.by_use[Use.USEFUL]
        if useful.energy_j:
            lost_j = (self.pace.power_w - self.pace.waiting_w) * undone_s
            self.ledger.move(Use.USEFUL, Use.REDONE, min(1.0, lost_j / useful.energy_j))

    def _outcome(self, finished: bool) -> SimulatedOutcome:
        return SimulatedOutcome(
            self.scenario.policy.name,
            self.seed,
            self.now_s,
            finished,
            self.work,
            self.ledger,
            self.generation,
            self.interruptions,
            self.losses,
            self.machine_s / self.now_s if self.now_s else 0.0,
        )


def _alone(group: Group, caps: Mapping[int, Cap]) -> Pace:
    """Return the pace of nodes that do not wait for each other: a step is the mean one."""
    rate = power_w = 0.0
    for (known, true), number in group.nodes.items():
        cap = caps[known]
        rate += number / (cap.slowdown * of_grade(true))
        power_w += number * cap.power_w
    machines = len(group.training)
    return Pace(machines / rate, caps, power_w, float(machines), 0.0)
