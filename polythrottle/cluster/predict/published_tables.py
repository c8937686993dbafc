"""Tables of what was recorded on transient machines: read in place, with one clear line per bad file.

The formats are those of the published tables (CM-DARE, transient-deep-learning, training_on_a_dime, Bamboo): CSV files
(`polythrottle.storage.tables`), units in the names of the columns. Columns that are not known are kept out.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from statistics import fmean, stdev
from typing import TypeVar

from polythrottle.domain.errors import BadFile
from polythrottle.domain.fleet.transient_machine import Network
from polythrottle.storage.cells import Cells
from polythrottle.storage.tables import header, read

_Row = TypeVar("_Row")


def read_rows(path: Path, columns: Sequence[str], make: Callable[[Cells], _Row]) -> tuple[_Row, ...]:
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
