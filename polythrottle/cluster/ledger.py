"""Where the seconds, joules and dollars of a training job went, and what came of a simulated job over several seeds."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from statistics import mean, stdev
from typing import Any

from polythrottle.domain.backports import StrEnum
from polythrottle.domain.errors import InvalidInput

# Where the seconds, joules and dollars of a training job went.


class Use(StrEnum):
    """What a machine was doing with its time."""

    USEFUL = "useful"  # steps that count
    CHECKPOINT = "checkpoint"  # training stopped to write one
    REDONE = "redone"  # steps lost with a machine and done again
    STARTUP = "startup"  # from the order to the first step
    WAITING = "waiting"  # at a barrier, for a slower machine or for a new generation
    OVERLAP = "overlap"  # a successor beside the machine it will replace
    EXPLORING = "exploring"  # trying clocks that may be worse


@dataclass(frozen=True)
class Spent:
    """Machine-seconds, joules and dollars."""

    machine_s: float = 0.0
    energy_j: float = 0.0
    usd: float = 0.0

    def __add__(self, other: "Spent") -> "Spent":
        return Spent(self.machine_s + other.machine_s, self.energy_j + other.energy_j, self.usd + other.usd)


@dataclass
class Ledger:
    """A job's account: every machine-second is written under exactly one use."""

    by_use: dict[Use, Spent] = field(default_factory=lambda: dict.fromkeys(Use, Spent()))

    def spend(self, use: Use, machine_s: float, power_w: float, usd_per_h: float) -> None:
        """Write down what machines used for a while.

        Args:
            use: What for.
            machine_s: How long, over all of them, in seconds, >= 0.
            power_w: Mean power of one machine, in watts.
            usd_per_h: Price of one machine per hour.

        Raises:
            InvalidInput: If the time is negative: it was written twice.
        """
        if machine_s < 0:
            raise InvalidInput(f"machines cannot spend {machine_s} s on {use}")
        more = Spent(machine_s, power_w * machine_s, usd_per_h * machine_s / 3600)
        self.by_use[use] = self.by_use[use] + more

    def move(self, source: Use, target: Use, share: float) -> None:
        """Move a share of one use to another, for example useful steps that a loss has undone.

        Raises:
            InvalidInput: If the share is not between 0 and 1.
        """
        if not 0 <= share <= 1:
            raise InvalidInput(f"a share is between 0 and 1, not {share}")
        had = self.by_use[source]
        moved = Spent(had.machine_s * share, had.energy_j * share, had.usd * share)
        self.by_use[source] = Spent(had.machine_s - moved.machine_s, had.energy_j - moved.energy_j, had.usd - moved.usd)
        self.by_use[target] = self.by_use[target] + moved

    @property
    def total(self) -> Spent:
        """Return the sum over all uses."""
        return sum(self.by_use.values(), Spent())

    def record(self) -> dict[str, dict[str, float]]:
        """Return the account as a document: use → machine_s, energy_j, usd."""
        return {
            str(use): {"machine_s": spent.machine_s, "energy_j": spent.energy_j, "usd": spent.usd}
            for use, spent in self.by_use.items()
        }


# What came of a simulated job, and of the same job under several seeds; everything here is simulated.

_STUDENT = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)
"""95 % quantiles of Student's t for 1 to 9 degrees of freedom; 2.0 beyond."""


@dataclass(frozen=True)
class SimulatedOutcome:
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


def against(
    outcomes: Sequence[SimulatedOutcome],
    baseline: Sequence[SimulatedOutcome],
    figure: Callable[[SimulatedOutcome], float],
) -> Spread:
    """Return how much less of a figure there is per work than in a baseline with the same seeds, as a fraction.

    Raises:
        InvalidInput: If the seeds are not the same.
    """
    if [each.seed for each in outcomes] != [each.seed for each in baseline]:
        raise InvalidInput("outcomes are compared seed by seed; these have different seeds")
    pairs = zip(outcomes, baseline, strict=True)
    return spread([1 - (figure(ours) / ours.work) / (figure(theirs) / theirs.work) for ours, theirs in pairs])
