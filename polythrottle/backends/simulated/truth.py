"""What an endless window of a settled board would measure: the ground truth that regret is counted from."""

from collections.abc import Mapping, Sequence
from functools import lru_cache

import numpy as np

from polythrottle.backends.simulated.engine import Engine
from polythrottle.backends.simulated.noise import typical
from polythrottle.backends.simulated.power import static_w
from polythrottle.catalog.models import Model
from polythrottle.measurement import EnergyKind, Latency, Measurement
from polythrottle.space import Level


@lru_cache(maxsize=8)
def _stretch(noise: float) -> Latency:
    """Return the statistics of query times at a noise level, for a query that takes 1 s without noise."""
    return Latency.of(typical(noise).tolist())


def expected(
    engine: Engine, model: Model, batch_sizes: Sequence[int], points: Sequence[Mapping[str, Level]], noise: float
) -> tuple[Measurement, ...]:
    """Return the true measurements of a model.

    Args:
        engine: The board's physics.
        model: What is served.
        batch_sizes: Items per query, one for each point.
        points: Levels of the board's knobs; those not named are at their default.
        noise: Its level.
    """
    batch_size = np.array(batch_sizes, dtype=float)
    cycle, temperature_c = engine.settled(model, batch_size, engine.columns(points))
    stretch = _stretch(noise)
    interval_s = cycle.interval_s * stretch.mean_s
    energy_j = cycle.dynamic_j + static_w(engine.simulation.thermal, temperature_c) * interval_s
    figures = (cycle.latency_s, energy_j / batch_size, batch_size / interval_s, energy_j / interval_s, temperature_c)
    return tuple(
        _measurement(engine, stretch, *row) for row in zip(*(column.tolist() for column in figures), strict=True)
    )


def _measurement(
    engine: Engine,
    stretch: Latency,
    latency_s: float,
    energy_j: float,
    throughput_per_s: float,
    power_w: float,
    temperature_c: float,
) -> Measurement:
    return Measurement(
        latency=_stretched(stretch, latency_s),
        energy_j=energy_j,
        throughput_per_s=throughput_per_s,
        power_w=power_w,
        energy_kind=EnergyKind.SIMULATED,
        boundary=engine.board.rails.boundary,
        temperature_c=temperature_c,
    )


def _stretched(stretch: Latency, latency_s: float) -> Latency:
    parts = (stretch.p50_s, stretch.p90_s, stretch.p95_s, stretch.p99_s, stretch.std_s)
    p50, p90, p95, p99, std = (None if part is None else part * latency_s for part in parts)
    return Latency(stretch.mean_s * latency_s, p50, p90, p95, p99, std)
