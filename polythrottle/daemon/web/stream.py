"""Server-sent events (WHATWG HTML, 9.2): what is new is fetched when there is room for it, so nothing piles up."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import suppress
from typing import Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from polythrottle.daemon.desk import Desk
from polythrottle.daemon.status import StudyShown
from polythrottle.daemon.web.plain import to_json
from polythrottle.daemon.web.replies import HEADERS, Refusal
from polythrottle.daemon.web.shelf import Shelf
from polythrottle.errors import DeviceError

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


class Everything:
    """Statuses, at most one a second, and events, each once.

    Args:
        shelf: Holds the status.
        after: The number of the last event that is known.
    """

    def __init__(self, shelf: Shelf, after: int) -> None:
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
            self._turn, self._shown_s = self._shelf.status.turn, now_s
            yield b"event: status\ndata: %s\n\n" % self._shelf.status_json

    def wait_s(self, now_s: float) -> float:
        """Return how long until a status that is there may be shown."""
        if self._shelf.status.turn == self._turn:
            return _SILENCE_S
        return max(0.0, _STATUS_S - (now_s - self._shown_s))


class OneStudy:
    """A study, whenever it has got on, until it has ended.

    Args:
        shelf: Holds it.
        id: Its name.
    """

    def __init__(self, shelf: Shelf, id: str) -> None:
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

    def __init__(self, shelf: Shelf, news: News) -> None:
        if shelf.followers >= FOLLOWERS_MOST:
            raise Refusal(503, DeviceError, "too many follow the daemon; ask again later", retry_after="5")
        super().__init__(b"", 200, {**HEADERS, "x-accel-buffering": "no"})
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

    async def _parts(self, left: "asyncio.Future[None]") -> AsyncIterator[bytes]:
        loop = asyncio.get_running_loop()
        yield _AGAIN
        while not left.done():
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


async def _either(changed: asyncio.Event, left: "asyncio.Future[None]", wait_s: float) -> bool:
    """Wait until something is new or the client has gone; return whether that is so before the time is up."""
    ring = asyncio.ensure_future(changed.wait())
    try:
        done, _ = await asyncio.wait((ring, left), timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        ring.cancel()
    return bool(done) or wait_s < _SILENCE_S


def newest(desk: Desk) -> int:
    """Return the number of the last event; 0 if there is none."""
    return max((each.number for each in desk.events()), default=0)
