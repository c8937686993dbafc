"""What services have in common: a query at a time or many at once, in the event loop that asks.

And the bound on the requests in flight at a server, as `polythrottle proxy` in front of it has it set.
"""

from __future__ import annotations

import asyncio
import json
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Generic, Protocol, TypeVar

from async_timeout import timeout

from polythrottle.domain.errors import (
    DeviceError,
    InvalidInput,
    KnobRejected,
    PolythrottleError,
    TrialError,
    Unanswered,
)
from polythrottle.domain.measurement import Query
from polythrottle.domain.space import CONCURRENCY, IN_FLIGHT, Knob, OperatingPoint, SearchSpace
from polythrottle.storage.untrusted import members_of
from polythrottle.workloads.foreign_calls import EventLoop, refusal_text
from polythrottle.workloads.inputs import chosen, count, grid_of
from polythrottle.workloads.services.http_client import Web
from polythrottle.workloads.uris import Address

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
            # `asyncio.timeout` is of Python 3.11.
            async with timeout(self._timeout_s):
                return await work
        except asyncio.TimeoutError:
            raise Unanswered(f"{self._address.where} did not answer within {self._timeout_s:g} s") from None


_PATH = "/polythrottle/in_flight"
_OK = 200


class InFlightLimit:
    """The limit of the proxy at an address; setting it ends nothing that is under way.

    Args:
        address: Of the service, whose requests go through the proxy.
        levels: To be tried.
    """

    def __init__(self, address: Address, levels: tuple[int, ...]) -> None:
        self._where = address.where
        self._root = f"{'https' if address.scheme == 'openai+https' else 'http'}://{address.where}"
        self._levels = levels
        self.found = 0
        self.held = 0

    @property
    def knob(self) -> Knob:
        """The levels, with the one that was found among them."""
        return Knob(IN_FLIGHT, tuple(sorted({*self._levels, self.found})))

    @property
    def most(self) -> int:
        """The highest level."""
        return max(*self._levels, self.found)

    async def open(self) -> None:
        """Look which limit holds.

        Raises:
            DeviceError: If there is no proxy at the address, or it lets nobody through.
            ConnectionError: If nobody answers.
        """
        status, found, _ = await self._asked("GET")
        limit = found.get("limit")
        if status != _OK or type(limit) is not int:
            raise DeviceError(
                f"no polythrottle proxy is at {self._where}; run one in front of the server "
                f"(polythrottle proxy http://HOST:PORT) and give its address, or leave {IN_FLIGHT} out"
            )
        if not limit:
            raise DeviceError(f"the proxy at {self._where} holds all requests back (its limit is 0)")
        self.found = self.held = limit

    async def set(self, limit: int) -> None:
        """Have a limit hold.

        Raises:
            KnobRejected: If the proxy does not take it, or is gone.
        """
        try:
            status, found, said = await self._asked("PUT", json.dumps({"limit": limit}).encode())
        except (TrialError, ConnectionError) as err:
            raise KnobRejected(f"the proxy does not take {IN_FLIGHT}={limit}: {err}") from err
        if status != _OK or found.get("limit") != limit:
            raise KnobRejected(f"the proxy at {self._where} does not take {IN_FLIGHT}={limit} ({status}): {said}")
        self.held = limit

    async def _asked(self, method: str, body: bytes | None = None) -> tuple[int, Mapping[str, Any], str]:
        web = Web(self._where, self._root, {"Content-Type": "application/json"})
        try:
            answer = await web.fetch(method, _PATH, body)
        finally:
            await web.close()
        found = answer.document
        return answer.status, members_of(found), refusal_text(answer.body)


def limit_of(address: Address) -> InFlightLimit | None:
    """Return the limit an address asks for; None if it asks for none.

    Raises:
        InvalidInput: If its levels are no numbers above zero.
    """
    levels = address.counts(IN_FLIGHT, least=1)
    if levels is None:
        return None
    return InFlightLimit(address, levels)
