"""The hour of the day in the danger to machines."""

from datetime import datetime, timedelta

import pytest

from polythrottle.cluster.lifetime import HOUR_S
from polythrottle.cluster.predict.hours import factors, started_at
from polythrottle.cluster.predict.pooled import Pieces
from polythrottle.cluster.tables import LifetimeRow
from polythrottle.errors import InvalidInput

STEADY = Pieces((0.0,), (0.05 / HOUR_S,))
MIDNIGHT = datetime(2019, 2, 18)
NOON = tuple(4.0 if hour == 12 else 0.5 for hour in range(24))


def expected(gpu: str, region: str) -> Pieces:
    """Return a danger that knows no hour."""
    return STEADY


def machine(start_h: float, age_h: float, lost: bool) -> LifetimeRow:
    """Return a machine."""
    age_s = age_h * HOUR_S
    return LifetimeRow("GPU", "here", MIDNIGHT + timedelta(hours=start_h), age_s, age_s if lost else None)


def test_the_hour_of_most_losses_is_the_most_dangerous() -> None:
    """Machines that are all lost at half past twelve make noon dangerous and midnight safe."""
    rows = [machine(start, 12.5 - start, True) for start in range(12) for _ in range(4)]
    found = factors([*rows, *(machine(13, 23, False) for _ in range(30))], expected)
    assert max(found) == found[12] > 2
    assert found[23] < 1


def test_without_losses_every_hour_is_like_another() -> None:
    """Nothing is said of hours by machines that were kept, or by none."""
    assert factors([], expected) == (1.0,) * 24
    assert max(factors([machine(0, 24, False)], expected)) <= 1.0


def test_the_start_decides_when_the_danger_comes() -> None:
    """A machine started at eleven meets noon in its second hour, one started at noon at once."""
    early, late = started_at(STEADY, NOON, 11), started_at(STEADY, NOON, 12)
    assert early.hazard_per_s(0.5 * HOUR_S) < early.hazard_per_s(1.5 * HOUR_S)
    assert late.hazard_per_s(0.5 * HOUR_S) == pytest.approx(early.hazard_per_s(1.5 * HOUR_S))
    half = started_at(STEADY, NOON, 11.5)
    assert half.hazard_per_s(0.4 * HOUR_S) < half.hazard_per_s(0.6 * HOUR_S)


def test_even_hours_change_nothing() -> None:
    """Factors of 1 give back the curve."""
    curve = Pieces((0.0, HOUR_S, 6 * HOUR_S), (1e-4, 2e-5, 1e-6))
    timed = started_at(curve, (1.0,) * 24, 7.25)
    for hours in (0.3, 2, 9, 60):
        assert timed.survival(hours * HOUR_S) == pytest.approx(curve.survival(hours * HOUR_S))


def test_a_day_has_24_hours() -> None:
    """Other numbers of factors and other hours are refused."""
    for by_hour, hour in (((1.0,) * 23, 3.0), ((1.0,) * 24, 24.0), ((1.0,) * 24, -1.0)):
        with pytest.raises(InvalidInput):
            started_at(STEADY, by_hour, hour)
