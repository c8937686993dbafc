"""What a report needs to know about a study, with an answer for everything that can be missing.

One unit for a whole axis or column.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from statistics import median

from polythrottle.domain.backports import StrEnum
from polythrottle.domain.errors import InvalidInput
from polythrottle.domain.measurement import EnergyKind, Measurement
from polythrottle.domain.problem import Constraint, Objective
from polythrottle.domain.space import OperatingPoint
from polythrottle.domain.study import WORTHWHILE, Study, Trial, TrialState, least

# One unit for a whole axis or column: the prefix and the decimals that keep all of its values readable.

_PREFIXES = ((1e3, "k"), (1.0, ""), (1e-3, "m"), (1e-6, "µ"), (1e-9, "n"))

_RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


@dataclass(frozen=True)
class Scale:
    """How the values of one quantity are written together.

    Args:
        unit: With its prefix, or a power of ten; empty for a plain number.
        factor: What one of that unit is in SI.
        decimals: Digits after the point: four that say something in a typical value, two in the smallest.
    """

    unit: str
    factor: float
    decimals: int

    @classmethod
    def of(cls, values: Iterable[float | None], unit: str) -> "Scale":
        """Return the scale that suits positive values in an SI unit; unknown ones are passed over."""
        known = [value for value in values if value is not None] or [1.0]
        factor, prefix = _prefix(median(known), unit)
        decimals = max(3 - _power(median(known) / factor), 1 - _power(min(known) / factor))
        return cls(f"{prefix}{unit}", factor, min(max(decimals, 0), 6))

    def number(self, value: float | None) -> str:
        """Return a value without its unit; unknown gives ``–``."""
        if value is None:
            return "–"
        return f"{value / self.factor:.{self.decimals}f}"

    def quantity(self, value: float | None) -> str:
        """Return a value with its unit; unknown gives ``–``."""
        if value is None:
            return self.number(value)
        return f"{self.number(value)} {self.unit}".strip()

    def titled(self, name: str) -> str:
        """Return a title with the unit: ``energy (mJ)``."""
        if self.unit:
            return f"{name} ({self.unit})"
        return name


def _prefix(typical: float, unit: str) -> tuple[float, str]:
    if not unit:
        power = 3 * (_power(typical) // 3)
        if -1 <= power / 3 <= 1:
            return (1.0, "")
        return (10.0**power, f"×10{str(power).translate(_RAISED)}")
    # Kiloseconds are a correct unit that nobody reads.
    usable = [(factor, prefix) for factor, prefix in _PREFIXES if (unit, prefix) != ("s", "k")]
    return next(((factor, prefix) for factor, prefix in usable if typical >= factor), usable[-1])


def _power(value: float) -> int:
    return math.floor(math.log10(value))


# What a report needs to know about a study, with an answer for everything that can be missing.


class Role(StrEnum):
    """The part a measured point plays in a figure."""

    FEASIBLE = "feasible"
    INFEASIBLE = "breaks the SLO"
    UNJUDGED = "not judged"
    PRESET = "preset"
    DEFAULT = "default"
    TUNED = "tuned"


@dataclass(frozen=True)
class Mark:
    """One measured point as figures draw it.

    Args:
        role: What it is.
        name: What to call it; empty for an ordinary trial.
        point: Where.
        measurement: What was seen there.
        verdict: Whether the SLO holds there; None if that cannot be said.
        number: Of the trial; None for a preset.
    """

    role: Role
    name: str
    point: OperatingPoint
    measurement: Measurement
    verdict: bool | None
    number: int | None = None


@dataclass(frozen=True)
class Digest:
    """A study seen by a reader: unlike the study itself it never raises, whatever was not measured."""

    study: Study

    @cached_property
    def constraints(self) -> tuple[Constraint, ...] | None:
        """The constraints with absolute limits, or None while a multiple has nothing to multiply."""
        try:
            return self.study.constraints
        except InvalidInput:
            return None

    def verdict(self, measurement: Measurement) -> bool | None:
        """Return whether the SLO holds, or None if its limit or one of its metrics is unknown."""
        # A recorded table may lack the statistic that is bounded; then nobody can say, and saying "holds" would be a
        # lie.
        if self.constraints is None or any(measurement.metric(bound.metric) is None for bound in self.constraints):
            return None
        return self.study.holds(measurement)

    @cached_property
    def measured(self) -> tuple[tuple[Trial, Measurement], ...]:
        """Every completed trial with its measurement."""
        return tuple((trial, trial.measurement) for trial in self.study.trials if trial.measurement is not None)

    @cached_property
    def best(self) -> Mark | None:
        """The trial that is the study's answer: known to hold the SLO, and chosen or else best by the objective."""
        # The chosen trial comes before the lowest one: a study may settle on one that is surer, not lower.
        held = [trial for trial, measurement in self.measured if self.verdict(measurement)]
        chosen = next((trial for trial in held if trial.number == self.study.answer), None)
        return self._trial_mark(chosen or least(held, self.study.problem.objective), Role.TUNED, "tuned")

    @cached_property
    def default(self) -> Mark | None:
        """The device's default point."""
        return self._trial_mark(self.study.default, Role.DEFAULT, "default")

    @property
    def default_is_best(self) -> bool:
        """Whether nothing that was tried beats the default."""
        return self.best is not None and self.default is not None and self.best.number == self.default.number

    @property
    def saving_fraction(self) -> float | None:
        """The share of the default's objective that the tuned point saves; None while either is unknown."""
        if self.best is None or self.default is None:
            return None
        objective = self.study.problem.objective
        return 1.0 - objective.of(self.best.measurement) / objective.of(self.default.measurement)

    @cached_property
    def trials(self) -> tuple[Mark, ...]:
        """Every completed trial by what became of it; the default and the tuned point among them under those roles."""
        return tuple(self._role_of(trial, measurement) for trial, measurement in self.measured)

    @cached_property
    def presets(self) -> tuple[Mark, ...]:
        """Every preset, in the order they were measured."""
        return tuple(
            Mark(Role.PRESET, known.name, known.point, known.measurement, self.verdict(known.measurement))
            for known in self.study.references
        )

    @property
    def broken(self) -> tuple[Measurement, ...]:
        """What was seen at the trials known to break the SLO."""
        return tuple(measurement for _, measurement in self.measured if self.verdict(measurement) is False)

    @property
    def unjudged(self) -> int:
        """How many trials were measured without it being known whether the SLO holds there."""
        return sum(self.verdict(measurement) is None for _, measurement in self.measured)

    @property
    def total_excess(self) -> float:
        """By what fractions of their limits the trials known to break the SLO exceed them, summed."""
        return sum(self.study.excess(measurement) for measurement in self.broken)

    @property
    def default_will_do(self) -> bool:
        """Whether the default is known to hold the SLO and nothing that was tried saves enough to be told from it."""
        if self.default is None or not self.default.verdict or self.saving_fraction is None:
            return False
        # After a few trials that found nothing, "the default will do" would be said too soon.
        return self.study.well_searched and self.saving_fraction < WORTHWHILE

    @property
    def closest(self) -> tuple[Trial, Measurement] | None:
        """The trial that exceeds its limits least, among those that can be judged."""
        judged = ((trial, measurement) for trial, measurement in self.measured if self.verdict(measurement) is not None)
        return min(judged, key=lambda pair: self.study.excess(pair[1]), default=None)

    def in_state(self, state: TrialState) -> tuple[Trial, ...]:
        """Return the trials in one state."""
        return tuple(trial for trial in self.study.trials if trial.state is state)

    @property
    def measurements(self) -> tuple[Measurement, ...]:
        """Every measurement there is, of trials and presets."""
        return (
            *(measurement for _, measurement in self.measured),
            *(known.measurement for known in self.study.references),
        )

    @property
    def kind(self) -> str:
        """How the joules came about, in words; empty if nothing was measured."""
        return _listed(str(measurement.energy_kind) for measurement in self.measurements)

    @property
    def energy_unit(self) -> str:
        """``J``, or nothing where energy is only relative."""
        # One relative value makes an axis relative: joules and shares cannot stand on one.
        if any(measurement.energy_kind is EnergyKind.RELATIVE for measurement in self.measurements):
            return ""
        return "J"

    @cached_property
    def energy_scale(self) -> Scale:
        """The unit and decimals in which the whole report writes energy."""
        return Scale.of((measurement.energy_j for measurement in self.measurements), self.energy_unit)

    @property
    def objective_name(self) -> str:
        """What is minimised, as it is called in sentences."""
        objective = self.study.problem.objective
        if objective in (Objective.EDP, Objective.LATENCY):
            return objective.words
        return self.energy_name

    @cached_property
    def objective_scale(self) -> Scale:
        """The unit and decimals in which the objective is written; of a front, that of energy."""
        objective = self.study.problem.objective
        if objective.unit == "J":
            return self.energy_scale
        known = self.energy_unit or objective is Objective.LATENCY
        return Scale.of(
            (objective.of(measurement) for measurement in self.measurements), objective.unit if known else ""
        )

    @property
    def objective_axis(self) -> str:
        """What an axis of the objective shows, the kind of its joules first."""
        objective = self.study.problem.objective
        if objective is Objective.LATENCY:
            return objective.words
        return f"{self.kind} {objective.words}".strip()

    @property
    def energy_name(self) -> str:
        """What an energy axis shows, the kind first."""
        return f"{self.kind} energy per item".strip()

    @property
    def boundary(self) -> str:
        """Which rails, devices or processes the joules cover; empty if nobody said."""
        return _listed(measurement.boundary for measurement in self.measurements)

    @property
    def beside(self) -> str:
        """What the device's own sensors cover that were read beside a meter; empty if there was none."""
        return _listed(
            f"{measurement.board.energy_kind}: {measurement.board.boundary}"
            for measurement in self.measurements
            if measurement.board
        )

    @property
    def latency_metric(self) -> str:
        """The latency statistic to draw: the first one bounded that was measured at all, else the mean."""
        bounded = (bound.metric for bound in self.study.problem.constraints if bound.unit == "s")
        # The statistic that is bounded, or the figure could not show its limit.
        return next(
            (name for name in bounded if any(measurement.metric(name) for measurement in self.measurements)), "mean"
        )

    @property
    def latency_limit_s(self) -> float | None:
        """The SLO's limit on the latency that is drawn."""
        bounds = (bound.limit for bound in self.constraints or () if bound.metric == self.latency_metric)
        return min(bounds, default=None)

    def _role_of(self, trial: Trial, measurement: Measurement) -> Mark:
        # The tuned point first: where it is the default as well, it is shown as tuned.
        for known in (self.best, self.default):
            if known is not None and known.number == trial.number:
                return known
        verdict = self.verdict(measurement)
        role = {True: Role.FEASIBLE, False: Role.INFEASIBLE, None: Role.UNJUDGED}[verdict]
        return Mark(role, "", trial.point, measurement, verdict, trial.number)

    def _trial_mark(self, trial: Trial | None, role: Role, name: str) -> Mark | None:
        if trial is None or trial.measurement is None:
            return None
        return Mark(role, name, trial.point, trial.measurement, self.verdict(trial.measurement), trial.number)


def _listed(words: Iterable[str]) -> str:
    return " and ".join(sorted({word for word in words if word}))
