"""The prolog and the epilog under a real Slurm: two slurmd on this machine, with GPUs that are none."""

import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cluster.slurm_nodes import SlurmNodes

pytestmark = [pytest.mark.cluster, pytest.mark.xdist_group("slurm")]
SCRIPTS = Path(__file__).resolve().parents[2] / "packaging" / "slurm"


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SlurmNodes]:
    """Start two nodes with both scripts, a profile, and a program that notes what it is asked."""
    scripts = tmp_path / "scripts"
    (scripts / "profiles").mkdir(parents=True)
    for name in ("prolog", "epilog"):
        shutil.copy(SCRIPTS / name, scripts / name)
    (scripts / "profiles" / "chat.toml").touch()
    program = scripts / "polythrottle"
    program.write_text(
        f'#!/bin/sh\necho "$@" >>{scripts}/asked\n'
        f'[ "$1" = apply ] || exit "$(cat {scripts}/code 2>/dev/null || echo 0)"\n'
    )
    program.chmod(0o755)
    jobs = tmp_path / "jobs"
    (scripts / "settings").write_text(f"program={program}\nprofiles={scripts}/profiles\njobs={jobs}\n")
    folder = tmp_path / "slurm"
    folder.mkdir()
    with SlurmNodes(folder, scripts) as started:
        monkeypatch.setenv("SLURM_CONF", str(started.conf))
        yield started


def asked(slurm: SlurmNodes) -> list[str]:
    """Return what polythrottle was asked."""
    assert slurm.scripts is not None
    path = slurm.scripts / "asked"
    return path.read_text().splitlines() if path.exists() else []


def words_of(pid: int) -> bytes:
    """Return the command line of a process; nothing if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def eventually(true: Callable[[], bool], what: str, slurm: SlurmNodes) -> None:
    """Wait up to a minute for something to be so."""
    end_s = time.monotonic() + 60
    while not true():
        assert time.monotonic() < end_s, f"not {what}: {asked(slurm)}\n{slurm.logs()}"
        time.sleep(0.1)


def test_a_jobs_gpus_are_set_for_it_and_put_back(slurm: SlurmNodes) -> None:
    """Whether it ends or is cancelled; one without a profile sets nothing; a node that cannot restore is drained."""
    scripts = slurm.scripts
    slurm.call("sbatch", "-w", "n1", "--gres=gpu:2", "-o", "/dev/null", "--wrap=true")
    slurm.call("sbatch", "-w", "n1", "--gres=gpu:2", "--comment=polythrottle=chat", "-o", "/dev/null", "--wrap=sleep 1")
    eventually(lambda: len(asked(slurm)) == 2, "ended", slurm)
    apply, restore = asked(slurm)
    assert apply == f"apply {scripts}/profiles/chat.toml --device nvml:0,1 --keep --no-daemon"
    assert restore == "restore --device nvml:0,1 --no-daemon"
    slurm.wait_for({"n1": "idle"})
    words = ("--gres=gpu:1", "--comment=polythrottle=chat", "-o", "/dev/null", "--wrap=sleep 600")
    job = slurm.call("sbatch", "--parsable", "-w", "n1", *words)
    eventually(lambda: len(asked(slurm)) == 3, "set", slurm)
    # A job that is cancelled while it is launched may be launched all the same.
    eventually(lambda: b"sleep\x00600" in b" ".join(map(words_of, slurm.processes("n1"))), "running", slurm)
    assert scripts is not None
    (scripts / "code").write_text("6")
    slurm.call("scancel", job)
    eventually(lambda: len(asked(slurm)) >= 4, "cancelled", slurm)
    assert asked(slurm)[3] == "restore --device nvml:0 --no-daemon"
    slurm.wait_for({"n1": "drained"})
