"""The units, rules and folders of packaging/: sound for systemd, tight, and enough for restoring to work inside."""

import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from polythrottle.actuation import Limits

ROOT = Path(__file__).resolve().parent.parent
PACKAGING = ROOT / "packaging"
UNITS = "usr/lib/systemd/system"
SERVICES = ("polythrottle-restore.service", "polythrottle.service")
# Of linux/capability.h, linux/prctl.h and sched.h.
CAPABILITIES = {"CAP_SYS_ADMIN": 21}

needs_systemd = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")


def quietly(*command: str, check: bool = True) -> "subprocess.CompletedProcess[str]":
    """Run a program with a /run of its own where that is possible: systemd's tools leave files in it."""
    apart = ["unshare", "-m", "sh", "-ec", 'mount -n -t tmpfs none /run; mkdir /run/udev; exec "$@"', "sh"]
    words = [*apart, *command] if os.geteuid() == 0 else [*command]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=120)
    assert not check or done.returncode == 0, f"{' '.join(command)}: {done.stdout}{done.stderr}"
    return done


@pytest.fixture(scope="module")
def laid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Everything as it is installed, with a program in place and the daemon's unit that the drop-ins are for."""
    folder = tmp_path_factory.mktemp("laid")
    program = folder / "bin/polythrottle-restore"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    environment = {**os.environ, "DESTDIR": str(folder), "BINDIR": str(program.parent)}
    subprocess.run([PACKAGING / "install-units"], env=environment, check=True, capture_output=True)
    (folder / UNITS / "polythrottle.service").write_text(f"[Service]\nExecStart={program}\n")
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
        *(f"{UNITS}/polythrottle.service.d/10-hardening.conf", f"{UNITS}/polythrottle.service.d/20-restore.conf"),
        *("usr/lib/sysusers.d/polythrottle.conf", "usr/lib/tmpfiles.d/polythrottle.conf"),
        *("usr/lib/udev/rules.d/70-polythrottle.rules", "usr/share/doc/polythrottle/limits.toml"),
    )
    for name in names:
        assert "@" not in (laid / name).read_text().replace("~@privileged @resources", "").replace("=@system", "")
        assert stat.S_IMODE((laid / name).stat().st_mode) == 0o644
    assert f"{laid}/bin/polythrottle-restore --boot" in settings(laid / names[0])["ExecStart"]
    assert settings(laid / names[3])["ExecStopPost"] == f"{laid}/bin/polythrottle-restore"


@pytest.mark.parametrize("folder", ["bin", "/opt/a b", "/opt/x|y", "/opt/$(id)"])
def test_a_folder_that_cannot_stand_in_a_unit_is_refused(folder: str, tmp_path: Path) -> None:
    """One line, and nothing laid."""
    environment = {**os.environ, "DESTDIR": str(tmp_path / "x"), "BINDIR": folder}
    done = subprocess.run([PACKAGING / "install-units"], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "x").exists()


@needs_systemd
@pytest.mark.parametrize("service", SERVICES)
def test_systemd_takes_the_units(service: str, laid: Path) -> None:
    """systemd-analyze verify has nothing to say about unit and drop-ins."""
    done = quietly("systemd-analyze", "verify", "--man=no", str(laid / UNITS / service))
    assert done.stderr == ""


@needs_systemd
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


@needs_systemd
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


@needs_systemd
def test_group_and_folders_are_made(laid: Path) -> None:
    """systemd-sysusers makes the group, systemd-tmpfiles the folders with their modes."""
    for name in ("passwd", "group"):
        (laid / "etc").mkdir(exist_ok=True)
        (laid / "etc" / name).touch()
    quietly("systemd-sysusers", f"--root={laid}", str(laid / "usr/lib/sysusers.d/polythrottle.conf"))
    assert "polythrottle:" in (laid / "etc/group").read_text()
    if os.geteuid() == 0:
        quietly("systemd-tmpfiles", f"--root={laid}", "--create", "polythrottle.conf")
        for name, mode in (("var/lib/polythrottle", 0o700), ("run/polythrottle", 0o750)):
            assert stat.S_IMODE((laid / name).stat().st_mode) == mode


def test_the_example_of_limits_can_be_read(tmp_path: Path) -> None:
    """As it is it limits nothing; with its # taken away every line counts."""
    text = (PACKAGING / "limits.toml").read_text()
    assert tomllib.loads(text) == {}
    (tmp_path / "limits.toml").write_text(re.sub(r"^# (?=\[|\w+ = \{)", "", text, flags=re.MULTILINE))
    limits = Limits.read(tmp_path / "limits.toml")
    assert set(limits.bounds) == {"nvml", "jetson", "cpu"}
    assert limits.span("nvml", "gpu_max_hz") == (600_000_000, 1_600_000_000)


KILLED = """
import os, signal, sys
from pathlib import Path
from polythrottle.backends.cpu import CpuDevice
from polythrottle.space import OperatingPoint
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


RESTORE = ("-m", "polythrottle.actuation.restoring", "--boot")


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
    names = settings(PACKAGING / "systemd/10-hardening.conf")["CapabilityBoundingSet"].split()
    code = CONFINED.replace("KEPT", repr([CAPABILITIES[name] for name in names]))
    command = [sys.executable, "-c", code, str(tree), str(state), *words]
    return subprocess.run(command, check=False, capture_output=True, text=True, cwd="/")


@needs_systemd
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
