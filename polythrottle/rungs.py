"""Ladders from what was measured: the cheapest point that holds the p99 at each rate of requests."""

from collections.abc import Iterable, Sequence

import numpy as np

from polythrottle.errors import SloUnmet
from polythrottle.ladder import Ladder, Rung, Service
from polythrottle.queueing import queueing
from polythrottle.study import Study

_STEP = 1.25
"""From one rate to the next."""
_LOWEST = 1 / 64
"""The lowest rung's rate over the highest that any point can answer."""
_REQUESTS = 4000
_MARGIN = 0.9
"""The share of the SLO that a prediction may take: real arrivals are burstier than Poisson's, predictions miss."""
_ALIKE = 0.005
"""Points that differ by less than this share in everything are taken for the same."""
_FIRST, _HOPELESS = 500, 1.5
"""So many requests suffice to see that a queue takes that many times too long."""
_FULL = 0.95
"""The share of its capacity beyond which no point is planned for, whatever the prediction."""


def ladder_of(services: Iterable[Service], slo_s: float, seed: int = 0) -> Ladder:
    """Return the ladder along Poisson arrivals.

    Args:
        services: How the device answers at the points to choose from.
        slo_s: The p99 to hold, from when a request arrives.
        seed: Of the arrivals the queues are computed with.

    Raises:
        SloUnmet: If no point holds it even at the lowest rate.
    """
    able = undominated(service for service in services if service.tail_s <= _MARGIN * slo_s)
    gaps = np.random.default_rng([seed, 0x1ADD]).standard_exponential(_REQUESTS)
    times = np.cumsum(gaps)
    top = max((service.most_per_s for service in able), default=0.0)
    rates = (top * _LOWEST * _STEP**step for step in range(100))
    found = (_rung(able, rate, times, slo_s) for rate in rates if rate < top)
    rungs = tuple(rung for rung in found if rung is not None)
    if not rungs:
        raise SloUnmet(f"no point holds p99<={slo_s * 1e3:g}ms at any rate of requests")
    return Ladder(slo_s, rungs)


def ladder_of_study(study: Study, slo_s: float) -> Ladder:
    """Return the ladder of the points a study measured.

    Raises:
        InvalidInput: If a measurement lacks what is needed; see `Service.of`.
        SloUnmet: If none of them holds the SLO.
    """
    seen = [(trial.point, trial.measurement) for trial in study.completed if trial.measurement is not None]
    return ladder_of([Service.of(point, measurement) for point, measurement in seen if not measurement.censored], slo_s)


def undominated(services: Iterable[Service]) -> list[Service]:
    """Return the services that no other of the same batch beats in everything, by more than a trifle."""
    kept: list[Service] = []
    for service in sorted(services, key=_figures):
        if not any(other.batch == service.batch and _beats(other, service) for other in kept):
            kept.append(service)
    return kept


def _figures(service: Service) -> tuple[float, ...]:
    return (service.interval_s, service.latency_s, service.tail_s, service.marginal_j, service.idle_w)


def _beats(one: Service, other: Service) -> bool:
    return all(mine <= theirs * (1 + _ALIKE) for mine, theirs in zip(_figures(one), _figures(other), strict=True))


def _rung(services: Sequence[Service], rate_per_s: float, times: np.ndarray, slo_s: float) -> Rung | None:
    """Return the cheapest rung at a rate; those that cannot be cheaper than one found are not looked at."""
    best: Rung | None = None
    times_s = (times / rate_per_s).tolist()
    for service in sorted(services, key=lambda each: each.least_w(rate_per_s)):
        if best is not None and service.least_w(rate_per_s) >= best.power_w:
            break
        if rate_per_s > _FULL * service.most_per_s:
            continue
        for gather_s in _gatherings(service, slo_s):
            if queueing(times_s[:_FIRST], service, gather_s).p99_s > _HOPELESS * slo_s:
                continue
            seen = queueing(times_s, service, gather_s)
            if seen.p99_s <= _MARGIN * slo_s and (best is None or seen.power_w < best.power_w):
                best = Rung(rate_per_s, service, gather_s, seen.power_w, seen.p99_s)
    return best


def _gatherings(service: Service, slo_s: float) -> tuple[float, ...]:
    """Return how long to gather: not at all, or as long as one batch before and its own service leave."""
    spare_s = _MARGIN * slo_s - service.tail_s - service.interval_s
    return (0.0, spare_s) if service.batch > 1 and spare_s > 0 else (0.0,)
