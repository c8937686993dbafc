"""What batches and slices have taken lately: means, tails, and sizes in between."""

from typing import Any

import pytest

from polythrottle.domain.errors import InvalidInput
from polythrottle.domain.space import BATCH_SIZE, Knob, OperatingPoint, SearchSpace
from polythrottle.training.beside.preparation import BatchedWorkload, Timings


def _timings() -> Timings:
    return Timings(OperatingPoint({"threads": 2}), (1, 2, 4, 8), idle_w=3.0)


def test_a_size_that_was_not_seen_lies_between_its_neighbours() -> None:
    """Times and joules are taken to be on the line between what was measured, in proportion beyond it."""
    timings = _timings()
    timings.served(1, 0.02)
    for samples, took_s in ((2, 0.2), (4, 0.4)):
        timings.trained(samples, took_s)
        timings.drew(samples=samples, joules=10 * took_s)
    slices = timings.option().slices
    assert [each.samples for each in slices] == [1, 2, 4, 8]
    assert [each.alone_s for each in slices] == pytest.approx([0.2, 0.2, 0.4, 0.8])
    assert slices[-1].joules == pytest.approx(8.0)


def test_few_times_have_a_loose_tail_and_many_their_own() -> None:
    """Below a hundred the tail is at least 1.2 times the mean; from then on it is the 99th percentile seen."""
    timings = _timings()
    timings.served(1, 0.01)
    assert timings.option().services[0].tail_s == pytest.approx(0.012)
    for number in range(200):
        timings.served(1, 0.02 if number == 7 else 0.01)
    assert timings.option().services[0].tail_s == pytest.approx(0.01)
    for _ in range(3):
        timings.served(1, 0.03)
    assert timings.option().services[0].tail_s == pytest.approx(0.03)


def test_a_machine_that_has_become_slower_is_believed_at_once() -> None:
    """Five slow batches of the last nine count as the mean; four stragglers do not, and faster ones wait their turn."""
    timings = _timings()
    for _ in range(200):
        timings.served(1, 0.01)
    for _ in range(4):
        timings.served(1, 0.03)
    assert timings.option().services[0].interval_s < 0.011
    timings.served(1, 0.03)
    assert timings.option().services[0].interval_s == pytest.approx(0.03)
    for _ in range(5):
        timings.served(1, 0.005)
    assert 0.01 < timings.option().services[0].interval_s < 0.011


def test_old_times_are_forgotten() -> None:
    """Two hundred fast batches make up for a slow beginning; forgetting on purpose takes all away."""
    timings = _timings()
    timings.served(1, 5.0)
    for _ in range(200):
        timings.served(1, 0.01)
    assert timings.option().services[0].tail_s == pytest.approx(0.01)
    timings.forget(1)
    with pytest.raises(InvalidInput, match="nothing is known"):
        timings.option()


def test_slices_end_where_the_guard_says_and_there_are_none_before_the_first() -> None:
    """A largest size cuts the list; without any slice seen there is none to choose; idle power stands for unknown."""
    timings = _timings()
    timings.served(1, 0.01)
    assert timings.option().slices == ()
    assert timings.option().services[0].batch_j == pytest.approx(0.03)
    timings.trained(8, 0.1)
    assert [each.samples for each in timings.option(most=2).slices] == [1, 2]
    assert timings.option(most=0).slices == ()
    assert timings.option(shared_s={1: 0.5}).shared_s == (0.5,)


class Answering:
    """A workload that only notes what is applied.

    Args:
        batches: Its batch sizes; no knob at all if empty.
    """

    uri = "answering"

    def __init__(self, *batches: int) -> None:
        knobs = [Knob("threads", (1, 2)), *([Knob(BATCH_SIZE, batches)] if batches else [])]
        default = {"threads": 2, **({BATCH_SIZE: batches[0]} if batches else {})}
        self.space = SearchSpace.grid(knobs, default)
        self.applied: list[OperatingPoint] = []

    def apply(self, point: OperatingPoint) -> None:
        """Note it."""
        assert point in self.space
        self.applied.append(point)

    def query(self) -> None:
        """Answer."""


def test_a_batch_is_applied_where_the_workload_has_batches() -> None:
    """Each size once until another comes; a workload without batches is left at its default."""
    several: Any = Answering(1, 4)
    server = BatchedWorkload(several, (1, 4))
    for requests in (1, 3, 4, 1):
        server.answer(requests)
    assert [point[BATCH_SIZE] for point in several.applied] == [1, 4, 1]
    alone: Any = Answering()
    BatchedWorkload(alone).answer(1)
    assert alone.applied == [OperatingPoint({"threads": 2})]
