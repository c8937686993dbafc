"""CPU cores that go offline and come back."""

import errno
import os
import re
import shutil

from polythrottle.testing.kernel.machine import Machine, refusal

_CPU = "/sys/devices/system/cpu"


def online_cores(machine: Machine) -> list[int]:
    """Return the cores that are online, ascending."""
    cores = [int(name[3:]) for name in machine.names(_CPU) if re.fullmatch(r"cpu\d+", name)]
    return sorted(cpu for cpu in cores if machine.read(f"{_CPU}/cpu{cpu}/online") == "1")


def put_online(machine: Machine, path: str, text: str) -> None:
    """Take a core off or bring it back; its clock's folder is there as long as one core of its cluster is.

    Raises:
        OSError: If it is the first core, or the text is neither 0 nor 1.
    """
    cpu = int(path.split("/")[-2].removeprefix("cpu"))
    if text not in ("0", "1"):
        raise refusal(errno.EINVAL, path)
    if cpu == 0 and text == "0":
        raise refusal(errno.EBUSY, path)
    if machine.read(path) == text:
        return
    machine.put(path, text)
    _list_cores(machine)
    if text == "1":
        _show(machine, cpu)
    else:
        _hide(machine, cpu)


def _hide(machine: Machine, cpu: int) -> None:
    link = machine.place(f"{_CPU}/cpu{cpu}/cpufreq")
    policy = machine.inside(f"{_CPU}/cpu{cpu}/cpufreq")
    left = [core for core in machine.numbers(f"{policy}/affected_cpus") if core != cpu]
    link.unlink()
    machine.put(f"{policy}/affected_cpus", " ".join(map(str, left)))
    if not left:
        kept = machine.beside / "hidden"
        kept.mkdir(exist_ok=True)
        shutil.move(machine.place(policy), kept / policy.rpartition("/")[2])


def _show(machine: Machine, cpu: int) -> None:
    hidden = machine.beside / "hidden"
    for name in sorted(os.listdir(hidden)) if hidden.is_dir() else []:
        if str(cpu) in (hidden / name / "related_cpus").read_text(encoding="utf-8").split():
            shutil.move(hidden / name, machine.place(f"{_CPU}/cpufreq/{name}"))
    for name in machine.names(f"{_CPU}/cpufreq"):
        policy = f"{_CPU}/cpufreq/{name}"
        if cpu in machine.numbers(f"{policy}/related_cpus"):
            there = sorted({*machine.numbers(f"{policy}/affected_cpus"), cpu})
            machine.put(f"{policy}/affected_cpus", " ".join(map(str, there)))
            machine.place(f"{_CPU}/cpu{cpu}/cpufreq").symlink_to(f"../cpufreq/{name}")


def _list_cores(machine: Machine) -> None:
    there = online_cores(machine)
    last = int(machine.read(f"{_CPU}/present").rpartition("-")[2])
    machine.put(f"{_CPU}/online", _ranges(there))
    machine.put(f"{_CPU}/offline", _ranges([cpu for cpu in range(last + 1) if cpu not in there]))


def _ranges(cores: list[int]) -> str:
    runs: list[list[int]] = []
    for cpu in cores:
        if runs and cpu == runs[-1][-1] + 1:
            runs[-1].append(cpu)
        else:
            runs.append([cpu])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
