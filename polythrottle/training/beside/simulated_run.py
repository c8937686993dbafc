"""Requests and a fine-tuning job on a simulated board under a policy, event by event. Simulated."""

import itertools
import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from polythrottle.backends.simulated.engine import ASSUMED, FAIR, Engine, co_run
from polythrottle.backends.simulated.physics import Noise, static_w, warmed_c
from polythrottle.catalog.boards import Board
from polythrottle.catalog.models import Model
from polythrottle.domain.errors import InvalidInput
from polythrottle.domain.load.energy_ration import DAY_S
from polythrottle.domain.space import OperatingPoint
from polythrottle.training.beside.corun_model import CoRun, PaperModel
from polythrottle.training.beside.operating_options import FinetuningJob, Menu, Option, Slice
from polythrottle.training.beside.progress_forecast import check_held, warnings_before
from polythrottle.training.beside.scheduler import (
    ALONE,
    GENTLE,
    MeanPowerLimit,
    Policy,
    Terms,
    alone,
    policy,
)
from polythrottle.training.beside.serving_loop import (
    INSTANT_S,
    LOOK_S,
    SLICES_MOST,
    AnsweredBatch,
    Result,
    ServingLoop,
    Training,
)
from polythrottle.training.beside.simulated_host import Host, Piece, SimulatedBench

# A stream of requests and a fine-tuning job on a simulated board under a policy, event by event. Simulated.

_REST_S = 60.0
"""So long after the stream it is told no more often than this: nothing changes but the hour."""
_PATIENCE = 50.0
"""A job that takes this many times as long as the stream and itself alone is given up: nothing makes it end."""
_DAYS = 30
"""For so many days more a job that goes by hours is waited for."""


@dataclass(frozen=True)
class Stream:
    """Requests that are to be answered.

    Args:
        times_s: When they arrive, ascending.
        length_s: How long the stream lasts.
        slo_s: The limit of each from its arrival.
        rate_per_s: The mean that was announced.

    Raises:
        InvalidInput: If a request comes after the end, or the limit is not positive and finite.
    """

    times_s: tuple[float, ...]
    length_s: float
    slo_s: float
    rate_per_s: float

    def __post_init__(self) -> None:
        if list(self.times_s) != sorted(self.times_s) or (self.times_s and self.times_s[-1] > self.length_s):
            raise InvalidInput("requests come one after another, and before the stream ends")
        if not 0 < self.slo_s < math.inf:
            raise InvalidInput(f"a limit is above 0 s, not {self.slo_s}")


@dataclass(frozen=True)
class Account:
    """What came of a stream and a job; everything simulated.

    Args:
        requests: That arrived.
        late: Of those, answered after their limit or never.
        dropped: Of those, never answered.
        latencies_s: Of those that were answered, in the order of their answers.
        samples: Fine-tuned until the stream ended.
        done_s: When the job was done; None if it was not.
        energy_j: Until both were done, or the stream ended if the job had no end.
        span_s: How long that took.
        inference_s: Time the device spent on inference, shared time counted by what was done.
        room: Samples that the rest of the stream's time would have been enough for at the clocks of then, had
            fine-tuning got all of it in its best slices.
        waited_s: How long fine-tuning waited because more power was drawn than allowed; None where any was.
        arrived_s: When those that were answered had come, in the order of their latencies.
        slices_s: From when to when slices were under way, of many the last.
    """

    requests: int
    late: int
    dropped: int
    latencies_s: tuple[float, ...]
    samples: int
    done_s: float | None
    energy_j: float
    span_s: float
    inference_s: float
    room: float
    waited_s: float | None = None
    arrived_s: tuple[float, ...] = ()
    slices_s: tuple[tuple[float, float], ...] = ()

    @property
    def violation_rate(self) -> float:
        """The share of requests not answered within their limit."""
        if self.requests:
            return self.late / self.requests
        return 0.0


@dataclass
class _Flight:
    """A piece under way: what is left of it, and what it is for."""

    piece: Piece
    left_s: float
    samples: int = 0
    arrived_s: tuple[float, ...] = ()
    began_s: float = 0.0


def simulate(
    host: Host,
    stream: Stream,
    policy: Policy,
    menu: Menu,
    seed: int = 0,
    batch: int = 1,
    endless: bool = False,
    choose: bool = True,
    ration: MeanPowerLimit | None = None,
    day_s: float | None = None,
) -> Account:
    """Return what comes of a stream and the host's job under a policy.

    Args:
        host: The board and both kinds of work.
        stream: The requests.
        policy: Who gets the device next.
        menu: The points; the board starts at the first.
        seed: Of the noise.
        batch: The largest batch of policies that choose none.
        endless: Whether the job never ends, so that the account is of the stream's length.
        choose: Whether the policy may choose another point than the first.
        ration: The power to keep to on average; None for any.
        day_s: Time of day at which the stream begins, since midnight; None for a policy that goes by no hours.

    Raises:
        InvalidInput: If the policy neither ends nor lets anything happen.
    """
    virtual = _VirtualHost(host, stream, menu, seed, endless, ration, day_s)
    loop = ServingLoop(
        virtual,
        stream.times_s,
        stream.slo_s,
        stream.rate_per_s,
        policy,
        ends_s=stream.length_s,
        batch=batch,
        menu=menu if choose else None,
        gives_up_s=virtual.gives_up_s,
    )
    loop.run()
    return Account(
        requests=len(stream.times_s),
        late=loop.late,
        dropped=loop.dropped,
        latencies_s=tuple(loop.latencies_s),
        samples=virtual.in_stream,
        done_s=virtual.done_s,
        energy_j=virtual.joules,
        span_s=virtual.now_s,
        inference_s=virtual.inference_s,
        room=virtual.room,
        waited_s=None if ration is None else virtual.waited_s,
        arrived_s=tuple(loop.arrived_s),
        slices_s=tuple(virtual.slices_s),
    )


class _VirtualHost:
    """A simulated board under both kinds of work, in its own time; satisfies the port `ServingHost`."""

    aim_s = None

    def __init__(
        self,
        host: Host,
        stream: Stream,
        menu: Menu,
        seed: int,
        endless: bool,
        ration: MeanPowerLimit | None,
        day_s: float | None,
    ) -> None:
        self._host = host
        self._stream = stream
        self._menu = menu
        self._ration = ration
        self._day_s = day_s
        self._weighed_j = 0.0
        if host.noise:
            self._noise: Iterator[float] = Noise(host.noise, seed, 0).queries()
        else:
            self._noise = itertools.repeat(1.0)
        self._total = math.inf if endless else float(host.job.work)
        self.option = menu.options[0]
        self._idle_w = host.idle_w(self.option.point)
        self._serving: _Flight | None = None
        self._learning: _Flight | None = None
        self._temperature_c = host.engine.simulation.thermal.start_c
        self._idle_since_s = -math.inf
        self._last = ""
        self._samples = 0
        self.now_s = 0.0
        self.joules = 0.0
        self.inference_s = 0.0
        self.room = 0.0
        self.waited_s = 0.0
        self.in_stream = 0
        self.done_s: float | None = None
        self.slices_s = deque[tuple[float, float]](maxlen=SLICES_MOST)

    @property
    def gives_up_s(self) -> float:
        """When a job that makes no progress is given up: nothing else would end the simulation."""
        most_s = _PATIENCE * (self._stream.length_s + self._host.job.work * self._menu.options[0].sample_s)
        if self._day_s is None:
            return most_s
        return most_s + _DAYS * DAY_S

    @property
    def done(self) -> bool:
        return math.isinf(self._total) or self._samples >= self._total

    @property
    def left(self) -> int:
        if self._learning is not None or (self._ration is not None and not self._ration.open):
            return 0
        return self._left_of_step()

    def _left_of_step(self) -> int:
        job = self._host.job
        if self._samples >= self._total:
            return 0
        done = self._samples % job.samples
        step = done // job.batch
        return job.step_samples(step) - (done - step * job.batch)

    @property
    def serves_until_s(self) -> float | None:
        if self._serving is None:
            return None
        return self.now_s + self._serving.left_s

    @property
    def training(self) -> bool:
        return self._learning is not None

    @property
    def day_s(self) -> float | None:
        if self._day_s is None:
            return None
        return (self._day_s + self.now_s) % DAY_S

    def queued(self, ages_s: Sequence[float], demand_per_s: float | None) -> None:
        """Do nothing: a simulated slice is never stopped in the middle."""

    def move(self, point: OperatingPoint) -> float:
        delays = self._host.engine.simulation.actuation
        before = self.option.point
        changed = {name for name in point if point[name] != before[name]}
        self.option = next(each for each in self._menu.options if each.point == point)
        self._idle_w = self._host.idle_w(point)
        return delays.gpu_s * bool(changed & {"gpu_min_hz", "gpu_max_hz"}) + delays.memory_s * ("mem_hz" in changed)

    def train(self, piece: Slice) -> None:
        self._learning = self._start("learning", piece.samples, samples=piece.samples)

    def serve(self, arrived_s: tuple[float, ...]) -> None:
        self._serving = self._start("serving", len(arrived_s), arrived_s=arrived_s)

    def _start(self, kind: str, size: int, samples: int = 0, arrived_s: tuple[float, ...] = ()) -> _Flight:
        beside = self._serving is not None or self._learning is not None
        waited_s = 0.0
        if not beside:
            waited_s = min(10.0, self.now_s - self._idle_since_s)
        take = self._host.serving if kind == "serving" else self._host.learning
        piece = take(self.option.point, size, waited_s, beside)
        warmup_s = 0.0
        if self._last not in ("", kind):
            warmup_s = ASSUMED.warmup_s
        self._last = kind
        return _Flight(piece, piece.work_s * next(self._noise) + warmup_s, samples, arrived_s, self.now_s)

    def wait(self, until_s: float, queued: bool) -> Sequence[AnsweredBatch]:
        """Let time pass, at most until a piece ends."""
        inference, training = self._paces()
        ends = [until_s]
        if self._serving is not None:
            ends.append(self.now_s + self._serving.left_s / inference)
        if self._learning is not None:
            ends.append(self.now_s + self._learning.left_s / training)
        # At least an instant, or rounding could let an event repeat at the same moment for ever.
        then_s = max(self.now_s + INSTANT_S, min(ends))
        self._draw(then_s - self.now_s, inference, training)
        self.now_s = then_s
        answers = self._end_serving()
        self._end_learning()
        return answers

    def _paces(self) -> tuple[float, float]:
        if self._serving is None or self._learning is None:
            return 1.0, 1.0
        both = self._host.paces(self._serving.piece, self._learning.piece)
        return both.inference, both.training

    def look(self, period_s: float, answered: int, late: int) -> float:
        """Tell the ration what was drawn; seldom once nothing comes any more, where nothing changes but the hour."""
        if self._ration is not None:
            if self._left_of_step() and not self._ration.open:
                self.waited_s += period_s
            self._ration = self._ration.after(self.joules - self._weighed_j, period_s)
            self._weighed_j = self.joules
            return LOOK_S
        if self.now_s > self._stream.length_s + _REST_S:
            return _REST_S
        return LOOK_S

    def _draw(self, duration_s: float, inference: float, training: float) -> None:
        """Draw energy for some time, and get that much done."""
        power_w = self._idle_w
        flights = [flight for flight in (self._serving, self._learning) if flight is not None]
        if flights:
            power_w = sum(flight.piece.power_w for flight in flights) / len(flights)
            self._idle_since_s = self.now_s + duration_s
        heat = self._host.engine.simulation.thermal
        joules = (power_w + static_w(heat, self._temperature_c)) * duration_s
        self.joules += joules
        self._temperature_c = warmed_c(heat, self._temperature_c, joules / duration_s, duration_s)
        served_s = 0.0
        if self._serving is not None:
            served_s = duration_s * inference
            self._serving.left_s -= served_s
            self.inference_s += served_s
        # What comes after the stream is no room beside requests: there are none.
        if self.now_s < self._stream.length_s:
            self.room += (duration_s - served_s) / self.option.sample_s
        if self._learning is not None:
            self._learning.left_s -= duration_s * training

    def _end_serving(self) -> Sequence[AnsweredBatch]:
        flight = self._serving
        if flight is None or flight.left_s > INSTANT_S:
            return ()
        self._serving = None
        return (AnsweredBatch(flight.arrived_s, self.now_s + flight.piece.lag_s),)

    def _end_learning(self) -> None:
        flight = self._learning
        if flight is None or flight.left_s > INSTANT_S:
            return
        self._samples += flight.samples
        self.slices_s.append((flight.began_s, self.now_s))
        if self.now_s <= self._stream.length_s:
            self.in_stream += flight.samples
        if self._samples >= self._total:
            self.done_s = self.now_s
        self._learning = None


def predicted(menu: Menu, shared_s: Sequence[Sequence[float]]) -> Menu:
    """Return a menu with latencies predicted beside fine-tuning, for each option one per service."""
    pairs = zip(menu.options, shared_s, strict=True)
    return Menu(tuple(replace(option, shared_s=tuple(each)) for option, each in pairs))


# Inference and fine-tuning side by side on a simulated board, told as `running` tells of a real one. Simulated.

LENGTH_S = 30.0
"""For so long requests come if nobody says otherwise."""
_MOST = 1_000_000
"""So many requests, seconds or slices are simulated within ten minutes."""
_STEPS = (16, 32, 64)
_BATCHES = (1, 2, 4, 8)


@dataclass(frozen=True, eq=False)
class SimulatedScene:
    """A board with both kinds of work.

    Args:
        board: From the catalogue.
        host: What either kind of work takes there.
        menu: The points to choose from.
    """

    board: Board
    host: Host
    menu: Menu

    @classmethod
    def of(cls, board: Board, model: Model, job: FinetuningJob, noise: float = 0.02, most: int = 8) -> "SimulatedScene":
        """Return a board that serves a model and fine-tunes it.

        Args:
            board: From the catalogue.
            model: What is served, and whose backbone is fine-tuned.
            job: The fine-tuning.
            noise: Standard deviation of the log of a piece's time.
            most: The largest batch that requests are answered in.

        Raises:
            InvalidInput: If the board cannot be simulated or hold the model.
        """
        host = Host(Engine(board), model, job, noise, most=most)
        return cls(board, host, host.menu())

    def foretold(self) -> Menu:
        """Return the menu with latencies beside fine-tuning at the default point, as the paper's model has them."""
        first = beside_s(self.host, self.board, self.menu.options[0])
        unknown = [[math.inf] * len(option.services) for option in self.menu.options[1:]]
        return predicted(self.menu, [first, *unknown])


def beside_s(host: Host, board: Board, option: Option) -> list[float]:
    """Return the latency of each service beside fine-tuning as the paper's model predicts it, fitted to co-runs."""
    bench = SimulatedBench(board, host.model, host.job, noise=0.0)
    # The fit needs steps of at least two sizes to tell what a larger one costs.
    whole = host.job.batch
    steps = [size for size in _STEPS if size <= whole]
    if len(steps) < 2:
        steps = sorted({1, max(1, whole // 2), whole})
    batches = _BATCHES if len(steps) > 1 else range(1, 1 + _BATCHES[-1])

    def case(batch: int, samples: int) -> CoRun:
        return bench.case(option.point, batch, samples, FAIR)

    def measured(batch: int, samples: int) -> CoRun:
        shared = co_run(host.engine, (host.model, batch), (host.learner, samples), option.point)
        return replace(case(batch, samples), latency_s=shared.latency_s)

    fitted = PaperModel.fit([measured(batch, samples) for batch in batches for samples in steps])
    return [fitted.predict(case(each.batch, host.job.batch)).mean_s for each in option.services]


def run_simulated(scene: SimulatedScene, terms: Terms) -> Result:
    """Return what comes of a stream and a job; after the stream the job is done to its end.

    Args:
        scene: The board and both kinds of work.
        terms: What is to be kept to; requests come for `LENGTH_S` if they do not say.

    Raises:
        SloUnmet: If inference alone does not hold the limit at any point.
        InvalidInput: If it leaves no power for anything else, the requests end before the hours begin, or there is more
            to do than can be simulated.
    """
    if terms.seconds is None:
        terms = replace(terms, seconds=LENGTH_S)
    length_s = terms.seconds or LENGTH_S
    terms.check_hours(terms.day_s)
    check_held(scene.menu, terms.rate_per_s, terms.slo_s)
    _check_sizes(scene, terms, length_s)
    notes = warnings_before(scene.menu, scene.host.job.work, terms, terms.day_s)
    times = terms.arrivals.times(terms.seed)
    assert times is not None
    # Traces go on for days; only what comes within the stream is held in memory.
    within = tuple(itertools.takewhile(lambda at_s: at_s < length_s, times))
    stream = Stream(within, length_s, terms.slo_s, terms.rate_per_s)
    if terms.policy == "paper":
        menu = scene.foretold()
    else:
        menu = scene.menu
    chosen = alone if terms.policy == ALONE else policy(terms.policy, terms.hours)
    chooses = terms.policy in GENTLE
    endless = terms.policy == ALONE
    day_s = None
    if terms.hours is not None:
        day_s = terms.day_s
    how = {"endless": endless, "choose": chooses}
    account = simulate(scene.host, stream, chosen, menu, terms.seed, 1, **how, ration=terms.ration, day_s=day_s)
    return _result(scene, terms, account, notes)


def _check_sizes(scene: SimulatedScene, terms: Terms, length_s: float) -> None:
    """Check that a run can be simulated in a time that somebody waits for.

    Raises:
        InvalidInput: If there are too many requests, seconds or slices.
    """
    job = scene.host.job
    piece = scene.menu.options[0].gap(terms.rate_per_s, terms.slo_s)
    if terms.policy == ALONE:
        slices = 0.0
    else:
        slices = max(job.steps, job.work / (job.batch if piece is None else piece.samples))
    counts = {"seconds": length_s, "requests": terms.rate_per_s * length_s, "slices of fine-tuning": slices}
    for what, count in counts.items():
        if count > _MOST:
            raise InvalidInput(f"{count:.3g} {what} are too many to simulate, and {_MOST:,} the most; ask for fewer")


def _result(scene: SimulatedScene, terms: Terms, account: Account, notes: tuple[str, ...]) -> Result:
    job = scene.host.job
    finished = account.done_s is not None
    done = job.work if finished else account.samples
    title = f"{scene.host.model.title} on {scene.board.title} (simulated)"
    epoch, rest = divmod(done, job.samples)
    steps = epoch * job.steps_per_epoch + rest // job.batch
    training = Training(done, steps, epoch, job.epochs, finished, account.done_s, waited_s=account.waited_s)
    counts = account.requests, account.late, account.dropped, account.latencies_s, training
    ran = (title, True, terms.policy, str(terms.arrivals), terms.slo_s, account.span_s)
    if terms.policy != ALONE:
        notes = (*notes, f"{account.samples} of {done} samples were trained while requests came")
    result = Result(*ran, *counts, account.energy_j, "simulated", "the whole board", notes)
    result = replace(result, arrived_s=account.arrived_s, slices_s=account.slices_s)
    return replace(result, hours=None if terms.hours is None else str(terms.hours), power_cap_w=terms.power_w)
