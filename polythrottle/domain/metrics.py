"""The quantities that an SLO can bound, their units, and of which requests: all, or those with prompts of a length."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass

from polythrottle.domain.errors import InvalidInput

METRICS: Mapping[str, str] = {
    "mean": "s",
    "p50": "s",
    "p90": "s",
    "p95": "s",
    "p99": "s",
    "power": "w",
    "temperature": "c",
    "throughput": "per_s",
    "ttft_p50": "s",
    "ttft_p99": "s",
    "tpot_p50": "s",
    "tpot_p99": "s",
    "itl_p50": "s",
    "itl_p99": "s",
    "tokens_per_j": "per_j",
}
"""The quantities an SLO can bound, and the unit each is held in.

Time to the first token is ttft, time per token after it tpot, the time between two tokens itl.
"""
FLOORS = frozenset({"throughput", "tokens_per_j"})
"""Those of them that an SLO bounds from below."""
EXTRAS = ("ttft_p50", "ttft_p99", "tpot_p50", "tpot_p99", "itl_p50", "itl_p99", "tokens_per_j")
"""Those of them that only some workloads have."""
OF_CLASS = " for "
"""What stands between a metric and the prompts it is that of, as in ``ttft_p99 for prompts<=2048``."""
_PROMPTS = re.compile(r"\s*(?:(\d{1,9})\s*(<|<=|≤)\s*)?prompts\s*(?:(<=?|>=?|≤|≥)\s*(\d{1,9}))?\s*", re.IGNORECASE)
_PROMPTS_GRAMMAR = "write for example prompts<=2048, prompts>2048 or 512<prompts<=2048, in tokens"


@dataclass(frozen=True)
class PromptClass:
    """Requests by how many tokens their prompts have.

    Args:
        above: More than so many.
        most: At most so many; None if there is no most.

    Raises:
        InvalidInput: If no prompt is of such a length.
    """

    above: int = 0
    most: int | None = None

    def __post_init__(self) -> None:
        if self.above < 0 or (self.most is not None and self.most <= self.above):
            raise InvalidInput(f"no prompt has more than {self.above} and at most {self.most} tokens")

    @classmethod
    def parse(cls, text: str) -> PromptClass:
        """Return the class that a text means: ``prompts<=2048``, ``prompts > 2048``, ``512<prompts<=2048``.

        Raises:
            InvalidInput: If the text is not of that form, or no prompt is of such a length.
        """
        match = _PROMPTS.fullmatch(text)
        if match is None or match[1] == match[4] is None or (match[1] and match[3] and match[3][0] in ">≥"):
            raise InvalidInput(f"{text!r} says of no requests how long they are; {_PROMPTS_GRAMMAR}")
        above, most = 0, None
        if match[1]:
            # Tokens are whole: `512 <=` is more than 511, and below `< 2048` at most 2047.
            above = int(match[1]) - (match[2] != "<")
        if match[3] and match[3][0] in ">≥":
            above = int(match[4]) - (match[3] != ">")
        elif match[3]:
            most = int(match[4]) - (match[3] == "<")
        return cls(above, most)

    def __contains__(self, tokens: int) -> bool:
        return self.above < tokens and (self.most is None or tokens <= self.most)

    def __str__(self) -> str:
        if self.most is None:
            return f"prompts>{self.above}"
        if self.above:
            return f"{self.above}<prompts<={self.most}"
        return f"prompts<={self.most}"


@functools.lru_cache(maxsize=256)
def split_metric(name: str) -> tuple[str, PromptClass | None]:
    """Return one of `METRICS` and the requests it is of, given both in one: ``ttft_p99 for prompts<=2048``.

    Raises:
        InvalidInput: If the requests are not named as `PromptClass` names them.
    """
    metric, divided, prompts = name.partition(OF_CLASS)
    return metric, PromptClass.parse(prompts) if divided else None


def unit_of(name: str) -> str:
    """Return the unit of a metric, be it of all requests or of a class of them."""
    return METRICS[split_metric(name)[0]]


def is_metric(name: str) -> bool:
    """Return whether something is one of `METRICS`, or a time of a class of requests, written as here."""
    try:
        metric, prompts = split_metric(name)
    except InvalidInput:
        return False
    if prompts is None:
        return metric in METRICS
    # One spelling only: intervals and extras are looked up by this text.
    return METRICS.get(metric) == "s" and name == f"{metric}{OF_CLASS}{prompts}"


_TOKEN_TIMES = ("tpot_p50", "tpot_p99", "itl_p50", "itl_p99")


def why_untold(name: str) -> str:
    """Return why a metric can be unknown where others are known, in brackets; empty if it has no reason of its own."""
    metric, prompts = split_metric(name)
    if prompts is not None:
        return f" (no answer of the window that tells it says that it is to {prompts})"
    if metric in _TOKEN_TIMES:
        return " (it is known only where the tokens of an answer come one after another)"
    return ""
