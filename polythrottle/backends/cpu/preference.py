"""The energy-performance preference: what the processor itself weighs when it chooses its clock.

Drivers intel_pstate and amd_pstate in active mode have it (Documentation/admin-guide/pm/intel_pstate.rst and
amd-pstate.rst in Linux). Under the governor ``performance`` they take no preference but that one, with EBUSY.
"""

from functools import cached_property
from pathlib import Path

from polythrottle.actuation.actuator import Actuator
from polythrottle.actuation.controls import Control, Setting
from polythrottle.actuation.limits import Limits
from polythrottle.backends.capability import Capability, off
from polythrottle.backends.cpu.policies import KIND, REMEDY, refusal
from polythrottle.backends.tree import Tree
from polythrottle.errors import PolythrottleError

EPP = "cpu_epp"
_FILE, _TABLE = "energy_performance_preference", "energy_performance_available_preferences"
_RESET = "default"  # written, it is never read back: the driver answers with what it stands for


class Preference:
    """The energy-performance preference of all policies, as one knob; the governor is left alone.

    Args:
        tree: The machine's files.
        folders: Of the cpufreq policies.
        actuator: Knows the preference as it was before anyone tuned it.
        limits: The administrator's.
    """

    def __init__(self, tree: Tree, folders: tuple[Path, ...], actuator: Actuator, limits: Limits) -> None:
        self._tree, self._folders, self._actuator, self._limits = tree, folders, actuator, limits

    @property
    def files(self) -> tuple[Path, ...]:
        """What is read and may be written."""
        return tuple(folder / name for folder in self._folders for name in (_FILE, _TABLE))

    @property
    def _controls(self) -> list[str]:
        return [str(folder / _FILE) for folder in self._folders]

    @cached_property
    def capability(self) -> Capability:
        """The preference as a knob, or why there is none."""
        if not self._folders:
            return off([EPP], "this kernel offers no cpufreq")[0]
        if not all(Path(file).exists() for file in self._controls):
            return off([EPP], "the cpufreq driver has no energy-performance preference")[0]
        if any(self._tree.text(folder / "scaling_governor") == "performance" for folder in self._folders):
            remedy = "choose governor powersave, which heeds the preference; polythrottle leaves the governor alone"
            return off([EPP], "governor performance takes no other preference", remedy)[0]
        if reason := refusal(self._tree, map(Path, self._controls)):
            return off([EPP], reason, REMEDY)[0]
        return self._offered()

    def _offered(self) -> Capability:
        try:
            found = {self._actuator.original(file) for file in self._controls}
        except PolythrottleError as err:
            return off([EPP], f"the preference cannot be read: {err}".replace("\n", " "))[0]
        if len(found) != 1:
            return off([EPP], f"cores hold different preferences: {', '.join(sorted(found))}")[0]
        tables = [set((self._tree.text(folder / _TABLE) or "").split()) for folder in self._folders]
        default = found.pop()
        names = (set.intersection(*tables) - {_RESET}) | {default}
        levels = self._limits.within(KIND, EPP, sorted(names))
        if len(levels) < 2:
            return off([EPP], "there is no preference to choose from")[0]
        for file in self._controls:
            self._actuator.allow(Control(file, frozenset(levels)))
        return Capability(EPP, levels, default, "searched only if named")

    def settings(self, level: str) -> list[Setting]:
        """Return the writes that set a preference on every policy."""
        return [Setting(file, level) for file in self._controls]
