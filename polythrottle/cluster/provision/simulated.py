"""A provider that rents out nothing: orders, start-ups and losses in virtual time, to rehearse with. Simulated."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import inf
from random import Random

from polythrottle.clock import Clock
from polythrottle.cluster.lifetime import KEPT, Lifetime, next_loss_s
from polythrottle.cluster.machine import Market
from polythrottle.cluster.provision.provider import Order, Rented, Stage
from polythrottle.errors import InvalidInput


@dataclass(frozen=True)
class _Life:
    """An order: when its machine is there, and when it is taken away or given back."""

    order: Order
    there_s: float
    lost_s: float
    ended_s: float = inf


@dataclass
class SimulatedProvider:
    """Gives every machine that is asked for, after a while, and takes spot machines away as their lifetime says.

    Attributes:
        clock: Virtual time.
        lifetime: How long a spot machine is kept; on-demand ones are kept for good.
        startup_s: From the order until the machine is there, in seconds, >= 0.
        most: How many it has at a time; further orders wait until one is given back or lost.
        seed: Of the lifetimes.
    """

    clock: Clock
    lifetime: Lifetime = KEPT
    startup_s: float = 90.0
    most: int = 1000
    seed: int = 0
    _lives: dict[str, _Life] = field(default_factory=dict, init=False)
    _queue: list[tuple[str, Order]] = field(default_factory=list, init=False)
    _count: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        if self.startup_s < 0 or self.most < 1:
            raise InvalidInput("a provider has at least one machine, and a start-up takes no negative time")
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
            ends_s = sorted(min(life.lost_s, life.ended_s) for life in self._lives.values())
            running = [end_s for end_s in ends_s if end_s > self.clock.now()]
            if len(running) >= self.most:
                return
            ticket, order = self._queue.pop(0)
            there_s = self.clock.now() + self.startup_s
            lifetime = self.lifetime if order.market is Market.SPOT else KEPT
            self._lives[ticket] = _Life(order, there_s, there_s + next_loss_s(lifetime, 0.0, 1 - self._chance.random()))

    def _rented(self, ticket: str, life: _Life) -> Rented:
        now_s, node = self.clock.now(), f"{life.order.machine or 'machine'}-{ticket}"
        if min(life.lost_s, life.ended_s) <= now_s:
            if life.ended_s < life.lost_s:
                return Rented(ticket, Stage.ENDED, reason="given back")
            return Rented(ticket, Stage.LOST, times_lost=1, reason="taken away (simulated)")
        if life.there_s > now_s:
            return Rented(ticket, Stage.WAITING, reason="starting")
        return Rented(ticket, Stage.RUNNING, node)
