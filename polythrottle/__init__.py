"""polythrottle: the least energy at which a neural network serves its users within their latency limit.

Names are looked up when they are first used (PEP 562), so that ``polythrottle --help`` comes without numpy.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from polythrottle.api import measure, resume, tune
    from polythrottle.client import Client
    from polythrottle.errors import PolythrottleError
    from polythrottle.measurement import EnergyKind, Latency, Measurement, Window
    from polythrottle.outcome import Tuning
    from polythrottle.problem import Constraint, Problem
    from polythrottle.profile import Profile
    from polythrottle.setup import Setup
    from polythrottle.space import Knob, OperatingPoint, SearchSpace
    from polythrottle.study import Study, Trial

__all__ = [
    "Client",
    "Constraint",
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
    "measure",
    "resume",
    "tune",
]

_HOMES = {
    "api": ("measure", "resume", "tune"),
    "client": ("Client",),
    "errors": ("PolythrottleError",),
    "measurement": ("EnergyKind", "Latency", "Measurement", "Window"),
    "outcome": ("Tuning",),
    "problem": ("Constraint", "Problem"),
    "profile": ("Profile",),
    "setup": ("Setup",),
    "space": ("Knob", "OperatingPoint", "SearchSpace"),
    "study": ("Study", "Trial"),
}


def __getattr__(name: str) -> object:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"polythrottle.{home}"), name)
    raise AttributeError(f"module 'polythrottle' has no attribute {name!r}")
