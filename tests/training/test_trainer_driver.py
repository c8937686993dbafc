"""Driving a real trainer's process: it dies, hangs, lies, sends an invalid answer, runs out of memory."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from trainer_jobs import data_folder, exported, job

from polythrottle.domain.errors import InvalidInput, PolythrottleError, TrialError
from polythrottle.training.beside.trainer.driver import Trainer, TrainerLost
from polythrottle.training.beside.trainer.job_folder import read_progress

pytestmark = pytest.mark.slow  # each starts trainers, which load torch

HELLO = (
    '{"pid": 1, "samples": 9, "held_out": 1, "steps_per_epoch": 2, "output": 3, "trained_parameters": 4, '
    '"device": "cpu", "operations": null, "traffic_bytes": null, "uncounted": "?", "step": 0, "epoch": 0, '
    '"position": 0, "of": 8, "finished": false, "notices": []}'
)
SLICE = (
    '{"took_s": 0.000001, "samples": 8, "of": 8, "at": 0, "step": 1, "written": true, "epoch": 0, "position": 8, '
    '"loss": 0.5, "finished": false, "halved_to": null, "left_out": [], "notices": []}'
)


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the tiny model as an archive of torch.export."""
    return exported(tmp_path_factory.mktemp("model") / "tiny.pt2")


@pytest.fixture
def where(tmp_path: Path) -> Path:
    """Return a folder with data in it."""
    data_folder(tmp_path / "data")
    return tmp_path


def pretending(where: Path, after_hello: str) -> Trainer:
    """Return a trainer that says hello and then does something else."""
    code = (
        "import json, os, signal, socket, sys, time\n"
        "way = socket.socket(fileno=int(sys.argv[1]))\n"
        f"way.recv(65536); way.sendall(b'{{\"answer\": ' + {HELLO!r}.encode() + b'}}\\n')\n"
        "way.recv(65536)\n"
        f"{after_hello}\n"
    )
    return Trainer(job(where, Path("m.pt2")), start_s=60, patience_s=30, command=(sys.executable, "-c", code))


def gone(pid: int) -> bool:
    """Return whether a process is no more."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_a_job_is_done_slice_by_slice(where: Path, archive: Path) -> None:
    """A real trainer trains to the end, says where it stands, and is gone afterwards."""
    with Trainer(job(where, archive, epochs=1)) as trainer:
        hello = trainer.start()
        assert (hello.samples + hello.held_out, hello.output, hello.operations) == (30, 3, 144)
        told = [trainer.slice(5)]
        while not told[-1].finished:
            told.append(trainer.slice(5))
        assert sum(each.samples for each in told) == hello.samples
        assert [each.step for each in told if each.loss is not None] == list(range(1, hello.steps_per_epoch + 1))
        assert all(each.measured_s >= each.took_s > 0 for each in told)
        pid = trainer.pid
    assert pid is not None
    assert gone(pid)
    assert read_progress(where / "job").finished


def test_a_killed_trainer_is_told_and_taken_up_again(where: Path, archive: Path) -> None:
    """The error names the signal; a new one goes on from the last step; inference was never asked to wait."""
    with Trainer(job(where, archive)) as trainer:
        trainer.start()
        step = trainer.slice(8).step
        assert trainer.pid is not None
        os.kill(trainer.pid, signal.SIGKILL)
        with pytest.raises(TrainerLost, match=r"SIGKILL.*goes on from there"):
            trainer.slice(8)
        assert trainer.start().step == step
        # Who is suspended answers nothing, and goes on when let.
        trainer.suspend()
        trainer.post("slice", samples=8, write=True)
        assert trainer.reply(0.0) is None
        with pytest.raises(InvalidInput, match="not answered slice yet"):
            trainer.post("slice", samples=8, write=True)
        trainer.resume()
        found = trainer.reply(30.0)
        assert found is not None
        assert trainer.done(*found).step == step + 1


def test_what_it_refuses_comes_as_what_it_is(where: Path, archive: Path) -> None:
    """An error of the trainer's is raised here in its own class, and no process stays."""
    trainer = Trainer(job(where, where / "missing.pt2"))
    with pytest.raises(PolythrottleError, match="missing"):
        trainer.start()
    assert trainer.pid is not None
    assert gone(trainer.pid)


def test_a_hanging_trainer_is_ended(where: Path) -> None:
    """After its time is up it is killed, not waited for."""
    trainer = pretending(where, "time.sleep(600)")
    trainer.start()
    assert trainer.pid is not None
    with pytest.raises(TrainerLost, match=r"has not answered for 0\.05 s"):
        trainer.slice(8, timeout_s=0.05)
    assert gone(trainer.pid)


@pytest.mark.parametrize(
    ("does", "words"),
    [
        ("sys.exit('no luck today')", "exit code 1.*no luck today"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", "SIGSEGV"),
        ("way.sendall(b'hello?\\n'); time.sleep(60)", "invalid answer"),
        ("way.sendall(b'{}\\n'); time.sleep(60)", "neither an answer nor an error"),
        ("way.sendall(b'{\"answer\": {}}\\n'); time.sleep(60)", "a slice's answer was expected"),
        ("way.sendall(b'x' * 2_000_000); time.sleep(60)", "invalid answer"),
    ],
)
def test_a_trainer_that_fails_is_told(where: Path, does: str, words: str) -> None:
    """It dies, crashes or sends an invalid answer: one clear line with its last words, and no process stays."""
    trainer = pretending(where, does)
    trainer.start()
    assert trainer.pid is not None
    with pytest.raises(TrainerLost, match=words):
        trainer.slice(8)
    assert gone(trainer.pid)
    with pytest.raises(TrainerLost, match="not running"):
        trainer.slice(8)


def test_a_lie_about_time_is_not_believed(where: Path) -> None:
    """What counts is what the driver has measured."""
    with pretending(where, f"time.sleep(0.05); way.sendall(b'{{\"answer\": ' + {SLICE!r}.encode() + b'}}\\n')") as liar:
        liar.start()
        done = liar.slice(8)
    assert done.took_s < 0.001
    assert done.measured_s >= 0.05


def test_memory_that_runs_out_halves_the_slice(where: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under a real limit of the system a wide model goes on with fewer samples at once, and says so."""
    (where / "wide.py").write_text(
        "from torch import nn\n"
        "def model():\n    return nn.Sequential(nn.Unflatten(1, (6, 1)), nn.Linear(1, 200_000), nn.ReLU(),"
        " nn.AvgPool1d(200_000), nn.Flatten(), nn.Linear(6, 3))\n"
    )
    monkeypatch.syspath_prepend(where)
    task = job(where, Path("wide:model"), batch=24, memory_bytes=160_000_000, epochs=1)
    with Trainer(task) as trainer:
        trainer.start()
        done = trainer.slice(24)
        assert done.samples == 24
        assert done.halved_to in (1, 3, 6, 12)
        assert any("do not fit into memory" in notice for notice in done.notices)


def test_one_sample_that_does_not_fit_ends_the_job(where: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer lives and says what to do; what was learnt before is kept."""
    (where / "huge.py").write_text(
        "from torch import nn\n"
        "def model():\n    return nn.Sequential(nn.Unflatten(1, (6, 1)), nn.Linear(1, 2_000_000), nn.ReLU(),"
        " nn.AvgPool1d(2_000_000), nn.Flatten(), nn.Linear(6, 3))\n"
    )
    monkeypatch.syspath_prepend(where)
    with Trainer(job(where, Path("huge:model"), memory_bytes=30_000_000)) as trainer:
        trainer.start()
        with pytest.raises(TrialError, match="one sample does not fit into memory"):
            trainer.slice(4)
        assert trainer.ask("checkpoint")["step"] == 0


@pytest.mark.parametrize("last", ["pass", "trainer.suspend()"])
def test_a_trainer_ends_with_its_driver(where: Path, archive: Path, last: str) -> None:
    """Whoever drives it is killed: the trainer leaves the folder to the next one, suspended or not."""
    code = (
        "import sys, time\nfrom trainer_jobs import job\nfrom pathlib import Path\n"
        "from polythrottle.training.beside.trainer.driver import Trainer\n"
        f"trainer = Trainer(job(Path({str(where)!r}), Path({str(archive)!r})))\n"
        f"trainer.start()\nstep = trainer.slice(8).step\n{last}\n"
        "sys.stdout.write(str(step) + '\\n'); sys.stdout.flush()\n"
        "time.sleep(600)\n"
    )
    paths = os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])
    driver = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": paths}
    )
    assert driver.stdout is not None
    assert driver.stdout.readline() == "1\n"
    driver.kill()
    driver.wait()
    driver.stdout.close()
    with Trainer(job(where, archive)) as trainer:
        assert trainer.start().step == 1


def test_labels_that_are_missing_are_told_before_anything_runs(where: Path, archive: Path) -> None:
    """The refusal comes through the process as one line."""
    np.save(where / "data" / "stray.npy", np.zeros(6, dtype=np.float32))
    with pytest.raises(InvalidInput, match="have no label"):
        Trainer(job(where, archive)).start()
