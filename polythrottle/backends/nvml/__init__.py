"""NVIDIA GPUs, one or several as one, read and steered through NVML, NVIDIA's management library."""

from __future__ import annotations

from polythrottle.backends.nvml.device import NvmlDevice
from polythrottle.backends.nvml.group import NvmlGroup, open_nvml
from polythrottle.backends.nvml.members import NamedGpus, check_name, means_several, part, usable, uuids

__all__ = [
    "NamedGpus",
    "NvmlDevice",
    "NvmlGroup",
    "check_name",
    "means_several",
    "open_nvml",
    "part",
    "usable",
    "uuids",
]
