"""What works on a GPU and what does not, found by reading alone.

The rights it takes, and the power of a Grace superchip beside it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polythrottle.actuation.drivers.controls import text_of
from polythrottle.actuation.drivers.nvml import PRIVILEGE, NotOffered
from polythrottle.backends.grace_power import channels
from polythrottle.backends.nvml.energy import CounterScope, EnergyCounter, EnergySource, module_w
from polythrottle.backends.nvml.gpu import BLACKWELL, POWER_CAP, Gpu, Slowdowns, faults
from polythrottle.backends.nvml.knobs import MEM_KNOB, POWER_KNOB, Dial, Dials
from polythrottle.domain.clock import Clock
from polythrottle.domain.errors import TrialError
from polythrottle.domain.ports import Finding
from polythrottle.domain.units import show_level

# Whether this process may set anything on a GPU, judged without trying.

_SYS_ADMIN = 21  # include/uapi/linux/capability.h


def may_set(status: Path = Path("/proc/self/status")) -> bool:
    """Return whether this process has CAP_SYS_ADMIN, which NVIDIA's driver asks for before it sets anything.

    In a user namespace of its own a process can have it and still be refused.

    Args:
        status: Where the kernel lists the capabilities of this process; if it does not, root is taken to have them all.
    """
    try:
        match = re.search(r"^CapEff:\s*([0-9a-fA-F]+)$", text_of(status), re.MULTILINE)
    except OSError:
        match = None
    if match:
        return bool(int(match[1], 16) >> _SYS_ADMIN & 1)
    return os.geteuid() == 0


# What works on a GPU and what does not, found by reading alone.

_HELD_DOWN = (
    "on a GeForce of this generation a locked memory clock was seen to hold other clocks down too, and performance by "
    "up to 32 % (NVIDIA/open-gpu-kernel-modules#1266); what is measured includes that"
)
_PERSISTENCE = "systemctl enable --now nvidia-persistenced, or nvidia-smi -pm 1"


def identity(gpu: Gpu) -> Mapping[str, str]:
    """Return what identifies a GPU and its firmware; what the driver does not say is left out.

    Raises:
        DeviceError: If the GPU is gone.
    """
    with gpu.library as library:
        asked: dict[str, Callable[[], Any]] = {
            "name": lambda: gpu.ask("nvmlDeviceGetName"),
            "uuid": lambda: gpu.uuid,
            "pci": lambda: _text(gpu.ask("nvmlDeviceGetPciInfo").busId),
            "vbios": lambda: gpu.ask("nvmlDeviceGetVbiosVersion"),
            "architecture": lambda: gpu.architecture,
            "driver": lambda: library.call("nvmlSystemGetDriverVersion"),
            "nvml": lambda: library.call("nvmlSystemGetNVMLVersion"),
        }
        found = {name: _answer(ask) for name, ask in asked.items()}
    return {name: str(value) for name, value in found.items() if value is not None}


def _answer(ask: Callable[[], Any]) -> Any:
    try:
        return ask()
    except NotOffered:
        return None


def _text(value: Any) -> str:
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    return str(value)


def _superchip() -> Iterator[Finding]:
    """Yield what the power meters around the GPU of a Grace superchip tell; they are no part of the GPU's joules."""
    for each in channels():
        mean = f", mean over {each.averaged_s * 1000:g} ms" if each.averaged_s else ""
        told = f"{each.power_w:.1f} W of {each.covers}{mean}, by {each.file}; not counted in the GPU's joules"
        yield Finding(each.label, True, told, f"to measure by it: ?meter=grace:{each.name}")


@dataclass(frozen=True)
class Inspection:
    """One look at a GPU; NVML is open meanwhile.

    Args:
        gpu: Whose.
        dials: Its knobs.
        energy: Where its joules come from, or why they are unknown.
        slowdowns: Its event reasons.
        privileged: Whether this process may set anything.
    """

    gpu: Gpu
    dials: Dials
    energy: EnergySource | str
    slowdowns: Slowdowns
    privileged: bool

    def findings(self, clock: Clock) -> tuple[Finding, ...]:
        """Return everything found, knobs first; measuring the energy counter's step takes up to a second."""
        knobs = tuple(self._knob(dial) for dial in self.dials.knobs.values())
        beside = (*self._module(), *_superchip(), *self._enforced())
        return (self._rights(), *knobs, self._energy(clock), *beside, *self._state())

    def _rights(self) -> Finding:
        if self.privileged:
            return Finding("rights to set", True, "this process has CAP_SYS_ADMIN, which the driver asks for")
        remedy = f"{PRIVILEGE}; tune --knobs none finds the batch size without"
        return Finding("rights to set", False, "this process lacks CAP_SYS_ADMIN, which the driver asks for", remedy)

    def _knob(self, dial: Dial) -> Finding:
        if dial.off:
            return Finding(dial.name, False, _line(dial.off))
        levels = list(dial.texts)
        if len(levels) == 1:
            return Finding(dial.name, False, f"there is only {show_level(dial.name, levels[0])}, so nothing to choose")
        span = f"{len(levels)} levels, {show_level(dial.name, levels[0])} to {show_level(dial.name, levels[-1])}"
        if not self.privileged:
            return Finding(dial.name, False, f"{span}, but it takes more rights to set it", PRIVILEGE)
        beside = f"; {_HELD_DOWN}" if dial.name == MEM_KNOB and self._holds_others_down else ""
        return Finding(dial.name, True, f"{span}; whether the driver takes them shows when one is set{beside}")

    @property
    def _holds_others_down(self) -> bool:
        named = str(self.gpu.maybe("nvmlDeviceGetName"))
        return "GeForce" in named and (self.gpu.architecture or 0) >= BLACKWELL

    def _energy(self, clock: Clock) -> Finding:
        if isinstance(self.energy, str):
            return Finding("energy", False, _line(f"neither energy nor power is reported: {self.energy}"))
        if not isinstance(self.energy, EnergyCounter):
            return Finding("energy", True, f"no energy counter; integrated from {self.energy.made_of}")
        step_s = self.energy.step_s(clock)
        if step_s is None:
            pace = "did not move twice in a second"
        else:
            pace = f"moves every {step_s * 1000:.3g} ms"
        if step_s is None:
            longer = ""
        else:
            longer = f"windows of {max(0.5, 100 * step_s):.2g} s or more see a hundred steps"
        return Finding("energy", step_s is not None, f"{self.energy.made_of} {pace}", longer)

    def _module(self) -> tuple[Finding, ...]:
        watts = module_w(self.gpu)
        if watts is None:
            return ()
        drawn = f"the module around the GPU draws {watts:.0f} W"
        if isinstance(self.energy, EnergyCounter) and self.energy.whose is not CounterScope.GPU:
            return (Finding("power scope", True, f"{drawn}; the energy counter covers {self.energy.whose.value}"),)
        remedy = "?scope=module counts the whole module"
        return (Finding("power scope", True, f"{drawn}; only the GPU's part is counted", remedy),)

    def _enforced(self) -> tuple[Finding, ...]:
        if self.dials.knobs[POWER_KNOB].off:
            return ()
        limit_mw = self.gpu.maybe("nvmlDeviceGetPowerManagementLimit")
        enforced_mw = self.gpu.maybe("nvmlDeviceGetEnforcedPowerLimit")
        if limit_mw is None or enforced_mw is None or enforced_mw >= limit_mw:
            return ()
        explanation = f"set to {limit_mw / 1000:g} W, but {enforced_mw / 1000:g} W are enforced from outside the driver"
        return (Finding("power limit", False, explanation, "see the baseboard controller or the rack's power manager"),)

    def _state(self) -> tuple[Finding, ...]:
        return tuple(each for each in (self._persistence(), self._slowdown(), self._company()) if each is not None)

    def _persistence(self) -> Finding | None:
        mode = self.gpu.maybe("nvmlDeviceGetPersistenceMode")
        if mode is None:
            return None
        if mode:
            return Finding("persistence mode", True, "on: settings stay when the last client leaves")
        explanation = "off: settings may go when the last client leaves, so they hold only while polythrottle runs"
        return Finding("persistence mode", False, explanation, f"to keep them longer: {_PERSISTENCE}")

    def _slowdown(self) -> Finding:
        reasons = self.slowdowns.now()
        if reasons is None:
            return Finding("slowdown", None, "the driver does not say whether the GPU is throttled")
        if causes := faults(reasons):
            remedy = "cool it, or see to its power supply, before anything is measured"
            return Finding("slowdown", False, f"the GPU is throttled now: {causes}", remedy)
        capped = ", held by its power limit" if reasons & POWER_CAP else ""
        return Finding("slowdown", True, f"event reasons are readable; none that spoils a window now{capped}")

    def _company(self) -> Finding | None:
        try:
            others = self.gpu.maybe("nvmlDeviceGetComputeRunningProcesses")
        except TrialError:
            others = None
        if others is None:
            return None
        if not others:
            return Finding("other work", True, "no process computes on it now")
        return Finding("other work", None, f"{len(others)} processes compute on it now; their joules count too")


def _line(text: str) -> str:
    return " ".join(text.split())
