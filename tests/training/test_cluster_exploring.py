"""Whether a node may look at a cap that nobody has looked at."""

from itertools import pairwise

import pytest

from polythrottle.domain.errors import InvalidInput
from polythrottle.domain.fleet.transient_machine import KEPT, Cap, ConstantHazard, ObservedLifetime
from polythrottle.lab.lone_node import Lone, lived
from polythrottle.storage.fleet_knowledge import CapObservation
from polythrottle.training.elastic.nodes.power_cap_search import Prospect, best, joules, next_limit, prospect, worth

LIMITS_W = (250.0, 225.0, 200.0, 175.0, 150.0)
DEFAULT = CapObservation(None, 1.0, 220.0, 3)


def test_a_look_pays_only_while_life_is_left_for_it() -> None:
    """What it wastes is earned back within the expected rest of a life, or it is not done."""
    look = Prospect(saving_w=10.0, cost_s=60.0, cost_j=600.0)
    assert worth(look, KEPT, 0.0, 3600.0)
    assert not worth(look, KEPT, 0.0, 100.0)  # the job ends before
    assert worth(look, ConstantHazard(1.0), 0.0, 86400.0)
    assert not worth(look, ConstantHazard(40.0), 0.0, 86400.0)  # taken away within minutes
    assert not worth(Prospect(0.0, 60.0, 0.0), KEPT, 0.0, 3600.0)  # nothing to gain


def test_what_counts_is_the_rest_of_the_life_at_this_age() -> None:
    """Before the provider's limit of 24 h a machine may look, half a minute before it not."""
    capped = ObservedLifetime((0.0, 86399.0, 86400.0), (1.0, 1.0, 0.0))
    look = Prospect(10.0, 60.0, 600.0)
    assert worth(look, capped, 40_000.0, 86400.0)
    assert not worth(look, capped, 86_360.0, 86400.0)


def test_the_walk_goes_down_by_steps_and_ends_at_the_first_that_is_too_slow() -> None:
    """From the default to the highest limit that is felt, and on, until steps take too long or joules rise."""
    seen = [DEFAULT]
    assert next_limit(seen, LIMITS_W, 0.03) == 250.0
    seen.append(CapObservation(250.0, 1.0, 210.0))
    assert next_limit(seen, LIMITS_W, 0.03) == 225.0
    assert next_limit([*seen, CapObservation(225.0, 1.05, 190.0)], LIMITS_W, 0.03) is None
    assert next_limit([*seen, CapObservation(225.0, 1.02, 220.0)], LIMITS_W, 0.03) is None
    assert next_limit([*seen, CapObservation(150.0, 1.02, 150.0)], LIMITS_W, 0.03) is None
    assert next_limit([], LIMITS_W, 0.03) is None


def test_a_limit_that_is_not_felt_is_passed_over() -> None:
    """At 150 W drawn, the first limit worth a look is 175 W; at 80 W none is."""
    assert next_limit([CapObservation(None, 1.0, 150.0)], LIMITS_W, 0.03) == 175.0
    assert next_limit([CapObservation(None, 1.0, 80.0)], LIMITS_W, 0.03) is None
    assert next_limit([CapObservation(None, 1.0, 300.0)], LIMITS_W, 0.03, gpus=2) == 175.0


def test_hope_follows_what_the_last_step_brought() -> None:
    """Half of it; nothing after a step that brought nothing."""
    assert prospect([DEFAULT, CapObservation(225.0, 1.0, 200.0)], 60.0).saving_w == pytest.approx(10.0)
    assert prospect([DEFAULT, CapObservation(225.0, 1.0, 230.0)], 60.0).saving_w == 0.0
    alone, waited_for = prospect([DEFAULT], 60.0), prospect([DEFAULT], 60.0, waiting_w=640.0)
    assert waited_for.cost_j > 3 * alone.cost_j  # fifteen others at the barrier


def test_the_default_is_kept_unless_something_is_surely_better() -> None:
    """Two per cent is the luck of noisy windows; too slow is no choice."""
    assert best([DEFAULT, CapObservation(225.0, 1.0, 216.0)], 0.03) == DEFAULT
    found = CapObservation(225.0, 1.02, 190.0)
    assert best([DEFAULT, found, CapObservation(200.0, 1.06, 150.0)], 0.03) == found


CAPS = (Cap(None, 1.0, 220.0), Cap(225.0, 1.01, 200.0), Cap(200.0, 1.025, 184.0), Cap(175.0, 1.09, 160.0))
USELESS = (Cap(None, 1.0, 220.0), Cap(225.0, 1.03, 218.0), Cap(200.0, 1.08, 212.0))


@pytest.mark.parametrize("life_h", [0.05, 0.2, 0.5, 4.0])
def test_learning_pays_for_itself_on_average(life_h: float) -> None:
    """Whatever the life, nodes that may learn spend no more than nodes that do not; long lives gain most."""
    saved = [lived(Lone(CAPS, ConstantHazard(1 / life_h)), seed) for seed in range(400)]
    share = 1 - sum(each.spent_j for each in saved) / sum(each.default_j for each in saved)
    assert share >= 0
    assert share > 0.05 or life_h < 0.5


def test_where_no_cap_helps_little_is_lost() -> None:
    """A node of half an hour on caps that save nothing wastes less than a quarter of a per cent."""
    saved = [lived(Lone(USELESS, ConstantHazard(2.0)), seed) for seed in range(400)]
    assert sum(each.spent_j for each in saved) < 1.0025 * sum(each.default_j for each in saved)


def test_a_life_that_ends_before_its_windows_looks_at_nothing() -> None:
    """Nothing is learnt, nothing is lost: it ran at its default."""
    saved = lived(Lone(CAPS, ConstantHazard(3600.0)), 3)
    assert saved.spent_j == saved.default_j


def test_a_walk_never_looks_below_the_first_that_was_too_slow() -> None:
    """So many seeds, no look after one beyond the limit."""
    for seed in range(100):
        looks = lived(Lone(CAPS, KEPT), seed).looks
        for before, _ in pairwise(looks):
            assert before.step_s <= looks[0].step_s * 1.03
        assert all(joules(after) for after in looks)


def test_impossible_prospects_are_refused() -> None:
    """A saving below nothing, a window of no time."""
    with pytest.raises(InvalidInput):
        Prospect(-1.0, 0.0, 0.0)
    with pytest.raises(InvalidInput):
        Lone(CAPS, KEPT, window_s=0.0)
