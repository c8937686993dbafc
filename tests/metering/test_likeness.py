"""How sure a mean is of batches that may resemble their neighbours."""

import numpy as np
import pytest

from polythrottle.metering.intervals import Mixed, Student, error_of_mean, half_width


def wandering(rng: np.random.Generator, count: int, held: float) -> np.ndarray:
    """Return an autoregression of mean 0 and deviation 1."""
    now, found = float(rng.standard_normal()), []
    for fresh in rng.standard_normal(count).tolist():
        now = held * now + np.sqrt(1 - held * held) * fresh
        found.append(now)
    return np.array(found)


def half_of_mean(values: np.ndarray, queries: float) -> float:
    """Return the half width of the interval of a mean, a straight drift taken out."""
    along = np.arange(len(values)) - (len(values) - 1) / 2
    rest = values - values.mean() - along * float(along @ values / (along @ along))
    deviation = np.sqrt(rest @ rest / (len(values) - 2) / len(values))
    return half_width([error_of_mean(values, queries).scaled(float(deviation))])


@pytest.mark.parametrize(("held", "least"), [(0.0, 0.93), (0.5, 0.9), (0.8, 0.86)])
def test_the_interval_of_a_mean_holds_where_neighbours_are_alike(held: float, least: float) -> None:
    """Twenty single queries in a row: about 95 % of 200 where they are independent, hardly fewer where they are not."""
    rng = np.random.default_rng(0)
    series = [wandering(rng, 20, held) for _ in range(200)]
    assert np.mean([abs(each.mean()) <= half_of_mean(each, 1.0) for each in series]) >= least


def test_long_batches_are_believed_sooner() -> None:
    """Of a hundred queries each, batches hardly can be alike; of one or two, they may well."""
    values = np.random.default_rng(3).standard_normal(20)
    short, long = (half_width([error_of_mean(values, queries)]) for queries in (1.0, 100.0))
    assert half_width([Student(1.0, 18)]) < long < 1.3 * half_width([Student(1.0, 18)])
    assert short > long


def test_a_level_that_cannot_be_told_from_wandering_is_wide() -> None:
    """A slow wave over the window leaves the mean open, many times beyond the textbook's interval."""
    wave = np.sin(np.linspace(0.0, 4.0, 20)) + 0.01 * np.random.default_rng(1).standard_normal(20)
    assert half_width([error_of_mean(wave, 1.5)]) > 4 * half_width([Student(1.0, 18)])


def test_batches_that_do_not_differ_leave_no_doubt() -> None:
    """No division by nothing: what is exact stays exact."""
    found = error_of_mean(np.zeros(20), 1.0)
    assert np.isfinite(found.deviations).all()
    assert half_width([found.scaled(0.0)]) == 0.0


def test_a_mixture_of_one_is_that_one() -> None:
    """Weights choose among deviations, and times a factor all of them grow."""
    assert half_width([Mixed((1.0, 9.0), (1.0, 0.0), 5)]) == pytest.approx(half_width([Student(1.0, 5)]), rel=0.02)
    even = Mixed((1.0, 3.0), (0.5, 0.5), 10)
    assert half_width([even.scaled(2.0)]) == pytest.approx(2 * half_width([even]))
    assert half_width([Student(1.0, 10)]) < half_width([even]) < half_width([Student(3.0, 10)])
