"""The daemon behind `polythrottle proxy`: prompts as it tells of them, and its bound on the requests in flight.

Which prompts wait is told as soon as they do, with how many tokens come and go: a language model's clock is raised
while they wait, and lowered again. The bound is a knob of `tune`, so that a point may hold it.
"""

from __future__ import annotations

import http.client
import json
import math
import socket
import threading
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol, runtime_checkable
from urllib.parse import SplitResult

from polythrottle.daemon.control.events import GPU_CLOCK, ClockWanted, ControlPlan, Target
from polythrottle.daemon.control.state import State
from polythrottle.daemon.observation import RequestStats
from polythrottle.daemon.traffic import answered, connection_to
from polythrottle.daemon.traffic.local_sources import WINDOW_S
from polythrottle.domain.backports import paired
from polythrottle.domain.clock import Clock, SystemClock
from polythrottle.domain.errors import InvalidInput, PolythrottleError
from polythrottle.domain.load.prompt_boost import ClockDemand, PromptNews
from polythrottle.domain.space import IN_FLIGHT, Level
from polythrottle.storage.json_channel import decode, encode
from polythrottle.storage.untrusted import MALFORMED

if TYPE_CHECKING:
    # It loads prometheus_client, and the control loop, which needs the rest of this module, reads no metrics itself.
    from polythrottle.daemon.traffic.server_metrics import ScrapedTraffic

METRICS_PATH = "/polythrottle/metrics"
PROMPTS_PATH = "/polythrottle/prompts"
LIMIT_PATH = "/polythrottle/in_flight"
# Events come at least every two seconds, whatever happens.
_TIMEOUT_S = 5.0
_AGAIN_S = 1.0
_LIMIT_AGAIN_S = 10.0
_LIMIT_BYTES = 4096
_LINE_BYTES = 64 << 10
_PROMPTS_MOST = 256
_FIRSTS_MOST = 4096
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
        InvalidInput: If it is not such news.
    """
    try:
        found = json.loads(data)
        listed = found["prompts"][:_PROMPTS_MOST]
        news = PromptNews(
            heard_s=heard_s,
            arrived=float(found["arrived"]),
            begun=float(found["begun"]),
            firsts=int(found["firsts"]),
            # It tells ages, for its clock is another process'.
            prompts=tuple((float(tokens), heard_s - float(age_s)) for tokens, age_s in listed),
            waiting=int(found["waiting"]),
            sent=int(found["sent"]),
            streams=int(found["streams"]),
            made=float(found["made"]),
            # A proxy of an earlier version does not tell.
            lately=tuple((float(tokens), float(wait_s)) for tokens, wait_s in found.get("lately", ())[:_PROMPTS_MOST]),
        )
    except MALFORMED as error:
        raise InvalidInput(f"it tells of no prompts: {str(error)[:60]}") from error
    counts = [news.arrived, news.begun, news.firsts, news.waiting, news.sent, news.streams, news.made]
    figures = [*counts, *(figure for prompt in (*news.prompts, *news.lately) for figure in prompt)]
    # Python's json reads NaN and Infinity.
    if not all(math.isfinite(figure) for figure in figures) or min(counts) < 0:
        raise InvalidInput("its figures about prompts are not finite, or a count is negative")
    return news


class FirstTokens:
    """How long each prompt waited for its first token, of the last minute and at most 4,096; from any thread."""

    def __init__(self) -> None:
        self._waits: deque[tuple[float, float, float]] = deque(maxlen=_FIRSTS_MOST)
        self._lock = threading.Lock()

    def heard(self, before: PromptNews | None, news: PromptNews) -> None:
        """Take in which prompts had theirs since the event before; what was told before that one is left out."""
        if before is not None and news.firsts > before.firsts:
            # Counted from the end: the newest so many, and all that are told where more have come than that.
            fresh = news.lately[before.firsts - news.firsts :]
            with self._lock:
                self._waits.extend((news.heard_s, tokens, wait_s) for tokens, wait_s in fresh)

    def lately(self, now_s: float) -> tuple[tuple[float, float], ...]:
        """Return tokens of each such prompt, and the seconds it waited."""
        with self._lock:
            while self._waits and self._waits[0][0] < now_s - WINDOW_S:
                self._waits.popleft()
            return tuple((tokens, wait_s) for _, tokens, wait_s in self._waits)


class PromptStream:
    """The proxy's events, read in a thread of its own, which connects again where the proxy was started again.

    Args:
        address: Of the proxy.
        clock: Of the control loop; the machine's by default.

    Attributes:
        why: What is wrong; empty if nothing is known to be.
        connected: How often the proxy was reached: once more may be another proxy, which knows nothing of the first.
    """

    def __init__(self, address: SplitResult, clock: Clock | None = None) -> None:
        self.why = ""
        self.connected = 0
        self._address = address
        self._clock = clock or SystemClock()
        self._news: PromptNews | None = None
        self._firsts = FirstTokens()
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

    def firsts(self) -> tuple[tuple[float, float], ...]:
        """Return the prompts that had their first token in the last minute: tokens, and seconds until then."""
        return self._firsts.lately(self._clock.now())

    def on_news(self, ring: Callable[[], None]) -> None:
        """Have ``ring`` called at each event."""
        self._ring = ring

    def close(self) -> None:
        """End the thread."""
        self._closed.set()
        # The loop's bell may be closed before this thread has ended.
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
            # Which prompts wait now is unknown: a clock raised for those of before is not to stay.
            self._news = None
            self._ring()
            self._closed.wait(_AGAIN_S)

    def _read(self) -> None:
        """Read events until the connection ends."""
        connection = connection_to(self._address, _TIMEOUT_S)
        self._connection = connection
        try:
            with answered(connection, "GET", PROMPTS_PATH, {"Accept": "text/event-stream"}) as answer:
                if answer.status != _OK:
                    raise InvalidInput(f"it answers {answer.status} {answer.reason}"[:80])
                self.connected += 1
                while not self._closed.is_set():
                    self._take(answer.readline(_LINE_BYTES))
        finally:
            self._connection = None

    def _take(self, line: bytes) -> None:
        if not line:
            raise OSError("it has ended the connection")
        if line.startswith(_DATA):
            before, self._news = self._news, news_of(line[len(_DATA) :], self._clock.now())
            self._firsts.heard(before, self._news)
            self.why = ""
            self._ring()


class InFlightBound:
    """The proxy's bound on the requests in flight, set to what a point holds, and in the end as it was found.

    Calls to the proxy run in a thread of their own. It is told when the point changes and when the proxy was started
    anew, so that a study may try other bounds meanwhile. A bound that somebody else has set since is not put back, and
    0, with which people hold all requests back, stays.

    Args:
        address: Of the proxy.
    """

    def __init__(self, address: SplitResult) -> None:
        self.why = ""
        self._address = address
        self._wanted: int | None = None
        self._found: int | None = None
        self._held: int | None = None
        self._proxy = 0
        self._due = False
        self._asked_s = -math.inf
        self._work: threading.Thread | None = None

    def want(self, level: Level | None) -> None:
        """Have a bound set soon; None for the one that was found."""
        limit = None
        if level is not None:
            limit = int(level)
        if limit != self._wanted:
            self._wanted = limit
            self._due = True
            self._asked_s = -math.inf

    def look(self, now_s: float, proxy: int) -> None:
        """Begin what is due; what failed is tried again after ten seconds.

        Args:
            now_s: Of the control loop's clock.
            proxy: How often a proxy was reached by now: a new one has another bound, and has not been told.
        """
        anew = self._wanted is not None and proxy != self._proxy
        busy = self._work is not None and self._work.is_alive()
        if busy or not (anew or self._due) or 0 <= now_s - self._asked_s < _LIMIT_AGAIN_S:
            return
        self._asked_s = now_s
        self._due = False
        self._work = threading.Thread(target=self._hold, args=(self._wanted, proxy), name="in flight", daemon=True)
        self._work.start()

    def close(self) -> None:
        """Have the bound as it was found, where it is still the one that was set."""
        if self._work is not None:
            self._work.join(2 * _TIMEOUT_S)
        if self._held is not None:
            self._hold(None, self._proxy)

    def _hold(self, wanted: int | None, proxy: int) -> None:
        try:
            now = self._bound("GET")
            if self._found is None or proxy != self._proxy:
                self._found, self._held, self._proxy = now, None, proxy
            # Somebody holds all requests back, and means it: the point's bound would let them go.
            if not now:
                self.why = "it holds all requests back (its bound is 0), which stays"
                self._due = True
                return
            goal = wanted
            # What somebody else has set since is newer than what was found.
            if wanted is None and now == self._held:
                goal = self._found
            if goal is not None and goal != now:
                self._bound("PUT", goal)
            self._held, self.why = wanted, ""
        except (OSError, http.client.HTTPException, ValueError) as error:
            self.why = f"its bound on the requests in flight cannot be set: {str(error)[:120] or type(error).__name__}"
            self._due = True

    def _bound(self, method: str, limit: int | None = None) -> int:
        """Return the bound that holds, after setting one if it is given.

        Raises:
            ValueError: If the proxy says no.
        """
        body = None
        if limit is not None:
            body = encode({"limit": limit})
        line = connection_to(self._address, _TIMEOUT_S)
        with answered(line, method, LIMIT_PATH, {"Content-Type": "application/json"}, body) as answer:
            data = answer.read(_LIMIT_BYTES)
        if answer.status != _OK:
            raise ValueError(f"it answers {answer.status}: {data[:80].decode(errors='replace')}")
        holds = None
        with suppress(InvalidInput):
            holds = decode(data).get("limit")
        # No isinstance, for JSON's true is an int to it.
        if type(holds) is not int or (limit is not None and holds != limit):
            raise ValueError(f"it answers {data[:80].decode(errors='replace')}")
        return holds


class ProxiedTraffic:
    """Requests that pass through `polythrottle proxy`; satisfies the ports ``Traffic`` and ``PromptSource``.

    Args:
        scraped: Reads the proxy's metrics.
        stream: Its events.
        uri: The text that opens it again.
        bound: On the requests in flight; None leaves it to others.
    """

    def __init__(
        self, scraped: ScrapedTraffic, stream: PromptStream, uri: str, bound: InFlightBound | None = None
    ) -> None:
        self._scraped = scraped
        self._stream = stream
        self._bound = bound
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
        for why in (self._stream.why, getattr(self._bound, "why", "")):
            if why:
                return f"{self._uri}: {why}"
        return ""

    def look(self, now_s: float) -> RequestStats | None:
        """Return what the proxy has counted since the look before; None while it does not answer."""
        if self._bound is not None:
            self._bound.look(now_s, self._stream.connected)
        seen = self._scraped.look(now_s)
        return None if seen is None else replace(seen, firsts=self._stream.firsts())

    def prompts(self) -> PromptNews | None:
        """Return what was told of prompts last; None if nothing was lately."""
        return self._stream.prompts()

    def on_news(self, ring: Callable[[], None]) -> None:
        """Have ``ring`` called when there is something new."""
        self._stream.on_news(ring)

    def serve(self, target: Target) -> None:
        """Have a point's bound on the requests in flight set soon; a point without one means as found."""
        if self._bound is not None:
            self._bound.want(target.point.get(IN_FLIGHT))

    def close(self) -> None:
        """Have the bound as found, and end the threads."""
        if self._bound is not None:
            self._bound.close()
        self._stream.close()
        self._scraped.close()


_EFFECT_S = 0.1
"""What was set holds after this; published are 50 to 200 ms (DynamoLLM, throttLL'eM)."""
_DOWN_S = 0.2
"""A clock is not lowered sooner after it was changed."""
_STEP = 0.03
"""Nor by less than this share of the highest: each change is written and read back."""
_RAISE_AGAIN_S = 10.0


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
            share * max(0.0, min(end, end_s) - max(at_s, begin_s)) for (at_s, share), end in paired(self._since, ends)
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
        # By identity: an event counts once, and counts also where its figures are those of the last.
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
            if 0 <= now_s - self._asked_s < _RAISE_AGAIN_S:
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
