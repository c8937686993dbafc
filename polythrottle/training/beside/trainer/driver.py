"""Driving a trainer: what is said to it, and who says it.

A scheduler and a trainer tell each other the task, and a JSON object per line over a Unix socket. The driver starts the
trainer, asks it for slices, measures them itself, and ends it when it does not answer.
"""

from __future__ import annotations

import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from polythrottle.actuation.wire import error_from
from polythrottle.domain.errors import BadFile, InvalidInput, StorageError, TrialError
from polythrottle.storage.json_channel import Channel
from polythrottle.storage.untrusted import last_line

if TYPE_CHECKING:
    from typing_extensions import Self

# What is to be trained, on what and how: a job as the trainer needs it.

HEAD = "head"
ADAPTERS = "adapters"
DEVICES = ("auto", "cpu", "cuda")
_FREE = ("epochs", "threads", "device", "served", "latency_limit_s", "slower", "memory_bytes")
"""What may differ when a job is resumed."""
_WHOLE = ("batch", "epochs", "rank", "threads", "memory_bytes")


@dataclass(frozen=True)
class Task:
    """A job as the trainer needs it.

    Args:
        model: ``package.module:callable``, ``model.pt2`` or TorchScript's ``model.pt``.
        data: Folder of samples; see `polythrottle.training.beside.trainer.job_folder`.
        folder: Of the job: checkpoints and all that; made if it is not there.
        batch: Samples of a step.
        epochs: How often each sample is seen.
        seed: Of the order of samples and of new weights.
        trained: ``head`` for the last linear layer, ``adapters`` for that and low-rank adapters on all other ones.
        rank: Of the adapters (LoRA, arXiv 2106.09685).
        learning_rate: Of Adam (arXiv 1412.6980).
        held_out: Share of the samples that are kept for validation, 0..1.
        served: The model file to be replaced; empty if none is to be.
        latency_limit_s: The longest one sample may take through the new model; None for no such limit.
        slower: How many times the served model's latency the new one's may be.
        threads: Of torch.
        device: ``cpu``, ``cuda``, or ``auto`` for cuda where there is one.
        memory_bytes: Most memory the trainer may take beyond its model; None for no limit; on the CPU only.

    Raises:
        InvalidInput: If a value is out of its range.
    """

    model: str
    data: str
    folder: str
    batch: int = 32
    epochs: int = 1
    seed: int = 0
    trained: str = HEAD
    rank: int = 4
    learning_rate: float = 1e-3
    held_out: float = 0.1
    served: str = ""
    latency_limit_s: float | None = None
    slower: float = 1.25
    threads: int = 1
    device: str = "auto"
    memory_bytes: int | None = None

    def __post_init__(self) -> None:
        for name, known in (("trained", (HEAD, ADAPTERS)), ("device", DEVICES)):
            if getattr(self, name) not in known:
                raise InvalidInput(f"{name} must be {' or '.join(known)}, not {getattr(self, name)!r}")
        for name in ("model", "data", "folder"):
            if not getattr(self, name):
                raise InvalidInput(f"{name} is missing")
        for name in _WHOLE:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InvalidInput(f"{name} must be at least 1, not {value}")
        self._check_reals()

    def _check_reals(self) -> None:
        if self.seed < 0:
            raise InvalidInput(f"seed must be 0 or more, not {self.seed}")
        if not (math.isfinite(self.learning_rate) and self.learning_rate > 0):
            raise InvalidInput(f"learning_rate must be above 0, not {self.learning_rate}")
        if not 0 < self.held_out < 1:
            raise InvalidInput(f"held_out is a share between 0 and 1, not {self.held_out}")
        if not (math.isfinite(self.slower) and self.slower >= 1):
            raise InvalidInput(f"slower must be at least 1, not {self.slower}")
        if self.latency_limit_s is not None and not self.latency_limit_s > 0:
            raise InvalidInput(f"latency_limit_s must be above 0, not {self.latency_limit_s}")

    def check_data(self) -> None:
        """Check that the data folder is there, for a model and torch take seconds to open.

        Raises:
            BadFile: If it cannot be listed.
        """
        try:
            os.scandir(self.data).close()
        except OSError as err:
            raise BadFile(f"the data folder {self.data} cannot be read: {err.strerror}") from err

    def document(self) -> dict[str, Any]:
        """Return it as JSON."""
        return asdict(self)

    def differences(self, other: Task) -> tuple[str, ...]:
        """Return the names of what makes the other one a different job; empty if it resumes this one."""
        mine = self.document()
        theirs = other.document()
        return tuple(name for name in mine if name not in _FREE and mine[name] != theirs[name])

    @classmethod
    def from_document(cls, document: Any) -> Task:
        """Return the task of a JSON document.

        Raises:
            InvalidInput: If a field is missing, unknown, of another type or out of its range.
        """
        if isinstance(document, dict):
            given: Mapping[str, Any] = document
        else:
            given = {}
        known = {each.name: each for each in fields(cls)}
        odd = sorted(set(given) - set(known)) or [
            name for name, value in given.items() if not _fits(value, str(known[name].type), known[name].default)
        ]
        lacks = [name for name in ("model", "data", "folder") if name not in given]
        if odd or lacks:
            raise InvalidInput(f"that is no task: {', '.join(lacks or odd)} is {'missing' if lacks else 'not right'}")
        return cls(**given)


def _fits(value: Any, kind: str, default: Any) -> bool:
    """Return whether a value out of JSON is of the kind of a field."""
    if value is None:
        return default is None
    if isinstance(value, bool):
        return False
    if "str" in kind:
        return isinstance(value, str)
    return isinstance(value, int) or ("float" in kind and isinstance(value, float))


# The line between whoever schedules fine-tuning and the trainer: one JSON object per line over a Unix stream socket.
#
# A request is ``{"verb": …}`` with the verb's fields, in at most 64 KiB; its answer is ``{"answer": {…}}`` or
# ``{"error": {"kind": …, "words": …}}``, in at most 1 MiB. One request at a time: the trainer does nothing unasked,
# and ends when the other side hangs up. Times are seconds, types strict as in `polythrottle.storage.json_channel`. The
# verbs:
#
# ``hello`` {task}
#     → ``pid``, ``samples``, ``held_out``, ``batch``, ``epochs``, ``steps_per_epoch``, ``output`` (dimension of the
#     head), ``trained_parameters``, ``device``, ``operations`` and ``traffic_bytes`` of one sample's forward pass (null
#     with ``uncounted`` saying why), and what ``slice`` says of where it stands. Begins or resumes a job: the first
#     request, and only that. ``task`` is a `polythrottle.training.beside.trainer.driver.Task` as JSON.
# ``slice`` {samples, write}
#     → ``samples`` (done now: never past the end of a step), ``took_s``, ``of`` (samples of this step), ``at`` (of them
# done; 0 between two steps), ``step`` (steps done), ``written`` (whether the last of them is on disk), ``epoch`` (the
# one that runs, from 0), ``position`` (samples of it in steps done), ``loss`` (mean of the step, when one ended; else
#     null), ``finished`` (the job), ``halved_to`` (most samples at once since memory ran out; else null), ``left_out``
#     [{file, why}], ``notices`` [text]. The slice that ends a step moves the weights and, with ``write``, brings a
#     checkpoint to disk; without, ``checkpoint`` does, or the next slice before anything else.
# ``checkpoint`` {}
#     → as ``slice``, without ``took_s``, ``samples``, ``loss`` and ``left_out``. Brings the last step to disk, if it is
#     not there yet: little computing and much waiting for the disk, so that it can go beside inference.
# ``validate`` {samples}
#     → ``done``, ``of`` (held-out samples), ``result`` (null until all are done; see `server.ValidationVerdict`). The
#     first request writes the candidate, each one then runs at most ``samples`` held-out samples through it and through
#     the served model, the last one times both.
# ``swap`` {}
#     → ``served``, ``previous`` (the file kept for going back; null if there was none). Refused unless the last
#     validation holds and nothing was trained since.
# ``rollback`` {}
#     → ``served``. The file kept is served again.
# ``stop`` {}
#     → {}, and the trainer ends. What was done of an unfinished step is forgotten.

MOST_REQUEST = 64 * 1024
MOST_ANSWER = 1024 * 1024
"""The longest request and the longest answer, in bytes, the newline included."""


class TrainerLost(TrialError):
    """The trainer has died, hangs or answers against the protocol; a new one resumes from its last checkpoint."""


LOG = "trainer.log"

_LAST_WORDS = 200
_REAP_S = 5.0
# A terminal's Ctrl-C then reaches the driver alone, and the kernel ends a suspended trainer whose driver dies (POSIX,
# _exit: SIGHUP to a newly orphaned process group with stopped members). A session of its own would be no such group.
_OWN_GROUP: Mapping[str, Any] = {"process_group": 0} if sys.version_info >= (3, 11) else {"preexec_fn": os.setpgrp}


@dataclass(frozen=True)
class Hello:
    """What a trainer says of its job once it is open.

    Args:
        pid: Of the trainer.
        samples: To train on, in the epoch that runs.
        held_out: To validate with.
        steps_per_epoch: Steps of one epoch.
        output: Dimension of the head.
        trained_parameters: Weights that are trained.
        device: Where it trains.
        operations: Of one sample's forward pass; None if they cannot be counted.
        traffic_bytes: What that moves besides weights; None likewise.
        uncounted: Why not; empty if they can.
        step: Steps done and on disk.
        epoch: The one that runs, from 0.
        position: Samples of it that are done.
        of: Samples of the step that comes.
        finished: Whether nothing is left to do.
        notices: What a user should know.
    """

    pid: int
    samples: int
    held_out: int
    steps_per_epoch: int
    output: int
    trained_parameters: int
    device: str
    operations: float | None
    traffic_bytes: float | None
    uncounted: str
    step: int
    epoch: int
    position: int
    of: int
    finished: bool
    notices: tuple[str, ...]


@dataclass(frozen=True)
class SliceDone:
    """A slice as it was answered, and how long it took by the driver's own clock.

    Args:
        measured_s: From the request to its answer; what a schedule must go by.
        took_s: What the trainer says.
        samples: Done.
        of: Samples of the step it was in.
        at: Of the step that runs now, done; 0 between two steps.
        step: Steps done.
        written: Whether the last of them is on disk.
        epoch: The one that runs, from 0.
        position: Samples of it in steps done.
        loss: Mean of the step, if one ended with samples that could be read; else None.
        finished: Whether nothing is left to do.
        halved_to: Most samples the trainer takes at once since memory ran out; None if it never did.
        left_out: Files that could not be read, and why; at most 8.
        notices: What a user should know.
    """

    measured_s: float
    took_s: float
    samples: int
    of: int
    at: int
    step: int
    written: bool
    epoch: int
    position: int
    loss: float | None
    finished: bool
    halved_to: int | None
    left_out: tuple[tuple[str, str], ...]
    notices: tuple[str, ...]


class Trainer:
    """A trainer's process; a context manager that has ended it when it is left.

    `slice` waits for its answer; to do something meanwhile, `post` it and look for its `reply`. Not for several threads
    at once.

    Args:
        task: What it is to train.
        start_s: How long it may take until the job is open.
        patience_s: How long any answer may take; a trainer that takes longer is ended.
        command: What is run, in place of this Python's trainer; the handle of the socket is added.
    """

    def __init__(
        self, task: Task, *, start_s: float = 120.0, patience_s: float = 60.0, command: Sequence[str] | None = None
    ) -> None:
        self.task = task
        self._start_s = start_s
        self._patience_s = patience_s
        self._command = command or (sys.executable, "-m", "polythrottle.training.beside.trainer")
        self._process: subprocess.Popen[bytes] | None = None
        self._line: Channel | None = None
        self._posted: tuple[str, float] | None = None
        self._logged = 0

    def start(self) -> Hello:
        """Start the process and have it begin the job or take it up again.

        Raises:
            InvalidInput: If it runs already.
            TrainerLost: If it dies or takes too long.
            StorageError: If the job's folder cannot be written.
            DeviceError: If another trainer is in it.
            PolythrottleError: What it refuses the job with.
        """
        if self._line is not None:
            raise InvalidInput("the trainer runs already")
        folder = Path(self.task.folder)
        ours, its = socket.socketpair()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with its, open(folder / LOG, "ab") as log:
                self._logged = log.tell()
                self._process = subprocess.Popen(
                    [*self._command, str(its.fileno())],
                    pass_fds=[its.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    **_OWN_GROUP,
                    env=_environment(self.task.threads),
                )
        except OSError as err:
            ours.close()
            raise StorageError(f"no trainer can be started in {folder}: {err.strerror}") from err
        self._line = Channel(ours, MOST_ANSWER)
        try:
            hello = self.ask("hello", self._start_s, task=self.task.document())
            return _hello(hello)
        except BaseException:
            self.kill()
            raise

    @property
    def pid(self) -> int | None:
        """Of the process; None if there is none."""
        if self._process is not None:
            return self._process.pid
        return None

    def post(self, verb: str, **fields: Any) -> None:
        """Ask for something without waiting; its answer is `reply`'s.

        Raises:
            TrainerLost: If the trainer is gone.
            InvalidInput: If it has not answered yet what it was asked before.
        """
        if self._posted is not None:
            raise InvalidInput(f"the trainer has not answered {self._posted[0]} yet")
        posted_s = time.monotonic()
        try:
            self._wire.send({"verb": verb, **fields}, self._patience_s)
        except OSError as err:
            raise self._lost("has hung up") from err
        self._posted = verb, posted_s

    def reply(self, timeout_s: float = 0.0) -> tuple[dict[str, Any], float] | None:
        """Return the answer to what was posted and the seconds since then; None if it has not come in time.

        Raises:
            TrainerLost: If the trainer has died or answers against the protocol; it is ended.
            PolythrottleError: What it refuses with.
        """
        if self._posted is None:
            raise InvalidInput("the trainer was not asked anything")
        try:
            message = self._wire.receive(timeout_s)
        except (EOFError, OSError) as err:
            raise self._lost("has died") from err
        except InvalidInput as err:
            raise self._lost(f"has sent an invalid answer ({err})") from err
        if message is None:
            return None
        measured_s = time.monotonic() - self._posted[1]
        self._posted = None
        if "error" in message:
            raise error_from(message["error"])
        if not isinstance(message.get("answer"), dict):
            raise self._lost("has sent an invalid answer (it is neither an answer nor an error)")
        return message["answer"], measured_s

    def ask(self, verb: str, timeout_s: float | None = None, **fields: Any) -> dict[str, Any]:
        """Return the answer to a request.

        Raises:
            TrainerLost: If the trainer dies, or does not answer in time; it is ended.
            PolythrottleError: What it refuses with.
        """
        self.post(verb, **fields)
        return self._awaited(self._patience_s if timeout_s is None else timeout_s)[0]

    def _awaited(self, timeout_s: float) -> tuple[dict[str, Any], float]:
        reply = self.reply(timeout_s)
        if reply is None:
            raise self._lost(f"has not answered for {timeout_s:g} s")
        return reply

    def slice(self, samples: int, timeout_s: float | None = None, *, write: bool = True) -> SliceDone:
        """Have some samples of a step done.

        Args:
            samples: At most; a slice ends where its step does.
            timeout_s: How long it may take.
            write: Whether a step that ends is written to disk within the slice. If not, ``ask("checkpoint")`` does it,
                which waits for the disk more than it computes, or else the next slice does before anything else: so
                that never more than one step is lost.

        Raises:
            TrainerLost: If the trainer dies, or does not answer in time; it is ended.
            PolythrottleError: What it refuses with; see `polythrottle.training.beside.trainer.worker.Worker.slice`.
        """
        self.post("slice", samples=samples, write=write)
        return self.done(*self._awaited(self._patience_s if timeout_s is None else timeout_s))

    def done(self, told: Mapping[str, Any], measured_s: float) -> SliceDone:
        """Return a slice's `reply` as a value.

        Raises:
            TrainerLost: If it is not valid; the trainer is ended.
        """
        try:
            return _slice_done(told, measured_s)
        except (KeyError, TypeError, ValueError) as err:
            raise self._lost("has sent an invalid answer (a slice's answer was expected)") from err

    def suspend(self) -> None:
        """Stop the process where it is, at once; `resume` lets it go on."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let a stopped process go on."""
        self._signal(signal.SIGCONT)

    def stop(self, timeout_s: float = 10.0) -> None:
        """End the trainer in good order, or, where it does not answer in time, at once; never fails."""
        if self._process is not None and self._posted is None:
            with suppress(Exception):
                self.resume()
                self.ask("stop", timeout_s)
                self._process.wait(_REAP_S)
        self.kill()

    def kill(self) -> None:
        """End the process at once; nothing but the step it was in is lost."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        if self._line is not None:
            self._line.close()
        self._line = self._posted = None

    def abandon(self) -> None:
        """End the process at once while another thread waits for its answer, which then is that it has died."""
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None:
            self._process.send_signal(number)

    @property
    def _wire(self) -> Channel:
        if self._line is None:
            raise TrainerLost("the trainer is not running; start it")
        return self._line

    def _lost(self, what: str) -> TrainerLost:
        """End the process, and return what is to be said of it."""
        process = self._process
        code = None
        if process is not None:
            with suppress(subprocess.TimeoutExpired):  # who hangs up is about to end, and its code tells why
                code = process.wait(0.5)
        self.kill()
        how = ""
        if code is not None:
            how = f" ({_ending(code)})"
        words = _words(Path(self.task.folder) / LOG, self._logged)
        return TrainerLost(
            f"the trainer {what}{how}; all steps but the one it was in are kept, a new one goes on from there{words}"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop() if kind is None else self.kill()


def _environment(threads: int) -> dict[str, str]:
    """Return the environment of a trainer: it finds the modules that this process finds, and keeps to its threads.

    Between slices its threads sleep: by default they would spin for a while and keep inference from the processors
    (GNU libgomp manual, OMP_WAIT_POLICY and GOMP_SPINCOUNT).
    """
    ours = {"OMP_NUM_THREADS": str(threads), "PYTHONPATH": os.pathsep.join(sys.path)}
    return {"OMP_WAIT_POLICY": "PASSIVE", **os.environ, **ours}


def _ending(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    with suppress(ValueError):
        return f"killed by {signal.Signals(-code).name}"
    return f"killed by signal {-code}"


def _words(log: Path, start: int) -> str:
    """Return the last line of a log after its first bytes, for people."""
    try:
        last = last_line(log.read_bytes()[start:], _LAST_WORDS)
    except OSError:
        return ""
    if last:
        return f"; its last words: {last}"
    return ""


def _hello(told: Mapping[str, Any]) -> Hello:
    try:
        fields = {name: told[name] for name in Hello.__dataclass_fields__}
    except KeyError as err:
        raise TrainerLost(f"the trainer has sent an invalid answer (its hello lacks {err})") from err
    return Hello(**{**fields, "notices": tuple(fields["notices"])})


def _slice_done(told: Mapping[str, Any], measured_s: float) -> SliceDone:
    fields = {name: told[name] for name in SliceDone.__dataclass_fields__ if name != "measured_s"}
    left_out = tuple((str(each["file"]), str(each["why"])) for each in fields["left_out"])
    numbers = ("took_s", "samples", "of", "at", "step", "epoch", "position")
    if any(not isinstance(fields[name], (int, float)) for name in numbers):
        raise TypeError("a number was expected")
    return SliceDone(measured_s, **{**fields, "left_out": left_out, "notices": tuple(map(str, fields["notices"]))})
