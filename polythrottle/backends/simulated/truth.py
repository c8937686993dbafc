"""What an endless window of a settled board would measure: the ground truth that regret is counted from."""

from collections.abc import Mapping
from functools import lru_cache

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


def expected(engine: Engine, model: Model, batch_size: int, levels: Mapping[str, Level], noise: float) -> Measurement:
    """Return the true measurement of a model in batches at the levels of all knobs, at a noise level."""
    cycle, temperature_c = engine.settled(model, batch_size, levels)
    stretch = _stretch(noise)
    interval_s = cycle.interval_s * stretch.mean_s
    energy_j = cycle.dynamic_j + static_w(engine.simulation.thermal, temperature_c) * interval_s
    return Measurement(
        latency=_stretched(stretch, cycle.latency_s),
        energy_j=energy_j / batch_size,
        throughput_per_s=batch_size / interval_s,
        power_w=energy_j / interval_s,
        energy_kind=EnergyKind.SIMULATED,
        boundary=engine.board.rails.boundary,
        temperature_c=temperature_c,
    )


def _stretched(stretch: Latency, latency_s: float) -> Latency:
    parts = (stretch.p50_s, stretch.p90_s, stretch.p95_s, stretch.p99_s, stretch.std_s)
    p50, p90, p95, p99, std = (None if part is None else part * latency_s for part in parts)
    return Latency(stretch.mean_s * latency_s, p50, p90, p95, p99, std)
