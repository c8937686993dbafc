"""How hot a GPU is: the hotter of its die and its memory."""

from polythrottle.actuation.nvml_library import NotOffered
from polythrottle.backends.nvml.gpu import Gpu

_MEMORY_FIELD = 82  # NVML_FI_DEV_MEMORY_TEMP
_DIE = 0  # NVML_TEMPERATURE_GPU
_NAMES = ("nvmlDeviceGetTemperatureV", "nvmlDeviceGetTemperature")  # newer, older


class Thermometer:
    """Reads a GPU's temperatures by whichever calls its driver has.

    Args:
        gpu: Whose.
    """

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._names = list(_NAMES)
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
