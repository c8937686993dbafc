"""What is known of a study's points, to explain from: what was measured where it was, what the models say elsewhere."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from polythrottle.domain.measurement import Measurement
from polythrottle.domain.problem import Objective
from polythrottle.domain.space import OperatingPoint
from polythrottle.domain.study import Study, Trial, TrialState
from polythrottle.optimize.features import Array
from polythrottle.optimize.quantities import DRAW, TIME, Bound, bound, in_units, metric_quantity, names, table

if TYPE_CHECKING:
    from polythrottle.optimize.posterior import PosteriorArrays

ENERGY = "energy"
EDP = "edp"
MEAN = "mean"
"""Energy per item, that times mean latency, and mean latency, among the metrics an explanation speaks of."""
_GOALS = {Objective.EDP: EDP, Objective.LATENCY: MEAN}
_EQUAL = 1e-12


@dataclass(frozen=True, eq=False)
class Evidence:
    """A study, what its models say, and what is explained of it.

    Args:
        study: At least two trials of it are completed, and its limits are known.
        quantities: What is modelled, in the order of the columns of ``anatomy``.
        anatomy: Of these quantities; the points asked for are the mixtures of default and chosen point.
    """

    study: Study
    quantities: tuple[str, ...]
    anatomy: "PosteriorArrays"

    @property
    def goal(self) -> str:
        """The metric that is minimised."""
        return goal(self.study.problem.objective)

    @cached_property
    def bounds(self) -> tuple[Bound, ...]:
        """The constraints as upper limits on modelled quantities, in order."""
        return tuple(bound(constraint) for constraint in self.study.constraints)

    @cached_property
    def seen(self) -> NDArray[np.bool_]:
        """Whether each point was measured over a whole window, shape (points,)."""
        found = np.zeros(len(self.study.problem.space), dtype=bool)
        found[[self._row(trial) for trial in self._whole]] = True
        return found

    @cached_property
    def tried(self) -> NDArray[np.bool_]:
        """Whether each point was visited at all, shape (points,): also where a window was cut short."""
        found = np.zeros(len(self.study.problem.space), dtype=bool)
        found[[self._row(trial) for trial in self.study.trials if trial.point in self.study.problem.space]] = True
        return found

    @cached_property
    def likely(self) -> Array:
        """Each quantity at each point, measured where it was and else predicted, shape (points, quantities).

        Where a window was cut short because a limit was plainly broken, what is bounded is the worse of the two.
        """
        found: Array = self.anatomy.mean.copy()
        bounded = [self.quantities.index(one.quantity) for one in self.bounds]
        for trial, seen in self._cut_short:
            row = self._row(trial)
            values = table([seen], self.quantities)[0]
            values[bounded] = np.maximum(values[bounded], found[row, bounded])
            found[row] = values
        if self._whole:
            measurements = [trial.measurement for trial in self._whole if trial.measurement is not None]
            found[[self._row(trial) for trial in self._whole]] = table(measurements, self.quantities)
        return found

    @cached_property
    def open(self) -> NDArray[np.bool_]:
        """Whether each point may be named, shape (points,): no trial failed there, and none saw its queue grow."""
        found = np.ones(len(self.study.problem.space), dtype=bool)
        closed = [
            trial
            for trial in self.study.trials
            if trial.state is TrialState.FAILED or (trial.measurement is not None and not trial.measurement.keeps_up)
        ]
        found[[self._row(trial) for trial in closed if trial.point in self.study.problem.space]] = False
        return found

    @property
    def _whole(self) -> list[Trial]:
        return [trial for trial in self.anatomy.trials if trial.measurement and not trial.measurement.censored]

    @property
    def _cut_short(self) -> list[tuple[Trial, Measurement]]:
        """The trials whose windows were cut short, and what was seen until then."""
        trials = ((trial, trial.measurement) for trial in self.anatomy.trials)
        return [(trial, seen) for trial, seen in trials if seen is not None and seen.censored]

    def _row(self, trial: Trial) -> int:
        return self.study.problem.space.index(trial.point)

    def columns(self, metric: str) -> list[int]:
        """Return the columns whose sum a metric is a function of."""
        return [self.quantities.index(name) for name in terms(metric)]

    def modelled(self, metric: str, values: Array) -> Array:
        """Return a metric on its models' scale, given all quantities in the last axis."""
        found: Array = values[..., self.columns(metric)].sum(axis=-1)
        return found

    def std(self, metric: str) -> Array:
        """Return the models' standard deviation of a metric on their scale, shape (points,), without noise."""
        found: Array = np.sqrt(self.modelled(metric, self.anatomy.variance))
        return found

    def noise(self, metric: str) -> float:
        """Return the standard deviation of one measurement of a metric, on its models' scale."""
        return float(np.sqrt(self.modelled(metric, self.anatomy.noise)))

    def allowed(self, bounds: Sequence[Bound]) -> NDArray[np.bool_]:
        """Return which points are likelier than not to hold these limits, shape (points,)."""
        found: NDArray[np.bool_] = self.open.copy()
        for one in bounds:
            found &= self.likely[:, self.quantities.index(one.quantity)] <= one.limit + _EQUAL
        if self._as_tight(bounds):
            found[[self._row(trial) for trial, _ in self._cut_short if not self.seen[self._row(trial)]]] = False
        return found

    def _as_tight(self, bounds: Sequence[Bound]) -> bool:
        """Return whether what breaks the study's limits breaks these too, whichever of them it was."""
        return all(
            any(one.quantity == asked.quantity and one.limit <= asked.limit + _EQUAL for one in bounds)
            for asked in self.bounds
        )

    def cheapest(self, bounds: Sequence[Bound]) -> int | None:
        """Return the row of the best objective among the points that are allowed; None if there is none."""
        values = np.where(self.allowed(bounds), self.modelled(self.goal, self.likely), np.inf)
        row = int(np.argmin(values))
        if np.isfinite(values[row]):
            return row
        return None


def gather(study: Study, mixtures: Sequence[OperatingPoint]) -> Evidence | None:
    """Return the evidence of a study; None if no model can be fitted to it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # gpytorch's import uses deprecated parts of torch
        from polythrottle.optimize.posterior import posterior_arrays  # loads torch

    quantities = names([bound(constraint) for constraint in study.constraints])
    wanted = tuple(name for metric in metrics(study) for name in terms(metric))
    quantities = tuple(dict.fromkeys((*quantities, *wanted)))
    anatomy = posterior_arrays(study, quantities, mixtures)
    if anatomy is None:
        return None
    return Evidence(study, quantities, anatomy)


def goal(objective: Objective) -> str:
    """Return the metric that is minimised; of a front, energy."""
    return _GOALS.get(objective, ENERGY)


def metrics(study: Study) -> tuple[str, ...]:
    """Return what is explained: the objective, energy, every bounded metric, and mean latency if no time is bounded."""
    bounded = [constraint.metric for constraint in study.constraints]
    timed = any(constraint.timed or constraint.at_least for constraint in study.constraints)
    return tuple(dict.fromkeys((goal(study.problem.objective), ENERGY, *bounded, *(() if timed else (MEAN,)))))


def terms(metric: str) -> tuple[str, ...]:
    """Return the modelled quantities whose sum a metric is a function of."""
    if metric == EDP:
        return (TIME, DRAW, MEAN)
    if metric == ENERGY:
        return (TIME, DRAW)
    return (metric_quantity(metric),)


def shown(metric: str, value: Array | float) -> Array:
    """Return a metric in its own unit, given it on its models' scale."""
    return in_units(metric, np.asarray(value, dtype=float))
