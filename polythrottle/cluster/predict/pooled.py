"""Survival of machines of which few were seen: each series borrows from its like, as far as they are alike.

Danger is constant within a few spans of age. Each series' danger is drawn towards what all series of its GPU type show,
and towards what was published of it before: gamma priors, so that all is counts of losses and of machine-seconds
watched, and can be updated machine by machine. By how much it is drawn is what predicts best, each machine from those
before it (Dawid 1984, doi 10.2307/2981683), in Google's table of 2019 and Amazon's of 2020 alike: four machines of the
published curve, one of the type. Statistics of revocation age fast, so old counts fade.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import exp, inf, log

from polythrottle.cluster.lifetime import HOUR_S
from polythrottle.cluster.tables import LifetimeRow
from polythrottle.errors import InvalidInput

EDGES_S = tuple(hours * HOUR_S for hours in (0.0, 1.0, 3.0, 6.0, 12.0, 24.0))
"""Where spans of age begin; the last has no end."""
HALF_S = 14 * 24 * HOUR_S
TRUST, BORROWED = 4.0, 1.0
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
            left -= rate * (end_s - start_s) if rate else 0.0
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
        lost, watched_s = self.losses, self.watched_s
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
