"""What a plan chooses from: the work, the machines on offer, and one way to do the work with them."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf

from polythrottle.cluster.ledger import Spent
from polythrottle.cluster.plan.power_caps import (
    ENERGY,
    Choice,
    Exposure,
    Terms,
    Weights,
    expect,
    intervals,
    losses_per_s,
)
from polythrottle.domain.errors import InvalidInput
from polythrottle.domain.fleet.transient_machine import HOUR_S, KEPT, Cap, CheckpointCost, Lifetime, MachineType, Market

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
        if self.market is Market.SPOT:
            return self.offer.lifetime
        return KEPT

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
