"""A job's nodes as processes of this machine: who is started with which words, and how they end."""

import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from polythrottle.domain.clock import VirtualClock
from polythrottle.domain.errors import BadFile, DeviceError, InvalidInput, UnknownName
from polythrottle.training.elastic import engines, ray_engine
from polythrottle.training.elastic.channel import ControllerAway
from polythrottle.training.elastic.engines import STOP_S, LaunchPlan, Torchrun, descendants, joining_words
from polythrottle.training.elastic.ray_engine import RayEngine


class Process:
    """A process that runs until it is told to end, or does not listen.

    Args:
        words: Its command line.
        deaf: Whether it has to be killed.
    """

    def __init__(self, words: Sequence[str], deaf: bool = False) -> None:
        self.words, self.deaf = list(words), deaf
        self.pid = 5_000_000  # above the kernel's largest
        self.returncode: int | None = None
        self.told: list[str] = []
        self.patience_s: list[float] = []

    def poll(self) -> int | None:
        """Return how it ended."""
        return self.returncode

    def terminate(self) -> None:
        """Be asked to end."""
        self.told.append("terminate")
        if not self.deaf and self.returncode is None:
            self.returncode = -signal.SIGTERM

    def wait(self, timeout_s: float | None = None) -> int:
        """Return how it ended, or that it has not."""
        if timeout_s is not None:
            self.patience_s.append(timeout_s)
            if self.returncode is None:
                raise subprocess.TimeoutExpired(self.words, timeout_s)
        self.returncode = -signal.SIGKILL if self.returncode is None else self.returncode
        return self.returncode


class Line:
    """A way to a controller that answers what it is scripted to, from a time on."""

    address = "127.0.0.1:4711"
    token_file = Path("token")

    def __init__(self, clock: VirtualClock, from_s: float = 0.0) -> None:
        self._clock, self._from_s = clock, from_s
        self.asked: list[str] = []

    def ask(self, verb: str, **words: Any) -> dict[str, Any]:
        """Answer, once it is time."""
        self.asked.append(" ".join([verb, *map(str, words.values())]))
        if self._clock.now() < self._from_s:
            raise ControllerAway("not yet")
        return {"phase": "training", "nodes": [{"node": "a"}, {"node": "b"}]}


class Bench:
    """Torchrun with processes and a controller that are pretended."""

    def __init__(self, tmp_path: Path, patch: pytest.MonkeyPatch) -> None:
        self.clock = VirtualClock()
        self.line = Line(self.clock)
        self.started: list[Process] = []
        self.deaf: set[str] = set()
        plan = LaunchPlan(tmp_path, Path("train.py"), ["--epochs", "3"], ["--serve", "any"], ["--standby"])
        self.torchrun = Torchrun(plan, self.clock)
        patch.setattr(engines.subprocess, "Popen", self._start)
        patch.setattr(engines, "job_line", lambda folder: self.line)
        patch.setattr(engines, "keeper", lambda folder: self.started[0].pid)

    def _start(self, command: Sequence[str], **words: Any) -> Process:
        assert list(command[:5]) == [sys.executable, "-m", "polythrottle", "cluster", "train"]
        assert words["start_new_session"]
        process = Process(command[5:], deaf=any(name in command for name in self.deaf))
        self.started.append(process)
        return process


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    """Return one that has not begun."""
    return Bench(tmp_path, monkeypatch)


def test_the_controller_is_started_once_and_each_member_joins_it(bench: Bench, tmp_path: Path) -> None:
    """Members are started when the controller answers; one that runs is let be, one that has ended is started again."""
    torchrun = bench.torchrun
    assert torchrun.exit_code is None
    bench.line = Line(bench.clock, from_s=1.0)
    torchrun.start(["a", "b"])
    assert bench.clock.now() >= 1.0
    controller, first, second = bench.started
    assert controller.words == ["--serve", "any", "--job-folder", str(tmp_path)]
    joining = ["--join", "127.0.0.1:4711", "--token-file", "token", "--node"]
    assert first.words == [*joining, "a", "--standby", "train.py", "--", "--epochs", "3"]
    assert second.words[len(joining)] == "b"
    torchrun.start(["a", "b"])
    assert len(bench.started) == 3
    first.returncode = 7
    assert torchrun.gone() == {"a": 7}
    torchrun.start(["a", "b"])
    assert len(bench.started) == 4
    assert torchrun.nodes["a"] is bench.started[3]  # type: ignore[comparison-overlap]
    assert torchrun.gone() == {}
    assert torchrun.exit_code is None
    assert torchrun.status()["phase"] == "training"
    assert torchrun.events() == []
    controller.returncode = 9
    assert torchrun.exit_code == 9


def test_a_controller_that_does_not_start_ends_the_start_with_its_code(bench: Bench) -> None:
    """One that ended is not waited for; one that never answers is given up after a while; another's is not taken."""
    bench.line = Line(bench.clock, from_s=1e9)
    with pytest.raises(DeviceError, match="the controller did not start") as silent:
        bench.torchrun.start(["a"])
    assert silent.value.exit_code == DeviceError.exit_code
    assert bench.clock.now() >= engines.START_S
    bench.started[0].returncode = 2
    before_s = bench.clock.now()
    with pytest.raises(DeviceError) as ended:
        bench.torchrun.start(["a"])
    assert ended.value.exit_code == 2
    assert bench.clock.now() == before_s
    assert bench.torchrun.nodes == {}


def test_a_former_launchers_controller_is_not_taken_for_ones_own(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who keeps the folder must be the process that was started here."""
    monkeypatch.setattr(engines, "keeper", lambda folder: 1)
    with pytest.raises(DeviceError):
        bench.torchrun.start(["a"])
    assert bench.line.asked == []


def test_nodes_are_stopped_before_the_controller_and_the_deaf_are_killed(bench: Bench) -> None:
    """All are asked; together they have so many seconds; what has ended is not asked."""
    bench.deaf = {"b"}
    bench.torchrun.start(["a", "b", "c"])
    controller, first, deaf, ended = bench.started
    ended.returncode = 0
    bench.torchrun.stop()
    assert [each.told for each in (first, deaf, ended, controller)] == [["terminate"], ["terminate"], [], ["terminate"]]
    assert deaf.returncode == -signal.SIGKILL
    assert first.returncode == controller.returncode == -signal.SIGTERM
    assert first.patience_s == [STOP_S]
    assert bench.torchrun.gone() == {"a": -signal.SIGTERM, "b": -signal.SIGKILL, "c": 0}


def test_a_node_that_is_taken_away_ends_and_one_that_is_not_there_is_named(bench: Bench) -> None:
    """A cloud takes it without a word."""
    bench.torchrun.start(["a"])
    with pytest.raises(UnknownName, match="b"):
        bench.torchrun.kill("b")
    bench.torchrun.kill("a")
    assert bench.torchrun.gone() == {"a": -signal.SIGKILL}
    assert bench.started[1].told == []


def test_the_way_to_a_job_stands_in_its_folder(tmp_path: Path) -> None:
    """Without it, or with a torn one, the folder is no job's; a token is named where there is one."""
    with pytest.raises(BadFile, match="is no folder of a cluster job"):
        engines.job_line(tmp_path)
    (tmp_path / engines.JOB).write_text(json.dumps({"address": "127.0.0.1:4711", "token_file": None}))
    assert joining_words(engines.job_line(tmp_path)) == ["--join", "127.0.0.1:4711"]
    (tmp_path / engines.JOB).write_text(json.dumps({"address": "nowhere", "token_file": None}))
    with pytest.raises(BadFile):
        engines.job_line(tmp_path)


def test_what_a_process_started_is_below_it() -> None:
    """Itself first; of one that has ended itself alone is told."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        assert descendants(child.pid) == [child.pid]
        assert child.stdin is not None
        child.stdin.close()
    assert descendants(5_000_000) == [5_000_000]


class Driver(Process):
    """Ray's driver, with the lines that it was told."""

    def __init__(self, words: Sequence[str]) -> None:
        super().__init__(words)
        self.stdin = self
        self.lines: list[str] = []

    def write(self, text: str) -> None:
        """Take a line."""
        self.lines.append(text)

    def flush(self) -> None:
        """Have it."""


def test_ray_is_told_of_members_and_its_failure_is_the_jobs(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its driver is started once, after the controller; whichever of the two has failed says the exit code."""
    engine = RayEngine(bench.torchrun.plan, bench.clock)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(InvalidInput, match="pip install 'polythrottle"):
        engine.start(["a"])
    assert engine.exit_code is None
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    drivers: list[Driver] = []

    def begin(command: Sequence[str], **words: Any) -> Process:
        if "polythrottle.training.elastic.ray_engine" in command:
            drivers.append(Driver(command))
            return drivers[-1]
        return bench._start(command, **words)

    monkeypatch.setattr(ray_engine.subprocess, "Popen", begin)
    monkeypatch.setattr(ray_engine, "job_line", lambda folder: bench.line)
    engine.start(["a", "b"])
    engine.start(["c"])
    engine.kill("a")
    (driver,) = drivers
    assert driver.lines == ["add a\n", "add b\n", "add c\n", "kill a\n"]
    assert driver.words[-4:] == [str(tmp_path), "train.py", "--epochs", "3"]
    assert len(bench.started) == 1
    assert engine.status()["phase"] == "training"
    assert engine.events() == []
    assert engine.exit_code is None
    driver.returncode = 1
    assert engine.exit_code == 1
    with pytest.raises(DeviceError, match="Ray has ended"):
        engine.kill("b")
    bench.started[0].returncode = 5
    assert engine.exit_code == 5
    engine.stop()
    assert bench.line.asked[-3:] == ["status", "drain a the job is stopped", "drain b the job is stopped"]
    assert bench.started[0].told == ["terminate"]
