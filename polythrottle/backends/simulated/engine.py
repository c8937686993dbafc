"""What a board does with a query at given knob levels, without noise: the physics behind device and ground truth."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from polythrottle.backends.simulated.physics import (
    Array,
    Clocks,
    Demand,
    QueryCycle,
    TopClocks,
    capped,
    idle_w,
    settled_c,
    sustainable_w,
)
from polythrottle.catalog.boards import Board, Simulation
from polythrottle.catalog.models import Model
from polythrottle.domain.errors import InvalidInput
from polythrottle.domain.space import Level


@dataclass(frozen=True)
class Engine:
    """The physics of one board, at several points at once: whatever it returns has shape (points,).

    Raises:
        InvalidInput: If the board's file has no coefficients to simulate it with.
    """

    board: Board

    def __post_init__(self) -> None:
        if self.board.simulation is None:
            raise InvalidInput(f"{self.board.title} cannot be simulated: its file has no [simulation] table")

    @cached_property
    def simulation(self) -> Simulation:
        """The board's coefficients."""
        assert self.board.simulation is not None
        return self.board.simulation

    @cached_property
    def tops(self) -> TopClocks:
        """The top clock of each domain."""
        return TopClocks(float(self._levels("gpu_max_hz")[-1]), float(self._levels("mem_hz")[-1]))

    def _levels(self, name: str) -> tuple[int | float, ...]:
        return self.board.knob(name).levels

    def columns(self, points: Sequence[Mapping[str, Level]]) -> dict[str, Array]:
        """Return the level of each knob of the board at each point; those not named are at their default."""
        default = self.board.default
        return {
            knob.name: np.array([point.get(knob.name, default[knob.name]) for point in points], dtype=float)
            for knob in self.board.knobs
        }

    def clocks(self, levels: Mapping[str, Array]) -> Clocks:
        """Return what the domains are set to; a board without a lowest GPU clock holds it at the highest."""
        gpu_max = levels["gpu_max_hz"]
        return Clocks(
            gpu_min_hz=levels.get("gpu_min_hz", gpu_max),
            gpu_max_hz=gpu_max,
            memory_hz=levels["mem_hz"],
            cpu_hz=levels.get("cpu_max_hz", np.full_like(gpu_max, self.simulation.cpu.clock_hz)),
        )

    def cap_w(self, levels: Mapping[str, Array]) -> Array:
        """Return the power in watts the board holds itself to: just below its limit, or the most it may ever draw."""
        if "power_limit_w" in levels:
            return levels["power_limit_w"] * self.simulation.gpu.hold
        return np.full_like(levels["gpu_max_hz"], self.board.power_max_w)

    def cycle(
        self, model: Model, batch_size: Array, levels: Mapping[str, Array], waited_s: float, hot: bool
    ) -> QueryCycle:
        """Return the cycle of one query.

        Args:
            model: What is served.
            batch_size: Items per query.
            levels: Of every knob of the board; see `columns`.
            waited_s: How long the board stood idle before; 0 if it did not.
            hot: Whether it has reached its temperature limit and slows itself down.
        """
        cap_w = self.cap_w(levels)
        if hot:
            cap_w = np.minimum(cap_w, sustainable_w(self.simulation.thermal))
        demand = Demand.of(self.simulation, model, batch_size)
        return capped(self.simulation, self.tops, demand, self.clocks(levels), waited_s, cap_w)

    def idle_w(self, levels: Mapping[str, Array]) -> Array:
        """Return what the board draws besides leakage while nothing is served, in watts."""
        return idle_w(self.simulation, self.tops, self.clocks(levels))

    def settled(self, model: Model, batch_size: Array, levels: Mapping[str, Array]) -> tuple[QueryCycle, Array]:
        """Return the cycle and the temperature in °C once the board has settled under full load."""
        heat = self.simulation.thermal
        free = self.cycle(model, batch_size, levels, waited_s=0.0, hot=False)
        temperature_c = settled_c(heat, free.dynamic_w)
        hot = temperature_c > heat.limit_c
        if not np.any(hot):
            return free, temperature_c
        slow = self.cycle(model, batch_size, levels, waited_s=0.0, hot=True)
        slow_c = np.minimum(heat.limit_c, settled_c(heat, slow.dynamic_w))
        return slow.where(hot, free), np.where(hot, slow_c, temperature_c)
