"""The sensors' self-test: read for a second, and see whether what they say can be true."""

import itertools
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext

from polythrottle.clock import VirtualClock
from polythrottle.errors import PolythrottleError
from polythrottle.findings import Finding
from polythrottle.measurement import EnergyKind, Reading
from polythrottle.ports import Device, Recorded, Sampled
from polythrottle.units import show

_LOOKS_EVERY_S, _LOOKS = 0.01, 100
_MOST_W, _COLDEST_C, _HOTTEST_C = 3000.0, -40.0, 125.0
_IDLE_S, _BUDGET = 1.0, 0.005
_WARY = "do not trust it; report it"


def sensor_findings(device: Device) -> tuple[Finding, ...]:
    """Return what a device's sensors say of themselves in a second, and what looking at them costs us.

    Args:
        device: Not entered; nothing is written to it.
    """
    if isinstance(device, Recorded):
        return (Finding("energy reading", None, "a recorded table has no sensors to test"),)
    sampled = device.sampling() if isinstance(device, Sampled) else nullcontext()
    try:
        with sampled:
            cost = () if isinstance(device.clock, VirtualClock) else (_overhead(device),)
            readings = list(_looked_at(device))
    except PolythrottleError as err:
        return (Finding("energy reading", False, " ".join(str(err).split())),)
    return (_energy(device, readings), _temperature(readings), *_throttling(readings), *cost)


def _looked_at(device: Device) -> Iterator[Reading]:
    device.read()  # the first opens what the others find open
    for _ in range(_LOOKS):
        yield device.read()
        device.clock.sleep(_LOOKS_EVERY_S)


def _energy(device: Device, readings: Sequence[Reading]) -> Finding:
    first, last = readings[0], readings[-1]
    span_s, grown_j = last.time_s - first.time_s, last.energy_j - first.energy_j
    if any(late.energy_j < early.energy_j for early, late in itertools.pairwise(readings)):
        return Finding("energy reading", False, "the counter went backwards while it was read", _WARY)
    if grown_j <= 0 or span_s <= 0:
        told = f"the counter did not move in {span_s:.2g} s"
        return Finding("energy reading", False, told, "it is frozen, or the device sleeps: try again under load")
    power_w = grown_j / span_s
    if power_w > _MOST_W * (device.uri.count(",") + 1):  # a group names each of its GPUs
        return Finding("energy reading", False, f"{show(power_w, 'W')} cannot be true", _WARY)
    kind = "" if device.energy_kind is EnergyKind.MEASURED else f", {device.energy_kind}"
    return Finding("energy reading", True, f"rises by {show(power_w, 'W')} now{kind}; {_step(readings)}")


def _step(readings: Sequence[Reading]) -> str:
    """Return how often a counter moves, as far as looking every 10 ms can tell."""
    moves = [late.time_s for early, late in itertools.pairwise(readings) if late.energy_j > early.energy_j]
    if len(moves) >= 0.8 * (len(readings) - 1):
        return f"it moves at every look, {show(_LOOKS_EVERY_S, 's')} apart"
    if len(moves) < 3:
        return f"it moved {len(moves)} times in {show(readings[-1].time_s - readings[0].time_s, 's')}"
    return f"it moves every {show((moves[-1] - moves[0]) / (len(moves) - 1), 's')}"


def _temperature(readings: Sequence[Reading]) -> Finding:
    degrees = next((each.temperature_c for each in reversed(readings) if each.temperature_c is not None), None)
    if degrees is None:
        return Finding("temperature reading", None, "no sensor can be read, so a trial that runs hot is not seen")
    if not _COLDEST_C < degrees < _HOTTEST_C:
        return Finding("temperature reading", False, f"{degrees:.4g} °C cannot be true", _WARY)
    return Finding("temperature reading", True, f"{degrees:.4g} °C")


def _throttling(readings: Sequence[Reading]) -> Iterator[Finding]:
    slowed = [reading for reading in readings if reading.throttled]
    if slowed:
        told = slowed[-1].cause or "heat or current slows the device now"
        yield Finding("throttling", False, told, "let it cool down, look at its supply; if it stays so, restart it")


def _overhead(device: Device) -> Finding:
    """Tell what sampling in the background takes of a core while nothing else is done, and what a reading takes."""
    start_s, busy_s = device.clock.now(), time.process_time()
    device.clock.sleep(_IDLE_S)
    share = (time.process_time() - busy_s) / (device.clock.now() - start_s)
    busy_s = time.process_time()
    device.read()
    within = share <= _BUDGET
    told = f"sampling takes {share:.2%} of a core, one reading {show(time.process_time() - busy_s, 's')} of its time"
    # A busy machine makes it dearer, which keeps nothing from working.
    return Finding("our overhead", True if within else None, told if within else f"{told}, more than {_BUDGET:.1%}")
