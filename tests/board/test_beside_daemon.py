"""What the desk runs on a board whose own daemon steers it, by a stand-in for ``ssh``: one of the two has it."""

import os
import sys
from pathlib import Path

import pytest
from boards_over_ssh import await_that, held, planted, stand_in
from far_jobs import daemon_there, finetuning, long_run, status_of, with_model

from polythrottle.actuation import standing
from polythrottle.board.link import SSH
from polythrottle.cli.commands import run
from polythrottle.daemon.trainer_monitor import TrainerMonitor
from polythrottle.domain.errors import DeviceError
from polythrottle.storage.paths import state_dir

pytestmark = pytest.mark.slow


@pytest.fixture
def board(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the tree of a board, with a tiny model and its data in the home that a stand-in for ssh leads to."""
    monkeypatch.setenv(SSH, stand_in(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with_model(tmp_path / "home")
    return planted(tmp_path)


def board_uri(board: Path) -> str:
    """Return how the board is reached."""
    return f"ssh://nano/jetson?root={board}&python={sys.executable}"


def test_a_board_that_its_daemon_steers_is_refused_in_one_line(
    board: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Tuning and fine-tuning alike: the line names the daemon, which goes on as if nothing had been asked."""
    tuning = ["tune", "-d", board_uri(board), "-w", "cmd:true", "--slo", "p99<=10s", "--trials", "2", "--yes"]
    with daemon_there(tmp_path, board) as client:
        await_that(lambda: (status := status_of(client)) is not None and not status.faults, "the board is not taken")
        before = held(board)
        for words in (tuning, finetuning(board_uri(board))):
            assert run(words) == DeviceError.exit_code
            (line,) = capsys.readouterr().err.splitlines()
            assert line.startswith("polythrottle: ssh://nano: jetson ")
            assert "is being steered by the daemon, " in line
            assert line.endswith(", through the actuator; wait for it or stop it")
        status = status_of(client)
        assert status is not None
        assert (status.faults, held(board)) == ((), before)


def test_a_daemon_is_told_of_the_desk_and_sees_its_job(board: Path, tmp_path: Path) -> None:
    """Its status names who has the board, and shows the job that the desk has trained there; later it has the board."""
    before = held(board)
    with long_run(board_uri(board), tmp_path / "home" / "job") as child, daemon_there(tmp_path, board) as client:
        await_that(
            lambda: (status := status_of(client)) is not None and status.finetuning is not None, "no job is seen"
        )
        status = status_of(client)
        assert status is not None
        assert status.finetuning is not None
        assert (status.finetuning.state, status.finetuning.folder) == ("running", str(tmp_path / "home" / "job"))
        assert any(f"at {os.uname().nodename} (process {child.pid}, over SSH)" in each for each in status.faults)
        child.terminate()
        child.wait(60)
        await_that(lambda: (status := status_of(client)) is not None and not status.faults, "the board is not taken")
    assert (held(board), standing()) == (before, ())


def test_a_job_that_was_trained_there_stays_known(board: Path, tmp_path: Path) -> None:
    """A link in the state folder of whoever logs in there leads to it, as one does locally."""
    assert run(finetuning(board_uri(board), "--epochs", "2", "--json")) == 0
    shown = TrainerMonitor((state_dir() / "finetune",)).look(0.0)
    assert shown is not None
    assert (shown.state, shown.folder) == ("finished", str(tmp_path / "home" / "job"))
