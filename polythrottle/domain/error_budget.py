"""An error budget: how many requests a search on a live service may make late beyond what its SLO allows anyway."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from polythrottle.domain.errors import InvalidInput
from polythrottle.domain.problem import Constraint, Problem
from polythrottle.domain.units import show_count, span_s

_AMOUNT = re.compile(r"(\d{1,12}(?:\.\d{0,9})?|\.\d{1,9})(%?)")
# Without itl: its percentile is one of the gaps between tokens, of which a request has many.
_SINGLE = re.compile(r"(?:ttft_|tpot_)?p(\d\d)")
_EXAMPLES = "write for example 0.1%, 200 (requests) or 5min"


def late_share(metric: str) -> float | None:
    """Return which share of requests may be over a limit on a percentile; None of what is not one of requests."""
    match = _SINGLE.fullmatch(metric)
    if match is None:
        return None
    return (100 - int(match[1])) / 100


@dataclass(frozen=True)
class ErrorBudget:
    """What somebody allows a search: a share of its requests, a number of them, or those that come in a time.

    Args:
        text: As written: ``0.1%``, ``200`` or ``5min``.
        share: Of the requests of a search; None if another is given, as of the next two.
        count: A number of requests.
        span_s: A time.
    """

    text: str
    share: float | None = None
    count: float | None = None
    span_s: float | None = None

    @classmethod
    def parse(cls, text: str) -> ErrorBudget:
        """Return the budget a text means.

        Raises:
            InvalidInput: If it means none, or one of nothing.
        """
        text = "".join(text.split())
        match = _AMOUNT.fullmatch(text)
        if match is None:
            try:
                return cls(text, span_s=span_s(text))
            except InvalidInput:
                raise InvalidInput(f"{text[:40]!r} is not an error budget; {_EXAMPLES}") from None
        amount = float(match[1])
        if amount <= 0 or (match[2] and amount > 100):
            raise InvalidInput(f"an error budget is above nothing and at most all, not {text[:40]}; {_EXAMPLES}")
        if match[2]:
            return cls(text, share=amount / 100)
        return cls(text, count=amount)

    def requests(self, problem: Problem, trials: int) -> float:
        """Return how many requests that is.

        A share is one of all requests that so many trials may send at most; a time stands for what comes in it.

        Args:
            problem: What is searched.
            trials: How many the search may make.

        Raises:
            InvalidInput: If no limit is on single requests, one is relative, or a time is given of a closed loop.
        """
        check_limits(problem.constraints)
        if self.count is not None:
            return self.count
        if self.share is not None:
            return self.share * self.expected(problem, trials)
        offered_per_s = problem.arrivals.offered_per_s
        if offered_per_s is None or self.span_s is None:
            raise InvalidInput(
                f"an error budget of {self.text} is as many requests as come in that time, which a closed loop does "
                "not say; add --arrivals, or write a share or a number of requests"
            )
        return self.span_s * offered_per_s

    def expected(self, problem: Problem, trials: int) -> int:
        """Return how many requests so many trials may send at most, windows that are repeated left out."""
        window = problem.window
        # Warm-up counts: on a live service its requests are users' too.
        return trials * (window.warmup + window.most_queries)

    def words(self, problem: Problem, trials: int) -> str:
        """Return what is allowed, for people."""
        most = f"at most {show_count(self.requests(problem, trials))} requests late beyond the SLO's own share"
        if self.share is not None:
            return f"{most} ({self.text} of the {self.expected(problem, trials):,} that {trials} trials may send)"
        if self.count is not None:
            return most
        return f"{most} (what comes in {self.text})"

    def __str__(self) -> str:
        return self.text


def check_limits(constraints: Sequence[Constraint]) -> None:
    """Check that limits say of a request, once it is answered, whether it is late.

    Raises:
        InvalidInput: If none does, or one that does is relative.
    """
    single = [one for one in constraints if late_share(one.metric) is not None]
    if not single:
        raise InvalidInput("an error budget counts late requests: give an SLO on a percentile, such as p99<=25ms")
    if relative := next((one for one in single if one.relative), None):
        raise InvalidInput(
            f"{relative} is known only once the default was measured, and an error budget counts from the first "
            "request on; write the limit in ms"
        )


@dataclass(frozen=True)
class LateRequests:
    """How many requests were sent, and how many of them were late: of one trial, or of several added up.

    What one trial leaves of the share that a limit allows anyway is not carried over to the next.

    Args:
        sent: All of them.
        late: By the metric of the limit: those over it, and those of which nobody knows.
        beyond: By the metric: those beyond the limit's share, each trial for itself.
        forfeited: What trials may have spent whose end nobody saw, as of a process that was killed.

    Raises:
        InvalidInput: If a figure is negative, or more were late than sent.
    """

    sent: int = 0
    late: Mapping[str, int] = field(default_factory=dict)
    beyond: Mapping[str, float] = field(default_factory=dict)
    forfeited: float = 0.0

    def __post_init__(self) -> None:
        if not all(0 <= count <= self.sent for count in self.late.values()) or not 0 <= self.forfeited < math.inf:
            raise InvalidInput(f"{dict(self.late)} of {self.sent} requests cannot have been late")

    @classmethod
    def of_trial(cls, sent: int, late: Mapping[str, int]) -> LateRequests:
        """Return what one trial has spent."""
        # Not below zero: what a good trial leaves of its share would pay for a bad one.
        beyond = {metric: max(0.0, count - (late_share(metric) or 0.0) * sent) for metric, count in late.items()}
        return cls(sent, late, beyond)

    def __add__(self, other: LateRequests) -> LateRequests:
        names = {**self.late, **other.late}
        return LateRequests(
            self.sent + other.sent,
            {name: self.late.get(name, 0) + other.late.get(name, 0) for name in names},
            {name: self.beyond.get(name, 0.0) + other.beyond.get(name, 0.0) for name in names},
            self.forfeited + other.forfeited,
        )

    def most_beyond(self) -> float:
        """Return how many were late beyond the share of a limit, by the limit most are over, and were forfeited."""
        return max(self.beyond.values(), default=0.0) + self.forfeited


NOTHING_SPENT = LateRequests()


@dataclass(frozen=True)
class ErrorAccount:
    """What a study has spent of its error budget.

    Args:
        most: How many requests may be late beyond the SLO's own share.
        spent: What was.
        metrics: Of the limits that say of a request whether it is late.
        allowed: In words.
    """

    most: float
    spent: LateRequests
    metrics: tuple[str, ...]
    allowed: str

    @classmethod
    def of(cls, budget: ErrorBudget, problem: Problem, trials: int, spent: LateRequests) -> ErrorAccount:
        """Return the account of a study."""
        return cls(
            budget.requests(problem, trials),
            spent,
            single_metrics(problem.constraints),
            budget.words(problem, trials),
        )

    @property
    def left(self) -> float:
        """How many more may be."""
        return max(0.0, self.most - self.spent.most_beyond())

    @property
    def words(self) -> str:
        """All of it, for people."""
        late = ", ".join(f"{self.spent.late.get(name, 0):,} over {name}" for name in self.metrics)
        lost = ""
        if self.spent.forfeited:
            lost = f", {show_count(self.spent.forfeited)} put down for trials whose end nobody saw"
        beyond = show_count(max(self.spent.beyond.values(), default=0.0))
        left = show_count(self.left)
        return f"{self.allowed}: {late} of {self.spent.sent:,} sent, {beyond} beyond it{lost}; {left} left"


def single_metrics(constraints: Sequence[Constraint]) -> tuple[str, ...]:
    """Return the metrics whose limits say of a single request whether it is late."""
    return tuple(dict.fromkeys(one.metric for one in constraints if late_share(one.metric) is not None))
