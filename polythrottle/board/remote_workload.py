"""A workload on a board over SSH as the desk sees it: its windows are driven there, told, and judged here."""

import json
import os
import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from types import TracebackType
from typing import Any, Protocol

from typing_extensions import Self

from polythrottle.actuation.client.connection import reading_from
from polythrottle.actuation.wire import error_from, space_from
from polythrottle.domain.clock import VirtualClock
from polythrottle.domain.errors import DeviceError, InvalidInput, KnobRejected, PolythrottleError, TrialError
from polythrottle.domain.measurement import Query, Reading
from polythrottle.domain.ports import EXACT_SENSOR, Device, Placement, Target
from polythrottle.domain.space import OperatingPoint, SearchSpace
from polythrottle.metering.error_budget_guard import RequestWatch
from polythrottle.metering.observed_window import ObservedWindow, Verdict, idle_watts
from polythrottle.metering.point_measurement import Asked, Closing, Run
from polythrottle.metering.window import Watched, WindowSample, observe, query_from

_POLL_S = 1.0
_FILES = (".onnx", ".pt2", ".pt", ".engine", ".plan")
_SERVICES = ("kserve://", "kserve+grpc://", "openai://", "openai+https://")
_RUNS_THERE = re.compile(r"cmd:.*|[^\W\d]\w*(?:\.[^\W\d]\w*)*:[^\W\d]\w*(?:\.[^\W\d]\w*)*(?:\?.*)?", re.DOTALL)
Exchange = Callable[[Mapping[str, Any]], Mapping[str, Any]]


class HostingBoard(Protocol):
    """A board that can run workloads (`polythrottle.backends.ssh.SshBoard`)."""

    hosts: bool

    def work(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return what the process that runs workloads there answers."""

    def close(self) -> None:
        """Hang up."""


class BoardWorkload:
    """A workload in the board's own Python; satisfies the ports ``Workload``, ``Noting``, ``Placed`` and ``Hosted``.

    Args:
        uri: What opens it there: ``cmd:<words>``, ``package.module:callable``, ``kserve://…``, ``openai://…``, or
            the path there of an ONNX model, an export of torch or a TensorRT engine.
        board: Which; closed with the workload.
        options: As of `polythrottle.workloads.open_workload`: ``inputs``, ``batch_sizes``, ``threads``, ``timeout_s``.
        target: The GPU that is tuned, if one is.

    Raises:
        InvalidInput: If it cannot be run there.
        PolythrottleError: As opening it there does.
    """

    def __init__(self, uri: str, board: HostingBoard, options: Mapping[str, Any], target: Target | None = None) -> None:
        self.uri = uri
        self._board = board
        self._told = Told(board.work)
        try:
            _check_runs_there(uri)
            found = self._open(options, target)
        except BaseException:
            board.close()  # nobody else would, while somebody keeps the error
            raise
        self.space: SearchSpace = space_from(json.loads(found["space"]))
        self.notes: tuple[str, ...] = tuple(map(str, found["notes"]))
        self._point = self.space.default
        self.concurrency = int(found["concurrency"])
        """How many queries a closed loop keeps under way at the default point."""
        self.digest = str(found["digest"])
        """Of the model's file; empty where it is none."""
        self.placement = None
        if (where := found["placement"]) is not None:
            self.placement = Placement(**where)
        self.target = target
        """The GPU that is tuned, with the number it has there."""
        if target is not None:
            self.target = replace(target, find=lambda: int(found["number"]))

    def _open(self, options: Mapping[str, Any], target: Target | None) -> Mapping[str, Any]:
        self._board.hosts = True
        tuned = None
        if target is not None:
            tuned = {"title": target.title, "uuids": list(target.uuids), "place": target.place}
        self._told.say(do="open", uri=self.uri, key=_key_for(self.uri), target=tuned, **options)
        found: Mapping[str, Any] = self._told.next("opened")[1]
        return found

    def apply(self, point: OperatingPoint) -> None:
        """Set the knobs of the queries to come.

        Raises:
            KnobRejected: If the board's side refuses it, with the first query.
        """
        self._point = self.space.default.moved(point)

    def query(self) -> Query:
        """Have one query answered there.

        Raises:
            TrialError: If it fails.
        """
        self._told.mend()
        self._told.say(do="query", point=dict(self._point))
        return query_from(self._told.next("q"))[1]

    def run(self, device: Device, point: OperatingPoint, asked: Asked, watch: RequestWatch | None) -> Run:
        """Return a load on it, which is driven and watched there."""
        return HostedRun(self, device, point.only(self.space.names), asked, watch)

    @property
    def told(self) -> "Told":
        """What the board's side tells."""
        return self._told

    def close(self) -> None:
        """Hang up: what was opened there ends with the connection.

        Raises:
            DeviceError: If a service is not left there as it was found.
        """
        try:
            if self.uri.startswith(_SERVICES):
                self._leave()
        finally:
            self._board.close()

    def _leave(self) -> None:
        """Wait until a service is as it was found, which may take longer than what ends with a connection has."""
        self._told.cut = lambda: False
        try:
            self._told.mend()
            self._told.say(do="close")
            self._told.until("closed")
        except PolythrottleError:
            # A connection that is lost has been told of; the board's side leaves the service by itself then.
            if not self._told.torn:
                raise


def _check_runs_there(uri: str) -> None:
    file = uri.partition("?")[0].lower().endswith(_FILES)
    if not (file or uri.startswith(_SERVICES) or _RUNS_THERE.fullmatch(uri)):
        raise InvalidInput(
            f"{uri} cannot be run over SSH: a board runs cmd:<shell words>, package.module:callable, model.onnx, "
            "model.pt2, model.pt, model.engine, kserve://host:port/model and openai://host:port/model"
        )


def _key_for(uri: str) -> str:
    """Return the key that a server is to be shown; what is set here is meant for the server that is named here."""
    if uri.startswith("openai"):
        from polythrottle.workloads.services.openai import KEY

        return os.environ.get(KEY, "")
    return ""


class Told:
    """What the process that runs workloads on a board tells, in order (`polythrottle.board.work_host` says what).

    Args:
        ask: Passes a message on to the process there.
    """

    def __init__(self, ask: Exchange) -> None:
        self._ask = ask
        self._events: deque[Sequence[Any]] = deque()
        self._orders: list[Mapping[str, object]] = []
        self.failed = False
        """Whether an error has ended what was under way there, or it can be followed no longer."""
        self.refused = False
        """Whether a point was refused, so that nothing of what was said with it has been passed on."""
        self.torn = False
        """Whether an answer was lost, so that nobody knows what is under way there."""
        self.cut: Callable[[], bool] = lambda: False
        """Whether nobody needs what is under way there any more."""

    def say(self, **order: object) -> None:
        """Give an order, with what is asked next."""
        self._orders.append(order)

    def peek(self) -> Sequence[Any]:
        """Return what comes next.

        Raises:
            TrialError: If nobody needs it any more.
            PolythrottleError: If that is an error, or the board cannot be reached.
        """
        while not self._events:
            if self.cut():
                raise TrialError("nobody needs it any more")
            orders, self._orders = self._orders, []
            try:
                self._events.extend(self._exchange(orders, _POLL_S))
            except KnobRejected:
                # The point was refused before anything was passed on. What is to end there still is.
                self._orders = [order for order in orders if order["do"] == "end"]
                self.failed = self.refused = True
                raise
            # A lost connection, or a Ctrl-C: whoever waited for the end of what runs there might wait for ever.
            except BaseException:
                self.failed = self.torn = True
                raise
        if self._events[0][0] == "error":
            self.failed = True
            raise error_from(self._events.popleft()[1])
        return self._events[0]

    def mend(self) -> None:
        """Follow again where that was broken off: what still runs there ends, and what is told of it is passed over.

        Raises:
            PolythrottleError: If the board cannot be reached.
        """
        if not self.torn:
            return
        sensor = asdict(EXACT_SENSOR)
        orders: Sequence[Mapping[str, object]] = [
            {"do": "stop"},
            {"do": "end"},
            {"do": "idle", "seconds": 0.0, "sensor": sensor},  # its end is told after all that was before
        ]
        self._orders.clear()
        self._events.clear()
        while not self.waits("idled"):
            if self._events:
                self._events.popleft()
            else:
                self._events.extend(self._exchange(orders, _POLL_S))
                orders = ()
        self._events.popleft()
        self.torn = False

    def next(self, *kinds: str) -> Sequence[Any]:
        """Return what comes next, which must be of one of some kinds.

        Raises:
            DeviceError: If it is of another.
            PolythrottleError: As `peek`.
        """
        found = self.peek()
        if found[0] not in kinds:
            raise DeviceError(
                f"the board told {found[0]!r} where {' or '.join(kinds)} was expected; it has another version"
            )
        return self._events.popleft()

    def until(self, kind: str) -> Sequence[Any]:
        """Return the next that is of a kind, past all others."""
        while self.peek()[0] != kind:
            self._events.popleft()
        return self._events.popleft()

    def waits(self, kind: str) -> bool:
        """Return whether something of a kind has been told already, and is the next."""
        return bool(self._events) and self._events[0][0] == kind

    def _exchange(self, orders: Sequence[Mapping[str, object]], wait_s: float) -> Sequence[Sequence[Any]]:
        message = {"say": list(orders), "wait_s": wait_s}
        events = self._ask(message).get("events")
        if not isinstance(events, list) or not all(isinstance(each, list) and len(each) > 1 for each in events):
            raise DeviceError("the board's answer makes no sense, as from one of another version")
        return events


class _ToldDevice:
    """The device as it is told: its clock stands at the last answer, its reading is that of the last look."""

    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.reading: Reading | None = None

    def read(self) -> Reading:
        """Return the last reading that was told."""
        assert self.reading is not None
        return self.reading


@dataclass
class HostedWindow(ObservedWindow):
    """A window that was driven elsewhere, as it is told."""

    told: Told = field(kw_only=True)
    watched: bool = field(default=False, kw_only=True)
    """Whether the load may be ended there for its error budget."""
    beside: _ToldDevice = field(default_factory=_ToldDevice, kw_only=True)

    @property
    def source(self) -> Watched:
        """What tells time and energy."""
        return self.beside

    def look(self) -> None:
        """Take the next look; a window that is cut short goes on to it."""
        while self.told.peek()[0] == "q":
            self.take(self.query())
        if self.told.peek()[0] != "over":
            self._take_look()

    def glance(self) -> None:
        """Do nothing: looks that were taken meanwhile are told before the next query."""

    def _take_look(self) -> None:
        self.beside.reading = reading_from(self.told.next("r")[1])[0]
        self.looks.append(WindowSample(self.beside.reading, *self.served))

    def query(self) -> Query:
        """Return the next query, with the looks before it."""
        while self.told.peek()[0] == "r":
            self._take_look()
        end_s, query = query_from(self.told.next("q"))
        self.beside.clock = VirtualClock(end_s)
        return query

    def take(self, query: Query) -> None:
        """Add a query that was just answered."""
        self.queries.append(query)
        self.ends_s.append(self.beside.clock.now())
        self._count(query)

    def load(self) -> Iterator[Query]:
        """Yield queries as they are told, and looks before the end that a watch sets."""
        while True:
            while self.watched and self.told.peek()[0] == "r":
                self._take_look()
            if self.watched and self.told.waits("over"):
                return
            yield self.query()


class HostedRun:
    """A load that is driven on the board which hosts the workload."""

    def __init__(
        self,
        workload: BoardWorkload,
        device: Device,
        point: OperatingPoint,
        asked: Asked,
        watch: RequestWatch | None = None,
    ) -> None:
        self._watch = watch
        self._warm = False
        self._workload = workload
        self._device = device
        self._point = point
        self._asked = asked
        self._told = workload.told
        self._begun = False
        self._over = True
        self._report: Mapping[str, Any] = {"late_p99_s": None, "cpu_s": 0.0}

    def window(self) -> tuple[int, ObservedWindow, bool]:
        """Have it warmed up and a window driven, and judge it meanwhile."""
        asked = self._asked
        verdict = Verdict(asked.window, asked.goal)
        if self._begun:
            self._told.say(do="again")
        else:
            self._told.mend()
            self._told.say(
                do="begin",
                point=dict(self._point),
                window=asdict(asked.window),
                sensor=asdict(asked.sensor),
                least=verdict.least,
                judged=asked.window.precision is not None or bool(asked.goal.limits),
                arrivals=str(asked.arrivals),
                seed=asked.seed,
                watch=None if self._watch is None else self._watch.order(),
            )
        self._begun = True
        self._over = self._told.failed = self._told.refused = False
        self._close_with(None)
        count = int(self._told.next("warm")[1])
        self._warm = True
        seen = HostedWindow(
            self._device,
            asked.sensor,
            arrivals=asked.arrivals,
            goal=asked.goal,
            told=self._told,
            watched=self._watch is not None,
        )
        censored = observe(seen, seen.load(), asked.window, verdict)
        self._stop()
        return count, seen, censored

    def _stop(self) -> None:
        """End the window there, where this one has seen enough before it has."""
        if not self._told.waits("over"):
            self._told.say(do="stop")
        self._take(self._told.until("over"))

    def _close_with(self, raw: Mapping[str, Any] | None) -> None:
        """Let the device know of a reading that was told, which spares it a question."""
        if isinstance(self._device, Closing):
            self._device.close_with(None if raw is None else reading_from(raw)[0])

    @property
    def sender(self) -> tuple[float | None, float]:
        """How late 99 % of the queries were sent at most, and the processor time the sender took."""
        return self._report["late_p99_s"], float(self._report["cpu_s"])

    def rest(self, moment_s: float) -> Iterator[Query]:
        """Yield what was sent before a moment and is not answered yet."""
        self._told.say(do="rest", until_s=moment_s)
        while self._told.peek()[0] == "q":
            yield query_from(self._told.next("q"))[1]
        self._take(self._told.next("over"))

    def _take(self, over: Sequence[Any]) -> None:
        """Take what is told of a load at the end of a window."""
        self._over = True
        self._report = over[1]
        if self._watch is not None:
            self._watch.hear(self._report["watch"], ended=False)
        if (raw := self._report.get("reading")) is not None:
            self._close_with(raw)
        self._workload.notes = tuple(map(str, self._report["notes"]))

    def idle_power_w(self) -> float | None:
        """Return the power without work."""
        asked = self._asked
        if asked.window.idle_s <= 0:
            return None
        self._told.say(do="idle", seconds=asked.window.idle_s, sensor=asdict(asked.sensor))
        looks = []
        while self._told.peek()[0] == "r":
            raw = self._told.next("r")[1]
            looks.append(WindowSample(reading_from(raw)[0]))
            self._close_with(raw)
        self._told.next("idled")
        return idle_watts(looks, asked.sensor)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._begun or self._told.torn:
            return
        if not self._told.failed:
            with suppress(PolythrottleError):
                if not self._over:
                    self._stop()
            self._told.say(do="end")  # with what is asked next: nothing is sent there between two windows
        if self._watch is not None:
            self._hear_the_last(self._watch)

    def _hear_the_last(self, watch: RequestWatch) -> None:
        """Take over what the requests have spent in the end; where nobody tells, that is all they might have."""
        if self._told.refused:
            if not self._warm:  # nothing was begun
                watch.hear(watch.state, ended=True)
                return
            self._told.say(do="end")
        with suppress(PolythrottleError):
            watch.hear(self._told.until("watched")[1], ended=True)
