"""One examination: every real device of a machine, the machine itself, its other programs, and what stands changed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from polythrottle.backends import DeviceURI, open_device
from polythrottle.diagnosis.machine import is_jetson, machine_findings
from polythrottle.diagnosis.records import record_findings
from polythrottle.diagnosis.sensors import sensor_findings
from polythrottle.diagnosis.steerers import others_steering
from polythrottle.diagnosis.system import System
from polythrottle.errors import PolythrottleError
from polythrottle.findings import Finding
from polythrottle.identity import identity_of
from polythrottle.ports import Device, Inspectable


@dataclass(frozen=True)
class Patient:
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

    devices: tuple[Patient, ...]
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
    given = None if device is None or device == "auto" else DeviceURI.parse(device)
    system = System(Path(given.options.get("root", "/")) if given is not None else Path("/"))
    uris = real_devices(system) if device is None or given is None else (device,)
    patients = tuple(_patient(uri) for uri in uris)
    if given is not None and given.scheme in ("sim", "replay"):
        return Examination(patients)
    return Examination(patients, machine_findings(system), others_steering(system), record_findings())


def real_devices(system: System) -> tuple[str, ...]:
    """Return the URIs of the real devices that are here: a Jetson, each NVIDIA GPU, the processor.

    Args:
        system: Where to look.
    """
    jetson = ("jetson",) if is_jetson(system) else ()
    return (*jetson, *(() if jetson else _gpus(system)), "cpu")


def _gpus(system: System) -> tuple[str, ...]:
    folders = system.found("proc/driver/nvidia/gpus/*/information")  # by PCI address, as NVML counts
    return tuple(f"nvml:{number}" for number in range(len(folders)))


def groups(uris: Sequence[str]) -> tuple[str, ...]:
    """Return the URIs of what can be steered as one besides: all NVIDIA GPUs, where there are several.

    Args:
        uris: Of the real devices that are here.
    """
    return ("nvml:all",) if sum(uri.startswith("nvml:") for uri in uris) > 1 else ()


def _patient(uri: str) -> Patient:
    try:
        board = open_device(uri)
        own = board.findings() if isinstance(board, Inspectable) else _knobs(board)
        return Patient(board.uri, board.title, identity_of(board), (*own, *sensor_findings(board)))
    except PolythrottleError as err:
        if uri.partition(":")[0] in ("sim", "replay"):  # not a device that fails, but a name that is wrong
            raise
        return Patient(uri, findings=(Finding("device", False, " ".join(str(err).split())),))


def _knobs(board: Device) -> tuple[Finding, ...]:
    """Return what can be set on a device that does not say so itself."""
    if not board.space.knobs:
        return (Finding("knobs", None, "nothing can be set on this device"),)
    return tuple(Finding(knob.name, True, f"{len(knob.levels)} levels") for knob in board.space.knobs)
