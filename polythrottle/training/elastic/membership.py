"""Who is there, and which of them make up the numbered generation that trains: pure, on one clock alone.

Nodes say that they are there (a beat), that their workers have stopped and that they wait (ready), or that they go.
Only the controller's monotonic clock decides who is lost, so clocks of nodes may differ by any amount.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from polythrottle.domain.backports import StrEnum
from polythrottle.domain.errors import InvalidInput


class Phase(StrEnum):
    """Where a job is."""

    GATHERING = "gathering"  # no generation trains; waiting for nodes
    TRAINING = "training"
    REGROUPING = "regrouping"  # members stop, to begin the next generation
    FINISHED = "finished"
    FAILED = "failed"


class EventKind(StrEnum):
    """What can happen to a membership."""

    JOINED = "joined"
    DRAINING = "draining"  # is about to leave
    LOST = "lost"  # three beats missed
    LEFT = "left"  # said so before
    FORMED = "formed"
    FINISHED = "finished"
    FAILED = "failed"


@dataclass(frozen=True)
class Rules:
    """When a node is lost and when a generation begins.

    Attributes:
        least: Nodes a generation needs, >= 1.
        most: Nodes a generation may have; more wait.
        beat_s: Time between two beats of a node, in seconds.
        missed: Beats a node may miss before it is lost.
        last_call_s: How long a generation that nobody trained before waits for more than ``least`` nodes, in seconds.
        settle_s: How long a generation is left to reach its first step before newcomers may end it, in seconds.
        fruitless: Generations in a row that may end in a worker's failure without one step before the job fails.
        parting_s: How long members that all go are given to stop and to write a last checkpoint, in seconds; an agent
            gives its workers 30 s, then kills them and leaves.
    """

    least: int = 1
    most: int = 1
    beat_s: float = 1.0
    missed: int = 3
    last_call_s: float = 3.0
    settle_s: float = 60.0
    fruitless: int = 3
    parting_s: float = 60.0

    def __post_init__(self) -> None:
        if not 1 <= self.least <= self.most:
            raise InvalidInput(f"nodes are given as least:most with 1 <= least <= most, not {self.least}:{self.most}")
        if not (self.beat_s > 0 and self.missed >= 1 and self.last_call_s >= 0):
            raise InvalidInput("a beat takes time, at least one is missed, and the last call is not negative")


@dataclass
class MemberNode:
    """One node as the controller knows it.

    Attributes:
        name: What it is called.
        address: Host and free port at which its first worker would gather the others.
        beaten_s: When it was last heard of, by the controller's clock, in seconds.
        since_s: When it joined, by the same clock: its age tells the hazard.
        generation: The newest it belongs to; a process that took a lost one's name belongs to none before.
        process: A random name of the process that speaks for it, so that two cannot be one node.
        ready: Whether its workers have stopped and it waits for a generation.
        failed: Whether they stopped because one failed.
        leaving: Why it goes, once its workers have stopped together with all others; empty while it stays.
    """

    name: str
    address: tuple[str, int]
    beaten_s: float
    since_s: float
    generation: int = 0
    process: str = ""
    ready: bool = False
    failed: bool = False
    leaving: str = ""


@dataclass(frozen=True)
class Event:
    """Something that happened, with the generation during which it did.

    Attributes:
        happening: What.
        generation: The newest generation then; for ``FORMED`` the one that begins.
        node: Whom it happened to, if one.
        members: Who makes up the generation, rank 0 (the chief) first; for ``FORMED`` only.
        reason: In words, where there is more to say.
    """

    happening: EventKind
    generation: int
    node: str | None = None
    members: tuple[str, ...] = ()
    reason: str = ""

    def record(self) -> dict[str, Any]:
        """Return it as a document, without what does not apply."""
        document: dict[str, Any] = {"event": str(self.happening), "generation": self.generation}
        if self.node is not None:
            document["node"] = self.node
        if self.members:
            document |= {"members": list(self.members), "chief": self.members[0]}
        return document | ({"reason": self.reason} if self.reason else {})


@dataclass
class Membership:
    """The nodes of one job and its generations; every change is returned as events by `tick`.

    Attributes:
        rules: When a node is lost and when a generation begins.
        generation: Number of the newest generation; 0 before the first.
        members: Its nodes by rank; the longest-serving is first, so that the chief's duties move to the next in age.
        gone: Those of them that are there no more, and how they went.
    """

    rules: Rules
    generation: int = 0
    members: tuple[str, ...] = ()
    nodes: dict[str, MemberNode] = field(default_factory=dict)
    gone: dict[str, EventKind] = field(default_factory=dict)
    outcome: Phase | None = None
    reason: str = ""
    _gathered_s: float | None = None
    _parting_s: float | None = None
    _formed_s: float | None = None
    _stepped: bool = True
    _settled: bool = True
    _fruitless: int = 0
    _untold: list[Event] = field(default_factory=list)

    def beat(self, name: str, now_s: float, process: str = "") -> bool:
        """Note that a node is there, and return whether it is known: one that is not must join again."""
        node = self.nodes.get(name)
        if node is None or node.process not in ("", process):
            return False
        node.beaten_s = now_s
        return True

    def join(self, name: str, address: tuple[str, int], now_s: float, generation: int = 0, process: str = "") -> None:
        """Take in a node, or one that was here before a restart of the controller and still trains a generation.

        Raises:
            InvalidInput: If another process speaks for a node of that name.
        """
        former = self.nodes.get(name)
        silent_s = self.rules.beat_s * self.rules.missed
        if former is not None and former.process != process and now_s - former.beaten_s <= silent_s and former.process:
            raise InvalidInput(f"a node named {name!r} is already there; give each node a --node of its own")
        trains = generation == self.generation and name in self.members
        if name in self.nodes and not trains:
            self._drop(name, EventKind.LOST, "it joined again: its former process is gone")
        self.nodes[name] = MemberNode(name, address, now_s, now_s, self.generation if trains else 0, process)
        self.gone.pop(name, None)
        self._tell(EventKind.JOINED, node=name)

    def ready(self, name: str, address: tuple[str, int], now_s: float, failed: bool = False) -> None:
        """Note that a node waits for the next generation; ``failed`` if because one of its workers failed."""
        node = self.nodes[name]
        node.address = address
        node.beaten_s = now_s
        node.ready = True
        node.failed = failed

    def drain(self, name: str, reason: str) -> None:
        """Note that a node is about to go: all stop together, after a checkpoint, and the others go on without it."""
        if name in self.nodes and not self.nodes[name].leaving:
            self.nodes[name].leaving = reason
            self._tell(EventKind.DRAINING, node=name, reason=reason)

    def readmit(self, name: str) -> None:
        """Let a node that was told to go take part again, if it is still there."""
        if name in self.nodes:
            self.nodes[name].leaving = ""

    def leave(self, name: str, reason: str) -> None:
        """Let a node go that says so and whose workers have stopped."""
        if name in self.nodes:
            self._drop(name, EventKind.LEFT, reason)

    def stepped(self, generation: int) -> None:
        """Note that a generation has trained a step: its failures are not the script's own from the beginning."""
        if generation == self.generation:
            self._stepped = self._settled = True

    def finish(self, name: str, generation: int) -> None:
        """Note that a node's workers have reached the end of the training; the first that does ends it for all.

        Raises:
            InvalidInput: If it speaks of another generation than the newest: what that has still to do is not done.
        """
        if generation != self.generation:
            raise InvalidInput(f"generation {generation} cannot finish the job: the newest is {self.generation}")
        if self.outcome is None and name in self.members:
            self.outcome = Phase.FINISHED
            self._tell(EventKind.FINISHED, node=name)

    def fail(self, reason: str) -> None:
        """Give the job up."""
        if self.outcome is None:
            self.outcome = Phase.FAILED
            self.reason = reason
            self._tell(EventKind.FAILED, reason=reason)

    @property
    def phase(self) -> Phase:
        """Return where the job is."""
        if self.outcome is not None:
            return self.outcome
        if not self.members:
            return Phase.GATHERING
        if self._changed():
            return Phase.REGROUPING
        return Phase.TRAINING

    @property
    def present(self) -> tuple[str, ...]:
        """Return the members that are still there, by rank."""
        return tuple(node.name for node in self._serving())

    @property
    def wanting(self) -> int:
        """Return how many more nodes must come before a generation can begin; 0 while one trains or the job is over."""
        if self.phase not in (Phase.GATHERING, Phase.REGROUPING):
            return 0
        return max(0, self.rules.least - sum(not node.leaving for node in self.nodes.values()))

    @property
    def broken(self) -> bool:
        """Return whether a member is gone, so that the others' next exchange can never end."""
        serving = self._serving()
        return len(serving) < len(self.members) or any(node.failed for node in serving)

    def rank(self, name: str) -> int | None:
        """Return a node's rank in the newest generation if it waits for nothing, None otherwise."""
        node = self.nodes.get(name)
        if node is None or node.ready or node not in self._serving():
            return None
        return self.members.index(name)

    def tick(self, now_s: float) -> list[Event]:
        """Lose who is silent, begin a generation if all is ready for it, and return what has happened since."""
        if self.outcome is None:
            self._lose_silent(now_s)
            self._settled = self._settled or (
                self._formed_s is not None and now_s - self._formed_s > self.rules.settle_s
            )
            if self._may_form(now_s):
                self._form(now_s)
        events = self._untold
        self._untold = []
        return events

    def _lose_silent(self, now_s: float) -> None:
        limit_s = self.rules.beat_s * self.rules.missed
        for node in list(self.nodes.values()):
            if now_s - node.beaten_s > limit_s:
                self._drop(node.name, EventKind.LOST, f"silent for more than {self.rules.missed} beats")

    def _changed(self) -> bool:
        """Return whether the members are to stop: one has gone or stopped, or there is room for one who waits."""
        serving = self._serving()
        if len(serving) < len(self.members) or any(node.ready or node.leaving for node in serving):
            return True
        room = len(self.members) < self.rules.most
        return room and self._settled and any(node.ready for node in self._newcomers())

    def _serving(self) -> list[MemberNode]:
        """Return the members that are there, by rank."""
        known = (self.nodes.get(name) for name in self.members)
        return [node for node in known if node is not None and node.generation == self.generation]

    def _newcomers(self) -> Iterator[MemberNode]:
        return (node for node in self.nodes.values() if node not in self._serving() and not node.leaving)

    def _may_form(self, now_s: float) -> bool:
        waiting = [node for node in self.nodes.values() if node.ready and not node.leaving]
        if len(waiting) < self.rules.least:
            self._gathered_s = None
            return False
        if not self._serving() and len(waiting) < self.rules.most:  # who starts together should begin together
            if self._gathered_s is None:
                self._gathered_s = now_s
            return now_s - self._gathered_s >= self.rules.last_call_s
        return self._changed() and self._stopped(now_s)

    def _stopped(self, now_s: float) -> bool:
        """Return whether no member trains any more, so that the newest checkpoint is that of the last step.

        Who goes stops together with who stays. Where nobody stays, nobody but the goers themselves can tell.
        """
        serving = self._serving()
        if any(not node.leaving for node in serving):
            return all(node.ready or node.leaving for node in serving)
        if all(node.ready for node in serving):
            return True
        if self._parting_s is None:
            self._parting_s = now_s
        return now_s - self._parting_s >= self.rules.parting_s

    def _form(self, now_s: float) -> None:
        if self._given_up():
            return
        staying = [node for node in self._serving() if not node.leaving]
        fresh = sorted((node for node in self._newcomers() if node.ready), key=lambda node: node.since_s)
        chosen = [*staying, *fresh][: self.rules.most]
        self.members = tuple(node.name for node in chosen)
        self.gone = {}
        self.generation += 1
        self._formed_s = now_s
        self._stepped = False
        self._settled = False
        self._parting_s = None
        for node in chosen:
            node.generation = self.generation
            node.ready = False
            node.failed = False
        self._tell(EventKind.FORMED, members=self.members)

    def _given_up(self) -> bool:
        """Return whether the script fails by itself: often in a row, before a step, with no member gone."""
        serving = self._serving()
        whole = bool(serving) and len(serving) == len(self.members) and not any(node.leaving for node in serving)
        faulty = any(node.failed for node in serving) or not any(node.ready for node in self._newcomers())
        if whole and faulty and not self._stepped:
            self._fruitless = self._fruitless + 1
        else:
            self._fruitless = 0
        if self._fruitless >= self.rules.fruitless:
            self.fail(f"the script failed {self._fruitless} times before its first step; see its own messages")
        return self.outcome is not None

    def _drop(self, name: str, happening: EventKind, reason: str) -> None:
        del self.nodes[name]
        if name in self.members:
            self.gone[name] = happening
        self._tell(happening, node=name, reason=reason)

    def _tell(self, happening: EventKind, **words: Any) -> None:
        self._untold.append(Event(happening, self.generation, **words))


def restored(rules: Rules, records: Sequence[Mapping[str, Any]], now_s: float) -> Membership:
    """Return the membership a controller had before it was restarted, from its own events.

    Args:
        rules: As before.
        records: Its events in order, as documents.
        now_s: The time by the new controller's clock: members have three beats from now to say that they are there.
    """
    membership = Membership(rules)
    for record in records:
        if record.get("event") == EventKind.FORMED:
            membership.generation = int(record["generation"])
            membership.members = tuple(record["members"])
            membership.gone = {}
        elif record.get("event") in (EventKind.LOST, EventKind.LEFT) and record.get("node") in membership.members:
            membership.gone[str(record["node"])] = EventKind(str(record["event"]))
        elif record.get("event") == EventKind.FINISHED:
            membership.outcome = Phase.FINISHED
    present = (name for name in membership.members if name not in membership.gone)
    membership.nodes = {name: MemberNode(name, ("", 0), now_s, now_s, membership.generation) for name in present}
    return membership
