"""Nodes from a real Slurm: two slurmd on this machine."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cluster.slurm_nodes import SlurmNodes

from polythrottle.cluster.rented_machines import SlurmProvider, nodes
from polythrottle.domain.errors import DeviceError
from polythrottle.domain.fleet.transient_machine import Order, Stage

pytestmark = [pytest.mark.cluster, pytest.mark.xdist_group("slurm")]


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SlurmNodes]:
    """Start two nodes and let Slurm's commands find them."""
    folder = tmp_path / "slurm"
    folder.mkdir()
    with SlurmNodes(folder) as started:
        monkeypatch.setenv("SLURM_CONF", str(started.conf))
        yield started


def eventually(true: Callable[[], bool], what: str, slurm: SlurmNodes) -> None:
    """Wait up to a minute for something to be so."""
    end_s = time.monotonic() + 60
    while not true():
        assert time.monotonic() < end_s, f"not {what}\n{slurm.logs()}"
        time.sleep(0.1)


def test_a_node_is_rented_lost_and_rented_again(slurm: SlurmNodes, tmp_path: Path) -> None:
    """Two jobs run; the one whose node goes down waits, says it was lost once, and runs again when it is back."""
    provider = SlurmProvider(["sleep", "600"], tmp_path / "out")
    tickets = [provider.request(Order()) for _ in range(2)]
    eventually(lambda: all(each.stage is Stage.RUNNING for each in provider.seen().values()), "both running", slurm)
    where = {rented.node: ticket for ticket, rented in provider.seen().items()}
    assert set(where) == {"n1", "n2"}
    slurm.call("scontrol", "update", "nodename=n2", "state=down", "reason=revoked")
    eventually(lambda: provider.seen()[where["n2"]].stage is Stage.WAITING, "waiting", slurm)
    assert (nodes()["n2"].usable, nodes()["n2"].reason, nodes()["n1"].usable) == (False, "revoked", True)
    assert provider.seen()[where["n1"]].stage is Stage.RUNNING
    slurm.call("scontrol", "update", "nodename=n2", "state=resume")
    eventually(lambda: nodes()["n2"].usable, "back", slurm)
    eventually(lambda: provider.seen()[where["n2"]].stage is Stage.RUNNING, "running again", slurm)
    assert provider.seen()[where["n2"]].times_lost == 1
    for ticket in tickets:
        provider.release(ticket)
        provider.release(ticket)
    eventually(lambda: all(each.stage is Stage.ENDED for each in provider.seen().values()), "released", slurm)


def test_a_node_that_dies_with_all_its_processes_is_seen(slurm: SlurmNodes, tmp_path: Path) -> None:
    """SIGKILL of slurmd and of the job's processes: Slurm calls the node down, the job waits, the other runs on."""
    provider = SlurmProvider(["sleep", "600"], tmp_path / "out")
    for _ in range(2):
        provider.request(Order())
    eventually(lambda: all(each.stage is Stage.RUNNING for each in provider.seen().values()), "both running", slurm)
    lost = next(ticket for ticket, rented in provider.seen().items() if rented.node == "n2")
    slurm.kill("n2")
    eventually(lambda: not nodes()["n2"].usable, "down", slurm)
    eventually(lambda: provider.seen()[lost].stage is Stage.WAITING, "waiting", slurm)
    slurm.boot("n2")
    eventually(lambda: provider.seen()[lost].stage is Stage.RUNNING, "running again", slurm)


def test_what_slurm_refuses_is_said(slurm: SlurmNodes, tmp_path: Path) -> None:
    """An unknown partition is one line with Slurm's own words."""
    provider = SlurmProvider(["true"], tmp_path / "out", partition="no-such")
    with pytest.raises(DeviceError, match="partition"):
        provider.request(Order())


def test_a_command_that_ends_gives_its_node_back(slurm: SlurmNodes, tmp_path: Path) -> None:
    """Its output is kept, and quotes in it reach the command as they are."""
    provider = SlurmProvider(["printf", "%s", "it's $HOME"], tmp_path / "out")
    ticket = provider.request(Order())
    eventually(lambda: provider.seen()[ticket].stage is Stage.ENDED, "ended", slurm)
    assert (tmp_path / "out" / f"{ticket}.log").read_text() == "it's $HOME"
