"""What a fleet runs under, how often it is interrupted, and whom it lets in."""

from dataclasses import replace
from math import inf

import pytest

from polythrottle.cluster.conditions import (
    Decision,
    DefaultPolicy,
    IndependentPolicy,
    JointPolicy,
    LearnedHazard,
    Situation,
    TunedPolicy,
    Turn,
    admitted,
    known_per_s,
)
from polythrottle.domain.errors import InvalidInput
from polythrottle.domain.fleet.gpu_variability import UNKNOWN, grade, ladder
from polythrottle.domain.fleet.transient_machine import (
    KEPT,
    Cap,
    CheckpointCost,
    ConstantHazard,
    MachineType,
    Market,
    ObservedLifetime,
    interval_s,
)

CAPS = (
    Cap(None, 1.0, 220.0),
    Cap(225.0, 1.02, 205.0),
    Cap(200.0, 1.055, 184.0),
    Cap(175.0, 1.095, 166.0),
    Cap(150.0, 1.18, 145.0),
)
MACHINE = MachineType("m", "V100", {Market.SPOT: 1.0}, CAPS, 40.0, 60.0)
COST = CheckpointCost(1.0, 6.0)
RATES = (0.42, 0.44, 0.46, 0.48)
RUNGS = ladder(CAPS, MACHINE.idle_w)


def situation(nodes: dict[int, int], per_h: float = 2.0, synchronous: bool = True) -> Situation:
    """Return a fleet's situation."""
    return Situation(nodes, per_h / 3600, 0.0, MACHINE, COST, 10.0, synchronous=synchronous)


def test_the_default_policy_changes_no_clock() -> None:
    """Daly's interval, or the one that was asked for."""
    found = DefaultPolicy().decide(situation({grade(1.0): 8}))
    assert (found.turns, found.interval_s) == ((Turn(1.0, CAPS[0]),), interval_s(COST, 2 / 3600, 1.0))
    assert DefaultPolicy(600.0).decide(situation({grade(1.0): 8})).interval_s == 600.0
    assert DefaultPolicy().decide(situation({grade(1.0): 8}, per_h=0.0)).interval_s == inf


def test_one_cap_for_all_stays_within_its_limit_of_time() -> None:
    """At 3 % it is the cap that is 2 % slower; at 6 % the next; jointly no dearer."""
    nodes = {grade(1.0): 8}
    assert IndependentPolicy(0.03).decide(situation(nodes)).turns == (Turn(1.0, CAPS[1]),)
    assert IndependentPolicy(0.06).decide(situation(nodes)).turns == (Turn(1.0, CAPS[2]),)
    assert JointPolicy(0.03).decide(situation(nodes)).turns == (Turn(1.0, CAPS[1]),)


def test_a_tuned_fleet_gives_each_node_what_just_meets_the_slowest() -> None:
    """With one node 15 % slow, equals run at 175 W or 150 W and the slow one at its default or little below."""
    slow, middle = grade(1.15), grade(1.0)
    turn = TunedPolicy(0.0).decide(situation({middle: 7, slow: 1, UNKNOWN: 1})).turns[0]
    assert turn.cap is None
    caps = turn.caps({middle: 7, slow: 1, UNKNOWN: 1}, RUNGS)
    assert (caps[middle], caps[slow], caps[UNKNOWN]) == (CAPS[3], CAPS[0], CAPS[0])
    assert TunedPolicy(0.03).decide(situation({middle: 7, slow: 1})).turns[-1].stretch > 1.0


def test_shares_follow_the_steps_as_they_come_out() -> None:
    """Turns of 1.0 and 1.2 that should come to 1.05 are three to one; never beyond either; else fixed."""
    turns = (Turn(0.5, None, 1.0), Turn(0.5, None, 1.2))
    wanted = Decision(60.0, turns, 1.05)
    assert wanted.shares([1.0, 1.2], 1.0) == pytest.approx((0.75, 0.25))
    assert wanted.shares([1.1, 1.2], 1.0) == (1.0, 0.0)
    assert wanted.shares([1.0, 1.02], 1.0) == (0.0, 1.0)
    assert wanted.shares([1.0, 1.0], 1.0) == Decision(60.0, turns).shares([1.0, 1.2], 1.0) == (0.5, 0.5)


def test_an_interval_other_than_daly_s_has_to_be_worth_it() -> None:
    """Where it would save next to nothing Daly's stays; where checkpoints are dear and losses many it is shorter."""
    nodes = {grade(1.0): 7, grade(1.1): 1}
    plain, hard = situation(nodes, 2.0), replace(situation(nodes, 60.0), checkpoint=CheckpointCost(30.0, 30.0))
    assert TunedPolicy().decide(plain).interval_s == DefaultPolicy().decide(plain).interval_s
    assert TunedPolicy().decide(hard).interval_s < 0.5 * DefaultPolicy().decide(hard).interval_s


def test_the_interval_follows_the_hazard() -> None:
    """A decision taken over from a situation much the same has the interval of its own hazard, within two steps."""
    policy, nodes = TunedPolicy(), {grade(1.0): 7, grade(1.1): 1}
    intervals = [policy.decide(situation(nodes, per_h)).interval_s for per_h in RATES]
    assert intervals == sorted(intervals, reverse=True)
    assert len(set(intervals)) > 1
    for per_h, interval in zip(RATES, intervals, strict=True):
        assert interval == pytest.approx(TunedPolicy().decide(situation(nodes, per_h)).interval_s, abs=2.0)


def test_slack_follows_the_next_generation() -> None:
    """The slow node is gone: the same decision, asked for the new group, runs the others at nearly their default."""
    turn = TunedPolicy(0.0).decide(situation({grade(1.0): 7, grade(1.15): 1})).turns[0]
    assert turn.caps({grade(1.0): 7}, RUNGS)[grade(1.0)] == CAPS[0]


def test_two_paces_by_turns_use_up_the_time_allowed() -> None:
    """Equals whose next cap is 5.5 % slower run part of the time under it: on average as slow as they may be."""
    turns = TunedPolicy(0.04).decide(situation({grade(1.0): 8})).turns
    assert sum(turn.share for turn in turns) == pytest.approx(1.0)
    under = [turn.caps({grade(1.0): 8}, RUNGS)[grade(1.0)] for turn in turns]
    assert len(set(under)) == 2
    slowdown = sum(turn.share * cap.slowdown for turn, cap in zip(turns, under, strict=True))
    assert 1.035 < slowdown < 1.045


def test_asynchronous_nodes_have_no_slack() -> None:
    """Nobody waits, so one cap for all, chosen for its own joules."""
    found = TunedPolicy(0.03).decide(situation({grade(1.0): 7, grade(1.15): 1}, synchronous=False))
    assert all(turn.cap in CAPS for turn in found.turns)


def test_the_same_situation_has_the_same_answer() -> None:
    """Also from a policy that has decided much else before."""
    policy = TunedPolicy()
    first = policy.decide(situation({grade(1.0): 8}))
    for per_h in (0.0, 1.0, 5.0, 50.0):
        policy.decide(situation({grade(1.0): 3, grade(1.1): 2}, per_h))
    assert policy.decide(situation({grade(1.0): 8})) == first == TunedPolicy().decide(situation({grade(1.0): 8}))


def test_interruptions_are_learnt_and_forgotten() -> None:
    """Six a day become the rate; after some days without any it has fallen, and never to nothing."""
    learned = LearnedHazard(prior_per_h=1.0, prior_s=3600.0, half_s=12 * 3600.0)
    for hour in range(0, 240, 4):
        learned.interrupted(hour * 3600.0)
    busy = learned.per_s(238 * 3600.0) * 3600
    assert busy == pytest.approx(0.25, rel=0.25)
    quiet = learned.per_s((236 + 96) * 3600.0) * 3600
    assert 0 < quiet < busy / 2


def test_before_anything_was_seen_the_prior_counts() -> None:
    """And less and less as time goes by without an interruption."""
    learned = LearnedHazard(prior_per_h=2.0)
    assert learned.per_s(0.0) * 3600 == pytest.approx(2.0)
    assert learned.per_s(7200.0) < 1.0 / 3600


def test_known_lifetimes_give_the_hazard_of_the_next_minutes() -> None:
    """Ten machines at 0.1 per hour make one per hour; the old ones of a type that dies young make less."""
    assert known_per_s(ConstantHazard(0.1), {0.0: 10}) * 3600 == pytest.approx(1.0, rel=0.01)
    infant = ObservedLifetime((0.0, 3600.0, 86400.0), (1.0, 0.5, 0.4))
    assert known_per_s(infant, {0.0: 1}) > 10 * known_per_s(infant, {7200.0: 1})
    assert known_per_s(KEPT, {0.0: 5}) == 0


@pytest.mark.parametrize(
    ("ready", "training", "per_s", "pause_s", "answer"),
    [
        (1, 0, 1.0, 1e9, True),  # nobody trains: nothing to lose
        (0, 5, 0.0, 1.0, False),  # nobody to let in
        (1, 9, 0.0, 60.0, True),  # nothing else would ever let it in
        (1, 9, 1 / 300, 60.0, False),  # in five minutes it gets in for nothing
        (4, 9, 1 / 300, 60.0, True),  # but four are worth it
    ],
)
def test_newcomers_are_let_in_when_it_pays(
    ready: int, training: int, per_s: float, pause_s: float, answer: bool
) -> None:
    """Their work until the next interruption against everybody's pause."""
    assert admitted(ready, training, per_s, pause_s) is answer


def test_impossible_numbers_are_refused() -> None:
    """Fewer than no machines, a prior worth no time."""
    with pytest.raises(InvalidInput):
        admitted(-1, 0, 0.0, 0.0)
    with pytest.raises(InvalidInput):
        LearnedHazard(prior_s=0.0)
