"""Which of the known causes keep a machine's clocks or sensors closed: told from files alone.

Sources: kernel_lockdown(7); capabilities(7); Documentation/admin-guide/pm/cpufreq.rst; CVE-2020-8694 for RAPL; NVIDIA's
driver README for ``/proc/driver/nvidia``.
"""

import os
import re
from collections.abc import Iterator

from polythrottle.diagnosis.steerers import enabled_units
from polythrottle.diagnosis.system import System
from polythrottle.findings import Finding

_SYS_ADMIN, _DAC_READ_SEARCH = 21, 2  # include/uapi/linux/capability.h
_SECURE_BOOT = "sys/firmware/efi/efivars/SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c"
_LIBRARIES = ("usr/lib/*/libnvidia-ml.so.*.*", "usr/lib64/libnvidia-ml.so.*.*", "usr/lib/libnvidia-ml.so.*.*")
_RESTORE_UNIT = "polythrottle-restore.service"


def machine_findings(system: System) -> tuple[Finding, ...]:
    """Return what in kernel, firmware and container keeps controls or sensors closed, or that nothing does.

    Args:
        system: Where to look.
    """
    checks = (_rights, _container, _virtual, _closed, _read_only, _masked_powercap, _clocks, _nvidia, _at_boot)
    return tuple(finding for check in checks for finding in check(system))


def is_jetson(system: System) -> bool:
    """Return whether the device tree names an NVIDIA Tegra chip."""
    return "nvidia,tegra" in (system.text("proc/device-tree/compatible") or "")


def _rights(system: System) -> Iterator[Finding]:
    match = re.search(r"^CapEff:\s*([0-9a-fA-F]+)$", system.text("proc/self/status") or "", re.MULTILINE)
    capable = int(match[1], 16) if match else 0
    if os.geteuid() != 0:
        told = f"user {os.geteuid()}: most clocks can be read, but only root may set them"
        yield Finding("rights", None, told, "run as root to tune; measuring needs less")
    elif match and not capable >> _SYS_ADMIN & 1:
        yield Finding(
            *("rights", False, "root without CAP_SYS_ADMIN: an NVIDIA driver refuses to set clocks and limits"),
            "give a container --cap-add SYS_ADMIN",
        )
    elif match and not capable >> _DAC_READ_SEARCH & 1:
        yield Finding(
            *("rights", False, "root without CAP_DAC_READ_SEARCH: RAPL's counters cannot be read"),
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
        told = f"this is a container ({name}): only its own processes are seen, so others may steer clocks unseen"
        yield Finding("container", None, told, "run doctor on the host too")


def _virtual(system: System) -> Iterator[Finding]:
    if re.search(r"^flags\s*:.*\bhypervisor\b", system.text("proc/cpuinfo") or "", re.MULTILINE):
        maker = system.text("sys/class/dmi/id/sys_vendor") or "unknown maker"
        told = f"this is a virtual machine ({maker}): the host keeps the processor's clocks and energy counters"
        yield Finding("virtual machine", False, told, "tune on the host, or a GPU that is passed through")


def _closed(system: System) -> Iterator[Finding]:
    """Tell whether kernel lockdown closes debugfs, which the memory clock of a Jetson needs."""
    mode = re.search(r"\[(\w+)\]", system.text("sys/kernel/security/lockdown") or "")
    boot = system.data(_SECURE_BOOT)
    secure = " under secure boot" if boot is not None and len(boot) == 5 and boot[4] == 1 else ""
    if mode and mode[1] != "none":
        told = f"kernel lockdown ({mode[1]}{secure}) closes debugfs, so a Jetson's memory clock cannot be locked"
        yield Finding("lockdown", False, told, "boot without secure boot, or tune the other knobs")
    elif is_jetson(system) and system.mounts().get("/sys/kernel/debug", ("", ()))[0] not in ("debugfs", ""):
        yield Finding("debugfs", False, "something else is mounted over debugfs")
    elif is_jetson(system) and system.mounts() and "/sys/kernel/debug" not in system.mounts():
        remedy = "mount -t debugfs debugfs /sys/kernel/debug, in a container from the host"
        yield Finding("debugfs", False, "not mounted, so the memory clock cannot be locked", remedy)


def _read_only(system: System) -> Iterator[Finding]:
    kind, options = system.mounts().get("/sys", ("", frozenset[str]()))
    if kind == "sysfs" and "ro" in options:
        remedy = "mount the host's /sys for writing, as docs/deploy.md shows"
        yield Finding("sysfs", False, "/sys is mounted read-only, so no clock can be set (a container?)", remedy)


def _masked_powercap(system: System) -> Iterator[Finding]:
    if any(path.startswith("/sys/devices/virtual/powercap") for path in system.mounts()):
        told = "something is mounted over powercap, as Docker does, so RAPL's counters are hidden"
        yield Finding("powercap", False, told, "docker run --security-opt systempaths=unconfined")


def _clocks(system: System) -> Iterator[Finding]:
    if not system.found("sys/devices/system/cpu/cpufreq/policy[0-9]*"):
        told = "the kernel has no cpufreq policy here, so processor clocks cannot be set"
        yield Finding("cpufreq", False, told, "load the driver for this processor, or tune on bare metal")


def _nvidia(system: System) -> Iterator[Finding]:
    """Tell whether an NVIDIA GPU is there that its driver does not serve, or serves in another version."""
    gpus = [path.parent.name for path in system.found("sys/bus/pci/devices/*/vendor") if _is_gpu(system, path.parent)]
    loaded = re.search(r"Module\D+\s(\d+(?:\.\d+)+)", system.text("proc/driver/nvidia/version") or "")
    if gpus and not loaded:
        told = f"an NVIDIA GPU is at {gpus[0]}, but its driver is not loaded"
        yield Finding("NVIDIA driver", False, told, "install the driver, or modprobe nvidia and read dmesg")
    libraries = {path.name.partition(".so.")[2] for pattern in _LIBRARIES for path in system.found(pattern)}
    if loaded and libraries and loaded[1] not in libraries:
        told = f"version {loaded[1]} is loaded, but the library is {max(libraries)}: upgraded without a reboot"
        yield Finding("NVIDIA driver", False, told, "reboot, or reload the nvidia modules")


def _is_gpu(system: System, folder: object) -> bool:
    vendor, kind = system.text(f"{folder}/vendor"), system.text(f"{folder}/class")
    return vendor == "0x10de" and (kind or "").startswith("0x03")


def _at_boot(system: System) -> Iterator[Finding]:
    if _RESTORE_UNIT in enabled_units(system):
        yield Finding("restore at boot", True, f"{_RESTORE_UNIT} is started at boot")
    else:
        told = f"{_RESTORE_UNIT} is not installed; what survives a reboot (a power mode) would stay after a crash"
        yield Finding("restore at boot", None, told, "sudo polythrottle daemon install")
