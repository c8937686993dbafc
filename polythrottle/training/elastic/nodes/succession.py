"""Which machine takes over from which, and when to order it: queue waits against the time left."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil, exp, log
from pathlib import Path
from statistics import fmean

from polythrottle.domain.errors import BadFile, InvalidInput
from polythrottle.domain.fleet.transient_machine import Rented, Stage
from polythrottle.storage.tables import read

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
