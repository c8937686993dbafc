"""An actuator on a planted Jetson: in this process behind the fake kernel, or as a process of its own."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from builders import quick

from polythrottle.actuation.client.connection import Line
from polythrottle.actuation.server.main import listening
from polythrottle.actuation.server.permits import Permits
from polythrottle.actuation.server.request_handler import Service
from polythrottle.actuation.server.server import Server
from polythrottle.actuation.server.unix_socket import Peer, peer_of
from polythrottle.actuation.systemd import Supervisor
from polythrottle.domain.errors import DeviceError
from polythrottle.testing import FakeKernel, plant

BOARD = "jetson-orin-nano"
MEM, GPU = "mem_hz", "gpu_max_hz"
ALICE, BOB = Peer(101, 4001, frozenset({4001, 5000})), Peer(102, 4002, frozenset({4002}))


class Time:
    """A boot clock that only moves when told to."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        """Return the time."""
        return self.now_s


class Bench:
    """An actuator that serves in a thread of this process, and those who ask it.

    Args:
        root: Of the planted tree.
        path: Of the socket.
        service: What answers.
        time: The clock of its leases.
    """

    def __init__(self, root: Path, path: Path, service: Service, time: Time) -> None:
        self.root, self.path, self.service, self.time = root, path, service, time
        self.peer: Peer | None = None
        self.really = False
        self.server: Server
        self.lines: list[Line] = []

    def identify(self, way: socket.socket) -> Peer:
        """Return whom the next connection is to be taken for; root if nobody was named; who it is if that is asked."""
        return peer_of(way) if self.really else self.peer or Peer(os.getpid(), 0)

    def line(self, peer: Peer | None = None) -> Line:
        """Return a connection of somebody."""
        self.peer = peer
        self.lines.append(Line(self.path, patience_s=30.0))
        self.lines[-1].ask("hello")
        return self.lines[-1]

    def held(self) -> Mapping[str, str]:
        """Return what every control of the board holds."""
        return FakeKernel(self.root).snapshot()


@contextmanager
def bench(
    folder: Path, permits: Permits | None = None, uris: tuple[str, ...] = (), board: str = BOARD
) -> Iterator[Bench]:
    """Serve a planted board, or other devices, from a thread.

    Args:
        folder: For tree and socket.
        permits: Those of the file that is not there by default.
        uris: What is served instead.
        board: What is planted.
    """
    root = quick(plant(board, folder / "b"))
    clock = Time()
    with FakeKernel(root).installed(), listening(folder / "s" / "a.sock") as listener:
        service = Service(uris or (f"jetson?root={root}",), permits or Permits([], own=0), clock)
        found = Bench(root, folder / "s" / "a.sock", service, clock)
        service.start()
        found.server = server = Server(listener, service, Supervisor({}), found.identify)
        thread = threading.Thread(target=server.run)
        thread.start()
        try:
            yield found
        finally:
            for line in found.lines:
                line.close()
            server.stop()
            thread.join()
            service.close()
            server.close()


SERVE = """
import sys
from polythrottle.actuation.server.main import main
from polythrottle.testing import FakeKernel
with FakeKernel(sys.argv[1]).installed():
    sys.exit(main(sys.argv[2:]))
"""


class Process:
    """An actuator in a process of its own, behind the fake kernel.

    Args:
        root: Of the planted tree.
        path: Of the socket.
        words: Further words of its command line.
    """

    def __init__(self, root: Path, path: Path, *words: str) -> None:
        command = [sys.executable, "-c", SERVE, str(root), "--socket", str(path), "--device", f"jetson?root={root}"]
        self.path = path
        self.child = subprocess.Popen([*command, *words], stderr=subprocess.PIPE, text=True)
        until(lambda: self.child.poll() is not None or _answers(path))

    def line(self) -> Line:
        """Return a connection."""
        return Line(self.path, patience_s=30.0)

    def end(self, number: int = signal.SIGTERM) -> tuple[int, str]:
        """Send a signal, and return the exit code and what it wrote."""
        self.child.send_signal(number)
        _, told = self.child.communicate(timeout=60)
        return self.child.returncode, told


def _answers(path: Path) -> bool:
    line = Line(path, patience_s=30.0)
    try:
        line.ask("hello")
    except DeviceError:
        return False
    finally:
        line.close()
    return True


@contextmanager
def running(command: list[str], **options: Any) -> Iterator[subprocess.Popen[Any]]:
    """Run a process; where the test fails meanwhile it is killed, and not waited for."""
    with subprocess.Popen(command, **options) as child:
        try:
            yield child
        finally:
            child.kill()


def until(true: Callable[[], object], patience_s: float = 60.0) -> Any:
    """Wait until something in another process is so, and return it."""
    ends = time.monotonic() + patience_s
    while not (found := true()):
        assert time.monotonic() < ends, "it did not come about"
        time.sleep(0.01)
    return found
