"""Curves of survival with few parameters, fitted by maximum likelihood to machines lost, kept, and lost between looks.

Exponential: the same danger at every age. Weibull: infant mortality (shape below 1) or wear. Bathtub: an exponential
early and one before the provider's limit (Kadupitiya et al., HPDC 2020, arXiv 1911.05160). AIC chooses.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import exp, inf, log

import numpy as np
from scipy.optimize import brentq, minimize

from polythrottle.cluster.lifetime import HOUR_S, Lifetime, Steady
from polythrottle.cluster.tables import LifetimeRow
from polythrottle.errors import InvalidInput

LIMIT_S = 24 * HOUR_S
_YOUNG_S = 30.0
_TINY = 1e-12


@dataclass(frozen=True)
class Weibull:
    """Survival exp(-(age/scale)^shape).

    Attributes:
        scale_s: Age at which survival is 1/e, in seconds, > 0.
        shape: Below 1 the young are in the greatest danger, above 1 the old; > 0.
    """

    scale_s: float
    shape: float

    def __post_init__(self) -> None:
        if not (self.scale_s > 0 and self.shape > 0):
            raise InvalidInput(f"a Weibull curve has a positive scale and shape, not {self.scale_s} s, {self.shape}")

    def survival(self, age_s: float) -> float:
        """Return the probability to be kept up to an age."""
        return exp(-((max(0.0, age_s) / self.scale_s) ** self.shape))

    def hazard_per_s(self, age_s: float) -> float:
        """Return the rate at an age; at birth that of half a minute, where a shape below 1 has no finite rate."""
        ratio = max(age_s, _YOUNG_S) / self.scale_s
        return float(self.shape / self.scale_s * ratio ** (self.shape - 1))

    def quantile_s(self, survival: float) -> float:
        """Return the age at which survival has fallen to the one given."""
        if survival >= 1:
            return 0.0
        return self.scale_s * (-log(survival)) ** (1 / self.shape) if survival > 0 else inf


@dataclass(frozen=True)
class Bathtub:
    """Survival 1 - share × (1 - exp(-age/early) + exp((age - limit)/late) - exp(-limit/late)), no less than 0.

    Attributes:
        share: Of the machines lost early, in (0, 1].
        early_s: Time constant of the early losses, in seconds, > 0.
        late_s: Time constant of the losses before the limit, in seconds, > 0.
        limit_s: The provider's limit of age, in seconds; nothing is kept longer.
    """

    share: float
    early_s: float
    late_s: float
    limit_s: float = LIMIT_S

    def __post_init__(self) -> None:
        if not (0 < self.share <= 1 and self.early_s > 0 and self.late_s > 0 and self.limit_s > 0):
            raise InvalidInput("a bathtub has a share in (0, 1] and positive times")

    def survival(self, age_s: float) -> float:
        """Return the probability to be kept up to an age."""
        if age_s <= 0:
            return 1.0
        early = 1 - exp(-age_s / self.early_s)
        late = exp((min(age_s, self.limit_s) - self.limit_s) / self.late_s) - exp(-self.limit_s / self.late_s)
        return max(0.0, 1 - self.share * (early + late)) if age_s <= self.limit_s else 0.0

    def hazard_per_s(self, age_s: float) -> float:
        """Return the rate at an age; infinite where nothing is kept."""
        alive = self.survival(age_s)
        if alive <= 0:
            return inf
        early = exp(-max(0.0, age_s) / self.early_s) / self.early_s
        late = exp((age_s - self.limit_s) / self.late_s) / self.late_s
        return self.share * (early + late) / alive

    def quantile_s(self, survival: float) -> float:
        """Return the age at which survival has fallen to the one given; no more than the limit."""
        if survival >= 1:
            return 0.0
        if self.survival(self.limit_s) > survival:
            return self.limit_s
        return float(brentq(lambda age_s: self.survival(age_s) - survival, 0.0, self.limit_s))


@dataclass(frozen=True)
class Fitted:
    """A curve with how well it fits.

    Attributes:
        family: exponential, weibull or bathtub.
        lifetime: The curve.
        log_likelihood: Of the machines it was fitted to.
        parameters: How many were fitted.
    """

    family: str
    lifetime: Lifetime
    log_likelihood: float
    parameters: int

    @property
    def aic(self) -> float:
        """Return Akaike's criterion: the lower, the better."""
        return 2 * self.parameters - 2 * self.log_likelihood


def log_likelihood(lifetime: Lifetime, rows: Sequence[LifetimeRow]) -> float:
    """Return how likely a curve makes what was seen of machines, as a natural logarithm.

    Machines not lost count with their survival, those lost between two looks with the fall of survival in between,
    those lost at a known age with their density per hour there.
    """
    total = 0.0
    for row in rows:
        if row.most_s is None:
            one = lifetime.survival(row.least_s)
        elif row.most_s > row.least_s:
            one = lifetime.survival(row.least_s) - lifetime.survival(row.most_s)
        else:
            age_s = max(row.age_s, _YOUNG_S)
            one = lifetime.survival(age_s) * min(lifetime.hazard_per_s(age_s), 1.0) * HOUR_S
        total += log(max(one, _TINY))
    return total


def fit_curves(rows: Sequence[LifetimeRow], limit_s: float = LIMIT_S) -> tuple[Fitted, ...]:
    """Return the curves that make what was seen most likely, one per family, the best by AIC first.

    Args:
        rows: The machines.
        limit_s: The provider's limit of age; a bathtub needs machines that came to it, and none far beyond.

    Raises:
        InvalidInput: If no machine was lost: then only a bound on the rate is known, not a curve.
    """
    lost = sum(row.lost for row in rows)
    if not lost:
        raise InvalidInput(f"none of {len(rows)} machines was lost, so there is no curve to fit; pool with others")
    rate = lost / max(sum(row.age_s for row in rows), 1.0)
    found = [Fitted("exponential", steady := Steady(rate * HOUR_S), log_likelihood(steady, rows), 1)]
    guesses = ((-log(rate), -0.5), (-log(rate), 0.0))
    found.append(_fit("weibull", rows, lambda q: Weibull(exp(q[0]), exp(q[1])), guesses))
    if 0.98 * limit_s <= max(row.age_s for row in rows) <= 1.1 * limit_s:
        inside = [_within(row, limit_s) for row in rows]
        starts = tuple((share, log(early_s), log(2 * HOUR_S)) for share in (-1.0, 1.0) for early_s in (600.0, 9000.0))
        made = _fit("bathtub", inside, lambda q: Bathtub(1 / (1 + exp(-q[0])), exp(q[1]), exp(q[2]), limit_s), starts)
        found.append(made)
    return tuple(sorted(found, key=lambda fitted: fitted.aic))


def _within(row: LifetimeRow, limit_s: float) -> LifetimeRow:
    """Return a machine with an age just below the limit if it is beyond: the limit is kept to some minutes only."""
    least_s = min(row.least_s, limit_s - 1.0)
    most_s = None if row.most_s is None else max(least_s, min(row.most_s, limit_s - 1.0))
    return LifetimeRow(row.gpu, row.region, row.start, least_s, most_s)


def _fit(
    family: str,
    rows: Sequence[LifetimeRow],
    make: Callable[[Sequence[float]], Lifetime],
    starts: Sequence[Sequence[float]],
) -> Fitted:
    def cost(logs: Sequence[float]) -> float:
        return -log_likelihood(make(np.clip(logs, -25, 25).tolist()), rows)

    tried = [minimize(cost, start, method="Nelder-Mead", options={"maxiter": 2000}) for start in starts]
    best = min(tried, key=lambda one: float(one.fun))
    return Fitted(family, make(np.clip(best.x, -25, 25).tolist()), -float(best.fun), len(starts[0]))
