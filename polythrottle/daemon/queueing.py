"""A queue before one server that answers in batches: how long requests wait, and what the server draws meanwhile."""

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from polythrottle.errors import InvalidInput
from polythrottle.measurement import Measurement
from polythrottle.space import OperatingPoint

_BATCH = "batch_size"


@dataclass(frozen=True)
class Service:
    """How a device answers at one operating point: a batch that is not full takes as long and as much as one that is.

    That is what engines of fixed shapes do, which pad; one that does not is cheaper than is said here.

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
        positive = (self.interval_s, self.latency_s, self.tail_s, self.batch_j)
        if self.batch < 1 or not all(math.isfinite(value) and value > 0 for value in positive) or self.idle_w < 0:
            raise InvalidInput(f"a batch of {self.batch} takes {self.interval_s} s and {self.batch_j} J")

    @classmethod
    def of(cls, point: OperatingPoint, seen: Measurement) -> "Service":
        """Return how a device answers at a point, from what was measured there back to back.

        Raises:
            InvalidInput: If the measurement lacks idle power or p99, without which nothing can be said at partial load.
        """
        if seen.idle_power_w is None:
            raise InvalidInput("following a load needs the idle power of each point; measure with a window that idles")
        if seen.latency.p99_s is None:
            raise InvalidInput("following a load needs the p99 of each point, and these measurements have none")
        batch = int(point.get(_BATCH, 1))
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
        return max(0.0, self.batch_j - self.idle_w * self.interval_s) / self.batch

    def least_w(self, rate_per_s: float) -> float:
        """Return the least mean power at a rate of requests: every batch full."""
        return self.idle_w + rate_per_s * self.marginal_j


class Batch(NamedTuple):
    """A batch: which requests, and when it was sent."""

    first: int
    after: int
    start_s: float


def gathered_s(times_s: Sequence[float], first: int, batch: int, gather_s: float) -> float:
    """Return when the batch that begins with a request is ready to be sent: full, or waited for long enough.

    Args:
        times_s: When requests arrive, ascending.
        first: Index of the oldest that waits.
        batch: Requests in a full batch.
        gather_s: How long the oldest may be kept waiting for others.
    """
    full_s = times_s[first + batch - 1] if first + batch <= len(times_s) else math.inf
    return min(full_s, times_s[first] + gather_s)


def batches(times_s: Sequence[float], service: Service, gather_s: float) -> Iterator[Batch]:
    """Yield the batches in which one server answers requests, first come, first served.

    Args:
        times_s: When requests arrive, ascending.
        service: How it answers.
        gather_s: How long the oldest request may be kept waiting for others.
    """
    first, free_s = 0, -math.inf
    while first < len(times_s):
        start_s = max(free_s, gathered_s(times_s, first, service.batch, gather_s))
        most = min(len(times_s), first + service.batch)
        after = max(first + 1, bisect_right(times_s, start_s, first, most))
        yield Batch(first, after, start_s)
        first, free_s = after, start_s + service.interval_s


class Queueing(NamedTuple):
    """What a queue was like: the 99th percentile of waiting and service together, and the mean power."""

    p99_s: float
    power_w: float


def queueing(times_s: Sequence[float], service: Service, gather_s: float) -> Queueing:
    """Return how long requests take and what the device draws, by going through arrivals one by one.

    Each batch is taken to last its mean; by how much the tail of one batch exceeds that is added to the percentile, as
    if the same requests were unlucky twice, which errs to the safe side.

    Args:
        times_s: When requests arrive, ascending; at least one.
        service: How the server answers.
        gather_s: How long the oldest request may be kept waiting for others.
    """
    sent = list(batches(times_s, service, gather_s))
    starts_s = np.repeat([each.start_s for each in sent], [each.after - each.first for each in sent])
    taken_s = starts_s - np.asarray(times_s) + service.latency_s
    p99_s = float(np.quantile(taken_s, 0.99, method="inverted_cdf")) + max(0.0, service.tail_s - service.latency_s)
    span_s = max(sent[-1].start_s + service.interval_s - times_s[0], service.interval_s * len(sent))
    extra_j = max(0.0, service.batch_j - service.idle_w * service.interval_s)
    return Queueing(p99_s, service.idle_w + len(sent) * extra_j / span_s)
