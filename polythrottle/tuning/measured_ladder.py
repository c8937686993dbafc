"""Ladders from what was measured: the cheapest point that holds the p99 at each rate, found by simulating a queue."""

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from polythrottle.domain.errors import InvalidInput, SloUnmet
from polythrottle.domain.ladder import FULL, Ladder, PointPerformance, Rung
from polythrottle.domain.measurement import EnergyKind, Measurement
from polythrottle.domain.study import Study

# A queue before one server that answers in batches: how long requests wait, and what the server draws meanwhile.


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
    if first + batch <= len(times_s):
        full_s = times_s[first + batch - 1]
    else:
        full_s = math.inf
    return min(full_s, times_s[first] + gather_s)


def batches(times_s: Sequence[float], service: PointPerformance, gather_s: float) -> Iterator[Batch]:
    """Yield the batches in which one server answers requests, first come, first served.

    Args:
        times_s: When requests arrive, ascending.
        service: How it answers.
        gather_s: How long the oldest request may be kept waiting for others.
    """
    first = 0
    free_s = -math.inf
    while first < len(times_s):
        start_s = max(free_s, gathered_s(times_s, first, service.batch, gather_s))
        # Whoever arrives before the batch is sent goes along, up to its size.
        most = min(len(times_s), first + service.batch)
        after = max(first + 1, bisect_right(times_s, start_s, first, most))
        yield Batch(first, after, start_s)
        first = after
        free_s = start_s + service.interval_s


class QueueResult(NamedTuple):
    """What a queue was like.

    Args:
        p99_s: The 99th percentile of waiting and service together.
        power_w: Mean.
        high_s: The percentile that was asked for.
    """

    p99_s: float
    power_w: float
    high_s: float


def simulate_queue(
    times_s: Sequence[float], service: PointPerformance, gather_s: float, share: float = 0.99
) -> QueueResult:
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
    return QueueResult(p99_s, service.idle_w + len(sent) * extra_j / span_s, high_s)


# Ladders from what was measured: the cheapest point that holds the p99 at each rate of requests.

_LAX = 1.1
"""By how much the SLO is relaxed to see what it costs."""
_STEP = 1.25
"""From one rate to the next."""
_LOWEST = 1 / 64
"""The lowest rung's rate over the highest that any point can answer."""
_REQUESTS = 4000
_MARGIN = 0.9
"""The share of the SLO that a prediction may take: real arrivals are burstier than Poisson's, predictions miss."""
_ALIKE = 0.005
"""Points that differ by less than this share in everything are taken for the same."""
_MINUTE_S = 60.0
"""What a p99 is taken over: nearly every minute is to hold it, not the average of them."""
_HALVINGS = 30
_MANY = 200
_FIRST = 500
_HOPELESS = 1.5
"""So many requests suffice to see that a queue takes that many times too long."""


def ladder_of(services: Iterable[PointPerformance], slo_s: float, seed: int = 0) -> Ladder:
    """Return the ladder along Poisson arrivals.

    Args:
        services: How the device answers at the points to choose from.
        slo_s: The p99 to hold, from when a request arrives.
        seed: Of the arrivals the queues are computed with.

    Raises:
        SloUnmet: If no point holds it even at the lowest rate.
    """
    lax_s = _LAX * slo_s
    known = list(services)
    able, more = (undominated(each for each in known if each.tail_s <= _MARGIN * held_s) for held_s in (slo_s, lax_s))
    # The same gaps at every rate, only stretched: rungs then differ by their service, not by luck.
    gaps = np.random.default_rng([seed, 0x1ADD]).standard_exponential(_REQUESTS)
    times = np.cumsum(gaps)
    top = max((service.most_per_s for service in able), default=0.0)
    rates = (top * _LOWEST * _STEP**step for step in range(100))
    per_rate = (_rung(able, rate, times, slo_s) for rate in rates if rate < top)
    rungs = tuple(rung for rung in per_rate if rung is not None)
    if not rungs:
        raise SloUnmet(f"no point holds p99<={slo_s * 1e3:g}ms at any rate of requests")
    lax = [_rung(more, rung.rate_per_s, times, lax_s) for rung in rungs]
    return Ladder(slo_s, tuple(_priced(*pair, lax_s - slo_s) for pair in zip(rungs, lax, strict=True)))


def _priced(rung: Rung, lax: Rung | None, longer_s: float) -> Rung:
    """Return a rung with what its SLO costs, seen from the rung for a longer one."""
    if lax is None:
        saved_w = 0.0
    else:
        saved_w = max(0.0, rung.power_w - lax.power_w)
    return replace(rung, relief_w_per_s=round(saved_w / longer_s, 6))


def ladder_of_study(study: Study, slo_s: float) -> Ladder:
    """Return the ladder of the points a study measured; those that break its power or heat are left out.

    Raises:
        InvalidInput: If no measurement has what is needed; see `PointPerformance.of`.
        SloUnmet: If none of them holds the SLO.
    """
    measured = [(trial.point, trial.measurement) for trial in study.completed if trial.measurement is not None]
    whole = [(point, measurement) for point, measurement in measured if not measurement.censored]
    limits = [limit for limit in study.constraints if not limit.timed and not limit.at_least]
    held = [(point, each) for point, each in whole if all(limit.slack(each) >= 0 for limit in limits)]
    known = [(point, each) for point, each in held if each.idle_power_w is not None and each.latency.p99_s is not None]
    # If none will do, the first says in its error what it lacks.
    return ladder_of([PointPerformance.of(point, measurement) for point, measurement in known or held[:1]], slo_s)


@dataclass(frozen=True)
class LadderOffer:
    """The ladder of a study's answer, or why it has none."""

    ladder: Ladder | None
    why: str = ""

    @classmethod
    def of(cls, study: Study) -> "LadderOffer":
        """Return the ladder of all points a study measured, if it measured what that takes."""
        limits_s = [limit.limit for limit in study.constraints if limit.metric == "p99"]
        if not limits_s:
            return cls(None, "following a load needs a limit on the p99, such as --slo 'p99<=50ms'")
        if not study.problem.arrivals.closed:
            return cls(None, "following a load needs points measured back to back, without --arrivals")
        if any(measurement.energy_kind is EnergyKind.RELATIVE for measurement in _measured(study)):
            return cls(None, "following a load needs joules, and this energy is only relative")
        try:
            return cls(ladder_of_study(study, min(limits_s)))
        except (InvalidInput, SloUnmet) as error:
            return cls(None, str(error))


def _measured(study: Study) -> list[Measurement]:
    return [trial.measurement for trial in study.completed if trial.measurement is not None]


def undominated(services: Iterable[PointPerformance]) -> list[PointPerformance]:
    """Return the services that no other of the same batch beats in everything, by more than a trifle."""
    kept: list[PointPerformance] = []
    for service in sorted(services, key=_figures):
        if not any(other.batch == service.batch and _beats(other, service) for other in kept):
            kept.append(service)
    return kept


def _figures(service: PointPerformance) -> tuple[float, ...]:
    return (service.interval_s, service.latency_s, service.tail_s, service.marginal_j, service.idle_w)


def _beats(one: PointPerformance, other: PointPerformance) -> bool:
    return all(mine <= theirs * (1 + _ALIKE) for mine, theirs in zip(_figures(one), _figures(other), strict=True))


def _rung(services: Sequence[PointPerformance], rate_per_s: float, times: np.ndarray, slo_s: float) -> Rung | None:
    """Return the cheapest rung at a rate: one that holds in nearly all minutes, or failing that on the whole."""
    times_s = (times / rate_per_s).tolist()
    # Nearly every minute is to hold; with few requests in a minute that may be more than any point can do.
    shares = (1 - late_share(_MINUTE_S * rate_per_s), 0.99)
    per_share = (_cheapest(services, rate_per_s, times_s, slo_s, share) for share in shares)
    return next((rung for rung in per_share if rung is not None), None)


def _cheapest(
    services: Sequence[PointPerformance], rate_per_s: float, times_s: Sequence[float], slo_s: float, share: float
) -> Rung | None:
    """Return the cheapest rung that so many requests stay within; those that cannot be cheaper are not looked at."""
    best: Rung | None = None
    # By what each draws at least, so that the search ends at the first that cannot beat the best.
    for service in sorted(services, key=lambda each: each.least_w(rate_per_s)):
        if best is not None and service.least_w(rate_per_s) >= best.power_w:
            break
        if rate_per_s > FULL * service.most_per_s:
            continue
        for gather_s in gatherings(service, slo_s):
            # A queue that is hopeless shows early, and the whole of it costs eight times as much to simulate.
            if simulate_queue(times_s[:_FIRST], service, gather_s).p99_s > _HOPELESS * slo_s:
                continue
            queue = simulate_queue(times_s, service, gather_s, share)
            if queue.high_s <= _MARGIN * slo_s and (best is None or queue.power_w < best.power_w):
                best = Rung(rate_per_s, service, gather_s, queue.power_w, queue.p99_s)
    return best


def late_share(requests: float) -> float:
    """Return the share of requests that may be late so that the p99 of so many holds in 99 % of cases.

    Of fewer than a hundred none may be, for then their p99 is the slowest of them.

    Args:
        requests: That the p99 is taken over, such as those of a minute.
    """
    allowed = int(0.01 * requests)
    low = 0.0
    high = 0.01
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        holds = _at_most(allowed, middle * max(1.0, requests)) >= 0.99
        low, high = (middle, high) if holds else (low, middle)
    return low


def _at_most(count: int, mean: float) -> float:
    """Return the chance of at most so many where a mean is expected: Poisson's, of many by its normal limit."""
    if count >= _MANY:
        # Half a count more: the correction for reading a count, which has steps, off a curve that has none.
        return 0.5 * (1 + math.erf((count + 0.5 - mean) / math.sqrt(2 * mean)))
    chance = total = math.exp(-mean)
    for number in range(1, count + 1):
        chance *= mean / number
        total += chance
    return total


def gatherings(service: PointPerformance, slo_s: float) -> tuple[float, ...]:
    """Return how long a batch may be gathered: not at all, or for parts of what the SLO leaves beside its service.

    All of that leaves no time to wait for the batch before; at high rates, where batches fill sooner, there is none to
    wait for.

    Args:
        service: How the server answers.
        slo_s: The p99 to hold.
    """
    spare_s = _MARGIN * slo_s - service.tail_s
    if service.batch == 1 or spare_s <= 0:
        return (0.0,)
    parts = (0.0, spare_s / 2, spare_s - service.interval_s, spare_s)
    return tuple(sorted({part for part in parts if part >= 0}))
