"""Moving a job to where a step costs least: only where it pays, no more than once a day."""

from pathlib import Path

import pytest

from polythrottle.cluster.plan.spot_market import DAY_S, Moving, PricedPlace, Quote, stay, travel, where_next
from polythrottle.cluster.recorded_tables import History, read_histories
from polythrottle.domain.errors import InvalidInput

HOUR_S = 3600.0


def place(name: str, *prices: float, each_s: float = DAY_S, speed: float = 1.0, power_w: float = 0.0) -> PricedPlace:
    """Return a place whose price changes every day."""
    times = tuple(each_s * index for index in range(len(prices)))
    return PricedPlace(History(name, times, prices, 1000 * DAY_S), speed, power_w)


def test_the_cheapest_step_wins_not_the_cheapest_hour() -> None:
    """A machine of twice the price and three times the speed is taken."""
    quotes = [Quote("slow", 1.0, 1.0), Quote("fast", 2.0, 3.0), Quote("gone", None, 9.0)]
    assert where_next(quotes, None, 0, 1e6, Moving()) == 1


def test_the_price_of_energy_can_turn_the_choice() -> None:
    """A cheap and hungry machine loses once energy costs enough."""
    quotes = [Quote("hungry", 0.5, 1.0, 3000), Quote("lean", 0.9, 1.0, 300)]
    assert where_next(quotes, None, 0, 1e6, Moving(0.0)) == 0
    assert where_next(quotes, None, 0, 1e6, Moving(0.3)) == 1


@pytest.mark.parametrize(
    ("held_s", "steps_left", "wanted"),
    [
        (2 * DAY_S, 1e6, 1),  # a day has passed, and a day's saving exceeds the move
        (0.5 * DAY_S, 1e6, 0),  # too soon
        (2 * DAY_S, 100, 0),  # too little left to save on
    ],
)
def test_a_job_moves_only_after_a_day_and_where_it_pays(held_s: float, steps_left: float, wanted: int) -> None:
    """The saving over what is left, a day at most, has to exceed what the move costs."""
    quotes = [Quote("here", 1.0, 1.0), Quote("there", 0.8, 1.0)]
    assert where_next(quotes, 0, held_s, steps_left, Moving(move_s=180)) == wanted


def test_a_machine_that_was_taken_away_is_left_at_once() -> None:
    """Where it is there is no price any more, so the dwell does not count; with nothing at all it waits."""
    quotes = [Quote("here", None, 1.0), Quote("there", 5.0, 1.0)]
    assert where_next(quotes, 0, 10, 1e6, Moving()) == 1
    assert where_next([Quote("here", None, 1.0)], 0, 10, 1e6, Moving()) is None


def test_a_journey_costs_what_its_prices_sum_up_to() -> None:
    """Two days at 1 and, after one move, two days at 0.5 with three minutes paid for twice."""
    places = [place("a", 1.0, 1.0, 3.0, 3.0, 3.0), place("b", 2.0, 2.0, 0.5, 0.5, 0.5)]
    done = travel(places, 4 * DAY_S, 0.0, Moving(move_s=180))
    assert done.places == ["a", "b"]
    assert done.moves == 1
    assert done.time_s == pytest.approx(4 * DAY_S + 360)
    assert done.usd == pytest.approx((2 * DAY_S * 1.0 + (2 * DAY_S + 360) * 0.5) / HOUR_S)
    stayed = stay(places, 4 * DAY_S, 0.0, Moving(move_s=180))
    assert stayed.moves == 0
    assert stayed.usd > done.usd


def test_prices_that_change_each_hour_are_not_chased() -> None:
    """With a dwell of a day a job between two places that take turns moves at most once a day."""
    swing = [0.5, 1.5] * 60
    places = [place("a", *swing, each_s=HOUR_S), place("b", *swing[::-1], each_s=HOUR_S)]
    done = travel(places, 3 * DAY_S, 0.0, Moving(move_s=60))
    assert done.moves <= 3
    assert travel(places, 3 * DAY_S, 0.0, Moving(move_s=60, dwell_s=0)).moves > 40


def test_a_record_that_ends_first_leaves_steps() -> None:
    """Beyond the record no price is known, and the journey says how far it came."""
    short = PricedPlace(History("a", (0.0,), (1.0,), DAY_S), 1.0)
    done = travel([short], 3 * DAY_S, 0.0, Moving(move_s=0))
    assert DAY_S <= done.done <= DAY_S + HOUR_S
    with pytest.raises(InvalidInput, match="no place has a price"):
        travel([short], 1, -5.0, Moving())


def test_on_recorded_prices_one_move_a_day_never_loses_and_hardly_gains(transient: Path) -> None:
    """Amazon's prices of 2020 were nearly flat: moving between zones saves up to 3 %, as much as chasing every hour."""
    histories = [
        history
        for region in ("us-east-1.csv.gz", "us-east-2.csv.gz", "eu-west-2.csv", "eu-central-1.csv")
        for history in read_histories(transient / f"aws_spot_price_{region}", "p3.2xlarge")
    ]
    places = [PricedPlace(history, 4.39, 227) for history in histories]
    begin_s = max(history.times_s[0] for history in histories)
    for day in (5, 35):
        start_s, steps = begin_s + day * DAY_S, 4.39 * 20 * DAY_S
        moved, stayed = (go(places, steps, start_s, Moving()) for go in (travel, stay))
        chased = travel(places, steps, start_s, Moving(dwell_s=0))
        assert 0.97 * stayed.usd < moved.usd <= stayed.usd
        assert moved.usd < 1.01 * chased.usd
        assert moved.moves <= 20
