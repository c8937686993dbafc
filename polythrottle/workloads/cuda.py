"""CUDA's driver library through ctypes: which number a GPU has, memory, copies, and time by events.

``libcuda.so.1`` comes with every driver, on a Jetson too, so that neither torch nor cuda-python need be there. Calls:
CUDA Driver API reference manual; names end as the header maps them (``cuMemAlloc_v2`` for ``cuMemAlloc``).
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from polythrottle.domain.errors import DeviceError, TrialError

LIBRARY = "libcuda.so.1"


def number_at(place: str) -> int:
    """Return the number that CUDA has for a GPU in this process; 0 where there is no CUDA to ask.

    Args:
        place: On the bus, as NVML writes it, such as 00000000:3B:00.0.

    Raises:
        DeviceError: If CUDA does not show it to this process.
    """
    domain, _, rest = place.lower().partition(":")
    try:
        driver = Driver()
    except DeviceError:
        return 0
    # NVML writes the domain in eight digits.
    if rest:
        return driver.number(f"{domain[-4:]}:{rest}")
    return 0


class CudaError(TrialError):
    """A call of the CUDA driver failed.

    Args:
        call: Its name.
        code: What it returned (CUresult).
        words: What the driver says of that.
    """

    def __init__(self, call: str, code: int, words: str) -> None:
        super().__init__(f"{call}: {words} (CUDA error {code})")
        self.code = code


class Driver:
    """The CUDA driver.

    Args:
        library: In place of libcuda.so.1.

    Raises:
        DeviceError: If there is no driver, or it finds no GPU.
    """

    def __init__(self, library: Any = None) -> None:
        try:
            if library is None:
                self._library = ctypes.CDLL(LIBRARY)
            else:
                self._library = library
            self.call("cuInit", 0)
        except OSError as err:
            raise DeviceError(f"there is no CUDA driver here ({LIBRARY}): {err}") from err
        except CudaError as err:
            raise DeviceError(f"the CUDA driver cannot be used: {err}") from err

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function of the driver.

        Args:
            name: As the library exports it.
            arguments: For it; whole numbers are C ints, all else is wrapped by the caller.

        Raises:
            CudaError: If it returns an error.
            DeviceError: If this driver has no such function.
        """
        try:
            function = getattr(self._library, name)
        except AttributeError as err:
            raise DeviceError(f"this CUDA driver is too old: it has no {name}") from err
        if code := int(function(*arguments)):
            raise CudaError(name, code, self._words(code))

    def _words(self, code: int) -> str:
        text = ctypes.c_char_p()
        unknown = self._library.cuGetErrorString(code, ctypes.byref(text))
        if unknown or text.value is None:
            return "an error without a name"
        return text.value.decode(errors="replace")

    def number(self, bus_id: str) -> int:
        """Return the number CUDA has for a GPU in this process.

        Args:
            bus_id: Where it is: ``0000:3b:00.0``.

        Raises:
            DeviceError: If CUDA does not show it to this process.
        """
        device = ctypes.c_int()
        try:
            self.call("cuDeviceGetByPCIBusId", ctypes.byref(device), bus_id.encode())
        except CudaError as err:
            shown = os.environ.get("CUDA_VISIBLE_DEVICES")
            if shown is None:
                hidden = ""
            else:
                hidden = f"; CUDA_VISIBLE_DEVICES={shown} may hide it"
            raise DeviceError(
                f"the GPU at {bus_id} is tuned, and CUDA does not show it to this process{hidden}"
            ) from err
        return device.value


class Stream:
    """One stream on one GPU, with memory of its own and two events around what is timed.

    Args:
        driver: The driver.
        number: Of the GPU, in CUDA's order.

    Raises:
        DeviceError: If there is no such GPU.
        CudaError: If it has no room.
    """

    def __init__(self, driver: Driver, number: int) -> None:
        self._driver = driver
        self._device = ctypes.c_int()
        self._context = ctypes.c_void_p()
        self._held: list[ctypes.c_uint64] = []
        self._pinned: list[ctypes.c_void_p] = []
        try:
            driver.call("cuDeviceGet", ctypes.byref(self._device), number)
        except CudaError as err:
            raise DeviceError(f"CUDA shows no GPU {number} to this process: {err}") from err
        # The primary context is the one that torch and ONNX Runtime have: one of our own would take its memory twice.
        driver.call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), self._device)
        self.bind()
        self._stream = ctypes.c_void_p()
        driver.call("cuStreamCreate", ctypes.byref(self._stream), 0)
        self._events = (ctypes.c_void_p(), ctypes.c_void_p())
        for event in self._events:
            driver.call("cuEventCreate", ctypes.byref(event), 0)

    @property
    def handle(self) -> int:
        """The stream, as other libraries take it."""
        return int(self._stream.value or 0)

    def bind(self) -> None:
        """Make this GPU the one the calling thread speaks to."""
        self._driver.call("cuCtxSetCurrent", self._context)

    def memory(self, size: int) -> int:
        """Return the address of so many bytes on the GPU, kept until `free`.

        Raises:
            CudaError: If there is no room.
        """
        address = ctypes.c_uint64()
        # At least one byte: CUDA refuses to hand out none, and a tensor may be empty.
        self._driver.call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(max(1, size)))
        self._held.append(address)
        return int(address.value)

    def pinned(self, size: int) -> int:
        """Return the address of so many bytes on the host that the GPU can copy by itself, kept until `free`.

        Raises:
            CudaError: If there is no room.
        """
        address = ctypes.c_void_p()
        self._driver.call("cuMemAllocHost_v2", ctypes.byref(address), ctypes.c_size_t(max(1, size)))
        self._pinned.append(address)
        return int(address.value or 0)

    def upload(self, address: int, host: int, size: int) -> None:
        """Copy bytes from the host to the GPU, after what is under way."""
        arguments = (ctypes.c_uint64(address), ctypes.c_void_p(host), ctypes.c_size_t(size), self._stream)
        self._driver.call("cuMemcpyHtoDAsync_v2", *arguments)

    def download(self, host: int, address: int, size: int) -> None:
        """Copy bytes from the GPU to the host, after what is under way."""
        arguments = (ctypes.c_void_p(host), ctypes.c_uint64(address), ctypes.c_size_t(size), self._stream)
        self._driver.call("cuMemcpyDtoHAsync_v2", *arguments)

    @contextmanager
    def timed(self) -> Iterator[list[float]]:
        """Time what is put on the stream meanwhile, by the GPU's own events, and wait for it.

        Yields:
            A list that holds the seconds it took once the block is left.
        """
        took: list[float] = []
        start, end = self._events
        self._driver.call("cuEventRecord", start, self._stream)
        yield took
        self._driver.call("cuEventRecord", end, self._stream)
        self._driver.call("cuEventSynchronize", end)
        elapsed_ms = ctypes.c_float()
        self._driver.call("cuEventElapsedTime", ctypes.byref(elapsed_ms), start, end)
        took.append(float(elapsed_ms.value) / 1000)

    def free(self) -> None:
        """Give back the memory that was handed out; what is under way is waited for."""
        self._driver.call("cuStreamSynchronize", self._stream)
        while self._held:
            self._driver.call("cuMemFree_v2", self._held.pop())
        while self._pinned:
            self._driver.call("cuMemFreeHost", self._pinned.pop())

    def close(self) -> None:
        """Give everything back."""
        self.bind()
        self.free()
        for event in self._events:
            self._driver.call("cuEventDestroy_v2", event)
        self._driver.call("cuStreamDestroy_v2", self._stream)
        self._driver.call("cuDevicePrimaryCtxRelease_v2", self._device)
