"""Watts between services: which rung each of them may stand on so that all together stay within a budget, exactly.

Each service offers options: the most that it can draw on one, and what that costs. One option of each is to be chosen
whose most draws together fit the budget and whose costs are least: the multiple-choice knapsack (Kellerer, Pferschy and
Pisinger, Knapsack Problems, 2004, chapter 11). A greedy by watts per weight is not exact there, for rungs are few and
uneven: a service that needs 300 W at once to hold its limit is passed over for two that take 150 W each and hold theirs
no better. Servers have few services, so the exact answer is cheap: services are merged one by one, and of what they can
draw together only the staircase of those sums is kept that cost less than every smaller sum.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Tuple

_MOST_STEPS = 1000
"""Of a staircase; beyond it draws are counted in thousandths of all, rounded up, which never breaks a budget."""
_ALIKE = 1e-9
Cost = Tuple[float, float, float]


@dataclass(frozen=True)
class PowerOption:
    """One way for a service to run.

    Args:
        most_w: What it draws at most so, whatever comes.
        mean_w: What it is expected to draw.
        broken: The weight of its SLO if that is expected to break, else 0.
        short: The share of its load that it is expected to leave, times its weight.
    """

    most_w: float
    mean_w: float
    broken: float = 0.0
    short: float = 0.0

    @property
    def cost(self) -> Cost:
        """What is minimised, the first first."""
        return (self.broken, self.short, self.mean_w)


@dataclass(frozen=True)
class Step:
    """A step of the staircase: what is drawn at most, what it costs, and which option of each service that is."""

    most_w: float
    cost: Cost
    chosen: tuple[int, ...]


@dataclass(frozen=True)
class Staircase:
    """What each budget buys: steps by rising watts, each of which costs less than those before.

    Args:
        steps: At least one.
    """

    steps: tuple[Step, ...]

    def within(self, budget_w: float) -> Step | None:
        """Return the step that costs least within a budget; None if not even the lowest is."""
        number = self._number(budget_w)
        if number is None:
            return None
        return self.steps[number]

    def beyond(self, budget_w: float) -> Step | None:
        """Return the next step above a budget, which is what more watts would buy; None if nothing costs less."""
        number = self._number(budget_w)
        after = 0 if number is None else number + 1
        if after < len(self.steps):
            return self.steps[after]
        return None

    def _number(self, budget_w: float) -> int | None:
        number = bisect_right([step.most_w for step in self.steps], budget_w + _ALIKE) - 1
        if number < 0:
            return None
        return number


def staircase(services: Sequence[Sequence[PowerOption]]) -> Staircase:
    """Return what each budget buys for all services together.

    Args:
        services: The options of each, at least one each.
    """
    all_w = sum(max(option.most_w for option in options) for options in services)
    steps = [Step(0.0, (0.0, 0.0, 0.0), ())]
    for options in services:
        steps = _thinned(_lowest(_merged(steps, options)), all_w)
    return Staircase(tuple(steps))


def _merged(steps: Sequence[Step], options: Sequence[PowerOption]) -> list[Step]:
    return [
        Step(step.most_w + option.most_w, _sum(step.cost, option.cost), (*step.chosen, number))
        for step in steps
        for number, option in enumerate(options)
    ]


def _sum(one: Cost, other: Cost) -> Cost:
    # Rounded, so that weights added in another order stay equal and the watts decide.
    return (round(one[0] + other[0], 9), round(one[1] + other[1], 9), one[2] + other[2])


def _lowest(steps: list[Step]) -> list[Step]:
    """Return the steps that cost less than every one that draws no more."""
    kept: list[Step] = []
    for step in sorted(steps, key=lambda each: (each.most_w, each.cost)):
        if not kept or step.cost < kept[-1].cost:
            kept.append(step)
    return kept


def _thinned(steps: list[Step], all_w: float) -> list[Step]:
    if len(steps) <= _MOST_STEPS or all_w <= 0:
        return steps
    grain_w = all_w / _MOST_STEPS
    # Sorted out once more: rounding gives steps the same watts.
    return _lowest([Step(grain_w * math.ceil(step.most_w / grain_w), step.cost, step.chosen) for step in steps])


def spread(shares_w: Sequence[float], tops_w: Sequence[float], weights: Sequence[float], left_w: float) -> list[float]:
    """Return shares raised by what is left, by weight, none above what its service can use.

    Args:
        shares_w: What each has.
        tops_w: What each can use.
        weights: Above zero.
        left_w: To be shared out.
    """
    found = list(shares_w)
    while left_w > _ALIKE:
        open_ = [number for number, top_w in enumerate(tops_w) if top_w - found[number] > _ALIKE]
        if not open_:
            break
        each_w = left_w / sum(weights[number] for number in open_)
        # The first to be full ends a round, so that there are at most as many rounds as services.
        part_w = min(each_w, *((tops_w[number] - found[number]) / weights[number] for number in open_))
        for number in open_:
            found[number] += part_w * weights[number]
            left_w -= part_w * weights[number]
    return found
