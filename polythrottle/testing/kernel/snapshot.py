"""What can be written, so that a tree can be compared before and after."""

import re

from polythrottle.testing.kernel.machine import Machine
from polythrottle.testing.kernel.modes import mode

DYNAMIC = (
    "cur_freq, target_freq, scaling_cur_freq and cpuinfo_cur_freq follow limits and load",
    "the rate of a BPMP clock, and that of override.emc, while nobody locks it",
    "power, current, voltage, temperature, GPU load and over-current counters",
    "affected_cpus and the lists of cores, which follow cpuN/online",
)
"""What a snapshot leaves out, and why."""

_CPU = "/sys/devices/system/cpu"
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
