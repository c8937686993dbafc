"""How long a machine is kept."""

from math import exp, inf

import pytest

from polythrottle.domain.errors import InvalidInput
from polythrottle.domain.fleet.transient_machine import (
    KEPT,
    ConstantHazard,
    ObservedLifetime,
    lost_before,
    next_loss_s,
    remaining_s,
)

HOUR_S = 3600.0
CURVE = ObservedLifetime((0.0, HOUR_S, 24 * HOUR_S), (1.0, 0.5, 0.4))


def test_a_steady_machine_forgets_its_age() -> None:
    """Its losses within an hour are the same at every age."""
    steady = ConstantHazard(0.1)
    assert lost_before(steady, 0, HOUR_S) == pytest.approx(lost_before(steady, 9 * HOUR_S, HOUR_S))
    assert steady.survival(10 * HOUR_S) == pytest.approx(exp(-1))


def test_an_on_demand_machine_is_kept() -> None:
    """It is never lost, whatever is drawn."""
    assert next_loss_s(KEPT, 0, 0.5) == inf
    assert remaining_s(KEPT, HOUR_S, 7 * HOUR_S) == pytest.approx(7 * HOUR_S)


def test_survivors_of_infancy_are_safer_than_newborns() -> None:
    """Half of the machines go in the first hour, few later."""
    assert lost_before(CURVE, 0, HOUR_S) == pytest.approx(0.5)
    assert lost_before(CURVE, HOUR_S, HOUR_S) < 0.01
    assert CURVE.hazard_per_s(0) > 50 * CURVE.hazard_per_s(2 * HOUR_S)


def test_quantiles_undo_survival() -> None:
    """The age drawn for a share is where that share survives; beyond the curve there is none."""
    for share in (0.9, 0.6, 0.45):
        assert CURVE.survival(CURVE.quantile_s(share)) == pytest.approx(share)
    assert CURVE.quantile_s(0.3) == inf
    assert next_loss_s(CURVE, 2 * HOUR_S, 1.0) >= 2 * HOUR_S


def test_the_rest_of_a_life_is_its_integral() -> None:
    """A steady machine is kept for (1 - exp(-λT))/λ of the next T."""
    assert remaining_s(ConstantHazard(0.5), 0, 4 * HOUR_S) == pytest.approx((1 - exp(-2)) / 0.5 * HOUR_S, rel=1e-4)


@pytest.mark.parametrize(
    ("ages", "alive"), [((0, 1), (1, 1.2)), ((1, 2), (1, 0.5)), ((0, 0), (1, 0.5)), ((0,), (1, 0))]
)
def test_a_curve_that_is_none_is_refused(ages: tuple[float, ...], alive: tuple[float, ...]) -> None:
    """Survival starts at 1 and never rises."""
    with pytest.raises(InvalidInput):
        ObservedLifetime(ages, alive)


def test_a_short_life_is_expected_to_be_short_however_far_one_looks() -> None:
    """Ten hours on average stay ten hours over a hundred and over a hundred million."""
    for horizon_h in (100, 1e4, 1e8):
        assert remaining_s(ConstantHazard(0.1), 0, horizon_h * HOUR_S) == pytest.approx(10 * HOUR_S, rel=0.001)
    assert remaining_s(ObservedLifetime((0.0, 60.0), (1.0, 0.5)), 0, 1e6) == pytest.approx(
        45 + 0.5 * (1e6 - 60), rel=0.001
    )
