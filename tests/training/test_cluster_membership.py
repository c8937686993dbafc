"""Who is there, and which nodes make up the generation that trains."""

import random

import pytest

from polythrottle.domain.errors import InvalidInput
from polythrottle.training.elastic.membership import EventKind, Membership, Phase, Rules, restored

AT = ("127.0.0.1", 1)


def gathered(names: str, rules: Rules, now_s: float = 0.0) -> Membership:
    """Return a membership whose nodes have joined and wait."""
    held = Membership(rules)
    for name in names:
        held.join(name, AT, now_s)
        held.ready(name, AT, now_s)
    return held


def happenings(held: Membership, now_s: float) -> list[str]:
    """Return what happens by a time, as words."""
    return [str(event.happening) for event in held.tick(now_s)]


def test_a_first_generation_waits_for_all_until_the_last_call() -> None:
    """Two of three nodes begin once the last call is over, three at once."""
    held = gathered("ab", Rules(2, 3, last_call_s=3.0))
    assert "formed" not in happenings(held, 0.0)
    for name in "ab":
        held.beat(name, 2.9)
    assert "formed" not in happenings(held, 2.9)
    assert "formed" in happenings(held, 3.0)
    assert held.members == ("a", "b")
    assert "formed" in happenings(gathered("abc", Rules(2, 3)), 0.0)


def test_a_node_that_misses_three_beats_is_lost_and_the_others_go_on_without_it() -> None:
    """Silence alone, by the controller's clock, takes a node out; the next generation has the next number."""
    held = gathered("ab", Rules(1, 2))
    held.tick(0.0)
    held.beat("b", 3.0)
    assert happenings(held, 3.01) == ["lost"]
    assert held.phase is Phase.REGROUPING
    assert held.broken
    held.ready("b", AT, 3.2)
    assert happenings(held, 3.2) == ["formed"]
    assert (held.generation, held.members, held.phase) == (2, ("b",), Phase.TRAINING)


def test_the_chief_is_the_longest_serving_node() -> None:
    """When rank 0 goes, the next in age takes its duties; a newcomer never does."""
    held = gathered("abc", Rules(1, 3))
    held.tick(0.0)
    held.leave("a", "gone")
    for name in "bc":
        held.ready(name, AT, 1.0)
    held.join("a", AT, 1.0)
    held.ready("a", AT, 1.0)
    held.tick(1.0)
    assert held.members == ("b", "c", "a")


def test_a_newcomer_ends_a_generation_only_after_its_first_step() -> None:
    """A generation that still starts is not disturbed by who comes; after its first step it makes room."""
    held = gathered("a", Rules(1, 2, last_call_s=0.0))
    held.tick(0.0)
    held.join("b", AT, 1.0)
    held.ready("b", AT, 1.0)
    held.beat("a", 1.0)
    held.tick(1.0)
    assert held.phase is Phase.TRAINING
    held.stepped(1)
    assert held.phase is Phase.REGROUPING
    assert not held.broken
    held.ready("a", AT, 2.0)
    held.tick(2.0)
    assert held.members == ("a", "b")


def test_a_newcomer_waits_while_there_is_no_room() -> None:
    """More nodes than a generation may have do not disturb it."""
    held = gathered("a", Rules(1, 1))
    held.tick(0.0)
    held.stepped(1)
    held.join("b", AT, 1.0)
    held.ready("b", AT, 1.0)
    assert held.phase is Phase.TRAINING


def test_a_node_that_says_so_leaves_without_breaking_the_generation() -> None:
    """While it drains all stop together; the next generation begins without waiting for it to be silent."""
    held = gathered("ab", Rules(1, 2))
    held.tick(0.0)
    held.drain("a", "notice")
    assert held.phase is Phase.REGROUPING
    assert not held.broken
    held.ready("b", AT, 1.0)
    assert "formed" in happenings(held, 1.0)
    assert held.members == ("b",)


def taken_over(rules: Rules) -> Membership:
    """Return a membership whose only member, at its work, is to go at 2 s, and whose successor waits."""
    held = gathered("a", rules)
    held.tick(0.0)
    held.stepped(1)
    held.join("b", AT, 1.0)
    held.ready("b", AT, 1.0)
    held.drain("a", "a successor is there")
    held.tick(2.0)
    return held


@pytest.mark.parametrize("most", [1, 2])
def test_a_successor_begins_only_once_the_last_member_has_stopped(most: int) -> None:
    """A member that goes is still at a step: who takes over at once would begin from a checkpoint before that."""
    held = taken_over(Rules(1, most, last_call_s=0.0))
    assert (held.generation, held.members, held.phase, held.broken) == (1, ("a",), Phase.REGROUPING, False)
    held.leave("a", "a successor is there")  # after its last checkpoint
    assert "formed" in happenings(held, 2.5)
    assert (held.generation, held.members) == (2, ("b",))


@pytest.mark.parametrize("ready", [True, False])
def test_a_member_that_goes_is_not_waited_for_once_it_has_stopped_or_died(ready: bool) -> None:
    """Its workers have stopped, or nothing is heard of it for three beats: its successor begins."""
    held = taken_over(Rules(1, 1))
    if ready:
        held.ready("a", AT, 3.0)
    held.beat("b", 4.0)
    assert happenings(held, 3.0 if ready else 4.0)[-1] == "formed"
    assert held.members == ("b",)


def test_a_member_that_goes_and_never_stops_keeps_nobody_waiting_for_ever() -> None:
    """Its agent would have killed its workers long ago: after a minute its successor begins from what there is."""
    held = taken_over(Rules(1, 1))
    for now_s in range(3, 62):
        held.beat("a", now_s)
        held.beat("b", now_s)
        assert happenings(held, now_s) == []
    assert "formed" in happenings(held, 62.0)
    assert (held.members, held.rank("a")) == (("b",), None)


def test_a_script_that_fails_before_its_first_step_is_given_up() -> None:
    """Three generations in a row that fail by themselves end the job with a reason."""
    held = gathered("ab", Rules(1, 2))
    for _ in range(3):
        held.tick(0.0)
        held.ready("a", AT, 0.0, failed=True)
        held.ready("b", AT, 0.0)
    assert happenings(held, 0.0)[-1] == "failed"
    assert held.phase is Phase.FAILED
    assert "before its first step" in held.reason


def test_losses_are_no_fault_of_the_script() -> None:
    """Generations that end because a node was lost are never counted against the script."""
    held = gathered("ab", Rules(1, 2))
    for round_ in range(1, 9):
        now_s = 10.0 * round_
        held.nodes["a"].beaten_s = held.nodes["b"].beaten_s = now_s
        held.tick(now_s)
        held.leave("b", "gone")
        held.ready("a", AT, now_s, failed=True)
        held.tick(now_s)
        held.join("b", AT, now_s)
        held.ready("b", AT, now_s)
        held.stepped(held.generation)
        held.ready("a", AT, now_s)
    assert held.outcome is None


def test_the_first_that_finishes_ends_the_training_for_all() -> None:
    """After the end nobody is lost and no generation begins."""
    held = gathered("ab", Rules(1, 2))
    held.tick(0.0)
    held.finish("a", 1)
    assert happenings(held, 100.0) == ["finished"]
    assert (held.phase, held.generation) == (Phase.FINISHED, 1)


def test_a_controller_that_comes_back_goes_on_with_the_same_generation() -> None:
    """Members have three beats to say that they are there; no generation is begun for a controller's sake."""
    held = gathered("ab", Rules(1, 2))
    records = [event.record() for event in held.tick(0.0)]
    again = restored(Rules(1, 2), records, 50.0)
    assert (again.generation, again.members, again.phase) == (1, ("a", "b"), Phase.TRAINING)
    again.beat("a", 52.0)
    assert happenings(again, 53.1) == ["lost"]


def test_a_node_that_joins_again_under_its_name_is_lost_first() -> None:
    """A machine that was restarted in between beats does not keep its former process's rank."""
    held = gathered("ab", Rules(1, 2))
    held.tick(0.0)
    held.join("a", AT, 1.0)
    assert happenings(held, 1.0) == ["lost", "joined"]
    assert held.rank("a") is None
    assert (held.phase, held.broken) == (Phase.REGROUPING, True)


@pytest.mark.parametrize("seed", range(20))
def test_ranks_and_numbers_hold_whatever_happens(seed: int) -> None:
    """Generations count up by one, their members are distinct, present, and as many as allowed."""
    rng, held, now_s, seen = random.Random(seed), Membership(Rules(1, 3)), 0.0, 0

    def waits(name: str) -> None:
        held.ready(name, AT, now_s)

    for _ in range(400):
        now_s += rng.uniform(0, 0.8)
        name = rng.choice("abcde")
        if name not in held.nodes:
            held.join(name, AT, now_s)
        else:
            rng.choice([lambda n: held.leave(n, ""), lambda n: held.drain(n, ""), waits])(name)
        for other in rng.sample("abcde", 4):
            held.beat(other, now_s)
        held.stepped(held.generation)
        for event in held.tick(now_s):
            if event.happening is EventKind.FORMED:
                assert event.generation == seen + 1
                assert len(set(event.members)) == len(event.members) <= 3
                assert set(event.members) <= set(held.nodes)
                seen = event.generation
    assert seen > 5


def test_two_processes_cannot_be_one_node() -> None:
    """The second is refused while the first beats, and taken in once that is silent; the first is then unknown."""
    held = Membership(Rules(1, 2))
    held.join("a", AT, 0.0, process="first")
    with pytest.raises(InvalidInput, match="already there"):
        held.join("a", AT, 1.0, process="second")
    assert held.beat("a", 1.0, "first")
    held.join("a", AT, 4.1, process="second")
    assert not held.beat("a", 4.2, "first")
    assert held.beat("a", 4.2, "second")


def test_rules_refuse_what_cannot_be() -> None:
    """Nodes are counted from one, and the least is not more than the most."""
    with pytest.raises(InvalidInput, match="least:most"):
        Rules(3, 2)
    with pytest.raises(InvalidInput, match="beat"):
        Rules(1, 2, beat_s=0.0)


def test_a_node_that_was_told_to_go_may_be_let_in_again() -> None:
    """It waits outside, and the next generation has it; one that is gone stays gone."""
    held = gathered("ab", Rules(1, 2))
    held.tick(0.0)
    held.stepped(1)
    held.drain("b", "it is slow")
    for name in "ab":
        held.ready(name, AT, 1.0)
    assert "formed" in happenings(held, 1.0)
    assert held.members == ("a",)
    held.stepped(2)
    assert held.phase is Phase.TRAINING
    held.readmit("b")
    held.readmit("nobody")
    assert held.phase is Phase.REGROUPING
    held.ready("a", AT, 2.0)
    assert "formed" in happenings(held, 2.0)
    assert held.members == ("a", "b")


def test_who_is_gone_is_no_longer_present_and_it_is_known_how_many_must_come() -> None:
    """A lost or left member is told apart until the next generation; one that comes back is gone no more."""
    held = gathered("ab", Rules(2, 2))
    assert Membership(Rules(2, 2)).wanting == 2
    held.tick(0.0)
    assert (held.present, held.gone, held.wanting) == (("a", "b"), {}, 0)
    held.beat("b", 3.0)
    held.tick(3.5)
    assert (held.members, held.present, held.gone) == (("a", "b"), ("b",), {"a": EventKind.LOST})
    assert held.wanting == 1
    held.leave("b", "told to")
    assert (held.present, held.gone["b"], held.wanting) == ((), EventKind.LEFT, 2)
    for name in "ab":
        held.join(name, AT, 4.0)
        held.ready(name, AT, 4.0)
    assert (held.gone, held.wanting) == ({}, 0)
    assert happenings(held, 4.0)[-1] == "formed"
    assert (held.present, held.gone) == (("a", "b"), {})


def test_a_controller_that_begins_again_knows_who_was_gone() -> None:
    """Its events tell how each member went."""
    events = [
        {"event": "lost", "generation": 0, "node": "z"},
        {"event": "formed", "generation": 1, "members": ["a", "b", "c"]},
        {"event": "lost", "generation": 1, "node": "a"},
        {"event": "left", "generation": 1, "node": "b"},
        {"event": "lost", "generation": 1, "node": "a newcomer"},
    ]
    held = restored(Rules(), events, 0.0)
    assert (held.gone, held.present) == ({"a": EventKind.LOST, "b": EventKind.LEFT}, ("c",))
