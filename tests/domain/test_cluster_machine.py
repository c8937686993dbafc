"""Machines that can be rented."""

import pytest

from polythrottle.domain.errors import InvalidInput
from polythrottle.domain.fleet.transient_machine import Cap, MachineType, Market

CAPS = (Cap(None, 1.0, 300.0), Cap(150.0, 1.1, 200.0))


def test_the_first_cap_is_the_default() -> None:
    """A step under a cap costs its power times its slowdown."""
    machine = MachineType("a", "V100", {Market.SPOT: 1.0}, CAPS, idle_w=60, writing_w=100)
    assert machine.default.limit_w is None
    assert [cap.energy for cap in machine.caps] == [300.0, pytest.approx(220.0)]


@pytest.mark.parametrize("wrong", [{"caps": ()}, {"usd_per_h": {Market.SPOT: -1.0}}, {"gpus": 0}, {"idle_w": -5.0}])
def test_a_machine_that_cannot_be_is_refused(wrong: dict[str, object]) -> None:
    """No caps, a negative price or power, no GPU: one line each."""
    whole = {"usd_per_h": {Market.SPOT: 1.0}, "caps": CAPS, "idle_w": 60.0, "writing_w": 100.0}
    with pytest.raises(InvalidInput):
        MachineType("a", "V100", **(whole | wrong))  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", [(None, 0.0, 1.0), (None, 1.0, 0.0), (0.0, 1.0, 1.0)])
def test_a_cap_that_cannot_be_is_refused(wrong: tuple[float | None, float, float]) -> None:
    """A cap has a positive limit, slowdown and power."""
    with pytest.raises(InvalidInput):
        Cap(*wrong)
