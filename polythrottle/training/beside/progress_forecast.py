"""How much can be fine-tuned by some time within some power, and what that costs: ranges, never points."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from polythrottle.domain.errors import InvalidInput, SloUnmet, UnknownName
from polythrottle.domain.load.energy_ration import DAY_S, LoadInterval
from polythrottle.training.beside.operating_options import FinetuningJob, Menu, Option
from polythrottle.training.beside.scheduler import GENTLE, POLICIES, Moment, OffPeak, Terms

_OFF = 0.2
"""By which share a load of a day is taken to differ from the forecast at most; assumed."""
_ATTAINED = 0.8
"""The least share of the predicted pace that is reached; assumed: slices are cut short by requests that wait."""
_DRAWN_OFF = 0.1
"""By which share what inference alone draws is taken to differ from the prediction at most; assumed: simulated boards,
which cool down over minutes, draw up to 9 % less."""
_LATE = 0.01
"""Share of requests that a tail of the 99th percentile lets be late."""


@dataclass(frozen=True)
class Range:
    """From the least to the most that is expected."""

    low: float
    high: float


@dataclass(frozen=True)
class Plan:
    """What a job comes to by the end of a horizon.

    Args:
        epochs: That are done by then, at most those of the job.
        joules: What the device draws until then, both kinds of work; more than an allowed power only as far as
            inference alone draws more.
        added_j: How much of that is for fine-tuning.
        late: Requests beyond their limit until then.
        requests: Expected until then.
        done_s: After which time the job is done; infinite where that is after the horizon.
    """

    epochs: Range
    joules: Range
    added_j: Range
    late: Range
    requests: Range
    done_s: Range


class _Sum(NamedTuple):
    samples: float = 0.0
    alone_j: float = 0.0
    added_j: float = 0.0
    late: float = 0.0
    requests: float = 0.0
    done_s: float = math.inf


class _Case(NamedTuple):
    """How far a load, a pace and the power of inference alone lie off what is expected, as factors."""

    load: float
    attained: float
    drawn: float


_HEAVY = _Case(1 + _OFF, _ATTAINED, 1 + _DRAWN_OFF)
_LIGHT = _Case(1 - _OFF, 1.0, 1 - _DRAWN_OFF)


class _Part(NamedTuple):
    pace: float
    alone_w: float
    added_w: float
    held: bool


def until_s(now_s: float, by_s: float) -> float:
    """Return how long it is until a time of day.

    Args:
        now_s: Seconds since midnight.
        by_s: Likewise; the next day if it is not later.

    Raises:
        InvalidInput: If one of them is not of a day.
    """
    if not (0 <= now_s < DAY_S and 0 <= by_s <= DAY_S):
        raise InvalidInput("a time of day lies between 00:00 and 24:00")
    if by_s > now_s:
        return by_s - now_s
    return by_s - now_s + DAY_S


def plan(
    menu: Menu,
    job: FinetuningJob,
    ahead: Sequence[LoadInterval],
    slo_s: float,
    policy: str = "interleave",
    power_w: float | None = None,
    quiet: OffPeak | None = None,
    day_s: float = 0.0,
) -> Plan:
    """Return what a job comes to over a horizon: from a heavy load and a slow pace to a light one and the predicted.

    Args:
        menu: What the device can do at which point.
        job: The fine-tuning.
        ahead: Requests that are expected, such as by `Pattern.ahead`; at least one stretch.
        slo_s: The limit of each request from its arrival.
        policy: ``interleave`` or ``off-peak``, whose pace can be predicted.
        power_w: The most mean power, of both kinds of work; None for any.
        quiet: When ``off-peak`` may fine-tune; None for its defaults, by load.
        day_s: Time of day at which the horizon begins, since midnight; matters where ``quiet`` names hours.

    Raises:
        InvalidInput: If the horizon is empty or ends before the hours begin, the policy's pace cannot be predicted,
            inference alone leaves no power for anything else, or a figure is out of range.
        SloUnmet: If inference alone cannot hold the limit at the heaviest load that is expected.
        UnknownName: If there is no such policy.
    """
    _check_predictable(policy)
    if not ahead or not sum(each.length_s for each in ahead) > 0 or (power_w is not None and not power_w > 0):
        raise InvalidInput("a plan needs a horizon longer than 0 s, and a power above 0 W if one is given")
    check_held(menu, max(each.rate_per_s for each in ahead), slo_s)
    check_power(menu, min(each.rate_per_s for each in ahead), slo_s, power_w)
    off_peak = None
    if policy != "interleave":
        off_peak = quiet or OffPeak()
    parts = _parts(ahead, off_peak, day_s)
    # A heavy load leaves less time for fine-tuning, so the least that is done goes with the most requests.
    low = _summed(menu, job, parts, slo_s, power_w, off_peak, _HEAVY)
    high = _summed(menu, job, parts, slo_s, power_w, off_peak, _LIGHT)
    return Plan(
        Range(low.samples / job.samples, high.samples / job.samples),
        _drawn(high, low, power_w, sum(each.length_s for each in ahead)),
        _ordered(low.added_j, high.added_j),
        Range(0.0, low.late),
        _ordered(high.requests, low.requests),
        _ordered(high.done_s, low.done_s),
    )


def _check_predictable(policy: str) -> None:
    if policy not in POLICIES:
        raise UnknownName("policy", policy, GENTLE)
    if policy not in GENTLE:
        raise InvalidInput(f"{policy} shares the device, so its misses cannot be planned; take {' or '.join(GENTLE)}")


def _parts(ahead: Sequence[LoadInterval], off_peak: OffPeak | None, day_s: float) -> list[tuple[LoadInterval, float]]:
    """Return a horizon's stretches, cut where hours begin and end, and the time of day at which each begins.

    Raises:
        InvalidInput: If no hour lies within the horizon.
    """
    parts: list[tuple[LoadInterval, float]] = []
    hours = None
    if off_peak is not None:
        hours = off_peak.hours
    for each in ahead:
        for part in [each] if hours is None else [one for one, _ in hours.cut(each, day_s)]:
            parts.append((part, day_s))
            day_s = (day_s + part.length_s) % DAY_S
    if hours is not None and not any(begin_s in hours for _, begin_s in parts):
        raise InvalidInput(f"none of the hours {hours} lies within that time; plan for longer, or take other hours")
    return parts


def check_power(menu: Menu, rate_per_s: float, slo_s: float, power_w: float | None) -> None:
    """Check that inference alone leaves some of a power at one of a device's points.

    Raises:
        InvalidInput: If it does not.
    """
    if power_w is None:
        return
    least_w = min(_alone_w(each, rate_per_s, slo_s) for each in menu.options)
    if least_w >= power_w:
        raise InvalidInput(
            f"nothing would be fine-tuned: inference alone draws {least_w:.3g} W at {rate_per_s:g}/s, and "
            f"{power_w:g} W are allowed; allow more, or send fewer requests"
        )


def warnings_before(menu: Menu, left: int, terms: Terms, day_s: float) -> tuple[str, ...]:
    """Return what should be said before a run: that its hours have not begun, or have too little room for the job.

    Args:
        menu: What the device can do at which point.
        left: Samples of the job.
        terms: Of the run.
        day_s: When it begins, since midnight.

    Raises:
        InvalidInput: If inference alone leaves no power for anything else.
    """
    check_power(menu, terms.rate_per_s, terms.slo_s, terms.power_w)
    if terms.hours is None:
        return ()
    waits: tuple[str, ...] = ()
    if day_s not in terms.hours:
        waits = (f"fine-tuning begins in {terms.hours.wait(day_s)}",)
    if terms.seconds is None:
        return waits
    paces = (_within(each, terms.rate_per_s, terms.slo_s, terms.power_w)[0] for each in menu.options)
    room = max(paces) * terms.hours.within_s(day_s, terms.seconds)
    if room >= left:
        return waits
    return (
        *waits,
        f"the hours {terms.hours} have room for about {room:,.0f} of the {left:,} samples left, in that time",
    )


def _ordered(one: float, other: float) -> Range:
    return Range(min(one, other), max(one, other))


def _drawn(light: _Sum, heavy: _Sum, power_w: float | None, length_s: float) -> Range:
    """Return from the least of both kinds of work to the most, within an allowed power where inference alone is."""
    alone = _ordered(light.alone_j, heavy.alone_j)
    added = _ordered(light.added_j, heavy.added_j)
    # The ration holds back fine-tuning alone: where inference draws more than allowed, the sum does too.
    if power_w is None:
        most_j = math.inf
    else:
        most_j = max(power_w * length_s, alone.high)
    return Range(alone.low + added.low, min(most_j, alone.high + added.high))


def check_held(menu: Menu, rate_per_s: float, slo_s: float) -> None:
    """Check that inference alone holds a limit at one of a device's points.

    Raises:
        SloUnmet: If it does not.
    """
    if not any(each.in_time((), rate_per_s, slo_s, 0.0) for each in menu.options):
        least_s = min(each.services[0].tail_s for each in menu.options)
        most = max(service.most_per_s for each in menu.options for service in each.services)
        raise SloUnmet(
            f"inference alone does not hold {slo_s * 1e3:g} ms at {rate_per_s:g}/s at any point; a single request "
            f"takes {least_s * 1e3:.3g} ms at its 99th percentile, and {most:.3g}/s is the most that is answered; "
            "allow more time or send fewer requests"
        )


def _summed(
    menu: Menu,
    job: FinetuningJob,
    ahead: Sequence[tuple[LoadInterval, float]],
    slo_s: float,
    power_w: float | None,
    off_peak: OffPeak | None,
    case: _Case,
) -> _Sum:
    total = _Sum()
    at_s = 0.0
    for each, day_s in ahead:
        rate = each.rate_per_s * case.load
        part = _part(menu, rate, slo_s, power_w, off_peak, day_s, case.drawn)
        pace = case.attained * part.pace
        left = job.work - total.samples
        busy_s = 0.0
        if pace > 0:
            busy_s = min(each.length_s, left / pace)
        added_j = part.added_w * busy_s
        requests = rate * each.length_s
        ends = math.isinf(total.done_s) and pace > 0 and busy_s >= left / pace
        total = _Sum(
            float(job.work) if ends or left <= 0 else min(float(job.work), total.samples + pace * busy_s),
            total.alone_j + part.alone_w * each.length_s,
            total.added_j + added_j,
            total.late + requests * (_LATE if part.held else 1.0),
            total.requests + requests,
            at_s + busy_s if ends else total.done_s,
        )
        at_s += each.length_s
    return total


def _part(
    menu: Menu,
    rate_per_s: float,
    slo_s: float,
    power_w: float | None,
    off_peak: OffPeak | None,
    day_s: float,
    drawn: float,
) -> _Part:
    """Return the pace and power of a stretch: where the policy would go, or where most is done within a power."""
    alone = next(iter(menu.ranked(rate_per_s, slo_s, False)), menu.fastest)
    held = alone.in_time((), rate_per_s, slo_s, 0.0) or menu.fastest.in_time((), rate_per_s, slo_s, 0.0)
    alone_w = drawn * _alone_w(alone, rate_per_s, slo_s)
    moment = Moment(0.0, (), alone, slo_s, expected_per_s=rate_per_s, day_s=day_s)
    if off_peak is not None and not off_peak.quiet(moment):
        return _Part(0.0, alone_w, 0.0, held)
    # Within a power a slower point may get more done, because it has to pause less; without one the policy goes to the
    # first.
    able = menu.ranked(rate_per_s, slo_s, True)
    chosen = able[:1] if power_w is None else able
    paces = [_within(option, rate_per_s, slo_s, power_w, drawn) for option in chosen]
    pace, both_w = max(paces, default=(0.0, alone_w))
    if pace > 0:
        return _Part(pace, alone_w, max(0.0, both_w - alone_w), held)
    return _Part(0.0, alone_w, 0.0, held)


def _alone_w(option: Option, rate_per_s: float, slo_s: float) -> float:
    service = option.gathered(rate_per_s, slo_s)
    busy = min(1.0, rate_per_s * service.interval_s / service.batch)
    return busy * service.batch_j / service.interval_s + (1 - busy) * service.idle_w


def _within(
    option: Option, rate_per_s: float, slo_s: float, power_w: float | None, drawn: float = 1.0
) -> tuple[float, float]:
    """Return the pace at an option within a power, and that power; paused for part of the time if it would be more."""
    pace = option.pace(rate_per_s, slo_s)
    piece = option.gap(rate_per_s, slo_s)
    alone_w = drawn * _alone_w(option, rate_per_s, slo_s)
    if piece is None or piece.joules is None or pace <= 0:
        return 0.0, alone_w
    added_w = (piece.joules / piece.alone_s - option.services[0].idle_w) * pace * piece.alone_s / piece.samples
    if power_w is None or added_w <= 0:
        share = 1.0
    else:
        # Fine-tuning is paused for the rest of the time, which is what the ration of a real run comes to.
        share = min(1.0, max(0.0, (power_w - alone_w) / added_w))
    return share * pace, alone_w + share * added_w
