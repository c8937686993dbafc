"""Training and checkpoints by turns, in closed form."""

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polythrottle.cluster.job_simulator import Cycle


def walked(cycle: Cycle, wall_s: float, step_s: float = 0.25) -> tuple[float, int]:
    """Return training time and checkpoints by walking through time in small steps."""
    trained_s = left_s = 0.0
    written = 0
    since_s = 0.0
    for _ in range(round(wall_s / step_s)):
        if left_s > 0:
            left_s -= step_s
            if left_s <= 0:
                written, since_s = written + 1, 0.0
            continue
        trained_s, since_s = trained_s + step_s, since_s + step_s
        if since_s >= cycle.interval_s:
            left_s = cycle.stall_s
            if not left_s:
                written, since_s = written + 1, 0.0
    return trained_s, written


@given(st.integers(1, 40), st.integers(0, 12), st.integers(0, 800))
def test_the_closed_form_is_the_walk(interval: int, stall: int, wall: int) -> None:
    """Training time and checkpoints after any time are those of a walk through it."""
    cycle = Cycle(interval / 4, stall / 4)
    trained_s, written = walked(cycle, wall / 4)
    assert cycle.trained_s(wall / 4) == pytest.approx(trained_s)
    assert cycle.written(wall / 4) == written


@given(st.floats(0.5, 500), st.floats(0, 20), st.floats(0, 5000))
def test_the_time_for_work_is_the_first_that_is_enough(interval_s: float, stall_s: float, trained_s: float) -> None:
    """So much training is done by then, and not before."""
    cycle = Cycle(interval_s, stall_s)
    wall_s = cycle.wall_s(trained_s)
    assert cycle.trained_s(wall_s) == pytest.approx(trained_s, abs=1e-6)
    assert cycle.trained_s(max(0.0, wall_s - 1e-3)) <= trained_s


def test_a_loss_undoes_all_since_the_newest_whole_checkpoint() -> None:
    """While one is still being written, the one before it counts."""
    cycle = Cycle(100.0, 2.0, persist_s=10.0)
    assert cycle.undone_s(60.0) == 60.0
    assert cycle.undone_s(101.0) == 100.0  # standing still for it: not written yet
    assert cycle.undone_s(102.0 + 5.0) == 105.0
    assert cycle.undone_s(102.0 + 15.0) == 15.0


def test_without_checkpoints_everything_is_training_and_everything_is_lost() -> None:
    """An infinite interval never stalls."""
    cycle = Cycle(inf, 3.0)
    assert (cycle.trained_s(500.0), cycle.wall_s(500.0), cycle.undone_s(500.0), cycle.written(500.0)) == (
        *(500.0, 500.0, 500.0),
        0,
    )
