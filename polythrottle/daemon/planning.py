"""From a tuned profile to what the controller follows: a ladder, a safe and a cool point, and bounds."""

from collections.abc import Sequence
from dataclasses import replace

from polythrottle.applying import parted
from polythrottle.daemon.guards import Bounds
from polythrottle.daemon.signals import Plan, Target
from polythrottle.ladder import FULL, Ladder, Rung, Service
from polythrottle.measurement import Measurement
from polythrottle.problem import Constraint
from polythrottle.profile import Profile
from polythrottle.space import OperatingPoint

_BATCH = "batch_size"
_AMPLE = 10.0
"""Times its tail that a workload without a limit on its p99 may take, for want of another measure of too long."""
_ROOM = 0.7
"""The share of its capacity that a lone point is planned for: it was measured back to back, and requests that come
when they like queue, at full load without end (Kleinrock, Queueing Systems, volume 1, 1975)."""
UNTOUCHED = Target(OperatingPoint({}))
"""Every knob of device and workload as it is when nobody tunes it."""


def plan_of(profile: Profile, asked: Bounds | None = None) -> Plan:
    """Return what the controller follows for a profile.

    The safe point is the device's default if that was measured to hold the SLO and to answer what the top rung can,
    else the top rung; the cool point is the coolest rung. A profile without a ladder has no rung to compare with or to
    go to, so that its default need only hold the SLO.

    Args:
        profile: With a ladder or without.
        asked: What the guards hold; what it leaves open is taken from the profile's SLO.
    """
    ladder = profile.ladder or single(profile)
    top, cool = ladder.rungs[ladder.top], ladder.rungs[ladder.coolest]
    needed_per_s = 0.0 if profile.ladder is None else top.rate_per_s
    safe = UNTOUCHED if _holds(profile.default, profile.slo, needed_per_s) else target_of(top)
    return Plan(ladder, safe, target_of(cool), bounds_of(profile.slo, asked))


def target_of(rung: Rung) -> Target:
    """Return what is to hold on a rung."""
    return Target(rung.service.point, rung.gather_s)


def single(profile: Profile) -> Ladder:
    """Return the ladder of a profile's one point, for all loads.

    It is for at most 70 % of what it answered back to back, to leave room for the queue; its p99 is the one measured,
    to which waiting adds. Without its idle power, nothing says that it draws less at partial load, so that nothing less
    is predicted.
    """
    point, seen = profile.point, profile.measurement
    batch = int(point.get(_BATCH, 1))
    power_w = seen.energy_j * seen.throughput_per_s
    idle_w = power_w if seen.idle_power_w is None else min(power_w, seen.idle_power_w)
    tail_s = seen.latency.p99_s or seen.latency.mean_s
    service = Service(
        point, batch, batch / seen.throughput_per_s, seen.latency.mean_s, tail_s, seen.energy_j * batch, idle_w
    )
    rate_per_s = _ROOM * service.most_per_s
    drawn_w = idle_w + _ROOM * (power_w - idle_w)
    return Ladder(p99_limit_s(profile.slo) or _AMPLE * tail_s, (Rung(rate_per_s, service, 0.0, drawn_w, tail_s),))


def bounds_of(slo: Sequence[str], asked: Bounds | None = None) -> Bounds:
    """Return what the guards hold: what was asked, and beside it what an SLO bounds.

    Args:
        slo: Constraints with absolute limits, as texts.
        asked: Limits that go before those.
    """
    limits = {each.metric: each.limit for each in map(Constraint.parse, slo) if not each.relative}
    asked = asked or Bounds()
    return replace(
        asked,
        p99_s=limits.get("p99") if asked.p99_s is None else asked.p99_s,
        power_w=limits.get("power") if asked.power_w is None else asked.power_w,
        temperature_c=limits.get("temperature") if asked.temperature_c is None else asked.temperature_c,
    )


def p99_limit_s(slo: Sequence[str]) -> float | None:
    """Return the tightest limit on the p99 in an SLO; None if there is none."""
    limits_s = [each.limit for each in map(Constraint.parse, slo) if each.metric == "p99" and not each.relative]
    return min(limits_s, default=None)


def device_part(profile: Profile, point: OperatingPoint) -> OperatingPoint:
    """Return the device's part of a point that belongs to a profile, such as one of its ladder."""
    return parted(replace(profile, point=point))[0]


def workload_part(profile: Profile, point: OperatingPoint) -> OperatingPoint:
    """Return the workload's part of a point that belongs to a profile."""
    return parted(replace(profile, point=point))[1]


def _holds(default: Measurement | None, slo: Sequence[str], rate_per_s: float) -> bool:
    """Return whether the default was measured to hold an SLO, and to answer as many requests as are to come."""
    if default is None or FULL * default.throughput_per_s < rate_per_s:
        return False
    limits = [Constraint.parse(text) for text in slo]
    known = all(default.metric(limit.metric) is not None for limit in limits)
    return known and all(not limit.relative and limit.slack(default) >= 0 for limit in limits)
