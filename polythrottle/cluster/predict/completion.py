"""A whole job on machines that may be lost: when it ends, what it costs, the joules, each with its spread.

Drawn many times with fixed seeds: every machine lives as long as its lifetime says, the others go on at their speed, a
successor comes after a while if one is asked for. CM-DARE's closed form for one loss is here too.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from math import ceil, inf
from random import Random
from statistics import fmean, quantiles

from polythrottle.cluster.lifetime import HOUR_S, Lifetime, next_loss_s
from polythrottle.errors import InvalidInput

Speed = Callable[[tuple[int, ...]], float]
"""Speed in steps per second of those members that are there, given by their numbers, rising."""

_MOST_EVENTS = 100_000


@dataclass(frozen=True)
class Member:
    """One place in a cluster.

    Attributes:
        lifetime: How long machines are kept there.
        usd_per_h: Price of the machine per hour.
        power_w: Power while it trains, in watts, or None where unknown: then the job's joules are too.
    """

    lifetime: Lifetime
    usd_per_h: float
    power_w: float | None = None


@dataclass(frozen=True)
class Job:
    """What is to be done, and by whom.

    Attributes:
        steps: Training steps in all.
        members: The places.
        speed: What those that are there do.
        fixed_usd_per_h: Price per hour of machines that are never lost, such as parameter servers.
        fixed_power_w: Their power in watts, or None.
        checkpoint_s: How long one checkpoint stops all, in seconds.
        checkpoint_every_s: Training between two of them, in seconds; infinite for none.
        replace_s: From a loss to the first step of a successor, in seconds; None: it is not replaced.
        redone: Whether a loss throws all back to the last checkpoint, as a barrier does; asynchronous workers go on.
        regroup_s: How long a loss or a join stops all, in seconds.
    """

    steps: float
    members: tuple[Member, ...]
    speed: Speed
    fixed_usd_per_h: float = 0.0
    fixed_power_w: float | None = 0.0
    checkpoint_s: float = 0.0
    checkpoint_every_s: float = inf
    replace_s: float | None = None
    redone: bool = False
    regroup_s: float = 0.0

    def __post_init__(self) -> None:
        if not (self.steps > 0 and self.members and self.checkpoint_every_s > 0):
            raise InvalidInput("a job has steps, members, and time between checkpoints")
        if not self.speed(tuple(range(len(self.members)))) > 0:
            raise InvalidInput("a job's members together make more than 0 steps/s")


@dataclass(frozen=True)
class Spread:
    """What a quantity comes to over all draws: its mean, and the bounds that 5 and 95 % of the draws stay under."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class Completion:
    """How a job ends; estimated.

    Attributes:
        time_s: When, in seconds from its start.
        usd: What it costs.
        energy_j: Joules of all machines, or None where a power is not known.
        losses: Machines lost on the way.
        finished: Share of the draws that ended; the rest lost every machine, and count in no other figure.
    """

    time_s: Spread | None
    usd: Spread | None
    energy_j: Spread | None
    losses: Spread | None
    finished: float


def complete(job: Job, draws: int = 400, seed: int = 0) -> Completion:
    """Return how a job ends, from many draws.

    Raises:
        InvalidInput: If there are no draws.
    """
    if draws < 1:
        raise InvalidInput("a spread needs at least one draw")
    drawn = [one for index in range(draws) if (one := _Drawn(job, Random(f"{seed}/{index}")).go()) is not None]
    known = job.fixed_power_w is not None and all(member.power_w is not None for member in job.members)
    if not drawn:
        return Completion(None, None, None, None, 0.0)
    time_s, usd, energy_j, losses = (_spread(column) for column in zip(*drawn, strict=True))
    return Completion(time_s, usd, energy_j if known else None, losses, len(drawn) / draws)


def _spread(values: Sequence[float]) -> Spread:
    cuts = quantiles(values, n=20, method="inclusive") if len(values) > 1 else [values[0]] * 19
    return Spread(fmean(values), cuts[0], cuts[-1])


class _Drawn:
    """One draw: an event loop over losses and joins."""

    def __init__(self, job: Job, random: Random) -> None:
        self.job, self.random = job, random
        self.now_s, self.done, self.losses = 0.0, 0.0, 0
        self.usd, self.energy_j = 0.0, 0.0
        self.there = set(range(len(job.members)))
        self.stopped_s, self.since_s = 0.0, 0.0
        self.events = [(self._life_s(index), index, False) for index in self.there]
        heapify(self.events)

    def go(self) -> tuple[float, float, float, float] | None:
        for _ in range(_MOST_EVENTS):
            at_s, index, joins = heappop(self.events) if self.events else (inf, -1, False)
            if self._trained_until(at_s):
                return self.now_s, self.usd, self.energy_j, float(self.losses)
            if at_s == inf:
                return None
            self._changed(index, joins)
        return None

    def _life_s(self, index: int) -> float:
        return self.now_s + next_loss_s(self.job.members[index].lifetime, 0.0, 1.0 - self.random.random())

    def _changed(self, index: int, joins: bool) -> None:
        self.stopped_s = self.job.regroup_s
        if joins:
            self.there.add(index)
            heappush(self.events, (self._life_s(index), index, False))
            return
        self.there.discard(index)
        self.losses += 1
        if self.job.redone:
            self.done -= self.since_s * self._rate((*sorted({*self.there, index}),))
            self.since_s = 0.0
        if self.job.replace_s is not None:
            heappush(self.events, (self.now_s + self.job.replace_s, index, True))

    def _rate(self, there: tuple[int, ...]) -> float:
        every_s = self.job.checkpoint_every_s
        share = 1.0 if every_s == inf else every_s / (every_s + self.job.checkpoint_s)
        return self.job.speed(there) * share if there else 0.0

    def _trained_until(self, at_s: float) -> bool:
        """Train up to a moment, or to the end if that is sooner; return whether it was."""
        idle_s = min(self.stopped_s, at_s - self.now_s)
        self._spend(idle_s)
        self.stopped_s -= idle_s
        rate = self._rate(tuple(sorted(self.there)))
        need_s = (self.job.steps - self.done) / rate if rate else inf
        span_s = min(need_s, at_s - self.now_s)
        if span_s == inf:
            return False
        self._spend(span_s)
        self.done += span_s * rate
        self.since_s = (self.since_s + span_s) % self.job.checkpoint_every_s
        return need_s <= span_s

    def _spend(self, span_s: float) -> None:
        if span_s == inf:
            return
        here = [self.job.members[index] for index in self.there]
        self.now_s += span_s
        self.usd += span_s / HOUR_S * (self.job.fixed_usd_per_h + sum(one.usd_per_h for one in here))
        self.energy_j += span_s * ((self.job.fixed_power_w or 0.0) + sum(one.power_w or 0.0 for one in here))


def published_s(
    steps: float, speeds_per_s: Sequence[float], checkpoint: tuple[float, float], losses: float, replace_s: float
) -> float:
    """Return CM-DARE's estimate of the time of a job: T = N/Σv + ⌈N/I⌉ × T_checkpoint + N_losses × T_replacement.

    Args:
        steps: N.
        speeds_per_s: v of each worker, in steps per second.
        checkpoint: I in steps, and the time of one in seconds.
        losses: Expected losses.
        replace_s: Time of a replacement in seconds.
    """
    every, time_s = checkpoint
    return steps / sum(speeds_per_s) + ceil(steps / every) * time_s + losses * replace_s


def after_loss_s(steps_left: float, old_per_s: float, new_per_s: float, wait_s: float) -> float:
    """Return what is left of a job when a machine was lost and its successor is awaited (CM-DARE's ``predict``).

    Args:
        steps_left: Steps to do.
        old_per_s: Speed of those that are left, in steps per second.
        new_per_s: Speed once the successor trains too, > 0.
        wait_s: Until then, in seconds.
    """
    if old_per_s * wait_s >= steps_left:
        return steps_left / old_per_s
    return wait_s + steps_left / new_per_s - wait_s * old_per_s / new_per_s
