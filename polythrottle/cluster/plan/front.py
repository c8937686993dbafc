"""Which ways to do a job are worth choosing from: the Pareto front over time, dollars and joules, with its chances."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import inf

from polythrottle.backports import StrEnum
from polythrottle.cluster.machine import Market
from polythrottle.cluster.plan.caps import COST, ENERGY, TIME
from polythrottle.cluster.plan.offer import Offer, Option, Work, options
from polythrottle.cluster.plan.outlook import Outlook, outlook
from polythrottle.errors import InvalidInput, SloUnmet

_LOOKED_AT = 60
"""Options of the front whose outlook is drawn, those with the smallest expected aim first."""

_EVERY = 24
_MANY = 11.0
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
        limit_s, least_s = self.nearest.limits.deadline_s, self.fastest.time_s
        if least_s > limit_s:
            yield "ends by the deadline", f"the fastest takes {_by(least_s, limit_s, _span)}"

    def _dear(self) -> Iterator[tuple[str, str]]:
        """Yield the same of the budget."""
        limit_usd, least_usd = self.nearest.limits.budget_usd, self.cheapest.usd
        if least_usd > limit_usd:
            yield "keeps the budget", f"the cheapest costs {_by(least_usd, limit_usd, _money)}"


def _by(value: float, limit: float, shown: Callable[[float], str]) -> str:
    if value <= limit:
        return shown(value)
    ratio = value / limit
    over = f"{ratio - 1:.1%} over the" if ratio < _MANY else f"{ratio:.3g} times the"
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
    found: list[Option] = []
    for done, (offer, market, machines) in enumerate(ways, 1):
        found += options(work, offer, market, machines, _WEIGHTS[aim])
        told(done, len(ways))
    ending = [option for option in found if option.time_s < inf]
    if found and not ending:
        raise SloUnmet("no plan ever ends: machines are lost faster than a step and its checkpoint can be done")
    return ending


def _counts(most: int) -> list[int]:
    """Return the numbers of machines to consider: every one up to 24, then a twentieth apart, and the most."""
    counts = list(range(1, min(most, _EVERY) + 1))
    while counts[-1] < most:
        counts.append(min(most, max(counts[-1] + 1, round(counts[-1] * 1.05))))
    return counts


def front_of(found: Sequence[Option]) -> list[Option]:
    """Return the options that no other beats in time, dollars and joules at once, each market for itself.

    A spot option that is better on average may still be worse with a deadline, so on-demand ones stay beside it.
    """
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
