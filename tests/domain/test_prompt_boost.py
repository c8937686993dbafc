"""The clock that waiting prompts need: low between them, high at once, and higher the more of them come."""

from dataclasses import replace

import pytest

from polythrottle.domain.load.prompt_boost import ClockDemand, PromptBoost, PromptNews, TokenLimits, WaitingPrompt
from polythrottle.domain.metrics import PromptClass

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


# --- the same from what a proxy tells -------------------------------------------------------------------------------

LIMITS = TokenLimits(((PromptClass(most=4096), 0.6), (PromptClass(above=4096), 2.0)), each_s=0.1)


def computed(tokens_of: list[int], per_s: float, held: float, each_s: float = 0.02) -> ClockDemand:
    """Return what is known after lone prompts that took so long at a share of the clock, a second apart."""
    demand, now_s, arrived, begun = ClockDemand().heard(PromptNews(0.0), 1.0, LIMITS), 0.0, 0.0, 0.0
    for number, tokens in enumerate(tokens_of):
        now_s, arrived = now_s + 1.0, arrived + tokens
        news = PromptNews(now_s, arrived, begun, number, ((tokens, now_s),), waiting=1, sent=1)
        demand = demand.heard(news, held, LIMITS)
        now_s, begun = now_s + (tokens / per_s + each_s) / held, begun + tokens
        demand = demand.heard(PromptNews(now_s, arrived, begun, number + 1), held, LIMITS)
    return demand


@pytest.mark.parametrize("held", [1.0, 0.4])
def test_the_rate_of_prompts_is_learnt_whatever_the_clock_and_what_each_takes_besides(held: float) -> None:
    """Long and short prompts tell tokens and prompts apart; a lower clock is allowed for."""
    demand = computed([200, 3000, 900, 1500] * 10, 12_000.0, held)
    assert demand.rate.per_s == pytest.approx(12_000.0, rel=1e-6)


def test_prompts_all_alike_tell_tokens_over_time() -> None:
    """Nothing says which part of the time is the prompt's and which its tokens'."""
    assert computed([1200] * 30, 12_000.0, 1.0).rate.per_s == pytest.approx(1200 / 0.12)


def test_before_the_rate_is_known_a_prompt_asks_for_the_highest_clock() -> None:
    """And without one nothing is asked for, so that the tuned point holds."""
    demand = ClockDemand().heard(PromptNews(0.0), 1.0, LIMITS)
    assert demand.share(0.0, LIMITS) is None
    waiting = demand.heard(PromptNews(1.0, 500, prompts=((500.0, 1.0),), waiting=1, sent=1), 1.0, LIMITS)
    assert waiting.share(1.0, LIMITS) == 1.0


def test_a_known_rate_asks_for_what_waiting_prompts_need_and_less_once_they_are_under_way() -> None:
    """The floor between them; a long prompt has longer, and what was computed of one is taken off."""
    demand = computed([200, 3000, 900, 1500] * 10, 12_000.0, 1.0)
    last = demand.news
    assert last is not None
    now_s = last.heard_s + 100.0
    quiet = demand.heard(replace(last, heard_s=now_s), 1.0, LIMITS)
    assert quiet.share(now_s, LIMITS) == pytest.approx(quiet.boost.floor, rel=0.01)

    def waiting(tokens: float) -> ClockDemand:
        news = replace(
            last, heard_s=now_s, arrived=last.arrived + tokens, prompts=((tokens, now_s),), waiting=1, sent=1
        )
        return quiet.heard(news, 1.0, LIMITS)

    assert waiting(1500.0).share(now_s, LIMITS) == pytest.approx(1500 / 12_000 / (0.3 * 0.6), rel=1e-3)
    assert waiting(6000.0).share(now_s, LIMITS) == pytest.approx(6000 / 12_000 / (0.3 * 2.0), rel=1e-3)
    assert waiting(4500.0).share(now_s, LIMITS) == 1.0, "a guess may be off: it may have the shorter prompts' limit"
    begun = waiting(2000.0)
    assert begun.news is not None
    later = begun.heard(replace(begun.news, heard_s=now_s + 0.1), 1.0, LIMITS)
    left = 2000 - 0.8 * 0.1 * 12_000
    assert later.share(now_s + 0.1, LIMITS) == pytest.approx(left / 12_000 / (0.3 * 0.5), rel=1e-3)


def test_tokens_that_come_slowly_ask_for_more_clock_and_fast_ones_for_less() -> None:
    """Ten answers at 140 ms a token, at half the clock, need all of it for a pace of 70 ms; at 35 ms a quarter."""
    for each_s, share in ((0.14, 1.0), (0.035, 0.25)):
        demand = ClockDemand().heard(PromptNews(0.0, streams=10), 0.5, LIMITS)
        for look in range(1, 50):
            news = PromptNews(0.2 * look, streams=10, made=0.2 * look * 10 / each_s)
            demand = demand.heard(news, 0.5, LIMITS)
        assert demand.pace == pytest.approx(share, rel=1e-6)


def test_a_proxy_that_began_anew_is_not_taken_for_a_load_that_fell() -> None:
    """Its counts begin at nothing again; what was learnt stays."""
    demand = computed([200, 3000] * 20, 12_000.0, 1.0)
    again = demand.heard(PromptNews(1000.0), 1.0, LIMITS)
    assert again.rate == demand.rate
    assert again.boost == demand.boost
