"""Slurm's prolog and epilog: what they ask polythrottle for, and that a job's GPUs are as they were found after it."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from builders import measured

from polythrottle.backends import open_device
from polythrottle.catalog.tuned_profiles import write_profile
from polythrottle.domain.profile import Profile
from polythrottle.domain.space import OperatingPoint
from polythrottle.storage.identity import identity_of
from polythrottle.testing.nvml import FakeNvml, compiler

SCRIPTS = Path(__file__).resolve().parent.parent / "packaging" / "slurm"
HANG_S = 120.0


@dataclass
class Node:
    """A node with both scripts, a profile and a stand-in for polythrottle that notes what it is asked.

    Args:
        folder: Of all that.
    """

    folder: Path

    def __post_init__(self) -> None:
        for name in ("prolog", "epilog"):
            shutil.copy(SCRIPTS / name, self.folder / name)
        (self.folder / "profiles").mkdir()
        (self.folder / "profiles" / "chat.toml").touch()
        self.program(f'echo "$@" >>{self.folder}/asked; exit $(cat {self.folder}/code 2>/dev/null || echo 0)')

    def program(self, text: str) -> None:
        """Have this run for polythrottle."""
        path = self.folder / "polythrottle"
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
        (self.folder / "settings").write_text(
            f"program={path}\nprofiles={self.folder}/profiles\njobs={self.folder}/jobs\n"
        )

    def run(self, name: str, job: str, gpus: str = "", comment: str = "") -> tuple[int, str]:
        """Run a script as slurmd does, and return its exit code and what it said."""
        told = {"SLURM_JOB_ID": job, "SLURM_JOB_GPUS": gpus, "SLURM_JOB_COMMENT": comment}
        told = {key: value for key, value in told.items() if value}
        environment = {"PATH": os.environ["PATH"], **told}
        done = subprocess.run(
            [self.folder / name], env=environment, capture_output=True, text=True, timeout=HANG_S, check=False
        )
        return done.returncode, done.stderr

    @property
    def asked(self) -> list[str]:
        """What polythrottle was asked."""
        path = self.folder / "asked"
        return path.read_text().splitlines() if path.exists() else []

    @property
    def jobs(self) -> list[str]:
        """The jobs whose GPUs are set."""
        return sorted(path.name for path in (self.folder / "jobs").glob("[0-9]*"))


@pytest.fixture
def node(tmp_path: Path) -> Node:
    """Return a node."""
    return Node(tmp_path)


def test_a_jobs_profile_is_applied_and_taken_back(node: Node) -> None:
    """To the GPUs that Slurm gave it, once each, and the epilog of a job that asked for nothing does nothing."""
    assert node.run("prolog", "7", "0,2", "polythrottle=chat")[0] == 0
    assert node.jobs == ["7"]
    assert node.run("epilog", "8")[0] == 0
    assert node.run("epilog", "7")[0] == 0
    assert node.run("epilog", "7")[0] == 0
    assert node.asked == [
        f"apply {node.folder}/profiles/chat.toml --device nvml:0,2 --keep --no-daemon",
        "restore --device nvml:0,2 --no-daemon",
    ]
    assert node.jobs == []


@pytest.mark.parametrize(
    ("job", "gpus", "comment", "words"),
    [
        ("7", "0", "", ""),
        ("7", "0", "my first job", ""),
        ("7", "", "polythrottle=chat", "no GPUs"),
        ("7", "0-3", "polythrottle=chat", "no GPUs"),
        ("7", "0", "polythrottle=", "names no profile"),
        ("7", "0", "polythrottle=../secret", "names no profile"),
        ("7", "0", "polythrottle=chat; reboot", "names no profile"),
        ("7", "0", "polythrottle=other", "there is no profile"),
        ("", "0", "polythrottle=chat", "no number"),
        ("../7", "0", "polythrottle=chat", "no number"),
    ],
)
def test_what_cannot_be_applied_lets_the_job_run(node: Node, job: str, gpus: str, comment: str, words: str) -> None:
    """The prolog ends well, so that the node is not drained, says why in a line, and sets nothing."""
    code, said = node.run("prolog", job, gpus, comment)
    assert code == 0
    assert words in said
    assert bool(said) == bool(words)
    assert said.count("\n") <= 1
    assert node.asked == []


def test_a_profile_that_is_refused_lets_the_job_run(node: Node) -> None:
    """The reason is said, and the epilog looks after the GPUs all the same."""
    (node.folder / "code").write_text("4")
    code, said = node.run("prolog", "7", "0", "polythrottle=chat")
    assert (code, "was not applied" in said) == (0, True)
    assert node.jobs == ["7"]
    (node.folder / "code").write_text("0")
    assert node.run("epilog", "7")[0] == 0
    assert node.jobs == []


def test_a_gpu_that_is_set_for_one_job_is_not_set_for_another(node: Node) -> None:
    """As with shards; 1 is not 11, and once the first has ended the second one's successor may."""
    assert node.run("prolog", "7", "1,2", "polythrottle=chat")[0] == 0
    assert "GPU 2 is set for job 7" in node.run("prolog", "8", "2,3", "polythrottle=chat")[1]
    assert node.run("prolog", "9", "11", "polythrottle=chat")[0] == 0
    assert node.jobs == ["7", "9"]
    assert node.run("epilog", "8")[0] == 0
    assert node.run("epilog", "7")[0] == 0
    assert node.run("prolog", "10", "2", "polythrottle=chat")[0] == 0
    assert node.jobs == ["10", "9"]


def test_gpus_that_cannot_be_put_back_drain_the_node(node: Node) -> None:
    """The epilog fails and says why, and again until they can."""
    node.run("prolog", "7", "0", "polythrottle=chat")
    (node.folder / "code").write_text("6")
    for _ in range(2):
        code, said = node.run("epilog", "7")
        assert code == 1
        assert "could not be put back (6)" in said
    (node.folder / "code").write_text("0")
    assert node.run("epilog", "7")[0] == 0


@pytest.fixture
def gpus(tmp_path: Path) -> Iterator[tuple[FakeNvml, Node]]:
    """Three GPUs of the stand-in driver, and a node with the real program and a few profiles."""
    with FakeNvml(tmp_path / "nvml", ("h100-sxm",) * 3) as fake:
        (tmp_path / "node").mkdir()
        node = Node(tmp_path / "node")
        words = " ".join(f"{key}='{value}'" for key, value in os.environ.items() if "NVML" in key or "LD_" in key)
        state = tmp_path / "state"
        node.program(f'export {words} POLYTHROTTLE_STATE_DIR={state}; exec {sys.executable} -m polythrottle "$@"')
        for name in ("0,1", "1", "0,2"):
            device = open_device(f"nvml:{name}")
            point = OperatingPoint({"gpu_max_hz": 1200 * 10**6})
            profile = Profile(device.uri, "model", point, measured(), identity=identity_of(device), workload_knobs=())
            write_profile(profile, node.folder / "profiles" / f"on-{name.replace(',', '-')}.toml")
        yield fake, node


def locks(fake: FakeNvml) -> list[int]:
    """Return the clock that each GPU is locked to, in MHz; 0 where it is not."""
    return [fake.get(slot, "gpu_lock_max_mhz") for slot in range(3)]


@pytest.mark.slow
@pytest.mark.skipif(compiler() is None, reason="no C compiler, so the stand-in driver cannot be built")
def test_the_gpus_of_a_job_are_as_they_were_found_after_it(gpus: tuple[FakeNvml, Node]) -> None:
    """By the real program, on the stand-in driver; also where the profile is for other GPUs and nothing was set."""
    fake, node = gpus
    before = fake.snapshot()
    code, said = node.run("prolog", "7", "0,2", "polythrottle=on-0-2")
    assert (code, "is applied to nvml:0,2" in said) == (0, True), said
    assert locks(fake) == [1200, 0, 1200]
    assert node.run("epilog", "7")[0] == 0
    assert fake.snapshot() == before
    assert "was not applied" in node.run("prolog", "8", "1", "polythrottle=on-0-2")[1]
    code, said = node.run("epilog", "8")
    assert code == 0, said
    assert fake.snapshot() == before


@pytest.mark.slow
@pytest.mark.skipif(compiler() is None, reason="no C compiler, so the stand-in driver cannot be built")
def test_the_end_of_a_job_leaves_the_only_other_gpu_that_is_set_alone(gpus: tuple[FakeNvml, Node]) -> None:
    """Nothing was set for it, and the one GPU on record is another job's."""
    fake, node = gpus
    assert node.run("prolog", "10", "1", "polythrottle=on-1")[0] == 0
    assert "was not applied" in node.run("prolog", "11", "2", "polythrottle=on-0-1")[1]
    code, said = node.run("epilog", "11")
    assert code == 0, said
    assert locks(fake) == [0, 1200, 0]
    assert node.run("epilog", "10")[0] == 0
    assert locks(fake) == [0, 0, 0]


@pytest.mark.slow
@pytest.mark.skipif(compiler() is None, reason="no C compiler, so the stand-in driver cannot be built")
def test_a_gpu_that_fell_off_the_bus_keeps_no_other_from_being_put_back(gpus: tuple[FakeNvml, Node]) -> None:
    """The node is drained, as one GPU is not as it was found; the other is, and the first once it answers again."""
    fake, node = gpus
    assert node.run("prolog", "12", "0,1", "polythrottle=on-0-1")[0] == 0
    fake.set(1, lost=1)
    code, said = node.run("epilog", "12")
    assert code != 0
    assert fake.uuid(1) in said
    assert fake.get(0, "gpu_lock_max_mhz") == 0
    fake.set(1, lost=0)
    assert node.run("epilog", "12")[0] == 0
    assert locks(fake) == [0, 0, 0]
