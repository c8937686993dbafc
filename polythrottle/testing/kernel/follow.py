"""What follows from limits, locks and load: clocks, power rails, temperatures. Simulated, with the catalogue's figures.

Power of a part is its dynamic power at the top clock × (clock / top clock) × (voltage / top voltage)² × load, with the
voltage curve of the catalogue: flat up to a knee, then linear. Every value changes at once and has no noise.
"""

import contextlib
from collections.abc import Mapping
from typing import Any

from polythrottle.catalog.boards import Simulation, Voltage
from polythrottle.testing.boards.tree import catalogued, described, gpu_levels_hz, memory_levels_hz
from polythrottle.testing.kernel.machine import Machine
from polythrottle.testing.kernel.memory_clock import CLK, govern_memory, memory_rate
from polythrottle.testing.kernel.rules import online_cores

_DEVFREQ = "/sys/class/devfreq"
_POLICIES = "/sys/devices/system/cpu/cpufreq"
_STEADY = ("PMIC-Die",)


def follow(machine: Machine) -> None:
    """Bring every file that follows from others up to date."""
    # What a fault has taken away can neither follow nor be followed; the rest still does.
    gone = contextlib.suppress(FileNotFoundError, NotADirectoryError)
    for name in machine.names(_DEVFREQ):
        with gone:
            _follow_limits(machine, f"{_DEVFREQ}/{name}/", "cur_freq", "target_freq")
    for name in machine.names(_POLICIES):
        with gone:
            _follow_limits(machine, f"{_POLICIES}/{name}/scaling_", "scaling_cur_freq", "cpuinfo_cur_freq")
    with gone:
        govern_memory(machine)
    if machine.memory.board is not None:
        with gone:
            _follow_gpu(machine, described(machine.memory.board))
        with gone:
            _follow_power(machine, described(machine.memory.board))


def _follow_limits(machine: Machine, prefix: str, *clocks: str) -> None:
    chosen = machine.read(f"{prefix}governor")
    busy = machine.memory.load >= 0.5
    side = "min"
    if chosen == "performance" or (busy and chosen != "powersave"):
        side = "max"
    clock = machine.number(f"{prefix}{side}_freq")
    for name in clocks:
        slower = 0.0
        if name == "cpuinfo_cur_freq":
            slower = machine.memory.held_back
        machine.put(f"{prefix.rpartition('/')[0]}/{name}", round(clock * (1 - slower)))


def gpu_clock(machine: Machine, board: Mapping[str, Any]) -> int:
    """Return the GPU clock in Hz."""
    return machine.number(f"{_DEVFREQ}/{_gpu_name(machine, board)}/cur_freq")


def _gpu_name(machine: Machine, board: Mapping[str, Any]) -> str:
    return machine.names(f"{board['gpu']['path']}/devfreq")[0]


def _follow_gpu(machine: Machine, board: Mapping[str, Any]) -> None:
    path = board["gpu"]["path"]
    if machine.has(f"{path}/load"):
        machine.put(f"{path}/load", round(1000 * machine.memory.load))
    for clock in board["gpu"].get("clocks", ()):
        if machine.read(f"{CLK}/{clock}/mrq_rate_locked") == "0":
            machine.put(f"{CLK}/{clock}/rate", gpu_clock(machine, board))


def watts(machine: Machine, board: Mapping[str, Any]) -> dict[str, float]:
    """Return the simulated power of each part: ``gpu``, ``cpu``, ``mem`` and ``soc``."""
    figures = catalogued(board).simulation
    assert figures is not None
    load = machine.memory.load
    gpu = gpu_clock(machine, board) / gpu_levels_hz(board)[-1]
    mem = memory_rate(machine) / memory_levels_hz(board)[-1]
    share = figures.gpu.idle + (1 - figures.gpu.idle) * load
    return {
        "gpu": figures.gpu.power_w * share * gpu * _squared_voltage(figures.gpu.voltage, gpu),
        "mem": figures.memory.power_w * mem**figures.memory.exponent * (0.4 + 0.6 * load),
        "cpu": _cpu_watts(machine, figures, load),
        "soc": figures.thermal.static_w,
    }


def _cpu_watts(machine: Machine, figures: Simulation, load: float) -> float:
    online = set(online_cores(machine))
    total = 0.0
    for name in machine.names(_POLICIES):
        cores = online & set(machine.numbers(f"{_POLICIES}/{name}/related_cpus"))
        clock = machine.number(f"{_POLICIES}/{name}/scaling_cur_freq") * 1000 / figures.cpu.clock_hz
        total += len(cores) * clock * _squared_voltage(figures.cpu.voltage, clock)
    return figures.cpu.core_w * total * (0.05 + 0.2 * load)


def _squared_voltage(curve: Voltage, clock: float) -> float:
    rise = max(0.0, (clock - curve.knee) / (1 - curve.knee))
    return float(((1 + (curve.swing - 1) * rise) / curve.swing) ** 2)


def _follow_power(machine: Machine, board: Mapping[str, Any]) -> None:
    parts = watts(machine, board)
    for chip in board["chips"]:
        for index, channel in enumerate(chip["channels"]):
            power_w = sum(parts[part] for part in channel["parts"]) + channel.get("extra_w", 0.0)
            _put_channel(machine, chip, index, channel["volt"], power_w)
    _follow_heat(machine, board, sum(parts.values()))


def _put_channel(machine: Machine, chip: Mapping[str, Any], index: int, volt: float, power_w: float) -> None:
    millivolt = round(volt * 1000)
    milliamp = round(1000 * power_w / (volt or 1.0))
    if chip["kind"] == "iio":
        folder = f"{chip['path']}/iio:device{chip['number']}"
        machine.put(f"{folder}/in_voltage{index}_input", millivolt)
        machine.put(f"{folder}/in_current{index}_input", milliamp)
        machine.put(f"{folder}/in_power{index}_input", round(1000 * power_w))
        return
    for name in machine.names(f"{chip['path']}/hwmon"):
        folder = f"{chip['path']}/hwmon/{name}"
        machine.put(f"{folder}/in{index + 1}_input", millivolt)
        machine.put(f"{folder}/curr{index + 1}_input", milliamp)
        if chip["kind"] == "ina238":
            machine.put(f"{folder}/power1_input", round(1e6 * power_w))


def _follow_heat(machine: Machine, board: Mapping[str, Any], power_w: float) -> None:
    figures = catalogued(board).simulation
    assert figures is not None
    heat = figures.thermal.ambient_c + figures.thermal.resistance_c_per_w * power_w
    for name in machine.names("/sys/class/thermal"):
        folder = f"/sys/class/thermal/{name}"
        if machine.read(f"{folder}/temp"):
            steady = machine.read(f"{folder}/type") in _STEADY
            machine.put(f"{folder}/temp", 50_000 if steady else round(1000 * min(heat, figures.thermal.limit_c)))
