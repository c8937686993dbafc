"""A simulated board and the requests that come to it, so that the daemon can be tried without hardware.

Requests arrive as `polythrottle.domain.arrivals` says and are answered in batches by one server on a simulated
device, while the clock of the control loop, real or virtual, moves on; `NodeMeter` tells what a simulated server draws
as a whole. Everything is simulated, and its joules are called so.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from polythrottle.actuation.client.board import Board
from polythrottle.backends import DeviceURI, open_device
from polythrottle.backends.simulated.node import NODE, SimulatedNode, is_node
from polythrottle.daemon.control.state import Switching
from polythrottle.daemon.observation import RequestStats
from polythrottle.daemon.traffic.local_sources import LatencyWindow
from polythrottle.domain.clock import Clock
from polythrottle.domain.errors import InvalidInput
from polythrottle.domain.space import BATCH_SIZE, OperatingPoint

if TYPE_CHECKING:
    from polythrottle.backends.simulated import SimulatedDevice, SimulatedWorkload
    from polythrottle.daemon.control.events import Target
    from polythrottle.domain.measurement import EnergyKind, Reading

_REDRAW_S = 60.0
"""A simulated window's noise in time and power stays as it is drawn until something is applied."""
_PATIENCE_S = 60.0
"""After which a sender gives up, so that no queue grows for ever."""


def _ignored(arrival_s: float, latency_s: float) -> None:
    return


@dataclass(frozen=True)
class Ended:
    """A request that ended: when, after how long, and whether with an answer; its sender may have given up before."""

    at_s: float
    latency_s: float
    answered: bool = True


@dataclass(frozen=True)
class Round:
    """What has become of the requests of a site.

    Args:
        ended: Since it was asked before.
        begun: How many were sent to the server or given up, so far.
        waiting: How many wait to be sent.
        over: Whether none is left and none will come.
    """

    ended: tuple[Ended, ...]
    begun: int
    waiting: int
    over: bool


class SimulatedSite:
    """One server on one simulated device, and the requests that come to it; `board` and `traffic` are its two sides.

    The device's own virtual time follows the clock of the control loop: whoever looks at either side lets it catch up
    first. A batch that was begun is finished, so that it can be ahead by as much as that takes.

    Args:
        device: Not used by anybody else.
        workload: That it serves.
        arrivals: When requests come, in seconds from now on, never falling; the workload is down after the last.
        clock: Of the control loop.
        words: The URI of the traffic.
        note: Called with each request's arrival and latency, in seconds from the start.
        switching: What setting a knob takes, during which nothing is served.
        patience_s: How long a request waits to be sent before its sender gives up.
        warming: Whether requests that come before the first point is set, after a release too, and while it is, are
            counted but their latencies forgotten: nothing was promised yet, and that takes longer than many an SLO.
    """

    def __init__(
        self,
        device: SimulatedDevice,
        workload: SimulatedWorkload,
        arrivals: Iterable[float],
        clock: Clock,
        words: str = "sim:",
        note: Callable[[float, float], None] = _ignored,
        switching: Switching | None = None,
        patience_s: float = _PATIENCE_S,
        warming: bool = False,
    ) -> None:
        self.device = device
        self.workload = workload
        self.board, self.traffic = SimulatedBoard(self), SimulatedTraffic(self, words)
        self.idle_s = 0.0
        self.switches = 0
        self._clock, self._note, self._switching = clock, note, switching or Switching()
        self._started_s = clock.now()
        self._drawn_s = 0.0
        self._patience_s = patience_s
        self._coming: Iterator[float] = iter(arrivals)
        self._queue: deque[float] = deque()
        self._ended: deque[Ended] = deque()
        self._point = device.space.default
        self._batch = workload.batch_size(workload.space.default)
        self._gather_s = 0.0
        self._begun = 0
        self._warms = warming
        self._warming = warming

    @property
    def now_s(self) -> float:
        """Seconds since the start, on the clock of the control loop."""
        return self._clock.now() - self._started_s

    def catch_up(self) -> None:
        """Let everything happen that happens until now."""
        until_s = self.now_s
        clock = self.device.clock
        while (at_s := clock.now()) < until_s:
            if at_s - self._drawn_s >= _REDRAW_S:
                self._drawn_s = at_s
                self.device.apply(self._point)
            ready_s = self._ready_s()
            if (wait_s := min(ready_s, until_s) - at_s) > 0:
                self.idle_s += wait_s
                clock.sleep(wait_s)
            if ready_s <= clock.now():
                self._serve()

    def apply(self, point: OperatingPoint) -> None:
        """Set the device's knobs; the server stands still meanwhile.

        Raises:
            KnobRejected: If the device has no such level.
        """
        self.catch_up()
        own = self.device.space.default.moved({name: level for name, level in point.items() if name != BATCH_SIZE})
        delay_s = self._switching.delay_s(self._point, own)
        self.device.apply(own)
        self.device.clock.sleep(delay_s)
        self._point = own
        self._drawn_s = self.device.clock.now()
        self.switches += 1
        if self._warming:
            self._warmed()

    def restore(self) -> None:
        """Set the device's knobs back to their defaults."""
        if self._point != self.device.space.default:
            self.apply(self.device.space.default)

    def release(self) -> None:
        """Likewise, and promise nothing until the first point is set again."""
        self.restore()
        self._warming = self._warms

    def serve(self, target: Target) -> None:
        """Set the batch and how long to gather it.

        Raises:
            KnobRejected: If the model cannot be served in such batches.
        """
        size = OperatingPoint({BATCH_SIZE: target.point.get(BATCH_SIZE, self.workload.space.default[BATCH_SIZE])})
        self.workload.apply(size)
        self._batch = self.workload.batch_size(size)
        self._gather_s = target.gather_s

    def round(self) -> Round:
        """Return what has become of the requests."""
        now_s = self.now_s
        ended = []
        # A batch that was begun is simulated to its end: its answers are not told before their time.
        while self._ended and self._ended[0].at_s <= now_s:
            ended.append(self._ended.popleft())
        self._pull(lambda: self._queue[-1] <= now_s)
        waiting = sum(arrival_s <= now_s for arrival_s in self._queue)
        return Round(tuple(ended), self._begun, waiting, over=not self._queue and not self._ended)

    def _warmed(self) -> None:
        """Forget how long the requests take that came until now."""
        now_s = self.device.clock.now()
        self._warming = False
        self._pull(lambda: self._queue[-1] <= now_s)
        while self._queue and self._queue[0] <= now_s:
            self._queue.popleft()
            self._begun += 1
        self._ended.clear()
        self.traffic.forget()

    def _ready_s(self) -> float:
        """Return when the batch that begins with the oldest request is ready to be sent: full, or waited for."""
        self._pull(lambda: len(self._queue) < self._batch)
        if not self._queue:
            return math.inf
        if len(self._queue) >= self._batch:
            full_s = self._queue[self._batch - 1]
        else:
            full_s = math.inf
        return min(full_s, self._queue[0] + self._gather_s)

    def _pull(self, wanted: Callable[[], bool]) -> None:
        """Look ahead at the arrivals: at one, and at more as long as they are wanted."""
        while not self._queue or wanted():
            arrival_s = next(self._coming, None)
            if arrival_s is None:
                return
            self._queue.append(arrival_s)

    def _serve(self) -> None:
        start_s = self.device.clock.now()
        batch: list[float] = []
        while self._queue and self._queue[0] < start_s - self._patience_s:
            self._end(self._queue.popleft(), start_s, answered=False)
        while self._queue and self._queue[0] <= start_s and len(batch) < self._batch:
            batch.append(self._queue.popleft())
        if not batch:
            return
        answer_s = start_s + self.workload.query().latency_s
        for arrival_s in batch:
            self._end(arrival_s, answer_s, answered=True)

    def _end(self, arrival_s: float, at_s: float, answered: bool) -> None:
        self._begun += 1
        self._ended.append(Ended(at_s, at_s - arrival_s, answered))
        self._note(arrival_s, at_s - arrival_s)


class SimulatedBoard:
    """The device of a simulated site; satisfies the port ``Board``."""

    def __init__(self, site: SimulatedSite) -> None:
        self._site = site

    @property
    def uri(self) -> str:
        """The device's URI."""
        return self._site.device.uri

    @property
    def title(self) -> str:
        """The name people know it by, marked as simulated."""
        return self._site.device.title

    @property
    def energy_kind(self) -> EnergyKind:
        """Always simulated."""
        return self._site.device.energy_kind

    @property
    def boundary(self) -> str:
        """What its joules cover."""
        return self._site.device.boundary

    def take(self) -> None:
        """Do nothing: nobody else can set a simulated board."""

    def apply(self, point: OperatingPoint) -> None:
        """Set the device's knobs of a point, others to their default.

        Raises:
            KnobRejected: If the board has no such knob or level.
        """
        self._site.apply(point)

    def read(self) -> Reading:
        """Return energy so far, temperature and clocks, now; ``time_s`` is on the device's own clock."""
        self._site.catch_up()
        return self._site.device.read()

    def verify(self) -> tuple[str, ...]:
        """Return nothing: what was applied holds."""
        return ()

    def restore(self) -> None:
        """Put everything back to how it was found."""
        self._site.restore()

    def release(self) -> tuple[str, ...]:
        """Likewise; nothing is left."""
        self._site.release()
        return ()


class SimulatedTraffic:
    """The requests of a simulated site; satisfies the port ``Traffic``."""

    def __init__(self, site: SimulatedSite, words: str) -> None:
        self._site = site
        self._words = words
        self._lately = LatencyWindow()
        self._arrived = 0
        self.note = ""

    @property
    def uri(self) -> str:
        """The text that opens it again."""
        return self._words

    def look(self, now_s: float) -> RequestStats | None:
        """Return what was seen since the look before; None after the last request was answered.

        Args:
            now_s: On the clock of the control loop.
        """
        self._site.catch_up()
        seen = self._site.round()
        for each in seen.ended:
            self._lately.add(each.at_s, each.latency_s)
        self._lately.until(self._site.now_s)
        if seen.over and not seen.ended:
            return None
        before = self._arrived
        self._arrived = seen.begun + seen.waiting
        failed = sum(not each.answered for each in seen.ended)
        worst_s = max((each.latency_s for each in seen.ended), default=None)
        lately = self._lately
        counts = self._arrived - before, len(seen.ended), failed, seen.waiting
        return RequestStats(*counts, lately.p99_s, lately.mean_s, worst_s=worst_s, p99_least_s=lately.p99_least_s)

    def forget(self) -> None:
        """Forget how long requests took so far."""
        self._lately.clear()

    def serve(self, target: Target) -> None:
        """Set the batch and how long to gather it.

        Raises:
            KnobRejected: If the model cannot be served in such batches.
        """
        self._site.serve(target)

    def close(self) -> None:
        """Release nothing; there is nothing."""


def open_site(
    text: str, device: str, workload: str, clock: Clock, batches: Iterable[int] = (), seed: int = 0
) -> SimulatedSite:
    """Return a simulated board and its requests.

    Args:
        text: ``sim:<arrivals>`` such as ``sim:poisson:30/s``; see `polythrottle.domain.arrivals`.
        device: URI of a simulated device.
        workload: What it serves: a name in ``profiles/workloads/`` or the path of such a file.
        clock: Of the control loop.
        batches: Sizes that will be asked for, beside those of the workload's file.
        seed: Of the arrivals; the device has one of its own.

    Raises:
        InvalidInput: If the device is not simulated, or the text says no arrivals.
        PolythrottleError: If device, workload or a recorded trace cannot be opened.
    """
    from polythrottle.backends import open_device
    from polythrottle.backends.simulated import SimulatedDevice
    from polythrottle.catalog import load_model
    from polythrottle.domain.arrivals import Arrivals

    arrivals = Arrivals.parse(text.removeprefix("sim:"))
    if (times := arrivals.times(seed)) is None:
        raise InvalidInput("simulated requests need a rate; write for example sim:poisson:30/s")
    board = open_device(device)
    if not isinstance(board, SimulatedDevice):
        raise InvalidInput(f"{text} makes up requests for a simulated board, not for {device}; give --traffic another")
    model = load_model(workload)
    model = replace(model, batch_sizes=tuple(sorted({*model.batch_sizes, *board.parts(batches)})))
    return SimulatedSite(board, board.serve(model), times, clock, f"sim:{arrivals}", warming=True)


# What a simulated server draws as a whole, as its own meter would tell: host, fans, and GPUs that no service has.

_STEP_S = 0.5
"""A batch that was begun is finished, so that boards are ahead of each other by less than this; assumed."""


@dataclass
class _Metered:
    board: Board
    time_s: float
    energy_j: float
    power_w: float

    def look(self) -> None:
        """Take in what was drawn since the look before."""
        seen = self.board.read()
        if seen.time_s - self.time_s >= _STEP_S:
            self.power_w = (seen.energy_j - self.energy_j) / (seen.time_s - self.time_s)
            self.time_s = seen.time_s
            self.energy_j = seen.energy_j


class NodeMeter:
    """A meter of a simulated server; satisfies `WholeMeter`.

    Args:
        uri: Of the server: ``sim:node?gpus=8xh100``.
        node: Which server it is.
    """

    def __init__(self, uri: str, node: SimulatedNode) -> None:
        self._uri = uri
        self._node = node
        self._boards: list[_Metered] = []
        self._idle_w: dict[int, float] = {}
        for number in range(len(node.boards)):
            self._idle_w[number] = _idle_w(self._gpu(number))

    @classmethod
    def of(cls, text: str) -> NodeMeter:
        """Return the meter of a server.

        Raises:
            InvalidInput: If the text means no server.
            UnknownName: If it has an option, or means a board, that there is not.
        """
        uri = DeviceURI.parse(text)
        if uri.name != NODE or uri.meter:
            raise InvalidInput(f"{text} is no meter of a whole server; a simulated one has sim:{NODE}?gpus=8xh100")
        uri.only("gpus", "seed")
        return cls(text, SimulatedNode.parse(uri.options, uri.count("seed", 0)))

    def _gpu(self, number: int) -> str:
        server, mark, options = self._uri.partition("?")
        return f"{server}/{number}{mark}{options}"

    def add(self, board: Board) -> None:
        """Count the board of a service.

        Raises:
            InvalidInput: If it is not among the GPUs of this server.
        """
        uri = DeviceURI.parse(board.uri)
        other = uri.scheme != "sim" or not is_node(uri.name)
        if other or SimulatedNode.parse(uri.options, uri.count("seed", 0)) != self._node:
            raise InvalidInput(f"the meter {self._uri} is of a simulated server, of which {board.uri} is no part")
        idle_w = sum(self._idle_w.pop(number, 0.0) for number in self._node.numbers(uri.name))
        seen = board.read()
        self._boards.append(_Metered(board, seen.time_s, seen.energy_j, idle_w))

    def power_w(self) -> tuple[float, float]:
        """Return when the newest power was seen, and watts."""
        for each in self._boards:
            each.look()
        gpus_w = sum(each.power_w for each in self._boards) + sum(self._idle_w.values())
        return max((each.time_s for each in self._boards), default=0.0), self._node.whole_w(gpus_w)


def _idle_w(uri: str) -> float:
    """Return what a board draws that nobody uses, in watts."""
    device = open_device(uri)
    # For a second, so that its joules are its watts.
    device.clock.sleep(1.0)
    return device.read().energy_j
