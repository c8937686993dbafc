"""One examination: every real device of a machine, its sensors, the machine itself, its other programs.

What still stands changed.
"""

import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

from polythrottle.backends import DeviceURI, open_device
from polythrottle.backends.meters import Metered, unmetered
from polythrottle.domain.clock import VirtualClock
from polythrottle.domain.errors import InvalidInput, PolythrottleError, UnknownName
from polythrottle.domain.measurement import EnergyKind, Reading
from polythrottle.domain.ports import Device, Finding, Inspectable, Recorded, Sampled, findings_of
from polythrottle.domain.units import show
from polythrottle.inspect.machine import System, is_jetson, machine_findings, others_steering, record_findings
from polythrottle.storage.identity import identity_of

# The sensors' self-test: read for a second, and see whether what they say can be true.

_LOOKS_EVERY_S = 0.01
_LOOKS = 100
_MOST_W = 3000.0
_COLDEST_C = -40.0
_HOTTEST_C = 125.0
_IDLE_S = 1.0
_BUDGET = 0.005
_STEPS = 4.0
_WARY = "do not trust it; report it"


def sensor_findings(device: Device) -> tuple[Finding, ...]:
    """Return what a device's sensors say of themselves in a second, and what looking at them costs us.

    Args:
        device: Not entered; nothing is written to it.
    """
    if isinstance(device, Recorded):
        return (Finding("energy reading", None, "a recorded table has no sensors to test"),)
    if isinstance(device, Sampled):
        sampled = device.sampling()
    else:
        sampled = nullcontext()
    try:
        with sampled:
            cost: tuple[Finding, ...] = ()
            if not isinstance(device.clock, VirtualClock):
                cost = (_overhead(device),)
            readings = list(_looked_at(device))
    except PolythrottleError as err:
        return (Finding("energy reading", False, " ".join(str(err).split())),)
    return (_energy(device, readings), _temperature(readings), *_throttling(readings), *cost)


def _looked_at(device: Device) -> Iterator[Reading]:
    device.read()  # the first opens what the others find open
    slow_s = 0.0
    if isinstance(device, Metered):
        slow_s = _STEPS * device.averaging.step_s
    for _ in range(_LOOKS):
        yield device.read()
        device.clock.sleep(max(_LOOKS_EVERY_S, slow_s / _LOOKS))


def _energy(device: Device, readings: Sequence[Reading]) -> Finding:
    first = readings[0]
    last = readings[-1]
    span_s = last.time_s - first.time_s
    grown_j = last.energy_j - first.energy_j
    if any(late.energy_j < early.energy_j for early, late in itertools.pairwise(readings)):
        return Finding("energy reading", False, "the counter went backwards while it was read", _WARY)
    if grown_j <= 0 or span_s <= 0:
        told = f"the counter did not move in {span_s:.2g} s"
        return Finding("energy reading", False, told, "it is frozen, or the device sleeps: try again under load")
    power_w = grown_j / span_s
    if power_w > _MOST_W * (device.uri.count(",") + 1):  # a group names each of its GPUs
        return Finding("energy reading", False, f"{show(power_w, 'W')} cannot be true", _WARY)
    kind = ""
    if device.energy_kind is not EnergyKind.MEASURED:
        kind = f", {device.energy_kind}"
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
    start_s = device.clock.now()
    busy_s = time.process_time()
    device.clock.sleep(_IDLE_S)
    share = (time.process_time() - busy_s) / (device.clock.now() - start_s)
    busy_s = time.process_time()
    device.read()
    within = share <= _BUDGET
    told = f"sampling takes {share:.2%} of a core, one reading {show(time.process_time() - busy_s, 's')} of its time"
    # A busy machine makes it dearer, which keeps nothing from working.
    if within:
        return Finding("our overhead", True, told)
    return Finding("our overhead", None, f"{told}, more than {_BUDGET:.1%}")


# One examination: every real device of a machine, the machine itself, its other programs, and what stands changed.


@dataclass(frozen=True)
class ExaminedDevice:
    """One device and what was found about it.

    Args:
        uri: What opens it.
        title: The name people know it by; empty if it could not be opened.
        identity: Hardware and firmware.
        findings: What works and what does not.
    """

    uri: str
    title: str = ""
    identity: Mapping[str, str] = field(default_factory=dict)
    findings: tuple[Finding, ...] = ()


@dataclass(frozen=True)
class Examination:
    """What was found, in four parts.

    Args:
        devices: Each device.
        machine: What in kernel, firmware and container keeps something closed.
        others: Who else steers clocks.
        records: What stands changed, and the state folder.
    """

    devices: tuple[ExaminedDevice, ...]
    machine: tuple[Finding, ...] = ()
    others: tuple[Finding, ...] = ()
    records: tuple[Finding, ...] = ()

    @property
    def faults(self) -> tuple[Finding, ...]:
        """Everything that does not work."""
        every = (*self.machine, *self.others, *self.records, *(each for one in self.devices for each in one.findings))
        return tuple(finding for finding in every if finding.works is False)


def examine(device: str | None = None) -> Examination:
    """Examine one device or all real ones, and the machine around them; writes nothing and runs nothing.

    Args:
        device: URI; every real device that is here if None. With ``?root=PATH`` the machine is the one in that folder.

    Raises:
        InvalidInput: If the URI is malformed.
        UnknownName: If its scheme is not known, or there is no simulated board of that name.
        BadFile: If a simulated board's or a recorded table's file cannot be read.
    """
    given = None
    system = System(Path("/"))
    uris: tuple[str, ...] = ()
    if device is not None and device != "auto":
        given = DeviceURI.parse(device)
        system = System(Path(given.options.get("root", "/")))
        uris = (device,)
    if given is not None and given.scheme == "ssh" and not given.meter:
        return _over_ssh(given, uris[0])
    uris = uris or real_devices(system)
    patients = tuple(_patient(uri) for uri in uris)
    if given is not None and given.scheme in ("sim", "replay"):
        return Examination(patients)
    return Examination(patients, machine_findings(system), others_steering(system), record_findings())


def _over_ssh(given: DeviceURI, uri: str) -> Examination:
    """Return what is found of a device over SSH, and of the machine that it is part of."""
    from polythrottle.backends.ssh import SshDevice

    try:
        board = SshDevice.of(given.name, given.options)
    except PolythrottleError as err:
        if isinstance(err, InvalidInput):
            raise
        return Examination((_unopened(uri, err),))
    with closing(board.board):
        try:
            around = board.board.examined()
            return Examination((_examined(board),), around["machine"], around["others"], around["records"])
        except PolythrottleError as err:
            return Examination((_unopened(uri, err),))


def real_devices(system: System) -> tuple[str, ...]:
    """Return the URIs of the real devices that are here: a Jetson, each NVIDIA GPU, the processor."""
    if is_jetson(system):  # whose GPU is on the same chip and is no GPU of NVML's
        return ("jetson", "cpu")
    return (*_gpus(system), "cpu")


def _gpus(system: System) -> tuple[str, ...]:
    folders = system.found("proc/driver/nvidia/gpus/*/information")  # by PCI address, as NVML counts
    return tuple(f"nvml:{number}" for number in range(len(folders)))


def groups(uris: Sequence[str]) -> tuple[str, ...]:
    """Return the URIs of what can be steered as one besides: all NVIDIA GPUs, where there are several.

    Args:
        uris: Of the real devices that are here.
    """
    if sum(uri.startswith("nvml:") for uri in uris) > 1:
        return ("nvml:all",)
    return ()


def _patient(uri: str) -> ExaminedDevice:
    try:
        return _examined(open_device(uri))
    except PolythrottleError as err:
        # Not a device that fails, but a name that is wrong.
        if isinstance(err, InvalidInput | UnknownName) or uri.partition(":")[0] in ("sim", "replay"):
            raise
        return _unopened(uri, err)


def _examined(board: Device) -> ExaminedDevice:
    told = findings_of(board)
    if isinstance(unmetered(board), Inspectable):
        own = told
    else:
        own = (*_knobs(board), *told)
    return ExaminedDevice(board.uri, board.title, identity_of(board), (*own, *sensor_findings(board)))


def _unopened(uri: str, err: Exception) -> ExaminedDevice:
    return ExaminedDevice(uri, findings=(Finding("device", False, " ".join(str(err).split())),))


def _knobs(board: Device) -> tuple[Finding, ...]:
    """Return what can be set on a device that does not say so itself."""
    if not board.space.knobs:
        return (Finding("knobs", None, "nothing can be set on this device"),)
    return tuple(Finding(knob.name, True, f"{len(knob.levels)} levels") for knob in board.space.knobs)
