"""The clock that waiting prompts need: low between them, high at once, and higher the more of them come."""

import pytest

from polythrottle.domain.load.prompt_boost import PromptBoost, WaitingPrompt

BOOST = PromptBoost(tokens_per_s=10_000.0)


def test_nothing_waiting_is_the_floor() -> None:
    """Without prompts the least share holds, whatever the time."""
    assert BOOST.needed(5.0, []) == BOOST.least == BOOST.floor


def test_a_prompt_asks_for_what_it_needs_within_its_share_of_the_time() -> None:
    """600 tokens in 0.3 of 0.4 s need half of 10,000 tokens a second."""
    assert BOOST.needed(0.0, [WaitingPrompt(600, 0.4)]) == pytest.approx(0.5)
    assert BOOST.needed(0.0, [WaitingPrompt(600, 0.2)]) == 1.0
    assert BOOST.needed(1.0, [WaitingPrompt(600, 0.9)]) == 1.0


def test_those_before_a_prompt_count_and_those_behind_it_do_not() -> None:
    """Prompts are computed in order."""
    soon, later = WaitingPrompt(600, 0.4), WaitingPrompt(3000, 4.0)
    assert BOOST.needed(0.0, [soon, later]) == pytest.approx(0.5)
    assert BOOST.needed(0.0, [later, soon]) == 1.0


def test_the_floor_rises_with_the_load_and_falls_again() -> None:
    """Half of the time spent on prompts raises it by half of `rise`; it fades over `window_s`."""
    boost = BOOST
    for tenth in range(1, 1001):
        boost = boost.arrived(tenth / 10, 500.0)
    assert boost.load == pytest.approx(0.5, rel=0.02)
    assert boost.least == pytest.approx(min(1.0, boost.floor + 0.5 * boost.rise), rel=0.02)
    assert boost.arrived(200.0, 0.0).least == pytest.approx(BOOST.floor, rel=0.01)
