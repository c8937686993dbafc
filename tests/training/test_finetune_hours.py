"""Hours of the day: written, across midnight, and how much of a time lies within them."""

import os
import time
from collections.abc import Iterator

import pytest

from polythrottle.domain.errors import InvalidInput
from polythrottle.domain.load.energy_ration import DAY_S, LoadInterval
from polythrottle.training.beside.scheduler import Hours, day_time_s, wall_day_s

_H = 3600.0
_NIGHT = Hours.parse("22:00-06:00")


@pytest.fixture
def berlin() -> Iterator[None]:
    """Have this process live in Berlin for a while."""
    before = os.environ.get("TZ")
    os.environ["TZ"] = "CET-1CEST,M3.5.0,M10.5.0/3"
    time.tzset()
    yield
    os.environ.pop("TZ") if before is None else os.environ.update(TZ=before)
    time.tzset()


def test_hours_may_span_midnight() -> None:
    """From the first minute until before the last."""
    assert [hour for hour in range(24) if hour * _H in _NIGHT] == [0, 1, 2, 3, 4, 5, 22, 23]
    noon = Hours.parse("11:30-13:00")
    assert (11.4 * _H in noon, 11.5 * _H in noon, 13 * _H in noon) == (False, True, False)
    assert (_NIGHT.length_s, noon.length_s) == (8 * _H, 1.5 * _H)


def test_hours_are_written_as_they_are_read() -> None:
    """Also a whole day, and until midnight."""
    for text in ("22:00-06:00", "00:00-24:00", "18:30-24:00", "00:00-00:01"):
        assert str(Hours.parse(text)) == text
    assert Hours.parse("0:00-24:00").length_s == DAY_S
    assert Hours.parse(" 9:05-10:00").begin_s == 9 * _H + 300


def test_how_much_of_a_time_lies_within_them() -> None:
    """Two nights of 49 hours; the rest of one; nothing of a day's work."""
    assert _NIGHT.within_s(20 * _H, 49 * _H) == 16 * _H
    assert _NIGHT.within_s(5 * _H, 2 * _H) == _H
    assert _NIGHT.within_s(6 * _H, 16 * _H) == 0
    assert (_NIGHT.opens_s(6 * _H), _NIGHT.opens_s(23 * _H)) == (16 * _H, 0.0)


def test_a_stretch_is_cut_where_they_begin_and_end() -> None:
    """Its parts add up to it, each wholly within or without."""
    parts = list(_NIGHT.cut(LoadInterval(20 * _H, 3.0), 20 * _H))
    assert [(part.length_s / _H, within) for part, within in parts] == [(2, False), (8, True), (10, False)]
    assert {part.rate_per_s for part, _ in parts} == {3.0}


def test_the_time_of_day_is_the_clock_on_the_wall(berlin: None) -> None:
    """Noon by the clock in summer as in winter, when it is another hour in London."""
    for wall in ("2026-07-01 12:00", "2026-12-01 12:00"):
        wall_s = time.mktime(time.strptime(wall, "%Y-%m-%d %H:%M"))
        assert wall_day_s(wall_s + 0.25) == 12 * _H + 0.25


@pytest.mark.parametrize(
    "text", ["", "22:00", "22:00-", "22-6", "22:00-6", "25:00-06:00", "24:30-06:00", "22:60-06:00", "-1:00-06:00"]
)
def test_hours_that_are_none_are_refused(text: str) -> None:
    """In one line that shows how they are written."""
    with pytest.raises(InvalidInput, match="like"):
        Hours.parse(text)


def test_hours_without_length_are_refused() -> None:
    """The same time twice is nothing, or is it a whole day? That is written otherwise."""
    for text in ("22:00-22:00", "24:00-00:00", "24:00-24:00"):
        with pytest.raises(InvalidInput, match="nothing lies between"):
            Hours.parse(text)
    with pytest.raises(InvalidInput, match="00:00 and 24:00"):
        Hours(-1.0, 5.0)
    assert day_time_s("06:00") == 6 * _H
