"""Which clock a language model's server needs: low between prompts, and at once a higher one while prompts wait.

Nothing but what a proxy or a server's metrics tell is asked for: how many tokens of prompts come, which prompts have no
first token yet, and, measured once, how fast prompts are computed at the highest clock.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from polythrottle.domain.metrics import PromptClass


@dataclass(frozen=True)
class WaitingPrompt:
    """A prompt whose first token has not come.

    Args:
        tokens: That are still to be computed of it.
        due_s: When its first token is due, by the limit on it.
    """

    tokens: float
    due_s: float


@dataclass(frozen=True)
class PromptBoost:
    """The clock that prompts need, as a share of the highest; computing prompts is taken to go with the clock.

    Between prompts a floor holds, for a change of clock takes time that the next prompt lacks. The floor rises with the
    load of prompts: the busier the engine, the more of them meet others before them. `floor`, `rise`, `share` and
    `window_s` were chosen on the first eight minutes of one trace (benchmarks/llm_policies.md).

    Args:
        tokens_per_s: Tokens of prompts that are computed a second at the highest clock.
        floor: The least share, while no prompts come.
        rise: By how much that grows for an engine that does nothing but compute prompts.
        share: Of the time that a prompt has left, which it may take as far as is known; others may come after it.
        window_s: Over how long the load is averaged.
        load: Share of the time that prompts take at the highest clock, lately.
        seen_s: Up to when.
    """

    tokens_per_s: float
    floor: float = 0.35
    rise: float = 1.5
    share: float = 0.3
    window_s: float = 10.0
    load: float = 0.0
    seen_s: float = 0.0

    def arrived(self, now_s: float, tokens: float) -> PromptBoost:
        """Return what is known after so many tokens of prompts have come since the last time."""
        fades = math.exp(-max(0.0, now_s - self.seen_s) / self.window_s)
        load = self.load * fades + tokens / (self.tokens_per_s * self.window_s)
        return replace(self, load=load, seen_s=max(now_s, self.seen_s))

    @property
    def least(self) -> float:
        """The share of the highest clock that holds while no prompt waits."""
        return min(1.0, self.floor + self.rise * self.load)

    def needed(self, now_s: float, prompts: Iterable[WaitingPrompt]) -> float:
        """Return the share of the highest clock that is needed now, never less than `least`.

        Args:
            now_s: The time.
            prompts: That have no first token, in the order in which they are computed.
        """
        tokens = 0.0
        needed = self.least
        for prompt in prompts:
            tokens += prompt.tokens
            left_s = self.share * (prompt.due_s - now_s)
            if left_s <= 0:
                return 1.0
            needed = max(needed, tokens / (self.tokens_per_s * left_s))
        return min(1.0, needed)


# The same from what a proxy tells, and nothing else: how fast prompts are computed is learnt, and tokens are paced.

_KEPT = 0.995
"""What is left of what was learnt from a prompt once another one has come: some 200 are remembered."""
_KNOWN_S = 2.0
"""After so much time spent on prompts their rate is known well enough to go by."""
_MARGINAL_MOST = 2.0
"""By how much a token more may be faster than a token on average: most of a short prompt's time is no token's."""
_GUESS = 0.25
_SURE = 0.8
"""The share of what should have been computed of a prompt by now that is counted on."""
_PACE_S = 1.0
_PACE = 0.7
"""The share of the limit on the time per token that tokens may take, so that most of them take less."""


@dataclass(frozen=True)
class PromptNews:
    """What a proxy tells of prompts and tokens at one moment; counts are since it began.

    Args:
        heard_s: When.
        arrived: Tokens of prompts that have come.
        begun: Tokens of those that have had their first token; ``firsts`` is how many those are.
        prompts: Tokens of each that has had none, and when it came, in that order; perhaps not all.
        waiting: How many have had none; ``sent`` of them have reached the server.
        sent: See ``waiting``.
        streams: Answers under way that have had their first token.
        made: Tokens of answers.
        lately: Tokens of the last prompts that have had their first token, and how long each waited for it.
    """

    heard_s: float
    arrived: float = 0.0
    begun: float = 0.0
    firsts: int = 0
    prompts: tuple[tuple[float, float], ...] = ()
    waiting: int = 0
    sent: int = 0
    streams: int = 0
    made: float = 0.0
    lately: tuple[tuple[float, float], ...] = ()


@dataclass(frozen=True)
class TokenLimits:
    """How long users may wait for tokens.

    Args:
        first: Limits on the time to the first token, each for prompts of some lengths.
        each_s: On the time per token after it; None if there is none.
    """

    first: tuple[tuple[PromptClass, float], ...] = ()
    each_s: float | None = None

    def first_s(self, guessed: float) -> float:
        """Return the tightest limit on the time to the first token that a prompt may have; infinite if there is none.

        Args:
            guessed: Its tokens, which may be a quarter fewer or more.
        """
        fewest, most = (1 - _GUESS) * guessed, (1 + _GUESS) * guessed
        held = (limit_s for prompts, limit_s in self.first if prompts.above < most and fewest <= (prompts.most or most))
        return min(held, default=math.inf)


@dataclass(frozen=True)
class PromptRate:
    """How fast prompts are computed: least squares of their time over how many they are and how many tokens they have.

    Args:
        tokens: Sum over what is remembered; ``work_s`` likewise, time as it would have been at the highest clock.
        work_s: See ``tokens``.
        nn: Sum of squares of counts; ``nt``, ``tt``, ``nw``, ``tw`` of the products of counts, tokens and time.
        nt: See ``nn``.
        tt: See ``nn``.
        nw: See ``nn``.
        tw: See ``nn``.
    """

    tokens: float = 0.0
    work_s: float = 0.0
    nn: float = 0.0
    nt: float = 0.0
    tt: float = 0.0
    nw: float = 0.0
    tw: float = 0.0

    def after(self, count: int, tokens: float, work_s: float) -> PromptRate:
        """Return what is known after so many prompts with so many tokens have taken so long."""
        kept = _KEPT**count
        return PromptRate(
            tokens=kept * self.tokens + tokens,
            work_s=kept * self.work_s + work_s,
            nn=kept * self.nn + count * count,
            nt=kept * self.nt + count * tokens,
            tt=kept * self.tt + tokens * tokens,
            nw=kept * self.nw + count * work_s,
            tw=kept * self.tw + tokens * work_s,
        )

    @property
    def per_s(self) -> float | None:
        """Tokens that are computed a second at the highest clock, what each prompt takes besides left out.

        None if that is not known yet. Where prompts are too much alike to tell the two apart, it is tokens over time.
        """
        if self.work_s < _KNOWN_S or not self.tokens:
            return None
        mean_s = self.work_s / self.tokens
        apart = self.nn * self.tt - self.nt * self.nt
        if apart <= 1e-3 * self.nn * self.tt:
            return 1 / mean_s
        each_s = (self.tw * self.nn - self.nw * self.nt) / apart
        return 1 / min(mean_s, max(each_s, mean_s / _MARGINAL_MOST))


@dataclass(frozen=True)
class ClockDemand:
    """Which share of the highest clock a language model's server needs, learnt from one `PromptNews` after the other.

    Args:
        boost: For prompts; its ``tokens_per_s`` is what is learnt.
        news: The last that came.
        rate: How fast prompts are computed.
        work_s: Time spent on prompts since the last first token, as it would have been at the highest clock.
        stream_s: Time that answers were under way lately, together; ``made`` tokens that came in it.
        made: See ``stream_s``.
        pace: The share of the highest clock that tokens need.
        done: Tokens that should have been computed of the prompts that have gone to the server and have not begun.
    """

    # Infinitely fast until the rate is learnt: no load and no prompt asks for anything, and `share` decides.
    boost: PromptBoost = field(default_factory=lambda: PromptBoost(math.inf))
    news: PromptNews | None = None
    rate: PromptRate = field(default_factory=PromptRate)
    work_s: float = 0.0
    stream_s: float = 0.0
    made: float = 0.0
    pace: float = 0.0
    done: float = 0.0

    def heard(self, news: PromptNews, held: float, limits: TokenLimits) -> ClockDemand:
        """Return what is known after news.

        Args:
            news: What was told.
            held: The share of the highest clock that held since the news before.
            limits: That are to hold.
        """
        before = self.news
        passed_s = 0.0 if before is None else news.heard_s - before.heard_s
        if before is None or passed_s < 0 or news.arrived < before.arrived or news.made < before.made:
            # The first of a proxy, or of one that was started anew.
            return replace(self, news=news)
        work_s = passed_s * held if before.sent else 0.0
        learnt = self._learnt(news, before, work_s)._paced(news, before, held, limits.each_s)
        per_s = learnt.rate.per_s
        if per_s is None:
            return learnt
        boost = replace(learnt.boost, tokens_per_s=per_s)
        done = self.done + per_s * work_s - (news.begun - before.begun)
        return replace(
            learnt,
            boost=boost.arrived(news.heard_s, news.arrived - before.arrived),
            done=max(0.0, done) if news.sent else 0.0,
        )

    def _learnt(self, news: PromptNews, before: PromptNews, work_s: float) -> ClockDemand:
        work_s += self.work_s
        firsts = news.firsts - before.firsts
        if firsts > 0:
            rate = self.rate.after(firsts, news.begun - before.begun, work_s)
            return replace(self, news=news, rate=rate, work_s=0.0)
        # What was given up before its first token has taught nothing.
        return replace(self, news=news, work_s=work_s if news.sent else 0.0)

    def _paced(self, news: PromptNews, before: PromptNews, held: float, limit_s: float | None) -> ClockDemand:
        passed_s = news.heard_s - before.heard_s
        fades = math.exp(-passed_s / _PACE_S)
        stream_s = self.stream_s * fades + before.streams * passed_s
        made = self.made * fades + news.made - before.made
        pace = 0.0
        if limit_s is not None and news.streams and made >= 1:
            # Tokens take no longer at a lower clock than by as much as it is lower.
            pace = min(1.0, held * stream_s / made / (_PACE * limit_s))
        return replace(self, stream_s=stream_s, made=made, pace=pace)

    def share(self, now_s: float, limits: TokenLimits) -> float | None:
        """Return the share of the highest clock that is needed; None if nothing is known that says which."""
        if self.news is None:
            return None
        if self.rate.per_s is None:
            return 1.0 if self.news.waiting else None
        prompts = []
        done = _SURE * self.done
        for tokens, came_s in self.news.prompts:
            # Never counted as finished: its first token has not come, whatever the estimate says.
            left = max(tokens - done, (1 - _SURE) * tokens)
            done -= tokens - left
            prompts.append(WaitingPrompt(left, came_s + limits.first_s(tokens)))
        return max(self.boost.needed(now_s, prompts), self.pace)
