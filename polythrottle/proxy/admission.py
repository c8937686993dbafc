"""Who may be under way at a server: at most so many requests at once, the others in line in the order they came."""

from collections import deque
from enum import Enum
from typing import Generic, TypeVar

from polythrottle.domain.errors import InvalidInput

MOST = 1_000_000
"""Limits above this are taken for a slip."""
T = TypeVar("T")


class Admission(Enum):
    """What becomes of a request that has come."""

    RUNS = "runs"
    WAITS = "waits"
    REFUSED = "refused"


class InFlight(Generic[T]):
    """Requests under way and in line, bounded in both; the limit may change at any time.

    Lowering the limit ends nothing: those that are under way go on, and nobody else starts until they are few enough. A
    limit of 0 lets nobody start, as while a server is started anew.

    Args:
        limit: How many may be under way at once.
        most_waiting: How many may be in line; whoever comes then is refused.
    """

    def __init__(self, limit: int, most_waiting: int) -> None:
        self._limit = checked_limit(limit)
        self._most_waiting = most_waiting
        self._running: set[T] = set()
        self._line: deque[T] = deque()
        self._in_line: set[T] = set()

    @property
    def limit(self) -> int:
        """How many may be under way at once."""
        return self._limit

    @property
    def running(self) -> int:
        """How many are under way."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """How many are in line."""
        return len(self._in_line)

    def enter(self, request: T) -> Admission:
        """Take in a request that has come; it may start if it runs."""
        if not self._in_line and len(self._running) < self._limit:
            self._running.add(request)
            return Admission.RUNS
        if len(self._in_line) >= self._most_waiting:
            return Admission.REFUSED
        self._line.append(request)
        self._in_line.add(request)
        return Admission.WAITS

    def leave(self, request: T) -> list[T]:
        """Let a request go, from wherever it is; returns those that are to start now."""
        self._running.discard(request)
        self._in_line.discard(request)
        return self._due()

    def set_limit(self, limit: int) -> list[T]:
        """Change the limit; returns those that are to start now.

        Raises:
            InvalidInput: If it is no limit.
        """
        self._limit = checked_limit(limit)
        return self._due()

    def clear_line(self) -> list[T]:
        """Empty the line; returns who stood in it, in order."""
        left = [request for request in self._line if request in self._in_line]
        self._line.clear()
        self._in_line.clear()
        return left

    def _due(self) -> list[T]:
        started: list[T] = []
        while self._line and (self._line[0] not in self._in_line or len(self._running) < self._limit):
            request = self._line.popleft()
            if request in self._in_line:  # whoever left keeps the place until it is reached
                self._in_line.remove(request)
                self._running.add(request)
                started.append(request)
        return started


def checked_limit(limit: object) -> int:
    """Return a limit.

    Raises:
        InvalidInput: If it is no whole number from 0 to `MOST`.
    """
    if type(limit) is not int or not 0 <= limit <= MOST:
        raise InvalidInput(f"requests in flight are a whole number from 0 to {MOST:,}, not {str(limit)[:40]}")
    return limit
