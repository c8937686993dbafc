"""Boards of one kind that search together: by how much they differ, and what one of them would have seen."""

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from statistics import geometric_mean
from typing import Any

from polythrottle.backends.device_uri import own_words
from polythrottle.board.remote_workload import BoardWorkload
from polythrottle.domain.errors import PolythrottleError, TrialError
from polythrottle.domain.measurement import Interval, Latency, Measurement, Query, Window, saving_interval
from polythrottle.domain.metrics import OF_CLASS
from polythrottle.domain.ports import Device, Workload
from polythrottle.domain.problem import Constraint
from polythrottle.domain.space import OperatingPoint
from polythrottle.domain.study import Study, Trial

LEAST_SHARE = 100
"""How many queries a board's share of a window has at least, so that a p99 is seen once."""

# GPUs of one type differ by some 8 % in what they draw (Sinha et al., SC 2022: "Not all GPUs are created equal"), and
# by less in how fast they are. Each board measures the default point, and what is seen there beside the others is
# taken for its own at every point: an offset of log energy per item, and one of log latency. It is a random effect
# (DerSimonian and Laird 1986): drawn towards the mean of all boards as far as its window is vague.

APART_SD = 0.05
APART_BOARDS = 2.0
"""By how much boards differ, as a logarithm, and how many boards that assumption counts for; assumed."""
_WINDOW_SD = 0.01
"""What two windows at one point differ by on one board besides what their intervals say: as the models have it before
they have seen any (`polythrottle.optimize.surrogate`)."""
_VAGUE_SD = 0.02
_LEAST_SD = 1e-3
_TWO_SIDED = 1.96
_TOKENS_PER_J = "tokens_per_j"


def shared_window(window: Window, share: int) -> Window:
    """Return a window of a share of its most queries.

    The default point is measured on every board, and what they see there is put together: each has its share of the
    queries. Elsewhere it is half of them: the second half tells little more, since two windows at one point differ
    anyway, while other boards wait for it.

    Args:
        window: As it is where one board searches alone.
        share: By how much to divide.
    """
    most = max(window.queries, min(window.most_queries, LEAST_SHARE), math.ceil(window.most_queries / share))
    return replace(window, most_queries=most)


@dataclass(frozen=True)
class OpenBoard:
    """A board that takes part.

    Args:
        uri: As it was named.
        device: Not entered yet.
        served: Serves queries on it.
    """

    uri: str
    device: Device
    served: Workload

    def named_in(self, error: PolythrottleError) -> PolythrottleError:
        """Return an error of this board that says which it is, as one of a board over SSH does by itself."""
        words = str(error)
        if words == own_words(self.uri, error) and not words.startswith(self.uri):
            error.args = (f"{self.uri}: {words}",)
        return error

    def cut_short_when(self, unneeded: Callable[[], bool]) -> None:
        """Have the next query fail once nobody needs it, so that a window ends early and the board is restored.

        A workload that cannot be told, or drives itself, has its window waited for.

        Args:
            unneeded: Whether nobody does; asked before each query, or over SSH each time something is told.
        """
        if isinstance(self.served, BoardWorkload):
            self.served.told.cut = unneeded
            return
        query = self.served.query

        def query_if_needed() -> Query:
            if unneeded():
                raise TrialError("nobody needs it any more")
            return query()

        with contextlib.suppress(AttributeError):
            setattr(self.served, "query", query_if_needed)  # noqa: B010


# By how much they differ


@dataclass(frozen=True)
class Offset:
    """By how much the logarithm of a quantity differs on a board from the mean of its kind.

    Args:
        mean: As expected.
        sd: How far that may be off: one standard deviation.
    """

    mean: float
    sd: float


@dataclass(frozen=True)
class BoardOffset:
    """How a board differs from the mean of its kind.

    Args:
        energy: In energy per item.
        latency: In every time of a query; throughput differs the other way about.
    """

    energy: Offset
    latency: Offset

    @property
    def power(self) -> float:
        """In watts, as expected."""
        return self.energy.mean - self.latency.mean


@dataclass(frozen=True)
class KindOffsets:
    """How the boards of one kind differ.

    Args:
        boards: Those whose default point is known.
        unknown: What is expected of another.
    """

    boards: Mapping[str, BoardOffset]
    unknown: BoardOffset

    @classmethod
    def of(cls, defaults: Mapping[str, Measurement]) -> "KindOffsets":
        """Return the offsets of boards.

        Args:
            defaults: What each measured at the default point.
        """
        energy, energy_sd = _offsets(
            {uri: (measurement.energy_j, measurement.intervals.get("energy")) for uri, measurement in defaults.items()}
        )
        times = {
            uri: (measurement.latency.mean_s, measurement.intervals.get("mean"))
            for uri, measurement in defaults.items()
        }
        latency, latency_sd = _offsets(times)
        boards = {uri: BoardOffset(energy[uri], latency[uri]) for uri in defaults}
        return cls(boards, BoardOffset(Offset(0.0, energy_sd), Offset(0.0, latency_sd)))

    def board(self, uri: str) -> BoardOffset:
        """Return the offset of a board; of one whose default is not known yet what is expected of any."""
        return self.boards.get(uri, self.unknown)

    @property
    def slowest(self) -> str | None:
        """The board that is slowest; None while none is known."""
        return max(self.boards, key=lambda uri: self.boards[uri].latency.mean, default=None)

    @property
    def worst(self) -> BoardOffset:
        """What every limit has to hold on: the slowest board, with the energy of the mean one."""
        slowest = self.slowest
        if slowest is None:
            latency = 0.0
        else:
            latency = self.boards[slowest].latency.mean
        return BoardOffset(Offset(0.0, 0.0), Offset(latency, 0.0))

    @property
    def most_power(self) -> float:
        """How much more than the mean board the one that draws most draws, as a logarithm."""
        return max((each.power for each in self.boards.values()), default=0.0)


def _offsets(figures: Mapping[str, tuple[float, Interval | None]]) -> tuple[dict[str, Offset], float]:
    """Return the offset of each board in the logarithm of a figure, and the deviation between boards."""
    if not figures:
        return {}, APART_SD
    logs = {uri: math.log(value) for uri, (value, _) in figures.items()}
    variances = {uri: _variance(value, interval) for uri, (value, interval) in figures.items()}
    apart = _apart(list(logs.values()), list(variances.values()))
    weights = {uri: 1.0 / (apart + variances[uri]) for uri in logs}
    mean = sum(weights[uri] * logs[uri] for uri in logs) / sum(weights.values())
    offsets = {}
    for uri, log in logs.items():
        share = apart / (apart + variances[uri])
        offsets[uri] = Offset(share * (log - mean), math.sqrt(share * variances[uri]))
    return offsets, math.sqrt(apart)


def _variance(value: float, interval: Interval | None) -> float:
    """Return the variance of the logarithm of a figure that its 95 % interval tells of."""
    own = _VAGUE_SD
    if interval is not None and interval.known:
        own = interval.half / value / _TWO_SIDED
    return own**2 + _WINDOW_SD**2


def _apart(logs: Sequence[float], variances: Sequence[float]) -> float:
    """Return the variance between boards (DerSimonian and Laird's), with that assumed counted as some boards."""
    more = len(logs) - 1
    if not more:
        return APART_SD**2
    weights = [1.0 / each for each in variances]
    total = sum(weights)
    mean = sum(w * log for w, log in zip(weights, logs, strict=True)) / total
    beyond = sum(w * (log - mean) ** 2 for w, log in zip(weights, logs, strict=True)) - more
    # Boards that differ less than their windows do by chance would have a negative variance between them.
    between = max(0.0, beyond / (total - sum(w * w for w in weights) / total))
    return max((APART_BOARDS * APART_SD**2 + more * between) / (APART_BOARDS + more), _LEAST_SD**2)


# What a board measured, as another would have.


def as_on(measurement: Measurement, here: BoardOffset, there: BoardOffset, power: float | None = None) -> Measurement:
    """Return a measurement as another board would have made it, its intervals wider by the doubt of that.

    Temperature, and what a board's own sensors say beside a meter, stay as they were.

    Args:
        measurement: What was measured.
        here: How the board differs that measured it.
        there: How the other does.
        power: By how much more than the mean that one draws, as a logarithm; what follows from energy and time if None.
    """
    if here == there:
        return measurement
    slower = math.exp(there.latency.mean - here.latency.mean)
    dearer = math.exp(there.energy.mean - here.energy.mean)
    drawn = math.exp((there.power if power is None else power) - here.power)
    doubts = (math.hypot(here.latency.sd, there.latency.sd), math.hypot(here.energy.sd, there.energy.sd))
    late = _Factor(slower, doubts[0])
    joules = _Factor(dearer, doubts[1])
    watts = _Factor(drawn, math.hypot(*doubts))
    rate = _Factor(1.0 / slower, doubts[0])
    times: dict[str, Any] = {
        each.name: late.times(getattr(measurement.latency, each.name))
        for each in fields(Latency)
        if each.name != "queries"
    }
    known = {"energy": joules, "power": watts, "throughput": rate, "temperature": None, _TOKENS_PER_J: joules.inverse}
    return replace(
        measurement,
        latency=replace(measurement.latency, **times),
        energy_j=measurement.energy_j * joules.value,
        throughput_per_s=measurement.throughput_per_s * rate.value,
        power_w=watts.times(measurement.power_w),
        intervals={
            name: _wider(measurement, name, interval, known.get(name, late))
            for name, interval in measurement.intervals.items()
        },
        extras={name: _extra(name, value, late, joules.inverse) for name, value in measurement.extras.items()},
    )


@dataclass(frozen=True)
class _Factor:
    """What a figure is multiplied by, and the deviation of the logarithm of that."""

    value: float
    sd: float

    @property
    def inverse(self) -> "_Factor":
        """What undoes it; as uncertain."""
        return _Factor(1.0 / self.value, self.sd)

    def times(self, figure: float | None) -> float | None:
        """Return a figure times it; None of none."""
        if figure is None:
            return None
        return figure * self.value


def _extra(name: str, value: float, late: _Factor, per_j: _Factor) -> float:
    return value * (per_j if name.partition(OF_CLASS)[0] == _TOKENS_PER_J else late).value


def _wider(measurement: Measurement, name: str, interval: Interval, factor: _Factor | None) -> Interval:
    """Return an interval times a factor whose own doubt is added to it."""
    if factor is None:
        return interval
    figure = measurement.energy_j if name == "energy" else measurement.metric(name)
    if figure is None:
        return interval.scaled(factor.value)
    reach = _TWO_SIDED * factor.sd * figure
    low = figure - math.hypot(max(0.0, figure - interval.low), reach)
    high = figure + math.hypot(max(0.0, interval.high - figure), reach)
    return Interval(min(low, interval.low), max(high, interval.high)).scaled(factor.value)


# A study of several boards, as one board would have made it.


@dataclass(frozen=True)
class BoardAnswer:
    """What the answer of a study comes to on one of its boards.

    Args:
        uri: The board.
        offset: How it differs from the mean of its kind.
        trials: How many it made.
        measurement: At the answer's point.
        saving: The share of the energy per item that this saves against the default point of this board.
        between: The 95 % interval of that; None if it is not known.
        measured: Whether it was measured on this board, and not worked out from another's.
    """

    uri: str
    offset: BoardOffset
    trials: int
    measurement: Measurement
    saving: float
    between: Interval | None
    measured: bool

    @property
    def words(self) -> str:
        """What a person wants to know of it, in a line."""
        energy = _percent(self.offset.energy.mean)
        slower = _percent(self.offset.latency.mean)
        how = str(self.measurement.energy_kind)  # a simulated board measures nothing
        if not self.measured:
            how = f"worked out from what others showed, {how}"
        # What is called "more" is a cost, so the interval is that of the cost, too.
        sign, word = (1, "less") if self.saving >= 0 else (-1, "more")
        saved = f"{100 * abs(self.saving):.1f} % {word} energy"
        if self.between is not None and self.between.known:
            low, high = sorted(100 * sign * end for end in (self.between.low, self.between.high))
            saved += f" ({low:.1f} to {high:.1f} %)"
        if self.trials == 1:
            trials = "1 trial"
        else:
            trials = f"{self.trials} trials"
        return f"{saved}, {how}; beside the others {energy} energy, {slower} time; {trials}"


def _percent(log: float) -> str:
    return f"{100 * math.expm1(log):+.1f} %"


@dataclass(frozen=True)
class BoardsView:
    """A study of several boards of one kind.

    Args:
        study: As it was measured, each trial on one of them.
        boards: The URI of the board of each trial, by the trial's number.
    """

    study: Study
    boards: Mapping[int, str]

    @property
    def defaults(self) -> Mapping[str, Measurement]:
        """What each board measured at the default point, the newest of each."""
        default = self.study.problem.space.default
        return {
            self.boards[trial.number]: trial.measurement
            for trial in self.study.completed
            if trial.point == default and trial.measurement is not None
        }

    @property
    def offsets(self) -> KindOffsets:
        """How the boards differ."""
        return KindOffsets.of(self.defaults)

    def on_all(self) -> Study:
        """Return the study as limits that hold on every board need it: times of the slowest, energy of the mean one.

        Where a point was measured on the slowest board itself and broke a limit there, it breaks it wherever else it
        was measured.
        """
        offsets = self.offsets
        worst = offsets.worst
        # Power as on the board that draws most, which need not be the slowest: a limit on it has to hold there too.
        study = self._seen(lambda measurement, here: as_on(measurement, here, worst, offsets.most_power), offsets)
        if not study.judgeable:
            return study
        broken = {
            trial.point: trial.measurement
            for trial in study.infeasible
            if self.boards[trial.number] == offsets.slowest and trial.measurement is not None
        }
        trials = (
            replace(trial, measurement=broken[trial.point])
            if trial.point in broken and trial.measurement is not None
            else trial
            for trial in study.trials
        )
        return replace(study, trials=tuple(trials))

    def told(self) -> Study:
        """Return as `on_all`, its device one that measured something, for whoever reads what the study came to.

        That is the first that was named, or if nothing was measured there, the one of the answer's trial.
        """
        study = self.on_all()
        device = study.problem.device
        if not study.boards or device in study.boards or device not in study.problem.boards:
            return study
        answer = study.answered
        device = study.boards[0] if answer is None else answer.board
        return replace(study, problem=replace(study.problem, device=device))

    def on_one(self, uri: str) -> Study:
        """Return the study as one board would have made it, its limits such that they hold on the slowest too.

        Args:
            uri: The board; it need not have made a trial yet.
        """
        offsets = self.offsets
        own = offsets.board(uri)
        study = self._seen(lambda measurement, here: as_on(measurement, here, own), offsets)
        slower = math.exp(max(0.0, offsets.worst.latency.mean - own.latency.mean))
        drawing = math.exp(max(0.0, offsets.most_power - own.power))
        limits = tuple(_tighter(each, slower, drawing) for each in study.problem.constraints)
        return replace(study, problem=replace(study.problem, constraints=limits))

    def answers(self, point: OperatingPoint) -> "tuple[BoardAnswer, ...]":
        """Return what a point comes to on each board that has measured its default, in the order of their names.

        Args:
            point: Measured on one of them at least.
        """
        offsets = self.offsets
        answers = []
        for uri, default in sorted(self.defaults.items()):
            made = [trial for trial in self.study.trials if self.boards[trial.number] == uri]
            own = [trial.measurement for trial in made if trial.point == point and trial.measurement is not None]
            others = [trial.measurement for trial in self.on_one(uri).completed if trial.point == point]
            measurement = own[-1] if own else others[-1]
            assert measurement is not None
            saving = 1.0 - measurement.energy_j / default.energy_j
            between = saving_interval(measurement, default)
            answers.append(BoardAnswer(uri, offsets.board(uri), len(made), measurement, saving, between, bool(own)))
        return tuple(answers)

    def _seen(self, turned: Callable[[Measurement, BoardOffset], Measurement], offsets: KindOffsets) -> Study:
        def trial_of(trial: Trial) -> Trial:
            board = self.boards.get(trial.number, "")
            if trial.measurement is None:
                return replace(trial, board=board)
            return replace(trial, measurement=turned(trial.measurement, offsets.board(board)), board=board)

        problem = self.study.problem
        defaults = [turned(measurement, offsets.board(uri)) for uri, measurement in self.defaults.items()]
        # What the problem states by itself counts, as on one board.
        reference = {**_pooled(defaults, problem.constraints), **problem.reference}
        if reference != problem.reference:
            problem = replace(problem, reference=reference)
        return replace(self.study, problem=problem, trials=tuple(map(trial_of, self.study.trials)))


def _pooled(defaults: Sequence[Measurement], constraints: Sequence[Constraint]) -> dict[str, float]:
    """Return what relative limits multiply: the geometric mean of what all boards saw at the default point.

    Args:
        defaults: What each board saw there, as one and the same board would have.
        constraints: Those that are relative count.
    """
    reference = {}
    for metric in {each.metric for each in constraints if each.relative}:
        values = [value for measurement in defaults if (value := measurement.metric(metric)) is not None and value > 0]
        if values:
            reference[metric] = geometric_mean(values)
    return reference


def _tighter(constraint: Constraint, slower: float, drawing: float) -> Constraint:
    """Return a limit that a board keeps only if the slowest does, and the one that draws most; relative ones stay."""
    if constraint.relative:
        return constraint
    if constraint.timed:
        return replace(constraint, limit=constraint.limit / slower)
    if constraint.metric == "throughput":
        return replace(constraint, limit=constraint.limit * slower)
    if constraint.metric == "power":
        return replace(constraint, limit=constraint.limit / drawing)
    return constraint
