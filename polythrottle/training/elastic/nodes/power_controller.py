"""What a node's agent does beside training: reports its pace, holds its boards at a power cap, and learns."""

import os
import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Any

from polythrottle.domain.clock import Clock, SystemClock
from polythrottle.domain.errors import DeviceError, InvalidInput, PolythrottleError
from polythrottle.domain.fleet.transient_machine import Cap, ConstantHazard
from polythrottle.storage.atomic_file import owned_folder
from polythrottle.storage.fleet_knowledge import Knowledge, KnowledgeStore, NodeReport, keep, recall
from polythrottle.storage.json_channel import finite
from polythrottle.storage.object_store import Store
from polythrottle.training.elastic.nodes.power_cap_search import Exploring
from polythrottle.training.elastic.nodes.steered_node import Steerable, SteeredNode, Steps, actuator_there, open_boards
from polythrottle.training.elastic.worker.process import Pace, Tally, read_pace

AGAIN_S = 60.0
"""How often at most what a node says of caps it has told of is written again: stores take money for writing."""


@dataclass(frozen=True)
class FleetView:
    """What a node knows of its fleet at one moment.

    Attributes:
        fleet: What other nodes have said of this machine type and network.
        asked: Whether the store has answered at all.
    """

    fleet: Knowledge
    asked: bool = False


class FleetKnowledge:
    """The fleet's knowledge of one machine type and network, as one node sees it.

    The store is asked in a background thread, because a bucket may take minutes to answer and training must not wait.
    That thread never changes what the others look at: it replaces `view` as a whole.

    Args:
        opened: Opens the store; called in a thread.
        node: This node's name: what it said itself before is left out of what the fleet knows.
        gpu: Machine type.
        network: What is trained.
    """

    def __init__(self, opened: Callable[[], KnowledgeStore], node: str, gpu: str, network: str) -> None:
        self._opened = opened
        self._node = node
        self.view = FleetView(Knowledge(gpu, network))
        self.trouble = ""
        self._busy: threading.Thread | None = None
        self._kept: NodeReport | None = None
        self._said: tuple[float | None, ...] = ()
        self._said_s = 0.0

    def look(self) -> None:
        """Read what the fleet knows, in the background."""
        self._begin(self._recall)

    def say(self, report: NodeReport, now_s: float) -> None:
        """Keep what this node has to say, in the background: a cap it had not told of at once, all else now and then.

        Args:
            report: What it has to say.
            now_s: The time by any clock, always the same.
        """
        limits = tuple(look.limit_w for look in report.looks)
        if limits and (limits != self._said or now_s - self._said_s >= AGAIN_S) and report != self._kept:
            self._said = limits
            self._said_s = now_s
            self._begin(lambda: self._keep(report))

    def close(self, report: NodeReport, patience_s: float = 3.0) -> None:
        """Keep the last of what this node has to say, and wait a little for it."""
        if self._busy is not None:
            self._busy.join(patience_s)
        if report.looks and report != self._kept:
            self._begin(lambda: self._keep(report))
        if self._busy is not None:
            self._busy.join(patience_s)

    def _begin(self, work: Callable[[], None]) -> None:
        # One at a time: a store that hangs would otherwise collect a thread with every window.
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
        fleet = self.view.fleet
        known, _ = recall(self._opened(), fleet.gpu, fleet.network)
        others = tuple(each for each in known.told if each.node != self._node)
        self.view = FleetView(Knowledge(known.gpu, known.network, others), asked=True)

    def _keep(self, report: NodeReport) -> None:
        keep(self._opened(), report)
        self._kept = report


WINDOW_S = 5.0
"""How long a window is at least: meters of boards show what was drawn over tenths of a second to seconds."""
STEPS = 10
"""Steps of a window at least."""
LEAST_ROOM = 0.02
"""A node whose step may hardly be longer has nothing to gain by looking at caps."""
LOOK_S = 0.5
AWAY_S = 15.0
"""After so long without an answer of the controller a node goes back to its default clocks: caps that turn slack into
joules are right only for the group they were planned for."""
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
        heard_s: When it was heard, by the node's clock.
    """

    cap: Cap | None = None
    room: float = 0.0
    waiting_w: float = 0.0
    losses_per_h: float = 0.0
    heard_s: float = 0.0

    @classmethod
    def of(cls, standing: Mapping[str, Any], heard_s: float) -> "ControllerAnswer":
        """Return what the controller asks of this node; nothing if its answer is from another version."""
        try:
            cap = standing.get("cap")
            return cls(
                Cap(*cap) if cap is not None else None,
                float(standing.get("room") or 0.0),
                float(standing.get("waiting_w") or 0.0),
                float(standing.get("losses_per_h") or 0.0),
                heard_s,
            )
        except (TypeError, ValueError, InvalidInput):
            return cls(heard_s=heard_s)


class NextMove(Enum):
    """What is done with the board after a look."""

    REST = "rest"  # the board goes back to its default
    CONTINUE = "continue"  # the window is not over yet
    JUDGE = "judge"  # the window is over


@dataclass(frozen=True)
class WindowProgress:
    """The steps of the window that is under way. Pure: a later one follows from the pace and the time alone.

    Attributes:
        began_s: When the window began.
        moved_s: When steps were seen last.
        pace: The newest pace; None before the first.
        done: Steps of the window.
        renewed: Whether the newest pace was the first of its generation.
    """

    began_s: float
    moved_s: float
    pace: Pace | None = None
    done: Tally = field(default_factory=Tally)
    renewed: bool = False

    def after(self, pace: Pace, now_s: float) -> "WindowProgress":
        """Return the progress once a pace has been read."""
        if self.pace is None or pace.generation != self.pace.generation:
            # Counters begin anew with a generation, so the difference to the old ones would be no steps at all.
            return replace(self, pace=pace, done=Tally(), renewed=True)
        more = pace.tally.since(self.pace.tally)
        moved_s = now_s if more.steps else self.moved_s
        return replace(self, pace=pace, done=self.done.plus(more), moved_s=moved_s, renewed=False)

    def move(self, now_s: float, heard_s: float, window_s: float) -> NextMove:
        """Return what to do now.

        Args:
            now_s: The time.
            heard_s: When the controller was heard last.
            window_s: How long a window is at least.
        """
        # Idle as on a node that waits for a generation to take it in: what is drawn then says nothing of a cap.
        idle = now_s - self.moved_s > max(IDLE_S, 4 * self.step_s)
        if idle or now_s - heard_s > AWAY_S:
            return NextMove.REST
        if self.done.steps >= STEPS and now_s - self.began_s >= window_s:
            return NextMove.JUDGE
        return NextMove.CONTINUE

    @property
    def step_s(self) -> float:
        """The mean time of a step since its generation began, in seconds; 0 before there is one."""
        if self.pace is None or not self.pace.tally.steps:
            return 0.0
        return self.pace.tally.step_s / self.pace.tally.steps

    @property
    def left_s(self) -> float:
        """How long the training goes on at that speed, in seconds."""
        if self.pace is None:
            return 0.0
        return self.pace.left * self.step_s

    def emptied(self) -> "WindowProgress":
        """Return it without the steps so far."""
        return replace(self, done=Tally())

    def judged(self, now_s: float) -> "WindowProgress":
        """Return the next window, which begins now."""
        return replace(self, done=Tally(), began_s=now_s)


class SteeredBoards:
    """One node's boards under a training job: set and read by one thread at a time.

    Args:
        name: The node's name.
        steerable: Its boards.
        clock: Of this process.
        window_s: How long a window is at least, in seconds.
        opened: Opens the job's store; called in a thread.
    """

    def __init__(
        self, name: str, steerable: Steerable, clock: Clock, window_s: float, opened: Callable[[], KnowledgeStore]
    ) -> None:
        self._name = name
        self._clock = clock
        self._window_s = window_s
        self._opened = opened
        self.steerable = steerable
        self.node: SteeredNode | None = None
        self.learning: FleetKnowledge | None = None
        self.begin()

    def begin(self) -> None:
        """Count time from now on: a node may have waited for its controller after its boards were opened."""
        self._began_s = self._clock.now()
        self._asked_s = self._began_s
        self._progress = WindowProgress(self._began_s, self._began_s)

    def step(self, pace: Pace, answer: ControllerAnswer) -> None:
        """Count the steps of a pace, renew the lease, end a window that is long enough, and do what follows."""
        node, learning = self._measuring(pace.network)
        now_s = self._clock.now()
        self._progress = self._progress.after(pace, now_s)
        if self._progress.renewed:
            node.rest()
        move = self._progress.move(now_s, answer.heard_s, self._window_s)
        if move is NextMove.REST:
            node.rest()
            self._progress = self._progress.emptied()
            return
        node.renew()
        self._aim(node, learning, answer)
        if move is NextMove.JUDGE:
            done = self._progress.done
            node.stepped(Steps(done.steps, done.step_s, done.own_s))
            self._progress = self._progress.judged(self._clock.now())
            learning.say(node.told(), self._clock.now())

    def close(self) -> tuple[str, ...]:
        """Keep what was learnt and put the boards back; return what is not as it was found.

        Raises:
            DeviceError: If one cannot be reached; its lease puts it back.
        """
        if self.node is None:
            return ()
        if self.learning is not None:
            self.learning.close(self.node.told())
        return self.node.release()

    def _measuring(self, network: str) -> tuple[SteeredNode, FleetKnowledge]:
        """Return the node under this network and share of a step; another share is measured from the beginning."""
        node = self.node
        learning = self.learning
        if node is not None and learning is not None and node.knowledge.network == network:
            return node, learning
        if node is not None:
            node.rest()
        learning = FleetKnowledge(self._opened, self._name, self.steerable.gpu, network)
        node = SteeredNode(self._name, self.steerable.board, learning.view.fleet, steps=1, paced=True)
        self.node = node
        self.learning = learning
        self._asked_s = self._clock.now()
        learning.look()
        return node, learning

    def _aim(self, node: SteeredNode, learning: FleetKnowledge, answer: ControllerAnswer) -> None:
        """Tell the node what it is to run under: what the group's pace asks for, or what it may look at to learn."""
        view = learning.view
        if view.asked:
            node.knowledge = view.fleet
        elif self._clock.now() - self._asked_s >= AGAIN_S:
            self._asked_s = self._clock.now()
            learning.look()
        node.exploring = self._exploring(node, view, answer)
        node.want(None if node.exploring is not None else answer.cap)

    def _exploring(self, node: SteeredNode, view: FleetView, answer: ControllerAnswer) -> Exploring | None:
        """Return what the node may do to learn; None where the fleet knows, or there is nothing left to learn."""
        limits_w = self.steerable.limits_w
        if len(node.knowledge.caps()) > 1 or not limits_w or not view.asked or answer.room < LEAST_ROOM:
            return None
        looks = sorted(node.told().looks, key=lambda look: -(look.limit_w or float("inf")))
        if not looks or looks[0].limit_w is not None:
            return None
        age_s = self._clock.now() - self._began_s
        exploring = Exploring(
            limits_w,
            ConstantHazard(answer.losses_per_h),
            horizon_s=age_s + self._progress.left_s,
            longer=max(0.03, answer.room),
            waiting_w=answer.waiting_w,
            gpus=self.steerable.gpus,
        )
        begun = any(window.limit_w not in {look.limit_w for look in looks} for window in node.windows[-1:])
        if begun or exploring.next_limit_w(looks, age_s, 3 * self._window_s) is not None:
            return exploring
        return None

    def document(self) -> dict[str, Any]:
        """Return what there is to say of the boards, for JSON; unknown is None, and nothing is known at first."""
        steerable = self.steerable
        node = self.node
        if node is None:
            return {}
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
            "temperature_c": reading and reading.temperature_c,
            "throttled": reading and reading.throttled,
            "verdict": str(verdict.next) if steerable.limits_w else WATCHED,
            "reason": verdict.reason if steerable.limits_w else UNSETTABLE,
            "factor": verdict.factor,
            "flagged": self._deviations(node),
            "limits": list(steerable.limits_w),
            "looks": [[look.limit_w, look.step_s, look.power_w, look.windows] for look in node.told().looks],
            "caps": [[cap.limit_w, cap.slowdown, cap.power_w] for cap in node.knowledge.caps()],
            "known_s": known and known.step_s,
        }

    def _deviations(self, node: SteeredNode) -> float | None:
        """Return by how many deviations this node's silicon stands out from its fleet; None if it does not."""
        known = node.knowledge
        return replace(known, told=(*known.told, node.told())).flagged().get(self._name)


class PowerController:
    """What a node's agent does beside training: it tells the controller its pace, and steers the node's boards.

    The workers know nothing of it. Two threads meet here: the agent's beat calls `words` and `heed`, and this class's
    own thread looks at the boards. They share two values, each replaced as a whole under a lock.

    Args:
        name: The node's name.
        boards: URIs of its boards, or ``off``; None for what an actuator of this machine serves, if there is one.
        told: Takes lines for people.
        window_s: How long a window is at least, in seconds.
        clock: Of this process.
        folder: Where the workers' paces lie; None for a new one.
        opened: Opens a store by its URL.

    Attributes:
        paces: Where the workers' paces lie.
        steered: The boards that are steered; None while none is.
    """

    def __init__(
        self,
        name: str,
        boards: Sequence[str] | None,
        told: Callable[[str], object],
        window_s: float = WINDOW_S,
        clock: Clock | None = None,
        folder: Path | None = None,
        opened: Callable[[str], KnowledgeStore] = Store,
    ) -> None:
        self._name = name
        self._boards = () if boards is not None and OFF in boards else boards
        self._told = told
        self._window_s = window_s
        self._clock = clock or SystemClock()
        self._opened = opened
        self._store = ""
        self._alive: int | None = None
        if folder is None:
            folder, self._alive = owned_folder()
        self.paces = folder
        self.steered: SteeredBoards | None = None
        self._trouble = ""
        self._mentioned = ""
        self._exchange = threading.Lock()
        self._answer = ControllerAnswer(heard_s=self._clock.now())
        self._words: dict[str, Any] = {}
        self._turning = threading.Lock()
        self._ended = threading.Event()

    def open(self) -> None:
        """Open the boards, none of which is taken yet; one that is not there is trouble, and training goes on.

        Raises:
            InvalidInput: If a board is not named as one.
            UnknownName: If there is no such board on this machine.
        """
        if self._boards is None:
            self._boards = ("auto",) if actuator_there() else ()
        if not self._boards:
            return
        try:
            steerable = open_boards(self._boards, self._clock, self.paces, f"cluster node {self._name}")
        except DeviceError as error:
            self._trouble = str(error)
            return
        self.steered = SteeredBoards(
            self._name, steerable, self._clock, self._window_s, lambda: self._opened(self._store)
        )
        note = "; no power limit can be set there, so it is only watched"
        if steerable.limits_w:
            note = ""
        self._told(f"node {self._name} steers {steerable.way}{note}")

    def start(self, store: str) -> None:
        """Look after the boards from now on, given the URL of the job's store."""
        self._store = store
        self._answer = ControllerAnswer(heard_s=self._clock.now())
        if self.steered is not None:
            self.steered.begin()
        threading.Thread(target=self._look_on, daemon=True).start()

    def words(self) -> dict[str, Any]:
        """Return what this node says with each beat."""
        with self._exchange:
            return dict(self._words)

    def heed(self, standing: Mapping[str, Any]) -> None:
        """Take note of what the controller has answered."""
        answer = ControllerAnswer.of(standing, self._clock.now())
        with self._exchange:
            self._answer = answer

    def turn(self) -> None:
        """Look once at the workers' pace and the boards, and renew what is said with each beat."""
        with self._turning:
            if not self._ended.is_set():
                self._turn()

    def close(self) -> None:
        """Put the boards back, keep what was learnt, and end."""
        self._ended.set()
        # A look may hang in a driver. After a while the boards are put back all the same: their lease would do it, too.
        alone = self._turning.acquire(timeout=10.0)
        try:
            self._release()
        finally:
            if alone:
                self._turning.release()
        shutil.rmtree(self.paces, ignore_errors=True)
        if self._alive is not None:
            os.close(self._alive)
            self._alive = None

    def _turn(self) -> None:
        pace = read_pace(self.paces)
        with self._exchange:
            answer = self._answer
        if self.steered is not None and pace is not None:
            self.steered.step(pace, answer)
        trouble = self._first_trouble()
        words: dict[str, Any] = {}
        if pace is not None:
            words["pace"] = pace.document()
        if self._boards:
            words["steering"] = _finite(self._document(self._boards) | {"trouble": trouble or None})
        with self._exchange:
            self._words = words
        self._mention(trouble)

    def _document(self, boards: Sequence[str]) -> dict[str, Any]:
        if self.steered is not None:
            known = self.steered.document()
        else:
            known = {}
        return known or {"device": ",".join(boards)}

    def _first_trouble(self) -> str:
        """Return what goes wrong, a board before the store; empty if nothing does."""
        if self.steered is None:
            return self._trouble
        troubles = [each.trouble for each in (self.steered.node, self.steered.learning) if each is not None]
        return next(filter(None, [*troubles[:1], self._trouble, *troubles[1:]]), "")

    def _look_on(self) -> None:
        while not self._ended.wait(min(LOOK_S, self._window_s / 4)):
            try:
                self.turn()
            except PolythrottleError as error:
                self._trouble = str(error)

    def _mention(self, trouble: str) -> None:
        """Say once what goes wrong with the board; training goes on."""
        if trouble and trouble != self._mentioned:
            self._told(f"the board of node {self._name}: {trouble}; training goes on")
        self._mentioned = trouble

    def _release(self) -> None:
        if self.steered is None:
            return
        try:
            left = self.steered.close()
        except DeviceError as error:
            self._told(f"the board of node {self._name}: {error}; its lease puts it back")
            return
        if left:
            self._told(f"the board of node {self._name} is not as it was found: {'; '.join(left)}")


def _finite(value: Any) -> Any:
    """Return a document with None for NaN and infinity: JSON has no word for them, and they are not known."""
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_finite(each) for each in value]
    return finite(value) if isinstance(value, float) else value
