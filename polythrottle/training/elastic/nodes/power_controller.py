"""What a node's agent does beside training: reports its pace, holds its boards at a power cap, and learns."""

import os
import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any

from polythrottle.domain.clock import Clock, SystemClock
from polythrottle.domain.errors import DeviceError, InvalidInput, PolythrottleError
from polythrottle.domain.fleet.transient_machine import Cap, ConstantHazard
from polythrottle.storage.fleet_knowledge import CapObservation, Knowledge, KnowledgeStore, NodeReport, keep, recall
from polythrottle.storage.object_store import Store
from polythrottle.training.elastic.nodes.newcomer import Exploring
from polythrottle.training.elastic.nodes.steered_node import Steerable, SteeredNode, Steps, actuator_there, open_boards
from polythrottle.training.elastic.worker.progress_reporter import Pace, Tally, own_folder, read_pace

# What a node knows of its fleet, read from and kept in the job's store beside training: nobody waits for the store.

AGAIN_S = 60.0
"""How often at most what a node says of caps it has told of is written again: stores take money for writing."""


class Learning:
    """The fleet's knowledge of one machine type and network, as one node sees it.

    Args:
        opened: Opens the store; called in a thread.
        node: This node's name: what it said itself before is left out of what the fleet knows.
        gpu: Machine type.
        network: What is trained.
    """

    def __init__(self, opened: Callable[[], KnowledgeStore], node: str, gpu: str, network: str) -> None:
        self._opened = opened
        self._node = node
        self.fleet = Knowledge(gpu, network)
        self.own: NodeReport | None = None
        self.asked = False
        self.trouble = ""
        self._busy: threading.Thread | None = None
        self._kept: NodeReport | None = None
        self._said: tuple[float | None, ...] = ()
        self._said_s = 0.0

    def look(self) -> None:
        """Read what the fleet knows, in the background."""
        self._begin(self._recall)

    def say(self, told: NodeReport, now_s: float) -> None:
        """Keep what this node has to say, in the background: a cap it had not told of at once, all else now and then.

        Args:
            told: What it has to say.
            now_s: The time by any clock, always the same.
        """
        limits = tuple(look.limit_w for look in told.looks)
        if limits and (limits != self._said or now_s - self._said_s >= AGAIN_S) and told != self._kept:
            self._said = limits
            self._said_s = now_s
            self._begin(lambda: self._keep(told))

    def close(self, told: NodeReport, patience_s: float = 3.0) -> None:
        """Keep the last of what this node has to say, and wait a little for it."""
        if self._busy is not None:
            self._busy.join(patience_s)
        if told.looks and told != self._kept:
            self._begin(lambda: self._keep(told))
        if self._busy is not None:
            self._busy.join(patience_s)

    def _begin(self, work: Callable[[], None]) -> None:
        if self._busy is not None and self._busy.is_alive():
            return
        self._busy = threading.Thread(target=self._safely, args=(work,), daemon=True)
        self._busy.start()

    def _safely(self, work: Callable[[], None]) -> None:
        try:
            work()
            self.trouble = ""
        except PolythrottleError as error:
            self.trouble = str(error)

    def _recall(self) -> None:
        known, _ = recall(self._opened(), self.fleet.gpu, self.fleet.network)
        others = tuple(each for each in known.told if each.node != self._node)
        mine = next((each for each in known.told if each.node == self._node), None)
        self.fleet = Knowledge(known.gpu, known.network, others)
        self.own = mine
        self.asked = True

    def _keep(self, told: NodeReport) -> None:
        keep(self._opened(), told)
        self._kept = told


# What a node's agent does beside training: it tells the controller how fast its workers are, and steers its board.
#
# The workers know nothing of it. What is set lasts no longer than the node's lease on the board, and than the
# controller can be reached: caps that turn slack into joules are right only for the group they were planned for.

WINDOW_S = 5.0
"""How long a window is at least: meters of boards show what was drawn over tenths of a second to seconds."""
STEPS = 10
"""Steps of a window at least."""
LEAST_ROOM = 0.02
"""A node whose step may hardly be longer has nothing to gain by looking at caps."""
LOOK_S = 0.5
AWAY_S = 15.0
"""After so long without an answer of the controller a node goes back to its default clocks."""
IDLE_S = 30.0
"""After so long without a step, and four times a step, a node is taken to be waiting, and is left at its default."""
OFF = "off"
WATCHED = "watched"
UNSETTABLE = "no power limit can be set here; polythrottle doctor says what can"


@dataclass(frozen=True)
class ControllerAnswer:
    """What the controller has answered last.

    Attributes:
        cap: Under which this node would just meet the slowest; None while nobody knows.
        room: How much longer than at its default its step may take, as a fraction.
        waiting_w: What the other nodes draw while they wait for this one, in watts.
        losses_per_h: Losses of one node per hour.
    """

    cap: Cap | None = None
    room: float = 0.0
    waiting_w: float = 0.0
    losses_per_h: float = 0.0


@dataclass
class Steering:
    """A node's pace and board, looked after in a thread of its own.

    Attributes:
        name: The node's name.
        boards: URIs of its boards, or ``off``; None for what an actuator of this machine serves, if there is one.
        told: Takes lines for people.
        window_s: How long a window is at least, in seconds.
        clock: Of this process.
        folder: Where the workers' paces lie; None for a new one.
    """

    name: str
    boards: Sequence[str] | None
    told: Callable[[str], object]
    window_s: float = WINDOW_S
    clock: Clock = field(default_factory=SystemClock)
    folder: Path | None = None
    opened: Callable[[str], KnowledgeStore] = Store
    steerable: Steerable | None = field(default=None, init=False)
    node: SteeredNode | None = field(default=None, init=False)
    trouble: str = field(default="", init=False)
    _store: str = field(default="", init=False)
    _found: Sequence[str] | None = field(default=None, init=False)
    _learning: Learning | None = field(default=None, init=False)
    _wish: ControllerAnswer = field(default_factory=ControllerAnswer, init=False)
    _heard_s: float = field(default=0.0, init=False)
    _began_s: float = field(default=0.0, init=False)
    _window_s: float = field(default=0.0, init=False)
    _moved_s: float = field(default=0.0, init=False)
    _asked_s: float = field(default=0.0, init=False)
    _pace: Pace | None = field(default=None, init=False)
    _done: Tally = field(default_factory=Tally, init=False)
    _said: dict[str, Any] = field(default_factory=dict, init=False)
    _mentioned: str = field(default="", init=False)
    _ended: threading.Event = field(default_factory=threading.Event, init=False)
    _thread: threading.Thread | None = field(default=None, init=False)
    _lock: int | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        if self.folder is None:
            self.folder, self._lock = own_folder()
        self.paces: Path = self.folder

    def start(self, store: str) -> None:
        """Look after the boards from now on.

        Args:
            store: URL of the job's store.
        """
        self._store = store
        self._began_s = self.clock.now()
        self._heard_s = self._window_s = self._moved_s = self._began_s
        self._thread = threading.Thread(target=self._look_on, daemon=True)
        self._thread.start()

    def open(self) -> None:
        """Open the boards, none of which is taken yet; one that is not there is trouble, and training goes on.

        Raises:
            InvalidInput: If a board's words are none.
            UnknownName: If there is no such board on this machine.
        """
        if self.boards is None and actuator_there():
            self._found = ("auto",)
        if self._wanted is not None:
            self._open(self._wanted)

    def words(self) -> dict[str, Any]:
        """Return what this node says with each beat."""
        return dict(self._said)

    def heed(self, standing: Mapping[str, Any]) -> None:
        """Take note of what the controller has answered."""
        self._heard_s = self.clock.now()
        try:
            self._wish = _wish(standing)
        except (TypeError, ValueError, InvalidInput):  # of another version: nothing is asked then
            self._wish = ControllerAnswer()

    def close(self) -> None:
        """Put the boards back, keep what was learnt, and end."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join(10.0)
        if self.node is not None:
            if self._learning is not None:
                self._learning.close(self.node.told())
            self._release(self.node)
        shutil.rmtree(self.paces, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def turn(self) -> None:
        """Look once: count steps, renew the lease, end a window that is long enough, and do what follows."""
        pace = read_pace(self.paces)
        if self.steerable is not None and pace is not None:
            self._steer(self.steerable, pace)
        said = {} if pace is None else {"pace": pace.document()}
        self._said = said | ({} if self._wanted is None else {"steering": _sayable(self._document())})
        self._mention(self._trouble())

    @property
    def _wanted(self) -> Sequence[str] | None:
        """Return the boards to be steered, None where none is."""
        if self.boards is not None:
            if OFF in self.boards:
                return None
            return self.boards
        return self._found

    def _open(self, wanted: Sequence[str]) -> None:
        try:
            self.steerable = open_boards(wanted, self.clock, self.paces, f"cluster node {self.name}")
        except DeviceError as error:
            self.trouble = str(error)
            return
        if self.steerable.limits_w:
            note = ""
        else:
            note = "; no power limit can be set there, so it is only watched"
        self.told(f"node {self.name} steers {self.steerable.way}{note}")

    def _look_on(self) -> None:
        while not self._ended.wait(min(LOOK_S, self.window_s / 4)):
            try:
                self.turn()
            except PolythrottleError as error:
                self.trouble = str(error)

    def _steer(self, steerable: Steerable, pace: Pace) -> None:
        node = self._node_for(steerable, pace)
        if self._continues(pace) and self._pace:
            more = pace.tally.since(self._pace.tally)
        else:
            more = Tally()
        if self._pace is None or pace.generation != self._pace.generation:
            self._done = Tally()
            node.rest()
        self._pace = pace
        self._done = self._done.plus(more)
        self._moved_s = self.clock.now() if more.steps else self._moved_s
        if self.clock.now() - self._heard_s > AWAY_S or self._idle(pace):
            node.rest()
            self._done = Tally()
            return
        node.renew()
        self._aim(node, steerable, pace)
        if self._done.steps >= STEPS and self.clock.now() - self._window_s >= self.window_s:
            node.stepped(Steps(self._done.steps, self._done.step_s, self._done.own_s))
            self._done = Tally()
            self._window_s = self.clock.now()
            if self._learning is not None:
                self._learning.say(node.told(), self.clock.now())

    def _idle(self, pace: Pace) -> bool:
        """Return whether the workers have stopped, as on a node that waits for a generation to take it in."""
        step_s = pace.tally.step_s / pace.tally.steps if pace.tally.steps else 0.0
        return self.clock.now() - self._moved_s > max(IDLE_S, 4 * step_s)

    def _continues(self, pace: Pace) -> bool:
        return self._pace is not None and pace.generation == self._pace.generation

    def _node_for(self, steerable: Steerable, pace: Pace) -> SteeredNode:
        """Return the node under this network and share of a step; another share is measured from the beginning."""
        if self.node is not None and self.node.knowledge.network == pace.network:
            return self.node
        if self.node is not None:
            self.node.rest()
        self._learning = Learning(lambda: self.opened(self._store), self.name, steerable.gpu, pace.network)
        self._asked_s = self.clock.now()
        self._learning.look()
        self.node = SteeredNode(self.name, steerable.board, self._learning.fleet, steps=1, paced=True)
        return self.node

    def _aim(self, node: SteeredNode, steerable: Steerable, pace: Pace) -> None:
        """Tell the node what it is to run under: what the group's pace asks for, or what it may look at to learn."""
        if self._learning is not None and self._learning.asked:
            node.knowledge = self._learning.fleet
        elif self._learning is not None and self.clock.now() - self._asked_s >= AGAIN_S:
            self._asked_s = self.clock.now()
            self._learning.look()
        exploring = self._exploring(node, steerable, pace)
        node.exploring = exploring
        node.want(None if exploring is not None else self._wish.cap)

    def _exploring(self, node: SteeredNode, steerable: Steerable, pace: Pace) -> Exploring | None:
        """Return what the node may do to learn; None where the fleet knows, or there is nothing left to learn."""
        asked = self._learning is not None and self._learning.asked
        if len(node.knowledge.caps()) > 1 or not steerable.limits_w or not asked or self._wish.room < LEAST_ROOM:
            return None
        age_s = self.clock.now() - self._began_s
        step_s = pace.tally.step_s / pace.tally.steps if pace.tally.steps else 0.0
        looks = sorted(node.told().looks, key=lambda look: -(look.limit_w or float("inf")))
        longer = max(0.03, self._wish.room)
        about = ConstantHazard(self._wish.losses_per_h), age_s + pace.left * step_s, longer, self._wish.waiting_w
        exploring = Exploring(steerable.limits_w, *about, steerable.gpus)
        if not looks or looks[0].limit_w is not None:
            return None
        begun = any(window.limit_w not in {look.limit_w for look in looks} for window in node.windows[-1:])
        goes_on = begun or exploring.next_limit_w(looks, age_s, 3 * self.window_s) is not None
        if goes_on:
            return exploring
        return None

    def _document(self) -> dict[str, Any]:
        """Return what there is to say of the board, for JSON; unknown is None."""
        steerable = self.steerable
        node = self.node
        if steerable is None or node is None:
            return {"device": ",".join(self._wanted or ()), "trouble": self._trouble() or None}
        reading = node.reading
        verdict = node.verdict
        known = node.knowledge.default
        return {
            "device": steerable.board.uri,
            "title": steerable.board.title,
            "energy_kind": str(steerable.board.energy_kind),
            "gpu": steerable.gpu,
            "limit_w": node.limit_w,
            "power_w": node.power_w,
            "temperature_c": None if reading is None else reading.temperature_c,
            "throttled": None if reading is None else reading.throttled,
            "verdict": str(verdict.next) if steerable.limits_w else WATCHED,
            "reason": verdict.reason if steerable.limits_w else UNSETTABLE,
            "factor": verdict.factor,
            "flagged": self._stands_out(node),
            "limits": list(steerable.limits_w),
            "looks": [_look(look) for look in node.told().looks],
            "caps": [[cap.limit_w, cap.slowdown, cap.power_w] for cap in node.knowledge.caps()],
            "known_s": None if known is None else known.step_s,
            "trouble": self._trouble() or None,
        }

    def _stands_out(self, node: SteeredNode) -> float | None:
        """Return by how many deviations this node's silicon stands out from its fleet; None if it does not."""
        known = node.knowledge
        return type(known)(known.gpu, known.network, (*known.told, node.told())).flagged().get(self.name)

    def _trouble(self) -> str:
        learning = self._learning.trouble if self._learning is not None else ""
        return (self.node.trouble if self.node is not None else "") or self.trouble or learning

    def _mention(self, trouble: str) -> None:
        """Say once what goes wrong with the board; training goes on."""
        if trouble and trouble != self._mentioned:
            self.told(f"the board of node {self.name}: {trouble}; training goes on")
        self._mentioned = trouble

    def _release(self, node: SteeredNode) -> None:
        try:
            left = node.release()
        except DeviceError as error:
            self.told(f"the board of node {self.name}: {error}; its lease puts it back")
            return
        if left:
            self.told(f"the board of node {self.name} is not as it was found: {'; '.join(left)}")


def _wish(standing: Mapping[str, Any]) -> ControllerAnswer:
    cap = standing.get("cap")
    return ControllerAnswer(
        None if cap is None else Cap(*cap),
        float(standing.get("room") or 0.0),
        float(standing.get("waiting_w") or 0.0),
        float(standing.get("losses_per_h") or 0.0),
    )


def _sayable(value: Any) -> Any:
    """Return a document without numbers that are none: JSON has no word for them, and they are not known."""
    if isinstance(value, dict):
        return {key: _sayable(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_sayable(each) for each in value]
    if isinstance(value, float) and not isfinite(value):
        return None
    return value


def _look(look: CapObservation) -> list[float | int | None]:
    return [look.limit_w, look.step_s, look.power_w, look.windows]
