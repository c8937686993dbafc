"""Several jobs on machines of several kinds: Gavel's program with dollars, joules and deadlines."""

import pytest

from polythrottle.cluster.plan.job_shares import Aim, Kind, Shares, SharingJob, share
from polythrottle.domain.errors import InvalidInput
from polythrottle.domain.fleet.transient_machine import Cap

KINDS = (
    Kind("k80", 4, 0.256, (Cap(None, 1, 120),)),
    Kind("v100", 1, 0.861, (Cap(250, 1, 227), Cap(150, 1.215, 149))),
)


def jobs(deadline_h: float | None = 24) -> tuple[SharingJob, ...]:
    """Return two jobs with different likings."""
    deadline_s = None if deadline_h is None else deadline_h * 3600
    return (
        SharingJob("old", 50_000, {"k80": 1.0, "v100": 2.0}, deadline_s=deadline_s),
        SharingJob("new", 100_000, {"k80": 0.5, "v100": 5.0}, deadline_s=deadline_s),
    )


def used(found: Shares, kind: str) -> float:
    """Return how many machines of a kind are in use on average."""
    return sum(part for shares in found.time.values() for (name, _), part in shares.items() if name == kind)


def test_nobody_gets_more_than_there_is() -> None:
    """Shares of a job sum up to one at most, and machines in use to those there are."""
    for aim in Aim:
        found = share(jobs(), KINDS, aim)
        assert all(sum(parts.values()) <= 1 + 1e-9 for parts in found.time.values())
        assert used(found, "v100") <= 1 + 1e-9
        assert found.feasible


def test_deadlines_are_met_with_the_fewest_dollars_or_joules() -> None:
    """Each aim is the best in its own figure, and neither does more than it must."""
    cost, energy = share(jobs(), KINDS, Aim.COST), share(jobs(), KINDS, Aim.ENERGY)
    assert cost.usd_per_h < energy.usd_per_h
    assert energy.power_w < cost.power_w
    for found in (cost, energy):
        for job in jobs():
            assert found.steps_per_s[job.name] == pytest.approx(job.needed_per_s)
    assert ("v100", 150) in {key for parts in energy.time.values() for key in parts}


def test_fair_shares_leave_no_job_worse_than_an_equal_share() -> None:
    """With a fifth of its time on the V100 and the rest on a K80 each job would do 1.2 and 1.4 steps per second."""
    found = share(jobs(None), KINDS, Aim.FAIR)
    assert found.steps_per_s["old"] >= 0.8 * 1.0 + 0.2 * 2.0 - 1e-9
    assert found.steps_per_s["new"] >= 0.8 * 0.5 + 0.2 * 5.0 - 1e-9
    assert found.steps_per_s["old"] / 1.2 == pytest.approx(found.steps_per_s["new"] / 1.4)


def test_weight_buys_speed() -> None:
    """A job of twice the weight of its like gets twice its speed."""
    pair = [SharingJob(name, 1000, {"v100": 5.0}, weight=weight) for name, weight in (("a", 1.0), ("b", 2.0))]
    found = share(pair, KINDS, Aim.FAIR)
    assert found.steps_per_s["b"] == pytest.approx(2 * found.steps_per_s["a"])


def test_a_job_that_falls_short_is_named_with_how_much() -> None:
    """Two jobs that both need the one V100 for the whole time are short of one machine's work together."""
    pair = [SharingJob(name, 5 * 3600, {"v100": 5.0}, deadline_s=3600) for name in ("a", "b")]
    for aim in Aim:
        found = share(pair, KINDS, aim)
        assert not found.feasible
        assert sum(found.short.values()) == pytest.approx(1.0)
        assert set(found.short) <= {"a", "b"}


def test_overhead_and_workers_count() -> None:
    """Losses slow a job down, and a job of two workers takes two machines at a time."""
    slow = SharingJob("wide", 3600, {"k80": 2.0}, workers=2, deadline_s=3600, overhead=0.2)
    found = share([slow], KINDS, Aim.COST)
    assert sum(found.time["wide"].values()) == pytest.approx(1 / 1.6)
    assert found.usd_per_h == pytest.approx(0.256 * 2 / 1.6)
    assert found.power_w == pytest.approx(240 / 1.6)


def test_what_cannot_be_is_refused() -> None:
    """No jobs, names twice, no fitting machine, no deadline: each says which."""
    with pytest.raises(InvalidInput, match="at least one job"):
        share([], KINDS)
    with pytest.raises(InvalidInput, match="is there twice"):
        share([*jobs(), *jobs()], KINDS)
    with pytest.raises(InvalidInput, match="'big' needs 8 machines"):
        share([SharingJob("big", 1, {"k80": 1.0}, workers=8)], KINDS)
    with pytest.raises(InvalidInput, match="'old' has no deadline"):
        share(jobs(None), KINDS, Aim.COST)
    with pytest.raises(InvalidInput, match="positive speed"):
        SharingJob("none", 1, {})
    with pytest.raises(InvalidInput, match="in the past"):
        SharingJob("late", 1, {"k80": 1.0}, deadline_s=0)
