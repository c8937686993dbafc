"""The training job that is simulated, and the machines that come and go under it, recorded or drawn from lifetimes."""

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from math import inf
from random import Random
from typing import Protocol

from polythrottle.cluster.recorded_tables import Trace
from polythrottle.domain.errors import InvalidInput
from polythrottle.domain.fleet.transient_machine import CheckpointCost, Lifetime, next_loss_s

# The training job that is simulated: how much work, what interrupts it, and what an interruption takes.

MEASURED = CheckpointCost(1.03, 6.67)
"""A checkpoint of 204 MB: on the local disk, and after that until it is in the bucket (CM-DARE's files)."""


@dataclass(frozen=True)
class SimulatedJob:
    """A data-parallel training job on however many machines there are.

    The times have measured defaults: a checkpoint of 204 MB takes 1.03 s on the local disk and 7.7 s until it is in
    the bucket, and a new machine's framework and data 79 s (CM-DARE's files); torchrun forms a smaller or larger group
    in 7.8 s (measured, TorchElastic with a keep-alive of 1 s).

    Attributes:
        work: What is to be done, in seconds of one machine in the middle of its type at its default clock; infinite to
            train for as long as the simulation lasts.
        checkpoint: What one checkpoint costs.
        reform_s: How long all stand still when the group is formed anew, in seconds.
        cold_s: From a machine's being there until it can join, in seconds.
        noticed: Share of losses that are announced early enough to write a checkpoint first, in [0, 1].
        synchronous: Whether all wait for the slowest at each step; else each goes at its own speed (asynchronous, with
            a parameter server that is not taken away), and a loss undoes nothing.
        overhead: Largest share of the time that checkpoints may stop training.
        speedups: Speed with 1, 2, … machines over that of one, where it is known; a larger group keeps the last one's
            speed per machine. None given is even scaling.
        verify_s: Training time after which a newcomer is calibrated: two or three windows of steps, in seconds.
    """

    work: float = inf
    checkpoint: CheckpointCost = MEASURED
    reform_s: float = 7.8
    cold_s: float = 79.0
    noticed: float = 0.0
    synchronous: bool = True
    overhead: float = 0.035
    verify_s: float = 60.0
    speedups: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        times = (self.reform_s, self.cold_s, self.verify_s)
        if self.work <= 0 or not all(0 <= each < inf for each in times):
            raise InvalidInput("a job has work to do, and its times are at least 0 and finite")
        if not 0 <= self.noticed <= 1:
            raise InvalidInput(f"the share of announced losses is in [0, 1], not {self.noticed}")
        if not 0 < self.overhead <= 1:
            raise InvalidInput(f"the share that checkpoints may take is in (0, 1], not {self.overhead}")

    def share(self, machines: int) -> float:
        """Return what each of so many machines does of what it would do alone."""
        if not self.speedups:
            return 1.0
        known = min(machines, len(self.speedups))
        return self.speedups[known - 1] / known


# Machines that come and go whatever the job does, as recorded or drawn from lifetimes: a stream of changes.

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
class RecordedSupply:
    """A recorded trace, replayed end to end.

    A record says how many machines were there, not which of them were lost: those are drawn, all alike. A fleet smaller
    than the record is a draw of its places; a larger one is several copies of it, each from another moment on.

    Attributes:
        trace: The record.
        machines: Places in the fleet, >= 1; how many are taken at a time is the record's.
    """

    trace: Trace
    machines: int

    def __post_init__(self) -> None:
        if self.machines < 1:
            raise InvalidInput(f"a fleet has at least one machine, not {self.machines}")

    def changes(self, seed: int) -> Iterator[Change]:
        """Yield the changes of every copy of the record in the order of time."""
        chance = Random(seed)
        left = self.machines
        numbers = count()
        copies: list[Iterator[Change]] = []
        while left > 0:
            places = min(left, self.trace.most)
            begins_s = 0.0
            if copies:
                begins_s = chance.random() * self.trace.ends_s
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
class DrawnSupply:
    """Machines with drawn lifetimes; a lost one is ordered again at once.

    Attributes:
        machines: Places in the fleet, >= 1.
        lifetime: How long a machine is kept.
        order_s: From the loss of a machine until its successor is there, in seconds.
    """

    machines: int
    lifetime: Lifetime
    order_s: float = 90.0

    def __post_init__(self) -> None:
        if self.machines < 1 or self.order_s < 0:
            raise InvalidInput("a fleet has at least one machine, and an order takes no negative time")

    def changes(self, seed: int) -> Iterator[Change]:
        """Yield arrivals and losses in the order of time."""
        chance = Random(seed)
        machines = count()
        coming: list[tuple[float, int]] = [(0.0, next(machines)) for _ in range(self.machines)]
        going: list[tuple[float, int]] = []
        while (time_s := min(heap[0][0] for heap in (coming, going) if heap)) < inf:
            if coming and coming[0][0] == time_s:
                _, machine = heapq.heappop(coming)
                heapq.heappush(going, (time_s + self._life_s(chance), machine))
                yield Change(time_s, machine, True)
            else:
                _, machine = heapq.heappop(going)
                heapq.heappush(coming, (time_s + self.order_s, next(machines)))
                yield Change(time_s, machine, False)

    def _life_s(self, chance: Random) -> float:
        return max(_SHORTEST_S, next_loss_s(self.lifetime, 0.0, 1 - chance.random()))
