"""Who else on this machine steers clocks: found by the names of processes and by the units systemd starts.

Only files are read: ``/proc/*/comm`` and ``cmdline``, and the links below ``*.wants`` folders (systemd.unit(5)).
Names from NVIDIA's Jetson Linux developer guide, the projects' own unit files, and NVIDIA's driver documentation.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from polythrottle.diagnosis.system import System
from polythrottle.findings import Finding

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
        return self.remedy or (f"systemctl stop {self.unit} while tuning" if self.harm is not False else "leave it")


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
    """Return who else steers clocks here, each with what to do; one finding that says so if nobody does.

    Args:
        system: Where to look.
    """
    running, enabled = processes(system), enabled_units(system)
    found = [finding for program in PROGRAMS if (finding := _seen(program, running, enabled)) is not None]
    found += other_units(system, enabled - {program.unit for program in PROGRAMS})
    if found:
        return tuple(found)
    if not running:
        return (Finding("other programs", None, "cannot be told: no process is shown in /proc"),)
    told = f"none of {len(PROGRAMS)} known programs that steer clocks runs or is started at boot"
    return (Finding("other programs", True, told),)


def _seen(program: Program, running: dict[str, int], enabled: set[str]) -> Finding | None:
    names = [name for name in program.processes if name[:_COMM] in running]
    works = None if program.harm is None else not program.harm
    if names:
        where = f"runs (process {running[names[0][:_COMM]]}): it {program.does}"
        return Finding(program.name, works, where, program.stop)
    if program.unit not in enabled:
        return None
    if program.processes:
        told = f"does not run now but is started at boot: it {program.does}"
        return Finding(program.name, None if works is False else works, told)
    return Finding(program.name, works, f"{program.unit} is started at boot: it {program.does}", program.stop)


def processes(system: System) -> dict[str, int]:
    """Return the processes by name, the lowest number of each; a script counts under its own name too."""
    found: dict[str, int] = {}
    for folder in sorted(system.found("proc/[0-9]*"), key=lambda path: (len(path.name), path.name)):
        name = system.text(folder / "comm")
        for each in (name, _script(system, folder) if name and _INTERPRETERS.fullmatch(name) else None):
            if each:
                found.setdefault(each[:_COMM], int(folder.name) if folder.name.isdecimal() else 0)
    return found


def _script(system: System, folder: Path) -> str | None:
    words = (system.data(folder / "cmdline") or b"").decode(errors="replace").split("\0")[1:]
    return next((Path(word).name for word in words if word and not word.startswith("-")), None)


def enabled_units(system: System) -> set[str]:
    """Return the units that systemd starts because another wants them, masked ones left out."""
    found = set()
    for folder in _UNIT_FOLDERS:
        for pattern in ("*.wants/*.service", "*.requires/*.service"):
            found |= {path.name for path in system.found(f"{folder}/{pattern}")}
    return {name for name in found if not _masked(system, name)}


def _masked(system: System, name: str) -> bool:
    mask = system.root / _UNIT_FOLDERS[0] / name
    return mask.is_symlink() and str(mask.readlink()) == "/dev/null"


def other_units(system: System, enabled: set[str]) -> Iterator[Finding]:
    """Yield enabled units nobody knows by name whose commands, or the script they run, set clocks."""
    for name in sorted(enabled):
        unit = next(filter(None, (system.text(f"{folder}/{name}") for folder in _UNIT_FOLDERS)), "")
        commands = re.findall(r"^Exec\w*\s*=\s*[-@:+!]*(.*)$", unit, re.MULTILINE)
        match = next(filter(None, map(_STEERING.search, [*commands, *_scripts(system, commands)])), None)
        if match is not None:
            told = f"is started at boot and sets clocks ({' '.join(match[0].split())[:40]})"
            yield Finding(name, False, told, f"systemctl stop {name} while tuning")


def _scripts(system: System, commands: list[str]) -> Iterator[str]:
    for command in commands:
        for word in command.split()[:3]:
            text = system.text(word.lstrip("/")) if word.startswith("/") else None
            if text is not None and text.startswith("#!"):
                yield text
