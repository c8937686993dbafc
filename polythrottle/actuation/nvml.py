"""The controls of NVIDIA GPUs; the only place that calls a function of NVML that sets something.

A control is ``nvml:<uuid>/<what>``. Its GPU is looked up by UUID at every single operation.

    gpu_clocks      ``210,1410`` lowest and highest graphics clock in MHz, or ``unlocked``; cannot be read back
    mem_clocks      likewise for the memory clock
    power_limit_mw  ``250000``, the limit that was set, in mW; what is enforced may be less
    power_profiles  ``3,6``, the numbers of the workload power profiles that are requested; empty if none is

``nvmlDeviceSetPowerManagementLimit_v2`` is not used: the Python binding drops its return code. Application clocks are
not used either: NVIDIA has deprecated them.
"""

import ctypes
import os
from collections.abc import Iterable
from typing import Any

from polythrottle.actuation.controls import UNREADABLE, Start
from polythrottle.actuation.nvml_library import Library, NotOffered
from polythrottle.errors import KnobRejected, PermissionDenied

SCHEME = "nvml:"
GPU_CLOCKS = "gpu_clocks"
MEM_CLOCKS = "mem_clocks"
POWER_LIMIT = "power_limit_mw"
POWER_PROFILES = "power_profiles"
UNLOCKED = "unlocked"

BLANK = 0x7FFFFFF0
"""Numbers from here on are DCGM's and NVML's way of saying "no value" in 32 bits (dcgm_structs.h, DCGM_INT32_BLANK)."""

_BITS = 32
_MODULE = "/sys/module/nvidia"
_REMOVE, _ADD = 0, 1  # nvmlPowerProfileOperation_t


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
        """Return the power limit that the GPU begins with; None of other controls."""
        uuid, what = _parted(key)
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
                err.key = key
                raise
        self._changed.add(key)

    def _opened(self) -> Library:
        if self._stays and not self._open:
            self._library.__enter__()
            self._open = True
        return self._library


def _parted(key: str) -> tuple[str, str]:
    uuid, _, what = key.removeprefix(SCHEME).rpartition("/")
    if not key.startswith(SCHEME) or not uuid or what not in _WRITERS:
        raise KnobRejected(f"{key!r} is no control of an NVIDIA GPU; expected nvml:<uuid>/{'|'.join(_WRITERS)}")
    return uuid, what


def _numbers(key: str, what: str, text: str) -> tuple[int, ...]:
    """Return the numbers a text holds, none for ``unlocked``; whatever is malformed goes no further than here."""
    clocks = what in (GPU_CLOCKS, MEM_CLOCKS)
    parts = [] if text == "" or (clocks and text == UNLOCKED) else text.split(",")
    numbers = tuple(int(part) for part in parts if part.isascii() and part.isdecimal())
    counts = {GPU_CLOCKS: (2,), MEM_CLOCKS: (2,), POWER_LIMIT: (1,)}.get(what, range(len(parts) + 1))
    fits = len(numbers) in counts or (clocks and text == UNLOCKED)
    # From BLANK on lie "no value" and the symbolic clock limits of NVML, which must not be mixed with numbers.
    if len(numbers) != len(parts) or not fits or any(number >= BLANK for number in numbers):
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
        # Where clocks cannot be locked none are, so unlocking them after an attempt is done already.
        if not err.unsupported:
            raise


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
}
