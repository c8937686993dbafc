"""The factor against an external meter that is slow, late, coarse or noisy, of a truth that is known."""

from dataclasses import dataclass

import numpy as np
import pytest

from polythrottle.domain.errors import InvalidInput
from polythrottle.domain.ports import Sensor
from polythrottle.metering.lag_model import EnergyCurve, MeterLag, lagging, slope_variance, step_of
from polythrottle.metering.wall_calibration import WallFit, fit_wall

Log = list[tuple[float, float]]
FACTOR, CONSTANT_W = 1.1, 3.0
TICK_S = 0.02


@dataclass(frozen=True)
class Meter:
    """What a meter does to power before it shows it."""

    lag_s: float = 0.0
    delay_s: float = 0.0
    average_s: float = TICK_S
    step_w: float = 0.0
    noise_w: float = 0.1
    period_s: float = 1.0


def trailing(power_w: np.ndarray, lag_s: float) -> np.ndarray:
    """Return power as it is shown with a lag."""
    if lag_s == 0:
        return power_w
    keep, now_w, found = float(np.exp(-TICK_S / lag_s)), float(power_w[0]), []
    for each_w in power_w.tolist():
        now_w = keep * now_w + (1 - keep) * each_w
        found.append(now_w)
    return np.array(found)


def logs(meter: Meter, seed: int = 0, phase_s: float = 10.0, sensor_lag_s: float = 0.0) -> tuple[Log, Log]:
    """Return what a self-test reads of a device that draws 5 or 20 W, give or take, and the log of a meter."""
    rng = np.random.default_rng(seed)
    times_s = np.arange(-40.0, 5 * phase_s + 10, TICK_S)
    turn = np.searchsorted(np.cumsum([1.0, 1.0, 0.6, 1.4, 1.0]) * phase_s, times_s, "right")
    busy = (turn % 2 == 1) & (times_s >= 0)
    power_w = np.where(busy, 20.0, 5.0) * (1 + 0.02 * trailing(rng.standard_normal(len(times_s)), 0.2) * 4)
    power_w[(times_s > -8) & (times_s < -1)] = 22.0  # a program that starts
    shown_w = trailing(FACTOR * power_w + CONSTANT_W, meter.lag_s)
    width = max(1, round(meter.average_s / TICK_S))
    total_w = np.concatenate([np.zeros(width), np.cumsum(shown_w)])
    shown_w = (total_w[width:] - total_w[:-width]) / width
    at_s = np.arange(-5 + rng.random() * meter.period_s, 5 * phase_s + 5, meter.period_s)
    read_w = np.interp(at_s - meter.delay_s, times_s, shown_w) + meter.noise_w * rng.standard_normal(len(at_s))
    if meter.step_w:
        read_w = meter.step_w * np.round(read_w / meter.step_w)
    test = (times_s >= 0) & (times_s <= 5 * phase_s)
    energy_j = np.cumsum(trailing(power_w, sensor_lag_s)[test]) * TICK_S
    return list(zip(times_s[test], energy_j, strict=True)), list(zip(at_s + 100, read_w, strict=True))


def holds(fit: WallFit) -> bool:
    """Return whether the interval holds the truth."""
    return abs(fit.factor - FACTOR) <= fit.half * fit.factor


@pytest.mark.parametrize(
    "meter",
    [
        Meter(lag_s=0.5),
        Meter(lag_s=2.0),
        Meter(lag_s=5.0),
        Meter(lag_s=2.0, delay_s=1.5),
        Meter(average_s=4.0),
        Meter(lag_s=2.0, step_w=0.1, period_s=2.0),
    ],
    ids=str,
)
def test_a_slow_meter_gives_the_same_factor(meter: Meter) -> None:
    """Phases that end before it has followed make the line no flatter, and what it does not know is said."""
    fit = fit_wall(*logs(meter))
    assert fit.factor == pytest.approx(FACTOR, rel=0.025)
    assert 0.001 < fit.half < 0.05
    assert fit.lag_s == pytest.approx(meter.lag_s + meter.average_s / 2, abs=0.6)


@pytest.mark.slow
def test_the_interval_of_a_factor_holds() -> None:
    """Of twelve meters with lags of 0 to 5 s nearly all; 400 each held in 96 to 97 of 100."""
    held = [holds(fit_wall(*logs(Meter(lag_s=(0.0, 0.5, 2.0, 5.0)[seed % 4]), seed))) for seed in range(12)]
    assert sum(held) >= 10


@pytest.mark.slow
def test_a_meter_too_slow_for_the_phases_is_refused_with_what_would_do() -> None:
    """The seconds that are named are then enough."""
    with pytest.raises(InvalidInput, match=r"too slowly for phases of 10 s; run polythrottle calibrate --seconds \d+"):
        fit_wall(*logs(Meter(lag_s=15.0)))
    assert holds(fit_wall(*logs(Meter(lag_s=15.0), phase_s=40.0)))


def test_a_factor_that_is_hardly_known_is_not_applied() -> None:
    """Noise as large as the load leaves more open than the sensor is usually off by."""
    with pytest.raises(InvalidInput, match=r"give or take \d+%, and nothing beyond 5% is applied .* --seconds \d+"):
        fit_wall(*logs(Meter(noise_w=4.0)))


def test_a_sensor_that_trails_itself_is_allowed_for() -> None:
    """A device's own lag is put on the meter too, or the two would not fit."""
    device, wall = logs(Meter(), sensor_lag_s=2.0)
    assert fit_wall(device, wall, 2.0).factor == pytest.approx(FACTOR, rel=0.02)
    kept = fit_wall(device, wall, 2.0).applied(Sensor(lag_s=2.0), "a.csv")
    assert (kept.lag_s, kept.source) == (2.0, "wall meter, a.csv")
    straight = np.column_stack([np.arange(9.0), 3 * np.arange(9.0)])
    assert lagging(straight, 0.5)[-1, 1] == pytest.approx(3 * (8 - 0.5), abs=0.01)
    assert lagging(straight, 0.0) is straight


def test_whole_watts_hide_what_the_residuals_do_not_show() -> None:
    """Two levels that nothing stirs are each off by up to half a step; noise of most of a step shows it."""
    shown_w = np.repeat([5.0, 20.0], 20)
    still, rng = np.round(1.1 * shown_w + 3), np.random.default_rng(0)
    assert slope_variance(1.0, still, shown_w, np.zeros(40)) == pytest.approx(2 / 12 / 15**2)
    noise_w = 0.8 * rng.standard_normal(40)
    stirred = np.round(1.1 * shown_w + 3 + noise_w)
    assert slope_variance(1.0, stirred, shown_w, stirred - 1.1 * shown_w - 3) < 0.2 * 2 / 12 / 15**2
    assert slope_variance(0.0, 1.1 * shown_w + noise_w, shown_w, noise_w) == 0.0
    wide, narrow = (fit_wall(*logs(Meter(step_w=step_w, noise_w=0.01))) for step_w in (1.0, 0.1))
    assert wide.half > 2 * narrow.half


@pytest.mark.parametrize(
    ("values", "step"),
    [([5.0, 21.0, 5.0], 1.0), ([5.5, 21.0], 0.5), ([0.1, 0.2, 0.5, 0.7, 1.1, 9.3], 0.1), ([5.0, 5.5, 6, 7, 7.5], 0.5),
     ([12.0, 40.0], 4.0), ([110.0, 400.0, 110.0], 10.0), ([0.3, 4.3, 10.3, 20.3, 30.3], 2.0), ([7.0], 7.0),
     ([0.0305 * count for count in (1, 2, 5, 7, 90)], 0.0305), ([1 / 3, 2.0], 0.0)],
)  # fmt: skip
def test_the_step_of_a_meter_is_seen_in_its_values(values: list[float], step: float) -> None:
    """It is the largest of which all are multiples, a constant aside where many are seen; else there is none."""
    assert step_of(np.array(values)) == pytest.approx(step)
    assert step_of(np.random.default_rng(0).random(50)) == 0.0


@pytest.mark.slow
@pytest.mark.parametrize("step_w", [2.0, 4.0, 5.0])
def test_a_meter_of_coarse_steps_is_refused_or_its_interval_holds(step_w: float) -> None:
    """Steps that are no power of ten are seen as well, and what they hide is not made up for by a longer test."""
    refused, held = [], []
    for seed in range(3):
        try:
            held.append(holds(fit_wall(*logs(Meter(step_w=step_w), seed))))
        except InvalidInput as error:
            refused.append(str(error))
    assert refused
    assert all("moves in steps of" in line and "--seconds" not in line for line in refused)
    assert all(held)


def test_readings_at_edges_do_not_count_as_noise() -> None:
    """A few that lie far off the line stir no level, however large they are."""
    shown_w, rest_w = np.repeat([5.0, 20.0], 20), np.zeros(40)
    rest_w[[0, 19, 20, 39]] = 6.0
    assert slope_variance(4.0, 4 * np.round(shown_w / 4), shown_w, rest_w) == pytest.approx(16 / 6 / 15**2)


def test_the_steps_are_those_of_the_log_where_the_sensor_trails() -> None:
    """What is put on the meter to be like the sensor hides its steps from whoever looks later."""
    device, wall = logs(Meter(step_w=1.0, noise_w=0.01), sensor_lag_s=1.0)
    fine = logs(Meter(step_w=0.0, noise_w=0.01), sensor_lag_s=1.0)[1]
    assert fit_wall(device, wall, 1.0).half > 2 * fit_wall(device, fine, 1.0).half


def test_a_trace_shows_a_step_as_a_meter_would() -> None:
    """An average climbs in a straight line, a lag by 1 - 1/e in its time constant, and both keep the joules."""
    times_s = np.arange(0.0, 40.0, 0.01)
    energy = np.column_stack([times_s, 10.0 * np.maximum(0.0, times_s - 10.0)])
    trace = EnergyCurve(np.concatenate([[[-1e-9, -1e-9]], energy]), 0.5)
    after_s = np.array([11.0, 12.0, 30.0])
    assert trace.shown_w(after_s, MeterLag(0.0, 1), np.full(3, 2.0)) == pytest.approx([5.0, 10.0, 10.0], abs=0.1)
    lagged_w = trace.shown_w(after_s, MeterLag(2.0, 1), np.zeros(3))
    assert lagged_w == pytest.approx(10 * (1 - np.exp(-np.array([0.5, 1.0, 10.0]))), abs=0.1)
    assert trace.shown_w(after_s, MeterLag(2.0, 2), np.zeros(3))[0] < lagged_w[0]
