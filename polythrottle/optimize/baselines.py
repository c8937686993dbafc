"""Rivals of the default search: random order, a refined grid, presets, gradient descent, Optuna's samplers.

The PolyThrottle paper's own method.
"""

import warnings
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from polythrottle.domain.errors import DeviceError, Exhausted, InvalidInput
from polythrottle.domain.measurement import Measurement
from polythrottle.domain.space import Knob, OperatingPoint, SearchSpace
from polythrottle.domain.study import Study, Trial
from polythrottle.optimize.features import Rows, coordinates, default_row, generator, remaining_rows

if TYPE_CHECKING:
    import optuna

# Methods that do not learn: a random order, a grid that is refined as it goes, and the vendor's presets.


class RandomOrder:
    """Random search without replacement, from the default point on."""

    def suggest(self, study: Study) -> OperatingPoint:
        """Return the default point, then any point that has not been tried, all equally likely.

        Raises:
            Exhausted: If every point has been tried.
        """
        space = study.problem.space
        rows = remaining_rows(study)
        if space.default not in study.visited:
            return space.default
        return space[int(generator(study).choice(rows))]


class CoarseToFine:
    """Grid search: the default point, the corners, then the points half-way between, and so on.

    However early it is stopped, what it has seen spans the whole space. It has no randomness.
    """

    def suggest(self, study: Study) -> OperatingPoint:
        """Return the default point, then the first point of the refinement that has not been tried.

        Raises:
            Exhausted: If every point has been tried.
        """
        space = study.problem.space
        rows = remaining_rows(study)
        order = _refinement(space)
        return space[int(rows[np.argmin(order[rows])])]


@lru_cache(maxsize=4)
def _refinement(space: SearchSpace) -> NDArray[np.intp]:
    """Return when each point's turn comes, shape (points,): 0 for the default, which is first."""
    depths = [_depth(len(knob.levels))[space.rows[:, k]] for k, knob in enumerate(space.knobs)]
    if depths:
        coarse = np.max(depths, axis=0)
    else:
        coarse = np.zeros(len(space), dtype=np.int64)
    coarse[default_row(space)] = -1
    turn = np.empty(len(space), dtype=np.intp)
    turn[np.argsort(coarse, kind="stable")] = np.arange(len(space))
    return turn


def _depth(levels: int) -> NDArray[np.int64]:
    """Return in which round of halving each level of a knob is first used, shape (levels,): 0 for both ends."""
    depth = np.zeros(levels, dtype=np.int64)
    gaps = [(0, levels - 1)]
    round_ = 0
    while gaps:
        round_ += 1
        middles = [(low, (low + high) // 2, high) for low, high in gaps if high - low > 1]
        depth[[middle for _, middle, _ in middles]] = round_
        gaps = [gap for low, middle, high in middles for gap in ((low, middle), (middle, high))]
    return depth


class PresetOrder:
    """What a careful user does by hand: the default point, then each of the vendor's presets, and no more.

    Where there are no presets, every level of the power limit alone, the highest first; where there is no power limit
    either, every level of the GPU clock alone.

    Args:
        presets: The vendor's named points; those outside the space are passed over.
    """

    def __init__(self, presets: Sequence[OperatingPoint] = ()) -> None:
        self._presets = tuple(presets)

    def suggest(self, study: Study) -> OperatingPoint:
        """Return the default point, then the first preset that has not been tried.

        Raises:
            Exhausted: If all have been tried.
        """
        space = study.problem.space
        named = [point for point in self._presets if point in space] or _alone(space)
        for point in (space.default, *named):
            if point not in study.visited and study.reachable(point):
                return point
        raise Exhausted(f"all {len(set(named) | {space.default})} presets have been tried")


def _alone(space: SearchSpace) -> list[OperatingPoint]:
    """Return every level of the one knob that presets turn, with all else at the default, the highest level first."""
    limits = [knob for knob in space.knobs if knob.name.endswith("_w")]
    clocks = [knob for knob in space.knobs if _steers_the_gpu(knob)]
    points = [space.default.moved({knob.name: level}) for knob in (limits or clocks)[:1] for level in knob.levels]
    return [point for point in reversed(points) if point in space]


def _steers_the_gpu(knob: Knob) -> bool:
    return knob.name.startswith("gpu_") and knob.is_clock and "_min_" not in knob.name


# Gradient-descent multi-dimensional search in the manner of Fulcrum's GMD (arXiv 2509.20205): a rival without a
# model.
#
# From the incumbent it measures, along each ordered knob in turn, the point half the remaining way towards the end
# that last helped; the knob whose step saved most energy within the limits is followed further, and steps that do not
# help are halved. Fulcrum reports about 15 profiled modes; its text is not public, so this is the idea, not its code.


class GradientSearch:
    """Coordinate steps from the incumbent, halved when they do not help."""

    def suggest(self, study: Study) -> OperatingPoint:
        """Return the default point, then the next step from the best point so far.

        Raises:
            Exhausted: If every point has been tried.
        """
        space = study.problem.space
        rows = remaining_rows(study)
        if space.default not in study.visited:
            return space.default
        unit = coordinates(space).unit
        start = unit[space.index(_incumbent(study).point)]
        tried = unit[[space.index(trial.point) for trial in study.trials]]
        targets = [_target(start, tried, column, sign) for column in range(unit.shape[1]) for sign in (-1.0, 1.0)]
        reach = [abs(target - start).max() for target in targets]
        target = start
        if targets:
            target = targets[int(np.argmax(reach))]
        return space[int(rows[np.argmin(np.square(unit[rows] - target).sum(axis=1))])]


def _incumbent(study: Study) -> Trial:
    """Return the best trial, or the one that breaks its limits least, or the first."""
    return study.best or study.closest or study.trials[0]


def _target(start: np.ndarray, tried: np.ndarray, column: int, sign: float) -> np.ndarray:
    """Return the point half-way along one axis between the incumbent and the nearest tried point or the end."""
    others = np.delete(tried, column, axis=1)
    same_line = np.isclose(others, np.delete(start, column), atol=1e-9).all(axis=1)
    ahead = sign * (tried[same_line, column] - start[column])
    end = (1.0 - start[column]) if sign > 0 else start[column]
    blocked = ahead[ahead > 1e-9]
    reach = float(blocked.min()) / 2 if len(blocked) else end / 2
    target: np.ndarray = start.copy()
    target[column] += sign * reach
    return target


# Optuna's samplers as rivals, with its own handling of constraints; Optuna is a development dependency.
#
# A sampler sees each knob as the index of its level. What it asks for is moved to the nearest point of the space that
# has not been tried, because its boxes know neither dependent knobs nor recorded rows nor repeats.


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
        space = study.problem.space
        rows = remaining_rows(study)
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
        if knob.ordered:
            found[knob.name] = optuna.distributions.IntDistribution(0, last)
        else:
            found[knob.name] = categories
    return found


def _told(
    study: Study, trial: Trial, distributions: "dict[str, optuna.distributions.BaseDistribution]"
) -> "optuna.trial.FrozenTrial":
    import optuna

    assert trial.measurement is not None
    space = study.problem.space
    measurement = trial.measurement
    return optuna.trial.create_trial(
        value=study.problem.objective.of(measurement),
        params={knob.name: knob.levels.index(trial.point[knob.name]) for knob in space.knobs},
        distributions=distributions,
        constraints={str(constraint): -constraint.slack(measurement) for constraint in study.constraints},
    )


def _unit_of(space: SearchSpace, asked: dict[str, int]) -> np.ndarray:
    """Return the unit coordinates of a point that need not be in the space, shape (columns,)."""
    wanted = np.array([asked[knob.name] for knob in space.knobs])
    unit = coordinates(space).unit
    columns = []
    start = 0
    for place, knob in enumerate(space.knobs):
        width = len(knob.levels)  # names have a column each
        if knob.ordered:
            width = 1
        if len(knob.levels) == 1:
            width = 0
        same = np.flatnonzero(space.rows[:, place] == wanted[place])
        if not len(same):
            raise InvalidInput(f"no point of the space has level {wanted[place]} of {knob.name}")
        columns.append(unit[same[0], start : start + width])
        start += width
    if columns:
        return np.concatenate(columns)
    return np.zeros(0)


# The search of the PolyThrottle paper (arXiv 2310.19991, §3): the yardstick, kept as published.
#
# Five random starts, then constrained expected improvement (Gardner et al. 2014): EI(x) · P[feasible](x) with ξ =
# 0.1, on Gaussian processes of energy and latency. In two phases where a space has CPU knobs: first the GPU, memory
# and batch knobs with the CPU at its default, then the CPU knobs at the best point found. What the paper leaves open
# is filled with what is usual: Matérn-5/2 with one length scale per knob, fitted by maximum likelihood with BoTorch's
# defaults; ξ in standard deviations of the energies seen; 15 trials for the first phase, the number the paper says it
# needs.

STARTS = 5
FIRST_PHASE = 15


class PaperSearch:
    """Constrained Bayesian optimisation as PolyThrottle published it.

    Args:
        phases: 2 to tune the CPU knobs apart, as published; 1 to search all knobs jointly.
    """

    def __init__(self, phases: int = 2) -> None:
        self._phases = phases

    def suggest(self, study: Study) -> OperatingPoint:
        """Return a random point five times, then the point of greatest constrained expected improvement.

        Raises:
            Exhausted: If every point has been tried.
        """
        space = study.problem.space
        rows = remaining_rows(study)
        if self._phases == 2:
            rows = _phase(study, rows)
        if len(study.completed) < STARTS:
            return space[int(generator(study).choice(rows))]
        return space[int(rows[np.argmax(_worth(study)[rows])])]


def _phase(study: Study, rows: Rows) -> Rows:
    """Return the rows of the present phase; all that are left once both phases are exhausted."""
    space = study.problem.space
    cpu = [name for name in space.names if name.startswith("cpu")]
    others = [name for name in space.names if name not in cpu]
    if not cpu or not others:
        return rows
    best = space.default
    if study.best is not None:
        best = study.best.point
    first = _keeping(space, rows, cpu, space.default)
    second = _keeping(space, rows, others, best)
    if len(first) and len(study.trials) < FIRST_PHASE:
        return first
    if len(second):
        return second
    return rows


def _keeping(space: SearchSpace, rows: Rows, names: Sequence[str], point: OperatingPoint) -> Rows:
    """Return those rows at which the named knobs have the levels they have at a point."""
    keep = np.ones(len(rows), dtype=bool)
    for name in names:
        column = space.names.index(name)
        keep &= space.rows[rows, column] == space.knobs[column].levels.index(point[name])
    return rows[keep]


def _worth(study: Study) -> NDArray[np.float64]:
    """Return EI × P(feasible) at every point, shape (points,)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from polythrottle.optimize.acquisition_value import constrained_improvement  # loads torch

        space = study.problem.space
        seen = [trial for trial in study.completed if trial.measurement is not None]
        rows = np.array([space.index(trial.point) for trial in seen])
        slacks = np.array([[one.slack(m) for one in study.constraints] for m in _measured(seen)]).reshape(len(seen), -1)
        energies = np.array([study.problem.objective.of(m) for m in _measured(seen)])
        return constrained_improvement(coordinates(space).unit, rows, energies, slacks, study.seed)


def _measured(trials: Sequence[Trial]) -> list[Measurement]:
    return [trial.measurement for trial in trials if trial.measurement is not None]
