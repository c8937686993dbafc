"""The processor of this machine: its clock limit where it can be set, its energy counted or estimated.

Files hang from ``root``: cpufreq (kHz), powercap (µJ) and thermal zones (m°C) below ``root/sys``, the model's name in
``root/proc/cpuinfo``.
"""

import math
import os
import platform
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Self

from polythrottle.actuation import Actuator, Difference
from polythrottle.backends.cpu_energy import energy_source
from polythrottle.clock import Clock, SystemClock
from polythrottle.errors import DeviceError, InvalidInput, KnobRejected, UnknownName
from polythrottle.measurement import EnergyKind, Reading
from polythrottle.space import Knob, Level, OperatingPoint, SearchSpace

KNOB = "cpu_max_hz"
ASSUMED_WATTS_PER_CORE = 10.0
_STEPS = 6
_SETTLE_S = 0.05  # governors look every 10 ms or less (Documentation/admin-guide/pm/cpufreq.rst, sampling_rate)
_SENSOR = re.compile(r"x86_pkg_temp|cpu|soc|tj|acpitz", re.IGNORECASE)
_OPTIONS = ("idle_w", "root", "watts_per_core")


class Policy:
    """One cpufreq policy: cores that share a clock.

    Args:
        folder: Such as ``/sys/devices/system/cpu/cpufreq/policy0``.
        actuator: Knows the limits as they were before anyone tuned them.
    """

    def __init__(self, folder: Path, actuator: Actuator) -> None:
        self.max_file = str(folder / "scaling_max_freq")
        self._folder = folder
        lowest = int(actuator.original(str(folder / "scaling_min_freq")))
        self.default_khz = int(actuator.original(self.max_file))
        table = self._table() or _steps(lowest, self.default_khz)
        # Only between the limits found here: nobody's floor or cap is crossed.
        self.levels_khz = sorted({khz for khz in table if lowest <= khz <= self.default_khz} | {self.default_khz})

    def _table(self) -> list[int]:
        path = self._folder / "scaling_available_frequencies"
        return [int(word) for word in path.read_text().split()] if path.is_file() else []

    def cap_khz(self, limit_khz: int) -> int:
        """Return the highest level not above a limit, or the lowest there is."""
        return max((khz for khz in self.levels_khz if khz <= limit_khz), default=self.levels_khz[0])


class CpuDevice:
    """This machine's processor.

    Its one knob, ``cpu_max_hz``, caps the clock of every core: each policy gets its highest frequency not above the
    level, within the limits it was found with. It is there if cpufreq can be written and energy is measured; an
    estimate from busy time cannot see what a lower clock saves, so then the clock is searched only if it is named.

    Args:
        root: Where ``sys`` and ``proc`` hang.
        watts_per_core: Power of a busy core in watts, to estimate with; if None, RAPL, or else 10 W assumed.
        idle_w: Power drawn at all times in watts, added to an estimate.
        knobs: Which knobs to search; the others stay at their default. All if None.
        clock: For readings and waiting.
        state: Folder for the originals; the user's state folder by default.

    Raises:
        InvalidInput: If a power is not a sensible figure, or there is no folder ``root``.
        DeviceError: If cpufreq is there but its files cannot be understood.
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
    ) -> None:
        if watts_per_core is not None and not (math.isfinite(watts_per_core) and watts_per_core > 0):
            raise InvalidInput(f"watts_per_core must be above zero and finite, not {watts_per_core:g}")
        if not (math.isfinite(idle_w) and idle_w >= 0):
            raise InvalidInput(f"idle_w must be zero or more and finite, not {idle_w:g}")
        self._root = Path(root)
        if not self._root.is_dir():
            raise InvalidInput(f"there is no folder {root!r} to look for a processor in")
        self._options = {
            "root": None if root == "/" else root,
            "watts_per_core": watts_per_core,
            "idle_w": idle_w or None,
        }
        self._searched = knobs
        self.clock: Clock = clock if clock is not None else SystemClock()
        self._energy = energy_source(self._root, watts_per_core, idle_w, ASSUMED_WATTS_PER_CORE, self.clock)
        self._actuator = Actuator("cpu" if root == "/" else f"cpu {self._root.resolve()}", state=state)
        self._throttles = self._throttle_count()

    @classmethod
    def open(cls, options: Mapping[str, str] | None = None, knobs: Sequence[str] | None = None) -> "CpuDevice":
        """Return the device a URI means: ``cpu?watts_per_core=15&idle_w=4`` has these two options.

        Args:
            options: What follows the question mark: ``watts_per_core``, ``idle_w`` in watts, ``root`` a folder.
            knobs: Which knobs to search; all if None.

        Raises:
            UnknownName: If there is no such option.
            InvalidInput: If a value is malformed.
        """
        given = dict(options or {})
        for name in given:
            if name not in _OPTIONS:
                raise UnknownName("option of device cpu", name, _OPTIONS)
        watts = {name: _number(name, given[name]) for name in ("watts_per_core", "idle_w") if name in given}
        root, watts_per_core = given.get("root", "/"), watts.get("watts_per_core")
        return cls(root=root, watts_per_core=watts_per_core, idle_w=watts.get("idle_w", 0.0), knobs=knobs)

    @property
    def uri(self) -> str:
        """The URI that opens this device again."""
        given = {name: value for name, value in sorted(self._options.items()) if value is not None}
        texts = {name: f"{value:.15g}" if isinstance(value, float) else value for name, value in given.items()}
        query = "&".join(f"{name}={text}" for name, text in texts.items())
        return f"cpu?{query}" if query else "cpu"

    @cached_property
    def title(self) -> str:
        """The processor's model name and how many cores this process may use."""
        text = _text(self._root / "proc/cpuinfo") or ""
        match = re.search(r"^(?:model name|Model)\s*:\s*(.+)$", text, re.MULTILINE)
        cores = len(os.sched_getaffinity(0))
        return f"{match[1].strip() if match else platform.machine()}, {cores} core{'s' if cores > 1 else ''}"

    @property
    def energy_kind(self) -> EnergyKind:
        """Measured with RAPL, estimated without."""
        return self._energy.kind

    @property
    def boundary(self) -> str:
        """Which packages or processes the joules cover, and what an estimate rests on."""
        if self.energy_kind is not EnergyKind.ESTIMATED or not self._policies:
            return self._energy.boundary
        told = "clock left alone, as" if self._searched is None else "clock searched although"
        return f"{self._energy.boundary}; {told} the estimate does not see what a lower one saves"

    @property
    def presets(self) -> Mapping[str, OperatingPoint]:
        """None: a processor comes without named points."""
        return {}

    @property
    def differences(self) -> tuple[Difference, ...]:
        """What was left changed on restoring because someone else had set it since."""
        return self._actuator.differences

    @cached_property
    def _policies(self) -> list[Policy]:
        folders = sorted((self._root / "sys/devices/system/cpu/cpufreq").glob("policy[0-9]*"))
        if not folders or not all(os.access(folder / "scaling_max_freq", os.W_OK) for folder in folders):
            return []
        try:
            return [Policy(folder, self._actuator) for folder in folders]
        except (OSError, ValueError, KnobRejected) as err:
            raise DeviceError(f"cannot read the clock limits in {folders[0].parent}: {err}") from err

    @cached_property
    def space(self) -> SearchSpace:
        """Every clock limit, or one point without knobs if there is none to choose."""
        blind = self.energy_kind is EnergyKind.ESTIMATED and self._searched is None
        if blind or not self._policies:
            return self._only_searched(SearchSpace.unit())
        levels = sorted({khz * 1000 for policy in self._policies for khz in policy.levels_khz})
        default = max(policy.default_khz for policy in self._policies) * 1000
        return self._only_searched(SearchSpace.grid([Knob(KNOB, tuple(levels))], {KNOB: default}))

    def _only_searched(self, space: SearchSpace) -> SearchSpace:
        if self._searched is None:
            return space
        searched = {space.knob(name).name for name in self._searched}
        return space.holding(set(space.names) - searched)

    def apply(self, point: OperatingPoint) -> None:
        """Set the clock limit on every policy, read it back, and wait until it has taken effect.

        Raises:
            KnobRejected: If the level is not one of the device's, or the kernel does not keep it.
            PermissionDenied: If cpufreq may not be written.
            DeviceError: If the device was not entered or is gone.
            StorageError: If the originals cannot be saved; nothing is written then.
        """
        wanted = self.space.default.moved(point)
        if wanted not in self.space:
            known = ", ".join(f"{knob.name} in {list(knob.levels)}" for knob in self.space.knobs) or "no knobs"
            raise KnobRejected(f"cpu cannot take {dict(point)}; it has {known}")
        if self.space.knobs:
            self._cap(wanted[KNOB])

    def _cap(self, limit_hz: Level) -> None:
        for policy in self._policies:
            self._actuator.write(policy.max_file, str(policy.cap_khz(int(limit_hz) // 1000)))
        self.clock.sleep(_SETTLE_S)

    def read(self) -> Reading:
        """Return energy so far, the hottest sensor, the fastest core's clock, and whether heat slows it, now.

        Raises:
            DeviceError: If an energy counter has become unreadable.
        """
        temperature_c, clocks_hz, throttled = self._temperature_c(), self._clocks_hz(), self._throttled()
        return Reading(self.clock.now(), self._energy.total_j(), temperature_c, clocks_hz, throttled)

    def _temperature_c(self) -> float | None:
        readings = [_text(path) for path in self._sensors]
        degrees = [int(text) / 1000 for text in readings if text and re.fullmatch(r"-?\d+", text)]
        # A switched-off sensor reads far outside what silicon survives.
        return max((each for each in degrees if -40 < each < 150), default=None)

    @cached_property
    def _sensors(self) -> list[Path]:
        zones = sorted((self._root / "sys/class/thermal").glob("thermal_zone*"))
        return [zone / "temp" for zone in zones if _SENSOR.search(_text(zone / "type") or "")]

    def _clocks_hz(self) -> dict[str, int]:
        folders = (self._root / "sys/devices/system/cpu/cpufreq").glob("policy[0-9]*")
        texts = [_text(folder / "scaling_cur_freq") for folder in folders]
        clocks_khz = [int(text) for text in texts if text and text.isdigit()]
        return {"cpu": max(clocks_khz) * 1000} if clocks_khz else {}

    def _throttled(self) -> bool:
        before, self._throttles = self._throttles, self._throttle_count()
        return self._throttles > before

    def _throttle_count(self) -> int:
        paths = (self._root / "sys/devices/system/cpu").glob("cpu[0-9]*/thermal_throttle/package_throttle_count")
        return sum(int(text) for text in map(_text, paths) if text and text.isdigit())

    def restore(self) -> None:
        """Restore the clock limits found at first.

        Raises:
            DeviceError: If one cannot be put back; names each.
        """
        self._actuator.restore()

    def __enter__(self) -> Self:
        if self._policies:
            self._actuator.__enter__()
        self._energy.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._energy.stop()
        self._actuator.__exit__(kind, error, trace)


def _steps(lowest_khz: int, highest_khz: int) -> list[int]:
    """Return a handful of clocks between two, in whole 100 MHz as processors without a table take them."""
    between = [lowest_khz + (highest_khz - lowest_khz) * step / (_STEPS - 1) for step in range(1, _STEPS - 1)]
    return [lowest_khz, *(round(khz / 100_000) * 100_000 for khz in between), highest_khz]


def _number(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise InvalidInput(f"{name}={text!r} is not a number of watts; write for example {name}=10") from None


def _text(path: Path) -> str | None:
    """Return what a file holds, or None: a sensor that is absent, asleep or forbidden is unknown, not zero."""
    try:
        return path.read_text().strip()
    except OSError:
        return None
