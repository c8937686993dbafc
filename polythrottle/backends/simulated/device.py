"""A board of the catalogue that is computed instead of wired up.

Its state in virtual time, its workload, and the ground truth.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from types import TracebackType
from typing import NamedTuple

import numpy as np
from typing_extensions import Self

from polythrottle.backends.simulated.engine import Engine, StepPhysics
from polythrottle.backends.simulated.language_model import SimulatedLanguageModel, Step, TokenServer
from polythrottle.backends.simulated.node import ALONE, SimulatedGroup
from polythrottle.backends.simulated.physics import Noise, QueryCycle, static_w, sustainable_w, typical, warmed_c
from polythrottle.catalog.boards import Board
from polythrottle.catalog.models import LanguageModel, Model
from polythrottle.domain.clock import VirtualClock
from polythrottle.domain.errors import InvalidInput, KnobRejected
from polythrottle.domain.measurement import EnergyKind, Latency, Measurement, Query, Reading
from polythrottle.domain.ports import Offer
from polythrottle.domain.space import BATCH_SIZE, Knob, Level, OperatingPoint, SearchSpace

# A model of the catalogue served on a simulated board.


class SimulatedWorkload:
    """A served model; satisfies the port ``Workload``. Made by `SimulatedDevice.serve`.

    Args:
        model: From the catalogue.
        space: The batch sizes that fit.
        answer: Serves one query of so many items.
    """

    def __init__(self, model: Model, space: SearchSpace, answer: Callable[[Model, int], Query]) -> None:
        self.model = model
        self._space = space
        self._answer = answer
        self._batch_size = self.batch_size(space.default)

    @property
    def uri(self) -> str:
        """The name or path of the model's file."""
        return self.model.name

    @property
    def space(self) -> SearchSpace:
        """The batch sizes that fit into the board's memory."""
        return self._space

    def batch_size(self, point: Mapping[str, Level]) -> int:
        """Return the batch size of a point, the default if it names none.

        Raises:
            KnobRejected: If the model cannot be served in batches of that size.
        """
        level = point.get(BATCH_SIZE, self._space.default[BATCH_SIZE])
        if level not in (sizes := self._space.knob(BATCH_SIZE).levels):
            raise KnobRejected(
                f"{self.model.title} cannot run at {BATCH_SIZE} {level}; it can at {', '.join(map(str, sizes))}"
            )
        return int(level)

    def apply(self, point: OperatingPoint) -> None:
        """Set the batch size.

        Raises:
            KnobRejected: If the workload has no such knob or batch size.
        """
        if unknown := sorted(set(point) - {BATCH_SIZE}):
            raise KnobRejected(f"{self.model.title} has no knob {unknown[0]}; it has {BATCH_SIZE}")
        self._batch_size = self.batch_size(point)

    def query(self) -> Query:
        """Serve one query in virtual time and return how long it took."""
        return self._answer(self.model, self._batch_size)

    def close(self) -> None:
        """Release nothing; there is nothing."""


# The state of a simulated board: levels, virtual time, energy so far, heat.

_RECOVERY_C = 2.0
"""How far a board that slowed itself down must cool before it stops doing so; assumed."""


_STEPS_PER_OCTAVE = 2
_LONG_S = 10.0
_SHORT_S = 1e-5


def _rounded_s(waited_s: float) -> float:
    """Return an idle time in steps of √2, so that what follows from it need not be computed each time."""
    if waited_s <= 0 or waited_s > _LONG_S:
        if waited_s > 0:
            return math.inf
        return 0.0
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


class QueryOutcome(NamedTuple):
    """One cycle, as plain numbers, which are faster to add up than arrays; see `Cycle`."""

    latency_s: float
    interval_s: float
    dynamic_j: float
    gpu_hz: float

    @classmethod
    def of(cls, cycle: QueryCycle) -> Self:
        """Return the cycle at its only point."""
        return cls(cycle.latency_s.item(), cycle.interval_s.item(), cycle.dynamic_j.item(), cycle.gpu_hz.item())


class State:
    """What a simulated board is like now; every call moves its own clock on.

    ``factors`` multiply the time and the power of everything served until they are replaced.

    Args:
        engine: The physics of one board.
        group: Of so many boards it is; what is read is of all of them.
    """

    def __init__(self, engine: Engine, group: SimulatedGroup = ALONE) -> None:
        self._engine = engine
        self._group_power = group.power
        self._group_time = group.time
        self._hottest = group.hottest
        self._mean_power = group.power / group.gpus
        self._gpus = 1
        self._engine_idle_w: float | None = None
        self._running_hz: float | None = None
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
        self._answers: dict[tuple[int, int, float, bool], tuple[QueryOutcome, Model]] = {}
        self._idle_w = self._engine.idle_w(self._columns).item()
        self._last: QueryOutcome | None = None
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
        self._running_hz = None
        if self._engine_idle_w is not None:
            self._spend(self._engine_idle_w * self.factors[1], duration_s)
            return
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
        self._draw(answer.dynamic_j, answer.interval_s * time * factor * self._group_time, power)
        self._last = answer
        self._waited_s = 0.0
        return answer.latency_s * time * factor * self._group_time

    def _answer(self, model: Model, batch_size: int) -> QueryOutcome:
        key = (id(model), batch_size, _rounded_s(self._waited_s), self._hot)
        if key not in self._answers:
            cycle = self._engine.cycle(model, np.array([float(batch_size)]), self._columns, key[2], key[3])
            self._answers[key] = (QueryOutcome.of(cycle), model)
        return self._answers[key][0]

    def _draw(self, dynamic_j: float, duration_s: float, power: float) -> None:
        heat = self._engine.simulation.thermal
        energy_j = (dynamic_j + static_w(heat, self._temperature_c) * duration_s) * power
        self._energy_j += energy_j * self._group_power
        self._temperature_c = warmed_c(heat, self._temperature_c, energy_j * self._hottest / duration_s, duration_s)
        self._hot = self._temperature_c >= heat.limit_c - (_RECOVERY_C if self._hot else 0.0)
        self.clock.advance(duration_s)

    def host(self, physics: StepPhysics, gpus: int) -> None:
        """Hold a language-model engine from now on, on so many of these cards; what is read is of all of them."""
        self._gpus = gpus
        self._engine_idle_w = physics.idle_w() * gpus * self._mean_power

    def step(self, physics: StepPhysics, server: TokenServer, factor: float) -> Step:
        """Run the next step of an engine at the levels that are set.

        Args:
            physics: Of its steps.
            server: Which has something to compute.
            factor: On the step's time.
        """
        cap_w = self._engine.cap_w(self._columns).item()
        if self._hot:
            cap_w = min(cap_w, sustainable_w(self._engine.simulation.thermal))
        clocks = self._engine.clocks(self._columns)
        memory_share = clocks.memory_hz.item() / self._engine.tops.memory_hz
        work, pieces = server.plan()
        duration_s, power_w, gpu_hz = physics.run(work, clocks.gpu_max_hz.item(), cap_w, memory_share)
        time, power = self.factors
        ran = (duration_s * time * factor * self._group_time, power_w * power * self._mean_power, gpu_hz)
        step = server.advance(self.clock.now(), work, pieces, ran)
        self._spend(step.power_w, step.duration_s)
        self._running_hz = gpu_hz
        return step

    def _spend(self, power_w: float, duration_s: float) -> None:
        """Draw a power that counts everything for a while."""
        heat = self._engine.simulation.thermal
        self._energy_j += power_w * duration_s
        self._temperature_c = warmed_c(heat, self._temperature_c, power_w / self._gpus, duration_s)
        self._hot = self._temperature_c >= heat.limit_c - (_RECOVERY_C if self._hot else 0.0)
        self.clock.advance(duration_s)

    def reading(self) -> Reading:
        """Return energy so far, temperature, clocks, and whether heat slows the board down, now.

        A power limit that somebody set is not throttling: it does what was asked.
        """
        clocks = self._engine.clocks(self._columns)
        if self._last is None:
            gpu_hz = clocks.gpu_min_hz.item()
        else:
            gpu_hz = self._last.gpu_hz
        if self._running_hz is not None:
            gpu_hz = self._running_hz
        running = {
            "gpu": round(gpu_hz),
            "mem": round(clocks.memory_hz.item()),
            "cpu": round(clocks.cpu_hz.item()),
        }
        return Reading(self.clock.now(), self._energy_j, self._temperature_c, running, self._hot)


# What an endless window of a settled board would measure: the ground truth that regret is counted from.


@lru_cache(maxsize=8)
def _stretch(noise: float) -> Latency:
    """Return the statistics of query times at a noise level, for a query that takes 1 s without noise."""
    return Latency.of(typical(noise).tolist())


def expected(
    engine: Engine,
    model: Model,
    batch_sizes: Sequence[int],
    points: Sequence[Mapping[str, Level]],
    noise: float,
    group: SimulatedGroup = ALONE,
) -> tuple[Measurement, ...]:
    """Return the true measurements of a model.

    Args:
        engine: The board's physics.
        model: What is served.
        batch_sizes: Items per query for each board, one for each point.
        points: Levels of the board's knobs; those not named are at their default.
        noise: Its level.
        group: Of the boards that answer as one.
    """
    batch_size = np.array(batch_sizes, dtype=float)
    cycle, temperature_c = engine.settled(model, batch_size, engine.columns(points))
    stretch = _stretch(noise)
    interval_s = cycle.interval_s * stretch.mean_s * group.time
    energy_j = cycle.dynamic_j + static_w(engine.simulation.thermal, temperature_c) * interval_s
    energy_j = energy_j * group.power
    items = batch_size * group.gpus
    figures = (
        cycle.latency_s * group.time,
        energy_j / items,
        items / interval_s,
        energy_j / interval_s,
        temperature_c,
    )
    boundary = _boundary(engine.board, group)
    return tuple(
        _measurement(boundary, stretch, *row) for row in zip(*(column.tolist() for column in figures), strict=True)
    )


def _boundary(board: Board, group: SimulatedGroup) -> str:
    if group.gpus > 1:
        return f"{group.gpus} x {board.rails.boundary}"
    return board.rails.boundary


def _measurement(
    boundary: str,
    stretch: Latency,
    latency_s: float,
    energy_j: float,
    throughput_per_s: float,
    power_w: float,
    temperature_c: float,
) -> Measurement:
    return Measurement(
        latency=_stretched(stretch, latency_s),
        energy_j=energy_j,
        throughput_per_s=throughput_per_s,
        power_w=power_w,
        energy_kind=EnergyKind.SIMULATED,
        boundary=boundary,
        temperature_c=temperature_c,
    )


def _stretched(stretch: Latency, latency_s: float) -> Latency:
    parts = (stretch.p50_s, stretch.p90_s, stretch.p95_s, stretch.p99_s, stretch.std_s)
    p50, p90, p95, p99, std = (None if part is None else part * latency_s for part in parts)
    return Latency(stretch.mean_s * latency_s, p50, p90, p95, p99, std)


# A board of the catalogue that is computed instead of wired up: same knobs, virtual time, energy and heat.

_SEED = 0
_NOISE = 0.02


class SimulatedDevice:
    """A simulated board; satisfies the ports ``Device`` and ``Rewindable``.

    Everything it does follows from seed, trial number (`rewind`) and what is asked of it, bit for bit.

    Args:
        board: From the catalogue.
        seed: Of the noise.
        noise: Standard deviation, as a fraction, of a query's time and of a window's power; 0 turns noise off.
        knobs: The knobs to search instead of those the board's file says.
        group: Of so many such boards it is, each of which gets its part of a batch; levels are those of each.

    Raises:
        InvalidInput: If the noise is not a fraction, the seed is negative, or the board cannot be simulated.
        UnknownName: If the board has no knob of a name in ``knobs``.
    """

    def __init__(
        self,
        board: Board,
        seed: int = _SEED,
        noise: float = _NOISE,
        knobs: Sequence[str] | None = None,
        group: SimulatedGroup = ALONE,
    ) -> None:
        if not 0.0 <= noise < 1.0 or seed < 0:
            raise InvalidInput(f"a simulation needs 0 <= noise < 1 and seed >= 0, not noise={noise} and seed={seed}")
        self._board = board
        self._seed = seed
        self._noise = noise
        self._knobs = None if knobs is None else tuple(knobs)
        self._space = board.space(self._knobs)
        self._group = group
        self._engine = Engine(board)
        self._state = State(self._engine, group)
        self.rewind(0)

    @property
    def uri(self) -> str:
        """The URI that opens this device again; options at their default are left out."""
        options = list(self._group.options)
        options += [f"seed={self._seed}"] if self._seed != _SEED else []
        options += [f"noise={self._noise:g}"] if self._noise != _NOISE else []
        options += [f"knobs={','.join(self._knobs)}"] if self._knobs is not None else []
        return f"sim:{self._group.name or self._board.name}{'?' if options else ''}{'&'.join(options)}"

    @property
    def title(self) -> str:
        """The name people know the board by, marked as simulated."""
        if self.gpus > 1:
            return f"{self.gpus} x {self._board.title} (simulated)"
        return f"{self._board.title} (simulated)"

    @property
    def gpus(self) -> int:
        """How many boards answer as this one."""
        return self._group.gpus

    @property
    def board(self) -> Board:
        """The catalogue entry this device simulates."""
        return self._board

    @property
    def space(self) -> SearchSpace:
        """The points that may be applied, and the default among them."""
        return self._space

    @property
    def clock(self) -> VirtualClock:
        """The virtual clock; sleeping on it passes idle time on the board."""
        return self._state.clock

    @property
    def energy_kind(self) -> EnergyKind:
        """Always simulated."""
        return EnergyKind.SIMULATED

    @property
    def boundary(self) -> str:
        """The rails of the board's total, of all boards where it is several."""
        return _boundary(self._board, self._group)

    @property
    def presets(self) -> Mapping[str, OperatingPoint]:
        """The vendor's named points; they may set knobs the space holds still."""
        return {name: self._space.default.moved(point) for name, point in self._board.presets.items()}

    def offers(self) -> tuple[Offer, ...]:
        """Return every knob of the board."""
        searched = self._space.names
        knobs = self._board.knobs
        return tuple(Offer(Knob(each.name, each.levels), each.default, each.name in searched) for each in knobs)

    def altered(self) -> tuple[str, ...]:
        """Return nothing: nobody else sets a simulated board."""
        return ()

    def apply(self, point: OperatingPoint) -> None:
        """Set every knob of ``point``, others to their default, and pass the time until it has taken effect.

        Raises:
            KnobRejected: If the board has no such knob or level, or does not take them together.
        """
        if problem := self._board.refusal(point):
            raise KnobRejected(problem)
        self._state.move(self._board.default.moved(point))
        if self._noise:
            self._state.factors = self._stream.window()
        else:
            self._state.factors = (1.0, 1.0)

    def read(self) -> Reading:
        """Return energy so far, temperature and clocks, now."""
        return self._state.reading()

    def restore(self) -> None:
        """Set every knob back to its default."""
        self._state.move(self._board.default)

    def rewind(self, number: int) -> None:
        """Put knobs, heat, energy, clock and noise to where trial ``number`` starts, whatever went before."""
        self._stream = Noise(self._noise, self._seed + 1000 * self._group.number, number)
        self._queries = self._stream.queries()
        self._state.reset(self._board.default)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.restore()

    def serve(self, model: Model) -> SimulatedWorkload:
        """Return the workload that serves a model on this device.

        Raises:
            InvalidInput: If the model does not fit into the board's memory, or needs a precision it has no rate for.
        """
        try:
            self._engine.simulation.gpu.ops_per_clock(model.precision)
        except InvalidInput as err:
            raise InvalidInput(f"{self._board.title} cannot serve {model.title}: {err}") from err
        return SimulatedWorkload(model, self._batches(model), self._answer)

    def _batches(self, model: Model) -> SearchSpace:
        """Return the batch sizes that fit, of all boards together."""
        own = model.space(self._board.memory_bytes)
        sizes = tuple(int(size) * self.gpus for size in own.knob(BATCH_SIZE).levels)
        return SearchSpace.grid([Knob(BATCH_SIZE, sizes)], {BATCH_SIZE: int(own.default[BATCH_SIZE]) * self.gpus})

    def parts(self, sizes: Iterable[int]) -> tuple[int, ...]:
        """Return what of batches of some sizes each board gets.

        Raises:
            InvalidInput: If one cannot be split evenly.
        """
        wanted = tuple(sizes)
        if uneven := [size for size in wanted if size % self.gpus]:
            raise InvalidInput(
                f"a batch of {uneven[0]} cannot be split evenly between {self.gpus} GPUs; take multiples of {self.gpus}"
            )
        return tuple(size // self.gpus for size in wanted)

    def serve_language(self, model: LanguageModel) -> SimulatedLanguageModel:
        """Return the workload that serves a language model on as many of these boards as it asks for.

        Raises:
            InvalidInput: If the board has no coefficients for it, the model does not fit, or runs on another number of
                GPUs than these.
        """
        if self.gpus > 1 and model.gpus != self.gpus:
            raise InvalidInput(f"{model.title} runs on {model.gpus} GPUs, and {self.uri} is {self.gpus} of them")
        served = SimulatedLanguageModel(model, self._board, self._step, self._state.clock)
        self._state.host(served.physics, model.gpus)
        return served

    def _step(self, physics: StepPhysics, server: TokenServer) -> Step:
        return self._state.step(physics, server, next(self._queries) if self._noise else 1.0)

    def _answer(self, model: Model, batch_size: int) -> Query:
        factor = next(self._queries) if self._noise else 1.0
        return Query(self._state.serve(model, batch_size // self.gpus, factor), batch_size)

    def expected(self, workload: SimulatedWorkload, point: Mapping[str, Level]) -> Measurement:
        """Return the truth at a point: what an endless window of a settled board would measure.

        Args:
            workload: From `serve`.
            point: Levels of knobs of device and workload; others at their default.

        Raises:
            KnobRejected: If device or workload would refuse the point.
        """
        return self.expected_all(workload, [point])[0]

    def expected_all(
        self, workload: SimulatedWorkload, points: Iterable[Mapping[str, Level]]
    ) -> tuple[Measurement, ...]:
        """Return the truth at many points, in their order; see `expected`."""
        wanted = list(points)
        own = [{name: point[name] for name in point if name not in workload.space.names} for point in wanted]
        if problem := next(filter(None, map(self._board.refusal, own)), None):
            raise KnobRejected(problem)
        sizes = [workload.batch_size(point) // self.gpus for point in wanted]
        return expected(self._engine, workload.model, sizes, own, self._noise, self._group)
