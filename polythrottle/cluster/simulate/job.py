"""The training job that is simulated: how much work, what interrupts it, and what an interruption takes."""

from dataclasses import dataclass
from math import inf

from polythrottle.cluster.plan.interval import CheckpointCost
from polythrottle.errors import InvalidInput

MEASURED = CheckpointCost(1.03, 6.67)
"""A checkpoint of 204 MB: on the local disk, and after that until it is in the bucket (CM-DARE's files)."""


@dataclass(frozen=True)
class Job:
    """A data-parallel training job on however many machines there are.

    The times have measured defaults: a checkpoint of 204 MB takes 1.03 s on the local disk and 7.7 s until it is in
    the bucket, and a new machine's framework and data 79 s (CM-DARE's files); torchrun forms a smaller or larger group
    in 7.8 s (measured, TorchElastic with a keep-alive of 1 s).

    Attributes:
        work: What is to be done, in seconds of one machine in the middle of its type at its default clock; infinite to
            train for as long as the simulation lasts.
        checkpoint: What one checkpoint costs.
        reform_s: How long all stand still when the group is formed anew, in seconds.
        cold_s: From a machine's being there until it can join, in seconds.
        noticed: Share of losses that are announced early enough to write a checkpoint first, in [0, 1].
        communication: Time of a step that no clock changes (the all-reduce), over the computing time of a machine in
            the middle at its default.
        synchronous: Whether all wait for the slowest at each step; else each goes at its own speed (asynchronous, with
            a parameter server that is not taken away), and a loss undoes nothing.
        overhead: Largest share of the time that checkpoints may stop training.
        speedups: Speed with 1, 2, … machines over that of one, where it is known; a larger group keeps the last one's
            speed per machine. None given is even scaling.
        verify_s: Training time after which a newcomer is calibrated: two or three windows of steps, in seconds.
    """

    work: float = inf
    checkpoint: CheckpointCost = MEASURED
    reform_s: float = 7.8
    cold_s: float = 79.0
    noticed: float = 0.0
    communication: float = 0.0
    synchronous: bool = True
    overhead: float = 0.035
    verify_s: float = 60.0
    speedups: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        times = (self.reform_s, self.cold_s, self.communication, self.verify_s)
        if self.work <= 0 or not all(0 <= each < inf for each in times):
            raise InvalidInput("a job has work to do, and its times are at least 0 and finite")
        if not 0 <= self.noticed <= 1:
            raise InvalidInput(f"the share of announced losses is in [0, 1], not {self.noticed}")
        if not 0 < self.overhead <= 1:
            raise InvalidInput(f"the share that checkpoints may take is in (0, 1], not {self.overhead}")

    def share(self, machines: int) -> float:
        """Return what each of so many machines does of what it would do alone."""
        if not self.speedups:
            return 1.0
        known = min(machines, len(self.speedups))
        return self.speedups[known - 1] / known
