"""The units under a real systemd: they start, are closed in as declared, and put the board back however they end."""

import json
import re
from collections.abc import Iterator

import pytest
from nspawn.conftest import CHECKOUT
from nspawn.machine import FULL, SHARED, SLOW, Machine, hold, until

from polythrottle.testing.nvml import FakeNvml, compiler

pytestmark = pytest.mark.systemd
ACTUATOR, DAEMON, RESTORE = "polythrottle-actuator.service", "polythrottle.service", "polythrottle-restore.service"
PROGRAM = "/usr/lib/polythrottle/bin/polythrottle-actuator --socket /run/polythrottle/actuator.sock"
# The processor's files are no kernel's, so they are named as a planted board's are.
NAMED = "[Service]\nEnvironment=POLYTHROTTLE_ROOTS=/sys/devices/system/cpu\n"
LOW = {"cpu_max_hz": 800_000_000}

PROBE = """
import ctypes, errno, json, mmap, os, socket
libc = ctypes.CDLL(None, use_errno=True)

def opened(path):
    os.close(os.open(path, os.O_RDWR))

def called(name, *words):
    if getattr(libc, name)(*words) < 0:
        raise OSError(ctypes.get_errno(), name)

def reached(family, kind=socket.SOCK_STREAM, address=None):
    with socket.socket(family, kind) as way:
        if address:
            way.connect(address)
            way.send(b"")

tried = {
    "etc": lambda: opened("/etc/passwd"),
    "program": lambda: opened("/usr/lib/polythrottle/pyvenv.cfg"),
    "home": lambda: os.listdir("/root/secret"),
    "own state": lambda: os.close(os.open(os.environ["STATE_DIRECTORY"] + "/probe", os.O_CREAT | os.O_RDWR)),
    "others' state": lambda: os.mkdir("/var/lib/probe"),
    "clock": lambda: opened("/sys/devices/system/cpu/cpufreq/policy0/scaling_max_freq"),
    "other part of sys": lambda: opened("/sys/kernel/mm/transparent_hugepage/enabled"),
    "proc": lambda: opened("/proc/sys/kernel/hostname"),
    "null": lambda: opened("/dev/null"),
    "other device": lambda: opened(os.environ["PROBED_DEVICE"]),
    "written and run": lambda: mmap.mmap(-1, 4096, prot=7),
    "namespace": lambda: called("unshare", 0x10000000),
    "mount": lambda: called("mount", b"none", b"/tmp", b"tmpfs", 0, None),
    "realtime": lambda: os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1)),
    "name": lambda: socket.sethostname("probe"),
    "inet": lambda: reached(socket.AF_INET),
    "netlink": lambda: reached(socket.AF_NETLINK, socket.SOCK_RAW),
    "this machine": lambda: reached(socket.AF_INET, socket.SOCK_DGRAM, ("127.0.0.1", 9)),
    "another machine": lambda: reached(socket.AF_INET, socket.SOCK_DGRAM, ("10.9.9.9", 9)),
}
found = {}
for name, do in tried.items():
    try:
        do()
        found[name] = "yes"
    except OSError as err:
        found[name] = errno.errorcode[err.errno]
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
found["capabilities"] = int(status["CapBnd"], 16)
found["no new privileges"] = int(status["NoNewPrivs"])
found["filtered"] = int(status["Seccomp"])
found["user"] = os.geteuid()
groups = dict(line.strip().split(":")[1:] for line in open("/proc/self/cgroup"))
for name, path in groups.items():
    if "pids" in name.split(","):
        found["tasks"] = open(f"/sys/fs/cgroup/pids{path}/pids.max").read().strip()
print("PROBE", json.dumps(found))
"""

SECOND_ADDRESS = """
import fcntl, socket, struct
for name, address in ((b"lo", "127.0.0.1"), (b"lo:1", "10.9.9.9")):
    packed = struct.pack("16sH2s4s8s", name, socket.AF_INET, b"", socket.inet_aton(address), b"")
    fcntl.ioctl(socket.socket(), 0x8916, packed)  # SIOCSIFADDR
"""


@pytest.fixture
def actuator(installed: Machine) -> Iterator[Machine]:
    """Have the actuator run for the processor, and the processor as the kernel begins with it."""
    installed.reset_processor()
    for unit in (ACTUATOR, RESTORE):
        installed.drop_in(unit, NAMED)
    installed.run("systemctl", "start", ACTUATOR)
    yield installed
    installed.run("systemctl", "stop", DAEMON, ACTUATOR)
    installed.run("systemctl", "reset-failed")
    for unit in (ACTUATOR, RESTORE, DAEMON):
        installed.drop_in(unit, "")


def began(machine: Machine, unit: str) -> int:
    """Return how often a unit was started again by systemd itself."""
    return int(machine.show(unit, "NRestarts")["NRestarts"])


def test_the_actuator_sets_a_clock_in_its_sandbox_and_puts_it_back_when_stopped(actuator: Machine) -> None:
    """Started by systemd it says that it is ready, sets what it is asked to, and leaves the board as found."""
    assert actuator.show(ACTUATOR, "ActiveState", "StatusText")["StatusText"].startswith("serves cpu")
    reading = hold(actuator, LOW)
    assert reading["clocks_hz"] == {"cpu": 800_000_000}
    assert actuator.cap_khz == SLOW
    actuator.run("systemctl", "stop", ACTUATOR)
    assert actuator.cap_khz == FULL
    assert actuator.show(ACTUATOR, "Result")["Result"] == "success"


def test_the_board_is_put_back_where_everything_of_the_actuator_was_killed(actuator: Machine) -> None:
    """With the actuator and its guard killed at once, ExecStopPost restores, and systemd starts the next one."""
    hold(actuator, LOW)
    assert actuator.cap_khz == SLOW
    actuator.run("systemctl", "kill", "--signal=KILL", "--kill-who=all", ACTUATOR)
    until(lambda: actuator.cap_khz == FULL, "the restored clock")
    until(lambda: actuator.active(ACTUATOR) and began(actuator, ACTUATOR) == 1, "the next actuator")
    assert re.search(r"^cpu: 1 put back$", actuator.journal(ACTUATOR), re.MULTILINE)


def test_a_hung_actuator_is_killed_by_the_watchdog_and_the_board_put_back(actuator: Machine) -> None:
    """One that was stopped in its tracks is ended by systemd, which restores and starts the next."""
    assert actuator.show(ACTUATOR, "WatchdogUSec")["WatchdogUSec"] == "1min 30s"
    actuator.drop_in(ACTUATOR, f"{NAMED}WatchdogSec=3\n")  # the same in less time
    actuator.run("systemctl", "restart", ACTUATOR)
    hold(actuator, LOW)
    assert actuator.cap_khz == SLOW
    actuator.run("systemctl", "kill", "--signal=STOP", "--kill-who=all", ACTUATOR)
    until(lambda: began(actuator, ACTUATOR) == 1 and actuator.active(ACTUATOR), "the next actuator")
    assert actuator.cap_khz == FULL
    assert "Watchdog timeout (limit 3s)!" in actuator.journal(ACTUATOR)
    hold(actuator, LOW)  # and it serves
    assert actuator.cap_khz == SLOW


def probed(machine: Machine, unit: str, more: str = "") -> dict[str, object]:
    """Return what is open to a program that a unit starts."""
    (machine.shared / "probe.py").write_text(PROBE)
    machine.run("mkdir", "-p", "/root/secret")
    machine.run("sh", "-c", "test -e /dev/probed || mknod /dev/probed c 10 237")
    machine.python(SECOND_ADDRESS)
    line = f"ExecStartPre=/usr/bin/python3 {SHARED}/probe.py\nEnvironment=PROBED_DEVICE=/dev/probed\n"
    machine.drop_in(unit, f"[Service]\n{line}{more}")
    machine.run("systemctl", "restart", unit)
    machine.run("systemctl", "stop", unit)
    said = re.findall(r"^PROBE (.*)$", machine.journal(unit), re.MULTILINE)
    found: dict[str, object] = json.loads(said[-1])
    return found


SHUT = {
    "etc": "EROFS",
    "program": "EROFS",
    "home": "EACCES",
    "own state": "yes",
    "others' state": "EROFS",
    "other part of sys": "EROFS",
    "proc": "EROFS",
    "null": "yes",
    "written and run": "EPERM",
    "namespace": "EPERM",
    "mount": "EPERM",
    "realtime": "EPERM",
    "name": "EPERM",
    "netlink": "EAFNOSUPPORT",
    "no new privileges": 1,
    "filtered": 2,
}


@pytest.mark.parametrize("unit", [ACTUATOR, RESTORE])
def test_root_is_closed_in_as_declared(unit: str, installed: Machine) -> None:
    """It can open clocks, its own state and nothing else; one capability, no network, no other device."""
    found = probed(installed, unit, "[Unit]\nConditionDirectoryNotEmpty=\n")
    expected = {
        **SHUT,
        "clock": "yes",
        "other device": "EPERM",
        "inet": "EAFNOSUPPORT",
        "capabilities": 1 << 21,
        "user": 0,
    }
    assert {name: found[name] for name in expected} == expected
    assert found.get("tasks", "256") == "256"
    assert installed.show(unit, "MemoryMax")["MemoryMax"] == str(512 << 20)


def test_the_daemon_is_closed_in_as_declared(actuator: Machine) -> None:
    """Not even a clock can be opened; it reaches this machine and no other."""
    configure_daemon(actuator)
    found = probed(actuator, DAEMON)
    expected = {**SHUT, "inet": "yes", "capabilities": 0, "this machine": "yes", "another machine": "EPERM"}
    expected |= {
        "etc": "EACCES",
        "program": "EACCES",
        "clock": "EACCES",
        "proc": "EACCES",
    }  # before its file system is asked
    assert {name: found[name] for name in expected} == expected
    assert found["user"] != 0
    assert found["other device"] in ("ENOENT", "EPERM")
    assert found.get("tasks", "256") == "256"
    assert actuator.show(DAEMON, "MemoryMax")["MemoryMax"] == str(4 << 30)


def configure_daemon(machine: Machine) -> None:
    """Have actuator and daemon serve a simulated board."""
    machine.drop_in(ACTUATOR, f"{NAMED}ExecStart=\nExecStart={PROGRAM} --device cpu --device sim:jetson-agx-orin\n")
    machine.run("systemctl", "restart", ACTUATOR)
    profile = (CHECKOUT / "examples/orin-efficientnet-b4.toml").read_text()
    machine.run("tee", "/etc/polythrottle/orin.toml", input=profile)
    settings = 'profile = "/etc/polythrottle/orin.toml"\ndevice = "sim:jetson-agx-orin"\ntraffic = "sim:poisson:10/s"\n'
    machine.run("tee", "/etc/polythrottle/daemon.toml", input=settings)


def test_the_daemon_follows_its_profile_through_the_actuator(actuator: Machine) -> None:
    """As its own user in its own sandbox; killed, it is started again and goes on."""
    configure_daemon(actuator)
    actuator.run("systemctl", "start", DAEMON)

    def following() -> bool:
        return json.loads(actuator.run("polythrottle", "daemon", "status", "--json").stdout)["phase"] == "following"

    until(following, "following")
    actuator.run("systemctl", "kill", "--signal=KILL", "--kill-who=main", DAEMON)
    until(lambda: actuator.active(DAEMON) and began(actuator, DAEMON) == 1, "the next daemon")
    until(following, "following again")
    owner = actuator.run("stat", "--format=%U %a", "/var/lib/polythrottle-daemon").stdout.split()
    assert owner == ["polythrottle", "700"]


@pytest.mark.parametrize("unit", [RESTORE, ACTUATOR, DAEMON])
def test_its_exposure_is_the_recorded_one(unit: str, installed: Machine) -> None:
    """systemd-analyze security says of the loaded unit what packaging/security-score.txt does."""
    recorded = dict(line.split() for line in (CHECKOUT / "packaging/security-score.txt").read_text().splitlines()[2:])
    said = installed.run("systemd-analyze", "security", "--no-pager", unit).stdout
    score = re.search(r"exposure level for \S+ ([\d.]+)", said)
    assert score is not None
    assert score[1] == recorded[unit]


NVPMODEL = """#!/bin/sh
# As NVIDIA's program: -m N notes the mode where polythrottle reads it.
echo "pmode:000$2" > /var/lib/nvpmodel/status
"""

MODE = """
from polythrottle.actuation.actuator import Actuator
from polythrottle.actuation.drivers.controls import Control, Setting
import os, signal
actuator = Actuator("jetson", guarded=False)
actuator.allow(Control("nvpmodel:/", frozenset("0123"), persistent=True))
actuator.__enter__()
actuator.write("nvpmodel:/", "2")
os.kill(os.getpid(), signal.SIGKILL)
"""


def plant_nvpmodel(machine: Machine) -> None:
    """Have a power mode, as a Jetson has, and a program that switches it."""
    machine.run("mkdir", "-p", "/var/lib/nvpmodel")
    machine.run("tee", "/var/lib/nvpmodel/status", input="pmode:0000\n")
    machine.run("tee", "/usr/sbin/nvpmodel", input=NVPMODEL)
    machine.run("chmod", "755", "/usr/sbin/nvpmodel")


def mode(machine: Machine) -> str:
    """Return the power mode that holds."""
    return machine.run("cat", "/var/lib/nvpmodel/status").stdout.strip()


def test_a_power_mode_is_put_back_at_boot_after_a_power_cut(installed: Machine) -> None:
    """The restore unit, enabled by the package, runs nvpmodel in its sandbox, and the record is gone."""
    plant_nvpmodel(installed)
    installed.python(MODE, check=False)
    assert mode(installed) == "pmode:0002"
    installed.cut_power()
    installed.start()
    assert mode(installed) == "pmode:0000"
    assert installed.show(RESTORE, "Result", "ExecMainStatus") == {"Result": "success", "ExecMainStatus": "0"}
    assert "jetson: 1 put back" in installed.journal(RESTORE)


@pytest.mark.skipif(compiler() is None, reason="no C compiler, so the stand-in NVIDIA driver cannot be built")
def test_a_gpu_is_set_and_put_back_through_nvml_in_the_sandbox(actuator: Machine) -> None:
    """With the stand-in for NVIDIA's library: eight cards as one are locked, and as found when all was killed."""
    fake = FakeNvml(actuator.shared / "nvml", ["a100"] * 8)
    before = fake.snapshot()
    (actuator.shared / "library").mkdir()
    (actuator.shared / "library" / fake.path.name).write_bytes(fake.path.read_bytes())
    found = f"LD_LIBRARY_PATH={SHARED}/library POLYTHROTTLE_FAKE_NVML={SHARED}/nvml"
    more = f"Environment={found}\nReadWritePaths={SHARED}/nvml\nExecStart=\nExecStart={PROGRAM} --device nvml:all\n"
    actuator.drop_in(ACTUATOR, f"{NAMED}{more}")
    actuator.run("systemctl", "restart", ACTUATOR)
    hold(actuator, {"gpu_max_hz": 1_200_000_000})
    assert fake.snapshot() != before
    actuator.run("systemctl", "kill", "--signal=KILL", "--kill-who=all", ACTUATOR)
    until(lambda: fake.snapshot() == before, "the restored cards")


RAPL, MONITOR = "/sys/devices/virtual/bdi/intel-rapl:0", "/sys/devices/virtual/bdi/hwmon0"

UEVENT = """
import socket, struct
for path, subsystem in (({rapl!r}, "powercap"), ({monitor!r}, "hwmon")):
    place = path[len("/sys"):]
    words = f"add@{{place}}\\0ACTION=add\\0DEVPATH={{place}}\\0SUBSYSTEM={{subsystem}}\\0"
    way = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 15)  # NETLINK_KOBJECT_UEVENT
    way.bind((0, 0))
    # A request that the kernel sends on as its own (lib/kobject_uevent.c, uevent_net_broadcast).
    way.sendto(struct.pack("=IHHII", 16 + len(words), 0x10, 1, 0, 0) + words.encode(), (0, 0))
"""


def test_udev_gives_energy_counters_to_the_group_to_read(installed: Machine) -> None:
    """A real udevd, told of a RAPL package and a power monitor, lets the group read them and nobody write."""
    devices = installed.shared / "devices"
    for name, subsystem, files in (
        ("intel-rapl:0", "powercap", {"energy_uj": 0o400, "name": 0o444, "constraint_0_power_limit_uw": 0o644}),
        ("hwmon0", "hwmon", {"name": 0o444, "power1_input": 0o440, "curr1_input": 0o444, "in1_crit": 0o644}),
    ):
        (devices / name).mkdir(parents=True)
        (devices / name / "subsystem").symlink_to(f"../../../../class/{subsystem}")
        (devices / name / "uevent").touch()
        for file, permissions in files.items():
            (devices / name / file).write_text("ina3221\n" if file == "name" else "1\n")
            (devices / name / file).chmod(permissions)
    installed.run("mount", "--bind", f"{SHARED}/devices", "/sys/devices/virtual/bdi")
    # A container has no udevd of its own, and udevd takes no device that is not in sysfs, unless told to.
    for unit in ("systemd-udevd-control.socket", "systemd-udevd-kernel.socket", "systemd-udevd.service"):
        service = "[Service]\nEnvironment=SYSTEMD_DEVICE_VERIFY_SYSFS=0\n" if unit.endswith(".service") else ""
        installed.drop_in(unit, f"[Unit]\nConditionPathIsReadWrite=\n{service}")
    installed.run("systemctl", "start", "systemd-udevd.service")
    installed.python(UEVENT.format(rapl=RAPL, monitor=MONITOR))
    installed.run("udevadm", "settle")

    def stands(path: str) -> str:
        return installed.run("stat", "--format=%G %a", path).stdout.strip()

    until(lambda: stands(f"{RAPL}/energy_uj") == "polythrottle 440", "the counter's group", 10)
    until(lambda: stands(f"{MONITOR}/power1_input") == "polythrottle 440", "the monitor's group", 10)
    assert stands(f"{MONITOR}/curr1_input") == "polythrottle 444"
    assert stands(f"{MONITOR}/in1_crit") == "root 644"
    assert stands(f"{RAPL}/constraint_0_power_limit_uw") == "root 644"
    member = "runuser -u polythrottle -- cat"
    assert installed.run("sh", "-c", f"{member} {RAPL}/energy_uj").stdout == "1\n"
