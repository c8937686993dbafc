"""How a job may turn out: draws that agree with what is expected."""

from math import inf

import pytest
from planning_builders import offer, work

from polythrottle.cluster.plan.options import Option, options
from polythrottle.cluster.plan.pareto_front import expected_losses, outlook
from polythrottle.domain.fleet.transient_machine import ConstantHazard, Market, ObservedLifetime


def option(rate_per_h: float, machines: int = 4, cap: int = 1, **more: object) -> Option:
    """Return an option that loses each machine at a rate."""
    return options(work(**more), offer(ConstantHazard(rate_per_h)), Market.SPOT, machines)[cap]


@pytest.mark.parametrize("rate_per_h", [0.05, 0.5, 2.0])
@pytest.mark.parametrize("machines", [1, 8])
@pytest.mark.parametrize("undoes", [True, False])
def test_draws_agree_with_what_is_expected(rate_per_h: float, machines: int, undoes: bool) -> None:
    """Mean time, cost and joules of many draws are the estimates, within four standard errors and 2 %."""
    found = option(rate_per_h, machines, undoes=undoes)
    drawn = outlook(found, seed=3, draws=400)
    for what, expected in zip(("time_s", "usd", "energy_j"), found.aims, strict=True):
        assert abs(drawn.mean(what) - expected) <= 4 * drawn.error(what) + 0.02 * expected
    assert drawn.mean("losses") == pytest.approx(expected_losses(found), rel=0.25, abs=0.3)


def test_what_is_never_lost_turns_out_as_expected() -> None:
    """An on-demand machine leaves nothing to chance: one outcome, equal to the estimate."""
    found = options(work(), offer(), Market.ON_DEMAND, 4)[2]
    (only,) = outlook(found).outcomes
    assert (only.time_s, only.usd, only.energy_j) == pytest.approx(found.aims)
    assert only.losses == 0


def test_the_same_seed_gives_the_same_outcomes() -> None:
    """Draws depend on the seed alone."""
    found = option(0.3)
    assert outlook(found, 7) == outlook(found, 7)
    assert outlook(found, 7) != outlook(found, 8)


def test_chances_and_quantiles_agree() -> None:
    """The share of draws within a quantile is at least the quantile's share, and little fewer are just below it."""
    drawn = outlook(option(0.5), draws=200)
    limit_s = drawn.quantile("time_s", 0.9)
    assert drawn.chance(deadline_s=limit_s) >= 0.9
    assert drawn.chance(deadline_s=limit_s * 0.999999) < 0.9
    assert drawn.chance(usd=0) == 0


def test_a_job_with_very_many_losses_is_not_walked_through() -> None:
    """With thousands of losses the spread follows the central limit, around the same mean."""
    found = option(1.0, machines=8, steps=72_000_000)
    assert expected_losses(found) > 2000
    drawn = outlook(found)
    assert drawn.mean("time_s") == pytest.approx(found.time_s)
    assert 1 < drawn.quantile("time_s", 0.95) / drawn.mean("time_s") < 1.01


def test_machines_that_die_before_they_train_hold_a_job_up() -> None:
    """Where two in three newborns are lost within start-up, the job begins late but ends."""
    harsh = offer(ObservedLifetime((0, 100, 1e6), (1, 0.34, 0.34)))
    found = options(work(undoes=False), harsh, Market.SPOT, 2)[0]
    drawn = outlook(found, draws=60)
    assert drawn.mean("losses") > 1
    assert drawn.mean("time_s") > 170 + 72_000 * 0.1
    assert drawn.quantile("time_s", 1.0) < inf


def test_notices_save_time_in_draws_too() -> None:
    """With every loss announced, less is redone."""
    told, surprised = option(2.0, noticed=1.0), option(2.0)
    assert outlook(told).mean("time_s") < outlook(surprised).mean("time_s")


def test_a_great_many_machines_take_fewer_draws() -> None:
    """A thousand machines are walked through thirty times, not two hundred: their joint fate hardly varies."""
    many = offer(ConstantHazard(1e-6), speedups=tuple(float(count) for count in range(1, 1025)))
    found = options(work(), many, Market.SPOT, 1024)[0]
    assert len(outlook(found, draws=200).outcomes) == 30
