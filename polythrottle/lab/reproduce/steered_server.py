"""A simulated server of a language model whose clock and power limit a policy sets while it serves.

The policy is asked every period, and whenever a request comes; what it asks for takes effect after a while, also within
a step.
"""

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from polythrottle.backends.simulated.engine import StepPhysics, StepWork
from polythrottle.backends.simulated.language_model import Step, TokenRequest, TokenServer
from polythrottle.domain.load.prompt_boost import WaitingPrompt

TTFT_S = 0.6
LONG_TTFT_S = 2.0
LONG_PROMPT = 4096
TPOT_S = 0.1
"""Limits: time to the first token at p99, that of prompts longer than so many tokens, and time per token at p99."""
BUDGET = 1024
"""Tokens of a step (``max_num_batched_tokens``): a piece of 2,048 takes an A100 longer than `TPOT_S`."""


def ttft_limit_s(prompt_tokens: int) -> float:
    """Return the limit on the time to the first token of a prompt."""
    return LONG_TTFT_S if prompt_tokens > LONG_PROMPT else TTFT_S


@dataclass
class ServerView:
    """What a policy sees before a step.

    Args:
        now_s: On the server's clock.
        server: Its queue and what runs.
        physics: Of its steps.
        clocks_hz: That can be set, ascending.
        gpu_hz: The one that runs.
        coming: Requests that have not come yet; only a clairvoyant looks.
        step: The last step; None before the first.
        arrived_tokens: Of prompts that have come so far, together.
    """

    now_s: float
    server: TokenServer
    physics: StepPhysics
    clocks_hz: Sequence[float]
    gpu_hz: float
    coming: deque[TokenRequest]
    step: Step | None = None
    arrived_tokens: int = 0

    @property
    def top_hz(self) -> float:
        """The highest clock."""
        return self.clocks_hz[-1]

    def at_least(self, gpu_hz: float) -> float:
        """Return the lowest clock that is not below another; the highest if all are."""
        return next((each for each in self.clocks_hz if each >= gpu_hz), self.top_hz)

    def clock_for(self, work: StepWork, limit_s: float, steps: int = 1) -> float:
        """Return the lowest clock at which some like steps take no longer than a limit; the highest if none does."""
        still_s, clocked_s = self.physics.split(work)
        left_s = limit_s / steps - still_s
        if left_s <= 0:
            return self.top_hz
        return self.at_least(clocked_s * self.top_hz / left_s)

    @property
    def prompt_tokens_per_s(self) -> float:
        """Tokens of prompts that full steps compute a second at the highest clock."""
        return BUDGET / self.physics.duration_s(StepWork(0, 0, BUDGET, BUDGET * 1024, 1), self.top_hz)

    def starting(self) -> Iterator[WaitingPrompt]:
        """Yield the prompts that have no first token yet, in order, with what is left of them."""
        lefts = [(request, request.target - request.computed) for request in self.server.prompts]
        lefts += [(request, request.prompt_tokens + request.made) for request in self.server.waiting]
        for request, left in lefts:
            # One that is computed again has had its first token: it is only in the way of others.
            first = request.first_s is None
            yield WaitingPrompt(left, request.arrival_s + ttft_limit_s(request.prompt_tokens) if first else math.inf)

    def take(self) -> bool:
        """Queue the requests that have reached the scheduler; return whether there are any."""
        new = False
        while self.coming and self.coming[0].ready_s <= self.now_s:
            request = self.coming.popleft()
            self.arrived_tokens += request.prompt_tokens
            self.server.add(request)
            new = True
        return new

    def decoding(self) -> StepWork:
        """Return a step that only makes tokens."""
        return StepWork(self.server.decoding, self.server.context)

    def thriftiest(self, work: StepWork) -> float:
        """Return the clock at which a step adds least to what an idle engine draws anyway."""
        idle_w = self.physics.idle_w()

        def added_j(gpu_hz: float) -> float:
            return (self.physics.power_w(work, gpu_hz) - idle_w) * self.physics.duration_s(work, gpu_hz)

        return min(self.clocks_hz, key=added_j)


class Policy(Protocol):
    """Says which clock and which power limit the card is to have."""

    period_s: float
    delay_s: float

    def wish(self, view: ServerView) -> tuple[float, float]:
        """Return the clock in Hz and the power limit in watts to set now."""


class Wishes:
    """What a policy has asked for, and what of it holds by now.

    Args:
        policy: Which is asked.
        limit_w: The card's own power limit.
    """

    def __init__(self, policy: Policy, limit_w: float) -> None:
        self._policy = policy
        self._limit_w = limit_w
        self._coming: deque[tuple[float, float, float]] = deque()
        self._asked_s = -math.inf
        self.cap_w = limit_w

    @property
    def next_s(self) -> float:
        """When the next change takes effect; infinite if none is under way."""
        return self._coming[0][0] if self._coming else math.inf

    def update(self, view: ServerView, new: bool) -> None:
        """Ask if it is time or a request has come, and take over what has taken effect."""
        if new or view.now_s - self._asked_s >= self._policy.period_s:
            gpu_hz, power_w = self._policy.wish(view)
            self._coming.append((view.now_s + self._policy.delay_s, gpu_hz, min(power_w, self._limit_w)))
            self._asked_s = view.now_s
        while self.next_s <= view.now_s:
            _, view.gpu_hz, self.cap_w = self._coming.popleft()


def steps(view: ServerView, policy: Policy, left: int, limit_w: float) -> Iterator[tuple[Step, float]]:
    """Yield each step and how long the engine stood idle before it, until so many requests are answered."""
    wishes = Wishes(policy, limit_w)
    saw: Callable[[Step], None] | None = getattr(policy, "saw", None)
    while left:
        idle_s = 0.0
        if view.server.idle:
            idle_s = max(0.0, view.coming[0].ready_s - view.now_s)
            view.now_s += idle_s
        wishes.update(view, view.take())
        view.step = _step(view, wishes)
        left -= len(view.step.finished)
        if saw is not None:
            saw(view.step)
        yield view.step, idle_s


def _step(view: ServerView, wishes: Wishes) -> Step:
    """Run one step; a clock that takes effect within it holds for what is left of it."""
    work, pieces = view.server.plan()
    begin_s, energy_j, left = view.now_s, 0.0, 1.0
    while True:
        whole_s, power_w, gpu_hz = view.physics.run(work, view.gpu_hz, wishes.cap_w)
        event_s = min(wishes.next_s, view.coming[0].ready_s if view.coming else math.inf)
        part_s = min(left * whole_s, event_s - view.now_s)
        energy_j += part_s * power_w
        if part_s == left * whole_s:
            view.now_s += part_s
            break
        left -= part_s / whole_s
        view.now_s = event_s
        wishes.update(view, view.take())
    duration_s = view.now_s - begin_s
    return view.server.advance(begin_s, work, pieces, (duration_s, energy_j / duration_s, gpu_hz))
