"""Which ways to do a job are worth choosing from: the Pareto front over time, dollars and joules.

Seeded draws of how each may turn out.
"""

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import ceil, inf, sqrt
from random import Random
from statistics import NormalDist

from polythrottle.cluster.plan.costs import COST, ENERGY, TIME, Use
from polythrottle.cluster.plan.options import Offer, Option, Work, options, terms_of
from polythrottle.domain.backports import StrEnum
from polythrottle.domain.errors import InvalidInput, SloUnmet
from polythrottle.domain.fleet.transient_machine import HOUR_S, Market

# How a job may turn out: seeded draws of its losses, walked through with the same rules as the expectations.

_EVENTS = 20_000
"""Losses, or machines that join, walked through for one option; a job with many takes fewer draws, for its spread is
small."""
_FEWEST = 30
_MANY_LOSSES = 2_000
"""With more losses than this in one job their number is taken for normal, and none is walked through."""
_GIVEN_UP = 100 * _MANY_LOSSES
_FOREVER_S = 1e12


@dataclass(frozen=True)
class SampledOutcome:
    """How a job turned out once, simulated.

    Attributes:
        time_s: From the order to the last step, in seconds.
        usd: What it cost.
        energy_j: Joules, servers included.
        losses: Machines taken away.
    """

    time_s: float
    usd: float
    energy_j: float
    losses: int


@dataclass(frozen=True)
class Outlook:
    """How a job may turn out, simulated.

    Attributes:
        outcomes: One per draw; a single one where nothing is left to chance.
    """

    outcomes: tuple[SampledOutcome, ...]

    def chance(self, deadline_s: float = inf, usd: float = inf) -> float:
        """Return the share of draws that end, by a deadline in seconds and within a budget in dollars."""
        ended = [each for each in self.outcomes if each.time_s < inf]
        kept = sum(each.time_s <= deadline_s and each.usd <= usd for each in ended)
        return kept / len(self.outcomes)

    def quantile(self, what: str, share: float) -> float:
        """Return the value that a share of draws does not exceed.

        Args:
            what: ``time_s``, ``usd``, ``energy_j`` or ``losses``.
            share: In (0, 1].
        """
        values = sorted(getattr(each, what) for each in self.outcomes)
        return float(values[min(len(values), max(1, ceil(share * len(values) - 1e-9))) - 1])

    def mean(self, what: str) -> float:
        """Return the mean of ``time_s``, ``usd``, ``energy_j`` or ``losses``."""
        return float(sum(getattr(each, what) for each in self.outcomes) / len(self.outcomes))

    def error(self, what: str) -> float:
        """Return the standard error of that mean."""
        mean = self.mean(what)
        count = len(self.outcomes)
        spread = sum((getattr(each, what) - mean) ** 2 for each in self.outcomes)
        return sqrt(spread / max(1, count - 1) / count)


def outlook(option: Option, seed: int = 0, draws: int = 200, patience: float = 20.0) -> Outlook:
    """Return how an option may turn out.

    Args:
        option: Machines, market, cap and interval.
        seed: Of the draws: the same seed gives the same answer.
        draws: How many at most.
        patience: A draw is given up, as never ending, after so many times the expected time.
    """
    if option.choice.time_s == inf:
        return Outlook((SampledOutcome(inf, inf, inf, 0),))
    # Nothing is ever lost on demand, so one draw is all draws.
    if option.lifetime.survival(_FOREVER_S) == 1:
        return Outlook((_Walk(option, Random(seed), inf).outcome(),))
    losses = expected_losses(option)
    # Walking through them would take minutes, and so many losses spread like a normal distribution anyway.
    if losses > _MANY_LOSSES:
        return _settled(option, losses)
    # The same work for each option: those that lose much are drawn less often, and vary less.
    count = max(_FEWEST, min(draws, int(_EVENTS / max(1.0, losses, option.machines))))
    random = Random(seed)
    # A draw that loses machines as fast as it works would go on for ever; it counts as never ending.
    limit_s = patience * option.time_s
    return Outlook(tuple(_Walk(option, random, limit_s).outcome() for _ in range(count)))


def expected_losses(option: Option) -> float:
    """Return how many machines the job is expected to lose, estimated."""
    hazard = terms_of(option.work, option.offer, option.market, option.machines).exposure.hazard_per_s
    return hazard * option.work.steps * option.choice.time_s


def _settled(option: Option, losses: float) -> Outlook:
    """Return the outlook of a job with very many losses: what is lost with them is normal, by the central limit."""
    useful = option.choice.parts[Use.USEFUL].machine_s / option.choice.spent.machine_s
    spread = (1 - useful) * sqrt(2 / losses)  # the work a loss undoes is about uniform, the time between exponential
    normal = NormalDist(1.0, max(spread, 1e-9))
    factors = [normal.inv_cdf((index + 0.5) / 99) for index in range(99)]
    time_s, usd, energy_j = option.aims
    return Outlook(tuple(SampledOutcome(time_s * by, usd * by, energy_j * by, round(losses * by)) for by in factors))


@dataclass
class _Walk:
    """One draw: machines are lost and replaced; work is done, written down and undone."""

    option: Option
    random: Random
    limit_s: float
    now_s: float = 0.0
    resume_s: float = 0.0
    done: float = 0.0
    secured: float = 0.0
    phase_s: float = 0.0
    energy_j: float = 0.0
    losses: int = 0
    events: list[tuple[float, bool]] = field(default_factory=list)

    def outcome(self) -> SampledOutcome:
        """Return how the draw ends: when all is done, or without end where it was given up."""
        for _ in range(self.option.machines):
            self._rent(0.0)
        alive = 0
        while (ends_s := self._ends(alive)) > (self.events[0][0] if self.events else inf):
            if self.now_s > self.limit_s or self.losses > _GIVEN_UP:
                ends_s = inf
                break
            at_s, joins = heapq.heappop(self.events)
            self._train(at_s, alive)
            alive += 1 if joins else -1
            if not joins:
                self._lose(at_s)
        if ends_s < inf:
            self._train(ends_s, alive)
        return self._written(ends_s)

    def _written(self, ends_s: float) -> SampledOutcome:
        option = self.option
        server = self.option.work.server
        # Every place is rented until the end, since a lost machine is ordered again at once.
        rent_usd = ends_s * (option.machines * option.usd_per_h / HOUR_S + server.all_usd_per_s)
        energy_j = self.energy_j + ends_s * server.all_w
        return SampledOutcome(ends_s, rent_usd + energy_j * option.work.usd_per_j, energy_j, self.losses)

    def _rent(self, at_s: float) -> None:
        """Order a machine: its life begins now; one that is lost before its first step is ordered again."""
        startup_s = self.option.offer.startup_s
        while (
            lost_s := self.option.lifetime.quantile_s(1 - self.random.random())
        ) < startup_s and at_s <= self.limit_s:
            at_s += lost_s
            self.losses += 1
        heapq.heappush(self.events, (at_s + startup_s, True))
        if lost_s < inf:
            # Never before it joined, or rounding could lose a machine that is not there.
            heapq.heappush(self.events, (at_s + max(lost_s, startup_s), False))

    def _lose(self, at_s: float) -> None:
        work = self.option.work
        self.losses += 1
        if work.undoes:
            # With a notice in time a last checkpoint is written, so that nothing is undone, only delayed.
            if self.random.random() < work.noticed:
                self.secured = self.done
                self.resume_s = max(self.resume_s, at_s) + work.cost.stall_s
            self.done = self.secured
            self.phase_s = 0.0
            self.resume_s = max(self.resume_s, at_s + work.restart_s)
        self._rent(at_s)

    def _step_s(self, alive: int) -> float:
        return self.option.offer.together_s(alive) * self.option.choice.cap.slowdown

    def _cycle_s(self) -> tuple[float, float]:
        """Return the training time between checkpoints, and how long one stops it."""
        every_s = self.option.choice.interval_s
        if every_s < inf:
            return (every_s, self.option.work.cost.stall_s)
        return (1e18, 0.0)

    def _ends(self, alive: int) -> float:
        """Return when the last step would end if nothing happened any more."""
        if alive <= 0:
            return inf
        every_s, stall_s = self._cycle_s()
        target_s = min(self.phase_s, every_s) + (self.option.work.steps - self.done) * self._step_s(alive)
        # No checkpoint after the last step: the job is done.
        full = max(0, ceil(target_s / every_s - 1e-9) - 1)
        return max(self.now_s, self.resume_s) + full * (every_s + stall_s) + target_s - full * every_s - self.phase_s

    def _train(self, until_s: float, alive: int) -> None:
        """Go on until a moment, in seconds, with so many machines."""
        begin_s = min(max(self.now_s, self.resume_s), max(until_s, self.now_s))
        span_s = 0.0
        if alive > 0:
            span_s = max(0.0, until_s - begin_s)
        every_s, stall_s = self._cycle_s()
        full, rest_s = divmod(self.phase_s + span_s, every_s + stall_s)
        had_s = min(self.phase_s, every_s)
        trained_s = full * every_s + min(rest_s, every_s) - had_s
        # What was trained since the last whole checkpoint is not safe yet.
        if full and alive > 0:
            self.secured = self.done + (full * every_s - had_s) / self._step_s(alive)
        if alive > 0:
            self.done += trained_s / self._step_s(alive)
        self.phase_s = rest_s
        self._burn(until_s, alive, trained_s, span_s - trained_s)
        self.now_s = max(self.now_s, until_s)

    def _burn(self, until_s: float, alive: int, trained_s: float, written_s: float) -> None:
        machine = self.option.offer.machine
        whole_s = max(0.0, until_s - self.now_s)
        waited_s = max(0.0, whole_s - trained_s - written_s)
        power = alive * (self.option.choice.cap.power_w * trained_s + machine.writing_w * written_s)
        idle_s = alive * waited_s + (self.option.machines - alive) * whole_s
        self.energy_j += power + machine.idle_w * idle_s


# Which ways to do a job are worth choosing from: the Pareto front over time, dollars and joules, with its chances.

_LOOKED_AT = 60
"""Options of the front whose outlook is drawn, those with the smallest expected aim first."""

_EVERY = 24
_LARGE_RATIO = 11.0
_SPANS = ((86400.0, "d"), (3600.0, "h"), (60.0, "min"))


class Aim(StrEnum):
    """What is to be as small as possible."""

    ENERGY = "energy"
    COST = "cost"
    TIME = "time"


_WEIGHTS = {Aim.ENERGY: ENERGY, Aim.COST: COST, Aim.TIME: TIME}


@dataclass(frozen=True)
class Limits:
    """What a plan has to keep to.

    Attributes:
        deadline_s: From the order to the last step, in seconds.
        budget_usd: What it may cost.
        chance: How likely both have to be kept, in (0, 1].
    """

    deadline_s: float = inf
    budget_usd: float = inf
    chance: float = 0.95

    def __post_init__(self) -> None:
        if not (self.deadline_s > 0 and self.budget_usd > 0 and 0 < self.chance <= 1):
            raise InvalidInput("a deadline and a budget are above 0, and a chance is above 0 and at most 100%")


@dataclass(frozen=True)
class Planned:
    """An option and how it may turn out.

    Attributes:
        option: The way to do the job.
        outlook: How it may turn out.
        limits: What was to be kept.
    """

    option: Option
    outlook: Outlook
    limits: Limits

    @property
    def chance(self) -> float:
        """Return how likely it keeps both limits."""
        return self.outlook.chance(self.limits.deadline_s, self.limits.budget_usd)

    @property
    def time_s(self) -> float:
        """Return the time that is kept with the chance asked for, in seconds."""
        return self.outlook.quantile("time_s", self.limits.chance)

    @property
    def usd(self) -> float:
        """Return the cost that is kept with the chance asked for."""
        return self.outlook.quantile("usd", self.limits.chance)

    @property
    def feasible(self) -> bool:
        """Return whether both limits are kept as likely as asked for."""
        return self.chance >= self.limits.chance

    @property
    def excess(self) -> float:
        """Return by what share the worse of the two limits is missed; not above 0 where none is."""
        # The quotient of two infinite limits would be no number.
        if self.time_s == inf:
            return inf
        return max(self.time_s / self.limits.deadline_s, self.usd / self.limits.budget_usd) - 1


@dataclass(frozen=True)
class Plan:
    """What was found.

    Attributes:
        front: Options none of which is beaten in time, dollars and joules at once, by rising aim.
        chosen: The one with the smallest aim that keeps the limits, None if none does.
        nearest: The one that misses the limits by least.
        fastest: The one that ends soonest, with the chance asked for.
        cheapest: The one that costs least, with the chance asked for.
        considered: How many options there were.
    """

    front: tuple[Planned, ...]
    chosen: Planned | None
    nearest: Planned
    fastest: Planned
    cheapest: Planned
    considered: int

    def missed(self) -> str:
        """Return which limit cannot be kept and by how much, as a sentence; empty where a plan was found."""
        limits = self.nearest.limits
        if self.chosen is not None:
            return ""
        sure = f"with a chance of {100 * limits.chance:.4g}%"
        if self.fastest.time_s == inf:
            return f"no plan ends {sure}: machines are lost nearly as fast as work is done"
        if alone := [*self._late(), *self._dear()]:
            first, *more = alone
            return "; nor ".join([f"no plan {first[0]} {sure}: {first[1]}", *(f"{how}: {what}" for how, what in more)])
        near = self.nearest
        return (
            f"deadline and budget can each be kept but not both {sure}: the nearest plan takes "
            f"{_by(near.time_s, limits.deadline_s, _span)} and costs {_by(near.usd, limits.budget_usd, _money)}"
            f"; its chance is {near.chance:.0%}"
        )

    def _late(self) -> Iterator[tuple[str, str]]:
        """Yield what no plan does and by how much the fastest fails, if none keeps the deadline alone."""
        limit_s = self.nearest.limits.deadline_s
        least_s = self.fastest.time_s
        if least_s > limit_s:
            yield "ends by the deadline", f"the fastest takes {_by(least_s, limit_s, _span)}"

    def _dear(self) -> Iterator[tuple[str, str]]:
        """Yield the same of the budget."""
        limit_usd = self.nearest.limits.budget_usd
        least_usd = self.cheapest.usd
        if least_usd > limit_usd:
            yield "keeps the budget", f"the cheapest costs {_by(least_usd, limit_usd, _money)}"


def _by(value: float, limit: float, shown: Callable[[float], str]) -> str:
    if value <= limit:
        return shown(value)
    # Above tenfold a percentage is hard to read.
    ratio = value / limit
    if ratio < _LARGE_RATIO:
        over = f"{ratio - 1:.1%} over the"
    else:
        over = f"{ratio:.3g} times the"
    return f"{shown(value)}, {over} {shown(limit)} allowed"


def _span(time_s: float) -> str:
    for unit_s, name in _SPANS:
        if time_s >= 2 * unit_s:
            return f"{time_s / unit_s:.4g} {name}"
    return f"{time_s:.4g} s"


def _money(usd: float) -> str:
    return f"{usd:.4g} usd"


def every_option(
    work: Work,
    offers: Iterable[Offer],
    markets: Sequence[Market] = tuple(Market),
    most: int | None = None,
    aim: Aim = Aim.ENERGY,
    told: Callable[[int, int], None] = lambda done, total: None,
) -> list[Option]:
    """Return every type, market, number of machines and cap, each with its best checkpoint interval.

    Args:
        work: The job.
        offers: What is on offer; a market without a price is left out.
        markets: Which markets may be used.
        most: The most machines, or None for what each offer allows.
        aim: What checkpoint intervals are best for: joules, dollars or seconds.
        told: Called with how many types, markets and numbers are done, of how many.

    Returns:
        Those that end; empty where nothing has a price in these markets.

    Raises:
        SloUnmet: If none of several would ever end.
    """
    ways = [
        (offer, market, machines)
        for offer in offers
        for market in markets
        if market in offer.machine.usd_per_h
        for machines in _counts(min(most or len(offer.speedups), len(offer.speedups)))
    ]
    every: list[Option] = []
    for done, (offer, market, machines) in enumerate(ways, 1):
        every += options(work, offer, market, machines, _WEIGHTS[aim])
        told(done, len(ways))
    ending = [option for option in every if option.time_s < inf]
    if every and not ending:
        raise SloUnmet("no plan ever ends: machines are lost faster than a step and its checkpoint can be done")
    return ending


def _counts(most: int) -> list[int]:
    """Return the numbers of machines to consider: every one up to 24, then a twentieth apart, and the most."""
    # A large cluster differs little from one with a machine more, and each costs a search for its interval.
    counts = list(range(1, min(most, _EVERY) + 1))
    while counts[-1] < most:
        counts.append(min(most, max(counts[-1] + 1, round(counts[-1] * 1.05))))
    return counts


def front_of(found: Sequence[Option]) -> list[Option]:
    """Return the options that no other beats in time, dollars and joules at once, each market for itself.

    A spot option that is better on average may still be worse with a deadline, so on-demand ones stay beside it.
    """
    # Per market, since dominance is in means and a deadline is kept or missed in the tails.
    kept: list[Option] = []
    for market in Market:
        front: list[Option] = []
        for option in sorted((each for each in found if each.market is market), key=lambda each: each.aims):
            aims = option.aims
            if not any(all(a <= b for a, b in zip(other.aims, aims, strict=True)) for other in front):
                front.append(option)
        kept += front
    return kept


def plan(
    found: Sequence[Option],
    limits: Limits,
    aim: Aim = Aim.COST,
    seed: int = 0,
    draws: int = 200,
    told: Callable[[int, int], None] = lambda done, total: None,
) -> Plan:
    """Return the front of options with their chances, and the best that keeps the limits.

    Args:
        found: The options.
        limits: Deadline, budget, and how likely they have to be kept.
        aim: What is to be small.
        seed: Of the draws.
        draws: How many per option.
        told: Called with how many outlooks are drawn, of how many.

    Raises:
        InvalidInput: If there is no option at all.
    """
    if not found:
        raise InvalidInput(
            "there is nothing to choose from: no machine on offer has a price in a market that is allowed"
        )
    front = _worth_looking_at(front_of(found), limits, aim)
    planned = []
    for done, option in enumerate(front, 1):
        planned.append(Planned(option, outlook(option, seed, draws), limits))
        told(done, len(front))
    # Limits are judged by the draws, not by the mean: an expected time is exceeded half of the time.
    able = [each for each in planned if each.feasible]
    return Plan(
        front=tuple(planned),
        chosen=min(able, key=lambda each: _aimed(each.option, aim), default=None),
        nearest=min(planned, key=lambda each: each.excess),
        fastest=min(planned, key=lambda each: each.time_s),
        cheapest=min(planned, key=lambda each: each.usd),
        considered=len(found),
    )


def _worth_looking_at(front: list[Option], limits: Limits, aim: Aim) -> list[Option]:
    """Return the part of a front whose outlook is drawn: the ends, and those that keep the limits on average."""
    # The ends are always drawn: what is missed by how much is told from the fastest and the cheapest.
    ends = {min(range(len(front)), key=lambda index: front[index].aims[part]) for part in range(3)}
    ranked = sorted(
        range(len(front)),
        key=lambda index: (
            max(front[index].time_s / limits.deadline_s, front[index].spent.usd / limits.budget_usd, 1.0),
            _aimed(front[index], aim),
        ),
    )
    chosen = ends | set(ranked[: _LOOKED_AT - len(ends)])
    return sorted((front[index] for index in chosen), key=lambda option: _aimed(option, aim))


def _aimed(option: Option, aim: Aim) -> float:
    return {Aim.TIME: option.time_s, Aim.COST: option.spent.usd, Aim.ENERGY: option.spent.energy_j}[aim]
