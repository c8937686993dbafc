"""A provider that rents out nothing: orders, start-ups and losses in virtual time, to rehearse with. Simulated."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from random import Random

from polythrottle.domain.clock import Clock
from polythrottle.domain.errors import InvalidInput
from polythrottle.domain.fleet.transient_machine import KEPT, Lifetime, Market, Order, Rented, Stage, next_loss_s


@dataclass(frozen=True)
class _Life:
    """An order: when its machine is there, when it is taken away or given back, and when its time would be over."""

    order: Order
    there_s: float
    lost_s: float
    limit_s: float = inf
    ended_s: float = inf


@dataclass
class SimulatedProvider:
    """Gives every machine that is asked for, after a while, and takes spot machines away as their lifetime says.

    Attributes:
        clock: Virtual time.
        lifetime: How long a spot machine is kept; on-demand ones are kept for good.
        startup_s: From the order until the machine is there, in seconds, >= 0.
        most: How many it has at a time; further orders wait until one is given back or lost.
        seed: Of the lifetimes and start-ups.
        limit_s: Time after which every machine is taken back, known beforehand, in seconds.
        scatter: Standard deviation of the logarithm of start-up times, >= 0; with 0 all are alike.
    """

    clock: Clock
    lifetime: Lifetime = KEPT
    startup_s: float = 90.0
    most: int = 1000
    seed: int = 0
    limit_s: float = inf
    scatter: float = 0.0
    _lives: dict[str, _Life] = field(default_factory=dict, init=False)
    _queue: list[tuple[str, Order]] = field(default_factory=list, init=False)
    _count: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        if self.startup_s < 0 or self.most < 1 or self.scatter < 0 or self.limit_s <= 0:
            raise InvalidInput("a provider has at least one machine, and no time of it is negative")
        self._chance = Random(self.seed)

    def request(self, order: Order) -> str:
        """Ask for one machine and return the ticket of the order."""
        self._count += 1
        ticket = f"simulated-{self._count}"
        self._queue.append((ticket, order))
        self._serve()
        return ticket

    def seen(self) -> Mapping[str, Rented]:
        """Return every order by its ticket, as it is now."""
        self._serve()
        waiting = {
            ticket: Rented(ticket, Stage.WAITING, reason="the provider has no machine left")
            for ticket, _ in self._queue
        }
        return {**{ticket: self._rented(ticket, life) for ticket, life in self._lives.items()}, **waiting}

    def crowd(self) -> Sequence[float]:
        """Return how many orders wait, and how many machines are free."""
        self._serve()
        return float(len(self._queue)), float(self.most - len(self._running_until_s()))

    def dismiss(self, ticket: str) -> None:
        """Let a machine's work end, which takes no time here."""
        self.release(ticket)

    def release(self, ticket: str) -> None:
        """Give a machine back, or withdraw its order; nothing happens if that was done before."""
        self._queue = [each for each in self._queue if each[0] != ticket]
        life, now_s = self._lives.get(ticket), self.clock.now()
        if life is not None and min(life.lost_s, life.ended_s) > now_s:
            self._lives[ticket] = replace(life, ended_s=now_s)
        self._serve()

    def _serve(self) -> None:
        """Begin with waiting orders, first come first served, each at the moment a machine was free."""
        while self._queue:
            if len(self._running_until_s()) >= self.most:
                return
            ticket, order = self._queue.pop(0)
            there_s = self.clock.now() + self.startup_s * self._scattered()
            lifetime = self.lifetime if order.market is Market.SPOT else KEPT
            lost_s = there_s + next_loss_s(lifetime, 0.0, 1 - self._chance.random())
            limit_s = there_s + self.limit_s
            self._lives[ticket] = _Life(order, there_s, min(lost_s, limit_s), limit_s)

    def _scattered(self) -> float:
        return self._chance.lognormvariate(0.0, self.scatter) if self.scatter else 1.0

    def _running_until_s(self) -> list[float]:
        """Return when each machine that is there, or on its way, will go, in seconds."""
        ends_s = (min(life.lost_s, life.ended_s) for life in self._lives.values())
        return [end_s for end_s in ends_s if end_s > self.clock.now()]

    def _rented(self, ticket: str, life: _Life) -> Rented:
        now_s, node = self.clock.now(), f"{life.order.machine or 'machine'}-{ticket}"
        if min(life.lost_s, life.ended_s) <= now_s:
            if life.ended_s < life.lost_s:
                return Rented(ticket, Stage.ENDED, reason="given back")
            return Rented(ticket, Stage.LOST, times_lost=1, reason="taken away (simulated)")
        if life.there_s > now_s:
            return Rented(ticket, Stage.WAITING, reason="starting")
        return Rented(ticket, Stage.RUNNING, node, left_s=None if life.limit_s == inf else life.limit_s - now_s)
