"""What is served in a day: requests in bursts that follow the hour, on a simulated board with a tuned profile."""

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np

from polythrottle.backends.simulated import SimulatedDevice, SimulatedWorkload
from polythrottle.catalog import load_board, load_model
from polythrottle.catalog.tuned_profiles import write_profile
from polythrottle.domain.arrivals import Burst
from polythrottle.domain.ladder import Ladder, PointPerformance
from polythrottle.domain.measurement import Measurement
from polythrottle.domain.profile import Profile
from polythrottle.domain.space import OperatingPoint
from polythrottle.tuning.measured_ladder import ladder_of

BOARD, MODEL, SLO_S = "jetson-agx-orin", "efficientnet-b7", 0.7
BATCH = "batch_size"
MEAN_PER_S, SWING, HOURS = 2.2, 0.5, 24
_BURST = Burst(MEAN_PER_S * (1 + SWING), peak=3.5, share=0.1, length_s=20.0)


def opened(seed: int = 0) -> tuple[SimulatedDevice, SimulatedWorkload]:
    """Return board and workload, as new."""
    device = SimulatedDevice(load_board(BOARD), seed)
    return device, device.serve(load_model(MODEL))


def arrivals(seed: int) -> Iterator[float]:
    """Yield when requests come, without end: bursts, thinned to the hour of the day."""
    random = np.random.default_rng([seed, 0x50A4])
    for time_s in _BURST.times(seed):
        share = (1 + SWING * math.sin(2 * math.pi * (time_s / 3600 / HOURS - 0.25))) / (1 + SWING)
        if random.random() < share:
            yield time_s


@cache
def ladder() -> Ladder:
    """Return the points along load, from what the board does back to back."""
    device, workload = opened()
    found = []
    for point in device.space:
        if point.get("gpu_min_hz", point["gpu_max_hz"]) != point["gpu_max_hz"]:
            continue
        idle_w = _idle_w(device, point)
        for batch in workload.space.knob(BATCH).levels:
            whole = point.moved({BATCH: batch})
            found.append(PointPerformance.of(whole, replace(device.expected(workload, whole), idle_power_w=idle_w)))
    return ladder_of(found, SLO_S)


def profile(file: Path) -> Path:
    """Write the profile of the board and return its file."""
    device, workload = opened()
    rungs = ladder()
    top = rungs.rungs[rungs.top]
    default = device.space.default
    write_profile(
        Profile(
            device=device.uri,
            workload=MODEL,
            point=top.service.point,
            measurement=_seen(device, workload, top.service.point),
            default=_seen(device, workload, default.moved({BATCH: 1})),
            slo=(f"p99<={SLO_S * 1e3:g}ms",),
            workload_knobs=(BATCH,),
            ladder=rungs,
        ),
        file,
    )
    return file


def _seen(device: SimulatedDevice, workload: SimulatedWorkload, point: OperatingPoint) -> Measurement:
    own = point.only(set(point) - {BATCH})
    return replace(device.expected(workload, point), idle_power_w=_idle_w(device, own))


def _idle_w(device: SimulatedDevice, point: OperatingPoint) -> float:
    device.rewind(0)
    device.apply(point)
    before_j = device.read().energy_j
    device.clock.sleep(5.0)
    return (device.read().energy_j - before_j) / 5.0
