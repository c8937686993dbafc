"""Devices: simulated boards, recorded tables, Jetsons, NVIDIA GPUs, this processor, and those behind an actuator."""

from __future__ import annotations

from polythrottle.backends.device_uri import FORMS, DeviceURI, check_named, names_more_than_here, open_device
from polythrottle.backends.probe import find_device

__all__ = ["FORMS", "DeviceURI", "check_named", "find_device", "names_more_than_here", "open_device"]
