"""The controller: one process, on a machine that stays, that keeps a job's membership; it needs no torch.

It listens on loopback; on any other address only with a token, for whoever reaches it could stop the training.
"""

import contextlib
import json
import math
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from polythrottle.clock import Clock, SystemClock
from polythrottle.cluster.store import Holding, Store
from polythrottle.cluster.train.account import JOB, Journal, Progress, replayed
from polythrottle.cluster.train.membership import Happening, Membership, Phase, Rules, restored
from polythrottle.cluster.train.wire import LARGEST, Line, admits, is_loopback
from polythrottle.errors import InvalidInput, PolythrottleError, StorageError

TICK_S = 0.05


@dataclass(frozen=True)
class Job:
    """What a controller is started with.

    Attributes:
        name: What the job is called.
        folder: Where its events are kept.
        rules: When a node is lost and when a generation begins.
        store: URL of its checkpoints.
        rate_per_h: Losses of one node per hour if known.
        terms: What workers are told when they begin: batch rule, overhead budget and the like.
    """

    name: str
    folder: Path
    rules: Rules
    store: str
    rate_per_h: float | None = None
    terms: Mapping[str, Any] | None = None


class Controller:
    """Answers nodes and workers, and keeps the job's events.

    Args:
        job: What it is started with; a folder with events of a former controller is continued.
        clock: Decides who is silent.

    Raises:
        StorageError: If the folder cannot be written.
        BadFile: If the events in it are none.
    """

    def __init__(self, job: Job, clock: Clock | None = None) -> None:
        self.job, self._clock = job, clock or SystemClock()
        self._journal = Journal(job.folder)
        self._start_s = self._clock.now()
        self.membership: Membership = restored(job.rules, list(self._journal.records), self._start_s)
        self.progress: Progress = replayed(self._journal.records)
        self._wanted_checkpoints = 0
        self._counted_s = self._start_s
        self._lock = threading.RLock()

    def answer(self, verb: str, words: Mapping[str, Any]) -> dict[str, Any]:
        """Return the answer to one request.

        Raises:
            InvalidInput: If the request is none.
        """
        asked: Callable[[Mapping[str, Any]], dict[str, Any]] | None = getattr(self, f"_on_{verb}", None)
        if asked is None:
            raise InvalidInput(f"the controller is not asked for {verb[:20]!r}")
        with self._lock:
            try:
                return asked(words)
            except (KeyError, TypeError, ValueError) as err:
                raise InvalidInput(f"{verb}: the request lacks or garbles {err}") from err
            finally:
                self.tick()

    def tick(self) -> None:
        """Lose who is silent and begin a generation if all is ready."""
        with self._lock:
            now_s = self._clock.now()
            self.progress.machine_s += (now_s - self._counted_s) * len(self.membership.nodes)
            self._counted_s = now_s
            beaten = {node.name: node.beaten_s - self._start_s for node in self.membership.nodes.values()}
            for event in self.membership.tick(now_s):
                since = {"beaten_s": beaten[event.node]} if event.happening is Happening.LOST and event.node else {}
                self.note(event.record() | since)

    def excuse(self, held_up_s: float) -> None:
        """Not count a time in which this process was held up itself, in seconds, as anybody's silence."""
        with self._lock:
            for node in self.membership.nodes.values():
                node.beaten_s += held_up_s

    def note(self, record: Mapping[str, Any]) -> None:
        """Keep one event."""
        stamped = {"at_s": round(self._clock.now() - self._start_s, 3), **record}
        self._journal.append(stamped)
        self.progress.take(stamped)

    def give_up(self, reason: str) -> None:
        """End the job as failed."""
        with self._lock:
            self.membership.fail(reason)
        self.tick()

    def close(self) -> None:
        """Close the events."""
        self._journal.close()

    def _on_join(self, words: Mapping[str, Any]) -> dict[str, Any]:
        name, generation = str(words["node"])[:80], int(words.get("generation", 0))
        self.membership.join(name, _address(words), self._clock.now(), generation, str(words.get("process", "")))
        return self._standing(name) | {"job": self.job.name, "store": self.job.store}

    def _on_beat(self, words: Mapping[str, Any]) -> dict[str, Any]:
        name = str(words["node"])
        known = self.membership.beat(name, self._clock.now(), str(words.get("process", "")))
        return self._standing(name) | {"known": known}

    def _on_ready(self, words: Mapping[str, Any]) -> dict[str, Any]:
        name = str(words["node"])
        if name not in self.membership.nodes:
            return self._standing(name) | {"known": False}
        self.membership.ready(name, _address(words), self._clock.now(), bool(words.get("failed")))
        return self._standing(name) | {"known": True}

    def _on_drain(self, words: Mapping[str, Any]) -> dict[str, Any]:
        self.membership.drain(str(words["node"]), str(words["reason"])[:200])
        return {}

    def _on_leave(self, words: Mapping[str, Any]) -> dict[str, Any]:
        self.membership.leave(str(words["node"]), str(words["reason"])[:200])
        return {}

    def _on_finish(self, words: Mapping[str, Any]) -> dict[str, Any]:
        self.membership.finish(str(words["node"]))
        return {}

    def _on_notice(self, words: Mapping[str, Any]) -> dict[str, Any]:
        left_s = words.get("left_s")
        if left_s is not None and not math.isfinite(float(left_s)):
            raise InvalidInput("a notice's time left is a number of seconds")
        self._wanted_checkpoints += 1
        record = {"event": "notice", "node": str(words["node"]), "kind": str(words["kind"])[:40], "left_s": left_s}
        self.note(record | {"generation": self.membership.generation, "source": str(words.get("source", ""))[:80]})
        return {}

    def _on_report(self, words: Mapping[str, Any]) -> dict[str, Any]:
        """Take a worker's report, and tell it what it must do; that of a former generation is told to stop."""
        generation = int(words["generation"])
        for record in words.get("records", ()):
            if not isinstance(record, dict) or record.get("event") in set(Happening):
                raise InvalidInput("a worker's record is a document with an event of its own")
            self.note({**record, "generation": generation})
        if generation == self.membership.generation and words.get("step") is not None:
            self.membership.stepped(generation)
            self.progress.step, self.progress.epoch = int(words["step"]), int(words["epoch"])
        present = generation == self.membership.generation
        hazard_per_s, source = self.progress.hazard_per_s(len(self.membership.members), self.job.rate_per_h)
        return {
            "stop": not present or self.membership.phase in (Phase.REGROUPING, Phase.FAILED),
            "broken": not present or self.membership.broken or self.membership.phase is Phase.FAILED,
            "checkpoints": self._wanted_checkpoints,
            "hazard_per_s": hazard_per_s,
            "hazard_source": source,
        }

    def _on_terms(self, words: Mapping[str, Any]) -> dict[str, Any]:
        return {"store": self.job.store, **(self.job.terms or {})}

    def _on_status(self, words: Mapping[str, Any]) -> dict[str, Any]:
        return self.status()

    def _standing(self, name: str) -> dict[str, Any]:
        """Return what a node needs to know: whether to stop, or its place in the newest generation."""
        held, rank = self.membership, self.membership.rank(name)
        standing: dict[str, Any] = {
            "phase": str(held.phase),
            "reason": held.reason,
            "generation": held.generation,
            "rank": rank,
            "world": len(held.members),
            "regroup": rank is not None and held.phase is Phase.REGROUPING,
            "beat_s": held.rules.beat_s,
        }
        chief = held.nodes.get(held.members[0]) if held.members else None
        return standing | {"gather_at": list(chief.address) if chief else None}

    def status(self) -> dict[str, Any]:
        """Return where the job stands, as a document."""
        with self._lock:
            held, now_s = self.membership, self._clock.now()
            hazard_per_s, source = self.progress.hazard_per_s(len(held.members), self.job.rate_per_h)
            nodes = [
                {"node": node.name, "rank": held.rank(node.name), "age_s": round(now_s - node.since_s, 1)}
                | {"silent_s": round(now_s - node.beaten_s, 1), "leaving": node.leaving or None}
                for node in held.nodes.values()
            ]
            return {
                "job": self.job.name,
                "phase": str(held.phase),
                "reason": held.reason or None,
                "generation": held.generation,
                "least": held.rules.least,
                "most": held.rules.most,
                "members": list(held.members),
                "chief": held.members[0] if held.members else None,
                "nodes": nodes,
                "store": self.job.store,
                "hazard_per_h": hazard_per_s * 3600,
                "hazard_source": source,
                **told(self.progress),
            }


def told(progress: Progress) -> dict[str, Any]:
    """Return what a job's progress adds up to, as a document; unknown is None."""
    return {
        "step": progress.step,
        "epoch": progress.epoch,
        "checkpoints": progress.checkpoints,
        "newest_checkpoint": dict(progress.newest) if progress.newest else None,
        "spooled": progress.spooled,
        "losses": progress.counts.get(Happening.LOST, 0),
        "departures": progress.counts.get(Happening.LEFT, 0),
        "notices": progress.counts.get("notice", 0),
        "recoveries_s": [round(each, 2) for each in progress.recoveries],
        "recoveries_kind": "measured by the controller, from a lost node's last beat to the next first step",
    }


def _address(words: Mapping[str, Any]) -> tuple[str, int]:
    host, port = words["address"]
    return str(host), int(port)


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
        except PolythrottleError:
            self.server_close()
            raise
        self.controller.excuse(SystemClock().now() - begun_s)  # nobody could be heard meanwhile
        for work, words in ((self.serve_forever, (0.05,)), (self._holding.keep, (self._robbed,))):
            threading.Thread(target=work, args=words, daemon=True).start()

    def run(self, patience_s: float = 20.0) -> Phase:
        """Watch, once open, until the job has ended and its nodes have gone, or `stop`; return how it ended.

        Args:
            patience_s: How long nodes may take to go after the end, in seconds.

        Raises:
            StorageError: If the events cannot be kept, or another controller took the store.
        """
        try:
            self._watch(patience_s)
        finally:
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

    def _watch(self, patience_s: float) -> None:
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
