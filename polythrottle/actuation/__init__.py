"""The only code that writes to a device: originals saved first, written, read back, restored."""

from polythrottle.actuation.actuator import Actuator, Difference, Files, SysFiles

__all__ = ["Actuator", "Difference", "Files", "SysFiles"]
