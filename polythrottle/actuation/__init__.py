"""The only code that writes to a device: originals saved first, written, read back, restored."""

from polythrottle.actuation.actuator import Actuator
from polythrottle.actuation.controls import UNREADABLE, Control, Controls, Setting, SysFiles, span
from polythrottle.actuation.limits import Limits
from polythrottle.actuation.putting_back import Difference, Outcome
from polythrottle.actuation.restoring import Standing, confirm, restore_all, standing
from polythrottle.actuation.system import SystemControls

__all__ = [
    "UNREADABLE",
    "Actuator",
    "Control",
    "Controls",
    "Difference",
    "Limits",
    "Outcome",
    "Setting",
    "Standing",
    "SysFiles",
    "SystemControls",
    "confirm",
    "restore_all",
    "span",
    "standing",
]
