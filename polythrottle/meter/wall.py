"""A device's joules against those of an external meter: a factor, how sure it is, and what the meter sees besides.

A straight line is fitted through mean powers over equal times, the meter's clock first shifted to where both go
together best. The slope is the factor. A constant, such as a fan or a carrier board the sensor does not see, is shown
and left out: it does not depend on the point. The two-run shape, record and then compare, is that of MLPerf Power.
"""

import csv
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from polythrottle.errors import BadFile, InvalidInput
from polythrottle.sensors import Sensor

Array = NDArray[np.float64]
_LEAST_PAIRS, _LEAST_CORRELATION, _LEAST_COVERED = 10, 0.8, 0.8
_AS_GOOD, _MOSTLY = 0.02, 0.8
_FACTORS = (0.2, 5.0)
"""What a factor can be: no supply wastes four fifths, and a sensor that sees less than a fifth is none."""
_REST = "(beyond the heading)"
_FINEST_S, _MOST_SHIFTS = 0.02, 200_000


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
        InvalidInput: If they have too little in common to say, or the factor is none that can be.
    """
    energy, meter = np.array(device, dtype=float), np.array(wall, dtype=float)
    _see_that_they_tell(energy, meter)
    ours_w, theirs_w, covered_s, shift_s = _aligned(energy, meter)
    correlation, length_s = _correlation(ours_w, theirs_w), float(energy[-1, 0] - energy[0, 0])
    if correlation is None:
        raise InvalidInput("wherever the meter's log is laid over the self-test, one of the two does not move")
    if correlation < _LEAST_CORRELATION:
        raise InvalidInput(
            f"the meter's log does not go with the device's power (correlation {correlation:.2f}); let it record "
            f"all of a run of polythrottle calibrate"
        )
    _see_that_it_covers(covered_s, length_s)
    return _checked(_line(ours_w, theirs_w, shift_s, correlation))


def _see_that_they_tell(energy: Array, meter: Array) -> None:
    """Raise InvalidInput if nothing can be learnt from them."""
    if len(energy) < _LEAST_PAIRS or len(meter) < _LEAST_PAIRS:
        raise InvalidInput(f"a calibration needs {_LEAST_PAIRS} readings of both, not {len(energy)} and {len(meter)}")
    if np.any(np.diff(meter[:, 0]) <= 0) or not np.all(np.isfinite(meter)):
        raise InvalidInput("the meter's times must rise, and its powers be numbers")
    if np.any(meter[:, 1] < 0):
        raise InvalidInput("the meter shows less than 0 W; see whether its clamp is the wrong way round")
    if np.any(np.diff(energy[:, 0]) <= 0) or not np.all(np.isfinite(energy)):
        raise InvalidInput("the self-test's times do not rise; run polythrottle calibrate again")
    _see_that_it_covers(float(meter[-1, 0] - meter[0, 0]), float(energy[-1, 0] - energy[0, 0]))
    if np.ptp(meter[:, 1]) == 0:
        raise InvalidInput(
            f"the meter did not move: it shows {meter[0, 1]:g} W all along; see whether it is the meter of this "
            f"machine, and the column that of the power"
        )


def _see_that_it_covers(covered_s: float, length_s: float) -> None:
    if covered_s < _LEAST_COVERED * length_s:
        raise InvalidInput(
            f"the meter's log covers {covered_s:.1f} s of the {length_s:.1f} s of the self-test; let it record all of "
            f"it, {_LEAST_COVERED:.0%} at least, with times in seconds"
        )


def _checked(fit: WallFit) -> WallFit:
    """Return a fit whose factor can be.

    Raises:
        InvalidInput: If it cannot.
    """
    least, most = _FACTORS
    if not least <= fit.factor <= most:
        raise InvalidInput(
            f"a factor of {fit.factor:.4g} cannot be right, only {least:g} to {most:g} can: see whether the column is "
            f"power and in watts (not mW or kW), and the meter that of this machine"
        )
    return fit


def _aligned(energy: Array, meter: Array) -> tuple[Array, Array, float, float]:
    """Return both powers, how long they cover, and the shift where they go together best; of several, the longest.

    Raises:
        InvalidInput: If they have too little in common at every shift.
    """
    found = [(_paired(energy, meter, shift), shift) for shift in _shifts(energy, meter).tolist()]
    rated = [(-1.0 if (value := _correlation(*pair[:2])) is None else value, pair, shift) for pair, shift in found]
    best = max((value for value, *_ in rated), default=-1.0)
    longest = max((len(pair[0]) for value, pair, _ in rated if value >= best - _AS_GOOD), default=0)
    if longest < _LEAST_PAIRS - 1:
        raise InvalidInput(f"the meter's log has fewer than {_LEAST_PAIRS} readings in the time of the self-test")
    nearly = [each for each in rated if len(each[1][0]) >= _MOSTLY * longest]
    _, (ours_w, theirs_w, covered_s), shift_s = max(nearly, key=lambda each: each[0])
    return ours_w, theirs_w, covered_s, shift_s


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
    """Return by how much the meter's clock may be ahead: every half period over all overlaps of half a record.

    Raises:
        InvalidInput: If there are too many to try.
    """
    step_s = max(float(np.median(np.diff(meter[:, 0]))) / 2, _FINEST_S)
    least_s = min(energy[-1, 0] - energy[0, 0], meter[-1, 0] - meter[0, 0]) / 2
    first, last = meter[0, 0] - energy[-1, 0] + least_s, meter[-1, 0] - energy[0, 0] - least_s
    if (last - first) / step_s > _MOST_SHIFTS:
        raise InvalidInput(
            f"the meter's log is {(meter[-1, 0] - meter[0, 0]) / 3600:.1f} h long; cut it down to the time around the "
            f"self-test, and see that its times are in seconds"
        )
    return np.arange(first, last + step_s, step_s)


def _paired(energy: Array, meter: Array, shift_s: float) -> tuple[Array, Array, float]:
    """Return mean power of both between the meter's readings, where both are known, and for how long that is."""
    ends_s = energy[[0, -1], 0] + shift_s
    first, last = np.searchsorted(meter[:, 0], ends_s[0], "left"), np.searchsorted(meter[:, 0], ends_s[1], "right")
    if last - first < _LEAST_PAIRS:
        return np.zeros(0), np.zeros(0), 0.0
    at_s, shown_w = meter[first:last, 0] - shift_s, meter[first:last, 1]
    ours_w = np.diff(np.interp(at_s, energy[:, 0], energy[:, 1])) / np.diff(at_s)
    return ours_w, (shown_w[1:] + shown_w[:-1]) / 2, float(at_s[-1] - at_s[0])


def _correlation(ours_w: Array, theirs_w: Array) -> float | None:
    """Return how two powers go together; None if one of them does not move."""
    if len(ours_w) < _LEAST_PAIRS - 1 or ours_w.std() == 0 or theirs_w.std() == 0:
        return None
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
    if path.exists() and not path.is_file():
        raise BadFile(f"{path} is no regular file")
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            rows = list(csv.DictReader(file, restkey=_REST))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise BadFile(f"{path} cannot be read: {why}") from error
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
