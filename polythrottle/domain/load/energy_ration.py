"""Energy that must last: what may be drawn now so that a battery, a day's ration or the clean hours of a day suffice.

A ration is planned over the whole horizon and planned anew each minute with what is really left (receding horizon
control), so that neither the load's nor the model's errors add up. Stretches of the horizon that need little leave
their share to those that need much: power is capped at one level, at which the caps just use up what there is
("water filling": Boyd and Vandenberghe, Convex Optimization, 2004, example 5.2). With a carbon intensity along time the
cap of each stretch falls as its intensity rises. The cap never goes below what the lowest rung draws.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from polythrottle.domain.backports import paired
from polythrottle.domain.errors import InvalidInput
from polythrottle.domain.ladder import Ladder
from polythrottle.domain.units import show

DAY_S = 24 * 3600.0
_SLOTS = 48
_SLOT_S = DAY_S / _SLOTS
_MEMORY_S = 3 * _SLOT_S
"""How many seconds of a slot its mean is made of: three days."""
# More than a float has bits (53).
_HALVINGS = 60


@dataclass(frozen=True)
class LoadInterval:
    """A part of the horizon.

    Args:
        length_s: How long it is.
        rate_per_s: Requests expected in it.
        weight: How much a joule costs in it beside others, such as its carbon intensity over the mean.
    """

    length_s: float
    rate_per_s: float
    weight: float = 1.0


@dataclass(frozen=True)
class DailyLoad:
    """Requests per second along the day, half-hour by half-hour, learnt over the last three days or so.

    Args:
        slots: Per half-hour from midnight the mean rate and the seconds it is made of.
    """

    slots: tuple[tuple[float, float], ...] = field(default=((0.0, 0.0),) * _SLOTS)

    def __post_init__(self) -> None:
        if len(self.slots) != _SLOTS or not all(rate >= 0 and seconds >= 0 for rate, seconds in self.slots):
            raise InvalidInput(f"a day has {_SLOTS} half-hours with rates of at least 0")

    def seen(self, at_s: float, rate_per_s: float, period_s: float) -> DailyLoad:
        """Return the pattern after one more look.

        Args:
            at_s: Seconds since midnight, of wall time.
            rate_per_s: Requests per second in the period.
            period_s: Since the look before; of a long one a half-hour at most is counted.
        """
        slot = int(at_s % DAY_S // _SLOT_S)
        # The mean of a longer gap is that of other half-hours too, and is not to outweigh what this one remembers.
        period_s = min(period_s, _SLOT_S)
        mean, seconds = self.slots[slot]
        total_s = min(seconds + period_s, _MEMORY_S)
        # A look right after another has no length, and would be divided by.
        if total_s > 0:
            moved = (mean + (rate_per_s - mean) * min(1.0, period_s / total_s), total_s)
        else:
            moved = (mean, 0.0)
        return replace(self, slots=(*self.slots[:slot], moved, *self.slots[slot + 1 :]))

    def ahead(self, at_s: float, length_s: float, now_per_s: float) -> tuple[LoadInterval, ...]:
        """Return what is expected from a time of day on; half-hours never seen are taken to be like now.

        Args:
            at_s: Seconds since midnight.
            length_s: How far to look.
            now_per_s: The rate at present.
        """
        stretches = []
        done_s = 0.0
        while done_s < length_s:
            moment_s = (at_s + done_s) % DAY_S
            part_s = min(_SLOT_S - moment_s % _SLOT_S, length_s - done_s)
            rate, seconds = self.slots[int(moment_s // _SLOT_S)]
            stretches.append(LoadInterval(part_s, rate if seconds > 0 else now_per_s))
            done_s += part_s
        return tuple(stretches)


@dataclass(frozen=True)
class Supply:
    """Energy, and from when to when it must do, in wall time.

    Args:
        joules: What there is from ``begin_s`` to ``end_s``.
        begin_s: Seconds since the epoch; ``end_s`` likewise.
        daily: Whether there is as much again on the next day.
    """

    joules: float
    begin_s: float
    end_s: float
    daily: bool = False

    def __post_init__(self) -> None:
        if not (0 < self.joules < math.inf and self.begin_s < self.end_s):
            raise InvalidInput("a supply is more than 0 J and lasts longer than 0 s")

    def at(self, now_s: float) -> Supply:
        """Return the supply of the day that a moment lies in, if it is daily; otherwise itself."""
        if not self.daily or self.begin_s <= now_s < self.end_s:
            return self
        days = math.floor((now_s - self.begin_s) / (self.end_s - self.begin_s))
        moved_s = days * (self.end_s - self.begin_s)
        return replace(self, begin_s=self.begin_s + moved_s, end_s=self.end_s + moved_s)


@dataclass(frozen=True)
class Ration:
    """What may be drawn now.

    Args:
        limit_w: Mean power; None if there is enough for all that is expected.
        met: Whether what there is suffices to hold the SLO throughout.
        need_j: What that takes.
        least_j: What the lowest points take; less than that lasts no plan.
        lasts_s: For how long what there is would hold the SLO.
    """

    limit_w: float | None
    met: bool
    need_j: float
    least_j: float
    lasts_s: float

    def words(self, left_j: float, length_s: float) -> str:
        """Return for people whether it suffices, and if not, the nearest that does."""
        if self.met:
            return f"{_wh(left_j)} left for {_hours(length_s)}; the SLO is expected to take {_wh(self.need_j)}"
        shorter = f"{_wh(left_j)} for {_hours(self.lasts_s)}"
        nearest = f"{_wh(self.need_j)} would hold it for {_hours(length_s)}, or {shorter}"
        if left_j < self.least_j:
            return f"{_wh(left_j)} do not last {_hours(length_s)} even at the lowest points; {nearest}"
        return f"{_wh(left_j)} do not hold the SLO for {_hours(length_s)}: power is capped; {nearest}"


def ration(ladder: Ladder, ahead: Sequence[LoadInterval], left_j: float, factor: float = 1.0) -> Ration:
    """Return what may be drawn in the first stretch.

    Args:
        ladder: What each rate of requests takes.
        ahead: The horizon, at least one stretch of it.
        left_j: What there is for it.
        factor: What is really drawn over what the ladder predicts, as seen so far.

    Raises:
        InvalidInput: If there is no horizon.
    """
    if not ahead:
        raise InvalidInput("there is no time left to plan for")
    needs = [factor * _need_w(ladder, part.rate_per_s) for part in ahead]
    floors = [factor * _floor_w(ladder, part.rate_per_s) for part in ahead]
    lengths = [part.length_s for part in ahead]
    need_j = _total_j(needs, lengths)
    least_j = _total_j(floors, lengths)
    if need_j <= left_j:
        return Ration(None, True, need_j, least_j, sum(lengths))
    # No cap uses less than the floors do; with less left than that, the floors it is.
    level_w = _level_w(ahead, needs, floors, max(left_j, least_j))
    # Back from what is really drawn to what the ladder says, with which whoever obeys the limit compares it.
    limit_w = min(needs[0], max(floors[0], level_w / ahead[0].weight)) / factor
    return Ration(limit_w, False, need_j, least_j, _lasts_s(needs, lengths, left_j))


def _total_j(powers_w: Sequence[float], lengths_s: Sequence[float]) -> float:
    return sum(power_w * length_s for power_w, length_s in paired(powers_w, lengths_s))


def _need_w(ladder: Ladder, rate_per_s: float) -> float:
    return ladder.rungs[ladder.best(rate_per_s, rate_per_s)].power_at(rate_per_s)


def _floor_w(ladder: Ladder, rate_per_s: float) -> float:
    return min(rung.power_at(rate_per_s) for rung in ladder.rungs)


def _level_w(ahead: Sequence[LoadInterval], needs: Sequence[float], floors: Sequence[float], left_j: float) -> float:
    """Return the level of the water: the cap at weight 1 that just uses up what is left."""

    def used_j(level_w: float) -> float:
        return sum(
            part.length_s * min(need, max(floor, level_w / part.weight))
            for part, (need, floor) in paired(ahead, paired(needs, floors))
        )

    low = 0.0
    high = max(need * part.weight for need, part in paired(needs, ahead))
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if used_j(middle) <= left_j else (low, middle)
    # The lower end: it never uses more than there is.
    return low


def _lasts_s(needs: Sequence[float], lengths: Sequence[float], left_j: float) -> float:
    """Return for how long what is left covers the needs, one stretch after the other."""
    lasted_s = 0.0
    for need, length_s in paired(needs, lengths):
        if left_j < need * length_s:
            return lasted_s + max(0.0, left_j) / need
        lasted_s = lasted_s + length_s
        left_j = left_j - need * length_s
    return lasted_s


def weighted(ahead: Sequence[LoadInterval], intensities: Sequence[float]) -> tuple[LoadInterval, ...]:
    """Return the stretches with carbon intensities for weights.

    Args:
        ahead: The horizon.
        intensities: Per stretch, in g/kWh, above 0.
    """
    total_s = sum(part.length_s for part in ahead)
    mean = sum(part.length_s * value for part, value in paired(ahead, intensities)) / total_s
    return tuple(replace(part, weight=value / mean) for part, value in paired(ahead, intensities))


def _wh(joules: float) -> str:
    return show(joules / 3600, "Wh")


def _hours(seconds: float) -> str:
    minutes = round(seconds / 60)
    if minutes >= 60:
        return f"{minutes // 60} h {minutes % 60:02d} min"
    return f"{minutes} min"
