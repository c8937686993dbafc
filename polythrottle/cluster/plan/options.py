"""What a plan chooses from: the work, the machines on offer, one way to do the work with them; and mixes of types.

A *mix* has machines of several types in one job: what a given one would take, cost and draw, at default caps. It is
simulated. Asynchronous workers go on at their own pace until the parameter server is full; how long it needs for a
step is fitted to the speed-ups of all types in the catalogue (`predict.completion`). In step, all wait for the slowest.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import exp, inf

from polythrottle.cluster.plan.costs import (
    ENERGY,
    Choice,
    Exposure,
    Spent,
    Terms,
    Weights,
    expect,
    intervals,
    losses_per_s,
)
from polythrottle.cluster.predict.completion import (
    ClusterJob,
    ClusterMember,
    Completion,
    DrawnSpread,
    asynchronous,
    complete,
    think_s,
)
from polythrottle.domain.errors import InvalidInput
from polythrottle.domain.fleet.transient_machine import (
    HOUR_S,
    KEPT,
    Cap,
    CheckpointCost,
    Lifetime,
    MachineType,
    Market,
    interval_s,
)

J_PER_KWH = 3.6e6


@dataclass(frozen=True)
class ServerRental:
    """Machines that are rented beside the workers and never taken away: parameter servers, a controller.

    Attributes:
        usd_per_h: Price of one per hour.
        power_w: Its mean power in watts.
        count: How many.
    """

    usd_per_h: float = 0.0
    power_w: float = 0.0
    count: int = 1

    @property
    def all_w(self) -> float:
        """Return the power of all of them in watts."""
        return self.power_w * self.count

    @property
    def all_usd_per_s(self) -> float:
        """Return the price of all of them per second."""
        return self.usd_per_h * self.count / HOUR_S


@dataclass(frozen=True)
class Work:
    """A training job.

    Attributes:
        name: What is trained.
        steps: Steps until it is done, of all machines together, > 0.
        cost: What one checkpoint costs.
        restart_s: How long all stand still after a loss until the rest train again, in seconds.
        undoes: Whether a loss undoes the work since the last checkpoint (synchronous training).
        noticed: Share of losses announced early enough to write a checkpoint first.
        server: What is rented beside the workers.
        usd_per_kwh: Price of energy, paid beside the rent; 0 where the rent includes it.
    """

    name: str
    steps: float
    cost: CheckpointCost
    restart_s: float = 0.0
    undoes: bool = True
    noticed: float = 0.0
    server: ServerRental = field(default_factory=ServerRental)
    usd_per_kwh: float = 0.0

    def __post_init__(self) -> None:
        if not self.steps > 0:
            raise InvalidInput(f"a job has more than 0 steps, not {self.steps:g}")
        if not 0 <= self.usd_per_kwh < inf:
            raise InvalidInput(f"a price of energy is at least 0 and finite, not {self.usd_per_kwh:g}")

    @property
    def usd_per_j(self) -> float:
        """Return the price of a joule."""
        return self.usd_per_kwh / J_PER_KWH


@dataclass(frozen=True)
class Offer:
    """A machine type on offer for a job.

    Attributes:
        machine: The type, with prices and caps.
        step_s: Time of a step of the job on one of them at the default cap, in seconds.
        speedups: Speed with 1, 2, … machines over that of one; its length is the most there may be.
        startup_s: From the order to the first step, in seconds.
        lifetime: How long a spot machine is kept.
        known: How the figures are known: ``price`` → ``recorded``, and so on.
    """

    machine: MachineType
    step_s: float
    speedups: tuple[float, ...] = (1.0,)
    startup_s: float = 0.0
    lifetime: Lifetime = KEPT
    known: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.step_s > 0 or self.startup_s < 0:
            raise InvalidInput(
                f"machine {self.machine.name!r} needs a positive step time and a start-up of at least 0 s"
            )
        if not self.speedups or not all(speedup > 0 for speedup in self.speedups):
            raise InvalidInput(f"machine {self.machine.name!r} needs positive speed-ups for 1, 2, … machines")

    def together_s(self, machines: int) -> float:
        """Return the time of a step of the job on several of them at the default cap, in seconds."""
        return self.step_s / self.speedups[machines - 1]

    def kept_in(self, market: Market) -> Lifetime:
        """Return how long one of them is kept: a spot machine for its lifetime, any other for good."""
        if market is Market.SPOT:
            return self.lifetime
        return KEPT


@dataclass(frozen=True)
class Option:
    """One way to do a job: so many machines of a type, a market, a cap and an interval; expectations are estimated.

    Attributes:
        work: The job.
        offer: The machines.
        market: How they are rented.
        machines: How many.
        choice: Cap and checkpoint interval, and what a step is expected to cost.
    """

    work: Work
    offer: Offer
    market: Market
    machines: int
    choice: Choice

    @property
    def usd_per_h(self) -> float:
        """Return the price of one machine per hour."""
        return self.offer.machine.usd_per_h[self.market]

    @property
    def lifetime(self) -> Lifetime:
        """Return how long one of the machines is kept."""
        return self.offer.kept_in(self.market)

    @property
    def time_s(self) -> float:
        """Return the expected time from the order to the last step, in seconds."""
        return self.offer.startup_s + self.work.steps * self.choice.time_s

    @cached_property
    def spent(self) -> Spent:
        """Return machine-seconds, joules and dollars expected, servers and the price of energy included."""
        each = self.choice.spent
        server = self.work.server
        steps = self.work.steps
        waited_s = self.offer.startup_s * self.machines
        energy_j = each.energy_j * steps + waited_s * self.offer.machine.idle_w + self.time_s * server.all_w
        rent_usd = each.usd * steps + waited_s * self.usd_per_h / HOUR_S + self.time_s * server.all_usd_per_s
        machine_s = each.machine_s * steps + waited_s + self.time_s * server.count
        return Spent(machine_s, energy_j, rent_usd + energy_j * self.work.usd_per_j)

    @property
    def aims(self) -> tuple[float, float, float]:
        """Return what is traded: expected time in seconds, dollars and joules."""
        return self.time_s, self.spent.usd, self.spent.energy_j


def terms_of(work: Work, offer: Offer, market: Market, machines: int) -> Terms:
    """Return what is given when cap and interval of so many machines are chosen.

    Losses are counted over the time the job would take without any, each machine newborn when it begins.
    """
    step_s = offer.together_s(machines)
    if market is Market.SPOT:
        lifetime = offer.lifetime
    else:
        lifetime = KEPT
    # A rate over seconds says nothing where a newborn machine is in most danger: a minute at least.
    span_s = max(work.steps * step_s, HOUR_S / 60)
    rate = machines * losses_per_s([(lifetime, 0.0)], span_s)
    exposure = Exposure(machines, rate, work.restart_s, offer.startup_s, work.noticed, work.undoes)
    return Terms(offer.machine, offer.machine.usd_per_h[market], exposure, work.cost, step_s)


def options(work: Work, offer: Offer, market: Market, machines: int, weights: Weights = ENERGY) -> tuple[Option, ...]:
    """Return one option per cap, each with the checkpoint interval that is best for what counts.

    Args:
        work: The job.
        offer: The machines.
        market: How they are rented.
        machines: How many.
        weights: What counts; what energy costs, and what servers draw and cost meanwhile, is added.
    """
    terms = terms_of(work, offer, market, machines)
    server = work.server
    per_j = weights.per_j + weights.per_usd * work.usd_per_j
    waiting = per_j * server.all_w + weights.per_usd * server.all_usd_per_s
    whole = replace(weights, per_j=per_j, per_s=weights.per_s + waiting)
    return tuple(Option(work, offer, market, machines, _best(terms, cap, whole)) for cap in offer.machine.caps)


def _best(terms: Terms, cap: Cap, weights: Weights) -> Choice:
    choices = [expect(terms, cap, every_s) for every_s in intervals(terms, cap)]
    return min(choices, key=lambda choice: (choice.value(weights), choice.time_s))


_SERVICES = 400
"""Service times tried, evenly from none to the longest at which the fastest cluster could still be that fast."""
_EVENTS = 20_000
_FEWEST = 30
_MOST_LOSSES = 2_000
_FIRST = 2
"""Outcomes drawn to see whether a job ends at all."""
_HOPELESS = 50.0


@dataclass(frozen=True)
class Part:
    """Like machines of a mix.

    Attributes:
        offer: Their type.
        market: How they are rented; their type has a price there.
        machines: How many, >= 1.
    """

    offer: Offer
    market: Market
    machines: int

    def __post_init__(self) -> None:
        name = self.offer.machine.name
        most = len(self.offer.speedups)
        if not 1 <= self.machines <= most:
            raise InvalidInput(f"a mix takes 1 to {most} of {name}, as many as the catalogue offers: {self.machines}")
        if self.market not in self.offer.machine.usd_per_h:
            raise InvalidInput(f"{name} has no price of {self.market}")

    @property
    def lifetime(self) -> Lifetime:
        """Return how long one of them is kept."""
        return self.offer.kept_in(self.market)

    @property
    def member(self) -> ClusterMember:
        """Return one of them as a member of a cluster."""
        machine = self.offer.machine
        return ClusterMember(self.lifetime, machine.usd_per_h[self.market], machine.default.power_w)


@dataclass(frozen=True)
class Mixed:
    """What a mix comes to.

    Attributes:
        parts: Its machines.
        steps_per_s: Speed of all of them together, predicted.
        interval_s: Training time between checkpoints in seconds; infinite where none is needed.
        ends: When the job ends, what it costs, its joules and losses; simulated, from the order on.
    """

    parts: tuple[Part, ...]
    steps_per_s: float
    interval_s: float
    ends: Completion


def mix(work: Work, offers: Sequence[Offer], parts: Sequence[Part], draws: int = 200, seed: int = 0) -> Mixed:
    """Return what a mix of machines comes to; a lost machine is replaced by one of its type.

    Args:
        work: The job.
        offers: All types whose speed-ups are known; the service time is fitted to them.
        parts: The machines.
        draws: How many outcomes at most.
        seed: Of the draws.

    Raises:
        InvalidInput: If there are no machines, or so many losses that the draws would never end.
    """
    each = [part for part in parts for _ in range(part.machines)]
    if not each:
        raise InvalidInput("a mix has at least one machine")
    speed = _speed(work, offers, [part.offer for part in each])
    together = speed(tuple(range(len(each))))
    span_s = work.steps / together
    hazard_per_s = losses_per_s([(part.lifetime, 0.0) for part in each], max(span_s, HOUR_S / 60))
    cost = CheckpointCost(work.cost.stall_s, work.cost.persist_s)
    if work.undoes:
        every_s = interval_s(cost, hazard_per_s, 1 / together)
    else:
        every_s = inf
    replace_s = max(part.offer.startup_s for part in each)
    longer = 1 + hazard_per_s * replace_s / len(each)
    if work.undoes and hazard_per_s:
        longer *= exp(min(_HOPELESS, hazard_per_s * (every_s + work.cost.stall_s + work.restart_s)))
    if (losses := hazard_per_s * span_s * longer) > _MOST_LOSSES:
        raise InvalidInput(f"a mix that would lose about {losses:.2g} machines on the way is not simulated")
    job = ClusterJob(
        steps=work.steps,
        members=tuple(part.member for part in each),
        speed=speed,
        fixed_usd_per_h=work.server.all_usd_per_s * HOUR_S,
        fixed_power_w=work.server.all_w,
        checkpoint_s=work.cost.stall_s,
        checkpoint_every_s=every_s,
        replace_s=replace_s,
        redone=work.undoes,
        regroup_s=work.restart_s if work.undoes else 0.0,
    )
    ends = complete(job, _FIRST, seed)
    if ends.finished:
        ends = complete(job, max(_FEWEST, min(draws, int(_EVENTS / max(1.0, losses)))), seed)
    return Mixed(tuple(parts), together, every_s, _ordered(work, each, ends))


def service_s(offers: Iterable[Offer]) -> float:
    """Return how long the parameter server needs for a step, in seconds: what explains the speed-ups best.

    Args:
        offers: Types with their speed-ups; even ones say that it is never full.
    """
    curves = [
        (1 / offer.step_s, machines, speedup / offer.step_s)
        for offer in offers
        for machines, speedup in enumerate(offer.speedups, 1)
        if machines > 1
    ]
    if not curves:
        return 0.0
    longest_s = 1 / max(together for _, _, together in curves)
    tried = (longest_s * index / _SERVICES for index in range(_SERVICES + 1))
    return min(tried, key=lambda one_s: sum(_miss(one_s, *point) ** 2 for point in curves))


def _miss(served_s: float, alone: float, machines: int, together: float) -> float:
    return asynchronous([think_s(alone, served_s)] * machines, served_s) / together - 1


def _speed(work: Work, offers: Sequence[Offer], each: Sequence[Offer]) -> Callable[[tuple[int, ...]], float]:
    """Return the speed of those machines that are there, given by their numbers."""
    if work.undoes:
        return lambda there: _in_step([each[index] for index in there])
    served_s = service_s(offers)
    thinks_s = [think_s(1 / offer.step_s, served_s) for offer in each]
    return lambda there: asynchronous([thinks_s[index] for index in there], served_s)


def _in_step(there: Sequence[Offer]) -> float:
    """Return the speed of machines with equal shares of each batch: the slowest's, by the worst of their scalings."""
    if not there:
        return 0.0
    count = len(there)
    known = [(offer.speedups, min(count, len(offer.speedups))) for offer in there]
    scaling = min(speedups[machines - 1] / machines for speedups, machines in known)
    return count * scaling / max(offer.step_s for offer in there)


def _ordered(work: Work, each: Sequence[Part], ends: Completion) -> Completion:
    """Return how a job ends counted from the order: start-ups of all and of successors are paid for, at idle power."""
    if ends.time_s is None or ends.usd is None or ends.energy_j is None or ends.losses is None:
        return ends
    start_s = max(part.offer.startup_s for part in each)
    again = ends.losses.mean / len(each)
    idle_w = sum(part.offer.machine.idle_w for part in each)
    usd_per_s = sum(part.member.usd_per_h for part in each) / HOUR_S
    energy_j = _more(ends.energy_j, start_s * (idle_w * (1 + again) + work.server.all_w))
    rent = _more(ends.usd, start_s * (usd_per_s * (1 + again) + work.server.all_usd_per_s))
    usd = DrawnSpread(*(a + b * work.usd_per_j for a, b in zip(_parts(rent), _parts(energy_j), strict=True)))
    return Completion(_more(ends.time_s, start_s), usd, energy_j, ends.losses, ends.finished)


def _more(spread: DrawnSpread, value: float) -> DrawnSpread:
    return DrawnSpread(*(one + value for one in _parts(spread)))


def _parts(spread: DrawnSpread) -> tuple[float, float, float]:
    return spread.mean, spread.low, spread.high
