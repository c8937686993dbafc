"""What came of serving and fine-tuning side by side, on a real device or a simulated one."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from polythrottle.domain.measurement import Interval, Latency
from polythrottle.metering.intervals import percentile_intervals

_PERCENTILES = ("p50", "p95", "p99")
_Z = 1.96
SLICES_MOST = 20_000
"""Of so many slices it is remembered when they were."""


@dataclass(frozen=True)
class Training:
    """What was fine-tuned.

    Args:
        samples: In whole steps.
        steps: Done.
        epoch: The one that runs, from 0; as many as there are once it is finished.
        epochs: There are.
        finished: Whether the job is.
        done_s: After which time it was; None if it was not.
        loss: Mean of the last step; None if unknown.
        suspended: How often a slice was stopped in the middle, for requests that would have been late.
        restarts: How often the trainer was started again.
        shrunk: How often slices were made smaller, because latencies came near the limit.
        pauses: How often fine-tuning was paused for that.
        stopped: Why there was no fine-tuning any more; empty if there was until the end.
        waited_s: How long it waited because more power was drawn than allowed; None where any was.
        exit_code: Of the failure that stopped it; 0 where none did.
    """

    samples: int
    steps: int
    epoch: int
    epochs: int
    finished: bool
    done_s: float | None = None
    loss: float | None = None
    suspended: int = 0
    restarts: int = 0
    shrunk: int = 0
    pauses: int = 0
    stopped: str = ""
    waited_s: float | None = None
    exit_code: int = 0


@dataclass(frozen=True)
class Result:
    """What came of both.

    Args:
        title: What ran where, for people; says so if it is simulated.
        simulated: Whether times and energy are computed.
        policy: By which.
        arrivals: Of the requests, as text.
        slo_s: The limit of each from its arrival.
        span_s: How long it lasted.
        requests: That arrived.
        late: Of those, answered after their limit or never.
        dropped: Of those, never answered.
        latencies_s: Of those that were answered.
        training: What was fine-tuned.
        energy_j: Of both; None if unknown.
        energy_kind: How the joules came about.
        boundary: What they cover.
        notices: What a reader should know.
        interrupted: Whether it was ended from the keyboard.
        validation: What came of the new model against the served one; None where it was not looked at.
        hours: At which it was fine-tuned, as text; None where they did not matter.
        power_cap_w: Mean power of both kinds of work that was allowed; None for any.
        arrived_s: When those that were answered had come, in the order of their latencies.
        slices_s: From when to when slices were under way, of many the last; stops in the middle included.
    """

    title: str
    simulated: bool
    policy: str
    arrivals: str
    slo_s: float
    span_s: float
    requests: int
    late: int
    dropped: int
    latencies_s: Sequence[float]
    training: Training
    energy_j: float | None
    energy_kind: str
    boundary: str
    notices: tuple[str, ...] = ()
    interrupted: bool = False
    validation: Mapping[str, Any] | None = None
    hours: str | None = None
    power_cap_w: float | None = None
    arrived_s: Sequence[float] = ()
    slices_s: Sequence[tuple[float, float]] = ()

    @property
    def late_share(self) -> float | None:
        """The share of the requests that were late; None if there was none."""
        if self.requests:
            return self.late / self.requests
        return None

    @property
    def late_interval(self) -> Interval | None:
        """Its 95 % interval, if requests are late independently of each other; None if there was none."""
        if self.requests:
            return wilson(self.late, self.requests)
        return None

    @property
    def latency(self) -> Latency | None:
        """Of the requests that were answered; None if none was."""
        if self.latencies_s:
            return Latency.of(self.latencies_s)
        return None

    def percentiles(self) -> dict[str, tuple[float, Interval | None]]:
        """Return p50, p95 and p99 of the answered requests and their 95 % intervals, in seconds; empty without any."""
        latency = self.latency
        if latency is None:
            return {}
        intervals = percentile_intervals(self.latencies_s, _PERCENTILES)
        return {name: (getattr(latency, f"{name}_s"), intervals.get(name)) for name in _PERCENTILES}

    @property
    def held(self) -> bool | None:
        """Whether the p99 of all requests stayed within the limit, dropped ones counted as late; None without any."""
        if self.late_share is None:
            return None
        return self.late_share <= 0.01

    @property
    def mean_power_w(self) -> float | None:
        """Of both kinds of work; None if unknown."""
        if self.energy_j is None or not self.span_s > 0:
            return None
        return self.energy_j / self.span_s

    def document(self) -> dict[str, Any]:
        """Return the same for ``--json``; what is unknown is None."""
        names = ("title", "simulated", "policy", "arrivals", "slo_s", "span_s", "requests", "late", "dropped")
        latency = self.latency
        return {
            **{name: getattr(self, name) for name in names},
            "answered": len(self.latencies_s),
            "late_share": self.late_share,
            "late_share_interval": _ends(self.late_interval),
            "slo_held": self.held,
            "latency_s": {
                "mean": None if latency is None else latency.mean_s,
                **{name: value for name, (value, _) in self.percentiles().items()},
                **{f"{name}_interval": _ends(interval) for name, (_, interval) in self.percentiles().items()},
            },
            "training": vars(self.training) | {"stopped": self.training.stopped or None},
            "energy_j": self.energy_j,
            "mean_power_w": self.mean_power_w,
            "power_cap_w": self.power_cap_w,
            "hours": self.hours,
            "energy_kind": self.energy_kind,
            "boundary": self.boundary,
            "interrupted": self.interrupted,
            "validation": None if self.validation is None else dict(self.validation),
            "notices": list(self.notices),
        }


def _ends(interval: Interval | None) -> list[float | None] | None:
    """Return both ends, None for one that is not known."""
    if interval is None:
        return None
    return [end if math.isfinite(end) else None for end in (interval.low, interval.high)]


def wilson(hits: int, cases: int) -> Interval:
    """Return the 95 % interval of a share (Wilson, J. American Statistical Association 22, 1927).

    Args:
        hits: Of the cases.
        cases: At least 1.
    """
    share = hits / cases
    spread = _Z**2 / cases
    middle = (share + spread / 2) / (1 + spread)
    # Not the normal interval: it has no width at 0 hits, where a claim of "none late" needs one most.
    half = _Z * math.sqrt(share * (1 - share) / cases + spread / (4 * cases)) / (1 + spread)
    low = 0.0
    if hits != 0:
        low = middle - half
    high = 1.0
    if hits != cases:
        high = middle + half
    return Interval(max(0.0, low), min(1.0, high))
