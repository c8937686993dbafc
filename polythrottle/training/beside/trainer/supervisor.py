"""A trainer that is supervised from a thread of its own: given slices, stopped, ended when it hangs, started again."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, Queue
from typing import Any

from polythrottle.domain.errors import PolythrottleError
from polythrottle.training.beside.trainer.driver import Hello, SliceDone, Trainer, TrainerLost
from polythrottle.training.beside.trainer.job_folder import newest_place, read_begun

# A thread that does one thing at a time and says when it is done.


@dataclass(frozen=True)
class CompletedCall:
    """Something a lane was asked for.

    Args:
        what: As it was called when asked for.
        began_s: On the clock of `time.monotonic`; ``ended_s`` likewise.
        value: What came of it; None if it failed.
        error: What it failed with; None if it did not.
    """

    what: Any
    began_s: float
    ended_s: float
    value: Any = None
    error: BaseException | None = None

    @property
    def took_s(self) -> float:
        """How long it took."""
        return self.ended_s - self.began_s


class WorkerThread:
    """A thread; what it has done is put into a queue that several lanes may share.

    Args:
        name: Of the thread.
        done: Where to put what is done.
    """

    def __init__(self, name: str, done: Queue[CompletedCall]) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._done = done

    def begin(self, what: Any, call: Callable[[], Any]) -> None:
        """Have something done; its `CompletedCall` comes through the queue, whatever it raises."""
        # Time is taken in the thread that did it, so that a busy queue does not count as work.
        began_s = time.monotonic()

        def told(future: Future[Any]) -> None:
            error = future.exception()
            value = None
            if error is None:
                value = future.result()
            self._done.put(CompletedCall(what, began_s, time.monotonic(), value, error))

        self._pool.submit(call).add_done_callback(told)

    def wait(self, call: Callable[[], Any]) -> Any:
        """Have something done and return what came of it, or raise what it raised."""
        return self._pool.submit(call).result()

    def close(self) -> None:
        """End the thread once it has done what it does."""
        self._pool.shutdown()


def ended_calls(done: Queue[CompletedCall], within_s: float) -> Iterator[CompletedCall]:
    """Yield what has ended, in its order, waiting so long for the first.

    Args:
        done: What threads put it into. No `queue.SimpleQueue`: where nobody has waited before, that of Python 3.11
            waits for good if its time is over by its second look, as is one wait of 1 µs in some thousands.
        within_s: Zero or less not to wait.
    """
    with suppress(Empty):
        yield done.get(timeout=max(0.0, within_s))
        while True:
            yield done.get_nowait()


# A trainer that is looked after: given slices, stopped in the middle of one, ended when it hangs, started again.

_FOREVER_S = 1e6
"""How long an answer to a slice is waited for: whether it hangs is judged here, where it may be held meanwhile."""
_HANGS = 20.0
_LEAST_S = 10.0
"""A slice that takes so many times its tail, and so long at least, hangs, unless somebody says otherwise."""
_SAVED_S = 30.0
"""How long bringing a step to disk may take."""
_RESTARTS = 3
"""So often in a row a trainer is started again without having ended a step in between."""
_NOTICES = 8
_GONE = "the trainer was gone at the end; the same run goes on after the last step on disk"

START = "start"
SLICE = "slice"
CHECKPOINT = "checkpoint"


class SupervisedTrainer:
    """A trainer and what it is doing; its answers come through a lane.

    Args:
        trainer: Not started.
        lane: Where it is asked.
        patience_s: For how long at least a slice may take before it counts as one that hangs.

    Attributes:
        suspended: How often a slice was stopped in the middle.
        restarts: How often the trainer was started again.
        stopped: Why there is no fine-tuning any more; empty while there is.
        exit_code: Of the failure that stopped it; 0 while there is none.
        notices: What a user should know.
    """

    def __init__(self, trainer: Trainer, lane: WorkerThread, patience_s: float = _LEAST_S) -> None:
        self._trainer = trainer
        self._lane = lane
        self._patience_s = patience_s
        self._doing = ""
        self._waited_for = False
        self._tail_s = 0.0
        self._ran_s = 0.0
        self._since_s = 0.0
        self._held = False
        self._unsaved = False
        self._lost = 0
        self._left = 0
        self._begun = (0, 0)
        self._place = (0, 0)
        self.hello: Hello | None = None
        self.suspended = self.restarts = self.epoch = 0
        self.finished = False
        self.stopped = ""
        self.exit_code = 0
        self.loss: float | None = None
        self.notices: list[str] = []

    @property
    def samples(self) -> int:
        """Trained since `count`, in whole steps."""
        return self._place[1] - self._begun[1]

    @property
    def steps(self) -> int:
        """Done since `count`."""
        return self._place[0] - self._begun[0]

    def open(self) -> Hello:
        """Start the trainer and wait until its job is open.

        Raises:
            PolythrottleError: If it cannot be; see `Trainer.start`.
        """
        hello: Hello = self._waited(self._trainer.start)
        self._greeted(hello)
        self.count()
        return hello

    @property
    def left_of_job(self) -> int:
        """Samples left until all epochs are done, in whole steps."""
        assert self.hello is not None
        return max(0, self._trainer.task.epochs * self.hello.samples - self._place[1])

    def count(self) -> None:
        """Count samples and steps from here on."""
        self._begun = self._place

    def _greeted(self, hello: Hello) -> None:
        self.hello = hello
        self._left = hello.of
        self._unsaved = False
        self._place = hello.step, hello.epoch * hello.samples + hello.position
        self.epoch = hello.epoch
        self.finished = hello.finished
        self._note(hello.notices)

    @property
    def batch(self) -> int:
        """Samples of a step."""
        return self._trainer.task.batch

    @property
    def epochs(self) -> int:
        """Epochs of the job."""
        return self._trainer.task.epochs

    @property
    def model(self) -> str:
        """What is trained, as it was named."""
        return self._trainer.task.model

    @property
    def busy(self) -> bool:
        """Whether it does anything; a slice that is held counts."""
        return bool(self._doing)

    @property
    def slicing(self) -> bool:
        """Whether a slice is under way, held or not."""
        return self._doing == SLICE

    @property
    def starting(self) -> bool:
        """Whether it is started again."""
        return self._doing == START

    @property
    def held(self) -> bool:
        """Whether a slice was stopped in the middle."""
        return self._held

    @property
    def left(self) -> int:
        """Samples left of the step at hand; 0 while it is busy, or nothing is to be done."""
        if self.busy or self.finished or self.stopped:
            return 0
        return self._left

    def remaining_s(self) -> float:
        """Return how much longer the slice under way may take by its tail; 0 once it has taken longer than that."""
        if self.slicing:
            return max(0.0, self._tail_s - self._run_s())
        return 0.0

    def overdue(self) -> bool:
        """Return whether the slice under way has taken longer than its tail."""
        return self.slicing and self._run_s() > self._tail_s

    def begin(self, samples: int, tail_s: float) -> None:
        """Have a slice done, which should take no longer than a time."""
        self._doing = SLICE
        self._tail_s = tail_s
        self._ran_s = 0.0
        self._since_s = time.monotonic()
        self._lane.begin(SLICE, lambda: self._trainer.slice(samples, _FOREVER_S, write=False))

    def save(self) -> None:
        """Bring the last step to disk, if it is not there yet and nothing else is done."""
        # Between slices alone: a trainer does one thing at a time, and requests would wait for a slice and a write.
        if self._unsaved and not self.busy and not self.stopped:
            self._doing = CHECKPOINT
            self._lane.begin(CHECKPOINT, lambda: self._trainer.ask("checkpoint", _SAVED_S))

    def practise(self, samples: int) -> SliceDone:
        """Have a slice done and brought to disk, waiting for it.

        Raises:
            PolythrottleError: If the trainer fails or has nothing left to do; see `Trainer.slice`.
        """
        done: SliceDone = self.ask(lambda trainer: trainer.slice(samples, write=False))
        self._advanced(done)
        if self._unsaved:
            self.ask(lambda trainer: trainer.ask("checkpoint"))
            self._unsaved = False
        return done

    def settle(self) -> None:
        """Bring the last step to disk, waiting for it; a slice that is under way is forgotten, and so is a start."""
        if self.slicing or self.stopped:
            return
        if self.starting:
            self._note([_GONE])
            return
        try:
            self.ask(lambda trainer: trainer.ask("checkpoint", _SAVED_S))
            self._doing = ""
            self._unsaved = False
        except TrainerLost:
            self._note([_GONE])
        except PolythrottleError as error:
            self._stop(error, str(error))

    def hold(self) -> None:
        """Stop the slice under way where it is."""
        # What it has run is kept, so that the time it is held does not look like a hang.
        self._ran_s = self._run_s()
        self._held = True
        self.suspended += 1
        self._trainer.suspend()

    def release(self) -> None:
        """Let a slice that is held go on."""
        self._trainer.resume()
        self._since_s = time.monotonic()
        self._held = False

    def check(self) -> None:
        """End a trainer whose slice takes so long that it must hang; that it has died comes through the lane."""
        # Twenty times its tail, and never under ten seconds: a machine that swaps is slow, and is no hang.
        if self.slicing and not self._held and self._run_s() > max(self._patience_s, _HANGS * self._tail_s):
            self._note([f"a slice took longer than {self._run_s():.0f} s; the trainer was ended and started again"])
            # Counted anew, or every look until its end arrives would end it once more.
            self._since_s = time.monotonic()
            self._ran_s = 0.0
            self._trainer.abandon()

    def _run_s(self) -> float:
        return self._ran_s + (0.0 if self._held else time.monotonic() - self._since_s)

    def took(self, done: CompletedCall) -> SliceDone | None:
        """Take note of what has come through the lane, and start the trainer again where it is gone.

        Returns:
            The slice, if it was one that went well and was not stopped in between, so that its time tells something.
        """
        # A slice that was stopped in between took longer than it runs; its time would teach a wrong tail.
        whole = not self._ran_s
        if self._held:  # it had answered before it was stopped
            self._trainer.resume()
        self._doing = ""
        self._held = False
        if done.error is not None:
            self._failed(done.error)
            return None
        if done.what == START:
            self._greeted(done.value)
        elif done.what == CHECKPOINT:
            self._unsaved = False
            self._note(done.value["notices"])
        else:
            self._advanced(done.value)
            return done.value if whole else None
        return None

    def _advanced(self, done: SliceDone) -> None:
        assert self.hello is not None
        if done.step > self._place[0]:
            self._lost = 0
        self._place = done.step, done.epoch * self.hello.samples + done.position
        self.epoch = done.epoch
        self.finished = done.finished
        # The last step of an epoch is shorter than the others.
        coming = min(self.batch, max(1, self.hello.samples - done.position))
        self._left = done.of - done.at if done.at else coming
        self._unsaved = not done.written
        if done.loss is not None:
            self.loss = done.loss
        self._note([*done.notices, *(f"{file} was left out: {why}" for file, why in done.left_out)])

    def _failed(self, error: BaseException) -> None:
        # A fault of our own is no reason to go on without fine-tuning as if the trainer had refused.
        if not isinstance(error, PolythrottleError):
            raise error
        if not isinstance(error, TrainerLost):
            self._stop(error, str(error))
        elif self._lost >= _RESTARTS:
            self._stop(error, f"given up after {_RESTARTS} starts without a step in between: {error}")
        else:
            self._lost += 1
            self.restarts += 1
            self._doing = START
            self._lane.begin(START, self._trainer.start)

    def _stop(self, error: PolythrottleError, words: str) -> None:
        self.stopped = words
        self.exit_code = error.exit_code

    def _note(self, texts: Iterable[str]) -> None:
        for text in texts:
            # A trainer that fails a thousand times says the same thing a thousand times.
            if text not in self.notices and len(self.notices) < _NOTICES:
                self.notices.append(text)

    def ask(self, call: Callable[[Trainer], Any]) -> Any:
        """Return what the trainer says, waiting for it; nothing else may be under way."""
        return self._waited(lambda: call(self._trainer))

    def _waited(self, call: Callable[[], Any]) -> Any:
        """Have something done and wait for it; where a Ctrl-C ends the waiting, it is still under way."""
        self._waited_for = True
        try:
            done = self._lane.wait(call)
        except Exception:
            self._waited_for = False
            raise
        self._waited_for = False
        return done

    def close(self) -> None:
        """End the trainer: in good order if it is idle, at once if not; what a step had not ended is forgotten."""
        # One that is still starting loads torch for as long as a loaded machine takes, and has nothing to lose.
        if self.busy or self._waited_for:
            self._trainer.abandon()
        with suppress(PolythrottleError):
            self._lane.wait(self._trainer.stop)


def kept_words(folder: Path) -> str:
    """Return, for people, what is kept of the job of a folder after an interrupt, and how to go on."""
    try:
        begun, place = read_begun(folder), newest_place(folder)
    except PolythrottleError as error:
        return f"of its job: {error}"
    if begun is None:
        return f"no job was begun in {folder}; the same command begins it"
    if place is None:
        return f"no step of the job in {folder} is kept yet; the same command goes on with it"
    return f"{place.step:,} steps of the job in {folder} are kept; the same command goes on from there"
