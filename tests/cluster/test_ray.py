"""The ray engine: the same job, the same records, with Ray Train keeping the processes."""

import subprocess
from pathlib import Path

import pytest
from cluster.ledgers import counted, steps

from polythrottle.training.elastic.events import read_events

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]
ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / ".ray" / "bin" / "python"
STORY = """
import sys
from pathlib import Path
from polythrottle.training.elastic.ray_engine import RayEngine
from polythrottle.training.elastic.job_control import LocalJob as Local
from polythrottle.training.elastic.engines import LaunchPlan

if __name__ == "__main__":
    folder, ledger, script = map(Path, sys.argv[1:4])
    words = (str(ledger), "400", "10", "2", "0.2")
    engine = RayEngine(LaunchPlan(folder, script, words, ("--serve", "127.0.0.1:0", "--nodes", "1:2", "--every", "2")))
    killed = []

    def told(event):
        if event["event"] == "checkpoint" and not killed:
            killed.append(engine.kill("n2"))
        elif event["event"] == "first step" and killed:
            (ledger / "hurry").touch()

    sys.exit(Local(engine, ["n1", "n2"], None).run(told, lambda: engine.exit_code))
"""


def test_a_lost_node_of_ray_costs_no_sample(tmp_path: Path) -> None:
    """A node of two is killed: Ray starts the group again with one, and every sample is seen once an epoch."""
    if not PYTHON.exists():
        pytest.skip("Ray is not installed into .ray (make .ray)")
    ledger, story = tmp_path / "ledger", tmp_path / "story.py"
    ledger.mkdir()
    story.write_text(STORY)
    words = [str(tmp_path / "job"), str(ledger), str(Path(__file__).with_name("elastic_script.py"))]
    done = subprocess.run([PYTHON, story, *words], capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    events = read_events(tmp_path / "job")
    assert {"lost", "resumed", "finished"} <= {event["event"] for event in events}
    assert [event["workers"] for event in events if event["event"] == "first step"][-1] == 1
    kept = counted(steps(ledger))
    assert [step.step for step in kept] == list(range(1, len(kept) + 1))
    for epoch in range(2):
        assert sorted(s for step in kept if step.epoch == epoch for s in step.samples) == list(range(400))
