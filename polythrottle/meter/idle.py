"""What a device draws without work, at the point it is set to."""

from polythrottle.ports import Device
from polythrottle.sensors import Sensor


def idle_power_w(device: Device, duration_s: float, sensor: Sensor) -> float | None:
    """Return the power of a device that is left alone, in watts; None if that was not asked or cannot be told.

    Measured right after a window, when the board is as warm as it was in it, for leakage grows with heat.

    Args:
        device: Set to a point, and without work.
        duration_s: How long to look at least; 0 if not at all.
        sensor: What its energy is read with.
    """
    if duration_s <= 0:
        return None
    device.clock.sleep(sensor.settle_s)
    start = device.read()
    device.clock.sleep(max(duration_s, sensor.least_s))
    end = device.read()
    if end.time_s <= start.time_s or end.energy_j <= start.energy_j:
        return None
    return (end.energy_j - start.energy_j) / (end.time_s - start.time_s) * sensor.factor
