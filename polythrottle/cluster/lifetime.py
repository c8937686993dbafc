"""How long a machine that can be taken away is kept: the one port between lifetimes' models and who uses them."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import exp, inf, log
from typing import Protocol

from polythrottle.errors import InvalidInput

HOUR_S = 3600.0
_CUTS = (0.5, 0.05, 1e-5)


class Lifetime(Protocol):
    """The age at which a machine is taken away, as a distribution."""

    def survival(self, age_s: float) -> float:
        """Return the probability that a machine is still there at an age in seconds: 1 at 0, never rising."""

    def hazard_per_s(self, age_s: float) -> float:
        """Return the rate per second at which machines of an age in seconds are taken away."""

    def quantile_s(self, survival: float) -> float:
        """Return the first age in seconds at which survival is no more than the one given; may be infinite."""


@dataclass(frozen=True)
class Steady:
    """A machine that is taken away at the same rate at every age; at rate 0 never.

    Attributes:
        rate_per_h: Losses per hour, >= 0.
    """

    rate_per_h: float

    def __post_init__(self) -> None:
        if not 0 <= self.rate_per_h < inf:
            raise InvalidInput(f"a rate of losses is at least 0 per hour, not {self.rate_per_h}")

    def survival(self, age_s: float) -> float:
        """Return exp(-rate × age)."""
        return exp(-self.rate_per_h * age_s / HOUR_S)

    def hazard_per_s(self, age_s: float) -> float:
        """Return the rate, whatever the age."""
        return self.rate_per_h / HOUR_S

    def quantile_s(self, survival: float) -> float:
        """Return the age at which survival has fallen to the one given."""
        if survival >= 1:
            return 0.0
        return -log(survival) / self.rate_per_h * HOUR_S if self.rate_per_h and survival > 0 else inf


KEPT = Steady(0.0)
"""The lifetime of an on-demand machine."""


@dataclass(frozen=True)
class Observed:
    """A survival curve as observed, for example by Kaplan–Meier: straight between its corners, level after the last.

    Attributes:
        ages_s: Rising ages in seconds; the first is 0.
        survivals: Survival at each of them, never rising; the first is 1.
    """

    ages_s: tuple[float, ...]
    survivals: tuple[float, ...]

    def __post_init__(self) -> None:
        falls = all(a >= b >= 0 for a, b in zip(self.survivals, self.survivals[1:], strict=False))
        rises = all(a < b for a, b in zip(self.ages_s, self.ages_s[1:], strict=False))
        if len(self.ages_s) != len(self.survivals) or not self.ages_s or not (falls and rises):
            raise InvalidInput("a survival curve has rising ages and survivals that never rise")
        if self.ages_s[0] != 0 or self.survivals[0] != 1:
            raise InvalidInput("a survival curve starts at age 0 with survival 1")

    def survival(self, age_s: float) -> float:
        """Return the survival between the two corners around the age."""
        after = bisect_right(self.ages_s, age_s)
        if after == len(self.ages_s):
            return self.survivals[-1]
        (t0, t1), (s0, s1) = self.ages_s[after - 1 : after + 1], self.survivals[after - 1 : after + 1]
        return s0 + (s1 - s0) * (age_s - t0) / (t1 - t0)

    def hazard_per_s(self, age_s: float) -> float:
        """Return the fall of survival around the age over survival there; infinite where nothing survives."""
        after = bisect_right(self.ages_s, age_s)
        if after == len(self.ages_s):
            return 0.0
        (t0, t1), (s0, s1) = self.ages_s[after - 1 : after + 1], self.survivals[after - 1 : after + 1]
        alive = self.survival(age_s)
        return (s0 - s1) / (t1 - t0) / alive if alive > 0 else inf

    def quantile_s(self, survival: float) -> float:
        """Return the first age at which the curve is as low as the survival given, infinite if it never is."""
        pairs = zip(self.ages_s, self.survivals, strict=True)
        before: tuple[float, float] | None = None
        for age_s, alive in pairs:
            if alive <= survival:
                if before is None or before[1] == alive:
                    return age_s
                return before[0] + (age_s - before[0]) * (before[1] - survival) / (before[1] - alive)
            before = (age_s, alive)
        return inf


def remaining_s(lifetime: Lifetime, age_s: float, horizon_s: float, parts: int = 200) -> float:
    """Return how long a machine of an age is expected to be kept, counted up to a horizon.

    Args:
        lifetime: Its distribution.
        age_s: Its age in seconds.
        horizon_s: The longest stay that counts, in seconds: the rest of the job.
        parts: Trapezoids of the integral.

    Returns:
        The integral of P(alive at age + t | alive at age) over t from 0 to the horizon, in seconds.
    """
    alive = lifetime.survival(age_s)
    if alive <= 0 or horizon_s <= 0:
        return 0.0
    # A short life would fall between two corners of a long horizon: cut where half, few and hardly any are left.
    falls_s = (max(0.0, lifetime.quantile_s(alive * share) - age_s) for share in _CUTS)
    cuts_s = sorted({0.0, *(min(horizon_s, fall_s) for fall_s in falls_s)})
    return (
        sum(_kept_s(lifetime, age_s, begin_s, end_s, parts // len(_CUTS)) for begin_s, end_s in pairwise(cuts_s))
        / alive
    )


def _kept_s(lifetime: Lifetime, age_s: float, begin_s: float, end_s: float, parts: int) -> float:
    step_s = (end_s - begin_s) / parts
    later = [lifetime.survival(age_s + begin_s + step_s * index) for index in range(parts + 1)]
    return step_s * (sum(later) - (later[0] + later[-1]) / 2)


def lost_before(lifetime: Lifetime, age_s: float, span_s: float) -> float:
    """Return the probability that a machine of an age is taken away within a span, both in seconds."""
    alive = lifetime.survival(age_s)
    return 1.0 if alive <= 0 else 1 - lifetime.survival(age_s + span_s) / alive


def next_loss_s(lifetime: Lifetime, age_s: float, uniform: float) -> float:
    """Return the age in seconds at which a machine of an age is taken away, for a uniform number in (0, 1]."""
    return max(age_s, lifetime.quantile_s(uniform * lifetime.survival(age_s)))


def hazard_of(lifetimes: Sequence[tuple[Lifetime, float]]) -> float:
    """Return the rate per second at which the first of several machines, each with its age in seconds, is lost."""
    return sum(lifetime.hazard_per_s(age_s) for lifetime, age_s in lifetimes)
