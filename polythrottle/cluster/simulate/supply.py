"""Machines that come and go whatever the job does, as recorded or drawn from lifetimes: a stream of changes."""

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from math import inf
from random import Random
from typing import Protocol

from polythrottle.cluster.lifetime import HOUR_S, Lifetime, next_loss_s
from polythrottle.cluster.simulate.trace import Trace
from polythrottle.errors import InvalidInput

_SHORTEST_S = 1.0
"""No machine is taken away before it was there for a second: else virtual time would stand still."""


@dataclass(frozen=True)
class Change:
    """A machine is there, or is taken away.

    Attributes:
        time_s: When, in seconds of virtual time.
        machine: Its number; a machine that is taken away never comes back, its successor has a number of its own.
        there: Whether it comes.
    """

    time_s: float
    machine: int
    there: bool


class Supply(Protocol):
    """Where machines come from."""

    def changes(self, seed: int) -> Iterator[Change]:
        """Yield what happens in the order of time, without end unless nothing can happen any more."""


@dataclass(frozen=True)
class Recorded:
    """A recorded trace, replayed end to end.

    A record says how many machines were there, not which of them were lost: those are drawn, all alike. A fleet smaller
    than the record is a draw of its places; a larger one is several copies of it, each from another moment on.

    Attributes:
        trace: The record.
        machines: Places in the fleet, >= 1; how many are taken at a time is the record's.
        shifted: Whether to begin at a moment drawn by the seed instead of at the record's beginning.
    """

    trace: Trace
    machines: int
    shifted: bool = False

    def __post_init__(self) -> None:
        if self.machines < 1:
            raise InvalidInput(f"a fleet has at least one machine, not {self.machines}")

    def changes(self, seed: int) -> Iterator[Change]:
        """Yield the changes of every copy of the record in the order of time."""
        chance = Random(seed)
        left, numbers = self.machines, count()
        copies: list[Iterator[Change]] = []
        while left > 0:
            places = min(left, self.trace.most)
            begins_s = chance.random() * self.trace.ends_s if self.shifted or copies else 0.0
            copies.append(self._copy(Random(chance.random()), places, begins_s, numbers))
            left -= places
        return heapq.merge(*copies, key=lambda change: change.time_s)

    def _copy(self, chance: Random, places: int, begins_s: float, numbers: "count[int]") -> Iterator[Change]:
        """Yield the changes of some of the record's places, from a moment of it on."""
        mine = set(chance.sample(range(self.trace.most), places))
        there: list[int] = []  # the record's places that are filled
        empty = list(range(self.trace.most))
        filled: dict[int, int] = {}
        for time_s, wanted in self._counts(begins_s):
            while len(there) != wanted:
                source, target = (empty, there) if len(there) < wanted else (there, empty)
                place = _drawn(source, chance)
                target.append(place)
                if place in mine:
                    coming = target is there
                    filled[place] = next(numbers) if coming else filled[place]
                    yield Change(time_s, filled[place], coming)

    def _counts(self, begins_s: float) -> Iterator[tuple[float, int]]:
        """Yield when the number of machines is which, from a moment of the record on, at 0 s."""
        trace = self.trace
        yield 0.0, next(number for at_s, number in _backwards(trace) if at_s <= begins_s)
        for lap in count():
            if len(set(trace.counts)) == 1:  # nothing ever happens again
                return
            for at_s, number in zip(trace.times_s, trace.counts, strict=True):
                time_s = lap * trace.ends_s + at_s - begins_s
                if time_s > 0:
                    yield time_s, number


def _backwards(trace: Trace) -> Iterator[tuple[float, int]]:
    return zip(reversed(trace.times_s), reversed(trace.counts), strict=True)


def _drawn(places: list[int], chance: Random) -> int:
    """Take one place out of a list, in a time that does not depend on its length."""
    index = int(chance.random() * len(places))
    places[index], places[-1] = places[-1], places[index]
    return places.pop()


@dataclass(frozen=True)
class Fitted:
    """Machines with drawn lifetimes; a lost one is ordered again at once, and shocks take several together.

    Attributes:
        machines: Places in the fleet, >= 1.
        lifetime: How long a machine is kept.
        order_s: From the loss of a machine until its successor is there, in seconds.
        shocks_per_h: How often a shock comes, per hour.
        shock_share: Which share of the machines a shock takes, in [0, 1].
    """

    machines: int
    lifetime: Lifetime
    order_s: float = 90.0
    shocks_per_h: float = 0.0
    shock_share: float = 0.0

    def __post_init__(self) -> None:
        if self.machines < 1 or self.order_s < 0:
            raise InvalidInput("a fleet has at least one machine, and an order takes no negative time")
        if self.shocks_per_h < 0 or not 0 <= self.shock_share <= 1:
            raise InvalidInput("shocks come at no negative rate and take a share between 0 and 1")

    def changes(self, seed: int) -> Iterator[Change]:
        """Yield arrivals, losses and the losses of shocks in the order of time."""
        chance, machines = Random(seed), count()
        there: set[int] = set()
        coming: list[tuple[float, int]] = [(0.0, next(machines)) for _ in range(self.machines)]
        going: list[tuple[float, int]] = []
        shock_s = self._gap_s(chance)
        while (time_s := min(shock_s, *(heap[0][0] for heap in (coming, going) if heap))) < inf:
            if coming and coming[0][0] == time_s:
                _, machine = heapq.heappop(coming)
                there.add(machine)
                heapq.heappush(going, (time_s + self._life_s(chance), machine))
                yield Change(time_s, machine, True)
                continue
            if shock_s == time_s:
                lost = [machine for machine in sorted(there) if chance.random() < self.shock_share]
                shock_s = time_s + self._gap_s(chance)
            else:
                lost = [machine] if (machine := heapq.heappop(going)[1]) in there else []
            for machine in lost:
                there.discard(machine)
                heapq.heappush(coming, (time_s + self.order_s, next(machines)))
                yield Change(time_s, machine, False)

    def _life_s(self, chance: Random) -> float:
        return max(_SHORTEST_S, next_loss_s(self.lifetime, 0.0, 1 - chance.random()))

    def _gap_s(self, chance: Random) -> float:
        return chance.expovariate(self.shocks_per_h) * HOUR_S if self.shocks_per_h else inf
