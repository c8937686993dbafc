"""Which clock a language model's server needs: low between prompts, and at once a higher one while prompts wait.

Nothing but what a proxy or a server's metrics tell is asked for: how many tokens of prompts come, which prompts have no
first token yet, and, measured once, how fast prompts are computed at the highest clock.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace


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

    def arrived(self, now_s: float, tokens: float) -> "PromptBoost":
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
