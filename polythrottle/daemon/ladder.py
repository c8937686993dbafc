"""Operating points along load: for each rate of requests the one that holds the p99 for the least power."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from polythrottle.daemon.queueing import Service, queueing
from polythrottle.errors import InvalidInput, SloUnmet
from polythrottle.space import Level, OperatingPoint
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


@dataclass(frozen=True)
class Rung:
    """The point for all rates up to one.

    Args:
        rate_per_s: The highest it is meant for.
        service: What is applied, and how it answers.
        gather_s: How long the server may keep a request waiting for others.
        power_w: Predicted mean at that rate.
        p99_s: Predicted at that rate.
    """

    rate_per_s: float
    service: Service
    gather_s: float
    power_w: float
    p99_s: float

    def power_at(self, rate_per_s: float) -> float:
        """Return the mean power at another rate, in watts.

        Batches are taken to be as full as the requests that come while the oldest is kept waiting make them, and fuller
        the higher the rate: single requests at none, as predicted at the rung's own.
        """
        added_w = self.power_w - self.service.idle_w
        batch_j = self.service.batch_j - self.service.idle_w * self.service.interval_s
        if added_w <= 0 or batch_j <= 0:
            return self.power_w
        filled = self.rate_per_s * batch_j / added_w
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
        InvalidInput: If there is none, or their rates do not rise.
    """

    slo_s: float
    rungs: tuple[Rung, ...]

    def __post_init__(self) -> None:
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
        return max(within) if within else min(range(len(self.rungs)), key=drawn_w)

    @classmethod
    def of(cls, services: Iterable[Service], slo_s: float, seed: int = 0) -> "Ladder":
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
        return cls(slo_s, rungs)

    @classmethod
    def of_study(cls, study: Study, slo_s: float) -> "Ladder":
        """Return the ladder of the points a study measured.

        Raises:
            InvalidInput: If a measurement lacks what is needed; see `Service.of`.
            SloUnmet: If none of them holds the SLO.
        """
        seen = [(trial.point, trial.measurement) for trial in study.completed if trial.measurement is not None]
        return cls.of(
            [Service.of(point, measurement) for point, measurement in seen if not measurement.censored], slo_s
        )


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


@dataclass(frozen=True)
class Switching:
    """What it takes to go from one point to another.

    A clock takes effect after about 1 ms (CPU), 5 ms (GPU) and 8 ms (memory) on Orin, during less than 0.1 ms of which
    the domain stands still (arXiv 2606.16106); writing one file of the kernel takes 17 ms (arXiv 2310.19991).

    Args:
        write_s: Per knob that changes.
        gpu_s: Until a GPU clock has taken effect; ``memory_s`` and ``cpu_s`` likewise.
    """

    write_s: float = 0.017
    gpu_s: float = 0.005
    memory_s: float = 0.008
    cpu_s: float = 0.001

    def delay_s(self, before: Mapping[str, Level], after: Mapping[str, Level]) -> float:
        """Return how long it takes until all of a point holds; the batch is the workload's and costs nothing."""
        changed = {name for name in after if name != "batch_size" and after[name] != before.get(name)}
        domains = {name.partition("_")[0] for name in changed}
        effects = {"gpu": self.gpu_s, "mem": self.memory_s, "cpu": self.cpu_s}
        return len(changed) * self.write_s + sum(effects.get(domain, 0.0) for domain in domains)

    def cost_j(self, before: OperatingPoint, after: OperatingPoint, power_w: float) -> float:
        """Return the energy a switch takes if the device did nothing useful meanwhile, which is the most it can be."""
        return self.delay_s(before, after) * power_w
