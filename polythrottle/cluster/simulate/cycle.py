"""Training and checkpoints by turns, without an event for each: where a job is in its cycle after any span of time."""

from dataclasses import dataclass
from math import floor, inf

_ROUNDING_S = 1e-9


@dataclass(frozen=True)
class Cycle:
    """How a job alternates between training and standing still for a checkpoint.

    Attributes:
        interval_s: Training time between checkpoints, in seconds, > 0; infinite for none.
        stall_s: How long each stops training, in seconds.
        persist_s: How much longer it takes until it can be read again, in seconds; training goes on meanwhile.
    """

    interval_s: float
    stall_s: float
    persist_s: float = 0.0

    def trained_s(self, at_s: float) -> float:
        """Return the training time within the first so many seconds of cycles."""
        if self.interval_s == inf:
            return at_s
        laps, within_s = self._lap(at_s)
        return laps * self.interval_s + min(within_s, self.interval_s)

    def wall_s(self, trained_s: float) -> float:
        """Return the first moment by which so much training time has passed, in seconds."""
        if self.interval_s == inf:
            return trained_s
        laps = max(0, floor((trained_s - _ROUNDING_S) / self.interval_s))
        return trained_s + laps * self.stall_s

    def undone_s(self, at_s: float) -> float:
        """Return the training time that a loss at a moment undoes, in seconds: all since the newest whole checkpoint.

        What went before the first second of the cycles is taken to be safe.
        """
        if self.interval_s == inf:
            return at_s
        laps, within_s = self._lap(at_s)
        since_s = min(within_s, self.interval_s)
        return since_s + self.interval_s if laps >= 1 and within_s < self.persist_s else since_s

    def written(self, at_s: float) -> int:
        """Return how many checkpoints were begun and held training up within the first so many seconds."""
        return 0 if self.interval_s == inf else self._lap(at_s)[0]

    def _lap(self, at_s: float) -> tuple[int, float]:
        lap_s = self.interval_s + self.stall_s
        laps = floor(at_s / lap_s + _ROUNDING_S / lap_s)
        return laps, max(0.0, at_s - laps * lap_s)
