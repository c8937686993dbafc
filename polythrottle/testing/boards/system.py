"""Files that say what a board is and which power modes it has."""

from typing import Any

from polythrottle.testing.boards.described import Described, cores
from polythrottle.testing.boards.layout import Layout

_TREE = "/sys/firmware/devicetree/base"
_CPU = "/sys/devices/system/cpu"


def put_system(layout: Layout, board: Described, boot_id: str) -> None:
    """Add identity, release, boot and power modes."""
    layout.put(_TREE, {"model": f"{board['model']}\0", "compatible": "\0".join(board["compatible"]) + "\0"})
    layout.put(_TREE, {"serial-number": "1420000000000\0"})
    layout.link("/proc/device-tree", _TREE)
    release, _, revision = board["l4t"].partition(".")
    text = f"# R{release} (release), REVISION: {revision}, GCID: 1, BOARD: {board['board']}, EABI: aarch64"
    layout.put("/etc", {"nv_tegra_release": f"{text}, DATE: Wed Jan  8 01:49:37 UTC 2025"})
    layout.put("/proc/sys/kernel", {"osrelease": f"{board['kernel']}.120-tegra"})
    layout.put("/proc/sys/kernel/random", {"boot_id": boot_id})
    layout.put("/proc", {"cpuinfo": "\n\n".join(f"processor\t: {cpu}\nCPU part\t: 0xd42" for cpu in cores(board))})
    layout.put("/var/lib/nvpmodel", {"status": _status(board)})
    layout.put(*_split(board["nvpmodel"]["file"], nvpmodel_conf(board)))
    layout.link("/etc/nvpmodel.conf", board["nvpmodel"]["file"])


def _split(path: str, content: str) -> tuple[str, dict[str, object]]:
    folder, _, name = path.rpartition("/")
    return folder, {name: content}


def _status(board: Described) -> str:
    mode = f"pmode:{board['nvpmodel']['default']:04d}"
    return f"{mode} fmode:quiet" if board["l4t"].startswith("32") else mode


def nvpmodel_conf(board: Described) -> str:
    """Return the file of power modes of a board, in the syntax of nvpmodel."""
    modes = board["nvpmodel"]["modes"]
    head = ["# What each parameter is and where it goes, then the modes, then the one a new board starts in.", ""]
    end = ["# mandatory section to configure the default power mode"]
    end.append(f"< PM_CONFIG DEFAULT={board['nvpmodel']['default']} >")
    return "\n".join(head + _parameters(board) + [line for mode in modes for line in _mode(board, mode)] + end)


def _parameters(board: Described) -> list[str]:
    gpu = board["gpu"]
    lines = ["< PARAM TYPE=FILE NAME=CPU_ONLINE >", *(f"CORE_{cpu} {_CPU}/cpu{cpu}/online" for cpu in cores(board)), ""]
    if "tpc_pg_mask" in gpu:
        lines += ["< PARAM TYPE=FILE NAME=TPC_POWER_GATING >", f"TPC_PG_MASK {gpu['path']}/tpc_pg_mask", ""]
    control = f"{gpu.get('pci', gpu['path'])}/power/control"
    for name, argument in (("ENABLE", "EN"), ("DISABLE", "DIS")):
        lines += [f"< PARAM TYPE=FILE NAME=GPU_POWER_CONTROL_{name} >", f"GPU_PWR_CNTL_{argument} {control}", ""]
    for index, cluster in enumerate(board["cpu"]["clusters"]):
        lines += _clock(f"{board['cpu']['core']}_{index}", f"{_CPU}/cpu{cluster[0]}/cpufreq", "scaling_")
    name = gpu["path"].rpartition("/")[2]
    lines += _clock("GPU", f"{gpu['path']}/devfreq/{name}", "")
    cap = board["emc"]["caps"][0]
    return [*lines, "< PARAM TYPE=CLOCK NAME=EMC >", f"MAX_FREQ {cap}", f"MAX_FREQ_KNEXT {cap}", ""]


def _clock(name: str, folder: str, prefix: str) -> list[str]:
    files = {
        "FREQ_TABLE": f"{prefix}available_frequencies",
        "MAX_FREQ": f"{prefix}max_freq",
        "MIN_FREQ": f"{prefix}min_freq",
    }
    lines = [f"< PARAM TYPE=CLOCK NAME={name} >"]
    lines += [f"{key}{twin} {folder}/{file}" for twin in ("", "_KNEXT") for key, file in files.items()]
    return [*lines, ""]


def _mode(board: Described, mode: dict[str, Any]) -> list[str]:
    offline = mode.get("offline", [cpu for cpu in cores(board) if cpu >= mode.get("cores", len(cores(board)))])
    lines = [f"< POWER_MODEL ID={mode['id']} NAME={mode['name']} >"]
    lines += [f"CPU_ONLINE CORE_{cpu} {0 if cpu in offline else 1}" for cpu in cores(board)]
    if "tpc_pg_mask" in board["gpu"]:
        mask = mode.get("tpc_pg_mask", board["gpu"]["tpc_pg_mask"])
        lines.append(f"TPC_POWER_GATING TPC_PG_MASK {mask}")
    lines.append("GPU_POWER_CONTROL_ENABLE GPU_PWR_CNTL_EN on")
    for index, cluster in enumerate(board["cpu"]["clusters"]):
        if set(cluster) <= set(offline):
            continue
        name = f"{board['cpu']['core']}_{index}"
        lines += [f"{name} MIN_FREQ {board['cpu']['min_khz']}", f"{name} MAX_FREQ {mode['cpu_khz']}"]
    lines += ["GPU MIN_FREQ 0", f"GPU MAX_FREQ {mode['gpu_hz']}", "GPU_POWER_CONTROL_DISABLE GPU_PWR_CNTL_DIS auto"]
    return [*lines, f"EMC MAX_FREQ {mode['emc_hz']}", ""]
