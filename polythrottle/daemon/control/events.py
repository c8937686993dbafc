"""Events and actions of the controller: what it is told, what it says is to be done.

The guards that trip on what is observed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Union

from polythrottle.domain.backports import StrEnum
from polythrottle.domain.errors import InvalidInput
from polythrottle.domain.ladder import Ladder
from polythrottle.domain.load.prompt_boost import TokenLimits
from polythrottle.domain.metrics import PromptClass
from polythrottle.domain.space import Level, OperatingPoint

# Limits that are held whatever the ladder says: who trips, and why.


_LATE = 0.01
"""The share of requests that a p99 lets be late."""
_LEAST = 20
_CHANCE = 1 / 1440
"""Prompts that are late as often as a p99 lets them trip a guard in about one minute of a day."""


class Guard(StrEnum):
    """What is watched."""

    P99 = "p99"
    TTFT = "ttft p99"
    TPOT = "tpot p99"
    ERRORS = "errors"
    POWER = "power"
    PEAK = "peak power"
    TEMPERATURE = "temperature"
    THROTTLE = "throttling"

    @property
    def hardware(self) -> bool:
        """Whether it is for the device's sake, which goes before the users'."""
        return not self.latency and self is not Guard.ERRORS

    @property
    def latency(self) -> bool:
        """Whether it is how long users wait."""
        return self in (Guard.P99, Guard.TTFT, Guard.TPOT)


@dataclass(frozen=True)
class Bounds:
    """What the guards hold; None is not watched.

    Args:
        p99_s: Of requests; ``power_w`` mean power, ``peak_w`` its highest sample, ``temperature_c`` the hottest sensor.
        errors: The share of requests that may fail.
        throttling: Whether the device may throttle.
        hold_s: How long the safe point is held after everything is well again; doubled when a guard trips soon after.
        ttft_s: Of a language model's requests, the p99 of the time to the first token; ``tpot_s`` per token after it.
        ttft_of: Limits on that p99 of prompts of some lengths alone.

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
    ttft_s: float | None = None
    tpot_s: float | None = None
    ttft_of: tuple[tuple[PromptClass, float], ...] = ()

    def __post_init__(self) -> None:
        limits = (
            self.p99_s,
            self.ttft_s,
            self.tpot_s,
            *(limit_s for _, limit_s in self.ttft_of),
            self.power_w,
            self.peak_w,
            self.temperature_c,
            self.hold_s,
        )
        # Not `<= 0`, which is false of NaN too.
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
class Observation:
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
        ttft_p99_s: Of the requests answered lately, the time to the first token; ``tpot_p99_s`` per token after it.
        firsts: Tokens of each prompt that had its first token in the last minute, and the seconds until then.
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
    ttft_p99_s: float | None = None
    tpot_p99_s: float | None = None
    firsts: tuple[tuple[float, float], ...] = ()

    @property
    def broken_s(self) -> float | None:
        """The p99 that the guard goes by: no more of it than is certain."""
        if self.p99_least_s is None:
            return self.p99_s
        return self.p99_least_s


def tripped(bounds: Bounds, seen: Observation) -> tuple[Trip, ...]:
    """Return the guards that trip; none on what was not seen.

    A p99 looks back: it does not trip on what is over, once requests are answered in time again.
    """
    return tuple(trip for trip in _tripped(bounds, seen) if trip.guard is not Guard.P99 or not _over(bounds, seen))


def _over(bounds: Bounds, seen: Observation) -> bool:
    return seen.worst_s is not None and bounds.p99_s is not None and seen.worst_s <= bounds.p99_s


def _tripped(bounds: Bounds, seen: Observation) -> Iterator[Trip]:
    rows = (
        (Guard.P99, seen.broken_s, bounds.p99_s, 1e3, "ms"),
        (Guard.TTFT, seen.ttft_p99_s, bounds.ttft_s, 1e3, "ms"),
        (Guard.TPOT, seen.tpot_p99_s, bounds.tpot_s, 1e3, "ms"),
        (Guard.ERRORS, seen.errors, bounds.errors, 1e2, "% of requests"),
        (Guard.POWER, seen.power_w, bounds.power_w, 1.0, "W"),
        (Guard.PEAK, seen.peak_w, bounds.peak_w, 1.0, "W"),
        (Guard.TEMPERATURE, seen.temperature_c, bounds.temperature_c, 1.0, "°C"),
    )
    for guard, value, limit, scale, unit in rows:
        # A value that is no number is a broken sensor, not a good one.
        if value is not None and limit is not None and not value <= limit:
            yield Trip(guard, f"{guard} is {value * scale:.4g} {unit}, above {limit * scale:.4g}")
    for wait in waits_of(bounds, seen):
        if wait.broken:
            late = f"{wait.late} of {wait.seen} first tokens came later than {wait.limit_s * 1e3:.4g} ms"
            yield Trip(Guard.TTFT, f"{late} for {wait.prompts}")
    if seen.throttled and not bounds.throttling:
        yield Trip(Guard.THROTTLE, "the device throttles")


@dataclass(frozen=True)
class PromptWait:
    """How long prompts of some lengths waited for their first token lately.

    Args:
        prompts: Which.
        limit_s: On the p99.
        seen: How many there were; ``late`` of them waited longer than that.
        late: See ``seen``.
        p99_s: None while there are fewer than 20.
    """

    prompts: PromptClass
    limit_s: float
    seen: int
    late: int
    p99_s: float | None

    @property
    def broken(self) -> bool:
        """Whether more than 1 % are late, and not by chance: so many of so few are in one minute of a day."""
        return self.late > _LATE * self.seen and _chance_of(self.late, self.seen) < _CHANCE


def waits_of(bounds: Bounds, seen: Observation) -> Iterator[PromptWait]:
    """Yield how long prompts waited of each length that has a limit of its own."""
    for prompts, limit_s in bounds.ttft_of:
        # The proxy guesses lengths, so that they are no whole numbers.
        waits_s = sorted(wait_s for tokens, wait_s in seen.firsts if round(tokens) in prompts)
        p99_s = None
        if len(waits_s) >= _LEAST:
            p99_s = waits_s[math.ceil((1 - _LATE) * len(waits_s)) - 1]
        yield PromptWait(prompts, limit_s, len(waits_s), sum(wait_s > limit_s for wait_s in waits_s), p99_s)


def _chance_of(late: int, of: int) -> float:
    """Return how likely at least so many are late where each is with 1 % (binomial)."""
    odds = _LATE / (1 - _LATE)
    # At most 4,096 prompts are told of, for which this is 1e-18: nothing underflows.
    term = (1 - _LATE) ** of
    below = 0.0
    for number in range(late):
        below += term
        term *= odds * (of - number) / (number + 1)
    return 1.0 - below


# What the controller is told, and what it says is to be done: plain values.

GPU_CLOCK = "gpu_max_hz"
_GPU_LOWEST = "gpu_min_hz"


@dataclass(frozen=True)
class Target:
    """What is to hold: a point, and how long the server may keep a request waiting for others, in seconds."""

    point: OperatingPoint
    gather_s: float = 0.0


@dataclass(frozen=True)
class ControlPlan:
    """What is known about a workload.

    Args:
        ladder: Its points along load; None if its model has none that is valid, so that it stays at the safe point.
        safe: Where latency and errors are surely all right, such as the device's default.
        cool: Where power and heat surely are.
        bounds: What the guards hold.
        tokens: How long users of a language model may wait for tokens, by the lengths of their prompts.
    """

    ladder: Ladder | None
    safe: Target
    cool: Target
    bounds: Bounds
    tokens: TokenLimits = field(default_factory=TokenLimits)


@dataclass(frozen=True)
class WorkloadUp:
    """A workload has started, or has been replaced by another."""

    plan: ControlPlan


@dataclass(frozen=True)
class WorkloadDown:
    """The workload has ended."""


@dataclass(frozen=True)
class PowerBudget:
    """The most mean power from now on, in watts; None if there is no such limit."""

    limit_w: float | None


@dataclass(frozen=True)
class PowerShare:
    """The most that may be drawn whatever load comes, in watts: a part of what several services share; None if none."""

    limit_w: float | None


@dataclass(frozen=True)
class Suspend:
    """The machine goes to sleep."""


@dataclass(frozen=True)
class Resume:
    """The machine is awake again."""


@dataclass(frozen=True)
class DriverReload:
    """The driver was loaded anew, so that nothing may hold any more."""


@dataclass(frozen=True)
class ForeignWrite:
    """Somebody else has changed what this daemon set."""

    now_s: float
    knobs: tuple[str, ...]


@dataclass(frozen=True)
class Reclaim:
    """A person wants the daemon to set the board again after it gave way."""


@dataclass(frozen=True)
class ModelChanged:
    """The served model is another one, with a ladder of its own or none."""

    ladder: Ladder | None


@dataclass(frozen=True)
class Replanned:
    """The same workload is to be followed by another profile: what is known of its load stays known."""

    plan: ControlPlan


@dataclass(frozen=True)
class DriftFound:
    """The profile's predictions no longer hold."""

    words: str


@dataclass(frozen=True)
class StudyOffered:
    """There is time, energy and room for violations to explore."""


@dataclass(frozen=True)
class StudyAsked:
    """Somebody wants a study now, whatever else says that there is time."""

    words: str


@dataclass(frozen=True)
class StudyEnded:
    """A study has ended, with a better ladder or none."""

    ladder: Ladder | None


@dataclass(frozen=True)
class TrainerChanged:
    """A trainer beside the workload has begun or ceased to work; ``runs`` is whether it does, ``words`` say it."""

    runs: bool
    words: str


@dataclass(frozen=True)
class ClockWanted:
    """The GPU clock that prompts and tokens of a language model need now, in place of that of the rung.

    Args:
        gpu_hz: Which; None leaves the rung's.
        others: Levels of other knobs that do not hold it down, where nobody bounds the power.
        words: Why.
    """

    gpu_hz: int | None
    others: Mapping[str, Level] = field(default_factory=dict)
    words: str = ""

    def moved(self, point: OperatingPoint, bounded: bool) -> OperatingPoint:
        """Return a point at this clock.

        Args:
            point: Of a rung.
            bounded: Whether the power is, so that no clock above the rung's may be set.
        """
        gpu_hz = self.gpu_hz
        if gpu_hz is None:
            return point
        levels: dict[str, Level] = {} if bounded else dict(self.others)
        levels[GPU_CLOCK] = min(gpu_hz, int(point[GPU_CLOCK])) if bounded else gpu_hz
        if _GPU_LOWEST in point:
            # The kernel refuses a lowest clock above the highest.
            levels[_GPU_LOWEST] = min(int(point[_GPU_LOWEST]), int(levels[GPU_CLOCK]))
        return point.moved(levels)


@dataclass(frozen=True)
class ApplyRefused:
    """What was to be applied could not be: the device refused it, or is not there."""

    words: str


@dataclass(frozen=True)
class LeaseLost:
    """The right to write is gone; whoever keeps it has restored the board or does so. ``words`` say what happened."""

    words: str = "the right to set the board is lost"


@dataclass(frozen=True)
class LeaseGained:
    """The right to write is there again."""


Event = Union[
    WorkloadUp,
    WorkloadDown,
    Observation,
    PowerBudget,
    PowerShare,
    Suspend,
    Resume,
    DriverReload,
    ForeignWrite,
    Reclaim,
    ModelChanged,
    Replanned,
    DriftFound,
    StudyOffered,
    StudyAsked,
    StudyEnded,
    TrainerChanged,
    ClockWanted,
    ApplyRefused,
    LeaseLost,
    LeaseGained,
]


@dataclass(frozen=True)
class Apply:
    """Set a point of the ladder."""

    target: Target
    reason: str


@dataclass(frozen=True)
class GoSafe:
    """Set the safe or the cool point, before anything else is done."""

    target: Target
    reason: str


@dataclass(frozen=True)
class Restore:
    """Put everything back to how it was found."""

    reason: str


@dataclass(frozen=True)
class Verify:
    """Find the device again and read back what holds, before anything is written."""

    reason: str


@dataclass(frozen=True)
class StartStudy:
    """Let a study continue from its journal; it sets the board until it ends."""

    reason: str


@dataclass(frozen=True)
class StopStudy:
    """End the study at once; its journal keeps what it knows."""

    reason: str


@dataclass(frozen=True)
class Alert:
    """Tell people.

    Args:
        kind: One word for machines.
        words: For people.
        trips: The guards that tripped, if that is what happened.
    """

    kind: str
    words: str
    trips: tuple[Trip, ...] = ()


Action = Union[Apply, GoSafe, Restore, Verify, StartStudy, StopStudy, Alert]
