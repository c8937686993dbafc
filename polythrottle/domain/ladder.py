"""Operating points along load: for each rate of requests the one that holds the p99 for the least power."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from polythrottle.domain.backports import pairwise
from polythrottle.domain.errors import InvalidInput
from polythrottle.domain.measurement import Measurement
from polythrottle.domain.space import BATCH_SIZE, OperatingPoint

FULL = 0.95
"""The share of its capacity beyond which no point is planned for, whatever the prediction."""


def _held(value: object, *names: str) -> None:
    """Round times to the nanosecond, to which files hold them, so that what is read equals what was written."""
    for name in names:
        object.__setattr__(value, name, round(getattr(value, name), 9))


@dataclass(frozen=True)
class PointPerformance:
    """How a device answers at one operating point: a batch that is not full takes as long and as much as one that is.

    That is what engines of fixed shapes do, which pad; one that does not is cheaper than is said here. Times are held
    to a nanosecond.

    Args:
        point: Levels of device and workload.
        batch: Requests in a full batch.
        interval_s: From one batch to the next when they never run out.
        latency_s: From sending a batch to its answer, on average.
        tail_s: The time that 99 % of batches stay within.
        batch_j: Energy of a batch in that interval, everything the device draws included.
        idle_w: What it draws at this point without work.

    Raises:
        InvalidInput: If a time or an energy is not positive and finite, or the batch is empty.
    """

    point: OperatingPoint
    batch: int
    interval_s: float
    latency_s: float
    tail_s: float
    batch_j: float
    idle_w: float

    def __post_init__(self) -> None:
        _held(self, "interval_s", "latency_s", "tail_s")
        positive = (self.interval_s, self.latency_s, self.tail_s, self.batch_j)
        if self.batch < 1 or not all(math.isfinite(value) and value > 0 for value in positive) or self.idle_w < 0:
            raise InvalidInput(f"a batch of {self.batch} takes {self.interval_s} s and {self.batch_j} J")

    @classmethod
    def of(cls, point: OperatingPoint, seen: Measurement) -> PointPerformance:
        """Return how a device answers at a point, from what was measured there back to back.

        Raises:
            InvalidInput: If the measurement lacks idle power or p99, without which nothing can be said at partial load.
        """
        if seen.idle_power_w is None:
            raise InvalidInput("following a load needs the idle power of each point; measure with a window that idles")
        if seen.latency.p99_s is None:
            raise InvalidInput("following a load needs the p99 of each point, and these measurements have none")
        batch = int(point.get(BATCH_SIZE, 1))
        whole_s = batch / seen.throughput_per_s
        return cls(
            point, batch, whole_s, seen.latency.mean_s, seen.latency.p99_s, seen.energy_j * batch, seen.idle_power_w
        )

    @property
    def most_per_s(self) -> float:
        """Requests per second beyond which the queue grows without end."""
        return self.batch / self.interval_s

    @property
    def marginal_j(self) -> float:
        """The energy a full batch adds per request to what the device draws idle; never negative."""
        # Idle and busy power come from two windows, so that noise can put the idle one above.
        return max(0.0, self.batch_j - self.idle_w * self.interval_s) / self.batch

    @property
    def full_w(self) -> float:
        """What it draws when requests never run out, which is the most it can."""
        return max(self.idle_w, self.batch_j / self.interval_s)

    def least_w(self, rate_per_s: float) -> float:
        """Return the least mean power at a rate of requests: every batch full."""
        return self.idle_w + rate_per_s * self.marginal_j


@dataclass(frozen=True)
class Rung:
    """The point for all rates up to one.

    Args:
        rate_per_s: The highest it is meant for.
        service: What is applied, and how it answers.
        gather_s: How long the server may keep a request waiting for others.
        power_w: Predicted mean at that rate.
        p99_s: Predicted at that rate.
        relief_w_per_s: What the SLO costs there: the watts that one more second of its p99 would save; None if unknown.

    Raises:
        InvalidInput: If one of them is not finite and positive; only the time to gather and the relief may be 0.
    """

    rate_per_s: float
    service: PointPerformance
    gather_s: float
    power_w: float
    p99_s: float
    relief_w_per_s: float | None = None

    def __post_init__(self) -> None:
        _held(self, "gather_s", "p99_s")
        positive = (self.rate_per_s, self.power_w, self.p99_s)
        if not all(0 < value < math.inf for value in positive) or not 0 <= self.gather_s < math.inf:
            raise InvalidInput(f"no rung is for {self.rate_per_s}/s at {self.power_w} W and a p99 of {self.p99_s} s")

        if self.relief_w_per_s is not None and not 0 <= self.relief_w_per_s < math.inf:
            raise InvalidInput(f"a longer limit cannot save {self.relief_w_per_s} W/s")

    def power_at(self, rate_per_s: float) -> float:
        """Return the mean power at another rate, in watts.

        Batches are taken to be as full as the requests that come while the oldest is kept waiting make them, and fuller
        the higher the rate: single requests at none, as predicted at the rung's own.
        """
        added_w = self.power_w - self.service.idle_w
        batch_j = self.service.batch_j - self.service.idle_w * self.service.interval_s
        # The same noise: there is nothing that could grow with the rate.
        if added_w <= 0 or batch_j <= 0:
            return self.power_w
        filled = self.rate_per_s * batch_j / added_w
        # Beyond its capacity it is busy all the time and draws no more.
        rate_per_s = min(rate_per_s, self.service.most_per_s)
        fuller = 1 + (filled - 1) * min(1.0, rate_per_s / self.rate_per_s)
        gathered = min(filled, 1 + rate_per_s * self.gather_s)
        return self.service.idle_w + rate_per_s * batch_j / max(1.0, fuller, gathered)


@dataclass(frozen=True)
class Ladder:
    """Rungs by rising rate.

    Args:
        slo_s: The p99 they hold.
        rungs: At least one.

    Raises:
        InvalidInput: If there is none, their rates do not rise, or the p99 is not positive and finite.
    """

    slo_s: float
    rungs: tuple[Rung, ...]

    def __post_init__(self) -> None:
        _held(self, "slo_s")
        if not 0 < self.slo_s < math.inf:
            raise InvalidInput(f"a ladder holds a p99 above zero, not {self.slo_s} s")
        rates = [rung.rate_per_s for rung in self.rungs]
        if not rates or any(after <= before for before, after in pairwise(rates)):
            raise InvalidInput("a ladder needs rungs of rising rates")

    @property
    def top(self) -> int:
        """The rung of the highest rate."""
        return len(self.rungs) - 1

    @cached_property
    def coolest(self) -> int:
        """The rung that draws least under the load it is meant for."""
        return min(range(len(self.rungs)), key=lambda number: self.rungs[number].power_w)

    def within(self, full_w: float) -> tuple[int, ...]:
        """Return the rungs that draw no more than this at full load; that which draws least if none does."""
        found = tuple(number for number, rung in enumerate(self.rungs) if rung.service.full_w <= full_w)
        return found or (min(range(len(self.rungs)), key=lambda number: self.rungs[number].service.full_w),)

    def best(self, demand_per_s: float, mean_per_s: float, budget_w: float | None = None) -> int:
        """Return the rung that answers a demand for the least power; the top if the demand is beyond all.

        Args:
            demand_per_s: What it must be able to answer.
            mean_per_s: What it will have to answer on average, for which its power is counted.
            budget_w: The most mean power; if none that can answer is within, that which draws least is returned.
        """
        able = [number for number, rung in enumerate(self.rungs) if rung.rate_per_s >= demand_per_s] or [self.top]

        def drawn_w(number: int) -> float:
            return self.rungs[number].power_at(mean_per_s)

        chosen = min(able, key=drawn_w)
        if budget_w is None or drawn_w(chosen) <= budget_w:
            return chosen
        within = [number for number in range(len(self.rungs)) if drawn_w(number) <= budget_w]
        if within:
            # None that is within answers the demand, so the one that is meant for most falls short least.
            return max(within)
        return min(range(len(self.rungs)), key=drawn_w)
