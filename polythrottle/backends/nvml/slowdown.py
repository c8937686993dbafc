"""Whether a GPU slows itself down, and why: the driver's clock event reasons."""

import threading

from polythrottle.actuation.nvml_library import NotOffered
from polythrottle.backends.nvml.gpu import Gpu

IDLE, POWER_CAP = 0x1, 0x4
FAULTS = {0x8: "hardware slowdown", 0x20: "heat", 0x40: "heat, in hardware", 0x80: "power brake"}
"""Reasons that spoil a window. Reaching the power limit (0x4) is none of them: that is what a limit is for."""

_NAMES = ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons")  # newer, older


class Slowdowns:
    """Gathers the reasons seen between two readings, from any thread.

    Args:
        gpu: Whose.
    """

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._names = list(_NAMES)
        self._guard = threading.Lock()
        self._seen = 0

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
        with self._guard:
            self._seen |= found

    def take(self) -> int:
        """Return every reason noted since the last time, and forget them."""
        with self._guard:
            seen, self._seen = self._seen, 0
        return seen


def faults(reasons: int) -> str:
    """Return the reasons that spoil a window, in words; empty if there is none."""
    return ", ".join(name for bit, name in FAULTS.items() if reasons & bit)
