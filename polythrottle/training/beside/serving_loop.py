"""Serving and fine-tuning side by side: one loop over a host with a clock, real or computed, and what comes of it."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from polythrottle.domain.errors import InvalidInput
from polythrottle.domain.load.forecast import Forecast
from polythrottle.domain.measurement import Interval, Latency
from polythrottle.domain.space import OperatingPoint
from polythrottle.metering.intervals import percentile_intervals
from polythrottle.training.beside.operating_options import Menu, Option, Slice
from polythrottle.training.beside.scheduler import Decision, Moment, Policy, taken

LOOK_S = 1.0
"""How often the forecast is told what came."""
INSTANT_S = 1e-9
"""Times that lie closer together are one moment: sums of floats do not meet exactly."""
_ASKED = 100
"""A policy that starts something so often at one moment never comes to rest."""


@dataclass(frozen=True)
class AnsweredBatch:
    """A batch that was answered.

    Args:
        arrived_s: When each of its requests had come.
        ended_s: When the answer was there.
    """

    arrived_s: tuple[float, ...]
    ended_s: float


class ServingHost(Protocol):
    """A device that serves and fine-tunes, with its clock; what is under way and what comes of it is the host's."""

    @property
    def now_s(self) -> float:
        """Seconds since the loop began."""

    @property
    def option(self) -> Option:
        """What the device can do at the point it is at."""

    @property
    def left(self) -> int:
        """Samples of the step at hand that may be begun now."""

    @property
    def serves_until_s(self) -> float | None:
        """When the batch under way should be answered; None where none is."""

    @property
    def training(self) -> bool:
        """Whether a slice runs."""

    @property
    def day_s(self) -> float | None:
        """Time of day in seconds since midnight; None where it does not matter."""

    @property
    def aim_s(self) -> float | None:
        """The latency that may be planned with; None for the limit."""

    @property
    def done(self) -> bool:
        """Whether the job needs nothing more."""

    def queued(self, ages_s: Sequence[float], demand_per_s: float | None) -> None:
        """Hear what waits before the policy is asked: a slice that runs may have to be stopped for it."""

    def move(self, point: OperatingPoint) -> float:
        """Change to another point, and return how long that takes."""

    def train(self, piece: Slice) -> None:
        """Begin a slice."""

    def serve(self, arrived_s: tuple[float, ...]) -> None:
        """Begin to answer a batch."""

    def wait(self, until_s: float, queued: bool) -> Sequence[AnsweredBatch]:
        """Let time pass until then, or until something ends, and return what was answered.

        Args:
            until_s: At the latest.
            queued: Whether requests wait.
        """

    def look(self, period_s: float, answered: int, late: int) -> float:
        """Look after what changes slowly, such as power, and return how long it is until the next look.

        Args:
            period_s: Since the last look.
            answered: Requests so far.
            late: Requests so far that were beyond their limit or dropped.
        """


class ServingLoop:
    """Requests as they come, a policy that says who gets the device next, and what came of both.

    Args:
        host: The device.
        times_s: When requests come, ascending; may go on without end if ``ends_s`` is None.
        slo_s: The limit of each from its arrival.
        rate_per_s: The mean that was announced.
        policy: Who gets the device next.
        ends_s: Before which the loop does not end; None to let requests come until the job is done.
        batch: The largest batch of policies that choose none.
        menu: Points that the policy may choose from; None to stay.
        gives_up_s: When the loop ends whatever is left.

    Attributes:
        requests: That have come.
        late: Of those, answered after their limit or never.
        dropped: Of those, never answered.
        latencies_s: Of those that were answered, in the order of their answers.
        arrived_s: When those had come.
    """

    def __init__(
        self,
        host: ServingHost,
        times_s: Iterable[float],
        slo_s: float,
        rate_per_s: float,
        policy: Policy,
        *,
        ends_s: float | None,
        batch: int = 1,
        menu: Menu | None = None,
        gives_up_s: float = math.inf,
    ) -> None:
        self._host = host
        self._ahead = iter(times_s)
        self._next_s = next(self._ahead, math.inf)
        self._slo_s = slo_s
        self._policy = policy
        self._ends_s = ends_s
        self._batch = batch
        self._menu = menu
        self._gives_up_s = gives_up_s
        self._waiting: deque[float] = deque()
        self._forecast = Forecast().seen(0.0, rate_per_s, LOOK_S)
        self._period_s = LOOK_S
        self._look_s = LOOK_S
        self._since_look = 0
        self.requests = 0
        self.late = 0
        self.dropped = 0
        self.latencies_s: list[float] = []
        self.arrived_s: list[float] = []

    def run(self) -> None:
        """Serve until no request is left and the job needs nothing more.

        Raises:
            InvalidInput: If the policy never comes to rest.
            PolythrottleError: What the host's work fails with.
        """
        while not self._over() and self._host.now_s <= self._gives_up_s:
            until_s = self._ask()
            self._pass(math.inf if until_s is None else until_s)

    def _over(self) -> bool:
        if self._ends_s is None and self._host.done:
            self._next_s = math.inf
        busy = math.isfinite(self._next_s) or self._waiting or self._host.serves_until_s is not None
        if busy or self._host.now_s < (self._ends_s or 0.0) - INSTANT_S:
            return False
        return self._host.done

    def _ask(self) -> float | None:
        """Do what the policy says until it says nothing; return when it wants to be asked again at the latest."""
        self._host.queued(self._ages_s(), self._forecast.demand_per_s)
        for _ in range(_ASKED):
            decision = self._policy(self._moment())
            if decision.idle:
                return decision.until_s
            self._do(decision)
        raise InvalidInput("the policy never comes to rest: it changes the operating point again and again")

    def _ages_s(self) -> tuple[float, ...]:
        now_s = self._host.now_s
        return tuple(max(0.0, now_s - each) for each in self._waiting)

    def _moment(self) -> Moment:
        host = self._host
        return Moment(
            now_s=host.now_s,
            ages_s=self._ages_s(),
            option=host.option,
            slo_s=self._slo_s,
            left=host.left,
            expected_per_s=self._forecast.demand_per_s,
            busy_until_s=host.serves_until_s,
            training=host.training,
            batch=self._batch,
            menu=self._menu,
            day_s=host.day_s,
            mean_per_s=self._forecast.slow_per_s,
            aim_s=host.aim_s,
        )

    def _do(self, decision: Decision) -> None:
        if decision.point is not None:
            # Clocks take time to settle, in which requests come and work goes on at the new point already.
            settled_s = self._host.now_s + self._host.move(decision.point)
            while self._host.now_s < settled_s - INSTANT_S:
                self._pass(settled_s)
            return
        for _ in range(decision.drop):
            self._waiting.popleft()
            self.late += 1
            self.dropped += 1
        if decision.run is not None:
            self._host.train(decision.run)
        if decision.batch:
            self._host.serve(taken(self._waiting, decision))

    def _pass(self, until_s: float) -> None:
        """Let time pass until then or the next thing that happens, and take note of what ended and came."""
        for answer in self._host.wait(min(self._next_s, self._look_s, until_s), bool(self._waiting)):
            took_s = [answer.ended_s - each for each in answer.arrived_s]
            self.latencies_s += took_s
            self.arrived_s += answer.arrived_s
            self.late += sum(each > self._slo_s for each in took_s)
        now_s = self._host.now_s
        while self._next_s <= now_s + INSTANT_S:
            self._waiting.append(self._next_s)
            self.requests += 1
            self._since_look += 1
            self._next_s = next(self._ahead, math.inf)
        if now_s >= self._look_s - INSTANT_S:
            self._look(now_s)

    def _look(self, now_s: float) -> None:
        """Tell the forecast what came since the last look, which on a busy machine may be longer ago than planned."""
        behind_s = now_s - self._look_s
        if behind_s > INSTANT_S:
            self._period_s += behind_s
            self._look_s = now_s
        self._forecast = self._forecast.seen(now_s, self._since_look / self._period_s, self._period_s)
        self._since_look = 0
        self._period_s = self._host.look(self._period_s, len(self.latencies_s), self.late)
        self._look_s += self._period_s


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
