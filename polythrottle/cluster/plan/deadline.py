"""One machine and a deadline while spot comes and goes: when to rent on demand instead.

Replayed on recorded availability.
"""

import json
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import inf
from pathlib import Path
from typing import Any

from polythrottle.cluster.recorded_tables import read_trace
from polythrottle.domain.errors import BadFile, InvalidInput
from polythrottle.domain.fleet.transient_machine import Market
from polythrottle.storage.untrusted import MALFORMED, check_plain

# One machine, a deadline, spot that comes and goes: when to rent on demand instead.
#
# Uniform Progress is that of "Can't Be Late" (NSDI 2024), greedy the rule it is compared with there. Both are pure
# functions of what is known now, so a replay and a controller ask the very same ones.

_SLACK_FOR_GREEDY = 1.75
"""Deadline over work from which greedy costs less, unless spot is scarce; both published replays cross about here."""
_SCARCE = 0.3
"""Share of time with spot below which Uniform Progress costs less at any slack."""


@dataclass(frozen=True)
class Situation:
    """What is known when it is decided what to rent.

    Attributes:
        now_s: Time since the order, in seconds.
        done_s: Work done, in seconds of one machine.
        work_s: All the work, in seconds of one machine.
        deadline_s: When it has to be done, in seconds since the order.
        delay_s: How long a machine is paid for before it goes on with the work, in seconds.
        holding: What is rented now, None for nothing.
        spot: Whether a spot machine can be had now.
        margin_s: How much earlier to be careful, in seconds: the time until the next decision.
    """

    now_s: float
    done_s: float
    work_s: float
    deadline_s: float
    delay_s: float
    holding: Market | None
    spot: bool
    margin_s: float = 0.0

    @property
    def urgent(self) -> bool:
        """Return whether nothing but on-demand to the end is safe for one who waits: two changes are left at most."""
        left_s = self.deadline_s - self.now_s
        return left_s < self.work_s - self.done_s + 2 * self.delay_s + self.margin_s

    def expected_s(self, later_s: float = 0.0) -> float:
        """Return the work that uniform progress would have done so much later than now, in seconds."""
        return self.work_s * (self.now_s + later_s) / self.deadline_s


RentalPolicy = Callable[[Situation], Market | None]
"""What to hold next: a market, or None to wait without renting anything."""


def uniform_progress(seen: Situation) -> Market | None:
    """Return what Uniform Progress holds next, by its four rules.

    Spot is taken when there is some and kept until it is lost; with nothing, on-demand is taken when progress is behind
    the straight line to the deadline; on-demand is left for spot only when progress would still be on that line after
    two changes; when only on-demand to the end is safe, that.
    """
    if seen.holding is Market.SPOT and seen.spot:
        return Market.SPOT
    if seen.urgent:
        return Market.ON_DEMAND
    if seen.holding is Market.ON_DEMAND:
        ahead = seen.done_s >= seen.expected_s(2 * seen.delay_s + seen.margin_s)
        if seen.spot and ahead:
            return Market.SPOT
        return Market.ON_DEMAND
    if seen.spot:
        return Market.SPOT
    if seen.done_s < seen.expected_s():
        return Market.ON_DEMAND
    return None


def greedy(seen: Situation) -> Market | None:
    """Return what greedy holds next: spot whenever there is some, nothing otherwise, on-demand when it has to be."""
    if seen.holding is Market.SPOT and seen.spot:
        return Market.SPOT
    if seen.urgent or seen.holding is Market.ON_DEMAND:
        return Market.ON_DEMAND
    if seen.spot:
        return Market.SPOT
    return None


def policy_for(work_s: float, deadline_s: float, available: float) -> RentalPolicy:
    """Return the policy that costs less for a slack: Uniform Progress where it is small or spot is scarce.

    Args:
        work_s: All the work, in seconds of one machine.
        deadline_s: When it has to be done, in seconds since the order.
        available: Share of time with spot, as far as known.
    """
    roomy = deadline_s / work_s >= _SLACK_FOR_GREEDY
    if roomy and available >= _SCARCE:
        return greedy
    return uniform_progress


@dataclass(frozen=True)
class Availability:
    """When spot could be had, along time.

    Attributes:
        times_s: Rising times of the changes, in seconds; the first is 0.
        there: Whether there was some from each of them on.
        ends_s: How long the record is, in seconds.
    """

    times_s: tuple[float, ...]
    there: tuple[bool, ...]
    ends_s: float

    def __post_init__(self) -> None:
        if not self.times_s or self.times_s[0] != 0 or len(self.times_s) != len(self.there):
            raise InvalidInput("a record of availability begins at 0 s and says for each time whether spot was there")
        if any(a >= b for a, b in pairwise((*self.times_s, self.ends_s))):
            raise InvalidInput("the times of a record of availability rise")

    @classmethod
    def of_counts(
        cls, times_s: Sequence[float], counts: Sequence[int], ends_s: float, wanted: int = 1
    ) -> "Availability":
        """Return when at least so many machines could be had at once."""
        return cls(tuple(times_s), tuple(count >= wanted for count in counts), ends_s)

    def at(self, time_s: float) -> bool:
        """Return whether spot was there at a time in seconds; the record begins anew at its end."""
        return self.there[bisect_right(self.times_s, time_s % self.ends_s) - 1]

    @property
    def share(self) -> float:
        """Return the share of time with spot."""
        spans = [after - before for before, after in pairwise((*self.times_s, self.ends_s))]
        return sum(span for span, there in zip(spans, self.there, strict=True) if there) / self.ends_s


@dataclass(frozen=True)
class RentalReplay:
    """What a policy did on a record, simulated.

    Attributes:
        finished_s: When the work was done, in seconds since the order; infinite if it was given up.
        held_s: Seconds that machines were paid for, by market.
        changes: How often something else was rented.
        deadline_s: When it had to be done.
    """

    finished_s: float
    held_s: dict[Market, float]
    changes: int
    deadline_s: float

    @property
    def met(self) -> bool:
        """Return whether the deadline was met."""
        return self.finished_s <= self.deadline_s * (1 + 1e-9)

    def usd(self, usd_per_h: dict[Market, float]) -> float:
        """Return what it cost at prices per hour."""
        return sum(self.held_s[market] * usd_per_h[market] for market in Market) / 3600

    def energy_j(self, power_w: float) -> float:
        """Return the joules of what was rented, at a power in watts; while it waits it rents nothing."""
        return power_w * sum(self.held_s.values())


@dataclass
class _Job:
    """A replay under way."""

    done_s: float = 0.0
    holding: Market | None = None
    ready_s: float = 0.0
    changes: int = 0
    held_s: dict[Market, float] = field(default_factory=lambda: dict.fromkeys(Market, 0.0))


def replay(
    policy: RentalPolicy,
    record: Availability,
    work_s: float,
    deadline_s: float,
    delay_s: float,
    begin_s: float = 0.0,
    look_s: float = 300.0,
) -> RentalReplay:
    """Return what a policy does on a record of availability, decided anew at every look and every change.

    Args:
        policy: What to hold.
        record: When spot could be had.
        work_s: All the work, in seconds of one machine.
        deadline_s: When it has to be done, in seconds since the order; at least the work and one change.
        delay_s: How long a machine is paid for before it goes on, in seconds.
        begin_s: When the order is, on the record.
        look_s: Time between looks, in seconds.

    Raises:
        InvalidInput: If not even on-demand from the beginning meets the deadline.
    """
    if deadline_s < work_s + delay_s or min(work_s, look_s) <= 0 or delay_s < 0:
        raise InvalidInput(
            f"{work_s / 3600:.4g} h of work and {delay_s:.4g} s of start cannot be done in {deadline_s / 3600:.4g} h"
        )
    job = _Job()
    now_s = 0.0
    # A policy of the user's own may never rent anything.
    while now_s < 10 * deadline_s:
        spot = record.at(begin_s + now_s)
        # The record says that it was taken away; whoever holds it is not asked.
        if job.holding is Market.SPOT and not spot:
            job.holding = None
        situation = Situation(now_s, job.done_s, work_s, deadline_s, delay_s, job.holding, spot, look_s)
        _take(job, policy(situation), now_s, delay_s)
        until_s = _next_look_s(record, begin_s + now_s, look_s) - begin_s
        if job.holding:
            ends_s = max(now_s, job.ready_s) + work_s - job.done_s
        else:
            ends_s = inf
        _hold(job, now_s, min(until_s, ends_s))
        if ends_s <= until_s:
            return RentalReplay(ends_s, job.held_s, job.changes, deadline_s)
        now_s = until_s
    return RentalReplay(inf, job.held_s, job.changes, deadline_s)


def _take(job: _Job, wanted: Market | None, now_s: float, delay_s: float) -> None:
    if wanted is not job.holding:
        job.changes += wanted is not None
        job.holding = wanted
        # Paid from the order on, useful only once it has started.
        job.ready_s = now_s + delay_s


def _hold(job: _Job, now_s: float, until_s: float) -> None:
    if job.holding is not None:
        job.held_s[job.holding] += until_s - now_s
        job.done_s += max(0.0, until_s - max(now_s, job.ready_s))


def _next_look_s(record: Availability, at_s: float, look_s: float) -> float:
    """Return the time of the next change of the record, or of the next look if that is sooner."""
    # A record of two weeks has to serve longer jobs: it begins anew at its end.
    lap_s = at_s // record.ends_s * record.ends_s
    index = bisect_right(record.times_s, at_s - lap_s)
    change_s = lap_s + (record.times_s[index] if index < len(record.times_s) else record.ends_s)
    if change_s > at_s:
        return min(at_s + look_s, change_s)
    return at_s + look_s


# When spot machines could be had, from a recorded cluster or from a trace of SkyPilot's, read in place.

_MOST_POINTS = 5_000_000
_LONGEST_S = 100 * 365.25 * 86400


def read_availability(path: Path, machines: int = 1) -> Availability:
    """Return when at least so many machines could be had at once.

    Args:
        path: A table with the columns time_s and n_nodes, or JSON as in github.com/skypilot-org/spot-traces: an object
            with ``metadata`` and its ``gap_seconds``, and ``data``, one number of machines (or 0 and 1) per gap.
        machines: How many are wanted.

    Raises:
        BadFile: If it is neither.
    """
    if path.suffix.lower() == ".json":
        return _of_json(path, machines)
    trace = read_trace(path)
    _check_length(path, trace.ends_s)
    return Availability.of_counts(trace.times_s, trace.counts, trace.ends_s, machines)


def _check_length(path: Path, length_s: float) -> None:
    if length_s > _LONGEST_S:
        raise BadFile(f"{path} is no trace of availability: it lasts {length_s:.3g} s, more than a century")


def _of_json(path: Path, machines: int) -> Availability:
    check_plain(path)
    try:
        document: Any = json.loads(path.read_text(encoding="utf-8"))
        gap_s = float(document["metadata"]["gap_seconds"])
        data = document["data"]
        counts = [_count(value) for value in data]
    except OSError as error:
        raise BadFile(f"cannot read the trace {path}: {error.strerror}") from error
    except MALFORMED as error:
        raise BadFile(
            f"{path} is no trace of availability: it needs metadata.gap_seconds, a number, and data, a list of whole"
            " numbers of at least 0"
        ) from error
    if not 0 < gap_s < 1e9 or not 0 < len(counts) < _MOST_POINTS:
        raise BadFile(f"{path} is no trace of availability: a gap above 0 s and at least one point are needed")
    _check_length(path, len(counts) * gap_s)
    # A point per gap would be millions in a trace of minutes; only changes matter.
    kept = [index for index, count in enumerate(counts) if not index or count != counts[index - 1]]
    times_s = [index * gap_s for index in kept]
    try:
        return Availability.of_counts(times_s, [counts[index] for index in kept], len(counts) * gap_s, machines)
    except InvalidInput as error:
        raise BadFile(f"{path} is no trace of availability: {error}") from error


def _count(value: object) -> int:
    """Return a number of machines.

    Raises:
        ValueError: If it is not valid.
    """
    if not isinstance(value, int | float) or value != int(value) or value < 0:
        raise ValueError(value)
    return int(value)
