"""What a machine's files tell: which known causes keep its clocks or sensors closed, and who else steers its clocks.

And what stands changed on this machine, and whether the place where originals are kept can be trusted.
"""

from __future__ import annotations

import os
import re
import shlex
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from polythrottle.actuation import Limits, Standing, standing
from polythrottle.actuation.drivers.controls import file_systems
from polythrottle.actuation.restore import lapsed, left_behind
from polythrottle.actuation.rollback import Outcome
from polythrottle.actuation.state.site import machine
from polythrottle.domain.errors import PolythrottleError
from polythrottle.domain.ports import Finding
from polythrottle.storage.paths import state_dir
from polythrottle.storage.untrusted import printable

# The files of a machine below a root, read so that nothing they hold can hurt.

_MOST_BYTES = 200_000


class System:
    """The files of a machine; what cannot be read is unknown, and unknown is None.

    Args:
        root: Where ``proc``, ``sys``, ``etc`` and ``usr`` hang.
    """

    def __init__(self, root: Path = Path("/")) -> None:
        self.root = root.absolute()

    def text(self, path: str | Path) -> str | None:
        """Return the beginning of a file, or None: never waits, as on a pipe."""
        data = self.data(path)
        if data is None:
            return None
        return data.decode(errors="replace").strip()

    def data(self, path: str | Path) -> bytes | None:
        """Return the first bytes of a file, or None."""
        try:
            handle = os.open(self.root / path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except (OSError, ValueError):
            return None
        try:
            return os.read(handle, _MOST_BYTES)
        except OSError:
            return None
        finally:
            os.close(handle)

    def found(self, pattern: str) -> list[Path]:
        """Return what matches a pattern below the root, sorted."""
        try:
            return sorted(self.root.glob(pattern))
        except OSError:
            return []

    def mounts(self) -> dict[str, tuple[str, frozenset[str]]]:
        """Return by mount point what kind of file system is there, and its options; the topmost where several are."""
        rows = [line.split() for line in (self.text("proc/self/mounts") or "").splitlines()]
        return {row[1]: (row[2], frozenset(row[3].split(","))) for row in rows if len(row) >= 4}


# Who else on this machine steers clocks: found by the names of processes and by the units systemd starts.
#
# Only files are read: ``/proc/*/comm`` and ``cmdline``, and the links below ``*.wants`` folders (systemd.unit(5)).
# Names from NVIDIA's Jetson Linux developer guide, the projects' own unit files, and NVIDIA's driver documentation.

_UNIT_FOLDERS = ("etc/systemd/system", "run/systemd/system", "usr/lib/systemd/system", "lib/systemd/system")
_INTERPRETERS = re.compile(r"python[\d.]*|sh|bash|dash|perl")
_COMM = 15  # the kernel keeps no more of a name (TASK_COMM_LEN)
_STEERING = re.compile(
    r"nvidia-smi\b.*\s(-lgc|-lmc|-pl|-ac|--lock-gpu-clocks|--lock-memory-clocks|--power-limit|--applications-clocks)"
    r"|\bjetson_clocks\b|\bnvpmodel\s+-m|\bcpupower\b.*\bfrequency-set|\bcpufreq-set\b|\bx86_energy_perf_policy\b"
    r"|scaling_(max|min)_freq|scaling_governor|devfreq/\S*/(max|min)_freq|mrq_rate_locked|energy_performance_preference"
)


@dataclass(frozen=True)
class Program:
    """A program that steers clocks or could.

    Args:
        name: As people know it.
        does: What it does to clocks.
        processes: What its processes are called.
        unit: The systemd unit that starts it.
        harm: False where it does not disturb, True where it does, None where that depends on how it is used.
        remedy: What to do about it.
    """

    name: str
    does: str
    processes: tuple[str, ...] = ()
    unit: str = ""
    harm: bool | None = True
    remedy: str = ""

    @property
    def stop(self) -> str:
        """What to do about it: by default to stop its unit."""
        if self.remedy:
            return self.remedy
        if self.harm is False:
            return "leave it"
        return f"systemctl stop {self.unit} while tuning"


PROGRAMS = (
    Program("nvpmodel", "sets the power mode at boot", (), "nvpmodel.service", False, "switch no mode while tuning"),
    Program(
        "jetson_clocks",
        "pins all clocks at boot",
        (),
        "jetson_clocks.service",
        remedy="systemctl disable jetson_clocks.service, then reboot: no clock below the pinned one is tried",
    ),
    Program("nvpower", "moves clocks with the power budget", ("nvpower", "nvpower.sh"), "nvpower.service", None),
    Program("nvphs", "moves clock caps on hints", ("nvphs", "nvphsd"), "nvphs.service", None, "leave it"),
    Program("nvfancontrol", "steers the fan alone", ("nvfancontrol",), "nvfancontrol.service", False),
    Program("jtop", "may run jetson_clocks, and its sampling costs power", ("jtop",), "jtop.service", None),
    Program("tuned", "sets governors and clock limits", ("tuned",), "tuned.service"),
    Program("TLP", "sets governors and clock limits when the power source changes", (), "tlp.service"),
    Program(
        "power-profiles-daemon",
        "sets the energy-performance preference",
        ("power-profiles-daemon",),
        "power-profiles-daemon.service",
    ),
    Program("auto-cpufreq", "sets governors and clock limits", ("auto-cpufreq",), "auto-cpufreq.service"),
    Program("LACT", "sets GPU clocks and power limits", ("lact", "lactd"), "lactd.service"),
    Program("nvidia-powerd", "moves the GPU's power limit", ("nvidia-powerd",), "nvidia-powerd.service"),
    Program("thermald", "lowers clocks and power limits in heat", ("thermald",), "thermald.service", None),
    Program("DCGM", "may enforce its own power limits", ("nv-hostengine",), "nvidia-dcgm.service", None),
    Program("zeusd", "sets GPU clocks and limits for its clients", ("zeusd",), "zeusd.service", None),
    Program("cpupower", "sets the governor at boot", (), "cpupower.service", False),
)
"""Every program that is looked for; `other_units` finds those nobody knows by name."""


def others_steering(system: System) -> tuple[Finding, ...]:
    """Return who else steers clocks here, each with what to do; one finding that says so if nobody does."""
    running = processes(system)
    enabled = enabled_units(system)
    findings = [finding for program in PROGRAMS if (finding := _seen(program, running, enabled)) is not None]
    findings += other_units(system, enabled - {program.unit for program in PROGRAMS})
    if findings:
        return tuple(findings)
    if not running:
        return (Finding("other programs", None, "cannot be told: no process is shown in /proc"),)
    words = f"none of {len(PROGRAMS)} known programs that steer clocks runs or is started at boot"
    return (Finding("other programs", True, words),)


def _seen(program: Program, running: dict[str, int], enabled: set[str]) -> Finding | None:
    names = [name for name in program.processes if name[:_COMM] in running]
    works = {None: None, True: False, False: True}[program.harm]
    if names:
        where = f"runs (process {running[names[0][:_COMM]]}): it {program.does}"
        return Finding(program.name, works, where, program.stop)
    if program.unit not in enabled:
        return None
    if program.processes:
        words = f"does not run now but is started at boot: it {program.does}"
        return Finding(program.name, works or None, words)  # it does no harm yet
    return Finding(program.name, works, f"{program.unit} is started at boot: it {program.does}", program.stop)


def processes(system: System) -> dict[str, int]:
    """Return the processes by name, the lowest number of each; a script counts under its own name too."""
    running: dict[str, int] = {}
    for folder in sorted(system.found("proc/[0-9]*"), key=lambda path: (len(path.name), path.name)):
        name = system.text(folder / "comm")
        for each in (name, _script(system, folder) if name and _INTERPRETERS.fullmatch(name) else None):
            if each:
                running.setdefault(each[:_COMM], int(folder.name) if folder.name.isdecimal() else 0)
    return running


def _script(system: System, folder: Path) -> str | None:
    words = (system.data(folder / "cmdline") or b"").decode(errors="replace").split("\0")[1:]
    return next((Path(word).name for word in words if word and not word.startswith("-")), None)


def enabled_units(system: System) -> set[str]:
    """Return the units that systemd starts because another wants them, masked ones left out."""
    names = set()
    for folder in _UNIT_FOLDERS:
        for pattern in ("*.wants/*.service", "*.requires/*.service"):
            names |= {path.name for path in system.found(f"{folder}/{pattern}")}
    # A mask is a link to /dev/null in /etc alone, before which every other folder gives way (systemctl mask).
    return {name for name in names if not _masked(system, name)}


def _masked(system: System, name: str) -> bool:
    mask = system.root / _UNIT_FOLDERS[0] / name
    return mask.is_symlink() and os.readlink(mask) == "/dev/null"


def other_units(system: System, enabled: set[str]) -> Iterator[Finding]:
    """Yield enabled units nobody knows by name whose commands, or the script they run, set clocks."""
    for name in sorted(enabled):
        unit = next(filter(None, (system.text(f"{folder}/{name}") for folder in _UNIT_FOLDERS)), "")
        commands = re.findall(r"^Exec\w*\s*=\s*[-@:+!]*(.*)$", unit, re.MULTILINE)
        match = next(filter(None, map(_STEERING.search, [*commands, *_scripts(system, commands)])), None)
        if match is not None:
            words = f"is started at boot and sets clocks ({' '.join(match[0].split())[:40]})"
            yield Finding(name, False, words, f"systemctl stop {name} while tuning")


def _scripts(system: System, commands: list[str]) -> Iterator[str]:
    for command in commands:
        for word in command.split()[:3]:
            text = None
            if word.startswith("/"):
                text = system.text(word.lstrip("/"))
            if text is not None and text.startswith("#!"):
                yield text


# Which of the known causes keep a machine's clocks or sensors closed: told from files alone.
#
# Sources: kernel_lockdown(7); capabilities(7); Documentation/admin-guide/pm/cpufreq.rst; CVE-2020-8694 for RAPL;
# NVIDIA's driver README for ``/proc/driver/nvidia``.

# include/uapi/linux/capability.h
_SYS_ADMIN = 21
_DAC_READ_SEARCH = 2
_SECURE_BOOT = "sys/firmware/efi/efivars/SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c"
_LIBRARIES = ("usr/lib/*/libnvidia-ml.so.*.*", "usr/lib64/libnvidia-ml.so.*.*", "usr/lib/libnvidia-ml.so.*.*")
_RESTORE_UNIT = "polythrottle-restore.service"


def machine_findings(system: System, board: str = "") -> tuple[Finding, ...]:
    """Return what in kernel, firmware and container keeps controls or sensors closed, or that nothing does.

    Args:
        system: The machine.
        board: Its URI at the desk that asks over SSH, where the commands are that are advised; "" if it is here.
    """
    checks = (_rights, _container, _virtual, _closed, _read_only, _masked_powercap, _clocks, _nvidia)
    return (*(finding for check in checks for finding in check(system)), *_at_boot(system, board))


def is_jetson(system: System) -> bool:
    """Return whether the device tree names an NVIDIA Tegra chip."""
    return "nvidia,tegra" in (system.text("proc/device-tree/compatible") or "")


def _rights(system: System) -> Iterator[Finding]:
    match = re.search(r"^CapEff:\s*([0-9a-fA-F]+)$", system.text("proc/self/status") or "", re.MULTILINE)
    capable = 0
    if match:
        capable = int(match[1], 16)
    if os.geteuid() != 0:
        words = f"user {os.geteuid()}: most clocks can be read, but only root may set them"
        yield Finding("rights", None, words, "run as root to tune; measuring needs less")
    elif match and not capable >> _SYS_ADMIN & 1:
        yield Finding(
            "rights",
            False,
            "root without CAP_SYS_ADMIN: an NVIDIA driver refuses to set clocks and limits",
            "give a container --cap-add SYS_ADMIN",
        )
    elif match and not capable >> _DAC_READ_SEARCH & 1:
        yield Finding(
            "rights",
            False,
            "root without CAP_DAC_READ_SEARCH: RAPL's counters cannot be read",
            "give a unit or container CAP_DAC_READ_SEARCH",
        )
    else:
        yield Finding("rights", True, "runs as root")


def _container(system: System) -> Iterator[Finding]:
    marks = {".dockerenv": "Docker", "run/.containerenv": "Podman", "var/run/secrets/kubernetes.io": "Kubernetes"}
    name = next((name for path, name in marks.items() if (system.root / path).exists()), None)
    init = (system.data("proc/1/environ") or b"").split(b"\0")
    name = name or next((word[10:].decode(errors="replace") for word in init if word.startswith(b"container=")), None)
    if name:
        words = f"this is a container ({name}): only its own processes are seen, so others may steer clocks unseen"
        yield Finding("container", None, words, "run doctor on the host too")


def _virtual(system: System) -> Iterator[Finding]:
    if re.search(r"^flags\s*:.*\bhypervisor\b", system.text("proc/cpuinfo") or "", re.MULTILINE):
        maker = system.text("sys/class/dmi/id/sys_vendor") or "unknown maker"
        words = f"this is a virtual machine ({maker}): the host keeps the processor's clocks and energy counters"
        if system.found("proc/driver/nvidia/gpus/*"):
            yield Finding("virtual machine", None, f"{words}; the GPU passed through to it has its own")
        else:
            yield Finding("virtual machine", False, words, "tune on the host, or a GPU that is passed through")


def _closed(system: System) -> Iterator[Finding]:
    """Tell whether kernel lockdown closes debugfs, which the memory clock of a Jetson needs."""
    mode = re.search(r"\[(\w+)\]", system.text("sys/kernel/security/lockdown") or "")
    boot = system.data(_SECURE_BOOT)
    # Four bytes of attributes, then the value (kernel: Documentation/filesystems/efivarfs.rst).
    secure = ""
    if boot is not None and len(boot) == 5 and boot[4] == 1:
        secure = " under secure boot"
    if mode and mode[1] != "none":
        words = f"kernel lockdown ({mode[1]}{secure}) closes debugfs, so a Jetson's memory clock cannot be locked"
        yield Finding("lockdown", False, words, "boot without secure boot, or tune the other knobs")
    elif is_jetson(system) and system.mounts().get("/sys/kernel/debug", ("", ()))[0] not in ("debugfs", ""):
        yield Finding("debugfs", False, "something else is mounted over debugfs")
    elif is_jetson(system) and system.mounts() and "/sys/kernel/debug" not in system.mounts():
        remedy = "mount -t debugfs debugfs /sys/kernel/debug, in a container from the host"
        yield Finding("debugfs", False, "not mounted, so the memory clock cannot be locked", remedy)


def _read_only(system: System) -> Iterator[Finding]:
    kind, options = system.mounts().get("/sys", ("", frozenset()))
    if kind == "sysfs" and "ro" in options:
        remedy = "mount the host's /sys for writing, as docs/deploy.md shows"
        yield Finding("sysfs", False, "/sys is mounted read-only, so no clock can be set (a container?)", remedy)


def _masked_powercap(system: System) -> Iterator[Finding]:
    if any(path.startswith("/sys/devices/virtual/powercap") for path in system.mounts()):
        words = "something is mounted over powercap, as Docker does, so RAPL's counters are hidden"
        yield Finding("powercap", False, words, "docker run --security-opt systempaths=unconfined")


def _clocks(system: System) -> Iterator[Finding]:
    if not system.found("sys/devices/system/cpu/cpufreq/policy[0-9]*"):
        words = "the kernel has no cpufreq policy here, so processor clocks cannot be set"
        yield Finding("cpufreq", False, words, "load the driver for this processor, or tune on bare metal")


def _nvidia(system: System) -> Iterator[Finding]:
    """Tell whether an NVIDIA GPU is there that its driver does not serve, or serves in another version."""
    gpus = [path.parent.name for path in system.found("sys/bus/pci/devices/*/vendor") if _is_gpu(system, path.parent)]
    loaded = re.search(r"Kernel Module\b.*?\s(\d+(?:\.\d+)+)", system.text("proc/driver/nvidia/version") or "")
    if gpus and not loaded:
        words = f"an NVIDIA GPU is at {gpus[0]}, but its driver is not loaded"
        yield Finding("NVIDIA driver", False, words, "install the driver, or modprobe nvidia and read dmesg")
    libraries = {path.name.partition(".so.")[2] for pattern in _LIBRARIES for path in system.found(pattern)}
    if loaded and libraries and loaded[1] not in libraries:
        words = f"version {loaded[1]} is loaded, but the library is {max(libraries)}: upgraded without a reboot"
        yield Finding("NVIDIA driver", False, words, "reboot, or reload the nvidia modules")


def _is_gpu(system: System, folder: object) -> bool:
    vendor = system.text(f"{folder}/vendor")
    kind = system.text(f"{folder}/class")
    return vendor == "0x10de" and (kind or "").startswith("0x03")


def _at_boot(system: System, board: str) -> Iterator[Finding]:
    if _RESTORE_UNIT in enabled_units(system):
        yield Finding("restore at boot", True, f"{_RESTORE_UNIT} is started at boot")
    else:
        words = f"{_RESTORE_UNIT} is not installed; what survives a reboot (a power mode) would stay after a crash"
        yield Finding("restore at boot", None, words, _install(board))


def _install(board: str) -> str:
    """Return the command that installs what restores at boot."""
    if not board:
        return "sudo polythrottle daemon install"
    # Nothing need be installed there, and at the desk it takes no rights.
    command = f"polythrottle daemon install --device {shlex.quote(board)}"
    return command if os.geteuid() == 0 else f"{command} --sudo"


_LEAST_BYTES = 1_000_000
ABOUT_RECORDS = frozenset({"originals", "state folder", "promise", "limits"})
"""Subjects of findings that are about the records as a whole; every other subject is a device that stands changed."""
_FORGETFUL = {"tmpfs", "ramfs"}
_REMOTE = {"nfs", "nfs4", "cifs", "smb3", "9p", "ceph", "fuse.sshfs"}


def record_findings(board: str = "") -> tuple[Finding, ...]:
    """Return what stands changed, by whom and until when, and whether the state folder is fit to keep it.

    Args:
        board: The URI by which somebody over SSH names this machine, for commands that are given there; "" here.
    """
    try:
        stands = tuple(_told(each, board) for each in standing())
        changed = {each.subject for each in stands}
        stands += tuple(_told_left(each, board) for each in left_behind() if each.device not in changed)
    except PolythrottleError as err:
        stands = (Finding("originals", False, _line(err)),)
    return (*(stands or (Finding("originals", True, "nothing stands changed"),)), *_state(), _limits())


def _told(each: Standing, board: str) -> Finding:
    lease = each.lease
    count = f"{len(each.keys)} control{'s' * (len(each.keys) != 1)}"
    since = f" since {lease.since}" * bool(lease.since)
    restore = f"polythrottle restore{_named(each.device, board)}"
    if each.damage:
        return Finding(each.device, False, f"the record of originals is damaged: {each.damage[0]}", restore)
    if lease.applied and lease.kept:
        return _kept(each, f"{lease.holder} stands{since} ({count})", f"{restore} gives it back")
    if lease.applied and each.expires_in_s is not None and each.expires_in_s > 0:
        if not lease.alive:
            told = f"{lease.holder} stands{since} ({count}); its guard has died, so that nothing reverts it"
            return Finding(each.device, False, told, restore)
        told = f"{lease.holder} stands{since} ({count}) and reverts in {each.expires_in_s:.0f} s"
        there = _named(each.device, board) if board else ""
        return Finding(each.device, None, told, f"polythrottle apply --confirm{there} lets it stand")
    if lease.alive:
        return Finding(each.device, None, f"is being steered by {lease.holder}{since} ({count} changed)")
    by = "a process that is gone"
    if lease.holder:
        by = f"{lease.holder}, which is dead"
    return Finding(each.device, False, f"{count} changed by {by},{since or ' some time ago'}", restore)


def _told_left(each: Outcome, board: str) -> Finding:
    """Tell of what a restoring before has left to somebody else."""
    force = f"polythrottle restore{_named(each.device, board)} --force"
    remedy = f"{force} puts it back; the next tune takes it for what it finds"
    return Finding(each.device, None, printable("; ".join(each.left)), remedy)


def _named(device: str, board: str) -> str:
    """Return the words that name a device to a command: a planted board is meant only where it is named."""
    kind, planted, root = device.partition(" /")
    if not board:
        return f" --device '{device}'" if planted else ""
    where, _, options = board.partition("?")
    joint = "?"
    if planted:
        where += f"/{kind}?root=/{root}"
        joint = "&"
    if options:
        where += f"{joint}{options}"
    return f" --device {shlex.quote(where)}"


def _kept(each: Standing, told: str, remedy: str) -> Finding:
    """Tell of what was applied for good: whether it still holds, and whether somebody keeps it."""
    if lapses := lapsed(each.device):
        return Finding(each.device, False, f"{told}, but {printable('; '.join(map(str, lapses)))}", remedy)
    if each.keys and not each.lease.alive:
        told += "; its keeper has died, so that nothing sets it anew should a driver or a GPU start anew"
    return Finding(each.device, None, told, remedy)


def _state() -> Iterator[Finding]:
    """Tell whether originals can be kept: the folder, or the nearest one above it that is there."""
    try:
        folder = state_dir()
        here = next(each for each in (folder, *folder.parents) if each.exists())
        found = here.stat()
        room = os.statvfs(here)
    except (PolythrottleError, OSError) as err:
        yield Finding("state folder", False, _line(err))
        return
    made = " (it will be made)" if here != folder else ""
    choose = "set POLYTHROTTLE_STATE_DIR to a folder of your own"
    if not stat.S_ISDIR(found.st_mode) or not os.access(here, os.W_OK | os.X_OK):
        yield Finding("state folder", False, f"{here} cannot be written", choose)
    elif found.st_mode & stat.S_IWOTH and not found.st_mode & stat.S_ISVTX:
        yield Finding("state folder", False, f"anyone may write in {here}", f"chmod o-w {here}, or {choose}")
    elif room.f_bavail * room.f_frsize < _LEAST_BYTES:
        yield Finding("state folder", False, f"the disk that holds {here} is full", "make room there")
    else:
        yield Finding("state folder", True, f"{folder}{made}")
        yield from _promises(here)


def _promises(folder: Path) -> Iterator[Finding]:
    """Tell which promise does not hold here because of where originals are kept, and why."""
    try:
        kind = file_systems().get(folder.stat().st_dev, "")
    except (OSError, ValueError):
        return
    move = "set POLYTHROTTLE_STATE_DIR to a folder on this machine's disk"
    if kind in _FORGETFUL:
        told = f"{folder} is on {kind}: what outlives a reboot (a power mode) is not put back after a power cut"
        yield Finding("promise", None, told, move)
    elif kind == "overlay":
        told = f"{folder} is a container's own: what is on record is lost with the container"
        yield Finding("promise", None, told, "mount a folder of the host's there, as docs/deploy.md shows")
    elif kind in _REMOTE:
        told = f"{folder} is on {kind}: two writers may not see each other's locks, and a server away stops steering"
        yield Finding("promise", None, told, move)
    if machine().startswith("boot-"):
        told = "/etc/machine-id says nothing, so that after a reboot nobody knows whose a power mode on record is"
        yield Finding("promise", None, told, "systemd-machine-id-setup makes one")


def _limits() -> Finding:
    try:
        bounds = Limits.read().bounds
    except PolythrottleError as err:
        return Finding("limits", False, _line(err))
    told = ", ".join(f"{kind} ({', '.join(table)})" for kind, table in bounds.items())
    if not told:
        return Finding("limits", True, "the administrator set none")
    return Finding("limits", True, f"the administrator's are kept: {told}")


def _line(err: Exception) -> str:
    return " ".join(str(err).split())
