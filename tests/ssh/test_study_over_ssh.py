"""A daemon of a board without an optimiser has its study made at the desk, behind a real ``sshd``."""

import os
import re
import subprocess
import sys
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from actuators import GPU, Process, until
from boards_over_ssh import far_sides
from builders import quick
from fake_servers import kserve
from fake_servers import listening as serving
from sshd import SSHD, listening

from polythrottle.board.link import SSH
from polythrottle.catalog.tuned_profiles import read_profile
from polythrottle.daemon.client import Client
from polythrottle.daemon.observation import RequestStats
from polythrottle.daemon.status import Status
from polythrottle.domain.errors import PolythrottleError
from polythrottle.testing import FakeKernel, plant

pytestmark = [pytest.mark.ssh, pytest.mark.skipif(SSHD is None, reason="needs sshd (Debian: openssh-server)")]
BOARD = "jetson-orin-nano"


@pytest.mark.parametrize("bounded", [False, True])
def test_a_study_is_made_at_the_desk_and_its_profile_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bounded: bool
) -> None:
    """Measured on the board, set through the actuator there under the daemon's loan, and put back in the end.

    Where the board sends the requests to a server, they are bounded by what the daemon has left, which is told.
    """
    root = quick(plant(BOARD, tmp_path / "board"))
    before = FakeKernel(root).snapshot()
    (tmp_path / "keys").mkdir()
    (tmp_path / "run").mkdir(mode=0o700)
    settings = tmp_path / "daemon.toml"
    server = kserve([{"name": "x", "datatype": "FP32", "shape": [-1, 4]}])
    workload = f"kserve://{server.where}/m" if bounded else "cmd:true"
    lines = [f'device = "jetson?root={root}"', f'workload = "{workload}"', 'slo = ["p99<=10s"]', 'study = "host"']
    settings.write_text("\n".join([*lines, 'traffic = "report?quiet=10min"']))
    environment = {**os.environ, "POLYTHROTTLE_STATE_DIR": str(tmp_path / "there")}
    with ExitStack() as ends:
        ends.enter_context(serving(server))
        config, _, _ = ends.enter_context(listening(tmp_path / "keys"))
        monkeypatch.setenv(SSH, f"ssh -F {config}")
        monkeypatch.setenv("TMPDIR", str(tmp_path))
        actuator = Process(root, tmp_path / "run" / "a.sock")
        ends.callback(actuator.end)
        words = ["daemon", "run", "--config", str(settings), "--actuator", str(actuator.path)]
        words += ["--socket", str(tmp_path / "run" / "d.sock")]
        log = ends.enter_context((tmp_path / "daemon.log").open("w"))
        daemon = subprocess.Popen(
            [sys.executable, "-m", "polythrottle", *words], stdout=log, stderr=log, env=environment
        )
        ends.callback(daemon.wait, 60)
        ends.callback(daemon.terminate)
        client = ends.enter_context(Client(tmp_path / "run" / "d.sock"))
        until(lambda: _reported(client) is not None and _begun(client))
        board = f"ssh://nano?python={sys.executable}"
        host = ["study-host", "--device", board, "--socket", str(tmp_path / "run" / "d.sock"), "--once"]
        made = ends.enter_context(
            subprocess.Popen([sys.executable, "-m", "polythrottle", *host], stdout=subprocess.PIPE, text=True)
        )
        until(lambda: _reported(client) is not None and _ended(client))
        told, _ = made.communicate(timeout=60)
        assert made.returncode == 0
        assert "study-1 has ended; its profile is the daemon's" in told
        (profile,) = (tmp_path / "there").glob("profiles/tuned/daemon/*.toml")
        found = read_profile(profile)
        assert (found.device, found.workload) == (f"jetson?root={root}", workload)
        study = client.status().study
        assert study is not None
        assert bool(re.search(r"; 0 of \d\.\d\d requests late beyond the SLO's own share$", study.words)) == bounded
        assert GPU in found.point
        assert not far_sides(tmp_path)
    assert FakeKernel(root).snapshot() == before


def _reported(client: Client) -> Status | None:
    """Keep the workload up, as a program that serves does; return the daemon's status, None while it has none."""
    with suppress(PolythrottleError):
        client.report(RequestStats(arrived=10, answered=10, p99_s=0.02, mean_s=0.01))
        return client.status()
    return None


def _begun(client: Client) -> bool:
    with suppress(PolythrottleError):
        client.start_study(2, {"method": "random", "seconds": "0.1", "queries": "2"})
        return True
    return False


def _ended(client: Client) -> bool:
    study = client.status().study
    return study is not None and study.state == "ended"
