"""A job's files, whole or not there: checkpoints with a checksum, and the served model with the one before."""

import json
import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from polythrottle.domain.errors import BadFile, StorageError
from polythrottle.storage.atomic_file import replace_file
from polythrottle.training.checkpoints import (
    HEAD_BYTES,
    KEPT,
    SUFFIX,
    check_state,
    fields_of,
    newest_whole,
    read_head,
    sealed,
)


def put_json(path: Path, document: Any) -> None:
    """Write a JSON document whole or not at all, so that after a power cut it is the old one or the new one.

    Raises:
        StorageError: If it cannot be written.
    """
    replace_file(path, json.dumps(document, allow_nan=False).encode() + b"\n")


def read_json(path: Path) -> Any:
    """Return a JSON document; None if there is no such file.

    Raises:
        BadFile: If it cannot be read, is none, or holds a number that is not finite.
    """
    try:
        return json.loads(path.read_bytes(), parse_float=_finite, parse_constant=_finite)
    except FileNotFoundError:
        return None
    except OSError as err:
        raise BadFile(f"{path} cannot be read: {err.strerror}") from err
    except (ValueError, RecursionError) as err:
        raise BadFile(f"{path} is damaged: {str(err)[:80]}") from err


def _finite(text: str) -> float:
    """Return a number.

    Raises:
        ValueError: If it is not finite: Python reads such numbers, but JSON has none.
    """
    if not math.isfinite(value := float(text)):
        raise ValueError(f"{text[:20]} is no number")
    return value


def swap_model(served: Path, data: bytes) -> Path | None:
    """Replace the served model, keeping the one before beside it; at any instant the served file is whole.

    Returns:
        The file kept; None if nothing was served before.

    Raises:
        StorageError: If it cannot be written; what was served still is.
    """
    kept = None
    if served.exists():
        kept = previous_model(served)
    if kept is not None:
        replace_file(kept, _served_bytes(served))
    replace_file(served, data)
    return kept


def roll_back_model(served: Path) -> None:
    """Serve the model before the last `swap` again.

    Raises:
        BadFile: If none was kept.
        StorageError: If it cannot be written; what was served still is.
    """
    kept = previous_model(served)
    if not kept.is_file():
        raise BadFile(f"there is nothing to go back to: {kept} does not exist")
    replace_file(served, _served_bytes(kept))


def previous_model(served: Path) -> Path:
    """Return where the model before the served one is kept."""
    return served.with_name(f"{served.stem}.previous{served.suffix}")


def _served_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as err:
        raise StorageError(f"{path} cannot be read: {err.strerror}; nothing was changed") from err


# Checkpoints of a job: where it stands and what it has learnt, one file per step in the job's folder.


@dataclass(frozen=True)
class JobPosition:
    """Where a job stands.

    Args:
        step: Steps done.
        epoch: The one that has begun, from 0.
        position: Samples of it that are done.
        listing: Digest of the listing the epoch goes by; empty before its first step.
        loss: Mean loss of the last step; None before the first.
        written_s: When this was written, in seconds since 1970.
    """

    step: int = 0
    epoch: int = 0
    position: int = 0
    listing: str = ""
    loss: float | None = None
    written_s: float = 0.0


@dataclass(frozen=True)
class Checkpoint:
    """A place and what was learnt until there.

    Args:
        place: Where.
        learnt: Bytes that only the trainer reads.
    """

    place: JobPosition
    learnt: bytes


def write_checkpoint(folder: Path, checkpoint: Checkpoint) -> None:
    """Write a checkpoint, and then drop all but the newest two.

    Raises:
        StorageError: If it cannot be written; the older ones stay.
    """
    data = sealed(asdict(checkpoint.place), checkpoint.learnt)
    replace_file(folder / f"{checkpoint.place.step:09d}{SUFFIX}", data)
    for old in _paths(folder)[KEPT:]:
        with suppress(OSError):  # one too many does no harm
            old.unlink(missing_ok=True)


def newest_checkpoint(folder: Path) -> tuple[Checkpoint | None, tuple[str, ...]]:
    """Return the newest whole checkpoint, None if there is none at all, and the names of damaged ones before it.

    Raises:
        BadFile: If there are some but none is whole.
    """
    found, damaged = newest_whole(_paths(folder), _whole_checkpoint)
    names = tuple(path.name for path, _ in damaged)
    if found is None and names:
        raise BadFile(f"no checkpoint in {folder} is whole ({', '.join(names)}); begin a new job in another folder")
    return found, names


def newest_place(folder: Path) -> JobPosition | None:
    """Return where the newest checkpoint says that a job stands; None if there is none that says so.

    Only its first line is read, so that a look is cheap: whether what follows is whole is not asked.
    """
    for path in _paths(folder):
        with suppress(OSError, BadFile), path.open("rb") as file:
            return _place(read_head(file.read(HEAD_BYTES)))
    return None


def _whole_checkpoint(path: Path) -> Checkpoint:
    """Return a checkpoint.

    Raises:
        BadFile: If it is not whole, or of a newer format.
    """
    try:
        data = path.read_bytes()
        head = read_head(data)
        learnt = data.partition(b"\n")[2]
        check_state(head, learnt)
        return Checkpoint(_place(head), learnt)
    except (OSError, BadFile) as err:
        raise BadFile(f"{path} is no whole checkpoint") from err


def _place(head: Mapping[str, Any]) -> JobPosition:
    try:
        return JobPosition(**fields_of(head))
    except TypeError as err:
        raise BadFile("its first line does not say where a job stands") from err


def _paths(folder: Path) -> list[Path]:
    """Return the checkpoints of a job, newest first."""
    return sorted((path for path in folder.glob(f"*{SUFFIX}") if path.stem.isdecimal()), reverse=True)


def next_position(place: JobPosition, samples: int, of: int, listing: str) -> JobPosition:
    """Return the place one step further.

    Args:
        place: Where it was.
        samples: Of the step.
        of: Samples of the epoch.
        listing: Digest of the epoch's listing.
    """
    position = place.position + samples
    if position >= of:
        return replace(place, step=place.step + 1, epoch=place.epoch + 1, position=0, listing="")
    return replace(place, step=place.step + 1, position=position, listing=listing)
