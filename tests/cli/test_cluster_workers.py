"""How many workers a rented node gets."""

from pathlib import Path

import pytest
import yaml

from polythrottle.cli.cluster.rented_nodes import gpus_of, workers_on
from polythrottle.cli.commands import run
from polythrottle.training.elastic.engines import LaunchPlan


@pytest.mark.parametrize(
    ("on", "sbatch", "gpus"),
    [
        ("skypilot:V100:4", [], 4),
        ("skypilot:V100", [], 1),
        ("skypilot", [], None),
        ("skypilot:V100: evil", [], None),
        ("skypilot:V100:1:2", [], None),
        ("slurm:gpu", [], None),
        ("slurm", ["--time=10", "--gres=nvme:1"], None),
        ("slurm", ["--gres=gpu"], 1),
        ("slurm", ["--gres=gpu:2"], 2),
        ("slurm", ["--gres=gpu:v100"], 1),
        ("slurm", ["--gres=gpu:v100:4,nvme:1"], 4),
        ("slurm", ["--gres=gpu:v100:2(S:0-1),gpu:a100:2"], 4),
        ("slurm", ["--gpus-per-node=a100:8"], 8),
        ("slurm", ["--gpus=2", "--gpus=3"], 3),
        ("slurm", ["-G4"], 4),
        ("slurm", ["--gres=gpu:0"], None),
        ("slurm", ["--gres=gpu:many:4:5", "--gpus-per-task=2", "--gres=none"], None),
    ],
)
def test_gpus_of_a_node_are_those_asked_for(on: str, sbatch: list[str], gpus: int | None) -> None:
    """In SkyPilot's words and in Slurm's, of which the last counts; where nobody says, it is not known."""
    assert gpus_of(on, sbatch) == gpus


@pytest.mark.parametrize(
    ("asked", "gpus", "workers", "said"),
    [(None, 4, 4, ""), (None, None, 1, ""), (4, 4, 4, ""), (8, 4, 8, ""), (2, None, 2, ""), (1, 4, 1, "3 of each")],
)
def test_who_leaves_gpus_idle_is_told(
    asked: int | None, gpus: int | None, workers: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """What was asked for holds; without it each GPU has its worker."""
    assert workers_on(asked, gpus) == workers
    found = capsys.readouterr().err
    assert said in found
    assert bool(found) == bool(said)


@pytest.mark.parametrize(("words", "workers", "idle"), [([], 4, False), (["--workers", "1"], 1, True)])
def test_a_task_of_four_gpus_a_node_trains_on_four(
    words: list[str],
    workers: int,
    idle: bool,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One worker for each GPU, or as many as were asked for, with a line on those that stay idle."""
    (tmp_path / "train.py").touch()
    monkeypatch.chdir(tmp_path)
    given = ["--on", "skypilot:V100:4", "--store", "s3://b/j", "--write", "task.yaml", *words]
    assert run(["cluster", "train", "train.py", *given]) == 0
    assert f"--workers {workers} " in yaml.safe_load((tmp_path / "task.yaml").read_text())["run"]
    assert ("stay idle" in capfd.readouterr().err) == idle


def test_a_slurm_job_of_two_gpus_trains_on_two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each node is told so when it is started."""
    (tmp_path / "train.py").touch()
    plans = []

    def run_on(where: object, plan: LaunchPlan, *_: object) -> int:
        plans.append(plan)
        return 1

    monkeypatch.setattr("polythrottle.cli.cluster.train.run_on", run_on)
    monkeypatch.setattr(
        "polythrottle.cli.cluster.rented_nodes.NodeSource.check", lambda nodes: None
    )  # no Slurm is asked
    given = ["--on", "slurm", "--sbatch=--gres=gpu:2"]
    run(["cluster", "train", str(tmp_path / "train.py"), *given])
    assert plans[0].joining[:2] == ["--workers", "2"]


def test_a_folder_that_is_not_there_is_not_made(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line that names it, as root too."""
    (tmp_path / "train.py").touch()
    monkeypatch.chdir(tmp_path)
    given = ["--on", "skypilot", "--store", "s3://b/j", "--write", "nowhere/task.yaml"]
    assert run(["cluster", "train", "train.py", *given]) == 2
    said = capfd.readouterr().err.strip()
    assert "there is no folder nowhere" in said
    assert len(said.splitlines()) == 1
    assert not (tmp_path / "nowhere").exists()
