"""Samples: reading them from files, their order in an epoch, and the ledger of which step has seen which."""

import json
import os
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from polythrottle.domain.errors import BadFile
from polythrottle.storage.append_log import AppendLog
from polythrottle.training.beside.trainer.job_folder import LABELS, Listing
from polythrottle.workloads.foreign_calls import one_line
from polythrottle.workloads.torch_archive import load_tensors

# Reading samples: arrays, tensors and pictures, one file each.

_NOT = {".npy": "it is no array of numbers, or is cut off", ".pt": "it is no plain tensor, or is cut off"}


class Unreadable(Exception):
    """A file that is no sample; never leaves the trainer."""


def read_sample(path: Path, shape: tuple[int, ...] | None = None) -> torch.Tensor:
    """Return a sample: reals as float32, whole numbers as int64, a picture as float32 of 0..1, channels first.

    Args:
        path: An array (``.npy``), a tensor (``.pt``) or a picture.
        shape: The shape it must have; None for any.

    Raises:
        Unreadable: If it is missing, is none, or has another shape.
    """
    try:
        tensor = _read(path)
    except MemoryError:
        raise
    except Unreadable:
        raise
    except FileNotFoundError as err:
        raise Unreadable("it is gone") from err
    except Exception as err:  # a file can be broken in as many ways as its library has errors
        # NumPy and torch advise to load it unsafely, which nobody should do.
        raise Unreadable(_NOT.get(path.suffix.lower(), one_line(err))) from err
    if shape is not None and tuple(tensor.shape) != shape:
        raise Unreadable(f"its shape is {tuple(tensor.shape)}, not {shape} like the first sample's")
    return tensor


def _read(path: Path) -> torch.Tensor:
    suffix = path.suffix.lower()
    if suffix == ".npy":
        return _plain(torch.from_numpy(np.load(path, allow_pickle=False)))
    if suffix == ".pt":
        tensor = load_tensors(path)
        if not isinstance(tensor, torch.Tensor):
            raise Unreadable(f"it holds a {type(tensor).__name__}, not a tensor")
        return _plain(tensor)
    from PIL import Image  # comes with matplotlib

    with Image.open(path) as picture:
        pixels = np.asarray(picture.convert("RGB"), dtype=np.float32) / 255.0
    return torch.from_numpy(np.ascontiguousarray(pixels.transpose(2, 0, 1)))


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    kind = torch.float32 if tensor.is_floating_point() else torch.int64
    return tensor.detach().to(kind).contiguous()


# The samples of an epoch: their order, what of them cannot be read, and whether the folder has changed since.


class Epoch:
    """An epoch over what a listing says, whatever happens to the folder meanwhile.

    Args:
        data: The folder.
        listing: What it held when the epoch began.
        classes: The class of each label.
        held_out: Share of samples to validate with.
        seed: Of the order.
        number: Of the epoch, from 0.
        shape: Of a sample.
        device: Where samples go.
    """

    def __init__(
        self,
        data: Path,
        listing: Listing,
        classes: Mapping[str, int],
        *,
        held_out: float,
        seed: int,
        number: int,
        shape: tuple[int, ...],
        device: torch.device,
    ) -> None:
        self.listing = listing
        self.number = number
        train, self.validate = listing.split(held_out)
        self.order = listing.order(train, seed, number)
        self._data = data
        self._classes = classes
        self._shape = shape
        self._device = device
        folders = {str(Path(each.file).parent) for each in listing.samples}
        self._places = [data, data / LABELS, *(data / folder for folder in sorted(folders))]
        self._marks: list[int] | None = self._marked()
        self._told: set[str] = set()

    def read(self, rows: Sequence[int]) -> tuple[torch.Tensor | None, torch.Tensor, dict[int, str]]:
        """Return samples and their classes, and why some could not be read, by row.

        Raises:
            BadFile: If the whole folder is gone.
        """
        samples = []
        classes = []
        left_out = {}
        for row in rows:
            entry = self.listing.samples[row]
            try:
                samples.append(read_sample(self._data / entry.file, self._shape))
                classes.append(self._classes[entry.label])
            except Unreadable as err:
                left_out[row] = str(err)
        if left_out and not self._data.is_dir():
            raise BadFile(f"the data folder {self._data} is gone; bring it back, and the job goes on where it was")
        inputs = None
        if samples:
            inputs = torch.stack(samples).to(self._device)
        return inputs, torch.tensor(classes, dtype=torch.int64, device=self._device), left_out

    def changes(self) -> str:
        """Return what has changed in the folder since the epoch began, in words, once; empty if nothing has.

        Looks closer only where a folder's own time has changed, which adding, removing and renaming files does.
        """
        marks = self._marked()
        if marks == self._marks:
            return ""
        self._marks = marks
        try:
            change = self.listing.differences(Listing.scan(self._data).labelled(self._classes))
        except BadFile as err:
            change = str(err)
        fresh = change not in self._told and change
        self._told.add(change)
        if fresh:
            return f"the data folder has changed ({change}); this epoch goes by what it held before"
        return ""

    def _marked(self) -> list[int]:
        return [_changed_ns(place) for place in self._places]


def _changed_ns(place: Path) -> int:
    try:
        return os.stat(place).st_mtime_ns
    except OSError:
        return -1


# Which samples each step has seen: a file that is only ever added to.
#
# A step that was lost with the power or a killed process is done again and has two lines; the later one counts, and
# only up to the step of the checkpoint one goes on from.

NAME = "ledger.jsonl"


@dataclass(frozen=True)
class Entry:
    """One step.

    Args:
        step: Its number, from 1.
        epoch: From 0.
        listing: Digest of the listing that the rows are of.
        seen: Rows that were trained on.
        left_out: Rows whose file could not be read.
    """

    step: int
    epoch: int
    listing: str
    seen: tuple[int, ...]
    left_out: tuple[int, ...] = ()


def append_entry(folder: Path, entry: Entry) -> None:
    """Add a step, on disk before this returns; a torn line before it is cut off.

    Raises:
        StorageError: If it cannot be written; what was there stays.
    """
    line = asdict(entry)
    crc = zlib.crc32(json.dumps(line).encode())
    with AppendLog(folder / NAME) as log:
        log.cut_torn_line()
        log.append(json.dumps({**line, "crc": crc}).encode())
