"""What a device draws without work, at the point it is set to."""

from polythrottle.errors import TrialError
from polythrottle.meter.joules import Joules
from polythrottle.meter.looks import Look, course
from polythrottle.meter.validity import check_readings
from polythrottle.ports import Device
from polythrottle.sensors import Sensor

_LOOKS = 40


def idle_power_w(device: Device, duration_s: float, sensor: Sensor, most_s: float) -> float | None:
    """Return the power of a device that is left alone, in watts; None if that was not asked or cannot be told.

    Measured right after a window, when the board is as warm as it was in it, for leakage grows with heat. It cannot be
    told where the energy reading stops, falls or jumps meanwhile.

    Args:
        device: Set to a point, and without work.
        duration_s: How long to look at least; 0 if not at all.
        sensor: What its energy is read with.
        most_s: How long to look at most, however long the sensor would have it.
    """
    if duration_s <= 0:
        return None
    device.clock.sleep(sensor.settle_s)
    looks, looked_s = [Look(device.read())], min(max(duration_s, sensor.least_s), max(duration_s, most_s))
    for _ in range(_LOOKS):
        device.clock.sleep(looked_s / _LOOKS)
        looks.append(Look(device.read()))
    try:
        check_readings(looks, sensor, closed=False)
    except TrialError:
        return None
    return Joules(course(looks, sensor), sensor).watts
