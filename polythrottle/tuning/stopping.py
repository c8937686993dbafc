"""When a search ends: what it may use, and when going on is not worth it."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

from polythrottle.domain.errors import InvalidInput
from polythrottle.domain.ports import Forecaster, Optimizer, RiskBound, Wary
from polythrottle.domain.study import ENOUGH, Cost, Daring, Study, Trial
from polythrottle.domain.units import show, show_span
from polythrottle.optimize.features import hopeless, untried_rows

WORTHLESS = 0.0003
WORTHLESS_BY_CHANCE = 0.001
"""Where windows tell the energy to 2 %, less is not to be found (``benchmarks/search.md``)."""
BY_FAR = 1.25
"""A point that took so many times its limit rules out all that physics says are no faster; less may be chance, or a
board that was hot for a while."""
IDLE = 10
WORTHLESS_IDLE = 0.003
CORNERED = 4
"""So many completed trials are enough to end a search whose every next one would be likely to break a limit."""
NOTHING_LEFT = "nothing more to gain"
ALL_TRIED = "all points tried"


@dataclass(frozen=True)
class Budget:
    """What a study may use in all; a trial or preset is begun only while nothing of it is used up.

    Args:
        trials: Visits of the search, whatever comes of them.
        duration_s: Time on the device's clock; None for no bound.
        energy_j: Energy, within the device's boundary; None for no bound.

    Raises:
        InvalidInput: If there is no trial, or a bound is not positive and finite.
    """

    trials: int = 30
    duration_s: float | None = None
    energy_j: float | None = None

    def __post_init__(self) -> None:
        if self.trials < 1:
            raise InvalidInput(f"a study needs at least 1 trial, not {self.trials}")
        for word, bound in (("time", self.duration_s), ("energy", self.energy_j)):
            if bound is not None and not 0 < bound < math.inf:
                raise InvalidInput(f"a budget of {word} must be above zero and finite, not {bound:g}")

    def used(self, study: Study) -> str | None:
        """Return what of the budget the trials of a study have used up, in words; None if it may go on."""
        if len(study.trials) >= self.trials:
            return f"{self.trials} trial{'s' * (self.trials > 1)} made"
        return self.spent(study.cost)

    def spent(self, cost: Cost) -> str | None:
        """Return what of the time and energy is used up by a cost, in words; None if nothing is."""
        if self.duration_s is not None and cost.duration_s >= self.duration_s:
            return f"{show_span(self.duration_s)} used"
        if self.energy_j is not None and cost.energy_j >= self.energy_j:
            return f"{show(self.energy_j, 'J')} used"
        return None


@dataclass(frozen=True)
class Rule:
    """When one more trial is not worth it.

    With a horizon: when all it is expected to save, over all items served until then, is less than it costs. Without:
    when it is expected to save less than `WORTHLESS` of the objective (`WORTHLESS_BY_CHANCE` where windows differ by
    chance), twice in a row, and `ENOUGH` were completed;
    `WORTHLESS_IDLE` is enough once `IDLE` trials were no better than the best, as where nothing matters but noise, and
    at once where that trial would be likely to break a limit: to make sure is not worth a risk; and after `CORNERED`
    completed trials where any other would be too. Neither holds while no feasible point is known; then a search ends
    only where physics leaves no point that may hold the limits (`BY_FAR`).

    Args:
        horizon_s: How long the profile will be used, in seconds; None if nobody said.
        early: Whether to stop for this reason at all.

    Raises:
        InvalidInput: If the horizon is not positive and finite, or is given although it shall not count.
    """

    horizon_s: float | None = None
    early: bool = True

    def __post_init__(self) -> None:
        if self.horizon_s is not None and not 0 < self.horizon_s < math.inf:
            raise InvalidInput(f"a horizon must be above zero and finite, not {self.horizon_s:g} s")
        if self.horizon_s is not None and not self.early:
            raise InvalidInput("a horizon says when to stop early; leave --horizon or --no-early-stop out")

    def reason(
        self,
        study: Study,
        saving_left: Callable[[Study], float],
        dares: Callable[[Study], Daring] = lambda study: Daring.NOTHING,
        held_back: Callable[[Study], str] = lambda study: "",
    ) -> str | None:
        """Return why a study should not go on, in words; None if it should.

        Args:
            study: Between two trials.
            saving_left: What one more trial is expected to save, in joules per item; see `Forecaster`.
            dares: What of what is left is likely to break a limit; see `Wary`.
            held_back: That only a user's own risk keeps it from more, in words; see `RiskBound`.
        """
        if not self.early or not study.judgeable:
            return None
        if study.best is None:
            return _out_of_reach(study)
        if self.horizon_s is None:
            reason = self._flat(study, saving_left, dares)
        else:
            reason = self._unpaid(study, saving_left)
        # Where the rest is not safe enough to look at, nobody knows that there is nothing to gain.
        return (held_back(study) or reason) if reason else None

    def _flat(
        self, study: Study, saving_left: Callable[[Study], float], dares: Callable[[Study], Daring]
    ) -> str | None:
        few = len(study.completed) < ENOUGH
        if len(study.completed) < CORNERED or (few and dares(study) is not Daring.ALL):
            return None
        share = _share(study, saving_left)
        worthless = WORTHLESS_BY_CHANCE if study.by_chance else WORTHLESS
        if _idle(study) >= IDLE:
            worthless = WORTHLESS_IDLE
        # Asked of the study one trial earlier too: one forecast alone is as noisy as the model behind it.
        flat = share < worthless and _share(_before(study), saving_left) < worthless
        if not flat and not (share < WORTHLESS_IDLE and dares(study)):
            return None
        return f"{NOTHING_LEFT}: one more trial would save {_percent(share)} of the {study.problem.objective.words}"

    def _unpaid(self, study: Study, saving_left: Callable[[Study], float]) -> str | None:
        costs_j = [trial.cost.energy_j for trial in study.trials if trial.cost is not None]
        best = study.best
        if not costs_j or self.horizon_s is None or best is None or best.measurement is None:
            return None
        items = self.horizon_s * best.measurement.throughput_per_s
        saved_j = saving_left(study) * items
        # The next trial is taken to cost what the trials before it did on average.
        cost_j = sum(costs_j) / len(costs_j)
        # Not >=, so that a forecast that is not a number goes on.
        if not saved_j < cost_j:
            return None
        span = show_span(self.horizon_s)
        return f"{NOTHING_LEFT}: within {span} one more trial would save {_ratio(saved_j, cost_j)} of its cost"


@runtime_checkable
class Surveyor(Protocol):
    """A search method that can say how much better than its answer some other point may be."""

    def most_left(self, study: Study, answer: Trial) -> float:
        """Return which share of the answer's objective another point may save at most; NaN if unknown.

        At most, that is at nineteen of twenty ends of searches. Pure as a suggestion is.
        """


class Outlook:
    """What a search method expects one more trial to save, asked once for each length of a study, and to risk.

    Args:
        optimizer: If it is a `Forecaster`, `Wary` and `RiskBound`; of any other nothing is known.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._forecaster = optimizer if isinstance(optimizer, Forecaster) else None
        self._wary = optimizer if isinstance(optimizer, Wary) else None
        self._bound = optimizer if isinstance(optimizer, RiskBound) else None
        self._known: dict[int, float] = {}

    def saving_left(self, study: Study) -> float:
        """Return the joules per item that one more trial is expected to save; inf if unknown."""
        if self._forecaster is None:
            return math.inf
        # Each forecast is needed twice: now, and after the next trial as the one before it.
        count = len(study.trials)
        if count not in self._known:
            self._known[count] = self._forecaster.saving_left(study)
        return self._known[count]

    def dares(self, study: Study) -> Daring:
        """Return what of what is left is likely to break a limit; nothing if unknown."""
        if self._wary is None:
            return Daring.NOTHING
        return self._wary.dares(study)

    def held_back(self, study: Study) -> str:
        """Return what only the user's own risk keeps the method from, in words; empty if nothing or unknown."""
        if self._bound is None:
            return ""
        return self._bound.held_back(study)


def with_most_left(reason: str, optimizer: Optimizer, study: Study, answer: Trial | None) -> str:
    """Return why a study ends, and how much may be left at most where its method can tell.

    Args:
        reason: In words.
        optimizer: The method; see `Surveyor`.
        study: At its end.
        answer: Its answer, if it has one.
    """
    untried = len(study.visited) < len(study.problem.space)
    # Of fewer trials a model knows its own prior and little else.
    if answer is None or not untried or len(study.completed) < CORNERED or not isinstance(optimizer, Surveyor):
        return reason
    share = optimizer.most_left(study, answer)
    if math.isnan(share):
        return reason
    return f"{reason}; at most {said_at_most(share)} % is left to save, likely less"


def said_at_most(share: float) -> int:
    """Return a bound as it is said: in whole percent, rounded up, and 1 at least."""
    return max(1, math.ceil(100.0 * share))


def is_conclusive(reason: str | None) -> bool:
    """Return whether a study ended because there was nothing left to find, and not because a budget was used."""
    return reason is not None and reason.startswith((NOTHING_LEFT, ALL_TRIED))


def _out_of_reach(study: Study) -> str | None:
    """Return in words that physics leaves no point that may hold the limits; None if some may."""
    timed = [each for each in study.constraints if each.timed]
    if not timed or not len(rows := untried_rows(study)) or not hopeless(study, BY_FAR)[rows].all():
        return None
    limits = " and ".join(str(each) for each in timed)
    return f"no point left can hold {limits}: each is at most as fast as one that missed that by a quarter"


def _share(study: Study, saving_left: Callable[[Study], float]) -> float:
    """Return the share of the best trial's objective that one more trial is expected to save; inf if unknown."""
    best = study.best
    if best is None or best.measurement is None or math.isnan(left := saving_left(study)):
        return math.inf
    return left / study.problem.objective.of(best.measurement)


def _idle(study: Study) -> int:
    """Return how many trials there were since the best."""
    if study.best is None:
        return 0
    return len(study.trials) - 1 - study.best.number


def _before(study: Study) -> Study:
    return replace(study, trials=study.trials[:-1])


def _percent(share: float) -> str:
    if share <= 0:
        return "nothing"
    # No smaller: two digits of less than that read as 1e-05.
    return f"{max(100 * share, 0.001):.2g} %"


def _ratio(saved_j: float, cost_j: float) -> str:
    if saved_j <= 0:
        return "nothing"
    return f"{max(100 * saved_j / cost_j, 0.01):.2g} %"
