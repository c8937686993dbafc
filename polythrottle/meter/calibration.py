"""What was found out about a device's own sensor: kept by what its joules are, and used for the same joules again.

A factor fitted for one kind of joules says nothing of another: not one of an estimate at 10 W a core of one at 20, nor
of what RAPL counts. So a calibration belongs to the hardware, the kind of energy, and every option of the device's URI,
for each of them changes what is read or how.
"""

import csv
import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from polythrottle.errors import BadFile, InvalidInput, StorageError
from polythrottle.identity import identity_of
from polythrottle.ports import Averaging, Device, Readable, Sensing
from polythrottle.sensors import Sensor, usual
from polythrottle.state import state_dir

FORMAT = 2
"""Files of format 1 lie elsewhere: they do not say which joules they are of, so they are not used."""
_COLUMNS = ("time_s", "energy_j")


def sensor_of(device: Readable) -> Sensor:
    """Return what is known of a device's sensor: what it says or was calibrated, else what is usual for its kind.

    Raises:
        BadFile: If there is a calibration that cannot be read.
    """
    if isinstance(device, Sensing):
        return device.sensor
    if device.uri.startswith(("sim:", "replay:")):
        return usual(device.uri)
    told, calibrated = uncalibrated(device), read_calibration(calibration_path(device))
    if calibrated is None or not told.average_s:
        return calibrated or told
    return replace(calibrated, step_s=told.step_s, average_s=told.average_s)


def uncalibrated(device: Readable) -> Sensor:
    """Return what is known of a sensor that nobody has calibrated: what its files say, else what is usual."""
    return device.averaging if isinstance(device, Averaging) else usual(device.uri)


def passed_over(device: Device) -> Iterator[str]:
    """Yield that there is a calibration which is not used because it does not say which joules it is of, if so."""
    before = _path(_hardware(device))
    if not calibration_path(device).exists() and before.exists():
        yield (
            f"the calibration {before} does not say for which options and which kind of energy it was made, so it is "
            f"not used; run polythrottle calibrate --device '{device.uri}' again"
        )


def calibration_path(device: Readable) -> Path:
    """Return where the calibration of a device is kept, whether there is one or not."""
    return _path({**_hardware(device), "energy": str(device.energy_kind), "options": _options(device)})


def _hardware(device: Readable) -> dict[str, str]:
    return dict(sorted(identity_of(device).items()))


def _options(device: Readable) -> str:
    return "&".join(sorted(filter(None, device.uri.partition("?")[2].split("&"))))


def _path(key: dict[str, str]) -> Path:
    return state_dir() / "calibrations" / f"{hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]}.json"


def read_calibration(path: Path) -> Sensor | None:
    """Return the sensor a calibration describes; None if there is none.

    Raises:
        BadFile: If it is not one.
    """
    try:
        document = json.loads(path.read_text())
        if document["v"] != FORMAT:
            raise BadFile(f"{path} is a calibration of another format; run polythrottle calibrate again")
        return Sensor(**document["sensor"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, LookupError, TypeError, OverflowError, RecursionError, InvalidInput) as error:
        raise BadFile(f"{path} is no calibration: {error}; remove it or run polythrottle calibrate again") from error


def write_calibration(path: Path, device: Device, sensor: Sensor) -> None:
    """Keep a calibration.

    Raises:
        StorageError: If it cannot be written.
    """
    document = {
        "v": FORMAT,
        "device": device.uri,
        "energy_kind": str(device.energy_kind),
        "identity": dict(identity_of(device)),
        "sensor": asdict(sensor),
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_suffix(".new")
        beside.write_text(json.dumps(document, indent=1) + "\n")
        beside.replace(path)
    except OSError as error:
        raise StorageError(f"{path} cannot be written: {error.strerror}") from error


def recording_path(calibration: Path) -> Path:
    """Return where the readings of the last self-test are kept, beside the calibration."""
    return calibration.with_suffix(".csv")


def write_recording(path: Path, readings: Sequence[tuple[float, float]]) -> None:
    """Keep readings: time in seconds and running total of joules.

    Raises:
        StorageError: If they cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "w", encoding="utf-8", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows([_COLUMNS, *readings])
    except OSError as error:
        raise StorageError(f"{path} cannot be written: {error.strerror}") from error


def read_recording(path: Path) -> tuple[tuple[float, float], ...]:
    """Return the readings of the last self-test.

    Raises:
        BadFile: If there are none.
    """
    try:
        with open(path, encoding="utf-8", newline="") as file:
            return tuple((float(row[_COLUMNS[0]]), float(row[_COLUMNS[1]])) for row in csv.DictReader(file))
    except FileNotFoundError as error:
        raise BadFile(
            "there is no self-test to compare with; run polythrottle calibrate while the meter records"
        ) from error
    except (OSError, ValueError, KeyError, TypeError, csv.Error) as error:
        raise BadFile(f"{path} cannot be read: {error}; run polythrottle calibrate again") from error
