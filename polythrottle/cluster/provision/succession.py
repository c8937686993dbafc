"""Who is to take over from whom, and when to ask: waits as this job has measured them, compared with the time left."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean

from polythrottle.cluster.provision.provider import Rented, Stage
from polythrottle.cluster.provision.successor import Stakes, WaitModel, Waits, submit_now
from polythrottle.errors import InvalidInput

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
        ended_s, joined_s = self._placed[old].ended_s, self._placed[heir].joined_s
        assert ended_s is not None
        assert joined_s is not None
        return Takeover(old, heir, max(0.0, ended_s - joined_s), max(0.0, joined_s - ended_s))
