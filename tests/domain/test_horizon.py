import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polythrottle.domain.errors import InvalidInput
from polythrottle.domain.ladder import Ladder, PointPerformance, Rung
from polythrottle.domain.load.energy_ration import DAY_S, DailyLoad, LoadInterval, Supply, ration, weighted
from polythrottle.domain.space import OperatingPoint


def _ladder() -> Ladder:
    rungs = []
    for rate, interval_s, idle_w in ((1.0, 0.3, 5.0), (4.0, 0.1, 10.0), (20.0, 0.02, 20.0)):
        point = OperatingPoint({"gpu_max_hz": round(1e9 / interval_s), "batch_size": 1})
        service = PointPerformance(point, 1, interval_s, interval_s, interval_s, idle_w * interval_s + 2.0, idle_w)
        rungs.append(Rung(rate, service, 0.0, idle_w + 2.0 * rate, 0.5))
    return Ladder(0.7, tuple(rungs))


_parts = st.lists(
    st.builds(LoadInterval, st.floats(60.0, 7200.0), st.floats(0.0, 19.0), st.floats(0.2, 5.0)), min_size=1, max_size=30
)


def _used_j(ladder: Ladder, ahead: list[LoadInterval], left_j: float) -> float:
    """Return what is used if each stretch draws as much as its ration says, re-planned at each."""
    used_j = 0.0
    for number, part in enumerate(ahead):
        found = ration(ladder, ahead[number:], left_j - used_j)
        need_w = ladder.rungs[ladder.best(part.rate_per_s, part.rate_per_s)].power_at(part.rate_per_s)
        used_j += part.length_s * (need_w if found.limit_w is None else min(need_w, found.limit_w))
    return used_j


@given(_parts, st.floats(0.1, 1.5))
def test_rations_last_for_the_horizon(ahead: list[LoadInterval], share: float) -> None:
    """What is rationed adds up to what there is, if that is enough for the lowest points; and wastes none of it."""
    ladder = _ladder()
    whole = ration(ladder, ahead, 1e12)
    left_j = share * whole.need_j
    used_j = _used_j(ladder, ahead, left_j)
    assert used_j <= max(left_j, whole.least_j) * (1 + 1e-6)
    if left_j >= whole.least_j:
        assert used_j >= min(left_j, whole.need_j) * (1 - 1e-3)


@given(_parts, st.floats(1e3, 1e8))
def test_power_is_capped_exactly_when_there_is_too_little(ahead: list[LoadInterval], left_j: float) -> None:
    """Enough for the SLO is no limit; less is one, and says how long it lasts."""
    found = ration(_ladder(), ahead, left_j)
    assert found.met == (found.need_j <= left_j) == (found.limit_w is None)
    assert found.met or found.lasts_s < sum(part.length_s for part in ahead)


def test_quiet_stretches_leave_their_share_to_busy_ones() -> None:
    """Power is capped at one level for all, not each stretch at its share."""
    ahead = [LoadInterval(3600.0, 0.1), LoadInterval(3600.0, 10.0)]
    whole = ration(_ladder(), ahead, 1e12)
    busy = ration(_ladder(), ahead[::-1], 0.8 * whole.need_j)
    assert busy.limit_w is not None
    assert busy.limit_w > 1.3 * 0.8 * whole.need_j / 7200.0


def test_dirty_hours_draw_less_than_clean_ones() -> None:
    """With carbon intensities the cap of a stretch falls as its intensity rises."""
    ahead = weighted([LoadInterval(3600.0, 10.0), LoadInterval(3600.0, 10.0)], [100.0, 400.0])
    whole = ration(_ladder(), ahead, 1e12)
    clean, dirty = (ration(_ladder(), order, 0.7 * whole.need_j).limit_w for order in (ahead, ahead[::-1]))
    assert clean is not None
    assert dirty is not None
    assert dirty < clean


def test_a_device_that_draws_more_than_predicted_is_capped_earlier() -> None:
    """The factor between what is drawn and what was predicted enters the plan."""
    ahead = [LoadInterval(3600.0, 10.0)]
    need_j = ration(_ladder(), ahead, 1e12).need_j
    assert ration(_ladder(), ahead, 1.1 * need_j).met
    assert not ration(_ladder(), ahead, 1.1 * need_j, factor=1.2).met


def test_what_cannot_be_met_names_the_nearest_that_can() -> None:
    """The energy that would do for the time, and the time that the energy does for."""
    ahead = [LoadInterval(9 * 3600.0, 10.0)]
    found = ration(_ladder(), ahead, 80 * 3600.0)
    words = found.words(80 * 3600.0, 9 * 3600.0)
    assert "80 Wh do not last 9 h 00 min even at the lowest points" in words
    assert "360 Wh would hold it for 9 h 00 min, or 80 Wh for 2 h 00 min" in words


def test_no_horizon_is_refused() -> None:
    """There is nothing to plan without time left."""
    with pytest.raises(InvalidInput, match="no time left"):
        ration(_ladder(), [], 1.0)


def test_a_day_is_learnt_and_half_hours_never_seen_are_like_now() -> None:
    """After a day of looks the pattern says what the next one brings."""
    pattern = DailyLoad()
    for minute in range(12 * 60):
        pattern = pattern.seen(60.0 * minute, 2.0 if minute < 360 else 8.0, 60.0)
    ahead = pattern.ahead(5.5 * 3600.0, 7 * 3600.0, 3.0)
    assert [round(part.rate_per_s, 6) for part in ahead] == [2.0] + [8.0] * 12 + [3.0]
    assert math.isclose(sum(part.length_s for part in ahead), 7 * 3600.0)


def test_a_pattern_follows_new_days_within_three() -> None:
    """What was is forgotten at the pace of days."""
    pattern = DailyLoad()
    for day, rate in enumerate((1.0, 1.0, 1.0, 9.0, 9.0, 9.0, 9.0, 9.0)):
        for minute in range(30):
            pattern = pattern.seen(60.0 * minute, rate, 60.0)
        if day == 2:
            assert pattern.slots[0][0] == pytest.approx(1.0)
    assert pattern.slots[0][0] > 7.0


def test_a_look_after_a_long_sleep_counts_as_a_half_hour_at_most() -> None:
    """A machine that slept for a day does not fill a slot with one look."""
    assert DailyLoad().seen(0.0, 5.0, 1e6).slots[0] == (5.0, DAY_S / 48)


def test_a_daily_supply_begins_anew_with_the_day() -> None:
    """Yesterday's ration is not carried over; a battery ends."""
    day = Supply(1.0, 0.0, DAY_S, daily=True)
    assert day.at(2.5 * DAY_S).begin_s == 2 * DAY_S
    assert day.at(0.5 * DAY_S) is day
    battery = Supply(1.0, 0.0, 100.0)
    assert battery.at(1000.0) is battery


@pytest.mark.parametrize("joules", [0.0, -1.0, math.inf, math.nan])
def test_a_supply_is_a_number_above_zero(joules: float) -> None:
    """Anything else is refused."""
    with pytest.raises(InvalidInput):
        Supply(joules, 0.0, 1.0)
