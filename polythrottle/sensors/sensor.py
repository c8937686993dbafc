"""A sensor, as far as it matters for joules: how often it moves, what it averages, what it misses, how it rounds."""

import math
from dataclasses import dataclass, fields

from polythrottle.errors import InvalidInput

_BATCH_LAGS, _BATCH_STEPS, LEAST_BATCHES = 4.0, 2.0, 6
_SETTLED = 5.0


@dataclass(frozen=True)
class Sensor:
    """What is known of an energy or power sensor; 0 is "does not".

    Args:
        step_s: How often the total moves: the period of a counter or of the polling behind it; of power that stands
            for a while, how often there is a new one.
        average_s: The time one power reading averages over.
        lag_s: Time constant with which readings follow the power.
        duty: The share of time it looks at all, as 0.25 where it sees 25 of every 100 ms.
        period_s: How often such a look begins.
        quantum_w: Step of one power reading.
        quantum_j: Step of the total.
        factor: What its joules are multiplied by to be those of a reference meter.
        factor_sd: How far that factor may be off, as a fraction: one standard deviation.
        source: Where all this is from; goes into the boundary if there is a factor.
        counts: Whether it is known to miss nothing between two looks, as a counter does; one that samples power does.

    Raises:
        InvalidInput: If a figure is negative or not finite, or the duty is no share.
    """

    step_s: float = 0.0
    average_s: float = 0.0
    lag_s: float = 0.0
    duty: float = 1.0
    period_s: float = 0.0
    quantum_w: float = 0.0
    quantum_j: float = 0.0
    factor: float = 1.0
    factor_sd: float = 0.0
    source: str = ""
    counts: bool = False

    def __post_init__(self) -> None:
        figures = [getattr(self, each.name) for each in fields(self) if each.name not in ("source", "counts")]
        if not all(math.isfinite(figure) and figure >= 0 for figure in figures):
            raise InvalidInput("a sensor's figures must be finite and not negative")
        if not 0 < self.duty <= 1 or self.factor == 0:
            raise InvalidInput("a sensor looks for a share of the time between 0 and 1, and its factor is above 0")

    @property
    def memory_s(self) -> float:
        """How long a reading remembers."""
        return self.lag_s + self.average_s / 2

    @property
    def late_s(self) -> float:
        """How long ago what a reading shows was drawn: its memory, and of an average the time for which it stands."""
        return self.memory_s + (self.step_s / 2 if self.average_s else 0.0)

    @property
    def smoothed_s(self) -> float:
        """By how much shorter a time seems whose noise is seen through that memory.

        The integral of white noise over a time b varies as b - lag after an exponential lag, if b is several lags, and
        as b - average / 3 after a moving average; so it does if the average is renewed once in its own time, for which
        the total grows straight.
        """
        return self.lag_s + self.average_s / 3

    @property
    def batch_s(self) -> float:
        """The shortest time whose energy says something by itself: neighbours share neither steps nor memory."""
        looks_s = self.period_s if self.duty < 1 else 0.0
        return max(_BATCH_STEPS * self.step_s, _BATCH_LAGS * self.memory_s, _BATCH_STEPS * looks_s)

    @property
    def least_s(self) -> float:
        """The shortest window from which an interval can be made."""
        return LEAST_BATCHES * self.batch_s

    @property
    def settle_s(self) -> float:
        """How long after a change readings still show what was before."""
        return _SETTLED * self.lag_s + self.average_s + self.step_s

    @property
    def note(self) -> str:
        """What the boundary of its joules must say besides: the factor, if there is one."""
        return "" if self.factor == 1.0 else f"times {self.factor:.4g} ({self.source or 'calibrated'})"


EXACT = Sensor(source="computed, so exact", counts=True)
_USUAL = {
    "nvml": Sensor(
        step_s=0.1, duty=0.25, period_s=0.1, quantum_j=0.001, source="as on A100 and H100: arXiv 2312.02741, SC 2024"
    ),
    "jetson": Sensor(step_s=0.0, quantum_w=0.04, source="INA3221: 40 uV across 5 mOhm at 5 V"),
    "cpu": Sensor(
        step_s=0.001, quantum_j=6.1e-5, source="RAPL: 1 ms, 2^-14 J (Intel SDM, volume 3B, 14.10)", counts=True
    ),
    "sim": EXACT,
}


def usual(uri: str) -> Sensor:
    """Return what is usual for devices of a kind, for those that nobody has calibrated.

    Args:
        uri: Of the device; one of a kind that is not known has an exact sensor, for want of anything better.
    """
    return _USUAL.get(uri.partition("?")[0].partition(":")[0], EXACT)
