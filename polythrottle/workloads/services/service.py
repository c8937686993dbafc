"""What all services have in common: a query at a time or many at once, in the event loop that asks."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Generic, Protocol, TypeVar

from async_timeout import timeout

from polythrottle.domain.errors import DeviceError, InvalidInput, PolythrottleError, TrialError, Unanswered
from polythrottle.domain.measurement import Query
from polythrottle.domain.space import Knob, OperatingPoint, SearchSpace
from polythrottle.workloads.foreign_calls import EventLoop
from polythrottle.workloads.inputs import chosen, count, grid_of
from polythrottle.workloads.uris import Address

CONCURRENCY = "concurrency"
_MOST_AT_ONCE = 4096
_LONGEST_S = 86_400.0


class ServiceConnection(Protocol):
    """The connections to one service; they belong to the event loop they were opened in."""

    async def close(self) -> None:
        """Close them."""


LineT = TypeVar("LineT", bound=ServiceConnection)
T = TypeVar("T")


class Service(ABC, Generic[LineT]):
    """A model served by somebody else, attached to and left as found: never started, never stopped.

    Args:
        address: Where it is.
        threads: Must be None: a service has threads of its own.
        timeout_s: When an answer is given up, in seconds.

    Raises:
        InvalidInput: If threads are given, or a number is out of range.
    """

    space: SearchSpace

    def __init__(self, address: Address, threads: Sequence[int] | None, timeout_s: float) -> None:
        if threads is not None:
            raise InvalidInput(f"{address.uri} is a service and sets its own threads; leave --threads out")
        if not 0 < timeout_s <= _LONGEST_S:
            raise InvalidInput(f"the timeout of a service must be above zero and at most a day, not {timeout_s:g} s")
        self.uri = address.uri
        self._address = address
        self._timeout_s = timeout_s
        self._at_once = address.counts(CONCURRENCY, least=1) or (1,)
        if self._at_once[-1] > _MOST_AT_ONCE:
            raise InvalidInput(f"{address.uri}: at most {_MOST_AT_ONCE} queries can be under way at once")
        self._lines: dict[asyncio.AbstractEventLoop, LineT] = {}
        self._loop: EventLoop | None = None

    def _open(self, knobs: Sequence[Knob], default: OperatingPoint | None = None) -> None:
        """Make the space of these knobs and the concurrency, if that has several levels."""
        if len(self._at_once) > 1:
            own = [Knob(CONCURRENCY, self._at_once)]
        else:
            own = []
        space = grid_of([*knobs, *own])
        if default is None:
            self.space = space
        else:
            self.space = SearchSpace(space.knobs, space.indices, space.default.moved(default))
        self._point = self.space.default

    @abstractmethod
    def _line(self) -> LineT:
        """Return new connections, for the running event loop."""

    @abstractmethod
    async def _ask(self, line: LineT) -> Query:
        """Issue one query."""

    @property
    def concurrency(self) -> int:
        """How many queries a closed loop keeps under way; above 1 also how many an open loop has at most."""
        if CONCURRENCY in self._point:
            return count(self._point, CONCURRENCY)
        return self._at_once[0]

    @property
    def notes(self) -> tuple[str, ...]:
        """What a user should read beside the figures: whose joules they are not."""
        if self._address.here:
            return ()
        return (f"{self._address.host} is another machine: joules counted here are not those the service takes",)

    def apply(self, point: OperatingPoint) -> None:
        """Set the knobs of the queries to come.

        Raises:
            KnobRejected: If the point is not in the space.
        """
        self._point = chosen(self.space, point)

    def query(self) -> Query:
        """Issue one query and wait for its answer.

        Raises:
            TrialError: If the answer is an error, is cut off, or does not come in time.
        """
        try:
            return self._wait_for(self.send())
        except PolythrottleError:
            self._wait_for(self.hang_up())  # a server may hang up behind an error, which must not spoil the next query
            raise

    async def send(self) -> Query:
        """Issue one query, letting others go on meanwhile.

        Raises:
            TrialError: If the answer is an error, is cut off, or does not come in time.
        """
        try:
            return await self._in_time(self._ask(self._lent()))
        except ConnectionError as err:
            raise TrialError(str(err)) from err

    async def hang_up(self) -> None:
        """Close what ``send`` opened in the running event loop."""
        line = self._lines.pop(asyncio.get_running_loop(), None)
        if line is not None:
            await line.close()

    def close(self) -> None:
        """Close what ``query`` opened; the service goes on."""
        self._disconnect()

    def _disconnect(self) -> None:
        if self._loop is not None:
            self._loop.run(self.hang_up())
            self._loop.close()
            self._loop = None

    def _lent(self) -> LineT:
        loop = asyncio.get_running_loop()
        if loop not in self._lines:
            self._lines[loop] = self._line()
        return self._lines[loop]

    def _wait_for(self, work: Coroutine[Any, Any, T]) -> T:
        if self._loop is None:
            self._loop = EventLoop()
        return self._loop.run(work)

    @contextmanager
    def _opening(self, asking: bool = False) -> Iterator[None]:
        """Hang up if what is done here fails, as nobody can close what was not opened.

        Args:
            asking: Whether it is a query, whose faults are then those of any query.

        Raises:
            DeviceError: If the service cannot be reached, or does not answer as one of its kind.
            TrialError: If it does not answer a query as it should.
        """
        try:
            yield
        except BaseException as err:
            self._disconnect()
            if isinstance(err, ConnectionRefusedError) or (isinstance(err, ConnectionError) and not asking):
                raise DeviceError(f"{err}; is the server up, and is that its {self._address.scheme} port?") from err
            if isinstance(err, ConnectionError):
                raise TrialError(str(err)) from err
            if isinstance(err, TrialError) and not asking:
                raise DeviceError(str(err)) from err
            raise

    async def _in_time(self, work: Awaitable[T]) -> T:
        """Return what ``work`` returns.

        Raises:
            Unanswered: If it does not come in time.
        """
        try:
            async with timeout(self._timeout_s):
                return await work
        except asyncio.TimeoutError:
            raise Unanswered(f"{self._address.where} did not answer within {self._timeout_s:g} s") from None
