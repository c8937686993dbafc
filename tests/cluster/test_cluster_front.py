"""The Pareto front over time, dollars and joules, with the chance to keep the limits."""

from dataclasses import replace
from itertools import pairwise
from math import inf

import pytest
from planning_builders import V100, offer, work

from polythrottle.cluster.plan.pareto_front import (
    Aim,
    Limits,
    Outlook,
    Plan,
    Planned,
    SampledOutcome,
    every_option,
    front_of,
    plan,
)
from polythrottle.domain.errors import InvalidInput, SloUnmet
from polythrottle.domain.fleet.transient_machine import Cap, ConstantHazard, Market

OPTIONS = every_option(work(), [offer(speedups=(1.0, 1.9, 2.7, 3.3))])


def test_every_market_number_and_cap_is_considered() -> None:
    """Two markets, four numbers of machines and six caps make 48 options."""
    assert len(OPTIONS) == 48
    assert len(every_option(work(), [offer()], (Market.SPOT,), most=3)) == 18


def test_nothing_on_the_front_is_beaten() -> None:
    """No option of the same market is as good in all three and better in one; every other is beaten by one."""
    front = front_of(OPTIONS)
    for option in OPTIONS:
        beaten = [
            other
            for other in OPTIONS
            if other.market is option.market
            and other.aims != option.aims
            and all(a <= b for a, b in zip(other.aims, option.aims, strict=True))
        ]
        assert (option in front) == (not beaten)


def test_the_plan_has_the_smallest_aim_that_keeps_the_limits() -> None:
    """Among feasible options none is cheaper, and each aim finds its own."""
    limits = Limits(deadline_s=7200, budget_usd=20)
    chosen = {}
    for aim in Aim:
        made = plan(OPTIONS, limits, aim, draws=100)
        assert made.chosen is not None
        assert made.chosen.chance >= 0.95
        chosen[aim] = made.chosen.option
    assert chosen[Aim.TIME].time_s <= min(chosen[Aim.COST].time_s, chosen[Aim.ENERGY].time_s)
    assert chosen[Aim.COST].spent.usd <= min(option.spent.usd for option in chosen.values())
    assert chosen[Aim.ENERGY].spent.energy_j <= min(option.spent.energy_j for option in chosen.values())


@pytest.mark.slow
def test_a_surer_plan_ends_no_later_than_asked_for() -> None:
    """With a tight deadline a chance of 99 % takes more than one of 50 %."""
    flaky = every_option(work(), [offer(ConstantHazard(1.0))], (Market.SPOT,))
    likely, sure = (plan(flaky, Limits(4300, chance=chance), Aim.COST).chosen for chance in (0.5, 0.99))
    assert likely is not None
    assert sure is not None
    assert sure.option.spent.usd >= likely.option.spent.usd
    assert sure.time_s <= 4300


@pytest.mark.parametrize(
    ("limits", "said"),
    [
        (Limits(deadline_s=600), "no plan ends by the deadline"),
        (Limits(budget_usd=1), "no plan keeps the budget"),
        (Limits(deadline_s=4700, budget_usd=3.75), "each be kept but not both"),
    ],
)
def test_what_cannot_be_kept_is_named_with_how_much(limits: Limits, said: str) -> None:
    """An infeasible plan says which limit is missed, by how many per cent, and offers the nearest."""
    made = plan(OPTIONS, limits)
    assert made.chosen is None
    assert said in made.missed()
    assert "over the" in made.missed()
    assert made.nearest.excess == min(each.excess for each in made.front)


def test_a_plan_that_was_found_misses_nothing() -> None:
    """Without limits everything is feasible."""
    made = plan(OPTIONS, Limits())
    assert made.chosen is not None
    assert made.missed() == ""


def test_progress_is_told() -> None:
    """Whoever waits hears of every outlook that is drawn."""
    heard: list[tuple[int, int]] = []
    made = plan(OPTIONS, Limits(), told=lambda done, total: heard.append((done, total)))
    assert heard[-1] == (len(made.front), len(made.front))


def test_a_job_that_never_ends_is_said() -> None:
    """Where a machine is lost long before a step is done, no plan is offered."""
    with pytest.raises(SloUnmet, match="no plan ever ends"):
        every_option(work(), [offer(ConstantHazard(100), step_s=36_000)], (Market.SPOT,))
    assert {option.market for option in every_option(work(), [offer(ConstantHazard(100), step_s=36_000)])} == {
        Market.ON_DEMAND
    }


def test_draws_that_never_end_are_not_kept_without_limits_either() -> None:
    """An option whose outcomes do not end is infeasible, and the plan says why."""
    never = Outlook((SampledOutcome(inf, inf, inf, 9),) * 20)
    each = Planned(OPTIONS[0], never, Limits())
    assert each.chance == 0
    assert each.excess == inf
    assert "no plan ends" in Plan((each,), None, each, each, each, 1).missed()


def test_a_large_fleet_is_considered_in_steps() -> None:
    """Up to 24 machines every number, beyond them a twentieth apart, and always the most."""
    counts = sorted({option.machines for option in every_option(work(), [offer(most=512)], (Market.ON_DEMAND,))})
    assert counts[:24] == list(range(1, 25))
    assert counts[-1] == 512
    assert len(counts) < 100
    assert all(b <= max(a + 1, 1.08 * a) for a, b in pairwise(counts))


def test_nothing_on_offer_is_said() -> None:
    """A market nobody offers leaves nothing to choose from."""
    spot_only = offer(machine=replace(V100, usd_per_h={Market.SPOT: 1.0}, caps=(Cap(None, 1, 200),)))
    with pytest.raises(InvalidInput, match="nothing to choose from"):
        plan(every_option(work(), [spot_only], (Market.ON_DEMAND,)), Limits())
    with pytest.raises(InvalidInput, match="chance"):
        Limits(chance=0)
