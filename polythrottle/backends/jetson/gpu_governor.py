"""Parameters of the GPU's governor, nvhost_podgov, as knobs: never searched unless they are named.

Between its two limits the governor chooses the clock. How often it looks and how sharply it answers are files beside
them: on Thor it looks every 10 ms with k = 3, load_target 200, load_margin 100 (jetson_stats). A slower ramp, 50 ms
and k = 10, was seen to end over-current events there, and ``up_freq_margin`` to take a write without keeping it
(schlafly1/camera-pipe1, ``start_thor.sh``), so every write is read back. Nobody has published what range the driver
takes: levels go from half to five times what was found.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from polythrottle.actuation.actuator import Actuator
from polythrottle.actuation.drivers.controls import Control, Setting
from polythrottle.actuation.limits import Limits
from polythrottle.backends.probe import KIND, Capability, Tree, unavailable
from polythrottle.domain.errors import PolythrottleError
from polythrottle.domain.space import Level

PLACES: Mapping[str, str] = {
    "podgov_poll_s": "polling_interval",
    "podgov_k": "nvhost_podgov/k",
    "podgov_load_target": "nvhost_podgov/load_target",
    "podgov_load_margin": "nvhost_podgov/load_margin",
    "podgov_load_max": "nvhost_podgov/load_max",
    "podgov_up_freq_margin": "nvhost_podgov/up_freq_margin",
}
"""Where each knob is written, below the GPU's devfreq folder."""
OWNERS: Mapping[str, str] = {place.rpartition("/")[2]: name for name, place in PLACES.items()}
_GOVERNOR = "nvhost_podgov"
_SHARES = (0.5, 1.0, 2.0, 3.0, 5.0)
_PER_S = 1000  # the kernel counts milliseconds
_MOST = 1_000_000
_TOLD = "searched only if named: half to five times what was found, as nobody has published what the driver takes"


class GpuGovernor:
    """The parameters of a GPU's governor that are there; none where another governor is in charge.

    Args:
        tree: The board's files.
        actuator: Knows each as it was before anyone tuned it.
        limits: The administrator's.
        folder: Devfreq folder of the GPU, or None.
    """

    def __init__(self, tree: Tree, actuator: Actuator, limits: Limits, folder: Path | None) -> None:
        self._actuator = actuator
        self._files: dict[str, str] = {}
        self._texts: dict[str, dict[Level, str]] = {}
        found: list[Capability] = []
        if folder is not None and tree.text(folder / "governor") == _GOVERNOR:
            for name, place in PLACES.items():
                if tree.there(folder / place):
                    found.append(self._probed(tree, limits, name, folder / place))
        self.capabilities = tuple(found)

    def _probed(self, tree: Tree, limits: Limits, name: str, file: Path) -> Capability:
        if refusal := tree.refusal(file):
            return unavailable([name], refusal, "run as root, or give this user the file with a udev rule")[0]
        try:
            number = int(self._actuator.original(str(file)))
        except (PolythrottleError, ValueError) as err:
            return unavailable([name], f"{file} cannot be read: {err}")[0]
        if not 0 < number <= _MOST:
            return unavailable([name], f"{file} holds {number}, of which there are no multiples to choose from")[0]
        texts: dict[Level, str] = {}
        for each in sorted({max(1, round(number * share)) for share in _SHARES}):
            texts[each / _PER_S if name.endswith("_s") else each] = str(each)
        default = next(level for level, text in texts.items() if text == str(number))
        low, high = limits.span(KIND, name)
        allowed = {level: text for level, text in texts.items() if level == default or low <= float(level) <= high}
        if len(allowed) < 2:
            return unavailable([name], "the administrator's limits leave no choice")[0]
        self._files[name] = str(file)
        self._texts[name] = allowed
        self._actuator.allow(Control(str(file), frozenset(allowed.values())))
        return Capability(name, tuple(allowed), default, _TOLD)

    def apply(self, point: Mapping[str, Level]) -> None:
        """Set what a point names of the parameters, each read back.

        Raises:
            KnobRejected: If one is not kept, as up_freq_margin is not.
        """
        named = [name for name in self._files if name in point]
        self._actuator.apply([Setting(self._files[name], self._texts[name][point[name]]) for name in named])
