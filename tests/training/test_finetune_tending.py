"""A trainer that is looked after: held in the middle of a slice, ended when it hangs, given up when nothing helps."""

import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from queue import Queue

import pytest

from polythrottle.training.beside.trainer import driver
from polythrottle.training.beside.trainer.driver import Task, Trainer
from polythrottle.training.beside.trainer.supervisor import CompletedCall, SupervisedTrainer, WorkerThread, ended_calls


class Scene:
    """A pretended trainer, its lane and what comes through it."""

    def __init__(self, where: Path, how: str, at: tuple[int, ...], sleep_s: float, patience_s: float) -> None:
        words = [where, 40, 8, 50, sleep_s, how, *at]
        command = (sys.executable, str(Path(__file__).parents[1] / "pretended_trainer.py"), *map(str, words))
        task = Task("tests:model", str(where), str(where), batch=8, epochs=50)
        self.done: Queue[CompletedCall] = Queue()
        self.lane = WorkerThread("trainer", self.done)
        self.tended = SupervisedTrainer(Trainer(task, start_s=60, command=command), self.lane, patience_s)
        self.tended.open()

    def next(self) -> None:
        """Take what comes next."""
        self.tended.took(self.done.get(timeout=60))

    def step(self) -> None:
        """Do what is left of a step, whatever happens on the way."""
        before = self.tended.steps
        while self.tended.steps == before and not self.tended.stopped:
            if self.tended.left:
                self.tended.begin(self.tended.left, 1e-3)
            self.next()


@pytest.fixture
def scenes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Scene]]:
    """Return a list whose scenes are closed afterwards, without waiting for trainers that would sleep on."""
    monkeypatch.setattr(driver, "_REAP_S", 0.05)
    made: list[Scene] = []
    yield made
    for scene in made:
        scene.tended.close()
        scene.lane.close()


def _scene(
    scenes: list[Scene], where: Path, how: str = "well", *at: int, sleep_s: float = 0.0, patience_s: float = 60.0
) -> Scene:
    scenes.append(Scene(where, how, at, sleep_s, patience_s))
    return scenes[-1]


def test_steps_are_counted_from_here_on(scenes: list[Scene], tmp_path: Path) -> None:
    """Whole steps count, a slice of one does not yet."""
    scene = _scene(scenes, tmp_path)
    scene.step()
    scene.tended.count()
    scene.tended.begin(3, 1.0)
    assert (scene.tended.busy, scene.tended.left) == (True, 0)
    scene.next()
    assert (scene.tended.samples, scene.tended.left) == (0, 5)
    scene.step()
    assert (scene.tended.samples, scene.tended.steps, scene.tended.left) == (8, 1, 8)


def test_a_slice_is_held_and_goes_on(scenes: list[Scene], tmp_path: Path) -> None:
    """Held it does not come to an end; let go it does, and its time, which tells nothing, is not given out."""
    scene = _scene(scenes, tmp_path, sleep_s=0.2)
    scene.tended.begin(2, 1e-3)
    scene.tended.hold()
    assert scene.tended.held
    assert scene.tended.overdue() or scene.tended.remaining_s() > 0
    assert scene.done.empty()
    scene.tended.release()
    assert scene.tended.took(scene.done.get(timeout=60)) is None
    assert (scene.tended.suspended, scene.tended.left) == (1, 6)


def test_what_was_done_before_it_was_held_is_not_left_standing(scenes: list[Scene], tmp_path: Path) -> None:
    """An answer that crossed the stop lets the trainer go on, so that it saves its step and does the next."""
    scene = _scene(scenes, tmp_path)
    scene.tended.begin(8, 1.0)
    answer = scene.done.get(timeout=60)
    scene.tended.hold()
    scene.tended.took(answer)
    scene.tended.save()
    scene.next()
    assert not scene.tended.busy
    scene.step()
    assert scene.tended.steps == 2


def test_a_trainer_that_hangs_is_ended_and_started_again(scenes: list[Scene], tmp_path: Path) -> None:
    """It goes on from its last step, and a note says what happened."""
    scene = _scene(scenes, tmp_path, "hangs", 1, patience_s=0.0)
    scene.step()
    scene.tended.begin(8, 1e-6)
    while scene.done.empty():
        if (tmp_path / "mishap-1").exists():
            scene.tended.check()
    scene.next()
    assert scene.tended.restarts == 1
    scene.next()
    scene.step()
    assert scene.tended.steps == 2
    assert "ended and started again" in scene.tended.notices[0]


def test_a_trainer_that_dies_at_every_start_is_given_up(scenes: list[Scene], tmp_path: Path) -> None:
    """After three starts without a step in between nothing is trained any more, and it says why."""
    scene = _scene(scenes, tmp_path)
    broken = (sys.executable, "-c", "raise SystemExit('no such luck')")
    scene.tended._trainer._command = broken
    scene.tended._trainer.abandon()
    scene.tended.begin(8, 1.0)
    while not scene.tended.stopped:
        scene.next()
    assert scene.tended.restarts == 3
    assert "given up after 3 starts" in scene.tended.stopped
    assert scene.tended.left == 0


def test_a_trainer_that_is_gone_at_the_end_has_not_stopped_fine_tuning(scenes: list[Scene], tmp_path: Path) -> None:
    """The last step may be done again, and a note says so; the job goes on another time."""
    scene = _scene(scenes, tmp_path)
    scene.step()
    scene.tended._trainer.kill()
    scene.tended.settle()
    assert scene.tended.stopped == ""
    assert "gone at the end" in scene.tended.notices[0]


def test_a_refusal_stops_fine_tuning_with_its_words(scenes: list[Scene], tmp_path: Path) -> None:
    """What a user must mend is not tried again and again."""
    scene = _scene(scenes, tmp_path, "refuses", 2)
    while not scene.tended.stopped:
        scene.step()
    assert scene.tended.stopped == "the disk is full"
    assert (scene.tended.steps, scene.tended.restarts) == (2, 0)


def test_a_trainer_that_still_starts_is_ended_at_once(tmp_path: Path) -> None:
    """After a Ctrl-C nobody waits for it to load what it needs, which on a loaded machine takes long."""
    words = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    trainer = Trainer(
        Task("tests:model", str(tmp_path), str(tmp_path)), start_s=600, command=(sys.executable, "-c", words)
    )
    lane = WorkerThread("trainer", Queue())
    tended = SupervisedTrainer(trainer, lane)

    def interrupt() -> None:
        while trainer.pid is None:
            time.sleep(0.01)
        # To the main thread, whose waiting it is to end.
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    interrupter = threading.Thread(target=interrupt)
    interrupter.start()
    with pytest.raises(KeyboardInterrupt):
        tended.open()
    interrupter.join()
    begun_s = time.monotonic()
    tended.close()
    lane.close()
    assert time.monotonic() < begun_s + 60  # and not the 600 s that it would take to start
    assert trainer.pid is not None


def test_a_trainer_whose_answer_was_an_error_is_still_ended_in_order(scenes: list[Scene], tmp_path: Path) -> None:
    """Only what is still waited for is ended at once."""
    scene = _scene(scenes, tmp_path)
    with pytest.raises(ZeroDivisionError):
        scene.tended.ask(lambda trainer: 1 / 0)
    assert not scene.tended._waited_for
    assert scene.tended.ask(lambda trainer: 7) == 7


@pytest.mark.timeout(60)
def test_a_wait_whose_time_is_over_as_it_begins_ends() -> None:
    """On a queue of C that nobody has waited at, one in thousands never did: no request was answered any more."""
    done = Queue[CompletedCall]()
    for number in range(30_000):
        done.put(CompletedCall(number, 0.0, 0.0))
        done.get()
        assert list(ended_calls(done, 1e-6)) == []
    threading.Timer(0.05, done.put, [CompletedCall("late", 0.0, 0.0)]).start()
    assert [call.what for call in ended_calls(done, 30.0)] == ["late"]
    done.put(CompletedCall("first", 0.0, 0.0))
    done.put(CompletedCall("second", 0.0, 0.0))
    assert [call.what for call in ended_calls(done, -1.0)] == ["first", "second"]
