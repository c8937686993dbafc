"""Curves of survival fitted by likelihood."""

from datetime import datetime
from math import exp, inf
from pathlib import Path

import numpy as np
import pytest

from polythrottle.cluster.recorded_tables import LifetimeRow, lifetime_rows
from polythrottle.domain.errors import InvalidInput
from polythrottle.domain.fleet.transient_machine import HOUR_S, ConstantHazard
from polythrottle.lab.reproduce.transient_machines import LIMIT_S, Bathtub, Weibull, fit_curves, log_likelihood

START = datetime(2019, 2, 18)
CURVES = [ConstantHazard(0.1), Weibull(10 * HOUR_S, 0.5), Weibull(10 * HOUR_S, 2.0), Bathtub(0.4, HOUR_S, 2 * HOUR_S)]


def row(least_s: float, most_s: float | None) -> LifetimeRow:
    """Return a machine."""
    return LifetimeRow("GPU", "here", START, least_s, most_s)


def drawn(life: object, count: int, limit_s: float = LIMIT_S, seed: int = 0) -> list[LifetimeRow]:
    """Return machines whose ages follow a curve, censored at a limit."""
    uniform = np.random.default_rng(seed).uniform(size=count)
    ages = [life.quantile_s(float(one)) for one in uniform]  # type: ignore[attr-defined]
    return [row(min(age, limit_s), age if age < limit_s else None) for age in ages]


@pytest.mark.parametrize("curve", CURVES, ids=str)
def test_a_curve_is_consistent(curve: Weibull) -> None:
    """Survival falls from 1, quantiles undo it, and its slope is the hazard."""
    ages = np.linspace(0, LIMIT_S - 60, 40)
    kept = [curve.survival(age) for age in ages]
    assert kept[0] == 1
    assert kept == sorted(kept, reverse=True)
    for age in ages[1:]:
        assert curve.quantile_s(curve.survival(age)) == pytest.approx(age, rel=1e-3)
        slope = (curve.survival(age - 5) - curve.survival(age + 5)) / 10 / curve.survival(age)
        assert curve.hazard_per_s(age) == pytest.approx(slope, rel=0.01)
    assert curve.quantile_s(1) == 0


def test_nothing_outlives_a_limit() -> None:
    """A bathtub ends there, whatever was left."""
    tub = Bathtub(0.1, HOUR_S, HOUR_S)
    assert tub.survival(LIMIT_S - 10) > 0.5
    assert tub.survival(LIMIT_S + 1) == 0
    assert tub.hazard_per_s(LIMIT_S + 1) == inf
    assert tub.quantile_s(0.01) == LIMIT_S


@pytest.mark.slow
@pytest.mark.parametrize(
    ("curve", "family"),
    [
        (ConstantHazard(0.1), "exponential"),
        (Weibull(20 * HOUR_S, 0.4), "weibull"),
        (Bathtub(0.45, HOUR_S, HOUR_S), "bathtub"),
    ],
)
def test_the_family_that_made_the_machines_is_chosen(curve: Weibull, family: str) -> None:
    """By AIC, from 400 machines, those that reached the limit censored; its survival is found again."""
    best = fit_curves(drawn(curve, 400, seed=1))[0]
    assert best.family == family
    for hours in (1, 6, 12, 20):
        assert best.lifetime.survival(hours * HOUR_S) == pytest.approx(curve.survival(hours * HOUR_S), abs=0.06)


@pytest.mark.slow
def test_losses_between_looks_are_as_good_as_seen() -> None:
    """Polled every ten minutes, the same Weibull is found."""
    rows = drawn(Weibull(5 * HOUR_S, 0.7), 400)
    polled = [one if one.most_s is None else row(one.age_s // 600 * 600, one.age_s // 600 * 600 + 600) for one in rows]
    exact, looked = (next(one for one in fit_curves(some) if one.family == "weibull") for some in (rows, polled))
    for hours in (0.5, 2, 10):
        assert looked.lifetime.survival(hours * HOUR_S) == pytest.approx(
            exact.lifetime.survival(hours * HOUR_S), abs=0.02
        )


def test_likelihood_counts_each_machine_as_what_was_seen() -> None:
    """Kept: survival. Lost between looks: the fall. Lost at an age: the density per hour."""
    steady = ConstantHazard(1.0)
    assert log_likelihood(steady, [row(HOUR_S, None)]) == pytest.approx(-1)
    assert exp(log_likelihood(steady, [row(0, HOUR_S)])) == pytest.approx(1 - exp(-1))
    assert log_likelihood(steady, [row(HOUR_S, HOUR_S)]) == pytest.approx(-1)


def test_without_a_loss_there_is_no_curve() -> None:
    """The message says what to do."""
    with pytest.raises(InvalidInput, match="pool with others"):
        fit_curves([row(LIMIT_S, None)] * 8)


def test_losses_at_birth_are_survived() -> None:
    """Ages of 0 fit too."""
    assert fit_curves([row(0, 0), row(0, 0), row(100, None)])[0].lifetime.survival(1e6) >= 0


@pytest.mark.parametrize("make", [lambda: Weibull(0, 1), lambda: Weibull(1, 0), lambda: Bathtub(2, 1, 1)])
def test_impossible_curves_are_refused(make: object) -> None:
    """Scales, shapes and shares have bounds."""
    with pytest.raises(InvalidInput):
        make()  # type: ignore[operator]


def test_recorded_lives_are_not_memoryless(transient: Path) -> None:
    """Amazon's K80 of 2020 die young: a Weibull of shape below 1 is far better than a steady danger."""
    rows = [one for one in lifetime_rows(transient / "aws_spot_lifetimes_2020.csv") if one.region == "us-east-1c"]
    fits = {one.family: one for one in fit_curves([one for one in rows if one.gpu == "K80"])}
    assert fits["weibull"].aic < fits["exponential"].aic - 5
    assert isinstance(fits["weibull"].lifetime, Weibull)
    assert fits["weibull"].lifetime.shape < 1
    assert "bathtub" not in fits
