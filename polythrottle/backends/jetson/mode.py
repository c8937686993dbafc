"""The board's power mode (nvpmodel): a knob of names, and the source of the vendor's presets.

A mode is offered only if switching to it needs no reboot, that is if it differs from the present one in clocks, cores
and runtime power alone, and if none of its limits lies above those found. The present mode is read from
``/var/lib/nvpmodel/status``, for ``nvpmodel -q`` needs root, can hang under load, and says nothing in a container.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from polythrottle.actuation.actuator import Actuator
from polythrottle.actuation.controls import Control
from polythrottle.backends.capability import Capability, off
from polythrottle.backends.jetson.nvpmodel_file import PowerMode, PowerModes
from polythrottle.backends.tree import Tree
from polythrottle.errors import PolythrottleError
from polythrottle.space import Level

NAME = "power_mode"
_CONF, _STATUS = "etc/nvpmodel.conf", "var/lib/nvpmodel/status"
_CPU = ("/scaling_max_freq",)
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
        self._file = PowerModes.parse(tree.text(tree.root / _CONF) or "")
        self._gpu = self._gpu_parameters(gpu_folder)
        self._numbers: dict[str, int] = {}
        self.capability = off([NAME], "not looked at yet")[0]

    @property
    def files(self) -> tuple[Path, ...]:
        """What it reads."""
        return self._tree.root / _CONF, self._tree.root / _STATUS

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
        """Return the highest level of each table that a mode allows; the lowest where it allows none."""
        limits = self.limits(mode)
        return {
            knob: max((level for level in table if level <= limits.get(knob, table[-1])), default=table[0])
            for knob, table in tables.items()
            if table
        }

    def apply(self, name: str) -> None:
        """Switch to a mode; it rewrites the limits of clocks and cores."""
        self._actuator.write(self._key, str(self._numbers[name]))

    def allows(self, name: str, levels: Mapping[str, Level]) -> bool:
        """Say whether levels of other knobs lie within what a mode allows."""
        mode = next(mode for mode in self.modes if mode.name == name)
        for knob, most in self.limits(mode).items():
            level = levels.get(knob)
            if knob != "gpu_min_hz" and isinstance(level, int | float) and level > most:
                return False
        return True
