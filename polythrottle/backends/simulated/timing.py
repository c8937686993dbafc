"""How long one query takes: a roofline over GPU and memory clock, launch overhead, and preprocessing on the CPU."""

from dataclasses import dataclass

import numpy as np

from polythrottle.backends.simulated.power import Array
from polythrottle.catalog.models import Model
from polythrottle.catalog.simulation import Simulation

_SHARPNESS = 2.0
"""How sharp the corner of the roofline is: 1 adds compute and memory time, infinity takes the longer."""


@dataclass(frozen=True)
class Clocks:
    """What each domain runs at, and between what the GPU may move; at several points at once, shape (points,)."""

    gpu_min_hz: Array
    gpu_max_hz: Array
    memory_hz: Array
    cpu_hz: Array


@dataclass(frozen=True)
class Demand:
    """What one query asks of a board: everything the clocks do not change; each of shape (points,).

    Args:
        compute_cycles: GPU cycles at the rate the kernels reach, lanes that find no work included.
        useful_share: Share of those cycles in which the lanes have work.
        memory_s: Time its bytes take at the top memory clock.
        traffic_bytes: Those bytes.
        launch_cycles: CPU cycles during which the GPU waits for kernels.
        preprocess_cycles: CPU cycles before the GPU can start.
        handoff_cycles: CPU cycles between two queries during which the GPU waits.
    """

    compute_cycles: Array
    useful_share: Array
    memory_s: Array
    traffic_bytes: Array
    launch_cycles: float
    preprocess_cycles: Array
    handoff_cycles: Array

    @classmethod
    def of(cls, simulation: Simulation, model: Model, batch_size: Array) -> "Demand":
        """Return what queries of ``batch_size`` items ask.

        A batch fills ``parallelism * batch_size`` of the lanes half: time grows as batch + lanes / parallelism, which
        gives the published batch factors 1 : 1.7 : 2.7 : 4.6 (AGX Orin, B7) and 1 : 1.7 : 3.2 : 6.0 (TX2, B4);
        arXiv 2310.19991, figure 2.
        """
        gpu, memory = simulation.gpu, simulation.memory
        unfilled = gpu.lanes / model.parallelism
        rate = gpu.ops_per_clock(model.precision)
        tensor = gpu.tensor_fp32 if model.precision == "fp32" else gpu.tensor
        efficiency = model.efficiency.tensor if tensor else model.efficiency.vector
        spilt = 1.0 + memory.spill * np.log2(batch_size) ** 2
        traffic = model.weight_bytes + batch_size * model.traffic_bytes * spilt
        return cls(
            compute_cycles=model.operations * (batch_size + unfilled) / (rate * efficiency),
            useful_share=batch_size / (batch_size + unfilled),
            memory_s=traffic / (memory.bandwidth_bytes_per_s * memory.achieved),
            traffic_bytes=traffic,
            launch_cycles=model.kernels * gpu.launch_cycles,
            preprocess_cycles=model.preprocess_cycles * batch_size,
            handoff_cycles=model.handoff_cycles * batch_size,
        )

    def burst_s(self, gpu_hz: Array, memory_share: Array, cpu_hz: Array) -> Array:
        """Return how long the GPU is busy with the query at a steady clock, in seconds.

        Args:
            gpu_hz: GPU clock.
            memory_share: Memory clock over the top memory clock.
            cpu_hz: CPU clock.
        """
        compute_s, memory_s = self.compute_cycles / gpu_hz, self.memory_s / memory_share
        longer, shorter = np.maximum(compute_s, memory_s), np.minimum(compute_s, memory_s)
        roofline_s = longer * (1.0 + (shorter / longer) ** _SHARPNESS) ** (1.0 / _SHARPNESS)
        return np.asarray(roofline_s + self.launch_cycles / cpu_hz)
