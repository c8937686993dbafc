"""What each service of a server may draw: a split of the watts there are, made anew every second.

What a service may draw is counted at full load: whatever load comes within the next second, all together stay within
the budget. Broken limits come first, by weight, then load that is left, then joules. What cannot be set, such as a
board that does not answer or one that a study sets, is counted with the most it can draw, and the others make room.

A prediction is never exact: silicon differs, and heat adds. So what a service was seen to draw above its rung's full
load is counted at once, and forgotten slowly; what it draws on average over what is predicted weighs where joules
decide.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Tuple

from polythrottle.daemon.control.state import Phase, State, needed_per_s
from polythrottle.domain.backports import paired
from polythrottle.domain.ladder import Ladder

# Watts between services: which rung each may stand on so that all together stay within a budget, exactly.
#
# Each service offers options: the most that it can draw on one, and what that costs. One option of each is to be
# chosen whose most draws together fit the budget and whose costs are least: the multiple-choice knapsack (Kellerer,
# Pferschy and Pisinger, Knapsack Problems, 2004, chapter 11). A greedy by watts per weight is not exact there, for
# rungs are few and uneven: a service that needs 300 W at once to hold its limit is passed over for two that take 150
# W each and hold theirs no better. Servers have few services, so the exact answer is cheap: services are merged one
# by one, and of what they can draw together only the staircase of those sums is kept that cost less than every
# smaller sum.

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


# What each service may draw, made anew every second.

_MARGIN = 1.03
"""What is counted for what nobody has seen yet: single samples lie above a mean."""
_LEARNING = 0.05
_TRUSTED = (0.8, 1.5)
_EXCESS_MOST = 1.5
_FORGETTING = 0.002
"""Of what was seen above a share, per second."""
_STAY = 0.99
"""Of what the present rung is expected to draw is counted, so that watts alone do not move it back and forth."""
_SLOPE = 0.1
_SLOPE_MOST = 0.5
_SPREAD_W = 10.0
_KEPT = 0.99
_DOWN_W = 1.1
"""Times what a board that nobody uses draws, which is counted for it."""


@dataclass(frozen=True)
class ServiceState:
    """A service, as the split has to know it.

    Args:
        name: Of the service.
        weight: What its SLO counts.
        state: Of its controller.
        most_w: What its board draws at most while nobody bounds it.
        power_w: What it drew in the last second; None if unknown.
        rate_per_s: The requests that came in it; None if unknown.
        waiting: Requests that wait to be sent.
        whole: Whether all of that second passed on the rung it stands on now.
    """

    name: str
    weight: float
    state: State
    most_w: float
    power_w: float | None = None
    rate_per_s: float | None = None
    waiting: int = 0
    whole: bool = True

    @property
    def ladder(self) -> Ladder | None:
        """Its rungs, where the daemon sets the board by them; None where it does not."""
        state = self.state
        bound = state.phase in (Phase.FOLLOWING, Phase.SAFE) and state.leased and not state.suspended
        if not bound or state.plan is None or state.study_runs:
            return None
        return state.plan.ladder


@dataclass(frozen=True)
class ServiceShare:
    """What a service gets.

    Args:
        name: Of the service.
        share_w: What it may draw at most; None where it cannot be bounded.
        counted_w: What was counted for it, which is what it needs.
        broken: Whether its SLO is expected to break.
        limit_w: What it may draw as its ladder predicts draws, for its controller; where it cannot be bounded now, what
            it may draw once it can.
    """

    name: str
    share_w: float | None
    counted_w: float
    broken: bool
    limit_w: float


@dataclass(frozen=True)
class PowerSplit:
    """A split.

    Args:
        budget_w: Of the whole server; ``rest_w`` what it draws besides its services' boards.
        rest_w: Likewise.
        shares: Of the services.
        met: Whether what is counted for them fits.
        buys: What more watts would buy, in words; empty if nothing.
        buys_w: How many that are; None if nothing.
    """

    budget_w: float
    rest_w: float
    shares: tuple[ServiceShare, ...]
    met: bool
    buys: str = ""
    buys_w: float | None = None


@dataclass
class HostPower:
    """What a server draws besides its services' boards: said, or learnt from a meter of the whole.

    Host, fans and the losses of its supplies grow with what the boards draw, so that a line is fitted through what was
    seen, by least squares that forget.

    Args:
        fixed_w: What was said; None to learn it.
    """

    fixed_w: float | None = None
    _weight: float = 0.0
    _sums: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0)
    _above_w: float = 0.0

    @property
    def known(self) -> bool:
        """Whether anything is."""
        return self.fixed_w is not None or self._weight > 0

    @property
    def line(self) -> tuple[float, float]:
        """Watts without any board, and what each watt of the boards adds."""
        if self.fixed_w is not None or not self._weight:
            return self.fixed_w or 0.0, 0.0
        boards, rest, squares, products = (total / self._weight for total in self._sums)
        spread = squares - boards * boards
        # Boards that draw the same all the time tell nothing of the slope.
        if spread > _SPREAD_W**2:
            slope = (products - boards * rest) / spread
        else:
            slope = _SLOPE
        slope = min(_SLOPE_MOST, max(0.0, slope))
        return rest - slope * boards + self._above_w, slope

    def seen(self, whole_w: float, boards_w: float) -> None:
        """Learn from what a meter says of the whole server, and what its boards drew at the time."""
        rest_w = whole_w - boards_w
        above_w = 0.0
        if self._weight:
            base_w, slope = self.line
            # A line of least squares lies in the middle; a limit is kept only if the highest above it counts too.
            above_w = max(0.0, rest_w - (base_w - self._above_w) - slope * boards_w)
        self._above_w = max(above_w, _KEPT * self._above_w)
        new = (boards_w, rest_w, boards_w * boards_w, boards_w * rest_w)
        self._weight = _KEPT * self._weight + 1
        self._sums = tuple(_KEPT * old + add for old, add in paired(self._sums, new))  # type: ignore[assignment]

    def besides_w(self, budget_w: float) -> float:
        """Return what is drawn besides the boards when all together draw a budget."""
        # With boards that draw b the whole is base + (1 + slope) b, which is to be the budget.
        base_w, slope = self.line
        return base_w + slope * max(0.0, budget_w - base_w) / (1 + slope)


@dataclass
class PowerSharing:
    """Splits a budget between services and learns what they really draw.

    Attributes:
        scales: What each service draws on average over what is predicted, by name.
    """

    scales: dict[str, float] = field(default_factory=dict)
    _excesses: dict[str, float] = field(default_factory=dict)

    def split(self, budget_w: float, rest_w: float, services: Sequence[ServiceState]) -> PowerSplit:
        """Return what each service may draw from now on.

        Args:
            budget_w: Of the whole server.
            rest_w: What it draws besides.
            services: At least one.
        """
        offers = [self._options(each) for each in services]
        stairs = staircase(offers)
        free_w = budget_w - rest_w
        step = stairs.within(free_w)
        met = step is not None
        # Where not even the lowest fits, everybody stays there, and it is told that the budget is not met.
        chosen = step or stairs.steps[0]
        picked = [options[number] for options, number in paired(offers, chosen.chosen)]
        shares_w = self._spread(services, offers, picked, free_w)
        shares = tuple(
            self._share(each, option, share_w) for each, (option, share_w) in paired(services, paired(picked, shares_w))
        )
        more = stairs.beyond(free_w) if met else None
        buys_w = None if more is None else more.most_w - free_w
        return PowerSplit(budget_w, rest_w, shares, met, _bought(services, offers, chosen, more), buys_w)

    def least_w(self, services: Sequence[ServiceState]) -> float:
        """Return the watts below which nothing can be split: every service on the rung that draws least."""
        return sum(min(option.most_w for option in self._options(each)) for each in services)

    def seen(self, services: Sequence[ServiceState], period_s: float) -> None:
        """Learn from what the services drew in a period."""
        for each in services:
            rung = each.state.rung
            follows = each.ladder is not None and each.state.phase is Phase.FOLLOWING
            # A second that a change has divided says nothing of either rung.
            if not follows or rung is None or each.power_w is None or not each.whole:
                continue
            excess = self._excesses.get(each.name, 1.0)
            excess = max(1.0, excess - _FORGETTING * period_s)
            full_w = _MARGIN * rung.service.full_w
            if each.power_w > full_w * excess:
                excess = min(_EXCESS_MOST, each.power_w / full_w)
            self._excesses[each.name] = excess
            if each.rate_per_s is None:
                continue
            low, high = _TRUSTED
            ratio = min(high, max(low, each.power_w / rung.power_at(each.rate_per_s)))
            before = self.scales.get(each.name, 1.0)
            self.scales[each.name] = before + _LEARNING * min(1.0, period_s) * (ratio - before)

    def forget(self, name: str) -> None:
        """Forget what a service drew that is gone."""
        self.scales.pop(name, None)
        self._excesses.pop(name, None)

    def _factor(self, name: str) -> float:
        """Return what a service is counted to draw at full load over what is predicted; never less than that."""
        return _MARGIN * self._excesses.get(name, 1.0)

    def _options(self, service: ServiceState) -> Sequence[PowerOption]:
        """Return the rungs of a service; the one draw that is to be counted where it cannot be bounded."""
        ladder = service.ladder
        if ladder is None:
            return (PowerOption(self._unbounded_w(service), service.power_w or 0.0),)
        state = service.state
        factor = self._factor(service.name)
        here = ladder.rungs[min(state.footing.rung, ladder.top)]
        needed = needed_per_s(ladder, here, state.forecast, service.waiting, state.pressed_manner)
        if needed is None:
            # Nothing is known of its load: all of it may come.
            needed = ladder.rungs[-1].rate_per_s
        mean_per_s = state.forecast.slow_per_s
        found = []
        for number, rung in enumerate(ladder.rungs):
            mean_w = rung.power_at(mean_per_s) * self.scales.get(service.name, 1.0)
            if number == state.footing.rung:
                mean_w *= _STAY
            able = 1.0
            if needed > 0:
                able = min(1.0, rung.rate_per_s / needed)
            # Beyond the top rung no watt helps: what even that leaves breaks for all alike.
            short = 0.0
            if needed > 0:
                short = min(1.0, ladder.rungs[-1].rate_per_s / needed) - able
            broken = service.weight if short > 0 else 0.0
            found.append(PowerOption(rung.service.full_w * factor, mean_w, broken, service.weight * max(0.0, short)))
        return found

    def _unbounded_w(self, service: ServiceState) -> float:
        """Return what is counted for a service that is not bounded by its ladder."""
        state = service.state
        if state.phase is Phase.DOWN and service.power_w is not None and not service.rate_per_s:
            return min(service.most_w, _DOWN_W * service.power_w)
        return max(service.most_w, service.power_w or 0.0)

    def _spread(
        self,
        services: Sequence[ServiceState],
        offers: Sequence[Sequence[PowerOption]],
        picked: Sequence[PowerOption],
        free_w: float,
    ) -> list[float]:
        """Return each service's watts, with what is left shared out too, for load that rises within a second."""
        needed_w = [option.most_w for option in picked]
        tops_w = [max(option.most_w for option in options) for options in offers]
        weights = [each.weight for each in services]
        return spread(needed_w, tops_w, weights, free_w - sum(needed_w))

    def _share(self, service: ServiceState, option: PowerOption, share_w: float) -> ServiceShare:
        # Rounded up by less than a milliwatt, so that dividing back does not forbid the rung it was made for.
        limit_w = share_w / self._factor(service.name) + 1e-6
        if service.ladder is None:
            return ServiceShare(service.name, None, option.most_w, False, limit_w)
        return ServiceShare(service.name, share_w, option.most_w, option.broken > 0, limit_w)


def _bought(
    services: Sequence[ServiceState], offers: Sequence[Sequence[PowerOption]], now: Step, more: Step | None
) -> str:
    """Return what the next step buys, in words."""
    if more is None:
        return ""
    pairs = [*paired(paired(services, offers), paired(now.chosen, more.chosen))]
    held = [each.name for (each, options), (before, after) in pairs if options[before].broken > options[after].broken]
    if held:
        return f"the SLO of {' and '.join(held)}"
    if more.cost[1] < now.cost[1]:
        return "more of the load"
    return f"{now.cost[2] - more.cost[2]:.3g} W less on average"


def cuts_first(split: PowerSplit, states: Mapping[str, State]) -> list[ServiceShare]:
    """Return the shares in the order in which they are to be told: those first that take something away.

    Args:
        split: Whose.
        states: Of the controllers, by the name of their service.
    """

    def raised_w(share: ServiceShare) -> float:
        before = states[share.name].share_w
        if before is None:
            return float("-inf")
        return share.limit_w - before

    return sorted(split.shares, key=raised_w)
