"""Limits that are held whatever the ladder says: who trips, and why."""

from collections.abc import Iterator
from dataclasses import dataclass

from polythrottle.backports import StrEnum
from polythrottle.errors import InvalidInput


class Guard(StrEnum):
    """What is watched."""

    P99 = "p99"
    ERRORS = "errors"
    POWER = "power"
    PEAK = "peak power"
    TEMPERATURE = "temperature"
    THROTTLE = "throttling"

    @property
    def hardware(self) -> bool:
        """Whether it is for the device's sake, which goes before the users'."""
        return self not in (Guard.P99, Guard.ERRORS)


@dataclass(frozen=True)
class Bounds:
    """What the guards hold; None is not watched.

    Args:
        p99_s: Of requests; ``power_w`` mean power, ``peak_w`` its highest sample, ``temperature_c`` the hottest sensor.
        errors: The share of requests that may fail.
        throttling: Whether the device may throttle.
        hold_s: How long the safe point is held after everything is well again; doubled when a guard trips soon after.

    Raises:
        InvalidInput: If a limit is not positive.
    """

    p99_s: float | None = None
    power_w: float | None = None
    peak_w: float | None = None
    temperature_c: float | None = None
    errors: float | None = None
    throttling: bool = False
    hold_s: float = 20.0

    def __post_init__(self) -> None:
        limits = (self.p99_s, self.power_w, self.peak_w, self.temperature_c, self.hold_s)
        if any(limit is not None and not limit > 0 for limit in limits) or not (
            self.errors is None or self.errors >= 0
        ):
            raise InvalidInput("the limit of a guard must be positive")


@dataclass(frozen=True)
class Trip:
    """A guard that tripped, and why."""

    guard: Guard
    words: str


@dataclass(frozen=True)
class Observed:
    """What was seen over a control period; what is not known is None, and no guard trips on it.

    Args:
        now_s: When, on a monotonic clock.
        period_s: Since the look before.
        rate_per_s: Requests that arrived per second; unlike the others, the forecast waits for it.
        waiting: Requests that wait to be sent.
        p99_s: Of the requests answered lately, over as long a time as the SLO is meant for.
        power_w: Mean; ``peak_w`` the highest sample.
        temperature_c: Hottest sensor.
        throttled: Whether the device throttles.
        errors: The share of requests that failed.
        worst_s: The longest that a request took which was answered since the look before.
        p99_least_s: What the p99 comes to at least once it is of as long a time as the SLO is meant for; None where
            that has passed, or is not known.
    """

    now_s: float
    period_s: float = 1.0
    rate_per_s: float | None = 0.0
    waiting: int = 0
    p99_s: float | None = None
    power_w: float | None = None
    peak_w: float | None = None
    temperature_c: float | None = None
    throttled: bool | None = None
    errors: float | None = None
    worst_s: float | None = None
    p99_least_s: float | None = None

    @property
    def broken_s(self) -> float | None:
        """The p99 that the guard goes by: no more of it than is certain."""
        return self.p99_s if self.p99_least_s is None else self.p99_least_s


def tripped(bounds: Bounds, seen: Observed) -> tuple[Trip, ...]:
    """Return the guards that trip; none on what was not seen.

    A p99 looks back: it does not trip on what is over, once requests are answered in time again.
    """
    return tuple(trip for trip in _tripped(bounds, seen) if trip.guard is not Guard.P99 or not _over(bounds, seen))


def _over(bounds: Bounds, seen: Observed) -> bool:
    return seen.worst_s is not None and bounds.p99_s is not None and seen.worst_s <= bounds.p99_s


def _tripped(bounds: Bounds, seen: Observed) -> Iterator[Trip]:
    rows = (
        (Guard.P99, seen.broken_s, bounds.p99_s, 1e3, "ms"),
        (Guard.ERRORS, seen.errors, bounds.errors, 1e2, "% of requests"),
        (Guard.POWER, seen.power_w, bounds.power_w, 1.0, "W"),
        (Guard.PEAK, seen.peak_w, bounds.peak_w, 1.0, "W"),
        (Guard.TEMPERATURE, seen.temperature_c, bounds.temperature_c, 1.0, "°C"),
    )
    for guard, value, limit, scale, unit in rows:
        # A value that is no number is a broken sensor, not a good one.
        if value is not None and limit is not None and not value <= limit:
            yield Trip(guard, f"{guard} is {value * scale:.4g} {unit}, above {limit * scale:.4g}")
    if seen.throttled and not bounds.throttling:
        yield Trip(Guard.THROTTLE, "the device throttles")
