"""Whether spot pays for machines that wait for each other."""

from dataclasses import replace

import pytest
from planning_builders import V100, offer, work

from polythrottle.cluster.plan.options import options
from polythrottle.cluster.plan.spot_market import judge, mean_inverse, spot_or_not
from polythrottle.domain.errors import InvalidInput
from polythrottle.domain.fleet.transient_machine import ConstantHazard, Market


def verdict(rate_per_h: float, machines: int = 8, market: Market = Market.SPOT, spot_usd: float = 0.86):  # type: ignore[no-untyped-def]
    """Return the verdict on machines lost at a rate."""
    machine = replace(V100, usd_per_h={Market.SPOT: spot_usd, Market.ON_DEMAND: 2.48})
    return judge(options(work(), offer(ConstantHazard(rate_per_h), machine=machine), market, machines)[0])


def test_the_slowdown_is_the_sketched_one_where_losses_are_rare() -> None:
    """1 + nλ(R + τ/2) and the stalls are the slowdown to first order."""
    spot = options(work(), offer(ConstantHazard(0.02)), Market.SPOT, 8)[0]
    found = judge(spot)
    assert found is not None
    every_s = spot.choice.interval_s
    sketched = 1 + 8 * (0.02 / 3600) * (8 + 170 / 8 + every_s / 2) + 3.8 / every_s
    assert found.slowdown == pytest.approx(sketched, rel=0.002)


def test_spot_stops_paying_where_both_cost_the_same() -> None:
    """Just below the break-even rate spot is cheaper, just above it is dearer."""
    at_per_h = verdict(0.1).break_even_per_h
    assert verdict(0.1).pays
    assert verdict(at_per_h * 0.95).cost_ratio < 1 < verdict(at_per_h * 1.02).cost_ratio


def test_more_machines_stand_fewer_losses() -> None:
    """The break-even rate of each machine falls with their number: all wait for any."""
    rates = [verdict(0.1, machines).break_even_per_h for machines in (1, 4, 8)]
    assert rates == sorted(rates, reverse=True)


def test_a_spot_price_above_on_demand_never_pays() -> None:
    """Where spot costs more there is no rate at which it pays, and the line says so."""
    dear = verdict(0.1, spot_usd=2.6)
    assert not dear.pays
    assert dear.break_even_per_h == 0


def test_the_price_of_energy_counts() -> None:
    """Where energy costs much, redone joules make spot less worth than its rent says."""
    dear = work(usd_per_kwh=5.0)
    rent, whole = (judge(options(job, offer(ConstantHazard(2.0)), Market.SPOT, 8)[0]) for job in (work(), dear))
    assert rent is not None
    assert whole is not None
    assert whole.cost_ratio > rent.cost_ratio
    assert whole.break_even_per_h < rent.break_even_per_h


def test_both_markets_get_the_same_verdict() -> None:
    """An on-demand option is compared with spot as spot is with it."""
    assert verdict(0.3, market=Market.ON_DEMAND) == verdict(0.3)


def test_a_machine_of_one_market_has_no_verdict() -> None:
    """Without two prices there is nothing to compare, and no line."""
    alone = offer(machine=replace(V100, usd_per_h={Market.SPOT: 1.0}))
    option = options(work(), alone, Market.SPOT, 2)[0]
    assert judge(option) is None
    assert spot_or_not(option) == ()
    assert "pays" in spot_or_not(options(work(), offer(), Market.SPOT, 2)[0])[0]


def test_the_mean_inverse_is_more_than_the_inverse_of_the_mean() -> None:
    """E[1/y] of a number that varies exceeds 1/E[y] (Jensen), and is 1/n where all are there."""
    assert mean_inverse(8, 1.0) == pytest.approx(1 / 8)
    assert mean_inverse(8, 0.7) > 1 / (8 * 0.7)
    assert mean_inverse(1, 0.3) == 1
    assert mean_inverse(5000, 0.5) == pytest.approx(1 / 2500, rel=0.001)


def test_a_share_of_time_is_above_0() -> None:
    """Workers that are never there have no mean of 1/y."""
    with pytest.raises(InvalidInput, match="share of time"):
        mean_inverse(2, 0)
