"""When the next checkpoint is due."""

import pytest

from polythrottle.domain.errors import InvalidInput
from polythrottle.training.elastic.worker.group import LONGEST_S, Cadence, assumed


def known(**words: float) -> Cadence:
    """Return what is known after a while: steps of 0.1 s, checkpoints that stop training for 0.2 s."""
    return Cadence(**{"step_s": 0.1, "stall_s": 0.2, "persist_s": 1.0, "trained_s": 1000.0, "measured": 3} | words)


def test_checkpoints_keep_within_their_share_of_the_time() -> None:
    """However many losses there are, stalls stay within 3.5 %."""
    interval_s = known().interval_s(hazard_per_s=0.1)
    assert 0.2 / (interval_s + 0.2) <= 0.035 + 1e-9


def test_a_write_ends_before_the_next_begins() -> None:
    """A slow store spaces checkpoints out, as CheckFreq has it."""
    assert known(stall_s=0.001, persist_s=40.0).interval_s(0.1) >= 40.0


def test_more_losses_bring_checkpoints_closer_and_none_at_all_half_an_hour_apart() -> None:
    """The interval follows the present hazard; it is never longer than half an hour."""
    often, seldom = known().interval_s(1 / 600), known().interval_s(1 / 36000)
    assert often < seldom < LONGEST_S
    assert known().interval_s(0.0) == LONGEST_S


def test_nothing_is_due_before_a_step_was_timed() -> None:
    """Without a step there is no interval."""
    assert not Cadence().is_due(1e9, 1.0)


def test_a_checkpoint_that_would_break_the_budget_waits() -> None:
    """Even a due one waits until the time trained pays for it."""
    assert known().is_due(1e4, 0.1)
    assert not known(spent_s=40.0).is_due(1e4, 0.1)


def test_steps_beside_a_write_are_compared_with_those_that_are_not() -> None:
    """Slower steps count as cost, scatter around the usual time cancels out."""
    seen = known(spent_s=0.0)
    for duration_s in (0.15, 0.05, 0.15, 0.05):
        seen = seen.stepped(duration_s, writing=True)
    assert seen.spent_s == pytest.approx(0.0)
    assert seen.stepped(0.3, writing=True).spent_s == pytest.approx(0.2)
    assert seen.step_s == known().step_s


def test_what_is_measured_replaces_what_was_assumed() -> None:
    """The first checkpoint counts whole, later ones move the known costs slowly."""
    first = assumed(100_000_000, 0.035).stepped(0.1, False).stalled(0.02).written(0.5, 0.01)
    assert (first.stall_s, first.persist_s, first.drag_s) == pytest.approx((0.02, 0.5, 0.01))
    later = first.stalled(0.04).written(1.5, 0.01)
    assert 0.02 < later.stall_s < 0.04
    assert 0.5 < later.persist_s < 1.5


def test_an_overhead_is_a_share() -> None:
    """Zero would mean never, more than one nothing at all."""
    with pytest.raises(InvalidInput, match="share"):
        Cadence(overhead=0.0)


def test_before_anything_was_trained_the_share_of_checkpoints_is_unknown() -> None:
    """A checkpoint at the end of a training without a step costs all of no time: neither 0 % nor 100 %."""
    assert Cadence().share is None
    assert Cadence().stalled(0.2).share is None
    assert known(spent_s=10.0).share == pytest.approx(0.01)
