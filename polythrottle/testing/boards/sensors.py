"""Files of the sensors of a board: power rails, thermal zones, over-current counters, the fan."""

from collections.abc import Mapping
from typing import Any

from polythrottle.testing.boards.described import Described
from polythrottle.testing.boards.layout import Layout

_FAN = "/sys/devices/platform/pwm-fan/hwmon/hwmon0"


def put_sensors(layout: Layout, board: Described, shift: int) -> None:
    """Add every sensor; ``shift`` is added to the number of each hwmon folder but the fan's, as another boot may."""
    layout.put(_FAN, {"name": "pwmfan", "pwm1": 69, "pwm1_enable": 1})
    layout.link("/sys/class/hwmon/hwmon0", _FAN)
    for chip in board["chips"]:
        _put_chip(layout, chip, shift)
    zones, silent = board["thermal"]["zones"], board["thermal"].get("silent", ())
    for index, zone in enumerate(zones):
        _put_zone(layout, index, zone, silent=zone in silent)
    if "overcurrent" in board:
        _put_overcurrent(layout, board["overcurrent"], shift)


def _put_chip(layout: Layout, chip: Mapping[str, Any], shift: int) -> None:
    path, kind = chip["path"], chip["kind"]
    address = path.rpartition("/")[2]
    name = "ina238" if kind == "ina238" else "ina3221x" if kind == "iio" else "ina3221"
    layout.put(path, {"name": name})
    layout.link(f"/sys/bus/i2c/devices/{address}", path)
    layout.link(f"/sys/bus/i2c/drivers/{name}/{address}", path)
    if kind == "iio":
        folder = f"{path}/iio:device{chip['number']}"
        layout.link(f"/sys/bus/iio/devices/iio:device{chip['number']}", folder)
    else:
        number = chip["number"] + shift
        folder = f"{path}/hwmon/hwmon{number}"
        layout.link(f"/sys/class/hwmon/hwmon{number}", folder)
    files = {"hwmon": _ina3221, "iio": _iio, "ina238": _ina238}[kind](chip["channels"])
    averaging = {key: chip[key] for key in ("samples", "update_interval") if key in chip}
    layout.put(folder, {"name": name, **files, **averaging})


def _ina3221(channels: list[dict[str, Any]]) -> dict[str, object]:
    files: dict[str, object] = {"in7_label": "sum of shunt voltages", "in7_input": 0, "curr4_crit_alarm": 0}
    for number, channel in enumerate(channels, start=1):
        files |= {
            f"in{number}_label": channel["label"],
            f"in{number}_enable": 1,
            f"in{number}_input": 0,
            f"curr{number}_input": 0,
            f"curr{number}_max": 32760,
            f"curr{number}_crit": 32760,
            f"curr{number}_max_alarm": 0,
            f"curr{number}_crit_alarm": 0,
        }
    return files


def _iio(channels: list[dict[str, Any]]) -> dict[str, object]:
    files: dict[str, object] = {}
    for number, channel in enumerate(channels):
        files |= {
            f"rail_name_{number}": channel["label"],
            f"in_voltage{number}_input": 0,
            f"in_current{number}_input": 0,
            f"in_power{number}_input": 0,
            # The driver of that time writes a unit after limits: a reader must not choke on it.
            f"warn_current_limit_{number}": "32760 ma",
            f"crit_current_limit_{number}": "32760 ma",
        }
    return files


def _ina238(channels: list[dict[str, Any]]) -> dict[str, object]:
    return {"in1_input": 0, "curr1_input": 0, "power1_input": 0, "power1_max": 200_000_000, "temp1_input": 40_000}


def _put_zone(layout: Layout, index: int, zone: str, *, silent: bool) -> None:
    folder = f"/sys/devices/virtual/thermal/thermal_zone{index}"
    trips = {"trip_point_0_type": "passive", "trip_point_0_temp": 99_000}
    layout.put(folder, {"type": zone, "temp": "" if silent else 45_000, "mode": "enabled", **trips})
    layout.link(f"/sys/class/thermal/thermal_zone{index}", folder)


def _put_overcurrent(layout: Layout, place: Mapping[str, Any], shift: int) -> None:
    number = place["number"] + shift
    folder = f"{place['path']}/hwmon/hwmon{number}"
    counters = {f"oc{index}_{what}": value for index in (1, 2, 3) for what, value in _OVERCURRENT.items()}
    layout.put(folder, {"name": place["name"], **counters})
    layout.link(f"/sys/class/hwmon/hwmon{number}", folder)
    if place.get("event_time"):
        for index in range(3):
            layout.put(f"{SOCTHERM}/oc{index}", {"event_cnt": 0, "event_time": 0})


SOCTHERM, EVENT_TICKS = "/sys/kernel/debug/bpmp/debug/soctherm", 33_569
"""Where the firmware of an Orin tells of events, numbered from 0, and by what the time of one grows: a public log of an
Orin Nano Super with JetPack 6.2 (27,390 events in 3,605 s, 33,569 units each)."""
_OVERCURRENT = {"event_cnt": 0, "throt_en": 1}
