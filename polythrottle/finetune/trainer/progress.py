"""Where a job stands, read from its folder without the trainer and without torch."""

import fcntl
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polythrottle.errors import BadFile, InvalidInput
from polythrottle.finetune.trainer.checkpoint import Place, newest
from polythrottle.finetune.trainer.files import read_json
from polythrottle.finetune.trainer.listing import Listing
from polythrottle.finetune.trainer.task import Task

TASK, VALIDATION, LOCK = "task.json", "validation.json", "lock"


@dataclass(frozen=True)
class Begun:
    """What a job began with.

    Args:
        task: What it is.
        classes: The class of each label.
        shape: Of a sample.
    """

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
    place: Place
    samples: int | None
    runs: bool
    validation: Mapping[str, Any] | None
    damaged: tuple[str, ...] = ()

    @property
    def finished(self) -> bool:
        """Whether all epochs are done."""
        return self.place.epoch >= self.task.epochs


def read_progress(folder: Path) -> Progress:
    """Return where the job of a folder stands.

    Raises:
        BadFile: If the folder holds no job, or one that is damaged.
    """
    begun = read_begun(folder)
    if begun is None:
        raise BadFile(f"{folder} holds no fine-tuning job; polythrottle finetune run begins one")
    found, damaged = newest(folder)
    place = found.place if found else Place()
    samples = len(Listing.load(folder, place.listing).split(begun.task.held_out)[0]) if place.listing else None
    runs = held(folder / LOCK)
    return Progress(begun.task, begun.classes, place, samples, runs, read_validation(folder), damaged)


def read_validation(folder: Path) -> Mapping[str, Any] | None:
    """Return what the last validation of a folder's job found; None before the first.

    Raises:
        BadFile: If what says so is damaged.
    """
    found = read_json(folder / VALIDATION)
    if found is None or (isinstance(found, dict) and _judges(found)):
        return found
    raise BadFile(f"{folder / VALIDATION} is damaged")


def _judges(found: Mapping[str, Any]) -> bool:
    """Return whether a document says how many samples were right, and whether the model may be served."""
    accuracy, samples = found.get("accuracy"), found.get("samples")
    right = isinstance(accuracy, int | float) and not isinstance(accuracy, bool) and 0 <= accuracy <= 1
    counted = isinstance(samples, int) and not isinstance(samples, bool) and samples >= 0
    return right and counted and isinstance(found.get("holds"), bool) and isinstance(found.get("why"), str)


def read_begun(folder: Path) -> Begun | None:
    """Return what a folder's job began with; None if none was begun there.

    Raises:
        BadFile: If what says so is damaged.
    """
    document = read_json(folder / TASK)
    if document is None:
        return None
    try:
        classes = {str(label): int(place) for label, place in document["classes"].items()}
        return Begun(Task.from_document(document["task"]), classes, tuple(int(size) for size in document["shape"]))
    except (KeyError, TypeError, ValueError, AttributeError, InvalidInput) as err:
        raise BadFile(f"{folder / TASK} is damaged") from err


def held(lock: Path) -> bool:
    """Return whether a trainer holds the lock of a job's folder; False where it may not be opened."""
    try:
        handle = os.open(lock, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(handle)
    return False
