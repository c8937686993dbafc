"""A device made of a table of recorded measurements: its space is exactly the rows, a visit returns what was recorded.

The format is that of the published tables: a header line, knob columns first, then measurements, SI units, one row per
configuration (`Table.read`). ``polythrottle sweep`` writes the same format.
"""

import json
import math
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from types import TracebackType

import numpy as np
from typing_extensions import Self

from polythrottle.domain.clock import VirtualClock
from polythrottle.domain.errors import BadFile, InvalidInput, KnobRejected, TrialError
from polythrottle.domain.measurement import EnergyKind, Latency, Measurement, Query, Reading
from polythrottle.domain.metrics import METRICS
from polythrottle.domain.space import BATCH_SIZE, Level, OperatingPoint, SearchSpace
from polythrottle.storage.cells import Cells
from polythrottle.storage.tables import header, read

_LATENCIES = {"mean": "latency_s", **{name: f"latency_{name}_s" for name in ("p50", "p90", "p95", "p99")}}
_REQUIRED = ("latency_s", "energy_j")
_INSTEAD = ("latency_s", "power_w")
_MEASURED = (*_LATENCIES.values(), "latency_std_s", "throughput_per_s", "power_w", "energy_j", "temperature_c")
_NOTES = ("energy_per_request_j", "epoch_time_s", "mean_batch_size", "observed_gpu_freq_hz", "core_mask", "n_repeats")
_LABELS = frozenset({"cpu_cluster"})
_LEAST = 1e-15
_MOST = 1e15
_SLOWEST_HZ = 1_000_000
_MAY_BE_ZERO = ("temperature_c", "latency_std_s")
_SMALL_IS_STOCK = frozenset({BATCH_SIZE, "gpu_min_hz"})
_OFFSET = "_offset_hz"


@dataclass(frozen=True)
class Table:
    """A recorded table: one point and one measurement per row.

    Args:
        path: Where it was read from.
        points: The configuration of each row, distinct.
        measurements: What was recorded there, in the same order.
        remarks: What a user should know of its figures, a line each.
    """

    path: Path
    points: tuple[OperatingPoint, ...]
    measurements: tuple[Measurement, ...]
    remarks: tuple[str, ...] = ()

    @classmethod
    def read(cls, path: Path) -> "Table":
        """Return the table in a CSV file, gzip-compressed or not, or in a Parquet file.

        The columns before the first measurement are the knobs. Columns behind it that are not known are kept out. Where
        no energy was recorded but power was, an item's energy is power over throughput.

        Raises:
            BadFile: If there is no such file, or it is no table: names the line and the column.
        """
        if not path.exists():
            raise BadFile(f"{path} does not exist; replay: takes the path of a .csv, .csv.gz or .parquet table")
        table = read(path, _needed(path))
        knobs = _knob_columns(path, table.names)
        kind, boundary = _provenance(path)
        if "energy_j" not in table.names:
            kind = EnergyKind.ESTIMATED
            boundary = f"power over throughput, {boundary}"
        points: dict[OperatingPoint, Cells] = {}
        measurements = []
        for cells in table.rows():
            row = _Row(cells)
            point = OperatingPoint({name: row.level(name) for name in knobs})
            if point in points:
                first = points[point].line
                again = cells.line
                raise BadFile(f"{path}, line {again}: repeats the configuration of line {first}")
            points[point] = cells
            measurements.append(row.measurement(kind, boundary))
        return cls(path, tuple(points), tuple(measurements), _remarks(path, table.names))._checked()

    def _checked(self) -> "Table":
        try:
            self.space  # noqa: B018  building it is the check
        except InvalidInput as error:
            raise BadFile(f"{self.path}: {error}") from error
        if len(kinds := {measurement.energy_kind for measurement in self.measurements}) > 1:
            raise BadFile(f"{self.path}: mixes {' and '.join(sorted(kinds))} energy, which do not compare")
        return self

    @cached_property
    def space(self) -> SearchSpace:
        """Exactly the recorded points; the default is the stock one among them."""
        return SearchSpace.of_points(self.points, self._stock, _LABELS)

    @property
    def _stock(self) -> OperatingPoint:
        """The recorded point nearest to an untuned device: clocks and limits high, offsets near 0, batches small."""

        def rank(point: OperatingPoint) -> tuple[float, ...]:
            clocks = {name: level for name, level in point.items() if not name.endswith(_OFFSET)}
            none = [-abs(_number(level)) for name, level in point.items() if name.endswith(_OFFSET)]
            high = [_number(level) for name, level in clocks.items() if name not in _SMALL_IS_STOCK]
            low = [-_number(level) for name, level in clocks.items() if name in _SMALL_IS_STOCK]
            return (*none, *high, *low)

        return max(self.points, key=rank)

    @property
    def fastest(self) -> Measurement:
        """The row of least mean latency, of those that kept up with their load: what relative limits multiply."""
        return min(self.measurements, key=_slowness)


class ReplayDevice:
    """A recorded table as a device; nothing is set, so nothing needs restoring.

    Args:
        path: The table.
        noise: Relative spread of the lognormal noise put on each visit; 0 returns what was recorded.
        seed: Of the noise.
        knobs: Which knobs to search, the others held at their default; all of them if None.

    Raises:
        BadFile: If the file is not a table.
        InvalidInput: If the noise is negative.
        UnknownName: If the table has no such knob.
    """

    def __init__(self, path: Path, *, noise: float = 0.0, seed: int = 0, knobs: Sequence[str] | None = None) -> None:
        if not 0 <= noise < 1:
            raise InvalidInput(f"noise is a fraction between 0 and 1, not {noise}")
        self._table = Table.read(path)
        if knobs is None:
            self._space = self._table.space
        else:
            self._space = _searched(self._table.space, knobs)
        self._noise = noise
        self._seed = seed
        self._trial = 0
        self._row = self._table.space.index(self._space.default)
        self._energy_j = 0.0
        self.clock = VirtualClock()

    @property
    def uri(self) -> str:
        """The URI that opens this table again."""
        options = [f"noise={self._noise:g}"] * (self._noise > 0) + [f"seed={self._seed}"] * (self._seed != 0)
        return f"replay:{self._table.path}{'?' if options else ''}{'&'.join(options)}"

    @property
    def title(self) -> str:
        """The name of the table."""
        return self._table.path.name.removesuffix(".gz").removesuffix(".csv")

    @property
    def space(self) -> SearchSpace:
        """Exactly the recorded points, or those of them at which the knobs not searched keep their default."""
        return self._space

    @property
    def energy_kind(self) -> EnergyKind:
        """How the recorded joules came about; with noise put on them they are simulated."""
        if self._noise:
            return EnergyKind.SIMULATED
        return self._table.measurements[0].energy_kind

    @property
    def boundary(self) -> str:
        """What the recorded joules cover, as far as the table says."""
        return self._table.measurements[0].boundary

    @property
    def presets(self) -> Mapping[str, OperatingPoint]:
        """None: a table records no presets."""
        return {}

    @property
    def table(self) -> Table:
        """The recorded table."""
        return self._table

    @property
    def reference(self) -> Mapping[str, float]:
        """Every metric of the fastest row that is searched, by name: what relative limits multiply."""
        table = self._table
        fastest = min((table.measurements[table.space.index(point)] for point in self.space), key=_slowness)
        values = {name: fastest.metric(name) for name in METRICS}
        return {name: value for name, value in values.items() if value is not None}

    def apply(self, point: OperatingPoint) -> None:
        """Go to a recorded row.

        Raises:
            KnobRejected: If the point was not recorded.
        """
        if point not in self.space:
            raise KnobRejected(f"{dict(point)} was not recorded in {self.title}")
        self._row = self._table.space.index(point)

    def read(self) -> Reading:
        """Return the virtual time and the energy of the visits so far, in joules."""
        return Reading(self.clock.now(), self._energy_j)

    def rewind(self, number: int) -> None:
        """Draw the noise of trial ``number`` from its own stream."""
        self._trial = number

    def recall(self, point: OperatingPoint) -> Measurement:
        """Return what was recorded at a point, with noise if asked for; the virtual clock moves on by one batch.

        Raises:
            KnobRejected: If the point was not recorded.
        """
        self.apply(point)
        measured = self._table.measurements[self._row]
        self.clock.sleep(measured.latency.mean_s)
        self._energy_j += measured.energy_j
        if self._noise == 0:
            return measured
        return self._disturbed(measured)

    def _disturbed(self, measured: Measurement) -> Measurement:
        # Not `hash`, which differs from process to process.
        name = zlib.crc32(repr(self._table.space[self._row]).encode())
        slow, hot = np.exp(self._noise * np.random.default_rng((self._seed, self._trial, name)).standard_normal(2))
        times = {
            f"{stat}_s": None if value is None else value * float(slow)
            for stat, value in ((stat, measured.metric(stat)) for stat in _LATENCIES)
        }
        return replace(
            measured,
            energy_kind=EnergyKind.SIMULATED,
            latency=replace(measured.latency, **times),  # type: ignore[arg-type]
            power_w=None if measured.power_w is None else measured.power_w * float(hot),
            throughput_per_s=measured.throughput_per_s / float(slow),
            # Power times time: both errors reach it.
            energy_j=measured.energy_j * float(hot * slow),
        )

    def restore(self) -> None:
        """Return to the default row."""
        self.apply(self.space.default)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.restore()


def _slowness(measurement: Measurement) -> tuple[bool, float]:
    return not measurement.keeps_up, measurement.latency.mean_s


def _searched(space: SearchSpace, knobs: Sequence[str]) -> SearchSpace:
    """Return the points at which only these knobs move.

    Raises:
        UnknownName: If one is not a knob of the space.
    """
    for name in knobs:
        space.knob(name)
    return space.holding([name for name in space.names if name not in knobs])


def _knob_columns(path: Path, header: Sequence[str]) -> tuple[str, ...]:
    knobs = tuple(header[: min(header.index(name) for name in header if name in (*_MEASURED, *_NOTES))])
    if "" in header:
        raise BadFile(f"{path}, line 1: column {header.index('') + 1} has no name")
    if not knobs:
        raise BadFile(f"{path} has no knob column before {header[0]}; knobs come first, measurements after")
    return knobs


def _needed(path: Path) -> tuple[str, ...]:
    """Return which measurements a table must have: energy, or power where it has that alone."""
    with suppress(BadFile):  # what a table lacks is said of what it should have
        if "energy_j" not in header(path, _INSTEAD):
            return _INSTEAD
    return _REQUIRED


def _remarks(path: Path, names: Sequence[str]) -> tuple[str, ...]:
    """Return how energy is worked out where none was recorded."""
    if "energy_j" in names:
        return ()
    if "throughput_per_s" in names:
        how = "power_w / throughput_per_s"
    else:
        how = f"power_w * latency_s{' / batch_size' * ('batch_size' in names)} (closed loop)"
    return (f"{path.name} has no energy_j: energy per item is {how}",)


def _provenance(path: Path) -> tuple[EnergyKind, str]:
    """Return how the energy came about, by the manifest beside the table if it lists the table."""
    try:
        entries = json.loads((path.parent / "manifest.json").read_text(encoding="utf-8"))["tables"]
        entry = next(entry for entry in entries if entry["file"] == path.name)
    except (OSError, ValueError, KeyError, TypeError, StopIteration):
        return EnergyKind.RECORDED, f"as recorded in {path.name}"
    if entry.get("energy_scale") == "relative":
        kind = EnergyKind.RELATIVE
    else:
        kind = EnergyKind.MEASURED
    return kind, f"as recorded by {entry.get('source', 'the source')} on {entry.get('device', 'the device')}"


@dataclass(frozen=True)
class _Row:
    """One line of a table, still as text."""

    cells: Cells

    def text(self, name: str) -> str:
        """Return what is there; empty if the column is not."""
        return self.cells.cells.get(name, "").strip()

    def level(self, name: str) -> Level:
        """Return a knob's level: a whole number, another number, or a label; a clock is in Hz, not in MHz."""
        text = self.text(name)
        try:
            value = float(text)
        except ValueError:
            value = math.nan if not text else math.inf
            if text and text.lower() not in ("nan", "inf", "-inf"):
                return text
        if not math.isfinite(value):
            raise BadFile(f"{self._where(name)}: the level {text!r} is not a finite number")
        if name.endswith("_hz") and not name.endswith(_OFFSET) and value < _SLOWEST_HZ:
            hint = ""
            if value > 0:
                hint = f"; {text} MHz are {value * 1e6:.0f}"
            raise BadFile(f"{self._where(name)}: {text} is no clock in Hz, of which the least is {_SLOWEST_HZ:,}{hint}")
        if value == int(value):
            return int(value)
        return value

    def number_in(self, name: str) -> float | None:
        """Return a measurement, or None if the field is empty or the column absent."""
        text = self.text(name)
        if not text:
            return None
        try:
            value = float(text)
        except ValueError:
            raise BadFile(f"{self._where(name)}: {text!r} is not a number") from None
        if not math.isfinite(value) or (value <= 0 and name not in _MAY_BE_ZERO):
            raise BadFile(f"{self._where(name)}: {text} must be a finite number above zero")
        if not _LEAST <= value <= _MOST and name not in _MAY_BE_ZERO:
            raise BadFile(f"{self._where(name)}: {text} is of a size that does not occur")
        return value

    def needed(self, name: str) -> float:
        """Return a measurement that has to be there."""
        value = self.number_in(name)
        if value is None:
            raise BadFile(f"{self._where(name)}: the field is empty, but every row needs it")
        return value

    def measurement(self, kind: EnergyKind, boundary: str) -> Measurement:
        """Return what the row recorded; its own ``energy_kind`` column overrides ``kind``."""
        mean_s = self.needed("latency_s")
        percentiles = {f"{name}_s": self.number_in(column) for name, column in _LATENCIES.items() if name != "mean"}
        throughput = self.number_in("throughput_per_s") or self._batch() / mean_s
        recorded = "energy_j" in self.cells.cells
        if recorded:
            power_w = self.number_in("power_w")
        else:
            power_w = self.needed("power_w")
        if recorded or power_w is None:
            energy_j = self.needed("energy_j")
        else:
            energy_j = power_w / throughput
        return Measurement(
            Latency(mean_s, **percentiles, std_s=self.number_in("latency_std_s")),  # type: ignore[arg-type]
            energy_j,
            throughput,
            power_w,
            self._kind(kind),
            self.text("boundary") or boundary,
            self.number_in("temperature_c"),
            offered_per_s=self.number_in("offered_per_s"),
            backlog_per_s=self.number_in("backlog_per_s"),
        )

    def _batch(self) -> float:
        return self.number_in(BATCH_SIZE) or 1.0

    def _kind(self, kind: EnergyKind) -> EnergyKind:
        text = self.text("energy_kind") or kind
        if text not in tuple(EnergyKind):
            raise BadFile(f"{self._where('energy_kind')}: {text!r} is not one of {', '.join(EnergyKind)}")
        return EnergyKind(text)

    def _where(self, name: str) -> str:
        return f"{self.cells.path}, line {self.cells.line}, column {name}"


def _number(level: Level) -> float:
    if isinstance(level, str):
        return 0.0
    return float(level)


class RecordedWorkload:
    """The workload a replay table brings: it was served when the table was recorded, and is not served again.

    Args:
        notes: What a user should read beside the figures.
    """

    uri = "recorded"
    space = SearchSpace.unit()

    def __init__(self, notes: tuple[str, ...] = ()) -> None:
        self.notes = notes

    def apply(self, point: OperatingPoint) -> None:
        """Do nothing: a table's knobs all belong to the device."""

    def query(self) -> Query:
        """Refuse: a recorded device is asked for whole measurements.

        Raises:
            TrialError: Always.
        """
        raise TrialError("a recorded workload cannot be queried again")

    def close(self) -> None:
        """Do nothing."""
