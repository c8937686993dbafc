"""Transient machines as recorded: start-up phases, Kaplan-Meier survival, fitted curves.

Losses that come in bursts.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import accumulate, groupby
from math import exp, inf, log, sqrt
from operator import mul
from statistics import NormalDist, fmean, stdev

import numpy as np
from scipy.optimize import brentq, minimize

from polythrottle.cluster.recorded_tables import LifetimeRow
from polythrottle.domain.errors import InvalidInput
from polythrottle.domain.fleet.transient_machine import HOUR_S, ConstantHazard, Lifetime, ObservedLifetime
from polythrottle.lab.reproduce.cluster_tables import StartupRow

# How long machines were kept, as observed: the Kaplan–Meier estimate and its band.


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
        if at:
            return self.survivals[at - 1]
        return 1.0

    def band(self, age_s: float, confidence: float = 0.95) -> Band:
        """Return the estimate at an age in seconds with Greenwood's limits on the log-log scale.

        Where nothing, or everything, was lost, Greenwood's variance says nothing; there the limit is that of the
        binomial distribution (Clopper and Pearson 1934, doi 10.1093/biomet/26.4.404), on one side.
        """
        tail = (1 - confidence) / 2
        alive = self.survival(age_s)
        count = max(1.0, self.machines / self.effect)
        if alive >= 1:
            return Band(1.0, tail ** (1 / count), 1.0)
        if alive <= 0:
            return Band(0.0, 0.0, 1 - tail ** (1 / count))
        error = sqrt(self.effect * self.sums[bisect_right(self.ages_s, age_s) - 1]) / abs(log(alive))
        wide = exp(NormalDist().inv_cdf(1 - tail) * error)
        return Band(alive, alive**wide, alive ** (1 / wide))

    def observed(self) -> ObservedLifetime:
        """Return the estimate as a lifetime that can be planned and simulated with."""
        corners = [(0.0, 1.0), *((age_s, alive) for age_s, alive in zip(self.ages_s, self.survivals, strict=True))]
        kept = [one for one in corners if one[0] > 0 or one[1] == 1]
        return ObservedLifetime(tuple(age_s for age_s, _ in kept), tuple(alive for _, alive in kept))


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


# Curves of survival with few parameters, fitted by maximum likelihood to machines lost, kept, and lost between looks.
#
# Exponential: the same danger at every age. Weibull: infant mortality (shape below 1) or wear. Bathtub: an
# exponential early and one before the provider's limit (Kadupitiya et al., HPDC 2020, arXiv 1911.05160). AIC chooses.

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
        if age_s <= self.limit_s:
            return max(0.0, 1 - self.share * (early + late))
        return 0.0

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
class FittedCurve:
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


def fit_curves(rows: Sequence[LifetimeRow], limit_s: float = LIMIT_S) -> tuple[FittedCurve, ...]:
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
    found = [FittedCurve("exponential", steady := ConstantHazard(rate * HOUR_S), log_likelihood(steady, rows), 1)]
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
) -> FittedCurve:
    def cost(logs: Sequence[float]) -> float:
        return -log_likelihood(make(np.clip(logs, -25, 25).tolist()), rows)

    tried = [minimize(cost, start, method="Nelder-Mead", options={"maxiter": 2000}) for start in starts]
    best = min(tried, key=lambda one: float(one.fun))
    return FittedCurve(family, make(np.clip(best.x, -25, 25).tolist()), -float(best.fun), len(starts[0]))


# Machines that are lost together: a provider takes capacity back in bursts, so losses are not independent.
#
# A burst is two or more losses of one series (GPU type and region) within a few minutes. The common-shock model
# (Marshall and Olkin 1967, doi 10.1080/01621459.1967.10482885): shocks arrive at a rate, each takes any machine with
# a probability; the rest are lost alone.

WITHIN_S = 120.0
"""Losses no further apart are one burst; recorded times are whole minutes."""


@dataclass(frozen=True)
class Bursts:
    """How losses come.

    Attributes:
        losses: How many there were.
        together: How many of them in bursts of two or more.
        shocks_per_h: Bursts per hour and series that machines were watched in.
        share: Of the machines there, how many a burst takes, on average; 0 without bursts.
        effect: Losses per moment of loss, averaged over losses: by how much fewer machines say as much as independent
            ones would; at least 1.
    """

    losses: int
    together: int
    shocks_per_h: float
    share: float
    effect: float


def bursts(rows: Sequence[LifetimeRow], within_s: float = WITHIN_S) -> Bursts:
    """Return how the losses of machines came.

    Args:
        rows: Machines of one or more series, those not lost included.
        within_s: Losses of a series no further apart, in seconds, are one burst.
    """

    def series(row: LifetimeRow) -> tuple[str, str]:
        return row.gpu, row.region

    sizes: list[int] = []
    shares: list[float] = []
    watched_s = 0.0
    for _, some in groupby(sorted(rows, key=lambda row: (series(row), row.start)), key=series):
        mine = list(some)
        begin = min(row.start for row in mine)
        watched_s += (max(_end(row) for row in mine) - begin).total_seconds()
        for moment, size in _groups(mine, within_s):
            sizes.append(size)
            if size > 1:
                shares.append(size / max(size, sum(row.start < moment <= _end(row) for row in mine)))
    losses = sum(sizes)
    return Bursts(
        losses,
        sum(size for size in sizes if size > 1),
        len(shares) / watched_s * HOUR_S if watched_s else 0.0,
        fmean(shares) if shares else 0.0,
        sum(size * size for size in sizes) / losses if losses else 1.0,
    )


def _end(row: LifetimeRow) -> datetime:
    return row.start + timedelta(seconds=row.age_s)


def _groups(rows: Sequence[LifetimeRow], within_s: float) -> list[tuple[datetime, int]]:
    """Return the moments of loss with how many were lost then, each the first of its group."""
    found: list[tuple[datetime, int]] = []
    last: datetime | None = None
    for end in sorted(_end(row) for row in rows if row.lost):
        if last is not None and (end - last).total_seconds() <= within_s:
            found[-1] = (found[-1][0], found[-1][1] + 1)
        else:
            found.append((end, 1))
        last = end
    return found


# How long a machine takes to come: provisioning, staging, booting, then the framework, cold or warm.

PHASES = ("provisioning", "staging", "booting", "framework")


@dataclass(frozen=True)
class Startup:
    """From the order of a machine to its first training step.

    Attributes:
        phases_s: Mean time of each of `PHASES`, in seconds.
        spread_s: Standard deviation of the sum, in seconds.
        machines: How many starts the machine's part was averaged over.
        gpu: GPU type they were of; empty where that type was never started, so that all types stand for it.
    """

    phases_s: tuple[float, float, float, float]
    spread_s: float
    machines: int
    gpu: str

    @property
    def machine_s(self) -> float:
        """Return the time until the machine has booted, in seconds."""
        return sum(self.phases_s[:3])

    @property
    def total_s(self) -> float:
        """Return the time until the first step, in seconds."""
        return sum(self.phases_s)


_FRAMEWORK_S = {True: (10.2, 0.0895), False: (71.1, 0.0895)}
"""Warm (a process starts again) or cold (a new machine): seconds to the first step, and seconds per tensor; a line
through ResNet-15, ResNet-32, Shake-Shake small, big: 75.6, 78.7, 89.1, 90.8 s cold; 14.8, 19.0, 29.4, 30.6 s warm."""


def framework_s(n_tensors: float, warm: bool = False) -> float:
    """Return the time from a booted machine to the first step, in seconds (published, CM-DARE).

    Args:
        n_tensors: Trainable tensors of the network: its graph is built anew.
        warm: Whether only the process starts again, framework and data being there.
    """
    fixed_s, tensor_s = _FRAMEWORK_S[warm]
    return fixed_s + tensor_s * n_tensors


def startup(
    rows: Sequence[StartupRow], gpu: str, transient: bool, n_tensors: float, warm: bool = False, region: str = ""
) -> Startup:
    """Return what a start takes, averaged over recorded ones that are like it.

    Args:
        rows: Recorded starts.
        gpu: GPU type.
        transient: Whether the machine can be taken away; staging such a machine takes longer.
        n_tensors: Of the network to train.
        warm: Whether the machine is there and only the process starts.
        region: Where, if starts there are to count alone.

    Raises:
        InvalidInput: If no start of that market was recorded.
    """
    if warm:
        return Startup((0.0, 0.0, 0.0, framework_s(n_tensors, warm)), 0.0, 0, gpu)
    market = [row for row in rows if row.transient == transient]
    if not market:
        raise InvalidInput(f"no start of a {'transient' if transient else 'lasting'} machine was recorded")
    of_type = [row for row in market if row.gpu == gpu]
    like = [row for row in of_type if row.region == region] or of_type or market
    means = [fmean(row.phases_s[index] for row in like) for index in range(3)]
    totals = [sum(row.phases_s) for row in like]
    spread_s = stdev(totals) * sqrt(1 + 1 / len(totals)) if len(totals) > 1 else 0.1 * totals[0]
    phases = (means[0], means[1], means[2], framework_s(n_tensors))
    return Startup(phases, spread_s, len(like), gpu if of_type else "")
