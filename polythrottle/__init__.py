"""polythrottle: the least energy at which a neural network serves its users within their latency limit.

Names are looked up when they are first used (PEP 562), so that ``polythrottle --help`` comes without numpy.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    __version__: str
    from polythrottle.api import plots
    from polythrottle.api.deployment import apply, confirm, restore
    from polythrottle.api.experiments import energy, measure, sweep
    from polythrottle.api.search import check, doctor, explain, read_journal, resume, tune
    from polythrottle.api.tuning_result import Tuning
    from polythrottle.daemon.client import Client
    from polythrottle.domain.errors import PolythrottleError
    from polythrottle.domain.measurement import EnergyKind, Latency, Measurement, Window
    from polythrottle.domain.problem import Constraint, Problem
    from polythrottle.domain.profile import Profile
    from polythrottle.domain.space import Knob, OperatingPoint, SearchSpace
    from polythrottle.domain.study import Study, Trial
    from polythrottle.metering.energy_block import EnergyBlock
    from polythrottle.tuning.setup import Setup


_HOMES = {
    "api.search": ("check", "doctor", "explain", "read_journal", "resume", "tune"),
    "daemon.client": ("Client",),
    "api.deployment": ("apply", "confirm", "restore"),
    "domain.errors": ("PolythrottleError",),
    "api.experiments": ("energy", "measure", "sweep"),
    "domain.measurement": ("EnergyKind", "Latency", "Measurement", "Window"),
    "metering.energy_block": ("EnergyBlock",),
    "api.tuning_result": ("Tuning",),
    "api.plots": ("plots",),
    "domain.problem": ("Constraint", "Problem"),
    "domain.profile": ("Profile",),
    "tuning.setup": ("Setup",),
    "domain.space": ("Knob", "OperatingPoint", "SearchSpace"),
    "domain.study": ("Study", "Trial"),
}


def __getattr__(name: str) -> object:
    if name == "__version__":
        from polythrottle.api.tuning_result import polythrottle_version

        return polythrottle_version()
    for home, names in _HOMES.items():
        if name in names:
            module = import_module(f"polythrottle.{home}")
            if home.endswith(f".{name}"):
                return module
            return getattr(module, name)
    raise AttributeError(f"module 'polythrottle' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


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
