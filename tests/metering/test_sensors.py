import math

import numpy as np
import pytest

from polythrottle.domain.errors import InvalidInput
from polythrottle.domain.ports import EXACT_SENSOR, Sensor, usual_sensor
from polythrottle.metering.intervals import Bounded, Normal, Rounded, Student, Triangular, half_width


@pytest.mark.parametrize(
    ("error", "half"),
    [(Normal(1.0), 1.960), (Bounded(1.0), 0.95), (Triangular(1.0), 1 - math.sqrt(0.05)), (Student(1.0, 5), 2.571),
     (Student(2.0, 18), 2 * 2.101), (Rounded(1.0, 0.0), 0.475)],
)  # fmt: skip
def test_one_error_has_its_textbook_interval(error: Normal, half: float) -> None:
    """95 % of a normal, uniform, triangular, Student's t and of a rounding that nothing stirs."""
    assert half_width([error]) == pytest.approx(half, rel=0.02)


def test_errors_add_as_their_sum_does() -> None:
    """Two normal errors add in quadrature; a small one beside a large one hardly counts; none is no error."""
    assert half_width([Normal(3.0), Normal(4.0)]) == pytest.approx(1.96 * 5, rel=0.02)
    assert half_width([Bounded(1.0), Normal(0.01)]) == pytest.approx(0.95, rel=0.02)
    assert half_width([Triangular(1.0), Triangular(1.0)]) < 2 * half_width([Triangular(1.0)])
    assert half_width([]) == 0.0


@pytest.mark.parametrize("stirred", [0.1, 0.3])
def test_noise_stirs_rounding_away(stirred: float) -> None:
    """What rounding leaves of a mean is as the sawtooth says: checked against rounding itself."""
    rng = np.random.default_rng(0)
    truths = rng.random(400)
    off = [float(np.mean(np.round(truth + stirred * rng.standard_normal(4000)) - truth)) for truth in truths]
    assert half_width([Rounded(1.0, stirred)]) == pytest.approx(float(np.quantile(np.abs(off), 0.95)), abs=0.02)


def test_a_sensor_says_how_long_a_window_must_be() -> None:
    """Slow counters and readings that remember need longer windows and longer settling; an exact sensor none."""
    assert EXACT_SENSOR.least_s == EXACT_SENSOR.settle_s == 0.0
    assert Sensor(step_s=0.1).least_s == pytest.approx(1.2)
    assert Sensor(average_s=1.0).least_s == pytest.approx(12.0)
    assert Sensor(lag_s=0.5).settle_s == pytest.approx(2.5)
    assert Sensor(duty=0.25, period_s=0.1).least_s == pytest.approx(1.2)


@pytest.mark.parametrize(
    "wrong", [{"step_s": -1.0}, {"duty": 0.0}, {"duty": 1.5}, {"factor": 0.0}, {"lag_s": math.nan}]
)
def test_a_sensor_that_cannot_be_is_refused(wrong: dict[str, float]) -> None:
    """Negative times, shares beyond one, a factor of nothing."""
    with pytest.raises(InvalidInput, match="sensor"):
        Sensor(**wrong)  # type: ignore[arg-type]


def test_what_is_usual_goes_by_the_kind_of_device() -> None:
    """NVML steps and looks a quarter of the time; simulated boards are exact; what nobody knows is too."""
    assert (usual_sensor("nvml:0").step_s, usual_sensor("nvml:0").duty) == (0.1, 0.25)
    assert usual_sensor("jetson?hz=5") == usual_sensor("jetson") != EXACT_SENSOR
    assert usual_sensor("cpu?watts_per_core=10") == usual_sensor("cpu") != EXACT_SENSOR
    assert usual_sensor("sim:jetson-nano") == usual_sensor("something:else") == EXACT_SENSOR
    assert "1.1" in Sensor(factor=1.1, source="wall meter").note
    assert Sensor().note == ""
