"""A worker's process: forked with torch imported already, how fast it trains, and why it failed.

Its pace is kept for its node's agent, and it talks with the controller in a thread of its own. Of a failure are told
exit code, last words, memory.
"""

import atexit
import json
import multiprocessing
import os
import re
import runpy
import select
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from math import isfinite
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from types import TracebackType
from typing import Any

from typing_extensions import Self

from polythrottle.domain.clock import Clock, SystemClock
from polythrottle.domain.errors import InvalidInput, PolythrottleError
from polythrottle.training.elastic.channel import ControllerAway, ControllerChannel

# Workers that begin at once: forked by a process that has imported torch already (Python's own fork server).
#
# Importing torch takes most of the time from a loss to the next first step. The fork server has imported it, and
# nothing else happens in it: no thread runs there, no GPU is touched, so that a fork of it is as good as a fresh
# interpreter.

METHOD = "forkserver"
_LOADED = [
    "torch",
    "torch.distributed",
    "torch.utils.data",
    "torch._dynamo",
    "polythrottle.training.elastic.worker.elastic_training",
]
"""The first optimiser imports torch._dynamo, which takes as long as torch itself (torch 2.13.0)."""
_KEPT_OFF = {signal.SIGTERM, signal.SIGHUP, signal.SIGINT}


def warm_up() -> None:
    """Start the fork server of this process, which then imports torch beside what goes on here.

    What is sent to a whole group of processes must not end it: its workers stop in order, and need it to be seen. So it
    begins with such signals blocked, and each worker unblocks them.
    """
    multiprocessing.set_forkserver_preload(_LOADED)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # a lost peer is no news, and torch prints its own stack
    resource_tracker.ensure_running()  # the fork server would start it, which unblocks signals (Python 3.11 to 3.14)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _KEPT_OFF)
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def own_words(environment: Mapping[str, str]) -> str:
    """Return what a worker has to know of its node's environment as it is now, as one word."""
    return json.dumps({name: value for name, value in environment.items() if name.startswith("POLYTHROTTLE_")})


def have_ended_well(workers: object) -> bool:
    """Return whether all workers have ended with code 0, by ``os._exit`` too: torch then waits for results for ever.

    Args:
        workers: What TorchElastic's agent holds of them.
    """
    started = getattr(getattr(workers, "_pc", None), "processes", ())
    return bool(started) and all(process.exitcode == 0 for process in started)


def train(known: str, script: str, *words: str) -> None:
    """Execute a training script in this process as an interpreter of its own would.

    Args:
        known: What `own_words` returned.
        script: Path of the script.
        words: Its arguments.

    Raises:
        SystemExit: If the script ends with a code other than 0.
    """
    import numpy
    import torch

    for name in _KEPT_OFF:
        signal.signal(name, signal.default_int_handler if name == signal.SIGINT else signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _KEPT_OFF)
    os.environ.update(json.loads(known))
    if torch.cuda._is_in_bad_fork():  # something imported has touched a GPU: no fork of that may
        os.execv(sys.executable, [sys.executable, "-u", script, *words])
    multiprocessing.set_start_method(None, force=True)  # it is the script's to choose
    sys.argv = [script, *words]
    sys.path[0:1] = [str(Path(script).parent)]
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(write_through=True)  # type: ignore[union-attr]
    numpy.random.seed()  # the state the script may use would be that of every fork
    _execute(script)


def _execute(script: str) -> None:
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as err:
        if err.code not in (None, 0):
            raise
    except Exception:
        traceback.print_exc()
        sys.exit(1)
    finally:
        atexit._run_exitfuncs()


# Why a worker failed: its exit code or signal, what it said last, and whether the kernel was short of memory.

KEPT_BYTES = 8192
LINES = 12
WIDTH = 300
_COLOUR = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_TRACEBACK = "Traceback (most recent call last):"


@dataclass(frozen=True)
class Fault:
    """How a worker ended that should not have.

    Attributes:
        exit_code: What it ended with; None if a signal ended it.
        signal: Name of the signal that ended it; empty if none did.
        said: The last lines of its node's standard error, oldest first.
        short_of_memory: Whether the kernel ended processes for lack of memory meanwhile; None where it does not say.
    """

    exit_code: int | None = None
    signal: str = ""
    said: tuple[str, ...] = ()
    short_of_memory: bool | None = None

    @property
    def reason(self) -> str:
        """Return it as one line."""
        if self.signal:
            return f"{self.signal} ended a worker{self._of_memory()}"
        text = message(self.said)
        return f"a worker ended with code {self.exit_code}" + (f": {text}" if text else "")

    def _of_memory(self) -> str:
        if self.short_of_memory:
            return ": the kernel ended processes for lack of memory meanwhile"
        unknown = self.short_of_memory is None and self.signal == "SIGKILL"
        if unknown:
            return "; lack of memory is the usual reason, see dmesg"
        return ""

    def document(self) -> dict[str, Any]:
        """Return it as a document."""
        known = {"exit_code": self.exit_code, "signal": self.signal or None, "said": list(self.said)}
        return {"reason": self.reason, **known, "short_of_memory": self.short_of_memory}

    @classmethod
    def from_document(cls, words: Mapping[str, Any]) -> Self:
        """Return the fault of a document, of which no more is kept than belongs into one.

        Raises:
            ValueError: If it is not valid.
            TypeError: If it is not valid.
        """
        code = words.get("exit_code")
        memory = words.get("short_of_memory")
        said = _plain([str(line) for line in words.get("said") or ()])
        name = str(words.get("signal") or "")[:20]
        return cls(None if code is None else int(code), name, said, None if memory is None else bool(memory))


def fault_of(exit_code: int, said: Sequence[str] = (), short_of_memory: bool | None = None) -> Fault:
    """Return the fault of a worker.

    Args:
        exit_code: As ``subprocess`` gives it: below 0 for a signal.
        said: The last lines of its node's standard error.
        short_of_memory: Whether the kernel ended processes for lack of memory meanwhile; None where it does not say.
    """
    lines = _plain(said)
    if exit_code >= 0:
        return Fault(exit_code, said=lines)
    try:
        name = signal.Signals(-exit_code).name
    except ValueError:
        name = f"signal {-exit_code}"
    return Fault(None, name, lines, short_of_memory)


def _plain(said: Sequence[str]) -> tuple[str, ...]:
    """Return the last lines without colours and other control characters, none too long."""
    bare = (_COLOUR.sub("", line) for line in said[-LINES:])
    return tuple("".join(each for each in line if each.isprintable())[:WIDTH] for line in bare)


def message(said: Sequence[str]) -> str:
    """Return the line that says most of a failure: an exception's own of a traceback, else the last."""
    lines = [line for line in said if line.strip() and not line.startswith("polythrottle:")]
    starts = [number for number, line in enumerate(lines) if line.startswith(_TRACEBACK)]
    after = lines[starts[-1] + 1 :] if starts else lines
    if starts:
        raised = [line for line in after if not line.startswith(" ")]
    else:
        raised = []
    return (raised[:1] or after[-1:] or [""])[0].strip()


class LastWords:
    """Passes on what this process and its children write to a descriptor, and keeps the end of it.

    A context manager: leaving it gives the descriptor back.

    Args:
        descriptor: Which; standard error.
        kept: How many bytes to keep.
    """

    def __init__(self, descriptor: int = 2, kept: int = KEPT_BYTES) -> None:
        self._descriptor = descriptor
        self._kept = kept
        self._tail = b""
        self._lock = threading.Lock()
        self._ended = threading.Event()

    def __enter__(self) -> Self:
        self._out = os.dup(self._descriptor)
        self._pipe, writing = os.pipe()
        os.set_blocking(self._pipe, False)
        os.dup2(writing, self._descriptor)
        os.close(writing)
        self._thread = threading.Thread(target=self._pass_on, daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.dup2(self._out, self._descriptor)
        self._ended.set()
        self._thread.join()
        self._drain()
        os.close(self._pipe)
        os.close(self._out)

    def lines(self) -> list[str]:
        """Return the last lines up to now; what a process that has ended wrote is among them."""
        self._drain()
        whole = self._tail.decode(errors="replace").replace("\r", "\n")
        return [line.rstrip() for line in whole.split("\n") if line.strip()][-LINES:]

    def _pass_on(self) -> None:
        while not self._ended.is_set():
            if select.select([self._pipe], [], [], 0.1)[0]:
                self._drain()

    def _drain(self) -> None:
        with self._lock, suppress(BlockingIOError):
            while part := os.read(self._pipe, 1 << 16):
                self._tail = (self._tail + part)[-self._kept :]
                _write(self._out, part)


def _write(descriptor: int, data: bytes) -> None:
    """Write all of it; where nobody reads any more, training goes on unheard."""
    with suppress(OSError):
        while data:
            data = data[os.write(descriptor, data) :]


class MemoryWatch:
    """Tells whether the kernel has ended processes for lack of memory since it was asked last.

    Args:
        root: Where ``proc`` and ``sys`` hang.
    """

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        self._before = self._counts()

    def killed(self) -> bool | None:
        """Return whether it has, among this group's processes or on this machine; None where neither is counted."""
        before = self._before
        self._before = self._counts()
        known = [key for key in self._before if key in before]
        if known:
            return any(self._before[key] > before[key] for key in known)
        return None

    def _counts(self) -> dict[str, int]:
        """Return the counts ``oom_kill`` of the own control group (cgroup v2) and of the machine (/proc/vmstat)."""
        own = _found(self._root / "proc/self/cgroup", r"^0::/(.*)$") or ""
        files = {"machine": self._root / "proc/vmstat", "group": self._root / "sys/fs/cgroup" / own / "memory.events"}
        counts = {name: _found(path, r"^oom_kill (\d+)$") for name, path in files.items()}
        return {name: int(count) for name, count in counts.items() if count is not None}


def _found(path: Path, pattern: str) -> str | None:
    """Return what a pattern's group finds in a file of the kernel's, None where there is no such file or line."""
    with suppress(OSError):
        matched = re.search(pattern, path.read_text(), re.MULTILINE)
        if matched:
            return matched[1]
        return None
    return None


# How fast one node's workers train: counters that each worker keeps, and the file by which its node's agent sees
# them.
#
# Nothing here waits for anybody: a worker's reporter writes a file beside training, the agent reads it now and then.

FOLDER = "POLYTHROTTLE_CLUSTER_PACE"
"""The environment variable with the folder of a node's paces, which its agent gives its workers."""


@dataclass(frozen=True)
class Tally:
    """Times of steps, summed.

    Attributes:
        steps: How many.
        step_s: From the end of one step to the end of the next, in seconds; what follows a step is left out.
        peers_s: Of that, waiting for the other workers once its own gradient was there, the exchange included.
        data_s: Of that, waiting for samples.
    """

    steps: int = 0
    step_s: float = 0.0
    peers_s: float = 0.0
    data_s: float = 0.0

    def __post_init__(self) -> None:
        if not all(isfinite(each) and each >= 0 for each in (self.steps, self.step_s, self.peers_s, self.data_s)):
            raise InvalidInput(f"steps and their times are finite and at least 0, not {self}")

    @property
    def own_s(self) -> float:
        """Return the time without waiting for others, in seconds; never more than the whole."""
        return max(0.0, self.step_s - self.peers_s)

    def plus(self, other: "Tally") -> "Tally":
        """Return both together."""
        return Tally(
            self.steps + other.steps,
            self.step_s + other.step_s,
            self.peers_s + other.peers_s,
            self.data_s + other.data_s,
        )

    def since(self, before: "Tally") -> "Tally":
        """Return what has come since an earlier tally of the same counters."""
        return Tally(
            max(0, self.steps - before.steps),
            max(0.0, self.step_s - before.step_s),
            max(0.0, self.peers_s - before.peers_s),
            max(0.0, self.data_s - before.data_s),
        )


@dataclass(frozen=True)
class Pace:
    """What one worker has done since its generation began.

    Attributes:
        generation: The generation.
        network: What is trained with how many samples at once: the name under which a fleet knows it.
        share: Samples of one worker in a step.
        batch: Samples of the whole step.
        left: Steps that are left of the training.
        tally: Times of all its steps.
        cold: Of them, those of the first epoch this process saw, whose samples may not have been in memory yet.
    """

    generation: int
    network: str
    share: int
    batch: int
    left: int
    tally: Tally = field(default_factory=Tally)
    cold: Tally = field(default_factory=Tally)

    def document(self) -> dict[str, Any]:
        """Return it for JSON."""
        return asdict(self)


def pace_of(document: Mapping[str, Any]) -> Pace:
    """Return the pace that a document holds.

    Raises:
        InvalidInput: If it is not valid.
    """
    try:
        generation, share, batch, left = (int(document[name]) for name in ("generation", "share", "batch", "left"))
        network = str(document["network"])[:100]
        tally = Tally(**document["tally"])
        cold = Tally(**document["cold"])
        return Pace(generation, network, share, batch, left, tally, cold)
    except (KeyError, TypeError, ValueError, ArithmeticError) as error:
        raise InvalidInput(f"no pace of a worker: it lacks or garbles {error}") from error


def write_pace(folder: Path, worker: int, pace: Pace) -> None:
    """Write a worker's pace for its node's agent; where that cannot be, training goes on without."""
    path = folder / f"{worker}.json"
    draft = path.with_suffix(".draft")
    with suppress(OSError):
        # Replaced whole, for the agent may read at any moment; not synced, for a pace is worthless after a crash.
        draft.write_text(json.dumps(pace.document()))
        os.replace(draft, path)


def read_pace(folder: Path) -> Pace | None:
    """Return the pace of a node: that of its slowest worker in the newest generation; None before any has said one."""
    paces = [pace for path in folder.glob("*.json") if (pace := _read(path)) is not None]
    # A worker of a former generation that was killed has left its file behind.
    newest = max((pace.generation for pace in paces), default=0)
    return max((pace for pace in paces if pace.generation == newest), key=_own_s, default=None)


def _own_s(pace: Pace) -> float:
    if pace.tally.steps:
        return pace.tally.own_s / pace.tally.steps
    return 0.0


def _read(path: Path) -> Pace | None:
    with suppress(OSError, ValueError, InvalidInput, TypeError):
        return pace_of(json.loads(path.read_text()))
    return None


# A worker's talk with the controller, in a thread of its own, so that training never waits for it.

ASK_S = 0.5
GRACE_S = 0.5


class Reporter:
    """Tells the controller of steps and checkpoints, and hears whether to stop.

    Args:
        line: The way to the controller; None outside an elastic job.
        node: The node's name.
        rank: The worker's rank.
        generation: The generation it trains in.
        cut_off: Called when the others are gone for good: the process that holds this worker, or a member.
        clock: Measures the grace after which it is called.
        pace: Says how fast this worker is; written for the node's agent, which steers its board.
    """

    def __init__(
        self,
        line: ControllerChannel | None,
        node: str,
        rank: int,
        generation: int,
        cut_off: Callable[[], None],
        clock: Clock | None = None,
        pace: Callable[[], Pace | None] = lambda: None,
    ) -> None:
        self._line = line
        self._node = node
        self._rank = rank
        self._generation = generation
        self._cut_off = cut_off
        self._clock = clock or SystemClock()
        self._parent = os.getppid()
        self._pace = pace
        self._folder = os.environ.get(FOLDER, "")
        self._records: list[dict[str, Any]] = []
        self._place: dict[str, int] = {}
        self._lock = threading.Lock()
        self._more = threading.Event()
        self._ended = threading.Event()
        self._broken_s: float | None = None
        self.stop = False
        self.checkpoints_wanted = 0
        self.hazard_per_s = 0.0
        self._thread = threading.Thread(target=self._talk, daemon=True)

    def start(self) -> None:
        """Begin to talk."""
        if self._line is not None:
            self._ask()
            self._thread.start()

    def note(self, record: Mapping[str, Any], now: bool = False) -> None:
        """Tell of something that happened; the next report carries it, ``now`` at once."""
        if self._line is not None:
            with self._lock:
                self._records.append(dict(record))
            if now:
                self._more.set()

    def stand(self, step: int, epoch: int) -> None:
        """Tell of the place the training has reached."""
        self._place = {"step": step, "epoch": epoch}

    def close(self) -> None:
        """Tell what is left, and end."""
        self._ended.set()
        self._more.set()
        if self._thread.is_alive():
            self._thread.join(5.0)

    def _talk(self) -> None:
        while not self._ended.is_set():
            self._more.wait(ASK_S)
            self._more.clear()
            self._show_pace()
            self._ask()
            if os.getppid() != self._parent:
                self._cut_off()
        self._ask()

    def _show_pace(self) -> None:
        pace = None
        if self._folder:
            pace = self._pace()
        if pace is not None:
            write_pace(Path(self._folder), self._rank, pace)

    def _ask(self) -> None:
        with self._lock:
            records = self._records
            self._records = []
        place = self._place if self._rank == 0 else {}
        words = {"node": self._node, "rank": self._rank, "generation": self._generation, "records": records, **place}
        try:
            assert self._line is not None
            answer = self._line.ask("report", **words)
        except PolythrottleError as err:
            # One that was refused would be refused again; only those that did not arrive are sent once more.
            if isinstance(err, ControllerAway):
                with self._lock:
                    self._records = records + self._records
            return
        self._hear(answer)

    def _hear(self, answer: Mapping[str, Any]) -> None:
        self.stop = self.stop or bool(answer.get("stop"))
        with suppress(KeyError, TypeError, ValueError, OverflowError):  # no figures: what was told before holds
            self.checkpoints_wanted = int(answer["checkpoints"])
            self.hazard_per_s = float(answer["hazard_per_s"])
        if not answer.get("broken"):
            self._broken_s = None
            return
        if self._broken_s is None:
            self._broken_s = self._clock.now()
        # The others may only be late by a moment, and a worker that is cut off loses its step.
        if self._clock.now() - self._broken_s >= GRACE_S:
            self._cut_off()
