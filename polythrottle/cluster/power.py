"""The power caps of a machine from a recorded table of power limits: smoothed, and interpolated where asked."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from math import isclose
from pathlib import Path
from typing import NamedTuple

from polythrottle.cluster.machine import Cap
from polythrottle.errors import BadFile, InvalidInput

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
    rows = _rows(path, batch_size)
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
    first = slowdowns[0] if slowdowns else 1.0
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
    found = list(caps[:1])
    for above, below in pairwise(caps):
        if above.limit_w is not None and below.limit_w is not None:
            parts = max(1, round((above.limit_w - below.limit_w) / step_w))
            found += [_between(above, below, part / parts) for part in range(1, parts)]
        found.append(below)
    return tuple(found)


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


def _rows(path: Path, batch_size: int | None) -> list[_Row]:
    from polythrottle.backends.replay import Table

    table = Table.read(path)
    knobs = set(table.points[0])
    if _LIMIT not in knobs:
        raise BadFile(f"{path} has no column {_LIMIT}; caps come from a table of power limits")
    if others := sorted(knobs - {_LIMIT, "batch_size"}):
        raise BadFile(f"{path} varies {', '.join(others)} beside {_LIMIT} and batch_size; caps need a table without")
    wanted = _batch(
        path, sorted({float(point["batch_size"]) for point in table.points if "batch_size" in point}), batch_size
    )
    rows = [
        _Row(float(point[_LIMIT]), measured.latency.mean_s or 0.0, measured.power_w or 0.0)
        for point, measured in zip(table.points, table.measurements, strict=True)
        if wanted is None or isclose(float(point["batch_size"]), wanted)
    ]
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
