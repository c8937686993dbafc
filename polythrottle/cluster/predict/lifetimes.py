"""How long machines are kept: pooled from the few that were seen, published as a prior.

As a catalogue names them.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import exp, inf, log
from pathlib import Path

from polythrottle.cluster.recorded_tables import LifetimeRow, lifetime_rows
from polythrottle.domain.errors import InvalidInput
from polythrottle.domain.fleet.transient_machine import HOUR_S, Lifetime
from polythrottle.storage.tables import header

# Survival of machines of which few were seen: each series borrows from its like, as far as they are alike.
#
# Danger is constant within a few spans of age. Each series' danger is drawn towards what all series of its GPU type
# show, and towards what was published of it before: gamma priors, so that all is counts of losses and of machine-
# seconds watched, and can be updated machine by machine. By how much it is drawn is what predicts best, each machine
# from those before it (Dawid 1984, doi 10.2307/2981683), in Google's table of 2019 and Amazon's of 2020 alike: four
# machines of the published curve, one of the type. Statistics of revocation age fast, so old counts fade.

EDGES_S = tuple(hours * HOUR_S for hours in (0.0, 1.0, 3.0, 6.0, 12.0, 24.0))
"""Where spans of age begin; the last has no end."""
HALF_S = 14 * 24 * HOUR_S
TRUST = 4.0
BORROWED = 1.0
"""Machines by which a series is drawn towards the published curve, and towards its GPU type."""
_FLOOR_PER_S = 1e-4 / HOUR_S

Series = tuple[str, str]
"""GPU type and region."""


@dataclass(frozen=True)
class Pieces:
    """Survival with a constant danger within each span of age.

    Attributes:
        edges_s: Where spans begin, rising, the first 0.
        rates_per_s: Danger within each span, per second, >= 0.
    """

    edges_s: tuple[float, ...]
    rates_per_s: tuple[float, ...]

    def __post_init__(self) -> None:
        rising = all(a < b for a, b in zip(self.edges_s, self.edges_s[1:], strict=False))
        if not self.edges_s or self.edges_s[0] != 0 or not rising or len(self.edges_s) != len(self.rates_per_s):
            raise InvalidInput("spans of age begin at 0, rise, and have a rate each")
        if min(self.rates_per_s) < 0:
            raise InvalidInput("rates of loss are at least 0")

    def survival(self, age_s: float) -> float:
        """Return the probability to be kept up to an age."""
        return exp(-self._danger(max(0.0, age_s)))

    def hazard_per_s(self, age_s: float) -> float:
        """Return the rate in the span of an age."""
        return self.rates_per_s[max(0, bisect_right(self.edges_s, age_s) - 1)]

    def quantile_s(self, survival: float) -> float:
        """Return the age at which survival has fallen to the one given; infinite if it never does."""
        if survival <= 0:
            return inf
        left = -log(min(1.0, survival))
        for start_s, end_s, rate in zip(self.edges_s, (*self.edges_s[1:], inf), self.rates_per_s, strict=True):
            if rate > 0 and left <= rate * (end_s - start_s):
                return start_s + left / rate
            if rate:
                left -= rate * (end_s - start_s)
        return inf

    def _danger(self, age_s: float) -> float:
        return sum(rate * one for rate, one in zip(self.rates_per_s, spans_s(age_s, self.edges_s), strict=True))


def spans_s(age_s: float, edges_s: Sequence[float] = EDGES_S) -> tuple[float, ...]:
    """Return how much of a life of an age falls into each span, in seconds."""
    ends = (*edges_s[1:], inf)
    return tuple(max(0.0, min(age_s, end_s) - start_s) for start_s, end_s in zip(edges_s, ends, strict=True))


@dataclass(frozen=True)
class Tally:
    """Losses and machine-seconds watched, by span of age; both may be fractions of machines that have faded."""

    losses: tuple[float, ...] = (0.0,) * len(EDGES_S)
    watched_s: tuple[float, ...] = (0.0,) * len(EDGES_S)

    def __add__(self, other: "Tally") -> "Tally":
        return Tally(
            tuple(a + b for a, b in zip(self.losses, other.losses, strict=True)),
            tuple(a + b for a, b in zip(self.watched_s, other.watched_s, strict=True)),
        )

    def faded(self, share: float) -> "Tally":
        """Return it with a share of every count."""
        return Tally(tuple(share * one for one in self.losses), tuple(share * one for one in self.watched_s))

    def drawn(self, parents: Sequence[tuple[Pieces, float]]) -> Pieces:
        """Return the danger it shows, drawn towards parents' as if some machines had lived by each of them."""
        lost = self.losses
        watched_s = self.watched_s
        for parent, machines in parents:
            more_s = machines_s(parent, machines)
            lost = tuple(a + rate * b for a, rate, b in zip(lost, parent.rates_per_s, more_s, strict=True))
            watched_s = tuple(a + b for a, b in zip(watched_s, more_s, strict=True))
        rates = (a / max(b, 1e-9) for a, b in zip(lost, watched_s, strict=True))
        return Pieces(EDGES_S, tuple(max(rate, _FLOOR_PER_S) for rate in rates))


def machines_s(parent: Pieces, machines: float) -> tuple[float, ...]:
    """Return the machine-seconds in each span that so many machines live that die by a parent's curve."""
    ends = (*parent.edges_s[1:], 2 * parent.edges_s[-1])
    middles = [(start + end) / 2 for start, end in zip(parent.edges_s, ends, strict=True)]
    return tuple(
        machines * parent.survival(middle_s) * (end - start)
        for middle_s, start, end in zip(middles, parent.edges_s, ends, strict=True)
    )


def tally(row: LifetimeRow) -> Tally:
    """Return the counts of one machine."""
    at = bisect_right(EDGES_S, row.age_s) - 1
    losses = tuple(float(row.lost and index == at) for index in range(len(EDGES_S)))
    return Tally(losses, spans_s(row.age_s))


Prior = Callable[[str, str], Pieces]
"""What is taken for known of a GPU type in a region; see `prior.prior`."""


@dataclass(frozen=True)
class Pool:
    """What is known of all series.

    Attributes:
        prior: Danger before anything was seen.
        series: Counts of each GPU type and region.
        borrowed: Machines by which a series is drawn towards its type.
        trust: Machines by which a series, and a type, is drawn towards the prior.
        at_s: When it was last brought up to date, in seconds.
        half_s: After how long a count is worth half, in seconds.
    """

    prior: Prior
    series: Mapping[Series, Tally] = field(default_factory=dict)
    borrowed: float = BORROWED
    trust: float = TRUST
    at_s: float = 0.0
    half_s: float = HALF_S

    def lifetime(self, gpu: str, region: str = "") -> Pieces:
        """Return the survival of a machine of a type in a region, seen there before or not."""
        like = (self._of_type(gpu), self.borrowed)
        return self.series.get((gpu, region), Tally()).drawn([like, (self.prior(gpu, region), self.trust)])

    def seen(self, row: LifetimeRow, at_s: float) -> "Pool":
        """Return it after one more machine, what was known before having faded.

        Args:
            row: The machine, lost or still there.
            at_s: Now, in seconds; a time before the last counts as the last.
        """
        share = 0.5 ** (max(0.0, at_s - self.at_s) / self.half_s)
        faded = {key: one.faded(share) for key, one in self.series.items()}
        key = (row.gpu, row.region)
        return replace(self, series={**faded, key: faded.get(key, Tally()) + tally(row)}, at_s=max(self.at_s, at_s))

    def _of_type(self, gpu: str) -> Pieces:
        mine = sum((one for (kind, _), one in self.series.items() if kind == gpu), Tally())
        return mine.drawn([(self.prior(gpu, ""), self.trust)])


def pooled(rows: Iterable[LifetimeRow], prior: Prior, half_s: float = HALF_S) -> Pool:
    """Return what machines show, each faded by its age at the newest one's start.

    Args:
        rows: The machines.
        prior: Danger before anything was seen.
        half_s: After how long a machine is worth half, in seconds.
    """
    pool = Pool(prior, half_s=half_s)
    for row in sorted(rows, key=lambda row: row.start):
        pool = pool.seen(row, row.start.timestamp())
    return pool


# What is taken for known before anything is measured: published figures, each with its source.
#
# CM-DARE (ICDCS 2020, arXiv 2004.03072; data of github.com/cake-lab/CM-DARE, 263b7f1, Apache-2.0): revocations of
# Google's preemptible machines within 24 h, 156 K80, 120 P100, 120 V100; start of the framework on new and old
# machines.


@dataclass(frozen=True)
class Revocations:
    """Shares of machines lost by an age, for one GPU type and region.

    Attributes:
        gpu: GPU model.
        region: Where they stood.
        lost: Share lost within 1, 6 and 12 h, and before 24 h.
        later: Share of those alive at 3 h that were lost later.
    """

    gpu: str
    region: str
    lost: tuple[float, float, float, float]
    later: float


REVOCATIONS = (
    Revocations("K80", "us-central1", (0.10, 0.17, 0.27, 0.56), 0.49),
    Revocations("K80", "us-west1", (0.04, 0.17, 0.19, 0.23), 0.10),
    Revocations("K80", "europe-west1", (0.40, 0.47, 0.53, 0.67), 0.38),
    Revocations("K80", "us-east1", (0.47, 0.47, 0.47, 0.47), 0.00),
    Revocations("P100", "us-east1", (0.20, 0.63, 0.67, 0.70), 0.18),
    Revocations("P100", "us-central1", (0.27, 0.33, 0.47, 0.53), 0.30),
    Revocations("P100", "us-west1", (0.17, 0.43, 0.53, 0.67), 0.52),
    Revocations("P100", "europe-west1", (0.00, 0.17, 0.23, 0.27), 0.15),
    Revocations("V100", "us-central1", (0.67, 0.67, 0.67, 0.67), 0.00),
    Revocations("V100", "us-west1", (0.30, 0.73, 0.73, 0.73), 0.43),
    Revocations("V100", "europe-west4", (0.07, 0.20, 0.23, 0.43), 0.32),
    Revocations("V100", "asia-east1", (0.23, 0.47, 0.47, 0.47), 0.16),
)


def curve(some: Revocations) -> Pieces:
    """Return a published row as a curve with a constant danger within each span of age."""
    alive_3h = (1 - some.lost[3]) / (1 - some.later)
    kept = (1.0, 1 - some.lost[0], min(1 - some.lost[0], alive_3h), *(1 - share for share in some.lost[1:]))
    return _through(kept)


def prior(gpu: str = "", region: str = "") -> Pieces:
    """Return the published curve of a GPU type and region, else the mean of the type's, else of all.

    Args:
        gpu: GPU model.
        region: A region or a zone in it.
    """
    of_type = [some for some in REVOCATIONS if some.gpu == gpu] or list(REVOCATIONS)
    here = [some for some in of_type if some.gpu == gpu and region.startswith(some.region)]
    curves = [curve(some) for some in here or of_type]
    return _through([sum(one.survival(age_s) for one in curves) / len(curves) for age_s in EDGES_S])


def _through(kept: "tuple[float, ...] | list[float]") -> Pieces:
    """Return the curve that has survivals at the edges of the spans, and goes on as in the last."""
    floor = 0.005
    held = [max(floor, one) for one in kept]
    pairs = zip(held, held[1:], EDGES_S, EDGES_S[1:], strict=False)
    rates = [max(0.0, log(a / b)) / (end - start) for a, b, start, end in pairs]
    return Pieces(EDGES_S, (*rates, rates[-1] if rates[-1] > 0 else 0.01 / HOUR_S))


# The lifetimes a catalogue can name: fitted to a recorded table, published, ended by the provider at an age.

DAY_S = 24 * HOUR_S
_STOPS_AFTER_A_DAY = "reached_24h_cap"


@dataclass(frozen=True)
class LimitedLifetime:
    """A lifetime that the provider ends at an age, if nothing ended it before.

    Attributes:
        before: How long machines are kept up to then.
        limit_s: The age at which all are stopped, in seconds.
    """

    before: Lifetime
    limit_s: float

    def __post_init__(self) -> None:
        if not self.limit_s > 0:
            raise InvalidInput(f"machines are stopped at an age above 0, not at {self.limit_s} s")

    def survival(self, age_s: float) -> float:
        """Return the survival before the limit, and 0 from it on."""
        if age_s < self.limit_s:
            return self.before.survival(age_s)
        return 0.0

    def hazard_per_s(self, age_s: float) -> float:
        """Return the hazard before the limit; from it on that of a machine which is gone within a second."""
        if age_s < self.limit_s:
            return self.before.hazard_per_s(age_s)
        return 1.0

    def quantile_s(self, survival: float) -> float:
        """Return the first age at which survival is no more than the one given; never beyond the limit."""
        return min(self.limit_s, self.before.quantile_s(survival))


def table_lifetime(path: Path, gpu: str, zone: str = "") -> tuple[Lifetime, int]:
    """Return the lifetime of a GPU type fitted to a table of machines, and how many of its kind the table has.

    Few machines of a zone borrow from those of their type and from published figures (`predict.pooled`). Where the
    table has machines that the provider stopped after 24 h, the lifetime ends there.

    Args:
        path: A table of lifetimes.
        gpu: GPU model as the table writes it.
        zone: Beginning of the zones' names; empty for all.

    Raises:
        BadFile: If the file is no such table.
        InvalidInput: If it has no machine of the kind; says what it has.
    """
    every = lifetime_rows(path)
    mine = [row.gpu.lower() == gpu.lower() and row.region.startswith(zone) for row in every]
    if not any(mine):
        have = sorted({f"{row.gpu} {row.region}" for row in every})
        wanted = f"{gpu} in {zone}" if zone else gpu
        raise InvalidInput(f"{path} has no lifetimes of {wanted}; it has {', '.join(have[:12])}")
    rows = [replace(row, region=zone) if fits else row for row, fits in zip(every, mine, strict=True)]
    name = next(row.gpu for row, fits in zip(every, mine, strict=True) if fits)
    fitted: Lifetime = pooled(rows, prior).lifetime(name, zone)
    stops = _STOPS_AFTER_A_DAY in header(path, ("gpu",)) and not all(row.lost for row in every)
    return LimitedLifetime(fitted, DAY_S) if stops else fitted, sum(mine)


def published_lifetime(gpu: str, region: str) -> tuple[Lifetime, str]:
    """Return what CM-DARE published of a GPU type in a region of Google's, stopped after 24 h, and whose it is.

    Where it has no such type or region the mean of its like is taken, and the text says so.
    """
    types = [row for row in REVOCATIONS if row.gpu == gpu]
    if any(region.startswith(row.region) for row in types):
        whose = ""
    elif types:
        whose = f", mean of all {gpu}"
    else:
        whose = ", mean of other GPUs"
    return LimitedLifetime(prior(gpu, region), DAY_S), f"published by CM-DARE, 2019{whose}"
