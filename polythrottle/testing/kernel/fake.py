"""The fake kernel itself: a port of controls over a planted tree."""

import contextlib
import errno
import os
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from polythrottle.actuation.drivers import controls, system
from polythrottle.domain.errors import DeviceError, KnobRejected
from polythrottle.testing.boards.tree import EVENT_TICKS, SOCTHERM
from polythrottle.testing.kernel.faults import Fault, Script, renumber, silence
from polythrottle.testing.kernel.follow import follow
from polythrottle.testing.kernel.log import Write, WriteLog
from polythrottle.testing.kernel.machine import Machine, refusal
from polythrottle.testing.kernel.memory_clock import CLK, memory_levels
from polythrottle.testing.kernel.modes import mode, switch
from polythrottle.testing.kernel.rules import obey, table

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

        What moves by itself is left out; `polythrottle.testing.kernel.fake.DYNAMIC` names it.
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
            for kind in (controls.SysFiles, system.SystemControls):
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


# What can be written, so that a tree can be compared before and after.

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
