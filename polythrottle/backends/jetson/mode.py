"""The board's power mode (nvpmodel): a knob of names, and the source of the vendor's presets.

A mode is offered only if switching to it needs no reboot, that is if it differs from the present one in clocks, cores
and runtime power alone, and if none of its limits lies above those found. The present mode is read from
``/var/lib/nvpmodel/status``, for ``nvpmodel -q`` needs root, can hang under load, and says nothing in a container.

A limit that a mode states goes to the nearest level of the board's own table: 670 MHz holds 675.75 on an AGX Xavier
(iloudaros/LoudVA), 640 holds 614.4 on a Nano. Neither the status file nor nvpmodel's exit status proves that a mode
applies, so the limits are read back once it was switched to.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from polythrottle.actuation.actuator import Actuator
from polythrottle.actuation.controls import Control
from polythrottle.backends.capability import Capability, off
from polythrottle.backends.jetson.nvpmodel_file import PowerMode, PowerModes
from polythrottle.backends.tree import Tree
from polythrottle.errors import KnobRejected, PolythrottleError
from polythrottle.findings import Finding
from polythrottle.space import Level
from polythrottle.units import show_level

NAME = "power_mode"
_CONF, _STATUS = "etc/nvpmodel.conf", "var/lib/nvpmodel/status"
_CPU = ("/scaling_max_freq",)
_RANGES = {"gpu_max_hz": "the GPU", "mem_hz": "the memory", "cpu_max_hz": "the CPU"}
_EMC = ("/emc", "/emc_iso_cap")


class Mode:
    """The power mode.

    Args:
        tree: The board's files.
        actuator: Knows the mode as it was before anyone tuned it.
        gpu_folder: Devfreq folder of the GPU, by whose name its parameter is known.
    """

    def __init__(self, tree: Tree, actuator: Actuator, gpu_folder: Path | None) -> None:
        self._tree, self._actuator = tree, actuator
        self._key = f"nvpmodel:{tree.root}"
        self._conf = tree.below(_CONF)
        self._file = PowerModes.parse(tree.text(self._conf) or "")
        self._gpu = self._gpu_parameters(gpu_folder)
        self._numbers: dict[str, int] = {}
        self._tables: Mapping[str, Sequence[int]] = {}
        self._present: PowerMode | None = None
        self._limit_files = _limit_files(tree, gpu_folder)
        self.capability = off([NAME], "not looked at yet")[0]

    @property
    def files(self) -> tuple[Path, ...]:
        """What it reads."""
        return self._conf, self._tree.root / _STATUS

    @property
    def modes(self) -> tuple[PowerMode, ...]:
        """Every mode of the board."""
        return self._file.modes

    def _gpu_parameters(self, folder: Path | None) -> tuple[str, ...]:
        name = folder.name if folder is not None else "gpu"
        return self._file.parameters(f"/{name}/max_freq") or tuple(
            each for each in self._file.files if each.startswith(("GPU", "GPC"))
        )

    def limits(self, mode: PowerMode) -> Mapping[str, int]:
        """Return the limits a mode sets, by knob in SI; where clusters differ, the lowest."""
        found: dict[str, int] = {}
        for knob, parameters, argument, unit_hz in (
            ("gpu_max_hz", self._gpu, "MAX_FREQ", 1),
            ("gpu_min_hz", self._gpu, "MIN_FREQ", 1),
            ("cpu_max_hz", self._file.parameters(*_CPU), "MAX_FREQ", 1000),
            ("mem_hz", self._file.parameters(*_EMC), "MAX_FREQ", 1),
        ):
            stated = [limit for each in parameters if (limit := mode.limit(each, argument)) is not None]
            if stated:
                found[knob] = min(stated) * unit_hz
        cores = [value for (name, _), value in mode.values.items() if name.startswith("CPU_ONLINE")]
        return {**found, "cpu_cores": cores.count("1")} if cores else found

    def probe(self, tables: Mapping[str, Sequence[int]], highest: Mapping[str, Level]) -> None:
        """Find out which modes may be switched to.

        Args:
            tables: For each knob everything its driver offers, ascending, limits aside.
            highest: For each knob that works the highest level between the limits found.
        """
        self._tables = tables
        self.capability = self._probed(tables, highest)
        if self.capability.works:
            texts = frozenset(str(self._numbers[str(name)]) for name in self.capability.levels)
            self._actuator.allow(Control(self._key, texts, persistent=True))

    def _probed(self, tables: Mapping[str, Sequence[int]], highest: Mapping[str, Level]) -> Capability:
        if not self.modes:
            return off([NAME], f"{self._tree.root / _CONF} is not there or names no mode")[0]
        if not self._tree.text(self._tree.root / _STATUS):
            return off([NAME], f"{self._tree.root / _STATUS} does not say which mode is present")[0]
        try:
            number = self._actuator.original(self._key)
        except PolythrottleError as err:
            return off([NAME], f"cannot tell the present mode: {err}")[0]
        present = next((mode for mode in self.modes if str(mode.number) == number), None)
        if present is None:
            return off([NAME], f"the present mode, {number}, is not in {self._tree.root / _CONF}")[0]
        self._present = present
        bounds = {**self.reach(present, tables), **highest}
        refused = {mode.name: why for mode in self.modes if (why := self._why_not(mode, present, tables, bounds))}
        self._numbers = {mode.name: mode.number for mode in reversed(self.modes) if mode.name not in refused}
        told = ", ".join(f"{name} ({why})" for name, why in refused.items())
        if len(self._numbers) < 2:
            return off([NAME], f"no other mode can be switched to: {told}" if told else "the board has one mode")[0]
        return Capability(NAME, tuple(sorted(self._numbers)), present.name, f"not offered: {told}" if told else "")

    def _why_not(
        self, mode: PowerMode, present: PowerMode, tables: Mapping[str, Sequence[int]], bounds: Mapping[str, Level]
    ) -> str | None:
        if mode is present:
            return None
        if self._file.fixed(mode) != self._file.fixed(present):
            return "needs a reboot"
        for knob, level in self.reach(mode, tables).items():
            bound = bounds.get(knob, level)
            if knob != "gpu_min_hz" and not isinstance(bound, str) and level > bound:
                return f"would raise {knob} above what was found"
        return None

    def reach(self, mode: PowerMode, tables: Mapping[str, Sequence[int]]) -> Mapping[str, int]:
        """Return the level of each table that a mode's limit ends on: the nearest."""
        limits = self.limits(mode)
        return {knob: nearest(table, limits.get(knob, table[-1])) for knob, table in tables.items() if table}

    def range_findings(self, highest: Mapping[str, Level]) -> Iterator[Finding]:
        """Yield what the mode the board is in hides of its clocks, and the command that shows most of it.

        Args:
            highest: For each knob that works the highest level between the limits found.
        """
        present = self._present
        if present is None:
            return
        found = {knob: int(highest[knob]) for knob in _RANGES if isinstance(highest.get(knob), int)}
        each = [(mode, _above(self.reach(mode, self._tables), found)) for mode in self.modes if mode is not present]
        hidden = [(mode, levels) for mode, levels in each if levels]
        if not hidden:
            return
        widest, levels = max(hidden, key=lambda pair: [pair[1].get(knob, 0) for knob in found])
        stops = " and ".join(f"{_RANGES[knob]} stops at {show_level(knob, found[knob])}" for knob in levels)
        allows = " and ".join(show_level(knob, level) for knob, level in levels.items())
        reboot = ", reboot" if self._file.fixed(widest) != self._file.fixed(present) else ""
        explanation = f"in {present.name} {stops}; {widest.name} allows {allows}"
        yield Finding("range", True, explanation, f"sudo nvpmodel -m {widest.number}{reboot}, then tune")

    def apply(self, name: str) -> None:
        """Switch to a mode, which rewrites the limits of clocks and cores, and read the limits back.

        Raises:
            KnobRejected: If nvpmodel refuses, or says that it switched and a limit is not that of the mode.
        """
        switched = self._actuator.live(self._key) != str(self._numbers[name])
        self._actuator.write(self._key, str(self._numbers[name]))
        if switched and (problem := self._unmoved(self._named(name))) is not None:
            raise KnobRejected(f"nvpmodel says that it switched to {name}, but {problem}")

    def _named(self, name: str) -> PowerMode:
        return next(mode for mode in self.modes if mode.name == name)

    def _unmoved(self, mode: PowerMode) -> str | None:
        """Return which limit is not that of a mode, or None; one level beside the nearest is rounding."""
        reach = self.reach(mode, self._tables)
        stated = {mode.limit(each) for each in self._file.parameters(*_CPU)}
        for knob, (file, unit_hz) in self._limit_files.items():
            held, table = self._tree.number(file), self._tables[knob]
            if held is None or knob not in reach or (knob == "cpu_max_hz" and len(stated) > 1):
                continue
            place = table.index(reach[knob])
            near = table[max(0, place - 1) : place + 2]
            if not near[0] <= held * unit_hz <= near[-1]:
                return f"{file} holds {held}"
        return None

    def allows(self, name: str, levels: Mapping[str, Level]) -> bool:
        """Say whether levels of other knobs lie within what a mode allows."""
        mode = self._named(name)
        reach = {**self.limits(mode), **self.reach(mode, self._tables)}
        for knob, most in reach.items():
            level = levels.get(knob)
            if knob != "gpu_min_hz" and isinstance(level, int | float) and level > most:
                return False
        return True


def nearest(table: Sequence[int], wanted: float) -> int:
    """Return the level of a table that a limit ends on: the nearest, of two as near the lower."""
    return min(table, key=lambda level: (abs(level - wanted), level))


def _above(reach: Mapping[str, int], found: Mapping[str, int]) -> Mapping[str, int]:
    """Return the levels of a mode that lie above those found."""
    return {knob: reach[knob] for knob, level in found.items() if knob in reach and reach[knob] > level}


def _limit_files(tree: Tree, gpu_folder: Path | None) -> Mapping[str, tuple[Path, int]]:
    """Return where the limit of a knob is read back, and its unit in Hz."""
    gpu = {} if gpu_folder is None else {"gpu_max_hz": (gpu_folder / "max_freq", 1)}
    return {**gpu, "cpu_max_hz": (tree.root / "sys/devices/system/cpu/cpufreq/policy0/scaling_max_freq", 1000)}
