"""A line to a board that is slow, loses and is cut: a relay of TCP on loopback, for where the kernel has no netem."""

import random
import socket
import threading
import time
from collections import deque
from contextlib import suppress

RETRANSMITTED_S = 0.4
"""How much later a segment that was lost arrives: the least timeout of Linux, 200 ms, beside the measured delay."""


class SlowLine:
    """Passes on what comes to one port to another, late.

    Each segment takes ``delay_s``; of ``loss`` of them the first copy is lost, so that it and all behind it come when
    it has been sent again, as TCP delivers in order.

    Args:
        port: Where to.
        delay_s: Each way.
        loss: A share.
        seed: Which are lost.
    """

    def __init__(self, port: int, delay_s: float, loss: float = 0.0, seed: int = 0) -> None:
        self._to = port
        self._delay_s = delay_s
        self._loss = loss
        self._draw = random.Random(seed)
        self._ends: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.lost = 0
        """How many segments were lost so far."""
        self.passed = [0, 0]
        """How many bytes went to the board and back so far."""
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                here, _ = self._listener.accept()
                there = socket.create_connection(("127.0.0.1", self._to))
            except OSError:
                return
            self._ends += [here, there]
            for number, (source, sink) in enumerate(((here, there), (there, here))):
                _Way(self, number, source, sink)

    def late_s(self) -> float:
        """Return how long the next segment takes."""
        if self._draw.random() < self._loss:
            self.lost += 1
            return self._delay_s + RETRANSMITTED_S
        return self._delay_s

    def cut(self) -> None:
        """Cut every connection, at both ends at once."""
        for end in self._ends:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Cut, and listen no longer."""
        self._listener.close()
        self.cut()
        for end in self._ends:
            end.close()


class _Way:
    """One direction of a connection: read by one thread, written late by another."""

    def __init__(self, line: SlowLine, number: int, source: socket.socket, sink: socket.socket) -> None:
        self._line = line
        self._number = number
        self._source = source
        self._sink = sink
        self._turn = threading.Condition()
        self._under_way: deque[tuple[float, bytes]] = deque()
        for target in (self._read, self._write):
            threading.Thread(target=target, daemon=True).start()

    def _read(self) -> None:
        due_s = 0.0
        data = b"more"
        while data:
            try:
                data = self._source.recv(1448)  # what a segment of Ethernet carries
            except OSError:
                data = b""
            due_s = max(due_s, time.monotonic() + self._line.late_s())
            with self._turn:
                self._under_way.append((due_s, data))
                self._turn.notify()

    def _write(self) -> None:
        data = b"more"
        while data:
            with self._turn:
                self._turn.wait_for(lambda: self._under_way)
                due_s, data = self._under_way.popleft()
            time.sleep(max(0.0, due_s - time.monotonic()))
            try:
                if data:
                    self._sink.sendall(data)
                    self._line.passed[self._number] += len(data)
                else:
                    self._sink.shutdown(socket.SHUT_WR)
            except OSError:
                return
