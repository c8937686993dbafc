"""polythrottle: the least energy at which a neural network serves its users within their latency limit.

Names are looked up when they are first used (PEP 562), so that ``polythrottle --help`` comes without numpy.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    __version__: str
    from polythrottle import plots
    from polythrottle.api import check, doctor, explain, read_journal, resume, tune
    from polythrottle.client import Client
    from polythrottle.deployment import apply, confirm, restore
    from polythrottle.errors import PolythrottleError
    from polythrottle.experiments import energy, measure, sweep
    from polythrottle.measurement import EnergyKind, Latency, Measurement, Window
    from polythrottle.meter.block import EnergyBlock
    from polythrottle.outcome import Tuning
    from polythrottle.problem import Constraint, Problem
    from polythrottle.profile import Profile
    from polythrottle.setup import Setup
    from polythrottle.space import Knob, OperatingPoint, SearchSpace
    from polythrottle.study import Study, Trial

__all__ = [
    "Client",
    "Constraint",
    "EnergyBlock",
    "EnergyKind",
    "Knob",
    "Latency",
    "Measurement",
    "OperatingPoint",
    "PolythrottleError",
    "Problem",
    "Profile",
    "SearchSpace",
    "Setup",
    "Study",
    "Trial",
    "Tuning",
    "Window",
    "__version__",
    "apply",
    "check",
    "confirm",
    "doctor",
    "energy",
    "explain",
    "measure",
    "plots",
    "read_journal",
    "restore",
    "resume",
    "sweep",
    "tune",
]

_HOMES = {
    "api": ("check", "doctor", "explain", "read_journal", "resume", "tune"),
    "client": ("Client",),
    "deployment": ("apply", "confirm", "restore"),
    "errors": ("PolythrottleError",),
    "experiments": ("energy", "measure", "sweep"),
    "measurement": ("EnergyKind", "Latency", "Measurement", "Window"),
    "meter.block": ("EnergyBlock",),
    "outcome": ("Tuning",),
    "plots": ("plots",),
    "problem": ("Constraint", "Problem"),
    "profile": ("Profile",),
    "setup": ("Setup",),
    "space": ("Knob", "OperatingPoint", "SearchSpace"),
    "study": ("Study", "Trial"),
}


def __getattr__(name: str) -> object:
    if name == "__version__":
        from polythrottle.outcome import polythrottle_version

        return polythrottle_version()
    for home, names in _HOMES.items():
        if name in names:
            module = import_module(f"polythrottle.{home}")
            return module if name == home else getattr(module, name)
    raise AttributeError(f"module 'polythrottle' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
