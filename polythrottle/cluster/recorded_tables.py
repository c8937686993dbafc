"""Tables of what was recorded, read in place, with one clear line per bad file: prices, power caps, machines, times.

The formats are those of the published tables (CM-DARE, transient-deep-learning, training_on_a_dime, Bamboo): CSV files
(`polythrottle.storage.tables`), units in the names of the columns. Columns that are not known are kept out.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from functools import cached_property, partial
from itertools import pairwise
from math import isclose
from pathlib import Path
from statistics import fmean, median, stdev
from typing import NamedTuple, TypeVar

from polythrottle.domain.errors import BadFile, InvalidInput
from polythrottle.domain.fleet.transient_machine import Cap, Network
from polythrottle.domain.space import BATCH_SIZE
from polythrottle.storage.cells import Cells
from polythrottle.storage.tables import header, read

# Spot prices along time, from a recorded table of price changes: each holds until the next.

_PRICE = "price_usd_per_h"
_TYPE = "instance_type"
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
    prices: dict[tuple[str, str, str], dict[float, float]] = {}
    types = set()
    zones = set()
    ends_s = 0.0
    for cells, time_s, where, sold in _price_rows(path):
        kind = cells.text(_TYPE)
        ends_s = max(ends_s, time_s)
        types.add(kind)
        if instance_type not in ("", kind):
            continue
        zones.add(where)
        if where.startswith(zone) and product in ("", sold):
            prices.setdefault((where, kind, sold), {})[time_s] = cells.number(_PRICE, 0.0)
    if not prices:
        if instance_type not in types:
            have = sorted(types)
        else:
            have = sorted(zones)
        wanted = " ".join(part for part in (instance_type, zone, product) if part)
        raise InvalidInput(f"{path} has no prices of {wanted or 'anything'}; it has {', '.join(have[:12])}")
    return tuple(_history(key, changes, ends_s) for key, changes in sorted(_one_product(prices, product).items()))


def _one_product(
    found: dict[tuple[str, str, str], dict[float, float]], product: str
) -> dict[tuple[str, str, str], dict[float, float]]:
    """Return one product only: the prices of Windows and Linux are not those of one machine."""
    products = {key[2] for key in found}
    kept = product or ("Linux/UNIX" if "Linux/UNIX" in products else min(products))
    return {key: changes for key, changes in found.items() if key[2] == kept}


def _price_rows(path: Path) -> Iterator[tuple[Cells, float, str, str]]:
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


# The power caps of a machine from a recorded table of power limits: smoothed, and interpolated where asked.

_LIMIT = "power_limit_w"


class _Row(NamedTuple):
    limit_w: float
    latency_s: float
    power_w: float


def caps_of_table(
    path: Path, batch_size: int | None = None, gpus: int = 1, table_gpus: int = 1, host_w: float = 0.0
) -> tuple[Cap, ...]:
    """Return the caps a replay table records, the highest limit first: it is the default.

    Args:
        path: A table with the column ``power_limit_w`` and perhaps ``batch_size``.
        batch_size: Which batch size, where the table has several.
        gpus: GPUs in the machine.
        table_gpus: GPUs whose power the table gives together.
        host_w: Power of the rest of the machine, in watts.

    Raises:
        BadFile: If it is no such table, or has no power.
        InvalidInput: If the batch size is not in the table or has to be named.
    """
    rows = _power_rows(path, batch_size)
    caps = [Cap(row.limit_w, row.latency_s / rows[0].latency_s, row.power_w * gpus / table_gpus) for row in rows]
    return tuple(replace(cap, power_w=cap.power_w + host_w) for cap in smoothed(caps))


def smoothed(caps: Sequence[Cap]) -> tuple[Cap, ...]:
    """Return caps by falling limit whose steps never get faster, and whose power never grows, as the limit falls.

    Recorded windows scatter by several per cent; taking the best of scattered rows would promise what is not there.
    Neighbours out of order are replaced by their mean (pool adjacent violators, Ayer et al. 1955).

    Args:
        caps: By falling limit.
    """
    slowdowns = _rising([cap.slowdown for cap in caps])
    powers = [-power for power in _rising([-cap.power_w for cap in caps])]
    first = 1.0
    if slowdowns:
        first = slowdowns[0]
    return tuple(
        Cap(cap.limit_w, slowdown / first, power) for cap, slowdown, power in zip(caps, slowdowns, powers, strict=True)
    )


def finer(caps: Sequence[Cap], step_w: float) -> tuple[Cap, ...]:
    """Return the caps and those between them, a step apart, on straight lines: estimated, not recorded.

    Args:
        caps: By falling limit; those without a limit stay as they are.
        step_w: Watts between neighbours, > 0.

    Raises:
        InvalidInput: If the step is not positive.
    """
    if not step_w > 0:
        raise InvalidInput(f"caps are a positive number of watts apart, not {step_w:g}")
    kept = list(caps[:1])
    for above, below in pairwise(caps):
        if above.limit_w is not None and below.limit_w is not None:
            parts = max(1, round((above.limit_w - below.limit_w) / step_w))
            kept += [_between(above, below, part / parts) for part in range(1, parts)]
        kept.append(below)
    return tuple(kept)


def _between(above: Cap, below: Cap, share: float) -> Cap:
    limit_w = (above.limit_w or 0) + ((below.limit_w or 0) - (above.limit_w or 0)) * share
    slowdown = above.slowdown + (below.slowdown - above.slowdown) * share
    return Cap(limit_w, slowdown, above.power_w + (below.power_w - above.power_w) * share)


def _rising(values: Sequence[float]) -> list[float]:
    """Return the nearest sequence that never falls, by least squares."""
    blocks: list[list[float]] = []
    for value in values:
        blocks.append([value, 1])
        while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:
            mean, count = blocks.pop()
            total = blocks[-1][1] + count
            blocks[-1] = [(blocks[-1][0] * blocks[-1][1] + mean * count) / total, total]
    return [mean for mean, count in blocks for _ in range(int(count))]


def _power_rows(path: Path, batch_size: int | None) -> list[_Row]:
    from polythrottle.backends.replay import Table

    table = Table.read(path)
    knobs = set(table.points[0])
    if _LIMIT not in knobs:
        raise BadFile(f"{path} has no column {_LIMIT}; caps come from a table of power limits")
    if others := sorted(knobs - {_LIMIT, BATCH_SIZE}):
        raise BadFile(f"{path} varies {', '.join(others)} beside {_LIMIT} and batch_size; caps need a table without")
    wanted = _batch(
        path, sorted({float(point[BATCH_SIZE]) for point in table.points if BATCH_SIZE in point}), batch_size
    )
    rows = [
        _Row(float(point[_LIMIT]), measured.latency.mean_s or 0.0, measured.power_w or 0.0)
        for point, measured in zip(table.points, table.measurements, strict=True)
        if wanted is None or isclose(float(point[BATCH_SIZE]), wanted)
    ]
    # Unknown power is never taken as 0 W: a cap that draws nothing would win every plan.
    if not all(row.power_w > 0 and row.latency_s > 0 for row in rows):
        raise BadFile(
            f"{path} does not say the power or the time of every row; caps need the columns power_w and latency_s"
        )
    return sorted(rows, reverse=True)


def _batch(path: Path, sizes: list[float], batch_size: int | None) -> float | None:
    if not sizes:
        return None
    if batch_size is None and len(sizes) == 1:
        return sizes[0]
    if batch_size not in sizes:
        have = ", ".join(f"{size:g}" for size in sizes)
        raise InvalidInput(
            f"{path} was recorded at batch sizes {have}; batch_size = {batch_size or 'none'} is not there"
        )
    return float(batch_size)


# Recorded clusters: how many machines a provider kept running at each moment, read in place from a table.

_TIME = "time_s"
_COUNT = "n_nodes"
_SHORTEST_S = 60.0
_MOST = 100_000


@dataclass(frozen=True)
class Trace:
    """Machines that ran along time, as recorded.

    Attributes:
        name: Where it comes from, for people.
        times_s: Rising times of the changes from the beginning of the record, in seconds; the first is 0.
        counts: Machines from each of them on.
        ends_s: How long the record is, in seconds.
        assumed_s: How much of that its last row is only taken to last, in seconds; 0 where the record says it itself.
    """

    name: str
    times_s: tuple[float, ...]
    counts: tuple[int, ...]
    ends_s: float
    assumed_s: float = 0.0

    def __post_init__(self) -> None:
        if not self.times_s or len(self.times_s) != len(self.counts) or self.times_s[0] != 0:
            raise InvalidInput("a trace begins at 0 s and has a number of machines for each time")
        if any(a >= b for a, b in pairwise(self.times_s)) or self.ends_s <= self.times_s[-1]:
            raise InvalidInput("the times of a trace rise, and it ends after its last change")
        if min(self.counts) < 0 or not max(self.counts):
            raise InvalidInput("a trace has at least one machine at some time, and never fewer than none")

    @property
    def most(self) -> int:
        """Return the most machines that ran together."""
        return max(self.counts)

    @property
    def losses(self) -> int:
        """Return how many machines were taken away."""
        return sum(max(0, before - after) for before, after in pairwise(self.counts))

    @property
    def machine_s(self) -> float:
        """Return the machine-seconds that were had."""
        spans = (b - a for a, b in pairwise((*self.times_s, self.ends_s)))
        return sum(count * span for count, span in zip(self.counts, spans, strict=True))


def read_trace(file: Path) -> Trace:
    """Return the trace in a table with the columns ``time_s`` and ``n_nodes`` (CSV, or CSV in gzip).

    Rows of the same time are one change. A machine-by-machine log that counts after each event is read the same way.
    A last row that repeats the number before it says when the record ends. One that changes it would last no time, and
    its losses would be none: it is taken to last as long as the middle one of the rows before it.

    Raises:
        BadFile: If the file cannot be read or is no such table; says which line is wrong.
    """
    counts: dict[float, int] = {}
    for cells in read(file, (_TIME, _COUNT)).rows():
        time_s = cells.number(_TIME, 0.0)
        number = cells.number(_COUNT, 0.0)
        if time_s < next(reversed(counts), time_s):
            raise cells.bad(_TIME, f"goes back to {time_s:g}; rows must be in the order of time")
        if number != int(number) or number > _MOST:
            raise cells.bad(_COUNT, f"is {number:g}; it needs a whole number of machines, at most {_MOST:,}")
        counts[time_s] = int(number)
    if len(counts) < 2:
        raise BadFile(f"{file} holds no trace: at least two different times are needed, found {len(counts)}")
    return _trace(file, counts)


def _trace(file: Path, seen: Mapping[float, int]) -> Trace:
    begins_s = min(seen)
    last_s = max(seen)
    if last_s - begins_s < _SHORTEST_S:
        raise BadFile(f"{file} holds no trace: it lasts {last_s - begins_s:g} s; at least {_SHORTEST_S:g} s are needed")
    kept: dict[float, int] = {}
    for time_s, count in seen.items():
        if not kept or count != next(reversed(kept.values())):
            kept[time_s - begins_s] = count
    length_s = last_s - begins_s
    assumed_s = 0.0
    if length_s in kept:
        assumed_s = median(b - a for a, b in pairwise(seen))
    try:
        return Trace(file.name, tuple(kept), tuple(kept.values()), length_s + assumed_s, assumed_s)
    except InvalidInput as error:
        raise BadFile(f"{file} holds no trace: {error}") from error


_Made = TypeVar("_Made")


def read_rows(path: Path, columns: Sequence[str], make: Callable[[Cells], _Made]) -> tuple[_Made, ...]:
    """Return the rows of a table, each made by a function of its cells.

    Raises:
        BadFile: If the file is no such table.
    """
    return tuple(make(cells) for cells in read(path, columns).rows())


@dataclass(frozen=True)
class StepRow:
    """Mean time of a training step of one network on one GPU type.

    Attributes:
        gpu: GPU model.
        network: What was trained; ``n_tensors`` is NaN where the table does not say.
        step_s: Mean time of a step in seconds; NaN where it is only asked for.
        std_s: Standard deviation between repeats, in seconds, or None.
        repeats: How many there were, or None.
        complete: Whether no optional cell of the row is empty; None where the table lacks the columns. Rows with
            holes come from another campaign of measurements.
    """

    gpu: str
    network: Network
    step_s: float
    std_s: float | None = None
    repeats: int | None = None
    complete: bool | None = None


def step_rows(path: Path, measured: bool = True) -> tuple[StepRow, ...]:
    """Return a table of step times, as in ``training_speed_by_network_cmdare.csv``: a row per network and GPU type.

    Args:
        path: The file; needs the columns gpu, network and flops, can have n_tensors, n_parameters, step_time_std_s,
            n_repeats and weight_mb.
        measured: Whether it needs step_time_s too.

    Raises:
        BadFile: If the file is no such table, or two networks have one name.
    """
    columns = ("gpu", "network", "flops", *(("step_time_s",) if measured else ()))
    rows = read_rows(path, columns, partial(_step_row, measured=measured))
    groups: dict[tuple[str, str], list[StepRow]] = {}
    for row in rows:
        groups.setdefault((row.gpu, row.network.name), []).append(row)
    return tuple(_merged(path, some) for some in groups.values())


def _merged(path: Path, rows: Sequence[StepRow]) -> StepRow:
    """Return repeats of one network on one GPU type as one row: their mean, and their deviation."""
    first = rows[0]
    if len(rows) == 1:
        return first
    if len({row.network.flops for row in rows}) > 1:
        raise BadFile(
            f"{path} has {first.network.name} on {first.gpu} with different flops; give two networks two names"
        )
    times_s = [row.step_s for row in rows]
    return replace(first, step_s=fmean(times_s), std_s=stdev(times_s), repeats=len(rows))


def _step_row(cells: Cells, measured: bool) -> StepRow:
    tensors = cells.perhaps("n_tensors")
    weight_mb = cells.perhaps("weight_mb")
    network = Network(
        cells.text("network"),
        cells.number("flops"),
        float("nan") if tensors is None else tensors,
        cells.perhaps("n_parameters", 0.0) or 0.0,
        weight_mb,
    )
    known = "weight_mb" in cells.cells
    return StepRow(
        cells.text("gpu"),
        network,
        cells.number("step_time_s") if measured else cells.perhaps("step_time_s") or float("nan"),
        cells.perhaps("step_time_std_s", 0.0),
        cells.whole("n_repeats") if cells.holds("n_repeats") else None,
        (weight_mb is not None and tensors is not None) if known else None,
    )


@dataclass(frozen=True)
class CheckpointRow:
    """Time of one checkpoint.

    Attributes:
        network: Name of the network.
        weight_mb: Size of its weights and of what its optimiser keeps, in MB.
        graph_mb: Size of its description (the meta-graph), in MB: grows with the number of tensors.
        local_s: Time to write it to the machine's disk, in seconds.
        remote_s: Time to write it to object storage, the local write included, in seconds.
    """

    network: str
    weight_mb: float
    graph_mb: float
    local_s: float
    remote_s: float


def is_of_checkpoints(path: Path) -> bool:
    """Return whether a table is one of checkpoint times and none of steps, by its columns.

    Raises:
        BadFile: If it cannot be read.
    """
    names = set(header(path))
    return bool({"local_write_s", "remote_write_s"} & names) and not {"flops", "step_time_s"} & names


def checkpoint_rows(path: Path) -> tuple[CheckpointRow, ...]:
    """Return a table of checkpoint times, in the format of ``gcp_checkpoint_times_cmdare.csv``.

    Raises:
        BadFile: If the file is no such table.
    """
    return read_rows(path, ("model", "weight_mb", "meta_mb", "local_write_s", "remote_write_s"), _checkpoint_row)


def _checkpoint_row(cells: Cells) -> CheckpointRow:
    number = cells.number
    return CheckpointRow(cells.text("model"), *map(number, ("weight_mb", "meta_mb", "local_write_s", "remote_write_s")))


@dataclass(frozen=True)
class LifetimeRow:
    """How long one transient machine was kept.

    Attributes:
        gpu: GPU model.
        region: Region or zone it stood in.
        start: When it began.
        least_s: Age at which it was last seen, in seconds.
        most_s: Age at which it was first missed, in seconds; None if it was not taken away while it was watched
            (stopped by its owner, by the provider's limit of 24 h, or at the end of the record).
    """

    gpu: str
    region: str
    start: datetime
    least_s: float
    most_s: float | None

    @property
    def lost(self) -> bool:
        """Whether it was taken away while it was watched."""
        return self.most_s is not None

    @property
    def age_s(self) -> float:
        """Return the age at which it was lost, the middle of what is known, or at which it was last seen."""
        if self.most_s is None:
            return self.least_s
        return (self.least_s + self.most_s) / 2


def lifetime_rows(path: Path) -> tuple[LifetimeRow, ...]:
    """Return a table of lifetimes, as in ``gcp_preemptible_lifetimes.csv`` or ``aws_spot_lifetimes_2020.csv``.

    Raises:
        BadFile: If the file is neither.
    """
    if {"lifetime_min_s", "created", "revoked"} & set(header(path, ("gpu", "zone"))):
        return read_rows(path, ("gpu", "zone", "created", "lifetime_min_s", "lifetime_max_s", "revoked"), _polled)
    return read_rows(path, ("gpu", "zone", "start", "lifetime_s", "reached_24h_cap"), _watched)


def _watched(cells: Cells) -> LifetimeRow:
    age_s = cells.number("lifetime_s", 0.0)
    most_s = None
    if not cells.flag("reached_24h_cap"):
        most_s = age_s
    return LifetimeRow(cells.text("gpu"), cells.text("zone"), cells.time("start"), age_s, most_s)


def _polled(cells: Cells) -> LifetimeRow:
    least_s = cells.number("lifetime_min_s", 0.0)
    most_s = None
    if cells.flag("revoked"):
        most_s = cells.number("lifetime_max_s", least_s)
    count = 1
    if cells.holds("n_gpus"):
        count = cells.whole("n_gpus")
    if count == 1:
        gpu = cells.text("gpu")
    else:
        gpu = f"{count}x {cells.text('gpu')}"
    return LifetimeRow(gpu, cells.text("zone"), cells.time("created"), least_s, most_s)
