"""How fast a worker trains, kept for its node's agent, and its talk with the controller in a thread of its own."""

import fcntl
import json
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any

from polythrottle.domain.clock import Clock, SystemClock
from polythrottle.domain.errors import InvalidInput, PolythrottleError
from polythrottle.training.elastic.channel import ControllerAway, ControllerChannel

# How fast one node's workers train: counters that each worker keeps, and the file by which its node's agent sees
# them.
#
# Nothing here waits for anybody: a worker's reporter writes a file beside training, the agent reads it now and then.

FOLDER = "POLYTHROTTLE_CLUSTER_PACE"
"""The environment variable with the folder of a node's paces, which its agent gives its workers."""

_PREFIX = "polythrottle-pace-"
_LOCK = "lock"


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


def own_folder() -> tuple[Path, int]:
    """Return a new folder for the paces of a node, and the handle of the lock that says its agent is alive.

    What agents that were killed have left behind is cleared away.
    """
    for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        _clear(path)
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
    lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    return folder, lock


def _clear(folder: Path) -> None:
    """Remove a folder of this user's whose agent is gone: the kernel has dropped its lock."""
    with suppress(OSError):
        # /tmp is everybody's: another user could have put a folder of this name there.
        if folder.lstat().st_uid != os.geteuid():
            return
        lock = os.open(folder / _LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(lock)


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
        self.stop = self.stop or bool(answer["stop"])
        self.checkpoints_wanted = int(answer["checkpoints"])
        self.hazard_per_s = float(answer["hazard_per_s"])
        if not answer["broken"]:
            self._broken_s = None
            return
        if self._broken_s is None:
            self._broken_s = self._clock.now()
        # The others may only be late by a moment, and a worker that is cut off loses its step.
        if self._clock.now() - self._broken_s >= GRACE_S:
            self._cut_off()
