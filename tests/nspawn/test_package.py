"""The Debian package on a machine without a network: installed, upgraded, removed and purged."""

from pathlib import Path

import pytest
from nspawn.conftest import install
from nspawn.machine import FULL, SLOW, Machine, hold, machine

pytestmark = pytest.mark.systemd
ACTUATOR, DAEMON, RESTORE = "polythrottle-actuator.service", "polythrottle.service", "polythrottle-restore.service"
NAMED = "[Service]\nEnvironment=POLYTHROTTLE_ROOTS=/sys/devices/system/cpu\n"
LOW = {"cpu_max_hz": 800_000_000}


def accounts(made: Machine) -> str:
    """Return users and groups."""
    return made.run("cat", "/etc/passwd", "/etc/group", "/etc/shadow", "/etc/gshadow").stdout


def test_installed_upgraded_and_purged_it_leaves_nothing(
    base: Path, package: Path, next_package: Path, tmp_path: Path
) -> None:
    """Nothing starts by itself; upgrading puts the board back and goes on; after purging all is as before."""
    with machine(tmp_path / "machine", base) as made:
        before, users = made.files(), accounts(made)
        install(made, package)
        enabled = {unit: made.show(unit, "UnitFileState", "ActiveState") for unit in (ACTUATOR, DAEMON, RESTORE)}
        assert {unit: each["UnitFileState"] for unit, each in enabled.items()} == {
            ACTUATOR: "disabled",
            DAEMON: "disabled",
            RESTORE: "enabled",
        }
        assert {each["ActiveState"] for each in enabled.values()} == {"inactive"}
        assert made.cap_khz == FULL

        made.run("polythrottle", "doctor", "--device", "sim:jetson-orin-nano")
        made.run("polythrottle", "measure", "--device", "sim:jetson-nano", "--workload", "resnet50")
        assert "needs torch" in made.run("polythrottle", "demo", check=False).stderr

        made.drop_in(ACTUATOR, NAMED)
        made.run("systemctl", "start", ACTUATOR)
        made.run("tee", "/etc/polythrottle/limits.toml", input="[cpu]\ncpu_max_mhz = { min = 800 }\n")
        hold(made, LOW)
        assert made.cap_khz == SLOW
        process = made.show(ACTUATOR, "MainPID")
        install(made, next_package)
        assert made.cap_khz == FULL
        assert made.active(ACTUATOR)
        assert made.show(ACTUATOR, "MainPID") != process
        assert made.run("dpkg-query", "--show", "--showformat=${Version}", "polythrottle").stdout.endswith("+next")
        assert "min = 800" in made.run("cat", "/etc/polythrottle/limits.toml").stdout

        hold(made, LOW)
        assert made.cap_khz == SLOW
        made.run("dpkg", "--remove", "polythrottle")
        assert made.cap_khz == FULL
        assert not made.active(ACTUATOR)
        assert "min = 800" in made.run("cat", "/etc/polythrottle/limits.toml").stdout
        made.run("dpkg", "--purge", "polythrottle")
        made.drop_in(ACTUATOR, "")
        assert accounts(made) == users
        assert made.files() == before
        assert made.run("systemctl", "--failed", "--quiet", "--no-legend").stdout == ""
