"""What else a processor says of itself: temperature, running clock, throttling, model."""

import re
from functools import cached_property
from pathlib import Path

from polythrottle.backends.tree import Tree

_SENSOR = re.compile(r"x86_pkg_temp|cpu|soc|tj|acpitz", re.IGNORECASE)


class Sensors:
    """The sensors of a processor; what is absent, asleep or forbidden is unknown, never zero.

    Args:
        tree: The machine's files.
    """

    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        self._throttles = self._throttle_count()

    @cached_property
    def _zones(self) -> tuple[Path, ...]:
        zones = self._tree.found("sys/class/thermal/thermal_zone*")
        return tuple(zone for zone in zones if _SENSOR.search(self._tree.text(zone / "type") or ""))

    @cached_property
    def _counters(self) -> tuple[Path, ...]:
        pattern = "sys/devices/system/cpu/cpu[0-9]*/thermal_throttle/package_throttle_count"
        return tuple(self._tree.found(pattern))

    @property
    def files(self) -> tuple[Path, ...]:
        """What is read."""
        zones = (zone / name for zone in self._zones for name in ("type", "temp"))
        return (*zones, *self._counters, self._tree.root / "proc/cpuinfo")

    @property
    def temperature_c(self) -> float | None:
        """The hottest sensor of the processor."""
        found = [self._tree.number(zone / "temp") for zone in self._zones]
        degrees = [milli / 1000 for milli in found if milli is not None]
        # A switched-off sensor reads far outside what silicon survives.
        return max((each for each in degrees if -40 < each < 150), default=None)

    def clocks_hz(self, policies: tuple[Path, ...]) -> dict[str, int]:
        """Return the clock of the fastest core.

        Args:
            policies: The cpufreq folders.
        """
        clocks_khz = [self._tree.number(folder / "scaling_cur_freq") for folder in policies]
        return {"cpu": max(clocks) * 1000} if (clocks := [khz for khz in clocks_khz if khz]) else {}

    @property
    def throttled(self) -> bool:
        """Whether heat has slowed it down since this was last asked."""
        before, self._throttles = self._throttles, self._throttle_count()
        return self._throttles > before

    def _throttle_count(self) -> int:
        return sum(self._tree.number(path) or 0 for path in self._counters)

    def told(self, *names: str) -> str | None:
        """Return the first of some lines in ``/proc/cpuinfo`` that is there."""
        text = self._tree.text(self._tree.root / "proc/cpuinfo") or ""
        matches = (re.search(rf"^{name}\s*:\s*(.+)$", text, re.MULTILINE) for name in names)
        return next((match[1].strip() for match in matches if match), None)

    @property
    def virtual(self) -> bool:
        """Whether this is a virtual machine's processor, which says so in its flags."""
        return "hypervisor" in (self.told("flags") or "").split()
