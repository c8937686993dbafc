"""Where the control loop and its clients meet: status, events, and commands that wait.

With the files they name read beforehand.
"""

import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as TooLate
from dataclasses import dataclass, field
from pathlib import Path

from polythrottle.daemon.commands import Answer, ApplyProfile, Command, SetBudget
from polythrottle.daemon.energy_budget import Carbon, check_wish
from polythrottle.daemon.followed_profile import ProfileFile, read_profile_file
from polythrottle.daemon.history_store import HistoryStore
from polythrottle.daemon.status import Happened, Status
from polythrottle.domain.errors import DeviceError

# The files that wishes name, read before the control loop hears of them: it must never wait for a file.

Named = ProfileFile | Carbon | None
"""What is in such a file; None where a wish names none."""
Read = Callable[[], Named]
"""Returns it, or raises what was wrong with it."""


def names_file(wish: Command) -> bool:
    """Return whether there is a file to be read for a wish."""
    return isinstance(wish, ApplyProfile) or (isinstance(wish, SetBudget) and wish.carbon is not None)


def read_named(wish: Command) -> Named:
    """Return what is in the file that a wish names; may take seconds.

    Raises:
        UnknownName: If there is no such profile.
        BadFile: If it cannot be used.
        InvalidInput: If the wish makes no sense, whatever is in the file.
    """
    match wish:
        case ApplyProfile(profile):
            return read_profile_file(profile)
        case SetBudget(carbon=str(path)):
            check_wish(wish)
            return Carbon.read(Path(path))
        case _:
            return None


# Where the control loop and those who ask meet: it never waits for them, they may wait for it.

_KEPT = 1000
_WISHES_MOST = 64
_PATIENCE_S = 10.0


@dataclass(frozen=True)
class PendingCommand:
    """A wish that waits, what is in the file it names where that was read, and where its answer or its error goes."""

    wish: Command
    read: Read | None = None
    answer: "Future[Answer]" = field(default_factory=Future)


class Mailbox:
    """One status, the last events, and the wishes that wait.

    The control loop calls `publish`, `tell` and `wishes`; every other method may be called from any thread. What is
    handed out is immutable, so that a slow reader holds up nobody.
    """

    def __init__(self, first: Status | None = None) -> None:
        self._status = first or Status()
        self._events: deque[Happened] = deque(maxlen=_KEPT)
        self._wishes: deque[PendingCommand] = deque()
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

    def ask(self, wish: Command, patience_s: float = _PATIENCE_S) -> Answer:
        """Hand in a wish and wait for its answer.

        Raises:
            DeviceError: If too many wait already, or the control loop does not answer in time.
            PolythrottleError: What it says no with.
        """
        asked = self.hand_in(wish)
        try:
            return asked.result(timeout=patience_s)
        except TooLate:
            # Nobody waits for it any more: it must not be carried out later, unseen.
            asked.cancel()
            raise DeviceError("the daemon is busy with the device and did not answer in time; ask again") from None

    def hand_in(self, wish: Command, read: Read | None = None) -> "Future[Answer]":
        """Hand in a wish; its answer comes through the future.

        Args:
            wish: What is wished.
            read: Returns at once what is in the file that it names, or raises what was wrong with it; without it the
                control loop reads the file itself.

        Raises:
            DeviceError: If too many wait already.
        """
        asked = PendingCommand(wish, read)
        with self._lock:
            if len(self._wishes) >= _WISHES_MOST:
                raise DeviceError("too many requests wait for the daemon; ask again later")
            self._wishes.append(asked)
        self._wake()
        return asked.answer

    def wishes(self) -> list[PendingCommand]:
        """Return the wishes that wait, oldest first, which are then the control loop's to answer."""
        with self._lock:
            taken = list(self._wishes)
            self._wishes.clear()
        # Marks each as under way, after which it cannot be cancelled; leaves out those that were.
        return [each for each in taken if each.answer.set_running_or_notify_cancel()]

    def on_wish(self, wake: Callable[[], None]) -> None:
        """Have ``wake`` called when a wish comes in, so that the control loop need not be asked for it."""
        self._wake = wake

    def _ring(self) -> None:
        with self._lock:
            listeners = tuple(self._listeners)
        # Outside the lock, for a listener may stop listening while it is called.
        for ring in listeners:
            ring()


class EventRecorder:
    """Where the parts of the control loop say what happened: noted in the history, counted, and shown to listeners.

    Args:
        record: Numbers and keeps the events.
        mailbox: Shows them.
    """

    def __init__(self, record: HistoryStore, mailbox: Mailbox) -> None:
        self.counts: Counter[str] = Counter()
        self._record = record
        self._mailbox = mailbox
        mailbox.tell(record.recent)

    def tell(self, kind: str, words: str) -> None:
        """Note an event and show it."""
        self.counts[kind] += 1
        self._mailbox.tell([self._record.tell(kind, words)])
