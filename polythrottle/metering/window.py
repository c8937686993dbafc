"""One window: queries driven and a device looked at between them, until whoever judges it has seen enough.

Standard library alone: on a board that is reached over SSH this runs there, and the desk judges what it amounts to.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Protocol

from polythrottle.domain.clock import Clock, VirtualClock
from polythrottle.domain.errors import DeviceError, InvalidInput
from polythrottle.domain.measurement import Query, Reading, Window
from polythrottle.domain.ports import Sensor

_SHARE_OF_STEP = 8.0
_LOOKS = 40.0
_SLOW = 0.01
"""A look that takes so large a share of the time between two is taken beside the queries."""
_MOST_JUDGED = 0.02
"""Asking whether a window knows enough takes at most such a share of it: what is measured would idle meanwhile."""
_GROWTH = 1.06
_ASKED_GROWTH = 1.1


class Watched(Protocol):
    """What is looked at during a window."""

    @property
    def clock(self) -> Clock:
        """What its readings go by."""

    def read(self) -> Reading:
        """Return energy so far, temperature and clocks, now."""


@dataclass(frozen=True)
class WindowSample:
    """A reading, and what had been served by then.

    Args:
        reading: Of the device.
        queries: Answered since the window began; items and tokens likewise.
    """

    reading: Reading
    queries: int = 0
    items: int = 0
    tokens: int = 0


@dataclass
class WindowLog:
    """What has been seen of a window so far.

    Args:
        device: Which is looked at.
        sensor: What it reads its energy with.
        queries: Answered, in order; ``ends_s`` are when, on the device's clock.
        looks: At the device.
    """

    device: Watched
    sensor: Sensor
    queries: list[Query] = field(default_factory=list)
    ends_s: list[float] = field(default_factory=list)
    looks: list[WindowSample] = field(default_factory=list)
    served: tuple[int, int, int] = (0, 0, 0)
    """Queries answered, their items and their tokens: one value, since a look may be taken beside the queries."""
    judged_s: float = 0.0
    looker: ThreadPoolExecutor | None = None
    under_way: Future[None] | None = None

    def look(self) -> None:
        """Look at the device; where a look is under way beside the queries, wait for that one."""
        if self.under_way is None:
            self._look()
        else:
            self._collect()

    def glance(self) -> None:
        """Look at the device, beside the queries to come where that is how it is looked at.

        On an H200 the driver takes 3 to 30 ms for an answer (580.159.04). A GPU that serves one query after the other
        would idle meanwhile, for a third of the time.
        """
        if self.looker is None:
            self._look()
        elif self.under_way is None or self.under_way.done():
            self._collect()
            self.under_way = self.looker.submit(self._look)

    def _look(self) -> None:
        reading = self.device.read()
        self.looks.append(WindowSample(reading, *self.served))

    def _collect(self) -> None:
        if self.under_way is not None:
            self.under_way.result()
            self.under_way = None

    @contextmanager
    def looked_at_beside(self) -> Iterator[None]:
        """Have glances taken in a thread of their own."""
        with ThreadPoolExecutor(1, "polythrottle-look") as self.looker:
            yield
            self._collect()

    def take(self, query: Query) -> None:
        """Add a query that was just answered."""
        self.queries.append(query)
        self.ends_s.append(self.device.clock.now())
        self._count(query)

    def _count(self, query: Query) -> None:
        queries, items, tokens = self.served
        self.served = (queries + 1, items + query.items, tokens + (query.tokens or 0))

    @property
    def items(self) -> int:
        """Items of the queries answered so far."""
        return self.served[1]

    @property
    def tokens(self) -> int:
        """Tokens of the queries answered so far."""
        return self.served[2]

    @property
    def elapsed_s(self) -> float:
        """From the first look to the last answer."""
        return self.ends_s[-1] - self.looks[0].reading.time_s if self.ends_s else 0.0

    @property
    def moved(self) -> bool:
        """Whether the energy has moved between the first look and the last."""
        return self.looks[-1].reading.energy_j > self.looks[0].reading.energy_j


class Judge(Protocol):
    """What says when a window may end."""

    @property
    def least(self) -> int:
        """Of how many queries at least."""

    def begin(self, seen: WindowLog) -> None:
        """Take note of the first look."""

    def due(self, queries: int) -> bool:
        """Return whether it is time to ask whether a window of a precision knows enough."""

    def reached(self, seen: WindowLog) -> bool:
        """Return whether it does."""

    def gives_up(self, seen: WindowLog) -> bool:
        """Return whether the window is plainly going to break a limit; asked after every query."""


class Gate(Protocol):
    """Whoever bounds what is sent: asked before each query, and told of each answer, both in the thread that sends."""

    def permits(self, count: int) -> bool:
        """Return whether so many requests may be sent now; after the first refusal nothing is sent any more."""

    def landed(self, query: Query) -> None:
        """Take note of a request that was answered."""

    @property
    def patience_s(self) -> float:
        """How long to wait in the end for what is under way."""


class Checks:
    """When to ask whether a window of a precision knows enough: ever less often.

    Args:
        window: What it is to see.
        least: Of how many queries at least.
    """

    def __init__(self, window: Window, least: int) -> None:
        self._asks = window.precision is not None
        self.least = least
        self._next = least

    def due(self, queries: int) -> bool:
        """Return whether it is time to ask again."""
        if not self._asks or queries < self._next:
            return False
        self._next = max(queries + 1, math.ceil(queries * _ASKED_GROWTH))
        return True


def observe(seen: WindowLog, load: Iterator[Query], window: Window, judge: Judge) -> bool:
    """Drive a window to where it ends, and return whether it was cut short.

    Every decision follows from the queries and the looks alone: whoever is given both, as at a desk, comes to the same.

    Args:
        seen: Empty; what was seen afterwards.
        load: Queries as they are answered.
        window: When to end.
        judge: What would be enough, where the window has a precision.
    """
    due = _Due(window, seen.sensor)
    began_s = seen.device.clock.now()
    seen.look()
    took_s = seen.device.clock.now() - began_s
    slow = took_s > _SLOW * due.apart_s and not isinstance(seen.device.clock, VirtualClock)
    judge.begin(seen)
    with seen.looked_at_beside() if slow else nullcontext():
        return _driven(seen, load, window, judge, due)


def _driven(seen: WindowLog, load: Iterator[Query], window: Window, judge: Judge, due: _Due) -> bool:
    least_s = max(window.duration_s, seen.sensor.least_s)
    # The most queries end no window that its sensor cannot tell anything of yet: quick ones may be over in a moment.
    while seen.elapsed_s < window.timeout_s and (
        len(seen.queries) < window.most_queries or seen.elapsed_s < seen.sensor.least_s
    ):
        if not _take_whole(seen, load):
            _look_last(seen)
            return True
        if due.now(len(seen.queries), seen.elapsed_s):
            seen.glance()
        if _over(seen, window, least_s, judge):
            break
        if judge.gives_up(seen) and len(seen.queries) < window.most_queries and seen.moved:
            _look_last(seen)
            return True
    _look_last(seen)
    return False


def _look_last(seen: WindowLog) -> None:
    """Look, unless that was done since the last answer."""
    for _ in range(2):  # a look that was under way may have been taken before that answer
        if seen.looks[-1].queries < len(seen.queries):
            seen.look()


def _take_whole(seen: WindowLog, load: Iterator[Query]) -> bool:
    """Take the next query, and those answered with it: the energy of one run is that of all of them.

    Returns:
        Whether there was one; there is not where something has ended the load.
    """
    for query in load:
        seen.take(query)
        if not query.more:
            return True
    return False


class _Due:
    """When to look at the device: about forty times a window, and often enough to see a counter step.

    A window may end by its most queries long before its time.
    """

    def __init__(self, window: Window, sensor: Sensor) -> None:
        spaced_s = window.duration_s / _LOOKS
        self.apart_s = min(spaced_s, sensor.step_s / _SHARE_OF_STEP) if sensor.step_s else spaced_s
        self._stepping = sensor.step_s > 0
        self._many = math.ceil(window.most_queries / _LOOKS)
        self._queries = 0
        self._time_s = 0.0

    def now(self, queries: int, elapsed_s: float) -> bool:
        grown = self._stepping or queries >= max(self._queries + 1, math.ceil(self._queries * _GROWTH))
        soon = elapsed_s - self._time_s < self.apart_s and queries - self._queries < self._many
        if not grown or soon:
            return False
        self._queries = queries
        self._time_s = elapsed_s
        return True


def _over(seen: WindowLog, window: Window, least_s: float, judge: Judge) -> bool:
    """Return whether the window has seen what it is for."""
    if seen.elapsed_s < least_s or len(seen.queries) < judge.least:
        return False
    if window.precision is None:
        return True
    if seen.judged_s > _MOST_JUDGED * seen.elapsed_s or not judge.due(len(seen.queries)):
        return False
    _look_last(seen)
    began_s = seen.device.clock.now()
    enough = seen.moved and judge.reached(seen)
    seen.judged_s += seen.device.clock.now() - began_s
    return enough


class Warming(Protocol):
    """A load as far as a warm-up needs it; see `polythrottle.metering.load.Load`."""

    @property
    def at_once(self) -> int:
        """How many queries are sent in the load's first moment; 0 where it has begun, or sends one at a time."""

    def rest(self, moment_s: float) -> Iterator[Query]:
        """Yield queries until all that were sent before a moment are answered."""

    def __next__(self) -> Query: ...


_ROUNDS = 4
"""How often each place of a closed loop is answered in a warm-up at most, on average: some answers take very long."""


def warm_up(load: Warming, clock: Clock, window: Window, sensor: Sensor) -> int:
    """Serve until the warm-up is over and the sensor shows nothing from before; return how many queries that took.

    A closed loop sends as many queries as it has places in its first moment, as nobody does later: of 256 prompts that
    came at once some waited 8 s for their first token on a simulated H100, and 0.8 s later on. So each place is
    answered once on average, and then all that was sent meanwhile.
    """
    start_s = clock.now()
    settle_s = max(window.settle_s, sensor.settle_s)
    at_once = load.at_once
    count = 0
    more = False
    while more or count < max(window.warmup, at_once) or clock.now() - start_s < settle_s:
        query = next(load, None)
        if query is None:  # something has ended the load
            return count
        more = query.more
        count += 1
    return count + sum(1 for _ in islice(load.rest(clock.now()), max(0, _ROUNDS * at_once - count)))


IDLE_READINGS = 40


def idle_looks(device: Watched, duration_s: float, sensor: Sensor) -> list[WindowSample]:
    """Return looks at a device that is left alone.

    Args:
        device: Set to a point, and without work.
        duration_s: How long to look at least.
        sensor: What its energy is read with.
    """
    device.clock.sleep(sensor.settle_s)
    looks = [WindowSample(device.read())]
    looked_s = max(duration_s, sensor.least_s)
    for _ in range(IDLE_READINGS):
        device.clock.sleep(looked_s / IDLE_READINGS)
        looks.append(WindowSample(device.read()))
    return looks


# A query as it travels from where a window is driven to where it is judged.

_FIELDS = ("latency_s", "items", "start_s", "first_s", "tokens", "sent_s", "more", "lumped", "step_s", "prompt_tokens")


def query_line(query: Query, end_s: float) -> list[Any]:
    """Return a query as it travels.

    Args:
        query: The query.
        end_s: When it was answered.
    """
    return ["q", end_s, *(getattr(query, name) for name in _FIELDS)]


def query_from(line: Sequence[Any]) -> tuple[float, Query]:
    """Return when a query that has travelled was answered, and the query.

    Raises:
        DeviceError: If it is none.
    """
    try:
        return float(line[1]), Query(**{name: line[2 + place] for place, name in enumerate(_FIELDS)})
    except (TypeError, ValueError, IndexError, InvalidInput) as err:
        raise DeviceError(f"the board told of a query that makes no sense: {err}") from err
