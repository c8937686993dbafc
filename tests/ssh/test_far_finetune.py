"""Fine-tuning on a board behind a real ``sshd``: done, cut off in the middle, left by a desk that sleeps."""

import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from boards_over_ssh import await_that, far_sides, held, planted
from far_jobs import daemon_there, finetuning, last_step, long_run, status_of, with_model
from slow_line import SlowLine
from sshd import SSHD, listening

from polythrottle.actuation import standing
from polythrottle.board.link import SSH
from polythrottle.cli.commands import run
from polythrottle.domain.errors import DeviceError

pytestmark = [pytest.mark.ssh, pytest.mark.skipif(SSHD is None, reason="needs sshd (Debian: openssh-server)")]


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """Return a folder of the board with a model and its data."""
    return with_model(tmp_path / "there")


@pytest.fixture
def line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowLine]:
    """Return the line to a board, ``ssh://nano``, that takes 50 ms each way and can be cut."""
    folder = tmp_path / "sshd"
    folder.mkdir()
    with listening(folder) as (config, port, _):
        slow = SlowLine(port, delay_s=0.05, loss=0.0)
        monkeypatch.setenv(SSH, f"ssh -F {config} -o Port={slow.port} -o HostKeyAlias=nano")
        monkeypatch.setenv("TMPDIR", str(tmp_path))
        yield slow
        slow.close()


@pytest.fixture
def board(line: SlowLine, tmp_path: Path) -> Path:
    """Return the tree of that board."""
    return planted(tmp_path)


def board_uri(board: Path) -> str:
    """Return how the board is reached."""
    return f"ssh://nano/jetson?root={board}&python={sys.executable}"


def done_later(board: Path, home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Check that the same command goes on with a job and ends it."""
    epochs = last_step(home / "job") // 4 + 4
    assert run(finetuning(board_uri(board), "--epochs", str(epochs), "--json", home=home)) == 0, capsys.readouterr().err
    found = json.loads(capsys.readouterr().out)
    assert found["training"]["finished"] is True
    assert found["training"]["steps"] < 20


def test_a_job_is_done_on_the_board(
    board: Path, home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the board's latencies and joules: no figure holds the line; the board as it was, nothing of ours left."""
    before = held(board)
    words = finetuning(board_uri(board), "--epochs", "4", "--seconds", "5", "--json", home=home)
    assert run(words) == 0, capsys.readouterr().err
    found = json.loads(capsys.readouterr().out)
    assert found["training"]["finished"] is True
    assert found["energy_j"] > 0
    assert found["latency_s"]["p50"] < 0.05
    assert (held(board), standing()) == (before, ())
    await_that(lambda: not far_sides(tmp_path), "the far side stays")
    assert not [*tmp_path.glob("polythrottle-board-*")]


def test_a_job_that_runs_is_looked_at(board: Path, home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From a second connection, while the first one trains."""
    with long_run(board_uri(board), home / "job", home):
        assert run(["finetune", "status", str(home / "job"), "-d", "ssh://nano", "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
    assert found["running"] is True
    assert found["steps"] > 0


def test_a_board_has_one_of_its_daemon_and_the_desk(
    board: Path, home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run is refused in a line that names the daemon; while a run has the board, the daemon names the desk."""
    with daemon_there(tmp_path, board) as client:
        await_that(lambda: (status := status_of(client)) is not None and not status.faults, "the board is not taken")
        assert run(finetuning(board_uri(board), home=home)) == DeviceError.exit_code
        assert "is being steered by the daemon, " in capsys.readouterr().err
    with long_run(board_uri(board), home / "job", home), daemon_there(tmp_path, board) as client:
        await_that(
            lambda: (status := status_of(client)) is not None and status.finetuning is not None, "no job is seen"
        )
        status = status_of(client)
        assert status is not None
        assert any("over SSH" in each for each in status.faults)


def test_a_profile_is_measured_on_the_board(
    board: Path, home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a job of its own that is thrown away there; the board as it was, nothing of ours left."""
    before = held(board)
    words = ["-d", board_uri(board), "-w", str(home / "tiny.pt2"), "--threads", "1", "--data", str(home / "data")]
    more = ["--train-batch", "8", "--held-out", "4", "--json"]
    assert run(["finetune", "profile", *words, *more]) == 0, capsys.readouterr().err
    found = json.loads(capsys.readouterr().out)
    assert (found["co_runs"], found["held_out"]) == (8, 4)
    await_that(lambda: not far_sides(tmp_path), "the far side stays")
    assert (held(board), standing()) == (before, ())
    assert not [*tmp_path.glob("polythrottle-*")]


def test_a_line_that_is_cut_ends_the_run_and_keeps_the_job(
    board: Path, home: Path, line: SlowLine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line at the desk that says how it goes on; the board as it was found, and it does go on."""
    before = held(board)
    with long_run(board_uri(board), home / "job", home) as child:
        line.cut()
        out, err = child.communicate(timeout=120.0)
    assert (child.returncode, out) == (DeviceError.exit_code, ""), err
    assert "the connection to ssh://nano was lost" in err.splitlines()[-1]
    assert "the same command goes on with it" in err.splitlines()[-1]
    await_that(lambda: not far_sides(tmp_path), "the far side stays")
    assert (held(board), standing()) == (before, ())
    done_later(board, home, capsys)


def test_a_desk_that_sleeps_ends_the_run_and_keeps_the_job(
    board: Path, home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It says nothing for 45 seconds: the board is as it was found though nothing was closed, and the job goes on."""
    before = held(board)
    with long_run(board_uri(board), home / "job", home) as child:
        os.killpg(child.pid, signal.SIGSTOP)
        await_that(lambda: not far_sides(tmp_path), "the far side stays")
        assert (held(board), standing()) == (before, ())
    done_later(board, home, capsys)
