from dataclasses import replace

import pytest

from polythrottle.daemon.budgets import ExplorationAllowance, ExplorationLedger, quiet_per_s
from polythrottle.domain.errors import InvalidInput
from polythrottle.domain.load.energy_ration import DAY_S, DailyLoad


def _hours(
    ledger: ExplorationLedger, hours: float, rate: float, start_s: float = 0.0, studying: bool = False
) -> ExplorationLedger:
    for minute in range(round(hours * 60)):
        now_s = start_s + 60.0 * (minute + 1)
        ledger = ledger.seen(now_s, 60.0, 600.0, round(rate * 60), studying, studying, 0.5)
    return ledger


def test_a_study_is_offered_in_idle_time() -> None:
    """After the idle time that is asked for, if the day's pattern does not promise a load meanwhile."""
    ledger = _hours(ExplorationLedger(), 1.0, 0.0)
    assert ledger.offer(3600.0, 3600.0, DailyLoad(), 600.0, 0.0)
    assert not replace(ledger, idle_since_s=3590.0).offer(3600.0, 3600.0, DailyLoad(), 600.0, 0.0)
    busy = DailyLoad().seen(3900.0, 9.0, 60.0)
    assert not replace(ledger, idle_since_s=3400.0).offer(3600.0, 3500.0, busy, 600.0, 0.0)


def test_a_pattern_that_is_wrong_today_is_not_believed_for_ever() -> None:
    """Idle for longer than a study takes is idle."""
    busy = DailyLoad().seen(3900.0, 9.0, 60.0)
    assert _hours(ExplorationLedger(), 1.0, 0.0).offer(3600.0, 3500.0, busy, 600.0, 0.0)


def test_under_load_there_is_none_without_a_canary() -> None:
    """A share of the time under load must be granted, and is kept to."""
    ledger = _hours(ExplorationLedger(), 10.0, 5.0)
    assert not ledger.offer(36000.0, 0.0, DailyLoad(), 600.0, 0.0)
    granted = replace(ledger, allowance=ExplorationAllowance(canary=0.05))
    assert granted.offer(36000.0, 0.0, DailyLoad(), 600.0, 0.0)
    assert not granted.offer(36000.0, 0.0, DailyLoad(), 3600.0, 0.0)


def test_exploring_keeps_to_its_joules() -> None:
    """A second study waits until the share of the day's energy allows it, and the day is forgotten in time."""
    ledger = _hours(ExplorationLedger(), 20.0, 5.0)
    ledger = _hours(ledger, 0.4, 0.0, 72000.0, studying=True)
    assert ledger.may_explore(14400.0) is not None
    later = _hours(replace(ledger, missed=0.0), 72.0, 5.0, 80000.0)
    assert later.may_explore(10000.0) is None


def test_exploring_keeps_to_its_violations() -> None:
    """Requests that missed their limit for it forbid more."""
    ledger = replace(_hours(ExplorationLedger(), 10.0, 5.0), missed=1000.0)
    assert "over the limit" in (ledger.may_explore(0.0) or "")
    assert ledger.may_explore(0.0) is not None
    assert replace(ledger, missed=10.0).may_explore(0.0) is None


def test_what_studies_count_themselves_is_of_the_days_account() -> None:
    """Their requests are the day's too, and what they have made late is taken off what the next may."""
    ledger = _hours(ExplorationLedger(), 10.0, 5.0)
    studied = ledger.studied(20_000.0, 30.0)
    assert studied.late_left(1000.0) == pytest.approx(ledger.late_left(1000.0) + 20.0 - 30.0)
    assert studied.shown.late == 30.0
    assert studied.shown.late_left == pytest.approx(studied.late_left(30 * 1005))
    assert "over the limit" in (ledger.studied(0.0, 300.0).may_explore(0.0) or "")
    assert studied.seen(DAY_S, DAY_S, 0.0, 0, 0, False, 0.5).late == pytest.approx(11.0, abs=0.1)


def test_requests_that_the_server_was_seen_to_get_too_are_put_down_once() -> None:
    """Of what was seen beside a study and what it has counted itself, the larger counts; the next count is anew."""
    ledger = _hours(ExplorationLedger(), 1 / 60, 5.0, studying=True)
    assert (ledger.requests, ledger.missed) == (300.0, 1.0)
    both = ledger.studied(400.0, 7.0)
    assert (both.sent, both.late, both.shown.late) == (100.0, 6.0, 7.0)
    assert both.studied(10.0, 2.0).shown.late == 9.0
    assert ledger.studied(40.0, 0.5).shown.late == 1.0


def test_a_board_without_load_is_studied_again_a_day_after_late_requests() -> None:
    """Its studies' own requests are all there are, so that what they have made late forbids the next for a while."""
    ledger = _hours(ExplorationLedger(), 1.0, 0.0).studied(0.0, 40.0)
    assert "over the limit" in (ledger.may_explore(0.0) or "")
    assert ledger.seen(DAY_S, DAY_S, 0.0, 0, 0, False, 0.5).may_explore(0.0) is None
    assert _hours(ExplorationLedger(), 1.0, 0.0).studied(30_000.0, 29.0).may_explore(0.0) is None


def test_a_clock_that_goes_back_does_not_make_idle_time() -> None:
    """Idle counts from the earlier look at most."""
    ledger = _hours(ExplorationLedger(), 1.0, 0.0).seen(10.0, 0.0, 0.0, 0, 0, False, 0.5)
    assert ledger.idle_since_s == 10.0


def test_idle_is_a_small_share_of_the_lowest_rung() -> None:
    """A request now and then is no load."""
    assert quiet_per_s(10.0) == pytest.approx(0.5)


@pytest.mark.parametrize("wrong", [{"joules": 1.5}, {"violations": -0.1}, {"canary": 2.0}, {"idle_s": 0.0}])
def test_shares_are_shares(wrong: dict[str, float]) -> None:
    """Anything else is refused."""
    with pytest.raises(InvalidInput):
        ExplorationAllowance(**wrong)


def test_what_was_is_forgotten_over_a_day() -> None:
    """A ledger without looks for a day keeps a third."""
    ledger = ExplorationLedger(all_j=100.0).seen(DAY_S, DAY_S, 0.0, 0, 0, False, 0.5)
    assert ledger.all_j == pytest.approx(36.8, abs=0.1)
