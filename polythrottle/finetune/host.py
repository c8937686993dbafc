"""A simulated board that serves a model and fine-tunes it: what either kind of work takes at its points. Simulated."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from polythrottle.backends.simulated.engine import Engine
from polythrottle.backends.simulated.noise import typical
from polythrottle.backends.simulated.power import static_w
from polythrottle.backends.simulated.sharing import ASSUMED, FAIR, Paces, Sharing, busy, paces
from polythrottle.backends.simulated.training import memory_share, trained
from polythrottle.catalog.models import Model
from polythrottle.finetune.job import Job, Slice
from polythrottle.finetune.options import Menu, Option
from polythrottle.ladder import Service
from polythrottle.measurement import Latency
from polythrottle.space import OperatingPoint

_PINNED = 8
"""So many of the highest GPU clocks are offered, held still."""
_MEMORIES = 3
"""So many of the highest memory clocks are offered with each."""
_SETTLED_S = 1e-2
"""Idle time before a query that counts as out of its row, where only what policies know is computed."""


@dataclass(frozen=True)
class Piece:
    """Work without noise while nothing else runs.

    Args:
        work_s: How long it occupies the device.
        lag_s: How much later its answer is there.
        power_w: Mean besides leakage.
        memory: How much of it is moving bytes, 0 to 1.
    """

    work_s: float
    lag_s: float
    power_w: float
    memory: float


@dataclass(frozen=True, eq=False)
class Host:
    """A board of the catalogue with both kinds of work.

    Args:
        engine: Its physics.
        model: What is served, and whose backbone is fine-tuned.
        job: The fine-tuning.
        noise: Standard deviation of the log of a piece's time; 0 is silence.
        sharing: What taking turns costs.
        most: The largest batch that requests are answered in.
    """

    engine: Engine
    model: Model
    job: Job
    noise: float = 0.02
    sharing: Sharing = ASSUMED
    most: int = 8
    _pieces: dict[tuple[object, ...], Piece] = field(default_factory=dict, repr=False)

    @cached_property
    def learner(self) -> Model:
        """What a slice asks of the board."""
        return trained(self.model, self.job.output)

    @cached_property
    def stretch(self) -> Latency:
        """The statistics of the time of a piece that takes 1 s without noise."""
        return Latency.of(typical(self.noise).tolist())

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Samples of a slice: powers of two and halfway between, whole steps, and the last step of an epoch."""
        whole, last = self.job.step_samples(0), self.job.step_samples(self.job.steps_per_epoch - 1)
        powers = [2**power for power in range(whole.bit_length())]
        parts = {*powers, *(power + power // 2 for power in powers)}
        return tuple(sorted({size for size in parts if size < whole} | {whole, last}))

    @property
    def default(self) -> OperatingPoint:
        """The point the board starts at."""
        return self.engine.board.default

    def serving(self, point: OperatingPoint, requests: int, waited_s: float, beside: bool) -> Piece:
        """Return a batch of requests.

        Args:
            point: Levels of every knob.
            requests: In the batch.
            waited_s: How long the board stood idle before.
            beside: Whether fine-tuning runs at the same time, so that the governor sees no gap.
        """
        return self._piece(self.model, busy(point) if beside else point, requests, waited_s)

    def learning(self, point: OperatingPoint, samples: int, waited_s: float, beside: bool) -> Piece:
        """Return a slice; see `serving`."""
        return self._piece(self.learner, busy(point) if beside else point, samples, waited_s)

    def _piece(self, model: Model, point: OperatingPoint, size: int, waited_s: float) -> Piece:
        # Idle times in steps of a factor of two, so that what follows from them need not be computed each time.
        waited_s = 0.0 if waited_s <= 0 else float(2.0 ** np.clip(np.round(np.log2(waited_s)), -13, 3))
        key = (model.name, point, size, waited_s)
        if key not in self._pieces:
            levels, sizes = self.engine.columns([point]), np.array([float(size)])
            cycle = self.engine.cycle(model, sizes, levels, waited_s, hot=False)
            memory = memory_share(self.engine, model, sizes, levels).item()
            work_s, lag_s = cycle.interval_s.item(), (cycle.latency_s - cycle.interval_s).item()
            self._pieces[key] = Piece(work_s, max(0.0, lag_s), cycle.dynamic_w.item(), memory)
        return self._pieces[key]

    def idle_w(self, point: OperatingPoint) -> float:
        """Return what the board draws besides leakage without work, in watts."""
        return self.engine.idle_w(self.engine.columns([point])).item()

    def paces(self, inference: Piece, training: Piece) -> Paces:
        """Return how fast both go on beside each other."""
        return paces(inference.memory, training.memory, FAIR, self.sharing)

    def option(self, point: OperatingPoint) -> Option:
        """Return what profiling the board alone at a point would say of both kinds of work."""
        heat = self.engine.simulation.thermal
        leak_w, idle_w = static_w(heat, heat.start_c), self.idle_w(point)

        def service(requests: int) -> Service:
            piece = self.serving(point, requests, _SETTLED_S, beside=False)
            took_s = piece.work_s * self.stretch.mean_s
            tail_s = (piece.work_s + piece.lag_s) * self._tail
            latency_s = (piece.work_s + piece.lag_s) * self.stretch.mean_s
            joules = (piece.power_w + leak_w) * took_s
            return Service(point, requests, took_s, latency_s, tail_s, joules, idle_w + leak_w)

        def cut(samples: int) -> Slice:
            piece = self.learning(point, samples, 0.0, beside=False)
            alone_s = piece.work_s * self.stretch.mean_s + self.sharing.warmup_s
            return Slice(
                samples,
                alone_s,
                max(alone_s, piece.work_s * self._tail + self.sharing.warmup_s),
                (piece.power_w + leak_w) * alone_s,
            )

        return Option(point, tuple(map(service, range(1, self.most + 1))), tuple(map(cut, self.sizes)))

    @property
    def _tail(self) -> float:
        assert self.stretch.p99_s is not None
        return self.stretch.p99_s

    def menu(self) -> Menu:
        """Return the default and points with the GPU held at a high clock, at high memory clocks."""
        board = self.engine.board
        pins = board.knob("gpu_max_hz").levels[-_PINNED:]
        memories = board.knob("mem_hz").levels[-_MEMORIES:]
        pinned = [self._pinned(gpu_hz, memory_hz) for gpu_hz in pins for memory_hz in memories]
        return Menu(tuple(map(self.option, _distinct([self.default, *pinned]))))

    def _pinned(self, gpu_hz: float, memory_hz: float) -> OperatingPoint:
        levels = {"gpu_min_hz": gpu_hz, "gpu_max_hz": gpu_hz, "mem_hz": memory_hz}
        return self.default.moved({name: level for name, level in levels.items() if name in self.default})


def _distinct(points: Iterable[OperatingPoint]) -> tuple[OperatingPoint, ...]:
    return tuple(dict.fromkeys(points))
