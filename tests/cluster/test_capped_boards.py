"""A GPU that a training node has capped through the actuator is as found again, whoever of the two is killed."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from actuators import until

from polythrottle.actuation.client.connection import Line
from polythrottle.domain.errors import DeviceError
from polythrottle.testing.nvml import FakeNvml

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(200)]
LEASE_S = 2.0
AGENT = """
import sys, time
from pathlib import Path
from polythrottle.domain.clock import SystemClock
from polythrottle.training.elastic.nodes.power_cap_search import Exploring
from polythrottle.storage.fleet_knowledge import Knowledge
from polythrottle.training.elastic.nodes.steered_node import SteeredNode
from polythrottle.domain.fleet.transient_machine import KEPT
from polythrottle.actuation.client.board import ActuatorBoard
board = ActuatorBoard(Path(sys.argv[1]), None, Path(sys.argv[2]), SystemClock(), lease_s=float(sys.argv[3]))
node = SteeredNode("n", board, Knowledge("A100", "net"), steps=1, exploring=Exploring((200.0,), KEPT, 86400.0))
told = False
while True:
    time.sleep(0.1)
    node.stepped() if node.limit_w is None else node.renew()
    if node.limit_w == 200.0 and not told:
        told = print("capped", flush=True) is None
    print(node.trouble, file=sys.stderr, flush=True) if node.trouble else None
"""


@contextmanager
def actuator(path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Serve the machine's GPU from a process of its own."""
    command = [sys.executable, "-m", "polythrottle", "daemon", "actuator", "--socket", str(path), "--device", "nvml:0"]
    child = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        until(lambda: child.poll() is not None or answers(path))
        assert child.poll() is None
        yield child
    finally:
        if child.poll() is None:
            child.terminate()
        child.wait(30)


@contextmanager
def agent(path: Path, token_file: Path) -> Iterator[subprocess.Popen[str]]:
    """Steer that GPU from a process of its own, which has capped it when this begins."""
    command = [sys.executable, "-c", AGENT, str(path), str(token_file), str(LEASE_S)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert child.stdout is not None
    try:
        assert child.stdout.readline() == "capped\n"
        yield child
    finally:
        child.kill()
        child.communicate(timeout=30)


def answers(path: Path) -> bool:
    """Return whether an actuator answers there."""
    line = Line(path, patience_s=30.0)
    try:
        return bool(line.ask("describe", device=""))
    except DeviceError:
        return False
    finally:
        line.close()


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[FakeNvml]:
    """A machine with one GPU that is not there, under load."""
    with FakeNvml(tmp_path / "nvml", ["a100"]) as fake:
        fake.set(0, load_permille=1000)
        yield fake


def test_when_the_agent_is_killed_its_lease_puts_the_limit_back(tmp_path: Path, machine: FakeNvml) -> None:
    """Nobody asks for it, and the actuator goes on: another node can cap the board."""
    found, path = machine.snapshot(), tmp_path / "a.sock"
    with actuator(path):
        for order in ("first", "second"):
            with agent(path, tmp_path / order) as node:
                assert machine.get(0, "power_limit_mw") == 200_000
                node.send_signal(signal.SIGKILL)
                assert node.wait(30) == -signal.SIGKILL
                until(lambda: machine.snapshot() == found)


@pytest.mark.parametrize("guarded", [True, False], ids=["its guard lives", "its guard too"])
def test_when_the_actuator_is_killed_the_limit_comes_back(tmp_path: Path, machine: FakeNvml, guarded: bool) -> None:
    """By its guard at once, else by the next actuator before it answers, while the agent is still there."""
    found, path = machine.snapshot(), tmp_path / "a.sock"
    with actuator(path) as served, agent(path, tmp_path / "token") as node:
        assert machine.get(0, "power_limit_mw") == 200_000
        watchers = psutil.Process(served.pid).children()
        assert watchers
        node.send_signal(signal.SIGSTOP)  # so that it does not take the board again in between
        for watcher in () if guarded else watchers:
            watcher.kill()
        served.kill()
        served.wait(30)
        if not guarded:
            assert machine.get(0, "power_limit_mw") == 200_000
            with actuator(path):
                assert machine.snapshot() == found
        until(lambda: machine.snapshot() == found)
