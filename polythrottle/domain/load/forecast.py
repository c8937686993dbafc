"""How many requests the next seconds will bring: the recent past, averaged, and its high percentile."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from polythrottle.domain.errors import InvalidInput

_STEADY = 3.0
"""How many times the load of now a peak may be that is no burst, but chance."""


@dataclass(frozen=True)
class ForecastWindows:
    """How far a forecast looks back.

    Args:
        fast_s: Time constant of the average that follows a rise.
        slow_s: Time constant of the average that a saving is counted with.
        memory_s: How long a rise is remembered.
        share: The percentile of the remembered averages that is prepared for, as a share.
        peak_s: Time constant with which a peak fades.
        quick_s: Time constant of the average that is believed as far as it is no chance.
        sure: By how many standard deviations of a Poisson process that may be chance.

    Raises:
        InvalidInput: If a time is not positive, or the share is not one.
    """

    fast_s: float = 6.0
    slow_s: float = 30.0
    memory_s: float = 3.0
    share: float = 0.9
    peak_s: float = 600.0
    quick_s: float = 2.0
    sure: float = 1.0

    def __post_init__(self) -> None:
        if not (
            self.fast_s > 0 and self.slow_s > 0 and self.memory_s > 0 and self.quick_s > 0 and 0 <= self.share <= 1
        ):
            raise InvalidInput("a forecast needs positive times and a share between 0 and 1")


@dataclass(frozen=True)
class Forecast:
    """What was seen of a load so far, bounded in size.

    Args:
        outlook: How far it looks back.
        fast_per_s: The fast average of the rate; None before anything was seen.
        slow_per_s: The slow average.
        recent: When, and the fast average then, newest last.
        peak_per_s: The highest fast average, fading.
        quick_per_s: The quick average.
    """

    outlook: ForecastWindows = field(default_factory=ForecastWindows)
    fast_per_s: float | None = None
    slow_per_s: float = 0.0
    recent: tuple[tuple[float, float], ...] = ()
    peak_per_s: float = 0.0
    quick_per_s: float = 0.0

    def seen(self, now_s: float, rate_per_s: float | None, period_s: float) -> Forecast:
        """Return the forecast after one more look.

        Args:
            now_s: When; a time before the last look, as of a clock that jumped, forgets what was remembered.
            rate_per_s: Requests per second that arrived in the period; None, where that is unknown, changes nothing.
            period_s: Since the look before.
        """
        if rate_per_s is None:
            return self
        fast = self._moved(self.fast_per_s, rate_per_s, period_s, self.outlook.fast_s)
        slow, quick = (
            # The first look is its average; from zero, the slow one would take half a minute to say what comes.
            self._moved(None if self.fast_per_s is None else average, rate_per_s, period_s, constant_s)
            for average, constant_s in (
                (self.slow_per_s, self.outlook.slow_s),
                (self.quick_per_s, self.outlook.quick_s),
            )
        )
        oldest_s = now_s - self.outlook.memory_s
        kept = tuple(pair for pair in self.recent if oldest_s < pair[0] < now_s)
        peak = max(fast, self._moved(self.peak_per_s, 0.0, period_s, self.outlook.peak_s))
        recent = (*kept, (now_s, fast))
        return replace(self, fast_per_s=fast, slow_per_s=slow, recent=recent, peak_per_s=peak, quick_per_s=quick)

    def raised(self, rate_per_s: float | None) -> Forecast:
        """Return the forecast that takes a rate, where it is higher, for the average at once."""
        if self.fast_per_s is None or rate_per_s is None or rate_per_s <= self.fast_per_s:
            return self
        return replace(self, fast_per_s=rate_per_s, recent=(*self.recent[:-1], (self.recent[-1][0], rate_per_s)))

    @staticmethod
    def _moved(average: float | None, value: float, period_s: float, constant_s: float) -> float:
        if average is None:
            return value
        return value + (average - value) * math.exp(-max(0.0, period_s) / constant_s)

    @property
    def steady(self) -> bool:
        """Whether no recent peak stands far above the load of now."""
        return self.fast_per_s is not None and self.peak_per_s <= _STEADY * self.fast_per_s

    @property
    def lull(self) -> bool:
        """Whether a recent peak stands far above the load of the last half minute: it may come again at any moment."""
        return self.peak_per_s > _STEADY * self.slow_per_s

    @property
    def rises(self) -> bool:
        """Whether the load rises for certain: what comes at least is above the average of the last seconds."""
        return self.fast_per_s is not None and self._certain_per_s > self.fast_per_s

    @property
    def demand_per_s(self) -> float | None:
        """The rate to be prepared for; None before anything was seen."""
        if self.fast_per_s is None:
            return None
        averages = sorted(average for _, average in self.recent)
        high = averages[min(len(averages) - 1, math.ceil(self.outlook.share * len(averages)))]
        return max(self.fast_per_s, high, self._certain_per_s)

    @property
    def _certain_per_s(self) -> float:
        """What comes at least by the quick average: while a load rises, the fast one lags by seconds of it.

        An exponential average of Poisson arrivals has the variance of the rate over twice its time constant.
        """
        deviation = math.sqrt(self.quick_per_s / (2 * self.outlook.quick_s))
        return self.quick_per_s - self.outlook.sure * deviation
