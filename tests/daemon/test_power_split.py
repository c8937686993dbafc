"""Watts between services: the staircase of what each budget buys, and what is left shared out."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polythrottle.daemon.control.power_sharing import Cost, PowerOption, spread, staircase

OPTION = st.builds(
    PowerOption,
    most_w=st.integers(1, 40).map(float),
    mean_w=st.integers(1, 40).map(float),
    broken=st.sampled_from([0.0, 1.0, 2.0]),
    short=st.sampled_from([0.0, 0.25, 0.5]),
)


def cheapest(services: list[list[PowerOption]], budget_w: float) -> Cost | None:
    """Return the least cost within a budget, by going through every choice."""
    fits = (each for each in product(*services) if sum(option.most_w for option in each) <= budget_w)
    costs = (tuple(sum(part) for part in zip(*(option.cost for option in each), strict=True)) for each in fits)
    return min(costs, default=None)  # type: ignore[arg-type, return-value]


@given(st.lists(st.lists(OPTION, min_size=1, max_size=5), min_size=1, max_size=4), st.integers(1, 160))
def test_no_choice_within_a_budget_is_cheaper(services: list[list[PowerOption]], budget_w: int) -> None:
    """The staircase finds what going through all choices finds, at every budget."""
    step = staircase(services).within(float(budget_w))
    best = cheapest(services, float(budget_w))
    assert (None if step is None else step.cost) == pytest.approx(best)
    if step is not None:
        chosen = [options[number] for options, number in zip(services, step.chosen, strict=True)]
        assert sum(option.most_w for option in chosen) == step.most_w <= budget_w


def test_a_greedy_by_weight_a_watt_is_not_exact() -> None:
    """The light service holds its limit for the fewest watts a weight, and then nothing is left for the heavy one."""
    heavy = [PowerOption(10, 10, broken=3.0), PowerOption(42, 42)]
    light = [PowerOption(10, 10, broken=1.4), PowerOption(24, 24)]
    by_watt = {"heavy": 3.0 / 32, "light": 1.4 / 14}
    assert max(by_watt, key=lambda name: by_watt[name]) == "light"
    step = staircase([heavy, light]).within(55.0)
    assert step is not None
    assert step.chosen == (1, 0)


def test_more_watts_buy_the_next_step() -> None:
    """What lies beyond a budget is the first choice that costs less."""
    stairs = staircase([[PowerOption(10, 10, broken=1.0), PowerOption(30, 25), PowerOption(50, 20)]])
    assert [step.most_w for step in stairs.steps] == [10, 30, 50]
    beyond = stairs.beyond(35.0)
    assert beyond is not None
    assert beyond.most_w == 50
    assert stairs.beyond(50.0) is None
    assert stairs.within(9.0) is None


def test_many_services_stay_within_their_budget() -> None:
    """Where steps are thinned out, draws are rounded up, so that what is chosen still fits."""
    services = [
        [PowerOption(10 + 3.7 * n + 0.013 * k * n, 5 + n, broken=float(9 - n)) for n in range(10)] for k in range(8)
    ]
    stairs = staircase(services)
    assert len(stairs.steps) <= 1000
    for budget_w in (100.0, 150.0, 223.3, 300.0):
        step = stairs.within(budget_w)
        assert step is not None
        drawn = sum(options[number].most_w for options, number in zip(services, step.chosen, strict=True))
        assert drawn <= budget_w


@given(
    st.lists(st.tuples(st.floats(0, 50), st.floats(0, 50), st.floats(0.5, 4)), min_size=1, max_size=5),
    st.floats(0, 200),
)
def test_what_is_left_is_shared_out_and_no_more(rows: list[tuple[float, float, float]], left_w: float) -> None:
    """Shares rise by at most what is left, none above what its service can use, and nothing that can be used stays."""
    before = [share for share, _, _ in rows]
    tops = [share + room for share, room, _ in rows]
    after = spread(before, tops, [weight for _, _, weight in rows], left_w)
    assert all(one <= two + 1e-6 for one, two in zip(before, after, strict=True))
    assert all(one <= top + 1e-6 for one, top in zip(after, tops, strict=True))
    given_w = sum(after) - sum(before)
    assert given_w == pytest.approx(min(left_w, sum(tops) - sum(before)), abs=1e-5)
