"""Has a language model's clock raised while prompts wait, as the proxy tells of them, and lowered again."""

import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from polythrottle.daemon.control.events import GPU_CLOCK, ClockWanted, ControlPlan
from polythrottle.daemon.control.state import State
from polythrottle.daemon.traffic.proxy_prompts import PromptSource
from polythrottle.domain.errors import PolythrottleError
from polythrottle.domain.load.prompt_boost import ClockDemand
from polythrottle.domain.space import Level

_EFFECT_S = 0.1
"""What was set holds after this; published are 50 to 200 ms (DynamoLLM, throttLL'eM)."""
_DOWN_S = 0.2
"""A clock is not lowered sooner after it was changed."""
_STEP = 0.03
"""Nor by less than this share of the highest: each change is written and read back."""
_AGAIN_S = 10.0


@dataclass(frozen=True)
class BoardClocks:
    """Which clocks of its GPU a board may be set to.

    Args:
        levels_hz: Ascending.
        others: Levels of the knobs that would hold the clock down, as the board has them by default.
    """

    levels_hz: tuple[int, ...]
    others: Mapping[str, Level]

    def at_least(self, share: float) -> int:
        """Return the lowest level that is no less than a share of the highest."""
        wanted_hz = share * self.levels_hz[-1]
        return next((level for level in self.levels_hz if level >= wanted_hz), self.levels_hz[-1])


class HeldShare:
    """Which share of the highest clock held when, as what was set takes effect a little later."""

    def __init__(self) -> None:
        self._since: deque[tuple[float, float]] = deque([(-math.inf, 1.0)])

    def set(self, now_s: float, share: float) -> None:
        """Note what is set now."""
        if share != self._since[-1][1]:
            self._since.append((now_s + _EFFECT_S, share))

    def mean(self, begin_s: float, end_s: float) -> float:
        """Return the mean share over a time; what held before it is forgotten."""
        while len(self._since) > 1 and self._since[1][0] <= begin_s:
            self._since.popleft()
        if end_s <= begin_s:
            return self._since[0][1]
        ends = [*(at_s for at_s, _ in list(self._since)[1:]), math.inf]
        parts = (
            share * max(0.0, min(end, end_s) - max(at_s, begin_s))
            for (at_s, share), end in zip(self._since, ends, strict=True)
        )
        return sum(parts) / (end_s - begin_s)


class PromptFollower:
    """What is known of prompts, and the clock that is wanted for them.

    Args:
        source: Tells of prompts.
        clocks: Returns what the board may be set to; asked once a plan can be followed by prompts.
    """

    def __init__(self, source: PromptSource, clocks: Callable[[], BoardClocks]) -> None:
        self.fault = ""
        self.demand = ClockDemand()
        self._source = source
        self._ask = clocks
        self._clocks: BoardClocks | None = None
        self._wanted_hz: int | None = None
        self._changed_s = 0.0
        self._asked_s = -math.inf
        self._held = HeldShare()

    def look(self, now_s: float, state: State) -> ClockWanted | None:
        """Return the clock that is wanted from now on; None if nothing changes.

        Args:
            now_s: The time.
            state: Of the controller.
        """
        news = self._source.prompts()
        plan = state.plan
        clocks = None if news is None or plan is None else self._followable(plan, now_s)
        if clocks is None or news is None or plan is None:
            return self._want(None, now_s, "")
        self._held.set(now_s, _share_set(state, clocks))
        before = self.demand.news
        if news is not before:
            held = 1.0 if before is None else self._held.mean(before.heard_s, news.heard_s)
            self.demand = self.demand.heard(news, held, plan.tokens)
        share = self.demand.share(now_s, plan.tokens)
        if share is None:
            return self._want(None, now_s, "")
        wanted_hz = clocks.at_least(share)
        known_hz = self._wanted_hz
        if known_hz is not None and wanted_hz < known_hz:
            soon = 0 <= now_s - self._changed_s < _DOWN_S
            if soon or known_hz - wanted_hz < _STEP * clocks.levels_hz[-1]:
                return None
        return self._want(wanted_hz, now_s, f"{news.waiting} prompts wait, {news.streams} answers are under way")

    def _want(self, gpu_hz: int | None, now_s: float, why: str) -> ClockWanted | None:
        if gpu_hz == self._wanted_hz:
            return None
        self._wanted_hz = gpu_hz
        self._changed_s = now_s
        if gpu_hz is None or self._clocks is None:
            return ClockWanted(None)
        return ClockWanted(gpu_hz, self._clocks.others, why)

    def _followable(self, plan: ControlPlan, now_s: float) -> BoardClocks | None:
        """Return the board's clocks if the plan's point sets one, and somebody is promised a first token in time."""
        if plan.ladder is None or not plan.tokens.first:
            self.fault = ""
            return None
        if GPU_CLOCK not in plan.ladder.rungs[0].service.point:
            self.fault = f"prompts are not followed: the profile does not set {GPU_CLOCK}"
            return None
        if self._clocks is None:
            if 0 <= now_s - self._asked_s < _AGAIN_S:
                return None
            self._asked_s = now_s
            try:
                self._clocks = self._ask()
            except PolythrottleError as error:
                self.fault = f"prompts are not followed: the board does not say which clocks it has: {error}"
                return None
        self.fault = ""
        return self._clocks if self._clocks.levels_hz else None


def _share_set(state: State, clocks: BoardClocks) -> float:
    """Return the share of the highest clock that is set."""
    point = {} if state.applied is None else state.applied.point
    return int(point.get(GPU_CLOCK, clocks.levels_hz[-1])) / clocks.levels_hz[-1]
