"""Whether spot machines pay for a job whose machines wait for each other, and when a job moves as prices change."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import exp, inf, isfinite, lgamma, log, log1p, sqrt

from polythrottle.cluster.plan.costs import Choice, expect, intervals
from polythrottle.cluster.plan.options import J_PER_KWH, Option, options, terms_of
from polythrottle.cluster.recorded_tables import History
from polythrottle.domain.errors import InvalidInput
from polythrottle.domain.fleet.transient_machine import HOUR_S, Market

# Moving a job to where a step costs least while prices change: no more than once a day, and only where it pays.
#
# After "Dynamic pricing across clouds" (DISPA at VLDB 2020): one move a day catches most changes of spot prices.
# Energy has a price of its own here, so that a machine that is cheap and hungry does not win by its rent alone.

DAY_S = 24 * HOUR_S


@dataclass(frozen=True)
class Quote:
    """What one place offers now.

    Attributes:
        name: Machine type and zone.
        usd_per_h: Price now; None if there is none to be had.
        steps_per_s: How fast the job would go there.
        power_w: What it would draw there, in watts.
    """

    name: str
    usd_per_h: float | None
    steps_per_s: float
    power_w: float = 0.0

    def __post_init__(self) -> None:
        if not (self.steps_per_s > 0 and self.power_w >= 0 and (self.usd_per_h is None or self.usd_per_h >= 0)):
            raise InvalidInput(f"{self.name} needs a positive speed, and a price and a power of at least 0")

    def usd_per_s(self, usd_per_kwh: float) -> float:
        """Return what a second costs there, energy included; infinite where nothing is to be had."""
        if self.usd_per_h is None:
            return inf
        return self.usd_per_h / HOUR_S + self.power_w * usd_per_kwh / J_PER_KWH

    def usd_per_step(self, usd_per_kwh: float) -> float:
        """Return what a step costs there, energy included."""
        return self.usd_per_s(usd_per_kwh) / self.steps_per_s


@dataclass(frozen=True)
class Moving:
    """When a job moves.

    Attributes:
        usd_per_kwh: Price of energy.
        move_s: How long a move stops the job while the new machine is paid for, in seconds.
        dwell_s: How long it stays at least where it is, unless its machine is taken away, in seconds.
        horizon_s: How long a price is taken to hold when the saving is counted, in seconds.
    """

    usd_per_kwh: float = 0.0
    move_s: float = 180.0
    dwell_s: float = DAY_S
    horizon_s: float = DAY_S

    def __post_init__(self) -> None:
        parts = (self.usd_per_kwh, self.move_s, self.dwell_s)
        if not all(isfinite(part) and part >= 0 for part in parts) or not self.horizon_s > 0:
            raise InvalidInput("a price of energy and times are at least 0, and a horizon is above 0")


def where_next(
    quotes: Sequence[Quote], held: int | None, held_s: float, steps_left: float, moving: Moving
) -> int | None:
    """Return which quote to hold next: where it is, unless a move pays.

    Args:
        quotes: What every place offers now.
        held: Where the job is; None at the beginning or after its machine was taken away.
        held_s: How long it has been there, in seconds.
        steps_left: Steps until it is done.
        moving: When a job moves.

    Returns:
        An index into the quotes, or None where nothing is to be had at all.
    """
    costs = [quote.usd_per_step(moving.usd_per_kwh) for quote in quotes]
    best = min(range(len(quotes)), key=costs.__getitem__, default=None)
    if best is None or costs[best] == inf:
        return None
    if held is None or quotes[held].usd_per_h is None:
        return best
    if best == held or held_s < moving.dwell_s:
        return held
    steps = min(steps_left, quotes[held].steps_per_s * moving.horizon_s)
    saved = steps * (costs[held] - costs[best])
    if saved > moving.move_s * quotes[best].usd_per_s(moving.usd_per_kwh):
        return best
    return held


@dataclass(frozen=True)
class PricedPlace:
    """A place of a replay: its prices along time, and how the job goes there.

    Attributes:
        history: Its prices, recorded.
        steps_per_s: Speed of the job there.
        power_w: Its power there, in watts.
    """

    history: History
    steps_per_s: float
    power_w: float = 0.0

    def quote(self, time_s: float) -> Quote:
        """Return what it offers at a time in seconds since 1970."""
        return Quote(self.history.name, self.history.at(time_s), self.steps_per_s, self.power_w)


@dataclass
class Journey:
    """Where a job went in a replay, simulated on recorded prices; it is assumed to get a machine wherever there is one.

    Attributes:
        usd: What its machines cost.
        energy_j: What they drew, in joules.
        time_s: How long it took, in seconds.
        moves: How often it moved, the first place not counted.
        places: Names of the places in order.
        done: Steps done; fewer than asked for if the record ended before.
    """

    usd: float = 0.0
    energy_j: float = 0.0
    time_s: float = 0.0
    moves: int = 0
    places: list[str] = field(default_factory=list)
    done: float = 0.0

    def cost_usd(self, usd_per_kwh: float) -> float:
        """Return dollars with energy at a price."""
        return self.usd + self.energy_j * usd_per_kwh / J_PER_KWH


def travel(
    places: Sequence[PricedPlace], steps: float, begin_s: float, moving: Moving, look_s: float = HOUR_S
) -> Journey:
    """Return how a job goes through recorded prices.

    Args:
        places: Where it may be.
        steps: Steps until it is done.
        begin_s: When it begins, in seconds since 1970.
        moving: When it moves; an infinite dwell keeps it in its first place.
        look_s: Time between looks at the prices, in seconds.

    Raises:
        InvalidInput: If no place has a price at the beginning.
    """
    journey = Journey()
    held = None
    since_s = begin_s
    now_s = begin_s
    ready_s = begin_s
    while journey.done < steps:
        quotes = [place.quote(now_s) for place in places]
        chosen = where_next(quotes, held, now_s - since_s, steps - journey.done, moving)
        if chosen is None:
            break
        if chosen != held:
            journey.moves += held is not None
            journey.places.append(quotes[chosen].name)
            held = chosen
            since_s = now_s
            ready_s = now_s + moving.move_s
        place = places[chosen]
        ends_s = max(now_s, ready_s) + (steps - journey.done) / place.steps_per_s
        until_s = min(now_s + look_s, ends_s)
        journey.usd += place.history.spent_usd(now_s, until_s)
        journey.energy_j += place.power_w * (until_s - now_s)
        if until_s == ends_s:
            journey.done = steps
        else:
            journey.done = journey.done + place.steps_per_s * max(0.0, until_s - max(now_s, ready_s))
        now_s = until_s
    if not journey.places:
        raise InvalidInput("no place has a price at the beginning; begin within the record")
    journey.time_s = now_s - begin_s
    return journey


def stay(places: Sequence[PricedPlace], steps: float, begin_s: float, moving: Moving) -> Journey:
    """Return how the job would have gone if it had stayed where a step was cheapest at the beginning: the baseline."""
    return travel(places, steps, begin_s, Moving(moving.usd_per_kwh, moving.move_s, 1e15, moving.horizon_s))


# Whether spot machines pay for a job whose machines wait for each other: a loss is a very long straggler.
#
# After Ambati et al. (IC2E 2019, doi 10.1109/IC2E.2019.00029): with n workers, each lost at rate λ, recovery R and
# interval τ, a synchronous job is slowed by 1 + nλ(R + τ/2), and spot pays while price ratio × slowdown is below 1.
# Where the number y of workers varies, the error of stochastic gradient descent is bounded by E[1/y], which is more
# than 1/E[y] (Zhang et al., INFOCOM 2020, arXiv 2003.05649).

_RARE_PER_H = 1e-6
_OFTEN_PER_H = 1e4
_MANY = 100.0


@dataclass(frozen=True)
class SpotSaving:
    """What spot saves over on-demand for the same machines and cap, estimated.

    Attributes:
        slowdown: Time on spot over time on demand, without start-up.
        cost_ratio: Dollars on spot over dollars on demand.
        energy_ratio: Joules on spot over joules on demand.
        break_even_per_h: Losses of one machine per hour at which both would cost the same; infinite if none are enough.
    """

    slowdown: float
    cost_ratio: float
    energy_ratio: float
    break_even_per_h: float

    @property
    def pays(self) -> bool:
        """Return whether spot costs less."""
        return self.cost_ratio < 1


def judge(option: Option) -> SpotSaving | None:
    """Return what spot does to an option's cost; None where its machine is not offered in both markets.

    Args:
        option: Of either market; its number of machines and cap are compared, each with its own interval.
    """
    work = option.work
    offer = option.offer
    machines = option.machines
    cap = option.choice.cap
    if set(offer.machine.usd_per_h) != set(Market) or not all(offer.machine.usd_per_h.values()):
        return None
    terms = {market: terms_of(work, offer, market, machines) for market in Market}
    kept = expect(terms[Market.ON_DEMAND], cap, inf)
    if option.market is Market.SPOT:
        on_spot = option
    else:
        on_spot = _on_spot(option)
    spot = on_spot.choice
    if spot.time_s == inf:
        return SpotSaving(inf, inf, inf, 0.0)
    slowdown = spot.time_s / kept.time_s
    ratio = _usd(option, spot) / _usd(option, kept)
    joules = spot.spent.energy_j / kept.spent.energy_j
    return SpotSaving(slowdown, ratio, joules, _break_even_per_h(on_spot, _usd(option, kept)))


def spot_or_not(option: Option) -> tuple[str, ...]:
    """Return a line that says whether spot pays and where it would stop to, or nothing where there is no choice."""
    verdict = judge(option)
    if verdict is None:
        return ()
    if verdict.cost_ratio == inf:
        return ("never ends on spot: losses come faster than work is written down",)
    verb = "does not pay"
    if verdict.pays:
        verb = "pays"
    if verdict.break_even_per_h:
        stays = f"below {verdict.break_even_per_h:.2g} losses/h each"
    else:
        stays = "at no rate of losses"
    if verdict.break_even_per_h == inf:
        stays = "whatever the losses"
    terms = terms_of(option.work, option.offer, Market.SPOT, option.machines)
    there = 1 / (1 + terms.exposure.hazard_per_s / option.machines * option.offer.startup_s)
    steady = 1 / mean_inverse(option.machines, there)
    cost, time, joules = (_times(ratio) for ratio in (verdict.cost_ratio, verdict.slowdown, verdict.energy_ratio))
    machines = f"{steady:.3g} machine{'' if f'{steady:.3g}' == '1' else 's'}"
    return (
        f"{verb}: {cost} the cost on demand, {time} the time, {joules} the joules; would pay {stays};"
        f" as steady as {machines}, 1/E[1/y]",
    )


def _times(ratio: float) -> str:
    if ratio < _MANY:
        return f"{ratio:.3f} ×"
    return f"{ratio:.4g} ×"


def mean_inverse(provisioned: int, available: float) -> float:
    """Return E[1/y | y ≥ 1] of the number y of workers that are there, of so many provisioned.

    Args:
        provisioned: Workers asked for, >= 1.
        available: Share of time each is there, independently, in (0, 1].

    Raises:
        InvalidInput: If one is out of range.
    """
    _check(provisioned, available)
    if available == 1:
        return 1 / provisioned
    chances = [_binomial(provisioned, y, available) for y in range(1, provisioned + 1)]
    return sum(chance / y for y, chance in enumerate(chances, 1)) / sum(chances)


def _binomial(total: int, count: int, share: float) -> float:
    """Return the chance of so many out of a total, in logarithms: the factors alone overflow."""
    ways = lgamma(total + 1) - lgamma(count + 1) - lgamma(total - count + 1)
    return exp(ways + count * log(share) + (total - count) * log1p(-share))


def _check(workers: int, available: float) -> None:
    if workers < 1 or not 0 < available <= 1:
        raise InvalidInput(
            f"at least one worker and a share of time in (0, 1] are needed, not {workers} and {available:g}"
        )


def _usd(option: Option, choice: Choice) -> float:
    """Return the rent and the energy of a useful step in dollars."""
    if choice.time_s == inf:
        return inf
    return choice.spent.usd + choice.spent.energy_j * option.work.usd_per_j


def _on_spot(option: Option) -> Option:
    choices = options(option.work, option.offer, Market.SPOT, option.machines)
    return next(each for each in choices if each.choice.cap == option.choice.cap)


def _break_even_per_h(option: Option, kept_usd: float) -> float:
    """Return the losses of a machine per hour at which a step costs so many dollars on spot too, by bisection."""
    terms = terms_of(option.work, option.offer, Market.SPOT, option.machines)
    cap = option.choice.cap

    def cost_ratio(rate_per_h: float) -> float:
        exposure = replace(terms.exposure, hazard_per_s=rate_per_h * option.machines / 3600)
        faced = replace(terms, exposure=exposure)
        choices = (expect(faced, cap, every_s) for every_s in intervals(faced, cap))
        return min(_usd(option, choice) for choice in choices) / kept_usd

    low = _RARE_PER_H
    high = _OFTEN_PER_H
    if cost_ratio(low) >= 1:
        return 0.0
    if cost_ratio(high) < 1:
        return inf
    while high > low * 1.001:
        middle = sqrt(low * high)
        low, high = (low, middle) if cost_ratio(middle) >= 1 else (middle, high)
    return low
