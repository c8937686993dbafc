"""A real training on two real Slurm nodes, one of which is taken away and comes back."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from cluster.slurm_nodes import SlurmNodes

from polythrottle.training.elastic.events import read_events
from polythrottle.training.elastic.job_control import status_of

pytestmark = [pytest.mark.cluster, pytest.mark.xdist_group("slurm")]
CURVE = Path(__file__).with_name("curve.py")
TRAIN = [sys.executable, "-m", "polythrottle", "cluster", "train"]
STEPS = 800
THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SlurmNodes]:
    """Start two nodes and let Slurm's commands find them."""
    folder = tmp_path / "slurm"
    folder.mkdir()
    with SlurmNodes(folder) as started:
        monkeypatch.setenv("SLURM_CONF", str(started.conf))
        for name, value in THREAD.items():
            monkeypatch.setenv(name, value)
        yield started


class Job:
    """A training of the curve: its controller is a process here, its nodes are Slurm's.

    Args:
        folder: Of the test.
        words: More options.
    """

    def __init__(self, folder: Path, *words: str) -> None:
        self.folder, self.curve, self.log = folder / "job", folder / "curve.jsonl", folder / "train.log"
        options = ["--on", "slurm", "--nodes", "1:2", "--job-folder", str(self.folder), "--every", "1", "--json"]
        self._log = self.log.open("wb")
        command = [*TRAIN, str(CURVE), *options, *words, "--", str(self.curve), "0.3"]
        self.process = subprocess.Popen(command, stdout=self._log, stderr=self._log)

    def steps(self) -> list[dict[str, Any]]:
        """Return the steps that were written down so far; a torn last line waits."""
        text = self.curve.read_text() if self.curve.exists() else ""
        return [json.loads(line) for line in text.split("\n")[:-1]]

    def hurry(self) -> None:
        """Let steps take no longer than they must."""
        self.curve.with_name("hurry").touch()

    def workers(self) -> int:
        """Return how many workers made the newest step."""
        steps = self.steps()
        return int(steps[-1]["workers"]) if steps else 0

    def end(self) -> None:
        """End the training if it still runs."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            self.process.wait(60)
        self._log.close()


def until(true: Callable[[], bool], what: str, job: Job, patience_s: float = 120) -> None:
    """Wait until something is so."""
    end_s = time.monotonic() + patience_s
    while not true():
        assert job.process.poll() in {None, 0}, job.log.read_text()
        assert time.monotonic() < end_s, f"not {what}: {job.steps()[-1:]}\n{job.log.read_text()}"
        time.sleep(0.2)


@contextmanager
def undisturbed(folder: Path) -> Iterator[Callable[[], dict[int, float]]]:
    """Run the same training by itself beside what goes on, and return what gives its loss after each step."""
    curve = folder / "alone.jsonl"
    process = subprocess.Popen([sys.executable, CURVE, curve, "0"])

    def losses() -> dict[int, float]:
        assert process.wait(200) == 0
        return {each["step"]: each["loss"] for each in map(json.loads, curve.read_text().splitlines())}

    try:
        yield losses
    finally:
        process.kill()
        process.wait()


def test_a_successor_takes_over_before_the_time_limit(slurm: SlurmNodes, tmp_path: Path) -> None:
    """Slurm ends each job after a minute: the next is asked for in time, and no step is lost, late or done twice."""
    job = Job(tmp_path, "--nodes", "1", "--sbatch=--time=1", "--successors", "20%")
    try:
        until(lambda: any(each["event"] == "succession" for each in read_events(job.folder)), "taken over", job, 200)
        job.hurry()
        assert job.process.wait(100) == 0, job.log.read_text()
    finally:
        job.end()
    events = read_events(job.folder)
    assert not [event for event in events if event["event"] == "lost"], job.log.read_text()
    asked, done = ([each for each in events if each["event"] == name] for name in ("successor", "succession"))
    assert done, job.log.read_text()
    assert 0 < asked[0]["left_s"] < 60
    assert [each["interruption_s"] for each in done] == [0.0] * len(done)
    assert all(each["overlap_s"] < 30 for each in done)
    found = status_of(job.folder)
    assert (found["phase"], found["step"], found["losses"]) == ("finished", STEPS, 0)
    assert found["successors"]["done"] == len(done)
    assert [name.rpartition("-")[2] for name in found["last_members"]] == [done[-1]["successor"]]
    assert [each["step"] for each in job.steps()] == list(range(1, STEPS + 1))
    assert slurm.call("squeue", "-h", "-t", "RUNNING") == ""


def test_a_training_shrinks_grows_and_ends_as_if_nothing_had_happened(slurm: SlurmNodes, tmp_path: Path) -> None:
    """A node goes down and returns, then dies with all its processes and returns: the loss curve stays the same."""
    job = Job(tmp_path)
    try:
        until(lambda: job.workers() == 2, "two workers", job)
        slurm.call("scontrol", "update", "nodename=n2", "state=down", "reason=revoked")
        until(lambda: job.workers() == 1, "one worker after scontrol", job)
        slurm.call("scontrol", "update", "nodename=n2", "state=resume")
        until(lambda: job.workers() == 2, "two workers again", job)
        slurm.kill("n2")
        until(lambda: job.workers() == 1, "one worker after SIGKILL", job)
        slurm.boot("n2")
        with undisturbed(tmp_path) as losses:  # while the node comes back
            until(lambda: job.workers() == 2, "two workers once more", job)
            job.hurry()
            assert job.process.wait(240) == 0, job.log.read_text()
            alone = losses()
    finally:
        job.end()
    whole = {each["step"]: each["loss"] for each in job.steps()}
    assert sorted(whole) == sorted(alone) == list(range(1, STEPS + 1))
    assert all(whole[step] == pytest.approx(alone[step], rel=1e-3, abs=1e-5) for step in alone)
    assert alone[STEPS] < 0.3 * alone[1]
    found = status_of(job.folder)
    assert (found["phase"], found["step"]) == ("finished", STEPS)
    assert found["generation"] >= 5
    assert slurm.call("squeue", "-h", "-t", "RUNNING") == ""
