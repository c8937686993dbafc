"""What the kernel does with a text that is written to a file: limits, governors, the memory clock; and nvpmodel.

*The memory clock*: rate locks of BPMP, the override of older boards, and caps. BPMP drops a rate outside its
table, or above the cap, without an error; the rate only moves while it is locked, and unlocking gives it back to the
governor. Where there is ``bwmgr_halt``, the bandwidth manager moves even a locked rate unless it is halted (public
sweeps on Thor and recipes for Orin Nano write it beside the lock). A cap of ``nvpmodel_clk_cap`` can be lowered, and
raising it does nothing (github.com/tiiuae/ghaf pull request 2071 on AGX Orin; nvpmodel's own switch lifts it).
``emc_iso_cap`` holds whatever number was written last, 0 for none (the driver nvpmodel_emc_cap.c).

*nvpmodel* reads its file of power modes and switches between them. A clock off the table of its
parameter ends on the nearest step: 670 MHz on 675.75 (iloudaros/LoudVA, an AGX Xavier), 640 on 614.4 and a CPU's 918 on
921.6 (a Nano's tables beside its nvpmodel.conf).
"""

import errno
import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from polythrottle.domain.errors import KnobRejected
from polythrottle.testing.kernel.machine import Machine, refusal

CLK = "/sys/kernel/debug/bpmp/debug/clk"
_EMC = f"{CLK}/emc"
_OVERRIDE = "/sys/kernel/debug/clk/override.emc"
_LIST = "/sys/kernel/debug/bpmp/debug/emc/possible_rates"
_HALT = "/sys/kernel/debug/bpmp/debug/bwmgr/bwmgr_halt"
_OLD_TABLE = "/sys/kernel/debug/clk/emc/clk_possible_rates"
_OLD_RATE = "/sys/kernel/debug/clk/emc/clk_rate"
_NEW_CAP = "/sys/kernel/nvpmodel_clk_cap/emc"
_ISO_CAP = "/sys/kernel/nvpmodel_emc_cap/emc_iso_cap"
_BWMGR = "/sys/class/devfreq/bwmgr/max_freq"


def memory_levels(machine: Machine) -> list[int]:
    """Return the memory clocks the board lists, in Hz, ascending."""
    for table in (f"{_EMC}/dvfs", f"{_EMC}/dvfs_table"):
        if machine.has(table):
            return sorted({int(line.split()[1]) for line in machine.read(table).splitlines()})
    if machine.has(_LIST):
        return sorted(int(word) * 1000 for word in machine.read(_LIST).removesuffix("(kHz)").split())
    return [rate * 1000 for rate in machine.numbers(_OLD_TABLE)]


def memory_cap(machine: Machine) -> int:
    """Return the highest memory clock that present caps allow, in Hz."""
    caps = [machine.number(path) for path in (_NEW_CAP, _ISO_CAP, _BWMGR) if machine.has(path)]
    return min([cap for cap in caps if cap > 0] or memory_levels(machine)[-1:], default=0)


def memory_rate(machine: Machine) -> int:
    """Return the memory clock, in Hz; 0 where the board shows none."""
    if machine.has(f"{_EMC}/rate"):
        path = f"{_EMC}/rate"
    else:
        path = _OLD_RATE
    if machine.has(path):
        return machine.number(path)
    return 0


def govern_memory(machine: Machine) -> None:
    """Give the memory clock to the governor where nobody holds it: the step at 60 % of the cap under load."""
    levels = memory_levels(machine)
    cap = memory_cap(machine)
    if not levels:
        return
    share = 0.6 if machine.memory.load >= 0.5 else 0.0
    allowed = [level for level in levels if level <= cap] or levels[:1]
    rate = next((level for level in allowed if level >= share * cap), allowed[-1])
    if machine.has(_EMC) and not _held(machine):
        machine.put(f"{_EMC}/rate", rate)
    if machine.has(_OVERRIDE):
        held = machine.read(f"{_OVERRIDE}/clk_state") == "1"
        if held:
            now = machine.number(f"{_OVERRIDE}/clk_update_rate")
        else:
            now = rate
        machine.put(f"{_OVERRIDE}/clk_rate", now)
        machine.put(_OLD_RATE, now)


def _held(machine: Machine) -> bool:
    """Return whether the memory clock stays where it was put."""
    if machine.has(_HALT) and machine.read(_HALT) != "1":
        return False
    return machine.read(f"{_EMC}/mrq_rate_locked") == "1" and machine.read(f"{_EMC}/state") == "1"


def put_halt(machine: Machine, path: str, text: str) -> None:
    """Halt the bandwidth manager, or let it run.

    Raises:
        OSError: If the text is not what it takes.
    """
    machine.put(path, _switch(path, text))


def put_bpmp(machine: Machine, path: str, text: str) -> None:
    """Write to a clock of BPMP.

    Raises:
        OSError: If the file is read-only, or the text is not what it takes.
    """
    folder, _, name = path.rpartition("/")
    if name in ("mrq_rate_locked", "state"):
        machine.put(path, _switch(path, text))
    elif name == "rate":
        wanted = _natural(path, text)
        listed = folder != _EMC or wanted in memory_levels(machine)
        capped = folder == _EMC and wanted > memory_cap(machine)
        if listed and not capped and machine.read(f"{folder}/mrq_rate_locked") == "1":
            machine.put(path, wanted)
    else:
        raise refusal(errno.EACCES, path)


def put_override(machine: Machine, path: str, text: str) -> None:
    """Write to the override of a Jetson Nano or TX1.

    Raises:
        OSError: If the file is read-only, or the text is not what it takes.
    """
    name = path.rpartition("/")[2]
    if name == "clk_state":
        machine.put(path, _switch(path, text))
    elif name == "clk_update_rate":
        wanted = _natural(path, text)
        if wanted in memory_levels(machine) and wanted <= memory_cap(machine):
            machine.put(path, wanted)
    else:
        raise refusal(errno.EACCES, path)


def put_cap(machine: Machine, path: str, text: str) -> None:
    """Write to a cap as anybody may: one that lifts ``nvpmodel_clk_cap`` is ignored.

    Raises:
        OSError: If the text is no number.
    """
    wanted = _natural(path, text)
    if path == _ISO_CAP or wanted < machine.number(path):
        force_cap(machine, path, str(wanted))


def force_cap(machine: Machine, path: str, text: str) -> None:
    """Write to a cap as nvpmodel does: it can lift it."""
    levels = memory_levels(machine)
    wanted = int(text)
    if path == _ISO_CAP:
        machine.put(path, max(0, wanted))
    else:
        fitting = [level for level in levels if level <= wanted] or levels[:1]
        machine.put(path, levels[-1] if wanted <= 0 else fitting[-1])


def _switch(path: str, text: str) -> str:
    if text not in ("0", "1"):
        raise refusal(errno.EINVAL, path)
    return text


def _natural(path: str, text: str) -> int:
    if not re.fullmatch(r"\d+", text):
        raise refusal(errno.EINVAL, path)
    return int(text)


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


_CONF = "/etc/nvpmodel.conf"
_STATUS = "/var/lib/nvpmodel/status"
_HEADER = re.compile(r"< (PARAM|POWER_MODEL|PM_CONFIG) (.*) >")


@dataclass
class Modes:
    """Power modes as the file has them.

    Args:
        places: Where each argument of each parameter goes, such as ``("GPU", "MAX_FREQ")``.
        lines: For each mode, what it sets: parameter, argument and value, in order.
        names: The name of each mode.
    """

    places: dict[tuple[str, str], str] = field(default_factory=dict)
    lines: dict[int, list[tuple[str, str, str]]] = field(default_factory=dict)
    names: dict[int, str] = field(default_factory=dict)


def parsed(text: str) -> Modes:
    """Return the power modes a file describes."""
    modes = Modes()
    for kind, fields, lines in _blocks(text):
        if kind == "PARAM":
            modes.places |= {(fields["NAME"], line[0]): line[1] for line in lines}
        elif kind == "POWER_MODEL":
            modes.names[int(fields["ID"])] = fields["NAME"]
            modes.lines[int(fields["ID"])] = [(line[0], line[1], line[2]) for line in lines]
    return modes


def _blocks(text: str) -> Iterator[tuple[str, dict[str, str], list[list[str]]]]:
    block: tuple[str, dict[str, str], list[list[str]]] | None = None
    for line in text.splitlines():
        header = _HEADER.fullmatch(line)
        if header:
            if block:
                yield block
            block = (header[1], dict(each.split("=", 1) for each in header[2].split()), [])
        elif block and line.strip() and not line.startswith("#"):
            block[2].append(line.split())
    if block:
        yield block


def mode(machine: Machine) -> str:
    """Return the number of the present power mode, as text; where none is noted, that which the board starts in."""
    if not machine.has(_STATUS):
        head = re.search(r"PM_CONFIG DEFAULT=(\d+)", machine.read(machine.inside(_CONF)))
        if head is not None:
            return head[1]
    if not machine.place(_STATUS).is_file():  # a pipe would be waited for
        raise refusal(errno.EINVAL, _STATUS)
    found = re.search(r"pmode:(\d+)", machine.read(_STATUS))
    if found is None:
        raise refusal(errno.EINVAL, _STATUS)
    return str(int(found[1]))


def switch(machine: Machine, text: str, *, starting: bool = False) -> None:
    """Switch to a power mode, given by its number; ``starting`` is while the board boots.

    Raises:
        KnobRejected: If it needs a reboot because it changes which parts of the GPU have power.
        OSError: If there is no such mode.
    """
    modes = parsed(machine.read(machine.inside(_CONF)))
    number = next((each for each in modes.lines if text == str(each)), None)
    if number is None:
        raise refusal(errno.EINVAL, f"nvpmodel -m {text}")
    steps = [(_found(machine, modes, name, argument), value) for name, argument, value in modes.lines[number]]
    if not starting and any(_needs_reboot(machine, path, value) for path, value in steps):
        raise KnobRejected(f"power mode {text} takes a reboot, so it was not switched to")
    for path, value in steps:
        _set(machine, path, value)
    noted = "pmode:0"
    if machine.has(_STATUS):
        noted = machine.read(_STATUS)
    machine.place(_STATUS).touch()
    machine.put(_STATUS, re.sub(r"pmode:\d+", f"pmode:{number:04d}", noted))


def _found(machine: Machine, modes: Modes, name: str, argument: str) -> str:
    for key in (argument, f"{argument}_KNEXT"):
        place = modes.places.get((name, key))
        if place and machine.has(place):
            return place
    return modes.places[name, argument]


def _needs_reboot(machine: Machine, path: str, value: str) -> bool:
    return path.endswith("_pg_mask") and machine.read(path) != value


def _nearest(machine: Machine, path: str, value: str) -> str:
    wanted = int(value)
    if wanted > 0:
        return str(min(table(machine, path), key=lambda level: abs(level - wanted)))
    return value


def _set(machine: Machine, place: str, value: str) -> None:
    # A cluster whose cores this mode has just taken off has no clock to limit.
    if not machine.has(place):
        return
    path = machine.inside(place)
    if path.endswith("/online"):
        put_online(machine, path, value)
    elif path.endswith(("min_freq", "max_freq")):
        force_limits(machine, path, _nearest(machine, path, value))
    elif "_cap/" in path:
        force_cap(machine, path, value)
    else:
        machine.put(path, value)


# What can be written, so that a tree can be compared before and after.

DYNAMIC = (
    "cur_freq, target_freq, scaling_cur_freq and cpuinfo_cur_freq follow limits and load",
    "the rate of a BPMP clock, and that of override.emc, while nobody locks it",
    "power, current, voltage, temperature, GPU load and over-current counters",
    "affected_cpus and the lists of cores, which follow cpuN/online",
)
"""What a snapshot leaves out, and why."""

_FIXED = ("railgate_enable", "enable_3d_scaling", "tpc_pg_mask", "fbp_pg_mask", "power/control", "../power/control")


def snapshot(machine: Machine) -> dict[str, str]:
    """Return what every writable control of a tree holds, by path inside it, and the power mode as ``nvpmodel``."""
    found = {path: machine.read(path) for path in _controls(machine) if machine.has(path)}
    if machine.has("/var/lib/nvpmodel/status") or machine.has(machine.inside("/etc/nvpmodel.conf")):
        found["nvpmodel"] = mode(machine)
    return dict(sorted(found.items()))


def _controls(machine: Machine) -> list[str]:
    paths: list[str] = []
    for name in machine.names("/sys/class/devfreq"):
        folder = machine.inside(f"/sys/class/devfreq/{name}")
        paths += [f"{folder}/{each}" for each in ("governor", "max_freq", "min_freq", "polling_interval")]
        paths += [f"{folder}/nvhost_podgov/{each}" for each in machine.names(f"{folder}/nvhost_podgov")]
        device = folder.rpartition("/devfreq/")[0]
        paths += [machine.inside(f"{device}/{each}") for each in _FIXED]
    for name in machine.names(f"{_CPU}/cpufreq"):
        paths += [f"{_CPU}/cpufreq/{name}/scaling_{each}" for each in ("governor", "max_freq", "min_freq")]
    for name in machine.names(_CPU):
        if re.fullmatch(r"cpu\d+", name):
            states = machine.names(f"{_CPU}/{name}/cpuidle")
            paths += [f"{_CPU}/{name}/online", *(f"{_CPU}/{name}/cpuidle/{state}/disable" for state in states)]
    return paths + _memory_controls(machine)


def _memory_controls(machine: Machine) -> list[str]:
    paths = []
    for folder in ("/sys/kernel/nvpmodel_clk_cap", "/sys/kernel/nvpmodel_emc_cap"):
        paths += [f"{folder}/{name}" for name in machine.names(folder)]
    clk = "/sys/kernel/debug/bpmp/debug/clk"
    for name in machine.names(clk):
        locked = machine.read(f"{clk}/{name}/mrq_rate_locked")
        paths += [f"{clk}/{name}/mrq_rate_locked", f"{clk}/{name}/state"]
        paths += [f"{clk}/{name}/rate"] if locked == "1" else []
    halt = "/sys/kernel/debug/bpmp/debug/bwmgr/bwmgr_halt"
    paths += [halt] if machine.has(halt) else []
    override = "/sys/kernel/debug/clk/override.emc"
    if machine.has(override):
        held = machine.read(f"{override}/clk_state") == "1"
        paths += [f"{override}/clk_state", *([f"{override}/clk_update_rate"] if held else [])]
    return paths
