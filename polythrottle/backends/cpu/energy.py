"""Where the joules of a processor come from: counted where they can be, else estimated, and why."""

from typing import Protocol

from polythrottle.backends.cpu.busy import BusyTime
from polythrottle.backends.cpu.zones import MASKED, PERMISSION, Zones
from polythrottle.clock import Clock
from polythrottle.measurement import EnergyKind

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
