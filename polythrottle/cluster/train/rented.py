"""A job whose nodes are rented: the controller runs here, each node is an order at a provider."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from polythrottle.clock import Clock, SystemClock
from polythrottle.cluster.provision.provider import Order, Provider, Rented, Stage
from polythrottle.cluster.train.engine import Engine
from polythrottle.errors import ClaimFailed, DeviceError

LOOK_S = 2.0
MOST_ORDERS = 5
"""Orders in a row that may end without a single step before the job is given up."""


@dataclass
class RentedNodes:
    """Keeps a number of nodes rented for a job until it has ended.

    A provider that brings a lost node back by itself (Slurm's requeue) shows its order as waiting; only an order that
    is lost or ended is placed again.

    Attributes:
        engine: Runs the controller; its nodes are not started here.
        count: Nodes that are wanted.
        order: What is asked for.
        clock: Waits.
    """

    engine: Engine
    count: int
    order: Order = field(default_factory=Order)
    clock: Clock = field(default_factory=SystemClock)
    _known: dict[str, Rented] = field(default_factory=dict)
    _wanted: set[str] = field(default_factory=set)
    _told: int = 0
    _in_vain: int = 0
    _looked_s: float = float("-inf")

    def run(
        self,
        rent: Callable[[], Provider],
        on_event: Callable[[Mapping[str, Any]], None],
        say: Callable[[str], object],
        ended: Callable[[], int | None],
    ) -> int:
        """Run the job to its end, give all nodes back, and return the controller's exit code.

        Args:
            rent: Returns the provider, once the controller can be reached.
            on_event: Told of everything that happens in the job, in order.
            say: Takes lines about orders.
            ended: Returns the controller's exit code, None while it runs.

        Raises:
            DeviceError: If the provider refuses the first orders.
            ClaimFailed: If orders end again and again before a step.
        """
        self.engine.start([])
        provider: Provider | None = None
        try:
            provider = rent()
            for _ in range(self.count):
                self._wanted.add(provider.request(self.order))
            while (code := ended()) is None:
                self.clock.sleep(0.2)
                self._follow(on_event)
                self._look(provider, say)
            self._follow(on_event)
            return code
        finally:
            if provider is not None:
                self._give_back(provider, say)
            self.engine.stop()

    def _follow(self, on_event: Callable[[Mapping[str, Any]], None]) -> None:
        events = self.engine.events()
        for event in events[self._told :]:
            on_event(event)
            if event["event"] == "first step":
                self._in_vain = 0
        self._told = len(events)

    def _look(self, provider: Provider, say: Callable[[str], object]) -> None:
        """See what became of the orders, and order again what will not come back."""
        if self.clock.now() - self._looked_s < LOOK_S:
            return
        self._looked_s = self.clock.now()
        try:
            seen = provider.seen()
            for ticket in sorted(self._wanted):
                self._consider(provider, seen[ticket], say)
        except DeviceError as error:
            say(f"{error}; training goes on, asking again")

    def _consider(self, provider: Provider, rented: Rented, say: Callable[[str], object]) -> None:
        before = self._known.get(rented.ticket)
        if before != rented:
            self._known[rented.ticket] = rented
            reason = f" ({rented.reason})" if rented.reason else ""
            where = f" on {rented.node}" if rented.node else ""
            say(f"order {rented.ticket} is {rented.stage}{where}{reason}")
        if rented.stage in {Stage.LOST, Stage.ENDED} and not self._over():
            if self._in_vain >= MOST_ORDERS:
                raise ClaimFailed(f"{MOST_ORDERS} orders in a row ended before a step; see the jobs' own output")
            self._in_vain += 1
            self._wanted.remove(rented.ticket)
            self._wanted.add(provider.request(self.order))

    def _over(self) -> bool:
        return any(event["event"] in {"finished", "failed"} for event in self.engine.events()[-50:])

    def _give_back(self, provider: Provider, say: Callable[[str], object]) -> None:
        for ticket in sorted(self._wanted):
            try:
                provider.release(ticket)
            except DeviceError as error:
                say(f"order {ticket} could not be given back: {error}")
