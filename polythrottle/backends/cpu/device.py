"""The processor of this machine as a device: knobs, readings, temperature, and what works on it and what does not."""

from __future__ import annotations

import math
import os
import platform
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from polythrottle.actuation import Controls, Limits, SystemControls
from polythrottle.actuation.actuator import ActuatedDevice, Actuator
from polythrottle.actuation.drivers.controls import text_of, trust
from polythrottle.backends.cpu.cpufreq import EPP, MAX, MIN, Policies, Preference, fastest_hz
from polythrottle.backends.cpu.energy import PERMISSION, PowercapZone, Zones, energy_source, probed
from polythrottle.backends.probe import Capability, Tree
from polythrottle.domain.clock import Clock, SystemClock
from polythrottle.domain.errors import DeviceError, InvalidInput, KnobRejected, PolythrottleError, UnknownName
from polythrottle.domain.measurement import EnergyKind, Reading
from polythrottle.domain.ports import Finding, Offer
from polythrottle.domain.space import Knob, Level, OperatingPoint, SearchSpace
from polythrottle.domain.units import unknown_knob

if TYPE_CHECKING:
    from typing_extensions import Self

# What else a processor says of itself: temperature, running clock, throttling, model.

_SENSOR = re.compile(r"x86_pkg_temp|cpu|soc|tj|acpitz", re.IGNORECASE)


class Sensors:
    """The sensors of a processor; what is absent, asleep or forbidden is unknown, never zero.

    Args:
        tree: The machine's files.
    """

    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        self._throttles = self._throttle_count()

    @cached_property
    def _zones(self) -> tuple[Path, ...]:
        zones = self._tree.found("sys/class/thermal/thermal_zone*")
        return tuple(zone for zone in zones if _SENSOR.search(self._tree.text(zone / "type") or ""))

    @cached_property
    def _counters(self) -> tuple[Path, ...]:
        pattern = "sys/devices/system/cpu/cpu[0-9]*/thermal_throttle/package_throttle_count"
        return tuple(self._tree.found(pattern))

    @property
    def files(self) -> tuple[Path, ...]:
        """What is read."""
        zones = (zone / name for zone in self._zones for name in ("type", "temp"))
        return (*zones, *self._counters, self._tree.root / "proc/cpuinfo")

    @property
    def temperature_c(self) -> float | None:
        """The hottest sensor of the processor."""
        found = [self._tree.number(zone / "temp") for zone in self._zones]
        degrees = [milli / 1000 for milli in found if milli is not None]
        # A switched-off sensor reads far outside what silicon survives.
        return max((each for each in degrees if -40 < each < 150), default=None)

    @property
    def throttled(self) -> bool:
        """Whether heat has slowed it down since this was last asked."""
        before = self._throttles
        self._throttles = self._throttle_count()
        return self._throttles > before

    def _throttle_count(self) -> int:
        return sum(self._tree.number(path) or 0 for path in self._counters)

    def told(self, *names: str) -> str | None:
        """Return the first of some lines in ``/proc/cpuinfo`` that is there."""
        text = self._tree.text(self._tree.root / "proc/cpuinfo") or ""
        matches = (re.search(rf"^{name}\s*:\s*(.+)$", text, re.MULTILINE) for name in names)
        return next((match[1].strip() for match in matches if match), None)

    @property
    def virtual(self) -> bool:
        """Whether this is a virtual machine's processor, which says so in its flags."""
        return "hypervisor" in (self.told("flags") or "").split()


# What works on a processor and what does not, one line each, with what can be done about it.

_VIRTUAL = "; this is a virtual machine, and its host keeps them to itself"


def findings(policies: Policies, preference: Preference, zones: Zones, sensors: Sensors) -> tuple[Finding, ...]:
    """Return what works and what does not, with the reason."""
    temperature_c = sensors.temperature_c
    told = "no sensor of the processor" if temperature_c is None else f"{temperature_c:.1f} °C"
    return (
        *_knobs(policies, preference, sensors),
        _energy(zones, sensors),
        *([_platform(zones.platform)] if zones.platform else []),
        Finding("temperature", temperature_c is not None, told),
    )


def _knobs(policies: Policies, preference: Preference, sensors: Sensors) -> Iterator[Finding]:
    virtual = _VIRTUAL if sensors.virtual and not policies.folders else ""
    try:
        for each in (policies.upper, policies.lower, preference.capability):
            finding = each.finding
            known = finding.works or not virtual
            yield finding if known else Finding(each.name, False, f"{finding.explanation}{virtual}", finding.remedy)
    except PolythrottleError as err:
        yield Finding(MAX, False, " ".join(str(err).split()))
    if governor := policies.told("scaling_governor"):
        yield Finding("governor", True, f"{governor}, with driver {policies.told('scaling_driver')}; left alone")


def _energy(zones: Zones, sensors: Sensors) -> Finding:
    counted, reason, remedy = probed(zones)
    if counted is not None:
        return Finding("energy", True, counted.boundary)
    virtual = _VIRTUAL if sensors.virtual and reason == "no RAPL here" else ""
    return Finding("energy", False, f"{reason}{virtual}; estimated from busy time instead", remedy)


def _platform(zone: PowercapZone) -> Finding:
    try:
        total_j = int(text_of(zone.energy)) * 1e-6
    except PermissionError:
        return Finding("psys", False, "the platform's counter is there but not readable", PERMISSION)
    except (OSError, ValueError) as err:
        return Finding("psys", False, f"the platform's counter cannot be read: {' '.join(str(err).split())}")
    return Finding("psys", True, f"{total_j:.1f} J on the platform's counter; holds the packages, so it is not added")


# The processor of this machine as a device.
#
# Files hang from ``root``: cpufreq (kHz), powercap (µJ) and thermal zones (m°C) below ``root/sys``, the model's name
# in ``root/proc/cpuinfo``.

_SETTLE_S = 0.05  # governors look every 10 ms or less (Documentation/admin-guide/pm/cpufreq.rst, sampling_rate)
_OPTIONS = ("busy", "idle_w", "root", "watts_per_core")
_EVERYONE = "everyone"


class CpuDevice(ActuatedDevice):
    """This machine's processor.

    ``cpu_max_hz`` caps the clock of every core: each policy gets its highest frequency not above the level, within the
    limits it was found with. It is there if cpufreq can be written and energy is measured; an estimate from busy time
    cannot see what a lower clock saves, so then the clock is searched only if it is named. So are ``cpu_min_hz``, which
    holds the clock up, and ``cpu_epp``, the energy-performance preference. Governors are left alone.

    Args:
        root: Where ``sys`` and ``proc`` hang.
        watts_per_core: Power of a busy core in watts, to estimate with; if None, RAPL, or else 10 W assumed.
        idle_w: Power drawn at all times in watts, added to an estimate.
        knobs: Which knobs to search; the others stay at their default. ``cpu_max_hz`` if None.
        clock: For readings and waiting.
        state: Folder for the originals; the user's state folder by default.
        controls: How to reach the files.
        limits: The administrator's; read from their file if None.
        everyone: Whether an estimate counts every program, as for a service that runs on this machine.

    Raises:
        InvalidInput: If a power is not a sensible figure, or there is no folder ``root``.
        DeviceError: If cpufreq is there but its files cannot be understood.
        BadFile: If the administrator's limits cannot be understood.
    """

    def __init__(
        self,
        *,
        root: str = "/",
        watts_per_core: float | None = None,
        idle_w: float = 0.0,
        knobs: Sequence[str] | None = None,
        clock: Clock | None = None,
        state: Path | None = None,
        controls: Controls | None = None,
        limits: Limits | None = None,
        everyone: bool = False,
    ) -> None:
        _check(root, watts_per_core, idle_w)
        self._options = {
            "root": None if root == "/" else root,
            "watts_per_core": watts_per_core,
            "idle_w": idle_w or None,
            "busy": _EVERYONE if everyone else None,
        }
        self._searched = knobs
        self.clock: Clock = clock if clock is not None else SystemClock()
        controls = controls if controls is not None else SystemControls()
        limits = limits if limits is not None else Limits.read()
        self._tree = Tree(Path(root), controls)
        self._zones = Zones(self._tree)
        self._sensors = Sensors(self._tree)
        self._energy = energy_source(self._zones, watts_per_core, idle_w, self.clock, everyone)
        name = "cpu" if self._tree.root == Path("/") else f"cpu {self._tree.root}"
        trust(self._tree.root)
        self._actuator = Actuator(name, state=state, controls=controls)
        self._policies = Policies(self._tree, self._actuator, limits)
        self._preference = Preference(self._tree, self._policies.folders, self._actuator, limits)

    @classmethod
    def open(cls, options: Mapping[str, str] | None = None, knobs: Sequence[str] | None = None) -> CpuDevice:
        """Return the device a URI means: ``cpu?watts_per_core=15&idle_w=4`` has these two options.

        Args:
            options: What follows the question mark: ``watts_per_core``, ``idle_w`` in watts, ``root`` a folder,
                ``busy=everyone`` to count every program in an estimate.
            knobs: Which knobs to search; ``cpu_max_hz`` if None.

        Raises:
            UnknownName: If there is no such option.
            InvalidInput: If a value is malformed.
        """
        given = dict(options or {})
        for name in given:
            if name not in _OPTIONS:
                raise UnknownName("option of device cpu", name, _OPTIONS)
        if (busy := given.get("busy", _EVERYONE)) != _EVERYONE:
            raise InvalidInput(
                f"busy={busy[:40]!r} does not say whose work to count; write busy={_EVERYONE}, or leave it out"
            )
        watts = {name: _number(name, given[name]) for name in ("watts_per_core", "idle_w") if name in given}
        root = given.get("root", "/")
        watts_per_core = watts.get("watts_per_core")
        idle_w = watts.get("idle_w", 0.0)
        everyone = "busy" in given
        return cls(root=root, watts_per_core=watts_per_core, idle_w=idle_w, knobs=knobs, everyone=everyone)

    @property
    def uri(self) -> str:
        """The URI that opens this device again."""
        given = {name: value for name, value in sorted(self._options.items()) if value is not None}
        texts = {name: f"{value:.15g}" if isinstance(value, float) else value for name, value in given.items()}
        query = "&".join(f"{name}={text}" for name, text in texts.items())
        if query:
            return f"cpu?{query}"
        return "cpu"

    @cached_property
    def title(self) -> str:
        """The processor's model name and how many cores this process may use."""
        cores = len(os.sched_getaffinity(0))
        return f"{self._model}, {cores} core{'s' if cores > 1 else ''}"

    @property
    def _model(self) -> str:
        return self._sensors.told("model name", "Model") or platform.machine()

    @property
    def identity(self) -> Mapping[str, str]:
        """Model, microcode and cpufreq driver, as far as they are known."""
        told = {
            "cpu": self._model,
            "microcode": self._sensors.told("microcode") or "",
            "cpufreq": self._policies.told("scaling_driver"),
        }
        return {name: text for name, text in told.items() if text}

    @property
    def files(self) -> tuple[str, ...]:
        """Every file it reads or may write."""
        parts = (self._policies.files, self._preference.files, self._zones.files, self._sensors.files)
        return tuple(dict.fromkeys(str(path) for part in parts for path in part))

    def findings(self) -> tuple[Finding, ...]:
        """Return what works and what does not, with the reason."""
        return findings(self._policies, self._preference, self._zones, self._sensors)

    @property
    def energy_kind(self) -> EnergyKind:
        """Measured with RAPL, estimated without."""
        return self._energy.kind

    @property
    def boundary(self) -> str:
        """Which packages or processes the joules cover, and what an estimate rests on."""
        if self.energy_kind is not EnergyKind.ESTIMATED or not self._policies.all:
            return self._energy.boundary
        told = "clock left alone, as" if self._searched is None else "clock searched although"
        return f"{self._energy.boundary}; {told} the estimate does not see what a lower one saves"

    @property
    def presets(self) -> Mapping[str, OperatingPoint]:
        """None: a processor comes without named points."""
        return {}

    @cached_property
    def space(self) -> SearchSpace:
        """Every clock limit, and the knobs named besides; one point without knobs if there is none to choose.

        Raises:
            UnknownName: If a knob is named that no processor has.
            DeviceError: If one is named that this processor does not offer, or cpufreq cannot be understood.
        """
        if not self._knobs:
            return SearchSpace.unit()
        knobs = [Knob(each.name, each.levels) for each in self._knobs]
        space = SearchSpace.grid(knobs, self._default, _ordered)
        if self._searched is None:
            return space
        return space.holding(set(space.names) - set(self._searched))

    @cached_property
    def _knobs(self) -> tuple[Capability, ...]:
        """The knobs of the space: those named, and the clock's limit unless nobody could tell what it saves."""
        blind = self.energy_kind is EnergyKind.ESTIMATED and self._searched is None
        named = self._named()
        return tuple(
            each for each in self._known if each.works and (each.name in named or each.name == MAX) and not blind
        )

    @property
    def _known(self) -> tuple[Capability, ...]:
        return self._policies.upper, self._policies.lower, self._preference.capability

    @property
    def _default(self) -> OperatingPoint:
        return OperatingPoint({each.name: each.default for each in self._knobs})

    def offers(self) -> tuple[Offer, ...]:
        """Return every knob that works here; it can be set if the device was opened with its name, or searches it."""
        searched = {each.name for each in self._knobs if self._searched is None or each.name in self._searched}
        working = (each for each in self._known if each.works)
        return tuple(Offer(Knob(each.name, each.levels), each.default, each.name in searched) for each in working)

    def altered(self) -> tuple[str, ...]:
        """Return the knobs that no longer hold what was applied last.

        Raises:
            DeviceError: If cpufreq is gone.
        """
        names = {"scaling_max_freq": MAX, "scaling_min_freq": MIN}
        return tuple(dict.fromkeys(names.get(key.rpartition("/")[2], EPP) for key in self._actuator.altered()))

    def _named(self) -> tuple[str, ...]:
        known = {each.name: each for each in self._known}
        for name in self._searched or ():
            if name not in known:
                raise unknown_knob(name, known)
            if not known[name].works:
                told = "; ".join(filter(None, (known[name].reason, known[name].remedy)))
                raise DeviceError(f"{name} cannot be searched here: {told}")
        return tuple(self._searched or ())

    def apply(self, point: OperatingPoint) -> None:
        """Set clock limits and preference on every policy, read them back, and wait until they have taken effect.

        Raises:
            KnobRejected: If the level is not one of the device's, or the kernel does not keep it.
            PermissionDenied: If cpufreq may not be written.
            DeviceError: If the device was not entered or is gone.
            StorageError: If the originals cannot be saved; nothing is written then.
        """
        wanted = self._default.moved(point)
        if not self._takes(wanted):
            known = ", ".join(f"{each.name} in {list(each.levels)}" for each in self._knobs) or "no knobs"
            raise KnobRejected(f"cpu cannot take {dict(point)}; it has {known}")
        if not self._knobs:
            return
        floor_hz = int(wanted[MIN]) if MIN in wanted else None
        settings = self._policies.settings(int(wanted[MAX]), floor_hz) if MAX in wanted else []
        self._actuator.apply([*settings, *(self._preference.settings(str(wanted[EPP])) if EPP in wanted else [])])
        self.clock.sleep(_SETTLE_S)

    def _takes(self, wanted: Mapping[str, Level]) -> bool:
        """Say whether a point is one of the space, which is not computed for that."""
        if self._searched is None:
            searched = {each.name for each in self._knobs}
        else:
            searched = set(self._searched)
        levels = {each.name: each.levels if each.name in searched else (each.default,) for each in self._knobs}
        return set(wanted) == set(levels) and all(wanted[name] in levels[name] for name in wanted) and _ordered(wanted)

    def read(self) -> Reading:
        """Return energy so far, the hottest sensor, the fastest core's clock, and whether heat slows it, now.

        Raises:
            DeviceError: If an energy counter has become unreadable.
        """
        clock_hz = fastest_hz(self._tree, self._policies.folders)
        clocks_hz = {} if clock_hz is None else {"cpu": clock_hz}
        throttled = self._sensors.throttled
        return Reading(self.clock.now(), self._energy.total_j(), self._sensors.temperature_c, clocks_hz, throttled)

    def leave_out(self, busy_s: float) -> bool:
        """Leave processor time of others out of an estimate; see `polythrottle.domain.ports.Discounting`."""
        return self._energy.leave_out(busy_s)

    def restore(self) -> None:
        """Restore the limits found at first.

        Raises:
            DeviceError: If one cannot be put back; names each.
        """
        self._actuator.restore()

    @contextmanager
    def sampling(self) -> Iterator[None]:
        """Read the counters as when entered, without becoming the writer."""
        self._energy.start()
        try:
            yield
        finally:
            self._energy.stop()

    def __enter__(self) -> Self:
        if self._knobs:
            self._actuator.__enter__()
        self._energy.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._energy.stop()
        self._actuator.__exit__(kind, error, trace)


def _ordered(point: Mapping[str, object]) -> bool:
    low = point.get(MIN)
    high = point.get(MAX)
    return not (isinstance(low, int) and isinstance(high, int)) or low <= high


def _check(root: str, watts_per_core: float | None, idle_w: float) -> None:
    if watts_per_core is not None and not (math.isfinite(watts_per_core) and watts_per_core > 0):
        raise InvalidInput(f"watts_per_core must be above zero and finite, not {watts_per_core:g}")
    if not (math.isfinite(idle_w) and idle_w >= 0):
        raise InvalidInput(f"idle_w must be zero or more and finite, not {idle_w:g}")
    if not Path(root).is_dir():
        raise InvalidInput(f"there is no folder {root!r} to look for a processor in")


def _number(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise InvalidInput(f"{name}={text!r} is not a number of watts; write for example {name}=10") from None
