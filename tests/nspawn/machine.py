"""A whole machine in a container: Debian with systemd as process 1, no network, and a processor whose clocks are files.

The boards are made of files that lie where the kernel's would, bound over folders of ``/sys``, so that what the units
open and close of ``/sys`` is what a test meets.
"""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

CPUFREQ = Path("/sys/devices/system/cpu/cpufreq")
FULL, SLOW = "3000000", "800000"
SHARED = "/shared"
"""Where the machine sees the folder it shares with the tests."""
_POLICY = {
    "scaling_min_freq": SLOW,
    "scaling_max_freq": FULL,
    "scaling_cur_freq": SLOW,
    "scaling_available_frequencies": "800000 2000000 3000000",
    "scaling_governor": "schedutil",
    "scaling_driver": "acpi-cpufreq",
    "affected_cpus": "0",
}
ENVIRONMENT = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "LANG": "C.UTF-8",
    "HOME": "/root",
}
_BOOT_S = 120.0
CGROUP = Path("/sys/fs/cgroup")
CONTROLLERS = ("devices", "pids")


def until(holds: Callable[[], object], what: str, patience_s: float = 60.0) -> None:
    """Wait for something that a process of the machine does."""
    ends = time.monotonic() + patience_s
    while not holds():
        assert time.monotonic() < ends, f"{what} did not come within {patience_s:g} s"
        time.sleep(0.05)


def _groups() -> set[Path]:
    """Return the control groups of this machine, in which those of machines in containers lie too."""
    return {Path(folder) for name in CONTROLLERS for folder, _, _ in os.walk(CGROUP / name)}


class Machine:
    """A machine that can be switched off and on.

    Args:
        folder: Where what it writes is kept.
        base: The Debian it begins as, which stays as it is.
    """

    def __init__(self, folder: Path, base: Path) -> None:
        self.folder, self.base = folder, base
        self.root, self.shared = folder / "root", folder / "shared"
        for name in ("root", "upper", "work", "shared"):
            (folder / name).mkdir()
        self._process: subprocess.Popen[bytes] | None = None
        self._init = 0
        self._groups = _groups()
        self.reset_processor()

    def reset_processor(self) -> None:
        """Have the processor as the kernel begins with it."""
        policy = self.shared / "cpufreq" / "policy0"
        policy.mkdir(parents=True, exist_ok=True)
        for name, text in _POLICY.items():
            (policy / name).write_text(f"{text}\n")

    @property
    def cap_khz(self) -> str:
        """What the processor is set to."""
        return (self.shared / "cpufreq/policy0/scaling_max_freq").read_text().strip()

    def start(self) -> None:
        """Switch it on, and wait until everything that is enabled has been started."""
        words = [
            "systemd-nspawn",
            "--quiet",
            "-D",
            str(self.root),
            "--machine=polythrottle-test",
            "--register=no",
            "--keep-unit",
        ]
        words += ["--link-journal=no", "--private-network", f"--bind={self.shared}:{SHARED}"]
        words += ["--system-call-filter=bpf", "--capability=CAP_BPF,CAP_PERFMON"]  # for IPAddressDeny=
        with (self.folder / "console.log").open("ab") as console:
            self._process = subprocess.Popen(
                [*words, "-b"], stdin=subprocess.DEVNULL, stdout=console, stderr=console, env=ENVIRONMENT
            )
        until(self._booted, "the machine's init", _BOOT_S)
        self.run("systemctl", "is-system-running", "--wait", check=False)
        # What a machine of its own would have: a /sys that only the units close, and control groups for devices and for
        # how many processes there are. Not for memory: that is the host's to share out.
        for folder in ("/sys", "/sys/devices", "/sys/kernel", *(f"{CGROUP}/{name}" for name in CONTROLLERS)):
            self.run("mount", "-o", "remount,bind,rw", folder, check=False)
        self.run("mount", "--bind", f"{SHARED}/cpufreq", str(CPUFREQ))
        self.run("systemctl", "daemon-reexec")

    def _booted(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, (self.folder / "console.log").read_text()
        for child in psutil.Process(self._process.pid).children():
            self._init = child.pid
        if not self._init:
            return False
        return self.run("systemctl", "is-system-running", check=False).stdout.strip() not in ("", "offline", "unknown")

    def cut_power(self) -> None:
        """End everything on it at once."""
        assert self._process is not None
        with suppress(ProcessLookupError):
            os.kill(self._init, signal.SIGKILL)
        self._process.wait(timeout=60)
        self._init = 0
        ends = time.monotonic() + 10.0
        while (left := _groups() - self._groups) and time.monotonic() < ends:
            for group in sorted(left, reverse=True):  # a folder after those in it, which the last processes leave late
                with suppress(OSError):
                    group.rmdir()
            time.sleep(0.02)

    def run(self, *words: str, check: bool = True, input: str | None = None) -> "subprocess.CompletedProcess[str]":
        """Run a program on it as root."""
        inside = ["nsenter", "-t", str(self._init), "-m", "-u", "-i", "-n", "-p", *words]
        done = subprocess.run(
            inside, capture_output=True, text=True, check=False, timeout=300, input=input, env=ENVIRONMENT
        )
        assert not check or done.returncode == 0, f"{' '.join(words)}: {done.stdout}{done.stderr}"
        return done

    def python(self, text: str, check: bool = True) -> "subprocess.CompletedProcess[str]":
        """Run Python as the package has it, as root."""
        return self.run("/usr/lib/polythrottle/bin/python3", "-", input=text, check=check)

    def show(self, unit: str, *properties: str) -> dict[str, str]:
        """Return what systemd knows of a unit."""
        lines = self.run("systemctl", "show", unit, *(f"--property={name}" for name in properties)).stdout.splitlines()
        return dict(line.split("=", 1) for line in lines)

    def active(self, unit: str) -> bool:
        """Return whether a unit runs."""
        return self.run("systemctl", "is-active", unit, check=False).stdout.strip() == "active"

    def journal(self, unit: str) -> str:
        """Return what a unit and systemd said of it."""
        return self.run("journalctl", "--no-pager", "--output=cat", f"--unit={unit}").stdout

    def drop_in(self, unit: str, text: str) -> None:
        """Change a unit as `systemctl edit --runtime` does; empty text undoes it."""
        folder = f"/run/systemd/system/{unit}.d"
        self.run("mkdir", "-p", folder)
        if text:
            self.run("tee", f"{folder}/90-test.conf", input=text)
        else:
            self.run("rm", "-rf", folder)
        self.run("systemctl", "daemon-reload")

    def files(self) -> dict[str, str]:
        """Return everything on its disk that a package may leave: paths with owner, mode, and target or size."""
        left_out = (
            "/proc",
            "/sys",
            "/dev",
            "/shared",
            "/tmp",
            "/var/log",
            "/var/cache",
            "/var/lib/dpkg",
            "/run/systemd",
            "/run/udev",
        )
        prune = " -o ".join(f"-path {name}" for name in left_out)
        code = (
            rf"find / -xdev \( {prune} \) -prune -o -printf '%p\t%u:%g %m %l\n'; find /run -xdev -name 'polythrottle*'"
        )
        return {
            line.partition("\t")[0]: line.partition("\t")[2] for line in self.run("sh", "-c", code).stdout.splitlines()
        }


@contextmanager
def machine(folder: Path, base: Path) -> Iterator[Machine]:
    """Have a machine of its own, switched on.

    Args:
        folder: Where what it writes is kept.
        base: The Debian it begins as.
    """
    folder.mkdir(parents=True, exist_ok=True)
    made = Machine(folder, base)
    layers = f"lowerdir={base},upperdir={folder}/upper,workdir={folder}/work"
    subprocess.run(["mount", "-t", "overlay", "overlay", "-o", layers, str(made.root)], check=True)
    try:
        made.start()
        yield made
    finally:
        with suppress(AssertionError, OSError):
            made.cut_power()
        subprocess.run(["umount", str(made.root)], check=True)


HOLD = """
import json, sys, time
from pathlib import Path
from polythrottle.actuation.client.connection import Line
line = Line(Path("/run/polythrottle/actuator.sock"))
token = line.ask("take", device={device!r}, seconds=60)["token"]
line.ask("apply", token=token, point={point!r})
print(json.dumps(line.ask("read", device={device!r})))
"""


def hold(made: Machine, point: dict[str, object], device: str = "") -> dict[str, object]:
    """Take a device of the machine's actuator for a minute, set it, and return a reading."""
    answer = made.python(HOLD.format(device=device, point=point)).stdout
    reading: dict[str, object] = json.loads(answer)
    return reading
