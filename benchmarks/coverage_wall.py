"""How often the 95 % interval of a factor against an external meter holds the truth, which is 1.1 and 3 W besides.

    python benchmarks/coverage_wall.py [--runs 400] [--phase 10]

Every run is a simulated self-test, 5 W idle and 20 W loaded by turns with power that wanders by 2 %, beside a meter of
1 Hz with noise of 0.1 W whose clock is off by up to half a minute; a program starts just before. Meters differ by row.
About half a second a run.
"""

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.signal import lfilter

from polythrottle.domain.errors import InvalidInput
from polythrottle.metering.wall_calibration import WallFit, fit_wall

Array = NDArray[np.float64]
FACTOR, CONSTANT_W, IDLE_W, LOADED_W = 1.1, 3.0, 5.0, 20.0
TURNS, TICK_S = (1.0, 1.0, 0.6, 1.4, 1.0), 0.01


@dataclass(frozen=True)
class Meter:
    """What a meter does to power, and how slow the device's own sensor is.

    Args:
        lag_s: Time constant with which it follows.
        stages: How many equal lags that is.
        delay_s: How late it shows what it shows.
        average_s: The time it averages over.
        step_w: What it is rounded to.
        noise_w: Deviation of its readings.
        period_s: Between two of them.
        sensor_lag_s: Time constant of the device's sensor.
    """

    lag_s: float = 0.0
    stages: int = 1
    delay_s: float = 0.0
    average_s: float = 0.0
    step_w: float = 0.0
    noise_w: float = 0.1
    period_s: float = 1.0
    sensor_lag_s: float = 0.0


METERS: Mapping[str, Meter] = {
    "follows at once": Meter(),
    "lag 0.5 s": Meter(lag_s=0.5),
    "lag 2 s": Meter(lag_s=2.0),
    "lag 5 s": Meter(lag_s=5.0),
    "lag 2 s, 1.5 s late": Meter(lag_s=2.0, delay_s=1.5),
    "two lags of 1 s": Meter(lag_s=2.0, stages=2),
    "lag 2 s, averages over 1 s": Meter(lag_s=2.0, average_s=1.0),
    "lag 0.5 s, steps of 0.1 W": Meter(lag_s=0.5, step_w=0.1),
    "steps of 1 W": Meter(step_w=1.0),
    "lag 2 s, noise of 0.5 W": Meter(lag_s=2.0, noise_w=0.5),
    "lag 2 s, 2 Hz": Meter(lag_s=2.0, period_s=0.5),
    "at once, the sensor's lag 2 s": Meter(sensor_lag_s=2.0),
    "lag 2 s, the sensor's 0.5 s": Meter(lag_s=2.0, sensor_lag_s=0.5),
    "lag 15 s": Meter(lag_s=15.0),
}


def fitted(meter: Meter, seed: int, phase_s: float) -> WallFit | None:
    """Return the fit of a run; None if it was refused."""
    rng = np.random.default_rng([seed, 17])
    length_s = sum(TURNS) * phase_s
    times_s = np.arange(-60.0, length_s + 20, TICK_S)
    power_w = _power_w(rng, times_s, phase_s)
    shown_w = FACTOR * power_w + CONSTANT_W
    for _ in range(meter.stages):
        shown_w = _lagged(shown_w, meter.lag_s / meter.stages)
    if meter.average_s:
        width, total = round(meter.average_s / TICK_S), np.concatenate([[0.0], np.cumsum(shown_w)])
        shown_w = np.concatenate([np.full(width - 1, shown_w[0]), (total[width:] - total[:-width]) / width])
    at_s = -5 + (rng.random() + np.arange(int((length_s + 10) / meter.period_s))) * meter.period_s
    read_w = np.interp(at_s - meter.delay_s, times_s, shown_w) + meter.noise_w * rng.standard_normal(len(at_s))
    if meter.step_w:
        read_w = meter.step_w * np.round(read_w / meter.step_w)
    total_j = np.concatenate([[0.0], np.cumsum(_lagged(power_w, meter.sensor_lag_s)) * TICK_S])[:-1]
    test = (times_s >= 0) & (times_s <= length_s)
    log = np.column_stack([at_s + rng.uniform(-30, 30), read_w])
    try:
        return fit_wall(np.column_stack([times_s, total_j])[test].tolist(), log.tolist(), meter.sensor_lag_s)
    except InvalidInput:
        return None


def _power_w(rng: np.random.Generator, times_s: Array, phase_s: float) -> Array:
    turn = np.searchsorted(np.cumsum(TURNS) * phase_s, times_s, "right")
    working = (turn % 2 == 1) & (times_s >= 0) & (times_s < sum(TURNS) * phase_s)
    power_w = np.where(working, LOADED_W, IDLE_W)
    power_w = np.where((times_s > -8) & (times_s < -1), 1.1 * LOADED_W, power_w)
    keep = float(np.exp(-TICK_S / 0.2))
    return power_w * (1 + 0.02 * lfilter([np.sqrt(1 - keep * keep)], [1, -keep], rng.standard_normal(len(times_s))))


def _lagged(power_w: Array, lag_s: float) -> Array:
    if not lag_s:
        return power_w
    keep = float(np.exp(-TICK_S / lag_s))
    return np.asarray(lfilter([1 - keep], [1, -keep], power_w - power_w[0]) + power_w[0])


def main(say: Callable[[str], None] = print) -> None:
    """Print coverage for every meter."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=400)
    parser.add_argument("--phase", type=float, default=10.0, help="length of a phase, s")
    given = parser.parse_args()
    say(f"{given.runs} self-tests with phases of {given.phase:g} s; the factor is {FACTOR}")
    say(f"{'':30} {'covered':>8} {'mean':>7} {'spread':>8} {'± med.':>8} {'refused':>8}")
    for label, meter in METERS.items():
        found = [fitted(meter, seed, given.phase) for seed in range(given.runs)]
        fits = [fit for fit in found if fit is not None]
        refused = f"{1 - len(fits) / len(found):8.1%}"
        if not fits:
            say(f"{label:30} {'':>34} {refused}")
            continue
        factors = np.array([fit.factor for fit in fits])
        held = np.mean([abs(fit.factor - FACTOR) <= fit.half * fit.factor for fit in fits])
        say(
            f"{label:30} {held:8.2%} {factors.mean():7.4f} {factors.std():8.4f} "
            f"{np.median([fit.half for fit in fits]):8.2%} {refused}"
        )


if __name__ == "__main__":
    main()
