"""How long machines were kept, as observed: the Kaplan–Meier estimate and its band."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import exp, inf, log, sqrt
from operator import mul
from statistics import NormalDist

from polythrottle.cluster.lifetime import Observed
from polythrottle.cluster.tables import LifetimeRow
from polythrottle.errors import InvalidInput


@dataclass(frozen=True)
class Band:
    """A survival with its confidence limits, all probabilities."""

    survival: float
    low: float
    high: float

    def holds(self, survival: float) -> bool:
        """Return whether a predicted survival lies within."""
        return self.low <= survival <= self.high


@dataclass(frozen=True)
class KaplanMeier:
    """The product-limit estimate (Kaplan and Meier 1958, doi 10.1080/01621459.1958.10501452).

    Attributes:
        ages_s: Rising ages at which machines were lost, in seconds.
        survivals: Survival from each of them on.
        sums: Greenwood's sum up to each of them: the variance of survival over its square.
        machines: How many were watched.
        effect: Machines lost together on average: by how much fewer machines say as much as independent ones.
    """

    ages_s: tuple[float, ...]
    survivals: tuple[float, ...]
    sums: tuple[float, ...]
    machines: int
    effect: float = 1.0

    def survival(self, age_s: float) -> float:
        """Return the estimate at an age in seconds."""
        at = bisect_right(self.ages_s, age_s)
        return self.survivals[at - 1] if at else 1.0

    def band(self, age_s: float, confidence: float = 0.95) -> Band:
        """Return the estimate at an age in seconds with Greenwood's limits on the log-log scale.

        Where nothing, or everything, was lost, Greenwood's variance says nothing; there the limit is that of the
        binomial distribution (Clopper and Pearson 1934, doi 10.1093/biomet/26.4.404), on one side.
        """
        tail = (1 - confidence) / 2
        alive, count = self.survival(age_s), max(1.0, self.machines / self.effect)
        if alive >= 1:
            return Band(1.0, tail ** (1 / count), 1.0)
        if alive <= 0:
            return Band(0.0, 0.0, 1 - tail ** (1 / count))
        error = sqrt(self.effect * self.sums[bisect_right(self.ages_s, age_s) - 1]) / abs(log(alive))
        wide = exp(NormalDist().inv_cdf(1 - tail) * error)
        return Band(alive, alive**wide, alive ** (1 / wide))

    def observed(self) -> Observed:
        """Return the estimate as a lifetime that can be planned and simulated with."""
        corners = [(0.0, 1.0), *((age_s, alive) for age_s, alive in zip(self.ages_s, self.survivals, strict=True))]
        kept = [one for one in corners if one[0] > 0 or one[1] == 1]
        return Observed(tuple(age_s for age_s, _ in kept), tuple(alive for _, alive in kept))


def kaplan_meier(rows: Sequence[LifetimeRow], effect: float = 1.0) -> KaplanMeier:
    """Return the estimate for machines, those that were not lost being censored at the age they were last seen.

    A loss between two looks counts at the middle of them.

    Args:
        rows: The machines.
        effect: Machines lost together on average, >= 1; widens the band.

    Raises:
        InvalidInput: If there are no machines.
    """
    if not rows:
        raise InvalidInput("survival needs at least one machine that was watched")
    ages_s = sorted({row.age_s for row in rows if row.lost})
    risks = [sum(row.age_s >= age_s for row in rows) for age_s in ages_s]
    counts = [
        (risk, sum(row.lost and row.age_s == age_s for row in rows)) for risk, age_s in zip(risks, ages_s, strict=True)
    ]
    kept = accumulate((1 - lost / risk for risk, lost in counts), mul)
    sums = accumulate(lost / (risk * (risk - lost)) if risk > lost else inf for risk, lost in counts)
    return KaplanMeier(tuple(ages_s), tuple(kept), tuple(sums), len(rows), effect)
