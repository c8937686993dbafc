"""Jetson boards, from Nano to Thor: clocks, memory, cores and power modes set; rails, heat and protection read."""

from __future__ import annotations

from polythrottle.backends.jetson.device import JetsonDevice

__all__ = ["JetsonDevice"]
