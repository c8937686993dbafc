"""What the proxy knows of its traffic: which requests are under way, which prompts wait, and what is counted.

*Admission*: at most so many requests are at a server at once, the others in line in the order they came. *Prompts*:
which have no first token yet, and how many tokens they are thought to have. What holds is told to whoever follows
(`Proxy`, at ``/polythrottle/prompts``) as one line of JSON, an event each: all of it every time, so that one that is
left out is made up for by the next. *Figures*, for Prometheus: requests by how they ended, tokens, and times as a
client sees them.
"""

import json
import re
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Generic, TypeVar

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from polythrottle.domain.errors import InvalidInput
from polythrottle.proxy.answers import Counted

MOST = 1_000_000
"""Limits above this are taken for a slip."""
T = TypeVar("T")


class Admission(Enum):
    """What becomes of a request that has come."""

    RUNS = "runs"
    WAITS = "waits"
    REFUSED = "refused"


class InFlight(Generic[T]):
    """Requests under way and in line, bounded in both; the limit may change at any time.

    Lowering the limit ends nothing: those that are under way go on, and nobody else starts until they are few enough. A
    limit of 0 lets nobody start, as while a server is started anew.

    Args:
        limit: How many may be under way at once.
        most_waiting: How many may be in line; whoever comes then is refused.
    """

    def __init__(self, limit: int, most_waiting: int) -> None:
        self._limit = checked_limit(limit)
        self._most_waiting = most_waiting
        self._running: set[T] = set()
        self._line: deque[T] = deque()
        self._in_line: set[T] = set()

    @property
    def limit(self) -> int:
        """How many may be under way at once."""
        return self._limit

    @property
    def running(self) -> int:
        """How many are under way."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """How many are in line."""
        return len(self._in_line)

    def enter(self, request: T) -> Admission:
        """Take in a request that has come; it may start if it runs."""
        # While anybody is in line nobody overtakes, even where there is room.
        if not self._in_line and len(self._running) < self._limit:
            self._running.add(request)
            return Admission.RUNS
        if len(self._in_line) >= self._most_waiting:
            return Admission.REFUSED
        self._line.append(request)
        self._in_line.add(request)
        return Admission.WAITS

    def leave(self, request: T) -> list[T]:
        """Let a request go, from wherever it is; returns those that are to start now."""
        self._running.discard(request)
        self._in_line.discard(request)
        return self._due()

    def set_limit(self, limit: int) -> list[T]:
        """Change the limit; returns those that are to start now.

        Raises:
            InvalidInput: If it is no limit.
        """
        self._limit = checked_limit(limit)
        return self._due()

    def clear_line(self) -> list[T]:
        """Empty the line; returns who stood in it, in order."""
        left = [request for request in self._line if request in self._in_line]
        self._line.clear()
        self._in_line.clear()
        return left

    def _due(self) -> list[T]:
        started: list[T] = []
        while self._line and (self._line[0] not in self._in_line or len(self._running) < self._limit):
            request = self._line.popleft()
            if request in self._in_line:  # whoever left keeps the place until it is reached
                self._in_line.remove(request)
                self._running.add(request)
                started.append(request)
        return started


def checked_limit(limit: object) -> int:
    """Return a limit.

    Raises:
        InvalidInput: If it is no whole number from 0 to `MOST`.
    """
    if type(limit) is not int or not 0 <= limit <= MOST:
        raise InvalidInput(f"requests in flight are a whole number from 0 to {MOST:,}, not {str(limit)[:40]}")
    return limit


_STREAMS = re.compile(rb'"stream"\s*:\s*true')
_GUESSED_BYTES = 4.0
"""Bytes of a request's body for each token of its prompt, while no server has counted any: English text has about 4."""
_GUESS_TOKENS = 500.0
"""So many tokens the guess weighs, beside those that were counted."""
_MOST_LISTED = 64
_LATELY_S = 1.0


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


KIND = CONTENT_TYPE_LATEST
PREFIX = "polythrottle_proxy_"
OUTCOMES = ("answered", "failed", "refused", "unreachable", "cut", "left")
"""How a request may end: an answer, an answer from 500 on, no room in line, no server, broken off by the server, broken
off by the client."""
_PER_DECADE = 10
_BOUNDS = tuple(round(10 ** (power / _PER_DECADE), 12) for power in range(-3 * _PER_DECADE, 2 * _PER_DECADE + 1))
"""From 1 ms to 100 s, each a quarter above the one before: a percentile out of them is within a quarter."""


@dataclass(frozen=True)
class Gauges:
    """What holds at one moment.

    Args:
        limit: How many requests may be under way.
        running: How many are; ``waiting`` are in line.
        pieces: Events that were passed on so far, of whole answers and of those under way.
    """

    limit: int
    running: int
    waiting: int
    pieces: int


class Figures:
    """Counters and histograms since the proxy began."""

    def __init__(self) -> None:
        self.pieces = 0
        self._gauges = Gauges(0, 0, 0, 0)
        self.registry = CollectorRegistry(auto_describe=False)
        home = self.registry
        self._requests = Counter(f"{PREFIX}requests", "Requests by how they ended.", ("outcome",), registry=home)
        for outcome in OUTCOMES:
            # A counter that appears with its first request shows Prometheus no increase for it.
            self._requests.labels(outcome)
        self._prompt = Counter(f"{PREFIX}prompt_tokens", "Tokens sent, as the server counts.", registry=home)
        self._generated = Counter(f"{PREFIX}generation_tokens", "Tokens of answers, once they ended.", registry=home)
        self._uncounted = Counter(
            f"{PREFIX}uncounted_answers", "Answers whose tokens the server did not count: pieces were.", registry=home
        )
        self._queue, self._first, self._per_token, self._whole = (
            Histogram(f"{PREFIX}{name}_seconds", text, buckets=_BOUNDS, registry=home)
            for name, text in (
                ("queue_time", "How long requests stood in line before they went to the server."),
                ("time_to_first_token", "From a request's arrival to the first piece of its answer."),
                ("time_per_output_token", "(last - first) / (n - 1) over the tokens of a streamed answer."),
                ("e2e_request_latency", "From a request's arrival to the end of its answer."),
            )
        )
        self.registry.register(self)

    def started(self, waited_s: float) -> None:
        """Note that a request went to the server."""
        self._queue.observe(waited_s)

    def ended(self, outcome: str) -> None:
        """Note how a request ended."""
        self._requests.labels(outcome).inc()

    def answered(
        self,
        *,
        whole_s: float,
        first_s: float | None,
        per_token_s: float | None,
        prompt: int | None,
        completion: int | None,
        by_server: bool,
    ) -> None:
        """Note the times and the tokens of a good answer; what is not known is None."""
        self._whole.observe(whole_s)
        if first_s is not None:
            self._first.observe(first_s)
        if per_token_s is not None:
            self._per_token.observe(per_token_s)
        self._prompt.inc(prompt or 0)
        self._generated.inc(completion or 0)
        if not by_server:
            self._uncounted.inc()

    def collect(self) -> Iterator[Metric]:
        """Yield what holds now."""
        now = self._gauges
        yield GaugeMetricFamily(f"{PREFIX}in_flight_limit", "Requests that may be under way.", now.limit)
        yield GaugeMetricFamily(f"{PREFIX}requests_running", "Requests under way at the server.", now.running)
        yield GaugeMetricFamily(f"{PREFIX}requests_waiting", "Requests in line.", now.waiting)
        yield CounterMetricFamily(f"{PREFIX}stream_pieces", "Events passed on so far.", now.pieces)

    def page(self, gauges: Gauges) -> bytes:
        """Return all of it in the text format."""
        self._gauges = gauges
        return generate_latest(self.registry)

    def totals(self) -> dict[str, int]:
        """Return how many requests ended how, and how many tokens there were."""
        found = {each: self._count("requests", {"outcome": each}) for each in OUTCOMES}
        return {**found, **{name: self._count(name, {}) for name in ("prompt_tokens", "generation_tokens")}}

    def _count(self, name: str, labels: dict[str, str]) -> int:
        return int(self.registry.get_sample_value(f"{PREFIX}{name}_total", labels) or 0)
