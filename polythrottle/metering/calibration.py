"""What is known of a device's own energy sensor: the self-test that finds it out, and the file that keeps it."""

import hashlib
import json
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from polythrottle.backends.meters import Metered
from polythrottle.domain.clock import VirtualClock
from polythrottle.domain.errors import BadFile, InvalidInput, TrialError
from polythrottle.domain.ports import Averaging, Device, Readable, Sensing, Sensor, usual_sensor
from polythrottle.storage.atomic_file import replace_file
from polythrottle.storage.identity import identity_of
from polythrottle.storage.paths import state_dir
from polythrottle.storage.tables import csv_lines, lines
from polythrottle.storage.untrusted import MALFORMED, check_plain

# What was found out about a device's own sensor: kept by what its joules are, and used for the same joules again.
#
# A factor fitted for one kind of joules says nothing of another: not one of an estimate at 10 W a core of one at 20,
# nor of what RAPL counts. So a calibration belongs to the hardware, the kind of energy, and every option of the
# device's URI, for each of them changes what is read or how.

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
    if device.uri.startswith(("sim:", "replay:")) and not isinstance(device, Averaging):
        return usual_sensor(device.uri)
    told = uncalibrated(device)
    calibrated = read_calibration(calibration_path(device))
    if calibrated is None or not told.average_s:
        return calibrated or told
    return replace(calibrated, step_s=told.step_s, average_s=told.average_s)


def uncalibrated(device: Readable) -> Sensor:
    """Return what is known of a sensor that nobody has calibrated: what its files say, else what is usual."""
    if isinstance(device, Averaging):
        return device.averaging
    return usual_sensor(device.uri)


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
    key = {**_hardware(device), "energy": str(device.energy_kind), "options": _options(device)}
    return _path({**key, "meter": device.meter} if isinstance(device, Metered) else key)


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
    check_plain(path)
    try:
        document = json.loads(path.read_text())
        if document["v"] != FORMAT:
            raise BadFile(f"{path} is a calibration of another format; run polythrottle calibrate again")
        return Sensor(**document["sensor"])
    except FileNotFoundError:
        return None
    except (*MALFORMED, OSError, InvalidInput) as error:
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
    replace_file(path, f"{json.dumps(document, indent=1)}\n".encode(), mode=None)


def recording_path(calibration: Path) -> Path:
    """Return where the readings of the last self-test are kept, beside the calibration."""
    return calibration.with_suffix(".csv")


def write_recording(path: Path, readings: Sequence[tuple[float, float]]) -> None:
    """Keep readings: time in seconds and running total of joules.

    Raises:
        StorageError: If they cannot be written.
    """
    replace_file(path, csv_lines([_COLUMNS, *readings]), mode=None)


def read_recording(path: Path) -> tuple[tuple[float, float], ...]:
    """Return the readings of the last self-test.

    Raises:
        BadFile: If there are none.
    """
    if not path.exists():
        raise BadFile("there is no self-test to compare with; run polythrottle calibrate while the meter records")
    try:
        rows = list(lines(path, _COLUMNS))
        return tuple((row.number("time_s", -math.inf), row.number("energy_j", -math.inf)) for row in rows)
    except BadFile as error:
        raise BadFile(f"{error}; run polythrottle calibrate again") from error


# The self-test of a device's energy reading: how often it moves, in what steps, how long it takes to follow.
#
# The device idles and works by turns, and its reading is looked at as fast as may be. The time constant is that of a
# lag; a moving average looks like one of half its length. What a board's files say of averaging is believed, and only
# what lags besides is a lag.

Array = NDArray[np.float64]
_LEAST_STEPS = 5
_PHASE_S = 10.0
_LOOK_S = 0.002
_SLOW_S = 0.001
_TURNS = (1.0, 1.0, 0.6, 1.4, 1.0)
PHASES = sum(_TURNS)
"""How many phases of the length that is asked for a self-test lasts."""
_OFTEN = 0.7
_APART = 1.2
_BESIDES = 0.25


@dataclass(frozen=True)
class SelfTest:
    """What a self-test found.

    Args:
        sensor: The device's, as far as it shows.
        idle_w: Power without work.
        loaded_w: Power with it.
        rise_s: Time constant with which readings follow when work begins; None if it is too short to see.
        fall_s: Likewise when it ends.
        readings: Times in seconds and joules, in order.
    """

    sensor: Sensor
    idle_w: float
    loaded_w: float
    rise_s: float | None
    fall_s: float | None
    readings: tuple[tuple[float, float], ...]


def self_test(device: Device, work: Callable[[], object], phase_s: float = _PHASE_S) -> SelfTest:
    """Look at a device's energy reading while it idles and works by turns.

    Args:
        device: Entered.
        work: Does a little work, for some milliseconds.
        phase_s: How long a turn takes, about; there are five, idle first and last.

    Raises:
        TrialError: If the reading does not move, or falls.
    """
    phases = []
    for turn, length in enumerate(_TURNS):  # uneven, so that a meter's log fits at one shift only
        phases.append(_seen(device, work if turn % 2 else lambda: device.clock.sleep(_LOOK_S), length * phase_s))
    idle = phases[-1]
    loaded = phases[1]
    step_s, quantum_j = _steps(phases)
    idle_w = _power_w(_second_half(idle))
    loaded_w = _power_w(_second_half(loaded))
    rise_s = _follow_s(loaded, idle_w, loaded_w, step_s)
    fall_s = _follow_s(phases[2], loaded_w, idle_w, step_s)
    told = uncalibrated(device)
    besides_s = max(rise_s or 0.0, fall_s or 0.0) - told.late_s
    known = replace(
        told,
        step_s=told.step_s if told.average_s else step_s,
        quantum_j=quantum_j,
        lag_s=besides_s if besides_s > _BESIDES * told.late_s else 0.0,
        source="self-test",
    )
    readings = tuple((float(time_s), float(energy_j)) for time_s, energy_j in np.vstack(phases).tolist())
    return SelfTest(known, idle_w, loaded_w, rise_s, fall_s, readings)


def _seen(device: Device, work: Callable[[], object], phase_s: float) -> Array:
    """Return looks at time and energy, as many as there is time for, shape (looks, 2)."""
    found = np.array(_looked(device, work, phase_s), dtype=float)
    if len(found) < _LEAST_STEPS or not np.all(np.isfinite(found)):
        raise TrialError(f"the device was read only {len(found)} times in {phase_s:g} s; it cannot be calibrated")
    if np.any(np.diff(found[:, 1]) < 0):
        raise TrialError("the energy reading falls, so it cannot be calibrated")
    if found[-1, 1] <= found[0, 1]:
        raise TrialError(f"the energy reading did not move in {phase_s:g} s, so it cannot be calibrated")
    return found


def _looked(device: Device, work: Callable[[], object], phase_s: float) -> list[tuple[float, float]]:
    """Look between pieces of work; beside them, where the device takes long for an answer."""
    looks: list[tuple[float, float]] = []
    begin_s = device.clock.now()
    ended = threading.Event()

    def look() -> bool:
        now = device.read()
        if now.time_s < begin_s + phase_s:
            looks.append((now.time_s, now.energy_j))
        return now.time_s < begin_s + phase_s and not ended.is_set()

    def look_on() -> None:
        while look():
            pass

    look()
    if device.clock.now() - begin_s > _SLOW_S and not isinstance(device.clock, VirtualClock):
        # Between answers that take longer than the work does, the device would mostly idle.
        with ThreadPoolExecutor(1) as beside:
            under_way = beside.submit(look_on)
            try:
                while not under_way.done():
                    work()
            finally:
                ended.set()
            under_way.result()
    else:
        work()
        while look():
            work()
    return looks


def _steps(phases: list[Array]) -> tuple[float, float]:
    """Return how often the total moves, 0 if as often as it was looked at; and the least it moved by."""
    periods = []
    least = math.inf
    for looks in phases:
        gains = np.diff(looks[:, 1])
        moved = looks[1:, 0][gains > 0]
        least = min(least, float(gains[gains > 0].min()))
        if len(moved) >= _LEAST_STEPS and np.mean(gains > 0) < _OFTEN:
            periods.append(float(np.median(np.diff(moved))))
    if periods:
        return (float(np.median(periods)), least)
    return (0.0, 0.0)


def _power_w(looks: Array) -> float:
    return float((looks[-1, 1] - looks[0, 1]) / (looks[-1, 0] - looks[0, 0]))


def _second_half(looks: Array) -> Array:
    return looks[len(looks) // 2 :]


def _follow_s(looks: Array, before_w: float, after_w: float, step_s: float) -> float | None:
    """Return the time constant of a change: the energy missing or left over after it, over the height of the step."""
    if max(before_w, after_w) <= _APART * min(before_w, after_w):
        return None
    elapsed_s = looks[-1, 0] - looks[0, 0]
    missing_j = after_w * elapsed_s - (looks[-1, 1] - looks[0, 1])
    found_s = float(missing_j / (after_w - before_w))
    if found_s > max(2 * step_s, 0.02):
        return found_s
    return None
