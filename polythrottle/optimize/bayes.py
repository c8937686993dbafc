"""Constrained Bayesian optimisation over a finite space: expected improvement times probability of feasibility.

Capped by risk.
"""

import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from polythrottle.domain.errors import Exhausted, InvalidInput
from polythrottle.domain.problem import Constraint, Objective, Problem
from polythrottle.domain.space import OperatingPoint
from polythrottle.domain.study import ENOUGH, Daring, Study, Trial, TrialState
from polythrottle.optimize.features import (
    Array,
    Rows,
    distinct_rows,
    generator,
    hopeless,
    remaining_rows,
    untried_rows,
)
from polythrottle.optimize.options import Ingredient, Options

if TYPE_CHECKING:
    from polythrottle.optimize.acquisition_value import AcquisitionValue

# Which point is tried next, given what a trial at each is worth: worth, capped by risk.

RISKS = (0.2, 0.5, 0.8)
"""How likely a trial may be to break a limit, unless the user says: the first cap within which something is left."""
SHARES = (0.05, 0.2, 0.5, 1.0)
"""Of the risk that is left of what a user allows to a whole search, one trial may use the first of these shares within
which something is left; beyond the first only for what is worth it."""
WORTHWHILE = 0.005
"""A cap leaves something if a trial within it is expected to save this share of the energy."""
WORTH_DARING = 0.003
"""Nor is a trial beyond every cap made for less than this share while a search is too young to end: one within is."""
NO_CHANCE = 0.02
"""While nothing that holds is known, models that give no point more than this to hold have nothing to say."""
LOOKS = 3
"""Windows at one point at most, where one does not tell whether it holds."""
_CERTAIN = 0.999
_LEAST_RISK = 1e-9
_TIE = 0.03
"""Points worth less than a thirtieth below the best count as equals: the models are not surer than that."""


def best_rows(worth: "AcquisitionValue", rows: Rows, options: Options, used: float = 0.0, *, few: bool = False) -> Rows:
    """Return the rows that are worth most, given the risk a trial may take, ascending.

    Args:
        worth: Of every point.
        rows: Those that have not been tried, at least one.
        options: The risk; without one the caps of `RISKS` are opened one after the other.
        used: What earlier trials have used of the user's own risk.
        few: Whether the search goes on only because too few trials were completed to end it.

    Raises:
        Exhausted: If the user's own risk leaves no row.
    """
    allowed = _within(worth, rows, options, used, few)
    total = np.nan_to_num(worth.total[allowed], nan=-np.inf)
    if options.risk is not None and worth.improving:
        # Of what is to be paid for with risk, what gains most for it.
        chance = -np.expm1(np.minimum(worth.assured[allowed], 0.0))
        total = total - np.log(np.maximum(chance, SHARES[0] * max(options.risk - used, _LEAST_RISK)))
    best: Rows = allowed[total >= total.max() - _TIE]
    return best


def beyond_caps(worth: "AcquisitionValue", rows: Rows) -> Daring:
    """Return what is likelier to break a limit than the last of `RISKS`.

    Args:
        worth: Of every point.
        rows: Those that have not been tried, at least one.
    """
    total = np.nan_to_num(worth.total[rows], nan=-np.inf)
    within = _below(RISKS[-1], worth.feasible, rows)
    if not len(within):
        return Daring.ALL
    if worth.total[within].max() > math.log(WORTHWHILE):
        return Daring.NOTHING
    if len(_below(RISKS[-1], worth.feasible, rows[total >= total.max()])):
        return Daring.NOTHING
    return Daring.GAIN


def _within(worth: "AcquisitionValue", rows: Rows, options: Options, used: float, few: bool) -> Rows:
    """Return the rows a trial may go to: all while nothing feasible is known, those within the risk after that."""
    if not worth.improving or Ingredient.CAP in options.without:
        return rows
    if options.risk is None:
        return _promising(worth, rows, RISKS, worth.feasible, few)
    allowed = safe_rows(worth, rows, options.risk, used)
    if not len(allowed):
        told = f"no point left is safe enough to try at a risk of {options.risk:g}"
        raise Exhausted(told + _beyond(worth, rows, used))
    return _promising(worth, allowed, [share * (options.risk - used) for share in SHARES], worth.assured)


def safe_rows(worth: "AcquisitionValue", rows: Rows, risk: float, used: float) -> Rows:
    """Return the rows that what is left of a user's risk allows: any at next to none, others if they are worth it.

    Args:
        worth: Of every point.
        rows: Those that have not been tried.
        risk: What the whole search may have.
        used: What earlier trials have used of it.
    """
    left = max(risk - used, 0.0)
    cheap = worth.assured[rows] >= math.log1p(-SHARES[0] * left)
    dear = worth.assured[rows] >= math.log1p(-min(left, _CERTAIN))
    kept: Rows = rows[cheap | (dear & (worth.total[rows] > math.log(WORTHWHILE)))]
    return kept


def _beyond(worth: "AcquisitionValue", rows: Rows, used: float) -> str:
    """Return in words which risk would have allowed the safest of some rows that is worth it; empty if none would."""
    worthy = rows[worth.total[rows] > math.log(WORTHWHILE)]
    if not len(worthy):
        return ", and none seems worth more"
    needed = used - math.expm1(min(float(worth.assured[worthy].max()), 0.0))
    if needed >= 1.0:
        return ""
    return f"; the safest that is worth it would be at --risk {math.ceil(1000.0 * needed - 1e-6) / 1000.0:g}"


def _promising(
    worth: "AcquisitionValue", rows: Rows, risks: Sequence[float], feasible: Array, few: bool = False
) -> Rows:
    """Return the rows within the first cap that leaves something to gain; if none does, all that it is worth to dare.

    Args:
        worth: Of every point.
        rows: Those that a trial may go to.
        risks: The caps.
        feasible: Of which chances to hold every limit they are.
        few: As for `best_rows`.
    """
    for risk in risks:
        within = _below(risk, feasible, rows)
        if len(within) and worth.total[within].max() > math.log(WORTHWHILE):
            return within
    if few and worth.total[rows].max() <= math.log(WORTH_DARING):
        return next((within for risk in risks if len(within := _below(risk, feasible, rows))), rows)
    return rows


def _below(risk: float, feasible: Array, rows: Rows) -> Rows:
    """Return the rows whose chance to break a limit is at most a risk, given log probabilities to hold them all."""
    kept: Rows = rows[feasible[rows] >= math.log1p(-risk)]
    return kept


# How much of the risk that a whole search may take was used.


class Account:
    """What each trial of a study was given as its chance to break a limit, when it was begun.

    Nothing is kept that does not follow from the study: what is not remembered is worked out again.

    Args:
        chance: Of a trial, given the study before it; None while no feasible point was known.
    """

    def __init__(self, chance: Callable[[Study, Trial], float | None]) -> None:
        self._chance = chance
        self._known: list[tuple[Trial, float]] = []
        self._of: tuple[Problem, int] | None = None

    def used(self, study: Study) -> float:
        """Return the sum of those chances, which is at least the chance that one of the trials breaks a limit."""
        if self._of is None or self._of[0] is not study.problem or self._of[1] != study.seed:
            self._of = (study.problem, study.seed)
            self._known = []
        pairs = zip(self._known, study.trials, strict=False)
        same = next((number for number, (known, trial) in enumerate(pairs) if known[0] != trial), None)
        if same is not None:
            del self._known[same:]
        for number in range(len(self._known), len(study.trials)):
            before = replace(study, trials=study.trials[:number])
            self._known.append((study.trials[number], self._chance(before, study.trials[number]) or 0.0))
        return sum(chance for _, chance in self._known[: len(study.trials)])


# Constrained Bayesian optimisation over a finite space: expected improvement × probability of feasibility.
#
# After Gardner et al. 2014 (ICML), with energy per item modelled as power × time per item and every point of the
# space scored. A suggestion is a function of the study alone.


class ConstrainedBayes:
    """Constrained Bayesian optimisation, from the default point on.

    Args:
        options: Earlier studies to learn from, the risk a trial may take, and ingredients to leave out.
    """

    def __init__(self, options: Options | None = None) -> None:
        self._options = options or Options()
        self._newest: tuple[Study, AcquisitionValue] | None = None
        self._account = Account(self._chance)

    def suggest(self, study: Study) -> OperatingPoint:
        """Return the default point, then the point whose trial is worth most; the seed chooses between equals.

        Raises:
            Exhausted: If every point has been tried, or none that is left is within the risk that was asked for.
            InvalidInput: If a constraint is on a quantity that is not measured here.
        """
        space = study.problem.space
        rows = remaining_rows(study)
        if space.default not in study.visited:
            return space.default
        if len(rows) == 1 and self._options.risk is None:
            return space[int(rows[0])]
        used = self._used(study)  # first, while what the last trial was begun with is remembered
        few = len(study.completed) < ENOUGH
        if len(worthy := self._rows(study)):
            rows = worthy
        worth = self._worth(study)
        if study.judgeable and not worth.improving:
            rows = _hopeful(study, rows, worth.feasible)
        best = best_rows(worth, rows, self._options, used, few=few)
        return space[int(generator(study).choice(best))]

    def saving_left(self, study: Study) -> float:
        """Return what one more trial is expected to take off the objective; inf while that is unknown or a front."""
        best = study.best
        rows = self._rows(study)
        objective = study.problem.objective
        if best is None or best.measurement is None or objective is Objective.PARETO:
            return math.inf
        if not len(rows):
            return 0.0
        used = self._used(study)
        worth = self._worth(study)
        if not worth.improving:
            return math.inf
        if self._options.risk is not None:
            rows = safe_rows(worth, rows, self._options.risk, used)
        if not len(rows):
            return math.inf  # the next suggestion says so
        return objective.of(best.measurement) * math.exp(min(float(np.nanmax(worth.total[rows])), 0.0))

    def most_left(self, study: Study, answer: Trial) -> float:
        """Return which share of an answer's objective another point may save at most; NaN if unknown or a front."""
        problem = study.problem
        # The models know the space alone, and a trial that was told from elsewhere may lie beside it.
        if problem.objective is Objective.PARETO or not study.judgeable or answer.point not in problem.space:
            return math.nan
        with _quiet():
            from polythrottle.optimize.acquisition_value import most_left  # loads torch

            return most_left(study, answer, self._options)

    def dares(self, study: Study) -> Daring:
        """Return what of what is left is beyond every cap on risk."""
        rows = self._rows(study)
        if not len(rows) or not (worth := self._worth(study)).improving or self._options.risk is not None:
            return Daring.NOTHING
        return beyond_caps(worth, rows)

    def held_back(self, study: Study) -> str:
        """Return in words that the risk asked for leaves nothing worth a trial though something is; empty if not so."""
        rows = _distinct(study, untried_rows(study))
        if not len(rows) or self._options.risk is None or not (worth := self._worth(study)).improving:
            return ""
        used = self._used(study)
        beyond = np.setdiff1d(rows, safe_rows(worth, rows, self._options.risk, used))
        if not np.any(worth.total[beyond] > math.log(WORTHWHILE)):
            return ""
        return f"what is safe enough at a risk of {self._options.risk:g} gains nothing{_beyond(worth, beyond, used)}"

    def answer(self, study: Study) -> Trial | None:
        """Return the trial whose point is best as the models have it; None if no trial holds every limit.

        Of windows that differ by chance the luckiest is rarely at the best point. What is on record, which has no
        intervals, does not: there it is the least figure.

        Raises:
            InvalidInput: If a relative limit has nothing to multiply.
        """
        held = {trial.point for trial in study.completed if study.feasible(trial)}
        if len(held) < 2 or not study.by_chance:
            return study.best
        with _quiet():
            from polythrottle.optimize.acquisition_value import best_visited  # loads torch

            return best_visited(study, self._options)

    def _rows(self, study: Study) -> Rows:
        """Return the rows a trial may go to: those that were not tried, and those to be looked at once more."""
        untried = _distinct(study, untried_rows(study))
        if self._options.risk is not None or not study.by_chance or not (worth := self._worth(study)).improving:
            return untried
        # Where windows differ by chance, one may leave open whether its point holds, and only another can tell.
        space = study.problem.space
        inside = [trial for trial in study.trials if trial.point in space]
        busy = {trial.point for trial in inside if trial.state is TrialState.RUNNING}
        told = [one.point for one in inside if one.measurement is not None and not one.measurement.censored]
        again = [space.index(point) for point, looks in Counter(told).items() if looks < LOOKS and point not in busy]
        return np.union1d(untried, np.array([row for row in again if not worth.sure[row]], dtype=np.intp))

    def _used(self, study: Study) -> float:
        """Return how much of the user's own risk the trials of a study have used; 0 without one."""
        if self._options.risk is None:
            return 0.0
        return self._account.used(study)

    def _chance(self, before: Study, trial: Trial) -> float | None:
        """Return the chance to break a limit that a trial had when it was begun; None if nothing feasible was known."""
        space = before.problem.space
        if trial.point not in space or trial.point in before.visited or before.best is None:
            return None
        worth = self._worth(before)
        if not worth.improving:
            return None
        return -math.expm1(min(float(worth.assured[space.index(trial.point)]), 0.0))

    def _worth(self, study: Study) -> "AcquisitionValue":
        """Return what a trial at each point is worth; remembered, because a study is asked about more than once."""
        if self._newest is None or not _same(self._newest[0], study):
            self._newest = study, _appraise(study, self._options)
        return self._newest[1]


def _distinct(study: Study, rows: Rows) -> Rows:
    """Return the rows a trial may go to: on record each is a figure of its own, as much as it resembles another."""
    if not study.by_chance:
        return rows
    return distinct_rows(study, rows)


def _hopeful(study: Study, rows: Rows, feasible: Array) -> Rows:
    """Return the rows that may be faster than every point that was too slow, as nothing that holds is known.

    Where the models give none of them a chance they would go where they know least, and so to the slowest of all.

    Args:
        study: Whose limits no trial holds.
        rows: Those that a trial may go to.
        feasible: The log probability of each point to hold every limit.

    """
    if not any(each.timed for each in study.constraints):
        return rows
    hopeful = rows[~hopeless(study)[rows]]
    if len(hopeful) and feasible[hopeful].max() >= math.log(NO_CHANCE):
        return hopeful
    if not len(hopeful):
        hopeful = rows
    with _quiet():
        from polythrottle.optimize.safety import slowed  # loads torch

        longer = slowed(study)[hopeful]
    least: Rows = hopeful[longer <= longer.min() + _TIE]
    return least


def _same(one: Study, other: Study) -> bool:
    """Return whether two studies of one problem have come equally far."""
    return one is other or (one.problem is other.problem and one.seed == other.seed and one.trials == other.trials)


def _appraise(study: Study, options: Options) -> "AcquisitionValue":
    """Return what a trial at each point is worth."""
    with _quiet():
        from polythrottle.optimize.acquisition_value import acquisition_value  # loads torch

        return acquisition_value(study, _constraints(study), options)


@contextmanager
def _quiet() -> Iterator[None]:
    """Hold warnings back.

    The import of gpytorch uses deprecated parts of torch, and the models' inputs are not scaled the way BoTorch advises
    because they have units.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _constraints(study: Study) -> tuple[Constraint, ...]:
    """Return the constraints with absolute limits; those that wait for the default's trial do not count yet."""
    try:
        return study.constraints
    except InvalidInput:
        return tuple(constraint for constraint in study.problem.constraints if not constraint.relative)
