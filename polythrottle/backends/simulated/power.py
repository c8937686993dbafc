"""What the parts of a board draw: voltage that is flat, then linear in the clock; memory; CPU; leakage with heat."""

from polythrottle.catalog.simulation import Cpu, Gpu, Memory, Thermal, Voltage


def relative_power(voltage: Voltage, share: float) -> float:
    """Return V²f over its value at the top clock.

    The shape is that of the published Tegra X1 table (Linux ``drivers/gpu/drm/nouveau/nvkm/subdev/volt/gm20b.c``).

    Args:
        voltage: The curve.
        share: Clock over the top clock; above 0.
    """
    slope = (voltage.swing - 1.0) / (1.0 - voltage.knee)
    volts = 1.0 + slope * max(0.0, share - voltage.knee)
    return share * (volts / voltage.swing) ** 2


def gpu_busy_w(gpu: Gpu, share: float, useful: float) -> float:
    """Return the GPU's dynamic power in watts while busy.

    Args:
        gpu: The GPU.
        share: Clock over the top clock.
        useful: Share of the time its lanes have work.
    """
    return gpu.power_w * relative_power(gpu.voltage, share) * (gpu.floor + (1.0 - gpu.floor) * useful)


def gpu_idle_w(gpu: Gpu, share: float) -> float:
    """Return the GPU's dynamic power in watts while it waits at a clock over the top clock."""
    return gpu.power_w * gpu.idle * relative_power(gpu.voltage, share)


def memory_w(memory: Memory, share: float) -> float:
    """Return the memory's power in watts without traffic, at a clock over the top clock."""
    return float(memory.power_w * share**memory.exponent)


def core_w(cpu: Cpu, clock_hz: float) -> float:
    """Return the dynamic power in watts of one busy CPU core."""
    return cpu.core_w * relative_power(cpu.voltage, clock_hz / cpu.clock_hz)


def static_w(thermal: Thermal, temperature_c: float) -> float:
    """Return the power in watts that no knob changes, leakage at a temperature included."""
    return thermal.static_w * max(0.0, 1.0 + thermal.leakage_per_c * (temperature_c - thermal.reference_c))
