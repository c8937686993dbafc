"""NVIDIA GPUs, read and steered through NVML, NVIDIA's management library."""

from polythrottle.backends.nvml.device import NvmlDevice

__all__ = ["NvmlDevice"]
