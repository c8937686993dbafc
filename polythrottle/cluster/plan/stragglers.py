"""Whether spot machines pay for a job whose machines wait for each other: a loss is a very long straggler.

After Ambati et al. (IC2E 2019, doi 10.1109/IC2E.2019.00029): with n workers, each lost at rate λ, recovery R and
interval τ, a synchronous job is slowed by 1 + nλ(R + τ/2), and spot pays while price ratio × slowdown is below 1. Where
the number y of workers varies, the error of stochastic gradient descent is bounded by E[1/y], which is more than 1/E[y]
(Zhang et al., INFOCOM 2020, arXiv 2003.05649).
"""

from dataclasses import dataclass, replace
from math import exp, inf, lgamma, log, log1p, sqrt

from polythrottle.cluster.machine import Market
from polythrottle.cluster.plan.caps import Choice, expect, intervals
from polythrottle.cluster.plan.offer import Option, options, terms_of
from polythrottle.errors import InvalidInput

_RARE_PER_H, _OFTEN_PER_H = 1e-6, 1e4
_MANY = 100.0


@dataclass(frozen=True)
class Verdict:
    """What spot saves over on-demand for the same machines and cap, estimated.

    Attributes:
        slowdown: Time on spot over time on demand, without start-up.
        cost_ratio: Dollars on spot over dollars on demand.
        energy_ratio: Joules on spot over joules on demand.
        break_even_price: Price ratio at which both would cost the same.
        break_even_per_h: Losses of one machine per hour at which both would cost the same; infinite if none are enough.
    """

    slowdown: float
    cost_ratio: float
    energy_ratio: float
    break_even_price: float
    break_even_per_h: float

    @property
    def pays(self) -> bool:
        """Return whether spot costs less."""
        return self.cost_ratio < 1


def sketched_slowdown(machines: int, hazard_per_s: float, recovery_s: float, interval_s: float) -> float:
    """Return 1 + nλ(R + τ/2), the first-order slowdown of a synchronous job.

    Args:
        machines: Workers that wait for each other.
        hazard_per_s: Losses of one of them per second.
        recovery_s: How long a loss stops all, in seconds.
        interval_s: Time between checkpoints in seconds.
    """
    return 1 + machines * hazard_per_s * (recovery_s + interval_s / 2)


def judge(option: Option) -> Verdict | None:
    """Return what spot does to an option's cost; None where its machine is not offered in both markets.

    Args:
        option: Of either market; its number of machines and cap are compared, each with its own interval.
    """
    work, offer, machines, cap = option.work, option.offer, option.machines, option.choice.cap
    if set(offer.machine.usd_per_h) != set(Market) or not all(offer.machine.usd_per_h.values()):
        return None
    terms = {market: terms_of(work, offer, market, machines) for market in Market}
    kept = expect(terms[Market.ON_DEMAND], cap, inf)
    found = option if option.market is Market.SPOT else _on_spot(option)
    spot = found.choice
    if spot.time_s == inf:
        return Verdict(inf, inf, inf, 0.0, 0.0)
    slowdown = spot.time_s / kept.time_s
    ratio = _usd(option, spot) / _usd(option, kept)
    price_ratio = offer.machine.usd_per_h[Market.SPOT] / offer.machine.usd_per_h[Market.ON_DEMAND]
    joules = spot.spent.energy_j / kept.spent.energy_j
    rent_usd = spot.spent.usd / price_ratio
    price = (_usd(option, kept) - spot.spent.energy_j * work.usd_per_j) / rent_usd
    return Verdict(slowdown, ratio, joules, price, _break_even_per_h(found, _usd(option, kept)))


def spot_or_not(option: Option) -> tuple[str, ...]:
    """Return a line that says whether spot pays and where it would stop to, or nothing where there is no choice."""
    found = judge(option)
    if found is None:
        return ()
    if found.cost_ratio == inf:
        return ("never ends on spot: losses come faster than work is written down",)
    verb = "pays" if found.pays else "does not pay"
    stays = f"below {found.break_even_per_h:.2g} losses/h each" if found.break_even_per_h else "at no rate of losses"
    if found.break_even_per_h == inf:
        stays = "whatever the losses"
    terms = terms_of(option.work, option.offer, Market.SPOT, option.machines)
    there = 1 / (1 + terms.exposure.hazard_per_s / option.machines * option.offer.startup_s)
    steady = 1 / mean_inverse(option.machines, there)
    cost, time, joules = (_times(ratio) for ratio in (found.cost_ratio, found.slowdown, found.energy_ratio))
    machines = f"{steady:.3g} machine{'' if f'{steady:.3g}' == '1' else 's'}"
    return (
        f"{verb}: {cost} the cost on demand, {time} the time, {joules} the joules; would pay {stays};"
        f" as steady as {machines}, 1/E[1/y]",
    )


def _times(ratio: float) -> str:
    return f"{ratio:.3f} ×" if ratio < _MANY else f"{ratio:.4g} ×"


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


def to_provision(wanted: int, available: float, most: int = 1024) -> int:
    """Return how many workers to ask for so that E[1/y] is no more than with ``wanted`` that are always there.

    Args:
        wanted: Workers the error bound was computed for, >= 1.
        available: Share of time each is there, in (0, 1].
        most: Where to give up.

    Raises:
        InvalidInput: If one is out of range, or ``most`` are not enough.
    """
    _check(wanted, available)
    for provisioned in range(wanted, most + 1):
        if mean_inverse(provisioned, available) <= 1 / wanted * (1 + 1e-12):
            return provisioned
    raise InvalidInput(f"{wanted} workers need more than {most} that are there {available:.0%} of the time")


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
    found = options(option.work, option.offer, Market.SPOT, option.machines)
    return next(each for each in found if each.choice.cap == option.choice.cap)


def _break_even_per_h(option: Option, kept_usd: float) -> float:
    """Return the losses of a machine per hour at which a step costs so many dollars on spot too, by bisection."""
    terms = terms_of(option.work, option.offer, Market.SPOT, option.machines)
    cap = option.choice.cap

    def cost_ratio(rate_per_h: float) -> float:
        exposure = replace(terms.exposure, hazard_per_s=rate_per_h * option.machines / 3600)
        faced = replace(terms, exposure=exposure)
        found = (expect(faced, cap, every_s) for every_s in intervals(faced, cap))
        return min(_usd(option, choice) for choice in found) / kept_usd

    low, high = _RARE_PER_H, _OFTEN_PER_H
    if cost_ratio(low) >= 1:
        return 0.0
    if cost_ratio(high) < 1:
        return inf
    while high > low * 1.001:
        middle = sqrt(low * high)
        low, high = (low, middle) if cost_ratio(middle) >= 1 else (middle, high)
    return low
