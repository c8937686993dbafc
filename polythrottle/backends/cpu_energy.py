"""Energy of this machine's processor: counted by RAPL, or estimated from busy time where RAPL cannot be read."""

import os
import resource
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import psutil

from polythrottle.clock import Clock
from polythrottle.errors import DeviceError
from polythrottle.measurement import EnergyKind

_MOST_W = 500.0  # above what one package draws for long; bounds how soon its counter can wrap


class EnergySource(Protocol):
    """A running total of joules and what it covers."""

    kind: EnergyKind
    boundary: str

    def total_j(self) -> float:
        """Return the joules since this source was made; never falls."""

    def start(self) -> None:
        """Begin whatever the total needs between two readings."""

    def stop(self) -> None:
        """End it."""


@dataclass
class _Counter:
    """One wrapping counter of microjoules."""

    name: str
    path: Path
    range_uj: int
    last_uj: int
    total_uj: int = 0

    def update(self) -> None:
        now_uj = int(self.path.read_text())
        grown_uj = now_uj - self.last_uj
        self.total_uj += grown_uj if grown_uj >= 0 else grown_uj + self.range_uj
        self.last_uj = now_uj


class Rapl:
    """The processor packages' own energy counters.

    Args:
        zones: powercap folders of packages, such as ``/sys/class/powercap/intel-rapl:0``.

    Raises:
        OSError: If one is not readable.
        ValueError: If one holds no number.
    """

    kind = EnergyKind.MEASURED

    def __init__(self, zones: Sequence[Path]) -> None:
        self._counters = [_counter(zone) for zone in zones]
        names = ", ".join(counter.name for counter in self._counters)
        self.boundary = f"RAPL {names}: processor packages of the whole machine, memory modules and board excluded"
        self._guard = threading.Lock()
        self._ended = threading.Event()
        self._sampler: threading.Thread | None = None

    @property
    def period_s(self) -> float:
        """How often the counters are read at least, in seconds: several times within the shortest wrap."""
        shortest_s = min(counter.range_uj for counter in self._counters) * 1e-6 / _MOST_W
        return min(60.0, max(0.1, shortest_s / 4))

    def total_j(self) -> float:
        """Return the joules of all packages since this source was made.

        Raises:
            DeviceError: If a counter has become unreadable.
        """
        try:
            with self._guard:
                for counter in self._counters:
                    counter.update()
                return sum(counter.total_uj for counter in self._counters) * 1e-6
        except (OSError, ValueError) as err:
            raise DeviceError(f"the RAPL energy counter can no longer be read: {err}") from err

    def start(self) -> None:
        """Read the counters in the background from now on, so that no wrap is missed."""
        self._ended.clear()
        self._sampler = threading.Thread(target=self._sample, name="polythrottle-rapl", daemon=True)
        self._sampler.start()

    def stop(self) -> None:
        """Stop reading in the background."""
        self._ended.set()
        if self._sampler is not None:
            self._sampler.join()
            self._sampler = None

    def _sample(self) -> None:
        while not self._ended.wait(self.period_s):
            try:
                self.total_j()
            except DeviceError:
                return  # the next reading meets the same error where somebody can act on it


def _counter(zone: Path) -> _Counter:
    name = (zone / "name").read_text().strip()
    range_uj = int((zone / "max_energy_range_uj").read_text())
    return _Counter(name, zone / "energy_uj", range_uj, int((zone / "energy_uj").read_text()))


class BusyTime:
    """An estimate: busy processor seconds of this process and its children, times a stated power per busy core.

    Args:
        watts_per_core: Power of one busy core in watts.
        idle_w: Power drawn all the time, in watts.
        clock: The clock idle power goes by.
        assumed: Whether nobody stated ``watts_per_core``.
        remark: Why it is an estimate.
    """

    kind = EnergyKind.ESTIMATED

    def __init__(self, watts_per_core: float, idle_w: float, clock: Clock, *, assumed: bool, remark: str) -> None:
        self._watts_per_core, self._idle_w, self._clock = watts_per_core, idle_w, clock
        self._start_s = clock.now()
        self._start_busy_s = self._busy_s = busy_s()
        stated = "assumed" if assumed else "as stated"
        idle = f"plus {idle_w:g} W at all times" if idle_w else "idle excluded"
        self.boundary = (
            f"estimated: busy CPU time of this process and its children × {watts_per_core:g} W per core ({stated}), "
            f"{idle}; {remark}"
        )

    def total_j(self) -> float:
        """Return the estimated joules since this source was made."""
        # A child that leaves without being waited for takes its time along; a total must not fall for it.
        self._busy_s = max(self._busy_s, busy_s())
        idle_j = self._idle_w * (self._clock.now() - self._start_s)
        return (self._busy_s - self._start_busy_s) * self._watts_per_core + idle_j

    def start(self) -> None:
        """Do nothing: the kernel keeps the time."""

    def stop(self) -> None:
        """Do nothing."""


def busy_s() -> float:
    """Return the processor seconds of this process, all its threads, and its children, living and finished."""
    finished = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + finished.ru_utime + finished.ru_stime + _living_children_s()


def _living_children_s() -> float:
    try:
        # Cheap way to learn that there are none, which is the rule; looking through /proc costs milliseconds.
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return 0.0
    total_s = 0.0
    for child in psutil.Process().children(recursive=True):
        try:
            times = child.cpu_times()
        except psutil.Error:
            continue
        total_s += times.user + times.system + times.children_user + times.children_system
    return total_s


def energy_source(
    root: Path, watts_per_core: float | None, idle_w: float, default_w: float, clock: Clock
) -> EnergySource:
    """Return RAPL where every package can be read and nobody stated another figure, else the estimate.

    Args:
        root: Where ``sys`` hangs.
        watts_per_core: Power of a busy core if stated, in watts; asks for the estimate.
        idle_w: Power drawn at all times, in watts, for the estimate.
        default_w: Power of a busy core to assume if none is stated, in watts.
        clock: The device's clock.
    """
    zones = sorted(zone for zone in (root / "sys/class/powercap").glob("intel-rapl:*") if zone.name.count(":") == 1)
    remark = "no RAPL here" if watts_per_core is None else "RAPL not asked"
    if watts_per_core is None:
        try:
            packages = [zone for zone in zones if (zone / "name").read_text().startswith("package")]
            if packages:
                return Rapl(packages)
        except (OSError, ValueError) as err:
            reason = err.strerror if isinstance(err, OSError) else err
            remark = f"RAPL is there but not readable ({reason}; needs root or CAP_DAC_READ_SEARCH)"
    watts = default_w if watts_per_core is None else watts_per_core
    return BusyTime(watts, idle_w, clock, assumed=watts_per_core is None, remark=remark)
