"""The exhaustive sweep: every point of a space, measured once, into a table that `replay:` can serve."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from polythrottle.backends.replay import Table
from polythrottle.domain.arrivals import CLOSED, Arrivals
from polythrottle.domain.errors import BadFile, InvalidInput, KnobAbsent, StorageError, TrialError
from polythrottle.domain.measurement import OFFERED, RECORDED, EnergyKind, Measurement, Window
from polythrottle.domain.ports import Device, Rewindable, Workload
from polythrottle.domain.space import Level, OperatingPoint, SearchSpace
from polythrottle.metering.point_measurement import measure
from polythrottle.storage.append_log import whole_bytes
from polythrottle.storage.tables import check_writable, csv_lines, read, write
from polythrottle.storage.untrusted import check_plain

if TYPE_CHECKING:
    import pandas as pd

_IDENTITY = ("device", "workload", "window")


@dataclass(frozen=True)
class Swept:
    """What a sweep did.

    Args:
        path: The table.
        points: How many points the space has.
        measured: How many were measured now.
        kept: How many were in the table already.
        failed: Points that could not be measured, and why; they are not in the table.
        energy_kind: How the joules came about.
        overloaded: How many points of the table did not serve what came: their row says by how much the queue grew,
            and none of them holds a limit.
    """

    path: Path
    points: int
    measured: int
    kept: int
    failed: tuple[tuple[OperatingPoint, str], ...]
    energy_kind: EnergyKind
    overloaded: int = 0

    def to_dataframe(self) -> "pd.DataFrame":
        """Return the table as a pandas frame, a row for each point; those that failed come last, with why.

        Raises:
            BadFile: If the table is not there any more.
        """
        import pandas as pd

        frame = read(self.path).typed()
        failed = [{**point, "failure": why} for point, why in self.failed]
        columns = {name: frame[name].tolist() + [row.get(name) for row in failed] for name in frame.columns}
        whys = [None] * len(frame) + [row["failure"] for row in failed]
        whole: pd.DataFrame = pd.DataFrame({**columns, "failure": pd.Series(whys, dtype="object")})
        return whole


def sweep(
    device: Device,
    workload: Workload,
    window: Window,
    path: Path,
    advanced: Callable[[int, int, OperatingPoint], None] = lambda done, total, point: None,
    arrivals: Arrivals = CLOSED,
) -> Swept:
    """Measure every point of a space into a replay table; a table that was begun is continued.

    Args:
        device: Not entered yet.
        workload: Serves queries on that device.
        window: How long to look at each point.
        path: The table; its ending says the format: ``.csv``, or ``.parquet``, which is written at the end from a
            ``.csv`` beside it.
        advanced: Told after each point: how many are done, of how many, and which.
        arrivals: When queries are meant to be sent.

    Raises:
        InvalidInput: If its ending is neither, or pyarrow is needed and not installed.
        BadFile: If the file holds something else than the beginning of this sweep.
        StorageError: If it cannot be written.
        TrialError: If no point at all could be measured.
    """
    check_writable(path)
    space = device.space * workload.space
    if not space.knobs:
        raise InvalidInput(f"{device.title} with {workload.uri} has no knob to sweep")
    load = f"{window.queries} queries, {window.duration_s:g} s"
    columns = RECORDED
    if not arrivals.closed:
        load = f"{load}, {arrivals}"
        columns = {**RECORDED, **OFFERED}
    identity = (device.uri, workload.uri, load)
    begun, kept = _unpacked(path, space, identity, tuple(columns))
    failures = _Failures(space)
    with device:
        for number, point in enumerate(space):
            if point not in kept and not failures.foreseen(point):
                try:
                    measurement = _visit(device, workload, window, number, point, arrivals)
                    _append(begun, [point[name] for name in space.names], columns, measurement, identity)
                except TrialError as error:
                    failures.add(point, error)
                    _give_up_if_hopeless(failures.points, number + 1, len(space))
            advanced(number + 1, len(space), point)
    measured = len(space) - len(kept) - len(failures.points)
    overloaded = sum(not row.keeps_up for row in Table.read(begun).measurements)
    if begun != path:
        # The rows go only once the Parquet file stands: a crash between the two leaves both.
        write(read(begun).typed(), path)
        begun.unlink()
    return Swept(path, len(space), measured, len(kept), tuple(failures.points), device.energy_kind, overloaded)


class _Failures:
    """Points of a space that could not be measured, and why."""

    def __init__(self, space: SearchSpace) -> None:
        self._default = space.default
        self._absent: dict[str, str] = {}
        self.points: list[tuple[OperatingPoint, str]] = []

    def add(self, point: OperatingPoint, error: TrialError) -> None:
        """Enter what a point failed of."""
        if isinstance(error, KnobAbsent) and error.knob in self._default:
            self._absent[error.knob] = str(error)
        self.points.append((point, str(error)))

    def foreseen(self, point: OperatingPoint) -> bool:
        """Return whether a point fails by what is known already; it is entered then."""
        # A knob that this board lacks can stay at its default, and at no other level.
        why = next((why for name, why in self._absent.items() if point[name] != self._default[name]), None)
        if why is None:
            return False
        self.points.append((point, why))
        return True


def _visit(
    device: Device, workload: Workload, window: Window, number: int, point: OperatingPoint, arrivals: Arrivals
) -> Measurement:
    # By the point's number, so that a sweep that is continued measures what an unbroken one would have.
    if isinstance(device, Rewindable):
        device.rewind(number)
    return measure(device, workload, point, window, arrivals=arrivals)


def _give_up_if_hopeless(failed: list[tuple[OperatingPoint, str]], tried: int, points: int) -> None:
    if len(failed) == tried >= min(3, points):
        if tried == points:
            which = "no point could be measured"
        else:
            which = f"the first {tried} points could not be measured"
        raise TrialError(f"{which}; the last: {failed[-1][1]}")


def _unpacked(
    path: Path, space: SearchSpace, identity: tuple[str, ...], columns: tuple[str, ...]
) -> tuple[Path, frozenset[OperatingPoint]]:
    """Return the CSV file that rows are added to, and the points it holds: the table, or one beside a Parquet file."""
    begun = path
    if path.suffix != ".csv":
        # Rows cannot be appended to Parquet, whose index of columns comes last.
        begun = path.with_name(f"{path.name}.csv")
    # Rows that lie beside the table are of a sweep that was interrupted, and newer than what it holds.
    if begun.exists() or not path.exists():
        return begun, _begun(begun, space, identity, columns)
    table = read(path)
    _write(begun, "wb", csv_lines([list(table.names), *table.frame.to_numpy(dtype=object).tolist()]))
    try:
        return begun, _begun(begun, space, identity, columns)
    except BadFile as error:
        begun.unlink()
        # The user has named the table, and not the rows beside it.
        raise BadFile(str(error).replace(str(begun), str(path))) from error


def _begun(
    path: Path, space: SearchSpace, identity: tuple[str, ...], columns: tuple[str, ...]
) -> frozenset[OperatingPoint]:
    """Return the points an earlier sweep has put into the table; start the table if there is none."""
    header = csv_lines([[*space.names, *columns, *_IDENTITY]])
    begun = _content(path)
    if not begun.startswith(header) and not header.startswith(begun):
        raise BadFile(f"{path} is not the beginning of this sweep: its columns are others; give a new --out")
    whole = begun[: whole_bytes(begun)]
    if len(whole) <= len(header):
        _write(path, "wb", header)
        return frozenset()
    if len(whole) < len(begun):
        os.truncate(path, len(whole))
    _check_identity(path, identity)
    points = frozenset(Table.read(path).points)
    if strangers := [point for point in points if point not in space]:
        raise BadFile(f"{path} is not the beginning of this sweep: {dict(strangers[0])} is no point of it")
    return points


def _check_identity(path: Path, identity: tuple[str, ...]) -> None:
    """Check that every row was measured on the same device and workload, through the same window."""
    table = read(path)
    for name, wanted in zip(_IDENTITY, identity, strict=True):
        if strange := [text for text in table.texts(name) if text != wanted]:
            raise BadFile(f"{path} is another sweep: its {name} is {strange[0]}, not {wanted}; give a new --out")


def _content(path: Path) -> bytes:
    try:
        if path.exists() and not path.is_file():
            raise BadFile(f"{path} is not a regular file; a table is one")
        check_plain(path)
        if path.exists():
            return path.read_bytes()
        return b""
    except OSError as error:
        raise BadFile(f"{path} cannot be read: {error.strerror}") from error


def _append(
    path: Path,
    levels: list[Level],
    columns: Mapping[str, Callable[[Measurement], object]],
    measurement: Measurement,
    identity: tuple[str, ...],
) -> None:
    # The writer of CSV leaves the cell of a None empty.
    figures = [take(measurement) for take in columns.values()]
    _write(path, "ab", csv_lines([[*levels, *figures, *identity]]))


def _write(path: Path, mode: Literal["ab", "wb"], data: bytes) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, mode) as file:
            file.write(data)
    except OSError as error:
        raise StorageError(f"{path} cannot be written: {error.strerror}; the rows before are kept") from error
