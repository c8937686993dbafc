"""Where the control loop and those who ask meet: it never waits for them, they may wait for it."""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as TooLate
from dataclasses import dataclass, field

from polythrottle.daemon.named_files import Read
from polythrottle.daemon.status import Happened, Status
from polythrottle.daemon.wishes import Answer, Wish
from polythrottle.errors import DeviceError

_KEPT = 1000
_WISHES_MOST = 64
_PATIENCE_S = 10.0


@dataclass(frozen=True)
class Asked:
    """A wish that waits, what is in the file it names where that was read, and where its answer or its error goes."""

    wish: Wish
    read: Read | None = None
    answer: "Future[Answer]" = field(default_factory=Future)


class Desk:
    """One status, the last events, and the wishes that wait.

    The control loop calls `publish`, `tell` and `wishes`; every other method may be called from any thread. What is
    handed out is immutable, so that a slow reader holds up nobody.
    """

    def __init__(self, first: Status | None = None) -> None:
        self._status = first or Status()
        self._events: deque[Happened] = deque(maxlen=_KEPT)
        self._wishes: deque[Asked] = deque()
        self._lock = threading.Lock()
        self._wake: Callable[[], None] = lambda: None
        self._listeners: list[Callable[[], None]] = []

    @property
    def status(self) -> Status:
        """What the last turn saw."""
        return self._status

    def publish(self, status: Status) -> None:
        """Show a new status and tell those who listen."""
        self._status = status
        self._ring()

    def tell(self, events: Sequence[Happened]) -> None:
        """Add events, oldest first, and tell those who listen."""
        with self._lock:
            self._events.extend(events)
        if events:
            self._ring()

    def events(self, after: int = 0) -> tuple[Happened, ...]:
        """Return the events after a number, oldest first; the last thousand are kept here."""
        with self._lock:
            return tuple(each for each in self._events if each.number > after)

    def listen(self, ring: Callable[[], None]) -> Callable[[], None]:
        """Have ``ring`` called, from the control loop's thread and at once, whenever something is new.

        It must not block, as ``loop.call_soon_threadsafe`` does not.

        Returns:
            What ends that.
        """
        with self._lock:
            self._listeners.append(ring)

        def end() -> None:
            with self._lock:
                if ring in self._listeners:
                    self._listeners.remove(ring)

        return end

    def ask(self, wish: Wish, patience_s: float = _PATIENCE_S) -> Answer:
        """Hand in a wish and wait for its answer.

        Raises:
            DeviceError: If too many wait already, or the control loop does not answer in time.
            PolythrottleError: What it says no with.
        """
        asked = self.hand_in(wish)
        try:
            return asked.result(timeout=patience_s)
        except TooLate:
            asked.cancel()
            raise DeviceError("the daemon is busy with the device and did not answer in time; ask again") from None

    def hand_in(self, wish: Wish, read: Read | None = None) -> "Future[Answer]":
        """Hand in a wish; its answer comes through the future.

        Args:
            wish: What is wished.
            read: Returns at once what is in the file that it names, or raises what was wrong with it; without it the
                control loop reads the file itself.

        Raises:
            DeviceError: If too many wait already.
        """
        asked = Asked(wish, read)
        with self._lock:
            if len(self._wishes) >= _WISHES_MOST:
                raise DeviceError("too many requests wait for the daemon; ask again later")
            self._wishes.append(asked)
        self._wake()
        return asked.answer

    def wishes(self) -> list[Asked]:
        """Return the wishes that wait, oldest first, which are then the control loop's to answer."""
        with self._lock:
            taken = list(self._wishes)
            self._wishes.clear()
        return [each for each in taken if each.answer.set_running_or_notify_cancel()]

    def on_wish(self, wake: Callable[[], None]) -> None:
        """Have ``wake`` called when a wish comes in, so that the control loop need not be asked for it."""
        self._wake = wake

    def _ring(self) -> None:
        with self._lock:
            listeners = tuple(self._listeners)
        for ring in listeners:
            ring()
