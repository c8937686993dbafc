"""What the proxy counts, for Prometheus: requests by how they ended, tokens, and times as a client sees them."""

from collections.abc import Iterator
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

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
