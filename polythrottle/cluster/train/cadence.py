"""When the next checkpoint is due: profiled as CheckFreq does (FAST'21), spaced as Daly says, within a budget; pure."""

from dataclasses import dataclass, replace
from math import inf

from polythrottle.cluster.plan.interval import CheckpointCost, interval_s
from polythrottle.errors import InvalidInput

COPY_BYTES_PER_S, WRITE_BYTES_PER_S, DRAG = 5e8, 1e8, 0.25
"""What is assumed of memory, store and slower steps beside a write until a first checkpoint has been measured."""
LONGEST_S = 1800.0
_FRESH = 0.3


@dataclass(frozen=True)
class Cadence:
    """What is known of a training's steps and checkpoints, and the budget.

    Attributes:
        step_s: Time of a step with no write beside it, in seconds; 0 before the first.
        stall_s: How long a checkpoint stops training, in seconds.
        persist_s: How long its write goes on, in seconds.
        drag_s: How much later training is after a write beside it than without, in seconds.
        spent_s: What checkpoints have cost training so far, in seconds.
        trained_s: How long training has gone on, in seconds.
        measured: Checkpoints whose cost was measured; with none it is assumed from the size.
        overhead: Largest share of the time that checkpoints may take.
    """

    step_s: float = 0.0
    stall_s: float = 0.0
    persist_s: float = 0.0
    drag_s: float = 0.0
    spent_s: float = 0.0
    trained_s: float = 0.0
    measured: int = 0
    overhead: float = 0.035

    def __post_init__(self) -> None:
        if not 0 < self.overhead <= 1:
            raise InvalidInput(f"the overhead of checkpoints is a share in (0, 1], not {self.overhead}")

    @property
    def cost_s(self) -> float:
        """Return what a checkpoint costs training, in seconds."""
        return self.stall_s + self.drag_s

    @property
    def share(self) -> float | None:
        """Return the share of the time that checkpoints have cost so far; None before anything was trained."""
        return self.spent_s / self.trained_s if self.trained_s > self.spent_s else None

    def stepped(self, duration_s: float, writing: bool) -> "Cadence":
        """Return what is known after one more step, in seconds; one beside a write is compared with one that is not."""
        trained_s = self.trained_s + duration_s
        if writing and self.step_s:
            late_s = duration_s - self.step_s  # signed, so that scatter cancels out
            return replace(self, trained_s=trained_s, spent_s=max(0.0, self.spent_s + late_s))
        step_s = duration_s if not self.step_s else self.step_s + _FRESH * (duration_s - self.step_s)
        return replace(self, trained_s=trained_s, step_s=step_s)

    def stalled(self, stall_s: float) -> "Cadence":
        """Return what is known after a snapshot that took so many seconds."""
        known_s = stall_s if not self.measured else self.stall_s + _FRESH * (stall_s - self.stall_s)
        return replace(self, stall_s=known_s, spent_s=self.spent_s + stall_s, trained_s=self.trained_s + stall_s)

    def written(self, persist_s: float, drag_s: float) -> "Cadence":
        """Return what is known after a write that took so long and delayed training by so much, in seconds."""
        fresh = 1.0 if not self.measured else _FRESH
        return replace(
            self,
            persist_s=self.persist_s + fresh * (persist_s - self.persist_s),
            drag_s=self.drag_s + fresh * (drag_s - self.drag_s),
            measured=self.measured + 1,
        )

    def interval_s(self, hazard_per_s: float) -> float:
        """Return the time between checkpoints in seconds, at most half an hour, for a rate of losses of any member."""
        if not self.step_s:
            return inf
        cost = CheckpointCost(self.cost_s, self.persist_s)
        return min(LONGEST_S, interval_s(cost, hazard_per_s, self.step_s, self.overhead))

    def is_due(self, since_s: float, hazard_per_s: float) -> bool:
        """Return whether a checkpoint is due.

        Args:
            since_s: Training time since the last, in seconds.
            hazard_per_s: Losses of any member per second.
        """
        within = self.spent_s + self.cost_s <= self.overhead * (self.trained_s + self.cost_s)
        return within and since_s >= self.interval_s(hazard_per_s)


def assumed(state_bytes: int, overhead: float) -> Cadence:
    """Return what is assumed before a first checkpoint, from the size of the state in bytes."""
    persist_s = state_bytes / WRITE_BYTES_PER_S
    return Cadence(
        stall_s=state_bytes / COPY_BYTES_PER_S, persist_s=persist_s, drag_s=DRAG * persist_s, overhead=overhead
    )
