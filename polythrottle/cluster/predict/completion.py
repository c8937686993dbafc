"""How fast a cluster trains, and when its whole job ends on machines that may be lost.

Seconds, dollars, joules with their spread.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from math import inf
from random import Random
from statistics import fmean, quantiles

from polythrottle.cluster.conditions import drawn_changes
from polythrottle.domain.errors import InvalidInput
from polythrottle.domain.fleet.transient_machine import HOUR_S, Lifetime

# How fast a cluster trains: workers that share parameter servers, or that wait for each other at a barrier.
#
# Asynchronous workers and parameter servers are a closed queueing network: a worker computes for its think time, then
# needs a service. Few workers go at their own pace, 1/(think + service); many go at the servers', 1/service. In
# between they queue, the more smoothly the fewer workers fill the servers (Reiser and Lavenberg 1980, doi
# 10.1145/322186.322195). The sharpness of the knee is taken as their number to the power 3/4: one figure for CM-
# DARE's curves and ICAC's jobs.

KNEE = 0.75
ROUND_TRIPS = 2.4
"""Round trips to a parameter server per step: fitted to CM-DARE's rows with 30 ms between K80 workers and server."""


def think_s(steps_per_s: float, service_s: float, distance_s: float = 0.0) -> float:
    """Return the time of a step that a worker spends by itself, from its speed alone with a server.

    Args:
        steps_per_s: Its speed alone, > 0.
        service_s: What the server took of each of those steps, in seconds.
        distance_s: Round-trip time between worker and servers where it will train, beyond that of the measurement.

    Raises:
        InvalidInput: If the speed is not positive.
    """
    if not steps_per_s > 0:
        raise InvalidInput(f"a worker's speed is above 0 steps/s, not {steps_per_s}")
    return max(1 / steps_per_s - service_s, 0.05 / steps_per_s) + ROUND_TRIPS * distance_s


def asynchronous(thinks_s: Sequence[float], service_s: float) -> float:
    """Return the speed of workers that share servers, each going on without the others, in steps per second.

    Args:
        thinks_s: Time of a step that each worker spends by itself, in seconds; workers may differ.
        service_s: Time of a service in seconds; 0 for servers that are never full.

    Returns:
        The smooth minimum of the sum of the workers' speeds and of what the servers can take; 0 without workers.
    """
    # Faster workers fill the server more often, so speeds are added, not times averaged.
    alone = sum(1 / (one + service_s) for one in thinks_s)
    if not alone or not service_s:
        return alone
    load = alone * service_s
    # A hard minimum would be exact only for clockwork: random arrivals queue well before the server is full.
    sharpness = max(1.0, len(thinks_s) / load) ** KNEE
    return float(alone / (1 + load**sharpness) ** (1 / sharpness))


# A whole job on machines that may be lost: when it ends, what it costs, the joules, each with its spread.
#
# Drawn many times with fixed seeds: every machine lives as long as its lifetime says, the others go on at their
# speed, a successor comes after a while if one is asked for. CM-DARE's closed form for one loss is here too.

Speed = Callable[[tuple[int, ...]], float]
"""Speed in steps per second of those members that are there, given by their numbers, rising."""

_MOST_EVENTS = 100_000


@dataclass(frozen=True)
class ClusterMember:
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
class ClusterJob:
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
    members: tuple[ClusterMember, ...]
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
class DrawnSpread:
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

    time_s: DrawnSpread | None
    usd: DrawnSpread | None
    energy_j: DrawnSpread | None
    losses: DrawnSpread | None
    finished: float


def complete(job: ClusterJob, draws: int = 400, seed: int = 0) -> Completion:
    """Return how a job ends, from many draws.

    Raises:
        InvalidInput: If there are no draws.
    """
    if draws < 1:
        raise InvalidInput("a spread needs at least one draw")
    # Each draw has a seed of its own, so that more draws repeat the first ones and plans can be compared draw by draw.
    drawn = [one for index in range(draws) if (one := _Drawn(job, Random(f"{seed}/{index}")).go()) is not None]
    known = job.fixed_power_w is not None and all(member.power_w is not None for member in job.members)
    if not drawn:
        return Completion(None, None, None, None, 0.0)
    time_s, usd, energy_j, losses = (_spread(column) for column in zip(*drawn, strict=True))
    return Completion(time_s, usd, energy_j if known else None, losses, len(drawn) / draws)


def _spread(values: Sequence[float]) -> DrawnSpread:
    if len(values) > 1:
        cuts = quantiles(values, n=20, method="inclusive")
    else:
        cuts = [values[0]] * 19
    return DrawnSpread(fmean(values), cuts[0], cuts[-1])


class _Drawn:
    """One draw: losses and joins by turns with training.

    Machines come and go as in a simulated fleet (`drawn_changes`). Training differs from `job_simulator` on purpose:
    members may be of any kinds, of which only their speed together is known, and nobody learns, caps or decides.
    """

    def __init__(self, job: ClusterJob, random: Random) -> None:
        self.job = job
        self.random = random
        self.now_s = 0.0
        self.done = 0.0
        self.losses = 0
        self.usd = 0.0
        self.energy_j = 0.0
        self.there = set(range(len(job.members)))
        self.stopped_s = 0.0
        self.since_s = 0.0

    def go(self) -> tuple[float, float, float, float] | None:
        """Return seconds, dollars, joules and losses until the work is done; None where it never would be."""
        order_s = inf
        if self.job.replace_s is not None:
            order_s = self.job.replace_s
        changes = drawn_changes([member.lifetime for member in self.job.members], order_s, self.random)
        # All are there when the job begins.
        later = islice(changes, len(self.job.members), None)
        # Machines that live for seconds and are replaced at once would let a draw go on for ever.
        for change, place in islice(later, _MOST_EVENTS):
            if self._trained_until(change.time_s):
                return self._outcome()
            self._changed(place, change.there)
        # Nothing happens any more: whoever is there ends it, or nobody does.
        if next(later, None) is None and self._trained_until(inf):
            return self._outcome()
        return None

    def _outcome(self) -> tuple[float, float, float, float]:
        return self.now_s, self.usd, self.energy_j, float(self.losses)

    def _changed(self, place: int, joins: bool) -> None:
        self.stopped_s = self.job.regroup_s
        if joins:
            self.there.add(place)
            return
        self.there.discard(place)
        self.losses += 1
        if self.job.redone:
            # At the speed before the loss, since that is what the work was done at.
            self.done -= self.since_s * self._rate((*sorted({*self.there, place}),))
            self.since_s = 0.0

    def _rate(self, there: tuple[int, ...]) -> float:
        every_s = self.job.checkpoint_every_s
        # Checkpoints are spread evenly instead of being events: a draw then has tens of events, not thousands.
        share = 1.0
        if every_s != inf:
            share = every_s / (every_s + self.job.checkpoint_s)
        if there:
            return self.job.speed(there) * share
        return 0.0

    def _trained_until(self, at_s: float) -> bool:
        """Train up to a moment, or to the end if that is sooner; return whether it was."""
        # Machines are paid for while a group is formed anew, though nothing is trained.
        idle_s = min(self.stopped_s, at_s - self.now_s)
        self._spend(idle_s)
        self.stopped_s -= idle_s
        rate = self._rate(tuple(sorted(self.there)))
        if rate:
            need_s = (self.job.steps - self.done) / rate
        else:
            need_s = inf
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
