"""How often a checkpoint is written."""

from math import inf

import pytest

from polythrottle.domain.errors import InvalidInput
from polythrottle.domain.fleet.transient_machine import CheckpointCost, daly_s, interval_s

HOUR_S = 3600.0


@pytest.mark.parametrize(("between_min", "expected_min"), [(24 * 60, 117), (6 * 60, 57), (15, 9.1)])
def test_daly_agrees_with_his_own_example(between_min: float, expected_min: float) -> None:
    """A checkpoint of 5 minutes is due after 117, 57 or 9.1 minutes."""
    assert daly_s(300, 1 / (between_min * 60)) / 60 == pytest.approx(expected_min, rel=0.006)


def test_nothing_is_written_where_nothing_is_lost() -> None:
    """Without losses the interval is endless."""
    assert interval_s(CheckpointCost(3.0), 0.0, 0.1) == inf


def test_a_write_ends_before_the_next_begins() -> None:
    """CheckFreq's bound wins where losses would ask for more checkpoints than can be written."""
    assert interval_s(CheckpointCost(0.01, persist_s=40.0), 1 / 600, 0.3) == pytest.approx(40.2)


def test_stalls_keep_their_share() -> None:
    """A stall of 2 s is due at most every 57.1 s within 3.5 %, in whole steps of 1 s."""
    assert interval_s(CheckpointCost(2.0), 1.0, 1.0) == 56
    assert 2.0 / (2.0 + interval_s(CheckpointCost(2.0), 1.0, 1.0)) <= 0.035


def test_cheap_joules_make_checkpoints_more_frequent() -> None:
    """Where standing still takes 35 % of the power, the interval is about √0.35 of the one for time."""
    slow, often = (interval_s(CheckpointCost(3.8, weight=weight), 1e-4, 0.01) for weight in (1.0, 0.35))
    assert often / slow == pytest.approx(0.35**0.5, rel=0.02)


@pytest.mark.parametrize("wrong", [{"step_s": 0.0}, {"step_s": 1.0, "overhead": 0.0}, {"step_s": 1.0, "overhead": 2.0}])
def test_impossible_figures_are_refused(wrong: dict[str, float]) -> None:
    """A step without time and an overhead outside (0, 1] are errors."""
    with pytest.raises(InvalidInput):
        interval_s(CheckpointCost(1.0), 1e-4, **wrong)
