"""Policies: pure, never late by their own tails, always getting on when there is room."""

from collections import deque
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from loaded_machine import LoadedMachine

from polythrottle.domain.errors import InvalidInput, UnknownName
from polythrottle.domain.ladder import PointPerformance
from polythrottle.domain.space import OperatingPoint
from polythrottle.training.beside.operating_options import MARGIN, Menu, Option, Slice
from polythrottle.training.beside.scheduler import (
    POLICIES,
    Decision,
    Hours,
    Moment,
    OffPeak,
    alone,
    greedy,
    in_time,
    interleave,
    off_peak,
    paper,
    policy,
    taken,
)

_SLO_S = 0.7


def _option(pace: float = 1.0, watts: float = 20.0, shared_s: tuple[float, ...] = ()) -> Option:
    """Return what a device does at a point: pace is its speed, with times of 0.02 s per item and 0.05 s on top."""
    point = OperatingPoint({"gpu_max_hz": round(1e9 * pace)})

    def took_s(items: int) -> float:
        return (0.05 + 0.02 * items) / pace

    services = tuple(
        PointPerformance(point, n, took_s(n), took_s(n), 1.2 * took_s(n), watts * took_s(n), 10.0) for n in (1, 2, 4, 8)
    )
    slices = tuple(Slice(n, took_s(n), 1.2 * took_s(n), watts * took_s(n)) for n in (1, 2, 4, 8, 16, 32))
    return Option(point, services, slices, shared_s)


_OPTION = _option()
_AGES = st.lists(st.floats(0.0, 2.0), max_size=12).map(lambda ages: tuple(sorted(ages, reverse=True)))
_MOMENTS = st.builds(
    Moment,
    now_s=st.floats(0.0, 1e5),
    ages_s=_AGES,
    option=st.just(_option(shared_s=(0.15, 0.2, 0.3, 0.5))),
    slo_s=st.floats(0.05, 5.0),
    left=st.just(64) | st.integers(0, 64),
    expected_per_s=st.none() | st.floats(0.0, 50.0),
    busy_until_s=st.none() | st.none() | st.just(1e6),
    training=st.booleans(),
    batch=st.integers(1, 8),
    menu=st.none() | st.just(Menu((_OPTION, _option(0.7, 12.0), _option(1.3, 35.0)))),
)


def _moment(*ages_s: float, **given: Any) -> Moment:
    return replace(Moment(100.0, ages_s, _OPTION, _SLO_S, left=64, expected_per_s=4.0), **given)


@given(_MOMENTS)
def test_a_slice_ends_before_the_earliest_deadline_by_its_tail(moment: Moment) -> None:
    """No slice is started after whose tail, and that of a batch, the oldest request would be late."""
    run = interleave(moment).run
    if run is None:
        return
    oldest_s = moment.ages_s[0] if moment.ages_s else 0.0
    assert run.tail_s + moment.option.services[0].tail_s <= moment.slo_s - oldest_s
    assert in_time(moment, run.tail_s)
    assert run.samples <= moment.left


@given(_MOMENTS)
def test_policies_are_pure_and_ask_for_what_is_there(moment: Moment) -> None:
    """The same moment gives the same decision: no more requests than wait, nothing beside what is in flight."""
    for each in (alone, *POLICIES.values()):
        decision = each(moment)
        assert decision == each(moment)
        assert 0 <= decision.drop + decision.skip + decision.batch <= len(moment.ages_s)
        assert not (moment.serving and decision.batch)
        assert not (moment.training and decision.run)


@pytest.mark.slow
@given(_MOMENTS)
def test_interleave_keeps_the_two_apart_and_drops_nobody(moment: Moment) -> None:
    """Inference and fine-tuning never run beside each other, and nobody is given up."""
    decision = interleave(moment)
    assert decision.drop == 0
    assert not (decision.batch and decision.run)
    if moment.serving or moment.training:
        assert decision.idle


@given(_MOMENTS)
def test_interleave_always_gets_on_when_the_device_is_free(moment: Moment) -> None:
    """While requests wait something is started or a time is named; with none, a slice whenever one may start."""
    free = replace(moment, busy_until_s=None, training=False, menu=None)
    decision = interleave(free)
    if free.ages_s:
        assert not decision.idle or (decision.until_s is not None and decision.until_s > free.now_s)
    elif free.left and in_time(free, free.option.slices[0].tail_s):
        assert decision.run is not None


def test_a_request_that_is_due_goes_first() -> None:
    """With 50 ms left before the oldest is late nothing is fine-tuned; just arrived, it may wait for a slice."""
    assert interleave(_moment(0.55)).batch == 1
    found = interleave(_moment(0.0))
    assert found.run is not None
    assert found.run.samples >= 4


def test_a_request_that_is_late_anyway_makes_no_other_one_late() -> None:
    """It is passed over for one that can still be in time, answered where that harms nobody, and before any slice."""
    passed_over = interleave(_moment(0.9, 0.5, expected_per_s=8.0))
    assert (passed_over.skip, passed_over.batch, passed_over.drop) == (1, 1, 0)
    for ages_s in ((0.9,), (0.9, 0.0)):
        harmless = interleave(_moment(*ages_s))
        assert (harmless.skip, harmless.batch, harmless.run) == (0, 1, None)


@pytest.mark.slow
def test_one_second_of_stall_makes_few_requests_late() -> None:
    """In virtual time: the queue that a stall has left behind is passed over, so that it delays nobody else."""
    found = LoadedMachine(interleave, lambda at_s: 6.0 if 10 < at_s < 11 else 1.0, guarded=False).run(30.0)
    assert 0 < found.late < 0.025 * found.requests
    assert found.samples > 0


def test_what_is_passed_over_keeps_its_place() -> None:
    """The oldest but for two is answered, and the two are the oldest still."""
    waiting = deque([1.0, 2.0, 3.0, 4.0])
    assert taken(waiting, Decision("", batch=1, skip=2)) == (3.0,)
    assert list(waiting) == [1.0, 2.0, 4.0]


def test_a_lower_aim_makes_slices_shorter_and_nobody_wait_longer() -> None:
    """Slices are planned with the aim; whether a request is lost is judged by the limit."""
    runs = [interleave(_moment(aim_s=share * _SLO_S)).run for share in (1.0, 0.75, 0.5, 0.25)]
    sizes = [0 if run is None else run.samples for run in runs]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] > sizes[-1]
    aged = interleave(_moment(0.4, 0.1, aim_s=0.3))
    assert (aged.batch, aged.skip, aged.run) == (2, 0, None)


def test_a_full_batch_goes_at_once() -> None:
    """Waiting longer would not fill it further."""
    assert interleave(_moment(*[0.0] * 8)).batch == 8


def test_more_requests_make_slices_smaller() -> None:
    """The queue that the forecast expects is left room for; beyond what can be answered there is no slice at all."""
    runs = [interleave(_moment(expected_per_s=rate)).run for rate in (0.0, 8.0, 12.0, 16.0, 20.0, 40.0)]
    sizes = [0 if run is None else run.samples for run in runs]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] > 0 == sizes[-1]


def test_without_fine_tuning_a_batch_fills_as_long_as_it_may() -> None:
    """A request waits for company until it would be late, and is asked about again then."""
    found = interleave(_moment(0.0, left=0, expected_per_s=1.0))
    assert found.idle
    assert found.until_s is not None
    assert 100.0 < found.until_s < 100.0 + MARGIN * _SLO_S


def test_the_point_that_costs_least_is_applied_first() -> None:
    """A slower point that draws less is chosen where it holds the limit, and the fastest where nothing else does."""
    slow, fast = _option(0.8, 12.0), _option(1.5, 60.0)
    menu = Menu((_OPTION, slow, fast))
    assert interleave(_moment(menu=menu, expected_per_s=8.0, left=0)).point == slow.point
    behind = _moment(*[0.6] * 8, menu=menu, expected_per_s=30.0)
    assert interleave(behind).point == fast.point
    assert interleave(replace(behind, option=fast)).point is None


def test_greedy_takes_whatever_there_is() -> None:
    """A whole step beside inference, single requests, and those whose limit has passed are given up."""
    found = greedy(_moment(0.9, 0.8, 0.1))
    assert (found.drop, found.batch) == (2, 1)
    assert found.run == _OPTION.slices[-1]
    assert alone(_moment(0.1)).run is None


def test_the_papers_policy_looks_for_a_smaller_batch() -> None:
    """The largest batch predicted to hold the limit beside a step is taken; if none is, the step waits."""
    some = replace(_OPTION, shared_s=(0.2, 0.3, 0.5, 0.9))
    found = paper(_moment(*[0.0] * 4, option=some))
    assert (found.batch, found.run) == (4, some.slices[-1])
    none = replace(_OPTION, shared_s=(0.8, 0.8, 0.8, 0.8))
    assert paper(_moment(0.0, option=none)).run is None
    with pytest.raises(InvalidInput, match="prediction"):
        paper(_moment(0.0))


def test_off_peak_waits_for_quiet() -> None:
    """By load or by the hour, also across midnight."""
    assert off_peak(_moment(expected_per_s=30.0)).run is None
    assert off_peak(_moment(expected_per_s=2.0)).run is not None
    assert off_peak(_moment(expected_per_s=None)).run is None
    night = OffPeak(hours=Hours.parse("22:00-06:00"))
    assert night(_moment(day_s=23 * 3600.0)).run is not None
    assert night(_moment(day_s=12 * 3600.0)).run is None
    with pytest.raises(InvalidInput, match="quiet"):
        OffPeak(share=1.5)


def test_a_policy_that_is_none_is_named() -> None:
    """The nearest name is offered."""
    with pytest.raises(UnknownName, match="interleave"):
        policy("interleaved")
    assert policy("greedy") is greedy


def test_hours_are_for_the_policy_that_goes_by_them() -> None:
    """Another one is refused rather than hours ignored."""
    hours = Hours.parse("01:00-02:00")
    assert policy("off-peak", hours) == OffPeak(hours=hours)
    with pytest.raises(InvalidInput, match="goes by no hours"):
        policy("interleave", hours)


@pytest.mark.parametrize(
    "given",
    [{"slo_s": 0.0}, {"expected_per_s": -1.0}, {"left": -1}, {"ages_s": (-0.1,)}, {"ages_s": (0.1, 0.2)}, {"batch": 0}],
    ids=str,
)
def test_a_moment_that_cannot_be_is_refused(given: dict[str, Any]) -> None:
    """Negative ages, requests out of order and the like are errors, not decisions."""
    with pytest.raises(InvalidInput):
        _moment(**given)
