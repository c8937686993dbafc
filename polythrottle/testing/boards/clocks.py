"""Files of the clocks of a board: GPU, CPU clusters, memory, and clocks nobody should mistake for them."""

from collections.abc import Sequence

from polythrottle.testing.boards.described import (
    Described,
    catalogued,
    cores,
    cpu_levels_khz,
    gpu_levels_hz,
    memory_levels_hz,
)
from polythrottle.testing.boards.layout import Layout

_CLK = "/sys/kernel/debug/bpmp/debug/clk"
_CPU = "/sys/devices/system/cpu"
_DECOY_HZ = (115_200_000, 300_800_000, 601_600_000)
_GPU_GOVERNORS = "nvhost_podgov wmark_active wmark_simple userspace performance simple_ondemand"
_CPU_GOVERNORS = "interactive conservative ondemand userspace powersave performance schedutil"


def put_clocks(layout: Layout, board: Described) -> None:
    """Add everything that has a clock, at the state nobody has limited."""
    _put_gpu(layout, board)
    for decoy in board["gpu"]["decoys"]:
        _put_devfreq(layout, f"/sys/devices/platform/13e40000.host1x/{decoy}", _DECOY_HZ, "wmark_active")
    for cluster in board["cpu"]["clusters"]:
        _put_policy(layout, board, cluster)
    for cpu in cores(board):
        _put_core(layout, board, cpu)
    _put_memory(layout, board)


def _put_devfreq(layout: Layout, device: str, levels: Sequence[int], governor: str) -> str:
    name = device.rpartition("/")[2]
    folder = f"{device}/devfreq/{name}"
    layout.put(
        folder,
        {
            "available_frequencies": " ".join(map(str, levels)),
            "available_governors": _GPU_GOVERNORS,
            "cur_freq": levels[-1],
            "governor": governor,
            "max_freq": levels[-1],
            "min_freq": levels[0],
            "name": name,
            "target_freq": levels[-1],
        },
    )
    layout.link(f"/sys/class/devfreq/{name}", folder)
    layout.link(f"{folder}/device", device)
    return folder


def _put_gpu(layout: Layout, board: Described) -> None:
    gpu = board["gpu"]
    path, levels = gpu["path"], gpu_levels_hz(board)
    folder = _put_devfreq(layout, path, levels, "nvhost_podgov")
    for second in gpu.get("seconds", ()):
        _put_devfreq(layout, f"{path.rpartition('/')[0]}/{second}", levels, "nvhost_podgov")
    awake = gpu.get("pci", path)
    layout.put(f"{awake}/power", {"control": "auto", "runtime_status": "active", "autosuspend_delay_ms": 500})
    masks = {name: gpu[name] for name in ("tpc_pg_mask", "fbp_pg_mask") if name in gpu}
    switches = {"railgate_enable": gpu.get("railgate", True), "enable_3d_scaling": gpu.get("scaling_switch", True)}
    layout.put(path, {**masks, **{name: 1 for name, there in switches.items() if there}})
    if gpu.get("busy", True):
        layout.put(path, {"load": 1000})
    if "node" in gpu:
        layout.put(f"{path}/of_node", {"name": f"{gpu['node']}\0"})
    if gpu.get("devfreq_dev"):
        layout.link(f"{path}/devfreq_dev", folder)
    for link in gpu.get("links", ()):
        layout.link(link, path)
    for clock in gpu.get("clocks", ()):
        _put_bpmp(layout, clock, levels)


def _put_bpmp(layout: Layout, clock: str, levels: Sequence[int], state: int = 1) -> None:
    files: dict[str, object] = {
        "min_rate": levels[0],
        "max_rate": levels[-1],
        "rate": levels[-1],
        "mrq_rate_locked": 0,
        "state": state,
    }
    layout.put(f"{_CLK}/{clock}", files)


def _put_policy(layout: Layout, board: Described, cluster: Sequence[int]) -> None:
    levels, cpus = cpu_levels_khz(board), " ".join(map(str, cluster))
    files: dict[str, object] = {
        "affected_cpus": cpus,
        "related_cpus": cpus,
        "cpuinfo_min_freq": levels[0],
        "cpuinfo_max_freq": levels[-1],
        "cpuinfo_cur_freq": levels[-1],
        "scaling_available_frequencies": " ".join(map(str, levels)),
        "scaling_available_governors": _CPU_GOVERNORS,
        "scaling_cur_freq": levels[-1],
        "scaling_driver": "tegra_cpufreq" if board["kernel"] == "4.9" else "tegra194",
        "scaling_governor": "schedutil",
        "scaling_max_freq": levels[-1],
        "scaling_min_freq": max(levels[0], board["cpu"]["min_khz"]),
    }
    layout.put(f"{_CPU}/cpufreq/policy{cluster[0]}", files)


def _put_core(layout: Layout, board: Described, cpu: int) -> None:
    cluster = next(each for each in board["cpu"]["clusters"] if cpu in each)
    last = sum(map(len, board["cpu"]["clusters"])) - 1
    layout.put(_CPU, {"online": f"0-{last}", "offline": "", "possible": f"0-{last}", "present": f"0-{last}"})
    layout.put(f"{_CPU}/cpu{cpu}", {"online": 1})
    for index, state in enumerate(("WFI", "c7")):
        layout.put(f"{_CPU}/cpu{cpu}/cpuidle/state{index}", {"name": state, "disable": 0})
    layout.link(f"{_CPU}/cpu{cpu}/cpufreq", f"{_CPU}/cpufreq/policy{cluster[0]}")


def _put_rates(layout: Layout, name: str, levels: Sequence[int]) -> None:
    """Add the list of memory rates: one line in kHz that ends in its unit, or a voltage table with a rate a line.

    Sources: kcirtapfromspace/gemma4, apps/llama-server/POWER_MODE.md, has path and text of the list on an Orin NX;
    softsys4ai/FlexiBO, config.yaml, the same path on a TX2. A public sweep on Thor reads the second word of each line
    of clk/emc/dvfs as Hz; what else those lines hold is assumed.
    """
    if name == "possible_rates":
        text = f"{' '.join(str(level // 1000) for level in levels)} (kHz)"
        layout.put("/sys/kernel/debug/bpmp/debug/emc", {name: text})
        return
    lines = [f"vdd_core {level} {600_000 + 25_000 * index}" for index, level in enumerate(levels)]
    layout.put(f"{_CLK}/emc", {name: "\n".join(lines)})


def _put_memory(layout: Layout, board: Described) -> None:
    emc, levels = board["emc"], memory_levels_hz(board)
    if emc["lock"] == "bpmp":
        _put_bpmp(layout, "emc", levels, emc.get("state", 1))
        _put_bpmp(layout, "vic", _DECOY_HZ)
        _put_rates(layout, emc.get("list", "possible_rates"), levels)
        if "halt" in emc:
            layout.put("/sys/kernel/debug/bpmp/debug/bwmgr", {"bwmgr_halt": emc["halt"]})
    else:
        table = {"clk_possible_rates": " ".join(str(level // 1000) for level in levels)}
        layout.put("/sys/kernel/debug/clk/emc", {**table, "clk_rate": levels[-1]})
        switch = {"clk_state": 0, "clk_rate": levels[-1], "clk_update_rate": levels[-1]}
        layout.put("/sys/kernel/debug/clk/override.emc", switch)
    for cap in emc["caps"]:
        folder, _, name = cap.rpartition("/")
        layout.put(folder, {name: 0 if name == "emc_iso_cap" else levels[-1]})
    folder, _, name = emc["activity"].rpartition("/")
    layout.put(folder, {name: round(0.4 * levels[-1] / 1000)})
    if "bwmgr" in emc:
        _put_devfreq(layout, emc["bwmgr"], levels, "userspace")
    memory_kb = round(catalogued(board).memory_bytes / 1024 * 0.97)
    layout.put("/proc", {"meminfo": f"MemTotal:       {memory_kb} kB\nMemFree:        {memory_kb // 2} kB"})
