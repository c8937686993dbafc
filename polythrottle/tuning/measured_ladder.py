"""Ladders from what was measured: the cheapest point that holds the p99 at each rate, found by simulating a queue."""

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from polythrottle.domain.errors import InvalidInput, SloUnmet
from polythrottle.domain.ladder import FULL, Ladder, PointPerformance, Rung
from polythrottle.domain.measurement import EnergyKind, Measurement
from polythrottle.domain.study import Study

# A queue before one server that answers in batches: how long requests wait, and what the server draws meanwhile.


_REQUESTS = 4000
"""Of a queue, unless fewer tell."""


class Batches(NamedTuple):
    """The batches in which requests were answered, in order.

    Args:
        sizes: How many requests each answers.
        starts_s: When each was sent.
    """

    sizes: Sequence[int]
    starts_s: Sequence[float]


def batches(times_s: Sequence[float], service: PointPerformance, gather_s: float) -> Batches:
    """Return the batches in which one server answers requests, first come, first served.

    A batch is sent when the server is free and the batch is full, or its oldest request has waited for long enough.
    Whoever has arrived by then goes along, up to its size.

    Args:
        times_s: When requests arrive, ascending.
        service: How it answers.
        gather_s: How long the oldest request may be kept waiting for others.
    """
    sizes: list[int] = []
    starts_s: list[float] = []
    first = 0
    free_s = -math.inf
    # A search goes through this a million times at its end, so nothing is called or made here that need not be.
    while first < len(times_s):
        start_s = times_s[first] + gather_s
        most = first + service.batch
        if most <= len(times_s):
            if times_s[most - 1] < start_s:  # noqa: PLR1730  # a call costs more than the rest
                start_s = times_s[most - 1]
        else:
            most = len(times_s)
        if start_s < free_s:  # noqa: PLR1730
            start_s = free_s
        after = most if times_s[most - 1] <= start_s else max(first + 1, bisect_right(times_s, start_s, first, most))
        sizes.append(after - first)
        starts_s.append(start_s)
        first = after
        free_s = start_s + service.interval_s
    return Batches(sizes, starts_s)


@dataclass(frozen=True, eq=False)
class Queue:
    """What a queue is like.

    Args:
        taken_s: Waiting and service of each request together, ascending.
        power_w: What the device draws, as a mean.
    """

    taken_s: np.ndarray
    power_w: float

    def within_s(self, share: float) -> float:
        """Return the least time that so many of the requests stay within."""
        return float(self.taken_s[max(0, math.ceil(share * len(self.taken_s)) - 1)])

    @property
    def p99_s(self) -> float:
        """What 99 of 100 stay within."""
        return self.within_s(0.99)


def simulate_queue(times_s: Sequence[float], service: PointPerformance, gather_s: float) -> Queue:
    """Return how long requests take and what the device draws, by going through arrivals one by one.

    Each batch is taken to last its mean; by how much the tail of one batch exceeds that is added to all, as if the same
    requests were unlucky twice, which errs to the safe side.

    Args:
        times_s: When requests arrive, ascending; at least one.
        service: How the server answers.
        gather_s: How long the oldest request may be kept waiting for others.
    """
    sent = batches(times_s, service, gather_s)
    waited_s = np.repeat(sent.starts_s, sent.sizes) - np.asarray(times_s)
    span_s = max(sent.starts_s[-1] + service.interval_s - times_s[0], service.interval_s * len(sent.sizes))
    extra_j = max(0.0, service.batch_j - service.idle_w * service.interval_s)
    return Queue(
        np.sort(waited_s) + max(service.latency_s, service.tail_s), service.idle_w + len(sent.sizes) * extra_j / span_s
    )


class Queues:
    """The queues before services at one rate of requests, each gone through once however many limits ask for it.

    Args:
        rate_per_s: The rate.
        times: When requests arrive at a rate of one per second, ascending.
    """

    def __init__(self, rate_per_s: float, times: np.ndarray) -> None:
        self.rate_per_s = rate_per_s
        self._times_s: list[float] = (times / rate_per_s).tolist()
        self._known: dict[tuple[PointPerformance, float, int], Queue] = {}

    def of(self, service: PointPerformance, gather_s: float, requests: int = _REQUESTS) -> Queue:
        """Return the queue before a service; of the first requests alone if few are asked for."""
        key = (service, gather_s, requests)
        if key not in self._known:
            self._known[key] = simulate_queue(self._times_s[:requests], service, gather_s)
        return self._known[key]


# Ladders from what was measured: the cheapest point that holds the p99 at each rate of requests.

_LAX = 1.1
"""By how much the SLO is relaxed to see what it costs."""
_STEP = 1.25
"""From one rate to the next."""
_LOWEST = 1 / 64
"""The lowest rung's rate over the highest that any point can answer."""
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
        SloUnmet: If no point holds it at the lowest of the rates tried; still lower ones may do.
    """
    lax_s = _LAX * slo_s
    known = list(services)
    able, more = (undominated(each for each in known if each.tail_s <= _MARGIN * held_s) for held_s in (slo_s, lax_s))
    # The same gaps at every rate, only stretched: rungs then differ by their service, not by luck.
    gaps = np.random.default_rng([seed, 0x1ADD]).standard_exponential(_REQUESTS)
    times = np.cumsum(gaps)
    top = max((service.most_per_s for service in able), default=0.0)
    rungs = []
    for rate_per_s in (top * _LOWEST * _STEP**step for step in range(100)):
        if rate_per_s >= top:
            break
        queues = Queues(rate_per_s, times)
        if (rung := _rung(able, queues, slo_s)) is not None:
            rungs.append(_priced(rung, _rung(more, queues, lax_s), lax_s - slo_s))
    if not rungs:
        limit = f"p99<={slo_s * 1e3:g}ms"
        if top == 0.0:
            raise SloUnmet(f"no point holds {limit} with {1 - _MARGIN:.0%} to spare, even for requests that never wait")
        raise SloUnmet(f"no point holds {limit} at {top * _LOWEST:.2g} requests/s, the lowest rate tried")
    return Ladder(slo_s, tuple(rungs))


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


def _rung(services: Sequence[PointPerformance], queues: Queues, slo_s: float) -> Rung | None:
    """Return the cheapest rung at a rate: one that holds in nearly all minutes, or failing that on the whole."""
    # Nearly every minute is to hold; with few requests in a minute that may be more than any point can do.
    shares = (1 - late_share(_MINUTE_S * queues.rate_per_s), 0.99)
    per_share = (_cheapest(services, queues, slo_s, share) for share in shares)
    return next((rung for rung in per_share if rung is not None), None)


def _cheapest(services: Sequence[PointPerformance], queues: Queues, slo_s: float, share: float) -> Rung | None:
    """Return the cheapest rung that so many requests stay within; those that cannot be cheaper are not looked at."""
    best: Rung | None = None
    rate_per_s = queues.rate_per_s
    # By what each draws at least, so that the search ends at the first that cannot beat the best.
    for service in sorted(services, key=lambda each: each.least_w(rate_per_s)):
        if best is not None and service.least_w(rate_per_s) >= best.power_w:
            break
        if rate_per_s > FULL * service.most_per_s:
            continue
        for gather_s in gatherings(service, slo_s):
            # A queue that is hopeless shows early, and the whole of it costs eight times as much to simulate.
            if queues.of(service, gather_s, _FIRST).p99_s > _HOPELESS * slo_s:
                continue
            queue = queues.of(service, gather_s)
            if queue.within_s(share) <= _MARGIN * slo_s and (best is None or queue.power_w < best.power_w):
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
