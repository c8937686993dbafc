"""Elastic training with real processes: nodes are killed, told to go, and come back; nothing is lost or seen twice."""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest
from cluster.ledgers import counted, steps, undone_s

from polythrottle.domain.clock import SystemClock
from polythrottle.training.elastic.checkpoints import FOLDER
from polythrottle.training.elastic.engines import LaunchPlan, Torchrun, descendants
from polythrottle.training.elastic.events import read_events
from polythrottle.training.elastic.job_control import LocalJob, status_of

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]
SCRIPT = Path(__file__).with_name("elastic_script.py")
EVERY_S = 2.0
QUICK_S = 0.5
"""Time between two beats where any node may be lost at any time: one more on a busy machine is no fault."""


class Job:
    """A job on this machine whose script writes down every sample, with a story that is told as events come.

    Args:
        folder: Of the test.
        nodes: The most nodes.
        samples: In an epoch.
        epochs: How many.
        pause_s: How long a step takes until `hurry`, in seconds.
        joining: More words for each node.
        beat_s: Time between two beats of a node, in seconds.
    """

    def __init__(
        self,
        folder: Path,
        nodes: int = 2,
        samples: int = 400,
        epochs: int = 2,
        pause_s: float = 0.1,
        joining: tuple[str, ...] = (),
        beat_s: float = 1.0,
    ) -> None:
        self.folder, self.ledger = folder / "job", folder / "ledger"
        self.ledger.mkdir()
        self.samples, self.epochs = samples, epochs
        words = (str(self.ledger), str(samples), "10", str(epochs), str(pause_s))
        serving = ("--serve", "127.0.0.1:0", "--nodes", f"1:{nodes}", "--every", str(EVERY_S), "--job", "job")
        self.engine = Torchrun(LaunchPlan(self.folder, SCRIPT, words, (*serving, "--beat", str(beat_s)), joining))
        self.names = [f"n{number}" for number in range(1, nodes + 1)]
        self.seen: list[Mapping[str, Any]] = []

    def run(self, story: Iterator[Callable[[Mapping[str, Any]], bool]], replace_s: float | None = None) -> None:
        """Run the job; each part of the story waits for the event it is true for, and the next follows."""
        part = next(story, None)

        def told(event: Mapping[str, Any]) -> None:
            nonlocal part
            self.seen.append(event)
            if part is not None and part(event):
                part = next(story, None)

        code = LocalJob(self.engine, self.names, replace_s).run(told, lambda: self.engine.exit_code)
        assert code == 0
        assert part is None, "the story was not told to its end"

    def hurry(self) -> None:
        """Let steps take no longer than they must."""
        (self.ledger / "hurry").touch()

    def events(self, name: str) -> list[Mapping[str, Any]]:
        """Return the events of a name."""
        return [event for event in self.seen if event["event"] == name]

    def assert_every_sample_exactly_once(self) -> None:
        """Check the ledger: steps that counted follow each other, and see every sample once an epoch."""
        kept = counted(steps(self.ledger))
        assert [step.step for step in kept] == list(range(1, len(kept) + 1))
        for epoch in range(self.epochs):
            seen = sorted(sample for step in kept if step.epoch == epoch for sample in step.samples)
            assert seen == list(range(self.samples))

    def assert_at_most_one_interval_was_lost(self) -> None:
        """Check the ledger: no generation had trained for longer than an interval past what the next went on from."""
        writes = [float(event["persist_s"]) + float(event["stall_s"]) for event in self.events("checkpoint")]
        pace_s = max(self.paces())
        assert max(undone_s(steps(self.ledger)), default=0.0) <= EVERY_S + max(writes, default=0.0) + 2 * pace_s

    def paces(self) -> list[float]:
        """Return the times between steps of one generation, in seconds: a busy machine takes its own."""
        found = [0.0]
        for by_step in steps(self.ledger).values():
            times = [by_step[step].at_s for step in sorted(by_step)]
            found += [later - sooner for sooner, later in pairwise(times)]
        return found


def first_step_on(workers: int) -> Callable[[Mapping[str, Any]], bool]:
    """Return what is true for the first step of a generation of so many workers."""
    return lambda event: event["event"] == "first step" and event["workers"] == workers


def an(name: str) -> Callable[[Mapping[str, Any]], bool]:
    """Return what is true for an event of a name."""
    return lambda event: event["event"] == name


def worker_of(job: Job, node: str) -> psutil.Process:
    """Return the worker of a node: it is the one that has opened the ledger."""
    below = [psutil.Process(pid) for pid in descendants(job.engine.nodes[node].pid)]
    return next(each for each in below if any(str(job.ledger) in file.path for file in each.open_files()))


def test_thirty_kills_and_joins_lose_and_repeat_nothing(tmp_path: Path) -> None:
    """Random nodes are killed at random times and come back; every sample is seen exactly once an epoch."""
    rng, clock = random.Random(7), SystemClock()
    job = Job(tmp_path, nodes=3, samples=1200, epochs=3, pause_s=0.1, beat_s=QUICK_S)
    turns = {"killed": 0, "due_s": float("inf")}
    changes = 0

    def told(event: Mapping[str, Any]) -> None:
        nonlocal changes
        job.seen.append(event)
        changes += event["event"] in {"lost", "joined"}
        if event["event"] == "first step":
            turns["due_s"] = clock.now() + rng.uniform(0.2, 3.0)

    def ended() -> int | None:
        if clock.now() >= turns["due_s"] and changes < 30 + len(job.names):
            with contextlib.suppress(KeyError):
                job.engine.kill(rng.choice(job.events("formed")[-1]["members"]))
                turns["killed"] += 1
            turns["due_s"] = float("inf")
        elif changes >= 30 + len(job.names):
            job.hurry()
        return job.engine.exit_code

    assert LocalJob(job.engine, job.names, 1.0).run(told, ended) == 0
    assert changes >= 30 + len(job.names)
    assert turns["killed"] >= 12
    job.assert_every_sample_exactly_once()
    job.assert_at_most_one_interval_was_lost()
    assert all("generation" in record for record in read_events(job.folder))


def test_killed_nodes_cost_at_most_one_interval_each(tmp_path: Path) -> None:
    """The chief is killed: another takes its duties, goes on from the newest checkpoint, and sees the rest once.

    Then the agent of another node alone: its workers and their fork server do not train on by themselves.
    """
    job = Job(tmp_path, nodes=3, samples=1200)
    below: list[psutil.Process] = []
    newest: list[int] = []

    def story() -> Iterator[Callable[[Mapping[str, Any]], bool]]:
        yield first_step_on(3)
        yield an("checkpoint")
        chief = job.events("formed")[-1]["chief"]
        job.engine.kill(chief)
        yield lambda event: event["event"] == "lost" and event["node"] == chief
        newest.append(job.events("checkpoint")[-1]["step"])
        yield first_step_on(2)
        assert job.events("formed")[-1]["chief"] != chief
        assert job.events("resumed")[-1]["step"] == newest[0]
        other = job.events("formed")[-1]["members"][1]
        agent = job.engine.nodes[other]
        below.extend(psutil.Process(pid) for pid in descendants(agent.pid) if pid != agent.pid)
        agent.kill()
        yield lambda event: event["event"] == "lost" and event["node"] == other
        yield first_step_on(1)
        job.hurry()

    job.run(story())
    formed = job.events("formed")
    assert [event["generation"] for event in formed] == list(range(1, len(formed) + 1))
    assert len(status_of(job.folder)["recoveries_s"]) == 2
    assert below
    assert not psutil.wait_procs(below, timeout=20)[1]
    job.assert_every_sample_exactly_once()
    job.assert_at_most_one_interval_was_lost()


def test_nodes_that_are_told_to_go_cost_no_step(tmp_path: Path) -> None:
    """SIGTERM to a node: all stop at one step after a checkpoint, the others go on from exactly there.

    To its agent alone, and, as a scheduler sends it, to agent, workers and what they were forked from.
    """
    job = Job(tmp_path, nodes=3, samples=1200)

    def story() -> Iterator[Callable[[Mapping[str, Any]], bool]]:
        yield first_step_on(3)
        told = job.events("formed")[-1]["members"][1]
        job.engine.nodes[told].send_signal(signal.SIGTERM)
        yield an("draining")
        yield first_step_on(2)
        whole = job.events("formed")[-1]["members"][1]
        for pid in descendants(job.engine.nodes[whole].pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        yield lambda event: event["event"] == "left" and event["node"] == whole
        yield first_step_on(1)
        job.hurry()

    job.run(story())
    assert not job.events("lost")
    assert not job.events("fault")
    assert [event.get("forced") for event in job.events("checkpoint")].count("regrouping") >= 2
    assert sum(map(len, steps(job.ledger).values())) == len(counted(steps(job.ledger))), "no step is done again"
    assert max(undone_s(steps(job.ledger))) == 0.0
    job.assert_every_sample_exactly_once()


def test_a_notice_brings_a_checkpoint_and_a_parting(tmp_path: Path) -> None:
    """A file on one node says 2 s left: a checkpoint for all, and the node leaves before anybody misses it."""
    job = Job(tmp_path, joining=("--notice", f"file:{tmp_path}/notice"))

    def story() -> Iterator[Callable[[Mapping[str, Any]], bool]]:
        yield first_step_on(2)
        job.engine.plan = LaunchPlan(**vars(job.engine.plan) | {"joining": ()})
        (tmp_path / "notice").write_text("16.5")
        yield an("notice")
        yield lambda event: event["event"] == "checkpoint" and event.get("forced") == "a notice"
        yield an("left")
        (tmp_path / "notice").unlink()
        yield an("left")
        job.engine.start(["n3"])
        job.hurry()

    job.run(story())
    assert not job.events("lost")
    assert all("notice of file" in event["reason"] for event in job.events("draining"))
    job.assert_every_sample_exactly_once()


def test_a_store_that_is_away_and_a_killed_worker_cost_one_interval(tmp_path: Path) -> None:
    """Checkpoints wait on the node's own disk and are put once the store is back.

    A worker that is killed, as when memory runs out, is named with its signal; its node starts it again.
    """
    job = Job(tmp_path, nodes=1)
    blocked = job.folder / "store" / FOLDER

    def story() -> Iterator[Callable[[Mapping[str, Any]], bool]]:
        blocked.parent.mkdir(parents=True, exist_ok=True)
        blocked.write_text("in the way")
        yield first_step_on(1)
        yield an("spooled")
        assert status_of(job.folder)["spooled"]
        blocked.unlink()
        yield an("checkpoint")
        assert not status_of(job.folder)["spooled"]
        worker_of(job, "n1").kill()
        yield an("fault")
        yield first_step_on(1)
        job.hurry()

    job.run(story())
    found = status_of(job.folder)
    assert not found["spooled"]
    fault = found["newest_fault"]
    assert (fault["node"], fault["signal"], fault["exit_code"]) == ("n1", "SIGKILL", None)
    assert fault["reason"].startswith("SIGKILL ended a worker")
    job.assert_every_sample_exactly_once()


def test_training_goes_on_without_its_controller_and_meets_it_again(tmp_path: Path) -> None:
    """The controller is killed and started again at the same address: same generation, no step undone."""
    job = Job(tmp_path, pause_s=0.2)

    def story() -> Iterator[Callable[[Mapping[str, Any]], bool]]:
        yield first_step_on(2)
        controller = job.engine._controller
        assert controller is not None
        address = json.loads((job.folder / "job.json").read_text())["address"]
        controller.kill()
        controller.wait()
        SystemClock().sleep(1.0)
        words = [address if word == "127.0.0.1:0" else word for word in job.engine.plan.serving]
        job.engine._controller = job.engine._process([*words, "--job-folder", str(job.folder)], subprocess.DEVNULL)
        yield an("checkpoint")
        job.hurry()

    job.run(story())
    assert [event["generation"] for event in job.events("formed")] == [1]
    assert not job.events("lost")
    job.assert_every_sample_exactly_once()


def test_a_script_that_fails_by_itself_is_given_up(tmp_path: Path) -> None:
    """After three attempts the job ends with one line, an exit code, and the script's own traceback above."""
    script = tmp_path / "script.py"
    script.write_text("raise ValueError('a mistake of the script')\n")
    command = [sys.executable, "-m", "polythrottle", "cluster", "train", "--nodes", "2", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 9
    assert "a mistake of the script" in done.stderr
    last = done.stderr.splitlines()[-1]
    assert "before its first step" in last
    assert "code 1: ValueError: a mistake of the script" in last
    assert "cluster status" in last


def test_a_script_that_ends_without_a_word_has_ended(tmp_path: Path) -> None:
    """Leaving by os._exit(0), as some scripts do to be rid of hanging threads, is an end like any other."""
    script = tmp_path / "script.py"
    script.write_text("import os\nos._exit(0)\n")
    command = [sys.executable, "-m", "polythrottle", "cluster", "train", "--nodes", "1", str(script)]
    assert subprocess.run(command, timeout=100, check=False).returncode == 0
