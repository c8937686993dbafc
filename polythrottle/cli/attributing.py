"""The table that `polythrottle measure --attribute` writes: what each request of a window took, and what nobody did."""

import csv
import io
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from polythrottle.errors import InvalidInput, StorageError
from polythrottle.units import show

if TYPE_CHECKING:
    from polythrottle.measurement import Measurement
    from polythrottle.meter import Attribution
AttributeOption = Annotated[
    Path | None,
    typer.Option("--attribute", metavar="FILE", help="Write each request's share of the joules to a table (.csv)."),
]
COLUMNS = ("request", "intended_s", "start_s", "end_s", "within", "items", "energy_j", "idle_share_j",
           "energy_kind", "boundary")  # fmt: skip
IDLE = "idle"


class Attributing:
    """A table of the requests of one measurement: checked before it, written after it.

    Args:
        path: A ``.csv`` file; an older table of this kind is replaced.

    Raises:
        InvalidInput: If its name does not end in ``.csv``.
        StorageError: If something else is there, or its folder is none that can be written.
    """

    def __init__(self, path: Path) -> None:
        _check_replaceable(path)
        self._path, self._windows = path, list["Attribution"]()

    def keep(self, found: "Attribution") -> None:
        """Take the requests of the window."""
        self._windows.append(found)

    @property
    def _kept(self) -> "Attribution":
        return self._windows[-1]

    def written(self, measured: "Measurement") -> StorageError | None:
        """Write a row for each request in the order they were meant to be sent, the last for what nobody took.

        Returns:
            Why it could not be written; None if it was.
        """
        from polythrottle.catalog.profiles import replace_file

        text = io.StringIO()
        rows = csv.writer(text, lineterminator="\n")
        rows.writerow(COLUMNS)
        rows.writerows((*row, measured.energy_kind, measured.boundary) for row in _rows(self._kept))
        try:
            replace_file(self._path, text.getvalue().encode())
        except StorageError as error:
            return error
        return None

    @property
    def document(self) -> dict[str, Any]:
        """What the JSON document of ``measure`` says of the table."""
        found = self._kept
        said = {"requests": len(found.requests), "meter_j": found.meter_j, "idle_j": found.idle_j}
        return {"attribution": {"table": str(self._path), **said}}

    def lines(self, measured: "Measurement") -> dict[str, str]:
        """Return what people are told of the table."""
        found = self._kept
        whole = [each.energy_j for each in found.requests if each.within == 1.0]
        each = f" took {show(min(whole), 'J')} to {show(max(whole), 'J')} each" if whole else ""
        joules = f"{show(found.idle_j, 'J')} of {show(found.meter_j, 'J')} {measured.energy_kind} went to nobody"
        return {"table": f"{self._path}: {len(found.requests):,} requests{each}; {joules}"}


def _check_replaceable(path: Path) -> None:
    if path.suffix != ".csv":
        raise InvalidInput(f"--attribute {path}: the table's name ends in .csv")
    folder = path.absolute().parent
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        raise StorageError(f"{path} cannot be written: {folder} is not a folder that can be written")
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass  # what rights alone do not tell: a folder of the kernel's, a file system that is read-only or full
        if path.exists() and not (path.is_file() and _begins_like_one(path)):
            raise StorageError(f"{path} is there already and no such table; name another file with --attribute")
    except OSError as error:
        raise StorageError(f"{path} cannot be written: {error.strerror}") from error


def _begins_like_one(path: Path) -> bool:
    header = ",".join(COLUMNS).encode()
    with path.open("rb") as file:
        return file.read(len(header)) in (header, b"")


def _rows(found: "Attribution") -> Iterator[tuple[object, ...]]:
    for number, each in enumerate(found.requests, start=1):
        times = (f"{time_s:.9f}" for time_s in (each.intended_s, each.start_s, each.end_s))
        yield number, *times, f"{each.within:.9g}", each.items, repr(each.energy_j), repr(each.idle_share_j)
    yield IDLE, "", f"{0.0:.9f}", f"{found.window_s:.9f}", "", "", repr(found.idle_j), ""
