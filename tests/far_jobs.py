"""Jobs that are fine-tuned on boards over SSH, and daemons that run there, in tests."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from actuators import Process
from boards_over_ssh import await_that
from trainer_jobs import data_folder, exported

from polythrottle.daemon.client import Client
from polythrottle.daemon.observation import RequestStats
from polythrottle.daemon.status import Status
from polythrottle.domain.errors import PolythrottleError

HOME = Path()
_REHEARSED = 60
"""Steps that no rehearsal makes: beyond them the run itself is under way."""


def with_model(home: Path) -> Path:
    """Return a folder of a board with a tiny model and its data."""
    data_folder(home / "data")
    exported(home / "tiny.pt2")
    return home


def finetuning(device: str, *more: str, home: Path = HOME) -> list[str]:
    """Return the words that fine-tune that model on a device over SSH.

    Args:
        device: Over SSH.
        more: Words besides.
        home: The folder of the board; by default the one that a login begins in.
    """
    place = ["-d", device, "-w", str(home / "tiny.pt2"), "--threads", "1", "--slo", "p99<=5s", "--rate", "20/s"]
    job = ["--data", str(home / "data"), "--job", str(home / "job")]
    return ["finetune", "run", *place, *job, "--train-batch", "8", *more]


def last_step(job: Path) -> int:
    """Return the last step of a job on disk; 0 before the first."""
    return max((int(path.stem) for path in job.glob("*.checkpoint")), default=0)


@contextmanager
def long_run(device: str, job: Path, home: Path = HOME) -> Iterator["subprocess.Popen[str]"]:
    """Run a desk in a process of its own that fine-tunes for long, past its rehearsal.

    Args:
        device: Over SSH.
        job: Its folder.
        home: As of `finetuning`.
    """
    child = subprocess.Popen(
        [sys.executable, "-m", "polythrottle", *finetuning(device, "--epochs", "100000", "--json", home=home)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        await_that(lambda: last_step(job) > _REHEARSED or child.poll() is not None, "nothing is trained")
        assert child.poll() is None
        yield child
    finally:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGCONT)
            os.killpg(child.pid, signal.SIGKILL)
        child.communicate()


@contextmanager
def daemon_there(folder: Path, board: Path) -> Iterator[Client]:
    """Run an actuator and a daemon of a planted board; yields what asks the daemon.

    Args:
        folder: For sockets and settings.
        board: Its tree.
    """
    run = folder / "run"
    run.mkdir(mode=0o700, exist_ok=True)
    actuator = Process(board, run / "a.sock")
    lines = [f'device = "jetson?root={board}"', 'workload = "cmd:true"', 'slo = ["p99<=10s"]', 'traffic = "report"']
    (folder / "daemon.toml").write_text("\n".join(lines))
    words = ["daemon", "run", "--config", str(folder / "daemon.toml"), "--actuator", str(actuator.path)]
    with (folder / "daemon.log").open("w") as log:
        daemon = subprocess.Popen(
            [sys.executable, "-m", "polythrottle", *words, "--socket", str(run / "d.sock")], stdout=log, stderr=log
        )
    try:
        with Client(run / "d.sock") as client:
            await_that(lambda: status_of(client) is not None or daemon.poll() is not None, "the daemon does not start")
            yield client
    finally:
        daemon.terminate()
        daemon.wait(60)
        actuator.end()


def status_of(client: Client) -> Status | None:
    """Keep the workload up, as a program that serves does; return the daemon's status, None while it has none."""
    with suppress(PolythrottleError):
        client.report(RequestStats(arrived=10, answered=10, p99_s=0.02, mean_s=0.01))
        return client.status()
    return None
