"""The memory clock: rate locks of BPMP, the override of older boards, and caps.

BPMP drops a rate outside its table, or above the cap, without an error; the rate only moves while it is locked, and
unlocking gives it back to the governor. Where there is ``bwmgr_halt``, the bandwidth manager moves even a locked rate
unless it is halted (public sweeps on Thor and recipes for Orin Nano write it beside the lock). A cap of
``nvpmodel_clk_cap`` can be lowered, and raising it does nothing (github.com/tiiuae/ghaf pull request 2071 on AGX
Orin; nvpmodel's own switch lifts it). ``emc_iso_cap`` holds whatever number was written last, 0 for none (the driver
nvpmodel_emc_cap.c).
"""

import errno
import re

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
