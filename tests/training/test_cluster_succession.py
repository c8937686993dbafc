"""Who takes over from whom: waits as measured, the moment to ask, and what it came to."""

import pytest

from polythrottle.domain.errors import InvalidInput
from polythrottle.domain.fleet.transient_machine import Rented, Stage
from polythrottle.training.elastic.nodes.rented_nodes import ENOUGH, Successions, Takeover


def measured(*waits_s: float, late: float = 0.5) -> Successions:
    """Return what is known after orders that took so long to join."""
    held = Successions(late)
    for number, wait_s in enumerate(waits_s):
        held.placed(f"old{number}", 0.0, (float(number),))
        held.joined(f"old{number}", wait_s)
    return held


def running(left_s: float | None, ticket: str = "old0") -> Rented:
    """Return an order that runs."""
    return Rented(ticket, Stage.RUNNING, "n1", left_s=left_s)


def test_it_is_asked_when_the_wait_reaches_the_time_left() -> None:
    """Not sooner, not without a limit, not for one that waits itself, and once."""
    held = measured(100.0, 200.0, 300.0)
    assert not held.is_due(running(250.0), 1000.0)
    assert held.is_due(running(199.0), 1000.0)
    assert not held.is_due(running(None), 1000.0)
    assert not held.is_due(Rented("old0", Stage.WAITING, left_s=10.0), 1000.0)
    held.placed("new", 1000.0)
    held.succeed("old0", "new")
    assert not held.is_due(running(199.0), 1000.0)


def test_who_tolerates_less_lateness_asks_sooner() -> None:
    """The time left at which it asks is the wait's quantile."""
    waits = [float(each) for each in range(10, 1010, 10)]
    assert not measured(*waits[:7]).is_due(running(65.0), 2000.0)
    assert measured(*waits[:7], late=0.01).is_due(running(65.0), 2000.0)


def test_without_a_measured_wait_nothing_is_predicted() -> None:
    """An order whose end comes before any has joined is placed again when it has ended."""
    held = Successions(0.5)
    held.placed("only", 0.0)
    assert held.waits(50.0) is None
    assert not held.is_due(running(1.0, "only"), 50.0)


def test_an_order_that_waits_longer_than_usual_counts_already() -> None:
    """A queue that has grown is seen before anything has come out of it."""
    held = measured(10.0, 20.0)
    held.placed("stuck", 100.0)
    assert held.waits(110.0).times_s == (10.0, 20.0)  # type: ignore[union-attr]
    assert held.waits(700.0).times_s == (10.0, 20.0, 600.0)  # type: ignore[union-attr]


def test_many_waits_are_regressed_on_the_queue() -> None:
    """Long queues meant long waits: where the queue is short now, a short wait is predicted."""
    held = measured(*(30.0 * (1 + number) for number in range(2 * ENOUGH)))
    short, long = held.waits(5000.0, (1.0,)), held.waits(5000.0, (15.0,))
    assert short is not None
    assert long is not None
    assert short.mean_s < 0.5 * long.mean_s


@pytest.mark.parametrize(
    ("joined_s", "ended_s", "overlap_s", "gap_s"), [(50.0, 58.0, 8.0, 0.0), (70.0, 60.0, 0.0, 10.0)]
)
def test_overlap_and_interruption_are_what_they_were(
    joined_s: float, ended_s: float, overlap_s: float, gap_s: float
) -> None:
    """Either both were there for a while, or neither was; a predecessor may go once its successor has joined."""
    held = measured(20.0)
    held.placed("new", 40.0)
    held.succeed("old0", "new")
    assert held.to_dismiss(45.0) == []
    if joined_s < ended_s:
        held.joined("new", joined_s)
        assert held.to_dismiss(55.0) == ["old0"]
        held.ended("old0", ended_s)
    else:
        held.ended("old0", ended_s)
        assert held.taken_over() == []
        held.joined("new", joined_s)
    assert held.to_dismiss(90.0) == []
    assert held.taken_over() == [Takeover("old0", "new", overlap_s, gap_s)]
    assert held.taken_over() == []


def test_a_successor_that_is_lost_has_a_successor_of_its_own_place() -> None:
    """The order that replaces it takes over from the same predecessor."""
    held = measured(20.0)
    held.placed("new", 40.0)
    held.succeed("old0", "new")
    assert held.predecessor("new") == "old0"
    held.ended("new", 50.0)
    held.placed("newer", 50.0)
    held.succeed("old0", "newer")
    held.ended("old0", 60.0)
    held.joined("newer", 65.0)
    assert held.taken_over() == [Takeover("old0", "newer", 0.0, 5.0)]


def test_a_node_that_joined_before_its_order_was_another() -> None:
    """A name that a former order had says nothing of this one."""
    held = Successions()
    held.placed("a", 10.0)
    held.joined("a", 5.0)
    assert held.waits(20.0) is None


@pytest.mark.parametrize("late", [0.0, 1.0, -0.5, float("nan")])
def test_a_chance_that_is_none_is_refused(late: float) -> None:
    """Never late and always late are no choices."""
    with pytest.raises(InvalidInput, match="late"):
        Successions(late)
