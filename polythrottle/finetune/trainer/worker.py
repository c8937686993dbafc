"""The trainer itself: does a slice when asked, and nothing else."""

import os
import resource
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import torch

from polythrottle.errors import InvalidInput, TrialError
from polythrottle.finetune.trainer import checkpoint, ledger
from polythrottle.finetune.trainer.checkpoint import Checkpoint, Place, moved
from polythrottle.finetune.trainer.epoch import Epoch
from polythrottle.finetune.trainer.files import previous
from polythrottle.finetune.trainer.learning import Learner, out_of_memory
from polythrottle.finetune.trainer.ledger import Entry
from polythrottle.finetune.trainer.listing import Listing
from polythrottle.finetune.trainer.network import Network
from polythrottle.finetune.trainer.opening import clear_drafts, hold, open_job
from polythrottle.finetune.trainer.task import Task

_TOLD = 8


class Worker:
    """A job that is open: its network, where it stands, and the step it is in.

    Args:
        task: What is to be trained.

    Raises:
        PolythrottleError: As `polythrottle.finetune.trainer.opening.hold` and ``open_job`` do.
    """

    def __init__(self, task: Task) -> None:
        self.task, self.folder = task, Path(task.folder)
        self._held = hold(self.folder)
        if task.served:
            served = Path(task.served)
            for name in (served.name, previous(served).name):
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
        self.place, self._saved, self.at = self._resumed(), True, 0
        self.most: int | None = None
        self._entry: Entry | None = None
        self.epoch = self._epoch()
        self._rows: list[int] = []
        self._prepare()
        self._try_out()
        _limit(task.memory_bytes, self.device)

    def close(self) -> None:
        """Let another trainer have the job's folder."""
        os.close(self._held)

    def _resumed(self) -> Place:
        found, damaged = checkpoint.newest(self.folder)
        if damaged:
            self._notices.append(f"damaged and passed over: {', '.join(damaged)}")
        if found is None:
            return Place()
        self._learner.resume(found.learnt)
        return found.place

    def _epoch(self) -> Epoch:
        """Return the epoch that runs: over what it began with, or over what the folder holds now."""
        digest = self.place.listing
        listing = Listing.load(self.folder, digest) if digest else self.opened.listing
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
        return torch.float32 if inputs is None else inputs.dtype

    @property
    def finished(self) -> bool:
        """Whether all epochs are done."""
        return self.place.epoch >= self.task.epochs

    def slice(self, samples: int, write: bool = True) -> dict[str, Any]:
        """Do some samples of the step that runs, and end it with the last of them; see `polythrottle.finetune.wire`.

        Raises:
            InvalidInput: If nothing is left to do, or no sample was asked for.
            TrialError: If training has diverged, or not even one sample fits into memory.
            StorageError: If a checkpoint cannot be written; the next slice tries again first.
            BadFile: If the data folder is gone.
        """
        if samples < 1 or self.finished:
            raise InvalidInput("this job is finished" if self.finished else f"a slice of {samples} samples is none")
        start_s = time.perf_counter()
        self.save()
        self._prepare()
        rows, of, loss = self._rows[self.at : self.at + samples], self.of, None
        unread = self._gather(rows)
        self.at += len(rows)
        if self.at == of:
            loss = self._end_step()
            if write:
                self.save()
        told = {"samples": len(rows), "of": of, "loss": loss, "left_out": self._named(unread), **self.standing()}
        return {"took_s": time.perf_counter() - start_s, **told}

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
        loss, digest = self._learner.move(), self.epoch.listing.digest
        further = moved(self.place, len(self._rows), len(self.epoch.order), digest)
        self._entry = Entry(further.step, self.place.epoch, digest, tuple(self._seen), tuple(self._unread))
        self.place, self._saved = replace(further, loss=loss), False
        self._rows, self.at = [], 0
        changes = self.epoch.changes()
        self._notices += [changes] if changes else []
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
            ledger.append(self.folder, self._entry)
            self._entry = None
        self.place = replace(self.place, written_s=time.time())
        checkpoint.write(self.folder, Checkpoint(self.place, self._learner.learnt()))
        self._saved = True

    def standing(self) -> dict[str, Any]:
        """Return where the job stands, and what was not told yet."""
        notices, self._notices = self._notices[:_TOLD], self._notices[_TOLD:]
        place = {"step": self.place.step, "epoch": self.place.epoch, "position": self.place.position}
        told = {"finished": self.finished, "halved_to": self.most, "notices": notices, "written": self._saved}
        return {**place, "at": self.at, **told}

    def _named(self, unread: Mapping[int, str]) -> list[dict[str, str]]:
        files = self.epoch.listing.samples
        return [{"file": files[row].file, "why": why} for row, why in list(unread.items())[:_TOLD]]


def _device(task: Task) -> torch.device:
    there = torch.cuda.is_available()
    if task.device == "cuda" and not there:
        raise InvalidInput("there is no CUDA device here; take device cpu")
    name = "cuda" if there and task.device != "cpu" else "cpu"
    if name == "cuda" and task.memory_bytes is not None:
        raise InvalidInput("memory_bytes limits a trainer on the CPU only")
    return torch.device(name)


def _limit(memory_bytes: int | None, device: torch.device) -> None:
    """Let this process take no more memory than it has and some."""
    if memory_bytes is not None and device.type == "cpu":
        most = psutil.Process().memory_info().vms + memory_bytes
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
