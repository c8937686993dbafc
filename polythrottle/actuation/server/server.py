"""The actuator's loop and its connections: one thread, every buffer bounded, nobody waited for."""

from __future__ import annotations

import selectors
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress

from polythrottle.actuation.server.request_handler import Service, number_of
from polythrottle.actuation.server.search_space_child import Job
from polythrottle.actuation.server.unix_socket import Peer, peer_of
from polythrottle.actuation.state.lease import boot_s
from polythrottle.actuation.systemd import Supervisor
from polythrottle.actuation.wire import MOST_REQUEST, VERSION, Later, error_line
from polythrottle.domain.errors import DeviceError, InvalidInput, PermissionDenied, PolythrottleError
from polythrottle.storage.json_channel import decode, encode
from polythrottle.storage.untrusted import printable

# One connection to the actuator: what came in and is not answered, what is to go out, and how long that may take.

SILENT_S = 150.0
STUCK_S = 5.0
"""How long a connection may ask nothing, and how long a line may take to come in or an answer to be taken."""
_CHUNK = 16 * 1024


class Connection:
    """A peer's connection; never blocks.

    Args:
        way: The socket.
        peer: Who is at its other end.
        now_s: When it began, on the monotonic clock.
    """

    def __init__(self, way: socket.socket, peer: Peer, now_s: float) -> None:
        way.setblocking(False)
        self.way = way
        self.peer = peer
        self.job: Job | None = None
        self.number: int | None = None
        self._in = bytearray()
        self._out = bytearray()
        self._ended = False
        self._silent_s = self._stuck_s = now_s

    def receive(self, now_s: float) -> None:
        """Take in what has come.

        Raises:
            OSError: If the connection is broken.
        """
        part = self.way.recv(_CHUNK)
        if not part:
            self._ended = True
        if not self._in:
            self._stuck_s = now_s
        self._in += part
        self._silent_s = now_s

    @property
    def too_long(self) -> bool:
        """Whether the line that comes in is longer than any request."""
        return len(self._in) > MOST_REQUEST and self._in.find(b"\n", 0, MOST_REQUEST) < 0

    def line(self, now_s: float) -> bytes | None:
        """Return the next whole line, None if there is none or the one before is not answered yet."""
        if self._out or self.job is not None or (end := self._in.find(b"\n")) < 0:
            return None
        found = bytes(self._in[:end])
        del self._in[: end + 1]
        self._stuck_s = self._silent_s = now_s
        return found

    @property
    def has_line(self) -> bool:
        """Whether `line` would return one."""
        return not self._out and self.job is None and b"\n" in self._in

    def send(self, data: bytes, now_s: float, *, last: bool = False) -> None:
        """Let an answer go out.

        Args:
            data: The answer's line.
            now_s: The time.
            last: Whether the connection ends with it.
        """
        self._stuck_s = self._silent_s = now_s
        self._out += data
        if last:
            self._ended = True
            self._in.clear()

    def flush(self, now_s: float) -> None:
        """Give out what the peer takes now.

        Raises:
            OSError: If the connection is broken.
        """
        try:
            sent = self.way.send(self._out)
        except BlockingIOError:
            return
        if sent:
            self._stuck_s = self._silent_s = now_s
        del self._out[:sent]

    @property
    def writes(self) -> bool:
        """Whether something is to go out."""
        return bool(self._out)

    @property
    def reads(self) -> bool:
        """Whether more may come in: not while much waits, so that a peer who does not read is not listened to."""
        return not self._ended and self.job is None and not self._out and len(self._in) <= MOST_REQUEST

    @property
    def done(self) -> bool:
        """Whether it has ended and everything that was asked is answered."""
        return self._ended and not self._out and self.job is None and b"\n" not in self._in

    @property
    def due_s(self) -> float:
        """When it is to be dropped unless something happens."""
        if self.job is not None:
            return self.job.ends_s + STUCK_S
        if self._out or self._in:
            return self._stuck_s + STUCK_S
        return self._silent_s + SILENT_S

    def close(self) -> None:
        """End it at once."""
        if self.job is not None:
            self.job.stop()
            self.job = None
        self.way.close()


# The actuator's loop: one thread, every buffer bounded, nobody waited for.

MOST_CONNECTIONS = 32
MOST_PER_USER = 4
_EVENTS = {(True, True): 3, (True, False): selectors.EVENT_READ, (False, True): selectors.EVENT_WRITE}


class Server:
    """Serves connections until it is told to stop.

    Args:
        listener: The socket that is listened on.
        service: What answers.
        supervisor: Who is told that the loop turns.
        identify: Tells who is at the other end of a connection.
    """

    def __init__(
        self,
        listener: socket.socket,
        service: Service,
        supervisor: Supervisor,
        identify: Callable[[socket.socket], Peer] = peer_of,
    ) -> None:
        listener.setblocking(False)
        self._listener = listener
        self._service = service
        self._supervisor = supervisor
        self._identify = identify
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ, self._accept)
        self._wake, self._woken = socket.socketpair()
        for end in (self._wake, self._woken):
            end.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ, lambda: self._woken.recv(4096))
        self._connections: dict[int, Connection] = {}
        self._stopped = False

    @property
    def waker(self) -> int:
        """A handle: what is written there, as by a signal (signal.set_wakeup_fd), makes the loop turn."""
        return self._wake.fileno()

    def stop(self) -> None:
        """Make `run` return after its present turn; may be called by a signal handler or another thread."""
        self._stopped = True
        with suppress(OSError):
            self._wake.send(b"\0")

    def run(self) -> None:
        """Serve until `stop`."""
        ping_s = self._supervisor.ping_s
        next_ping_s = time.monotonic()
        while not self._stopped:
            if ping_s is not None and next_ping_s <= time.monotonic():
                self._supervisor.alive()
                next_ping_s = time.monotonic() + ping_s
            for key, _ in self._selector.select(self._wait_s(None if ping_s is None else next_ping_s)):
                key.data()
            self._catch_up()
            self._tick()
            self._turn()

    def _catch_up(self) -> None:
        """After a slow call, hear those who have asked meanwhile before any lease is said to have run out."""
        if not self._service.stalled:
            return
        # Once more: who had to connect anew has only just been taken in.
        for key, _ in self._selector.select(0):
            key.data()
        self._service.catch_up([each.peer for each in self._connections.values() if each.has_line])

    def _tick(self) -> None:
        try:
            self._service.tick()
        # As in `_serve`.
        except Exception as err:
            _log(f"fault in ending a lease: {type(err).__name__}: {err}")

    def _wait_s(self, ping_s: float | None) -> float | None:
        if self._service.stalled or any(each.has_line for each in self._connections.values()):
            return 0.0
        now_s = time.monotonic()
        due = [each.due_s for each in self._connections.values()]
        waits = [each - now_s for each in (*due, *([] if ping_s is None else [ping_s]))]
        if (next_s := self._service.next_s) is not None:
            waits.append(next_s - boot_s())
        if waits:
            return max(0.0, min(waits))
        return None

    def _turn(self) -> None:
        """Answer at most one request of each connection, and drop those that are done or overdue.

        Who has a device comes first: no reader's request may hold up the renewing of a lease that runs meanwhile.
        """
        now_s = time.monotonic()
        for handle, each in sorted(self._connections.items(), key=lambda item: not self._service.holds(item[1].peer)):
            if each.too_long:
                self._reply(each, None, error=InvalidInput("that line is too long to be a request"), last=True)
            elif not self._service.stalled and (line := each.line(now_s)) is not None:
                self._serve(each, line)
            if each.done or each.due_s <= now_s:
                self._drop(handle)
            else:
                self._listen(handle, each)

    def _accept(self) -> None:
        try:
            way, _ = self._listener.accept()
        except OSError:
            return  # it has gone again, or there are no handles left: the others are served
        try:
            connection = Connection(way, self._identify(way), time.monotonic())
        except OSError:
            way.close()
            return
        handle = way.fileno()
        self._connections[handle] = connection
        self._selector.register(way, selectors.EVENT_READ, lambda: self._exchange(handle))
        if refusal := self._refusal(connection.peer):
            self._reply(connection, None, error=refusal, last=True)

    def _refusal(self, peer: Peer) -> PolythrottleError | None:
        if words := self._service.refuse(peer):
            return PermissionDenied(words)
        mine = sum(each.peer.uid == peer.uid for each in self._connections.values())
        if len(self._connections) > MOST_CONNECTIONS or (mine > MOST_PER_USER and peer.uid != 0):
            return Later(
                f"there are too many connections: at most {MOST_PER_USER} a user, {MOST_CONNECTIONS} in all", 5.0
            )
        return None

    def _exchange(self, handle: int) -> None:
        connection = self._connections.get(handle)
        now_s = time.monotonic()
        if connection is None:
            return
        try:
            if connection.writes:
                connection.flush(now_s)
            elif connection.reads:
                connection.receive(now_s)
        except BlockingIOError:
            return
        except OSError:
            self._drop(handle)

    def _listen(self, handle: int, connection: Connection) -> None:
        wanted = _EVENTS.get((connection.reads, connection.writes), 0)
        known = self._selector.get_map().get(handle)
        if wanted and known is None:
            self._selector.register(connection.way, wanted, lambda: self._exchange(handle))
        elif known is not None and not wanted:
            self._selector.unregister(connection.way)
        elif known is not None and known.events != wanted:
            self._selector.modify(connection.way, wanted, known.data)

    def _drop(self, handle: int) -> None:
        connection = self._connections.pop(handle)
        with suppress(KeyError):
            self._selector.unregister(connection.way)
        if connection.job is not None:
            self._selector.unregister(connection.job.output)
        connection.close()

    def _serve(self, connection: Connection, line: bytes) -> None:
        number = None
        try:
            message = decode(line)
            number = number_of(message)
            answer = self._service.answer(connection.peer, self._service.request(message))
        except PolythrottleError as err:
            self._reply(connection, number, error=err)
            return
        # The outermost loop: a fault in one answer must not end the process that keeps the device.
        except Exception as err:
            _log(f"fault in answering: {type(err).__name__}: {err}")
            self._reply(
                connection, number, error=DeviceError("the actuator met a fault of its own; its log says which")
            )
            return
        if isinstance(answer, dict):
            self._reply(connection, number, answer=answer)
        else:
            self._begin(connection, number, answer)

    def _begin(self, connection: Connection, number: int | None, job: Job) -> None:
        connection.job = job
        connection.number = number
        self._selector.register(job.output, selectors.EVENT_READ, lambda: self._gather(connection, job))

    def _gather(self, connection: Connection, job: Job) -> None:
        if not job.gather():
            return
        self._selector.unregister(job.output)
        connection.job = None
        connection.send(encode({"v": VERSION, "id": connection.number, **job.result()}), time.monotonic())

    def _reply(
        self,
        connection: Connection,
        number: int | None,
        *,
        answer: dict[str, object] | None = None,
        error: PolythrottleError | None = None,
        last: bool = False,
    ) -> None:
        told = {"answer": answer} if error is None else {"error": error_line(error)}
        try:
            data = encode({"v": VERSION, "id": number, **told})
        except ValueError:
            words = "the device gives a number that is not finite (NaN or infinity), which cannot be sent"
            data = encode({"v": VERSION, "id": number, "error": error_line(DeviceError(words))})
        connection.send(data, time.monotonic(), last=last)
        with suppress(OSError):  # met again by the loop, which drops it
            connection.flush(time.monotonic())

    def close(self) -> None:
        """End every connection."""
        for handle in list(self._connections):
            self._drop(handle)
        self._selector.close()
        for each in (self._wake, self._woken, self._listener):
            each.close()


def _log(text: str) -> None:
    sys.stderr.write(f"polythrottle actuator: {printable(text)}\n")
