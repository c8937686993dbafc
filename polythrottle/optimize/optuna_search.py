"""Optuna's samplers as rivals, with its own handling of constraints; Optuna is a development dependency.

A sampler sees each knob as the index of its level. What it asks for is moved to the nearest point of the space that has
not been tried, because its boxes know neither dependent knobs nor recorded rows nor repeats.
"""

import warnings
from typing import TYPE_CHECKING, Literal

import numpy as np

from polythrottle.errors import DeviceError, InvalidInput
from polythrottle.optimize.features import coordinates
from polythrottle.optimize.remaining import remaining_rows
from polythrottle.space import OperatingPoint, SearchSpace
from polythrottle.study import Study, Trial

if TYPE_CHECKING:
    import optuna


class OptunaSearch:
    """A sampler of Optuna behind the port: the default point first, then what the sampler asks for.

    Args:
        sampler: ``tpe`` (Watanabe 2023, c-TPE) or ``gp`` (Gaussian process with log expected improvement).
    """

    def __init__(self, sampler: Literal["tpe", "gp"]) -> None:
        self._sampler = sampler

    def suggest(self, study: Study) -> OperatingPoint:
        """Return the next point.

        Raises:
            Exhausted: If every point has been tried.
            DeviceError: If Optuna is not installed.
        """
        space, rows = study.problem.space, remaining_rows(study)
        if space.default not in study.visited:
            return space.default
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            asked = self._ask(study)
        unit = coordinates(space).unit
        target = _unit_of(space, asked)
        away = np.square(unit[rows] - target).sum(axis=1)
        return space[int(rows[np.argmin(away)])]

    def _ask(self, study: Study) -> dict[str, int]:
        """Return the level index per knob that the sampler wants next."""
        try:
            import optuna
        except ImportError as error:
            raise DeviceError("methods tpe and gp need Optuna: pip install 'polythrottle[optuna]'") from error
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        seed = (study.seed * 1_000_003 + len(study.trials)) % 2**32
        if self._sampler == "tpe":
            sampler: optuna.samplers.BaseSampler = optuna.samplers.TPESampler(seed=seed)
        else:
            sampler = optuna.samplers.GPSampler(seed=seed)
        told = optuna.create_study(sampler=sampler)
        distributions = _distributions(study.problem.space)
        told.add_trials([_told(study, trial, distributions) for trial in study.trials if trial.measurement is not None])
        return {name: int(level) for name, level in told.ask(distributions).params.items()}


def _distributions(space: SearchSpace) -> "dict[str, optuna.distributions.BaseDistribution]":
    import optuna

    found: dict[str, optuna.distributions.BaseDistribution] = {}
    for knob in space.knobs:
        last = len(knob.levels) - 1
        categories = optuna.distributions.CategoricalDistribution(list(range(last + 1)))
        found[knob.name] = optuna.distributions.IntDistribution(0, last) if knob.ordered else categories
    return found


def _told(
    study: Study, trial: Trial, distributions: "dict[str, optuna.distributions.BaseDistribution]"
) -> "optuna.trial.FrozenTrial":
    import optuna

    assert trial.measurement is not None
    space, measurement = study.problem.space, trial.measurement
    return optuna.trial.create_trial(
        value=study.problem.objective.of(measurement),
        params={knob.name: knob.levels.index(trial.point[knob.name]) for knob in space.knobs},
        distributions=distributions,
        constraints={str(constraint): -constraint.slack(measurement) for constraint in study.constraints},
    )


def _unit_of(space: SearchSpace, asked: dict[str, int]) -> np.ndarray:
    """Return the unit coordinates of a point that need not be in the space, shape (columns,)."""
    wanted = np.array([asked[knob.name] for knob in space.knobs])
    unit, columns, start = coordinates(space).unit, [], 0
    for place, knob in enumerate(space.knobs):
        width = 0 if len(knob.levels) == 1 else 1 if knob.ordered else len(knob.levels)
        same = np.flatnonzero(space.rows[:, place] == wanted[place])
        if not len(same):
            raise InvalidInput(f"no point of the space has level {wanted[place]} of {knob.name}")
        columns.append(unit[same[0], start : start + width])
        start += width
    return np.concatenate(columns) if columns else np.zeros(0)
