"""What the parts of a board draw: voltage that is flat, then linear in the clock; memory; CPU; leakage with heat."""

from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from polythrottle.catalog.simulation import Cpu, Gpu, Memory, Thermal, Voltage

Array = NDArray[np.float64]
Celsius = TypeVar("Celsius", float, Array)


def relative_power(voltage: Voltage, share: Array) -> Array:
    """Return V²f over its value at the top clock.

    The shape is that of the published Tegra X1 table (Linux ``drivers/gpu/drm/nouveau/nvkm/subdev/volt/gm20b.c``).

    Args:
        voltage: The curve.
        share: Clock over the top clock; above 0, any shape.
    """
    slope = (voltage.swing - 1.0) / (1.0 - voltage.knee)
    volts = 1.0 + slope * np.maximum(0.0, share - voltage.knee)
    return np.asarray(share * (volts / voltage.swing) ** 2)


def gpu_busy_w(gpu: Gpu, share: Array, useful: Array) -> Array:
    """Return the GPU's dynamic power in watts while busy.

    Args:
        gpu: The GPU.
        share: Clock over the top clock.
        useful: Share of the time its lanes have work.
    """
    return gpu.power_w * relative_power(gpu.voltage, share) * (gpu.floor + (1.0 - gpu.floor) * useful)


def gpu_idle_w(gpu: Gpu, share: Array) -> Array:
    """Return the GPU's dynamic power in watts while it waits at a clock over the top clock."""
    return gpu.power_w * gpu.idle * relative_power(gpu.voltage, share)


def memory_w(memory: Memory, share: Array) -> Array:
    """Return the memory's power in watts without traffic, at a clock over the top clock."""
    return np.asarray(memory.power_w * share**memory.exponent)


def core_w(cpu: Cpu, clock_hz: Array) -> Array:
    """Return the dynamic power in watts of one busy CPU core."""
    return cpu.core_w * relative_power(cpu.voltage, clock_hz / cpu.clock_hz)


def static_w(thermal: Thermal, temperature_c: Celsius) -> Celsius:
    """Return the power in watts that no knob changes, leakage at a temperature included."""
    return thermal.static_w * (1.0 + thermal.leakage_per_c * (temperature_c - thermal.reference_c))
