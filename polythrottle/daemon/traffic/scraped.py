"""Requests as a server's own Prometheus metrics count them."""

import math
from collections import deque
from dataclasses import replace

from polythrottle.daemon.ports import Seen
from polythrottle.daemon.signals import Target
from polythrottle.daemon.traffic.exposition import Counts, Names, counts_of, quantile
from polythrottle.daemon.traffic.fetching import Fetcher
from polythrottle.daemon.traffic.lately import WINDOW_S
from polythrottle.errors import InvalidInput

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
    """

    def __init__(self, fetcher: Fetcher, names: tuple[Names, ...], model: str, uri: str) -> None:
        self._fetcher, self._known, self._model, self._uri = fetcher, names, model, uri
        self._number, self._unread = 0, False
        self._asked_s, self._heard_s = -math.inf, -math.inf
        self._past: deque[tuple[float, Counts]] = deque()
        self._seen = Seen()
        self.note, self.patience_s = "", _PATIENCE_S

    @property
    def uri(self) -> str:
        """The text that opens it again."""
        return self._uri

    def look(self, now_s: float) -> Seen | None:
        """Return what the server has counted since the look before; None while it does not answer."""
        gap = self._unread
        counts = self._fresh(now_s)
        if counts is not None:
            self._heard_s = now_s
            self._seen = self._since(now_s, counts)
            # Over how long they came that are told of at once after a gap, is not what the next look assumes.
            return replace(self._seen, arrived=None) if gap else self._seen
        if now_s - self._heard_s > _DOWN_S:
            self._past.clear()
            return None
        known = self._seen
        if self._unread:
            return Seen(None, None, None, known.waiting, known.p99_s, known.mean_s)
        ended = None if known.answered is None else 0
        return Seen(0, ended, None if known.failed is None else 0, known.waiting, known.p99_s, known.mean_s)

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
        self._number, self._unread = page.number, True
        if page.text is None:
            self.note = f"{self._uri}: {page.why}"
            return None
        try:
            counts = counts_of(page.text, self._known, self._model)
        except InvalidInput as error:
            self.note = f"{self._uri}: {error}"
            return None
        self.note, self._unread = "", False
        return counts

    def _since(self, now_s: float, counts: Counts) -> Seen:
        past = self._past
        if past and (counts.began_anew(past[-1][1]) or now_s < past[-1][0]):
            past.clear()
        while len(past) > 1 and past[1][0] <= now_s - WINDOW_S:
            past.popleft()
        if not past:
            past.append((now_s, counts))
            waiting = counts.waiting
            return Seen(0, 0, None if counts.failed is None else 0, _whole(waiting), counts.p99_s)
        before, oldest = past[-1][1], past[0][1]
        past.append((now_s, counts))
        arrived = max(0, round(counts.arrived - before.arrived))
        return Seen(
            arrived,
            round(counts.answered - before.answered),
            _added(counts.failed, before.failed),
            _whole(counts.waiting),
            self._p99_s(oldest, counts),
            _mean_s(oldest, counts),
        )

    def _p99_s(self, oldest: Counts, counts: Counts) -> float | None:
        if not counts.buckets:
            return counts.p99_s
        found = quantile(oldest, counts)
        if found.why:
            self.note = f"{self._uri}: the p99 is not known: {found.why}"
        return found.value_s


def _whole(value: float | None) -> int | None:
    return None if value is None else max(0, round(value))


def _added(now: float | None, before: float | None) -> int | None:
    return None if now is None or before is None else round(now - before)


def _mean_s(oldest: Counts, counts: Counts) -> float | None:
    """Return the mean latency of what ended between two looks; None where sums are not told, or nothing ended."""
    if counts.sum_s is None or counts.summed is None or oldest.sum_s is None or oldest.summed is None:
        return None
    requests = counts.summed - oldest.summed
    return (counts.sum_s - oldest.sum_s) / requests if requests > 0 else None
