"""Where a worker looks for the newest checkpoint."""

from pathlib import Path
from typing import Any

import pytest
import torch

from polythrottle.domain.clock import VirtualClock
from polythrottle.storage.object_store import Store
from polythrottle.storage.paths import state_dir
from polythrottle.training.elastic.checkpoints import Manifest, commit, model_digest, write_state
from polythrottle.training.elastic.worker.group import CheckpointKeeper
from polythrottle.training.elastic.worker.process import Reporter

MODEL = "a model's"


def put(store: str, folder: Path, step: int) -> None:
    """Put a checkpoint into a store."""
    path = folder / "a-state"
    manifest = Manifest(1, step, 0, step, 1, "fixed", 1.0, MODEL)
    commit(Store(store), path, write_state(path, manifest, lambda file: file.write(b"state" * step)))


def test_what_waits_on_this_machine_is_found_under_whatever_name(tmp_path: Path) -> None:
    """A node that Slurm starts again has another name; the checkpoint that its elder could not put is still here."""
    url = f"file://{tmp_path}/store"
    place = model_digest({url: ()})
    put(url, tmp_path, 10)
    put(str(state_dir() / "spool" / "n1-7" / place), tmp_path, 20)
    put(str(state_dir() / "spool" / "n1-7" / "another-store"), tmp_path, 30)
    keeper = CheckpointKeeper(url, "n1-8", 0.035, None, Reporter(None, "n1-8", 0, 2, lambda: None), lambda line: None)
    for chief in (True, False):
        found = keeper.find(MODEL, chief)
        assert found is not None
        assert found.manifest.step == 20


def test_a_checkpoint_is_written_each_interval_and_only_then(tmp_path: Path) -> None:
    """Of a minute of steps of a second those at 10, 20 … s are written, whatever else goes on."""
    clock, state, written = VirtualClock(), {"weights": torch.zeros(4)}, []
    reporter = Reporter(None, "n1", 0, 1, lambda: None)
    keeper = CheckpointKeeper(f"file://{tmp_path}/store", "n1", 0.035, 10.0, reporter, lambda line: None, clock)
    keeper.begin(state, chief=True)

    def manifest(step: int) -> Manifest:
        written.append(step)
        return Manifest(1, step, 0, step, 1, "fixed", 1.0, MODEL)

    for step in range(1, 61):
        clock.sleep(1.0)
        keeper.stepped(1.0)
        keeper.keep_up(lambda: state, lambda step=step: manifest(step))  # type: ignore[misc]
        keeper.end(60.0)
    assert written == [10, 20, 30, 40, 50, 60]
    found = keeper.find(MODEL, chief=True)
    assert found is not None
    assert found.manifest.step == 60


def test_a_checkpoint_after_no_step_at_all_has_no_share_of_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was trained to its end before is written once more; that cost no share of a training that was none."""
    noted: list[dict[str, Any]] = []
    reporter = Reporter(None, "n1", 0, 1, lambda: None)
    monkeypatch.setattr(reporter, "note", lambda record, now=False: noted.append(record))
    keeper = CheckpointKeeper(f"file://{tmp_path}/store", "n1", 0.035, None, reporter, lambda line: None)
    manifest = Manifest(1, 256, 0, 256, 1, "fixed", 1.0, MODEL)
    keeper.write({"weights": torch.zeros(4)}, manifest, forced="the end", wait=True)
    (record,) = noted
    assert (record["event"], record["step"], record["share"]) == ("checkpoint", 256, None)
