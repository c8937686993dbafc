"""A queue before one server that answers in batches: how long requests wait, and what the server draws meanwhile."""

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from polythrottle.ladder import Service


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
    """What a queue was like.

    Args:
        p99_s: The 99th percentile of waiting and service together.
        power_w: Mean.
        high_s: The percentile that was asked for.
    """

    p99_s: float
    power_w: float
    high_s: float


def queueing(times_s: Sequence[float], service: Service, gather_s: float, share: float = 0.99) -> Queueing:
    """Return how long requests take and what the device draws, by going through arrivals one by one.

    Each batch is taken to last its mean; by how much the tail of one batch exceeds that is added to the percentile, as
    if the same requests were unlucky twice, which errs to the safe side.

    Args:
        times_s: When requests arrive, ascending; at least one.
        service: How the server answers.
        gather_s: How long the oldest request may be kept waiting for others.
        share: Of the requests that stay within ``high_s``.
    """
    sent = list(batches(times_s, service, gather_s))
    starts_s = np.repeat([each.start_s for each in sent], [each.after - each.first for each in sent])
    taken_s = starts_s - np.asarray(times_s) + service.latency_s
    unlucky_s = max(0.0, service.tail_s - service.latency_s)
    p99_s, high_s = (np.quantile(taken_s, (0.99, share), method="inverted_cdf") + unlucky_s).tolist()
    span_s = max(sent[-1].start_s + service.interval_s - times_s[0], service.interval_s * len(sent))
    extra_j = max(0.0, service.batch_j - service.idle_w * service.interval_s)
    return Queueing(p99_s, service.idle_w + len(sent) * extra_j / span_s, high_s)
