"""What is read off a device and a workload: readings, queries, latencies, measurements."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

from polythrottle.errors import InvalidInput


class EnergyKind(StrEnum):
    """How the joules of a measurement came about; every figure made from them carries the word."""

    MEASURED = "measured"
    ESTIMATED = "estimated"
    RELATIVE = "relative"
    SIMULATED = "simulated"


@dataclass(frozen=True)
class Reading:
    """One timed sample of a device.

    Args:
        time_s: When, on the device's clock.
        energy_j: Running total of energy since an arbitrary start.
        temperature_c: Hottest sensor, or None if there is none.
        clocks_hz: What actually runs, by domain; empty if not readable.
        throttled: Whether the device slows itself down now (heat, current, power).
    """

    time_s: float
    energy_j: float
    temperature_c: float | None = None
    clocks_hz: Mapping[str, int] = field(default_factory=dict)
    throttled: bool = False


@dataclass(frozen=True)
class Query:
    """One answered query: how long its sender waited, and for how many items.

    Raises:
        InvalidInput: If the latency is not a positive, finite time or there are no items.
    """

    latency_s: float
    items: int = 1

    def __post_init__(self) -> None:
        if not (math.isfinite(self.latency_s) and self.latency_s > 0) or self.items < 1:
            raise InvalidInput(f"a query took {self.latency_s} s for {self.items} items")


@dataclass(frozen=True)
class Latency:
    """How long queries took over one window; a statistic nobody recorded is None, never 0.

    Args:
        mean_s: Mean over queries.
        p50_s: Median; p90_s, p95_s and p99_s likewise: the time that share of queries stayed within.
        std_s: Standard deviation over queries.
        queries: How many queries the statistics are made of.
    """

    mean_s: float
    p50_s: float | None = None
    p90_s: float | None = None
    p95_s: float | None = None
    p99_s: float | None = None
    std_s: float | None = None
    queries: int | None = None

    def __post_init__(self) -> None:
        for value in (self.mean_s, self.p50_s, self.p90_s, self.p95_s, self.p99_s):
            if value is not None and not (math.isfinite(value) and value > 0):
                raise InvalidInput(f"a latency must be a positive, finite time, not {value} s")

    @classmethod
    def of(cls, latencies_s: Sequence[float]) -> "Latency":
        """Return the statistics of single latencies in seconds.

        Percentiles are order statistics that were really observed (inverted empirical distribution), not interpolated.

        Raises:
            InvalidInput: If there is none, or one is not a positive, finite time.
        """
        times = np.asarray(latencies_s, dtype=float)
        if not times.size:
            raise InvalidInput("no query finished in the window")
        p50, p90, p95, p99 = np.quantile(times, [0.5, 0.9, 0.95, 0.99], method="inverted_cdf").tolist()
        spread = float(times.std(ddof=1)) if times.size > 1 else None
        return cls(float(times.mean()), p50, p90, p95, p99, spread, int(times.size))


METRICS: Mapping[str, str] = {
    "mean": "s",
    "p50": "s",
    "p90": "s",
    "p95": "s",
    "p99": "s",
    "power": "w",
    "temperature": "c",
    "throughput": "per_s",
}
"""The quantities an SLO can bound, and the unit each is held in."""


@dataclass(frozen=True)
class Measurement:
    """One operating point on one workload over one window.

    Args:
        latency: Of single queries.
        energy_j: Energy per item, over everything inside ``boundary``.
        throughput_per_s: Items per second.
        power_w: Mean power over the window; None where the source has only energy of unknown unit.
        energy_kind: Measured, estimated, relative or simulated.
        boundary: Which rails, devices or processes the joules cover.
        temperature_c: Highest reading in the window.
        window_s: How long it was.
        censored: Whether the window was cut short because a limit was plainly broken; everything above is then that of
            the shorter window, and the point does not hold, whatever the limit.

    Raises:
        InvalidInput: If energy or throughput is not positive and finite, or power is not finite or negative.
    """

    latency: Latency
    energy_j: float
    throughput_per_s: float
    power_w: float | None = None
    energy_kind: EnergyKind = EnergyKind.MEASURED
    boundary: str = ""
    temperature_c: float | None = None
    window_s: float | None = None
    censored: bool = False

    def __post_init__(self) -> None:
        for name, value in (("energy", self.energy_j), ("throughput", self.throughput_per_s)):
            if not (math.isfinite(value) and value > 0):
                raise InvalidInput(f"{name} must be positive and finite, not {value}")
        if self.power_w is not None and not (math.isfinite(self.power_w) and self.power_w > 0):
            raise InvalidInput(f"power must be positive and finite, not {self.power_w}")

    def metric(self, name: str) -> float | None:
        """Return one of `METRICS` in its unit, or None if it was not measured."""
        if name == "power":
            return self.power_w
        if name == "temperature":
            return self.temperature_c
        if name == "throughput":
            return self.throughput_per_s
        value: float | None = getattr(self.latency, f"{name}_s")
        return value


@dataclass(frozen=True)
class Window:
    """How long a trial looks.

    It ends once both ``queries`` and ``duration_s`` are reached, or at ``most_queries``, or at ``timeout_s``, whichever
    comes first; ``warmup`` queries go before it and are not counted.

    Raises:
        InvalidInput: If a count or a duration is not positive, or the most is below the least.
    """

    queries: int = 100
    duration_s: float = 2.0
    most_queries: int = 1000
    warmup: int = 5
    timeout_s: float = 60.0

    def __post_init__(self) -> None:
        if self.queries < 1 or self.warmup < 0 or not self.queries <= self.most_queries:
            raise InvalidInput(f"a window needs 1 <= {self.queries} <= {self.most_queries} queries")
        if not (0 <= self.duration_s <= self.timeout_s and 0 < self.timeout_s < math.inf):
            raise InvalidInput(f"a window needs 0 <= {self.duration_s} <= {self.timeout_s} seconds")
