"""A catalogue's job under several policies on the same machines: what each would take, cost and draw. Simulated."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any

from polythrottle.cluster.catalogue import Catalogue
from polythrottle.cluster.conditions import (
    DefaultPolicy,
    DrawnSupply,
    FleetPolicy,
    IndependentPolicy,
    JointPolicy,
    RecordedSupply,
    SimulatedJob,
    Supply,
    TunedPolicy,
)
from polythrottle.cluster.job_simulator import Scenario, simulate
from polythrottle.cluster.plan.costs import SimulatedOutcome, Spent, Spread, against, spread
from polythrottle.cluster.plan.options import Offer, Work
from polythrottle.cluster.recorded_tables import History, Trace
from polythrottle.domain.errors import InvalidInput, UnknownName
from polythrottle.domain.fleet.gpu_variability import TYPICAL, Silicon
from polythrottle.domain.fleet.transient_machine import Market

POLICIES: Mapping[str, Callable[[float], FleetPolicy]] = {
    "default": lambda longer: DefaultPolicy(),
    "apart": IndependentPolicy,
    "joint": JointPolicy,
    "tuned": TunedPolicy,
}
"""The policies by name, from nothing to everything, for a largest slowdown."""
# What framework and data of a new machine take (CM-DARE's files); the rest of a start-up is the order.
_COLD_S = 79.0


@dataclass(frozen=True)
class SimulationRequest:
    """What is to be simulated.

    Attributes:
        offer: The machines.
        work: The job.
        history: Their price along time, where it was recorded; of several zones the first.
        trace: A recorded cluster; None draws from the offer's lifetime.
        machines: Places in the fleet.
        horizon_s: When to stop looking, in seconds.
        seeds: Of machines and silicon.
        spread: How far apart GPUs of one type are in speed.
        longer: How much longer the job may take than at default clocks.
        notice_s: How long before a loss a machine is told, in seconds; None for the work's share of announced losses.
        endless: Whether to train on to the horizon, whatever the work.
    """

    offer: Offer
    work: Work
    history: History | None
    trace: Trace | None
    machines: int
    horizon_s: float
    seeds: tuple[int, ...]
    spread: float = TYPICAL
    longer: float = 0.03
    notice_s: float | None = None
    endless: bool = False

    def __post_init__(self) -> None:
        if self.machines < 1 or not self.seeds or not 0 < self.horizon_s < inf:
            raise InvalidInput("a simulation has at least one machine and one seed, and a horizon above 0 s")
        if self.longer < 0 or (self.notice_s is not None and self.notice_s < 0):
            raise InvalidInput("how much longer a job may take, and a notice, are at least 0")

    @property
    def job(self) -> SimulatedJob:
        """Return the job."""
        work = self.work
        return SimulatedJob(
            work=inf if self.endless else work.steps * self.offer.step_s,
            checkpoint=work.cost,
            reform_s=work.restart_s,
            cold_s=min(_COLD_S, self.offer.startup_s),
            noticed=self._noticed,
            synchronous=work.undoes,
            speedups=self.offer.speedups if len(self.offer.speedups) > 1 else (),
        )

    @property
    def _noticed(self) -> float:
        if self.notice_s is None:
            return self.work.noticed
        # A notice helps only if there is time to write a checkpoint and to bring it to the store.
        return float(self.notice_s >= self.work.cost.stall_s + self.work.cost.persist_s and self.notice_s > 0)

    @property
    def supply(self) -> Supply:
        """Return where the machines come from."""
        if self.trace is not None:
            return RecordedSupply(self.trace, self.machines)
        return DrawnSupply(self.machines, self.offer.lifetime, max(0.0, self.offer.startup_s - _COLD_S))

    def scenario(self, policy: FleetPolicy) -> Scenario:
        """Return what is simulated under a policy."""
        prices = self.offer.machine.usd_per_h
        if Market.SPOT in prices:
            spot = {Market.SPOT: prices[Market.SPOT]}
        else:
            spot = dict(prices)
        machine = replace(self.offer.machine, usd_per_h=spot)
        price = None
        if self.history is not None:
            price = _repeated(self.history)
        known = None
        if self.trace is None:
            known = self.offer.lifetime
        supply = self.supply
        return Scenario(self.job, machine, supply, policy, Silicon(self.spread), usd_per_h=price, lifetime=known)


@dataclass(frozen=True)
class PolicyComparison:
    """Outcomes of several policies on the same machines, seed by seed.

    Attributes:
        asked: What was simulated.
        outcomes: Those of each policy, in the order of the seeds; the first policy is the baseline.
    """

    asked: SimulationRequest
    outcomes: Mapping[str, tuple[SimulatedOutcome, ...]]

    @property
    def baseline(self) -> tuple[SimulatedOutcome, ...]:
        """Return the outcomes that the others are compared with."""
        return next(iter(self.outcomes.values()))

    def mean(self, name: str, figure: Callable[[SimulatedOutcome], float]) -> Spread:
        """Return a figure of a policy over the seeds."""
        return spread([figure(outcome) for outcome in self.outcomes[name]])

    def saved(self, name: str, figure: Callable[[SimulatedOutcome], float]) -> Spread | None:
        """Return how much less of a figure a policy takes for the same work; None where nothing was done."""
        if not all(outcome.work > 0 for each in (self.baseline, self.outcomes[name]) for outcome in each):
            return None
        return against(self.outcomes[name], self.baseline, figure)

    def record(self) -> dict[str, Any]:
        """Return it as a document."""
        asked = self.asked
        return {
            "kind": "simulated",
            "job": asked.work.name,
            "machine": asked.offer.machine.name,
            "machines": asked.machines,
            "trace": None if asked.trace is None else asked.trace.name,
            "last_row_assumed_s": None if asked.trace is None else asked.trace.assumed_s,
            "spread": asked.spread,
            "seeds": list(asked.seeds),
            "policies": {
                name: {
                    "energy_saved": _shown(self.saved(name, lambda outcome: outcome.energy_j)),
                    "time_saved": _shown(self.saved(name, lambda outcome: outcome.time_s)),
                    "usd_saved": _shown(self.saved(name, lambda outcome: outcome.usd)),
                    "outcomes": [outcome.record() for outcome in outcomes],
                }
                for name, outcomes in self.outcomes.items()
            },
        }


def asked_of(catalogue: Catalogue, machine: str | None, **more: Any) -> SimulationRequest:
    """Return what is to be simulated with a machine of a catalogue, by default its first.

    Args:
        catalogue: Where machines and work come from.
        machine: Name of the machine.
        more: The other attributes of `SimulationRequest`.

    Raises:
        UnknownName: If there is no such machine.
        InvalidInput: If a value is out of range.
    """
    by_name = {offer.machine.name: offer for offer in catalogue.offers}
    if machine is None:
        name = next(iter(by_name))
    else:
        name = machine
    if name not in by_name:
        raise UnknownName("machine", name, by_name)
    histories = catalogue.histories.get(name, ())
    return SimulationRequest(by_name[name], catalogue.work, next(iter(histories), None), **more)


def compare(
    asked: SimulationRequest,
    names: Sequence[str] = tuple(POLICIES),
    told: Callable[[int, int], None] = lambda done, of: None,
) -> PolicyComparison:
    """Return what comes of a job under each of some policies, on the same machines. Simulated.

    Args:
        asked: What is simulated.
        names: Of the policies; the first is the baseline.
        told: Called with how much of the work is done, and of how much.

    Raises:
        UnknownName: If there is no such policy.
    """
    if unknown := [name for name in names if name not in POLICIES]:
        raise UnknownName("policy", unknown[0], POLICIES)
    found: dict[str, list[SimulatedOutcome]] = {name: [] for name in names}
    total = len(found) * len(asked.seeds) * 100
    for index, name in enumerate(found):
        policy = POLICIES[name](asked.longer)
        for number, seed in enumerate(asked.seeds):
            before = (index * len(asked.seeds) + number) * 100
            outcome = simulate(
                asked.scenario(policy),
                seed,
                asked.horizon_s,
                lambda time_s, before=before: told(before + int(100 * time_s / asked.horizon_s), total),  # type: ignore[misc]
            )
            told(before + 100, total)
            found[name].append(_paid(outcome, asked.work))
    return PolicyComparison(asked, {name: tuple(outcomes) for name, outcomes in found.items()})


def _paid(outcome: SimulatedOutcome, work: Work) -> SimulatedOutcome:
    """Return an outcome with the catalogue's servers, and with the price of energy that the rent does not include."""
    server = work.server
    span_s = outcome.time_s
    count = 0
    if server.all_w or server.all_usd_per_s:
        count = server.count
    rented = Spent(count * span_s, server.all_w * span_s, server.all_usd_per_s * span_s)
    energy_usd = (outcome.energy_j + rented.energy_j) * work.usd_per_j
    return replace(outcome, beside=rented + Spent(usd=energy_usd))


def _repeated(history: History) -> Callable[[float], float]:
    """Return a recorded price along virtual time: from the record's beginning, again and again."""
    begins_s = history.times_s[0]
    length_s = history.ends_s - begins_s
    return lambda time_s: history.at(begins_s + time_s % length_s) or 0.0


def _shown(value: Spread | None) -> dict[str, float | None] | None:
    if value is None:
        return None
    return {"mean": value.mean, "low": value.low, "high": value.high}
