"""An NVIDIA GPU that can be tuned: its clocks, its power limit, its joules."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from polythrottle.actuation import Controls, Limits, Setting
from polythrottle.actuation.actuator import ActuatedDevice, Actuator
from polythrottle.actuation.drivers.nvml import PRIVILEGE, UNLOCKED, Library, NotOffered, NvmlControls, key_of
from polythrottle.backends.nvml.energy import (
    SCOPES,
    CounterScope,
    EnergyCounter,
    EnergySource,
    Inspection,
    covers,
    energy_source,
    identity,
    may_set,
    module_w,
)
from polythrottle.backends.nvml.gpu import (
    FAULTS,
    GRAPHICS,
    MEMORY,
    Overrun,
    RequestedClocks,
    Slowdowns,
    Thermometer,
    check_power,
    check_profiles,
    clock_hz,
    find,
    settle,
)
from polythrottle.backends.nvml.knobs import (
    GPU_KNOB,
    MEM_KNOB,
    OFFSET_KNOBS,
    POWER_KNOB,
    PROFILE_KNOB,
    DialledDevice,
    Dials,
    probe,
)
from polythrottle.backends.power import BackgroundSampler
from polythrottle.domain.clock import Clock, SystemClock
from polythrottle.domain.errors import (
    DeviceError,
    InvalidInput,
    KnobAbsent,
    PermissionDenied,
    UnknownName,
)
from polythrottle.domain.measurement import Reading
from polythrottle.domain.ports import Finding
from polythrottle.domain.space import Level, OperatingPoint

if TYPE_CHECKING:
    from typing_extensions import Self

_OPTIONS = ("hz", "scope")
_HZ = 10.0
_MOST_HZ = 100.0
_IDLE_LOOKS = 5
"""An idle GPU whose driver counts its joules is looked at so much more seldom: there is nothing to slow down."""
_FRESH = 2.0
"""So many looks ago something may have been seen in the background to be taken for how it is now."""


@dataclass(frozen=True)
class _Survey:
    """What was seen of a GPU besides its joules."""

    time_s: float
    temperature_c: float | None
    clocks_hz: Mapping[str, int]


class NvmlDevice(DialledDevice, ActuatedDevice):
    """One NVIDIA GPU, by its UUID.

    Its knobs are ``gpu_max_hz``, the highest graphics clock it may run at, held by a lock from the lowest clock there
    is up to the level; ``mem_hz``, the memory clock it is locked to; ``power_limit_w``; and three that are searched
    only if they are named: ``power_profile``, a workload power profile where it has them, ``gpu_offset_hz`` and
    ``mem_offset_hz``, what is added to the clocks of its voltage curve. At its highest level a clock is left to the
    driver, as it was found; the power limit never goes above what was found.

    Clocks that somebody else has locked cannot be seen: NVML reads no lock back. They are taken for unlocked, and are
    unlocked on restoring if they were locked here.

    NVML is open while the device is entered, and for moments before: a GPU with a client can neither sleep nor be
    reset, and one without may forget its locks: without persistence mode also what was handed over; `findings` tells.

    Args:
        name: An index at this moment, a UUID, or nothing where there is only one GPU.
        scope: Whose joules: ``gpu``, or on a Grace superchip ``module``.
        hz: How often a second it is looked at in the background.
        knobs: Which knobs to search, with all their levels; the choice of `space` if None.
        clock: For readings and waiting.
        state: Folder for the originals; the user's state folder by default.
        limits: The administrator's; read from their file by default.
        library: How NVML is reached.
        controls: How the GPU is written; through the same library by default.
        privileged: Whether this process may set anything; judged by its capabilities by default.

    Raises:
        UnknownName: If there is no such GPU.
        InvalidInput: If scope or pace mean nothing, or there are several GPUs and none is named.
        DeviceError: If there is no driver, or the GPU is split by MIG.
    """

    def __init__(
        self,
        name: str = "",
        *,
        scope: str = "gpu",
        hz: float = _HZ,
        knobs: Sequence[str] | None = None,
        clock: Clock | None = None,
        state: Path | None = None,
        limits: Limits | None = None,
        library: Library | None = None,
        controls: Controls | None = None,
        privileged: bool | None = None,
    ) -> None:
        if scope not in SCOPES:
            raise UnknownName("scope of nvml", scope, SCOPES)
        if not (math.isfinite(hz) and 0 < hz <= _MOST_HZ):
            raise InvalidInput(f"hz must lie above 0 and at most at {_MOST_HZ:g} per second, not {hz:g}")
        self.clock: Clock = clock if clock is not None else SystemClock()
        self._library = library if library is not None else Library(self.clock)
        self._gpu = find(self._library, name)
        self._scope = scope
        self._hz = hz
        self._searched = knobs
        self._limits = limits
        self._privileged = may_set() if privileged is None else privileged
        self._slowdowns = Slowdowns(self._gpu)
        self._thermometer = Thermometer(self._gpu)
        self._overrun = Overrun(self._gpu)
        own = NvmlControls(self._library) if controls is None else controls
        self._actuator = Actuator(f"nvml {self._gpu.uuid}", state=state, controls=own)
        self._background = BackgroundSampler(
            self._look, 1.0 / self._hz, self.clock, "polythrottle-lookout", shared=True
        )
        self._locked: set[str] = set()
        self._seen: _Survey | None = None
        self._asked = 0

    @classmethod
    def open(
        cls, name: str = "", options: Mapping[str, str] | None = None, knobs: Sequence[str] | None = None
    ) -> NvmlDevice:
        """Return the GPU a URI means: ``nvml:0?scope=module`` has name 0 and one option.

        Args:
            name: What follows the colon.
            options: What follows the question mark: ``scope`` and ``hz``.
            knobs: Which knobs to search.

        Raises:
            UnknownName: If there is no such option or GPU.
            InvalidInput: If a value is malformed.
            DeviceError: If there is no driver, or the GPU is split by MIG.
        """
        given = dict(options or {})
        for key in given:
            if key not in _OPTIONS:
                raise UnknownName("option of device nvml", key, _OPTIONS)
        try:
            hz = float(given.get("hz", _HZ))
        except ValueError:
            raise InvalidInput(f"hz={given['hz']!r} is not a number; write for example hz=10") from None
        return cls(name, scope=given.get("scope", "gpu"), hz=hz, knobs=knobs)

    @property
    def uuid(self) -> str:
        """The GPU's UUID."""
        return self._gpu.uuid

    @property
    def uri(self) -> str:
        """The URI that opens this device again, by UUID: indexes move."""
        options = [f"scope={self._scope}"] if self._scope != "gpu" else []
        options += [f"hz={self._hz:g}"] if self._hz != _HZ else []
        return f"nvml:{self.uuid}{'?' if options else ''}{'&'.join(options)}"

    @cached_property
    def title(self) -> str:
        """The GPU's name."""
        return str(self._gpu.ask("nvmlDeviceGetName"))

    @cached_property
    def identity(self) -> Mapping[str, str]:
        """What identifies the GPU and its firmware: name, uuid, vbios, driver, pci and more."""
        return identity(self._gpu)

    @property
    def files(self) -> tuple[str, ...]:
        """The files that tell of it; it is read and steered through the driver, not through files."""
        # NVML writes 00000000:3B:00.0, the kernel 0000:3b:00.0.
        domain, _, rest = self.identity.get("pci", "").lower().partition(":")
        gpu = f"/proc/driver/nvidia/gpus/{domain[-4:]}:{rest}/information"
        if rest:
            return ("/proc/driver/nvidia/version", gpu)
        return ("/proc/driver/nvidia/version",)

    @cached_property
    def boundary(self) -> str:
        """What the joules cover and which readings they are made of."""
        source = self._energy
        if isinstance(source, str):
            return f"unknown: this GPU reports neither energy nor power ({source})"
        if isinstance(source, EnergyCounter):
            sampled = ""
        else:
            sampled = f", taken {self._hz:g} times a second and integrated"
        whose = covers(source, self._scope)
        if whose is CounterScope.MODULE:
            narrower = "" if self._scope == "module" else " (the GPU alone is not told)"
            whole = f"the whole module, GPU, its memory and processor{narrower}"
            return f"{source.made_of}{sampled}: {whole}; the rest excluded"
        with self._library:
            if self.dials.on:
                fixed = ""
            else:
                fixed = "; nothing on it can be set, and polythrottle doctor says why"
            beside = "the rest of its module and " if module_w(self._gpu) is not None else ""
        if whose is CounterScope.UNTOLD:
            either = "the GPU with its memory or the whole module, which readings do not tell apart"
            return f"{source.made_of}{sampled}: {either}; the host excluded{fixed}"
        return f"{source.made_of}{sampled}: the whole GPU with its memory; {beside}the host excluded{fixed}"

    @cached_property
    def dials(self) -> Dials:
        """Every knob, with its levels or the reason it is off."""
        limits = self._limits if self._limits is not None else Limits.read()
        with self._library:
            return probe(self._gpu, limits, self._actuator.original)

    @property
    def _hint(self) -> str:
        if isinstance(self._energy, str):
            return ""
        return "; it can be measured all the same"

    def altered(self) -> tuple[str, ...]:
        """Return the knobs that no longer hold what was applied last; of a locked clock nobody can tell.

        Raises:
            DeviceError: If the GPU is gone.
        """
        with self._library:
            changed = set(self._actuator.altered())
        return tuple(each.name for each in self.dials.on if key_of(self.uuid, each.what) in changed)

    @cached_property
    def _energy(self) -> EnergySource | str:
        with self._library:
            return energy_source(self._gpu, self.clock, self._scope)

    def findings(self) -> tuple[Finding, ...]:
        """Return what works on this GPU and what does not, and why; takes about a second, sets nothing.

        Raises:
            DeviceError: If the GPU is gone.
        """
        with self._library:
            seen = Inspection(self._gpu, self.dials, self._energy, self._slowdowns, self._privileged)
            return seen.findings(self.clock)

    def apply(self, point: OperatingPoint) -> None:
        """Set memory clock, graphics clock, power limit and profile in this order, read back, wait for the clocks.

        Raises:
            KnobRejected: If the GPU does not have the point, or refuses it or does not keep it.
            KnobAbsent: If the driver answers that the GPU does not have a knob at all.
            PermissionDenied: If this process may not set anything; nothing is tried then.
            DeviceError: If the device was not entered or is gone.
            StorageError: If the originals cannot be saved; nothing is written then.
        """
        wanted = self._wanted(point)
        settings = self._needed(wanted)
        if settings and not self._privileged:
            raise PermissionDenied(f"{self.title} may be read but not set; {PRIVILEGE}")
        with self._library:
            # Noted before they are written: what fails half-way may have locked some all the same.
            self._locked |= {setting.key for setting in settings}
            with self._telling_what_lacks():
                self._actuator.apply(settings)
            # Until they have settled, clocks on their way down would look like an overrun.
            self._overrun.expect(RequestedClocks(None, None))
            settle(self._gpu, self._targets(wanted), self._slowdowns, self.clock)
            self._check_enforced(wanted)
            self._overrun.expect(self._targets(wanted))
        # What the driver reported while the clocks moved is not held against the readings that follow.
        self._slowdowns.take()
        self._seen = None

    @contextmanager
    def _telling_what_lacks(self) -> Iterator[None]:
        """Turn the driver's answer that a GPU does not have a control at all into one that names the knob."""
        try:
            yield
        except NotOffered as err:
            knob = next((each.name for each in self.dials.on if key_of(self.uuid, each.what) == err.key), "")
            if not (knob and err.for_good):
                raise
            raise KnobAbsent(f"{self.title} does not have {knob} after all: {err}", knob) from err

    def _needed(self, wanted: Mapping[str, Level]) -> list[Setting]:
        """Return the writes for a point; what is as it was found and nobody here has touched is not among them."""
        every = {
            dial.name: Setting(key_of(self.uuid, dial.what), self.dials.text(dial.name, wanted))
            for dial in self.dials.on
        }
        # An offset that nobody has named is nobody's business here, whoever moves it.
        left = {name for name in OFFSET_KNOBS if name not in wanted}
        return [
            setting
            for name, setting in every.items()
            if setting.key in self._locked or not (name in left or self._resting(setting))
        ]

    def _resting(self, setting: Setting) -> bool:
        # Of a lock nobody can tell whether it holds, so one is only lifted if it was made here.
        return setting.text == UNLOCKED or self._actuator.live(setting.key) == setting.text

    def _targets(self, wanted: Mapping[str, Level]) -> RequestedClocks:
        held = {
            name: int(wanted[name])
            for name in (GPU_KNOB, MEM_KNOB)
            if name in wanted and self.dials.text(name, wanted) != UNLOCKED
        }
        return RequestedClocks(held.get(GPU_KNOB), held.get(MEM_KNOB))

    def _check_enforced(self, wanted: Mapping[str, Level]) -> None:
        power = self.dials.knobs[POWER_KNOB]
        profile = self.dials.knobs[PROFILE_KNOB]
        if power.default is not None:
            found_mw = int(self._actuator.original(key_of(self.uuid, power.what)))
            check_power(self._gpu, int(self.dials.text(POWER_KNOB, wanted)), found_mw)
        if wanted.get(PROFILE_KNOB, profile.default) != profile.default:
            check_profiles(self._gpu, self.dials.text(PROFILE_KNOB, wanted))

    def read(self) -> Reading:
        """Return energy so far, the hottest sensor, the clocks that run, and whether it slowed itself down since.

        Raises:
            DeviceError: If the GPU is gone, its driver was loaded anew, or it reports neither energy nor power.
        """
        if isinstance(self._energy, str):
            raise DeviceError(
                f"{self.title} reports neither energy nor power ({self._energy}), so nothing can be measured on it"
            )
        with self._library:
            seen = self._seen
            # Each answer of the driver may take milliseconds: what was just seen in the background is not asked again.
            if seen is None or not self._background.running or self.clock.now() - seen.time_s > _FRESH / self._hz:
                self._seen = seen = self._survey()
            self._asked += 1
            throttled = bool(self._slowdowns.take() & sum(FAULTS))
            energy_j = self._energy.total_j()
        overrun = self._overrun.take()
        return Reading(self.clock.now(), energy_j, seen.temperature_c, seen.clocks_hz, throttled, overrun=overrun)

    def _survey(self) -> _Survey:
        """Look at everything but the joules."""
        self._slowdowns.look()
        self._overrun.look()
        return _Survey(self.clock.now(), self._thermometer.hottest_c(), self._clocks_hz())

    def _clocks_hz(self) -> dict[str, int]:
        found = {"gpu": clock_hz(self._gpu, GRAPHICS), "mem": clock_hz(self._gpu, MEMORY)}
        return {name: hz for name, hz in found.items() if hz is not None}

    def restore(self) -> None:
        """Restore the power limit and profiles found at first, and unlock the clocks that were locked here.

        Raises:
            DeviceError: If something cannot be put back; names each.
        """
        self._overrun.expect(RequestedClocks(None, None))
        with self._library:
            self._actuator.restore()
        self._locked.clear()
        self._seen = None

    def _look(self) -> int:
        """Look once, and return how many looks may be left out until the next."""
        with self._library:
            if self._asked > 1:  # whoever asks seldom looks for himself
                self._seen = self._survey()
            else:
                self._slowdowns.look()
                self._overrun.look()
            self._asked = 0
            if not isinstance(self._energy, str):
                self._energy.look()
        if self._slowdowns.idle and isinstance(self._energy, (EnergyCounter, str)):
            return _IDLE_LOOKS - 1
        return 0

    @contextmanager
    def sampling(self) -> Iterator[None]:
        """Look at the GPU in the background as when entered, without becoming its writer."""
        with self._library:
            self._background.start()
            try:
                yield
            finally:
                self._background.stop()

    def __enter__(self) -> Self:
        self._library.__enter__()
        try:
            self._actuator.allow(*(dial.control(self.uuid) for dial in self.dials.on))
            self._actuator.__enter__()
        except BaseException:
            self._library.__exit__(None, None, None)
            raise
        if isinstance(self.clock, SystemClock):
            self._background.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(self.clock, SystemClock):
            self._background.stop()
        try:
            self._actuator.__exit__(kind, error, trace)
        finally:
            self._locked.clear()
            self._overrun.expect(RequestedClocks(None, None))
            self._library.__exit__(kind, error, trace)
