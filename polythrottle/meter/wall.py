"""A device's joules against those of an external meter: a factor, how sure it is, and what the meter sees besides.

A straight line is fitted through mean powers over equal times, the meter's clock first shifted to where both go
together best. The slope is the factor. A constant, such as a fan or a carrier board the sensor does not see, is shown
and left out: it does not depend on the point. The two-run shape, record and then compare, is that of MLPerf Power.
"""

import csv
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from polythrottle.errors import BadFile, InvalidInput
from polythrottle.sensors import Sensor

Array = NDArray[np.float64]
_LEAST_PAIRS, _LEAST_CORRELATION = 10, 0.8
_AS_GOOD, _MOSTLY = 0.02, 0.8


@dataclass(frozen=True)
class WallFit:
    """A device's power against that of an external meter.

    Args:
        factor: What the device's joules are multiplied by.
        factor_sd: One standard deviation of it, as a fraction.
        constant_w: What the meter sees besides, whatever the load.
        residual_w: Deviation of single powers from the line.
        shift_s: By how much the meter's clock is ahead.
        pairs: Of how many powers that is made.
        correlation: Between the two.
    """

    factor: float
    factor_sd: float
    constant_w: float
    residual_w: float
    shift_s: float
    pairs: int
    correlation: float

    def applied(self, sensor: Sensor, name: str) -> Sensor:
        """Return a sensor with this factor.

        Args:
            sensor: Before.
            name: Of the meter's log.
        """
        return replace(sensor, factor=self.factor, factor_sd=self.factor_sd, source=f"wall meter, {name}")


def fit_wall(device: Sequence[tuple[float, float]], wall: Sequence[tuple[float, float]]) -> WallFit:
    """Return how a device's power goes with that of an external meter: least squares with an intercept.

    Args:
        device: Times in seconds and running total of joules, in order.
        wall: Times in seconds, of whatever clock, and watts; one a second is enough.

    Raises:
        InvalidInput: If they have too little in common to say.
    """
    energy, meter = np.array(device, dtype=float), np.array(wall, dtype=float)
    if len(energy) < _LEAST_PAIRS or len(meter) < _LEAST_PAIRS:
        raise InvalidInput(f"a calibration needs {_LEAST_PAIRS} readings of both, not {len(energy)} and {len(meter)}")
    if np.any(np.diff(meter[:, 0]) <= 0) or not np.all(np.isfinite(meter)):
        raise InvalidInput("the meter's times must rise, and its powers be numbers")
    ours_w, theirs_w, shift_s = _aligned(energy, meter)
    correlation = _correlation(ours_w, theirs_w)
    if correlation < _LEAST_CORRELATION:
        raise InvalidInput(
            f"the meter's log does not go with the device's power (correlation {correlation:.2f}); let it record "
            f"all of a run of polythrottle calibrate"
        )
    return _line(ours_w, theirs_w, shift_s, correlation)


def _aligned(energy: Array, meter: Array) -> tuple[Array, Array, float]:
    """Return both powers at the shift where they go together best; of several, the longest overlap."""
    pairs = [_paired(energy, meter, shift) for shift in _shifts(energy, meter).tolist()]
    found = [_correlation(ours_w, theirs_w) for ours_w, theirs_w, _ in pairs]
    good = [pair for pair, value in zip(pairs, found, strict=True) if value >= max(found) - _AS_GOOD]
    longest = max(len(pair[0]) for pair in good)
    nearly = [(value, pair) for value, pair in zip(found, pairs, strict=True) if len(pair[0]) >= _MOSTLY * longest]
    return max(nearly, key=lambda each: each[0])[1]


def _line(ours_w: Array, theirs_w: Array, shift_s: float, correlation: float) -> WallFit:
    design = np.column_stack([ours_w, np.ones_like(ours_w)])
    (slope, constant), *_ = np.linalg.lstsq(design, theirs_w, rcond=None)
    rest = theirs_w - design @ np.array([slope, constant])
    residual = math.sqrt(float(rest @ rest) / (len(rest) - 2))
    spread = math.sqrt(float(np.sum((ours_w - ours_w.mean()) ** 2)))
    return WallFit(
        float(slope), residual / spread / float(slope), float(constant), residual, shift_s, len(rest), correlation
    )


def _shifts(energy: Array, meter: Array) -> Array:
    """Return by how much the meter's clock may be ahead: every half period over all overlaps of half a record."""
    period_s = float(np.median(np.diff(meter[:, 0])))
    least_s = min(energy[-1, 0] - energy[0, 0], meter[-1, 0] - meter[0, 0]) / 2
    first, last = meter[0, 0] - energy[-1, 0] + least_s, meter[-1, 0] - energy[0, 0] - least_s
    return np.arange(first, last + period_s / 2, period_s / 2)


def _paired(energy: Array, meter: Array, shift_s: float) -> tuple[Array, Array, float]:
    """Return mean power of both between the meter's readings, where both are known."""
    at_s = meter[:, 0] - shift_s
    inside = np.flatnonzero((at_s >= energy[0, 0]) & (at_s <= energy[-1, 0]))
    if len(inside) < _LEAST_PAIRS:
        return np.zeros(0), np.zeros(0), shift_s
    ours_w = np.diff(np.interp(at_s[inside], energy[:, 0], energy[:, 1])) / np.diff(at_s[inside])
    theirs_w = np.array([(meter[i, 1] + meter[j, 1]) / 2 for i, j in pairwise(inside.tolist())])
    return ours_w, theirs_w, float(shift_s)


def _correlation(ours_w: Array, theirs_w: Array) -> float:
    if len(ours_w) < _LEAST_PAIRS - 1 or ours_w.std() == 0 or theirs_w.std() == 0:
        return -1.0
    return float(np.corrcoef(ours_w, theirs_w)[0, 1])


def read_wall(path: Path, column: str | None = None, time_column: str | None = None) -> tuple[tuple[float, float], ...]:
    """Return the log of an external meter: times in seconds and watts.

    Args:
        path: A CSV file with a header.
        column: Which column is the power; the only one whose name says power or ends in ``_w`` if None.
        time_column: Which is the time, in seconds; the first whose name says time if None.

    Raises:
        BadFile: If there is no such file or column, or a line is not two numbers.
    """
    try:
        with open(path, encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise BadFile(f"{path} cannot be read: {error}") from error
    if not rows:
        raise BadFile(f"{path} holds no reading")
    power = column or _named(path, rows[0], lambda name: "power" in name or name.endswith(("_w", "(w)", "watts")))
    time = time_column or _named(path, rows[0], lambda name: "time" in name or name in ("t", "t_s"))
    try:
        return tuple((float(row[time]), float(row[power])) for row in rows)
    except KeyError as error:
        raise BadFile(f"{path} has no column {error}; it has {', '.join(rows[0])}") from error
    except (TypeError, ValueError) as error:
        raise BadFile(f"{path} holds something that is not a number: {error}") from error


def _named(path: Path, row: Mapping[str, str], fits: Callable[[str], bool]) -> str:
    found = [name for name in row if name and fits(name.strip().lower())]
    if not found:
        raise BadFile(f"{path}: say which column it is with --column; it has {', '.join(map(str, row))}")
    return found[0]
