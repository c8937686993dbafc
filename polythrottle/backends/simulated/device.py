"""A board of the catalogue that is computed instead of wired up: same knobs, virtual time, energy and heat."""

from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType

from typing_extensions import Self

from polythrottle.backends.simulated.engine import Engine
from polythrottle.backends.simulated.noise import Noise
from polythrottle.backends.simulated.state import State
from polythrottle.backends.simulated.truth import expected
from polythrottle.backends.simulated.workload import SimulatedWorkload
from polythrottle.catalog.boards import Board
from polythrottle.catalog.models import Model
from polythrottle.clock import VirtualClock
from polythrottle.errors import InvalidInput, KnobRejected
from polythrottle.measurement import EnergyKind, Measurement, Query, Reading
from polythrottle.ports import Offer
from polythrottle.space import Knob, Level, OperatingPoint, SearchSpace

_SEED, _NOISE = 0, 0.02


class SimulatedDevice:
    """A simulated board; satisfies the ports ``Device`` and ``Rewindable``.

    Everything it does follows from seed, trial number (`rewind`) and what is asked of it, bit for bit.

    Args:
        board: From the catalogue.
        seed: Of the noise.
        noise: Standard deviation, as a fraction, of a query's time and of a window's power; 0 turns noise off.
        knobs: The knobs to search instead of those the board's file says.

    Raises:
        InvalidInput: If the noise is not a fraction, the seed is negative, or the board cannot be simulated.
        UnknownName: If the board has no knob of a name in ``knobs``.
    """

    def __init__(
        self, board: Board, seed: int = _SEED, noise: float = _NOISE, knobs: Sequence[str] | None = None
    ) -> None:
        if not 0.0 <= noise < 1.0 or seed < 0:
            raise InvalidInput(f"a simulation needs 0 <= noise < 1 and seed >= 0, not noise={noise} and seed={seed}")
        self._board, self._seed, self._noise = board, seed, noise
        self._knobs = None if knobs is None else tuple(knobs)
        self._space = board.space(self._knobs)
        self._engine = Engine(board)
        self._state = State(self._engine)
        self.rewind(0)

    @property
    def uri(self) -> str:
        """The URI that opens this device again; options at their default are left out."""
        options = [f"seed={self._seed}"] if self._seed != _SEED else []
        options += [f"noise={self._noise:g}"] if self._noise != _NOISE else []
        options += [f"knobs={','.join(self._knobs)}"] if self._knobs is not None else []
        return f"sim:{self._board.name}{'?' if options else ''}{'&'.join(options)}"

    @property
    def title(self) -> str:
        """The name people know the board by, marked as simulated."""
        return f"{self._board.title} (simulated)"

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
        """The rails of the board's total."""
        return self._board.rails.boundary

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
        self._state.factors = self._stream.window() if self._noise else (1.0, 1.0)

    def read(self) -> Reading:
        """Return energy so far, temperature and clocks, now."""
        return self._state.reading()

    def restore(self) -> None:
        """Set every knob back to its default."""
        self._state.move(self._board.default)

    def rewind(self, number: int) -> None:
        """Put knobs, heat, energy, clock and noise to where trial ``number`` starts, whatever went before."""
        self._stream = Noise(self._noise, self._seed, number)
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
        return SimulatedWorkload(model, model.space(self._board.memory_bytes), self._answer)

    def _answer(self, model: Model, batch_size: int) -> Query:
        factor = next(self._queries) if self._noise else 1.0
        return Query(self._state.serve(model, batch_size, factor), batch_size)

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
        sizes = [workload.batch_size(point) for point in wanted]
        return expected(self._engine, workload.model, sizes, own, self._noise)
