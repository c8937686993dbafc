"""When a search ends: what it may use, and when going on is not worth it."""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace

from polythrottle.errors import InvalidInput
from polythrottle.ports import Forecaster, Optimizer, Wary
from polythrottle.study import ENOUGH, Study
from polythrottle.units import show

WORTHLESS, IDLE, WORTHLESS_IDLE = 0.0003, 10, 0.003
NOTHING_LEFT, ALL_TRIED = "nothing more to gain", "all points tried"
_SPANS = {"s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86_400.0, "w": 604_800.0}
_SPAN = re.compile(r"\s*(\d{1,12}\.?\d{0,12}|\.\d{1,12})\s*(s|min|m|h|d|w)\s*")


@dataclass(frozen=True)
class Budget:
    """What a search may use in all; a trial is begun only while nothing of it is used up.

    Args:
        trials: Visits, whatever comes of them.
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
        """Return what of the budget a study has used up, in words; None if it may go on."""
        cost = study.cost
        if len(study.trials) >= self.trials:
            return f"{self.trials} trial{'s' * (self.trials > 1)} made"
        if self.duration_s is not None and cost.duration_s >= self.duration_s:
            return f"{show_span(self.duration_s)} used"
        if self.energy_j is not None and cost.energy_j >= self.energy_j:
            return f"{show(self.energy_j, 'J')} used"
        return None


@dataclass(frozen=True)
class Rule:
    """When one more trial is not worth it.

    With a horizon: when all it is expected to save, over all items served until then, is less than it costs. Without:
    when it is expected to save less than `WORTHLESS` of the objective, twice in a row, and `ENOUGH` were completed;
    `WORTHLESS_IDLE` is enough once `IDLE` trials were no better than the best, as where nothing matters but noise, and
    at once where that trial would be likely to break a limit: to make sure is not worth a risk.
    Neither holds while no feasible point is known.

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
        dares: Callable[[Study], bool] = lambda study: False,
    ) -> str | None:
        """Return why a study should not go on, in words; None if it should.

        Args:
            study: Between two trials.
            saving_left: What one more trial is expected to save, in joules per item; see `Forecaster`.
            dares: Whether that trial is likely to break a limit; see `Wary`.
        """
        if not self.early or not study.judgeable or study.best is None:
            return None
        return self._flat(study, saving_left, dares) if self.horizon_s is None else self._unpaid(study, saving_left)

    def _flat(self, study: Study, saving_left: Callable[[Study], float], dares: Callable[[Study], bool]) -> str | None:
        if len(study.completed) < ENOUGH:
            return None
        share = _share(study, saving_left)
        worthless = WORTHLESS_IDLE if _idle(study) >= IDLE else WORTHLESS
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
        saved_j, cost_j = saving_left(study) * items, sum(costs_j) / len(costs_j)
        if not saved_j < cost_j:
            return None
        span = show_span(self.horizon_s)
        return f"{NOTHING_LEFT}: within {span} one more trial would save {_ratio(saved_j, cost_j)} of its cost"


class Outlook:
    """What a search method expects one more trial to save, asked once for each length of a study, and to risk.

    Args:
        optimizer: If it is a `Forecaster`, and `Wary`; of any other nothing is known.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._forecaster = optimizer if isinstance(optimizer, Forecaster) else None
        self._wary = optimizer if isinstance(optimizer, Wary) else None
        self._known: dict[int, float] = {}

    def saving_left(self, study: Study) -> float:
        """Return the joules per item that one more trial is expected to save; inf if unknown."""
        if self._forecaster is None:
            return math.inf
        count = len(study.trials)
        if count not in self._known:
            self._known[count] = self._forecaster.saving_left(study)
        return self._known[count]

    def dares(self, study: Study) -> bool:
        """Return whether the next trial is likely to break a limit; False if unknown."""
        return self._wary is not None and self._wary.dares(study)


def is_conclusive(reason: str | None) -> bool:
    """Return whether a study ended because there was nothing left to find, and not because a budget was used."""
    return reason is not None and reason.startswith((NOTHING_LEFT, ALL_TRIED))


def span_s(text: str) -> float:
    """Return a span of time such as ``30d``, ``12h``, ``90m`` or ``2w`` in seconds.

    Raises:
        InvalidInput: If it is not one.
    """
    match = _SPAN.fullmatch(text)
    if match is None or float(match[1]) == 0:
        raise InvalidInput(f"{text[:40]!r} is not a span of time; write for example 30d, 12h, 90m or 2w")
    return float(match[1]) * _SPANS[match[2]]


def show_span(duration_s: float) -> str:
    """Return a span of time as people write it: ``2592000`` gives ``30 days``."""
    word = next((word for word in ("day", "hour", "minute") if duration_s >= _SPANS[word[0]]), "second")
    count = f"{duration_s / _SPANS[word[0]]:.3g}"
    return f"{count} {word}{'s' * (count != '1')}"


def _share(study: Study, saving_left: Callable[[Study], float]) -> float:
    """Return the share of the best trial's objective that one more trial is expected to save; inf if unknown."""
    best = study.best
    if best is None or best.measurement is None or math.isnan(left := saving_left(study)):
        return math.inf
    return left / study.problem.objective.of(best.measurement)


def _idle(study: Study) -> int:
    """Return how many trials there were since the best."""
    return 0 if study.best is None else len(study.trials) - 1 - study.best.number


def _before(study: Study) -> Study:
    return replace(study, trials=study.trials[:-1])


def _percent(share: float) -> str:
    return "nothing" if share <= 0 else f"{max(100 * share, 0.001):.2g} %"


def _ratio(saved_j: float, cost_j: float) -> str:
    return "nothing" if saved_j <= 0 else f"{max(100 * saved_j / cost_j, 0.01):.2g} %"
