"""The only code that writes to a device: originals saved first, written, read back, restored.

Names are looked up when they are first used (PEP 562): the guard and the keeper, processes of their own that last as
long as a device stands changed, import modules of this package and not the writer with them, a megabyte each.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from polythrottle.actuation.actuator import Actuator
    from polythrottle.actuation.drivers.all_controls import SystemControls
    from polythrottle.actuation.drivers.controls import UNREADABLE, Control, Controls, Setting, SysFiles, span
    from polythrottle.actuation.limits import Limits
    from polythrottle.actuation.restore import Standing, confirm, restore_all, standing
    from polythrottle.actuation.rollback import Difference, Outcome

_HOMES = {
    "actuator": ("Actuator",),
    "drivers.controls": ("UNREADABLE", "Control", "Controls", "Setting", "SysFiles", "span"),
    "drivers.all_controls": ("SystemControls",),
    "limits": ("Limits",),
    "restore": ("Standing", "confirm", "restore_all", "standing"),
    "rollback": ("Difference", "Outcome"),
}

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


def __getattr__(name: str) -> object:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"polythrottle.actuation.{home}"), name)
    raise AttributeError(f"module 'polythrottle.actuation' has no attribute {name!r}")
