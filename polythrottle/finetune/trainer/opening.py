"""Beginning a job or taking one up again: its folder, its first listing, its model."""

import fcntl
import os
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from polythrottle.errors import BadFile, DeviceError, InvalidInput, StorageError
from polythrottle.finetune.trainer.files import put, put_json
from polythrottle.finetune.trainer.listing import LABELS, SUFFIXES, Listing, shown
from polythrottle.finetune.trainer.network import ARCHIVE, SCRIPT, begun
from polythrottle.finetune.trainer.progress import LOCK, TASK, read_begun
from polythrottle.finetune.trainer.reading import Unreadable, read_sample
from polythrottle.finetune.trainer.task import Task

_PATIENCE_S, _PAUSE_S = 10.0, 0.1


@dataclass(frozen=True)
class Opened:
    """A job that can be trained.

    Args:
        base: The model it began with.
        classes: The class of each label.
        listing: What the data folder holds now, of those labels.
        shape: Of a sample.
        notices: What a user should know.
    """

    base: Path
    classes: dict[str, int]
    listing: Listing
    shape: tuple[int, ...]
    notices: tuple[str, ...]


def hold(folder: Path) -> int:
    """Make a job's folder and keep other trainers out of it; return the handle that does.

    A trainer whose driver has gone ends after its slice, so that this waits for a while.

    Raises:
        StorageError: If it cannot be made.
        DeviceError: If another trainer stays in it.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as err:
        raise StorageError(f"the job's folder {folder} cannot be written: {err.strerror}") from err
    until_s = time.monotonic() + _PATIENCE_S
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except OSError:
            if time.monotonic() > until_s:
                os.close(handle)
                raise DeviceError(f"another trainer works in {folder}; wait for it or name another folder") from None
            time.sleep(_PAUSE_S)
    clear_drafts(folder)
    return handle


def clear_drafts(folder: Path, name: str = "*") -> None:
    """Remove what a killed trainer has left of files it was writing."""
    for draft in folder.glob(f".{name}.{'?' * 8}"):  # as tempfile names them
        with suppress(OSError):
            draft.unlink()


def open_job(task: Task) -> Opened:
    """Begin a task's job, or take it up again if its folder holds it; the folder is held.

    Raises:
        InvalidInput: If the folder holds another job, the data no samples, or some have no label.
        BadFile: If the data or the model cannot be read, or the folder is damaged.
        StorageError: If the folder cannot be written.
        TrialError: If the model fails on the first sample.
        UnknownName: If a Python module has no such name.
    """
    folder = Path(task.folder)
    known = read_begun(folder)
    listing = Listing.scan(Path(task.data))
    if known is None:
        return _begun(task, folder, listing)
    classes = known.classes
    if odd := known.task.differences(task):
        told = ", ".join(f"{name} {getattr(known.task, name)!r}, not {getattr(task, name)!r}" for name in odd)
        raise InvalidInput(f"{folder} holds another job ({told}); give the same words or another folder")
    base = next((folder / f"base{suffix}" for suffix in (ARCHIVE, SCRIPT) if (folder / f"base{suffix}").exists()), None)
    if base is None:
        raise BadFile(f"{folder} lacks the model its job began with; begin a new job in another folder")
    ours = listing.labelled(classes)
    strangers = [each.file for each in listing.samples if each.label not in classes]
    notes = [f"{len(strangers)} files left out, whose label the job does not know: {shown(strangers)}"]
    if len(ours.samples) < 2:
        raise InvalidInput(f"{task.data} holds too few samples of this job's labels; bring the data back")
    return Opened(base, classes, ours, known.shape, tuple(notes if strangers else ()))


def _begun(task: Task, folder: Path, listing: Listing) -> Opened:
    bare = [each.file for each in listing.samples if not each.label]
    if not listing.samples:
        raise InvalidInput(f"{task.data} holds no samples; one file each is expected: {', '.join(SUFFIXES)}")
    if bare:
        where = f"put them into {LABELS}, or each into a folder named like its label"
        raise InvalidInput(f"{len(bare)} of {len(listing.samples)} samples have no label: {shown(bare)}; {where}")
    if len({each.label for each in listing.samples}) < 2:
        raise InvalidInput(
            f"all samples in {task.data} are labelled {listing.samples[0].label!r}; give two labels or more"
        )
    sample = _first(task, listing)
    data, suffix, classes = begun(task.model, sample, [each.label for each in listing.samples], task.seed)
    base = folder / f"base{suffix}"
    put(base, data)
    put_json(folder / TASK, {"task": task.document(), "classes": classes, "shape": list(sample.shape)})
    return Opened(base, classes, listing, tuple(sample.shape), ())


def _first(task: Task, listing: Listing) -> torch.Tensor:
    """Return the first sample that can be read.

    Raises:
        BadFile: If none can.
    """
    why = ""
    for each in listing.samples:
        try:
            return read_sample(Path(task.data) / each.file)
        except Unreadable as err:
            why = why or f"{each.file}: {err}"
    raise BadFile(f"no sample in {task.data} can be read; {why}")
