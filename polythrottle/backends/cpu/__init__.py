"""The processor of this machine: its clock limits where they can be set, its energy counted or estimated."""

from polythrottle.backends.cpu.device import CpuDevice
from polythrottle.backends.cpu.policies import MAX as KNOB

__all__ = ["KNOB", "CpuDevice"]
