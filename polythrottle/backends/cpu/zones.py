"""Where energy counters are: powercap zones, which Intel and AMD processors share, or the AMD drivers of hwmon.

A powercap zone is named after the driver, ``intel-rapl:N`` on AMD too (Linux drivers/powercap/intel_rapl_msr.c), its
parts ``intel-rapl:N:M``. ``core`` and ``uncore`` are parts of their package, ``dram`` is beside it, ``psys`` is the
whole platform with the packages in it (Linux Documentation/power/powercap/powercap.rst). ``intel-rapl-mmio`` counts the
same packages a second time.
"""

import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from polythrottle.backends.cpu.counters import Counted, Counter
from polythrottle.backends.tree import Tree

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
class Zone:
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

    def counter(self, name: str) -> Counter:
        """Return its counter, beginning now.

        Raises:
            OSError: If it is not readable.
            ValueError: If it holds no number.
        """
        return Counter.of(name, self.energy, self.folder / "max_energy_range_uj")


class Zones:
    """Every energy counter of a machine.

    Args:
        tree: The machine's files.
    """

    def __init__(self, tree: Tree) -> None:
        self._tree = tree

    @cached_property
    def all(self) -> tuple[Zone, ...]:
        """The powercap zones, those before their parts, a package that two drivers show once."""
        folders = (self._tree.root / _CLASS).glob("*-rapl:*")
        zones: dict[tuple[str, str], Zone] = {}
        for folder in sorted(each for each in folders if _ZONE.fullmatch(each.name) and self._tree.holds(each)):
            name = self._tree.text(folder / "name") or ""
            zone = Zone(folder, name)
            zones.setdefault((folder.name.partition(":")[2] if zone.inner else "", name), zone)
        return tuple(zones.values())

    @property
    def packages(self) -> tuple[Zone, ...]:
        """Processor packages."""
        return tuple(zone for zone in self.all if not zone.inner and zone.name.startswith("package"))

    @property
    def memory(self) -> tuple[Zone, ...]:
        """Memory modules, beside their packages."""
        return tuple(zone for zone in self.all if zone.inner and zone.name == "dram")

    @property
    def platform(self) -> Zone | None:
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
        links = [each for each in folder.glob("*-rapl*") if each.is_symlink()] if folder.is_dir() else []
        return bool(links) and not any(link.exists() for link in links)

    def counted(self) -> Counted | None:
        """Return the sum of packages and memory, or None if this machine has no counter.

        Raises:
            OSError: If there are counters that may not be read.
            ValueError: If one holds no number.
        """
        if self.packages:
            return self._of_packages()
        if self._sockets:
            sockets = [Counter.of(name, file) for name, file in self._sockets]
            names = ", ".join(name for name, _ in self._sockets)
            return Counted(
                sockets, f"{names}: processor sockets of the whole machine; memory modules and board excluded"
            )
        return None

    def _of_packages(self) -> Counted:
        packages = [zone.counter(zone.name) for zone in self.packages]
        memory, closed = [], False
        for zone in self.memory:
            try:
                memory.append(zone.counter(_memory_name(zone)))
            except (OSError, ValueError):
                closed = True
        memory = [] if closed else memory
        names = ", ".join(counter.name for counter in (*packages, *memory))
        return Counted([*packages, *memory], f"RAPL {names}: {self._coverage(bool(memory), closed)}")

    def _coverage(self, memory: bool, closed: bool) -> str:
        inside = dict.fromkeys(zone.name for zone in self.all if zone.inner and zone.name not in ("dram", ""))
        parts = f" ({', '.join(inside)} inside them)" if inside else ""
        covered = f"processor packages{parts}{' and memory modules' if memory else ''} of the whole machine"
        missing = "board" if memory else "memory modules and board"
        told = [f"{covered}, {missing} excluded"]
        told += ["dram is counted but not readable"] if closed else []
        told += ["psys holds the packages and is not added"] if self.platform else []
        return "; ".join(told)


def _memory_name(zone: Zone) -> str:
    """Return ``dram-0`` for the memory of package 0: every package calls its own ``dram``."""
    return f"dram-{zone.folder.name.split(':')[1]}"
