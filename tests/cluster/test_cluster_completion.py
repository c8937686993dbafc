"""A whole job on machines that may be lost."""

from dataclasses import replace

import pytest

from polythrottle.cluster.predict.completion import ClusterJob, ClusterMember, complete
from polythrottle.domain.errors import InvalidInput
from polythrottle.domain.fleet.transient_machine import HOUR_S, KEPT, ConstantHazard, ObservedLifetime

SURE = ClusterJob(7200.0, (ClusterMember(KEPT, 1.0, 100.0),) * 2, lambda there: float(len(there)), 0.5, 50.0)
RISKY = replace(SURE, members=(ClusterMember(ConstantHazard(0.5), 1.0, 100.0),) * 2, replace_s=120.0)


def test_without_losses_all_is_known() -> None:
    """Two workers at 1 step/s do 7,200 steps in an hour, for $2.50 and 250 W × 1 h, without spread."""
    found = complete(SURE, 5)
    assert found.time_s is not None
    assert (found.time_s.low, found.time_s.mean, found.time_s.high) == pytest.approx((3600.0,) * 3)
    assert found.usd is not None
    assert found.usd.mean == pytest.approx(2.5)
    assert found.energy_j is not None
    assert found.energy_j.mean == pytest.approx(250 * HOUR_S)
    assert found.finished == 1


def test_checkpoints_take_their_share() -> None:
    """10 s of every 100 s of training make an hour a tenth longer."""
    found = complete(replace(SURE, checkpoint_s=10.0, checkpoint_every_s=100.0), 1)
    assert found.time_s is not None
    assert found.time_s.mean == pytest.approx(3960)


def test_a_loss_slows_those_that_go_on() -> None:
    """One of two lost after half an hour and not replaced: the rest takes twice as long."""
    half = ObservedLifetime((0.0, 1799.0, 1801.0), (1.0, 1.0, 0.0))
    found = complete(replace(SURE, members=(ClusterMember(half, 1.0), ClusterMember(KEPT, 1.0))), 20)
    assert found.time_s is not None
    assert found.time_s.mean == pytest.approx(5400, abs=3)
    assert found.energy_j is None
    assert found.usd is not None
    assert found.usd.mean == pytest.approx(0.5 + 1.5 + 0.75, abs=0.01)


def test_a_barrier_also_does_again_what_was_lost() -> None:
    """With work thrown back to a checkpoint, and all stopped to form anew, the same losses take longer."""
    kinds = {
        "on": RISKY,
        "stopped": replace(RISKY, regroup_s=60.0),
        "redone": replace(RISKY, regroup_s=60.0, redone=True, checkpoint_every_s=1800.0),
    }
    means = [found.time_s.mean for found in map(complete, kinds.values()) if found.time_s is not None]
    assert 3600 < means[0] < means[1] < means[2]


def test_losses_match_their_rate() -> None:
    """Two machines of rate 0.5/h over a little more than an hour lose about one."""
    found = complete(RISKY, 800)
    assert found.losses is not None
    assert found.losses.mean == pytest.approx(1.0, abs=0.12)


def test_a_job_that_loses_all_does_not_finish() -> None:
    """Draws that lost every machine count as unfinished, and in no figure."""
    found = complete(replace(SURE, members=(ClusterMember(ConstantHazard(60.0), 1.0),)), 10)
    assert found.finished == 0
    assert found.time_s is None
    assert complete(replace(RISKY, replace_s=None), 400).finished == pytest.approx(1 - 0.16, abs=0.1)


def test_the_same_seed_draws_the_same() -> None:
    """And another one another."""
    assert complete(RISKY, 30, 1) == complete(RISKY, 30, 1)
    assert complete(RISKY, 30, 1) != complete(RISKY, 30, 2)


def test_an_impossible_job_is_refused() -> None:
    """No steps, nobody, no speed, no draws."""
    for change in ({"steps": 0}, {"members": ()}, {"speed": lambda there: 0.0}, {"checkpoint_every_s": 0}):
        with pytest.raises(InvalidInput):
            replace(SURE, **change)
    with pytest.raises(InvalidInput):
        complete(SURE, 0)
