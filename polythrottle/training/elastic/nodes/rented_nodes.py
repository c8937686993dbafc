"""A job whose nodes are rented: the controller runs here, each node is an order at a provider."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from polythrottle.domain.clock import Clock, SystemClock
from polythrottle.domain.errors import ClaimFailed, DeviceError
from polythrottle.domain.fleet.transient_machine import Order, Provider, Rented, Stage
from polythrottle.training.elastic.engines import Engine
from polythrottle.training.elastic.launcher import stopped_in_order
from polythrottle.training.elastic.membership import EventKind
from polythrottle.training.elastic.nodes.succession import Successions

LOOK_S = 2.0
MOST_ORDERS = 5
"""Orders in a row that may end without a single step before the job is given up."""


def _unheard(words: Mapping[str, Any]) -> None:
    """Tell nobody."""


@dataclass
class RentedNodes:
    """Keeps a number of nodes rented for a job until it has ended.

    A provider that brings a lost node back by itself (Slurm's requeue) shows its order as waiting; only an order that
    is lost or ended is placed again. Where a provider ends orders at a known time, a successor is asked for before.

    Attributes:
        engine: Runs the controller; its nodes are not started here.
        count: Nodes that are wanted.
        order: What is asked for.
        clock: Waits.
        successions: When to ask for successors; None for never.
        note: Told of each successor that was asked for or has taken over, for the job's events.
        seen: Events that a former launcher saw: no news, and no reason to act.
    """

    engine: Engine
    count: int
    order: Order = field(default_factory=Order)
    clock: Clock = field(default_factory=SystemClock)
    successions: Successions | None = None
    note: Callable[[Mapping[str, Any]], object] = _unheard
    seen: int = 0
    _known: dict[str, Rented] = field(default_factory=dict)
    _arrived: dict[str, float] = field(default_factory=dict)
    _wanted: set[str] = field(default_factory=set)
    _dismissed: set[str] = field(default_factory=set)
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
        providers: list[Provider] = []

        def stop() -> None:
            for each in providers:
                self._give_back(each, say)
            self.engine.stop()

        with stopped_in_order(stop, say):
            self.engine.start([])
            providers.append(rent())
            for _ in range(self.count):
                self._ask(providers[0])
            while (code := ended()) is None:
                self.clock.sleep(0.2)
                self._follow(on_event)
                self._look(providers[0], say)
            self._follow(on_event)
            return code

    def _ask(self, provider: Provider) -> str:
        """Place an order and return its ticket."""
        crowd = provider.crowd() if self.successions is not None else ()
        ticket = provider.request(self.order)
        self._wanted.add(ticket)
        if self.successions is not None:
            self.successions.placed(ticket, self.clock.now(), crowd)
        return ticket

    def _follow(self, on_event: Callable[[Mapping[str, Any]], None]) -> None:
        events = self.engine.events()
        for event in events[self.seen :]:
            on_event(event)
            if event["event"] == "first step":
                self._in_vain = 0
            if event["event"] == EventKind.JOINED:
                self._arrived[str(event["node"])] = self.clock.now()
        self.seen = len(events)

    def _look(self, provider: Provider, say: Callable[[str], object]) -> None:
        """See what became of the orders, order again what will not come back, and ask for successors in time."""
        if self.clock.now() - self._looked_s < LOOK_S:
            return
        self._looked_s = self.clock.now()
        try:
            standing = provider.seen()
            for ticket in sorted(self._wanted):
                self._consider(provider, standing[ticket], say)
                self._welcome(standing[ticket])
            if self.successions is not None and not self._over():
                self._succeed(provider, self.successions, say)
        except DeviceError as error:
            say(f"{error}; training goes on, asking again")

    def _consider(self, provider: Provider, rented: Rented, say: Callable[[str], object]) -> None:
        before = self._known.get(rented.ticket)
        self._known[rented.ticket] = rented
        if before is None or (before.stage, before.node, before.reason) != (rented.stage, rented.node, rented.reason):
            reason = ""
            if rented.reason:
                reason = f" ({rented.reason})"
            where = ""
            if rented.node:
                where = f" on {rented.node}"
            say(f"order {rented.ticket} is {rented.stage}{where}{reason}")
        if rented.stage in {Stage.LOST, Stage.ENDED} and not self._over():
            self._replace(provider, rented.ticket)

    def _welcome(self, rented: Rented) -> None:
        """Note when an order's node joined the job, which may be before its provider was seen to have started it."""
        arrived_s = self._arrived.get(f"{rented.node}-{rented.ticket}", self._arrived.get(rented.node))
        if self.successions is not None and rented.stage is Stage.RUNNING and arrived_s is not None:
            self.successions.joined(rented.ticket, arrived_s)

    def _replace(self, provider: Provider, ticket: str) -> None:
        """Order again what has ended, unless a successor was asked for before."""
        held = self.successions
        if held is not None:
            held.ended(ticket, self.clock.now())
            if held.has_heir(ticket):
                self._wanted.remove(ticket)
                return
        if self._in_vain >= MOST_ORDERS:
            raise ClaimFailed(f"{MOST_ORDERS} orders in a row ended before a step; see the jobs' own output")
        self._in_vain += 1
        self._wanted.remove(ticket)
        fresh = self._ask(provider)
        predecessor = None
        if held is not None:
            predecessor = held.predecessor(ticket)
        if held is not None and predecessor is not None:
            held.succeed(predecessor, fresh)

    def _succeed(self, provider: Provider, held: Successions, say: Callable[[str], object]) -> None:
        now_s = self.clock.now()
        crowd = provider.crowd() if held.regresses else ()
        for ticket in sorted(self._wanted):
            rented = self._known.get(ticket)
            if rented is not None and held.is_due(rented, now_s, crowd):
                heir = self._ask(provider)
                held.succeed(ticket, heir)
                self.note({"done": False, "order": ticket, "successor": heir, "left_s": rented.left_s})
        for ticket in held.to_dismiss(now_s):
            if ticket not in self._dismissed:
                self._dismissed.add(ticket)
                say(f"order {ticket} may go: its successor's node has joined")
                provider.dismiss(ticket)
        for done in held.taken_over():
            times = {"overlap_s": done.overlap_s, "interruption_s": done.interruption_s}
            self.note({"done": True, "order": done.order, "successor": done.successor, **times})

    def _over(self) -> bool:
        return any(event["event"] in {"finished", "failed"} for event in self.engine.events()[-50:])

    def _give_back(self, provider: Provider, say: Callable[[str], object]) -> None:
        for ticket in sorted(self._wanted):
            try:
                provider.release(ticket)
            except DeviceError as error:
                say(f"order {ticket} could not be given back: {error}")
