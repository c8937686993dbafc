"""The state of a simulated board: levels, virtual time, energy so far, heat."""

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
from typing_extensions import Self

from polythrottle.backends.simulated.cycle import Cycle
from polythrottle.backends.simulated.engine import Engine
from polythrottle.backends.simulated.power import static_w
from polythrottle.backends.simulated.thermal import warmed_c
from polythrottle.catalog.models import Model
from polythrottle.clock import VirtualClock
from polythrottle.measurement import Reading
from polythrottle.space import Level, OperatingPoint

_RECOVERY_C = 2.0
"""How far a board that slowed itself down must cool before it stops doing so; assumed."""


_STEPS_PER_OCTAVE = 2
_LONG_S, _SHORT_S = 10.0, 1e-5


def _rounded_s(waited_s: float) -> float:
    """Return an idle time in steps of √2, so that what follows from it need not be computed each time."""
    if waited_s <= 0 or waited_s > _LONG_S:
        return math.inf if waited_s > 0 else 0.0
    return float(2 ** (round(_STEPS_PER_OCTAVE * math.log2(max(waited_s, _SHORT_S))) / _STEPS_PER_OCTAVE))


class BoardClock(VirtualClock):
    """Virtual time in which a board exists: whoever sleeps on it lets the board idle."""

    def __init__(self, idle: Callable[[float], None]) -> None:
        super().__init__()
        self._idle = idle

    def sleep(self, duration_s: float) -> None:
        """Move the virtual time on while the board idles."""
        if duration_s > 0:
            self._idle(duration_s)

    def advance(self, duration_s: float) -> None:
        """Move the virtual time on while the board works."""
        self._now_s += duration_s

    def reset(self) -> None:
        """Start again at 0, so that later sums round as the first ones did."""
        self._now_s = 0.0


class Answer(NamedTuple):
    """One cycle, as plain numbers, which are faster to add up than arrays; see `Cycle`."""

    latency_s: float
    interval_s: float
    dynamic_j: float
    gpu_hz: float

    @classmethod
    def of(cls, cycle: Cycle) -> Self:
        """Return the cycle at its only point."""
        return cls(cycle.latency_s.item(), cycle.interval_s.item(), cycle.dynamic_j.item(), cycle.gpu_hz.item())


class State:
    """What a simulated board is like now; every call moves its own clock on.

    ``factors`` multiply the time and the power of everything served until they are replaced.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.clock = BoardClock(self._idle)
        self.reset(engine.board.default)

    def reset(self, levels: OperatingPoint) -> None:
        """Start again: time 0, no energy, the start temperature, and these levels."""
        self.clock.reset()
        self.factors = (1.0, 1.0)
        self._energy_j = 0.0
        self._temperature_c = self._engine.simulation.thermal.start_c
        self._hot = False
        self._settle(levels)

    def _settle(self, levels: OperatingPoint) -> None:
        self._levels = levels
        self._columns = self._engine.columns([levels])
        self._answers: dict[tuple[int, int, float, bool], tuple[Answer, Model]] = {}
        self._idle_w = self._engine.idle_w(self._columns).item()
        self._last: Answer | None = None
        self._waited_s = math.inf

    def move(self, levels: OperatingPoint) -> None:
        """Set the level of every knob and idle until the change has taken effect."""
        delay_s = self._delay_s(levels)
        self._settle(levels)
        self.clock.sleep(delay_s)

    def _delay_s(self, levels: Mapping[str, Level]) -> float:
        times = self._engine.simulation.actuation
        by_knob = {
            ("gpu_min_hz", "gpu_max_hz"): times.gpu_s,
            ("mem_hz",): times.memory_s,
            ("cpu_max_hz",): times.cpu_s,
            ("power_limit_w",): times.power_s,
        }
        changed = {name for name, level in levels.items() if level != self._levels[name]}
        return sum(delay_s for names, delay_s in by_knob.items() if changed.intersection(names))

    def _idle(self, duration_s: float) -> None:
        self._last = None
        self._waited_s += duration_s
        self._draw(self._idle_w * duration_s, duration_s, 1.0)

    def serve(self, model: Model, batch_size: int, factor: float) -> float:
        """Answer one query and return how long its sender waited, in seconds.

        Args:
            model: What is served.
            batch_size: Items in the query.
            factor: On its time.
        """
        answer = self._answer(model, batch_size)
        time, power = self.factors
        self._draw(answer.dynamic_j, answer.interval_s * time * factor, power)
        self._last, self._waited_s = answer, 0.0
        return answer.latency_s * time * factor

    def _answer(self, model: Model, batch_size: int) -> Answer:
        key = (id(model), batch_size, _rounded_s(self._waited_s), self._hot)
        if key not in self._answers:
            cycle = self._engine.cycle(model, np.array([float(batch_size)]), self._columns, key[2], key[3])
            self._answers[key] = (Answer.of(cycle), model)
        return self._answers[key][0]

    def _draw(self, dynamic_j: float, duration_s: float, power: float) -> None:
        heat = self._engine.simulation.thermal
        energy_j = (dynamic_j + static_w(heat, self._temperature_c) * duration_s) * power
        self._energy_j += energy_j
        self._temperature_c = warmed_c(heat, self._temperature_c, energy_j / duration_s, duration_s)
        self._hot = self._temperature_c >= heat.limit_c - (_RECOVERY_C if self._hot else 0.0)
        self.clock.advance(duration_s)

    def reading(self) -> Reading:
        """Return energy so far, temperature, clocks, and whether heat slows the board down, now.

        A power limit that somebody set is not throttling: it does what was asked.
        """
        clocks = self._engine.clocks(self._columns)
        gpu_hz = clocks.gpu_min_hz.item() if self._last is None else self._last.gpu_hz
        running = {
            "gpu": round(gpu_hz),
            "mem": round(clocks.memory_hz.item()),
            "cpu": round(clocks.cpu_hz.item()),
        }
        return Reading(self.clock.now(), self._energy_j, self._temperature_c, running, self._hot)
