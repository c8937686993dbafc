"""Requests and tokens as a server's Prometheus metrics count them: fetched in the background, read by engine."""

from __future__ import annotations

import http.client
import math
import threading
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from urllib.parse import SplitResult

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from polythrottle.daemon.control.events import Target
from polythrottle.daemon.observation import RequestStats
from polythrottle.daemon.traffic import answered, connection_to
from polythrottle.daemon.traffic.engines import Names, names_on, whose
from polythrottle.daemon.traffic.local_sources import WINDOW_S
from polythrottle.domain.backports import removesuffix
from polythrottle.domain.errors import InvalidInput
from polythrottle.storage.untrusted import MALFORMED

# One page of a server, fetched in the background, so that who needs it waits no longer than it wants to.

_TIMEOUT_S = 0.15
_MOST_BYTES = 8 << 20
_OK = 200


@dataclass(frozen=True)
class Page:
    """What came: a text, or why there is none. ``number`` rises with each attempt."""

    number: int = 0
    text: str | None = None
    why: str = "it has not answered yet"


class Fetcher:
    """Fetches one page whenever it is asked to, in a thread of its own.

    Args:
        address: ``http`` or ``https``, with host, port and path.
        timeout_s: For each step of a connection.
        most_bytes: A longer page is not read to its end.
    """

    def __init__(self, address: SplitResult, timeout_s: float = _TIMEOUT_S, most_bytes: int = _MOST_BYTES) -> None:
        self._address = address
        self._timeout_s = timeout_s
        self._most_bytes = most_bytes
        self._page = Page()
        self._wanted, self._done = threading.Event(), threading.Event()
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="metrics", daemon=True)
        self._thread.start()

    def page(self, patience_s: float) -> Page:
        """Ask for the page anew and return it if it comes in time, else the one before."""
        if not self._wanted.is_set():
            # Cleared before it is asked: a fast answer would otherwise be forgotten, and waited for.
            self._done.clear()
            self._wanted.set()
        self._done.wait(patience_s)
        return self._page

    def close(self) -> None:
        """End the thread; one that waits for an answer ends by itself within its time."""
        self._closed = True
        self._wanted.set()
        self._thread.join(2 * self._timeout_s)

    def _work(self) -> None:
        while True:
            self._wanted.wait()
            if self._closed:
                return
            text, why = self._fetched()
            self._page = Page(self._page.number + 1, text, why)
            # Before those who wait are woken, for they may ask again at once.
            self._wanted.clear()
            self._done.set()

    def _fetched(self) -> tuple[str | None, str]:
        headers = {"Accept": "text/plain", "Connection": "close"}
        line = connection_to(self._address, self._timeout_s)
        try:
            with answered(line, "GET", self._address.path or "/", headers) as answer:
                data = answer.read(self._most_bytes + 1)
        except (OSError, http.client.HTTPException) as error:
            return None, f"it does not answer: {str(error) or type(error).__name__}"
        if answer.status != _OK:
            return None, f"it answers {answer.status} {answer.reason}"[:80]
        if len(data) > self._most_bytes:
            return None, f"its page is longer than {self._most_bytes >> 20} MiB"
        return data.decode("utf-8", "replace"), ""


# What a server's Prometheus metrics say of its requests, by the names of its engine.

_MODEL_LABELS = ("model", "model_name")
_SCALES = {"us": 1e-6, "microseconds": 1e-6, "ms": 1e-3, "milliseconds": 1e-3, "s": 1.0, "seconds": 1.0}
_P99 = "0.99"
_MOST_BUCKETS = 1000
_MOST_COUNTED = 2.0**53  # above, a float leaves whole numbers out, and no server has counted as far


@dataclass(frozen=True)
class Counts:
    """What a server has counted so far; None is not known.

    Args:
        answered: Requests that ended; None where the server does not count them.
        failed: Of them, without an answer.
        waiting: That wait now; ``busy`` that are being answered.
        sum_s: Of the latencies of ``summed`` requests.
        summed: How many.
        buckets: Upper end of a latency, and how many stayed within, ascending.
        p99_s: As the server computed it.
        tokens_in: Tokens of prompts; ``tokens_out`` generated.
        tokens_out: Tokens.
        first: Like ``buckets``, of times to the first token; ``per_token`` of each request's time per token after it.
        per_token: Likewise.
        engine: Whose metrics these are.
    """

    answered: float | None
    failed: float | None = None
    waiting: float | None = None
    busy: float | None = None
    sum_s: float | None = None
    summed: float | None = None
    buckets: tuple[tuple[float, float], ...] = ()
    p99_s: float | None = None
    tokens_in: float | None = None
    tokens_out: float | None = None
    first: tuple[tuple[float, float], ...] = ()
    per_token: tuple[tuple[float, float], ...] = ()
    engine: str = ""

    @property
    def arrived(self) -> float | None:
        """Requests that came so far, but for a constant: those that ended, wait or are answered; None if unknown."""
        if self.answered is None:
            return None
        return self.answered + (self.waiting or 0.0) + (self.busy or 0.0)

    def began_anew(self, before: Counts) -> bool:
        """Return whether the server counts from the beginning since, as after a restart."""
        pairs = [(self.answered, before.answered), (self.failed, before.failed), (self.summed, before.summed)]
        known = dict(before.buckets)
        pairs += [(count, known.get(end)) for end, count in self.buckets]
        pairs += [(self.tokens_in, before.tokens_in), (self.tokens_out, before.tokens_out)]
        return any(now is not None and then is not None and now < then for now, then in pairs)


@dataclass
class _Sums:
    """Samples added up over labels."""

    values: dict[str, float] = field(default_factory=dict)
    buckets: dict[str, dict[float, float]] = field(default_factory=dict)
    p99: float | None = None

    def take(self, sample: Sample, names: Names) -> None:
        """Add a sample to what its engine's names say it is; any other is passed over."""
        value = float(sample.value)
        # NaN is what a server without a figure writes; what nothing can have counted would be kept by the history.
        if not abs(value) <= _MOST_COUNTED:
            return
        histogram = removesuffix(sample.name, "_bucket")
        if histogram != sample.name and histogram in names.histograms:
            end = float(sample.labels.get("le", "nan"))
            buckets = self.buckets.setdefault(histogram, {})
            if len(buckets) < _MOST_BUCKETS and not math.isnan(end):
                buckets[end] = buckets.get(end, 0.0) + value
        elif names.summary and sample.name == names.summary:
            if sample.labels.get("quantile") == _P99 and value > 0:
                # Percentiles of several series cannot be added: the slowest stands for all.
                self.p99 = max(value, self.p99 or 0.0)
        else:
            self.values[sample.name] = self.values.get(sample.name, 0.0) + value

    def ends(self, histogram: str) -> tuple[tuple[float, float], ...]:
        """Return the buckets of a histogram, ascending, their ends in seconds."""
        scale_s = scale(histogram)
        return tuple((end * scale_s, count) for end, count in sorted(self.buckets.get(histogram, {}).items()))


def counts_of(text: str, known: Sequence[Names], model: str = "") -> Counts:
    """Return what a server has counted, from the text of its metrics; several series are added up.

    Args:
        text: In the exposition format of Prometheus.
        known: Which metrics matter; of several servers, the first whose are there.
        model: Only series of this model, where they say which; all if empty.

    Raises:
        InvalidInput: If the text is not of that format, or none of the metrics is in it.
    """
    names = names_on(text, known)
    if names is None:
        raise InvalidInput(whose(text, known))
    sums = _Sums()
    try:
        for sample in _samples(text, names.wanted):
            if not model or _model(sample.labels) in ("", model):
                sums.take(sample, names)
    except MALFORMED as error:
        raise InvalidInput(f"this is no text of Prometheus metrics: {str(error)[:80]}") from error
    return _counted(sums, names)


def _samples(text: str, wanted: frozenset[str]) -> Iterable[Sample]:
    """Yield the samples that matter; only their lines are parsed, for a server may have thousands of others."""
    lines = [line for line in text.splitlines() if line.partition("{")[0].partition(" ")[0] in wanted]
    for family in text_string_to_metric_families("\n".join(lines) + "\n"):
        yield from family.samples


def _model(labels: Mapping[str, str]) -> str:
    return next((labels[name] for name in _MODEL_LABELS if name in labels), "")


def _counted(sums: _Sums, names: Names) -> Counts:
    known = [sums.values[name] for name in names.answered if name in sums.values]
    if not (known if names.answered else sums.values):
        raise InvalidInput("none of the metrics is of this model; look at the label model or model_name")
    scale_s = scale(names.histogram or names.total)
    if names.histogram:
        whole = (f"{names.histogram}_sum", f"{names.histogram}_count")
    else:
        whole = (names.total, "")
    if whole[1]:
        summed = sums.values.get(whole[1])
    else:
        summed = sum(known) if known else None
    total = sums.values.get(whole[0])
    found = Counts(
        sum(known) if names.answered else None,
        _total(sums, names.failed),
        sums.values.get(names.waiting),
        sums.values.get(names.busy),
        None if total is None else total * scale_s,
        summed,
        sums.ends(names.histogram),
        tokens_in=sums.values.get(names.tokens_in),
        tokens_out=sums.values.get(names.tokens_out),
        first=sums.ends(names.first),
        per_token=sums.ends(names.per_token),
        engine=names.engine,
    )
    if sums.p99 is None:
        return found
    return replace(found, p99_s=sums.p99 * scale(names.summary))


def _total(sums: _Sums, names: tuple[str, ...]) -> float | None:
    known = [sums.values[name] for name in names if name in sums.values]
    if known:
        return sum(known)
    return None


def scale(name: str) -> float:
    """Return the seconds in the unit a metric's name ends in; 1 if it says none."""
    return _SCALES.get(name.rpartition("_")[2], 1.0)


@dataclass(frozen=True)
class Quantile:
    """A percentile out of a histogram; None with the reason if it cannot be told."""

    value_s: float | None
    why: str = ""


def quantile(before: Counts, now: Counts, share: float = 0.99, least: int = 20) -> Quantile:
    """Return the time within which a share of the requests stayed that ended between two looks.

    Within a bucket requests are taken to be spread evenly, as Prometheus' own ``histogram_quantile`` does.

    Args:
        before: The earlier look.
        now: The later.
        share: Of the requests.
        least: How many there must be.
    """
    return _quantile(before.buckets, now.buckets, share, least)


def _quantile(
    before: tuple[tuple[float, float], ...], now: tuple[tuple[float, float], ...], share: float = 0.99, least: int = 20
) -> Quantile:
    then = dict(before)
    added = [(end, max(0.0, count - then.get(end, 0.0))) for end, count in now]
    total = 0.0
    if added:
        total = added[-1][1]
    if total < least:
        return Quantile(None)
    low_s = 0.0
    below = 0.0
    for end, count in added:
        if count >= share * total:
            if math.isinf(end):
                return Quantile(
                    None, f"more than {1 - share:.0%} of requests took longer than the top bucket, {low_s:g} s"
                )
            part = 1.0
            if count > below:
                part = (share * total - below) / (count - below)
            return Quantile(low_s + part * (end - low_s))
        low_s = end
        below = count
    return Quantile(None, "the histogram has no bucket for all")


# Requests as a server's own Prometheus metrics count them.

_PATIENCE_S = 0.1
"""For so long a look waits for an answer; one that comes later counts at the next."""
_EVERY_S = 0.45
"""Looks that follow each other sooner do not ask the server again."""
_DOWN_S = 5.0
"""After so long without an answer the workload is taken to be down."""


class ScrapedTraffic:
    """A server's metrics, asked for at most about twice a second; satisfies the port ``Traffic``.

    The p99 is that of the requests that ended in the last minute: out of a histogram, or as the server computes it.

    Args:
        fetcher: Of the page with the metrics.
        names: Which metrics matter; of several servers, the first whose are there.
        model: Only this one of the server's models; all if empty.
        uri: The text that opens it again.
        request_tokens: So many tokens, in and out, count as one request; None where requests count as such.
    """

    def __init__(
        self,
        fetcher: Fetcher,
        names: tuple[Names, ...],
        model: str,
        uri: str,
        request_tokens: float | None = None,
    ) -> None:
        self._fetcher = fetcher
        self._known = names
        self._model = model
        self._uri = uri
        self._request_tokens = request_tokens
        self._due = 0.0
        self._number = 0
        self._unread = False
        self._asked_s = -math.inf
        self._heard_s = -math.inf
        self._past: deque[tuple[float, Counts]] = deque()
        self._seen = RequestStats()
        self.note = ""
        self.patience_s = _PATIENCE_S

    @property
    def uri(self) -> str:
        """The text that opens it again."""
        return self._uri

    def look(self, now_s: float) -> RequestStats | None:
        """Return what the server has counted since the look before; None while it does not answer."""
        gap = self._unread
        counts = self._fresh(now_s)
        if counts is not None:
            self._heard_s = now_s
            self._seen = self._since(now_s, counts)
            # Over how long they came that are told of at once after a gap, is not what the next look assumes.
            if gap:
                return replace(self._seen, arrived=None)
            return self._seen
        if now_s - self._heard_s > _DOWN_S:
            self._past.clear()
            return None
        known = self._seen
        if self._unread:
            # Unknown and not 0, or a server that is silent for a moment would be taken down the ladder.
            return RequestStats(None, None, None, known.waiting, known.p99_s, known.mean_s)
        ended = None if known.answered is None else 0
        return RequestStats(0, ended, None if known.failed is None else 0, known.waiting, known.p99_s, known.mean_s)

    def serve(self, target: Target) -> None:
        """Do nothing: metrics are there to be read."""

    def close(self) -> None:
        """End the thread that fetches."""
        self._fetcher.close()

    def _fresh(self, now_s: float) -> Counts | None:
        """Return what the server has counted by now; None if that is not known anew."""
        if 0 <= now_s - self._asked_s < _EVERY_S:
            return None
        self._asked_s = now_s
        page = self._fetcher.page(self.patience_s)
        if page.number == self._number:
            return None
        self._number = page.number
        self._unread = True
        if page.text is None:
            self.note = f"{self._uri}: {page.why}"
            return None
        try:
            counts = counts_of(page.text, self._known, self._model)
        except InvalidInput as error:
            self.note = f"{self._uri}: {error}"
            return None
        self.note = ""
        self._unread = False
        return counts

    def _since(self, now_s: float, counts: Counts) -> RequestStats:
        past = self._past
        if past and (counts.began_anew(past[-1][1]) or now_s < past[-1][0]):
            past.clear()
        # The last look before the window stays: what has ended in it is counted from there.
        while len(past) > 1 and past[1][0] <= now_s - WINDOW_S:
            past.popleft()
        if not past:
            past.append((now_s, counts))
            waiting = counts.waiting
            return RequestStats(0, 0, None if counts.failed is None else 0, _whole(waiting), counts.p99_s)
        before = past[-1][1]
        oldest = past[0][1]
        past.append((now_s, counts))
        return RequestStats(
            self._arrived(before, counts),
            _added(counts.answered, before.answered),
            _added(counts.failed, before.failed),
            _whole(counts.waiting),
            self._p99_s(oldest, counts),
            _mean_s(oldest, counts),
            tokens_in=_added(counts.tokens_in, before.tokens_in),
            tokens_out=_added(counts.tokens_out, before.tokens_out),
            ttft_p99_s=_quantile(oldest.first, counts.first).value_s,
            tpot_p99_s=_quantile(oldest.per_token, counts.per_token).value_s,
        )

    def _arrived(self, before: Counts, counts: Counts) -> int | None:
        """Return how many requests came between two looks, by tokens where those are to count."""
        if self._request_tokens is None:
            if counts.arrived is None or before.arrived is None:
                self.note = (
                    f"{self._uri}: {counts.engine} counts no requests; give request_tokens=N to count its tokens"
                )
                return None
            return max(0, round(counts.arrived - before.arrived))
        came, made = _added(counts.tokens_in, before.tokens_in), _added(counts.tokens_out, before.tokens_out)
        if came is None or made is None:
            self.note = (
                f"{self._uri}: {counts.engine or 'this server'} does not count its tokens; leave request_tokens out"
            )
            return None
        self._due += (came + made) / self._request_tokens
        whole = int(self._due)
        self._due -= whole
        return whole

    def _p99_s(self, oldest: Counts, counts: Counts) -> float | None:
        if not counts.buckets:
            return counts.p99_s
        found = quantile(oldest, counts)
        if found.why:
            self.note = f"{self._uri}: the p99 is not known: {found.why}"
        return found.value_s


def _whole(value: float | None) -> int | None:
    if value is None:
        return None
    return max(0, round(value))


def _added(now: float | None, before: float | None) -> int | None:
    if now is None or before is None:
        return None
    return round(now - before)


def _mean_s(oldest: Counts, counts: Counts) -> float | None:
    """Return the mean latency of what ended between two looks; None where sums are not told, or nothing ended."""
    if counts.sum_s is None or counts.summed is None or oldest.sum_s is None or oldest.summed is None:
        return None
    requests = counts.summed - oldest.summed
    if requests > 0:
        return (counts.sum_s - oldest.sum_s) / requests
    return None
