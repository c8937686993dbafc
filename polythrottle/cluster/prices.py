"""Spot prices along time, from a recorded table of price changes: each holds until the next."""

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import timezone
from functools import cached_property
from itertools import pairwise
from pathlib import Path

from polythrottle.cells import Cells
from polythrottle.errors import InvalidInput
from polythrottle.tables import header, read

_PRICE, _TYPE = "price_usd_per_h", "instance_type"
_CHANGES = ("timestamp", "zone", _TYPE, "product", _PRICE)
_DAILY = ("date", "region", _TYPE, _PRICE)


@dataclass(frozen=True)
class History:
    """The price of one machine type in one zone along time, recorded.

    Attributes:
        name: Zone and type, for people.
        times_s: Rising times of the changes, in seconds since 1970.
        usd_per_h: The price from each of them on.
        ends_s: Until when the record goes; what a price was after that is not known.
    """

    name: str
    times_s: tuple[float, ...]
    usd_per_h: tuple[float, ...]
    ends_s: float

    def __post_init__(self) -> None:
        if not self.times_s or len(self.times_s) != len(self.usd_per_h):
            raise InvalidInput("a history of prices has a price for each of its times")
        if any(a >= b for a, b in pairwise((*self.times_s, self.ends_s))):
            raise InvalidInput("the times of a history of prices rise")

    def at(self, time_s: float) -> float | None:
        """Return the price at a time in seconds since 1970; None outside the record."""
        if not self.times_s[0] <= time_s <= self.ends_s:
            return None
        return self.usd_per_h[bisect_right(self.times_s, time_s) - 1]

    def spent_usd(self, begin_s: float, end_s: float) -> float:
        """Return what a machine costs between two times within the record, in dollars."""
        inner = self.times_s[bisect_right(self.times_s, begin_s) : bisect_right(self.times_s, end_s)]
        return sum((b - a) * (self.at(a) or 0.0) for a, b in pairwise((begin_s, *inner, end_s))) / 3600

    def times(self, machines: int) -> "History":
        """Return the price of several machines together."""
        return replace(self, usd_per_h=tuple(price * machines for price in self.usd_per_h))

    @cached_property
    def mean_usd_per_h(self) -> float:
        """Return the mean price over the record."""
        begin_s = self.times_s[0]
        return self.spent_usd(begin_s, self.ends_s) / ((self.ends_s - begin_s) / 3600)


def read_histories(path: Path, instance_type: str = "", zone: str = "", product: str = "") -> tuple[History, ...]:
    """Return the histories in a table of price changes, one per zone, type and product.

    Args:
        path: A table with the columns timestamp, zone, instance_type, product and price_usd_per_h, or date, region,
            instance_type and price_usd_per_h.
        instance_type: Only this type.
        zone: Only zones, or regions, whose names begin like this.
        product: Only this product; by default ``Linux/UNIX`` where the table has it, and the first otherwise.

    Raises:
        BadFile: If the file is no such table.
        InvalidInput: If it holds nothing of the kind; says what it holds.
    """
    found: dict[tuple[str, str, str], dict[float, float]] = {}
    types, zones, ends_s = set(), set(), 0.0
    for cells, time_s, where, sold in _rows(path):
        kind, ends_s = cells.text(_TYPE), max(ends_s, time_s)
        types.add(kind)
        if instance_type not in ("", kind):
            continue
        zones.add(where)
        if where.startswith(zone) and product in ("", sold):
            found.setdefault((where, kind, sold), {})[time_s] = cells.number(_PRICE, 0.0)
    if not found:
        have = sorted(types) if instance_type not in types else sorted(zones)
        wanted = " ".join(part for part in (instance_type, zone, product) if part)
        raise InvalidInput(f"{path} has no prices of {wanted or 'anything'}; it has {', '.join(have[:12])}")
    return tuple(_history(key, changes, ends_s) for key, changes in sorted(_one_product(found, product).items()))


def _one_product(
    found: dict[tuple[str, str, str], dict[float, float]], product: str
) -> dict[tuple[str, str, str], dict[float, float]]:
    """Return one product only: the prices of Windows and Linux are not those of one machine."""
    products = {key[2] for key in found}
    kept = product or ("Linux/UNIX" if "Linux/UNIX" in products else min(products))
    return {key: changes for key, changes in found.items() if key[2] == kept}


def _rows(path: Path) -> Iterator[tuple[Cells, float, str, str]]:
    daily = _is_daily(path)
    for cells in read(path, _DAILY if daily else _CHANGES).rows():
        time_s = cells.time("date" if daily else "timestamp").replace(tzinfo=timezone.utc).timestamp()
        yield cells, time_s, cells.text("region" if daily else "zone"), "" if daily else cells.text("product")


def _is_daily(path: Path) -> bool:
    return "date" in (names := header(path)) and "timestamp" not in names


def _history(key: tuple[str, str, str], changes: dict[float, float], ends_s: float) -> History:
    times_s = sorted(changes)
    prices = tuple(changes[time_s] for time_s in times_s)
    return History(f"{key[0]} {key[1]}", tuple(times_s), prices, max(ends_s, times_s[-1] + 3600.0))
