"""What a device draws without work, at the point it is set to."""

from collections.abc import Sequence

from polythrottle.domain.errors import TrialError
from polythrottle.domain.ports import Device, Sensor
from polythrottle.metering.energy import EnergyEstimate, trajectory
from polythrottle.metering.validity import check_readings
from polythrottle.metering.window import WindowSample, idle_looks


def idle_power_w(device: Device, duration_s: float, sensor: Sensor) -> float | None:
    """Return the power of a device that is left alone, in watts; None if that was not asked or cannot be told.

    Measured right after a window, when the board is as warm as it was in it, for leakage grows with heat. It cannot be
    told where the energy reading stops, falls or jumps meanwhile.

    Args:
        device: Set to a point, and without work.
        duration_s: How long to look at least; 0 if not at all.
        sensor: What its energy is read with.
    """
    if duration_s <= 0:
        return None
    return idle_watts(idle_looks(device, duration_s, sensor), sensor)


def idle_watts(looks: Sequence[WindowSample], sensor: Sensor) -> float | None:
    """Return the power that looks at a device without work say; None if they say none."""
    try:
        check_readings(looks, sensor, closed=False)
    except TrialError:
        return None
    return EnergyEstimate(trajectory(looks, sensor), sensor).watts
