"""The stock governor: a burst starts at a low clock and climbs while it lasts, so short bursts run slowly."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from polythrottle.backends.simulated.power import Array
from polythrottle.catalog.simulation import Governor

_HALVINGS = 40
_SAMPLES = 12


@dataclass(frozen=True)
class Climb:
    """The GPU clock over bursts: each starts below its end and approaches it exponentially. Arrays of one shape.

    Args:
        high_hz: What it climbs towards.
        missing_hz: How far below that it starts.
        rise_s: Time to 63 % of the way.
        burst_s: How long the GPU is busy.
    """

    high_hz: Array
    missing_hz: Array
    rise_s: float
    burst_s: Array

    @classmethod
    def after(cls, governor: Governor, low_hz: Array, high_hz: Array, burst_s: Array, gap_s: Array) -> "Climb":
        """Return the climb once bursts and gaps have repeated long enough to be alike.

        In a gap the clock falls towards the lowest; what a burst misses of the highest at its start is then
        ``(high - low) (1 - g) / (1 - g r)``, where ``r`` and ``g`` are what a burst and a gap leave of a difference.

        Args:
            governor: Its time constants.
            low_hz: Lowest clock allowed.
            high_hz: Highest clock allowed.
            burst_s: How long the GPU is busy.
            gap_s: How long it waits between bursts; infinite if long.
        """
        if governor.rise_s <= 0:
            return cls(high_hz, np.zeros_like(high_hz), governor.rise_s, burst_s)
        rest, gap = np.exp(-burst_s / governor.rise_s), np.exp(-gap_s / governor.fall_s)
        missing_hz = np.maximum(0.0, high_hz - low_hz) * (1.0 - gap) / (1.0 - gap * rest)
        return cls(high_hz, missing_hz, governor.rise_s, burst_s)

    @property
    def mean_hz(self) -> Array:
        """The mean clock over the burst."""
        if self.rise_s <= 0:
            return self.high_hz
        climbs = self.burst_s / self.rise_s
        return np.asarray(self.high_hz + self.missing_hz / climbs * np.expm1(-climbs))

    @property
    def samples_hz(self) -> Array:
        """Clocks at evenly spaced times of the burst, from which means of other quantities follow; (times, bursts)."""
        if self.rise_s <= 0:
            return self.high_hz[np.newaxis]
        times = (np.arange(_SAMPLES)[:, np.newaxis] + 0.5) / _SAMPLES * self.burst_s
        return np.asarray(self.high_hz - self.missing_hz * np.exp(-times / self.rise_s))


def settle(
    governor: Governor,
    low_hz: Array,
    high_hz: Array,
    burst_s: Callable[[Array], Array],
    gap_s: Callable[[Array], Array],
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
    if governor.rise_s <= 0 or bool(np.all(low_hz >= high_hz)):
        return Climb.after(governor, low_hz, high_hz, least, np.full_like(least, math.inf))
    for _ in range(_HALVINGS):
        middle = (least + most) / 2
        longer = burst_s(Climb.after(governor, low_hz, high_hz, middle, gap_s(middle)).mean_hz) > middle
        least, most = np.where(longer, middle, least), np.where(longer, most, middle)
    return Climb.after(governor, low_hz, high_hz, most, gap_s(most))
