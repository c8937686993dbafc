"""NVML: the library, opened and closed in pairs, its return codes, and the controls of NVIDIA GPUs.

The only place that sets anything by it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from types import TracebackType
from typing import TYPE_CHECKING, Any

from polythrottle.actuation.drivers.controls import UNREADABLE, Start
from polythrottle.domain.backports import removeprefix
from polythrottle.domain.clock import Clock, SystemClock
from polythrottle.domain.errors import DeviceError, KnobRejected, PermissionDenied

if TYPE_CHECKING:
    from typing_extensions import Self

# NVML, the library that speaks to NVIDIA's driver: opened and closed in pairs; its return codes are translated here.
#
# Return codes and what they mean: NVML API reference, nvmlReturn_t. Readers and writers go through `Library`.

PRIVILEGE = (
    "run as root; in a container as root with --cap-add SYS_ADMIN (Kubernetes: a privileged pod); reading needs neither"
)
"""What lets a process set clocks and power limits: the driver asks for CAP_SYS_ADMIN."""

_NOT_SUPPORTED = 3
_NOT_FOUND = 6
_NO_SUCH_FREQUENCY = 24
_PAUSES_S = (0.01, 0.02, 0.04, 0.08, 0.16)


class NotOffered(KnobRejected):
    """This GPU or this driver does not have what was asked for; whatever needs it is off."""

    unsupported = False
    """Whether the GPU can never have it."""
    for_good = False
    """Whether asking for another value would be answered alike: GPU, driver or library do not have it at all."""
    key = ""
    """The control that was to be written, if one was."""


class Reaction(Enum):
    """What to do about a return code."""

    ABSENT = "the capability is not there"
    FORBIDDEN = "more rights are needed"
    FLEETING = "ask again in a moment"
    REFUSED = "this value is not taken"
    GONE = "the device cannot be steered any more"


@dataclass(frozen=True)
class ReturnCode:
    """One return code of NVML.

    Args:
        answer: What to do about it.
        meaning: In words, with the remedy if there is one.
    """

    answer: Reaction
    meaning: str


CODES = {
    1: ReturnCode(Reaction.GONE, "NVML was closed in between"),
    2: ReturnCode(Reaction.REFUSED, "the driver takes no such value"),
    3: ReturnCode(Reaction.ABSENT, "this GPU does not support it"),
    4: ReturnCode(Reaction.FORBIDDEN, f"no permission; {PRIVILEGE}"),
    6: ReturnCode(Reaction.GONE, "the driver knows no such GPU any more"),
    8: ReturnCode(Reaction.GONE, "the GPU's power cables are not attached properly"),
    9: ReturnCode(Reaction.GONE, "the NVIDIA driver is not loaded; load it (modprobe nvidia) or reboot"),
    10: ReturnCode(Reaction.FLEETING, "the driver did not answer in time"),
    12: ReturnCode(
        Reaction.GONE,
        "there is no NVIDIA driver here (libnvidia-ml.so.1 not found); install it, or start the container with the GPU "
        "(docker run --gpus all)",
    ),
    13: ReturnCode(Reaction.ABSENT, "this driver is too old to know it"),
    15: ReturnCode(Reaction.GONE, "the GPU has fallen off the bus; see the kernel log, then reset it or reboot"),
    16: ReturnCode(Reaction.GONE, "the GPU must be reset before it can be used again (nvidia-smi --gpu-reset)"),
    17: ReturnCode(Reaction.GONE, "the operating system blocked the driver; see who else holds /dev/nvidia*"),
    18: ReturnCode(
        Reaction.GONE,
        "driver and library differ in version, as after an unattended upgrade; reboot, or reload the NVIDIA modules",
    ),
    19: ReturnCode(Reaction.FLEETING, "somebody else is using it"),
    20: ReturnCode(Reaction.GONE, "the driver has no memory left"),
    21: ReturnCode(Reaction.FLEETING, "the driver has no data yet"),
    23: ReturnCode(Reaction.REFUSED, "the driver is out of resources for it"),
    24: ReturnCode(Reaction.ABSENT, "this GPU does not have that frequency"),
    25: ReturnCode(Reaction.ABSENT, "this driver speaks another version of it"),
    26: ReturnCode(Reaction.ABSENT, "this driver no longer offers it"),
    27: ReturnCode(Reaction.FLEETING, "the GPU is not ready"),
    28: ReturnCode(Reaction.GONE, "the driver finds no such GPU any more"),
    29: ReturnCode(Reaction.REFUSED, "the GPU's present state does not allow it"),
    999: ReturnCode(Reaction.GONE, "the driver met an error it does not know; see the kernel log"),
}
"""Every return code that is handled, and how; any other stops the study as an unknown error."""


def translated(what: str, value: int) -> DeviceError | KnobRejected:
    """Return the error a return code amounts to.

    Args:
        what: The call that was answered so.
        value: The return code, not 0.
    """
    code = CODES.get(value, ReturnCode(Reaction.GONE, "an error nobody has described"))
    if value == _NOT_FOUND and not what.startswith("nvmlDeviceGetHandle"):
        # An H200 answers so of samples that its driver (580.159.04) does not keep; the GPU is there.
        code = ReturnCode(Reaction.ABSENT, "the driver has none")
    text = f"{what}: {code.meaning} (NVML code {value})"
    kinds: dict[Reaction, type[DeviceError | KnobRejected]] = {
        Reaction.ABSENT: NotOffered,
        Reaction.FORBIDDEN: PermissionDenied,
        Reaction.FLEETING: KnobRejected,
        Reaction.REFUSED: KnobRejected,
        Reaction.GONE: DeviceError,
    }
    error = kinds[code.answer](text)
    if isinstance(error, NotOffered):
        error.unsupported = value == _NOT_SUPPORTED
        error.for_good = value != _NO_SUCH_FREQUENCY
    return error


class Library:
    """NVML, open for as long as it is entered, however often it is entered.

    The driver counts its clients: without persistence mode it may forget locked clocks when the last one leaves, and
    it cannot reset a GPU or put it to sleep while there is one. So it is entered while a device is steered, and left
    after.

    Args:
        clock: For the pauses before a call is repeated.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock: Clock = clock if clock is not None else SystemClock()
        self._depth = 0
        self._guard = threading.RLock()
        self._handles: dict[str, Any] = {}

    def __enter__(self) -> Self:
        with self._guard:
            if self._depth == 0:
                self.call("nvmlInit")
            self._depth += 1
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._guard:
            self._depth -= 1
            if self._depth == 0:
                self._handles.clear()
                # A lost GPU or an unloaded driver fails here too, and nobody could do anything about it.
                with contextlib.suppress(DeviceError, KnobRejected):
                    self.call("nvmlShutdown")

    def call(self, name: str, *arguments: Any) -> Any:
        """Return what a function of NVML answers, asked again with growing pauses while it says "not now".

        Args:
            name: Of a function of ``pynvml``.
            arguments: For it.

        Raises:
            NotOffered: If GPU or driver do not have it.
            KnobRejected: If the value is refused, or the driver keeps saying "not now".
            PermissionDenied: If more rights are needed; says which.
            DeviceError: If driver or GPU are gone, or not there.
        """
        import pynvml

        return self._repeated(name, getattr(pynvml, name), arguments)

    def _repeated(self, name: str, function: Callable[..., Any], arguments: Sequence[Any]) -> Any:
        import pynvml

        for pause_s in (*_PAUSES_S, None):
            try:
                return function(*arguments)
            except pynvml.NVMLError as err:
                code = CODES.get(err.value)
                if pause_s is None or code is None or code.answer is not Reaction.FLEETING:
                    raise translated(name, err.value) from err
            self._clock.sleep(pause_s)
        raise AssertionError("the last round returns or raises")

    def checked(self, name: str, *arguments: Any) -> None:
        """Call a function whose return code its binding drops, and look at that code; as `call` otherwise."""
        import pynvml

        def looked_at(*given: Any) -> None:
            pynvml._nvmlCheckReturn(pynvml._nvmlGetFunctionPointer(name)(*given))

        self._repeated(name, looked_at, arguments)

    def ask(self, uuid: str, name: str, *arguments: Any) -> Any:
        """Return what a function that only reads answers for a GPU; as `call` otherwise.

        The handle is kept while NVML is open, and looked up anew once the driver has answered that the GPU is gone.

        Args:
            uuid: The GPU's.
            name: Of a function of ``pynvml`` whose first argument is the GPU.
            arguments: The others.
        """
        handle = self._handles.get(uuid)
        if handle is None:
            handle = self.gpu(uuid)
            self._handles[uuid] = handle
        try:
            return self.call(name, handle, *arguments)
        except PermissionDenied:
            raise
        except DeviceError:
            self._handles.pop(uuid, None)
            raise

    def gpu(self, uuid: str) -> Any:
        """Return the handle of a GPU, looked up by its UUID: indexes move when a GPU is reset or lost.

        Raises:
            DeviceError: If there is none of that UUID any more.
        """
        try:
            return self.call("nvmlDeviceGetHandleByUUID", uuid)
        except KnobRejected as err:
            raise DeviceError(f"{uuid} cannot be found: {err}") from err


# The controls of NVIDIA GPUs; the only place that calls a function of NVML that sets something.
#
# A control is ``nvml:<uuid>/<what>``. Its GPU is looked up by UUID at every single operation.
#
# gpu_clocks      ``210,1410`` lowest and highest graphics clock in MHz, or ``unlocked``; cannot be read back
# mem_clocks      likewise for the memory clock power_limit_mw  ``250000``, the limit that was set, in mW; what is
# enforced may be less power_profiles  ``3,6``, the numbers of the workload power profiles that are requested; empty
# if none is
#
# ``nvmlDeviceSetPowerManagementLimit_v2`` is not used: the Python binding drops its return code. Application clocks
# are not used either: NVIDIA has deprecated them.

SCHEME = "nvml:"
GPU_CLOCKS = "gpu_clocks"
MEM_CLOCKS = "mem_clocks"
POWER_LIMIT = "power_limit_mw"
POWER_PROFILES = "power_profiles"
GPU_OFFSET = "gpu_offset_mhz"
MEM_OFFSET = "mem_offset_mhz"
UNLOCKED = "unlocked"

BLANK = 0x7FFFFFF0
"""Numbers from here on are DCGM's and NVML's way of saying "no value" in 32 bits (dcgm_structs.h, DCGM_INT32_BLANK)."""

_BITS = 32
_MODULE = "/sys/module/nvidia"
# nvmlPowerProfileOperation_t
_REMOVE = 0
_ADD = 1


def key_of(uuid: str, what: str) -> str:
    """Return the key of a control of the GPU with that UUID."""
    return f"{SCHEME}{uuid}/{what}"


def mask_ids(mask: Iterable[int]) -> tuple[int, ...]:
    """Return the numbers of the bits that are set in words of 32 bits, ascending."""
    return tuple(
        word_number * _BITS + bit
        for word_number, word in enumerate(mask)
        for bit in range(_BITS)
        if int(word) >> bit & 1
    )


def profiles(library: Library, handle: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the numbers of a GPU's workload power profiles: those requested, and those enforced, which may differ.

    Raises:
        NotOffered: If the GPU has none.
        DeviceError: If it is gone.
    """
    import pynvml

    state = pynvml.c_nvmlWorkloadPowerProfileCurrentProfiles_v1_t()
    library.call("nvmlDeviceWorkloadPowerProfileGetCurrentProfiles", handle, ctypes.byref(state))
    return mask_ids(state.requestedProfilesMask.mask), mask_ids(state.enforcedProfilesMask.mask)


@dataclass(frozen=True)
class ClockOffset:
    """What a driver adds to the clocks of a domain, in MHz.

    Args:
        now_mhz: What holds.
        least_mhz: The lowest it takes.
        most_mhz: The highest it takes.
    """

    now_mhz: int
    least_mhz: int
    most_mhz: int


# nvmlClockType_t, and what the domain is called by the calls of drivers before 555, which NVIDIA has deprecated.
_DOMAINS = {GPU_OFFSET: (0, "Gpc"), MEM_OFFSET: (2, "Mem")}
# nvmlPstates_t. Of the others drivers take none, or hold them with this one: LACT pull requests 461 and 918, where
# P0 and P2 read the same -100 MHz, and P8 has a range of 0 to 0.
_P0 = 0


def clock_offset(library: Library, handle: Any, what: str) -> ClockOffset:
    """Return a GPU's clock offset and the range that its driver takes.

    Args:
        library: Open.
        handle: Of the GPU.
        what: ``GPU_OFFSET`` or ``MEM_OFFSET``.

    Raises:
        NotOffered: If GPU or driver have none.
        DeviceError: If the GPU is gone.
    """
    domain, older = _DOMAINS[what]
    info = _offset_of(domain)
    try:
        library.checked("nvmlDeviceGetClockOffsets", handle, ctypes.byref(info))
    except NotOffered:
        now_mhz = int(library.call(f"nvmlDeviceGet{older}ClkVfOffset", handle))
        least_mhz, most_mhz = library.call(f"nvmlDeviceGet{older}ClkMinMaxVfOffset", handle)
        return ClockOffset(now_mhz, int(least_mhz), int(most_mhz))
    return ClockOffset(info.clockOffsetMHz, info.minClockOffsetMHz, info.maxClockOffsetMHz)


def _offset_of(domain: int, offset_mhz: int = 0) -> Any:
    import pynvml

    info = pynvml.c_nvmlClockOffset_t()
    info.version = pynvml.nvmlClockOffset_v1
    info.type = domain
    info.pstate = _P0
    info.clockOffsetMHz = offset_mhz
    return info


class NvmlControls:
    """Reads and writes the controls of all NVIDIA GPUs of this machine.

    Args:
        library: How NVML is reached. If None, NVML is opened at the first operation and stays open as long as this
            object lives, so that a process that keeps clocks locked stays the client the driver wants for that.
    """

    def __init__(self, library: Library | None = None) -> None:
        self._library = library if library is not None else Library()
        self._stays = library is None
        self._open = False
        self._changed: set[str] = set()
        self._refused: set[str] = set()

    def read(self, key: str) -> str:
        """Return what a control holds; `UNREADABLE` for clocks, which no call of NVML reads back.

        Raises:
            KnobRejected: If the key names no control, or the GPU does not have it (`NotOffered`).
            DeviceError: If the GPU is gone.
        """
        uuid, what = _parted(key)
        with self._opened() as library:
            handle = library.gpu(uuid)
            if what == POWER_LIMIT:
                return str(_limit_mw(library, handle))
            if what == POWER_PROFILES:
                return ",".join(map(str, profiles(library, handle)[0]))
            if what in _DOMAINS:
                return str(clock_offset(library, handle, what).now_mhz)
            return UNREADABLE

    def start(self, key: str) -> Start:
        """Return what tells the present start of the driver, or of the GPU, from the next.

        The energy counter begins anew with the driver (NVML reference, nvmlDeviceGetTotalEnergyConsumption).

        Raises:
            KnobRejected: If the key names no control.
            DeviceError: If the GPU is gone.
        """
        uuid, _ = _parted(key)
        try:
            node = os.stat(_MODULE).st_ino
        except OSError:
            node = 0
        with self._opened() as library:
            try:
                return Start(node, int(library.call("nvmlDeviceGetTotalEnergyConsumption", library.gpu(uuid))))
            except NotOffered:
                return Start(node)

    def factory(self, key: str) -> str | None:
        """Return the power limit that the GPU begins with, and no clock offset; None of other controls."""
        uuid, what = _parted(key)
        if what in _DOMAINS:
            return "0"
        if what != POWER_LIMIT:
            return None
        with self._opened() as library:
            return str(int(library.call("nvmlDeviceGetPowerManagementDefaultLimit", library.gpu(uuid))))

    def write(self, key: str, text: str) -> None:
        """Set a control.

        Raises:
            KnobRejected: If key or text mean nothing, or the driver refuses.
            PermissionDenied: If it takes more rights; says which.
            DeviceError: If the GPU is gone.
        """
        uuid, what = _parted(key)
        numbers = _numbers(key, what, text)
        with self._opened() as library:
            try:
                _WRITERS[what](library, library.gpu(uuid), numbers)
            except PermissionDenied:
                if text == UNLOCKED and uuid in self._refused and key not in self._changed:
                    return  # this object was let lock nothing there, so there is nothing of its own to undo
                if numbers and what in (GPU_CLOCKS, MEM_CLOCKS):
                    self._refused.add(uuid)  # an attempt of our own: putting back only ever unlocks
                raise
            except NotOffered as err:
                # Where clocks cannot be locked none are, so unlocking them after an attempt is done already; this
                # object knows better where it has locked them.
                if text == UNLOCKED and err.unsupported and key not in self._changed:
                    return
                err.key = key
                raise
        self._changed.add(key)

    def _opened(self) -> Library:
        if self._stays and not self._open:
            self._library.__enter__()
            self._open = True
        return self._library


def _parted(key: str) -> tuple[str, str]:
    uuid, _, what = removeprefix(key, SCHEME).rpartition("/")
    if not key.startswith(SCHEME) or not uuid or what not in _WRITERS:
        raise KnobRejected(f"{key!r} is no control of an NVIDIA GPU; expected nvml:<uuid>/{'|'.join(_WRITERS)}")
    return uuid, what


def _numbers(key: str, what: str, text: str) -> tuple[int, ...]:
    """Return the numbers a text holds, none for ``unlocked``; whatever is malformed goes no further than here."""
    clocks = what in (GPU_CLOCKS, MEM_CLOCKS)
    parts = [] if text == "" or (clocks and text == UNLOCKED) else text.split(",")
    signed = what in _DOMAINS
    numbers = tuple(int(part) for part in parts if part.isascii() and part[signed and part[:1] == "-" :].isdecimal())
    singles = dict.fromkeys((POWER_LIMIT, *_DOMAINS), (1,))
    counts = {GPU_CLOCKS: (2,), MEM_CLOCKS: (2,), **singles}.get(what, range(len(parts) + 1))
    fits = len(numbers) in counts or (clocks and text == UNLOCKED)
    # From BLANK on lie "no value" and the symbolic clock limits of NVML, which must not be mixed with numbers.
    if len(numbers) != len(parts) or not fits or any(abs(number) >= BLANK for number in numbers):
        raise KnobRejected(f"{key} cannot hold {text!r}")
    if clocks and numbers and numbers[0] > numbers[1]:
        raise KnobRejected(f"{key} cannot hold {text!r}: the lowest clock lies above the highest")
    return numbers


def _limit_mw(library: Library, handle: Any) -> int:
    limit_mw = int(library.call("nvmlDeviceGetPowerManagementLimit", handle))
    if limit_mw >= BLANK:
        raise NotOffered("nvmlDeviceGetPowerManagementLimit: the driver gives no value")
    return limit_mw


def _set_gpu_clocks(library: Library, handle: Any, clocks_mhz: tuple[int, ...]) -> None:
    if clocks_mhz:
        library.call("nvmlDeviceSetGpuLockedClocks", handle, *clocks_mhz)
    else:
        _unlock(library, "nvmlDeviceResetGpuLockedClocks", handle)


def _set_mem_clocks(library: Library, handle: Any, clocks_mhz: tuple[int, ...]) -> None:
    if clocks_mhz:
        library.call("nvmlDeviceSetMemoryLockedClocks", handle, *clocks_mhz)
    else:
        _unlock(library, "nvmlDeviceResetMemoryLockedClocks", handle)


def _unlock(library: Library, name: str, handle: Any) -> None:
    try:
        library.call(name, handle)
    except NotOffered as err:
        if not err.unsupported:
            raise
        library.call(name, handle)  # a card that cannot says so each time


def _set_power_limit(library: Library, handle: Any, limits_mw: tuple[int, ...]) -> None:
    library.call("nvmlDeviceSetPowerManagementLimit", handle, limits_mw[0])


def _set_power_profiles(library: Library, handle: Any, wanted: tuple[int, ...]) -> None:
    held = set(profiles(library, handle)[0])
    for operation, changed in ((_REMOVE, held - set(wanted)), (_ADD, set(wanted) - held)):
        if changed:
            _change_profiles(library, handle, operation, sorted(changed))


def _change_profiles(library: Library, handle: Any, operation: int, changed: list[int]) -> None:
    import pynvml

    update = pynvml.c_nvmlWorkloadPowerProfileUpdateProfiles_v1_t()
    update.operation = operation
    _mark(update.updateProfilesMask.mask, changed)
    try:
        library.call("nvmlDeviceWorkloadPowerProfileUpdateProfiles_v1", handle, ctypes.byref(update))
    except NotOffered:
        # Drivers before this call have the two that NVIDIA has deprecated since.
        older = pynvml.c_nvmlWorkloadPowerProfileRequestedProfiles_v1_t()
        _mark(older.requestedProfilesMask.mask, changed)
        name = "SetRequestedProfiles" if operation == _ADD else "ClearRequestedProfiles"
        library.call(f"nvmlDeviceWorkloadPowerProfile{name}", handle, ctypes.byref(older))


def _set_gpu_offset(library: Library, handle: Any, offsets_mhz: tuple[int, ...]) -> None:
    _set_offset(library, handle, GPU_OFFSET, offsets_mhz[0])


def _set_mem_offset(library: Library, handle: Any, offsets_mhz: tuple[int, ...]) -> None:
    _set_offset(library, handle, MEM_OFFSET, offsets_mhz[0])


def _set_offset(library: Library, handle: Any, what: str, offset_mhz: int) -> None:
    domain, older = _DOMAINS[what]
    try:
        library.checked("nvmlDeviceSetClockOffsets", handle, ctypes.byref(_offset_of(domain, offset_mhz)))
    except NotOffered:
        library.call(f"nvmlDeviceSet{older}ClkVfOffset", handle, offset_mhz)


def _mark(mask: Any, numbers: list[int]) -> None:
    for number in numbers:
        if number >= len(mask) * _BITS:
            raise KnobRejected(f"there is no workload power profile {number}")
        mask[number // _BITS] |= 1 << number % _BITS


_WRITERS = {
    GPU_CLOCKS: _set_gpu_clocks,
    MEM_CLOCKS: _set_mem_clocks,
    POWER_LIMIT: _set_power_limit,
    POWER_PROFILES: _set_power_profiles,
    GPU_OFFSET: _set_gpu_offset,
    MEM_OFFSET: _set_mem_offset,
}
