"""Prompts on their way through the proxy: which have no first token yet, and how many tokens they are thought to have.

What holds is told to whoever follows (`Proxy`, at ``/polythrottle/prompts``) as one line of JSON, an event each: all of
it every time, so that one that is left out is made up for by the next.
"""

import json
import re
from collections import deque
from dataclasses import dataclass
from typing import Generic, TypeVar

from polythrottle.proxy.answers import Counted

_STREAMS = re.compile(rb'"stream"\s*:\s*true')
_GUESSED_BYTES = 4.0
"""Bytes of a request's body for each token of its prompt, while no server has counted any: English text has about 4."""
_GUESS_TOKENS = 500.0
"""So many tokens the guess weighs, beside those that were counted."""
_MOST_LISTED = 64
_LATELY_S = 1.0
T = TypeVar("T")


@dataclass
class _Prompt:
    size: int
    tokens: float
    came_s: float
    sent: bool = False


class Prompts(Generic[T]):
    """Requests by what the proxy knows of their prompts; times are in seconds on the caller's clock.

    How many tokens a prompt has is told by nobody before its answer ends. Until then its body's bytes are taken for so
    many tokens as those of requests before it turned out to have.
    """

    def __init__(self) -> None:
        self.arrived = 0.0
        """Tokens of all prompts that have come."""
        self.begun = 0.0
        """Tokens of prompts that have had their first token."""
        self.firsts = 0
        """How many those are."""
        self._waiting: dict[T, _Prompt] = {}
        self._streams: dict[T, _Prompt] = {}
        self._lately: deque[tuple[float, float, float]] = deque(maxlen=_MOST_LISTED)
        self._tokens = _GUESS_TOKENS
        self._bytes = _GUESS_TOKENS * _GUESSED_BYTES
        self._completion = 1.0
        self._pieces = 1.0
        self._made = 0.0

    @property
    def under_way(self) -> bool:
        """Whether a prompt waits or an answer streams."""
        return bool(self._waiting or self._streams)

    def came(self, request: T, body: bytes, now_s: float) -> None:
        """Note a request; one whose answer is not streamed waits for no first token, but its prompt is load too."""
        prompt = _Prompt(len(body), len(body) * self._tokens / self._bytes, now_s)
        self.arrived += prompt.tokens
        if _STREAMS.search(body):
            self._waiting[request] = prompt

    def sent(self, request: T) -> None:
        """Note that a request goes to the server, whose turn it was."""
        prompt = self._waiting.get(request)
        if prompt is not None:
            prompt.sent = True

    def began(self, request: T, now_s: float) -> None:
        """Note that the first piece of an answer has come."""
        prompt = self._waiting.pop(request, None)
        if prompt is not None:
            self.begun += prompt.tokens
            self.firsts += 1
            self._streams[request] = prompt
            self._lately.append((now_s, prompt.tokens, now_s - prompt.came_s))

    def passed(self, pieces: int) -> None:
        """Note pieces of answers that were passed on."""
        self._made += pieces * self._completion / self._pieces

    def ended(self, request: T, pieces: int, counted: Counted | None) -> None:
        """Note that a request is over, and learn from the server's count what a byte and a piece are worth.

        Args:
            request: Which.
            pieces: Of its answer.
            counted: Tokens of it; None if it has no whole answer.
        """
        self._waiting.pop(request, None)
        prompt = self._streams.pop(request, None)
        if prompt is None or counted is None or not counted.by_server:
            return
        if counted.prompt:
            self._tokens += counted.prompt
            self._bytes += prompt.size
        if counted.completion and pieces:
            self._completion += counted.completion
            self._pieces += pieces

    def line(self, now_s: float) -> str:
        """Return what holds now, as `polythrottle.daemon.traffic.proxy_prompts` reads it.

        ``prompts`` are the first 64 without a first token in the order in which they came, each with its tokens and the
        seconds since; of all ``waiting``, ``sent`` have gone to the server. ``streams`` are answers that have begun and
        not ended, ``made`` the tokens passed on so far. ``lately`` are the newest of all ``firsts``, those of the last
        second and at most 64: the tokens of each, and how long it waited for its first.
        """
        listed = list(self._waiting.values())[:_MOST_LISTED]
        found = {
            "at_s": round(now_s, 4),
            "arrived": round(self.arrived),
            "begun": round(self.begun),
            "firsts": self.firsts,
            "prompts": [[round(each.tokens), round(now_s - each.came_s, 4)] for each in listed],
            "waiting": len(self._waiting),
            "sent": sum(each.sent for each in self._waiting.values()),
            "streams": len(self._streams),
            "made": round(self._made),
            "lately": [
                [round(tokens), round(waited_s, 4)]
                for at_s, tokens, waited_s in self._lately
                if now_s - at_s <= _LATELY_S
            ],
        }
        return json.dumps(found, separators=(",", ":"))
