"""How often a running job is interrupted: learnt from its own interruptions, or known from lifetimes and ages."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import exp, log

from polythrottle.cluster.lifetime import HOUR_S, Lifetime, lost_before
from polythrottle.errors import InvalidInput

_LOOK_S = 600.0


@dataclass
class Learned:
    """Interruptions counted with forgetting: statistics of revocation age within months, and differ by the hour.

    A burst that takes many machines within one re-forming is one interruption: the job loses its work once. The prior
    counts as so much time seen, with its rate.

    Attributes:
        prior_per_h: Interruptions of the job per hour before anything was seen.
        prior_s: How much seen time the prior is worth, in seconds, > 0.
        half_s: After how long what was seen counts half, in seconds, > 0.
    """

    prior_per_h: float = 1.0
    prior_s: float = HOUR_S
    half_s: float = 6 * HOUR_S
    _seen: float = field(default=0.0, init=False)
    _time_s: float = field(default=0.0, init=False)
    _last_s: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        if self.prior_per_h < 0 or self.prior_s <= 0 or self.half_s <= 0:
            raise InvalidInput("a prior has a rate of at least 0 and times above 0")

    def interrupted(self, now_s: float) -> None:
        """Take note of an interruption."""
        self._aged(now_s)
        self._seen += 1

    def per_s(self, now_s: float) -> float:
        """Return the interruptions to expect per second, from now on."""
        self._aged(now_s)
        return (self._seen + self.prior_per_h * self.prior_s / HOUR_S) / (self._time_s + self.prior_s)

    def _aged(self, now_s: float) -> None:
        span_s = max(0.0, now_s - self._last_s)
        rate = log(2) / self.half_s
        kept = exp(-rate * span_s)
        self._seen *= kept
        self._time_s = self._time_s * kept + (1 - kept) / rate
        self._last_s += span_s


def known_per_s(lifetime: Lifetime, ages_s: Mapping[float, int], shocks_per_h: float = 0.0) -> float:
    """Return the interruptions per second of machines of known ages, shocks that take several counted once.

    Args:
        lifetime: The distribution of every machine's life.
        ages_s: How many machines there are of each age in seconds; ages may be rounded, a sum over a few will do.
        shocks_per_h: Common shocks per hour.
    """
    alone = sum(number * min(1.0, lost_before(lifetime, age_s, _LOOK_S)) for age_s, number in ages_s.items())
    return alone / _LOOK_S + shocks_per_h / HOUR_S
