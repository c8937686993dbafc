"""The power of a Grace superchip beside its GPU: CPU, SoC and module, by the ACPI power meters of its firmware.

The kernel's ``power_meter`` driver shows each as a hwmon device whose ``device/power1_oem_info`` names the
boundary, ``Module Power Socket 0``, ``Grace Power Socket 0``, ``CPU Power Socket 0``, ``SysIO Power Socket 0``,
beside ``power1_average`` in microwatts and ``power1_average_interval`` in milliseconds, 50 or 1000 (NVIDIA Grace
Performance Tuning Guide, "Power Telemetry"; Linux Documentation/hwmon/acpi_power_meter.rst; ACPI tables of NVIDIA's
UEFI). The module's covers regulators, GPU, HBM and memory (Alumet's user book, "Grace Hopper plugin").
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from polythrottle.actuation.drivers.system import SystemControls
from polythrottle.backends.probe import Tree

_LABEL = re.compile(r"(Module|Grace|CPU|SysIO) Power Socket (\d+)")
_COVERS = {
    "Module": "the whole module: GPU, its memory, processor and regulators",
    "Grace": "the Grace socket",
    "CPU": "the rail of the cores",
    "SysIO": "the rail of the SoC",
}


@dataclass(frozen=True)
class Channel:
    """One power meter of a superchip.

    Args:
        label: As the firmware names it.
        name: What it is called by: ``module``, ``grace``, ``cpu`` or ``sysio``.
        socket: Of which it is.
        covers: What its watts are of, in words.
        file: Of microwatts.
        power_w: What it tells now.
        averaged_s: Over how long each value is the mean; None if nobody tells.
    """

    label: str
    name: str
    socket: int
    covers: str
    file: Path
    power_w: float
    averaged_s: float | None


NAMES = tuple(name.lower() for name in _COVERS)


def channels(root: Path = Path("/")) -> tuple[Channel, ...]:
    """Return the power meters of a Grace superchip, by label; none on another machine, or where none answers.

    Args:
        root: Where ``sys`` hangs.
    """
    return tuple(sorted(_found(Tree(root, SystemControls())), key=lambda each: each.label))


def _found(tree: Tree) -> Iterator[Channel]:
    # Kernels before the driver was rewritten have the files in the parent's folder alone.
    for file in tree.found("sys/class/hwmon/hwmon*/device/power1_oem_info", "sys/class/hwmon/hwmon*/power1_oem_info"):
        match = _LABEL.fullmatch(" ".join((tree.text(file) or "").split()))
        microwatts = tree.number(file.with_name("power1_average"))
        if match is None or microwatts is None:
            continue
        interval_ms = tree.number(file.with_name("power1_average_interval"))
        averaged_s = interval_ms / 1000 if interval_ms else None
        yield Channel(
            label=match[0],
            name=match[1].lower(),
            socket=int(match[2]),
            covers=_COVERS[match[1]],
            file=file.with_name("power1_average"),
            power_w=microwatts / 1e6,
            averaged_s=averaged_s,
        )
