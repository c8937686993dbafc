"""A whole job on one machine: stopped in order, begun again, and never twice at once."""

import json
import os
import signal
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from polythrottle.domain.clock import VirtualClock
from polythrottle.storage.object_store import Store
from polythrottle.training.elastic.checkpoints import Manifest, commit, write_state
from polythrottle.training.elastic.events import JOB, EventLog
from polythrottle.training.elastic.job_control import LocalJob, how_to_continue, status_of, stopped_in_order


class Engine:
    """An engine with events of a former launcher."""

    def __init__(self, before: Sequence[dict[str, Any]]) -> None:
        self._events = list(before)
        self.started: list[tuple[str, ...]] = []
        self.stopped = 0

    def start(self, members: Sequence[str]) -> None:
        """Keep whom it was asked to start."""
        self.started.append(tuple(members))

    def stop(self) -> None:
        """Count."""
        self.stopped += 1

    def status(self) -> dict[str, Any]:
        """Return nothing."""
        return {}

    def events(self) -> list[dict[str, Any]]:
        """Return what is known."""
        return self._events


def test_what_a_former_launcher_saw_is_no_news() -> None:
    """Its losses start no node again, and are not told again."""
    lost = {"event": "lost", "node": "a", "generation": 1}
    engine, told, left = Engine([lost, lost]), [], [None] * 40 + [0]
    local = LocalJob(engine, ["a", "b"], 1.0, VirtualClock(), seen=1)
    assert local.run(told.append, lambda: left.pop(0)) == 0
    assert told == [lost]
    assert engine.started == [("a", "b"), ("a",)]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_stops_all_in_order_and_a_second_does_not_leave_anything_behind(number: signal.Signals) -> None:
    """Ctrl-C, a scheduler's SIGTERM and a closed terminal are one; people are told before it takes time."""
    handlers = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    happened: list[str] = []

    def stop() -> None:
        os.kill(os.getpid(), number)
        happened.append("stopped")

    def train() -> None:
        with stopped_in_order(stop, happened.append):
            os.kill(os.getpid(), number)
            happened.append("not reached")

    with pytest.raises(KeyboardInterrupt):
        train()
    assert len(happened) == 2
    assert "a last checkpoint" in happened[0]
    assert happened[1] == "stopped"
    assert {each: signal.getsignal(each) for each in handlers} == handlers


def test_a_terminal_that_may_close_may_close() -> None:
    """Where SIGHUP is ignored (nohup), it goes on being ignored."""
    former = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    stops: list[int] = []
    try:
        with stopped_in_order(lambda: stops.append(1), str):
            os.kill(os.getpid(), signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, former)
    assert stops == [1]


def test_what_a_stopped_job_has_kept_is_said(tmp_path: Path) -> None:
    """The newest checkpoint's step, or that there is none."""
    folder = tmp_path / "job"
    assert how_to_continue(folder) == "no checkpoint was kept; --job job begins anew"
    journal = EventLog(folder)
    journal.append({"event": "checkpoint", "generation": 1, "step": 20, "at_s": 1.0})
    journal.close()
    assert how_to_continue(folder) == "the checkpoint of step 20 is kept; go on from it with --job job"


def test_a_job_that_is_over_tells_the_epoch_of_its_newest_step(tmp_path: Path) -> None:
    """As its checkpoint has it; unknown where the newest step is one of which no epoch was kept."""
    checkpoint = {"event": "checkpoint", "generation": 1, "step": 20, "epoch": 3, "at_s": 1.0}
    resumed = {"event": "first step", "generation": 2, "step": 21, "at_s": 2.0}
    for record, told in ((checkpoint, (20, 3)), (resumed, (21, None))):
        journal = EventLog(tmp_path)
        journal.append(record)
        journal.close()
        found = status_of(tmp_path)
        assert (found["step"], found["epoch"]) == told


def named(folder: Path, store: str) -> None:
    """Leave what a controller leaves behind that is gone: the way to it, and its store."""
    folder.mkdir(exist_ok=True)
    document = {"v": 1, "job": "job", "address": "127.0.0.1:1", "pid": 1, "store": store, "token_file": None}
    (folder / JOB).write_text(json.dumps(document))


def put(store: str, folder: Path, step: int) -> None:
    """Put a checkpoint into a store."""
    path = folder / "a-state"
    manifest = Manifest(1, step, 3, step, 1, "fixed", 1.0, "a model's")
    commit(Store(store), path, write_state(path, manifest, lambda file: file.write(b"state")))


def test_checkpoints_that_came_after_the_controller_had_gone_are_found_in_the_store(tmp_path: Path) -> None:
    """The store says which is the newest; how many there were is unknown then, and not what events counted."""
    folder, url = tmp_path / "job", f"file://{tmp_path}/store"
    journal = EventLog(folder)
    journal.append({"event": "first step", "generation": 1, "step": 1, "epoch": 0, "at_s": 1.0})
    journal.append({"event": "checkpoint", "generation": 1, "step": 10, "epoch": 0, "bytes": 5, "at_s": 2.0})
    journal.close()
    named(folder, url)
    put(url, tmp_path, 10)
    assert (status_of(folder)["checkpoints"], status_of(folder)["step"]) == (1, 10)
    put(url, tmp_path, 20)
    found = status_of(folder)
    assert (found["newest_checkpoint"]["step"], found["newest_checkpoint"]["bytes"]) == (20, 5)
    assert (found["checkpoints"], found["step"], found["epoch"]) == (None, 20, 3)
    assert how_to_continue(folder) == "the checkpoint of step 20 is kept; go on from it with --job job"
    (tmp_path / "store" / "checkpoints" / "g000001-s000000020.checkpoint").unlink()
    assert status_of(folder)["newest_checkpoint"]["step"] == 10, "its file is gone"


def test_a_job_that_told_no_step_stands_where_the_store_says(tmp_path: Path) -> None:
    """Its events are gone or it had none yet; the checkpoint is there."""
    folder, url = tmp_path / "job", f"file://{tmp_path}/store"
    named(folder, url)
    put(url, tmp_path, 20)
    found = status_of(folder)
    assert (found["step"], found["epoch"], found["checkpoints"]) == (20, 3, None)


def test_a_store_that_cannot_be_asked_leaves_the_newest_checkpoint_as_it_was_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether it refuses or does not answer in time; status says so, and does not wait for ever."""
    folder = tmp_path / "job"
    journal = EventLog(folder)
    journal.append({"event": "checkpoint", "generation": 1, "step": 10, "at_s": 2.0})
    journal.close()
    named(folder, "nope://store")
    found = status_of(folder)
    assert (found["newest_checkpoint"]["step"], found["checkpoints"]) == (10, 1)
    assert "cannot be opened" in found["store_trouble"]
    answers = threading.Event()
    monkeypatch.setattr("polythrottle.training.elastic.job_control.newest_manifest", lambda store: answers.wait(60.0))
    monkeypatch.setattr("polythrottle.training.elastic.job_control.STORE_S", 0.01)
    named(folder, f"file://{tmp_path}/store")
    assert "did not answer" in status_of(folder)["store_trouble"]
    answers.set()


def test_a_job_without_events_has_no_counts(tmp_path: Path) -> None:
    """Nobody counted: unknown, not 0."""
    folder = tmp_path / "job"
    named(folder, f"file://{tmp_path}/store")
    found = status_of(folder)
    for name in ("generation", "checkpoints", "losses", "departures", "notices", "restarts", "faults"):
        assert found[name] is None
    assert "no events" in found["reason"]
