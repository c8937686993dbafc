"""A problem and the trials made on it so far."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property

from polythrottle.errors import InvalidInput
from polythrottle.measurement import Measurement
from polythrottle.problem import Constraint, Problem
from polythrottle.space import OperatingPoint


class TrialState(StrEnum):
    """Where a trial stands."""

    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"


@dataclass(frozen=True)
class Trial:
    """A numbered visit to a point.

    Args:
        number: Counts from 0.
        point: Where.
        measurement: What was seen, once it was.
        failure: Why nothing was seen, if the visit failed.
    """

    number: int
    point: OperatingPoint
    measurement: Measurement | None = None
    failure: str | None = None

    @property
    def state(self) -> TrialState:
        """Running until there is a measurement or a failure."""
        if self.failure is not None:
            return TrialState.FAILED
        return TrialState.RUNNING if self.measurement is None else TrialState.COMPLETED


@dataclass(frozen=True)
class Reference:
    """A named point measured for comparison, such as a vendor's preset; never a suggestion of the optimiser."""

    name: str
    point: OperatingPoint
    measurement: Measurement


@dataclass(frozen=True)
class Study:
    """A problem, how it is searched, and its trials in order.

    Args:
        problem: What is asked.
        method: Name of the optimiser.
        seed: Its randomness.
        trials: Every visit so far, numbered from 0 without gaps.
        references: Presets measured for comparison.

    Raises:
        InvalidInput: If the trials are not numbered 0, 1, 2, ….
    """

    problem: Problem
    method: str = "bayes"
    seed: int = 0
    trials: tuple[Trial, ...] = ()
    references: tuple[Reference, ...] = ()

    def __post_init__(self) -> None:
        if [trial.number for trial in self.trials] != list(range(len(self.trials))):
            raise InvalidInput("the trials of a study are numbered from 0 without gaps")

    def with_trial(self, trial: Trial) -> "Study":
        """Return this study with a trial added, or replaced if its number is taken."""
        return replace(self, trials=(*self.trials[: trial.number], trial, *self.trials[trial.number + 1 :]))

    def with_reference(self, reference: Reference) -> "Study":
        """Return this study with a reference added, or replaced if its name is taken."""
        others = tuple(known for known in self.references if known.name != reference.name)
        return replace(self, references=(*others, reference))

    @property
    def completed(self) -> tuple[Trial, ...]:
        """The trials that have a measurement."""
        return tuple(trial for trial in self.trials if trial.state is TrialState.COMPLETED)

    @property
    def default(self) -> Trial | None:
        """The first completed trial at the default point."""
        return next((trial for trial in self.completed if trial.point == self.problem.space.default), None)

    @property
    def visited(self) -> frozenset[OperatingPoint]:
        """Every point a trial went to, whatever came of it."""
        return frozenset(trial.point for trial in self.trials)

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
        return None if default is None or default.measurement is None else default.measurement.metric(metric)

    def holds(self, measurement: Measurement) -> bool:
        """Return whether a measurement meets every constraint."""
        return all(constraint.slack(measurement) >= 0 for constraint in self.constraints)

    def excess(self, measurement: Measurement) -> float:
        """Return by what fraction the worst broken limit is exceeded; 0 if all hold."""
        return max((constraint.excess(measurement) for constraint in self.constraints), default=0.0)

    def feasible(self, trial: Trial) -> bool:
        """Return whether a trial was measured and met every constraint."""
        return trial.measurement is not None and self.holds(trial.measurement)

    @property
    def infeasible(self) -> tuple[Trial, ...]:
        """The trials that were measured and broke a constraint."""
        return tuple(trial for trial in self.completed if not self.feasible(trial))

    @property
    def best(self) -> Trial | None:
        """The feasible trial of least energy; the earliest of equals."""
        return least_energy(trial for trial in self.completed if self.feasible(trial))

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
        """The share of the default's energy per item that the best trial saves; None while either is unknown."""
        default, best = self.default, self.best
        if default is None or best is None or default.measurement is None or best.measurement is None:
            return None
        return 1.0 - best.measurement.energy_j / default.measurement.energy_j


def least_energy(trials: Iterable[Trial]) -> Trial | None:
    """Return the trial of least energy per item among those that have a measurement."""
    return min(
        (trial for trial in trials if trial.measurement is not None),
        key=lambda trial: trial.measurement.energy_j if trial.measurement else float("inf"),
        default=None,
    )
