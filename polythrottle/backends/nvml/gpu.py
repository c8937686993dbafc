"""One NVIDIA GPU as NVML shows it. Nothing here sets anything; units are NVML's own: MHz, mW, mJ, µs.

Calls: NVML API reference, Device Queries. What GPU or driver do not have raises `NotOffered`, a blank number too: NVML
and DCGM have values that look finite and mean "no value".
"""

from dataclasses import dataclass
from typing import Any

from polythrottle.actuation.nvml import BLANK
from polythrottle.actuation.nvml_library import Library, NotOffered, translated
from polythrottle.errors import DeviceError, InvalidInput, UnknownName

WIDE_BLANK = 1 << 47
"""Where blank numbers of 64 bits and floating point begin; a 32-bit one is an ordinary value of a counter of mJ."""

VOLTA, AMPERE, BLACKWELL = 5, 7, 10
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
    """A GPU, found again by its UUID at every call.

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
            return self.library.call(name, self.library.gpu(self.uuid), *arguments)

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
        return None if number in (None, _UNKNOWN_ARCHITECTURE) else int(number)

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
        known = listed(library)
        if not known:
            raise DeviceError("the NVIDIA driver is here, but it finds no GPU")
        if not name and len(known) > 1:
            raise InvalidInput(f"there are {len(known)} GPUs; name one: nvml:0 to nvml:{len(known) - 1}, or its UUID")
        uuid = known.get(name or "0", name)
        if uuid not in known.values():
            raise UnknownName("GPU", name, (*known, *known.values()))
        gpu = Gpu(library, uuid)
        _refuse_mig(gpu)
        return gpu


def listed(library: Library) -> dict[str, str]:
    """Return the UUID of every GPU by its index; a GPU that is lost is left out."""
    found = {}
    for index in range(int(library.call("nvmlDeviceGetCount"))):
        try:
            handle = library.call("nvmlDeviceGetHandleByIndex", index)
            found[str(index)] = str(library.call("nvmlDeviceGetUUID", handle))
        except DeviceError:
            continue
    return found


def _refuse_mig(gpu: Gpu) -> None:
    mode = gpu.maybe("nvmlDeviceGetMigMode")
    if mode is not None and mode[0]:
        raise DeviceError(
            f"{gpu.ask('nvmlDeviceGetName')} is split by MIG; {_MIG}; with no work on it, turn MIG off: "
            f"nvidia-smi -i {gpu.uuid} -mig 0"
        )
