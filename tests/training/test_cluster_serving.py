"""A controller of its own process that is killed: its job's time, losses and recoveries go on as they were."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from polythrottle.cli.commands import run
from polythrottle.domain.errors import BadFile, InvalidInput
from polythrottle.training.elastic.channel import ControllerAway, ControllerChannel, WrongToken
from polythrottle.training.elastic.engines import job_line
from polythrottle.training.elastic.events import keeper, read_events
from polythrottle.training.elastic.job_control import job_folder, status_of

AT = ["127.0.0.1", 29500]
PATIENCE_S = 90.0


class Kept:
    """A job's controllers, each a process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.processes: list[subprocess.Popen[bytes]] = []

    def begin(self) -> ControllerChannel:
        """Start a controller and return the way to it."""
        words = ["--serve", "127.0.0.1:0", "--nodes", "1:2", "--job-folder", str(self.folder), "--beat", "0.5"]
        command = [sys.executable, "-m", "polythrottle", "cluster", "train", *words]
        self.processes.append(subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL))
        found: list[ControllerChannel] = []

        def answers() -> bool:
            with suppress(BadFile, ControllerAway):
                line = job_line(self.folder)
                found.append(line)
                return keeper(self.folder) == self.processes[-1].pid and bool(line.ask("status"))
            return False

        until(answers)
        return found[-1]

    def kill(self) -> None:
        """Take the controller away without a word."""
        self.processes[-1].kill()
        self.processes[-1].wait()


def until(true: Callable[[], bool]) -> None:
    """Wait until something is so."""
    end_s = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < end_s
        time.sleep(0.05)


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[Kept]:
    """Keep a job, and end its controllers after the test."""
    found = Kept(tmp_path / "job")
    yield found
    for process in found.processes:
        with suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
        process.wait()


def gather(line: ControllerChannel, *names: str) -> None:
    """Let nodes join and be ready."""
    for name in names:
        line.ask("join", node=name, address=AT, process=f"{name}'s")
        line.ask("ready", node=name, address=AT)


@contextmanager
def beating(folder: Path, name: str) -> Iterator[None]:
    """Let a node be heard by whichever controller answers."""
    ended = threading.Event()

    def beat() -> None:
        while not ended.wait(0.1):
            with suppress(BadFile, ControllerAway):
                job_line(folder).ask("beat", node=name, process=f"{name}'s")

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def first_step(line: ControllerChannel, generation: int) -> None:
    """Report a generation's first step."""
    record = {"event": "first step", "step": generation, "workers": 1, "at_s": -5.0}
    line.ask("report", node="a", rank=0, generation=generation, step=generation, epoch=0, records=[record])


@pytest.mark.slow
def test_a_killed_controllers_successor_goes_on_in_the_jobs_time(kept: Kept) -> None:
    """Time never begins again, what left before is no loss, and a recovery after it is measured as it was."""
    line = kept.begin()
    gather(line, "a", "b")
    until(lambda: line.ask("beat", node="a", process="a's")["generation"] == 1)
    first_step(line, 1)
    line.ask("leave", node="b", reason="told to")
    line.ask("ready", node="a", address=AT)
    until(lambda: line.ask("beat", node="a", process="a's")["generation"] == 2)
    with beating(kept.folder, "a"):
        killed_s = time.monotonic()
        kept.kill()
        former, line = line, kept.begin()
        assert line.token == former.token, "nodes that train on are let in again"
        away_s = time.monotonic() - killed_s
        assert line.ask("beat", node="a", process="a's")["known"], "who trained on is still a member"
        line.ask("join", node="c", address=AT, process="c's")
        beaten_s = time.monotonic()
    with beating(kept.folder, "c"):
        until(lambda: any(event["event"] == "lost" for event in read_events(kept.folder)))
        line.ask("ready", node="c", address=AT)
        until(lambda: line.ask("beat", node="c", process="c's")["generation"] == 3)
    first_step(line, 3)
    recovered_s = time.monotonic() - beaten_s
    found = line.ask("status")
    events = read_events(kept.folder)
    times = [event["at_s"] for event in events]
    assert times == sorted(times)
    (restarted,) = (event for event in events if event["event"] == "restarted")
    assert 0 < restarted["away_s"] <= away_s
    assert (found["restarts"], found["losses"], found["departures"]) == (1, 1, 1)
    (recovery_s,) = found["recoveries_s"]
    assert 1.5 <= recovery_s <= recovered_s + 0.1


@pytest.mark.slow
def test_a_second_launcher_of_a_live_job_is_one_line_and_disturbs_nothing(
    kept: Kept, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Whether it would run all of the job, rent its nodes or only be its controller; the first one goes on."""
    line = kept.begin()
    gather(line, "a")
    script = tmp_path / "script.py"
    script.write_text("")
    before = read_events(kept.folder)
    for words in ([str(script)], ["--serve", "127.0.0.1:0"]):
        capfd.readouterr()
        assert run(["cluster", "train", "--job-folder", str(kept.folder), *words]) == 8
        said = capfd.readouterr().err.strip()
        assert len(said.splitlines()) == 1
        assert f"another controller (process {kept.processes[0].pid})" in said
        assert "cluster status" in said
    assert line.ask("beat", node="a", process="a's")["known"]
    assert [event["event"] for event in read_events(kept.folder)[: len(before)]] == [event["event"] for event in before]
    assert not any(event["event"] in {"lost", "left", "restarted"} for event in read_events(kept.folder))
    with pytest.raises(InvalidInput, match="already there"):
        line.ask("join", node="a", address=AT, process="another")


@pytest.mark.slow
def test_a_controller_alone_tells_what_happens_and_what_is_kept_when_it_is_stopped(tmp_path: Path) -> None:
    """Its own terminal shows the job's events; told to stop before the job is over, it does not end well."""
    words = ["--serve", "127.0.0.1:0", "--nodes", "1:2", "--job", "alone", "--store", str(tmp_path / "store")]
    command = [sys.executable, "-m", "polythrottle", "cluster", "train", *words]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        found: list[ControllerChannel] = []

        def answers() -> bool:
            with suppress(BadFile, ControllerAway):
                found.append(job_line(job_folder("alone")))
                return bool(found[-1].ask("status"))
            return False

        until(answers)
        gather(found[-1], "a", "b")
        until(lambda: found[-1].ask("status")["phase"] == "training")
        process.send_signal(signal.SIGTERM)
        out, said = process.communicate(timeout=PATIENCE_S)
    finally:
        process.kill()
        process.wait()
    assert (process.returncode, out) == (130, b"")
    for text in (
        "a joined",
        "b joined",
        "begins on a, b",
        "stopped before the job was over",
        "--job alone begins anew",
    ):
        assert text in said.decode()


@pytest.mark.slow
def test_a_controller_makes_a_token_of_its_own(kept: Kept) -> None:
    """On loopback, too: in a file that only its owner can read, and on no command line."""
    line = kept.begin()
    assert line.token_file == kept.folder / "token"
    assert line.token_file.stat().st_mode & 0o777 == 0o600
    with pytest.raises(WrongToken):
        ControllerChannel(line.host, line.port).ask("finish", node="a", generation=0)
    command = Path(f"/proc/{kept.processes[0].pid}/cmdline")
    assert not command.exists() or line.token.encode() not in command.read_bytes()


def test_a_controller_that_was_launched_leaves_the_words_to_its_launcher(kept: Kept) -> None:
    """The launcher shows the events, and finds that the job is not over when its controller was told to stop."""
    line = kept.begin()
    gather(line, "a")
    kept.processes[-1].terminate()
    assert kept.processes[-1].wait(PATIENCE_S) == 0
    assert status_of(kept.folder)["phase"] == "unknown"
