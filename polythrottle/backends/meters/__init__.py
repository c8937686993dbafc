"""Meters of one's own: smart plugs, power meters of servers, hwmon files, programs and logs, read while work runs."""

from polythrottle.backends.meters.live_meter import LiveMeter, Sample, Source
from polythrottle.backends.meters.metered_device import (
    FORMS,
    Metered,
    MeterReader,
    meter_apart,
    metered,
    open_meter,
    unmetered,
)

__all__ = [
    "FORMS",
    "LiveMeter",
    "MeterReader",
    "Metered",
    "Sample",
    "Source",
    "meter_apart",
    "metered",
    "open_meter",
    "unmetered",
]
