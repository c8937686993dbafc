"""The controller: one process, on a machine that stays, that keeps a job's membership; it needs no torch."""

import math
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from polythrottle.clock import Clock, SystemClock
from polythrottle.cluster.train.account import (
    FAULT,
    RESTARTED,
    SUCCESSION,
    SUCCESSOR,
    UNHEARD,
    Journal,
    Progress,
    origin_of,
    replayed,
)
from polythrottle.cluster.train.fault import Fault
from polythrottle.cluster.train.membership import Event, Happening, Membership, Phase, Rules, restored
from polythrottle.cluster.train.overseeing import OVERSEEN, Overseer, Watched
from polythrottle.errors import InvalidInput

_NO_SPEED: dict[str, Any] = {
    **dict.fromkeys(("measured_steps_per_s", "expected_steps_per_s", "short")),
    **{"found": False, "reason": "no generation trains now", "causes": (), "proposals": ()},
}
_OWN = {*Happening, FAULT, RESTARTED, SUCCESSOR, SUCCESSION, "notice", *OVERSEEN}


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
        BadFile: If the events in it are none.
    """

    def __init__(self, job: Job, clock: Clock | None = None, calendar: Callable[[], float] = time.time) -> None:
        self.job, self._clock, self._calendar = job, clock or SystemClock(), calendar
        self._journal = Journal(job.folder)
        self._start_s = self._clock.now()
        self._origin = origin_of(self._journal.records, calendar())
        self.membership: Membership = restored(job.rules, list(self._journal.records), self._start_s)
        self.progress: Progress = replayed(self._journal.records)
        self._heard_s: dict[str, float] = {}
        self._wanted_checkpoints = 0
        self._given_up, self._reason = False, ""
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
                self.membership.generation, self.membership.members = generation, ()
                self.membership.nodes.clear()
        if self._origin.restarted:
            away_s = None if self._origin.away_s is None else round(self._origin.away_s, 3)
            self.note({"event": RESTARTED, "generation": self.membership.generation, "away_s": away_s})

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
            except (KeyError, TypeError, ValueError, ArithmeticError, AttributeError) as err:
                raise InvalidInput(f"{verb}: the request lacks or garbles {err}") from err
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
        if event.happening is Happening.LOST:
            beaten_s = self._heard_s.pop(event.node or "", None)
            return {UNHEARD: True} if beaten_s is None else {"beaten_s": round(beaten_s, 3)}
        if event.happening is Happening.FAILED and self.progress.fault is not None and not self._given_up:
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

    def _on_join(self, words: Mapping[str, Any]) -> dict[str, Any]:
        name, generation = str(words["node"])[:80], int(words.get("generation", 0))
        self.membership.join(name, _address(words), self._clock.now(), generation, str(words.get("process", "")))
        self.tick()  # a former process of the name is lost as of its own last beat
        self._heard_s[name] = self.at_s
        return self._standing(name) | {"job": self.job.name, "store": self.job.store}

    def _on_beat(self, words: Mapping[str, Any]) -> dict[str, Any]:
        name = str(words["node"])
        known = self.membership.beat(name, self._clock.now(), str(words.get("process", "")))
        if known:
            self._heard_s[name] = self.at_s
            self._overseer.hear(name, words)
        return self._standing(name) | {"known": known} | self._overseer.answer(name, self._losses_per_h)

    def _on_ready(self, words: Mapping[str, Any]) -> dict[str, Any]:
        name = str(words["node"])
        if name not in self.membership.nodes:
            return self._standing(name) | {"known": False}
        self.membership.ready(name, _address(words), self._clock.now(), bool(words.get("failed")))
        self._heard_s[name] = self.at_s
        return self._standing(name) | {"known": True}

    def _on_drain(self, words: Mapping[str, Any]) -> dict[str, Any]:
        self.membership.drain(str(words["node"]), str(words["reason"])[:200])
        return {}

    def _on_leave(self, words: Mapping[str, Any]) -> dict[str, Any]:
        self.membership.leave(str(words["node"]), str(words["reason"])[:200])
        return {}

    def _on_finish(self, words: Mapping[str, Any]) -> dict[str, Any]:
        self.membership.finish(str(words["node"]), int(words["generation"]))
        return {}

    def _on_notice(self, words: Mapping[str, Any]) -> dict[str, Any]:
        left_s = words.get("left_s")
        if left_s is not None and not math.isfinite(float(left_s)):
            raise InvalidInput("a notice's time left is a number of seconds")
        self._wanted_checkpoints += 1
        record = {"event": "notice", "node": str(words["node"]), "kind": str(words["kind"])[:40], "left_s": left_s}
        self.note(record | {"generation": self.membership.generation, "source": str(words.get("source", ""))[:80]})
        return {}

    def _on_fault(self, words: Mapping[str, Any]) -> dict[str, Any]:
        """Keep why a worker failed: its node is ready again soon, or the job is given up."""
        fault = Fault.from_document(words)
        record = {"event": FAULT, "node": str(words["node"])[:80], "generation": self.membership.generation}
        self.note(record | fault.document())
        return {}

    def _on_succession(self, words: Mapping[str, Any]) -> dict[str, Any]:
        """Keep what who rents the nodes says: a successor was asked for, or has taken over."""
        record: dict[str, Any] = {"event": SUCCESSION if words["done"] else SUCCESSOR}
        record |= {"order": str(words["order"])[:80], "successor": str(words["successor"])[:80]}
        for name in ("left_s", "wait_s", "overlap_s", "interruption_s"):
            if words.get(name) is not None:
                record[name] = round(float(words[name]), 3)
        self.note(record | {"generation": self.membership.generation})
        return {}

    def _on_report(self, words: Mapping[str, Any]) -> dict[str, Any]:
        """Take a worker's report, and tell it what it must do; that of a former generation is told to stop."""
        generation = int(words["generation"])
        for record in words.get("records", ()):
            if not isinstance(record, dict) or record.get("event") in _OWN:
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

    @property
    def _losses_per_h(self) -> float:
        """Return the losses of one node per hour, as far as they are known."""
        return self.progress.hazard_per_s(1, self.job.rate_per_h)[0] * 3600

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
            held, now_s, joined_s = self.membership, self._clock.now(), self.progress.joined_s
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
                **present(held),
                "nodes": nodes,
                "store": self.job.store,
                "hazard_per_h": hazard_per_s * 3600,
                "hazard_source": source,
                "speed": self._overseer.document() | ({} if held.phase is Phase.TRAINING else _NO_SPEED),
                **told(self.progress),
            }


def present(held: Membership, over: bool | None = None) -> dict[str, Any]:
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


def told(progress: Progress) -> dict[str, Any]:
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


def _address(words: Mapping[str, Any]) -> tuple[str, int]:
    host, port = words["address"]
    return str(host), int(port)
