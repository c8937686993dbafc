"""What the kernel does with a text that is written to a file."""

import errno
import os
import re
import shutil
from collections.abc import Callable

from polythrottle.testing.kernel.machine import Machine, refusal
from polythrottle.testing.kernel.memory_clock import put_bpmp, put_cap, put_halt, put_override

# CPU cores that go offline and come back.

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


# Pairs of limits, a minimum and a maximum, of devfreq and cpufreq.
#
# Sources: Linux drivers/devfreq/devfreq.c and drivers/cpufreq/cpufreq.c. A devfreq limit off the table ends on the step
# below (github.com/Qengineering/Jover issue 3 met a neighbour); of cpufreq, a minimum goes up and a maximum down.

_PAIR = re.compile(r"(.*/)(scaling_)?(min|max)_freq")


def put_limit(machine: Machine, path: str, text: str) -> None:
    """Set one of two limits as the kernel would.

    Raises:
        OSError: If the text is no number, or the limits would cross on a kernel that refuses that.
    """
    level = _fitted(machine, path, _whole(path, text))
    low, high = _pair(path)
    _believe_files(machine, low, high)
    if path == low:
        crossing = level > machine.number(high)
    else:
        crossing = level < machine.number(low)
    if crossing and machine.memory.refuses:
        raise refusal(errno.EINVAL, path)
    machine.memory.wishes[path] = level
    _bring_together(machine, low, high)


def force_limits(machine: Machine, path: str, text: str) -> None:
    """Set one of two limits whatever the other is, moving that out of the way: what nvpmodel ends up with."""
    level = _fitted(machine, path, _whole(path, text))
    low, high = _pair(path)
    _believe_files(machine, low, high)
    machine.memory.wishes[path] = level
    if path == low and level > machine.number(high):
        machine.memory.wishes[high] = level
    if path == high and level < machine.number(low):
        machine.memory.wishes[low] = level
    _bring_together(machine, low, high)


def table(machine: Machine, path: str) -> list[int]:
    """Return the clocks the folder of a limit lists, ascending, in the unit of its files."""
    folder, scaling, _ = _parts(path)
    return machine.numbers(f"{folder}{scaling}available_frequencies")


def _believe_files(machine: Machine, low: str, high: str) -> None:
    """Forget wishes that the files contradict: a test has written to them without asking the kernel."""
    wishes = machine.memory.wishes
    least = machine.number(low)
    most = machine.number(high)
    if wishes.get(high) != most:
        wishes[high] = most
    if min(wishes.get(low, least), most) != least:
        wishes[low] = least


def _bring_together(machine: Machine, low: str, high: str) -> None:
    wishes = machine.memory.wishes
    most = wishes[high]
    machine.put(high, most)
    machine.put(low, min(wishes.get(low, machine.number(low)), most))


def _parts(path: str) -> tuple[str, str, str]:
    match = _PAIR.fullmatch(path)
    if match is None:
        raise refusal(errno.EACCES, path)
    return match[1], match[2] or "", match[3]


def _pair(path: str) -> tuple[str, str]:
    folder, scaling, _ = _parts(path)
    return f"{folder}{scaling}min_freq", f"{folder}{scaling}max_freq"


def _whole(path: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise refusal(errno.EINVAL, path) from None


def _fitted(machine: Machine, path: str, wanted: int) -> int:
    """Return the step a wish ends on; 0 as a maximum and -1 mean no limit."""
    _, scaling, side = _parts(path)
    levels = table(machine, path)
    if not levels:
        raise refusal(errno.EINVAL, path)
    if wanted < 0 or (side == "max" and wanted == 0):
        if side == "max":
            return levels[-1]
        return levels[0]
    if scaling and side == "min":
        return next((level for level in levels if level >= wanted), levels[-1])
    return max((level for level in levels if level <= wanted), default=levels[0])


# Which control takes which texts.


def _put_governor(machine: Machine, path: str, text: str) -> None:
    folder, _, name = path.rpartition("/")
    known = f"{folder}/{name.replace('governor', 'available_governors')}"
    if text not in machine.read(known).split():
        raise refusal(errno.EINVAL, path)
    machine.put(path, text)


def _one_of(*texts: str) -> Callable[[Machine, str, str], None]:
    def put(machine: Machine, path: str, text: str) -> None:
        if text not in texts:
            raise refusal(errno.EINVAL, path)
        machine.put(path, text)

    return put


def _put_count(machine: Machine, path: str, text: str) -> None:
    if not text.isdecimal():
        raise refusal(errno.EINVAL, path)
    # It takes a write without a word and keeps what it held (schlafly1/camera-pipe1, start_thor.sh).
    if not path.endswith("/up_freq_margin"):
        machine.put(path, text)


def _put_mask(machine: Machine, path: str, text: str) -> None:
    if text != machine.read(path):
        raise refusal(errno.EBUSY, path)


_RULES: tuple[tuple[str, Callable[[Machine, str, str], None]], ...] = (
    (r".*/devfreq/[^/]+/(min|max)_freq", put_limit),
    (r".*/devfreq/[^/]+/governor", _put_governor),
    (r".*/devfreq/[^/]+/(polling_interval|nvhost_podgov/[a-z_]+)", _put_count),
    (rf"{_CPU}/cpufreq/policy\d+/scaling_(min|max)_freq", put_limit),
    (rf"{_CPU}/cpufreq/policy\d+/scaling_governor", _put_governor),
    (rf"{_CPU}/cpu\d+/online", put_online),
    (rf"{_CPU}/cpu\d+/cpuidle/state\d+/disable", _one_of("0", "1")),
    (r"/sys/kernel/debug/bpmp/debug/clk/[^/]+/[a-z_]+", put_bpmp),
    (r"/sys/kernel/debug/bpmp/debug/bwmgr/bwmgr_halt", put_halt),
    (r"/sys/kernel/debug/clk/override\.emc/[a-z_]+", put_override),
    (r"/sys/kernel/nvpmodel_(clk|emc)_cap/[a-z_]+", put_cap),
    (r".*/power/control", _one_of("on", "auto")),
    (r".*/(railgate_enable|enable_3d_scaling)", _one_of("0", "1")),
    (r".*/[ft][bp][pc]_pg_mask", _put_mask),
)


def obey(machine: Machine, path: str, text: str) -> None:
    """Do what the kernel does when ``text`` is written to ``path``, a path inside the tree without links.

    Raises:
        OSError: As the kernel would: no such file, read-only, out of range, out of order, busy.
    """
    if not machine.has(path):
        raise refusal(errno.ENOENT, path)
    for pattern, rule in _RULES:
        if re.fullmatch(pattern, path):
            rule(machine, path, text.strip())
            return
    raise refusal(errno.EACCES, path)
