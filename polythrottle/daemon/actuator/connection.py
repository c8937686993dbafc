"""One connection to the actuator: what came in and is not answered, what is to go out, and how long that may take."""

import socket

from polythrottle.actuation.wire import MOST_REQUEST
from polythrottle.daemon.actuator.spaces import Job
from polythrottle.daemon.peers import Peer

SILENT_S, STUCK_S = 150.0, 5.0
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
        self.way, self.peer = way, peer
        self.job: Job | None = None
        self.number: int | None = None
        self._in, self._out = bytearray(), bytearray()
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
        return self._stuck_s + STUCK_S if self._out or self._in else self._silent_s + SILENT_S

    def close(self) -> None:
        """End it at once."""
        if self.job is not None:
            self.job.stop()
            self.job = None
        self.way.close()
