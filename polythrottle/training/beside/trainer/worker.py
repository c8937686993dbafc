"""The trainer itself: opens a job or takes it up again, and does a slice when asked; what it sees, and how it notes it.

An epoch goes over what its listing says. Which samples each step has seen stands in a ledger that is only added to.
"""

from __future__ import annotations

import fcntl
import json
import os
import resource
import time
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from polythrottle.domain.errors import BadFile, DeviceError, InvalidInput, StorageError, TrialError
from polythrottle.storage.append_log import AppendLog
from polythrottle.storage.atomic_file import replace_file
from polythrottle.training.beside.trainer.driver import Task
from polythrottle.training.beside.trainer.job_folder import (
    LABELS,
    LOCK,
    SUFFIXES,
    TASK,
    Checkpoint,
    JobPosition,
    Listing,
    newest_checkpoint,
    next_position,
    previous_model,
    put_json,
    read_begun,
    shown,
    write_checkpoint,
)
from polythrottle.training.beside.trainer.network import ARCHIVE, SCRIPT, Learner, Network, begun, out_of_memory
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
    if tensor.is_floating_point():
        kind = torch.float32
    else:
        kind = torch.int64
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

LEDGER = "ledger.jsonl"


@dataclass(frozen=True)
class LedgerEntry:
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


def append_entry(folder: Path, entry: LedgerEntry) -> None:
    """Add a step, on disk before this returns; a torn line before it is cut off.

    Raises:
        StorageError: If it cannot be written; what was there stays.
    """
    line = asdict(entry)
    crc = zlib.crc32(json.dumps(line).encode())
    with AppendLog(folder / LEDGER) as log:
        log.cut_torn_line()
        log.append(json.dumps({**line, "crc": crc}).encode())


# Beginning a job or taking one up again: its folder, its first listing, its model.

_PATIENCE_S = 10.0
_PAUSE_S = 0.1


@dataclass(frozen=True)
class OpenJob:
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


def open_job(task: Task) -> OpenJob:
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
        differences = ", ".join(f"{name} {getattr(known.task, name)!r}, not {getattr(task, name)!r}" for name in odd)
        raise InvalidInput(f"{folder} holds another job ({differences}); give the same words or another folder")
    base = next((folder / f"base{suffix}" for suffix in (ARCHIVE, SCRIPT) if (folder / f"base{suffix}").exists()), None)
    if base is None:
        raise BadFile(f"{folder} lacks the model its job began with; begin a new job in another folder")
    ours = listing.labelled(classes)
    strangers = [each.file for each in listing.samples if each.label not in classes]
    notes = [f"{len(strangers)} files left out, whose label the job does not know: {shown(strangers)}"]
    if len(ours.samples) < 2:
        raise InvalidInput(f"{task.data} holds too few samples of this job's labels; bring the data back")
    return OpenJob(base, classes, ours, known.shape, tuple(notes if strangers else ()))


def _begun(task: Task, folder: Path, listing: Listing) -> OpenJob:
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
    replace_file(base, data)
    put_json(folder / TASK, {"task": task.document(), "classes": classes, "shape": list(sample.shape)})
    return OpenJob(base, classes, listing, tuple(sample.shape), ())


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


# The trainer itself: does a slice when asked, and nothing else.

_TOLD = 8


class Worker:
    """A job that is open: its network, where it stands, and the step it is in.

    Raises:
        PolythrottleError: As `polythrottle.training.beside.trainer.worker.hold` and ``open_job`` do.
    """

    def __init__(self, task: Task) -> None:
        self.task = task
        self.folder = Path(task.folder)
        self._held = hold(self.folder)
        if task.served:
            served = Path(task.served)
            for name in (served.name, previous_model(served).name):
                clear_drafts(served.parent, name)
        torch.set_num_threads(task.threads)
        self.device = _device(task)
        self.opened = open_job(task)
        torch.set_num_threads(task.threads)  # opening a model sets its own
        self.network = Network(
            self.opened.base, trained=task.trained, rank=task.rank, seed=task.seed, device=self.device
        )
        self._learner = Learner(self.network, task.learning_rate)
        self._notices: list[str] = list(self.opened.notices)
        self.place = self._resumed()
        self._saved = True
        self.at = 0
        self.most: int | None = None
        self._entry: LedgerEntry | None = None
        self.epoch = self._epoch()
        self._rows: list[int] = []
        self._prepare()
        self._try_out()
        _limit(task.memory_bytes, self.device)

    def close(self) -> None:
        """Let another trainer have the job's folder."""
        os.close(self._held)

    def _resumed(self) -> JobPosition:
        found, damaged = newest_checkpoint(self.folder)
        if damaged:
            self._notices.append(f"damaged and passed over: {', '.join(damaged)}")
        if found is None:
            return JobPosition()
        self._learner.resume(found.learnt)
        return found.place

    def _epoch(self) -> Epoch:
        """Return the epoch that runs: over what it began with, or over what the folder holds now."""
        digest = self.place.listing
        if digest:
            listing = Listing.load(self.folder, digest)
        else:
            listing = self.opened.listing
        if not digest:
            listing.save(self.folder)
        return Epoch(
            Path(self.task.data),
            listing,
            self.opened.classes,
            held_out=self.task.held_out,
            seed=self.task.seed,
            number=self.place.epoch,
            shape=self.opened.shape,
            device=self.device,
        )

    def _prepare(self) -> None:
        """Have the rows of the step that runs; an epoch begins with its first slice, not with the last one's end."""
        if self._rows or self.finished:
            return
        if self.epoch.number != self.place.epoch:
            self._next_epoch()
        first = self.place.position
        self._rows = self.epoch.order[first : first + self.task.batch]
        self._seen: list[int] = []
        self._unread: dict[int, str] = {}
        self._learner.forget()

    @property
    def of(self) -> int:
        """Samples of the step that runs or comes."""
        return len(self._rows) or min(self.task.batch, len(self.epoch.order) - self.place.position)

    def _try_out(self) -> None:
        """Run one sample through, so that a model that does not take it is found now."""
        with torch.no_grad():
            self.network(torch.zeros((1, *self.opened.shape), dtype=self._kind(), device=self.device))

    def _kind(self) -> torch.dtype:
        inputs, _, _ = self.epoch.read(self.epoch.order[:1])
        if inputs is None:
            return torch.float32
        return inputs.dtype

    @property
    def finished(self) -> bool:
        """Whether all epochs are done."""
        return self.place.epoch >= self.task.epochs

    def slice(self, samples: int, write: bool = True) -> dict[str, Any]:
        """Do some samples of the step that runs, and end it with the last of them; `driver` tells what is answered.

        Raises:
            InvalidInput: If nothing is left to do, or no sample was asked for.
            TrialError: If training has diverged, or not even one sample fits into memory.
            StorageError: If a checkpoint cannot be written; the next slice tries again first.
            BadFile: If the data folder is gone.
        """
        if self.finished:
            raise InvalidInput("this job is finished")
        if samples < 1:
            raise InvalidInput(f"a slice has at least 1 sample, but {samples} were asked for")
        start_s = time.perf_counter()
        self.save()
        self._prepare()
        rows = self._rows[self.at : self.at + samples]
        of = self.of
        loss = None
        unread = self._gather(rows)
        self.at += len(rows)
        if self.at == of:
            loss = self._end_step()
            if write:
                self.save()
        document = {"samples": len(rows), "of": of, "loss": loss, "left_out": self._named(unread), **self.standing()}
        return {"took_s": time.perf_counter() - start_s, **document}

    def _gather(self, rows: list[int]) -> dict[int, str]:
        """Gather some rows, in halves where memory does not hold them at once; return why some could not be read."""
        unread: dict[int, str] = {}
        while rows:
            part = rows[: self.most]
            try:
                inputs, classes, missed = self.epoch.read(part)
                if inputs is not None:
                    self._learner.gather(inputs, classes)
            except (RuntimeError, MemoryError) as err:
                if not out_of_memory(err):
                    raise TrialError(f"the model raised {type(err).__name__}: {str(err)[:200]}") from err
                self._halve(len(part))
                continue
            unread |= missed
            self._seen += [row for row in part if row not in missed]
            rows = rows[len(part) :]
        self._unread |= unread
        return unread

    def _halve(self, samples: int) -> None:
        if samples == 1:
            raise TrialError("one sample does not fit into memory; allow the trainer more, or take a smaller model")
        self.most = samples // 2
        self._notices.append(f"{samples} samples at once do not fit into memory; going on with {self.most}")

    def _end_step(self) -> float | None:
        """Move the weights and note who was seen; nothing is on disk yet."""
        loss = self._learner.move()
        digest = self.epoch.listing.digest
        further = next_position(self.place, len(self._rows), len(self.epoch.order), digest)
        self._entry = LedgerEntry(further.step, self.place.epoch, digest, tuple(self._seen), tuple(self._unread))
        self.place = replace(further, loss=loss)
        self._saved = False
        self._rows = []
        self.at = 0
        changes = self.epoch.changes()
        if changes:
            self._notices += [changes]
        return loss

    def _next_epoch(self) -> None:
        opened = open_job(self.task)
        if found := self.epoch.listing.differences(opened.listing):
            self._notices.append(f"epoch {self.place.epoch + 1} goes by the data folder as it is now ({found})")
        self._notices += [note for note in opened.notices if note not in self.opened.notices]
        self.opened = opened
        self.epoch = self._epoch()

    def save(self) -> None:
        """Write the ledger and a checkpoint, where the last step is not on disk yet.

        Raises:
            StorageError: If they cannot be written.
        """
        if self._saved:
            return
        if self._entry is not None:
            append_entry(self.folder, self._entry)
            self._entry = None
        self.place = replace(self.place, written_s=time.time())
        write_checkpoint(self.folder, Checkpoint(self.place, self._learner.learnt()))
        self._saved = True

    def standing(self) -> dict[str, Any]:
        """Return where the job stands, and what was not told yet."""
        notices = self._notices[:_TOLD]
        self._notices = self._notices[_TOLD:]
        place = {"step": self.place.step, "epoch": self.place.epoch, "position": self.place.position}
        document = {"finished": self.finished, "halved_to": self.most, "notices": notices, "written": self._saved}
        return {**place, "at": self.at, **document}

    def _named(self, unread: Mapping[int, str]) -> list[dict[str, str]]:
        files = self.epoch.listing.samples
        return [{"file": files[row].file, "why": why} for row, why in list(unread.items())[:_TOLD]]


def _device(task: Task) -> torch.device:
    there = torch.cuda.is_available()
    if task.device == "cuda" and not there:
        raise InvalidInput("there is no CUDA device here; take device cpu")
    name = "cpu"
    if there and task.device != "cpu":
        name = "cuda"
    if name == "cuda" and task.memory_bytes is not None:
        raise InvalidInput("memory_bytes limits a trainer on the CPU only")
    return torch.device(name)


def _limit(memory_bytes: int | None, device: torch.device) -> None:
    """Let this process take no more memory than it has and some."""
    if memory_bytes is not None and device.type == "cpu":
        import psutil  # a board's Python need not have it

        most = psutil.Process().memory_info().vms + memory_bytes
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
