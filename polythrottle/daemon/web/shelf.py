"""What the API shows without asking the control loop: the status as JSON, the last seconds, the studies seen."""

import asyncio
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from polythrottle.daemon.desk import Desk
from polythrottle.daemon.status import Status, StudyShown
from polythrottle.daemon.web.plain import to_json

KEPT_S = 600
_STUDIES_MOST = 50
_FRESH_S = 5.0


class Shelf:
    """Filled when the control loop rings, on the event loop's own thread; every method belongs to that thread.

    Args:
        desk: Where the control loop publishes.
        loop: The event loop it is filled on.
    """

    def __init__(self, desk: Desk, loop: asyncio.AbstractEventLoop) -> None:
        self.desk = desk
        self.closing = False
        self.followers = 0
        self._loop = loop
        self._seconds: deque[tuple[int, dict[str, Any]]] = deque(maxlen=KEPT_S)
        self._studies: dict[str, StudyShown] = {}
        self._rung = False
        self._changed = asyncio.Event()
        self._noted: Status | None = None
        self._noted_s = float("-inf")
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
    def status_json(self) -> bytes:
        """The status as JSON, made once per turn however many ask."""
        status = self.status
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
