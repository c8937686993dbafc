"""The stock governor: a burst starts at a low clock and climbs while it lasts, so short bursts run slowly."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from polythrottle.catalog.simulation import Governor

_HALVINGS = 40
_SAMPLES = 12


@dataclass(frozen=True)
class Climb:
    """The GPU clock over one burst: it starts below its end and approaches it exponentially.

    Args:
        high_hz: What it climbs towards.
        missing_hz: How far below that it starts.
        rise_s: Time to 63 % of the way.
        burst_s: How long the GPU is busy.
    """

    high_hz: float
    missing_hz: float
    rise_s: float
    burst_s: float

    @classmethod
    def after(cls, governor: Governor, low_hz: float, high_hz: float, burst_s: float, gap_s: float) -> "Climb":
        """Return the climb after a gap in which the clock fell from ``high_hz`` towards ``low_hz``.

        Args:
            governor: Its time constants.
            low_hz: Lowest clock allowed.
            high_hz: Highest clock allowed.
            burst_s: How long the GPU is busy.
            gap_s: How long it waited before; infinite if long ago.
        """
        if governor.rise_s <= 0 or low_hz >= high_hz:
            return cls(high_hz, 0.0, governor.rise_s, burst_s)
        missing_hz = (high_hz - low_hz) * -math.expm1(-gap_s / governor.fall_s)
        return cls(high_hz, missing_hz, governor.rise_s, burst_s)

    @property
    def mean_hz(self) -> float:
        """The mean clock over the burst."""
        if self.missing_hz <= 0:
            return self.high_hz
        return self.high_hz - self.missing_hz * self.rise_s / self.burst_s * -math.expm1(-self.burst_s / self.rise_s)

    @property
    def samples_hz(self) -> tuple[float, ...]:
        """Clocks at evenly spaced times of the burst, from which means of other quantities follow."""
        if self.missing_hz <= 0:
            return (self.high_hz,)
        times = ((i + 0.5) / _SAMPLES * self.burst_s for i in range(_SAMPLES))
        return tuple(self.high_hz - self.missing_hz * math.exp(-time / self.rise_s) for time in times)


def settle(
    governor: Governor,
    low_hz: float,
    high_hz: float,
    burst_s: Callable[[float], float],
    gap_s: Callable[[float], float],
) -> Climb:
    """Return the climb whose length follows from its mean clock, and its mean clock from its length.

    Args:
        governor: Its time constants.
        low_hz: Lowest clock allowed.
        high_hz: Highest clock allowed.
        burst_s: Length of the burst at a steady clock; falls as the clock rises.
        gap_s: The wait before a burst of some length; never grows with it.
    """
    least, most = burst_s(high_hz), burst_s(low_hz)
    if governor.rise_s <= 0 or low_hz >= high_hz:
        return Climb(high_hz, 0.0, governor.rise_s, least)
    for _ in range(_HALVINGS):
        middle = (least + most) / 2
        if burst_s(Climb.after(governor, low_hz, high_hz, middle, gap_s(middle)).mean_hz) > middle:
            least = middle
        else:
            most = middle
    return Climb.after(governor, low_hz, high_hz, most, gap_s(most))
