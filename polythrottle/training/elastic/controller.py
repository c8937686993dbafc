"""The controller: one process that keeps a job's membership and its hold on the store; it needs no torch."""

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from polythrottle.domain.clock import Clock, SystemClock
from polythrottle.domain.errors import InvalidInput, PolythrottleError, StorageError
from polythrottle.storage.object_store import Holding, Store
from polythrottle.training.elastic.channel import Answer, ControllerChannel, Listener
from polythrottle.training.elastic.checkpoints import newest_generation
from polythrottle.training.elastic.events import (
    FAULT,
    JOB,
    RESTARTED,
    SUCCESSION,
    SUCCESSOR,
    UNHEARD,
    Beat,
    Departure,
    EventLog,
    Finish,
    JobProgress,
    Join,
    NoticeMessage,
    Ready,
    Report,
    SuccessionStep,
    WorkerFault,
    origin_of,
    replayed,
)
from polythrottle.training.elastic.membership import Event, EventKind, Membership, Phase, Rules, restored
from polythrottle.training.elastic.nodes.overseer import OVERSEEN, Overseer, Watched

# The controller: one process, on a machine that stays, that keeps a job's membership; it needs no torch.

_NO_SPEED: dict[str, Any] = {
    **dict.fromkeys(("measured_steps_per_s", "expected_steps_per_s", "short")),
    **{"found": False, "reason": "no generation trains now", "causes": (), "proposals": ()},
}
_OWN = {*EventKind, FAULT, RESTARTED, SUCCESSOR, SUCCESSION, "notice", *OVERSEEN}


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
        watched: How its nodes are paced, and when it is called slow.
    """

    name: str
    folder: Path
    rules: Rules
    store: str
    rate_per_h: float | None = None
    terms: Mapping[str, Any] | None = None
    watched: Watched = field(default_factory=Watched)


class Controller:
    """Answers nodes and workers, and keeps the job's events.

    Args:
        job: What it is started with; a folder with events of a former controller is continued.
        clock: Decides who is silent.
        calendar: Returns the seconds since 1970: dates events, and tells how long no controller kept the job.

    Raises:
        StorageError: If the folder cannot be written.
        BadFile: If it holds no events.
    """

    def __init__(self, job: Job, clock: Clock | None = None, calendar: Callable[[], float] = time.time) -> None:
        self.job = job
        self._clock = clock or SystemClock()
        self._calendar = calendar
        self._journal = EventLog(job.folder)
        self._start_s = self._clock.now()
        self._origin = origin_of(self._journal.records, calendar())
        self.membership: Membership = restored(job.rules, list(self._journal.records), self._start_s)
        self.progress: JobProgress = replayed(self._journal.records)
        self._heard_s: dict[str, float] = {}
        self._wanted_checkpoints = 0
        self._given_up = False
        self._reason = ""
        self._overseer = Overseer(job.watched, self.membership, self.note)
        self._lock = threading.RLock()

    @property
    def events(self) -> list[dict[str, Any]]:
        """Return what has happened so far, oldest first; it grows."""
        return self._journal.records

    @property
    def reason(self) -> str:
        """Return why the job has failed, with its last worker's own words; empty if it has not."""
        return self._reason or self.membership.reason

    @property
    def at_s(self) -> float:
        """Return the time of the job in seconds: since its first controller began, whoever keeps it now."""
        return self._origin.at_s + self._clock.now() - self._start_s

    def begin(self, generation: int = 0) -> None:
        """Go on with a job that another controller kept before.

        Args:
            generation: The newest that left a checkpoint. Where the job's folder does not know of it, as on another
                machine, the next is numbered after it: the newest checkpoint is that of the latest generation.
        """
        with self._lock:
            if generation > self.membership.generation:
                self.membership.generation = generation
                self.membership.members = ()
                self.membership.nodes.clear()
        if self._origin.restarted:
            away_s = None
            if self._origin.away_s is not None:
                away_s = round(self._origin.away_s, 3)
            self.note({"event": RESTARTED, "generation": self.membership.generation, "away_s": away_s})

    def answer(self, verb: str, words: Mapping[str, Any]) -> dict[str, Any]:
        """Return the answer to one request.

        Raises:
            InvalidInput: If the request is not valid.
        """
        handler = _HANDLERS.get(verb)
        if handler is None:
            raise InvalidInput(f"the controller is not asked for {verb[:20]!r}")
        with self._lock:
            try:
                return handler(self, words)
            except InvalidInput as err:
                raise InvalidInput(f"{verb}: {err}") from err
            except (ValueError, ArithmeticError) as err:  # numbers that are of their type but of no sense, such as NaN
                raise InvalidInput(f"{verb}: the request garbles a number: {err}") from err
            finally:
                self.tick()

    def tick(self) -> None:
        """Lose who is silent and begin a generation if all is ready."""
        with self._lock:
            self.progress.until(self.at_s)
            for event in self.membership.tick(self._clock.now()):
                self.note(event.record() | self._known_of(event))
            self._overseer.tick(self._clock.now())

    def _known_of(self, event: Event) -> dict[str, Any]:
        """Return what is known beside an event: when a lost node was last heard of, and how a job's worker failed."""
        if event.happening is EventKind.LOST:
            beaten_s = self._heard_s.pop(event.node or "", None)
            if beaten_s is None:
                return {UNHEARD: True}
            return {"beaten_s": round(beaten_s, 3)}
        if event.happening is EventKind.FAILED and self.progress.fault is not None and not self._given_up:
            fault = self.progress.fault
            self._reason = f"{event.reason}; the last, on {fault['node']}: {fault['reason']}"
            return {"reason": self._reason}
        return {}

    def excuse(self, held_up_s: float) -> None:
        """Not count a time in which this process was held up itself, in seconds, as anybody's silence."""
        with self._lock:
            for node in self.membership.nodes.values():
                node.beaten_s += held_up_s

    def note(self, record: Mapping[str, Any]) -> None:
        """Keep one event."""
        stamps = {"at_s": round(self.at_s, 3), "unix_s": round(self._calendar(), 3)}
        stamped = {**stamps, **record, **stamps}  # first in the line, and nobody else's
        self._journal.append(stamped)
        self.progress.take(stamped)

    def give_up(self, reason: str) -> None:
        """End the job as failed, though its workers may be well."""
        with self._lock:
            self._given_up = True
            self.membership.fail(reason)
        self.tick()

    def close(self) -> None:
        """Close the events."""
        self._journal.close()

    def join(self, said: Join) -> dict[str, Any]:
        """Take a node in, and tell it what it needs to know."""
        self.membership.join(said.node, said.address, self._clock.now(), said.generation, said.process)
        self.tick()  # a former process of the name is lost as of its own last beat
        self._heard_s[said.node] = self.at_s
        return self._standing(said.node) | {"job": self.job.name, "store": self.job.store}

    def beat(self, said: Beat) -> dict[str, Any]:
        """Note that a node lives and what it says of its boards, and tell it its place and its pace."""
        known = self.membership.beat(said.node, self._clock.now(), said.process)
        if known:
            self._heard_s[said.node] = self.at_s
            self._overseer.hear(said.node, said.measured)
        return self._standing(said.node) | {"known": known} | self._overseer.answer(said.node, self._losses_per_h)

    def ready(self, said: Ready) -> dict[str, Any]:
        """Note that a node can begin a generation."""
        known = said.node in self.membership.nodes
        if known:
            self.membership.ready(said.node, said.address, self._clock.now(), said.failed)
            self._heard_s[said.node] = self.at_s
        return self._standing(said.node) | {"known": known}

    def drain(self, said: Departure) -> dict[str, Any]:
        """Note that a node will leave."""
        self.membership.drain(said.node, said.reason)
        return {}

    def leave(self, said: Departure) -> dict[str, Any]:
        """Let a node go."""
        self.membership.leave(said.node, said.reason)
        return {}

    def finish(self, said: Finish) -> dict[str, Any]:
        """Note that a node has trained to the end."""
        self.membership.finish(said.node, said.generation)
        return {}

    def notice(self, said: NoticeMessage) -> dict[str, Any]:
        """Keep a notice, and ask the workers for a checkpoint."""
        self._wanted_checkpoints += 1
        record = {"event": "notice", "node": said.node, "kind": said.kind, "left_s": said.left_s}
        self.note(record | {"generation": self.membership.generation, "source": said.source})
        return {}

    def fault(self, said: WorkerFault) -> dict[str, Any]:
        """Keep why a worker failed: its node is ready again soon, or the job is given up."""
        record = {"event": FAULT, "node": said.node, "generation": self.membership.generation}
        self.note(record | said.fault.document())
        return {}

    def succession(self, said: SuccessionStep) -> dict[str, Any]:
        """Keep that a successor was asked for, or has taken over."""
        event = SUCCESSION if said.done else SUCCESSOR
        record = {"event": event, "order": said.order, "successor": said.successor, **said.times}
        self.note(record | {"generation": self.membership.generation})
        return {}

    def report(self, said: Report) -> dict[str, Any]:
        """Take a worker's report, and tell it what it must do; that of a former generation is told to stop."""
        if any(record.get("event") in _OWN for record in said.records):
            raise InvalidInput("a worker's record is a document with an event of its own")
        for record in said.records:
            self.note({**record, "generation": said.generation})
        present = said.generation == self.membership.generation
        if present and said.at is not None:
            self.membership.stepped(said.generation)
            self.progress.step, self.progress.epoch = said.at
        hazard_per_s, source = self.progress.hazard_per_s(len(self.membership.members), self.job.rate_per_h)
        return {
            "stop": not present or self.membership.phase in (Phase.REGROUPING, Phase.FAILED),
            "broken": not present or self.membership.broken or self.membership.phase is Phase.FAILED,
            "checkpoints": self._wanted_checkpoints,
            "hazard_per_s": hazard_per_s,
            "hazard_source": source,
        }

    @property
    def _losses_per_h(self) -> float:
        """Return the losses of one node per hour, as far as they are known."""
        return self.progress.hazard_per_s(1, self.job.rate_per_h)[0] * 3600

    def terms(self) -> dict[str, Any]:
        """Return what workers are told when they begin."""
        return {"store": self.job.store, **(self.job.terms or {})}

    def _standing(self, name: str) -> dict[str, Any]:
        """Return what a node needs to know: whether to stop, or its place in the newest generation."""
        held = self.membership
        rank = self.membership.rank(name)
        standing: dict[str, Any] = {
            "phase": str(held.phase),
            "reason": held.reason,
            "generation": held.generation,
            "rank": rank,
            "world": len(held.members),
            "regroup": rank is not None and held.phase is Phase.REGROUPING,
            "beat_s": held.rules.beat_s,
        }
        chief = None
        if held.members:
            chief = held.nodes.get(held.members[0])
        return standing | {"gather_at": list(chief.address) if chief else None}

    def status(self) -> dict[str, Any]:
        """Return where the job stands, as a document."""
        with self._lock:
            held = self.membership
            now_s = self._clock.now()
            joined_s = self.progress.joined_s
            hazard_per_s, source = self.progress.hazard_per_s(len(held.members), self.job.rate_per_h)
            nodes = [
                {"node": node.name, "rank": held.rank(node.name)}
                | {"age_s": round(self.at_s - joined_s.get(node.name, self.at_s), 1)}
                | {"silent_s": round(now_s - node.beaten_s, 1), "leaving": node.leaving or None}
                | self._overseer.row(node.name)
                for node in held.nodes.values()
            ]
            return {
                "job": self.job.name,
                "phase": str(held.phase),
                "reason": self.reason or None,
                "generation": held.generation,
                "least": held.rules.least,
                "most": held.rules.most,
                **members_document(held),
                "nodes": nodes,
                "store": self.job.store,
                "hazard_per_h": hazard_per_s * 3600,
                "hazard_source": source,
                "speed": self._overseer.document() | ({} if held.phase is Phase.TRAINING else _NO_SPEED),
                **progress_document(self.progress),
            }


def members_document(held: Membership, over: bool | None = None) -> dict[str, Any]:
    """Return who of a job's newest generation is there, and who has gone, as a document; once the job is over, who was.

    Args:
        held: Its membership.
        over: Whether the job is over, where no controller keeps it; None for what the membership says.
    """
    members = list(held.members)
    ended = held.outcome is not None if over is None else over
    now = [] if ended else list(held.present)
    return {
        "members": now,
        "chief": members[0] if members[:1] == now[:1] and now else None,
        "last_members": members if ended else [],
        "gone": {} if ended else {name: str(how) for name, how in held.gone.items()},
        "waits_for": held.wanting if over is None else None,
    }


def progress_document(progress: JobProgress) -> dict[str, Any]:
    """Return what a job's progress adds up to, as a document; unknown is None."""
    return {
        "step": progress.step,
        "epoch": progress.epoch,
        "checkpoints": progress.checkpoints,
        "newest_checkpoint": dict(progress.newest) if progress.newest else None,
        "spooled": progress.spooled,
        "taken_up": dict(progress.taken_up) if progress.taken_up else None,
        "nothing_left": progress.idle,
        "losses": progress.losses,
        "departures": progress.departures,
        "notices": progress.counts.get("notice", 0),
        "restarts": progress.counts.get(RESTARTED, 0),
        "faults": progress.counts.get(FAULT, 0),
        "newest_fault": dict(progress.fault) if progress.fault else None,
        "successors": progress.successions.document(),
        "recoveries_s": [round(each, 2) for each in progress.recoveries],
        "recoveries_kind": "measured by the controller, from a lost node's last beat to the next first step",
    }


_HANDLERS: Mapping[str, Callable[[Controller, Mapping[str, Any]], dict[str, Any]]] = {
    "join": lambda controller, words: controller.join(Join.read(words)),
    "beat": lambda controller, words: controller.beat(Beat.read(words)),
    "ready": lambda controller, words: controller.ready(Ready.read(words)),
    "drain": lambda controller, words: controller.drain(Departure.read(words)),
    "leave": lambda controller, words: controller.leave(Departure.read(words)),
    "finish": lambda controller, words: controller.finish(Finish.read(words)),
    "notice": lambda controller, words: controller.notice(NoticeMessage.read(words)),
    "fault": lambda controller, words: controller.fault(WorkerFault.read(words)),
    "succession": lambda controller, words: controller.succession(SuccessionStep.read(words)),
    "report": lambda controller, words: controller.report(Report.read(words)),
    "terms": lambda controller, words: controller.terms(),
    "status": lambda controller, words: controller.status(),
}
"""All that the network may ask for: a word from outside never names an attribute of the controller."""


# A controller on its address, with its hold on the store: it answers who has the token, and watches its job.

TICK_S = 0.05


def _unheard(event: Mapping[str, Any]) -> None:
    """Tell nobody."""


class ControllerServer:
    """A controller on its address, with its hold on the store.

    Args:
        controller: What answers.
        host: Where to listen.
        port: On which port; 0 for a free one.
        token: What lets in.
        holding: The hold on the store.

    Raises:
        InvalidInput: If there is no token, or it cannot listen there.
    """

    def __init__(self, controller: Controller, host: str, port: int, token: str, holding: Holding) -> None:
        self.controller = controller
        self.token = token
        self.fault: StorageError | None = None
        self._told = len(controller.events)
        self._holding = holding
        self._listener = Listener(host, port, token, self._answer)
        self._ended = threading.Event()

    @property
    def line(self) -> ControllerChannel:
        """Return the way to this controller."""
        host, port = self._listener.address
        return ControllerChannel(host, port, self.token)

    def open(self) -> None:
        """Take hold of the store, and answer from now on.

        Raises:
            ClaimedElsewhere: If another controller works on the store.
            StorageError: If it cannot be reached.
            BadFile: If a claim in it is not valid.
        """
        begun_s = SystemClock().now()
        try:
            self._holding.take()
            generation = newest_generation(Store(self.controller.job.store))
        except PolythrottleError:
            self._listener.close()
            raise
        self.controller.excuse(SystemClock().now() - begun_s)  # nobody could be heard meanwhile
        self.controller.begin(generation)
        self._listener.start()
        threading.Thread(target=self._holding.keep, args=(self._robbed,), daemon=True).start()

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
            self._listener.close()
            self._holding.release()
            self.controller.close()
        if self.fault is not None:
            raise self.fault
        return self.controller.membership.phase

    def stop(self) -> None:
        """End `run` soon."""
        self._ended.set()

    def _answer(self, verb: str, words: Mapping[str, Any]) -> Answer:
        try:
            return 200, self.controller.answer(verb, words)
        except StorageError as err:
            self.fault = err
            return 503, {"error": str(err)}
        except PolythrottleError as err:
            return 400, {"error": str(err)}

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
            held_up_s = clock.now() - looked_s
            looked_s = clock.now()
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
            if over_s is None:
                over_s = clock.now()
            if not self.controller.membership.nodes or clock.now() - over_s > patience_s:
                return


def announce(job: Job, line: ControllerChannel, token_file: Path) -> None:
    """Write down where a job's controller is met.

    Raises:
        StorageError: If it cannot be written.
    """
    document = {"v": 1, "job": job.name, "address": line.address, "pid": os.getpid(), "store": job.store}
    whole = document | {"token_file": str(token_file)}
    Store(str(job.folder)).write(JOB, json.dumps(whole).encode())
