"""Whether a device has drawn more than it may, by its own meter."""

from polythrottle.errors import DeviceError
from polythrottle.finetune.ration import Ration
from polythrottle.ports import Device


class Weighed:
    """A ration of power and the device it is for; looked at about once a second, from one thread.

    Args:
        device: Entered.
        ration: What it may draw.

    Attributes:
        waited_s: How long fine-tuning had to wait although there was something to do.

    Raises:
        DeviceError: If the device cannot be read.
    """

    def __init__(self, device: Device, ration: Ration) -> None:
        self._device, self._ration, self._last, self._readable = device, ration, device.read(), True
        self.waited_s = 0.0

    @property
    def open(self) -> bool:
        """Whether fine-tuning may go on; not while the device cannot be read."""
        return self._ration.open and self._readable

    def look(self, wanted: bool) -> None:
        """See what was drawn since the last look.

        Args:
            wanted: Whether there is something to fine-tune.
        """
        was_open = self.open
        try:
            now = self._device.read()
        except DeviceError:
            self._readable = False
            return
        passed_s = now.time_s - self._last.time_s
        self.waited_s += passed_s if wanted and not was_open else 0.0
        self._ration = self._ration.after(now.energy_j - self._last.energy_j, passed_s)
        self._last, self._readable = now, True
