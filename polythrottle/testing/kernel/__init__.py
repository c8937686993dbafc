"""A layer over a planted tree that behaves as the kernel does, and fails where it is told to.

`plant` lays the tree of a board, and `FakeKernel` is a port of controls over it. Clocks, power rails and temperatures
follow from limits, locks and load: simulated, with the catalogue's figures. Power of a part is its dynamic power at the
top clock × (clock / top clock) × (voltage / top voltage)² × load, with the voltage curve of the catalogue: flat up to a
knee, then linear. Every value changes at once and has no noise.
"""

import contextlib
import errno
import os
import re
import shutil
import signal
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from polythrottle.actuation.drivers import all_controls, controls
from polythrottle.catalog.boards import Simulation, Voltage
from polythrottle.domain.errors import DeviceError, KnobRejected, StorageError, UnknownName
from polythrottle.testing.boards import (
    EVENT_TICKS,
    SOCTHERM,
    Layout,
    catalogued,
    described,
    gpu_levels_hz,
    memory_levels_hz,
    put_clocks,
    put_sensors,
    put_system,
)
from polythrottle.testing.kernel.machine import (
    Fault,
    Machine,
    Memory,
    Script,
    Write,
    WriteLog,
    refusal,
    renumber,
    silence,
)
from polythrottle.testing.kernel.rules import (
    CLK,
    govern_memory,
    memory_levels,
    memory_rate,
    mode,
    obey,
    online_cores,
    snapshot,
    switch,
    table,
)

__all__ = ["FakeKernel", "Fault", "Write", "plant", "reboot"]

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


def plant(name: str, folder: Path | str, *, power_mode: int | None = None) -> Path:
    """Lay the tree of a board as it is after its first start.

    Args:
        name: One of `polythrottle.testing.BOARDS`.
        folder: Becomes ``/`` of the board; new or empty. What its kernel remembers lies in ``<folder>.kernel``.
        power_mode: Number of the nvpmodel mode it starts in; by default the one its file names.

    Returns:
        The folder.

    Raises:
        UnknownName: If there is no such board, or it has no such power mode.
        StorageError: If the folder cannot be laid, or holds something.
    """
    root = Path(folder)
    board = described(name)
    if power_mode is not None:
        chosen = power_mode
    else:
        chosen = int(board["nvpmodel"]["default"])
    if chosen not in (known := [mode["id"] for mode in board["nvpmodel"]["modes"]]):
        raise UnknownName("power mode", str(chosen), map(str, known))
    try:
        if root.exists() and any(root.iterdir()):
            raise StorageError(f"{root} is not empty; name a new folder for the tree")
        shutil.rmtree(Machine(root).beside, ignore_errors=True)  # of an earlier tree of that name
        _lay(root, name, Memory(board=name, refuses=board["kernel"].startswith("4.")), chosen)
    except (NotADirectoryError, PermissionError, FileExistsError) as err:
        raise StorageError(f"cannot lay a tree at {root}: {err.strerror}") from err
    return root


def reboot(root: Path | str, *, shift: int = 0) -> None:
    """Start a planted board again: everything written is forgotten but the power mode, and a new boot has its own id.

    Args:
        root: Of its tree.
        shift: Added to the numbers of its hwmon folders, which another boot may find in another order.

    Raises:
        StorageError: If the tree was not planted.
    """
    machine = Machine(Path(root))
    with machine.held():
        old = machine.memory
        chosen = int(mode(machine))
    if old.board is None:
        raise StorageError(f"{root} was not planted and cannot be started again")
    for each in machine.root.iterdir():
        shutil.rmtree(each)
    shutil.rmtree(machine.beside / "hidden", ignore_errors=True)
    fresh = Memory(board=old.board, refuses=old.refuses, load=old.load, shift=shift)
    fresh.boots = old.boots + 1
    fresh.writes = old.writes
    _lay(machine.root, old.board, fresh, chosen)


def _lay(root: Path, name: str, memory: Memory, chosen: int) -> None:
    board = described(name)
    layout = Layout()
    put_system(layout, board, str(uuid.uuid5(uuid.NAMESPACE_DNS, f"{name}/{memory.boots}")))
    put_clocks(layout, board)
    put_sensors(layout, board, memory.shift)
    root.mkdir(parents=True, exist_ok=True)
    layout.lay(root)
    machine = Machine(root)
    machine.beside.mkdir(exist_ok=True)
    machine.memory = memory
    switch(machine, str(chosen), starting=True)
    follow(machine)
    machine.remember()


_MODE = "nvpmodel:"
_SLEEPING = re.compile(r"/devfreq/[^/]+/[a-z]+_freq$")


class FakeKernel:
    """Reads and writes a tree as the kernel of that board would; a port of controls.

    Every instance on the same tree, in whichever process, shares its state, its faults and its log: they lie beside
    the tree, in ``<tree>.kernel``.

    Args:
        root: A tree laid by `polythrottle.testing.plant`, or a copy of a real board's.
        log: Where writes are logged; by default ``writes.log`` beside the tree.

    Raises:
        DeviceError: If there is no such folder.
    """

    def __init__(self, root: Path | str, *, log: Path | None = None) -> None:
        if not Path(root).is_dir():
            raise DeviceError(f"there is no tree at {root}; plant one first")
        self._machine = Machine(Path(root))
        self._machine.beside.mkdir(exist_ok=True)
        self._script = Script(self._machine.beside)
        self._log = WriteLog(log if log is not None else self._machine.beside / "writes.log")

    @property
    def root(self) -> Path:
        """Where ``/`` of the board is."""
        return self._machine.root

    def read(self, key: str) -> str:
        """Return what a control holds, without the newline the kernel adds.

        Args:
            key: A path below the root, or ``nvpmodel:<root>`` for the number of the power mode.

        Raises:
            OSError: As the kernel would.
        """
        with self._machine.held():
            due = self._script.due("read", key)
            self._before(due, key)
            text = self._value(key)
            self._after(due, key)
            return text

    def write(self, key: str, text: str) -> None:
        """Write to a control as the kernel would; a power mode is given by its number.

        Raises:
            OSError: As the kernel would.
            KnobRejected: If a power mode takes a reboot.
        """
        with self._machine.held():
            due = self._script.due("write", key)
            self._logged(due, key, text, "us")
            self._after(due, key)

    def _logged(self, due: list[Fault], key: str, text: str, by: str) -> None:
        self._machine.memory.writes += 1
        self._machine.remember()
        number = self._machine.memory.writes
        self._log.begin(number, key, text, self._peek(key), by)
        try:
            self._before(due, key)
            self._take(due, key, text)
        except (OSError, KnobRejected) as err:
            name = "refused"
            if isinstance(err, OSError):
                name = errno.errorcode.get(err.errno or 0, "?")
            self._log.end(number, name, self._peek(key))
            raise
        self._log.end(number, "ok", self._peek(key))

    def _take(self, due: list[Fault], key: str, text: str) -> None:
        rounding = next((fault for fault in due if fault.act == "round"), None)
        if any(fault.act == "ignore" for fault in due):
            return
        if rounding is not None:
            if rounding.value is not None:
                text = rounding.value
            else:
                text = self._below(key, text)
        self._do(key, text)

    def _do(self, key: str, text: str) -> None:
        if key.startswith(_MODE):
            switch(self._own(key), text)
        else:
            obey(self._machine, self._machine.real(key), text)
        follow(self._machine)
        self._machine.remember()

    def _value(self, key: str) -> str:
        if key.startswith(_MODE):
            return mode(self._own(key))
        path = self._machine.real(key)
        if self._is_silent(path):
            raise refusal(errno.EAGAIN, path)
        return self._machine.read(path)

    def _is_silent(self, path: str) -> bool:
        """Say whether reading a file of the board gives EAGAIN: what sleeps, and zones whose sensor is gated."""
        if _SLEEPING.search(path):
            return self._machine.memory.asleep and self._sleeps()
        if not path.endswith("/temp"):
            return False
        return not self._machine.read(path) or (self._is_gpu_zone(path) and self._sleeps())

    def _silences(self, path: str) -> bool:
        """Say whether any file that a process reads is one of this tree that gives EAGAIN now."""
        if not path.startswith(f"{self.root}/") or not (path.endswith("/temp") or _SLEEPING.search(path)):
            return False
        self._machine.recall()
        return self._is_silent(path.removeprefix(str(self.root)))

    def _own(self, key: str) -> Machine:
        if os.path.realpath(key.removeprefix(_MODE) or "/") != str(self.root):
            raise refusal(errno.ENOENT, key)
        return self._machine

    def _is_gpu_zone(self, path: str) -> bool:
        return self._machine.read(f"{path.rpartition('/')[0]}/type").lower().startswith("gpu-therm")

    def _sleeps(self) -> bool:
        if not self._machine.memory.asleep:
            return False
        for name in self._machine.names("/sys/class/devfreq"):
            device = f"/sys/class/devfreq/{name}/device"
            for place, awake in (("railgate_enable", "0"), ("power/control", "on"), ("../power/control", "on")):
                if self._machine.has(f"{device}/{place}") and self._machine.read(f"{device}/{place}") == awake:
                    return False
        return True

    def _peek(self, key: str) -> str | None:
        try:
            return self._value(key)
        except OSError:
            return None

    def _below(self, key: str, text: str) -> str:
        with contextlib.suppress(OSError, ValueError):
            path = self._machine.real(key)
            if path.startswith(CLK):
                listed = memory_levels(self._machine)
            else:
                listed = table(self._machine, path)
            return str(max((level for level in listed if level < int(text)), default=listed[0]))
        return text

    def _before(self, due: list[Fault], key: str) -> None:
        for fault in due:
            if fault.act == "die_before":
                os.kill(os.getpid(), signal.SIGKILL)
            elif fault.act == "renumber":
                renumber(self._machine, str(fault.path), str(fault.value))
            elif fault.act == "vanish":
                with contextlib.suppress(OSError):
                    self._machine.place(self._machine.real(key)).unlink(missing_ok=True)
            elif fault.act.startswith("E"):
                raise refusal(getattr(errno, fault.act), key)

    def _after(self, due: list[Fault], key: str) -> None:
        for fault in due:
            if fault.act == "foreign":
                self._logged([], self._placed(fault.path) if fault.path else key, str(fault.value), "foreign")
        if any(fault.act == "die_after" for fault in due):
            os.kill(os.getpid(), signal.SIGKILL)

    def _placed(self, path: str) -> str:
        inside = path.startswith((_MODE, f"{self.root}/"))
        if inside:
            return path
        return str(self._machine.place(path))

    def fail(self, *faults: Fault) -> None:
        """Add faults to the script of this tree; they hold for every process."""
        with self._machine.held():
            self._script.add(faults)

    def heal(self) -> None:
        """Forget every fault."""
        with self._machine.held():
            self._script.clear()

    def writes(self) -> tuple[Write, ...]:
        """Return every write so far, in order, whichever process made it and even if it died of it."""
        return self._log.writes()

    def snapshot(self) -> dict[str, str]:
        """Return what every writable control holds, by path inside the tree, and ``nvpmodel``.

        What moves by itself is left out; `polythrottle.testing.kernel.rules.DYNAMIC` names it.
        """
        with self._machine.held():
            return snapshot(self._machine)

    def work(self, load: float) -> None:
        """Let the processors be busy for a share of time, 0 to 1; clocks, power and heat follow."""
        with self._machine.held():
            self._machine.memory.load = load
            follow(self._machine)
            self._machine.remember()

    def doze(self, *, asleep: bool = True) -> None:
        """Power the GPU down whenever nothing keeps it awake: its clocks and its thermal zone give EAGAIN then."""
        with self._machine.held():
            self._machine.memory.asleep = asleep
            self._machine.remember()

    def throttle(self, events: int = 1, number: int = 1) -> None:
        """Count over-current events, as the board does when it slows itself down.

        Args:
            events: How many.
            number: Of which kind, 1 to 3 (to 6 on Xavier); 3 is normal on Orin and Thor.

        Raises:
            DeviceError: If the board has no such counters.
        """
        with self._machine.held():
            for name in self._machine.names("/sys/class/hwmon"):
                paths = [f"/sys/class/hwmon/{name}/oc{number}_{what}_cnt" for what in ("event", "irq")]
                if any(map(self._machine.has, paths)):
                    for path in paths:
                        self._count(path, events)
                    for told, each in (("event_cnt", 1), ("event_time", EVENT_TICKS)):
                        self._count(f"{SOCTHERM}/oc{number - 1}/{told}", events * each)
                    return
        raise DeviceError(f"the board at {self.root} counts no over-current events")

    def _count(self, path: str, more: int) -> None:
        if self._machine.has(path):
            self._machine.put(path, self._machine.number(path) + more)

    def hold_back(self, share: float) -> None:
        """Let every processor run slower by a share than its governor asks, which ``cpuinfo_cur_freq`` alone tells.

        As a Thor did after an over-current event at boot (forums.developer.nvidia.com, topic 361188).
        """
        with self._machine.held():
            self._machine.memory.held_back = share
            follow(self._machine)
            self._machine.remember()

    def renumber(self, path: str, name: str) -> None:
        """Give a folder of ``/sys/class/hwmon`` or ``/sys/class/devfreq`` another name, as another boot may."""
        with self._machine.held():
            renumber(self._machine, path, name)

    def covers(self, key: str) -> bool:
        """Return whether a key is one of this tree."""
        place = os.path.realpath(key.removeprefix(_MODE) or "/")
        if key.startswith(_MODE):
            return place == str(self.root)
        return key.startswith("/") and place.startswith(f"{self.root}/")

    @contextmanager
    def installed(self) -> Iterator["FakeKernel"]:
        """Let everything in this process that reaches controls of this tree go through this kernel.

        Its files that answer EAGAIN do so to whoever reads them, by whatever call.
        """
        with contextlib.ExitStack() as stack:
            for kind in (controls.SysFiles, all_controls.SystemControls):
                read = _reader(kind.read, self)
                write = _writer(kind.write, self)
                stack.enter_context(mock.patch.multiple(kind, read=read, write=write))
            stack.enter_context(silence(FakeKernel(self.root)._silences))
            yield self


def _reader(usual: Callable[[Any, str], str], kernel: FakeKernel) -> Callable[[Any, str], str]:
    def read(port: Any, key: str) -> str:
        if kernel.covers(key):
            return kernel.read(key)
        return usual(port, key)

    return read


def _writer(usual: Callable[[Any, str, str], None], kernel: FakeKernel) -> Callable[[Any, str, str], None]:
    def write(port: Any, key: str, text: str) -> None:
        if kernel.covers(key):
            kernel.write(key, text)
        else:
            usual(port, key, text)

    return write
