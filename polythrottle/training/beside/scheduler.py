"""Who gets the device next, inference or fine-tuning: pure policies within a limit, hours and a mean power."""

from __future__ import annotations

import math
import re
import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Callable

from polythrottle.domain.arrivals import Arrivals
from polythrottle.domain.backports import paired, pairwise
from polythrottle.domain.errors import InvalidInput, UnknownName
from polythrottle.domain.ladder import PointPerformance
from polythrottle.domain.load.energy_ration import DAY_S, LoadInterval
from polythrottle.domain.space import OperatingPoint
from polythrottle.training.beside.operating_options import Menu, Option, Slice

# Hours of the day, such as from 22:00 to 06:00, on the clock of the place where a device stands.

_TIME = re.compile(r"(\d{1,2}):([0-5]\d)", re.ASCII)


def day_time_s(text: str) -> float:
    """Return a time of day such as ``06:00`` in seconds since midnight; 24:00 is the end of the day.

    Raises:
        InvalidInput: If it is not valid.
    """
    matched = _TIME.fullmatch(text.strip())
    if matched:
        at_s = 3600.0 * int(matched[1]) + 60.0 * int(matched[2])
    else:
        at_s = -1.0
    if not 0 <= at_s <= DAY_S:
        raise InvalidInput(f"a time of day is written like 06:00, not {text[:20]!r}")
    return at_s


def wall_day_s(wall_s: float) -> float:
    """Return the time of day where this machine stands, in seconds since midnight.

    Args:
        wall_s: As `time.time` gives it.
    """
    now = time.localtime(wall_s)
    return 3600.0 * now.tm_hour + 60.0 * now.tm_min + min(59, now.tm_sec) + wall_s % 1


@dataclass(frozen=True)
class Hours:
    """From one time of the day until another, which may be the next morning.

    Args:
        begin_s: In seconds since midnight.
        end_s: Likewise.

    Raises:
        InvalidInput: If one is not of a day, or nothing lies between them.
    """

    begin_s: float
    end_s: float

    def __post_init__(self) -> None:
        if not (0 <= self.begin_s <= DAY_S and 0 <= self.end_s <= DAY_S):
            raise InvalidInput("hours go from one time of the day to another, between 00:00 and 24:00")
        if self.begin_s % DAY_S == self.end_s % DAY_S and (self.begin_s, self.end_s) != (0.0, DAY_S):
            raise InvalidInput(f"nothing lies between {_written(self.begin_s)} and {_written(self.end_s)}")

    @classmethod
    def parse(cls, text: str) -> Hours:
        """Return the hours that a text such as ``22:00-06:00`` means.

        Raises:
            InvalidInput: If it means none.
        """
        begin, dash, end = text.partition("-")
        if not dash:
            raise InvalidInput(f"hours are written like 22:00-06:00, not {text[:20]!r}")
        return cls(day_time_s(begin), day_time_s(end))

    def __contains__(self, day_s: float) -> bool:
        """Return whether a time of day lies between them."""
        if self.begin_s < self.end_s:
            return self.begin_s <= day_s < self.end_s
        return day_s >= self.begin_s or day_s < self.end_s

    def __str__(self) -> str:
        return f"{_written(self.begin_s)}-{_written(self.end_s)}"

    @property
    def length_s(self) -> float:
        """How long they are, in a day."""
        return (self.end_s - self.begin_s) % DAY_S or DAY_S

    def opens_s(self, day_s: float) -> float:
        """Return how long it is from a time of day until they begin; 0 within them."""
        if day_s in self:
            return 0.0
        return (self.begin_s - day_s) % DAY_S

    def wait(self, day_s: float) -> str:
        """Return how long it is from a time of day until they begin, for people."""
        hours, minutes = divmod(math.ceil(self.opens_s(day_s) / 60), 60)
        return f"{hours} h {minutes:02} min"

    def cut(self, ahead: LoadInterval, day_s: float) -> Iterator[tuple[LoadInterval, bool]]:
        """Yield the parts of a stretch that begins at a time of day, and whether each lies within these hours."""
        left_s = ahead.length_s
        while left_s > 0:
            within = day_s in self
            until_s = ((self.end_s if within else self.begin_s) - day_s) % DAY_S or DAY_S
            part_s = min(left_s, until_s)
            yield LoadInterval(part_s, ahead.rate_per_s, ahead.weight), within
            left_s = left_s - part_s
            day_s = (day_s + part_s) % DAY_S

    def within_s(self, day_s: float, length_s: float) -> float:
        """Return how much of a time that begins at a time of day lies between them."""
        return sum(part.length_s for part, within in self.cut(LoadInterval(length_s, 0.0), day_s) if within)


def _written(at_s: float) -> str:
    return f"{int(at_s // 3600):02}:{int(at_s % 3600 // 60):02}"


# A mean power that both kinds of work are to stay within: fine-tuning waits while it has been exceeded.

_SPAN_S = 10.0
"""For so long at most power may be saved up or owed."""
_STOP = 0.1
_GO = 0.2
"""Shares of that: below the first fine-tuning waits, so that what runs until somebody looks again is saved already;
from the second on it goes on, so that it does not stop and go every second."""


@dataclass(frozen=True)
class MeanPowerLimit:
    """What may be drawn on average, and what was left of it lately.

    Inference is never held back: where it alone draws more, fine-tuning waits and the mean is above the ration. What
    was not drawn is kept for ten seconds' worth at most, what was drawn too much is owed for as much.

    Args:
        power_w: Mean of both kinds of work, everything the device draws included.
        spare_j: Left of what might have been drawn; negative where it was more.
        open: Whether fine-tuning may go on.

    Raises:
        InvalidInput: If the power is not positive and finite.
    """

    power_w: float
    spare_j: float = 0.0
    open: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.power_w < math.inf:
            raise InvalidInput(f"a power is above 0 W and finite, not {self.power_w:g} W")

    def after(self, joules: float, duration_s: float) -> MeanPowerLimit:
        """Return the ration after some time in which the device drew some energy."""
        most_j = self.power_w * _SPAN_S
        spare_j = min(most_j, max(-most_j, self.spare_j + self.power_w * duration_s - joules))
        return replace(self, spare_j=spare_j, open=spare_j >= (_STOP if self.open else _GO) * most_j)


# Who gets the device next, inference or fine-tuning: policies, each a pure function of the moment.

_THRIFTY = 0.6
"""A slice that runs while requests wait does at least this share of what the best does per second."""


@dataclass(frozen=True)
class Moment:
    """Everything a policy may look at.

    Args:
        now_s: By any clock that only rises.
        ages_s: How long each request has waited, oldest first.
        option: What the device can do at the point it is at.
        slo_s: The limit of a request, from its arrival.
        left: Samples left of the step at hand; 0 if there is nothing to fine-tune.
        expected_per_s: Requests to be prepared for; None if nothing is known of them.
        busy_until_s: When the inference in flight ends, as far as is known; None if there is none.
        training: Whether a slice is in flight.
        batch: The largest batch that policies use that choose none.
        menu: Points to choose from; None to stay.
        day_s: Seconds since midnight, of wall time; None if unknown.
        mean_per_s: Requests on average, by which costs are counted; None for those expected.
        aim_s: The latency that slices are planned with, where predictions have been too bright; None for the limit.

    Raises:
        InvalidInput: If a time or a rate is negative or not finite, or the requests are not in order.
    """

    now_s: float
    ages_s: tuple[float, ...]
    option: Option
    slo_s: float
    left: int = 0
    expected_per_s: float | None = None
    busy_until_s: float | None = None
    training: bool = False
    batch: int = 1
    menu: Menu | None = None
    day_s: float | None = None
    mean_per_s: float | None = None
    aim_s: float | None = None

    def __post_init__(self) -> None:
        if not 0 < self.slo_s < math.inf or not 0 <= (self.expected_per_s or 0.0) < math.inf:
            raise InvalidInput("a limit is above 0 s, and a rate is finite and not negative")
        if self.left < 0 or self.batch < 1 or any(not 0 <= age < math.inf for age in self.ages_s):
            raise InvalidInput("ages, and samples that are left, are not negative, and a batch has at least 1 request")
        if any(after > before for before, after in pairwise(self.ages_s)):
            raise InvalidInput("requests wait oldest first")

    @property
    def serving(self) -> bool:
        """Whether inference is in flight."""
        return self.busy_until_s is not None


@dataclass(frozen=True)
class Decision:
    """What is to be done now; several things at once only under policies that share the device.

    Args:
        reason: In words.
        run: A slice to start.
        batch: Requests to answer, the oldest but for those passed over; 0 for none.
        skip: Requests passed over, the oldest: they are late whatever is done, and wait on.
        drop: Requests to give up, the oldest, before that.
        point: To be applied before anything else, and then the policy asked again.
        until_s: When to ask again even if nothing happens.
    """

    reason: str
    run: Slice | None = None
    batch: int = 0
    drop: int = 0
    point: OperatingPoint | None = None
    until_s: float | None = None
    skip: int = 0

    @property
    def idle(self) -> bool:
        """Whether nothing is to be started."""
        return self.run is None and not self.batch and not self.drop and self.point is None


Policy = Callable[[Moment], Decision]


def taken(waiting: deque[float], decision: Decision) -> tuple[float, ...]:
    """Take from a queue, oldest first, what a decision answers, and leave what it passes over where it is."""
    waiting.rotate(-decision.skip)
    answered = tuple(waiting.popleft() for _ in range(decision.batch))
    waiting.rotate(decision.skip)
    return answered


def in_time(moment: Moment, spent_s: float) -> bool:
    """Return whether all requests stay in time if nothing is served for a while; see `Option.in_time`."""
    aim_s = moment.slo_s if moment.aim_s is None else moment.aim_s
    return moment.option.in_time(moment.ages_s, moment.expected_per_s, aim_s, spent_s)


def alone(moment: Moment) -> Decision:
    """Answer requests as they come, in batches up to the one that was deployed; fine-tune nothing."""
    return _greedily(replace(moment, left=0))


def greedy(moment: Moment) -> Decision:
    """Fine-tune whenever there is work, whole steps, beside inference; give up requests whose limit has passed."""
    return _greedily(moment)


def _greedily(moment: Moment) -> Decision:
    late = sum(age >= moment.slo_s for age in moment.ages_s)
    waiting = len(moment.ages_s) - late
    step = None
    if not moment.training:
        step = moment.option.fits(math.inf, moment.left)
    if moment.serving or not waiting:
        batch = 0
    else:
        batch = moment.option.serves(min(waiting, moment.batch)).batch
    return Decision("whatever there is", step, min(batch, waiting), late)


def paper(moment: Moment) -> Decision:
    """Fine-tune step by step beside inference while a prediction says that its batch stays within the limit.

    That is the policy of arXiv 2310.19991: when the batch at hand would not, a smaller one is looked for; if none is
    found, fine-tuning waits. Requests whose limit has passed are given up. A step cannot be interrupted.
    """
    late = sum(age >= moment.slo_s for age in moment.ages_s)
    waiting = moment.ages_s[late:]
    able = [each for each, shared_s in _shared(moment.option) if _holds(waiting, each, shared_s, moment.slo_s)]
    begins = bool(moment.left and not moment.training and able)
    beside = moment.training or begins
    if beside and able:
        service = able[-1]
    else:
        service = moment.option.widest(moment.slo_s)
    if moment.serving:
        batch = 0
    else:
        batch = min(len(waiting), moment.option.serves(min(len(waiting), service.batch)).batch)
    step = None
    if begins:
        step = moment.option.fits(math.inf, moment.left)
    if able:
        reason = "the prediction holds the limit"
    else:
        reason = "no batch would hold the limit beside a step"
    return Decision(reason, step, batch, late)


def _shared(option: Option) -> list[tuple[PointPerformance, float]]:
    if not option.shared_s:
        raise InvalidInput(
            "the paper's policy needs a prediction of latencies beside fine-tuning; profile co-runs first"
        )
    return list(paired(option.services, option.shared_s))


def _holds(ages_s: tuple[float, ...], service: PointPerformance, shared_s: float, slo_s: float) -> bool:
    """Return whether the last request that waits is answered in time, batch after batch."""
    batches = max(1, -(-len(ages_s) // service.batch))
    return (ages_s[0] if ages_s else 0.0) + batches * shared_s <= slo_s


def interleave(moment: Moment) -> Decision:
    """Fine-tune in slices between batches, never beside them, each as long as all requests stay in time by its tail.

    Requests wait for a fuller batch as long as that costs none of them its limit, so that slices fit in between. What
    runs is let end, which is soon: a slice is no longer than what the queue and the forecast leave. Where there are
    points to choose from, the one that costs least per unit of useful work is applied first. A request that is late
    whatever is done makes no other one late: it is answered before any slice, but after those that can be in time.
    """
    if moment.serving or moment.training:
        return Decision("what runs is let end")
    if (better := _better(moment)) is not None:
        return Decision("costs less for the work to come", point=better.point)
    if late := _lost(moment):
        return _behind(moment, late)
    waiting = len(moment.ages_s)
    piece = _slice(moment)
    widest = moment.option.widest(moment.slo_s)
    if waiting >= widest.batch or (waiting and piece is None and not _can_wait(moment)):
        return Decision("requests are due", batch=min(waiting, moment.option.serves(min(waiting, widest.batch)).batch))
    if piece is not None:
        return Decision(f"{piece.samples} samples fit before the next batch", piece)
    return Decision("nothing to do", until_s=_latest_s(moment) if waiting else None)


def _lost(moment: Moment) -> int:
    """Return how many requests are late even if they are answered now, the oldest."""
    least_s = moment.option.services[0].latency_s
    return sum(age + least_s > moment.slo_s for age in moment.ages_s)


def _behind(moment: Moment, lost: int) -> Decision:
    """Answer requests that are late anyway, unless that would make those late that are not."""
    late = moment.option.serves(min(lost, moment.option.widest(moment.slo_s).batch))
    others = replace(moment, ages_s=moment.ages_s[lost:], aim_s=None)
    if not others.ages_s or in_time(others, late.interval_s):
        return Decision("requests are late", batch=min(lost, late.batch))
    waiting = len(others.ages_s)
    widest = moment.option.widest(moment.slo_s).batch
    batch = min(waiting, moment.option.serves(min(waiting, widest)).batch)
    return Decision("requests can still be in time, others not", batch=batch, skip=lost)


def _better(moment: Moment) -> Option | None:
    if moment.menu is None or moment.expected_per_s is None:
        return None
    demand = moment.expected_per_s
    if moment.mean_per_s is None:
        mean = demand
    else:
        mean = moment.mean_per_s
    best = moment.menu.best(moment.ages_s, demand, mean, moment.slo_s, moment.left > 0, moment.option)
    if best.point != moment.option.point:
        return best
    return None


def _slice(moment: Moment) -> Slice | None:
    """Return the largest slice after which all requests are still in time; None if none is, or none is worth it."""
    slices = [each for each in moment.option.slices if each.samples <= moment.left]
    piece = next((each for each in reversed(slices) if in_time(moment, each.tail_s)), None)
    if piece is None or not moment.ages_s:
        return piece
    thrifty = moment.option.sample_s * piece.samples >= _THRIFTY * piece.alone_s
    if thrifty or piece.samples == moment.left:
        return piece
    return None


def _can_wait(moment: Moment) -> bool:
    """Return whether it is worth waiting for a fuller batch: nothing is left to fine-tune, and time is."""
    return moment.left == 0 and _latest_s(moment) > moment.now_s


def _latest_s(moment: Moment) -> float:
    """Return until when requests may be left to wait, found by halving."""
    low_s = 0.0
    high_s = moment.slo_s
    if not in_time(moment, low_s):
        return moment.now_s
    for _ in range(10):
        middle_s = (low_s + high_s) / 2
        low_s, high_s = (middle_s, high_s) if in_time(moment, middle_s) else (low_s, middle_s)
    if low_s > 1e-3:
        return moment.now_s + low_s
    return moment.now_s


@dataclass(frozen=True)
class OffPeak:
    """Fine-tune as `interleave` does, but only at quiet times.

    Args:
        share: Of what the device can answer; it is quiet when no more than this is expected.
        hours: At which it is quiet whatever is expected; None to go by the load.

    Raises:
        InvalidInput: If the share is not one.
    """

    share: float = 0.3
    hours: Hours | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 1:
            raise InvalidInput(f"quiet is a share between 0 and 1 of the capacity, not {self.share:g}")

    def __call__(self, moment: Moment) -> Decision:
        """Return what is to be done now."""
        return interleave(moment if self.quiet(moment) else replace(moment, left=0))

    def quiet(self, moment: Moment) -> bool:
        """Return whether it is quiet: by the hour if hours are given and the time is known, else by the forecast."""
        if self.hours is not None and moment.day_s is not None:
            return moment.day_s in self.hours
        if moment.expected_per_s is None:
            return False
        return moment.expected_per_s <= self.share * moment.option.widest(moment.slo_s).most_per_s


off_peak = OffPeak()

POLICIES: Mapping[str, Policy] = {"greedy": greedy, "paper": paper, "interleave": interleave, "off-peak": off_peak}


def policy(name: str, hours: Hours | None = None) -> Policy:
    """Return a policy by its name.

    Args:
        name: One of `POLICIES`.
        hours: At which ``off-peak`` fine-tunes; None to go by the load.

    Raises:
        UnknownName: If there is none; names the nearest.
        InvalidInput: If hours are given to another policy.
    """
    if name not in POLICIES:
        raise UnknownName("policy", name, POLICIES)
    if hours is None:
        return POLICIES[name]
    if name != "off-peak":
        raise InvalidInput(f"the policy {name} goes by no hours; {hours} is for the policy off-peak")
    return OffPeak(hours=hours)


# What serving and fine-tuning side by side is to keep to: limit, requests, policy, time, hours and power.

GENTLE = ("interleave", "off-peak")
"""Policies that keep a limit: slices stop in the middle for requests, and less is dared when latencies come near it."""
ALONE = "none"
"""In place of a policy: nothing is fine-tuned."""
LONGEST_S = 10 * 365.25 * 86400.0
"""Nothing is run or planned for longer than ten years."""


@dataclass(frozen=True)
class Terms:
    """What is to be kept to.

    Args:
        slo_s: The limit of each request from its arrival.
        arrivals: When they come; not a closed loop.
        policy: Who gets the device next; `ALONE` for inference alone.
        seconds: How long requests come; None until the job is done.
        seed: Of the arrivals.
        hours: At which the policy ``off-peak`` fine-tunes; None to go by the load.
        power_w: Mean power of both kinds of work at most, for which fine-tuning waits; None for any.
        day_s: Time of day at which a simulated run begins, since midnight; a real one goes by the clock.

    Raises:
        InvalidInput: If requests come in a closed loop, a time or power is not positive, a time is longer than
            `LONGEST_S`, hours are given to another policy than ``off-peak``, or nothing is fine-tuned that a power
            could hold back.
        UnknownName: If there is no such policy.
    """

    slo_s: float
    arrivals: Arrivals
    policy: str = "interleave"
    seconds: float | None = None
    seed: int = 0
    hours: Hours | None = None
    power_w: float | None = None
    day_s: float = 0.0

    def __post_init__(self) -> None:
        if self.arrivals.closed:
            raise InvalidInput("requests must come by the clock: write for example poisson:30/s")
        if not all(0 < each_s <= LONGEST_S for each_s in (self.slo_s, self.seconds) if each_s is not None):
            raise InvalidInput("a limit and a length are above 0 s, and ten years (3.16e8 s) at most")
        if self.policy != ALONE:
            policy(self.policy, self.hours)
        elif self.hours is not None or self.power_w is not None:
            raise InvalidInput("inference alone fine-tunes nothing that hours or a power could hold back")
        if self.power_w is not None:
            MeanPowerLimit(self.power_w)

    @property
    def rate_per_s(self) -> float:
        """Requests per second in the long run."""
        assert self.arrivals.offered_per_s is not None
        return self.arrivals.offered_per_s

    @property
    def ration(self) -> MeanPowerLimit | None:
        """The power that is to be kept to; None if any may be drawn."""
        if self.power_w is None:
            return None
        return MeanPowerLimit(self.power_w)

    def check_hours(self, day_s: float) -> None:
        """Check that a run that begins at a time of day lasts until its hours begin.

        Raises:
            InvalidInput: If it ends before.
        """
        if self.hours is None or self.seconds is None:
            return
        if not self.hours.within_s(day_s, self.seconds):
            raise InvalidInput(
                f"nothing would be fine-tuned: {self.hours} begins in {self.hours.wait(day_s)}, "
                "after this has ended; let it go on for longer, or take other hours"
            )
