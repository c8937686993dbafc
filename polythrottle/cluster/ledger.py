"""Where the seconds, joules and dollars of a training job went."""

from dataclasses import dataclass, field

from polythrottle.backports import StrEnum
from polythrottle.errors import InvalidInput


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

    def spend(self, use: Use, duration_s: float, power_w: float, usd_per_h: float, machines: int = 1) -> None:
        """Write down what machines used for a while.

        Args:
            use: What for.
            duration_s: How long, in seconds, >= 0.
            power_w: Mean power of one machine, in watts.
            usd_per_h: Price of one machine per hour.
            machines: How many of them.

        Raises:
            InvalidInput: If the duration is negative: time was written twice.
        """
        if duration_s < 0:
            raise InvalidInput(f"a machine cannot spend {duration_s} s on {use}")
        machine_s = duration_s * machines
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
