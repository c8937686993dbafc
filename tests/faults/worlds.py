"""Boards a session can be run on, and what is compared before and after it."""

import os
import re
import shutil
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path

from polythrottle.actuation import Controls, SystemControls
from polythrottle.backends.jetson import JetsonDevice
from polythrottle.backends.nvml import NvmlDevice, NvmlGroup
from polythrottle.backends.nvml.knobs import OFFSET_KNOBS
from polythrottle.domain.ports import Device
from polythrottle.domain.space import OperatingPoint
from polythrottle.testing import FakeKernel, plant, reboot
from polythrottle.testing.nvml import FakeNvml

MOST_GPUS = 8  # that the stand-in driver shows


class World(ABC):
    """A board that can be broken.

    Args:
        name: Of the board.
        folder: Everything of it lies below, the state folder too.
    """

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder = name, folder
        self.state = folder / "state"

    @abstractmethod
    def fresh(self) -> None:
        """Make the board as it is when nobody has touched it."""

    @abstractmethod
    def controls(self) -> Controls:
        """Return the way to its controls."""

    @abstractmethod
    def open(self, controls: Controls) -> Device:
        """Return the device, reached through controls."""

    @abstractmethod
    def held(self) -> Mapping[str, str]:
        """Return what every control holds, by the name that reports use."""

    @abstractmethod
    def reboot(self) -> None:
        """Start the board again, as after a power cut."""

    @abstractmethod
    def another(self, key: str) -> str:
        """Return a value that nobody here writes to a control, but that it takes."""

    @abstractmethod
    def write_foreign(self, key: str, text: str) -> None:
        """Write as somebody else."""

    @abstractmethod
    def renumber(self) -> None:
        """Let what has a number have another."""

    def points(self, device: Device) -> list[OperatingPoint]:
        """Return what a session applies: the first point, a power mode if there is one, the last point."""
        presets = list(device.presets.values())[-1:]
        return [device.space[0], *presets, device.space[len(device.space) - 1]]


class JetsonWorld(World):
    """A planted tree behind the fake kernel."""

    def __init__(self, name: str, folder: Path) -> None:
        super().__init__(name, folder)
        self.root = folder / "board"
        self._kept = folder / "kept"
        plant(name, self._kept)
        self._laid: Mapping[str, str] = {}
        self._names: list[str] = []
        self._moved = False

    def _folders(self) -> list[str]:
        return sorted(os.listdir(self.root / "sys/class/hwmon"))

    def fresh(self) -> None:
        """Lay the tree anew, unless it is as it was laid."""
        if self._laid and self.held() == self._laid and self._folders() == self._names and not self._moved:
            shutil.rmtree(self.state, ignore_errors=True)
            return
        for path in (self.root, self.root.with_name("board.kernel"), self.state):
            shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(self._kept, self.root, symlinks=True)
        shutil.copytree(self._kept.with_name("kept.kernel"), self.root.with_name("board.kernel"))
        self._laid, self._names, self._moved = self.held(), self._folders(), False

    def controls(self) -> Controls:
        """Return the fake kernel."""
        return FakeKernel(self.root)

    def open(self, controls: Controls) -> Device:
        """Return the board."""
        return JetsonDevice(root=str(self.root), controls=controls)

    def held(self) -> Mapping[str, str]:
        """Return every writable control."""
        found = FakeKernel(self.root).snapshot()
        return {
            f"nvpmodel:{self.root}" if path == "nvpmodel" else f"{self.root}{path}": text
            for path, text in found.items()
        }

    def reboot(self) -> None:
        """Start the tree again."""
        self._moved = True
        reboot(self.root, shift=1)

    def another(self, key: str) -> str:
        """Return an entry from the middle of a frequency table, another mode, or the other of 0 and 1."""
        if key.startswith("nvpmodel:"):
            return "0" if self.held()[key] != "0" else "1"
        now = Path(key).read_text().strip()
        for name in ("available_frequencies", "scaling_available_frequencies"):
            if (Path(key).parent / name).exists():
                levels = sorted((Path(key).parent / name).read_text().split(), key=int)
                return next(level for level in levels[len(levels) // 2 :] if level != now)
        return "1" if now == "0" else "0"

    def write_foreign(self, key: str, text: str) -> None:
        """Write through the kernel."""
        FakeKernel(self.root).write(key, text)

    def renumber(self) -> None:
        """Give the first hwmon folder another number."""
        folder = sorted((self.root / "sys/class/hwmon").iterdir())[0].name
        FakeKernel(self.root).renumber(f"/sys/class/hwmon/{folder}", "hwmon77")


class NvmlWorld(World):
    """A GPU of the stand-in library, with a second one beside it."""

    def __init__(self, name: str, folder: Path) -> None:
        super().__init__(name, folder)
        self._stand_in = self._made()

    def _made(self) -> FakeNvml:
        return FakeNvml(self.folder / "nvml", [self.name, self.name]).__enter__()

    def fresh(self) -> None:
        """Start driver and state anew."""
        shutil.rmtree(self.state, ignore_errors=True)
        self._stand_in.__exit__(None, None, None)
        self._stand_in = self._made()

    def controls(self) -> Controls:
        """Return the real controls: they meet the stand-in."""
        return SystemControls()

    def open(self, controls: Controls) -> Device:
        """Return the GPU, on the stand-in's time."""
        return NvmlDevice(self._stand_in.uuid(0), controls=controls, clock=self._stand_in.clock())

    def held(self) -> Mapping[str, str]:
        """Return locks, limit and profiles of both GPUs, under the keys of their controls."""
        return {
            f"nvml:{uuid}/{what}": " ".join(str(numbers[name]) for name in names)
            for uuid, numbers in self._stand_in.snapshot().items()
            for what, names in _NUMBERS.items()
        }

    def reboot(self) -> None:
        """Load the driver again."""
        self._stand_in.reload_driver()

    def points(self, device: Device) -> list[OperatingPoint]:
        """Return the first point, the lowest of the clock offsets where there are some, and the last point."""
        first, *others = super().points(device)
        offers = {each.knob.name: each.knob.levels[0] for each in device.offers()}  # type: ignore[attr-defined]
        lowest = {name: level for name, level in offers.items() if name in OFFSET_KNOBS}
        return [first, *([device.space.default.moved(lowest)] if lowest else []), *others]

    def another(self, key: str) -> str:
        """Return a limit, an offset or a lock that nobody here writes."""
        if key.endswith("_offset_mhz"):
            return "-33"
        return "211000" if key.endswith("power_limit_mw") else "300,600"

    def write_foreign(self, key: str, text: str) -> None:
        """Write what can be read back past our side of the driver; nobody can tell whose lock it is."""
        what = key.rpartition("/")[2]
        if what in ("power_limit_mw", "gpu_offset_mhz", "mem_offset_mhz"):
            slot = next(slot for slot in range(len(self._stand_in.models)) if self._stand_in.uuid(slot) in key)
            self._stand_in.foreign(slot, **{what: int(text)})

    def renumber(self) -> None:
        """Swap the two GPUs' indexes."""
        self._stand_in.reorder([1, 0])


class GroupWorld(NvmlWorld):
    """Several GPUs of the stand-in library as one: ``4xh100`` with a fifth beside them, ``8xh100-sxm`` all of them."""

    def _made(self) -> FakeNvml:
        count, _, model = self.name.partition("x")
        self.count = int(count)
        self.slots = min(self.count + 1, MOST_GPUS)
        return FakeNvml(self.folder / "nvml", [model] * self.slots).__enter__()

    def open(self, controls: Controls) -> Device:
        """Return the group, on the stand-in's time."""
        clock = self._stand_in.clock()
        gpus = [self._stand_in.uuid(slot) for slot in range(self.count)]
        return NvmlGroup([NvmlDevice(uuid, controls=controls, clock=clock) for uuid in gpus])

    def renumber(self) -> None:
        """Turn the GPUs' indexes round."""
        self._stand_in.reorder([*reversed(range(self.slots))])


_NUMBERS = {
    "gpu_clocks": ("gpu_lock_min_mhz", "gpu_lock_max_mhz"),
    "mem_clocks": ("memory_lock_min_mhz", "memory_lock_max_mhz"),
    "power_limit_mw": ("power_limit_mw",),
    "power_profiles": ("requested_profiles",),
    "gpu_offset_mhz": ("gpu_offset_mhz",),
    "mem_offset_mhz": ("mem_offset_mhz",),
}


def made(name: str, folder: Path) -> World:
    """Return the world of a board, its state folder named in the environment."""
    folder.mkdir(parents=True, exist_ok=True)
    os.environ["POLYTHROTTLE_STATE_DIR"] = str(folder / "state")
    kind = GroupWorld if re.match(r"\d+x", name) else NvmlWorld
    return JetsonWorld(name, folder) if name.startswith("jetson") else kind(name, folder)
