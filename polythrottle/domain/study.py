"""A problem and the trials made on it so far, and the card that a notebook shows of a study or a profile."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import cached_property
from html import escape
from typing import TYPE_CHECKING

from polythrottle.domain.backports import StrEnum
from polythrottle.domain.errors import InvalidInput
from polythrottle.domain.measurement import EnergyKind, Interval, Measurement, measurement_frame, saving_interval
from polythrottle.domain.problem import Constraint, Objective, Problem, device_alone
from polythrottle.domain.space import BATCH_SIZE, CONCURRENCY, IN_FLIGHT, OperatingPoint
from polythrottle.domain.units import show, show_name, show_number, show_percent

if TYPE_CHECKING:
    import pandas as pd

# What a notebook shows of a study or a profile: a heading, what the joules are, and a few named lines.

CAUTIONS = {
    EnergyKind.SIMULATED: "Simulated: time and energy come from a model of the device. No device was measured.",
    EnergyKind.RECORDED: "Recorded: energy is what a table says. How it came about the table does not say.",
    EnergyKind.ESTIMATED: "Estimated: energy is worked out from a stated power figure. It was not read from a meter.",
    EnergyKind.RELATIVE: "Relative: the unit of energy is unknown. Only ratios mean anything.",
}
"""What has to be said of joules that were not read from a meter."""
_CELL = "text-align:left;vertical-align:top;padding:2px 12px 2px 0"


def card_html(heading: str, lines: Iterable[tuple[str, str]], kinds: Iterable[EnergyKind] = ()) -> str:
    """Return a small table as HTML that needs no style sheet; every text is escaped.

    Args:
        heading: What it is of.
        lines: Name and text of each row; a row without a text is left out.
        kinds: How the joules in it came about.
    """
    rows = "".join(
        f'<tr><th style="{_CELL};font-weight:normal;opacity:0.7">{escape(name)}</th>'
        f'<td style="{_CELL}">{escape(text)}</td></tr>'
        for name, text in lines
        if text
    )
    cautions = "".join(f"<p><em>{escape(CAUTIONS[kind])}</em></p>" for kind in sorted(set(kinds)) if kind in CAUTIONS)
    return f'<div class="polythrottle"><p><strong>{escape(heading)}</strong></p><table>{rows}</table>{cautions}</div>'


def show_energy(seen: Measurement) -> str:
    """Return energy per item with its ± and how it came about: ``812 mJ ± 1.1 % per item, simulated``."""
    unit = "" if seen.energy_kind is EnergyKind.RELATIVE else "J"
    between = seen.intervals.get("energy")
    if between is not None and between.known:
        around = f" ± {100 * between.half / seen.energy_j:.2g} %"
    else:
        around = ""
    return f"{show(seen.energy_j, unit).strip()}{around} per item, {seen.energy_kind}"


def show_saving(fraction: float | None, between: Interval | None, of: str = "energy per item") -> str:
    """Return what share is saved, with its 95 % interval; empty if it is unknown.

    Args:
        fraction: Of the default's; negative if more is taken.
        between: The interval; None if it is not known.
        of: What is saved.
    """
    if fraction is None:
        return ""
    claim = f"{show_percent(abs(fraction))} {'less' if fraction >= 0 else 'more'} {of} than the default"
    if between is None or not between.known:
        return f"{claim}; its interval is not known"
    ends = f"{show_percent(between.low)} to {show_percent(between.high)} with 95 % confidence"
    if between.low <= 0 <= between.high:
        return f"{claim}; not proven: {ends}"
    return f"{claim}: {ends}"


def show_point(point: OperatingPoint) -> str:
    """Return a point as ``--point`` takes it: ``batch_size=4, gpu_max_mhz=828.75``."""
    return ", ".join(f"{show_name(name)}={show_number(name, level)}" for name, level in point.items())


# A problem and the trials made on it so far.

WORTHWHILE = 0.01
"""The share of the default's energy below which a saving is within the noise of two single trials."""
ENOUGH = 6
"""How many completed trials it takes at least before anything is said about what they did not find."""

DOUBT = 5.0
"""How many times better than the untuned default a point is not expected to be at the same work or more."""
_ASKED = (BATCH_SIZE, CONCURRENCY, IN_FLIGHT)
"""Knobs that say how much is asked at once."""


class TrialState(StrEnum):
    """Where a trial stands."""

    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"


RECORDED_ITEMS = 1000
"""Items a trial on a recorded device is taken to serve when its cost is counted: the paper's requests per
configuration (arXiv 2310.19991), as the benchmark counts them."""


class Daring(IntEnum):
    """What is likelier to break a limit than any risk that a search method takes for a real gain."""

    NOTHING, GAIN, ALL = range(3)
    """Not what there is to gain; that; or whatever is left."""


@dataclass(frozen=True)
class Cost:
    """What searching takes: applying, settling, warming up and looking, with the suggestion where time is real.

    Args:
        duration_s: On the device's clock.
        energy_j: Within the device's boundary, of the kind its measurements have.

    Raises:
        InvalidInput: If either is negative or not finite.
    """

    duration_s: float = 0.0
    energy_j: float = 0.0

    def __post_init__(self) -> None:
        if not (0 <= self.duration_s < math.inf and 0 <= self.energy_j < math.inf):
            raise InvalidInput(f"a trial cannot have cost {self.energy_j} J in {self.duration_s} s")

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.duration_s + other.duration_s, self.energy_j + other.energy_j)


@dataclass(frozen=True)
class Trial:
    """A numbered visit to a point.

    Args:
        number: Counts from 0.
        point: Where.
        measurement: What was seen, once it was.
        failure: Why nothing was seen, if the visit failed.
        cost: What the visit took, once it ended; None where that was not recorded.
        absent: The knob that the device turned out not to have, if that is why it failed.
        board: The URI of the board it was made on, of several that search together; empty where there is one.
    """

    number: int
    point: OperatingPoint
    measurement: Measurement | None = None
    failure: str | None = None
    cost: Cost | None = None
    absent: str | None = None
    board: str = ""

    @property
    def state(self) -> TrialState:
        """Running until there is a measurement or a failure."""
        if self.failure is not None:
            return TrialState.FAILED
        if self.measurement is None:
            return TrialState.RUNNING
        return TrialState.COMPLETED


@dataclass(frozen=True)
class Reference:
    """A named point measured for comparison, such as a vendor's preset; never a suggestion of the optimiser.

    Args:
        name: Which preset.
        point: Where.
        measurement: What was seen.
        cost: What that took; None where it was not recorded, as in journals of older versions.
    """

    name: str
    point: OperatingPoint
    measurement: Measurement
    cost: Cost | None = None

    @property
    def taken(self) -> Cost:
        """What it took; where that was not recorded, what its window did, without settling and warm-up."""
        if self.cost is not None:
            return self.cost
        window_s = self.measurement.window_s or 0.0
        return Cost(window_s, window_s * (self.measurement.power_w or 0.0))


@dataclass(frozen=True, repr=False)
class Study:
    """A problem, how it is searched, and its trials in order.

    Args:
        problem: What is asked.
        method: Name of the optimiser.
        seed: Its randomness.
        trials: Every visit so far, numbered from 0 without gaps.
        references: Presets measured for comparison.
        answer: Number of the trial whose point was chosen when the search ended; None leaves that to the figures.

    Raises:
        InvalidInput: If the trials are not numbered 0, 1, 2, ….
    """

    problem: Problem
    method: str = "bayes"
    seed: int = 0
    trials: tuple[Trial, ...] = ()
    references: tuple[Reference, ...] = ()
    answer: int | None = None

    def __post_init__(self) -> None:
        if [trial.number for trial in self.trials] != list(range(len(self.trials))):
            raise InvalidInput("the trials of a study are numbered from 0 without gaps")

    def with_trial(self, trial: Trial) -> Study:
        """Return this study with a trial added, or replaced if its number is taken; what was chosen before is open."""
        trials = (*self.trials[: trial.number], trial, *self.trials[trial.number + 1 :])
        return replace(self, trials=trials, answer=None)

    def with_reference(self, reference: Reference) -> Study:
        """Return this study with a reference added, or replaced if its name is taken."""
        others = tuple(known for known in self.references if known.name != reference.name)
        return replace(self, references=(*others, reference))

    @property
    def completed(self) -> tuple[Trial, ...]:
        """The trials that have a measurement."""
        return tuple(trial for trial in self.trials if trial.state is TrialState.COMPLETED)

    @property
    def default(self) -> Trial | None:
        """The newest completed trial at the default point: one made again was doubted, or left open what it holds."""
        found = (trial for trial in reversed(self.completed) if trial.point == self.problem.space.default)
        return next(found, None)

    @property
    def doubtful(self) -> bool:
        """Whether the only visit to the default is contradicted, as by a window that something else disturbed.

        It is if a trial that asked at least as much at once was `DOUBT` times as fast, or one that asked as much took
        that much less energy. Where that is no fault it costs one trial to see it again.
        """
        default = self.default
        if default is None or sum(trial.point == default.point for trial in self.trials) > 1:
            return False
        return any(_contradicts(trial, default) for trial in self.completed if trial.point != default.point)

    @property
    def by_chance(self) -> bool:
        """Whether windows differ by chance: they tell their intervals; what is on record has none."""
        return any(trial.measurement is not None and trial.measurement.intervals for trial in self.completed)

    @property
    def visited(self) -> frozenset[OperatingPoint]:
        """Every point a trial went to, whatever came of it."""
        return frozenset(trial.point for trial in self.trials)

    @property
    def absent(self) -> frozenset[str]:
        """The knobs that a trial showed the device not to have; only points with their default are worth a trial."""
        return frozenset(trial.absent for trial in self.trials if trial.absent is not None)

    def reachable(self, point: OperatingPoint) -> bool:
        """Return whether no knob that is absent would have to be set for a point."""
        default = self.problem.space.default
        return all(point.get(name) == default.get(name) for name in self.absent)

    @property
    def cost(self) -> Cost:
        """What all trials took together; a trial whose cost was not recorded counts nothing."""
        return sum((trial.cost for trial in self.trials if trial.cost is not None), Cost())

    @property
    def presets_cost(self) -> Cost:
        """What measuring the presets took, which is no part of the search and counts in what it may use."""
        return sum((reference.taken for reference in self.references), Cost())

    @property
    def duration_s(self) -> float:
        """How long the search took: boards work at once, so as long as the busiest did, not the sum as in `cost`."""
        worked: dict[str, float] = {}
        for trial in self.trials:
            if trial.cost is not None:
                worked[trial.board] = worked.get(trial.board, 0.0) + trial.cost.duration_s
        return max(worked.values(), default=0.0)

    @property
    def virtual(self) -> bool:
        """Whether its seconds are simulated as its joules are: a simulated board elsewhere takes the time of clocks."""
        simulated = any(seen.energy_kind is EnergyKind.SIMULATED for seen in self._measurements)
        return simulated and not self.problem.device.startswith("ssh:")

    @property
    def boards(self) -> tuple[str, ...]:
        """Those of several boards that measured anything, in the order in which they did; none where there is one."""
        return tuple(dict.fromkeys(trial.board for trial in self.completed if trial.board))

    @property
    def unmeasured(self) -> tuple[str, ...]:
        """Those of several boards that measured nothing."""
        return tuple(board for board in self.problem.boards if board not in self.boards)

    @property
    def where(self) -> str:
        """On what it was measured: the device, or all of several boards."""
        return ", ".join(map(device_alone, sorted(self.boards))) or device_alone(self.problem.device)

    @property
    def judgeable(self) -> bool:
        """Whether every limit has an absolute value: what a relative one multiplies is known."""
        return all(
            not constraint.relative or self._reference(constraint.metric) is not None
            for constraint in self.problem.constraints
        )

    @cached_property
    def constraints(self) -> tuple[Constraint, ...]:
        """The constraints with absolute limits; relative ones need the default's trial or the problem's reference.

        Raises:
            InvalidInput: If a relative limit has nothing to multiply yet.
        """
        return tuple(constraint.resolved(self._reference(constraint.metric)) for constraint in self.problem.constraints)

    def _reference(self, metric: str) -> float | None:
        if metric in self.problem.reference:
            return self.problem.reference[metric]
        default = self.default
        if default is None or default.measurement is None:
            return None
        return default.measurement.metric(metric)

    def holds(self, measurement: Measurement) -> bool:
        """Return whether a measurement meets every constraint; one cut short for breaking a limit does not.

        Nor does one that does not keep up with what comes: its latency grows for as long as that goes on.
        """
        kept = measurement.keeps_up and not measurement.censored
        return kept and all(constraint.slack(measurement) >= 0 for constraint in self.constraints)

    def excess(self, measurement: Measurement) -> float:
        """Return by what fraction the worst broken limit is exceeded; 0 if all hold."""
        return max((constraint.excess(measurement) for constraint in self.constraints), default=0.0)

    def most_broken(self, measurement: Measurement) -> Constraint | None:
        """Return the limit that a measurement breaks by the largest fraction; None if it breaks none."""
        worst = max(self.constraints, key=lambda constraint: constraint.excess(measurement), default=None)
        return worst if worst is not None and worst.excess(measurement) > 0 else None

    def verdict(self, measurement: Measurement) -> bool | None:
        """Return whether a measurement meets every constraint; None if a limit or one of its metrics is unknown."""
        if not self.judgeable or any(measurement.metric(one.metric) is None for one in self.constraints):
            return None
        return self.holds(measurement)

    def feasible(self, trial: Trial) -> bool:
        """Return whether a trial was measured and met every constraint."""
        return trial.measurement is not None and self.holds(trial.measurement)

    @property
    def infeasible(self) -> tuple[Trial, ...]:
        """The trials that were measured and broke a constraint."""
        return tuple(trial for trial in self.completed if not self.feasible(trial))

    @property
    def total_excess(self) -> float:
        """By what fractions of their limits the infeasible trials exceed them, summed."""
        return sum(self.excess(trial.measurement) for trial in self.infeasible if trial.measurement is not None)

    @property
    def stopped_early(self) -> tuple[Trial, ...]:
        """The trials whose window was cut short because a limit was plainly broken."""
        return tuple(trial for trial in self.completed if trial.measurement and trial.measurement.censored)

    @property
    def best(self) -> Trial | None:
        """The feasible trial whose point was chosen, else the one that is best by the objective; earliest of equals."""
        held = [trial for trial in self.completed if self.feasible(trial)]
        chosen = next((trial for trial in held if trial.number == self.answer), None)
        return chosen or least(held, self.problem.objective)

    @property
    def front_metric(self) -> str:
        """The latency that is traded against energy: the first that is bounded, else the mean."""
        bounded = [constraint.metric for constraint in self.problem.constraints if constraint.timed]
        return next(iter(bounded), "mean")

    @property
    def front(self) -> tuple[Trial, ...]:
        """The feasible trials that no other feasible one beats in both latency and energy, the fastest first."""
        held = [(_traded(trial, self.front_metric), trial) for trial in self.completed if self.feasible(trial)]
        found: list[Trial] = []
        least_j = math.inf
        # The number last: of two that are equal in both the earlier one is on the front.
        for (_, energy_j), trial in sorted(held, key=lambda pair: (*pair[0], pair[1].number)):
            if energy_j < least_j:
                found.append(trial)
                least_j = energy_j
        return tuple(found)

    @property
    def closest(self) -> Trial | None:
        """The completed trial that exceeds its limits least."""
        return min(
            self.completed,
            key=lambda trial: self.excess(trial.measurement) if trial.measurement else float("inf"),
            default=None,
        )

    @property
    def saving_fraction(self) -> float | None:
        """The share of the default's objective that the best trial saves; None while either is unknown."""
        default = self.default
        best = self.best
        objective = self.problem.objective
        if default is None or best is None or default.measurement is None or best.measurement is None:
            return None
        return 1.0 - objective.of(best.measurement) / objective.of(default.measurement)

    @property
    def saving(self) -> Interval | None:
        """The 95 % interval of that share, where it is one of energy; None where energies have no intervals."""
        default = self.default
        best = self.best
        if self.problem.objective in (Objective.EDP, Objective.LATENCY) or default is None or best is None:
            return None
        # Two visits to one point differ by chance alone, which is no saving.
        if default.measurement is None or best.measurement is None or default.point == best.point:
            return None
        return saving_interval(best.measurement, default.measurement)

    @property
    def requests(self) -> int | None:
        """How many requests the trials took in all; None if that was not counted."""
        counts = [trial.measurement.requests for trial in self.completed if trial.measurement]
        # One unknown count makes the sum one: a sum of the rest would look like all of them.
        if counts and None not in counts:
            return sum(count for count in counts if count is not None)
        return None

    @property
    def default_will_do(self) -> bool:
        """Whether the default holds every limit and nothing that was tried saves `WORTHWHILE` of its objective."""
        saving = self.saving_fraction
        if saving is None or self.default is None or not self.feasible(self.default):
            return False
        return self.well_searched and saving < WORTHWHILE

    @property
    def within_noise(self) -> bool:
        """Whether the default holds every limit, and the best trial's saving against it may be chance alone.

        That is where its 95 % interval does not exclude zero. Nothing is said where energies have no intervals.
        """
        return (
            self.saving is not None
            and self.saving.low <= 0
            and self.default is not None
            and self.feasible(self.default)
        )

    @property
    def well_searched(self) -> bool:
        """Whether enough was tried to say that something is not there: `ENOUGH` trials, or every point."""
        return len(self.completed) >= ENOUGH or len(self.visited) == len(self.problem.space)

    @property
    def answered(self) -> Trial | None:
        """The best trial; None also where no limit can be judged yet."""
        if all(self.verdict(seen) is not None for seen in self._measurements):
            return self.best
        return None

    @property
    def _measurements(self) -> tuple[Measurement, ...]:
        return tuple(trial.measurement for trial in self.trials if trial.measurement is not None)

    def to_dataframe(self) -> pd.DataFrame:
        """Return a pandas frame with a row for each trial, in SI units, the unit last in each name.

        Its columns: ``trial``; ``board``, its URI, where there are several; the knobs; ``state`` (running, completed,
        failed); ``feasible`` (unknown where nothing was measured or a limit cannot be judged), ``is_best``,
        ``on_front``; what was measured, with the ends of 95 % intervals as ``energy_low_j`` and ``energy_high_j``;
        ``cost_s`` and ``cost_j`` of the visit; ``failure``.
        How the joules came about is in ``energy_kind``, what they cover in ``boundary``.
        """
        import pandas as pd

        best = self.answered
        if best is not None:
            front = {trial.number for trial in self.front}
        else:
            front = set()
        verdicts = [None if trial.measurement is None else self.verdict(trial.measurement) for trial in self.trials]
        costs = [trial.cost for trial in self.trials]
        first = {
            "trial": pd.Series([trial.number for trial in self.trials], dtype="int64"),
            **({"board": pd.Series([trial.board for trial in self.trials], dtype="object")} if self.boards else {}),
            **{name: pd.Series([trial.point[name] for trial in self.trials]) for name in self.problem.space.names},
            "state": pd.Series([str(trial.state) for trial in self.trials], dtype="object"),
            # Of pandas' own kind, for a verdict may be unknown: NumPy's bool would make that False or True.
            "feasible": pd.Series(verdicts, dtype="boolean"),
            "is_best": pd.Series([trial == best for trial in self.trials], dtype="bool"),
            "on_front": pd.Series([trial.number in front for trial in self.trials], dtype="bool"),
        }
        last = {
            "cost_s": pd.Series([None if cost is None else cost.duration_s for cost in costs], dtype="float64"),
            "cost_j": pd.Series([None if cost is None else cost.energy_j for cost in costs], dtype="float64"),
            "failure": pd.Series([trial.failure for trial in self.trials], dtype="object"),
        }
        seen = measurement_frame([trial.measurement for trial in self.trials])
        table: pd.DataFrame = pd.concat([pd.DataFrame(first), seen, pd.DataFrame(last)], axis="columns")
        return table

    def __repr__(self) -> str:
        asked = " ".join(map(str, self.problem.constraints)) or "no SLO"
        said = [f"{len(self.trials)} trial{'s' * (len(self.trials) != 1)}"]
        if (best := self.answered) is not None and best.measurement is not None:
            said.append(f"best {show_energy(best.measurement)}")
            said.append(show_saving(self.saving_fraction, self.saving, self.problem.objective.words).partition(";")[0])
        elif self._measurements:
            said.append("none known to hold it")
        words = ", ".join(filter(None, said))
        return f"<Study of {self.problem.workload or 'workload'} on {self.where or 'device'}, {asked}: {words}>"

    def _repr_html_(self) -> str:
        heading = f"{self.problem.workload or 'workload'} on {self.where or 'device'}"
        return card_html(heading, self.lines(), (seen.energy_kind for seen in self._measurements))

    def lines(self) -> Iterator[tuple[str, str]]:
        """Yield what a person wants to know of the study, each with its name: answer, saving, SLO, trials."""
        best = self.answered
        if best is not None and best.measurement is not None:
            yield "answer", f"{show_point(best.point)} (trial {best.number})"
            yield "energy", show_energy(best.measurement)
            yield "saving", show_saving(self.saving_fraction, self.saving, self.problem.objective.words)
        else:
            yield "answer", "no trial is known to hold the SLO" if self._measurements else "nothing was measured yet"
        yield "SLO", self._held(best)
        yield "trials", self._counts()

    def _held(self, best: Trial | None) -> str:
        """Return each limit, with what the best trial has of it."""
        seen = None if best is None else best.measurement
        if seen is None:
            return ", ".join(map(str, self.problem.constraints)) or "none"
        held = (f"{bound} (tuned: {bound.show(seen.metric(bound.metric))})" for bound in self.constraints)
        return ", ".join(held) or "none"

    def _counts(self) -> str:
        broken = sum(self.verdict(seen) is False for seen in self._measurements)
        failed = sum(trial.state is TrialState.FAILED for trial in self.trials)
        parts = (f"{broken} broke the SLO" * (broken > 0), f"{failed} failed" * (failed > 0))
        whole = f"{len(self.trials)} of {len(self.problem.space)} points by {self.method}"
        return ", ".join(filter(None, (whole, *parts)))


def least(trials: Iterable[Trial], objective: Objective) -> Trial | None:
    """Return the trial that is best by an objective among those that have a measurement; the earliest of equals."""
    return min(
        (trial for trial in trials if trial.measurement is not None),
        key=lambda trial: objective.of(trial.measurement) if trial.measurement else math.inf,
        default=None,
    )


def _contradicts(trial: Trial, default: Trial) -> bool:
    """Return whether a trial makes what was seen at the default hard to believe."""
    seen = trial.measurement
    doubted = default.measurement
    assert seen is not None
    assert doubted is not None
    # Without the knob each query is one item, and one is under way at once.
    asked, usual = ([one.point.get(name, 1) for name in _ASKED] for one in (trial, default))
    if any(isinstance(level, str) for level in asked + usual) or any(map(operator.lt, asked, usual)):
        return False
    return DOUBT * seen.latency.mean_s < doubted.latency.mean_s or (
        asked == usual and DOUBT * seen.energy_j < doubted.energy_j
    )


def _traded(trial: Trial, metric: str) -> tuple[float, float]:
    """Return a measured trial's latency in seconds and energy per item in joules."""
    assert trial.measurement is not None
    latency_s = trial.measurement.metric(metric)
    return math.inf if latency_s is None else latency_s, trial.measurement.energy_j
