"""The processor of this machine: its clock limits where they can be set, its energy counted or estimated."""

from __future__ import annotations

from polythrottle.backends.cpu.cpufreq import MAX as KNOB
from polythrottle.backends.cpu.device import CpuDevice

__all__ = ["KNOB", "CpuDevice"]
