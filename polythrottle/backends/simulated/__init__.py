"""Boards that are computed instead of wired up."""

from polythrottle.backends.simulated.device import SimulatedDevice
from polythrottle.backends.simulated.workload import SimulatedWorkload

__all__ = ["SimulatedDevice", "SimulatedWorkload"]
