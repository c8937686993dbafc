"""What is shown without asking the control loop: status and studies as JSON, and server-sent events of what is new."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any, Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from polythrottle.daemon.loop.mailbox import Mailbox
from polythrottle.daemon.status import NodeShown, Status, StudyShown
from polythrottle.daemon.web.messages import HEADERS, Refusal, to_json
from polythrottle.domain.errors import DeviceError

# What the API shows without asking the control loop: the status as JSON, the last seconds, the studies seen.

KEPT_S = 600
_STUDIES_MOST = 50
_FRESH_S = 5.0


class StatusCache:
    """Filled when the control loop rings, on the event loop's own thread; every method belongs to that thread.

    Args:
        desk: Where the control loop publishes.
        loop: The event loop it is filled on.
    """

    def __init__(self, desk: Mailbox, loop: asyncio.AbstractEventLoop) -> None:
        self.desk = desk
        self.closing = False
        self.followers = 0
        self._loop = loop
        self._seconds: deque[tuple[int, dict[str, Any]]] = deque(maxlen=KEPT_S)
        self._studies: dict[str, StudyShown] = {}
        self._rung = False
        self._changed = asyncio.Event()
        self._noted: Status | None = None
        self._noted_s = loop.time()
        self._written: tuple[Status, bytes] | None = None
        self._end = desk.listen(self._ring)
        self._note()

    @property
    def status(self) -> Status:
        """What the last turn saw."""
        return self.desk.status

    @property
    def changed(self) -> asyncio.Event:
        """Is set when something is new, and another takes its place."""
        return self._changed

    @property
    def fresh(self) -> bool:
        """Whether the control loop turned within the last five seconds."""
        return self.status.turn > 0 and self._loop.time() - self._noted_s < _FRESH_S

    @property
    def stands(self) -> str:
        """For how long the control loop has not turned, in words; empty while it turns."""
        stood_s = self._loop.time() - self._noted_s
        if stood_s < _FRESH_S:
            return ""
        return f"the control loop has not turned for {stood_s:.0f} s; what is shown is as old"

    @property
    def shown(self) -> Status:
        """The status, with a fault and nothing promised where the control loop stands: it cannot say so itself."""
        status = self.status
        words = self.stands
        if not words:
            return status
        return replace(status, faults=(*status.faults, words), budget=replace(status.budget, met=None))

    def shown_node(self, node: NodeShown) -> NodeShown:
        """Return what is shown of a server of services, likewise.

        Args:
            node: As the control loop has left it.
        """
        words = self.stands
        if not words:
            return node
        return replace(node, faults=(*node.faults, words), met=None)

    @property
    def status_json(self) -> bytes:
        """The status as JSON, made once per turn however many ask."""
        status = self.status
        if self.stands:  # it says for how long, which changes from one second to the next
            return to_json(self.shown)
        if self._written is None or self._written[0] is not status:
            self._written = (status, to_json(status))
        return self._written[1]

    @property
    def seconds(self) -> list[Mapping[str, Any]]:
        """What was seen in each of the last 600 seconds, oldest first."""
        return [each for _, each in self._seconds]

    @property
    def studies(self) -> list[StudyShown]:
        """The studies since the daemon began, newest first."""
        return list(reversed(self._studies.values()))

    def study(self, id: str) -> StudyShown | None:
        """Return a study by its name; None if none was seen."""
        return self._studies.get(id)

    def close(self) -> None:
        """Listen no more, and let those who follow go."""
        self._end()
        self.closing = True
        self._wake()

    def _ring(self) -> None:
        """Have the new taken note of; called by the control loop, which it costs next to nothing."""
        if not self._rung:
            self._rung = True
            with suppress(RuntimeError):  # the event loop has been closed meanwhile
                self._loop.call_soon_threadsafe(self._note)

    def _note(self) -> None:
        # Before the status is looked at: one that is published from here on rings again.
        self._rung = False
        status = self.desk.status
        if status.turn > 0 and (self._noted is None or status.turn != self._noted.turn):
            self._noted_s = self._loop.time()
            self._add_second(status)
        self._noted = status
        if status.study is not None:
            self._studies[status.study.id] = status.study
            while len(self._studies) > _STUDIES_MOST:
                del self._studies[next(iter(self._studies))]
        self._wake()

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def _add_second(self, status: Status) -> None:
        now_s = time.time()
        if self._seconds and self._seconds[-1][0] == int(now_s):
            self._seconds.pop()
        second = {
            "t": round(now_s, 3),
            "power_w": status.power_w,
            "p99_s": status.p99_s,
            "limit_s": status.limit_s,
            "rate_per_s": status.rate_per_s,
            "temperature_c": status.temperature_c,
            "rung": None if status.rung is None else status.rung.number,
        }
        self._seconds.append((int(now_s), second))


# Server-sent events (WHATWG HTML, 9.2): what is new is fetched when there is room for it, so nothing piles up.

KIND = "text/event-stream"
FOLLOWERS_MOST = 32
_STATUS_S = 0.95
_SILENCE_S = 8.0
_AGAIN = b"retry: 2000\n\n"
_STILL = b": nothing new\n\n"


class News(Protocol):
    """What somebody follows."""

    def due(self, now_s: float) -> Iterator[bytes]:
        """Yield what is new since it was asked last."""

    def wait_s(self, now_s: float) -> float:
        """Return how long nothing needs to be looked at unless it is rung for."""

    @property
    def over(self) -> bool:
        """Whether nothing more will come."""


class AllEvents:
    """Statuses, at most one a second, and events, each once.

    Args:
        shelf: Holds the status.
        after: The number of the last event that is known.
    """

    def __init__(self, shelf: StatusCache, after: int) -> None:
        self._shelf = shelf
        self._after = after if after <= newest(shelf.desk) else 0  # numbers began anew: it knows none of these
        self._turn = -1
        self._shown_s = float("-inf")

    @property
    def over(self) -> bool:
        """Whether nothing more will come: never."""
        return False

    def due(self, now_s: float) -> Iterator[bytes]:
        """Yield the events that came, and the status if it is another and a second has passed."""
        for each in self._shelf.desk.events(self._after):
            self._after = each.number
            yield b"id: %d\nevent: event\ndata: %s\n\n" % (each.number, to_json(each))
        if self._shelf.status.turn != self._turn and now_s - self._shown_s >= _STATUS_S:
            self._turn = self._shelf.status.turn
            self._shown_s = now_s
            yield b"event: status\ndata: %s\n\n" % self._shelf.status_json

    def wait_s(self, now_s: float) -> float:
        """Return how long until a status that is there may be shown."""
        if self._shelf.status.turn == self._turn:
            return _SILENCE_S
        return max(0.0, _STATUS_S - (now_s - self._shown_s))


class StudyEvents:
    """A study, whenever it has got on, until it has ended.

    Args:
        shelf: Holds it.
        id: Its name.
    """

    def __init__(self, shelf: StatusCache, id: str) -> None:
        self._shelf = shelf
        self._id = id
        self._seen: StudyShown | None = None

    @property
    def over(self) -> bool:
        """Whether it has ended."""
        return self._seen is None or self._seen.state != "running"

    def due(self, now_s: float) -> Iterator[bytes]:
        """Yield it if it is not what it was."""
        found = self._shelf.study(self._id)
        if found is not None and found != self._seen:
            self._seen = found
            yield b"event: study\ndata: %s\n\n" % to_json(found)

    def wait_s(self, now_s: float) -> float:
        """Return how often it is said that nothing is new."""
        return _SILENCE_S


class EventStream(Response):
    """Answers with what is new as it comes, until the client or the daemon ends.

    Args:
        shelf: Rings when something is new.
        news: What is followed.

    Raises:
        Refusal: If too many follow already.
    """

    media_type = KIND

    def __init__(self, shelf: StatusCache, news: News) -> None:
        if shelf.followers >= FOLLOWERS_MOST:
            raise Refusal(503, DeviceError, "too many follow the daemon; ask again later", retry_after="5")
        # nginx would keep events back until its buffer is full (its module ngx_http_proxy, X-Accel-Buffering).
        super().__init__(b"", 200, {**HEADERS, "x-accel-buffering": "no"})
        # Starlette has noted that of the empty body.
        del self.headers["content-length"]
        self._shelf = shelf
        self._news = news

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send as long as somebody reads."""
        self._shelf.followers += 1
        left = asyncio.ensure_future(_left(receive))
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            async for part in self._parts(left):
                await send({"type": "http.response.body", "body": part, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            self._shelf.followers -= 1
            left.cancel()
            with suppress(asyncio.CancelledError):
                await left

    async def _parts(self, left: asyncio.Future[None]) -> AsyncIterator[bytes]:
        loop = asyncio.get_running_loop()
        yield _AGAIN
        while not left.done():
            # Taken before looking: what comes while parts are sent sets this one, and is not waited for.
            changed = self._shelf.changed
            for part in self._news.due(loop.time()):
                yield part
            if self._news.over or self._shelf.closing:
                return
            if not await _either(changed, left, self._news.wait_s(loop.time())):
                yield _STILL


async def _left(receive: Receive) -> None:
    """Return when the client has gone."""
    message: Mapping[str, object] = {}
    while message.get("type") != "http.disconnect":
        message = await receive()


async def _either(changed: asyncio.Event, left: asyncio.Future[None], wait_s: float) -> bool:
    """Wait until something is new or the client has gone; return whether that is so before the time is up."""
    ring = asyncio.ensure_future(changed.wait())
    try:
        done, _ = await asyncio.wait((ring, left), timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        ring.cancel()
    # A shorter wait was for a status that is there already: then something is new.
    return bool(done) or wait_s < _SILENCE_S


def newest(desk: Mailbox) -> int:
    """Return the number of the last event; 0 if there is none."""
    return max((each.number for each in desk.events()), default=0)
