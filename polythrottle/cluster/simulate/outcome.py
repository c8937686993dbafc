"""What came of a simulated job, and of the same job under several seeds; everything here is simulated."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from statistics import mean, stdev
from typing import Any

from polythrottle.cluster.ledger import Ledger, Spent
from polythrottle.errors import InvalidInput

_STUDENT = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)
"""95 % quantiles of Student's t for 1 to 9 degrees of freedom; 2.0 beyond."""


@dataclass(frozen=True)
class Outcome:
    """One simulated job.

    Attributes:
        policy: Under which policy.
        seed: Of the machines and their silicon.
        time_s: How long it took, or how long it was watched.
        finished: Whether all of its work was done.
        work: What was done and kept, in seconds of one machine in the middle at its default clock.
        ledger: Where machine-seconds, joules and dollars went.
        generations: How often a group was formed.
        interruptions: How often a loss stopped the group.
        losses: Machines taken away, training or not.
        machines: Mean number of machines that were there.
        beside: What was drawn and paid beside the workers: servers, and energy where the rent does not include it.
    """

    policy: str
    seed: int
    time_s: float
    finished: bool
    work: float
    ledger: Ledger
    generations: int
    interruptions: int
    losses: int
    machines: float
    beside: Spent = field(default_factory=Spent)

    @property
    def energy_j(self) -> float:
        """Return all joules."""
        return self.ledger.total.energy_j + self.beside.energy_j

    @property
    def usd(self) -> float:
        """Return all dollars."""
        return self.ledger.total.usd + self.beside.usd

    def record(self) -> dict[str, Any]:
        """Return it as a document."""
        return {
            "policy": self.policy,
            "seed": self.seed,
            "time_s": self.time_s,
            "finished": self.finished,
            "work_machine_s": self.work,
            "energy_j": self.energy_j,
            "usd": self.usd,
            "machines": self.machines,
            "generations": self.generations,
            "interruptions": self.interruptions,
            "losses": self.losses,
            "ledger": self.ledger.record(),
            "beside": asdict(self.beside),
        }


@dataclass(frozen=True)
class Spread:
    """A figure over several seeds.

    Attributes:
        mean: Its mean.
        low: Lower end of the 95 % interval of the mean; None from a single seed.
        high: Upper end.
    """

    mean: float
    low: float | None
    high: float | None


def spread(values: Sequence[float]) -> Spread:
    """Return mean and 95 % interval (Student) of figures of independent seeds.

    Raises:
        InvalidInput: If there is none.
    """
    if not values:
        raise InvalidInput("a spread needs at least one figure")
    middle = mean(values)
    if len(values) < 2:
        return Spread(middle, None, None)
    freedom = len(values) - 1
    half = (_STUDENT[freedom - 1] if freedom <= len(_STUDENT) else 2.0) * stdev(values) / len(values) ** 0.5
    return Spread(middle, middle - half, middle + half)


def against(outcomes: Sequence[Outcome], baseline: Sequence[Outcome], figure: Callable[[Outcome], float]) -> Spread:
    """Return how much less of a figure there is per work than in a baseline with the same seeds, as a fraction.

    Raises:
        InvalidInput: If the seeds are not the same.
    """
    if [each.seed for each in outcomes] != [each.seed for each in baseline]:
        raise InvalidInput("outcomes are compared seed by seed; these have different seeds")
    pairs = zip(outcomes, baseline, strict=True)
    return spread([1 - (figure(ours) / ours.work) / (figure(theirs) / theirs.work) for ours, theirs in pairs])
