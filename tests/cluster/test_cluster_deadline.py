"""Uniform Progress and greedy: four rules, and what they do on availability as published and as recorded."""

from math import exp
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polythrottle.cluster.plan.deadline import (
    Availability,
    RentalPolicy,
    Situation,
    greedy,
    policy_for,
    replay,
    uniform_progress,
)
from polythrottle.domain.errors import InvalidInput
from polythrottle.domain.fleet.transient_machine import Market

WORK_S, DELAY_S = 48 * 3600.0, 0.2 * 3600
PRICES = {Market.SPOT: 0.3, Market.ON_DEMAND: 1.0}


def seen(now_h: float, done_h: float, holding: Market | None, spot: bool) -> Situation:
    """Return a situation of 48 h of work in 72 h."""
    return Situation(now_h * 3600, done_h * 3600, WORK_S, 72 * 3600, DELAY_S, holding, spot)


@pytest.mark.parametrize(
    ("situation", "wanted"),
    [
        (seen(9, 5.9, None, False), Market.ON_DEMAND),  # (1) idle and behind the line (6 h)
        (seen(9, 6.1, None, False), None),  # idle and ahead: wait
        (seen(9, 1.0, None, True), Market.SPOT),  # (2) spot whenever there is some
        (seen(9, 1.0, Market.SPOT, True), Market.SPOT),
        (seen(9, 6.1, Market.ON_DEMAND, True), Market.ON_DEMAND),  # (3) on-demand is kept on the line …
        (seen(9, 6.3, Market.ON_DEMAND, True), Market.SPOT),  # … and left two changes ahead of it
        (seen(60, 36.1, None, True), Market.ON_DEMAND),  # (4) 12 h left for 11.9 h of work
    ],
)
def test_uniform_progress_follows_its_four_rules(situation: Situation, wanted: Market | None) -> None:
    """Each rule decides where it should."""
    assert uniform_progress(situation) is wanted


def test_greedy_waits_until_it_must_not() -> None:
    """Greedy takes spot, waits without it however far behind, and ends on demand."""
    assert greedy(seen(9, 0, None, False)) is None
    assert greedy(seen(9, 0, None, True)) is Market.SPOT
    assert greedy(seen(60, 36.1, None, False)) is Market.ON_DEMAND
    assert greedy(seen(61, 37.1, Market.ON_DEMAND, True)) is Market.ON_DEMAND


def drawn(share: float, up_h: float, seed: int, days: int = 45) -> Availability:
    """Return a record with spells whose lengths are log-normal with a heavy tail, as those recorded are."""
    random, now_s, there = Random(seed), 0.0, False
    times_s, flags = [], []
    while now_s < days * 86400:
        times_s.append(now_s)
        flags.append(there)
        mean_s = 3600 * (up_h if there else up_h * (1 - share) / share)
        now_s += max(600.0, random.lognormvariate(0, 1.6) * mean_s / exp(1.28))
        there = not there
    return Availability(tuple(times_s), tuple(flags), days * 86400.0)


def mean_cost(policy: RentalPolicy, share: float, up_h: float, slack: float) -> float:
    """Return the cost against pure on-demand, over records and beginnings; the deadline is always met."""
    costs = []
    for seed in range(3):
        record = drawn(share, up_h, seed)
        for begin in range(12):
            done = replay(policy, record, WORK_S, WORK_S * slack, DELAY_S, begin * 3.7 * 86400)
            assert done.met
            costs.append(done.usd(PRICES) / (WORK_S / 3600))
    return sum(costs) / len(costs)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("share", "up_h", "slack", "published"),
    [
        (0.17, 1, 1.25, (0.98, 0.96)),
        (0.17, 1, 2.0, (0.90, 0.89)),
        (0.47, 2, 1.25, (0.84, 0.77)),
        (0.47, 2, 1.5, (0.75, 0.69)),
        (0.47, 2, 2.0, (0.59, 0.60)),
        (0.76, 5, 1.25, (0.55, 0.47)),
        (0.76, 5, 1.5, (0.44, 0.42)),
        (0.9, 10, 1.5, (0.35, 0.355)),
        (0.9, 10, 2.0, (0.32, 0.33)),
    ],
)
def test_costs_are_those_of_the_published_replays(
    share: float, up_h: float, slack: float, published: tuple[float, float]
) -> None:
    """On drawn records of the same availability both rules cost what they do on the recorded ones, within 0.07."""
    found = mean_cost(greedy, share, up_h, slack), mean_cost(uniform_progress, share, up_h, slack)
    assert found == pytest.approx(published, abs=0.07)


def test_uniform_progress_wins_where_slack_is_small_and_loses_a_little_where_it_is_large() -> None:
    """The order of the two turns between slack 1.25 and 2, and the choice by slack follows it."""
    tight = mean_cost(greedy, 0.47, 2, 1.25) - mean_cost(uniform_progress, 0.47, 2, 1.25)
    roomy = mean_cost(greedy, 0.76, 5, 2.0) - mean_cost(uniform_progress, 0.76, 5, 2.0)
    assert tight > 0.03
    assert -0.06 < roomy < 0
    assert policy_for(WORK_S, WORK_S * 1.25, 0.5) is uniform_progress
    assert policy_for(WORK_S, WORK_S * 2, 0.7) is greedy
    assert policy_for(WORK_S, WORK_S * 2, 0.17) is uniform_progress


@settings(max_examples=60, deadline=None)
@given(
    spells=st.lists(st.integers(300, 200_000), min_size=1, max_size=40),
    first=st.booleans(),
    slack=st.floats(1.03, 3),
    begin_s=st.integers(0, 100_000),
)
def test_the_deadline_is_met_whatever_spot_does(spells: list[int], first: bool, slack: float, begin_s: int) -> None:
    """Both rules keep the deadline on any record, where on-demand alone would with a look to spare."""
    times_s = [float(sum(spells[:index])) for index in range(len(spells))]
    record = Availability(
        tuple(times_s), tuple((index % 2 == 0) == first for index in range(len(spells))), float(sum(spells))
    )
    for policy in (uniform_progress, greedy):
        done = replay(policy, record, 36_000, max(36_000 * slack, 36_000 + 3 * 720 + 300), 720, begin_s)
        assert done.met


def test_where_spot_never_goes_nothing_is_on_demand() -> None:
    """With spot all the time the cost is that of spot and one change; joules are power times what was held."""
    always = Availability((0.0,), (True,), 86400.0)
    done = replay(uniform_progress, always, WORK_S, 2 * WORK_S, DELAY_S)
    assert done.held_s[Market.ON_DEMAND] == 0
    assert done.usd(PRICES) == pytest.approx(0.3 * 48.2)
    assert done.energy_j(200) == pytest.approx(200 * (WORK_S + DELAY_S))
    assert done.changes == 1


def test_on_recorded_clusters_the_deadline_is_met(transient: Path) -> None:
    """On two recorded clusters, most of their machines wanted at once, both rules are in time and cost less."""
    from polythrottle.cluster.plan.deadline import read_availability

    for name, machines in (("gcp_spot_cluster_v100_us-east1-c.csv", 70), ("aws_spot_cluster_p3.csv", 20)):
        record = read_availability(transient / name, machines)
        assert 0 < record.share < 1
        for policy in (uniform_progress, greedy):
            done = replay(policy, record, 4 * 3600, 6 * 3600, 300)
            assert done.met
            assert done.usd(PRICES) < 4 + 300 / 3600


def test_what_cannot_be_is_refused() -> None:
    """A deadline nobody can keep and a record that is none say so."""
    with pytest.raises(InvalidInput, match="cannot be done"):
        replay(greedy, Availability((0.0,), (True,), 1.0), 100, 90, 0)
    with pytest.raises(InvalidInput, match="begins at 0"):
        Availability((1.0,), (True,), 2.0)
    with pytest.raises(InvalidInput, match="rise"):
        Availability((0.0, 5.0), (True, False), 5.0)
