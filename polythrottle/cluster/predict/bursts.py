"""Machines that are lost together: a provider takes capacity back in bursts, so losses are not independent.

A burst is two or more losses of one series (GPU type and region) within a few minutes. The common-shock model (Marshall
and Olkin 1967, doi 10.1080/01621459.1967.10482885): shocks arrive at a rate, each takes any machine with a probability;
the rest are lost alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import groupby
from math import exp
from statistics import fmean

from polythrottle.cluster.lifetime import HOUR_S
from polythrottle.cluster.tables import LifetimeRow

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

    def all_kept(self, machines: int, span_s: float) -> float:
        """Return the probability that no shock takes any of some machines within a span in seconds."""
        return exp(-self.shocks_per_h * span_s / HOUR_S * (1 - (1 - self.share) ** machines))


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
