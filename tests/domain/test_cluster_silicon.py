"""How GPUs of one model differ."""

from random import Random
from statistics import quantiles

import pytest

from polythrottle.domain.errors import InvalidInput
from polythrottle.domain.fleet.gpu_variability import OUTLIER, Silicon, calibrated, flagged, grade, of_grade


def test_the_spread_is_from_whisker_to_whisker() -> None:
    """The quartiles of many draws are those of a normal whose box plot's whiskers are so far apart; none is outside."""
    chance = Random(1)
    drawn = [Silicon(0.22).draw(chance) for _ in range(20_000)]
    low, middle, high = quantiles(drawn, n=4)
    assert middle == pytest.approx(1.0, abs=0.002)
    assert (high - low) * 4 == pytest.approx(0.22, rel=0.05)  # q3 + 1.5 iqr − (q1 − 1.5 iqr)
    assert 0.89 <= min(drawn) < max(drawn) <= 1.11


def test_outliers_are_slower_only() -> None:
    """As many as asked for, up to half as slow again as the middle."""
    chance = Random(2)
    drawn = [Silicon(0.08, outliers=0.1).draw(chance) for _ in range(10_000)]
    slow = [factor for factor in drawn if factor > 1.04 + 1e-9]
    assert len(slow) == pytest.approx(1000, rel=0.15)
    assert max(slow) <= OUTLIER


def test_equals_are_equal() -> None:
    """Without spread every GPU is the middle."""
    assert {Silicon(0.0).draw(Random(seed)) for seed in range(9)} == {1.0}


@pytest.mark.parametrize("factor", [0.9, 0.996, 1.0, 1.0001, 1.0049, 1.005, 1.3])
def test_a_grade_is_never_faster_than_its_node(factor: float) -> None:
    """It is rounded to the slower side, by less than a quarter of a per cent."""
    assert factor - 1e-9 <= of_grade(grade(factor)) < factor + 0.0025


def test_a_node_is_calibrated_by_its_middle_window() -> None:
    """One window with a hiccup does not make a node slow."""
    assert calibrated([1.02, 1.04, 3.0], 1.0) == 1.04


@pytest.mark.parametrize(("steps_s", "expected_s"), [([], 1.0), ([1.0], 0.0), ([0.0], 1.0)])
def test_nothing_is_calibrated_from_nothing(steps_s: list[float], expected_s: float) -> None:
    """No window, no expectation, no time: an error."""
    with pytest.raises(InvalidInput):
        calibrated(steps_s, expected_s)


def test_who_stands_out_is_flagged() -> None:
    """One slow node of six is named with how far it is away; the others are not."""
    found = flagged({"a": 1.0, "b": 1.01, "c": 0.99, "d": 1.005, "e": 0.995, "f": 1.22})
    assert list(found) == ["f"]
    assert found["f"] > 3


def test_a_fleet_of_equals_flags_nobody() -> None:
    """A deviation of nothing is not divided by; noise below half a per cent is no outlier."""
    assert flagged(dict.fromkeys("abcdef", 1.0)) == {}
    assert flagged({"a": 1.0, "b": 1.0, "c": 1.0, "d": 1.0, "e": 1.01}) == {}
    assert flagged({"a": 1.0, "b": 1.0, "c": 2.0}) == {}
