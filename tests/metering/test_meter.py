from dataclasses import replace

import pytest
from builders import FakeDevice, FakeWorkload

from polythrottle.domain.errors import TrialError
from polythrottle.domain.measurement import Reading, Window
from polythrottle.domain.problem import Constraint
from polythrottle.domain.space import OperatingPoint
from polythrottle.metering.point_measurement import measure

POINT = OperatingPoint({"gpu_max_hz": 800_000_000, "batch_size": 4})


def test_energy_is_shared_by_the_items_of_the_window() -> None:
    """Ten watts over 10 ms an item are 0.1 J an item, whatever the batch."""
    device = FakeDevice(power_w=10.0)
    measured = measure(device, FakeWorkload(device), POINT, Window())
    assert measured.energy_j == pytest.approx(0.1)
    assert measured.power_w == pytest.approx(10.0)
    assert measured.throughput_per_s == pytest.approx(100.0)
    assert measured.latency.mean_s == pytest.approx(0.04)
    assert measured.temperature_c == 40.0


def test_a_window_ends_when_it_has_seen_enough() -> None:
    """Both the least time and the least number of queries are reached, and no more."""
    device = FakeDevice()
    one = measure(device, FakeWorkload(device), POINT, Window(queries=10, duration_s=2.0))
    assert one.window_s == pytest.approx(2.0)
    two = measure(device, FakeWorkload(device), POINT, Window(queries=100, duration_s=1.0))
    assert two.latency.queries == 100
    three = measure(device, FakeWorkload(device), POINT, Window(queries=10, duration_s=50.0, most_queries=20))
    assert three.latency.queries == 20
    four = measure(device, FakeWorkload(device), POINT, Window(queries=1000, duration_s=1.0, timeout_s=3.0))
    assert four.latency.queries in (75, 76)


def test_warm_up_is_not_counted() -> None:
    """Queries before the window cost time but are in no figure."""
    device = FakeDevice()
    measured = measure(device, FakeWorkload(device), POINT, Window(queries=10, duration_s=0.0, warmup=7))
    assert measured.latency.queries == 10
    assert device.clock.now() == pytest.approx(17 * 0.04)


@pytest.mark.parametrize(("power", "told"), [(0.0, "did not move"), (-1.0, "did not move"), (float("nan"), "nothing")])
def test_energy_that_does_not_move_spoils_the_trial(power: float, told: str) -> None:
    """A sensor that stands still or goes back is never a number."""
    device = FakeDevice(power_w=power)
    with pytest.raises(TrialError, match=told):
        measure(device, FakeWorkload(device), POINT, Window())


def test_a_throttled_window_is_not_valid() -> None:
    """What a hot device does says nothing about the point."""
    device = FakeDevice()
    device.throttled = True
    with pytest.raises(TrialError, match="was throttled"):
        measure(device, FakeWorkload(device), POINT, Window())


def test_a_failing_query_spoils_the_trial() -> None:
    """The workload's own words are the reason."""
    device = FakeDevice()
    with pytest.raises(TrialError, match="out of memory"):
        measure(device, FakeWorkload(device, TrialError("out of memory"), after=20), POINT, Window())


def test_a_window_that_plainly_breaks_a_limit_is_cut_short() -> None:
    """Thirty queries tell; latency, power and energy are those of what was seen, and it is called censored."""
    device = FakeDevice(power_w=10.0)
    window = Window(queries=100, duration_s=0.0, most_queries=1000)
    measured = measure(device, FakeWorkload(device), POINT, window, [Constraint.parse("mean<=20ms")])
    assert measured.censored
    assert measured.latency.queries == 30
    assert measured.energy_j == pytest.approx(0.1)
    assert measured.window_s == pytest.approx(30 * 0.04)
    assert not measure(device, FakeWorkload(device), POINT, window, [Constraint.parse("mean<=40ms")]).censored
    assert not measure(device, FakeWorkload(device), POINT, window).censored


def test_a_window_is_not_cut_short_before_its_energy_is_known() -> None:
    """A counter that has not moved yet is waited for, up to the whole window."""

    class Coarse(FakeDevice):
        def read(self) -> Reading:
            return replace(super().read(), energy_j=10.0 * (self.clock.now() // 2.5))

    device = Coarse()
    window = Window(queries=100, duration_s=0.0, most_queries=1000, warmup=0)
    measured = measure(device, FakeWorkload(device), POINT, window, [Constraint.parse("mean<=20ms")])
    assert measured.censored
    assert measured.window_s is not None
    assert 2.5 <= measured.window_s < 4.0
