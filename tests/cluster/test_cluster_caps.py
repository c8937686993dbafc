"""The power cap and the checkpoint interval of a job, chosen together."""

from dataclasses import replace
from math import expm1, inf

import pytest
from hypothesis import given
from hypothesis import strategies as st
from planning_builders import V100
from scipy.optimize import linprog

from polythrottle.cluster.conditions import DefaultPolicy, DrawnSupply, SimulatedJob
from polythrottle.cluster.job_simulator import Scenario, simulate
from polythrottle.cluster.plan.costs import (
    COST,
    ENERGY,
    TIME,
    Exposure,
    Terms,
    Use,
    Weights,
    apart,
    blended,
    expect,
    frontier,
    joint,
    losses_per_s,
    reference_s,
)
from polythrottle.domain.errors import InvalidInput
from polythrottle.domain.fleet.gpu_variability import Silicon
from polythrottle.domain.fleet.transient_machine import KEPT, Cap, CheckpointCost, ConstantHazard, ObservedLifetime


def terms(rate_per_h: float = 0.1, machines: int = 4, **more: float) -> Terms:
    """Return a job of V100 that loses each machine at a rate."""
    exposure = Exposure(machines, rate_per_h * machines / 3600, restart_s=8, replace_s=170)
    return Terms(V100, 0.86, replace(exposure, **more), CheckpointCost(3.8), step_s=0.2)  # type: ignore[arg-type]


def test_without_losses_a_step_costs_its_power_and_time_alone() -> None:
    """Nothing is written, redone or waited for where nothing is ever lost."""
    calm = expect(terms(0), V100.caps[1], inf)
    assert calm.time_s == pytest.approx(0.2 * 1.0227)
    assert calm.spent.energy_j == pytest.approx(4 * 213.2 * 0.2 * 1.0227)
    assert calm.spent.usd == pytest.approx(4 * 0.86 * 0.2 * 1.0227 / 3600)
    assert {use for use, spent in calm.parts.items() if spent.machine_s} == {Use.USEFUL}


def test_to_first_order_a_step_costs_what_young_says() -> None:
    """Where losses are rare, overhead is C/τ + Λ(τ/2 + R)."""
    hazard = 0.01 / 3600
    rare = Terms(V100, 0.86, Exposure(1, hazard, 8, 170), CheckpointCost(3.8), 0.2)
    found = expect(rare, V100.default, 1800)
    assert found.time_s / 0.2 == pytest.approx(1 + 3.8 / 1800 + hazard * (900 + 178), rel=1e-4)


def test_the_parts_are_the_whole() -> None:
    """Machine-seconds by use add up to the time of a step on every machine."""
    found = expect(terms(), V100.caps[2], 600)
    assert found.spent.machine_s == pytest.approx(4 * found.time_s)
    assert all(found.parts[use].machine_s > 0 for use in found.parts)


def test_a_segment_takes_as_long_as_daly_says() -> None:
    """Useful, written and redone time together follow the exponential law, also where losses are frequent."""
    hard = terms(2.0)
    found = expect(hard, V100.default, 600)
    again = sum(found.parts[use].machine_s for use in (Use.USEFUL, Use.CHECKPOINT, Use.REDONE)) / 4
    rate = hard.exposure.hazard_per_s
    assert again == pytest.approx(expm1(rate * 603.8) / rate * 0.2 / 600)


def test_a_job_that_writes_nothing_and_loses_machines_never_ends() -> None:
    """An infinite interval under losses, or a segment that never survives, costs infinitely much."""
    assert expect(terms(), V100.default, inf).value(ENERGY) == inf
    assert expect(terms(100), V100.default, 7200).value(COST) == inf


@pytest.mark.slow
@given(rate=st.floats(0, 3), machines=st.integers(1, 64), longer=st.floats(0, 0.5), noticed=st.floats(0, 1))
def test_chosen_together_is_never_worse_than_chosen_apart(
    rate: float, machines: int, longer: float, noticed: float
) -> None:
    """Where the two chosen apart keep to the time allowed, the two chosen together cost no more."""
    job = terms(rate, machines, noticed=noticed)
    one, two = joint(job, ENERGY, longer), apart(job, ENERGY, longer)
    fastest = joint(job, TIME, 0)
    assert one.time_s <= expect(job, V100.default, reference_s(job)).time_s * (1 + longer) * (1 + 1e-9)
    assert fastest.time_s <= one.time_s * (1 + 1e-9)
    if two.time_s <= fastest.time_s * (1 + longer):
        assert one.value(ENERGY) <= two.value(ENERGY) * (1 + 1e-9)


def linear_programme(job: Terms, every_s: float, most_s: float) -> float:
    """Return the fewest joules of a step of caps by turns within a time, by a general solver."""
    choices = [expect(job, cap, every_s) for cap in job.machine.caps]
    found = linprog(
        [one.spent.energy_j for one in choices],
        A_ub=[[one.time_s for one in choices]],
        b_ub=[most_s],
        A_eq=[[1.0] * len(choices)],
        b_eq=[1.0],
    )
    return float(found.fun)


@pytest.mark.slow
@given(rate=st.floats(0, 2), machines=st.integers(1, 64), longer=st.floats(0, 0.4))
def test_caps_by_turns_are_the_optimum_of_the_linear_programme(rate: float, machines: int, longer: float) -> None:
    """At the interval it chose no turns of any caps take fewer joules in the time allowed; nor does one cap alone."""
    job = terms(rate, machines)
    found = blended(job, ENERGY, longer)
    most_s = expect(job, V100.default, reference_s(job)).time_s * (1 + longer)
    assert found.choice.time_s <= most_s * (1 + 1e-9)
    best_j = linear_programme(job, found.choice.interval_s, most_s * (1 + 1e-9))
    assert found.choice.spent.energy_j == pytest.approx(best_j, rel=1e-6)
    assert found.choice.value(ENERGY) <= joint(job, ENERGY, longer).value(ENERGY) * (1 + 1e-3)


def test_with_an_interval_given_caps_alone_are_chosen() -> None:
    """It is kept, and no better than the best one."""
    given, best = blended(terms(), ENERGY, 0.04, 300.0), blended(terms(), ENERGY, 0.04)
    assert given.choice.interval_s == 300.0
    assert given.choice.value(ENERGY) >= best.choice.value(ENERGY)


def test_turns_are_what_they_amount_to() -> None:
    """Time and joules of the two caps, each with its share of the steps."""
    found = blended(terms(), ENERGY, 0.04)
    assert 0 < found.share < 1
    parts = ((found.first, 1 - found.share), (found.second, found.share))
    assert found.choice.cap.slowdown == pytest.approx(sum(share * cap.slowdown for cap, share in parts))
    assert found.choice.cap.energy == pytest.approx(sum(share * cap.energy for cap, share in parts))


def test_a_cap_that_turns_of_two_others_beat_is_not_on_the_frontier() -> None:
    """A cap above the line between its neighbours, and one that costs more than a faster one, are left out."""
    caps = (Cap(None, 1.0, 200), Cap(180, 1.05, 189), Cap(160, 1.1, 160), Cap(100, 1.9, 99))
    assert frontier(caps) == (caps[0], caps[2])
    assert frontier(caps[:2]) == caps[:2]


def test_a_longer_time_buys_joules() -> None:
    """With more time allowed the cap falls to the one with the fewest joules of a step, and no further."""
    caps = [joint(terms(), ENERGY, longer).cap.limit_w for longer in (0, 0.03, 0.07, 0.15, inf)]
    assert caps == [250, 225, 200, 175, 150]


def test_losses_move_the_best_cap_up_where_checkpoints_are_dear() -> None:
    """A lower cap lengthens exposure: with frequent losses and dear checkpoints the slower caps stop paying."""
    dear = replace(terms(20, 16), cost=CheckpointCost(60, 600), overhead=1.0)
    calm_w, harsh_w = joint(terms(0), ENERGY, inf).cap.limit_w, joint(dear, ENERGY, inf).cap.limit_w
    assert calm_w == 150
    assert harsh_w is not None
    assert harsh_w >= 150


def test_joules_want_checkpoints_more_often_than_seconds() -> None:
    """A machine draws less while it writes, so in joules a stall is cheap and redone work dear."""
    job = replace(terms(0.5), overhead=1.0)
    assert joint(job, ENERGY, 0.5).interval_s < 0.8 * joint(job, TIME, 0.5).interval_s


def test_notices_save_redone_work() -> None:
    """A job whose losses are all announced undoes nothing and needs no checkpoints in turn."""
    told = joint(terms(noticed=1.0), ENERGY)
    assert told.interval_s == inf
    assert told.parts[Use.REDONE].machine_s == 0
    assert told.parts[Use.CHECKPOINT].machine_s > 0
    assert told.spent.energy_j < joint(terms(), ENERGY).spent.energy_j


def test_where_a_server_keeps_the_model_nothing_is_undone() -> None:
    """Asynchronous workers that are lost cost only their absence."""
    kept = joint(replace(terms(), exposure=replace(terms().exposure, undoes=False)), ENERGY)
    assert kept.parts[Use.REDONE].machine_s == 0
    assert kept.parts[Use.STARTUP].machine_s > 0


def test_losses_are_counted_over_what_machines_live() -> None:
    """Machines lost steadily give their rate; one in two that dies at once raises it; one kept gives none."""
    assert losses_per_s([(ConstantHazard(0.1), 0.0), (KEPT, 0.0)], 7200) == pytest.approx(0.1 / 3600, rel=1e-3)
    early = ObservedLifetime((0, 60, 3600), (1, 0.5, 0.5))
    assert losses_per_s([(early, 0)], 3600) == pytest.approx(0.5 / (45 + 0.5 * 3540), rel=0.01)
    assert losses_per_s([(early, 120)], 3400) == 0
    assert losses_per_s([(ObservedLifetime((0, 60), (1, 0)), 61)], 60) == 1


def test_what_cannot_be_is_refused() -> None:
    """Weights, exposures and terms say what is wrong with them."""
    with pytest.raises(InvalidInput, match="weights"):
        Weights()
    with pytest.raises(InvalidInput, match="weights"):
        Weights(per_j=-1)
    with pytest.raises(InvalidInput, match="at least one machine"):
        Exposure(0, 0.1)
    with pytest.raises(InvalidInput, match="at least 0"):
        Exposure(1, -0.1)
    with pytest.raises(InvalidInput, match="overhead"):
        replace(terms(), overhead=0)
    with pytest.raises(InvalidInput, match="longer"):
        joint(terms(), ENERGY, -0.1)
    with pytest.raises(InvalidInput, match="longer"):
        blended(terms(), ENERGY, -0.1)


def test_the_simulator_comes_to_the_same() -> None:
    """Time and joules of a simulated fleet, event by event, are what is expected of it, within 2 %."""
    every_s, work_s = 600.0, 4 * 40 * 3600.0
    supply = DrawnSupply(4, ConstantHazard(0.3), order_s=91.0)
    job = SimulatedJob(work=work_s, checkpoint=CheckpointCost(3.8, 3.8), verify_s=0.0)
    scenario = Scenario(job, V100, supply, DefaultPolicy(every_s), Silicon(0.0), noise=0.0)
    outcomes = [simulate(scenario, seed, 400 * 3600.0) for seed in range(4)]
    exposure = Exposure(4, 4 * 0.3 / 3600, job.reform_s, 91.0 + job.cold_s)
    step = expect(Terms(V100, 0.86, exposure, job.checkpoint, 1 / 4), V100.default, every_s)
    assert sum(each.time_s for each in outcomes) / 4 == pytest.approx(step.time_s * work_s, rel=0.02)
    assert sum(each.energy_j for each in outcomes) / 4 == pytest.approx(step.spent.energy_j * work_s, rel=0.02)
