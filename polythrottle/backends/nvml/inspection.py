"""What works on a GPU and what does not, found by reading alone."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from polythrottle.actuation.nvml_library import PRIVILEGE, NotOffered
from polythrottle.backends.nvml.dials import MEM_KNOB, POWER_KNOB, Dial, Dials
from polythrottle.backends.nvml.energy import Counter, Source, Whose, module_w
from polythrottle.backends.nvml.gpu import BLACKWELL, Gpu
from polythrottle.backends.nvml.slowdown import POWER_CAP, Slowdowns, faults
from polythrottle.clock import Clock
from polythrottle.errors import TrialError
from polythrottle.findings import Finding
from polythrottle.units import show_level

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
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


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
    energy: Source | str
    slowdowns: Slowdowns
    privileged: bool

    def findings(self, clock: Clock) -> tuple[Finding, ...]:
        """Return everything found, knobs first; measuring the energy counter's step takes up to a second."""
        knobs = tuple(self._knob(dial) for dial in self.dials.knobs.values())
        return (self._rights(), *knobs, self._energy(clock), *self._module(), *self._enforced(), *self._state())

    def _rights(self) -> Finding:
        if self.privileged:
            return Finding("rights to set", True, "this process has CAP_SYS_ADMIN, which the driver asks for")
        return Finding("rights to set", False, "this process lacks CAP_SYS_ADMIN, which the driver asks for", PRIVILEGE)

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
        if not isinstance(self.energy, Counter):
            return Finding("energy", True, f"no energy counter; integrated from {self.energy.made_of}")
        step_s = self.energy.step_s(clock)
        pace = "did not move twice in a second" if step_s is None else f"moves every {step_s * 1000:.3g} ms"
        longer = "" if step_s is None else f"windows of {max(0.5, 100 * step_s):.2g} s or more see a hundred steps"
        return Finding("energy", step_s is not None, f"{self.energy.made_of} {pace}", longer)

    def _module(self) -> tuple[Finding, ...]:
        watts = module_w(self.gpu)
        if watts is None:
            return ()
        drawn = f"the module around the GPU draws {watts:.0f} W"
        if isinstance(self.energy, Counter) and self.energy.whose is not Whose.GPU:
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
