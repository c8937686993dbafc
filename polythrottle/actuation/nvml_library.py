"""NVML, the library that speaks to NVIDIA's driver: opened and closed in pairs; its return codes are translated here.

Return codes and what they mean: NVML API reference, nvmlReturn_t. Readers and writers go through `Library`.
"""

import contextlib
import threading
from dataclasses import dataclass
from enum import Enum
from types import TracebackType
from typing import Any

from typing_extensions import Self

from polythrottle.clock import Clock, SystemClock
from polythrottle.errors import DeviceError, KnobRejected, PermissionDenied

PRIVILEGE = (
    "run as root; in a container as root with --cap-add SYS_ADMIN (Kubernetes: a privileged pod); reading needs neither"
)
"""What lets a process set clocks and power limits: the driver asks for CAP_SYS_ADMIN."""

_NOT_SUPPORTED, _NO_SUCH_FREQUENCY = 3, 24
_PAUSES_S = (0.01, 0.02, 0.04, 0.08, 0.16)


class NotOffered(KnobRejected):
    """This GPU or this driver does not have what was asked for; whatever needs it is off."""

    unsupported = False
    """Whether the GPU can never have it."""
    for_good = False
    """Whether asking for another value would be answered alike: GPU, driver or library do not have it at all."""
    key = ""
    """The control that was to be written, if one was."""


class Answer(Enum):
    """What to do about a return code."""

    ABSENT = "the capability is not there"
    FORBIDDEN = "more rights are needed"
    FLEETING = "ask again in a moment"
    REFUSED = "this value is not taken"
    GONE = "the device cannot be steered any more"


@dataclass(frozen=True)
class Code:
    """One return code of NVML.

    Args:
        answer: What to do about it.
        meaning: In words, with the remedy if there is one.
    """

    answer: Answer
    meaning: str


CODES = {
    1: Code(Answer.GONE, "NVML was closed in between"),
    2: Code(Answer.REFUSED, "the driver takes no such value"),
    3: Code(Answer.ABSENT, "this GPU does not support it"),
    4: Code(Answer.FORBIDDEN, f"no permission; {PRIVILEGE}"),
    6: Code(Answer.GONE, "the driver knows no such GPU any more"),
    8: Code(Answer.GONE, "the GPU's power cables are not attached properly"),
    9: Code(Answer.GONE, "the NVIDIA driver is not loaded; load it (modprobe nvidia) or reboot"),
    10: Code(Answer.FLEETING, "the driver did not answer in time"),
    12: Code(
        Answer.GONE,
        "there is no NVIDIA driver here (libnvidia-ml.so.1 not found); install it, or start the container with the GPU "
        "(docker run --gpus all)",
    ),
    13: Code(Answer.ABSENT, "this driver is too old to know it"),
    15: Code(Answer.GONE, "the GPU has fallen off the bus; see the kernel log, then reset it or reboot"),
    16: Code(Answer.GONE, "the GPU must be reset before it can be used again (nvidia-smi --gpu-reset)"),
    17: Code(Answer.GONE, "the operating system blocked the driver; see who else holds /dev/nvidia*"),
    18: Code(
        Answer.GONE,
        "driver and library differ in version, as after an unattended upgrade; reboot, or reload the NVIDIA modules",
    ),
    19: Code(Answer.FLEETING, "somebody else is using it"),
    20: Code(Answer.GONE, "the driver has no memory left"),
    21: Code(Answer.FLEETING, "the driver has no data yet"),
    23: Code(Answer.REFUSED, "the driver is out of resources for it"),
    24: Code(Answer.ABSENT, "this GPU does not have that frequency"),
    25: Code(Answer.ABSENT, "this driver speaks another version of it"),
    26: Code(Answer.ABSENT, "this driver no longer offers it"),
    27: Code(Answer.FLEETING, "the GPU is not ready"),
    28: Code(Answer.GONE, "the driver finds no such GPU any more"),
    29: Code(Answer.REFUSED, "the GPU's present state does not allow it"),
    999: Code(Answer.GONE, "the driver met an error it does not know; see the kernel log"),
}
"""Every return code that is handled, and how; any other stops the study as an unknown error."""


def translated(what: str, value: int) -> DeviceError | KnobRejected:
    """Return the error a return code amounts to.

    Args:
        what: The call that was answered so.
        value: The return code, not 0.
    """
    code = CODES.get(value, Code(Answer.GONE, "an error nobody has described"))
    text = f"{what}: {code.meaning} (NVML code {value})"
    kinds: dict[Answer, type[DeviceError | KnobRejected]] = {
        Answer.ABSENT: NotOffered,
        Answer.FORBIDDEN: PermissionDenied,
        Answer.FLEETING: KnobRejected,
        Answer.REFUSED: KnobRejected,
        Answer.GONE: DeviceError,
    }
    error = kinds[code.answer](text)
    if isinstance(error, NotOffered):
        error.unsupported, error.for_good = value == _NOT_SUPPORTED, value != _NO_SUCH_FREQUENCY
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

        for pause_s in (*_PAUSES_S, None):
            try:
                return getattr(pynvml, name)(*arguments)
            except pynvml.NVMLError as err:
                code = CODES.get(err.value)
                if pause_s is None or code is None or code.answer is not Answer.FLEETING:
                    raise translated(name, err.value) from err
            self._clock.sleep(pause_s)
        raise AssertionError("the last round returns or raises")

    def gpu(self, uuid: str) -> Any:
        """Return the handle of a GPU, looked up by its UUID: indexes move when a GPU is reset or lost.

        Raises:
            DeviceError: If there is none of that UUID any more.
        """
        try:
            return self.call("nvmlDeviceGetHandleByUUID", uuid)
        except KnobRejected as err:
            raise DeviceError(f"{uuid} cannot be found: {err}") from err
