"""Joules of a processor: counted by RAPL or the AMD drivers of hwmon where they can be.

Else estimated from busy time, and why.
"""

from __future__ import annotations

import math
import os
import re
import resource
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Protocol

from polythrottle.actuation.drivers.controls import text_of
from polythrottle.backends.power import BackgroundSampler
from polythrottle.backends.probe import Tree
from polythrottle.domain.clock import Clock, SystemClock
from polythrottle.domain.errors import DeviceError
from polythrottle.domain.measurement import EnergyKind

# An estimate of the processor's energy from busy time, where nothing counts it.

_WHOSE = {False: "this process and its children", True: "every program on these processors"}


class BusyTime:
    """An estimate: busy processor seconds times a stated power per busy core.

    Those of this process and its children, or of every program on the processors that this one may use, for a model
    that somebody else serves on this machine.

    Args:
        watts_per_core: Power of one busy core in watts.
        idle_w: Power drawn all the time, in watts.
        clock: The clock idle power goes by.
        assumed: Whether nobody stated ``watts_per_core``.
        remark: Why it is an estimate.
        everyone: Whether every program counts.
    """

    kind = EnergyKind.ESTIMATED

    def __init__(
        self, watts_per_core: float, idle_w: float, clock: Clock, *, assumed: bool, remark: str, everyone: bool = False
    ) -> None:
        self._everyone = everyone
        self._watts_per_core = watts_per_core
        self._idle_w = idle_w
        self._clock = clock
        self._start_s = clock.now()
        self._start_busy_s = self._busy_s = self._seen_s()
        self._told_j = 0.0
        stated = "assumed" if assumed else "as stated"
        idle = f"plus {idle_w:g} W at all times" if idle_w else "idle excluded"
        self.boundary = (
            f"estimated: busy CPU time of {_WHOSE[everyone]} × {watts_per_core:g} W per core ({stated}), "
            f"{idle}; {remark}"
        )

    def total_j(self) -> float:
        """Return the estimated joules since this source was made."""
        # A child that leaves without being waited for takes its time along; a total must not fall for it.
        self._busy_s = max(self._busy_s, self._seen_s())
        idle_j = self._idle_w * (self._clock.now() - self._start_s)
        total_j = (self._busy_s - self._start_busy_s) * self._watts_per_core + idle_j
        # What is left out is known to the microsecond, what everyone took in steps: it is owed until the next step.
        self._told_j = max(self._told_j, total_j)
        return self._told_j

    def _seen_s(self) -> float:
        if self._everyone:
            return machine_busy_s()
        return busy_s()

    def leave_out(self, busy_s: float) -> bool:
        """Take so many of the busy seconds since the last total off the next; return that this was done."""
        self._start_busy_s += busy_s
        return True

    def start(self) -> None:
        """Do nothing: the kernel keeps the time."""

    def stop(self) -> None:
        """Do nothing."""


_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_BUSY = (1, 2, 3, 6, 7)
"""Of the lines of /proc/stat: user, nice, system, irq and softirq (proc_stat(5))."""
_PARENT = 1
_TIMES = slice(11, 15)
"""Of /proc/PID/stat after the name: the parent; user and system time, its own and of children it has waited for."""


def busy_s() -> float:
    """Return the processor seconds of this process, all its threads, and its children, living and finished."""
    finished = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + finished.ru_utime + finished.ru_stime + _living_children_s()


def machine_busy_s() -> float:
    """Return the seconds for which the processors this process may use were busy, whoever with; in steps of 10 ms."""
    mine = {f"cpu{number}" for number in os.sched_getaffinity(0)}
    lines = [line.split() for line in text_of(Path("/proc/stat")).splitlines()]
    return sum(int(words[place]) for words in lines if words[0] in mine for place in _BUSY) / _TICKS_PER_S


def _living_children_s() -> float:
    if not hasattr(os, "waitid"):  # PyPy has none
        return _descendants_s()
    try:
        # Cheap way to learn that there are none, which is the rule; looking through /proc costs milliseconds.
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return 0.0
    return _descendants_s()


def _descendants_s() -> float:
    parents: dict[int, int] = {}
    ticks: dict[int, int] = {}
    for entry in os.listdir("/proc"):
        if entry.isdecimal():
            with suppress(OSError, ValueError, IndexError):  # it has ended meanwhile
                words = text_of(Path("/proc", entry, "stat")).rpartition(")")[2].split()
                parents[int(entry)] = int(words[_PARENT])
                ticks[int(entry)] = sum(map(int, words[_TIMES]))
    mine = {os.getpid()}
    while found := {pid for pid, parent in parents.items() if parent in mine} - mine:
        mine |= found
    return sum(ticks[pid] for pid in mine - {os.getpid()}) / _TICKS_PER_S


# The processor's own energy counters (RAPL), and the thread that reads them before they wrap.

_MOST_W = 500.0  # above what one package draws for long; bounds how soon its counter can wrap


@dataclass
class RaplCounter:
    """One counter of microjoules.

    Args:
        name: Such as ``package-0`` or ``dram``.
        path: The file to read.
        range_uj: Where it starts again at 0; None if only a reload of its driver makes it do so.
        last_uj: What it said last.
        total_uj: What it has counted since it was made.
    """

    name: str
    path: Path
    range_uj: int | None
    last_uj: int
    total_uj: int = 0

    @classmethod
    def of(cls, name: str, path: Path, range_file: Path | None = None) -> RaplCounter:
        """Return the counter in a file, beginning now.

        Args:
            name: What it counts.
            path: The file to read.
            range_file: Holds where it starts again at 0.

        Raises:
            OSError: If a file is not readable.
            ValueError: If one holds no number, or the range is not above zero.
        """
        range_uj = None if range_file is None else int(text_of(range_file))
        if range_uj is not None and range_uj <= 0:
            raise ValueError(f"{range_file} says {range_uj}")
        return cls(name, path, range_uj, int(text_of(path)))

    def update(self) -> None:
        """Read it and add what it has grown by, across a wrap.

        Raises:
            OSError: If it is no longer readable.
            ValueError: If it holds no number.
            DeviceError: If it has started over and nobody knows what was lost.
        """
        now_uj = int(text_of(self.path))
        grown_uj = now_uj - self.last_uj
        self.last_uj = now_uj
        if grown_uj < 0 and self.range_uj is None:
            raise DeviceError(f"{self.path} has started over: its driver was reloaded, and what it had counted is lost")
        self.total_uj += grown_uj if grown_uj >= 0 or self.range_uj is None else grown_uj + self.range_uj


class RaplCounters:
    """The sum of some counters.

    Args:
        counters: At least one; none inside another.
        boundary: What they cover.
    """

    kind = EnergyKind.MEASURED

    def __init__(self, counters: Sequence[RaplCounter], boundary: str) -> None:
        self._counters = counters
        self.boundary = boundary
        self._guard = threading.Lock()
        self._background = BackgroundSampler(self._look, self.period_s, SystemClock(), "polythrottle-rapl")

    @property
    def period_s(self) -> float:
        """How often the counters are read at least, in seconds: several times within the shortest wrap."""
        wraps_s = [counter.range_uj * 1e-6 / _MOST_W for counter in self._counters if counter.range_uj]
        if wraps_s:
            return min(60.0, max(0.1, min(wraps_s) / 4))
        return math.inf

    def total_j(self) -> float:
        """Return the joules of all counters since this source was made.

        Raises:
            DeviceError: If a counter has become unreadable or has started over.
        """
        try:
            with self._guard:
                for counter in self._counters:
                    counter.update()
                return sum(counter.total_uj for counter in self._counters) * 1e-6
        except (OSError, ValueError) as err:
            raise DeviceError(f"the RAPL energy counter can no longer be read: {err}") from err

    def start(self) -> None:
        """Read the counters in the background, so that no wrap is missed, until `stop` was called as often."""
        if math.isfinite(self.period_s):
            self._background.start()

    def leave_out(self, busy_s: float) -> bool:
        """Do nothing and say so: counters know nothing of who was busy."""
        return False

    def stop(self) -> None:
        """Stop reading in the background, unless somebody else has started it too."""
        self._background.stop()

    def _look(self) -> None:
        self.total_j()


# Where energy counters are: powercap zones, which Intel and AMD processors share, or the AMD drivers of hwmon.
#
# A powercap zone is named after the driver, ``intel-rapl:N`` on AMD too (Linux drivers/powercap/intel_rapl_msr.c),
# its parts ``intel-rapl:N:M``. ``core`` and ``uncore`` are parts of their package, ``dram`` is beside it, ``psys`` is
# the whole platform with the packages in it (Linux Documentation/power/powercap/powercap.rst). ``intel-rapl-mmio``
# counts the same packages a second time.

_CLASS = "sys/class/powercap"
_ZONE = re.compile(r"[a-z]+-rapl:\d+(:\d+)?")
_AMD_DRIVERS = ("amd_energy", "zenergy")
PERMISSION = (
    "energy counters are root's alone since CVE-2020-8694: run as root or with CAP_DAC_READ_SEARCH, "
    "or install the udev rule and join group polythrottle"
)
MASKED = (
    "Docker masks /sys/devices/virtual/powercap: mount the host's /sys at another place and name it, cpu?root=/host"
)


@dataclass(frozen=True)
class PowercapZone:
    """One powercap zone."""

    folder: Path
    name: str

    @property
    def inner(self) -> bool:
        """Whether it is a part of another."""
        return self.folder.name.count(":") > 1

    @property
    def energy(self) -> Path:
        """Its counter, in µJ."""
        return self.folder / "energy_uj"

    def counter(self, name: str) -> RaplCounter:
        """Return its counter, beginning now.

        Raises:
            OSError: If it is not readable.
            ValueError: If it holds no number.
        """
        return RaplCounter.of(name, self.energy, self.folder / "max_energy_range_uj")


class Zones:
    """Every energy counter of a machine.

    Args:
        tree: The machine's files.
    """

    def __init__(self, tree: Tree) -> None:
        self._tree = tree

    @cached_property
    def all(self) -> tuple[PowercapZone, ...]:
        """The powercap zones, those before their parts, a package that two drivers show once."""
        folders = (self._tree.root / _CLASS).glob("*-rapl:*")
        zones: dict[tuple[str, str], PowercapZone] = {}
        for folder in sorted(each for each in folders if _ZONE.fullmatch(each.name) and self._tree.holds(each)):
            name = self._tree.text(folder / "name") or ""
            zone = PowercapZone(folder, name)
            zones.setdefault((folder.name.partition(":")[2] if zone.inner else "", name), zone)
        return tuple(zones.values())

    @property
    def packages(self) -> tuple[PowercapZone, ...]:
        """Processor packages."""
        return tuple(zone for zone in self.all if not zone.inner and zone.name.startswith("package"))

    @property
    def memory(self) -> tuple[PowercapZone, ...]:
        """Memory modules, beside their packages."""
        return tuple(zone for zone in self.all if zone.inner and zone.name == "dram")

    @property
    def platform(self) -> PowercapZone | None:
        """The whole platform, packages inside."""
        return next((zone for zone in self.all if not zone.inner and zone.name == "psys"), None)

    @property
    def _sockets(self) -> tuple[tuple[str, Path], ...]:
        """The sockets that an AMD driver of hwmon counts: name and file."""
        found = []
        for folder in self._tree.found("sys/class/hwmon/hwmon*"):
            if self._tree.text(folder / "name") in _AMD_DRIVERS:
                labels = {label: self._tree.text(label) or "" for label in sorted(folder.glob("energy*_label"))}
                sockets = {label: text for label, text in labels.items() if text.startswith("Esocket")}
                found += [(text, label.with_name(label.name[:-5] + "input")) for label, text in sockets.items()]
        return tuple(found)

    @property
    def files(self) -> tuple[Path, ...]:
        """What is read."""
        names = ("name", "energy_uj", "max_energy_range_uj")
        amd = [each for _, file in self._sockets for each in (file, file.with_name(file.name[:-5] + "label"))]
        drivers = dict.fromkeys(file.parent / "name" for file in amd)
        return (*(zone.folder / name for zone in self.all for name in names), *amd, *drivers)

    @property
    def masked(self) -> bool:
        """Whether zones are listed but lead nowhere, as in a container."""
        folder = self._tree.root / _CLASS
        if folder.is_dir():
            links = [each for each in folder.glob("*-rapl*") if each.is_symlink()]
        else:
            links = []
        return bool(links) and not any(link.exists() for link in links)

    def counted(self) -> RaplCounters | None:
        """Return the sum of packages and memory, or None if this machine has no counter.

        Raises:
            OSError: If there are counters that may not be read.
            ValueError: If one holds no number.
        """
        if self.packages:
            return self._of_packages()
        if self._sockets:
            sockets = [RaplCounter.of(name, file) for name, file in self._sockets]
            names = ", ".join(name for name, _ in self._sockets)
            return RaplCounters(
                sockets, f"{names}: processor sockets of the whole machine; memory modules and board excluded"
            )
        return None

    def _of_packages(self) -> RaplCounters:
        packages = [zone.counter(zone.name) for zone in self.packages]
        memory = []
        closed = False
        for zone in self.memory:
            try:
                memory.append(zone.counter(_memory_name(zone)))
            except (OSError, ValueError):
                closed = True
        memory = [] if closed else memory
        names = ", ".join(counter.name for counter in (*packages, *memory))
        return RaplCounters([*packages, *memory], f"RAPL {names}: {self._coverage(bool(memory), closed)}")

    def _coverage(self, memory: bool, closed: bool) -> str:
        inside = dict.fromkeys(zone.name for zone in self.all if zone.inner and zone.name not in ("dram", ""))
        parts = f" ({', '.join(inside)} inside them)" if inside else ""
        covered = f"processor packages{parts}{' and memory modules' if memory else ''} of the whole machine"
        missing = "board" if memory else "memory modules and board"
        told = [f"{covered}, {missing} excluded"]
        told += ["dram is counted but not readable"] if closed else []
        told += ["psys holds the packages and is not added"] if self.platform else []
        return "; ".join(told)


def _memory_name(zone: PowercapZone) -> str:
    """Return ``dram-0`` for the memory of package 0: every package calls its own ``dram``."""
    return f"dram-{zone.folder.name.split(':')[1]}"


# Where the joules of a processor come from: counted where they can be, else estimated, and why.

ASSUMED_WATTS_PER_CORE = 10.0


class EnergySource(Protocol):
    """A running total of joules and what it covers."""

    kind: EnergyKind
    boundary: str

    def total_j(self) -> float:
        """Return the joules since this source was made; never falls."""

    def leave_out(self, busy_s: float) -> bool:
        """Take so many busy seconds since the last total off the next; return whether that can be done."""

    def start(self) -> None:
        """Begin whatever the total needs between two readings."""

    def stop(self) -> None:
        """End it."""


def energy_source(
    zones: Zones, watts_per_core: float | None, idle_w: float, clock: Clock, everyone: bool = False
) -> EnergySource:
    """Return the counters where every package can be read and nobody stated another figure, else the estimate.

    Args:
        zones: The machine's counters.
        watts_per_core: Power of a busy core if stated, in watts; asks for the estimate.
        idle_w: Power drawn at all times, in watts, for the estimate.
        clock: The device's clock.
        everyone: Whether an estimate counts every program.
    """
    if watts_per_core is not None:
        return BusyTime(watts_per_core, idle_w, clock, assumed=False, remark="RAPL not asked", everyone=everyone)
    counted, remark, _ = probed(zones)
    return counted or BusyTime(ASSUMED_WATTS_PER_CORE, idle_w, clock, assumed=True, remark=remark, everyone=everyone)


def probed(zones: Zones) -> tuple[EnergySource | None, str, str]:
    """Return the counters, or None with the reason and what can be done about it."""
    try:
        if counted := zones.counted():
            return counted, "", ""
    except PermissionError as err:
        return None, f"RAPL is there but not readable ({err.strerror}; needs root or CAP_DAC_READ_SEARCH)", PERMISSION
    except (OSError, ValueError) as err:
        return None, f"RAPL is there but not readable ({err.strerror if isinstance(err, OSError) else err})", ""
    if zones.masked:
        return None, "RAPL is there but masked, as in a container", MASKED
    return None, "no RAPL here", ""
