"""A small job and machines for it, shared by the tests of plans."""

from dataclasses import replace
from typing import Any

from polythrottle.cluster.plan.options import Offer, Work
from polythrottle.domain.fleet.transient_machine import (
    Cap,
    CheckpointCost,
    ConstantHazard,
    Lifetime,
    MachineType,
    Market,
)

V100 = MachineType(
    "v100",
    "V100",
    {Market.SPOT: 0.86, Market.ON_DEMAND: 2.48},
    (
        Cap(250, 1.0, 227.4),
        Cap(225, 1.0227, 213.2),
        Cap(200, 1.0614, 190.5),
        Cap(175, 1.1042, 171.8),
        Cap(150, 1.2151, 149.0),
        Cap(125, 1.5074, 123.6),
    ),
    idle_w=60,
    writing_w=80,
)

CATALOGUE = """
[work]
name = "a network"
machine_h = 8
of = "m"
checkpoint_stall_s = 2.0
restart_s = 8
[machines.m]
gpu = "V100"
steps_per_s = 4.0
most = 8
startup_s = 100
idle_w = 40
usd_per_h.spot = 1.0
lifetime.rate_per_h = 0.2
caps = [{ power_w = 220 }, { limit_w = 200, slowdown = 1.05, power_w = 184 }]
"""
"""A job of eight hours on one type of machine with two caps, as a file."""


def work(**more: Any) -> Work:
    """Return a synchronous job of about four hours of one machine."""
    return replace(Work("job", 72_000, CheckpointCost(3.8, 3.8), restart_s=8), **more)


def offer(lifetime: Lifetime | None = None, most: int = 8, **more: Any) -> Offer:
    """Return V100 machines that take 0.2 s for a step and are lost once in ten hours."""
    speedups = tuple(float(number) for number in range(1, most + 1))
    return replace(Offer(V100, 0.2, speedups, 170, ConstantHazard(0.1) if lifetime is None else lifetime), **more)
