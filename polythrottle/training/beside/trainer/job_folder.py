"""A job's folder, read and written without torch: its files, checkpoints, the listing of its data, where it stands.

Files are whole or not there: checkpoints have a checksum, and the served model is kept with the one before.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import zlib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polythrottle.domain.errors import BadFile, InvalidInput, PolythrottleError, StorageError
from polythrottle.storage import tables
from polythrottle.storage.atomic_file import is_locked, replace_file
from polythrottle.storage.json_channel import parse
from polythrottle.storage.untrusted import MALFORMED
from polythrottle.training.beside.trainer.driver import Task
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

if TYPE_CHECKING:
    from typing_extensions import Self


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
        return parse(path.read_bytes())
    except FileNotFoundError:
        return None
    except OSError as err:
        raise BadFile(f"{path} cannot be read: {err.strerror}") from err
    except (ValueError, RecursionError) as err:
        raise BadFile(f"{path} is damaged: {str(err).partition(' while ')[0][:80]}") from err


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
    """Serve the model before the last `swap_model` again.

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
        why = f"{', '.join(names)}: {damaged[0][1]}"
        raise BadFile(f"no checkpoint in {folder} is whole ({why}); begin a new job in another folder")
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
    except OSError as err:
        raise BadFile(f"it cannot be read: {err.strerror}") from err


def _place(head: Mapping[str, Any]) -> JobPosition:
    """Return the place that a file or a board names, which may be anything."""
    with suppress(TypeError, OverflowError):
        place = JobPosition(**fields_of(head))
        whole = all(type(each) is int and each >= 0 for each in (place.step, place.epoch, place.position))
        dated = 0 <= place.written_s < 2.5e11  # no date has a year beyond 9999
        if whole and dated and isinstance(place.listing, str) and (place.loss is None or math.isfinite(place.loss)):
            return place
    raise BadFile("it does not say where a job stands")


def _paths(folder: Path) -> list[Path]:
    """Return the checkpoints of a job, newest first."""
    return sorted((path for path in folder.glob(f"*{SUFFIX}") if path.stem.isdecimal()), reverse=True)


def next_position(place: JobPosition, samples: int, of: int, listing: str) -> JobPosition:
    """Return the place one step further."""
    position = place.position + samples
    if position >= of:
        return replace(place, step=place.step + 1, epoch=place.epoch + 1, position=0, listing="")
    return replace(place, step=place.step + 1, position=position, listing=listing)


# What a data folder holds: one file per sample, its label from ``labels.csv`` or from the folder it lies in.
#
# ``labels.csv`` has two columns, file (path below the folder) and label, with or without a line ``file,label`` above;
# one that separates them otherwise, as ``file;label`` does, says what stands between cells in the rows below.
# Without it each sample lies in a folder named like its label. Order and held-out samples follow from names alone, so
# that they are the same on every machine and with every version of every library.

SUFFIXES = (".npy", ".pt", ".png", ".jpg", ".jpeg", ".bmp")
LABELS = "labels.csv"
_HEAD = ("file", "label")
_MOST_LABELS = 5_000_000
_SHOWN = 4


@dataclass(frozen=True)
class Sample:
    """One file.

    Args:
        file: Path below the data folder, with slashes.
        label: Its label; empty if it has none.
        size_bytes: Its size when it was listed.
        changed_ns: When it was changed last, then.
    """

    file: str
    label: str
    size_bytes: int
    changed_ns: int


@dataclass(frozen=True)
class Listing:
    """What a data folder held at one time.

    Args:
        samples: Sorted by name.
    """

    samples: tuple[Sample, ...]

    @classmethod
    def scan(cls, folder: Path) -> Self:
        """Return what a folder holds now; files of other kinds are no samples.

        Raises:
            BadFile: If the folder or ``labels.csv`` cannot be read.
        """
        try:
            entries = sorted(_walk(folder, ""))
        except OSError as err:
            raise BadFile(f"the data folder {folder} cannot be read: {err.strerror}") from err
        table = _table(folder)
        return cls(tuple(Sample(file, _label(file, table), size, changed) for file, size, changed in entries))

    @cached_property
    def digest(self) -> str:
        """What tells this listing from others."""
        rows = [[each.file, each.label, each.size_bytes, each.changed_ns] for each in self.samples]
        return hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:16]

    def labelled(self, labels: Iterable[str]) -> Self:
        """Return the listing with only those samples that have one of some labels."""
        known = set(labels)
        return type(self)(tuple(each for each in self.samples if each.label in known))

    def split(self, share: float) -> tuple[list[int], list[int]]:
        """Return the rows to train on and the rows to validate with; a file stays on its side whatever comes or goes.

        Args:
            share: Of the samples that are held out; at least one is, and at least one is not.
        """
        drawn = [_draw("held out", each.file) for each in self.samples]
        rows = sorted(range(len(drawn)), key=drawn.__getitem__)
        count = sum(value < share for value in drawn)
        count = max(1, min(count, len(rows) - 1))
        return sorted(rows[count:]), sorted(rows[:count])

    def order(self, rows: Sequence[int], seed: int, epoch: int) -> list[int]:
        """Return the rows in the order of an epoch."""
        return sorted(rows, key=lambda row: (_draw(f"{seed}:{epoch}", self.samples[row].file), row))

    def differences(self, now: Listing) -> str:
        """Return what has changed since, in words; empty if nothing has."""
        old, new = ({each.file: each for each in listing.samples} for listing in (self, now))
        parts = (
            (sorted(set(new) - set(old)), "new"),
            (sorted(set(old) - set(new)), "gone"),
            (sorted(name for name in set(old) & set(new) if old[name] != new[name]), "changed"),
        )
        return "; ".join(f"{len(files)} {word}: {shown(files)}" for files, word in parts if files)

    def save(self, folder: Path) -> None:
        """Write it into a job's folder, named by its digest.

        Raises:
            StorageError: If it cannot be written.
        """
        path = listing_path(folder, self.digest)
        if not path.exists():
            put_json(path, [[each.file, each.label, each.size_bytes, each.changed_ns] for each in self.samples])

    @classmethod
    def load(cls, folder: Path, digest: str) -> Self:
        """Return the listing of a digest.

        Raises:
            BadFile: If it is not there or not whole.
        """
        path = listing_path(folder, digest)
        rows: Any = read_json(path)
        try:
            listing = cls(tuple(Sample(*row) for row in rows))
        except TypeError:
            listing = cls(())
        if listing.digest != digest:
            raise BadFile(f"{path} is missing or damaged, so nobody knows which samples were seen; begin a new job")
        return listing


def classes_of(labels: Iterable[str], output: int) -> dict[str, int]:
    """Return the class of each label: its own number where all are numbers the model has, else its place among them.

    Args:
        labels: Of the samples.
        output: Dimension of the model's output.
    """
    names = sorted(set(labels))
    if all(name.isdecimal() and name.isascii() and len(name) < 9 and int(name) < output for name in names):
        return {name: int(name) for name in names}
    return {name: place for place, name in enumerate(names)}


def shown(names: Sequence[str]) -> str:
    """Return the first of some names, and how many more there are."""
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")


def listing_path(folder: Path, digest: str) -> Path:
    """Return where a job's folder keeps the listing of a digest."""
    return folder / f"listing-{digest}.json"


def _walk(folder: Path, below: str) -> Iterable[tuple[str, int, int]]:
    with os.scandir(folder / below) as entries:
        for entry in entries:
            name = f"{below}/{entry.name}" if below else entry.name
            if entry.name.startswith("."):
                continue
            # Labels may be links to folders elsewhere; further down a link could lead in circles.
            if entry.is_dir(follow_symlinks=not below):
                yield from _walk(folder, name)
            elif entry.name.lower().endswith(SUFFIXES) and entry.is_file():
                state = entry.stat()
                yield name, state.st_size, state.st_mtime_ns


def _table(folder: Path) -> Mapping[str, str] | None:
    """Return the labels of ``labels.csv``; None if there is no such file."""
    path = folder / LABELS
    if not os.path.lexists(path):
        return None
    labels: dict[str, str] = {}
    for row in tables.rows(path, _HEAD, most_rows=_MOST_LABELS):
        if len(row) != 2:
            raise BadFile(f"{path}: {','.join(row)[:60]!r} is not a file and its label")
        file, label = map(str.strip, row)
        if (file, label) != _HEAD:
            labels[file] = label
    return labels


def _label(file: str, table: Mapping[str, str] | None) -> str:
    if table is None:
        return file.rpartition("/")[0]
    return table.get(file, "")


def _draw(salt: str, file: str) -> float:
    """Return a number of 0..1 that only the two texts decide."""
    digest = hashlib.blake2b(f"{salt}\0{file}".encode("utf-8", "surrogateescape"), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64


# Where a job stands, read from its folder without the trainer and without torch.


def leave_link(job: Path, folder: Path) -> None:
    """Leave a link to a job in a folder of jobs, so that the daemon of this user finds it, and drop links to nowhere.

    A job is trained whether a daemon finds it or not: where no link can be left there is none.
    """
    target = Path(os.path.realpath(job))
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        for each in folder.iterdir():
            if each.is_symlink() and not each.exists():
                each.unlink(missing_ok=True)
        # Jobs in two places may have one name. A link that is there already is refused, which is as good.
        (folder / f"{target.name}-{zlib.crc32(os.fsencode(target)):08x}").symlink_to(target)


TASK = "task.json"
VALIDATION = "validation.json"
LOCK = "lock"


@dataclass(frozen=True)
class JobStart:
    """What a job began with: what it is, the class of each label, the shape of a sample."""

    task: Task
    classes: dict[str, int]
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Progress:
    """Where a job stands.

    Args:
        task: What it is.
        classes: The class of each label.
        place: Of its newest checkpoint.
        samples: To train on in an epoch, by the listing of the epoch that runs; None between two epochs.
        runs: Whether a trainer works on it now.
        validation: What the last validation found; None before the first.
        damaged: Names of checkpoints that are not whole, newer than the one that counts.
    """

    task: Task
    classes: Mapping[str, int]
    place: JobPosition
    samples: int | None
    runs: bool
    validation: Mapping[str, Any] | None
    damaged: tuple[str, ...] = ()

    @property
    def finished(self) -> bool:
        """Whether all epochs are done."""
        return self.place.epoch >= self.task.epochs

    def document(self) -> dict[str, Any]:
        """Return the same as JSON, for a desk."""
        return {**vars(self), "task": self.task.document(), "place": asdict(self.place)}

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> Self:
        """Return where a job stands, as a board has told it.

        Raises:
            BadFile: If that makes no sense.
        """
        try:
            return cls(
                task=Task.from_document(document["task"]),
                classes=document["classes"],
                place=_place(document["place"]),
                samples=document["samples"],
                runs=document["runs"],
                validation=document["validation"],
                damaged=tuple(document["damaged"]),
            )
        except (KeyError, TypeError, InvalidInput) as err:
            raise BadFile(f"what the board says of the job makes no sense: {err}") from err


def read_progress(folder: Path) -> Progress:
    """Return where the job of a folder stands.

    Raises:
        BadFile: If the folder holds no job, or one that is damaged.
    """
    begun = read_begun(folder)
    if begun is None:
        raise BadFile(f"{folder} holds no fine-tuning job; polythrottle finetune run begins one")
    found, damaged = newest_checkpoint(folder)
    place = found.place if found else JobPosition()
    if place.listing:
        samples = len(Listing.load(folder, place.listing).split(begun.task.held_out)[0])
    else:
        samples = None
    runs = is_locked(folder / LOCK)
    return Progress(begun.task, begun.classes, place, samples, runs, read_validation(folder), damaged)


def read_validation(folder: Path) -> Mapping[str, Any] | None:
    """Return what the last validation of a folder's job found; None before the first.

    Raises:
        BadFile: If what says so is damaged.
    """
    verdict = read_json(folder / VALIDATION)
    if verdict is None or (isinstance(verdict, dict) and _judges(verdict)):
        return verdict
    raise BadFile(f"{folder / VALIDATION} is damaged")


def _judges(found: Mapping[str, Any]) -> bool:
    """Return whether a document says how many samples were right, and whether the model may be served."""
    accuracy = found.get("accuracy")
    samples = found.get("samples")
    right = isinstance(accuracy, (int, float)) and not isinstance(accuracy, bool) and 0 <= accuracy <= 1
    counted = isinstance(samples, int) and not isinstance(samples, bool) and samples >= 0
    return right and counted and isinstance(found.get("holds"), bool) and isinstance(found.get("why"), str)


def read_begun(folder: Path) -> JobStart | None:
    """Return what a folder's job began with; None if none was begun there.

    Raises:
        BadFile: If what says so is damaged.
    """
    document = read_json(folder / TASK)
    if document is None:
        return None
    try:
        classes = {str(label): int(place) for label, place in document["classes"].items()}
        return JobStart(Task.from_document(document["task"]), classes, tuple(int(size) for size in document["shape"]))
    except (*MALFORMED, InvalidInput) as err:
        raise BadFile(f"{folder / TASK} is damaged") from err


# On a board over SSH: one question of the desk, in a Python without packages.


def main(mark: str, folder: str, device: str) -> int:
    """Tell the desk at the other end of standard input and output where a job stands; returns an exit code.

    Args:
        mark: What begins the line that says that this listens.
        folder: Where this was unpacked; it is removed at the end.
        device: Of no use here.
    """
    # Only here: a daemon that reads jobs answers no desk in this way.
    from polythrottle.board.carried import answer_once

    return answer_once(mark, folder, _answer)


def _answer(request: Mapping[str, Any]) -> dict[str, Any]:
    from polythrottle.actuation.wire import error_line

    try:
        return read_progress(Path(request["folder"])).document()
    except PolythrottleError as err:
        return {"error": error_line(err)}
    except OSError as err:
        return {"error": error_line(StorageError(f"{err.filename or request['folder']}: {err.strerror}"))}
