"""The task file for SkyPilot, whose commands two nodes of this machine execute; SkyPilot itself is not here."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from cluster.ledgers import counted, steps
from cluster.slurm_nodes import free_port

from polythrottle.cluster.rented_machines import PORT, SkyPilotTraining, training_text

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]
SCRIPT = Path(__file__).with_name("elastic_script.py")


def test_the_commands_of_a_task_train(tmp_path: Path) -> None:
    """Two nodes execute what SkyPilot would have them execute, with its variables; every sample is seen once."""
    ledger = tmp_path / "ledger"
    ledger.mkdir()
    (ledger / "hurry").touch()
    serving, words = ("--nodes", "2:2", "--job", "task"), (str(ledger), "200", "10", "1", "0")
    task = SkyPilotTraining("task", 2, "", f"file://{tmp_path}/store", serving, (), str(SCRIPT), words)
    commands = yaml.safe_load(training_text(task))["run"].replace(f":{PORT} ", f":{free_port()} ")
    found = []
    for rank in range(2):
        home = tmp_path / f"home{rank}"
        home.mkdir()
        known = {"SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.2", "SKYPILOT_NODE_RANK": str(rank), "HOME": str(home)}
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        environment = {**os.environ, **known, "PATH": path, "POLYTHROTTLE_TOKEN": "0123456789abcdef" * 2}
        found.append(subprocess.Popen(["bash", "-c", commands], env=environment, start_new_session=True))
    assert [process.wait(200) for process in found] == [0, 0]
    kept = counted(steps(ledger))
    assert sorted(sample for step in kept for sample in step.samples) == list(range(200))
