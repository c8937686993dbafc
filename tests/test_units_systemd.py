"""The units, rules and folders of packaging/: sound for systemd, tight, and enough for restoring to work inside."""

import os
import re
import signal
import stat
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from actuators import BOARD, MEM, running, until

from polythrottle.actuation import Limits
from polythrottle.actuation.client.connection import Line
from polythrottle.actuation.server import permits
from polythrottle.actuation.server.permits import Permits
from polythrottle.actuation.server.unix_socket import Peer
from polythrottle.domain.backports import tomllib
from polythrottle.testing import FakeKernel, plant

ROOT = Path(__file__).resolve().parent.parent
PACKAGING = ROOT / "packaging"
UNITS = "usr/lib/systemd/system"
SERVICES = ("polythrottle-restore.service", "polythrottle-actuator.service", "polythrottle.service")
PROGRAMS = ("polythrottle", "polythrottle-actuator", "polythrottle-restore")
# Of linux/capability.h, linux/prctl.h and sched.h.
CAPABILITIES = {"CAP_SYS_ADMIN": 21}


OLDER = re.compile(r"Unknown key( name)? 'FileDescriptorStorePreserve' in section")
"""What systemd before 254 says of a line that it passes over (its NEWS, CHANGES WITH 254)."""


def quietly(*command: str, check: bool = True) -> "subprocess.CompletedProcess[str]":
    """Run a program with a /run of its own where that is possible: systemd's tools leave files in it."""
    apart = ["unshare", "-m", "sh", "-ec", 'mount -n -t tmpfs none /run; mkdir /run/udev; exec "$@"', "sh"]
    words = [*apart, *command] if os.geteuid() == 0 else [*command]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=120)
    assert not check or done.returncode == 0, f"{' '.join(command)}: {done.stdout}{done.stderr}"
    return done


@pytest.fixture(scope="module")
def laid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Everything as it is installed, with programs in place."""
    folder = tmp_path_factory.mktemp("laid")
    (folder / "bin").mkdir()
    for name in PROGRAMS:
        (folder / "bin" / name).write_text("#!/bin/sh\n")
        (folder / "bin" / name).chmod(0o755)
    environment = {**os.environ, "DESTDIR": str(folder), "BINDIR": str(folder / "bin")}
    subprocess.run([PACKAGING / "install-units"], env=environment, check=True, capture_output=True)
    return folder


def settings(path: Path) -> dict[str, str]:
    """Return the settings of a unit file, several of a name joined."""
    found: dict[str, str] = {}
    for name, _, value in (line.partition("=") for line in path.read_text().splitlines() if re.match(r"\w+=", line)):
        found[name] = f"{found[name]} {value}" if name in found else value
    return found


def test_everything_is_laid_and_nothing_is_left_to_fill_in(laid: Path) -> None:
    """Units, drop-ins, rules, group, folders and the example are there, pointing at the programs."""
    names = (
        *(f"{UNITS}/polythrottle-restore.service", f"{UNITS}/polythrottle-restore.service.d/10-hardening.conf"),
        *(f"{UNITS}/polythrottle-actuator.service.d/{each}" for each in ("10-hardening.conf", "20-restore.conf")),
        *(f"{UNITS}/polythrottle-actuator.service", f"{UNITS}/polythrottle.service"),
        *("usr/lib/sysusers.d/polythrottle.conf", "usr/lib/tmpfiles.d/polythrottle.conf"),
        *("usr/lib/udev/rules.d/70-polythrottle.rules", "usr/share/doc/polythrottle/limits.toml"),
        "usr/share/doc/polythrottle/permits.toml",
    )
    for name in names:
        assert "@" not in (laid / name).read_text().replace("~@privileged @resources", "").replace("=@system", "")
        assert stat.S_IMODE((laid / name).stat().st_mode) == 0o644
    assert f"{laid}/bin/polythrottle-restore --boot" in settings(laid / names[0])["ExecStart"]
    assert settings(laid / names[3])["ExecStopPost"] == f"{laid}/bin/polythrottle-restore"
    assert settings(laid / names[4])["ExecStart"].startswith(f"{laid}/bin/polythrottle-actuator --socket /run/polythr")
    assert settings(laid / names[5])["ExecStart"] == f"{laid}/bin/polythrottle daemon run"


@pytest.mark.parametrize("folder", ["bin", "/opt/a b", "/opt/x|y", "/opt/$(id)"])
def test_a_folder_that_cannot_stand_in_a_unit_is_refused(folder: str, tmp_path: Path) -> None:
    """One line, and nothing laid."""
    environment = {**os.environ, "DESTDIR": str(tmp_path / "x"), "BINDIR": folder}
    done = subprocess.run([PACKAGING / "install-units"], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "x").exists()


def test_the_actuator_may_leave_what_is_open_to_systemd() -> None:
    """Two descriptors a device, also once the service has failed for good."""
    found = settings(PACKAGING / "systemd/polythrottle-actuator.service")
    assert int(found["FileDescriptorStoreMax"]) >= 16
    assert found["FileDescriptorStorePreserve"] == "yes"
    assert found["Type"] == "notify"


@pytest.mark.tools("systemd-analyze")
@pytest.mark.parametrize("service", SERVICES)
def test_systemd_takes_the_units(service: str, laid: Path) -> None:
    """systemd-analyze verify has nothing to say about unit and drop-ins."""
    done = quietly("systemd-analyze", "verify", "--man=no", str(laid / UNITS / service))
    told = [line for line in done.stderr.splitlines() if not OLDER.search(line)]
    assert told == []


@pytest.mark.tools("systemd-analyze")
@pytest.mark.parametrize("service", SERVICES)
def test_the_sandbox_gets_no_looser(service: str, laid: Path) -> None:
    """The exposure is at most what is on record, and the record is brought down when it falls."""
    lines = (PACKAGING / "security-score.txt").read_text().splitlines()
    recorded = {name: float(score) for name, score in (line.split() for line in lines if not line.startswith("#"))}
    done = quietly("systemd-analyze", "security", "--offline=true", "--no-pager", str(laid / UNITS / service))
    match = re.search(r"exposure level for \S+ ([\d.]+)", done.stdout)
    assert match
    score = float(match[1])
    assert score <= recorded[service], f"{service} is more exposed than before: {score}"
    if re.match(r"systemd 252\b", quietly("systemd-analyze", "--version").stdout):  # another looks at other things
        assert score == recorded[service], f"{service} got better: write {score} into packaging/security-score.txt"


def test_the_sandbox_holds_what_was_promised() -> None:
    """Each line of the list that a root service is to be closed with is there."""
    found = settings(PACKAGING / "systemd/10-hardening.conf")
    yes = (
        *("NoNewPrivileges", "ProtectHome", "PrivateTmp", "ProtectControlGroups", "ProtectKernelModules"),
        *("ProtectKernelLogs", "ProtectClock", "ProtectHostname", "RestrictNamespaces", "RestrictRealtime"),
        *("RestrictSUIDSGID", "LockPersonality", "MemoryDenyWriteExecute", "PrivateNetwork"),
    )
    assert all(found[name] == "yes" for name in yes)
    assert found["CapabilityBoundingSet"] == "CAP_SYS_ADMIN"
    assert found["ProtectSystem"] == "strict"
    assert found["RestrictAddressFamilies"] == "AF_UNIX"
    assert found["DevicePolicy"] == "closed"
    assert found["UMask"] == "0077"
    assert found["StateDirectory"] == "polythrottle"
    assert {"TasksMax", "MemoryMax"} <= set(found)
    assert set(found["ReadOnlyPaths"].split()) == {"/sys", "/proc/sys"}


def test_the_daemon_has_no_right_but_to_ask() -> None:
    """It is nobody special, sees no device, writes nowhere but to its own folders, and reaches this machine alone."""
    found = settings(PACKAGING / "systemd/polythrottle.service")
    assert found["User"] == "polythrottle"
    assert found["CapabilityBoundingSet"] == found["AmbientCapabilities"] == ""
    assert found["ProtectSystem"] == "strict"
    assert found["ReadWritePaths"] == "/run/polythrottle/daemon"
    assert (found["IPAddressDeny"], found["IPAddressAllow"]) == ("any", "localhost")
    yes = ("NoNewPrivileges", "PrivateDevices", "ProtectKernelTunables", "ProtectHome", "MemoryDenyWriteExecute")
    assert all(found[name] == "yes" for name in yes)


@pytest.mark.parametrize("service", SERVICES[1:])
def test_a_service_that_hangs_or_dies_is_started_again(service: str) -> None:
    """It says when it is ready, is watched, and told to stop has its own processes end after it."""
    found = settings(PACKAGING / "systemd" / service)
    if service == "polythrottle-actuator.service":
        found |= settings(PACKAGING / "systemd/20-restore.conf")
    assert (found["Type"], found["Restart"], found["KillMode"]) == ("notify", "on-failure", "mixed")
    assert int(found["WatchdogSec"]) > 35  # what nvpmodel may take


@pytest.mark.tools("udevadm")
def test_the_rules_are_read_without_complaint(laid: Path, tmp_path: Path) -> None:
    """Udev understands each line; it does complain of one that is wrong."""
    if os.geteuid() != 0:
        pytest.skip("trying rules out takes root, to lay them where udev looks in a namespace of its own")
    assert quietly("udevadm", "--version").stdout
    bad = tmp_path / "70-bad.rules"
    bad.write_text('SUBSYTEM=="powercap", RUN+="x"\n')
    script = 'mount -n --bind "$1" /usr/lib/udev/rules.d; udevadm test --action=add /sys/class/net/lo 2>&1'
    rules = laid / "usr/lib/udev/rules.d"
    told = {each: quietly("sh", "-ec", script, "sh", str(each)).stdout for each in (rules, tmp_path)}
    assert "Reading rules file: /usr/lib/udev/rules.d/70-polythrottle.rules" in told[rules]
    assert "70-polythrottle.rules:" not in told[rules]
    assert "70-bad.rules:1 Invalid key" in told[tmp_path]


def test_the_rules_grant_reading_alone(laid: Path) -> None:
    """No rule gives anyone but root the right to write, and none reaches further than the group."""
    text = (laid / "usr/lib/udev/rules.d/70-polythrottle.rules").read_text()
    modes = re.findall(r"chmod (\S+)", text)
    assert modes
    assert set(modes) == {"g+r"}
    assert "MODE" not in text
    assert set(re.findall(r"chgrp (\S+)", text)) == {"polythrottle"}


@pytest.mark.tools("systemd-sysusers", "systemd-tmpfiles")
def test_group_and_folders_are_made(laid: Path) -> None:
    """systemd-sysusers makes the group, systemd-tmpfiles the folders with their modes."""
    for name in ("passwd", "group"):
        (laid / "etc").mkdir(exist_ok=True)
        (laid / "etc" / name).touch()
    quietly("systemd-sysusers", f"--root={laid}", str(laid / "usr/lib/sysusers.d/polythrottle.conf"))
    assert "polythrottle:" in (laid / "etc/group").read_text()
    assert "polythrottle:" in (laid / "etc/passwd").read_text()
    if os.geteuid() == 0:
        quietly("systemd-tmpfiles", f"--root={laid}", "--create", "polythrottle.conf")
        modes = {"var/lib/polythrottle": 0o700, "run/polythrottle": 0o755, "run/polythrottle/daemon": 0o755}
        for name, mode in modes.items():
            assert stat.S_IMODE((laid / name).stat().st_mode) == mode
        users = (laid / "etc/passwd").read_text().splitlines()
        owner = next(line for line in users if line.startswith("polythrottle:"))
        assert (laid / "run/polythrottle").stat().st_uid == 0
        assert (laid / "run/polythrottle/daemon").stat().st_uid == int(owner.split(":")[2])


def test_the_example_of_limits_can_be_read(tmp_path: Path) -> None:
    """As it is it limits nothing; with its # taken away every line counts."""
    text = (PACKAGING / "limits.toml").read_text()
    assert tomllib.loads(text) == {}
    (tmp_path / "limits.toml").write_text(re.sub(r"^# (?=\[|\w+ = \{)", "", text, flags=re.MULTILINE))
    limits = Limits.read(tmp_path / "limits.toml")
    assert set(limits.bounds) == {"nvml", "jetson", "cpu"}
    assert limits.span("nvml", "gpu_max_hz") == (600_000_000, 1_600_000_000)


def test_the_example_of_permits_can_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it is it permits nothing and says so; with its # taken away every line counts."""
    text = (PACKAGING / "permits.toml").read_text()
    assert tomllib.loads(text) == {}
    monkeypatch.setattr(permits, "user_id", {"polythrottle": 4001}.get)
    monkeypatch.setattr(permits, "group_id", {"polythrottle": 4002}.get)
    file = tmp_path / "permits.toml"
    file.write_text(re.sub(r"^# (?=\[|\w+ = )", "", text, flags=re.MULTILINE))
    file.chmod(0o644)
    found = Permits.read(file)
    assert found.rights(Peer(1, 4001), ["cpu"]).control
    member = found.rights(Peer(2, 5, frozenset({4002})), ["jetson"])
    assert member.allow({"gpu_max_hz": 306_000_000, "power_mode": "15W"}, {})
    assert not member.allow({"cpu_max_hz": 1}, {})


KILLED = """
import os, signal, sys
from pathlib import Path
from polythrottle.backends.cpu import CpuDevice
from polythrottle.domain.space import OperatingPoint
device = CpuDevice(root=sys.argv[1], knobs=("cpu_max_hz",))
device._actuator._guarded = False  # nobody but the unit is to restore here
device.__enter__()
device.apply(OperatingPoint({"cpu_max_hz": 800000000}))
os.kill(os.getpid(), signal.SIGKILL)
"""

CONFINED = """
import ctypes, os, subprocess, sys
libc = ctypes.CDLL(None, use_errno=True)
if os.geteuid() == 0:
    mount = lambda *words: subprocess.run(["mount", "-n", *words], check=True)
    if libc.unshare(0x00020000):
        raise OSError(ctypes.get_errno(), "unshare")
    mount("--make-rprivate", "/")
    for path in sys.argv[1:3]:
        mount("--bind", path, path)
    mount("-o", "remount,bind,ro", "/")
    if os.path.ismount("/tmp"):
        mount("-o", "remount,bind,ro", "/tmp")
    for number in range(64):
        if number not in KEPT:
            libc.prctl(24, number, 0, 0, 0)
if libc.prctl(38, 1, 0, 0, 0):
    raise OSError(ctypes.get_errno(), "no new privileges")
libc.prctl(65, 1, 0, 0, 0)  # memory is not both written and executed; Linux 6.3
os.umask(0o077)
os.execv(sys.executable, [sys.executable, *sys.argv[3:]])
"""


@pytest.fixture
def changed(tmp_path: Path, state_folder: Path) -> Path:
    """A processor's tree that a killed program left changed."""
    folder = tmp_path / "tree/sys/devices/system/cpu/cpufreq/policy0"
    folder.mkdir(parents=True)
    values = {"scaling_min_freq": 800_000, "scaling_max_freq": 3_000_000, "scaling_cur_freq": 800_000}
    for name, khz in values.items():
        (folder / name).write_text(f"{khz}\n")
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path / "tree")], check=False, capture_output=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert (folder / "scaling_max_freq").read_text().strip() == "800000"
    return folder / "scaling_max_freq"


RESTORE = ("-m", "polythrottle.actuation.restore", "--boot")


@pytest.mark.tools("unshare")
def test_restoring_works_inside_the_sandbox(changed: Path, tmp_path: Path, state_folder: Path) -> None:
    """With one capability, all but state and controls read-only, and no writable code, everything is put back."""
    done = confined(tmp_path / "tree", state_folder, "-W", "ignore", *RESTORE)
    assert done.returncode == 0, done.stderr
    assert changed.read_text().strip() == "3000000"
    if os.geteuid() == 0:
        elsewhere = f"open({str(tmp_path / 'elsewhere')!r}, 'w')"
        assert "Read-only file system" in confined(tmp_path / "tree", state_folder, "-c", elsewhere).stderr


def confined(tree: Path, state: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    """Run Python where only these two folders can be written, with the capabilities of the units."""
    return subprocess.run(confinement(tree, state, *words), check=False, capture_output=True, text=True, cwd="/")


def confinement(tree: Path, state: Path, *words: str) -> list[str]:
    """Return the command that does so."""
    names = settings(PACKAGING / "systemd/10-hardening.conf")["CapabilityBoundingSet"].split()
    code = CONFINED.replace("KEPT", repr([CAPABILITIES[name] for name in names]))
    return [sys.executable, "-c", code, str(tree), str(state), *words]


@pytest.mark.tools("strace", "systemd-analyze")
def test_restoring_needs_no_call_that_the_sandbox_forbids(changed: Path, tmp_path: Path) -> None:
    """Every system call it makes is in the units' filter."""
    trace = tmp_path / "trace"
    command = ["strace", "-f", "-qq", "-o", str(trace), sys.executable, "-W", "ignore", *RESTORE]
    done = subprocess.run(command, check=False, capture_output=True, text=True, cwd="/")
    assert done.returncode == 0, done.stderr
    assert changed.read_text().strip() == "3000000"
    made = set(re.findall(r"^\d+ +([a-z]\w+)\(", trace.read_text(), re.MULTILINE))
    assert {"openat", "write"} <= made
    assert made <= permitted()


@pytest.mark.tools("strace", "systemd-analyze")
def test_the_actuator_works_inside_the_sandbox(tmp_path: Path, state_folder: Path) -> None:
    """It serves, sets, computes a search space and puts back with no more than the unit leaves it."""
    root, path = plant(BOARD, tmp_path / "b"), state_folder / "a.sock"
    state_folder.mkdir()
    before, trace = FakeKernel(root).snapshot(), state_folder / "trace"
    words = ("-m", "polythrottle.actuation.server", "--socket", str(path), "--device", f"jetson?root={root}")
    tracing = ["strace", "-f", "-qq", "-o", str(trace), sys.executable, "-W", "ignore", *words]
    for command in (confinement(root, state_folder, "-W", "ignore", *words), tracing):
        with running(command, cwd="/", stderr=subprocess.PIPE, text=True) as child:
            until(lambda child=child: path.exists() or child.poll() is not None)
            line = Line(path)
            assert line.ask("space", device="")["size"] > 1
            token = line.ask("take", device="", seconds=60)["token"]
            line.ask("apply", token=token, point={MEM: 204_000_000})
            assert line.ask("read", device="")["clocks_hz"]["mem"] == 204_000_000
            line.close()
            os.kill(serving(child.pid), signal.SIGTERM)
            _, told = child.communicate(timeout=60)
            assert (child.returncode, told) == (0, "")
        assert FakeKernel(root).snapshot() == before
    made = set(re.findall(r"^\d+ +([a-z]\w+)\(", trace.read_text(), re.MULTILINE))
    assert {"listen", "getsockopt", "sendto"} <= made
    assert made - permitted() <= {"mbind"}  # NumPy's OpenBLAS asks for memory nearby, and does without when refused


def serving(pid: int) -> int:
    """Return the process that serves: the traced one where it is traced."""
    own = psutil.Process(pid)
    return int(own.children()[0].pid) if own.name() == "strace" else pid


def permitted() -> set[str]:
    """Return the system calls that the units' filter lets through, its groups resolved."""
    groups: dict[str, set[str]] = {}
    for line in quietly("systemd-analyze", "syscall-filter", "--no-pager").stdout.splitlines():
        if re.fullmatch(r"@[\w-]+", line):
            members = groups.setdefault(line, set())
        elif re.fullmatch(r" +@?[\w-]+", line):
            members.add(line.strip())

    def calls(name: str) -> set[str]:
        return {call for each in groups[name] for call in (calls(each) if each.startswith("@") else {each})}

    words = settings(PACKAGING / "systemd/10-hardening.conf")["SystemCallFilter"]
    assert words == "@system-service ~@privileged @resources"
    return calls("@system-service") - calls("@privileged") - calls("@resources")
