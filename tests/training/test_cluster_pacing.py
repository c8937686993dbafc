"""What the controller answers nodes with: caps under which each just meets the slowest."""

from typing import Any

import pytest

from polythrottle.domain.errors import InvalidInput
from polythrottle.training.elastic.nodes.overseer import PacePlanner
from polythrottle.training.elastic.worker.process import Pace, Tally

CAPS = [[None, 1.0, 300.0], [250.0, 1.04, 260.0], [200.0, 1.1, 215.0]]
"""What the store knows: a quarter more slowly, 0.95 and 0.79 of the joules."""


def said(own_s: float, step_s: float = 1.0, steps: int = 10, **more: Any) -> dict[str, Any]:
    """Return what a node says of its steps and its board."""
    tally = Tally(steps, step_s * steps, max(0.0, step_s - own_s) * steps, 0.1 * steps)
    pace = Pace(1, "Net-b8", 8, 16, 100, tally).document()
    board = {
        "gpu": "V100",
        "looks": [[None, own_s, 300.0, 3]],
        "caps": CAPS,
        "power_w": 280.0,
        "limits": [200, 225, 250],
        **more,
    }
    return {"pace": pace, "steering": board}


def paced(**own_s: float) -> PacePlanner:
    """Return the pacing of nodes that have measured their own steps."""
    held = PacePlanner()
    held.formed(1, sorted(own_s))
    for name, each_s in own_s.items():
        held.hear(name, {"pace": said(each_s, steps=0)["pace"]})
        held.hear(name, said(each_s))
    return held


def limit_w(held: PacePlanner, name: str) -> float | None:
    """Return the limit a node is told, None for its default."""
    cap = held.answer(name)["cap"]
    return None if cap is None else cap[0]


def test_each_node_gets_the_cap_that_just_meets_the_slowest() -> None:
    """12 % of slack take the lowest cap, 5 % the one between, and the slowest none."""
    held = paced(a=0.89, b=0.95, c=1.0)
    assert [limit_w(held, name) for name in "abc"] == [200.0, 250.0, None]
    assert held.barrier_s == 1.0
    assert held.answer("a")["room"] == pytest.approx(1 / 0.89 - 1)
    assert held.answer("a")["waiting_w"] == 560.0
    held.hear("b", said(0.95, power_w=None))
    assert held.answer("a")["waiting_w"] == 560.0, "it is not known right after a change, and was 280 W before"
    assert held.row("b")["steering"]["power_w"] is None


def test_all_may_be_later_where_that_was_asked_for() -> None:
    """5 % more for everybody: the slowest is capped, too."""
    held = PacePlanner(0.05)
    held.formed(1, ["a", "b"])
    for name in "ab":
        held.hear(name, said(1.0))
    assert limit_w(held, "a") == 250.0


def test_a_newcomer_that_has_not_measured_itself_is_left_at_its_default() -> None:
    """And nobody waits for it in the plan."""
    held = paced(a=0.9, b=1.0)
    held.formed(2, ["a", "b", "c"])
    assert held.answer("c")["cap"] is None
    assert limit_w(held, "a") is not None
    assert held.answer("nobody") == {}


def test_a_new_generation_plans_anew() -> None:
    """When the slowest has gone, the next slowest has no slack left."""
    held = paced(a=0.9, b=1.0)
    assert limit_w(held, "a") == 200.0
    held.formed(2, ["a"])
    assert limit_w(held, "a") is None


def test_what_a_node_has_seen_goes_before_what_the_fleet_knows() -> None:
    """On this node 200 W takes 30 % longer: it gets the other."""
    held = paced(a=0.89, b=1.0)
    held.hear("a", said(0.89, looks=[[None, 0.89, 300.0, 3], [200.0, 0.89 * 1.3, 215.0, 3]]))
    assert limit_w(held, "a") == 250.0


def test_nodes_learn_from_each_other_within_their_type() -> None:
    """What one has looked at the next of its type is told; one of another type is not."""
    held = PacePlanner()
    held.formed(1, ["a", "b", "c"])
    held.hear("a", said(1.0, caps=[], looks=[[None, 1.0, 300.0, 3], [200.0, 1.1, 215.0, 3]]))
    held.hear("b", said(0.85, caps=[]))
    held.hear("c", said(0.85, caps=[], gpu="A100"))
    assert [limit_w(held, name) for name in "abc"] == [None, 200.0, None]


def test_one_that_says_it_is_slow_slows_nobody_beyond_the_jobs_own_steps() -> None:
    """It says 3 s, the job's steps take 1 s: the barrier stays where it is."""
    held = paced(a=0.95, b=1.0)
    held.formed(2, ["a", "b", "c"])
    for name, own_s in (("a", 0.95), ("b", 1.0), ("c", 3.0)):
        for steps in (0, 10):
            words = said(own_s, 1.0, steps)
            words["pace"]["generation"] = 2
            held.hear(name, words)
    assert held.answer("b")["cap"] is not None
    assert held.barrier_s == 1.0


def test_status_shows_what_is_known_and_nothing_for_what_is_not() -> None:
    """Times of the newest steps, and of the board what the node says."""
    held = paced(a=0.9)
    row = held.row("a")
    assert (row["step_s"], row["own_s"], row["input_s"]) == (1.0, pytest.approx(0.9), pytest.approx(0.1))
    assert (row["steering"]["power_w"], row["steering"]["planned"]) == (280.0, True)
    assert held.row("nobody") == {"step_s": None, "own_s": None, "input_s": None, "steering": None}
    held.formed(2, ["a"])
    held.hear("a", {})
    assert held.row("a")["step_s"] is None


def test_the_slowdown_of_a_cap_that_is_only_looked_at_is_not_known() -> None:
    """At its default it is 1; under a known limit what that does; under another nobody can say."""
    held = paced(a=0.9)
    assert held.slowdowns()["a"] == 1.0
    held.hear("a", said(0.9, limit_w=250.0))
    assert held.slowdowns()["a"] == pytest.approx(1.04)
    held.hear("a", said(0.9, limit_w=123.0))
    assert held.slowdowns()["a"] is None


@pytest.mark.parametrize(
    "words",
    [
        {"pace": {}},
        {"steering": {"looks": [[None, -1.0, 3.0, 1]]}},
        {"steering": {"looks": [[1.0]]}},
        {"steering": {"caps": [[None, 1.0, 1.0]] * 1001}},
        {"steering": "x"},
        {"steering": {"looks": [[None, 1.0, 1.0, float("inf")]]}},
        {"pace": {"generation": float("inf")}},
    ],
)
def test_words_that_make_no_sense_are_refused(words: dict[str, Any]) -> None:
    """What was known before stays."""
    held = paced(a=0.9, b=1.0)
    with pytest.raises(InvalidInput):
        held.hear("a", words)
    assert limit_w(held, "a") == 200.0


def test_what_is_no_number_is_not_taken_for_one() -> None:
    """A text, a truth or infinity where watts should be is unknown."""
    held = paced(a=0.9)
    for wrong in ("300", True, float("inf"), float("nan"), [1]):
        held.hear("a", said(0.9, power_w=wrong, known_s=wrong, reason=wrong))
        assert held.nodes["a"].board["power_w"] is None
        assert held.nodes["a"].board["known_s"] is None


def test_a_plan_stands_until_there_is_something_new() -> None:
    """Windows drift by fractions of a per cent: that moves no cap; a limit nobody had looked at does."""
    held = paced(a=0.95, b=1.0)
    assert limit_w(held, "a") == 250.0
    held.hear("a", said(0.99))
    assert limit_w(held, "a") == 250.0
    held.hear("a", said(0.99, looks=[[None, 0.99, 300.0, 3], [225.0, 1.0, 240.0, 3]]))
    assert limit_w(held, "a") is None


def test_no_cap_is_taken_to_make_a_node_faster() -> None:
    """A look that was faster than the default was so by chance: the slowest is not capped for it."""
    held = paced(a=0.5, b=1.0)
    held.hear("b", said(1.0, looks=[[None, 1.0, 300.0, 3], [225.0, 0.98, 240.0, 3]]))
    assert limit_w(held, "b") is None


def test_a_limit_that_a_board_has_not_is_not_asked_of_it() -> None:
    """An administrator's limits leave one node less than its like."""
    held = paced(a=0.89, b=1.0)
    held.hear("a", said(0.89, limits=[250.0], looks=[[None, 0.89, 300.0, 3], [225.0, 0.93, 280.0, 3]]))
    assert limit_w(held, "a") == 250.0
