"""Prompts as `polythrottle proxy` tells of them: which wait, as soon as they do, and how many tokens come and go."""

from __future__ import annotations

import http.client
import json
import math
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol, runtime_checkable
from urllib.parse import SplitResult

from polythrottle.daemon.control.events import Target
from polythrottle.daemon.observation import RequestStats
from polythrottle.daemon.traffic.server_metrics import ScrapedTraffic
from polythrottle.domain.clock import Clock, SystemClock
from polythrottle.domain.errors import InvalidInput
from polythrottle.domain.load.prompt_boost import PromptNews

METRICS_PATH = "/polythrottle/metrics"
PROMPTS_PATH = "/polythrottle/prompts"
# Events come at least every two seconds, whatever happens.
_TIMEOUT_S = 5.0
_AGAIN_S = 1.0
_LINE_BYTES = 64 << 10
_PROMPTS_MOST = 256
_OK = 200
_DATA = b"data:"


@runtime_checkable
class PromptSource(Protocol):
    """Requests of which it is known which prompts wait."""

    def prompts(self) -> PromptNews | None:
        """Return what was told last; None if nothing was lately. Its times are on the clock of the control loop."""

    def on_news(self, ring: Callable[[], None]) -> None:
        """Have ``ring`` called from another thread when there is something new."""


def news_of(data: bytes, heard_s: float) -> PromptNews:
    """Return what an event of the proxy tells.

    Args:
        data: Its JSON.
        heard_s: When it came.

    Raises:
        InvalidInput: If it is none.
    """
    try:
        found = json.loads(data)
        listed = found["prompts"][:_PROMPTS_MOST]
        news = PromptNews(
            heard_s=heard_s,
            arrived=float(found["arrived"]),
            begun=float(found["begun"]),
            firsts=int(found["firsts"]),
            prompts=tuple((float(tokens), heard_s - float(age_s)) for tokens, age_s in listed),
            waiting=int(found["waiting"]),
            sent=int(found["sent"]),
            streams=int(found["streams"]),
            made=float(found["made"]),
        )
    except (ValueError, LookupError, TypeError, OverflowError, RecursionError) as error:
        raise InvalidInput(f"it tells of no prompts: {str(error)[:60]}") from error
    counts = [news.arrived, news.begun, news.firsts, news.waiting, news.sent, news.streams, news.made]
    figures = [*counts, *(figure for prompt in news.prompts for figure in prompt)]
    if not all(math.isfinite(figure) for figure in figures) or min(counts) < 0:
        raise InvalidInput("it tells of prompts in figures that are none")
    return news


class PromptStream:
    """The proxy's events, read in a thread of its own, which connects again where the proxy was started again.

    Args:
        address: Of the proxy.
        clock: Of the control loop; the machine's by default.
    """

    def __init__(self, address: SplitResult, clock: Clock | None = None) -> None:
        self.why = ""
        self._address = address
        self._clock = clock or SystemClock()
        self._news: PromptNews | None = None
        self._ring: Callable[[], None] = lambda: None
        self._closed = threading.Event()
        self._connection: http.client.HTTPConnection | None = None
        self._thread = threading.Thread(target=self._work, name="prompts", daemon=True)
        self._thread.start()

    def prompts(self) -> PromptNews | None:
        """Return what was told last; None if nothing was lately."""
        news = self._news
        if news is None or self._clock.now() - news.heard_s > _TIMEOUT_S:
            return None
        return news

    def on_news(self, ring: Callable[[], None]) -> None:
        """Have ``ring`` called at each event."""
        self._ring = ring

    def close(self) -> None:
        """End the thread."""
        self._closed.set()
        self._ring = lambda: None
        connection = self._connection
        if connection is not None and connection.sock is not None:
            with suppress(OSError):
                connection.sock.shutdown(socket.SHUT_RDWR)
        self._thread.join(_AGAIN_S)

    def _work(self) -> None:
        while not self._closed.is_set():
            try:
                self._read()
            except (OSError, http.client.HTTPException, ValueError) as error:
                self.why = f"it does not tell of prompts: {str(error) or type(error).__name__}"
            except InvalidInput as error:
                self.why = str(error)
            self._news = None
            self._ring()
            self._closed.wait(_AGAIN_S)

    def _read(self) -> None:
        """Read events until the connection ends."""
        kind = http.client.HTTPSConnection if self._address.scheme == "https" else http.client.HTTPConnection
        connection = kind(self._address.hostname or "", self._address.port, timeout=_TIMEOUT_S)
        self._connection = connection
        try:
            connection.request("GET", PROMPTS_PATH, headers={"Accept": "text/event-stream"})
            answer = connection.getresponse()
            if answer.status != _OK:
                raise InvalidInput(f"it answers {answer.status} {answer.reason}"[:80])
            while not self._closed.is_set():
                line = answer.readline(_LINE_BYTES)
                if not line:
                    raise OSError("it has ended the connection")
                if line.startswith(_DATA):
                    self._news = news_of(line[len(_DATA) :], self._clock.now())
                    self.why = ""
                    self._ring()
        finally:
            self._connection = None
            connection.close()


class ProxiedTraffic:
    """Requests that pass through `polythrottle proxy`; satisfies the ports ``Traffic`` and ``PromptSource``.

    Args:
        scraped: Reads the proxy's metrics.
        stream: Its events.
        uri: The text that opens it again.
    """

    def __init__(self, scraped: ScrapedTraffic, stream: PromptStream, uri: str) -> None:
        self._scraped = scraped
        self._stream = stream
        self._uri = uri

    @property
    def uri(self) -> str:
        """The text that opens it again."""
        return self._uri

    @property
    def note(self) -> str:
        """What went wrong, if something did."""
        if self._scraped.note:
            return self._scraped.note
        return f"{self._uri}: {self._stream.why}" if self._stream.why else ""

    def look(self, now_s: float) -> RequestStats | None:
        """Return what the proxy has counted since the look before; None while it does not answer."""
        return self._scraped.look(now_s)

    def prompts(self) -> PromptNews | None:
        """Return what was told of prompts last; None if nothing was lately."""
        return self._stream.prompts()

    def on_news(self, ring: Callable[[], None]) -> None:
        """Have ``ring`` called when there is something new."""
        self._stream.on_news(ring)

    def serve(self, target: Target) -> None:
        """Do nothing: the proxy's bound is a knob of `tune`, and stays as it was set."""

    def close(self) -> None:
        """End both threads."""
        self._stream.close()
        self._scraped.close()
