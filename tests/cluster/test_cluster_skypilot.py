"""A plan as a SkyPilot task file."""

from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from planning_builders import V100, offer, work

from polythrottle.cli.commands import run
from polythrottle.cluster.plan.options import Option, options
from polythrottle.cluster.rented_machines import SkyPilotTraining, task_text, training_text
from polythrottle.domain.errors import InvalidInput
from polythrottle.domain.fleet.transient_machine import MachineType, Market


def option(market: Market = Market.SPOT, machine: MachineType = V100, machines: int = 4) -> Option:
    """Return an option at 200 W."""
    return options(work(name="ResNet-32: 64,000 steps"), offer(machine=machine), market, machines)[2]


def test_a_task_has_the_documented_fields() -> None:
    """Nodes, accelerators, spot and what the command needs of the plan are where SkyPilot looks for them."""
    machine = replace(V100, name="p3.2xlarge", region="us-east-1")
    found = yaml.safe_load(task_text(option(machine=machine), "torchrun train.py\nsync"))
    assert found["name"] == "resnet-32-64-000-steps"
    assert found["num_nodes"] == 4
    assert found["resources"] == {
        "infra": "aws/us-east-1",
        "accelerators": "V100:1",
        "instance_type": "p3.2xlarge",
        "use_spot": True,
        "job_recovery": "FAILOVER",
    }
    assert found["envs"]["POLYTHROTTLE_CAP_W"] == "200"
    assert found["run"] == "torchrun train.py\nsync\n"


def test_an_on_demand_task_needs_no_recovery() -> None:
    """Where nothing is taken away nothing says how to come back, and no interval is given."""
    found = yaml.safe_load(task_text(option(Market.ON_DEMAND), "python train.py"))
    assert found["resources"] == {"accelerators": "V100:1", "use_spot": False}
    assert "POLYTHROTTLE_INTERVAL_S" not in found["envs"]


def test_the_cloud_is_read_from_the_name() -> None:
    """A machine called after Google's cloud goes there; without a region SkyPilot may choose one."""
    found = yaml.safe_load(task_text(option(machine=replace(V100, name="gcp-v100")), "x"))
    assert found["resources"]["infra"] == "gcp"
    assert found["resources"]["job_recovery"] == "EAGER_NEXT_REGION"


def test_a_training_names_its_controller_by_the_first_node() -> None:
    """All nodes join there with the secret token; the first one is the controller too, and spot is asked for."""
    serving, joining = ("--nodes", "2:4", "--job", "j"), ("--notice", "aws")
    found = yaml.safe_load(
        training_text(SkyPilotTraining("My job", 4, "V100:1", "s3://b/j", serving, joining, "t.py", ["a b"]))
    )
    assert (found["name"], found["num_nodes"], found["workdir"]) == ("my-job", 4, ".")
    assert found["resources"] == {"accelerators": "V100:1", "use_spot": True, "job_recovery": "EAGER_NEXT_REGION"}
    assert found["secrets"] == {"POLYTHROTTLE_TOKEN": None}
    assert found["setup"].split()[-1] == "s3fs"
    assert "--serve $at --store s3://b/j --nodes 2:4 --job j &" in found["run"]
    assert found["run"].count("--join $at") == 1
    assert "--notice aws t.py -- 'a b'" in found["run"]
    assert (
        "accelerators"
        not in yaml.safe_load(training_text(SkyPilotTraining("x", 1, "", "gs://b", (), (), "t.py")))["resources"]
    )


@pytest.mark.parametrize("name", ["V100:0", "V100: evil", "a b", "V100:1:2"])
def test_accelerators_that_could_not_be_are_refused(name: str) -> None:
    """Nothing but a name and a number goes into the file."""
    with pytest.raises(InvalidInput, match="V100:1"):
        SkyPilotTraining("x", 1, name, "gs://b", (), (), "t.py")


def test_a_training_is_written_for_skypilot_and_not_begun(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file, and the line that launches it; nothing else happens."""
    (tmp_path / "train.py").touch()
    monkeypatch.chdir(tmp_path)
    words = ["--on", "skypilot:V100:1", "--store", "s3://b/j", "--nodes", "2:4"]
    assert run(["cluster", "train", "train.py", *words, "--write", "task.yaml", "--", "--width", "5"]) == 0
    said = capfd.readouterr().err
    assert "POLYTHROTTLE_TOKEN=$(openssl rand -hex 16) sky jobs launch --secret POLYTHROTTLE_TOKEN " in said
    found = yaml.safe_load((tmp_path / "task.yaml").read_text())
    assert "train.py -- --width 5" in found["run"]
    assert found["run"].count("--store s3://b/j") == 1


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (["--on", "skypilot", "--store", "s3://b/j"], 2, "--write FILE"),
        (["--on", "skypilot", "--write", "t.yaml"], 2, "bucket"),
        (["--on", "skypilot", "--write", "t.yaml", "--store", "/tmp/x"], 2, "bucket"),
        (["--on", "slurm", "--write", "t.yaml"], 2, "--on skypilot"),
        (["--on", "skypilt", "--write", "t.yaml"], 2, "--on skypilot"),
        (["--on", "moon"], 3, "skypilot, slurm"),
    ],
)
def test_what_skypilot_could_not_run_is_one_line(
    words: list[str], code: int, text: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """No file is written."""
    (tmp_path / "train.py").touch()
    assert run(["cluster", "train", str(tmp_path / "train.py"), *words]) == code
    said = capfd.readouterr().err.strip()
    assert text in said
    assert len(said.splitlines()) == 1
    assert not (tmp_path / "t.yaml").exists()


def test_nothing_in_a_command_or_a_name_breaks_the_file() -> None:
    """Colons, quotes and hashes stay what they are."""
    command = "echo 'a: b' # \"c\"\n\nexit"
    assert yaml.safe_load(task_text(option(), command))["run"] == command + "\n"
    with pytest.raises(InvalidInput, match="needs a command"):
        task_text(option(), "  ")
    with pytest.raises(InvalidInput, match="no GPU called"):
        task_text(option(machine=replace(V100, gpu="V100: evil")), "x")
