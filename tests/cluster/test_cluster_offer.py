"""What a plan chooses from, and what each way of doing a job is expected to cost."""

import pytest
from planning_builders import V100, offer, work

from polythrottle.cluster.plan.costs import COST, ENERGY, TIME
from polythrottle.cluster.plan.options import Offer, ServerRental, options, terms_of
from polythrottle.cluster.plan.pareto_front import outlook
from polythrottle.domain.errors import InvalidInput
from polythrottle.domain.fleet.transient_machine import Market, ObservedLifetime


def test_on_demand_costs_what_its_hours_cost() -> None:
    """Without losses time is start-up and steps, money is time × price, joules are power × time."""
    found = options(work(), offer(), Market.ON_DEMAND, 4)[0]
    assert found.time_s == pytest.approx(170 + 72_000 * 0.05)
    assert found.spent.usd == pytest.approx(found.time_s * 4 * 2.48 / 3600)
    assert found.spent.energy_j == pytest.approx(4 * (60 * 170 + 227.4 * 3600))
    assert found.choice.interval_s == float("inf")


def test_there_is_one_option_per_cap() -> None:
    """Each cap comes with an interval of its own, and lower caps take longer."""
    found = options(work(), offer(), Market.SPOT, 4)
    assert [each.choice.cap for each in found] == list(V100.caps)
    assert [each.time_s for each in found] == sorted(each.time_s for each in found)
    assert all(0 < each.choice.interval_s < float("inf") for each in found)


def test_intervals_follow_what_counts() -> None:
    """In joules a stall is cheap, so checkpoints come more often than in seconds or dollars, which agree."""
    energy, cost, time = (options(work(), offer(), Market.SPOT, 4, weights)[0] for weights in (ENERGY, COST, TIME))
    assert energy.choice.interval_s < 0.8 * time.choice.interval_s
    assert cost.choice.interval_s == time.choice.interval_s
    assert time.time_s <= energy.time_s
    assert energy.spent.energy_j <= time.spent.energy_j


def test_a_price_of_energy_is_paid_beside_the_rent() -> None:
    """Dollars grow by the joules' price, and with energy dear enough the cheapest cap is a low one."""
    plain, priced = (options(work(usd_per_kwh=price), offer(), Market.ON_DEMAND, 2, COST) for price in (0.0, 20.0))
    assert priced[0].spent.usd - plain[0].spent.usd == pytest.approx(plain[0].spent.energy_j / 3.6e6 * 20)
    cheapest = [min(found, key=lambda each: each.spent.usd).choice.cap.limit_w for found in (plain, priced)]
    assert cheapest == [250, 175]
    assert outlook(priced[3]).mean("usd") == pytest.approx(priced[3].spent.usd)
    with pytest.raises(InvalidInput, match="price of energy"):
        work(usd_per_kwh=float("inf"))


def test_servers_are_paid_and_powered_all_the_time() -> None:
    """What is rented beside the workers adds its price and power for the whole time."""
    plain = options(work(), offer(), Market.ON_DEMAND, 2)[0]
    served = options(work(server=ServerRental(0.143, 50, 2)), offer(), Market.ON_DEMAND, 2)[0]
    assert served.spent.usd - plain.spent.usd == pytest.approx(2 * 0.143 * plain.time_s / 3600)
    assert served.spent.energy_j - plain.spent.energy_j == pytest.approx(100 * plain.time_s)


def test_a_hungry_server_makes_slow_caps_dear() -> None:
    """With servers that draw much the fewest joules are at a higher cap."""
    calm = min(options(work(), offer(), Market.ON_DEMAND, 2), key=lambda each: each.spent.energy_j)
    busy = min(
        options(work(server=ServerRental(0, 2000)), offer(), Market.ON_DEMAND, 2), key=lambda each: each.spent.energy_j
    )
    assert (calm.choice.cap.limit_w or 0) < (busy.choice.cap.limit_w or 0)


def test_losses_are_those_of_newborn_machines() -> None:
    """Where newborns are lost and survivors kept, a long job meets fewer losses per hour than a short one."""
    infant = offer(ObservedLifetime((0, 3600, 86400), (1, 0.5, 0.5)))
    short, long = (terms_of(work(steps=steps), infant, Market.SPOT, 1) for steps in (18_000, 400_000))
    assert short.exposure.hazard_per_s > 5 * long.exposure.hazard_per_s
    assert terms_of(work(), infant, Market.ON_DEMAND, 1).exposure.hazard_per_s == 0


def test_what_cannot_be_is_refused() -> None:
    """A job without steps, and a machine without speed, say so."""
    with pytest.raises(InvalidInput, match="steps"):
        work(steps=0)
    with pytest.raises(InvalidInput, match="step time"):
        Offer(V100, 0)
    with pytest.raises(InvalidInput, match="speed-ups"):
        Offer(V100, 1, ())
    assert options(work(), offer(), Market.SPOT, 1)[0].choice.value(ENERGY) > 0
