"""Jetson trees as data: one file per board and release of its software, and what its files look like on disk.

Clocks, sensors and power modes are laid as the description of each board says.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from polythrottle.catalog import Board, load_board
from polythrottle.domain.backports import tomllib
from polythrottle.domain.errors import UnknownName

# Descriptions of boards: what differs between them; the clock tables come from the catalogue.

_FOLDER = Path(__file__).parent
UNMETERED: tuple[str, ...] = ("jetson-nano-2gb",)
"""Names of the boards without a power sensor: they can be planted and steered, and not measured."""
BOARDS: tuple[str, ...] = tuple(sorted({path.stem for path in _FOLDER.glob("*.toml")} - {*UNMETERED}))
"""Names of every other board that can be planted."""

_CPU_FIRST_KHZ = 115_200
_PARTS = frozenset({"gpu", "cpu", "emc", "chips", "thermal", "overcurrent", "nvpmodel"})
Described = Mapping[str, Any]


@cache
def described(name: str) -> Described:
    """Return the description of a board, with the tables it takes over from another.

    Raises:
        UnknownName: If there is no such board.
    """
    if name not in (known := (*BOARDS, *UNMETERED)):
        raise UnknownName("board to plant", name, known)
    board = tomllib.loads((_FOLDER / f"{name}.toml").read_text(encoding="utf-8"))
    if "extends" in board:
        inherited = described(board["extends"])
    else:
        inherited = {}
    return {**inherited, **board}


def catalogued(board: Described) -> Board:
    """Return what the catalogue has on a board."""
    return _catalogued(board["device"])


@cache
def _catalogued(device: str) -> Board:
    return load_board(device)


def assumptions() -> Mapping[tuple[str, str], list[str]]:
    """Return what no public record shows of the boards: for each part and what is assumed of it, which boards.

    A part names its records as ``source``; what is assumed beside them it says after a semicolon.
    """
    found: dict[tuple[str, str], list[str]] = {}
    for name in (*BOARDS, *UNMETERED):
        own = tomllib.loads((_FOLDER / f"{name}.toml").read_text(encoding="utf-8"))
        for part in sorted(_PARTS & set(own)):
            for what in _assumed(own[part]):
                found.setdefault((part, what), []).append(name)
    return dict(sorted(found.items()))


def _assumed(part: Any) -> list[str]:
    tables = part if isinstance(part, list) else [part]
    texts = [str(table["source"]) for table in tables if "source" in table]
    if not texts:
        if tables:
            return ["all of it"]
        return []
    clauses = [clause.strip() for text in texts for clause in text.split(";")]
    return [clause for clause in clauses if "assumed" in clause or "made up" in clause]


def cores(board: Described) -> list[int]:
    """Return the numbers of all CPU cores of a board, ascending."""
    return sorted(cpu for cluster in board["cpu"]["clusters"] for cpu in cluster)


def gpu_levels_hz(board: Described) -> tuple[int, ...]:
    """Return the GPU clocks of a board, ascending: its own table where it has one, else the catalogue's."""
    own = board["gpu"].get("levels_mhz")
    if own:
        return tuple(round(level * 1e6) for level in own)
    return _levels(board, "gpu_max_hz")


def memory_levels_hz(board: Described) -> tuple[int, ...]:
    """Return the memory clocks of a board, ascending: its own table where it has one, else the catalogue's."""
    own = board["emc"].get("levels_mhz")
    if own:
        return tuple(round(level * 1e6) for level in own)
    return _levels(board, "mem_hz")


def cpu_levels_khz(board: Described) -> tuple[int, ...]:
    """Return the CPU clocks of a board in kHz, ascending: in even steps where it says so, else the catalogue's."""
    listed = tuple(level // 1000 for level in _levels(board, "cpu_max_hz"))
    step_khz = board["cpu"].get("step_khz")
    if step_khz is None:
        return listed
    return (*range(_CPU_FIRST_KHZ, listed[-1], step_khz), listed[-1])


def _levels(board: Described, knob: str) -> tuple[int, ...]:
    return tuple(int(level) for level in catalogued(board).knob(knob).levels)


# What a tree will hold, before it is laid on disk.


@dataclass
class Layout:
    """Files and links of a tree, by absolute path inside it.

    Args:
        files: Content of each file, without the newline every file of the kernel ends in.
        links: Target of each link, a path inside the tree too; laid as relative links, so that the tree can be moved.
    """

    files: dict[str, str] = field(default_factory=dict)
    links: dict[str, str] = field(default_factory=dict)

    def put(self, folder: str, files: Mapping[str, object]) -> None:
        """Add files below a folder."""
        self.files.update({f"{folder}/{name}": str(content) for name, content in files.items()})

    def link(self, path: str, target: str) -> None:
        """Add a link."""
        self.links[path] = target

    def lay(self, root: Path) -> None:
        """Write everything below ``root``."""
        # As texts and each folder once: a tree has hundreds of files, and as `Path` it takes twice as long.
        made: set[str] = set()
        for path, content in self.files.items():
            # Device-tree strings end in NUL, everything else in a newline; a sensor that never answers is empty.
            text = content if content.endswith("\0") or not content else f"{content}\n"
            handle = os.open(_made(root, path, made), os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
            try:
                os.write(handle, text.encode())
            finally:
                os.close(handle)
        for path, target in self.links.items():
            os.symlink(os.path.relpath(target, os.path.dirname(path)), _made(root, path, made))


def _made(root: Path, path: str, made: set[str]) -> str:
    """Return where a path of the tree is on this machine, with the folder it lies in; ``made`` are those that exist."""
    place = f"{root}{path}"
    folder = place.rpartition("/")[0]
    if folder not in made:
        os.makedirs(folder, exist_ok=True)
        made.add(folder)
    return place


# Files of the clocks of a board: GPU, CPU clusters, memory, and clocks nobody should mistake for them.

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
    path = gpu["path"]
    levels = gpu_levels_hz(board)
    folder = _put_devfreq(layout, path, levels, "nvhost_podgov")
    if "podgov" in gpu:
        layout.put(folder, {"polling_interval": gpu["polling_ms"]})
        layout.put(f"{folder}/nvhost_podgov", gpu["podgov"])
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
    levels = cpu_levels_khz(board)
    cpus = " ".join(map(str, cluster))
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
    emc = board["emc"]
    levels = memory_levels_hz(board)
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


# Files of the sensors of a board: power rails, thermal zones, over-current counters, the fan.

_FAN = "/sys/devices/platform/pwm-fan/hwmon/hwmon0"


def put_sensors(layout: Layout, board: Described, shift: int) -> None:
    """Add every sensor; ``shift`` is added to the number of each hwmon folder but the fan's, as another boot may."""
    layout.put(_FAN, {"name": "pwmfan", "pwm1": 69, "pwm1_enable": 1})
    layout.link("/sys/class/hwmon/hwmon0", _FAN)
    for chip in board["chips"]:
        _put_chip(layout, chip, shift)
    zones = board["thermal"]["zones"]
    silent = board["thermal"].get("silent", ())
    for index, zone in enumerate(zones):
        _put_zone(layout, index, zone, silent=zone in silent)
    if "overcurrent" in board:
        _put_overcurrent(layout, board["overcurrent"], shift)


def _put_chip(layout: Layout, chip: Mapping[str, Any], shift: int) -> None:
    path = chip["path"]
    kind = chip["kind"]
    address = path.rpartition("/")[2]
    # The older driver, which shows its rails through iio, is called ina3221x.
    name = {"ina238": "ina238", "iio": "ina3221x"}.get(kind, "ina3221")
    layout.put(path, {"name": name})
    layout.link(f"/sys/bus/i2c/devices/{address}", path)
    layout.link(f"/sys/bus/i2c/drivers/{name}/{address}", path)
    if kind == "iio":
        folder = f"{path}/iio:device{chip['number']}"
        layout.link(f"/sys/bus/iio/devices/iio:device{chip['number']}", folder)
    else:
        number = chip["number"] + shift
        folder = f"{path}/hwmon/hwmon{number}"
        layout.link(f"/sys/class/hwmon/hwmon{number}", folder)
    files = {"hwmon": _ina3221, "iio": _iio, "ina238": _ina238}[kind](chip["channels"])
    averaging = {key: chip[key] for key in ("samples", "update_interval") if key in chip}
    layout.put(folder, {"name": name, **files, **averaging})


def _ina3221(channels: list[dict[str, Any]]) -> dict[str, object]:
    files: dict[str, object] = {"in7_label": "sum of shunt voltages", "in7_input": 0, "curr4_crit_alarm": 0}
    for number, channel in enumerate(channels, start=1):
        files |= {
            f"in{number}_label": channel["label"],
            f"in{number}_enable": 1,
            f"in{number}_input": 0,
            f"curr{number}_input": 0,
            f"curr{number}_max": 32760,
            f"curr{number}_crit": 32760,
            f"curr{number}_max_alarm": 0,
            f"curr{number}_crit_alarm": 0,
        }
    return files


def _iio(channels: list[dict[str, Any]]) -> dict[str, object]:
    files: dict[str, object] = {}
    for number, channel in enumerate(channels):
        files |= {
            f"rail_name_{number}": channel["label"],
            f"in_voltage{number}_input": 0,
            f"in_current{number}_input": 0,
            f"in_power{number}_input": 0,
            # The driver of that time writes a unit after limits: a reader must not choke on it.
            f"warn_current_limit_{number}": "32760 ma",
            f"crit_current_limit_{number}": "32760 ma",
        }
    return files


def _ina238(channels: list[dict[str, Any]]) -> dict[str, object]:
    label = {"label": channels[0]["label"]} if channels else {}
    return {
        **label,
        "in1_input": 0,
        "curr1_input": 0,
        "power1_input": 0,
        "power1_max": 200_000_000,
        "temp1_input": 40_000,
    }


def _put_zone(layout: Layout, index: int, zone: str, *, silent: bool) -> None:
    folder = f"/sys/devices/virtual/thermal/thermal_zone{index}"
    trips = {"trip_point_0_type": "passive", "trip_point_0_temp": 99_000}
    layout.put(folder, {"type": zone, "temp": "" if silent else 45_000, "mode": "enabled", **trips})
    layout.link(f"/sys/class/thermal/thermal_zone{index}", folder)


def _put_overcurrent(layout: Layout, place: Mapping[str, Any], shift: int) -> None:
    number = place["number"] + shift
    folder = f"{place['path']}/hwmon/hwmon{number}"
    kinds, each = _OVERCURRENT[place.get("driver", "tegra234-oc-event")]
    counters = {f"oc{index}_{what}": value for index in range(1, kinds + 1) for what, value in each.items()}
    layout.put(folder, {"name": place["name"], **counters})
    layout.link(f"/sys/class/hwmon/hwmon{number}", folder)
    if place.get("event_time"):
        for index in range(3):
            layout.put(f"{SOCTHERM}/oc{index}", {"event_cnt": 0, "event_time": 0})


SOCTHERM = "/sys/kernel/debug/bpmp/debug/soctherm"
EVENT_TICKS = 33_569
"""Where the firmware of an Orin tells of events, numbered from 0, and by what the time of one grows: a public log of an
Orin Nano Super with JetPack 6.2 (27,390 events in 3,605 s, 33,569 units each)."""
_OVERCURRENT: Mapping[str, tuple[int, Mapping[str, int]]] = {
    "tegra234-oc-event": (3, {"event_cnt": 0, "throt_en": 1}),
    "tegra-oc-event": (6, {"irq_cnt": 0, "priority": 0, "cpu_throttle_ctrl": 0, "gpu_throttle_ctrl": 0}),
}
"""How many kinds of event NVIDIA's drivers count, and the files of each."""

# Files that say what a board is and which power modes it has.

_TREE = "/sys/firmware/devicetree/base"


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
    if board["l4t"].startswith("32"):
        return f"{mode} fmode:quiet"
    return mode


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
    listed = [cpu for cpu in cores(board) if cpu not in board["cpu"].get("unlisted", ())]
    lines += [f"CPU_ONLINE CORE_{cpu} {0 if cpu in offline else 1}" for cpu in listed]
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
