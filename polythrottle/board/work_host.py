"""The process on a board that runs workloads and drives windows, for a desk that judges them.

A child of the far side: `WorkHost` starts it and passes messages on, `main` is what it runs. It answers one line with
one line: a request is ``say`` (a list of commands) and ``wait_s`` (how long to wait for something to tell), an answer
``events``. Commands, each an object with ``do``:

``open`` {uri, key, target, inputs, batch_sizes, threads, timeout_s} → ``opened`` {space, notes, placement, number,
  digest}. Opens a workload; the key is what a language model's server is shown, if any, the target the GPU that is
  tuned, the number what CUDA calls it here, and the digest that of the model's file.
``close`` → ``closed``. Closes it, so that a service is as it was found.
``query`` {point} → ``query``: one query, outside any window.
``begin`` {point, window, sensor, least, judged, arrivals, seed, watch} → ``warm`` {count}, ``q`` and ``r`` …, and
  ``over`` {late_p99_s, cpu_s, notes, reading, watch}, the reading one of the device then, or nothing. With a watch
  (`polythrottle.metering.error_budget_guard`) no request is sent that it does not permit, and ``watched``, what it has
  seen in the end, is told after the load has ended, also where an error has ended it.
``stop`` ends the window that is driven; what it tells after that is of no use.
``again`` drives another window of the same load; ``rest`` {until_s} → ``q`` …, what was sent before a moment.
``end`` ends the load.
``idle`` {seconds, sensor} → ``r`` …, ``idled``: looks at the device without work.

``q`` is a query and when it was answered, ``r`` a reading of the device; an error ends what was under way. Times are
those of the device. What a window tells waits in this process until a look that may end it, so that nothing is written
between two queries.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from polythrottle.actuation.client.connection import Line, reading_from
from polythrottle.actuation.wire import error_line
from polythrottle.domain.arrivals import Arrivals
from polythrottle.domain.clock import Clock, SystemClock
from polythrottle.domain.errors import DeviceError, InvalidInput, PolythrottleError, TrialError
from polythrottle.domain.measurement import Query, Reading, Window
from polythrottle.domain.ports import Concurrent, Noting, Placed, Sensor, Target, Workload
from polythrottle.domain.space import OperatingPoint
from polythrottle.metering.error_budget_guard import RequestWatch
from polythrottle.metering.load import Load, batch_of, drive
from polythrottle.metering.window import Checks, WindowLog, idle_looks, observe, query_line, warm_up
from polythrottle.storage.identity import content_digest
from polythrottle.storage.json_channel import Channel, encode
from polythrottle.storage.space_codec import space_document
from polythrottle.storage.untrusted import printable
from polythrottle.workloads import open_workload
from polythrottle.workloads.cuda import number_at
from polythrottle.workloads.uris import ModelUri

_MOST = 16 * 1024
_MOST_EVENTS = 20_000
_LONGEST_ANSWER = 4 * 1024 * 1024
_PARTING_S = 5.0
_START = (
    "import sys; sys.path[0] = sys.argv[1]; from polythrottle.board.work_host import main; sys.exit(main(sys.argv[2:]))"
)
_PACKAGE = Path(__file__).resolve().parent.parent.parent


class WorkHost:
    """The process, as the far side sees it; started when something is asked of it first.

    Args:
        path: Of the far side's socket.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._process: subprocess.Popen[bytes] | None = None
        self._way: socket.socket | None = None

    def ask(self, message: Mapping[str, Any]) -> HostJob:
        """Pass a request on, and return the job that waits for its answer.

        Raises:
            DeviceError: If the process cannot be started, or has ended.
        """
        if self._process is None:
            self._start()
        assert self._way is not None
        try:
            self._way.setblocking(True)
            self._way.sendall(encode(message))
            self._way.setblocking(False)
        except (OSError, ValueError) as err:
            raise DeviceError(f"the process that runs the workload has ended: {err}") from err
        return HostJob(self._way, self._code)

    def _code(self) -> int | None:
        assert self._process is not None
        with suppress(subprocess.TimeoutExpired):
            return self._process.wait(1.0)
        return None

    def _start(self) -> None:
        self._way, theirs = socket.socketpair()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _START, str(_PACKAGE), str(theirs.fileno()), str(self._path)],
                stdin=subprocess.DEVNULL,
                stdout=2,  # standard output is the channel to the desk
                pass_fds=(theirs.fileno(),),
            )
        except OSError as err:
            raise DeviceError(f"cannot start the process that runs the workload: {err.strerror}") from err
        finally:
            theirs.close()

    def close(self) -> None:
        """End the process and what it runs."""
        if self._way is not None:
            self._way.close()
        if self._process is not None:
            try:
                self._process.wait(_PARTING_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()


class HostJob:
    """An answer of the process, as it comes; satisfies ``Job``.

    Args:
        way: To the process.
        code: Returns its exit code.
    """

    def __init__(self, way: socket.socket, code: Callable[[], int | None]) -> None:
        self.output = way
        self.ends_s = time.monotonic() + 3600.0  # how long a model may take to be opened is for the desk to say
        self._code = code
        self._parts = bytearray()
        self._ended = False

    def gather(self) -> bool:
        """Read what there is and say whether that was all."""
        try:
            part = self.output.recv(65536)
        except BlockingIOError:
            return False
        except OSError:
            part = b""
        self._parts += part
        self._ended = not part
        return self._ended or self._parts.endswith(b"\n") or len(self._parts) > _LONGEST_ANSWER

    def result(self) -> dict[str, Any]:
        """Return its answer, or an error if the process has ended."""
        if self._ended or not self._parts.endswith(b"\n"):
            code = self._code()
            if code is not None and code >= 0:
                how = f"with code {code}"
            else:
                how = f"by signal {-(code or 0)}"
            return {"error": error_line(TrialError(f"the process that runs the workload on the board ended {how}"))}
        found: dict[str, Any] = json.loads(bytes(self._parts))
        return found

    def stop(self) -> None:
        """Leave it: the process goes on, and its answer is of no use to anybody."""


# What runs in the process.


class FarDevice:
    """The device as this process sees it: through the far side, which reads it.

    Args:
        path: Of the far side's socket.
    """

    def __init__(self, path: str) -> None:
        self._line = Line(path)
        self.clock: Clock = SystemClock()
        self.raw: dict[str, Any] = {}
        """The last answer as it was told."""

    def read(self) -> Reading:
        """Return energy so far, temperature and clocks, now."""
        self.raw = self._line.ask("read", device="")
        return reading_from(self.raw)[0]


class Outbox:
    """What is told to the desk; held back until there is a reason to tell it."""

    def __init__(self) -> None:
        self._held: deque[list[Any]] = deque()
        self._ready: deque[list[Any]] = deque()
        self._change = threading.Condition()

    def hold(self, event: list[Any]) -> None:
        """Keep an event for later."""
        with self._change:
            self._held.append(event)

    def tell(self, event: list[Any] | None = None) -> None:
        """Tell what was held, and an event."""
        with self._change:
            self._ready.extend(self._held)
            if event is not None:
                self._ready.append(event)
            self._held.clear()
            self._change.notify()

    def take(self, wait_s: float) -> list[list[Any]]:
        """Return what there is to tell, waiting for it; nothing if nothing comes in time."""
        with self._change:
            self._change.wait_for(lambda: self._ready, wait_s)
            # So many stay below the longest answer that the far side takes; the rest comes with the next.
            count = min(len(self._ready), _MOST_EVENTS)
            return [self._ready.popleft() for _ in range(count)]


class FarWindow(WindowLog):
    """A window as it is driven here, each query and look of which is told to the desk."""

    def __init__(self, device: FarDevice, sensor: Sensor, outbox: Outbox, early: bool) -> None:
        super().__init__(device, sensor)
        self._device = device
        self._outbox = outbox
        self._early = early

    def _look(self) -> None:
        super()._look()
        self._outbox.hold(["r", self._device.raw])
        if self._early:
            self._outbox.tell()

    def take(self, query: Query) -> None:
        """Add a query that was just answered."""
        super().take(query)
        self._outbox.hold(query_line(query, self.ends_s[-1]))
        if len(self.queries) > 1:  # only the looks and what is told are needed here
            self.queries[-2] = self.queries[-1]


class DeskJudge(Checks):
    """Goes on until the desk has said that it is enough.

    Args:
        window: When it ends at the latest.
        least: Queries it needs, as the desk says.
        told: Set once the desk has said so.
    """

    def __init__(self, window: Window, least: int, told: threading.Event) -> None:
        super().__init__(window, least)
        self._told = told

    def begin(self, seen: WindowLog) -> None:
        """Do nothing."""

    def reached(self, seen: WindowLog) -> bool:
        """Return whether the desk has said that it is enough."""
        return self._told.is_set()

    def gives_up(self, seen: WindowLog) -> bool:
        """Return whether the desk has said that it is enough."""
        return self._told.is_set()


class Worker:
    """Carries out what the desk says, in the main thread of the process.

    Args:
        device: To look at.
        outbox: For what is told.
    """

    def __init__(self, device: FarDevice, outbox: Outbox) -> None:
        self.orders: queue.SimpleQueue[Mapping[str, Any] | None] = queue.SimpleQueue()
        self.stop = threading.Event()
        self._device = device
        self._outbox = outbox
        self._workload: Workload | None = None
        self._watch: RequestWatch | None = None

    def run(self) -> None:
        """Go on until there is nobody to work for."""
        try:
            while (order := self.orders.get()) is not None:
                self._try(self._carry_out, order)
        finally:
            try:
                self._leave()
            except PolythrottleError as err:  # nobody is left to be told but who reads what ssh prints
                sys.stderr.write(f"polythrottle: {printable(str(err))}\n")

    def _leave(self) -> None:
        served = self._workload
        self._workload = None
        if served is not None:
            served.close()

    def _try(self, work: Callable[[Mapping[str, Any]], None], order: Mapping[str, Any]) -> None:
        try:
            work(order)
        except PolythrottleError as err:
            self._outbox.tell(["error", error_line(err)])
        except ImportError as err:
            words = f"{sys.executable} on the board cannot do that: {err}"
            self._outbox.tell(["error", error_line(TrialError(words))])
        # The outermost loop: a fault in one order must not end the process that holds the model.
        except Exception as err:
            words = f"the board's side met a fault: {type(err).__name__}: {err}"
            self._outbox.tell(["error", error_line(TrialError(words))])
        if self._watch is not None:
            self._outbox.tell(["watched", self._watch.state])
            self._watch = None

    def _carry_out(self, order: Mapping[str, Any]) -> None:
        works: Mapping[str, Callable[[Mapping[str, Any]], None]] = {
            "open": self._open,
            "close": self._close,
            "query": self._query,
            "begin": self._begin,
            "idle": self._idle,
        }
        work = works.get(str(order.get("do")))
        if work is not None:  # what belongs to a load that an error has ended needs no answer
            work(order)

    def _served(self) -> Workload:
        if self._workload is None:
            raise InvalidInput("no workload is open on the board")
        return self._workload

    def _open(self, order: Mapping[str, Any]) -> None:
        self._leave()
        if key := str(order.get("key") or ""):
            from polythrottle.workloads.services.openai import KEY

            os.environ[KEY] = key
        target = _target(order["target"])
        try:
            served = open_workload(
                order["uri"],
                inputs=tuple(order["inputs"]),
                batch_sizes=order["batch_sizes"],
                threads=order["threads"],
                timeout_s=order["timeout_s"],
                target=target,
            )
        except ImportError as err:
            raise DeviceError(_unimportable(order["uri"], err)) from err
        except DeviceError as err:
            if isinstance(err.__cause__, ImportError):  # what it says of pip is for a machine with polythrottle
                raise DeviceError(_unimportable(order["uri"], err.__cause__)) from err
            raise
        self._workload = served
        told = {"space": json.dumps(space_document(served.space)), "notes": _notes(served), **_place(served, target)}
        told["digest"] = _digest(order["uri"])
        told["concurrency"] = 1
        if isinstance(served, Concurrent):
            told["concurrency"] = served.concurrency
        self._outbox.tell(["opened", told])

    def _close(self, order: Mapping[str, Any]) -> None:
        self._leave()
        self._outbox.tell(["closed", 0])

    def _query(self, order: Mapping[str, Any]) -> None:
        served = self._served()
        served.apply(OperatingPoint(order["point"]))
        self._outbox.tell(query_line(served.query(), self._device.clock.now()))

    def _idle(self, order: Mapping[str, Any]) -> None:
        sensor = Sensor(**order["sensor"])
        told: list[list[Any]] = []

        class Telling:
            clock = self._device.clock

            @staticmethod
            def read() -> Reading:
                reading = self._device.read()
                told.append(["r", self._device.raw])
                return reading

        idle_looks(Telling(), order["seconds"], sensor)
        for each in told:
            self._outbox.hold(each)
        self._outbox.tell(["idled", len(told)])

    def _begin(self, order: Mapping[str, Any]) -> None:
        watch = None
        if order["watch"] is not None:
            watch = self._watch = RequestWatch.there(order["watch"])
        served = self._served()
        point = OperatingPoint(order["point"])
        served.apply(point)
        window = Window(**order["window"])
        sensor = Sensor(**order["sensor"])
        arrivals = Arrivals.parse(order["arrivals"])
        clock = self._device.clock
        batch = batch_of(served, point)
        with drive(served, arrivals, clock, order["seed"], batch=batch, timeout_s=window.timeout_s, gate=watch) as load:
            more: Mapping[str, Any] | None = order
            while more is not None and more["do"] != "end":
                if more["do"] == "rest":
                    self._rest(load, more["until_s"])
                elif more is order or more["do"] == "again":
                    self._one(load, window, sensor, order)
                else:
                    self.orders.put(more)  # another load: whoever began this one has left it
                    break
                more = self.orders.get()

    def _one(self, load: Load, window: Window, sensor: Sensor, order: Mapping[str, Any]) -> None:
        self.stop.clear()
        self._outbox.tell(["warm", warm_up(load, self._device.clock, window, sensor)])
        seen = FarWindow(self._device, sensor, self._outbox, order["judged"])
        observe(seen, load, window, DeskJudge(window, order["least"], self.stop))
        self._tell_over(load)

    def _rest(self, load: Load, until_s: float) -> None:
        for query in load.rest(until_s):
            self._outbox.hold(query_line(query, self._device.clock.now()))
        self._tell_over(load)

    def _tell_over(self, load: Load) -> None:
        report = load.report
        told: dict[str, Any] = {"late_p99_s": report.late_p99_s, "cpu_s": report.cpu_s, "notes": _notes(self._served())}
        if self._watch is not None:
            told["watch"] = self._watch.state
        with suppress(PolythrottleError):  # whoever needs it asks, and is told why there is none
            self._device.read()
            told["reading"] = self._device.raw
        self._outbox.tell(["over", told])


def _target(told: Mapping[str, Any] | None) -> Target | None:
    """Return the GPU that is tuned, as the desk tells it, with the number it has in this process."""
    if told is None:
        return None
    place = str(told["place"])
    return Target(str(told["title"]), tuple(told["uuids"]), partial(number_at, place), place)


def _unimportable(uri: str, err: ImportError) -> str:
    """Return what is said where a package that a workload needs cannot be imported in this Python."""
    if isinstance(err, ModuleNotFoundError) and err.name:
        return f"{uri} needs {err.name}, which {sys.executable} on the board lacks; ?python= names another Python there"
    return f"{uri} cannot be run in {sys.executable} on the board: {err}"


def _place(served: Workload, target: Target | None) -> dict[str, Any]:
    """Return what is told of where the work runs; the desk compares that with the GPU that is tuned."""
    placement = None
    if isinstance(served, Placed):
        placement = served.placement
    if placement is None:
        return {"placement": None, "number": 0}
    if target is None or not target.uuids:
        return {"placement": asdict(placement), "number": 0}
    return {"placement": asdict(placement), "number": target.number}


def _digest(uri: str) -> str:
    """Return the digest of the file that a workload's URI names; empty where it names none."""
    path = Path(ModelUri.parse(uri).name)
    if ":" not in uri.partition("/")[0] and path.is_file():
        return content_digest(path)
    return ""


def _notes(served: Workload) -> list[str]:
    if isinstance(served, Noting):
        return list(served.notes)
    return []


def _listen(channel: Channel, worker: Worker, outbox: Outbox) -> None:
    """Take what the desk says, in a thread of its own; without a desk there is nothing to do."""
    with suppress(EOFError, OSError, InvalidInput, ValueError, KeyError):
        while (message := channel.receive()) is not None:
            for order in message.get("say", ()):
                if order.get("do") == "stop":
                    worker.stop.set()
                else:
                    worker.orders.put(order)
            channel.send({"answer": {"events": outbox.take(float(message.get("wait_s", 0.0)))}})
    worker.orders.put(None)
    os.kill(os.getpid(), signal.SIGTERM)  # in the middle of a query: what is open is closed all the same
    # A query that hangs in somebody's native code lets Python see no signal.
    time.sleep(_PARTING_S)
    os._exit(1)


def _end(number: int, frame: FrameType | None) -> None:
    raise SystemExit(1)


def main(arguments: Sequence[str]) -> int:
    """Work for a desk until its far side is gone.

    Args:
        arguments: Handle of the way to the far side, and the path of its socket.
    """
    signal.signal(signal.SIGTERM, _end)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    way = socket.socket(fileno=int(arguments[0]))
    outbox = Outbox()
    worker = Worker(FarDevice(arguments[1]), outbox)
    threading.Thread(target=_listen, args=(Channel(way, _MOST), worker, outbox), daemon=True).start()
    with closing(way):
        worker.run()
    return 0
