"""A job whose nodes are rented: each node is an order at a provider, and a successor is asked for before one ends.

The controller runs here. Which machine takes over from which, and when it is ordered, follows from waits in the queue
against the time left.
"""

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, exp, log
from pathlib import Path
from statistics import fmean
from typing import Any

from polythrottle.domain.clock import Clock, SystemClock
from polythrottle.domain.errors import BadFile, ClaimFailed, DeviceError, InvalidInput
from polythrottle.domain.fleet.transient_machine import Order, Provider, Rented, Stage
from polythrottle.storage.tables import read
from polythrottle.training.elastic.engines import Engine
from polythrottle.training.elastic.job_control import stopped_in_order
from polythrottle.training.elastic.membership import EventKind

# When to ask for a successor: regress the wait in the queue, compare it with the time left (Mirage, arXiv
# 2306.14086).
#
# A successor that comes early is paid for and draws power beside its predecessor (overlap); one that comes late
# leaves the job short of a machine (interruption). With a price on either, the best moment is a newsvendor's (Arrow,
# Harris and Marschak 1951): ask as soon as the chance to be late exceeds overlap's share of both prices.


@dataclass(frozen=True)
class Stakes:
    """What a second too early and a second too late cost.

    Attributes:
        overlap_usd_per_s: A successor that waits beside its predecessor: its rent and its energy.
        interruption_usd_per_s: A place that stands empty: what the lost progress is worth.
    """

    overlap_usd_per_s: float
    interruption_usd_per_s: float

    def __post_init__(self) -> None:
        if not (self.overlap_usd_per_s >= 0 and self.interruption_usd_per_s >= 0) or not self.both:
            raise InvalidInput("being early and being late cost at least 0, and not both nothing")

    @property
    def both(self) -> float:
        """Return the sum of the two."""
        return self.overlap_usd_per_s + self.interruption_usd_per_s

    @property
    def tolerable(self) -> float:
        """Return the chance to be late from which it is cheaper to ask now."""
        return self.overlap_usd_per_s / self.both


def stakes_of(
    usd_per_h: float, idle_w: float, usd_per_kwh: float, progress_usd_per_h: float | None = None, machines: int = 1
) -> Stakes:
    """Return the stakes of a machine.

    Args:
        usd_per_h: Its rent per hour.
        idle_w: Its power while it waits, in watts.
        usd_per_kwh: Price of energy.
        progress_usd_per_h: What an hour of its progress is worth; by default its rent, times all machines' where they
            wait for it.
        machines: Machines that stand still while its place is empty, itself included.
    """
    if progress_usd_per_h is None:
        progress = usd_per_h * machines
    else:
        progress = progress_usd_per_h
    return Stakes((usd_per_h + idle_w / 1000 * usd_per_kwh) / 3600, progress / 3600)


@dataclass(frozen=True)
class Waits:
    """How long a successor may take from its order to its first step, as a sample of times, all alike likely.

    Attributes:
        times_s: Rising times in seconds, >= 0.
    """

    times_s: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.times_s or list(self.times_s) != sorted(self.times_s) or self.times_s[0] < 0:
            raise InvalidInput("waits are at least one time of at least 0 s, in rising order")

    @classmethod
    def of(cls, times_s: Sequence[float]) -> "Waits":
        """Return the sample in any order."""
        return cls(tuple(sorted(times_s)))

    @property
    def mean_s(self) -> float:
        """Return the mean wait in seconds."""
        return sum(self.times_s) / len(self.times_s)

    def longer(self, time_s: float) -> float:
        """Return the chance to wait longer than a time in seconds."""
        return 1 - bisect_right(self.times_s, time_s) / len(self.times_s)

    def quantile_s(self, share: float) -> float:
        """Return the wait in seconds that a share of waits does not exceed."""
        return self.times_s[min(len(self.times_s), max(1, ceil(share * len(self.times_s) - 1e-9))) - 1]


def read_waits(path: Path, gpu: str = "") -> Waits:
    """Return the waits in a table: column ``wait_s``, or ``total_s`` as in ``gcp_startup_times_cmdare.csv``.

    Args:
        path: The table.
        gpu: Only rows of this GPU model, where the table has a column ``gpu`` with some of it; all otherwise.

    Raises:
        BadFile: If the file is no such table.
    """
    rows = list(read(path).rows())
    column = "total_s"
    if "wait_s" in rows[0].cells:
        column = "wait_s"
    if column not in rows[0].cells:
        raise BadFile(f"{path} has no column wait_s or total_s; waits are seconds from an order to a machine")
    mine = [row for row in rows if row.cells.get("gpu", "").lower() == gpu.lower()]
    return Waits.of([row.number(column, 0.0) for row in mine or rows])


def lead_s(waits: Waits, stakes: Stakes) -> float:
    """Return how long before the end of its predecessor a successor is best asked for, in seconds."""
    return waits.quantile_s(1 - stakes.tolerable)


def submit_now(left_s: float, waits: Waits, stakes: Stakes) -> bool:
    """Return whether to ask for the successor of a machine whose end is known: a wall-time limit, a notice.

    Args:
        left_s: Time left in seconds.
        waits: How long a successor takes.
        stakes: What being early and being late cost.
    """
    return waits.longer(left_s) >= stakes.tolerable or left_s <= 0


def expected_usd(ahead_s: float, waits: Waits, stakes: Stakes) -> float:
    """Return what asking so long ahead of a known end is expected to cost, in dollars."""
    return sum(_cost(ahead_s, wait_s, stakes) for wait_s in waits.times_s) / len(waits.times_s)


def _cost(left_s: float, wait_s: float, stakes: Stakes) -> float:
    early_s = left_s - wait_s
    if early_s > 0:
        return early_s * stakes.overlap_usd_per_s
    return -early_s * stakes.interruption_usd_per_s


@dataclass(frozen=True)
class WaitModel:
    """A regression of queue waits, in logarithms, on what can be seen of the queue.

    Attributes:
        weights: Of 1 and of the logarithm of 1 + each feature.
        residuals: Of the logarithm of 1 + wait, sorted: the spread that the features do not explain.
    """

    weights: tuple[float, ...]
    residuals: tuple[float, ...]

    @classmethod
    def fit(cls, features: Sequence[Sequence[float]], waits_s: Sequence[float]) -> "WaitModel":
        """Return the model of past orders, by least squares with a little ridge.

        Args:
            features: What was seen at each order, for example jobs waiting, machines free, machines asked for; >= 0.
            waits_s: How long each waited, in seconds, >= 0.

        Raises:
            InvalidInput: If there are fewer than three orders, their features differ in number, or one is negative.
        """
        if len(features) < 3 or len(features) != len(waits_s) or len({len(row) for row in features}) != 1:
            raise InvalidInput("a model of waits needs at least three orders, each with the same features and its wait")
        if any(value < 0 for row in (waits_s, *features) for value in row):
            raise InvalidInput("features of a queue and waits are at least 0")
        import numpy as np

        matrix = np.array([_logs(row) for row in features])
        target = np.log1p(np.array(waits_s, dtype=float))
        ridge = 1e-3 * len(target) * np.diag([0.0] + [1.0] * (matrix.shape[1] - 1))
        weights = np.linalg.lstsq(matrix.T @ matrix + ridge, matrix.T @ target, rcond=None)[0]
        residuals = sorted(float(value) for value in target - matrix @ weights)
        return cls(tuple(float(value) for value in weights), tuple(residuals))

    def waits(self, features: Sequence[float]) -> Waits:
        """Return how long an order may wait now.

        Raises:
            InvalidInput: If there are not as many features as the model was fitted with.
        """
        if len(features) + 1 != len(self.weights):
            raise InvalidInput(f"the model of waits takes {len(self.weights) - 1} features, not {len(features)}")
        middle = sum(weight * value for weight, value in zip(self.weights, _logs(features), strict=True))
        return Waits.of([max(0.0, exp(min(50.0, middle + rest)) - 1) for rest in self.residuals])


def _logs(row: Sequence[float]) -> list[float]:
    return [1.0, *(log(1 + value) for value in row)]


# Who is to take over from whom, and when to ask: waits as this job has measured them, compared with the time left.

ENOUGH = 8
"""Measured waits from which they are regressed on what was seen of the queue; fewer stand for themselves."""


@dataclass
class _Placed:
    """An order: when it was placed, what was seen of the queue then, when its node joined the job and when it ended."""

    asked_s: float
    crowd: tuple[float, ...]
    joined_s: float | None = None
    ended_s: float | None = None


@dataclass(frozen=True)
class Takeover:
    """A successor that has taken over.

    Attributes:
        order: The predecessor's ticket.
        successor: The successor's.
        overlap_s: How long both were there, in seconds.
        interruption_s: How long neither was, in seconds.
    """

    order: str
    successor: str
    overlap_s: float
    interruption_s: float


@dataclass
class Successions:
    """Orders of one job whose end is known, and who follows them.

    Attributes:
        late: The chance to be late that is tolerable, in (0, 1): asking later costs places that stand empty, asking
            sooner costs machines that wait.
    """

    late: float = 0.2
    _placed: dict[str, _Placed] = field(default_factory=dict)
    _heirs: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not 0 < self.late < 1:
            raise InvalidInput(f"the chance to be late is above 0 and below 100 %, not {self.late:.0%}")

    def placed(self, ticket: str, now_s: float, crowd: Sequence[float] = ()) -> None:
        """Note that an order was placed.

        Args:
            ticket: The provider's name for it.
            now_s: The time in seconds.
            crowd: What is seen of the queue.
        """
        self._placed[ticket] = _Placed(now_s, tuple(crowd))

    def joined(self, ticket: str, now_s: float) -> None:
        """Note that an order's node has joined the job; one that joined before the order was placed is another's."""
        order = self._placed.get(ticket)
        if order is not None and order.joined_s is None and now_s >= order.asked_s:
            order.joined_s = now_s

    def ended(self, ticket: str, now_s: float) -> None:
        """Note that an order has ended."""
        order = self._placed.get(ticket)
        if order is not None and order.ended_s is None:
            order.ended_s = now_s

    def has_heir(self, ticket: str) -> bool:
        """Return whether another order is to take over, or has."""
        return ticket in self._heirs

    @property
    def regresses(self) -> bool:
        """Return whether enough waits were measured to tell them by what is seen of the queue."""
        return sum(each.joined_s is not None for each in self._placed.values()) >= ENOUGH

    def waits(self, now_s: float, crowd: Sequence[float] = ()) -> Waits | None:
        """Return how long an order may take from now to its node's joining, None before one was measured.

        An order that still waits counts with its time so far where that is longer than usual.
        """
        known = [
            (each.crowd, each.joined_s - each.asked_s) for each in self._placed.values() if each.joined_s is not None
        ]
        if not known:
            return None
        times_s = [time_s for _, time_s in known]
        if self.regresses and crowd and {len(seen) for seen, _ in known} == {len(crowd)}:
            return WaitModel.fit([seen for seen, _ in known], times_s).waits(crowd)
        pending = [
            now_s - each.asked_s for each in self._placed.values() if each.joined_s is None and each.ended_s is None
        ]
        return Waits.of([*times_s, *(time_s for time_s in pending if time_s > fmean(times_s))])

    def is_due(self, rented: Rented, now_s: float, crowd: Sequence[float] = ()) -> bool:
        """Return whether to ask for the successor of an order now (Mirage: the wait reaches the time left)."""
        if rented.stage is not Stage.RUNNING or rented.left_s is None or self.has_heir(rented.ticket):
            return False
        waits = self.waits(now_s, crowd)
        return waits is not None and submit_now(rented.left_s, waits, Stakes(self.late, 1 - self.late))

    def succeed(self, ticket: str, heir: str) -> None:
        """Note that an order is to take over from another; one that takes a lost heir's place does so in its stead."""
        self._heirs[ticket] = heir

    def predecessor(self, heir: str) -> str | None:
        """Return whose successor an order is, None if it is none's or has taken over."""
        return next((ticket for ticket, each in self._heirs.items() if each == heir), None)

    def to_dismiss(self, now_s: float) -> list[str]:
        """Return the orders whose successors' nodes have joined: they need not stay to their end."""
        return [
            ticket
            for ticket, heir in self._heirs.items()
            if self._placed[ticket].ended_s is None and self._placed[heir].joined_s is not None
        ]

    def taken_over(self) -> list[Takeover]:
        """Return the successions that are done, each once."""
        done = [(old, heir) for old, heir in self._heirs.items() if self._is_done(old, heir)]
        for old, _ in done:
            del self._heirs[old]
        return [self._takeover(old, heir) for old, heir in done]

    def _is_done(self, old: str, heir: str) -> bool:
        return self._placed[old].ended_s is not None and self._placed[heir].joined_s is not None

    def _takeover(self, old: str, heir: str) -> Takeover:
        ended_s = self._placed[old].ended_s
        joined_s = self._placed[heir].joined_s
        assert ended_s is not None
        assert joined_s is not None
        return Takeover(old, heir, max(0.0, ended_s - joined_s), max(0.0, joined_s - ended_s))


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
        if self.successions is not None:
            crowd = provider.crowd()
        else:
            crowd = ()
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
