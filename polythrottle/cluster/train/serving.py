"""A controller on its address: HTTP on loopback, elsewhere only with a token, for who reaches it can stop a job."""

import contextlib
import json
import os
import threading
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from polythrottle.clock import SystemClock
from polythrottle.cluster.store import Holding, Store
from polythrottle.cluster.train.account import JOB
from polythrottle.cluster.train.checkpoint import newest_generation
from polythrottle.cluster.train.controller import Controller, Job
from polythrottle.cluster.train.membership import Phase
from polythrottle.cluster.train.wire import LARGEST, Line, admits, is_loopback
from polythrottle.errors import InvalidInput, PolythrottleError, StorageError

TICK_S = 0.05


def _unheard(event: Mapping[str, Any]) -> None:
    """Tell nobody."""


class _Handler(BaseHTTPRequestHandler):
    """One request of a node or worker."""

    server: "Serving"
    timeout = 10

    def do_POST(self) -> None:
        """Answer one request; a browser's is refused: pages elsewhere must not steer a job."""
        if self.headers.get("Origin") or self.headers.get("Content-Type") != "application/json":
            self._send(403, {"error": "not a request of a polythrottle node"})
        elif not admits(self.server.token, self.headers.get("Authorization")):
            self._send(401, {"error": "this controller needs the job's token: give --token-file"})
        else:
            self._send(*self._answered())

    def _answered(self) -> tuple[int, dict[str, Any]]:
        try:
            length = int(self.headers.get("Content-Length", "0"))
            if not 0 <= length <= LARGEST:
                return 413, {"error": "the request is too long"}
            words = json.loads(self.rfile.read(length) or b"{}")
            if not isinstance(words, dict):
                return 400, {"error": "a request is one JSON document"}
            return 200, self.server.controller.answer(self.path.strip("/"), words)
        except (ValueError, RecursionError):
            return 400, {"error": "a request is one JSON document"}
        except StorageError as err:
            self.server.fault = err
            return 503, {"error": str(err)}
        except PolythrottleError as err:
            return 400, {"error": str(err)}

    def _send(self, status: int, document: Mapping[str, Any]) -> None:
        data = json.dumps(document).encode()
        with contextlib.suppress(OSError):  # who asked has gone
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing of single requests."""


class Serving(ThreadingHTTPServer):
    """A controller on its address, with its hold on the store.

    Args:
        controller: What answers.
        host: Where to listen; anything but loopback needs a token.
        port: On which port; 0 for a free one.
        token: What lets in.
        holding: The hold on the store.

    Raises:
        InvalidInput: If it would listen for everybody without a token, or cannot listen there.
    """

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, controller: Controller, host: str, port: int, token: str, holding: Holding) -> None:
        if not is_loopback(host) and not token:
            raise InvalidInput(f"{host} can be reached from other machines: give --token-file, or listen on 127.0.0.1")
        self.controller, self.token = controller, token
        self.fault: StorageError | None = None
        self._told = len(controller.events)
        self._holding = holding
        try:
            super().__init__((host, port), _Handler)
        except OSError as err:
            raise InvalidInput(f"cannot listen on {host}:{port}: {err.strerror or err}") from err
        self._ended = threading.Event()

    @property
    def line(self) -> Line:
        """Return the way to this controller."""
        return Line(str(self.server_address[0]), int(self.server_address[1]), self.token)

    def open(self) -> None:
        """Take hold of the store, and answer from now on.

        Raises:
            ClaimedElsewhere: If another controller works on the store.
            StorageError: If it cannot be reached.
            BadFile: If a claim in it is none.
        """
        begun_s = SystemClock().now()
        try:
            self._holding.take()
            generation = newest_generation(Store(self.controller.job.store))
        except PolythrottleError:
            self.server_close()
            raise
        self.controller.excuse(SystemClock().now() - begun_s)  # nobody could be heard meanwhile
        self.controller.begin(generation)
        for work, words in ((self.serve_forever, (0.05,)), (self._holding.keep, (self._robbed,))):
            threading.Thread(target=work, args=words, daemon=True).start()

    def run(self, patience_s: float = 20.0, on_event: Callable[[Mapping[str, Any]], object] = _unheard) -> Phase:
        """Watch, once open, until the job has ended and its nodes have gone, or `stop`; return how it ended.

        Args:
            patience_s: How long nodes may take to go after the end, in seconds.
            on_event: Told of everything that happens in the job from now on, in order.

        Raises:
            StorageError: If the events cannot be kept, or another controller took the store.
        """
        try:
            self._watch(patience_s, on_event)
        finally:
            self._tell(on_event)
            self.shutdown()
            self.server_close()
            self._holding.release()
            self.controller.close()
        if self.fault is not None:
            raise self.fault
        return self.controller.membership.phase

    def stop(self) -> None:
        """End `run` soon."""
        self._ended.set()

    def _robbed(self, reason: str) -> None:
        self.fault = StorageError(reason)
        with contextlib.suppress(StorageError):
            self.controller.give_up(reason)

    def _tell(self, on_event: Callable[[Mapping[str, Any]], object]) -> None:
        """Tell what has happened since: from the watching thread, so that a stuck terminal holds up no answer."""
        for event in self.controller.events[self._told :]:
            self._told += 1
            on_event(event)

    def _watch(self, patience_s: float, on_event: Callable[[Mapping[str, Any]], object]) -> None:
        over_s: float | None = None
        clock = SystemClock()
        looked_s = clock.now()
        while not self._ended.wait(TICK_S):
            held_up_s, looked_s = clock.now() - looked_s, clock.now()
            if held_up_s > self.controller.job.rules.beat_s:
                self.controller.excuse(held_up_s)
            try:
                self.controller.tick()
            except StorageError as err:
                self.fault = err
                return
            self._tell(on_event)
            if self.controller.membership.outcome is None:
                continue
            over_s = clock.now() if over_s is None else over_s
            if not self.controller.membership.nodes or clock.now() - over_s > patience_s:
                return


def announce(job: Job, line: Line, token_file: Path | None) -> None:
    """Write down where a job's controller is met.

    Raises:
        StorageError: If it cannot be written.
    """
    document = {"v": 1, "job": job.name, "address": line.address, "pid": os.getpid(), "store": job.store}
    whole = document | {"token_file": str(token_file) if token_file else None}
    Store(str(job.folder)).write(JOB, json.dumps(whole).encode())
