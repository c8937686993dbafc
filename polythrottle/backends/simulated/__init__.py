"""Boards that are computed instead of wired up."""

from polythrottle.backends.simulated.device import SimulatedDevice, SimulatedWorkload

__all__ = ["SimulatedDevice", "SimulatedWorkload"]
