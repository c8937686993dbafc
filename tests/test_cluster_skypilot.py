"""A plan as a SkyPilot task file."""

from dataclasses import replace

import pytest
import yaml
from planning_builders import V100, offer, work

from polythrottle.cluster.machine import MachineType, Market
from polythrottle.cluster.plan.offer import Option, options
from polythrottle.cluster.provision.skypilot import task_text
from polythrottle.errors import InvalidInput


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


def test_nothing_in_a_command_or_a_name_breaks_the_file() -> None:
    """Colons, quotes and hashes stay what they are."""
    command = "echo 'a: b' # \"c\"\n\nexit"
    assert yaml.safe_load(task_text(option(), command))["run"] == command + "\n"
    with pytest.raises(InvalidInput, match="needs a command"):
        task_text(option(), "  ")
    with pytest.raises(InvalidInput, match="no GPU called"):
        task_text(option(machine=replace(V100, gpu="V100: evil")), "x")
