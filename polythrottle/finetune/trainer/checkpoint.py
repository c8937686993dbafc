"""Checkpoints: where a job stands and what it has learnt, whole or not there, told apart by a checksum.

A file is one line of JSON and then bytes that only the trainer reads, so that where a job stands can be read without
torch. The two newest are kept; the newest that is whole counts.
"""

import hashlib
import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from polythrottle.errors import BadFile
from polythrottle.finetune.trainer.files import put

FORMAT = 1
KEPT = 2
_SUFFIX = ".checkpoint"
_HEAD_BYTES = 4096


@dataclass(frozen=True)
class Place:
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

    place: Place
    learnt: bytes


def write(folder: Path, checkpoint: Checkpoint) -> None:
    """Write a checkpoint, and then drop all but the newest two.

    Raises:
        StorageError: If it cannot be written; the older ones stay.
    """
    head = {"v": FORMAT, **asdict(checkpoint.place), "bytes": len(checkpoint.learnt)}
    sealed = {**head, "sha256": _checksum(head, checkpoint.learnt)}
    data = json.dumps(sealed, allow_nan=False).encode() + b"\n" + checkpoint.learnt
    put(folder / f"{checkpoint.place.step:09d}{_SUFFIX}", data)
    for old in _paths(folder)[KEPT:]:
        with suppress(OSError):  # one too many does no harm
            old.unlink(missing_ok=True)


def newest(folder: Path) -> tuple[Checkpoint | None, tuple[str, ...]]:
    """Return the newest whole checkpoint, None if there is none at all, and the names of damaged ones before it.

    Raises:
        BadFile: If there are some but none is whole.
    """
    damaged: list[str] = []
    for path in _paths(folder):
        try:
            return _read(path), tuple(damaged)
        except BadFile:
            damaged.append(path.name)
    if damaged:
        raise BadFile(f"no checkpoint in {folder} is whole ({', '.join(damaged)}); begin a new job in another folder")
    return None, ()


def newest_place(folder: Path) -> Place | None:
    """Return where the newest checkpoint says that a job stands; None if there is none that says so.

    Only its first line is read, so that a look is cheap: whether what follows is whole is not asked.
    """
    for path in _paths(folder):
        with suppress(OSError, ValueError, TypeError, AttributeError, RecursionError), path.open("rb") as file:
            return _place(json.loads(file.readline(_HEAD_BYTES)))
    return None


def _read(path: Path) -> Checkpoint:
    """Return a checkpoint.

    Raises:
        BadFile: If it is not whole, or of a newer format.
    """
    try:
        line, _, learnt = path.read_bytes().partition(b"\n")
        head: dict[str, Any] = json.loads(line)
        told = head.pop("sha256")
        if head["v"] != FORMAT or told != _checksum(head, learnt):
            raise ValueError("checksum")
        place = _place(head)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as err:
        raise BadFile(f"{path} is no whole checkpoint") from err
    return Checkpoint(place, learnt)


def _place(head: dict[str, Any]) -> Place:
    return Place(**{name: value for name, value in head.items() if name not in ("v", "bytes", "sha256")})


def _paths(folder: Path) -> list[Path]:
    """Return the checkpoints of a job, newest first."""
    return sorted(_checkpoints(folder), reverse=True)


def _checkpoints(folder: Path) -> Iterator[Path]:
    return (path for path in folder.glob(f"*{_SUFFIX}") if path.stem.isdecimal())


def _checksum(head: dict[str, Any], learnt: bytes) -> str:
    return hashlib.sha256(json.dumps(head).encode() + b"\n" + learnt).hexdigest()


def moved(place: Place, samples: int, of: int, listing: str) -> Place:
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
