"""Which fine-tuning job there is beside the workload and whether its trainer works: read from the job's folder alone.

A look is cheap: the first line of a checkpoint, a lock, and the CPU time of whoever holds it. Weights are never read
and torch is never loaded. A job is

========  =============================================================================
running   its trainer lives and has done something lately
paused    its trainer lives and has used no CPU time for a while: it is held back
finished  all epochs are done, and the trainer has ended
gone      the trainer has ended before that; the same ``finetune run`` goes on with it
========  =============================================================================
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from heapq import nlargest
from pathlib import Path

from polythrottle.daemon.status import FinetuningShown
from polythrottle.domain.backports import StrEnum
from polythrottle.domain.errors import BadFile
from polythrottle.storage.atomic_file import is_locked
from polythrottle.training.beside.trainer.job_folder import (
    LOCK,
    TASK,
    JobPosition,
    JobStart,
    Listing,
    listing_path,
    newest_place,
    read_begun,
)

LOOK_S = 3.0
"""So long at least between two looks."""
STILL_S = 15.0
STILL_UNSEEN_S = 60.0
"""How long a trainer does nothing to count as paused; longer where only its checkpoints can be seen."""
LATELY_S = 86400.0
"""For how long a job that ended before the daemon began is shown."""
_JOBS_MOST = 16
_WINDOW_S = 60.0
_LISTING_MOST = 1 << 18
"""Bytes of a listing that is read to know how many samples an epoch has; of a longer one the epoch is long too."""


class TrainerState(StrEnum):
    """What a job's trainer does; see the table above."""

    RUNNING = "running"
    PAUSED = "paused"
    FINISHED = "finished"
    GONE = "gone"


@dataclass
class _Job:
    """What is remembered of a job between looks."""

    begun: JobStart
    changed_ns: int
    trace: tuple[int, int | None] = (-1, None)
    active_s: float = 0.0
    doing: TrainerState | None = None
    since_s: float = 0.0
    alive: bool = False
    listing: str = ""
    samples: int | None = None
    steps: deque[JobPosition] = field(default_factory=lambda: deque(maxlen=64))


class TrainerMonitor:
    """Looks for fine-tuning jobs and says which one matters: one that runs before one that is paused before the newest.

    Args:
        folders: Jobs, or folders that hold jobs; they need not exist. Of many, the sixteen changed last are looked at.
        wall: Wall time, seconds since the epoch.

    Attributes:
        shown: What the last look found; None if nothing.
        fault: What cannot be read, in words; empty if nothing.
    """

    def __init__(self, folders: Sequence[Path] = (), wall: Callable[[], float] = time.time) -> None:
        self.shown: FinetuningShown | None = None
        self.fault = ""
        self._folders = tuple(folders)
        self._wall = wall
        self._jobs: dict[Path, _Job] = {}
        self._looked_s: float | None = None

    def look(self, now_s: float) -> FinetuningShown | None:
        """Return the job that matters; None if there is none. Looks anew only every few seconds.

        Args:
            now_s: On the clock of the control loop.
        """
        if self._looked_s is None or not 0 <= now_s - self._looked_s < LOOK_S:
            self._looked_s = now_s
            self.fault = ""
            jobs = [(folder, job) for folder in self._found() if (job := self._job(folder)) is not None]
            found = [(job, shown) for folder, job in jobs if (shown := self._seen(folder, job, now_s)) is not None]
            if found:
                self.shown = max(found, key=lambda each: _weight(*each))[1]
            else:
                self.shown = None
        return self.shown

    def _found(self) -> list[Path]:
        found = {folder: _changed_ns(folder) for each in self._folders for folder in self._below(each)}
        newest = nlargest(_JOBS_MOST, found, key=found.__getitem__)
        self._jobs = {folder: job for folder, job in self._jobs.items() if folder in newest}
        return newest

    def _below(self, folder: Path) -> Iterator[Path]:
        if os.path.exists(folder / TASK):
            # A job and the link that `leave_link` has left to it are one.
            yield Path(os.path.realpath(folder))
            return
        try:
            with os.scandir(folder) as entries:
                yield from [
                    Path(os.path.realpath(each.path))
                    for each in entries
                    if os.path.exists(os.path.join(each.path, TASK))
                ]
        except (FileNotFoundError, NotADirectoryError):
            return
        except OSError as error:
            self.fault = f"fine-tuning jobs in {folder} cannot be seen: {error.strerror}"

    def _job(self, folder: Path) -> _Job | None:
        """Return what is known of a job; a folder in which another one was begun is a new one."""
        job = self._jobs.get(folder)
        changed_ns = _changed_ns(folder / TASK)
        if job is not None and job.changed_ns == changed_ns:
            return job
        try:
            begun = read_begun(folder)
        except BadFile as error:
            self.fault = f"a fine-tuning job cannot be read: {error}"
            return None
        if begun is None:
            return None
        self._jobs[folder] = _Job(begun, changed_ns)
        return self._jobs[folder]

    def _seen(self, folder: Path, job: _Job, now_s: float) -> FinetuningShown | None:
        place = newest_place(folder) or JobPosition()
        lives = is_locked(folder / LOCK)
        doing = _doing(job, place, lives, _ticks(folder / LOCK) if lives else None, now_s)
        ended_s = place.written_s or job.changed_ns / 1e9
        wall_s = self._wall()
        job.alive |= lives
        if not job.alive and wall_s - ended_s > LATELY_S:
            return None
        _counted(folder, job, place.listing)
        if doing is not job.doing:
            # It ended before this daemon looked: when, its last checkpoint tells.
            if job.doing is None and not lives:
                job.since_s = ended_s
            else:
                job.since_s = wall_s
            job.doing = doing
        if place.written_s and (not job.steps or job.steps[-1].step < place.step):
            job.steps.append(place)
        return FinetuningShown(
            str(doing),
            str(folder),
            job.begun.task.model,
            place.epoch,
            job.begun.task.epochs,
            place.position,
            job.samples,
            place.step,
            _rate_per_s(job, wall_s) if doing is TrainerState.RUNNING else None,
            datetime.fromtimestamp(job.since_s).astimezone().isoformat(timespec="seconds"),
        )


def _doing(job: _Job, place: JobPosition, lives: bool, ticks: int | None, now_s: float) -> TrainerState:
    if not lives:
        if place.epoch >= job.begun.task.epochs:
            return TrainerState.FINISHED
        return TrainerState.GONE
    trace = place.step, ticks
    if trace != job.trace or not job.alive:
        job.trace = trace
        job.active_s = now_s
    # Another user's processes may be hidden (proc(5), hidepid): then nothing but its checkpoints tells that it works.
    if ticks is None:
        still_s = STILL_UNSEEN_S
    else:
        still_s = STILL_S
    if now_s - job.active_s < still_s:
        return TrainerState.RUNNING
    return TrainerState.PAUSED


def _rate_per_s(job: _Job, wall_s: float) -> float | None:
    """Return samples per second over the last minute; None if too little of it was seen, or of an epoch's length."""
    if not job.steps or not 0 <= wall_s - job.steps[-1].written_s < _WINDOW_S:
        return None
    last = job.steps[-1]
    known = [each for each in job.steps if job.samples is not None or each.epoch == last.epoch]
    first = next(each for each in known if last.written_s - each.written_s < _WINDOW_S)
    span_s = last.written_s - first.written_s
    samples = (last.epoch - first.epoch) * (job.samples or 0)
    if span_s > 0:
        return (samples + last.position - first.position) / span_s
    return None


def _counted(folder: Path, job: _Job, digest: str) -> None:
    """Note how many samples the epoch has, once per listing; one that is long or damaged leaves it unknown."""
    if not digest or digest == job.listing:
        return
    job.listing = digest
    job.samples = None
    with suppress(OSError, BadFile):
        if listing_path(folder, digest).stat().st_size <= _LISTING_MOST:
            job.samples = len(Listing.load(folder, digest).split(job.begun.task.held_out)[0])


def _weight(job: _Job, shown: FinetuningShown) -> tuple[bool, bool, float]:
    return shown.state == TrainerState.RUNNING, shown.state == TrainerState.PAUSED, job.since_s


def _changed_ns(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def _ticks(lock: Path) -> int | None:
    """Return the CPU time of whoever holds a lock, in the kernel's ticks; None where the kernel does not say."""
    with suppress(OSError, ValueError, IndexError):
        found = lock.stat()
        wanted = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}:{found.st_ino}"
        # proc_locks(5): number, kind, ADVISORY, WRITE, process, device:inode, first and last byte.
        rows = [line.split() for line in Path("/proc/locks").read_text().splitlines()]
        holder = next((row[4] for row in rows if row[1] == "FLOCK" and row[5] == wanted), "")
        # proc(5): utime and stime are fields 14 and 15, counted behind the name, which may hold blanks and brackets.
        times = Path(f"/proc/{holder}/stat").read_text().rpartition(")")[2].split()
        return int(times[11]) + int(times[12])
    return None
