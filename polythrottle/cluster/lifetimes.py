"""The lifetimes a catalogue can name: fitted to a recorded table, published, ended by the provider at an age."""

from dataclasses import dataclass, replace
from pathlib import Path

from polythrottle.cluster.lifetime import HOUR_S, Lifetime
from polythrottle.cluster.predict.pooled import pooled
from polythrottle.cluster.predict.prior import REVOCATIONS, prior
from polythrottle.cluster.tables import lifetime_rows
from polythrottle.errors import InvalidInput
from polythrottle.tables import header

DAY_S = 24 * HOUR_S
_STOPS_AFTER_A_DAY = "reached_24h_cap"


@dataclass(frozen=True)
class Limited:
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
        return self.before.survival(age_s) if age_s < self.limit_s else 0.0

    def hazard_per_s(self, age_s: float) -> float:
        """Return the hazard before the limit; from it on that of a machine which is gone within a second."""
        return self.before.hazard_per_s(age_s) if age_s < self.limit_s else 1.0

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
    return Limited(fitted, DAY_S) if stops else fitted, sum(mine)


def published_lifetime(gpu: str, region: str) -> tuple[Lifetime, str]:
    """Return what CM-DARE published of a GPU type in a region of Google's, stopped after 24 h, and whose it is.

    Where it has no such type or region the mean of its like is taken, and the text says so.
    """
    types = [row for row in REVOCATIONS if row.gpu == gpu]
    here = any(region.startswith(row.region) for row in types)
    whose = "" if here else f", mean of all {gpu}" if types else ", mean of other GPUs"
    return Limited(prior(gpu, region), DAY_S), f"published by CM-DARE, 2019{whose}"
