"""Whether a job is slower than its machines together should be: measured against predicted speed, per generation.

CM-DARE (ICDCS 2020) compares a cluster's speed after a warm-up with the sum of its workers' own and flags more than
6.7 % short. Here the reference belongs to a generation and is learnt again for the next: after a change of membership
nothing measured before says anything.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from polythrottle.errors import InvalidInput

THRESHOLD = 0.067
"""Largest shortfall that is not called a bottleneck (CM-DARE's default)."""
WARM_UP_S = 30.0
"""How long after a group was formed its speed says nothing (CM-DARE)."""
FEWEST = 3
"""Windows that a verdict is made of at least."""
_ROUNDING = 1e-9


@dataclass(frozen=True)
class Window:
    """The speed of a job over a while.

    Attributes:
        generation: Of the group.
        since_s: From the forming of the group to the window's beginning, in seconds.
        steps_per_s: Speed of the whole job.
    """

    generation: int
    since_s: float
    steps_per_s: float

    def __post_init__(self) -> None:
        if not (self.since_s >= 0 and self.steps_per_s >= 0):
            raise InvalidInput(f"a window begins after the group was formed and has a speed of at least 0, not {self}")


@dataclass(frozen=True)
class Shortfall:
    """How far a job is behind what is expected of it.

    Attributes:
        generation: Of the group.
        measured: Median speed of its windows, in steps per second; None before there are enough.
        expected: What its machines should do together, in steps per second.
        threshold: Largest shortfall that is not called a bottleneck.
        reason: Why there is no verdict; empty if there is one.
    """

    generation: int
    measured: float | None
    expected: float
    threshold: float = THRESHOLD
    reason: str = ""

    @property
    def short(self) -> float | None:
        """Return by which fraction it is short, negative if it is faster; None without a verdict."""
        return None if self.measured is None else 1 - self.measured / self.expected

    @property
    def found(self) -> bool:
        """Return whether this is a bottleneck."""
        return self.short is not None and self.short > self.threshold + _ROUNDING


def together(alone: Sequence[float], synchronous: bool, efficiency: float = 1.0) -> float:
    """Return the speed expected of machines together, in steps per second.

    Args:
        alone: Speed of each of them alone, in steps per second, each from several windows: a low reference hides a
            bottleneck (the published one of ResNet-15 on P100 is 13 % low).
        synchronous: Whether all wait for the slowest at each step; a step is then one machine's batch each.
        efficiency: What communication leaves, in (0, 1].

    Raises:
        InvalidInput: If there is no machine, a speed is not positive or the efficiency not in (0, 1].
    """
    if not alone or min(alone) <= 0 or not 0 < efficiency <= 1:
        raise InvalidInput("machines have speeds above 0, and an efficiency is in (0, 1]")
    return efficiency * (len(alone) * min(alone) if synchronous else sum(alone))


def shortfall(
    windows: Sequence[Window], expected: float, threshold: float = THRESHOLD, warm_up_s: float = WARM_UP_S
) -> Shortfall:
    """Return how far the newest generation is behind.

    Args:
        windows: What was measured, oldest first; those of earlier generations and of the warm-up are passed over.
        expected: What its machines should do together, in steps per second.
        threshold: Largest shortfall that is not called a bottleneck.
        warm_up_s: How long after its forming a group's speed says nothing, in seconds.

    Raises:
        InvalidInput: If the expectation is not positive, or the threshold not in [0, 1).
    """
    if not expected > 0 or not 0 <= threshold < 1:
        raise InvalidInput(f"an expected speed is above 0 and a threshold in [0, 1), not {expected} and {threshold}")
    if not windows:
        return Shortfall(0, None, expected, threshold, "nothing was measured yet")
    newest = max(window.generation for window in windows)
    speeds = [each.steps_per_s for each in windows if each.generation == newest and each.since_s >= warm_up_s]
    if len(speeds) < FEWEST:
        words = f"{len(speeds)} of {FEWEST} windows since {warm_up_s:g} s after generation {newest} was formed"
        return Shortfall(newest, None, expected, threshold, words)
    return Shortfall(newest, median(speeds), expected, threshold)
