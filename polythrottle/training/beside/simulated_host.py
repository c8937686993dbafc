"""A simulated board that serves a model and fine-tunes it: what its work takes, and co-runs on it. Simulated."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice

import numpy as np

from polythrottle.backends.simulated.engine import (
    ASSUMED,
    Engine,
    Paces,
    busy,
    co_run,
    memory_share,
    paces,
    trained,
)
from polythrottle.backends.simulated.physics import Noise, static_w, typical
from polythrottle.catalog import Board, Model
from polythrottle.domain.errors import InvalidInput
from polythrottle.domain.ladder import PointPerformance
from polythrottle.domain.measurement import Latency
from polythrottle.domain.space import BATCH_SIZE, OperatingPoint
from polythrottle.training.beside.corun_model import CoRun, intensity
from polythrottle.training.beside.operating_options import FinetuningJob, Menu, Option, Slice

# A simulated board that serves a model and fine-tunes it: what either kind of work takes at its points. Simulated.

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
        most: The largest batch that requests are answered in.
    """

    engine: Engine
    model: Model
    job: FinetuningJob
    noise: float = 0.02
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
        whole = self.job.step_samples(0)
        last = self.job.step_samples(self.job.steps_per_epoch - 1)
        # Halfway sizes too: a slice of 17 would otherwise have to be cut to 16 or wait for room for 32.
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
        # A continuous idle time would compute each piece anew, of which a stream has thousands; a factor of two is fine
        # enough.
        if waited_s <= 0:
            waited_s = 0.0
        else:
            waited_s = float(2.0 ** np.clip(np.round(np.log2(waited_s)), -13, 3))
        key = (model.name, point, size, waited_s)
        # The engine works on columns of hundreds of points; for one of them its overhead would be most of a simulation.
        if key not in self._pieces:
            levels = self.engine.columns([point])
            sizes = np.array([float(size)])
            cycle = self.engine.cycle(model, sizes, levels, waited_s, hot=False)
            memory = memory_share(self.engine, model, sizes, levels).item()
            work_s = cycle.interval_s.item()
            lag_s = (cycle.latency_s - cycle.interval_s).item()
            self._pieces[key] = Piece(work_s, max(0.0, lag_s), cycle.dynamic_w.item(), memory)
        return self._pieces[key]

    def idle_w(self, point: OperatingPoint) -> float:
        """Return what the board draws besides leakage without work, in watts."""
        return self.engine.idle_w(self.engine.columns([point])).item()

    def paces(self, inference: Piece, training: Piece) -> Paces:
        """Return how fast both go on beside each other."""
        return paces(inference.memory, training.memory)

    def option(self, point: OperatingPoint) -> Option:
        """Return what profiling the board alone at a point would say of both kinds of work."""
        heat = self.engine.simulation.thermal
        leak_w = static_w(heat, heat.start_c)
        idle_w = self.idle_w(point)

        def service(requests: int) -> PointPerformance:
            piece = self.serving(point, requests, _SETTLED_S, beside=False)
            took_s = piece.work_s * self.stretch.mean_s
            tail_s = (piece.work_s + piece.lag_s) * self._tail
            latency_s = (piece.work_s + piece.lag_s) * self.stretch.mean_s
            joules = (piece.power_w + leak_w) * took_s
            return PointPerformance(point, requests, took_s, latency_s, tail_s, joules, idle_w + leak_w)

        def cut(samples: int) -> Slice:
            piece = self.learning(point, samples, 0.0, beside=False)
            alone_s = piece.work_s * self.stretch.mean_s + ASSUMED.warmup_s
            return Slice(
                samples,
                alone_s,
                max(alone_s, piece.work_s * self._tail + ASSUMED.warmup_s),
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


# Co-runs on a simulated board: time slicing as the simulator has it, and noise.

SHARES = (0.0, 0.25, 0.5, 0.75)
"""Shares of the time that fine-tuning gets in the cases."""
_CASES = 400
_WINDOW = 500
_ELEMENT_BYTES = {"fp32": 4, "fp16": 2, "int8": 1}


class SimulatedBench:
    """A simulated board that serves a model and fine-tunes it beside; satisfies `corun_bench.Bench`.

    Args:
        board: From the catalogue.
        model: What is served.
        job: What is fine-tuned beside it.
        noise: Standard deviation, as a fraction, of a query's time.
        seed: Of noise and cases.

    Attributes:
        slower: Factor on every latency from now on: a drift, for whatever has to follow one.

    Raises:
        InvalidInput: If the noise is not a fraction, or the board cannot be simulated or hold the model.
    """

    simulated = True

    def __init__(
        self,
        board: Board,
        model: Model,
        job: FinetuningJob,
        noise: float = 0.03,
        seed: int = 0,
    ) -> None:
        if not 0 <= noise < 1 or seed < 0:
            raise InvalidInput(f"a simulation needs 0 <= noise < 1 and seed >= 0, not noise={noise} and seed={seed}")
        self._engine = Engine(board)
        self._board = board
        self._model = model
        self._job = job
        self._engine.simulation.gpu.ops_per_clock(model.precision)
        self._training = trained(model, job.output)
        self._noise = noise
        self._seed = seed
        self._number = 0
        self._points: dict[CoRun, OperatingPoint] = {}
        self.slower = 1.0

    @property
    def title(self) -> str:
        """Board and model, marked as simulated."""
        return f"{self._model.title} on {self._board.title} (simulated)"

    @cached_property
    def cases(self) -> Sequence[CoRun]:
        """Some hundred co-runs at random among batches, shares and points of the board."""
        rng = np.random.default_rng([self._seed, 1])
        for _ in range(_CASES):
            point = self._board.default.moved(self._drawn(rng))
            if self._board.refusal(point) is None:
                case = self.case(point, self._batch(rng), self._step(rng), float(rng.choice(SHARES)))
                self._points[case] = point
        return tuple(self._points)

    def _drawn(self, rng: np.random.Generator) -> dict[str, int | float]:
        names = [name for name in ("gpu_max_hz", "mem_hz", "cpu_max_hz") if name in self._board.default]
        levels = {name: rng.choice(self._board.knob(name).levels[-8:]).item() for name in names}
        if "gpu_min_hz" in self._board.default:
            floor = {"gpu_min_hz": self._board.knob("gpu_min_hz").levels[0]}
        else:
            floor = {}
        return {**levels, **floor}

    def _batch(self, rng: np.random.Generator) -> int:
        return int(rng.choice(self._model.space(self._board.memory_bytes).knob(BATCH_SIZE).levels))

    def _step(self, rng: np.random.Generator) -> int:
        return max(1, self._job.batch // int(rng.choice([1, 2, 4, 8])))

    def case(self, point: OperatingPoint, batch: int, samples: int, share: float) -> CoRun:
        """Return the co-run at a point of the board, without its latency.

        Args:
            point: Levels of every knob of the board.
            batch: Items per query.
            samples: Of a step of the fine-tuning.
            share: Of the time that fine-tuning gets.
        """
        if not share:
            samples = 0
        operations, moved = _work(self._model, batch)
        step_operations, step_moved = _work(self._training, samples) if samples else (0.0, 0.0)
        clocks = self._engine.clocks(self._engine.columns([point]))
        width = _ELEMENT_BYTES[self._model.precision]
        return CoRun(
            operations=operations,
            traffic_bytes=moved,
            batch=batch,
            step_operations=step_operations,
            step_bytes=step_moved,
            step_batch=samples,
            gpu_hz=clocks.gpu_max_hz.item(),
            memory_hz=clocks.memory_hz.item(),
            cpu_hz=clocks.cpu_hz.item(),
            share=share,
            intensity=intensity(operations, moved, width),
            step_intensity=intensity(step_operations, step_moved, width),
        )

    def truth_s(self, case: CoRun) -> float:
        """Return the latency of one of the cases without noise, in seconds.

        Raises:
            InvalidInput: If it is not valid of them.
        """
        # A case knows its clocks but not the whole point, which only the bench that made it remembers.
        if case.unmeasured not in self._points:
            raise InvalidInput("this bench can only measure its own cases")
        serving = (self._model, case.batch)
        training = (self._training, max(case.step_batch, 1))
        shared = co_run(self._engine, serving, training, self._points[case.unmeasured], case.share)
        return shared.latency_s * self.slower

    def measure(self, case: CoRun) -> CoRun:
        """Return a case with the mean and tail of a window of queries."""
        # Mean and tail from one window of queries: a real window has both of the same noise.
        noise = self._stream()
        factor, _ = noise.window()
        times_s = np.fromiter(islice(noise.queries(), _WINDOW), float) * factor * self.truth_s(case)
        latency = Latency.of(times_s.tolist())
        return replace(case, latency_s=latency.mean_s, tail_s=latency.p99_s)

    def request(self, case: CoRun) -> CoRun:
        """Return a case with the latency of one query."""
        return replace(case, latency_s=self.truth_s(case) * next(self._stream().queries()))

    def _stream(self) -> Noise:
        self._number += 1
        return Noise(self._noise, self._seed, self._number)


def _work(model: Model, items: int) -> tuple[float, float]:
    """Return the operations of a query and the bytes it moves."""
    return model.operations * items, model.weight_bytes + model.traffic_bytes * items
