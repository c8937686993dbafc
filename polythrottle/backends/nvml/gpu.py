"""One NVIDIA GPU as NVML shows it: fields, slowdowns and why, temperature.

The wait until it does what was asked of it.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

from polythrottle.actuation.drivers.nvml import BLANK, Library, NotOffered, profiles, translated
from polythrottle.domain.clock import Clock
from polythrottle.domain.errors import DeviceError, InvalidInput, KnobRejected, UnknownName

# One NVIDIA GPU as NVML shows it. Nothing here sets anything; units are NVML's own: MHz, mW, mJ, µs.
#
# Calls: NVML API reference, Device Queries. What GPU or driver do not have raises `NotOffered`, a blank number too:
# NVML and DCGM have values that look finite and mean "no value".

WIDE_BLANK = 1 << 47
"""Where blank numbers of 64 bits and floating point begin; a 32-bit one is an ordinary value of a counter of mJ."""

VOLTA = 5
AMPERE = 7
BLACKWELL = 10
"""Architectures as nvmlDeviceGetArchitecture counts them."""

_MEMBERS = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")  # nvmlValueType_t
_UNKNOWN_ARCHITECTURE = 0xFFFFFFFF
_MIG = "its power cannot be told from its neighbours', so nothing on it can be tuned"


@dataclass(frozen=True)
class Field:
    """One field value: a number, and when the driver took it."""

    value: float
    timestamp_us: int


@dataclass(frozen=True)
class Gpu:
    """A GPU, known by its UUID: indexes move.

    Args:
        library: How NVML is reached.
        uuid: As nvmlDeviceGetUUID spells it.
    """

    library: Library
    uuid: str

    def ask(self, name: str, *arguments: Any) -> Any:
        """Return what a function of NVML answers for this GPU.

        Args:
            name: Of a function of ``pynvml`` whose first argument is the GPU.
            arguments: The others.

        Raises:
            NotOffered: If GPU or driver do not have it.
            KnobRejected: If the driver keeps saying "not now".
            DeviceError: If the GPU is gone.
        """
        with self.library:
            return self.library.ask(self.uuid, name, *arguments)

    def number(self, name: str, *arguments: Any, blank: int = BLANK) -> int:
        """Return a whole number that is one; as `ask`.

        Args:
            name: Of the function.
            arguments: For it, after the GPU.
            blank: Where numbers that mean "no value" begin.

        Raises:
            NotOffered: Also if the answer is blank.
        """
        value = int(self.ask(name, *arguments))
        if value >= blank:
            raise NotOffered(f"{name}: the driver gives no value")
        return value

    def maybe(self, name: str, *arguments: Any) -> Any:
        """Return what a function answers, or None where GPU or driver do not have it; as `ask` otherwise."""
        try:
            return self.ask(name, *arguments)
        except NotOffered:
            return None

    def field(self, number: int, scope: int = 0, blank: int = BLANK) -> Field:
        """Return a field value; each has a return code of its own, which is looked at.

        Args:
            number: As NVML_FI_DEV_….
            scope: As NVML_POWER_SCOPE_…, where the field has scopes.
            blank: Where numbers that mean "no value" begin.

        Raises:
            NotOffered: If GPU or driver do not have the field, or its value is blank.
            KnobRejected: If there is no value at the moment.
            DeviceError: If the GPU is gone.
        """
        found = self.ask("nvmlDeviceGetFieldValues", [(number, scope)])[0]
        if found.nvmlReturn:
            raise translated(f"field {number} of scope {scope}", found.nvmlReturn)
        if not 0 <= found.valueType < len(_MEMBERS):
            raise NotOffered(f"field {number} of scope {scope}: the driver gives it in an unknown form")
        value = float(getattr(found.value, _MEMBERS[found.valueType]))
        if not value < blank:
            raise NotOffered(f"field {number} of scope {scope}: the driver gives no value")
        return Field(value, int(found.timestamp))

    @property
    def architecture(self) -> int | None:
        """Which generation it is, as NVML counts; None if the driver does not say."""
        number = self.maybe("nvmlDeviceGetArchitecture")
        if number in (None, _UNKNOWN_ARCHITECTURE):
            return None
        return int(number)

    @property
    def averages_power(self) -> bool | None:
        """Whether its power reading is an average over a second; None if the generation is unknown.

        It is on Ampere, GA100 excepted, and on all that came after (NVML API reference, nvmlDeviceGetPowerUsage).
        """
        architecture = self.architecture
        if architecture is None:
            return None
        return architecture >= AMPERE and self.maybe("nvmlDeviceGetCudaComputeCapability") != (8, 0)


def find(library: Library, name: str) -> Gpu:
    """Return the GPU a URI names: an index, which counts at this moment only, or a UUID; the only one if it names none.

    Raises:
        UnknownName: If there is no such GPU.
        InvalidInput: If there are several and none is named.
        DeviceError: If there is no driver or no GPU, or it is split into MIG instances.
    """
    if name.startswith("MIG-"):
        raise DeviceError(f"{name} is an instance of a GPU split by MIG; {_MIG}")
    with library:
        known = uuids_by_index(library)
        if not known:
            raise DeviceError("the NVIDIA driver is here, but it finds no GPU")
        if not name and len(known) > 1:
            raise InvalidInput(f"there are {len(known)} GPUs; name one: nvml:0 to nvml:{len(known) - 1}, or its UUID")
        uuid = known.get(name or "0", name)
        if uuid not in known.values():
            raise UnknownName("GPU", name, (*known, *known.values()))
        gpu = Gpu(library, uuid)
        refuse_mig(gpu)
        return gpu


def uuids_by_index(library: Library) -> dict[str, str]:
    """Return the UUID of every GPU by its index; a GPU that is lost is left out."""
    found = {}
    for index in range(int(library.call("nvmlDeviceGetCount"))):
        try:
            handle = library.call("nvmlDeviceGetHandleByIndex", index)
            found[str(index)] = str(library.call("nvmlDeviceGetUUID", handle))
        except DeviceError:
            continue
    return found


def refuse_mig(gpu: Gpu) -> None:
    """Refuse a GPU that is split into MIG instances.

    Raises:
        DeviceError: If it is, or is gone.
    """
    mode = gpu.maybe("nvmlDeviceGetMigMode")
    if mode is not None and mode[0]:
        raise DeviceError(
            f"{gpu.ask('nvmlDeviceGetName')} is split by MIG; {_MIG}; with no work on it, turn MIG off: "
            f"nvidia-smi -i {gpu.uuid} -mig 0"
        )


# Whether a GPU slows itself down, and why: the driver's clock event reasons.

IDLE = 0x1
POWER_CAP = 0x4
FAULTS = {0x8: "hardware slowdown", 0x20: "heat", 0x40: "heat, in hardware", 0x80: "power brake"}
"""Reasons that spoil a window. Reaching the power limit (0x4) is none of them: that is what a limit is for."""

_REASON_CALLS = ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons")  # newer, older


class Slowdowns:
    """Gathers the reasons seen between two readings, from any thread.

    Args:
        gpu: Whose.
    """

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._names = list(_REASON_CALLS)
        self._guard = threading.Lock()
        self._seen = 0
        self.idle = False
        """Whether nothing ran on the GPU when it was looked at last, and nothing slowed it down."""

    def now(self) -> int | None:
        """Return the bits that are set now, by whichever call this driver has; None if it has neither.

        Raises:
            DeviceError: If the GPU is gone.
        """
        while self._names:
            try:
                return int(self._gpu.ask(self._names[0]))
            except NotOffered:
                del self._names[0]
        return None

    def look(self) -> None:
        """Take note of the reasons that hold now.

        Raises:
            DeviceError: If the GPU is gone.
        """
        found = self.now() or 0
        self.idle = found == IDLE
        with self._guard:
            self._seen |= found

    def take(self) -> int:
        """Return every reason noted since the last time, and forget them."""
        with self._guard:
            seen = self._seen
            self._seen = 0
        return seen


def faults(reasons: int) -> str:
    """Return the reasons that spoil a window, in words; empty if there is none."""
    return ", ".join(name for bit, name in FAULTS.items() if reasons & bit)


# How hot a GPU is: the hotter of its die and its memory.

_MEMORY_FIELD = 82  # NVML_FI_DEV_MEMORY_TEMP
_DIE = 0  # NVML_TEMPERATURE_GPU
_TEMPERATURE_CALLS = ("nvmlDeviceGetTemperatureV", "nvmlDeviceGetTemperature")  # newer, older


class Thermometer:
    """Reads a GPU's temperatures by whichever calls its driver has.

    Args:
        gpu: Whose.
    """

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._names = list(_TEMPERATURE_CALLS)
        self._memory = True

    def hottest_c(self) -> float | None:
        """Return the hotter of die and memory in °C; None if neither is known.

        Raises:
            DeviceError: If the GPU is gone.
        """
        known = [each for each in (self._die_c(), self._memory_c()) if each is not None]
        return max(known, default=None)

    def _die_c(self) -> float | None:
        while self._names:
            try:
                return float(self._gpu.number(self._names[0], _DIE))
            except NotOffered:
                del self._names[0]
        return None

    def _memory_c(self) -> float | None:
        if not self._memory:
            return None
        try:
            # Memory without a sensor reads 0, and no memory at work is that cold.
            return self._gpu.field(_MEMORY_FIELD).value or None
        except NotOffered:
            self._memory = False
            return None


# Wait until what was asked of a GPU has taken effect, as far as its clocks show.
#
# Locked clocks cannot be read back, so what runs is the only witness. How long a change takes varies strongly by GPU
# and target (arXiv 2502.20075).

GRAPHICS = 0
MEMORY = 2
"""Clock domains as nvmlDeviceGetClockInfo numbers them (nvmlClockType_t)."""

_MOST_S = 2.0
_LOOK_S = 0.01
_SLACK_HZ = 15_000_000  # drivers round to their own steps, the coarsest of which are 15 MHz
_HELD_LOWER = IDLE | POWER_CAP | sum(FAULTS)


@dataclass(frozen=True)
class RequestedClocks:
    """The clocks that were asked for, in Hz; None where the driver is free.

    Args:
        graphics_hz: At most this.
        memory_hz: Exactly this while there is work.
    """

    graphics_hz: int | None
    memory_hz: int | None


def clock_hz(gpu: Gpu, domain: int) -> int | None:
    """Return the clock that runs in a domain, or None if the driver does not say.

    Raises:
        DeviceError: If the GPU is gone.
    """
    try:
        return gpu.number("nvmlDeviceGetClockInfo", domain) * 1_000_000
    except NotOffered:
        return None


class Overrun:
    """Notices clocks that run above what they were locked to, from any thread.

    A GB10 takes locks without effect; another tool may reset them; and a driver without persistence mode forgets them
    once it is unloaded. No call tells, but the clocks that run under load do. What is within a step of the coarsest
    drivers is none.

    Args:
        gpu: Whose.
    """

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._wanted = RequestedClocks(None, None)
        self._guard = threading.Lock()
        self._seen = ""

    def expect(self, wanted: RequestedClocks) -> None:
        """Expect these clocks from now on, and forget what was seen before."""
        with self._guard:
            self._wanted = wanted
            self._seen = ""

    def look(self) -> None:
        """Take note of a clock that runs above its lock now.

        Raises:
            DeviceError: If the GPU is gone.
        """
        wanted = self._wanted
        for name, domain, lock_hz in (("graphics", GRAPHICS, wanted.graphics_hz), ("memory", MEMORY, wanted.memory_hz)):
            now_hz = None if lock_hz is None else clock_hz(self._gpu, domain)
            if now_hz is None or lock_hz is None or now_hz <= lock_hz + _SLACK_HZ:
                continue
            with self._guard:
                if wanted is self._wanted:  # not one that was just replaced
                    self._seen = (
                        f"the {name} clock was locked to {lock_hz // 10**6} MHz and ran at {now_hz // 10**6} MHz"
                    )

    def take(self) -> str:
        """Return what was noted since the last time, in words, and forget it."""
        with self._guard:
            seen = self._seen
            self._seen = ""
        return seen


def settle(gpu: Gpu, wanted: RequestedClocks, slowdowns: Slowdowns, clock: Clock) -> None:
    """Wait until the clocks have followed, for two seconds at most.

    A clock below what was asked for is taken as it is when the GPU idles or its power or heat holds it down; a graphics
    clock below is taken after the wait too, for the lock is a ceiling and work may be light.

    Raises:
        KnobRejected: If a clock does not come down to what was asked for, or the memory clock not up to it under work.
        DeviceError: If the GPU is gone.
    """
    end_s = clock.now() + _MOST_S
    while True:
        problem, reached = _look(gpu, wanted, slowdowns)
        if reached:
            return
        if clock.now() >= end_s:
            break
        clock.sleep(_LOOK_S)
    if problem:
        raise KnobRejected(problem)


def _look(gpu: Gpu, wanted: RequestedClocks, slowdowns: Slowdowns) -> tuple[str, bool]:
    """Return what is wrong with the clocks, if anything, and whether they have arrived."""
    reasons = slowdowns.now()
    excused = reasons is None or bool(reasons & _HELD_LOWER)
    problems = []
    low = False
    for name, domain, target_hz in (("graphics", GRAPHICS, wanted.graphics_hz), ("memory", MEMORY, wanted.memory_hz)):
        now_hz = clock_hz(gpu, domain) if target_hz is not None else None
        if now_hz is None or target_hz is None:
            continue
        below = now_hz < target_hz - _SLACK_HZ and not excused
        low = low or below
        if now_hz > target_hz + _SLACK_HZ or (below and domain == MEMORY):
            problems.append(f"asked for a {name} clock of {target_hz // 10**6} MHz, but {now_hz // 10**6} MHz run")
    return "; ".join(problems), not problems and not low


def check_power(gpu: Gpu, limit_mw: int, found_mw: int) -> None:
    """Check that a power limit is not only set but enforced.

    Args:
        gpu: Whose.
        limit_mw: What was set.
        found_mw: What the GPU was found with; nothing is expected of that one.

    Raises:
        KnobRejected: If something outside, such as a baseboard controller, enforces a lower one.
        DeviceError: If the GPU is gone.
    """
    try:
        enforced_mw = gpu.number("nvmlDeviceGetEnforcedPowerLimit")
    except NotOffered:
        return
    if enforced_mw < limit_mw and limit_mw != found_mw:
        raise KnobRejected(
            f"the power limit is set to {limit_mw / 1000:g} W, but {enforced_mw / 1000:g} W are enforced from outside"
        )


def check_profiles(gpu: Gpu, text: str) -> None:
    """Check that the workload power profiles that were requested are among those that act.

    Args:
        gpu: Whose.
        text: Their numbers, as the control holds them.

    Raises:
        KnobRejected: If one was set aside in favour of another.
        DeviceError: If the GPU is gone.
    """
    wanted = tuple(int(number) for number in text.split(",") if number)
    with gpu.library as library:
        enforced = profiles(library, library.gpu(gpu.uuid))[1]
    if missing := set(wanted) - set(enforced):
        raise KnobRejected(
            f"workload power profile {', '.join(map(str, sorted(missing)))} is requested but not enforced; "
            f"enforced is {', '.join(map(str, enforced)) or 'none'}"
        )
