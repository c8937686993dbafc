"""Slack turned into joules."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polythrottle.domain.errors import InvalidInput
from polythrottle.domain.fleet.gpu_variability import (
    UNKNOWN,
    Pace,
    by_turns,
    frugal,
    grade,
    ladder,
    met,
    of_grade,
    pace,
    paced,
    paces,
)
from polythrottle.domain.fleet.transient_machine import Cap

CAPS = (Cap(None, 1.0, 220.0), Cap(200.0, 1.05, 184.0), Cap(150.0, 1.18, 145.0), Cap(100.0, 1.9, 98.0))
IDLE_W = 40.0


def test_the_fast_are_slowed_to_just_meet_the_slow() -> None:
    """With a node 10 % slower, the others run 5 % slower for less; the slow one keeps its clock, the step its time."""
    slow, middle = grade(1.10), grade(1.0)
    found = pace({middle: 7, slow: 1}, CAPS, IDLE_W)
    assert found.caps == {middle: CAPS[1], slow: CAPS[0]}
    assert found.step == pytest.approx(1.10)
    plain = paced({(UNKNOWN, middle): 7, (UNKNOWN, slow): 1}, {UNKNOWN: CAPS[0]}, IDLE_W)
    assert plain.step == found.step
    assert found.joules < 0.9 * plain.joules


def test_the_power_of_a_step_is_that_of_running_and_waiting() -> None:
    """Seven nodes at 184 W for 1.05 of a step of 1.10 and at 40 W for the rest, one at 220 W for all of it."""
    found = pace({grade(1.0): 7, grade(1.10): 1}, CAPS, IDLE_W)
    assert found.joules == pytest.approx(7 * (184 * 1.05 + 40 * 0.05) + 220 * 1.10)
    assert found.busy == pytest.approx(7 * 1.05 / 1.10 + 1)
    assert found.waiting_w == pytest.approx(7 * 40 * 0.05 / 1.10)


def test_who_is_not_known_keeps_the_default() -> None:
    """Nobody is slowed before it was looked at; it does not set the barrier either."""
    assert met([UNKNOWN, grade(1.0)], ladder(CAPS, IDLE_W), 1.2)[UNKNOWN] == CAPS[0]
    assert pace({UNKNOWN: 3}, CAPS, IDLE_W).step == 1.0


def test_waiting_longer_is_dearer_where_waiting_costs() -> None:
    """A board that draws nearly as much at the barrier as at work gains from being slow."""
    assert frugal(CAPS, 1.0, 1.06, 40.0) == CAPS[1]
    assert frugal(CAPS, 1.0, 1.0, 40.0) == CAPS[0]
    assert frugal(CAPS, 1.5, 1.0, 40.0) == CAPS[0]  # it misses the barrier anyway: as fast as it can


def test_a_node_taken_for_another_holds_all_up() -> None:
    """Believed as fast as the middle and 4 % slower in truth, it opens the barrier later."""
    caps = {grade(1.0): CAPS[1]}
    assert paced({(grade(1.0), grade(1.04)): 1}, caps, IDLE_W).step == pytest.approx(1.05 * 1.04)


@given(st.dictionaries(st.integers(360, 460), st.integers(1, 50), min_size=1), st.floats(1.0, 1.3))
def test_slack_never_slows_the_job_nor_costs_joules(nodes: dict[int, int], stretch: float) -> None:
    """Whatever the fleet: no step beyond the barrier, and never more joules than at default clocks."""
    found = pace(nodes, CAPS, IDLE_W, stretch)
    slowest = max(map(of_grade, nodes))
    assert found.step <= slowest * stretch + 1e-9
    plain = paced({(each, each): number for each, number in nodes.items()}, dict.fromkeys(nodes, CAPS[0]), IDLE_W)
    assert plain.step == pytest.approx(slowest)
    waiting = sum(nodes.values()) * IDLE_W * max(0.0, found.step - slowest)  # what the stretch itself costs
    assert found.joules <= plain.joules + waiting + 1e-6


def test_a_fleet_s_paces_are_caps_of_a_mean_node() -> None:
    """The first is the reference; later barriers are slower and draw less."""
    found = [cap for _, cap in paces({grade(1.0): 3, grade(1.08): 1}, CAPS, IDLE_W, (1.0, 1.06, 1.2))]
    assert found[0].slowdown == 1.0
    assert [cap.slowdown for cap in found] == sorted(cap.slowdown for cap in found)
    assert [cap.power_w for cap in found] == sorted((cap.power_w for cap in found), reverse=True)


@pytest.mark.parametrize(("nodes", "stretch"), [({}, 1.0), ({400: 0}, 1.0), ({400: 1}, 0.9)])
def test_impossible_paces_are_refused(nodes: dict[int, int], stretch: float) -> None:
    """Nobody to pace, or a barrier before the slowest."""
    with pytest.raises(InvalidInput):
        pace(nodes, CAPS, IDLE_W, stretch)


def test_paces_by_turns_are_weighed_by_their_time() -> None:
    """Half the steps at 1.0 and 200 W, half at 1.5 and 100 W: 1.25 on average, at 140 W."""
    fast, slow = Pace(1.0, {}, 200.0, 2.0, 10.0), Pace(1.5, {}, 100.0, 1.0, 20.0)
    found = by_turns([(fast, 0.5), (slow, 0.5)])
    assert (found.step, found.power_w, found.busy, found.waiting_w) == pytest.approx((1.25, 140.0, 1.4, 16.0))
    assert found.joules == pytest.approx((fast.joules + slow.joules) / 2)
    more = by_turns([(fast, 0.5), (slow, 0.5)], 0.5)
    assert (more.step, more.power_w) == pytest.approx((1.25, (200 * 1.5 + 100 * 2.0) / 3.5))
    assert by_turns([(fast, 1.0)], 0.3) == fast
